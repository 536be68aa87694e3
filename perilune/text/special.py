"""Names and ids of the control tokens that follow the ranks of a Kimi vocabulary.

Owns the default names, a checkpoint's own names, and the comparison with the ids in config.json.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from perilune.errors import ConfigError

NUM_SPECIAL_SLOTS = 256

BOS = "[BOS]"
EOS = "[EOS]"
END_OF_MSG = "<|end_of_msg|>"
OPEN = "<|open|>"
CLOSE = "<|close|>"
SEP = "<|sep|>"
EOT = "[EOT]"
MEDIA_BEGIN = "<|media_begin|>"
MEDIA_CONTENT = "<|media_content|>"
MEDIA_END = "<|media_end|>"
MEDIA_PAD = "<|media_pad|>"
PAD = "[PAD]"

# Slot = id - number of ranks; in the released vocabulary slot 0 is id 163584.
DEFAULT_SLOTS: Mapping[int, str] = {
    0: BOS,
    1: EOS,
    2: END_OF_MSG,
    3: OPEN,
    4: CLOSE,
    5: SEP,
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    9: EOT,
    18: MEDIA_BEGIN,
    19: MEDIA_CONTENT,
    20: MEDIA_END,
    21: MEDIA_PAD,
    254: "[UNK]",
    255: PAD,
}

# Without these neither a conversation can be encoded nor its end be seen.
REQUIRED_NAMES = (
    *(BOS, EOS, END_OF_MSG, OPEN, CLOSE, SEP, EOT),
    *(MEDIA_BEGIN, MEDIA_CONTENT, MEDIA_END, MEDIA_PAD, PAD),
)

CONFIG_ID_KEYS: Mapping[str, str] = {
    "bos_token_id": BOS,
    "eos_token_id": END_OF_MSG,
    "pad_token_id": PAD,
    "media_placeholder_token_id": MEDIA_PAD,
}


def special_names(num_ranks: int, overrides: Mapping[int, str], source: str) -> list[str]:
    """Names of the 256 slots after the ranks, in id order; `overrides` maps id -> name and comes from `source`.

    Raises ConfigError when an id lies outside the slots, a name occurs twice, or a needed name is absent.
    """
    last = num_ranks + NUM_SPECIAL_SLOTS - 1
    for token_id, name in overrides.items():
        if not num_ranks <= token_id <= last:
            raise ConfigError(f"{source}: token {name!r} has id {token_id}; special ids go from {num_ranks} to {last}")
    names = []
    for slot in range(NUM_SPECIAL_SLOTS):
        token_id = num_ranks + slot
        default = DEFAULT_SLOTS.get(slot, f"<|reserved_token_{token_id}|>")
        names.append(overrides.get(token_id, default))
    ids: dict[str, int] = {}
    for token_id, name in enumerate(names, start=num_ranks):
        if name in ids:
            raise ConfigError(f"{source}: the name {name!r} belongs to both id {ids[name]} and id {token_id}")
        ids[name] = token_id
    for name in REQUIRED_NAMES:
        if name not in ids:
            slot = next(slot for slot, default in DEFAULT_SLOTS.items() if default == name)
            raise ConfigError(
                f"{source}: no token is called {name!r} (id {num_ranks + slot} is called {names[slot]!r}); "
                f"this is not a Kimi K3 tokenizer"
            )
    return names


def read_name_overrides(path: Path) -> dict[int, str]:
    """Read id -> name from `added_tokens_decoder` of a tokenizer_config.json; empty when the key is absent."""
    table = read_json_object(path).get("added_tokens_decoder", {})
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: added_tokens_decoder is {type(table).__name__}, expected an object of id -> token")
    overrides = {}
    for key, entry in table.items():
        name = entry.get("content") if isinstance(entry, dict) else None
        if not (key.isascii() and key.isdigit()) or not isinstance(name, str) or not name:
            raise ConfigError(
                f'{path}: added_tokens_decoder[{key!r}] is {entry!r}, expected "<id>": {{"content": "<name>"}}'
            )
        overrides[int(key)] = name
    return overrides


def check_config_ids(path: Path, special_ids: Mapping[str, int], vocab_size: int) -> None:
    """Compare the token ids and vocab_size of a config.json (top level and text_config) with the tokenizer's.

    A larger vocab_size is allowed, since embedding rows may be padded. Raises ConfigError naming both sides.
    """
    config = read_json_object(path)
    parts = {"": config}
    text_config = config.get("text_config")
    if isinstance(text_config, dict):
        parts["text_config."] = text_config
    for prefix, part in parts.items():
        for key, name in CONFIG_ID_KEYS.items():
            if part.get(key) is not None and part[key] != special_ids[name]:
                raise ConfigError(
                    f"{path}: {prefix}{key} is {part[key]!r} but the tokenizer's {name} has id {special_ids[name]}; "
                    f"the two must agree"
                )
        rows = part.get("vocab_size")
        if rows is not None and (not isinstance(rows, int) or rows < vocab_size):
            raise ConfigError(
                f"{path}: {prefix}vocab_size is {rows!r} but the tokenizer has {vocab_size} ids; "
                f"it must be at least that many"
            )


def read_json_object(path: Path) -> dict[str, object]:
    """Read a JSON file whose top level is an object; anything else is a ConfigError naming the file."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: the top level is {type(value).__name__}, expected an object")
    return value

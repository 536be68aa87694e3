"""Text to token ids and back.

Two entries: `encode` for content, which yields no control id whatever the text spells, and `encode_markup`, where
the names of control tokens become their ids. Knows nothing of messages or channels.
"""

import codecs
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Self

import tiktoken

from perilune.errors import RequestError
from perilune.text.rank_file import read_rank_file
from perilune.text.special import (
    CLOSE,
    END_OF_MSG,
    EOS,
    EOT,
    NUM_SPECIAL_SLOTS,
    OPEN,
    SEP,
    check_config_ids,
    read_name_overrides,
    special_names,
)

RANK_FILE = "tiktoken.model"
MAX_PIECE_CHARS = 400_000
MAX_RUN_CHARS = 25_000

# Words are letters other than Han: capitals then small letters, at least one of the two.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_BEFORE_WORD = r"[^\r\n\p{L}\p{N}]?"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLIT_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        f"{_BEFORE_WORD}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        f"{_BEFORE_WORD}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

# The codec waits for a third byte here although none makes a character of it.
_SURROGATE_START = re.compile(rb"\xed[\xa0-\xbf]")

_RUNS = re.compile(r"\s+|\S+")


class Tokenizer:
    """A Kimi vocabulary: byte-level BPE ranks, then 256 control tokens."""

    def __init__(self, ranks: Mapping[bytes, int], names: list[str]):
        self._bpe = tiktoken.Encoding("kimi", pat_str=SPLIT_PATTERN, mergeable_ranks=dict(ranks), special_tokens={})
        self._bytes = [b""] * len(ranks)
        for token, rank in ranks.items():
            self._bytes[rank] = token
        self._bytes += [name.encode() for name in names]
        self.max_token_bytes = max(map(len, self._bytes))
        self._names = names
        self.num_ranks = len(ranks)
        self.vocab_size = len(self._bytes)
        self.special_ids: Mapping[str, int] = {name: self.num_ranks + slot for slot, name in enumerate(names)}
        self.end_of_msg_id = self.special_ids[END_OF_MSG]
        self.open_id = self.special_ids[OPEN]
        self.close_id = self.special_ids[CLOSE]
        self.sep_id = self.special_ids[SEP]
        # control tokens that are not flagged as special in the released tokenizer, so that raw text shows them
        self.marker_ids = (self.open_id, self.close_id, self.sep_id)
        self.eos_token_ids = (self.end_of_msg_id, self.special_ids[EOS], self.special_ids[EOT])
        # Longest first, so that a name which begins with another one wins.
        longest_first = sorted(names, key=len, reverse=True)
        self._markup = re.compile("|".join(re.escape(name) for name in longest_first))

    @classmethod
    def from_ranks(cls, ranks: Mapping[bytes, int], overrides: Mapping[int, str] | None = None) -> Self:
        """Build from token bytes -> rank (0..n-1, all single bytes present); `overrides` renames control ids."""
        return cls(ranks, special_names(len(ranks), overrides or {}, "special token names"))

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Read `tiktoken.model` of a checkpoint; names from tokenizer_config.json and ids from config.json if there.

        Raises CheckpointError for a damaged rank file, ConfigError for names or ids that do not agree.
        """
        ranks = read_rank_file(directory / RANK_FILE)
        names_path = directory / "tokenizer_config.json"
        overrides = read_name_overrides(names_path) if names_path.exists() else {}
        tokenizer = cls(ranks, special_names(len(ranks), overrides, str(names_path)))
        config_path = directory / "config.json"
        if config_path.exists():
            check_config_ids(config_path, tokenizer.special_ids, tokenizer.vocab_size)
        return tokenizer

    def encode(self, text: str, at_most: int | None = None) -> list[int]:
        """Encode content; every id is below `num_ranks`. Raises RequestError for lone surrogates.

        More than `at_most` ids are the beginning of a longer result: the rest is not encoded.
        """
        check_encodable(text)
        ids: list[int] = []
        for piece in cut(text):
            ids += self._encode_piece(piece)
            if at_most is not None and len(ids) > at_most:
                break
        return ids

    def encode_markup(self, text: str, at_most: int | None = None) -> list[int]:
        """Encode text in which names of control tokens stand for those tokens; the rest is content.

        `at_most` is as in `encode`.
        """
        ids: list[int] = []
        end = 0
        for match in self._markup.finditer(text):
            ids += self.encode(text[end : match.start()], at_most)
            ids.append(self.special_ids[match.group()])
            end = match.end()
            if at_most is not None and len(ids) > at_most:
                return ids
        return ids + self.encode(text[end:], at_most)

    def is_special(self, token_id: int) -> bool:
        """Whether the id is a control token; ids past the vocabulary (padding of the embedding) count as such."""
        return token_id >= self.num_ranks

    def special_name(self, token_id: int) -> str | None:
        """Name of a control token; None for ordinary tokens and for ids past the vocabulary."""
        slot = token_id - self.num_ranks
        return self._names[slot] if 0 <= slot < NUM_SPECIAL_SLOTS else None

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token; a control token gives its name, an id past the vocabulary gives nothing."""
        if token_id < 0:
            raise RequestError(f"token id {token_id} is negative; ids go from 0 to {self.vocab_size - 1}")
        return self._bytes[token_id] if token_id < self.vocab_size else b""

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """Text of a whole sequence; U+FFFD stands for bytes that are not UTF-8.

        With `skip_special` only markers of the format are shown by name, of all control tokens.
        """
        detokenizer = Detokenizer(self, skip_special=skip_special)
        return detokenizer.push(ids) + detokenizer.flush()

    def _encode_piece(self, piece: str) -> list[int]:
        try:
            ids: list[int] = self._bpe.encode_ordinary(piece)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of the compiled library is not an Exception
            raise RequestError(f"the text could not be tokenized ({len(piece)} characters): {error}") from error
        return ids


class Detokenizer:
    """Turns token ids into text as they come; splitting the ids in any way gives the same text.

    Holds at most 3 bytes, and only while they can still become a character. A control token ends a character.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = False):
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """Text completed by these ids."""
        parts = []
        for token_id in ids:
            if not self._tokenizer.is_special(token_id):
                parts.append(self._decoder.decode(self._tokenizer.token_bytes(token_id)))
                if _SURROGATE_START.fullmatch(self._decoder.getstate()[0]):
                    parts.append(self.flush())
                continue
            parts.append(self.flush())
            if not self._skip_special or token_id in self._tokenizer.marker_ids:
                parts.append(self._tokenizer.token_bytes(token_id).decode())
        return "".join(parts)

    def flush(self) -> str:
        """U+FFFD for a character that was left incomplete, else nothing."""
        return self._decoder.decode(b"", final=True)


def cut(text: str) -> Iterator[str]:
    """Cut as the released tokenizer does, every piece being encoded alone.

    First every 400,000 characters; inside such a part, after each 25,000 characters of one run of whitespace or of
    non-whitespace.
    """
    for start in range(0, len(text), MAX_PIECE_CHARS):
        part = text[start : start + MAX_PIECE_CHARS]
        if len(part) <= MAX_RUN_CHARS:
            yield part
            continue
        piece_start = 0
        for run in _RUNS.finditer(part):
            for border in range(run.start() + MAX_RUN_CHARS, run.end(), MAX_RUN_CHARS):
                yield part[piece_start:border]
                piece_start = border
        yield part[piece_start:]


def check_encodable(text: str, param: str | None = None) -> None:
    """Raise RequestError, naming the field `param`, when the text holds a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{param or 'the text'} holds the lone surrogate U+{ord(text[error.start]):04X} "
            f"at character {error.start}; send valid Unicode",
            param=param,
        ) from error

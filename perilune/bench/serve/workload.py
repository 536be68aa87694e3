"""What is sent to a server under load: conversations of token ids, when they begin and how they go on. No clock."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, fields

from perilune.errors import ConfigError

# the least vocabulary: every tokenizer of this family has a token for each byte
NUM_BYTE_IDS = 256


@dataclass(frozen=True)
class Turn:
    """One request: `token_ids` are added to what the conversation holds, after `pause_s` seconds."""

    token_ids: tuple[int, ...]
    max_tokens: int
    pause_s: float


@dataclass(frozen=True)
class Session:
    """A conversation; `start_s` is when it begins, from the start of the run, None for as soon as there is room."""

    start_s: float | None
    turns: tuple[Turn, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole conversation, answers included."""
        return sum(len(turn.token_ids) + turn.max_tokens for turn in self.turns)


@dataclass(frozen=True)
class Workload:
    """Settings of a load; a wrong value raises ConfigError. Lengths are in tokens.

    `num_prompts` conversations begin `request_rate` per second in a Poisson process, or one after another (None). A
    conversation begins with one of `num_prefixes` shared prefixes of `prefix_len` and goes on with `input_len` tokens
    of its own. Each of its `turns` is answered with `output_len` tokens; later turns add `tool_len` tokens
    `tool_pause_s` seconds after an answer. Own lengths and answers vary by `range_ratio`, 0 to 1, both ways.
    """

    num_prompts: int = 100
    request_rate: float | None = None
    input_len: int = 128
    output_len: int = 64
    range_ratio: float = 0.0
    prefix_len: int = 0
    num_prefixes: int = 1
    turns: int = 1
    tool_len: int = 64
    tool_pause_s: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for setting in fields(self):
            value = getattr(self, setting.name)
            if setting.name == "request_rate":
                if value is not None and not 0 < value < float("inf"):
                    raise ConfigError(f"request_rate is {value}; it must be above 0 requests per second")
            elif setting.name == "range_ratio":
                if not 0 <= value < 1:
                    raise ConfigError(f"range_ratio is {value}; it must be at least 0 and below 1")
            elif setting.name in ("prefix_len", "tool_pause_s", "seed"):
                if not 0 <= value < float("inf"):
                    raise ConfigError(f"{setting.name} is {value}; it must be at least 0")
            elif value < 1:
                raise ConfigError(f"{setting.name} is {value}; it must be at least 1")


class TokenSource:
    """Token ids to write prompts with: drawn below `vocab_size`, or cut from a text at random places."""

    def __init__(self, vocab_size: int = NUM_BYTE_IDS, text_ids: Sequence[int] = ()):
        if vocab_size < 2:
            raise ConfigError(f"vocab_size is {vocab_size}; it must be at least 2, so that prompts can differ")
        self._vocab_size = vocab_size
        self._text_ids = tuple(text_ids)

    def take(self, rng: random.Random, count: int) -> tuple[int, ...]:
        if not self._text_ids:
            return tuple(rng.choices(range(self._vocab_size), k=count))
        start = rng.randrange(len(self._text_ids))
        repeats = (start + count) // len(self._text_ids) + 1
        return (self._text_ids * repeats)[start : start + count]


def build_sessions(workload: Workload, source: TokenSource) -> list[Session]:
    """The conversations of a load; equal settings give equal ones."""
    rng = random.Random(workload.seed)
    prefixes = [source.take(rng, workload.prefix_len) for _ in range(workload.num_prefixes)]
    starts = _start_times(workload)
    return [Session(start_s, tuple(_turns(workload, source, rng, rng.choice(prefixes)))) for start_s in starts]


def _start_times(workload: Workload) -> list[float | None]:
    """A generator of its own, so that the rate does not change the prompts."""
    if workload.request_rate is None:
        return [None] * workload.num_prompts
    rng, now_s, found = random.Random(f"arrivals {workload.seed}"), 0.0, []
    for _ in range(workload.num_prompts):
        found.append(now_s)
        now_s += rng.expovariate(workload.request_rate)
    return [*found]


def _turns(workload: Workload, source: TokenSource, rng: random.Random, prefix: tuple[int, ...]) -> list[Turn]:
    def vary(length: int) -> int:
        spread = int(length * workload.range_ratio)
        return max(1, rng.randint(length - spread, length + spread))

    first = Turn((*prefix, *source.take(rng, vary(workload.input_len))), vary(workload.output_len), 0.0)
    later = [
        Turn(source.take(rng, vary(workload.tool_len)), vary(workload.output_len), workload.tool_pause_s)
        for _ in range(workload.turns - 1)
    ]
    return [first, *later]

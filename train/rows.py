"""Turns questions into training rows: token ids in the real chat format, and which of them the model must emit.

One conversation to a row, filled with whole exchanges; what is left over is padding without loss.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import numpy.typing as npt

from perilune.text.encoding import message_segments
from perilune.text.messages import ChatMessage
from perilune.text.prompt.effort import THINKING_EFFORTS, thinking_effort
from perilune.text.prompt.segments import Segment, encode_segments, open_message, open_tag
from perilune.text.special import PAD
from perilune.text.tokenizer import Tokenizer
from train.dictionary import load_dictionary
from train.questions import DEFAULT_MIX, SKILLS, THINKING_SHARE, Context, Drill, Exchange, QuestionSource
from train.split import FIRST_EVALUATION_SEED

DEFAULT_ROW_LENGTH = 256
# How often an exchange of another skill comes between those of a row's own skill.
CHANGE_SHARE = 0.15
RECALL_CHANGE_SHARE = 0.05
MAX_LEFT_OVER = 8
MAX_TRIES = 4
# Room for the thinking-effort message and the longest exchange.
MIN_ROW_LENGTH = 256
ACKNOWLEDGED_SHARE = 0.15

Batch = tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]


@dataclass(frozen=True)
class Row:
    """Token ids and, of the same length, whether the model must emit that token (it is a target of the loss).

    To train, predict token i from tokens before i wherever `loss_mask[i]` is true.
    """

    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]


class ChatRenderer:
    """Encodes exchanges in the chat format, split into what the model is given and what it must emit."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._markup: dict[tuple[Segment, ...], list[int]] = {}
        self.pad_id = tokenizer.special_ids[PAD]

    def head(self, system: str | None, effort: str | None) -> Row:
        """What stands before the first user turn; thinking is off when `effort` is None."""
        ids = self._fixed(thinking_effort(effort)) if effort is not None else []
        if system is not None:
            ids = ids + self._encode(message_segments(ChatMessage("system", system), effort is not None))
        return Row(tuple(ids), (False,) * len(ids))

    def exchange(self, exchange: Exchange, *, thinking: bool) -> Row:
        """A user turn and the answer; the loss covers what follows the opening of the answer's first channel."""
        stub = self._fixed(open_message("assistant") + open_tag("think" if thinking else "response"))
        user = self._encode(message_segments(ChatMessage("user", exchange.user), thinking))
        answer = ChatMessage("assistant", exchange.answer, reasoning=exchange.reasoning)
        assistant = self._encode(message_segments(answer, thinking))
        assert assistant[: len(stub)] == stub
        num_given = len(user) + len(stub)
        mask = (False,) * num_given + (True,) * (len(assistant) - len(stub))
        return Row((*user, *assistant), mask)

    def _encode(self, segments: Iterable[Segment]) -> list[int]:
        return encode_segments(segments, self._tokenizer)

    def _fixed(self, segments: list[Segment]) -> list[int]:
        key = tuple(segments)
        if key not in self._markup:
            self._markup[key] = self._encode(segments)
        return self._markup[key]


class Conversation:
    """Exchanges of one row: mostly of one skill, and for recall the facts come first."""

    def __init__(self, source: QuestionSource, mix: Mapping[str, float], level: float) -> None:
        self._source = source
        self._mix = mix
        self._level = level
        self._skill = source.rng.choices(list(mix), weights=list(mix.values()))[0]
        self._context: Context | None = source.context(level) if self._skill == "recall" else None
        self._known = list(self._context.facts) if self._context else []
        self._num_asked = 0
        self.is_recall = self._skill == "recall"
        self.system = self._context.system if self._context else None

    @property
    def has_new_facts(self) -> bool:
        """Whether the last exchange was the first about its facts: without it nothing else may ask for them."""
        return self._num_asked == 1

    def next_exchange(self) -> Exchange:
        """The next user turn with its answer."""
        rng = self._source.rng
        if self._context is None:
            return self._source.exchange(self._other_skill() if rng.random() < CHANGE_SHARE else self._skill)
        if self._num_asked == 0:
            return self._first_of(self._context)
        if rng.random() < RECALL_CHANGE_SHARE:
            return self._source.exchange(self._other_skill())
        if self._num_asked > len(self._context.facts):
            self._context = self._source.context(self._level, self._known)
            self._known += self._context.facts
            self._num_asked = 0
            return self._first_of(self._context)
        self._num_asked += 1
        return self._source.recall(self._context.facts)

    def _first_of(self, context: Context) -> Exchange:
        self._num_asked = 1
        if context.head and self._source.rng.random() < ACKNOWLEDGED_SHARE:
            return self._source.acknowledgement(context)
        exchange = self._source.recall(context.facts)
        return replace(exchange, user=context.head + exchange.user)

    def _other_skill(self) -> str:
        skills = [skill for skill in self._mix if skill != "recall"]
        if not any(self._mix[skill] for skill in skills):
            return "talk"
        return self._source.rng.choices(skills, weights=[self._mix[skill] for skill in skills])[0]


def check_mix(mix: Mapping[str, float]) -> None:
    """ValueError unless the mix names known skills with weights that can be drawn from."""
    if unknown := set(mix) - set(SKILLS):
        raise ValueError(f"mix names {', '.join(sorted(unknown))}; allowed skills: {', '.join(SKILLS)}")
    if any(weight < 0 for weight in mix.values()) or sum(mix.values()) <= 0:
        raise ValueError(f"mix is {dict(mix)}; weights are at least 0 and one of them is above 0")


class RowSource:
    """An endless, reproducible supply of training rows."""

    def __init__(
        self,
        seed: int,
        tokenizer: Tokenizer,
        *,
        row_length: int = DEFAULT_ROW_LENGTH,
        mix: Mapping[str, float] = DEFAULT_MIX,
        thinking_share: float = THINKING_SHARE,
        drill: Drill | None = None,
    ) -> None:
        if not 0 <= seed < FIRST_EVALUATION_SEED:
            raise ValueError(f"seed {seed}: training seeds go from 0 to {FIRST_EVALUATION_SEED - 1}")
        if row_length < MIN_ROW_LENGTH:
            raise ValueError(f"row_length is {row_length}; it must be at least {MIN_ROW_LENGTH}")
        check_mix(mix)
        self._rng = random.Random(seed)
        self._source = QuestionSource(self._rng, load_dictionary(), held_out=False, drill=drill)
        self._renderer = ChatRenderer(tokenizer)
        self._row_length = row_length
        self._mix = mix
        self._thinking_share = thinking_share
        # Exchanges that no longer fitted: they fill or open later rows, so that long answers are not the rarer for it.
        self._left_over: list[Exchange] = []

    def row(self, level: float) -> Row:
        """One conversation; `level` from 0 to 1 sets how many facts there are to recall from."""
        while True:
            parts = self._parts(level)
            if len(parts) > 1:
                return self._joined(parts)

    def _parts(self, level: float) -> list[Row]:
        is_thinking = self._rng.random() < self._thinking_share
        effort = self._rng.choice(THINKING_EFFORTS) if is_thinking else None
        conversation = Conversation(self._source, self._mix, level)
        parts = [self._renderer.head(conversation.system, effort)]
        free = self._row_length - len(parts[0].token_ids)
        num_tries = 1
        while num_tries <= MAX_TRIES:
            is_crowded = len(self._left_over) > MAX_LEFT_OVER and not conversation.is_recall
            exchange = self._left_over.pop(0) if is_crowded else conversation.next_exchange()
            part = self._renderer.exchange(exchange, thinking=is_thinking)
            if len(part.token_ids) <= free:
                parts.append(part)
                free -= len(part.token_ids)
                continue
            if exchange.skill != "recall":
                self._left_over.append(exchange)
            # Another question about known facts may be shorter; of other skills there are enough left over.
            if not conversation.is_recall or conversation.has_new_facts:
                break
            num_tries += 1
        return parts + self._filling(free, is_thinking)

    def _filling(self, free: int, is_thinking: bool) -> list[Row]:
        rendered = [(self._renderer.exchange(e, thinking=is_thinking), e) for e in self._left_over]
        fitting = [(len(part.token_ids), part, e) for part, e in rendered if len(part.token_ids) <= free]
        if not fitting:
            return []
        _, part, exchange = max(fitting, key=lambda item: item[0])
        self._left_over.remove(exchange)
        return [part]

    def _joined(self, parts: list[Row]) -> Row:
        ids = tuple(chain.from_iterable(part.token_ids for part in parts))
        mask = tuple(chain.from_iterable(part.loss_mask for part in parts))
        num_padding = self._row_length - len(ids)
        return Row(ids + (self._renderer.pad_id,) * num_padding, mask + (False,) * num_padding)


def batches(
    seed: int,
    tokenizer: Tokenizer,
    batch_size: int,
    *,
    level: Callable[[int], float],
    row_length: int = DEFAULT_ROW_LENGTH,
    mix: Mapping[str, float] = DEFAULT_MIX,
    thinking_share: float = THINKING_SHARE,
    drill: Drill | None = None,
) -> Iterator[Batch]:
    """Token ids int64 [batch, row_length] and loss masks bool [batch, row_length]; `level(step)` is the curriculum.

    Equal arguments give equal batches: to resume at step n, drop the first n (`itertools.islice`).
    """
    source = RowSource(seed, tokenizer, row_length=row_length, mix=mix, thinking_share=thinking_share, drill=drill)
    step = 0
    while True:
        rows = [source.row(level(step)) for _ in range(batch_size)]
        yield (
            np.array([row.token_ids for row in rows], dtype=np.int64),
            np.array([row.loss_mask for row in rows], dtype=np.bool_),
        )
        step += 1

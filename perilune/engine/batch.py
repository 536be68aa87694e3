"""The plan of one step and what came of it, per request; no tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from perilune.cache.moves import Move
from perilune.cache.tiers.ledger import Transfers
from perilune.engine.request import Request
from perilune.sampling.logprobs import SampledToken, TokenLogprob


@dataclass(frozen=True)
class Seal:
    """The state behind `position` tokens is to be copied to `slot` when the step has got there.

    None says that there is no room or no need for a copy: a request is cut there all the same, so that its rounding
    does not depend on others.
    """

    position: int
    slot: int | None


@dataclass(frozen=True)
class ScheduledSequence:
    """What one request computes in a step: `token_ids`, the first of them at position `num_computed_tokens`.

    Position p is cached in entry p // block_size of `block_table`. `needs_token` says that these are the last known
    tokens, so that the step ends with choosing the next one. `logprob_targets` are the positions of the prompt tokens
    whose log-probabilities this step yields; each comes from the logits of the position before it. `seals` are
    ascending, behind the first of `token_ids` and not past the last.

    Behind its last known token a step may verify guesses, for at most `most_drafts` of which there is room; when they
    are made, `num_drafts` of them end `token_ids`.
    """

    request: Request
    num_computed_tokens: int
    token_ids: tuple[int, ...]
    block_table: tuple[int, ...]
    state_slot: int
    needs_token: bool
    logprob_targets: range
    seals: tuple[Seal, ...] = ()
    most_drafts: int = 0
    num_drafts: int = 0

    @property
    def num_scheduled_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def draft_ids(self) -> tuple[int, ...]:
        """The guesses behind the last known token."""
        return self.token_ids[self.num_scheduled_tokens - self.num_drafts :]

    @property
    def seq_len(self) -> int:
        """Tokens in the context after this step."""
        return self.num_computed_tokens + self.num_scheduled_tokens

    @property
    def logits_rows(self) -> list[int]:
        """Indices into `token_ids` whose logits are wanted: one per target, then those of `token_rows`."""
        return [*(target - 1 - self.num_computed_tokens for target in self.logprob_targets), *self.token_rows]

    @property
    def token_rows(self) -> range:
        """Indices into `token_ids` whose logits choose tokens: the last known token's, if needed, and each guess's."""
        end = self.num_scheduled_tokens
        return range(end - 1 - self.num_drafts, end) if self.needs_token else range(0)


@dataclass(frozen=True)
class ScheduledBatch:
    """The sequences of one step, those with exactly one token first.

    Before anything is computed come the saves of `transfers`, then `moves`; then its loads begin.
    """

    sequences: tuple[ScheduledSequence, ...]
    num_preempted: int = 0
    moves: tuple[Move, ...] = ()
    transfers: Transfers = field(default_factory=Transfers)

    @property
    def has_work(self) -> bool:
        """Whether there is anything to do for a runner."""
        return bool(self.sequences or self.moves or self.transfers)

    @property
    def num_decodes(self) -> int:
        """How many sequences have exactly one token, be it a generated one or the tail of a prompt."""
        return sum(sequence.num_scheduled_tokens == 1 for sequence in self.sequences)

    @property
    def num_scheduled_tokens(self) -> int:
        return sum(sequence.num_scheduled_tokens for sequence in self.sequences)


@dataclass(frozen=True)
class StepResult:
    """What a step yielded, by request id.

    `tokens` are those that follow the known ones, in order: one, and one more for each guess that was right. A request
    that failed has an entry in `failures`, which says why, and none in `tokens`. `prompt_logprobs` are those of the
    prompt tokens that follow the ones the request already has.
    """

    tokens: Mapping[str, Sequence[SampledToken]] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)
    prompt_logprobs: Mapping[str, Sequence[TokenLogprob]] = field(default_factory=dict)

"""Guesses for the answers of a step: made before its pass, and those that stay taken over into the states after it."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, takewhile
from typing import Protocol

import torch
from torch import Tensor

from perilune.cache.storage import CacheStorage
from perilune.engine.batch import ScheduledBatch, ScheduledSequence
from perilune.engine.request import Request
from perilune.engine.steps.owed import OwedRows
from perilune.engine.steps.tokens import DrawnRule, Judge
from perilune.ops.recording import num_recordings
from perilune.speculative.policy import DraftPolicy, DraftStats
from perilune.speculative.verify import accept_tokens

# Takes cache, records, state slots [N], cu_seqlens [N+1] and counts [N]: `KimiModel.commit`.
Commit = Callable[[Mapping[str, Tensor], Mapping[str, Tensor], Tensor, Tensor, Tensor], None]


@dataclass(frozen=True)
class Proposal:
    """Guesses in order and, where the proposer knows, the chance of each to be right where all before it are.

    Guesses that were drawn come with the laws that they were drawn from.
    """

    token_ids: tuple[int, ...] = ()
    chances: tuple[float, ...] | None = None
    laws: Tensor | None = None  # [K, V] float64


class Proposer(Protocol):
    """Whatever guesses tokens."""

    def propose(self, sequences: Sequence[ScheduledSequence]) -> Sequence[Proposal]:
        """At most `most_drafts` guesses of what follows each of these sequences, which end with the last known token.

        Their block tables have room for as many rows as guesses are ever made.
        """


class Drafting:
    """Makes, hands over and takes back guesses; `policy` says how many. `records` holds a row per token to verify.

    `judge` is for guesses that were drawn; others stay where plain sampling chooses them. `owed` puts off what plain
    steps leave for the proposer; None where they leave nothing.
    """

    def __init__(
        self,
        proposer: Proposer,
        policy: DraftPolicy,
        commit: Commit,
        storage: CacheStorage,
        records: CacheStorage,
        *,
        judge: Judge = accept_tokens,
        owed: OwedRows | None = None,
    ):
        self._proposer = proposer
        self.policy = policy
        self._commit = commit
        self._cache = storage.views
        self._records = records
        self._planned: Sequence[ScheduledSequence] = ()
        self._verified: list[ScheduledSequence] = []
        self._chances: dict[str, tuple[float, ...]] = {}
        self._laws: dict[str, Tensor] = {}
        self._judge = judge
        self._owed = owed
        self._num_answers = self._num_drafting = 0
        self._is_resting = False
        self._began_s, self._num_recordings = 0.0, 0

    @property
    def num_drafts(self) -> int:
        return self.policy.num_drafts

    @property
    def num_rows(self) -> int:
        """The most tokens that a step can verify, last known ones included."""
        return self._records.num_slots

    @property
    def records(self) -> Mapping[str, Tensor]:
        """What a pass leaves of tokens that it verifies, by group."""
        return self._records.views

    def rests(self) -> bool:
        """Whether the next step verifies nothing, so that nothing else here is asked about it."""
        # a step without sequences asks for no guesses, and has none
        self._verified, self._num_answers, self._num_drafting = [], 0, 0
        self._is_resting = self.policy.rests()
        return self._is_resting

    def begin(self, batch: ScheduledBatch) -> None:
        """To be called before anything of a step is done."""
        self._num_recordings = num_recordings()
        if self._is_resting and self.policy.wants_time:
            self._began_s, self._num_answers = time.perf_counter(), len(batch.sequences)
            self._planned = batch.sequences
        if self._owed is not None:
            has_guesses = not self._is_resting and any(
                item.most_drafts > 0 or item.num_drafts > 0 for item in batch.sequences
            )
            self._owed.begin(batch, has_guesses=has_guesses)

    def switch(self, *, is_on: bool) -> None:
        """Off, steps are those of an engine that never guesses: not even what proposers read is left."""
        self.policy.is_off = not is_on
        if self._owed is not None:
            self._owed.switch(is_on=is_on)

    def force(self) -> None:
        """From now on every step verifies as many guesses as there is room for, whatever they cost."""
        self.switch(is_on=True)
        self.policy.is_forced = True

    def settle(self) -> None:
        """Has everything in the cache that was put off."""
        if self._owed is not None:
            self._owed.write()

    def lengths(self, requests: Sequence[Request], most: Sequence[int], budget: int) -> Sequence[int]:
        """How many guesses of each answer the next step should verify."""
        self._began_s, self._num_answers = time.perf_counter(), len(requests)
        return self.policy.lengths(requests, most, budget)

    def propose(
        self, sequences: Sequence[ScheduledSequence]
    ) -> tuple[tuple[ScheduledSequence, ...], tuple[ScheduledSequence, ...]]:
        """The sequences of a step that verify nothing, in their order, and those that do, with their guesses."""
        self._planned, self._chances, self._laws = sequences, {}, {}
        if self._is_resting:
            self._verified = []
            return tuple(sequences), ()
        self._verified = [sequence for sequence in sequences if sequence.num_drafts > 0]
        asked = [sequence for sequence in sequences if sequence.most_drafts > 0]
        self._num_drafting = len(asked)
        if not asked and not self._verified:
            return tuple(sequences), ()
        proposals = self._alike(self._trim(self._proposer.propose(asked))) if asked else ()
        for sequence, proposal in zip(asked, proposals, strict=True):
            if proposal.token_ids:
                self._verified.append(_with_drafts(sequence, proposal.token_ids))
            if proposal.laws is not None and proposal.token_ids:
                self._laws[sequence.request.request_id] = proposal.laws
            if proposal.chances is not None:
                self._chances[sequence.request.request_id] = proposal.chances
        self._verified.sort(key=lambda sequence: sequence.num_drafts)  # few orders, so few recordings
        ids = {sequence.request.request_id for sequence in self._verified}
        return tuple(item for item in sequences if item.request.request_id not in ids), tuple(self._verified)

    @property
    def has_guesses(self) -> bool:
        """Whether the step verifies any."""
        return bool(self._verified)

    @property
    def drawn(self) -> DrawnRule | None:
        """How those guesses of this step are to be judged that were drawn; None where none were."""
        return DrawnRule(self._judge, self._laws) if self._laws else None

    def keep(self, taken: Mapping[str, Sequence[int]]) -> None:
        """Take over the step's guesses, given the tokens that each request took, and learn from it."""
        if self._owed is not None:
            self._owed.end()
        if self._is_resting:
            if self._num_answers > 0 and num_recordings() == self._num_recordings:
                self.policy.observe_rest(self._num_answers, self._step_seconds())
            return
        self.commit(taken)
        for sequence in self._verified:
            found = taken[sequence.request.request_id]
            # an answer that ends with a guess says nothing about those behind it
            num_judged, num_right = min(sequence.num_drafts, len(found)), _num_equal(sequence.draft_ids, found)
            self.policy.observe(sequence.request, num_judged, num_right, self._chances.get(sequence.request.request_id))
        self._observe_step()

    def commit(self, taken: Mapping[str, Sequence[int]]) -> None:
        """Move the states on to where all tokens that each request took are seen, but for the last."""
        if self._verified:
            tokens = [taken[sequence.request.request_id] for sequence in self._verified]
            ends = accumulate((sequence.num_scheduled_tokens for sequence in self._verified), initial=0)
            with torch.inference_mode():
                self._commit(
                    self._cache,
                    self._records.views,
                    torch.tensor([sequence.state_slot for sequence in self._verified]),
                    torch.tensor(list(ends)),
                    torch.tensor([len(found) for found in tokens]),
                )

    def stats(self) -> DraftStats:
        return self.policy.stats()

    def _observe_step(self) -> None:
        if self._num_answers == 0:
            return
        num_verified = sum(sequence.num_drafts for sequence in self._verified)
        is_usual = num_recordings() == self._num_recordings
        seconds = self._step_seconds()
        self.policy.observe_step(self._num_answers, self._num_drafting, num_verified, seconds, is_usual=is_usual)

    def _step_seconds(self) -> float | None:
        """What the step took; None where prompts shared it, which come last."""
        return None if len(self._planned[-1].token_ids) > 1 else time.perf_counter() - self._began_s

    def _trim(self, proposals: Sequence[Proposal]) -> Sequence[Proposal]:
        """The proposals without what is not worth verifying, where the proposer knows their chances."""
        if any(proposal.chances is None for proposal in proposals):
            return proposals
        return _cut(proposals, self.policy.trimmed([item.chances or () for item in proposals]))

    def _alike(self, proposals: Sequence[Proposal]) -> Sequence[Proposal]:
        """Proposals cut so that the step has one of few shapes."""
        lengths = [len(item.token_ids) for item in proposals]
        others = [0] * max(0, self._num_answers - len(lengths))
        return _cut(proposals, self.policy.alike([*lengths, *others])[: len(lengths)])


def _cut(proposals: Sequence[Proposal], lengths: Sequence[int]) -> list[Proposal]:
    return [replace(item, token_ids=item.token_ids[:count]) for item, count in zip(proposals, lengths, strict=True)]


def _num_equal(draft_ids: Sequence[int], token_ids: Sequence[int]) -> int:
    """How many guesses were right before the first that was not."""
    pairs = zip(draft_ids, token_ids, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _with_drafts(sequence: ScheduledSequence, draft_ids: tuple[int, ...]) -> ScheduledSequence:
    return replace(sequence, token_ids=(*sequence.token_ids, *draft_ids), num_drafts=len(draft_ids))

"""What steps cost on this machine, with this model: a few of them run at the start, as the engine runs them."""

import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from perilune.engine.batch import ScheduledBatch, ScheduledSequence
from perilune.engine.request import GenerateRequest, Request
from perilune.engine.steps.drafting import Drafting
from perilune.engine.steps.runner import ModelRunner
from perilune.sampling.params import SamplingParams
from perilune.speculative.length import COMMON_LENGTHS, StepTimes
from perilune.speculative.policy import StepCosts

_LOG = logging.getLogger(__name__)

# a count, and seconds
_Point = tuple[int, float]

# Each kind of step runs so often, the fastest counts; no new kind is begun after so many seconds.
RUNS = 4
MOST_S = 10.0
# The context of the answers, in tokens.
CONTEXT = 16


class CostMeter:
    """Times steps of up to `max_num_seqs` answers on an engine that serves nobody yet: its cache is overwritten."""

    def __init__(
        self,
        runner: ModelRunner,
        drafting: Drafting,
        *,
        max_num_seqs: int,
        block_size: int,
        num_blocks: int,
        vocab_size: int,
    ):
        self._runner, self._drafting = runner, drafting
        self._random = random.Random(0)
        self._vocab_size = vocab_size
        self._end_s = time.perf_counter() + MOST_S
        per_sequence = -(-(CONTEXT + 1 + drafting.num_drafts) // block_size)
        self._most = min(max_num_seqs, num_blocks // per_sequence)
        blocks = range(per_sequence)
        self._sequences = [
            self._sequence(index, tuple(index * per_sequence + block for block in blocks))
            for index in range(self._most)
        ]

    def measure(self) -> StepCosts | None:
        """Seconds of plain, verifying and drafting steps; None where there is no room to run one."""
        if self._most == 0:
            return None
        plain, verifying, drafting = list[_Point](), list[_Point](), list[_Point]()
        for count in _doubling(self._most):
            if plain and time.perf_counter() > self._end_s:
                break
            sequences = self._sequences[:count]
            plain.append((count, _fastest(partial(self._step, sequences))))
            drafting.append((count, _fastest(partial(self._propose, sequences))))
            most = min(self._drafting.num_drafts, self._drafting.num_rows // count - 1)
            for length in sorted({1, 3, most} if count == 1 else {most} - {0}):
                guessing = [self._with_drafts(item, min(length, most)) for item in sequences]
                rows = sum(item.num_scheduled_tokens for item in guessing)
                verifying.append((rows, _fastest(partial(self._step, guessing))))
        costs = StepCosts(*map(_times, (plain, verifying, drafting)))
        _LOG.info("steps took: plain %s, verifying %s, drafting %s", *map(_shown, (plain, verifying, drafting)))
        return costs

    def prepare(self) -> None:
        """Has the shapes of steps recorded that guesses are cut to, as long as there is time, before anybody waits."""
        for guessing in self._shapes():
            if time.perf_counter() > self._end_s:
                break
            self._step(guessing)

    def _shapes(self) -> Iterator[list[ScheduledSequence]]:
        """Steps of every shape that guesses of a power of two of answers are cut to."""
        for count in _doubling(self._most):
            most = min(self._drafting.num_drafts, self._drafting.num_rows // count - 1)
            for num_verifies in _doubling(count):
                for length in COMMON_LENGTHS:
                    if length <= most:
                        plain, verified = self._sequences[num_verifies:count], self._sequences[:num_verifies]
                        yield [*plain, *(self._with_drafts(item, length) for item in verified)]

    def _step(self, sequences: Sequence[ScheduledSequence]) -> None:
        result = self._runner.execute(ScheduledBatch(tuple(sequences)))
        self._drafting.commit(
            {name: [sampled.token_id for sampled in tokens] for name, tokens in result.tokens.items()}
        )

    def _propose(self, sequences: Sequence[ScheduledSequence]) -> None:
        self._drafting.propose([replace(item, most_drafts=self._drafting.num_drafts) for item in sequences])

    def _sequence(self, index: int, block_table: tuple[int, ...]) -> ScheduledSequence:
        token_ids = tuple(self._random.choices(range(self._vocab_size), k=CONTEXT + 1))
        message = GenerateRequest(f"measured-{index}", token_ids, SamplingParams(temperature=0.0, ignore_eos=True))
        request = Request(message, arrival_index=index, arrival_s=0.0, max_total_tokens=len(token_ids), seed=0)
        return ScheduledSequence(
            request=request,
            num_computed_tokens=CONTEXT,
            token_ids=token_ids[-1:],
            block_table=block_table,
            state_slot=index,
            needs_token=True,
            logprob_targets=range(0),
        )

    def _with_drafts(self, sequence: ScheduledSequence, count: int) -> ScheduledSequence:
        guesses = self._random.choices(range(self._vocab_size), k=count)
        return replace(sequence, token_ids=(*sequence.token_ids, *guesses), num_drafts=count)


def _doubling(most: int) -> list[int]:
    counts = [1 << power for power in range(most.bit_length()) if 1 << power < most]
    return [*counts, most]


def _fastest(run: Callable[[], None]) -> float:
    found = []
    for _ in range(RUNS):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return min(found)


def _times(points: Sequence[_Point]) -> StepTimes:
    """A table of at least two points; a single one is taken to hold for any count."""
    return StepTimes.measured(points if len(dict(points)) > 1 else [*points, (points[0][0] + 1, points[0][1])])


def _shown(points: Sequence[_Point]) -> str:
    return ", ".join(f"{count}: {1000 * seconds:.3g} ms" for count, seconds in points)

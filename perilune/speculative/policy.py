"""When to draft, and how much: what drafts were worth so far, for each request and in all, against what steps cost.

Knows no tensors. Lengths change how fast tokens come, never which.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from weakref import WeakKeyDictionary

from perilune.speculative.length import Acceptance, StepTimes, alike, choose_lengths

_LOG = logging.getLogger(__name__)

# Where nothing pays, one answer tries so many drafts after so many steps; when all stay, the next trial is longer.
FIRST_WAIT = 8
TRIAL_LENGTH = 2
# What drafting may lose, as a share of the time of plain steps, and the most that it may lose of what it won, in steps.
_LOSS_SHARE = 0.005
_MOST_CREDIT = 16.0
# so many steps at most go by before answers are looked at again
_LONGEST_REST = 64
# How far one step moves the estimate of how long steps take against what was measured.
_WEIGHT = 0.1
# Steps that take so many times as long as expected are passed over, unless so many come in a row.
_STRANGE = 2.0
_MOST_STRANGE = 8
# So many times as long as expected is a pause of the machine, and no loss of that much.
_PAUSE = 4.0
# How often a good draft is right at a place behind right ones.
GOOD = 0.8
# After so many rounds a draft is judged: at the first place, and at the second against the first.
_JUDGED_ROUNDS = 256
_MISMATCHED = 0.1
_CLIFF = 0.25


@dataclass(frozen=True)
class DraftStats:
    """What drafting did since the start. `tried[i]` drafts at place i came behind accepted ones; `kept[i]` stayed.

    Of the steps, but for those with nothing but prompts, `num_plain_steps` verified nothing.
    """

    tried: tuple[int, ...]
    kept: tuple[int, ...]
    num_rounds: int
    num_drafted: int
    num_steps: int
    num_plain_steps: int

    @property
    def num_accepted(self) -> int:
        return sum(self.kept)

    def behind(self, before: "DraftStats") -> "DraftStats":
        """These counts on top of earlier ones, of as many places."""
        return DraftStats(
            tuple(a + b for a, b in zip(self.tried, before.tried, strict=True)),
            tuple(a + b for a, b in zip(self.kept, before.kept, strict=True)),
            self.num_rounds + before.num_rounds,
            self.num_drafted + before.num_drafted,
            self.num_steps + before.num_steps,
            self.num_plain_steps + before.num_plain_steps,
        )


@dataclass(frozen=True)
class StepCosts:
    """Measured seconds: of plain steps by their answers, of verifying steps by rows, of drafting by answers."""

    plain: StepTimes
    verifying: StepTimes
    drafting: StepTimes

    def can_pay(self, num_drafts: int) -> bool:
        """Whether a good draft, right `GOOD` of the time at each place, would make any number of answers faster."""
        survival = [GOOD ** (place + 1) for place in range(num_drafts)]
        return any(
            any(
                choose_lengths(
                    [survival] * count,
                    self.verifying,
                    self.drafting.of(count),
                    plain_seconds=self.plain.of(count),
                )
            )
            for count in self.plain.rows
        )


_FREE = StepTimes((1, 2), (1.0, 1.0))
# What is assumed until it is measured: that guesses cost nothing.
UNKNOWN_COSTS = StepCosts(plain=_FREE, verifying=_FREE, drafting=StepTimes((1, 2), (0.0, 0.0)))


@dataclass
class _Record:
    acceptance: Acceptance
    last_trial: int = 0


class Calibration:
    """What a maker of drafts calls their chance against how often they stay, in bins of its chances."""

    _BINS = 10
    _PRIOR = 8.0  # rounds that the maker's word counts as

    def __init__(self) -> None:
        self._tried = [self._PRIOR] * self._BINS
        self._kept = [self._PRIOR * (index + 0.5) / self._BINS for index in range(self._BINS)]

    def of(self, chance: float) -> float:
        index = self._bin(chance)
        return self._kept[index] / self._tried[index]

    def observe(self, chance: float, *, is_kept: bool) -> None:
        index = self._bin(chance)
        self._tried[index] += 1
        self._kept[index] += is_kept

    def _bin(self, chance: float) -> int:
        # a chance that is no number is none
        return min(int(chance * self._BINS), self._BINS - 1) if chance > 0 else 0


class DraftPolicy:
    """Chooses lengths for the answers of each step, and learns from what became of them; `costs` may be exchanged.

    Requests are told apart by identity and forgotten with their last reference. `is_model` says that the drafts come
    from a model made for this one, which is suspicious where they fail. With `gives_chances` as many are made as can be
    and those worth it verified, as `trimmed` says.
    """

    def __init__(self, num_drafts: int, *, is_model: bool = False, gives_chances: bool = False):
        self.num_drafts = num_drafts
        self._gives_chances = gives_chances
        self._is_trial = False
        self.costs = UNKNOWN_COSTS
        self._calibration = Calibration()
        self._all = Acceptance(num_drafts)
        self._records: WeakKeyDictionary[object, _Record] = WeakKeyDictionary()
        self._factors = {True: 1.0, False: 1.0}  # by whether a step verifies
        self._num_idle = self._num_trials = self._num_right = 0
        self._num_resting = 0
        self._num_strange = {True: 0, False: 0}  # in a row, by whether they verify
        self._credit = 0.0  # what drafting may lose now, in plain steps
        self._tried, self._kept = [0] * num_drafts, [0] * num_drafts
        # answers and rounds when it was found that nothing pays
        self._settled: tuple[tuple[int, ...], int] | None = None
        self._trial_length = TRIAL_LENGTH
        self._num_rounds = self._num_drafted = self._num_steps = self._num_plain_steps = 0
        self._is_judged = not is_model
        self.is_off = False  # then nothing is ever verified
        self.is_forced = False  # then all there is room for is verified, whatever it costs

    def rests(self) -> bool:
        """Whether the next step verifies nothing whatever its answers are; to be asked once before each step.

        For a step of a small model even the question is dear.
        """
        if self.is_forced or (self._num_resting == 0 and not self.is_off):
            return False
        self._num_resting = max(0, self._num_resting - 1)
        self._num_idle += 1
        self._num_steps += 1
        self._num_plain_steps += 1
        self._credit = min(self._credit + _LOSS_SHARE, _MOST_CREDIT)
        return True

    @property
    def wants_time(self) -> bool:
        """Whether what the resting step takes is to be told to `observe_rest`: the last of a rest is looked at."""
        return self._num_resting == 0 and not self.is_off

    def observe_rest(self, num_answers: int, seconds: float | None) -> None:
        """Learn what a resting step took; None where prompts shared it."""
        if seconds is not None:
            self._learn(seconds, self._expected(num_answers, 0, 0), is_verifying=False)

    def lengths(self, requests: Sequence[object], most: Sequence[int], budget: int) -> list[int]:
        """How many drafts each of these answers should verify, at most `most` of each and `budget` in all."""
        self._is_trial, self._num_right = False, 0
        if not requests or budget <= 0:
            return [0] * len(requests)
        if self.is_forced:
            return _filled([1] * min(len(requests), budget) + [0] * (len(requests) - budget), most, budget)
        if self._credit < 0:
            self._num_resting = min(int(-self._credit / _LOSS_SHARE), _LONGEST_REST)
            return [0] * len(requests)
        # where nothing was tried since nothing paid, nothing pays still
        state = (tuple(map(id, requests)), self._num_rounds)
        if self._settled == state:
            return self._idle(requests, most, budget)
        usual = self._all.rates
        survivals = [
            self._record(request).acceptance.survival_beside(usual)[: max(0, count)]
            for request, count in zip(requests, most, strict=True)
        ]
        chosen = self._choose(survivals, self.costs.drafting.of(len(requests)), budget)
        if any(chosen):
            self._num_idle, self._trial_length = 0, TRIAL_LENGTH
            return _filled(chosen, most, budget) if self._gives_chances else chosen
        self._settled = state
        return self._idle(requests, most, budget)

    def trimmed(self, chances: Sequence[Sequence[float]]) -> list[int]:
        """How many of the drafts that are made already are worth verifying; `chances` are what their maker thinks."""
        if self._is_trial or self.is_forced:
            return [len(found) for found in chances]
        survivals = [list(accumulate(map(self._calibration.of, found), mul)) for found in chances]
        return self._choose(survivals, 0.0, sum(map(len, survivals)))

    def alike(self, lengths: Sequence[int]) -> list[int]:
        """Of guesses of these lengths, those of all answers of a step, how many to verify."""
        return alike(lengths)

    def observe(
        self, request: object, num_verified: int, num_accepted: int, chances: Sequence[float] | None = None
    ) -> None:
        """Learn from a round, in which the maker of the drafts gave them these chances, if any."""
        if self._is_trial:
            is_good = num_accepted == num_verified
            self._trial_length = min(2 * self._trial_length, self.num_drafts) if is_good else TRIAL_LENGTH
        self._num_right += num_accepted
        for acceptance in (self._record(request).acceptance, self._all):
            acceptance.observe(num_verified, num_accepted)
        self._num_rounds += 1
        self._num_drafted += num_verified
        for place in range(min(num_accepted + 1, num_verified)):
            self._tried[place] += 1
            self._kept[place] += place < num_accepted
            if chances is not None:
                self._calibration.observe(chances[place], is_kept=place < num_accepted)
        if not self._is_judged and self._num_rounds >= _JUDGED_ROUNDS:
            self._judge()

    def observe_step(
        self,
        num_answers: int,
        num_drafting: int,
        num_verified: int,
        seconds: float | None,
        *,
        is_usual: bool = True,
    ) -> None:
        """Learn what a step took; `seconds` is None where prompts shared it.

        Of its answers `num_drafting` had drafts made, of which `num_verified` in all were verified. Steps of which it
        is known that they are not `is_usual` count as lost time, but not as what such steps take.
        """
        if num_answers == 0:
            return
        self._num_steps += 1
        self._num_plain_steps += num_verified == 0
        if seconds is None:
            return
        expected = self._expected(num_answers, num_drafting, num_verified)
        if not is_usual or (num_verified == 0 and num_drafting > 0):
            self._account(num_answers, num_drafting, min(seconds, expected * _STRANGE))
            return
        self._learn(seconds, expected, is_verifying=num_verified > 0)
        # what is not believed to be usual is lost all the same, but for pauses of the machine
        self._account(num_answers, num_drafting, min(seconds, expected * _PAUSE))

    def _expected(self, num_answers: int, num_drafting: int, num_verified: int) -> float:
        """Seconds of a step, as far as it is known."""
        expected = self.costs.plain.of(num_answers)
        if num_verified > 0:
            expected = self.costs.verifying.of(num_answers + num_verified)
        if num_drafting > 0:
            expected += self.costs.drafting.of(num_drafting)
        return expected * self._factors[num_verified > 0]

    def _learn(self, seconds: float, expected: float, *, is_verifying: bool) -> None:
        """Correct what such steps are expected to take.

        A step that takes much longer is believed only with others like it in a row: passes are recorded at times, and
        machines have pauses.
        """
        if seconds > _STRANGE * expected:
            self._num_strange[is_verifying] += 1
            if self._num_strange[is_verifying] < _MOST_STRANGE:
                return
        else:
            self._num_strange[is_verifying] = 0
        found = max(seconds / expected, 1 / _STRANGE)
        self._factors[is_verifying] *= 1 + _WEIGHT * (found - 1)

    def _account(self, num_answers: int, num_drafting: int, seconds: float) -> None:
        """Book what a step lost or won against plain ones, so that estimates that are wrong cannot lose much."""
        won = _LOSS_SHARE
        if num_drafting > 0:
            plain_seconds = self.costs.plain.of(num_answers) * self._factors[False]
            won = 1 + self._num_right / num_answers - seconds / plain_seconds
        self._credit = min(self._credit + won, _MOST_CREDIT)

    def stats(self) -> DraftStats:
        return DraftStats(
            tuple(self._tried),
            tuple(self._kept),
            self._num_rounds,
            self._num_drafted,
            self._num_steps,
            self._num_plain_steps,
        )

    def _record(self, request: object) -> _Record:
        record = self._records.get(request)
        if record is None:
            record = self._records[request] = _Record(Acceptance(self.num_drafts, self._all))
        return record

    def _choose(self, survivals: Sequence[Sequence[float]], draft_seconds: float, budget: int) -> list[int]:
        plain_seconds = self.costs.plain.of(len(survivals)) * self._factors[False] / self._factors[True]
        return choose_lengths(
            survivals, self.costs.verifying, draft_seconds, plain_seconds=plain_seconds, most_drafts=budget
        )

    def _idle(self, requests: Sequence[object], most: Sequence[int], budget: int) -> list[int]:
        """No lengths, but now and then a trial of the answer whose last one is longest ago: nothing else would ever
        change its estimate.
        """
        lengths = [0] * len(requests)
        self._num_idle += 1
        able = [index for index, count in enumerate(most) if count > 0] if self._num_idle >= FIRST_WAIT else ()
        if able:
            records = [self._record(request) for request in requests]
            index = min(able, key=lambda index: records[index].last_trial)
            self._is_trial, self._num_idle = True, 0
            self._num_trials += 1
            records[index].last_trial = self._num_trials
            lengths[index] = min(self._trial_length, most[index], budget)
        else:
            self._num_resting = max(0, FIRST_WAIT - 1 - self._num_idle)
        return lengths

    def _judge(self) -> None:
        """Says once what drafts that fail look like."""
        self._is_judged = True
        first = self._kept[0] / self._tried[0]
        if first < _MISMATCHED:
            _LOG.warning(
                "%.0f %% of the first drafts of a block are right: the draft seems to belong to another model, or to "
                "need other rotary settings than it declares",
                100 * first,
            )
        elif self.num_drafts > 1 and self._tried[1] and self._kept[1] / self._tried[1] < _CLIFF * first:
            _LOG.warning(
                "%.0f %% of the first drafts of a block are right and %.0f %% of the second ones behind them: the "
                "draft's Markov head or the mask of its blocks seems wrong",
                100 * first,
                100 * self._kept[1] / self._tried[1],
            )


def _filled(lengths: Sequence[int], most: Sequence[int], budget: int) -> list[int]:
    """Lengths above 0 raised to the most there can be, those of the first answers first."""
    spare, filled = budget - sum(lengths), []
    for length, limit in zip(lengths, most, strict=True):
        more = min(limit - length, spare) if length > 0 else 0
        filled.append(length + more)
        spare -= more
    return filled

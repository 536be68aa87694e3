import logging
import random
from dataclasses import replace

import pytest

from perilune.speculative.length import StepTimes
from perilune.speculative.policy import FIRST_WAIT, TRIAL_LENGTH, Calibration, DraftPolicy, StepCosts

# rows nearly free, and rows that cost as much as steps
CHEAP = StepCosts(StepTimes((1, 64), (1.0, 1.6)), StepTimes((1, 64), (1.0, 1.6)), StepTimes((1, 64), (0.05, 0.2)))
DEAR = StepCosts(StepTimes((1, 64), (1.0, 64.0)), StepTimes((1, 64), (1.0, 64.0)), StepTimes((1, 64), (0.5, 1.0)))


class Answer:
    """Guesses of this answer are right with a chance."""

    def __init__(self, chance, seed=0):
        self.chance, self.random = chance, random.Random(seed)

    def verify(self, count):
        accepted = 0
        while accepted < count and self.random.random() < self.chance:
            accepted += 1
        return accepted


def simulate(policy, answers, num_steps, costs):
    """Runs steps that cost what `costs` say; gives seconds per token against plain steps, and how many drafted."""
    seconds = tokens = num_drafting = 0
    for _ in range(num_steps):
        lengths = [0] * len(answers)
        is_resting = policy.rests()
        if not is_resting:
            lengths = policy.lengths(answers, [policy.num_drafts] * len(answers), 1000)
        taken = costs.plain.of(len(answers))
        if any(lengths):
            taken = costs.verifying.of(len(answers) + sum(lengths)) + costs.drafting.of(len(answers))
            num_drafting += 1
        for answer, length in zip(answers, lengths, strict=True):
            accepted = answer.verify(length)
            tokens += 1 + accepted
            if length:
                policy.observe(answer, length, accepted)
        if not is_resting:
            policy.observe_step(len(answers), sum(length > 0 for length in lengths), sum(lengths), taken)
        seconds += taken
    return seconds / tokens / (costs.plain.of(len(answers)) / len(answers)), num_drafting


def policy_with(costs, **options):
    policy = DraftPolicy(7, **options)
    policy.costs = costs
    return policy


@pytest.mark.parametrize("num_answers", [1, 4, 16])
def test_right_guesses_make_tokens_cheaper(num_answers):
    answers = [Answer(0.9, seed) for seed in range(num_answers)]
    cost, num_drafting = simulate(policy_with(CHEAP), answers, 300, CHEAP)
    assert cost < 0.5
    assert num_drafting > 280


@pytest.mark.parametrize("num_answers", [1, 4, 16])
@pytest.mark.parametrize(("chance", "costs"), [(0.0, CHEAP), (0.02, CHEAP), (0.5, DEAR)])
def test_guessing_that_loses_stops_and_costs_less_than_three_percent(num_answers, chance, costs):
    answers = [Answer(chance, seed) for seed in range(num_answers)]
    policy = policy_with(costs)
    simulate(policy, answers, 400, costs)
    cost, num_drafting = simulate(policy, answers, 2000, costs)
    assert cost < 1.03
    assert num_drafting <= 1.1 * 2000 / FIRST_WAIT


def test_an_answer_that_becomes_predictable_is_guessed_again():
    policy, answer = policy_with(CHEAP), Answer(0.0)
    simulate(policy, [answer], 600, CHEAP)
    answer.chance = 1.0
    _, num_drafting = simulate(policy, [answer], 3000, CHEAP)
    assert num_drafting > 2000


def test_guesses_go_to_the_answers_where_they_are_right():
    policy, good, bad = policy_with(CHEAP), Answer(0.95), Answer(0.0)
    simulate(policy, [good, bad], 200, CHEAP)
    lengths = policy.lengths([good, bad], [7, 7], 1000)
    assert lengths[0] >= 5
    assert lengths[1] == 0


def test_steps_that_take_longer_than_measured_count():
    """A machine on which verifying became slow stops it, whatever was measured at the start."""
    policy, answer = policy_with(CHEAP), Answer(0.9)
    for _ in range(200):
        lengths = policy.lengths([answer], [7], 1000)
        if lengths[0]:
            policy.observe(answer, lengths[0], answer.verify(lengths[0]))
        policy.observe_step(1, int(lengths[0] > 0), lengths[0], 30.0 if lengths[0] else 1.0)
    assert sum(policy.lengths([answer], [7], 1000)[0] > 0 for _ in range(20)) <= 2


def test_estimates_that_are_wrong_cannot_lose_much():
    """Drafts that stay always and are said to be cheap, in steps that take four times as long as it is worth."""
    policy, answer, seconds, tokens = policy_with(CHEAP), Answer(1.0), 0.0, 0
    for number in range(8000):
        if number == 500:  # until then it learns what they cost
            seconds, tokens = 0.0, 0
        (length,) = policy.lengths([answer], [7], 1000)
        if length:
            policy.observe(answer, length, length)
        taken = 4.0 * (1 + length) if length else 1.0
        policy.observe_step(1, int(length > 0), length, taken)
        seconds, tokens = seconds + taken, tokens + 1 + length
    assert seconds / tokens < 1.04  # the share, and a last round that is not earned back yet


def test_bounds_are_kept():
    policy, answers = policy_with(CHEAP, gives_chances=True), [Answer(0.99, seed) for seed in range(3)]
    simulate(policy, answers, 50, CHEAP)
    assert policy.lengths(answers, [2, 0, 7], 1000) == [2, 0, 7]
    assert sum(policy.lengths(answers, [7, 7, 7], 5)) == 5
    assert policy.lengths(answers, [7, 7, 7], 0) == [0, 0, 0]
    assert policy.lengths([], [], 5) == []


def test_a_trial_is_short_and_goes_round():
    policy, answers = policy_with(DEAR), [Answer(0.0, seed) for seed in range(3)]
    tried = []
    for _ in range(1000):
        lengths = policy.lengths(answers, [7, 7, 7], 1000)
        if any(lengths):
            tried.append(lengths)
            assert sorted(lengths) == [0, 0, TRIAL_LENGTH]
            index = lengths.index(TRIAL_LENGTH)
            policy.observe(answers[index], TRIAL_LENGTH, 0)
    assert len({tuple(lengths) for lengths in tried[:3]}) == 3


def test_made_guesses_are_trimmed_by_what_their_maker_thinks_and_how_often_it_was_right():
    costs = replace(CHEAP, verifying=StepTimes((1, 64), (1.0, 4.0)))
    policy, answer = policy_with(costs, gives_chances=True), Answer(1.0)
    simulate(policy, [answer], 20, costs)
    policy.lengths([answer], [7], 1000)
    (sure,) = policy.trimmed([(0.95,) * 7])
    assert sure == 7
    assert policy.trimmed([(0.95, 0.95, 0.001, 0.9, 0.9, 0.9, 0.9)]) == [2]
    for _ in range(500):  # it is sure of itself and wrong
        policy.observe(answer, 1, 0, (0.95,))
    policy.lengths([answer], [7], 1000)
    assert policy.trimmed([(0.95,) * 7])[0] < 2


def test_chances_are_calibrated():
    calibration, source = Calibration(), random.Random(0)
    assert calibration.of(0.85) == pytest.approx(0.85)
    for _ in range(2000):
        calibration.observe(0.85, is_kept=source.random() < 0.4)
    assert calibration.of(0.85) == pytest.approx(0.4, abs=0.05)
    assert calibration.of(0.15) == pytest.approx(0.15)
    for edge in (0.0, 1.0, float("nan"), -1.0):
        assert 0.0 <= calibration.of(edge) <= 1.0


@pytest.mark.parametrize(
    ("accepted", "words"),
    [([0] * 300, "another model"), ([1] * 300, "Markov"), ([3] * 300, None)],
    ids=["mismatched", "cliff", "fine"],
)
def test_a_draft_model_that_fails_is_reported_once_with_the_likely_cause(accepted, words, caplog):
    policy, answer = DraftPolicy(7, is_model=True), Answer(1.0)
    with caplog.at_level(logging.WARNING):
        for count in accepted:
            policy.observe(answer, 7, count)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == (words is not None)
    assert all(words in message for message in messages)


def test_copies_of_the_text_that_fail_are_nobodys_fault(caplog):
    policy, answer = DraftPolicy(7), Answer(1.0)
    for _ in range(300):
        policy.observe(answer, 7, 0)
    assert not caplog.records


def test_what_was_verified_is_counted():
    policy, answer = DraftPolicy(3), Answer(1.0)
    policy.observe(answer, 3, 1)
    policy.observe(answer, 2, 2)
    policy.observe_step(1, 1, 3, 1.0)
    policy.observe_step(1, 0, 0, None)
    policy.observe_step(0, 0, 0, 1.0)
    stats = policy.stats()
    assert (stats.tried, stats.kept) == ((2, 2, 0), (2, 1, 0))
    assert (stats.num_rounds, stats.num_drafted, stats.num_accepted) == (2, 5, 3)
    assert (stats.num_steps, stats.num_plain_steps) == (2, 1)


def test_whether_drafting_can_pay_is_seen_from_what_steps_cost():
    assert CHEAP.can_pay(7)
    assert not DEAR.can_pay(7)
    assert not replace(CHEAP, drafting=StepTimes((1, 64), (9.0, 99.0))).can_pay(7)
    # for one answer it pays, for many it does not
    times = StepTimes((1, 8, 64), (1.0, 1.0, 8.0))
    assert StepCosts(times, times, StepTimes((1, 64), (0.0, 0.0))).can_pay(7)


def test_a_policy_that_is_off_rests_and_one_that_is_forced_never_does():
    off, forced = policy_with(CHEAP), policy_with(DEAR)
    off.is_off = forced.is_forced = True
    assert all(off.rests() for _ in range(50))
    assert off.stats().num_plain_steps == off.stats().num_steps == 50
    assert not off.wants_time
    for _ in range(50):
        assert not forced.rests()
        assert forced.lengths([object(), object()], [7, 3], 1000) == [7, 3]
        assert forced.lengths([object(), object()], [7, 7], 9) == [7, 2]
        assert forced.lengths([object(), object()], [7, 7], 1) == [1, 0]
        assert forced.lengths([object(), object()], [0, 7], 1) == [0, 0]
        assert forced.lengths([object(), object()], [7, 7], 0) == [0, 0]
        assert forced.trimmed([(0.01,) * 5]) == [5]


def test_steps_that_are_often_far_dearer_than_usual_are_counted_as_lost():
    policy, answer, lost = policy_with(CHEAP), Answer(0.55), 0.0
    for step in range(3000):
        if policy.rests():
            continue
        (length,) = policy.lengths([answer], [7], 1000)
        if length == 0:
            policy.observe_step(1, 0, 0, 1.0)
            continue
        accepted = answer.verify(length)
        policy.observe(answer, length, accepted)
        usual = CHEAP.verifying.of(1 + length) + CHEAP.drafting.of(1)
        seconds = usual * (3.5 if step % 4 else 1.0)
        policy.observe_step(1, 1, length, seconds)
        lost += seconds - (1 + accepted)
    assert lost < 0.03 * 3000

import random
from itertools import product

import pytest

from perilune.speculative.length import Acceptance, StepTimes, alike, choose_lengths

FLAT = StepTimes((1, 64), (1.0, 1.0))  # memory-bound: rows cost nothing
STEEP = StepTimes((1, 64), (1.0, 64.0))  # compute-bound: a row costs a row


def rate(lengths, survivals, times, draft_seconds):
    tokens = sum(1 + sum(survival[:length]) for survival, length in zip(survivals, lengths, strict=True))
    drafting = draft_seconds if any(lengths) else 0.0
    return tokens / (drafting + times.of(len(lengths) + sum(lengths)))


@pytest.mark.parametrize("seed", range(20))
def test_no_other_lengths_promise_more_than_the_margin_above(seed):
    source = random.Random(seed)
    times = StepTimes.measured([(rows, 1 + source.random() * 0.2 * rows) for rows in (1, 2, 4, 8, 16)])
    survivals = [sorted((source.random() for _ in range(3)), reverse=True) for _ in range(3)]
    draft_seconds = source.random() * 0.5
    chosen = choose_lengths(survivals, times, draft_seconds)
    most = max(rate(lengths, survivals, times, draft_seconds) for lengths in product(range(4), repeat=3))
    own = rate(chosen, survivals, times, draft_seconds)
    assert own >= most / (1.03 if not any(chosen) else 1.0) - 1e-12


def test_free_rows_take_every_draft_and_dear_ones_none():
    survivals = [[0.9, 0.8, 0.7], [0.5, 0.2, 0.1]]
    assert choose_lengths(survivals, FLAT, 0.0) == [3, 3]
    assert choose_lengths(survivals, STEEP, 0.0) == [0, 0]


def test_rows_go_to_the_requests_whose_drafts_stay():
    times = StepTimes((1, 2, 8, 16), (1.0, 1.0, 1.3, 9.0))
    lengths = choose_lengths([[0.95, 0.9, 0.85, 0.8, 0.75, 0.7], [0.05, 0.01, 0.0, 0.0, 0.0, 0.0]], times, 0.0)
    assert lengths[0] == 6
    assert lengths[1] == 0


def test_drafts_that_cost_more_than_they_bring_are_not_made():
    survivals = [[0.6, 0.3]]
    assert choose_lengths(survivals, FLAT, 0.1) == [2]
    assert choose_lengths(survivals, FLAT, 0.9) == [0]


def test_a_gain_within_the_margin_is_left():
    assert choose_lengths([[0.02]], FLAT, 0.0) == [0]
    assert choose_lengths([[0.05]], FLAT, 0.0) == [1]


def test_requests_without_drafts_are_counted_and_get_none():
    assert choose_lengths([[], [0.9]], FLAT, 0.0) == [0, 1]
    assert choose_lengths([[], []], FLAT, 0.0) == [0, 0]


def test_estimates_come_to_what_happens_by_place():
    source, acceptance = random.Random(0), Acceptance(4)
    truth, sums, count = [0.9, 0.7, 0.4, 0.8], [0.0] * 4, 0
    for index in range(4000):
        accepted = 0
        while accepted < 4 and source.random() < truth[accepted]:
            accepted += 1
        acceptance.observe(4, accepted)
        if index >= 100:
            sums, count = [a + b for a, b in zip(sums, acceptance.rates, strict=True)], count + 1
    assert [total / count for total in sums] == pytest.approx(truth, abs=0.04)
    assert acceptance.survival[1] == pytest.approx(acceptance.rates[0] * acceptance.rates[1])


def test_places_that_were_not_reached_are_not_judged():
    acceptance = Acceptance(4)
    before = acceptance.rates
    acceptance.observe(4, 1)
    assert acceptance.rates[0] > before[0]
    assert acceptance.rates[1] < before[1]
    after = acceptance.rates
    assert after[2] == after[3] == after[1]  # as the place before them, which is all that is known
    acceptance.observe(1, 1)
    assert acceptance.rates[3] == acceptance.rates[2] == acceptance.rates[1]


def test_a_place_is_tried_that_comes_behind_one_that_holds():
    """Nothing is known of the second place while one draft is verified; the first being sure makes it worth a try."""
    times, acceptance = StepTimes((1, 2, 4, 8), (1.0, 1.05, 1.9, 2.6)), Acceptance(7)
    for _ in range(60):
        (length,) = choose_lengths([acceptance.survival], times, 0.0)
        acceptance.observe(length, length)
    assert length == 7


def test_a_request_better_than_others_at_one_place_is_taken_to_be_so_at_the_next():
    usual = Acceptance(3)
    for index in range(60):
        usual.observe(3, 3 if index % 3 == 0 else 0)
    mine = Acceptance(3, usual)
    for _ in range(20):
        mine.observe(1, 1)
    assert mine.rates[0] > 1.5 * usual.rates[0]
    assert mine.rates[1] > min(0.99, 1.4 * usual.rates[1])


def test_a_new_request_starts_from_what_others_saw():
    all_requests = Acceptance(3)
    for _ in range(50):
        all_requests.observe(3, 0)
    assert Acceptance(3, all_requests).rates == pytest.approx(all_requests.rates)
    assert Acceptance(3, all_requests).rates[0] < 0.1


def test_a_text_that_becomes_predictable_is_drafted_again():
    """Estimates forget: where drafts failed for long, some that stay bring drafting back."""
    acceptance = Acceptance(3)
    for _ in range(200):
        acceptance.observe(3, 0)
    times = StepTimes((1, 8), (1.0, 1.7))
    assert choose_lengths([acceptance.survival], times, 0.05) == [0]
    for _ in range(20):
        acceptance.observe(3, 3)
    assert choose_lengths([acceptance.survival], times, 0.05)[0] > 0


def test_times_between_and_beyond_what_was_measured():
    times = StepTimes.measured([(4, 0.5), (8, 4.0), (1, 1.0), (8, 3.0), (8, 3.5)])
    assert times.seconds == (1.0, 1.0, 3.0)  # four rows cannot cost less than one
    assert [times.of(rows) for rows in (1, 2, 4, 6, 8, 10)] == [1.0, 1.0, 1.0, 2.0, 3.0, 4.0]


def test_guesses_are_cut_to_few_shapes():
    assert alike([0, 5, 0]) == [0, 3, 0]
    assert alike([4, 0, 4, 4]) == [3, 0, 3, 0]
    assert alike([7, 6, 7]) == [7, 0, 7]
    assert alike([7, 7, 7]) == [7, 7, 7]
    assert alike([3, 3, 7]) == [3, 3, 3]
    assert alike([1, 2, 0]) == [1, 1, 0]
    assert alike([2]) == [1]
    assert alike([0, 0]) == [0, 0]
    assert alike([]) == []


def test_cut_guesses_are_never_longer_and_all_alike():
    source = random.Random(5)
    for _ in range(300):
        lengths = [source.randrange(9) for _ in range(source.randrange(1, 12))]
        kept = alike(lengths)
        assert all(own <= made for own, made in zip(kept, lengths, strict=True))
        above = [own for own in kept if own > 0]
        assert len(set(above)) <= 1
        assert len(above) == len(lengths) or len(above) & (len(above) - 1) == 0
        assert any(above) == any(lengths)

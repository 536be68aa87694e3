from hypothesis import given
from hypothesis import strategies as st

from perilune.engine.policy.shares import Claim, share


def claims(*pending, priority=0):
    return [Claim(priority, count, count) for count in pending]


def test_a_lone_prompt_has_the_whole_budget():
    assert share(100, claims(1000)) == [100]
    assert share(100, claims(7)) == [7]


def test_a_short_prompt_is_computed_at_once_beside_longer_ones():
    assert share(100, claims(10**5, 10**5, 30)) == [50, 20, 30]


def test_the_oldest_has_half_however_many_short_ones_there_are():
    assert share(100, claims(10**5, *[10] * 20)) == [50, *[10] * 5, *[0] * 15]


def test_what_one_half_leaves_the_other_takes():
    assert share(100, claims(10**5, 30)) == [70, 30]
    assert share(100, claims(10, 60, 60)) == [10, 60, 30]


def test_a_budget_of_one_goes_to_the_oldest():
    assert share(1, claims(9, 2)) == [1, 0]


def test_a_prompt_that_waits_for_a_picture_takes_nothing_and_is_not_the_oldest():
    waiting, half = Claim(0, 50, 0), Claim(0, 80, 20)
    assert share(100, [waiting, half, *claims(500)]) == [0, 20, 80]


def test_a_lower_priority_gets_only_what_the_others_leave():
    urgent, later = Claim(-1, 80, 80), Claim(0, 5, 5)
    assert share(60, [urgent, later]) == [60, 0]
    assert share(82, [urgent, later]) == [80, 2]


some_claims = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 50), st.integers(0, 50)), max_size=9)


@given(st.integers(0, 80), some_claims)
def test_nothing_is_wasted_and_nobody_gets_more_than_there_is(budget, drawn):
    asked = sorted((Claim(p, n, min(n, ready)) for p, n, ready in drawn), key=lambda claim: claim.priority)
    given_out = share(budget, asked)
    assert all(0 <= got <= claim.num_ready for got, claim in zip(given_out, asked, strict=True))
    assert sum(given_out) == min(budget, sum(claim.num_ready for claim in asked))


@given(st.integers(1, 200), st.sampled_from((1, 16, 64)), st.integers(0, 30), st.integers(0, 150))
def test_the_oldest_gets_on_under_any_budget_and_grain_however_many_short_prompts_there_are(
    budget, grain, num_short, start
):
    long = Claim(0, 10_000, 10_000, start)
    given_out = share(budget, [long, *[Claim(0, 10, 10)] * num_short], grain)
    assert given_out[0] >= 1
    assert min(given_out) >= 0
    assert sum(given_out) <= budget
    if budget >= grain:
        assert (start + given_out[0]) % grain == 0

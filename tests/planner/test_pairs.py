import pytest

from perilune.planner.pairs import EXACT, all_pairs, all_verdicts, released_config

PAIRS, VERDICTS = all_pairs(), all_verdicts()
EXACT_PAIRS = {"1", "3", "4", "6", "7", "9", "10", "11", "12", "14", "15", "16", "17", "22"}
CLOSE_PAIRS = {"2", "5", "13", "18", "21", "23", "29"}


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair.number}: {pair.claim}")
def test_a_published_figure_is_met_or_shown_as_open(pair):
    assert pair.holds, f"{pair.published} published, {pair.computed} computed"


@pytest.mark.parametrize("verdict", VERDICTS, ids=lambda verdict: verdict.claim)
def test_a_published_statement_is_met_or_shown_as_open(verdict):
    assert verdict.holds


def test_the_pairs_called_exact_are_kept_within_one_percent():
    exact = [pair for pair in PAIRS if pair.number in EXACT_PAIRS]
    assert {pair.number for pair in exact} == EXACT_PAIRS
    assert all(abs(pair.error) <= EXACT and pair.kind != "open" for pair in exact)


def test_the_close_ones_are_there_and_not_open():
    close = [pair for pair in PAIRS if pair.number in CLOSE_PAIRS]
    assert {pair.number for pair in close} == CLOSE_PAIRS
    assert all(pair.kind == "close" and pair.tolerance <= 0.07 for pair in close)


def test_open_ones_disagree():
    """An open pair that came to agree should be closed."""
    assert {pair.number for pair in PAIRS if pair.kind == "open"} == {"19", "25", "27"}
    assert all(abs(pair.error) > 0.1 for pair in PAIRS if pair.kind == "open")
    assert all(verdict.published != verdict.computed for verdict in VERDICTS if verdict.is_open)


def test_the_released_configurations_are_those_of_the_tests(released_configs):
    assert {arch: released_config(arch) for arch in ("k3", "k31")} == released_configs

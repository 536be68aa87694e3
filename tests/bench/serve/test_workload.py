import itertools

import pytest

from perilune.bench.serve.workload import NUM_BYTE_IDS, TokenSource, Workload, build_sessions
from perilune.errors import ConfigError


def sessions(source=None, **settings):
    return build_sessions(Workload(**settings), source or TokenSource())


def test_equal_settings_give_equal_conversations_and_another_seed_others():
    settings = {"num_prompts": 5, "turns": 3, "range_ratio": 0.5, "request_rate": 2.0}
    assert sessions(**settings) == sessions(**settings)
    assert sessions(**settings) != sessions(**settings, seed=1)


def test_lengths_are_as_asked_and_prompts_differ_from_their_first_block():
    found = sessions(num_prompts=20, input_len=30, output_len=7)
    assert {(len(s.turns), len(s.turns[0].token_ids), s.turns[0].max_tokens) for s in found} == {(1, 30, 7)}
    assert len({s.turns[0].token_ids[:16] for s in found}) == 20
    assert all(0 <= token_id < NUM_BYTE_IDS for s in found for token_id in s.turns[0].token_ids)


def test_lengths_vary_within_their_ratio():
    found = sessions(num_prompts=200, input_len=100, output_len=10, range_ratio=0.3)
    inputs = [len(session.turns[0].token_ids) for session in found]
    outputs = [session.turns[0].max_tokens for session in found]
    assert (min(inputs), max(inputs)) == (70, 130)
    assert (min(outputs), max(outputs)) == (7, 13)


def test_conversations_share_the_prefixes_and_nothing_else():
    found = sessions(num_prompts=40, prefix_len=50, num_prefixes=3, input_len=20)
    prompts = [session.turns[0].token_ids for session in found]
    assert {len(prompt) for prompt in prompts} == {70}
    assert len({prompt[:50] for prompt in prompts}) == 3
    assert len({prompt[50:] for prompt in prompts}) == 40


def test_later_turns_add_a_tool_result_after_a_pause():
    (found,) = sessions(num_prompts=1, turns=3, input_len=20, output_len=5, tool_len=9, tool_pause_s=1.5)
    assert [(len(turn.token_ids), turn.max_tokens, turn.pause_s) for turn in found.turns] == [
        (20, 5, 0.0),
        (9, 5, 1.5),
        (9, 5, 1.5),
    ]
    assert found.num_tokens == 20 + 9 + 9 + 15


def test_poisson_arrivals_come_at_the_rate_with_the_spread_of_one_and_leave_the_prompts_alone():
    closed, slow, fast = (sessions(num_prompts=4000, request_rate=rate, input_len=2) for rate in (None, 2.0, 200.0))
    assert {session.start_s for session in closed} == {None}
    starts = [session.start_s for session in slow]
    gaps = [later - earlier for earlier, later in itertools.pairwise(starts)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert starts[0] == 0.0
    assert mean == pytest.approx(0.5, rel=0.05)
    assert deviation == pytest.approx(mean, rel=0.1)
    assert [session.start_s for session in fast] == pytest.approx([start / 100 for start in starts])
    assert [s.turns for s in closed] == [s.turns for s in slow] == [s.turns for s in fast]


def test_prompts_are_cut_from_a_text_that_may_be_shorter_than_they_are():
    found = sessions(TokenSource(text_ids=[5, 6, 7]), num_prompts=9, input_len=8)
    for session in found:
        ids = session.turns[0].token_ids
        assert len(ids) == 8
        assert all((later - earlier) % 3 == 1 for earlier, later in itertools.pairwise(ids))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_prompts": 0}, "num_prompts is 0; it must be at least 1"),
        ({"request_rate": 0.0}, "request_rate is 0.0; it must be above 0"),
        ({"request_rate": float("inf")}, "request_rate is inf"),
        ({"range_ratio": 1.0}, "range_ratio is 1.0; it must be at least 0 and below 1"),
        ({"tool_pause_s": -1.0}, "tool_pause_s is -1.0; it must be at least 0"),
        ({"turns": 0}, "turns is 0"),
    ],
)
def test_a_wrong_setting_is_an_error_that_names_it(settings, words):
    with pytest.raises(ConfigError, match=words):
        Workload(**settings)


def test_a_vocabulary_of_one_is_refused():
    with pytest.raises(ConfigError, match="vocab_size is 1"):
        TokenSource(1)

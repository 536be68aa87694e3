import numpy as np
import pytest

from perilune.bench.serve.driver import Played, Record
from perilune.bench.serve.figures import make_report, percentile, read_goals, render_report, summarise
from perilune.errors import ConfigError


def record(*arrivals_s, turn=0, prompt=10, cached=0, error=None):
    return Record(turn, 0.0, prompt, cached, list(range(len(arrivals_s))), list(arrivals_s), error)


def report(records, goals=(), *, duration_s=10.0, abandoned=0):
    return make_report(Played(tuple(records), duration_s, abandoned, 3, (0.0, 0.001), 2.5), read_goals(goals))


@pytest.mark.parametrize("count", [1, 2, 7, 100])
def test_summaries_agree_with_numpy(count):
    values = np.random.default_rng(count).exponential(size=count)
    found = summarise(list(values))
    assert (found.mean, found.median, found.std, found.p99) == pytest.approx(
        (values.mean() * 1e3, np.median(values) * 1e3, values.std() * 1e3, np.percentile(values, 99) * 1e3)
    )
    assert percentile(list(values), 37) == pytest.approx(np.percentile(values, 37))


def test_whole_answers_add_up_and_failures_are_apart():
    found = report(
        [record(1.0, 1.5, 2.5, cached=4), record(2.0, prompt=30), record(error="429 busy"), record(error="429 busy")],
        abandoned=5,
    ).as_json()
    assert {name: found[name] for name in ("completed", "failed", "abandoned")} == {
        "completed": 2,
        "failed": 2,
        "abandoned": 5,
    }
    assert found["errors"] == {"429 busy": 2}
    assert (found["total_input_tokens"], found["total_output_tokens"], found["total_cached_tokens"]) == (40, 4, 4)
    assert found["cached_share"] == 0.1
    assert (found["request_throughput"], found["output_throughput"], found["total_token_throughput"]) == (0.2, 0.4, 4.4)
    assert (found["mean_ttft_ms"], found["median_e2el_ms"]) == (1500.0, 2250.0)
    assert found["mean_itl_ms"] == 750.0
    assert found["mean_tpot_ms"] == 750.0, "an answer of one token has no time per further token"
    assert found["request_goodput"] is None
    assert (found["client_cpu_share"], found["max_concurrent_requests"]) == (0.25, 3)


def test_names_are_those_of_vllms_benchmark():
    names = {f"{kind}_{m}_ms" for kind in ("mean", "median", "std", "p99") for m in ("ttft", "tpot", "itl", "e2el")}
    names |= {"duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput"}
    names |= {"request_goodput", "output_throughput", "total_token_throughput", "max_concurrent_requests"}
    assert names <= set(report([record(1.0)]).as_json())


@pytest.mark.parametrize(
    ("goals", "num_good"),
    [
        (["ttft:1500"], 2),
        (["ttft:999"], 0),
        (["tpot:400"], 2),
        (["e2el:1000"], 1),
        (["ttft:1500", "tpot:750", "e2el:2500"], 2),
        (["ttft:1000", "e2el:2499"], 1),
    ],
)
def test_goodput_counts_answers_that_met_every_goal(goals, num_good):
    records = [record(1.0, 1.5, 2.5), record(1.0), record(5.0, 5.1), record(0.1, error="500")]
    assert report(records, goals).request_goodput == pytest.approx(num_good / 10)


@pytest.mark.parametrize("text", ["ttft", "ttft:", "ttft:x", "itl:5", "ttft:0", "ttft:-1", "ttft:inf", "ttft:nan", ""])
def test_a_goal_that_cannot_be_read_names_what_can(text):
    with pytest.raises(ConfigError, match="ttft, tpot, e2el"):
        read_goals([text])


def test_a_goal_counts_once():
    assert read_goals(["ttft:5", "e2el:1e3"]) == {"ttft": 5.0, "e2el": 1000.0}
    with pytest.raises(ConfigError, match="at most once"):
        read_goals(["ttft:5", "ttft:6"])


def test_turns_are_told_apart():
    found = report([record(1.0), record(3.0), record(0.5, turn=1, prompt=20, cached=15)])
    assert found.median_ttft_ms_by_turn == (2000.0, 500.0)
    assert found.cached_share_by_turn == (0.0, 0.75)
    lines = render_report(found).splitlines()
    assert [line.split() for line in lines if line.startswith(("1 ", "2 "))] == [
        ["1", "2000.00", "0.0%"],
        ["2", "500.00", "75.0%"],
    ]


def test_nothing_answered_is_a_report_too():
    found = report([record(error="ConnectError")])
    assert found.as_json()["mean_ttft_ms"] is None
    assert "failed: ConnectError" in render_report(found)

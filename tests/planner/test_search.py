from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.errors import ConfigError
from perilune.parallel.mesh import Placement
from perilune.planner.hardware import Figure, load_hardware, probe
from perilune.planner.memory import stage_memories
from perilune.planner.precision import Precision
from perilune.planner.search import Plan, Question, assess, search

MILLION = 1048576


def with_memory(hardware, num_bytes):
    return replace(hardware, memory=Figure(num_bytes, "", "", "probed"))


@settings(deadline=None, max_examples=100)
@given(
    size=st.integers(10**6, 10**8),
    more=st.integers(0, 10**8),
    shape=st.sampled_from([(1, 1, 1), (4, 1, 1), (2, 2, 1), (2, 1, 2)]),
    dense=st.sampled_from(["bf16", "fp8"]),
    context=st.integers(1, 10**6),
    concurrency=st.integers(1, 64),
)
def test_more_memory_never_refuses_a_plan_that_fitted(small, size, more, shape, dense, context, concurrency):
    tp, dp, pp = shape
    hardware = load_hardware("b200")
    engine = replace(hardware.engines[0], reserve=None)
    question, placement = Question(1, context, concurrency), Placement(tp=tp, dp=dp, pp=pp)
    before, after = (
        assess(small, with_memory(hardware, num_bytes), engine, placement, Precision(dense=dense), question)
        for num_bytes in (size, size + more)
    )
    if isinstance(before, Plan):
        assert isinstance(after, Plan)
        assert after.num_requests >= before.num_requests
        assert after.longest_context >= before.longest_context
        assert after.num_tokens >= before.num_tokens


def test_a_plan_that_fits_really_holds_what_was_asked(k31):
    question = Question(1, 500_000, 3)
    for plan in search(k31, load_hardware("mi355x"), question).plans:
        requests = -(-3 // plan.placement.dp)
        assert all(stage.free_bytes >= requests * stage.request_bytes(500_000) for stage in plan.stages)
        assert plan.num_requests >= 3
        assert plan.longest_context >= 500_000


def test_every_placement_is_a_plan_or_has_a_reason(k31):
    hardware = load_hardware("mi355x")
    result = search(k31, hardware, Question())
    assert all(refused.reason and refused.constraint and refused.label for refused in result.refused)
    labels = {plan.placement.label for plan in result.plans}
    assert {"tp8", "tp8 dcp8"} <= labels
    tp4 = [refused for refused in result.refused if refused.label.startswith("ATOM, tp4, ")]
    assert {refused.constraint for refused in tp4} == {"weights"}
    assert "387.29 GB of 309.22 GB" in tp4[0].reason


def test_published_layouts_come_first(k31):
    plans = search(k31, load_hardware("mi355x"), Question()).plans
    flags = [plan.is_published for plan in plans]
    assert flags == sorted(flags, reverse=True)
    assert {plan.placement.tp for plan in plans if plan.is_published} == {8}


@pytest.mark.parametrize(
    ("arch", "name", "reason"),
    [
        ("k31", "atlas-a2", "Huawei lists A2 as unsupported for K3.1 Pro"),
        ("k31", "ascend-950pr", "Huawei lists 950PR as unsupported for K3.1 Pro"),
        ("k3", "mi300x", "1,536 GB cannot hold the 1,561 GB checkpoint"),
    ],
)
def test_excluded_platforms_are_refused_with_the_vendors_reason(released_configs, arch, name, reason):
    result = search(released_configs[arch], load_hardware(name), Question())
    assert result.plans == ()
    assert any(refused.constraint == "vendor" and reason in refused.reason for refused in result.refused)


@pytest.mark.parametrize("name", ["mi300x", "mi325x"])
def test_fp4_arithmetic_is_refused_where_the_chip_has_none(k3, name):
    result = search(k3, load_hardware(name), Question(2))
    assert result.plans
    assert any("gfx942 has no scaled-FP4 instruction" in refused.reason for refused in result.refused)


def test_exclusions_hold_for_their_model_only(k3):
    assert search(k3, load_hardware("atlas-a2"), Question(8)).plans
    assert search(k3, load_hardware("ascend-950pr"), Question(4)).plans


def test_int4_experts_are_refused_above_tp_16(k3):
    result = search(k3, load_hardware("atlas-800i-a3"), Question(4))
    reasons = {refused.reason for refused in result.refused if "tp32" in refused.label}
    assert any(reason.startswith("tp above 16 is refused by vLLM Ascend") for reason in reasons)


def test_the_constraint_that_fails_is_named(k31):
    hardware = load_hardware("mi355x")
    engine, placement, precision = (
        hardware.engines[0],
        Placement(tp=8),
        Precision(dense="fp8", latent="fp8", index="fp8"),
    )

    def constraint(question, machine=hardware):
        return assess(k31, machine, engine, placement, precision, question).constraint

    stage = stage_memories(k31, hardware, engine, placement, precision)[0]
    assert constraint(Question(1, MILLION, 5)) == "cache"
    assert constraint(Question(1, 1, 4000)) == "states"
    assert constraint(Question(), with_memory(hardware, stage.resident_bytes - 1)) == "weights"
    assert constraint(Question(), with_memory(hardware, stage.resident_bytes + 1)) == "runtime"


def test_the_binding_constraint_turns_from_states_to_rows_with_length(k31):
    binding = {
        context: search(k31, load_hardware("mi355x"), Question(1, context)).plans[0].binding
        for context in (1024, MILLION)
    }
    assert binding == {1024: "state slots", MILLION: "cache rows"}


def test_perilune_runs_on_one_machine_as_one_process(k31):
    (first, *_) = search(k31, load_hardware("dual-epyc-turin"), Question()).plans
    assert (first.engine.name, first.placement, first.precision) == ("perilune", Placement(), Precision())
    assert search(k31, probe(memory_bytes=20 * 2**30, num_cpus=2), Question()).plans == ()


@pytest.mark.parametrize(
    ("question", "message"),
    [
        (Question(0), "--nodes is 0; allowed for gb300: 1 to 18"),
        (Question(-1), "--nodes is -1"),
        (Question(19), "--nodes is 19"),
        (Question(1, 0), "--context is 0; allowed: 1 to 1048576"),
        (Question(1, 10**12), "--context is 1000000000000"),
        (Question(1, 1, 0), "--concurrency is 0; allowed: 1 to 65536"),
        (Question(1, 1, 10**9), "--concurrency is 1000000000"),
    ],
)
def test_a_question_without_sense_is_refused_with_what_is_allowed(k31, question, message):
    with pytest.raises(ConfigError, match=message):
        search(k31, load_hardware("gb300"), question)


def test_a_machine_that_is_too_small_is_told_what_streaming_needs(k31):
    (plain, *_) = search(k31, load_hardware("desktop-nvme"), Question()).refused
    assert plain.constraint == "weights"
    assert "with experts read from disk and dense weights in int8, perilune serve needs 66.85 GB" in plain.reason
    small = with_memory(load_hardware("desktop-nvme"), 60 * 10**9)
    assert all("read from disk" not in refused.reason for refused in search(k31, small, Question()).refused)

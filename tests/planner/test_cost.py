import pytest

from perilune.parallel.mesh import Placement
from perilune.planner.cost import expert_share, handoff, token_time
from perilune.planner.hardware import load_hardware
from perilune.planner.memory import stage_memories
from perilune.planner.precision import Precision


def time_of(config, name, placement, precision, context=1, concurrency=1):
    hardware = load_hardware(name)
    stages = stage_memories(config, hardware, hardware.engines[0], placement, precision)
    return token_time(config, hardware, placement, precision, stages, context, concurrency)


@pytest.mark.parametrize(
    ("name", "tp", "dense", "gigabytes"),
    [
        ("b300", 8, "bf16", 26.4),
        ("gb300", 16, "bf16", 18.5),
        ("mi355x", 8, "fp8", 20.3),
        ("rtx-pro-6000", 16, "bf16", 8.6),
    ],
)
def test_bytes_of_a_token_are_those_of_the_published_roofline(k3, name, tp, dense, gigabytes):
    found = time_of(k3, name, Placement(tp=tp), Precision(dense=dense, latent="fp8"))
    # the roofline of the sources neglects the low-rank projections that every rank repeats, and the state
    assert found.bytes_per_rank / 1e9 == pytest.approx(gigabytes, rel=0.06)
    assert found.bound == "memory bandwidth"


def test_expected_time_is_ideal_over_the_class(k3):
    found = time_of(k3, "b300", Placement(tp=8), Precision(latent="fp8"))
    assert found.expected_s == pytest.approx(found.ideal_s / 0.40)
    assert time_of(k3, "h200", Placement(tp=16), Precision()).expected_s is None


def test_no_bandwidth_no_time(k3):
    assert time_of(k3, "atlas-a2", Placement(tp=8, dp=8, ep=64), Precision("int4", "int8")) is None


def test_sparse_attention_shortens_a_long_context(k3, k31):
    long = 1048576
    precision = Precision(latent="fp8", index="fp8")
    extra = [
        time_of(config, "b300", Placement(tp=8), precision, long).bytes_per_rank
        - time_of(config, "b300", Placement(tp=8), precision, 1).bytes_per_rank
        for config in (k3, k31)
    ]
    assert extra[0] == (long - 1) * 13824
    assert extra[1] == (2048 - 1) * 13824 + long * 3168


def test_more_requests_touch_more_experts_up_to_all(k3):
    assert expert_share(k3, 1) == pytest.approx(16 / 896)
    shares = [expert_share(k3, count) for count in (1, 8, 64, 4096)]
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1)


def test_many_requests_are_bound_by_arithmetic(k3):
    found = time_of(k3, "h20-3e", Placement(tp=16), Precision(), concurrency=65536)
    assert found.bound == "arithmetic"


def test_converting_hit_experts_multiplies_their_bytes(k3):
    stored = time_of(k3, "mtt-s5000", Placement(tp=32), Precision("mxfp4", "fp8"))
    converted = time_of(k3, "mtt-s5000", Placement(tp=32), Precision("mxfp4_via_fp8", "fp8"))
    experts = 92 * 16 * 17547264 / 32
    assert converted.bytes_per_rank - stored.bytes_per_rank == pytest.approx(experts * 2 / 0.53125, rel=0.001)


def test_a_handoff_moves_rows_and_one_state(k31):
    moved = handoff(k31, Precision(latent="fp8", index="fp8"), 131072)
    assert (moved.rows_bytes, moved.state_bytes) == (131072 * 16992, 449372160)
    assert moved.seconds["4 x 200G"] == pytest.approx(0.026 + 0.005, rel=0.05)
    assert moved.seconds["8 x 400G"] == pytest.approx(0.012 + 0.0024, rel=0.05)

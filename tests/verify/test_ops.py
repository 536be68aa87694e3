import pytest
import torch

from perilune import ops
from perilune.errors import ConfigError
from perilune.ops import _native
from perilune.ops.registry import all_ops
from perilune.ops.tables import CASE_TABLES
from perilune.verify.ops import Ran, Skipped, check_case, verify_ops

ops.load_all()


@pytest.fixture
def inductor(monkeypatch):
    """Registers an implementation for one test, by a backend that has none."""

    def add(op_name, call, supports=lambda _: None):
        op = all_ops()[op_name]
        monkeypatch.setattr(op, "_implementations", dict(op._implementations))
        op.register("inductor", call, supports)

    return add


def test_a_right_implementation_passes_every_case(inductor):
    inductor("rms_norm", all_ops()["rms_norm"].reference)
    seen = []
    report = verify_ops("rms_norm", "inductor", lambda *done: seen.append(done))
    num_cases = len(CASE_TABLES["rms_norm"].cases)
    assert (len(report.ran), report.skipped, report.failed) == (num_cases, [], [])
    assert all(run.error == 0 for run in report.ran)
    assert seen == [(done, num_cases) for done in range(1, num_cases + 1)]


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda x, weight, eps: 1.01 * all_ops()["rms_norm"].reference(x, weight, eps), pytest.approx(0.01, rel=0.5)),
        (lambda x, weight, eps: x.double(), float("inf")),
        (lambda x, weight, eps: torch.empty_like(x), float("inf")),
        (lambda x, weight, eps: (x, x), float("inf")),
    ],
    ids=["one per cent off", "another dtype", "memory that nobody wrote", "two results"],
)
def test_a_wrong_result_fails(inductor, call, error):
    inductor("rms_norm", call)
    report = verify_ops("rms_norm", "inductor")
    float32 = [run for run in report.failed if "bfloat16" not in run.case]
    assert len(float32) == len(CASE_TABLES["rms_norm"].cases) / 2
    assert max(run.error for run in float32) == error


def test_a_wrong_effect_on_an_argument_fails(inductor):
    def forgets_the_state(x, weight, state, state_slots, cu_seqlens):
        own = None if state is None else state.clone()
        return all_ops()["short_conv"].reference(x, weight, own, state_slots, cu_seqlens)

    inductor("short_conv", forgets_the_state)
    report = verify_ops("short_conv", "inductor")
    assert {run.case.removesuffix(", bfloat16") for run in report.ran if not run.is_failed} == {"no state"}


def test_what_raises_fails_with_its_message(inductor):
    def crash(*_):
        raise ValueError("no room")

    inductor("situ", crash)
    failed = verify_ops("situ", "inductor").failed
    assert failed
    assert {run.reason for run in failed} == {"raised ValueError: no room"}


def test_a_refusal_is_skipped_with_its_reason(inductor):
    inductor("situ", lambda *_: None, supports=lambda _: "never")
    report = verify_ops("situ", "inductor")
    assert report.ran == []
    assert {(skip.op, skip.backend, skip.reason) for skip in report.skipped} == {("situ", "inductor", "never")}
    assert len(report.skipped) == len(CASE_TABLES["situ"].cases)


def test_without_the_native_core_the_reason_is_told_once(monkeypatch):
    monkeypatch.setattr(_native, "_absence", "no compiler")
    report = verify_ops(backend="native")
    assert (report.isas, report.ran) == ((), [])
    assert report.skipped == [Skipped(None, "native", None, None, "no compiler")]


def test_an_op_without_native_implementation_is_named(monkeypatch):
    op = all_ops()["rms_norm"]
    monkeypatch.setattr(op, "_implementations", {"reference": op.implementation("reference")})
    monkeypatch.setattr(_native, "_absence", None)
    monkeypatch.setattr("perilune.verify.ops._isas", lambda: ())
    (skip,) = verify_ops("rms_norm").skipped
    assert (skip.op, skip.backend, skip.case) == ("rms_norm", "native", None)


@pytest.mark.skipif(_native.absence() is not None, reason=str(_native.absence()))
def test_the_native_core_runs_under_each_instruction_set_and_keeps_its_own():
    core = _native.core()
    before, isas = core.isa(), core.available_isas()
    case = CASE_TABLES["rms_norm"].cases[0]
    found = list(check_case(all_ops()["rms_norm"], case, ["native"], isas))
    assert [run.isa for run in found if isinstance(run, Ran)] == isas
    assert core.isa() == before


@pytest.mark.parametrize(("arguments", "named"), [(("rmsnorm", None), "rms_norm"), ((None, "reference"), "native")])
def test_a_name_that_does_not_exist_is_refused_with_those_that_do(arguments, named):
    with pytest.raises(ConfigError, match=named):
        verify_ops(*arguments)

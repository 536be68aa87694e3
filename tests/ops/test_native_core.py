"""The compiled core itself: choice of the instruction set, its absence, and its threads as Python sees them."""

import os
import subprocess
import sys
import threading

import pytest
import torch

from perilune import ops
from perilune.errors import BackendError
from perilune.ops import _native
from perilune.ops.norm.reference import rms_norm
from perilune.ops.registry import tensor_key
from perilune.ops.threads import set_num_threads, torch_stands_back

needs_core = pytest.mark.skipif(_native.absence() is not None, reason=str(_native.absence()))


@pytest.fixture
def rows():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(640, 1040, generator=generator), torch.randn(1040, generator=generator)


@pytest.fixture
def forgets_the_choice():
    """The choice of the instruction set is made once in a process; here it is made again."""
    core = _native.core()
    before = core.isa()
    _native.core.cache_clear()
    yield
    _native.core.cache_clear()
    assert core.use_isa(before)


@needs_core
@pytest.mark.usefixtures("forgets_the_choice")
def test_the_variable_chooses_the_instruction_set(monkeypatch):
    monkeypatch.setenv("PERILUNE_ISA", "baseline")
    assert _native.core().isa() == "baseline"


@needs_core
@pytest.mark.usefixtures("forgets_the_choice")
def test_an_instruction_set_that_is_not_there_is_refused_with_those_that_are(monkeypatch):
    offered = _native.core().available_isas()
    _native.core.cache_clear()
    monkeypatch.setenv("PERILUNE_ISA", "avx9000")
    with pytest.raises(BackendError, match=f"'avx9000'; this processor offers {', '.join(offered)}"):
        _native.core()


def test_without_a_core_ops_run_their_references_and_say_why():
    """In a process of its own, where the extension cannot be imported."""
    program = """
import sys
sys.modules["perilune._native"] = None
import torch
from perilune import ops
from perilune.ops.registry import tensor_key
from perilune.ops.threads import set_num_threads, torch_stands_back
x, weight = torch.ones(1, 16), torch.ones(16)
(native, reference) = ops.rms_norm.explain(tensor_key(x, weight, sizes=(16,)))
assert reference.is_chosen and "is not built" in native.refusal and "install" in native.refusal, native
assert torch.allclose(ops.rms_norm(x, weight, 0.0), x)
set_num_threads(2)
with torch_stands_back():
    assert torch.get_num_threads() == 2
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@needs_core
def test_the_core_is_chosen_where_it_is_there(rows):
    (native, _) = ops.rms_norm.explain(tensor_key(*rows, sizes=(1040,)))
    assert (native.backend, native.refusal, native.is_chosen) == ("native", None, True)


@needs_core
@pytest.mark.usefixtures("num_threads")
def test_both_thread_pools_are_set_and_torch_stands_back():
    try:
        set_num_threads(2)
        assert (_native.core().num_threads(), torch.get_num_threads()) == (2, 2)
        with torch_stands_back():
            assert (_native.core().num_threads(), torch.get_num_threads()) == (2, 1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


@needs_core
@pytest.mark.usefixtures("num_threads")
def test_no_number_of_threads_means_one_per_processor():
    _native.core().set_num_threads(0)
    assert _native.core().num_threads() == len(os.sched_getaffinity(0))


@needs_core
@pytest.mark.usefixtures("num_threads")
def test_threads_of_python_may_call_at_once_and_change_their_number(rows):
    expected = rms_norm(*rows, 1e-5)
    errors = []

    def call(num_threads):
        for _ in range(50):
            _native.core().set_num_threads(num_threads)
            errors.append(float((ops.rms_norm(*rows, 1e-5) - expected).abs().max()))

    callers = [threading.Thread(target=call, args=(count,)) for count in (1, 2, 3, 4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(errors) == 200
    assert max(errors) < 1e-5


@needs_core
@pytest.mark.usefixtures("num_threads")
def test_a_child_of_fork_computes_too(rows):
    expected = ops.rms_norm(*rows, 1e-5)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(ops.rms_norm(*rows, 1e-5), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

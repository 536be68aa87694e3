"""During op tests, memory that nobody wrote holds garbage: NaN, or the largest integer.

`isa` and `num_threads` run a test once per instruction set of this processor, and by one and two threads.
"""

import pytest
import torch

from perilune.ops import _native

ISAS = _native.core().available_isas() if _native.absence() is None else []


def filled_with_garbage(allocate):
    def allocate_garbage(*args, **kwargs):
        tensor = allocate(*args, **kwargs)
        if tensor.dtype.is_floating_point:
            return tensor.fill_(torch.nan)
        return tensor.fill_(True if tensor.dtype is torch.bool else torch.iinfo(tensor.dtype).max)

    return allocate_garbage


@pytest.fixture(autouse=True)
def empty_is_garbage(monkeypatch):
    for owner, name in [(torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")]:
        monkeypatch.setattr(owner, name, filled_with_garbage(getattr(owner, name)))


@pytest.fixture(params=ISAS)
def isa(request):
    core = _native.core()
    before = core.isa()
    assert core.use_isa(request.param)
    yield request.param
    core.use_isa(before)


@pytest.fixture(params=[1, 2])
def num_threads(request):
    core = _native.core()
    before = core.num_threads()
    core.set_num_threads(request.param)
    yield request.param
    core.set_num_threads(before)

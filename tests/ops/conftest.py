"""During op tests, memory that nobody wrote holds garbage: NaN, or the largest integer."""

import pytest
import torch


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

"""Processor threads that ops compute with: the native core's pool, and torch's own, which must not fight over them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from perilune.ops import _native


def set_num_threads(count: int) -> None:
    """Lets the native core and torch compute with `count` threads each, from the next op on."""
    torch.set_num_threads(count)
    if _native.absence() is None:
        _native.core().set_num_threads(count)


@contextmanager
def torch_stands_back() -> Iterator[None]:
    """Inside, torch computes with one thread where the native core does the work.

    After every op that torch spreads over threads, those spin for milliseconds on processors that the core wants.
    """
    count = torch.get_num_threads()
    if _native.absence() is None:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)

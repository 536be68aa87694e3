"""A pass of a model recorded once, as the calls that its ops made of the native core, and run again by one call.

Nothing but calls of the core and new shapes of tensors may happen in between: any computation of torch, any look at a
tensor's content refuses the recording and names it. So what depends on contents must be known outside and told apart
by whoever keeps recordings. New tensors of a recorded pass lie in an `Arena`, which keeps their memory.
"""

import ctypes
import mmap
import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from perilune.ops import _native

T = TypeVar("T")

_aten = torch.ops.aten
_num_recordings = 0
_MAKES_EMPTY = frozenset((_aten.empty.memory_format, _aten.new_empty.default, _aten.empty_like.default))


class Arena:
    """Memory of recorded passes. A piece that no tensor of a pass uses any more serves the next tensor of its size.

    Passes that share an arena overwrite each other's tensors, so one of them runs at a time and its results are used
    before the next.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[mmap.mmap]] = defaultdict(list)
        self._pieces: list[mmap.mmap] = []

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self._pieces))

    def place(self, like: Tensor) -> Tensor:
        """A new tensor of the same shape and dtype, contiguous; its memory is free again when its last view is gone."""
        size = max(mmap.PAGESIZE, 1 << (like.nbytes - 1).bit_length())  # few sizes, so that passes share pieces
        free = self._free[size]
        if not free:
            self._pieces.append(mmap.mmap(-1, size))
            free.append(self._pieces[-1])
        piece = free.pop()
        window = memoryview(piece)  # the tensor's storage holds it
        weakref.finalize(window, free.append, piece)
        return torch.frombuffer(window, dtype=like.dtype, count=like.numel()).view(like.shape)

    @staticmethod
    def alias(tensor: Tensor) -> Tensor:
        """The memory of a contiguous tensor of the arena, without holding it: the next pass may write there."""
        memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
        return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)


@dataclass(frozen=True)
class Recording(Generic[T]):
    """What a pass gave, and the program that makes it again in the same memory; without one, why there is none."""

    result: T
    program: Any
    refusal: str | None


class _Watch(TorchDispatchMode):
    """Notes the first thing torch does that a program would not repeat, and places new tensors in the arena."""

    def __init__(self, arena: Arena):
        super().__init__()
        self._arena = arena
        self.refusal: str | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the compiler takes a second to import

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _MAKES_EMPTY and result.is_cpu and result.is_contiguous() and result.numel():
            return self._arena.place(result)
        if not self._is_view(func, args, result):
            self.refusal = self.refusal or f"{func} is no call of the native core"
        return result

    @staticmethod
    def _is_view(func: Any, args: Any, result: Any) -> bool:
        """Whether `func` gave another shape to the same memory; ops that may copy (contiguous, to) did not."""
        if not func.is_view or func is _aten.lift_fresh.default:
            return False
        results = result if isinstance(result, tuple | list) else (result,)
        base = args[0].untyped_storage().data_ptr()
        return all(tensor.untyped_storage().data_ptr() == base for tensor in results)


def record(function: Callable[[], T], arena: Arena) -> Recording[T]:
    """Calls `function` once and records what it did; its inputs stay where they are as long as the program runs."""
    absence = _native.absence()
    if absence is not None:
        return Recording(function(), None, absence)
    global _num_recordings
    _num_recordings += 1
    program, watch = _native.core().Program(), _Watch(arena)
    program.begin()
    try:
        with watch:
            result = function()
    finally:
        program.end()
    return Recording(result, program if watch.refusal is None else None, watch.refusal)


def num_recordings() -> int:
    """How many passes this process has recorded so far, each of which took longer than the same pass otherwise."""
    return _num_recordings


def replay(program: Any) -> None:
    """Makes all calls of a recorded pass again."""
    _native.core().replay(program)

"""What every op's table of cases shares: a named case, its tolerance, how results are compared, how batches are laid.

A case table serves tests, `verify ops` and benchmarks: one list of sizes, and a function that makes an op's arguments.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tolerance:
    """Largest allowed `largest_error` of a float result against the reference, and why it is not zero."""

    relative: float
    reason: str


FLOAT32 = Tolerance(1e-5, "float32 sums taken in another order")
BFLOAT16 = Tolerance(2e-2, "a result or intermediate may be rounded to the other bfloat16 neighbour, 2^-8 apart")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call of an op; subclasses add its sizes. `dtype` is that of the activations."""

    name: str
    dtype: torch.dtype = torch.float32
    tolerance: Tolerance = FLOAT32

    def in_bfloat16(self, tolerance: Tolerance = BFLOAT16) -> Self:
        """The same sizes with bfloat16 activations."""
        return replace(self, name=f"{self.name}, bfloat16", dtype=torch.bfloat16, tolerance=tolerance)


C = TypeVar("C", bound=Case)


@dataclass(frozen=True)
class CaseTable(Generic[C]):
    """An op's cases; `arguments(case, generator)` makes the positional arguments of one call."""

    cases: tuple[C, ...]
    arguments: Callable[[C, torch.Generator], tuple[Any, ...]]


def largest_error(expected: Tensor, found: Tensor) -> float:
    """Largest deviation relative to the entry's own magnitude plus the root mean square of `expected`.

    Infinite where dtype or shape differ, where NaNs lie in other places, and where integers differ.
    """
    if expected.dtype != found.dtype or expected.shape != found.shape:
        return float("inf")
    if not expected.is_floating_point():
        return 0.0 if torch.equal(expected, found) else float("inf")
    is_number = ~expected.isnan()
    if not torch.equal(is_number, ~found.isnan()):
        return float("inf")
    right, ours = expected[is_number].double(), found[is_number].double()
    if torch.equal(right, ours):
        return 0.0
    error = (ours - right).abs() / (right.abs() + right.square().mean().sqrt())
    return float(error.nan_to_num(nan=torch.inf, posinf=torch.inf).max())


def copied(value: Any) -> Any:
    """The same nest of lists and tuples with every tensor cloned."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, list):
        return [copied(item) for item in value]
    # named tuples stay what they are
    return tuple.__new__(type(value), map(copied, value)) if isinstance(value, tuple) else value


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor in a nest of lists and tuples, in order."""
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in tensors_in(item)] if isinstance(value, list | tuple) else []


def outcome(call: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Tensor]:
    """Every tensor that `call` returns, then every one it leaves in copies of its arguments: states change in place."""
    own = copied(arguments)
    return tensors_in((call(*own), own))


@dataclass(frozen=True)
class Layout:
    """Lengths of a batch's sequences: tokens of this call, and tokens that were there before it."""

    new: tuple[int, ...]
    before: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return sum(self.new)

    @property
    def cu_seqlens(self) -> Tensor:
        return torch.tensor([0, *self.new]).cumsum(0)

    @property
    def seq_lens(self) -> Tensor:
        return torch.tensor(self.new) + torch.tensor(self.before)

    @property
    def positions(self) -> Tensor:
        """Position of every token of this call in its sequence, [T]."""
        return torch.cat(
            [torch.arange(first, first + count) for first, count in zip(self.before, self.new, strict=True)]
        )


# Layouts that every op over sequences must survive.
LAYOUTS = {
    "single token": Layout(new=(1,), before=(0,)),
    "one sequence": Layout(new=(37,), before=(0,)),
    "lengths differ": Layout(new=(5, 17, 1, 32), before=(0, 3, 40, 16)),
    "all decode": Layout(new=(1, 1, 1), before=(0, 31, 70)),
    "decode and long": Layout(new=(1, 1, 50), before=(63, 7, 14)),
}


def scattered_slots(num_sequences: int, generator: torch.Generator) -> tuple[int, Tensor]:
    """Number of state slots, and each sequence's own, out of order and with unused ones between."""
    num_slots = num_sequences + 3
    return num_slots, torch.randperm(num_slots, generator=generator)[:num_sequences]


def paged(rows: list[Tensor], block_size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Lays sequences' rows [S, W] into blocks out of order: (pool [blocks, block_size, W], block_table [N, B]).

    Rows and blocks that nobody wrote hold NaN; the table is wider than needed and points there past a sequence's end.
    """
    counts = [-(-row.shape[0] // block_size) for row in rows]
    num_blocks = sum(counts) + 3
    order = torch.randperm(num_blocks, generator=generator).tolist()
    pool = torch.full((num_blocks, block_size, rows[0].shape[1]), torch.nan, dtype=rows[0].dtype)
    block_table = torch.full((len(rows), max(counts) + 2), order[-1])
    for index, (row, count) in enumerate(zip(rows, counts, strict=True)):
        own = [order.pop(0) for _ in range(count)]
        block_table[index, :count] = torch.tensor(own)
        for block, piece in zip(own, row.split(block_size), strict=True):
            pool[block, : piece.shape[0]] = piece
    return pool, block_table

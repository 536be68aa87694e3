"""Row ops by the native core."""

from functools import lru_cache

import torch
from torch import Tensor

from perilune.ops._native import ACTIVATIONS, address, code, core, refusal, refuse_types
from perilune.ops.registry import OpKey

_INT64 = (torch.int64,)


def embed_rows(weight: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """See the package's contract."""
    weight, ids = weight.contiguous(), ids.contiguous()
    y = torch.empty(ids.shape[0], weight.shape[1], dtype=dtype)
    core().embed_rows(address(weight), code(weight), *weight.shape, address(ids), ids.shape[0], address(y), code(y))
    return y


def supports_embed_rows(key: OpKey) -> str | None:
    """Any sizes; float32 and bfloat16."""
    return refusal(key) or refuse_types(key, ACTIVATIONS, _INT64, ACTIVATIONS)


def store_rows(pool: Tensor, slots: Tensor, rows: Tensor) -> None:
    """See the package's contract."""
    rows, slots = rows.contiguous(), slots.contiguous()
    tokens, columns = rows.shape
    source = (address(rows), code(rows), tokens, columns, address(slots))
    core().store_rows(*source, address(pool), code(pool), pool.numel() // columns)


def append_rows(pool: Tensor, end: Tensor, rows: Tensor) -> None:
    """See the package's contract."""
    rows = rows.contiguous()
    core().append_rows(address(rows), code(rows), *rows.shape, address(end), address(pool), code(pool), pool.shape[0])


def join_rows(*parts: Tensor) -> Tensor:
    """See the package's contract."""
    total, columns = sum(part.shape[0] for part in parts), parts[0].shape[1]
    y, slots = torch.empty(total, columns, dtype=parts[0].dtype), _slots(1 << max(0, total - 1).bit_length())
    first = 0
    for part in parts:
        last = first + part.shape[0]
        store_rows(y, slots[first:last], part)
        first = last
    return y


@lru_cache(maxsize=64)
def _slots(count: int) -> Tensor:
    """The numbers from 0 on; kept, so that recorded passes read them where they are."""
    return torch.arange(count)


def supports_join_rows(key: OpKey) -> str | None:
    """Any sizes; float32 or bfloat16, all the same."""
    return refusal(key) or refuse_types(key, ACTIVATIONS, *(key.dtypes[:1] for _ in key.dtypes[1:]))


def supports_store_rows(key: OpKey) -> str | None:
    """A pool in one piece; float32 and bfloat16."""
    _, is_contiguous = key.sizes
    if not is_contiguous:
        return "the pool must be contiguous"
    return refusal(key) or refuse_types(key, ACTIVATIONS, _INT64, ACTIVATIONS)


def add_rows(x: Tensor, z: Tensor) -> Tensor:
    """See the package's contract."""
    x, z = x.contiguous(), z.contiguous()
    y = torch.empty_like(x)
    core().add_rows(address(x), address(z), code(x), x.numel(), address(y))
    return y


def gate_rows(x: Tensor, gate: Tensor) -> Tensor:
    """See the package's contract."""
    x, gate = x.contiguous(), gate.contiguous()
    y = torch.empty_like(x)
    core().gate_rows(address(x), address(gate), code(x), x.numel(), address(y))
    return y


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """See the package's contract."""
    gate, up = gate.contiguous(), up.contiguous()
    y = torch.empty_like(gate)
    core().swiglu(address(gate), address(up), code(gate), gate.numel(), address(y))
    return y


def supports_pair(key: OpKey) -> str | None:
    """Any sizes; float32 or bfloat16, both the same."""
    return refusal(key) or refuse_types(key, ACTIVATIONS, key.dtypes[:1])


def scale_rows(x: Tensor, factor: float) -> Tensor:
    """See the package's contract."""
    x = x.contiguous()
    y = torch.empty_like(x, dtype=torch.float32)
    core().scale_rows(address(x), code(x), x.numel(), factor, address(y))
    return y


def supports_scale_rows(key: OpKey) -> str | None:
    """Any sizes; float32 or bfloat16."""
    return refusal(key) or refuse_types(key, ACTIVATIONS)

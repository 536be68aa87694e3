"""Row ops by the native core."""

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

"""Row ops in plain torch."""

import torch
import torch.nn.functional as F
from torch import Tensor


def embed_rows(weight: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """weight [V, D], ids [T] -> [T, D] in dtype."""
    return F.embedding(ids, weight).to(dtype)


def store_rows(pool: Tensor, slots: Tensor, rows: Tensor) -> None:
    """pool [..., D] changes in place at rows slots [T]; rows [T, D]."""
    pool.view(-1, rows.shape[-1])[slots] = rows.to(pool.dtype)


def append_rows(pool: Tensor, end: Tensor, rows: Tensor) -> None:
    """pool [P, D] and end [1] change in place; rows [T, D]."""
    first = int(end[0])
    if not 0 <= first <= pool.shape[0] - rows.shape[0]:
        raise IndexError(f"the pool has no room for {rows.shape[0]} rows behind {first} of its {pool.shape[0]}")
    pool[first : first + rows.shape[0]] = rows.to(pool.dtype)
    end += rows.shape[0]


def join_rows(*parts: Tensor) -> Tensor:
    """Parts [T_i, D], end to end."""
    return torch.cat(parts)


def add_rows(x: Tensor, z: Tensor) -> Tensor:
    """The sum, rounded once."""
    return x + z


def gate_rows(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate), the sigmoid rounded to their dtype as well."""
    return x * torch.sigmoid(gate)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU of the gate, rounded, times up."""
    return F.silu(gate) * up


def scale_rows(x: Tensor, factor: float) -> Tensor:
    """float32."""
    return x.float() * factor

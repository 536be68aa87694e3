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

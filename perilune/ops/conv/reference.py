"""Short convolution in plain torch."""

import torch
import torch.nn.functional as F
from torch import Tensor

from perilune.ops import ragged


def short_conv(x: Tensor, weight: Tensor, state: Tensor | None, state_slots: Tensor, cu_seqlens: Tensor) -> Tensor:
    """y_t = SiLU(sum_j weight[:, j] * x_{t-K+1+j}); see the package's contract for shapes and in-place effects."""
    taps = weight.shape[1]
    seq_lengths = ragged.lengths(cu_seqlens)
    rows = ragged.pad(x, seq_lengths)
    if state is None:
        rows = F.pad(rows, (0, 0, taps - 1, 0))
    else:
        rows = torch.cat([state[state_slots].to(x.dtype), rows], dim=1)
        for index, length in enumerate(seq_lengths):
            state[state_slots[index]] = rows[index, length : length + taps - 1].to(state.dtype)
    y = F.silu(_taps(rows.float(), weight))
    return ragged.unpad(y.to(x.dtype), seq_lengths)


def _taps(rows: Tensor, weight: Tensor) -> Tensor:
    length = rows.shape[1] - weight.shape[1] + 1
    y = rows[:, :length] * weight[:, 0]
    for tap in range(1, weight.shape[1]):
        y = torch.addcmul(y, rows[:, tap : tap + length], weight[:, tap])
    return y

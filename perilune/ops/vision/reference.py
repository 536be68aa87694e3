"""The ops of the vision tower in plain torch. L patches, H heads of width D."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

# Scores that exist at once: the queries of a picture go in blocks of as many as keep within it.
_MOST_SCORES = 2**24


def patch_attention(qkv: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor, queries: slice) -> Tensor:
    """qkv [L, 3, H, D] -> [Q, H, D], picture by picture and block by block of queries."""
    q_LHD, k_LHD, v_LHD = qkv.unbind(1)
    q_LHD, k_LHD = (_turned(x, cos, sin) for x in (q_LHD, k_LHD))
    start, stop, _ = queries.indices(qkv.shape[0])
    pieces = []
    for first, end in pairwise(cu_seqlens.tolist()):
        k_HSD, v_HSD = (x[first:end].transpose(0, 1).float() for x in (k_LHD, v_LHD))
        block = max(1, _MOST_SCORES // (k_HSD.shape[0] * max(1, end - first)))
        for q_BHD in q_LHD[max(first, start) : max(first, start, min(end, stop))].split(block):
            scores_HBS = q_BHD.transpose(0, 1).float() @ k_HSD.transpose(1, 2) * q_BHD.shape[-1] ** -0.5
            pieces.append((scores_HBS.softmax(-1) @ v_HSD).transpose(0, 1).to(qkv.dtype))
    return torch.cat(pieces)


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU in its tanh form."""
    return F.gelu(x.float(), approximate="tanh").to(x.dtype)


def _turned(x_LHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x_LHD.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).to(x_LHD.dtype)

"""MoonViT-V2: the tower that turns patches of pictures into rows for the text model, and the projector behind it.

L: patches of all pictures, end to end; H heads of width D; C: width of the tower; M: rows after the 2 x 2 merge.
"""

from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perilune import ops
from perilune.config.model import VisionConfig
from perilune.models.layers import Linear, RMSNorm, Weight

ROPE_THETA = 10000.0
T = TypeVar("T")
# Work of the model in pieces: a generator that yields between two of them and returns the result.
Pieces = Generator[None, None, T]
# What one piece computes: rows where every row stands alone, and query-key pairs of one head in attention.
ROWS_AT_ONCE = 2048
PAIRS_AT_ONCE = 2**22
ROW_MULTIPLE = 16

# Frames, rows and columns of an item in patches; a picture is one frame.
Grid = tuple[int, int, int]


class PatchEmbed(nn.Module):
    """Linear map of the patches' pixels plus their learned places, resampled to each grid."""

    def __init__(self, config: VisionConfig, dtype: torch.dtype):
        super().__init__()
        patch, width = config.patch_size, config.vt_hidden_size
        self.num_pixels = 3 * patch * patch
        self.proj = Weight(width, self.num_pixels, dtype=dtype)
        self.pos_emb = Weight(config.init_pos_emb_height, config.init_pos_emb_width, width, dtype=dtype)
        self.max_frames = config.init_pos_emb_time

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """patches [L, 3, P, P] -> [L, C]."""
        # zeros, so that rows are as long as a kernel takes them
        fill = (0, -self.num_pixels % ROW_MULTIPLE)
        rows = ops.dense_linear(F.pad(patches.reshape(-1, self.num_pixels), fill), F.pad(self.proj.weight, fill))
        return rows + torch.cat([self._places(grid) for grid in grids]).to(rows.dtype)

    def _places(self, grid: Grid) -> Tensor:
        """Float32 [frames * rows * columns, C]; only items of several frames have a term of time."""
        frames, height, width = grid
        assert frames <= self.max_frames, f"an item has at most {self.max_frames} frames"
        table = self.pos_emb.weight.float()
        if table.shape[:2] != (height, width):
            spread = F.interpolate(table.permute(2, 0, 1)[None], (height, width), mode="bilinear", align_corners=False)
            table = spread[0].permute(1, 2, 0)
        places = table.flatten(0, 1)
        if frames == 1:
            return places
        half = places.shape[1] // 2
        steps = torch.arange(frames)[:, None] * ROPE_THETA ** -(torch.arange(half) / half)
        times = torch.cat((steps.sin(), steps.cos()), -1)
        return (places + times[:, None]).flatten(0, 1)


class Mlp(nn.Module):
    """Two linear maps around GELU in its tanh form."""

    def __init__(self, config: VisionConfig, dtype: torch.dtype):
        super().__init__()
        self.fc0 = Linear(config.vt_hidden_size, config.vt_intermediate_size, dtype)
        self.fc1 = Linear(config.vt_intermediate_size, config.vt_hidden_size, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x [L, C] -> [L, C]."""
        y: Tensor = self.fc1(ops.gelu_tanh(self.fc0(x)))
        return y


class Block(nn.Module):
    """Attention within each item, then the MLP, both on normed inputs."""

    def __init__(self, config: VisionConfig, eps: float, dtype: torch.dtype):
        super().__init__()
        hidden = config.vt_hidden_size
        self.heads = config.vt_num_attention_heads
        self.norm0, self.norm1 = RMSNorm(hidden, eps, dtype), RMSNorm(hidden, eps, dtype)
        self.wqkv = Linear(hidden, 3 * config.qkv_hidden_size, dtype)
        self.wo = Linear(config.qkv_hidden_size, hidden, dtype)
        self.mlp = Mlp(config, dtype)

    def pieces(self, x: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor) -> Pieces[Tensor]:
        """x [L, C] -> [L, C]."""
        qkv = yield from _by_rows(lambda rows: self.wqkv(self.norm0(rows)), x)
        qkv = qkv.unflatten(-1, (3, self.heads, -1))
        longest = int(cu_seqlens.diff().max())
        step = max(1, PAIRS_AT_ONCE // longest)
        mixed = []
        for first in range(0, x.shape[0], step):
            queries = slice(first, first + step)
            o = ops.patch_attention(qkv, cos, sin, cu_seqlens, queries)
            mixed.append(x[queries] + self.wo(o.flatten(1)))
            yield
        return (yield from _by_rows(lambda rows: rows + self.mlp(self.norm1(rows)), torch.cat(mixed)))


class Encoder(nn.Module):
    """The blocks and the last norm."""

    def __init__(self, config: VisionConfig, eps: float, dtype: torch.dtype):
        super().__init__()
        self.blocks = nn.ModuleList(Block(config, eps, dtype) for _ in range(config.vt_num_hidden_layers))
        self.final_layernorm = RMSNorm(config.vt_hidden_size, eps, dtype)

    def pieces(self, x: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor) -> Pieces[Tensor]:
        """x [L, C] -> [L, C]."""
        for block in self.blocks:
            x = yield from block.pieces(x, cos, sin, cu_seqlens)
        y: Tensor = self.final_layernorm(x)
        return y


class VisionTower(nn.Module):
    """Patches to merged rows; items in one call do not see each other."""

    def __init__(self, config: VisionConfig, eps: float, dtype: torch.dtype):
        super().__init__()
        self.head_dim = config.qkv_hidden_size // config.vt_num_attention_heads
        self.patch_embed = PatchEmbed(config, dtype)
        self.encoder = Encoder(config, eps, dtype)

    def pieces(self, patches: Tensor, grids: Sequence[Grid]) -> Pieces[Tensor]:
        """patches [L, 3, P, P] of items with these grids -> [M, 4 * C]."""
        lengths = [frames * height * width for frames, height, width in grids]
        cos, sin = rotary_angles(grids, self.head_dim)
        x = self.patch_embed(patches, grids)
        yield
        x = yield from self.encoder.pieces(x, cos, sin, torch.tensor([0, *lengths]).cumsum(0))
        return torch.cat([merged(rows, grid) for rows, grid in zip(x.split(lengths), grids, strict=True)])


class Projector(nn.Module):
    """Merged rows to rows of the text model; an exact GELU between two linear maps, then a norm."""

    def __init__(self, config: VisionConfig, dtype: torch.dtype):
        super().__init__()
        width = config.mm_hidden_size * config.merge_kernel_size[0] * config.merge_kernel_size[1]
        self.proj = nn.Sequential(Linear(width, width, dtype), nn.GELU(), Linear(width, config.text_hidden_size, dtype))
        self.post_norm = RMSNorm(config.text_hidden_size, config.projector_ln_eps, dtype)

    def forward(self, rows: Tensor) -> Tensor:
        """rows [M, 4 * C] -> [M, text hidden size]."""
        y: Tensor = self.post_norm(self.proj(rows))
        return y


class VisionModel(nn.Module):
    """Tower and projector under their released names."""

    def __init__(self, config: VisionConfig, eps: float, dtype: torch.dtype):
        super().__init__()
        self.vision_tower = VisionTower(config, eps, dtype)
        self.mm_projector = Projector(config, dtype)

    def pieces(self, patches: Tensor, grids: Sequence[Grid]) -> Pieces[Tensor]:
        """patches [L, 3, P, P] in the compute dtype -> [M, text hidden size], item after item."""
        rows = yield from self.vision_tower.pieces(patches, grids)
        return (yield from _by_rows(self.mm_projector, rows, ROWS_AT_ONCE // 4))

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """All pieces at once."""
        return finished(self.pieces(patches, grids))


def finished(pieces: Pieces[T]) -> T:
    """The result of work that is done without a break."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            result: T = end.value
            return result


def _by_rows(function: Callable[[Tensor], Tensor], x: Tensor, at_once: int | None = None) -> Pieces[Tensor]:
    parts = []
    for rows in x.split(max(1, at_once or ROWS_AT_ONCE)):
        parts.append(function(rows))
        yield
    return torch.cat(parts)


def rotary_angles(grids: Sequence[Grid], head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every pair's angle, float32 [L, D / 2]: pairs turn by column and row in turns.

    Pair 2i turns by column * theta^(-4i / D), pair 2i + 1 by row * the same; frames repeat the angles.
    """
    frequencies = ROPE_THETA ** (-torch.arange(0, head_dim, 4) / head_dim)
    angles = []
    for frames, height, width in grids:
        columns = torch.arange(width).expand(height, width)[..., None] * frequencies
        rows = torch.arange(height)[:, None].expand(height, width)[..., None] * frequencies
        angles.append(torch.stack((columns, rows), -1).flatten(2).flatten(0, 1).repeat(frames, 1))
    angles_LD = torch.cat(angles)
    return angles_LD.cos(), angles_LD.sin()


def merged(x: Tensor, grid: Grid) -> Tensor:
    """x [frames * rows * columns, C] -> [rows * columns / 4, 4 * C]: 2 x 2 cells side by side, mean of the frames."""
    frames, height, width = grid
    cells = x.view(frames, height // 2, 2, width // 2, 2, -1).transpose(2, 3)
    return cells.float().mean(0).to(x.dtype).flatten(0, 1).flatten(1)

"""What a plan stores: equal tensors as pieces, and their bytes on each rank."""

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property

from perilune.checkpoint.names import Part
from perilune.parallel.mesh import Placement, Rank, share
from perilune.parallel.placement import Home, Split


@dataclass(frozen=True)
class Piece:
    """Equal tensors of one kind: per layer and expert, `num_units` units of `unit_bytes` that ranks divide."""

    part: Part
    split: Split
    home: Home
    num_units: int
    unit_bytes: int
    layers: tuple[int, ...]
    num_experts: int = 1

    @cached_property
    def total_bytes(self) -> int:
        return self.num_units * self.unit_bytes * len(self.layers) * self.num_experts

    def copies(self, placement: Placement) -> int:
        """How often the plan stores it."""
        if self.split is Split.EXPERT:
            return 1
        return placement.dp * (placement.tp if self.split is Split.REPLICATED else 1)

    def bytes_on(self, placement: Placement, rank: Rank, num_layers: int) -> int:
        """Bytes on one rank; over all ranks of a plan they sum to `copies` times the total."""
        count = self._layers_on(placement, rank.stage, num_layers)
        if self.split is Split.REPLICATED:
            return count * self.num_units * self.unit_bytes
        if self.split is Split.TENSOR:
            return count * len(share(self.num_units, placement.tp, rank.tp_rank)) * self.unit_bytes
        ep_rank, inner_rank = placement.expert_ranks(rank)
        num_experts = len(share(self.num_experts, placement.ep, ep_rank))
        return count * num_experts * len(share(self.num_units, placement.expert_tp, inner_rank)) * self.unit_bytes

    def _layers_on(self, placement: Placement, stage: int, num_layers: int) -> int:
        if self.home is Home.LAYERS:
            held = placement.stage_layers(stage, num_layers)
            return bisect_left(self.layers, held.stop) - bisect_left(self.layers, held.start)
        is_here = stage == (0 if self.home is Home.FIRST else placement.pp - 1)
        return len(self.layers) if is_here else 0

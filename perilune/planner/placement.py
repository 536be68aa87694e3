"""Who holds what: the parallel sizes of a plan, its ranks, and how one stored tensor is divided among them."""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from perilune.checkpoint.names import Part
from perilune.config.model import ModelConfig
from perilune.config.parts import MXFP4_GROUP


class Split(Enum):
    """How a tensor is divided: whole on every rank, by heads or rows over tp, or by experts over the expert group."""

    REPLICATED = "replicated"
    TENSOR = "tp"
    EXPERT = "experts"


class Home(Enum):
    """Which pipeline stages hold a tensor: those of its layers, the first, or the last."""

    LAYERS = "layers"
    FIRST = "first"
    LAST = "last"


@dataclass(frozen=True)
class Rank:
    stage: int
    dp_rank: int
    tp_rank: int


@dataclass(frozen=True)
class Placement:
    """Parallel sizes. Experts are shared by the `dp * tp` ranks of a stage: `ep` groups of experts, inner width split
    over what is left. `dcp` ranks of a tensor-parallel group share the rows of each token's cache.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    dcp: int = 1

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def expert_tp(self) -> int:
        return self.tp * self.dp // self.ep

    @property
    def label(self) -> str:
        """The sizes above 1, as `tp8 dcp8`."""
        names = ("dp", "tp", "pp", "ep", "dcp")
        return " ".join(f"{name}{getattr(self, name)}" for name in names if getattr(self, name) > 1) or "one device"

    def ranks(self) -> Iterator[Rank]:
        for stage in range(self.pp):
            for dp_rank in range(self.dp):
                for tp_rank in range(self.tp):
                    yield Rank(stage, dp_rank, tp_rank)

    def stage_layers(self, stage: int, num_layers: int) -> range:
        """Layers of a stage: contiguous, as even as can be."""
        return range(stage * num_layers // self.pp, (stage + 1) * num_layers // self.pp)

    def refusal(self, config: ModelConfig) -> str | None:
        """Why the model cannot be divided so, or None."""
        if config.kda.num_heads % self.tp or config.mla.num_heads % self.tp:
            return f"{config.mla.num_heads} heads do not divide by tp {self.tp}"
        if self.dp * self.tp % self.ep or config.moe.num_experts % self.ep:
            return f"{config.moe.num_experts} experts do not divide by ep {self.ep}"
        groups = config.moe.moe_intermediate_size // MXFP4_GROUP
        if groups % self.expert_tp:
            return f"the {groups} scale groups of an expert's inner width do not divide by {self.expert_tp} ranks"
        if self.tp % self.dcp:
            return f"dcp {self.dcp} does not divide tp {self.tp}"
        if self.pp > config.num_hidden_layers:
            return f"{config.num_hidden_layers} layers are fewer than {self.pp} stages"
        return None


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
            return count * _share(self.num_units, placement.tp, rank.tp_rank) * self.unit_bytes
        ep_rank, inner_rank = divmod(rank.dp_rank * placement.tp + rank.tp_rank, placement.expert_tp)
        experts = _share(self.num_experts, placement.ep, ep_rank)
        return count * experts * _share(self.num_units, placement.expert_tp, inner_rank) * self.unit_bytes

    def _layers_on(self, placement: Placement, stage: int, num_layers: int) -> int:
        if self.home is Home.LAYERS:
            held = placement.stage_layers(stage, num_layers)
            return bisect_left(self.layers, held.stop) - bisect_left(self.layers, held.start)
        is_here = stage == (0 if self.home is Home.FIRST else placement.pp - 1)
        return len(self.layers) if is_here else 0


def _share(num_units: int, num_ranks: int, rank: int) -> int:
    """Units of one rank: even, the first ranks taking what is left, so that rank 0 never has less than another."""
    return num_units // num_ranks + (rank < num_units % num_ranks)

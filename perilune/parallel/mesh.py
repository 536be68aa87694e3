"""Ranks and parallel sizes: how many share a model, and in which groups. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass

from perilune.config.model import ModelConfig
from perilune.config.parts import MXFP4_GROUP


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

    def expert_ranks(self, rank: Rank) -> tuple[int, int]:
        """A rank's group of experts, and its place among those that share the inner width of that group."""
        return divmod(rank.dp_rank * self.tp + rank.tp_rank, self.expert_tp)

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
        if groups < self.expert_tp:
            return f"the {groups} scale groups of an expert's inner width are fewer than {self.expert_tp} ranks"
        if self.tp % self.dcp:
            return f"dcp {self.dcp} does not divide tp {self.tp}"
        if self.pp > config.num_hidden_layers:
            return f"{config.num_hidden_layers} layers are fewer than {self.pp} stages"
        return None


def share(num_units: int, num_ranks: int, rank: int) -> range:
    """Units of one rank: contiguous and even, the first ranks taking one more where it does not divide."""
    least, more = divmod(num_units, num_ranks)
    first = rank * least + min(rank, more)
    return range(first, first + least + (rank < more))

"""One rank's part of a checkpoint, cut out of the mapped files by the placement table: its bytes, and no others."""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from perilune.checkpoint.loader import check_values, map_tensors
from perilune.checkpoint.names import TEXT_PREFIX, TensorFamily, expert_of, layer_of, parameter_name
from perilune.config.model import ModelConfig
from perilune.errors import ConfigError
from perilune.parallel.mesh import Placement, Rank, share
from perilune.parallel.placement import WHOLE, Home, Rule, Split, num_units, rule_of


@dataclass(frozen=True)
class Shard:
    """Which part of every stored tensor one rank of a placement holds."""

    config: ModelConfig
    placement: Placement
    rank: Rank

    def __post_init__(self) -> None:
        reason = self.placement.refusal(self.config)
        if reason is not None:
            raise ConfigError(f"{self.placement.label}: {reason}; choose sizes that divide the model")

    def holds(self, name: str, rule: Rule) -> bool:
        """Whether any of the tensor is on this rank."""
        stage, placement = self.rank.stage, self.placement
        if rule.home is Home.LAYERS:
            is_here = layer_of(name) in placement.stage_layers(stage, self.config.num_hidden_layers)
        else:
            is_here = stage == (0 if rule.home is Home.FIRST else placement.pp - 1)
        if not is_here or rule.split is not Split.EXPERT:
            return is_here
        group, _ = placement.expert_ranks(self.rank)
        return expert_of(name) in share(self.config.moe.num_experts, placement.ep, group)

    def extent(self, rule: Rule, shape: tuple[int, ...]) -> range | None:
        """Indices along `rule.dim` of a held tensor with that stored shape; None for all of it."""
        if rule.dim is None:
            return None
        ranks, rank = self.placement.tp, self.rank.tp_rank
        if rule.split is Split.EXPERT:
            ranks, rank = self.placement.expert_tp, self.placement.expert_ranks(self.rank)[1]
        units = num_units(rule, shape, self.config.moe.moe_intermediate_size)
        own, size = share(units, ranks, rank), shape[rule.dim] // units
        return range(own.start * size, own.stop * size)

    def cut(self, family: TensorFamily, tensor: Tensor) -> Tensor:
        """The held part of a tensor: a view where it is contiguous, a copy where columns are taken."""
        rule = rule_of(family.pattern)
        extent = self.extent(rule, tuple(tensor.shape))
        if rule.dim is None or extent is None:
            return tensor
        return tensor.narrow(rule.dim, extent.start, len(extent)).contiguous()


def load_shard(
    directory: Path, config: ModelConfig, placement: Placement, rank: Rank, *, check_scales: bool = False
) -> dict[str, Tensor]:
    """This rank's tensors by parameter name, as `load_state` gives the whole: dtypes as stored, shapes of the part.

    Experts of other ranks and layers of other stages are absent. Only the pages of its own part are read, apart from
    the ends that it shares with others. Raises CheckpointError, and ConfigError for a placement that cannot be.
    """
    shard = Shard(config, placement, rank)
    mapped = map_tensors(directory, config, check_scales=False)
    own = {name: family for name, family in mapped.families.items() if shard.holds(name, rule_of(family.pattern))}
    parts = {name: shard.cut(family, mapped.state[parameter_name(name)]) for name, family in own.items()}
    check_values(parts, own, config, check_scales=check_scales)
    added = mapped.state.keys() - {parameter_name(name) for name in mapped.families}  # what the file may leave out
    state = {name: mapped.state[name] for name in added if shard.holds(TEXT_PREFIX + name, WHOLE)}
    return {**state, **{parameter_name(name): part for name, part in parts.items()}}

"""Bytes on each rank of a plan: weights by part, workspace, states, cache rows, and what is left of the device."""

from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache

from perilune.checkpoint.names import Part
from perilune.config.model import ModelConfig
from perilune.models.accounting import INDEX_FORMATS, LATENT_FORMATS, conv_state_bytes, recurrent_state_bytes
from perilune.parallel.mesh import Placement, Rank
from perilune.planner.hardware import Engine, Hardware
from perilune.planner.precision import Precision, pieces, workspace_bytes_per_layer

MAX_TOKENS = 2**40


@dataclass(frozen=True)
class StageMemory:
    """The fullest rank of one pipeline stage, in bytes.

    `latent_bytes` and `index_bytes` are those of one token over the stage's layers, before `dcp` divides them.
    """

    stage: int
    parts: dict[Part, int]
    workspace_bytes: int
    reserve_bytes: int
    state_bytes: int  # of one request
    latent_bytes: int
    index_bytes: int
    dcp: int
    index_dcp: int
    memory_bytes: int
    budget_bytes: int  # what the engine may use of the memory

    @property
    def resident_bytes(self) -> int:
        """Weights that stay."""
        return sum(self.parts.values())

    @property
    def peak_bytes(self) -> int:
        """Weights, conversion workspace and what the runtime is known to take, before any cache."""
        return self.resident_bytes + self.workspace_bytes + self.reserve_bytes

    @property
    def free_bytes(self) -> int:
        """What states and cache rows may take; negative when the weights do not fit."""
        return self.budget_bytes - self.peak_bytes

    def rows_bytes(self, num_tokens: int) -> int:
        """Cache rows of one sequence: token i lies on rank i mod dcp."""
        return -(-num_tokens // self.dcp) * self.latent_bytes + -(-num_tokens // self.index_dcp) * self.index_bytes

    def request_bytes(self, num_tokens: int) -> int:
        return self.state_bytes + self.rows_bytes(num_tokens)

    def num_tokens(self, num_slots: int) -> int:
        """Tokens of one sequence beside the states of `num_slots` requests; MAX_TOKENS where rows cost nothing."""
        room = self.free_bytes - num_slots * self.state_bytes
        return max(0, bisect_right(range(MAX_TOKENS + 1), room, key=self.rows_bytes) - 1)

    def num_requests(self, num_tokens: int) -> int:
        return max(0, self.free_bytes) // max(1, self.request_bytes(num_tokens))


def stage_memories(
    config: ModelConfig, hardware: Hardware, engine: Engine, placement: Placement, precision: Precision
) -> tuple[StageMemory, ...]:
    """The memory of every stage of a plan. Rank 0 of a stage is its fullest."""
    memory = int(hardware.memory.amount)
    budget = int(memory * engine.usable.amount) if engine.usable else memory
    workspace = 0
    if precision.experts == "mxfp4_via_fp8":
        workspace = -(-workspace_bytes_per_layer(config) // (placement.tp * placement.dp))
    conv_itemsize = 4 if precision.latent == "float32" else 2
    state = recurrent_state_bytes(config) + conv_state_bytes(config, conv_itemsize)
    found = []
    for stage in range(placement.pp):
        layers = placement.stage_layers(stage, config.num_hidden_layers)
        num_full = sum(1 for layer in config.full_attn_layers if layer in layers)
        num_kda = len(layers) - num_full
        slot = -(-state * num_kda // (max(1, len(config.kda_layers)) * placement.tp))
        index = INDEX_FORMATS[precision.index](config.indexer) if config.indexer else 0
        found.append(
            StageMemory(
                stage=stage,
                parts=rank_parts(config, engine, _weights_only(placement), precision, Rank(stage, 0, 0)),
                workspace_bytes=workspace,
                reserve_bytes=int(engine.reserve.amount) if engine.reserve else 0,
                state_bytes=slot * engine.slots_per_request,
                latent_bytes=num_full * LATENT_FORMATS[precision.latent](config.mla),
                index_bytes=num_full * index,
                dcp=placement.dcp,
                index_dcp=placement.dcp if engine.dcp_shards_index else 1,
                memory_bytes=memory,
                budget_bytes=budget,
            )
        )
    return tuple(found)


def rank_parts(
    config: ModelConfig, engine: Engine, placement: Placement, precision: Precision, rank: Rank
) -> dict[Part, int]:
    """Weight bytes of one rank, part by part."""
    return _rank_parts(
        config, engine.has_vision, engine.shards_everything, placement, precision.experts, precision.dense, rank
    )


@lru_cache(maxsize=4096)
def _rank_parts(
    config: ModelConfig,
    has_vision: bool,
    shards_everything: bool,
    placement: Placement,
    experts: str,
    dense: str,
    rank: Rank,
) -> dict[Part, int]:
    stored = pieces(config, Precision(experts, dense), has_vision=has_vision, shards_everything=shards_everything)
    parts: dict[Part, int] = {}
    for piece in stored:
        parts[piece.part] = parts.get(piece.part, 0) + piece.bytes_on(placement, rank, config.num_hidden_layers)
    return parts


def _weights_only(placement: Placement) -> Placement:
    """The placement without what does not move weights, so that plans share the arithmetic."""
    return Placement(placement.tp, placement.pp, placement.dp, placement.ep)

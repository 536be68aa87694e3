"""Time per token as a bound by bytes and operations, and what a prefill machine hands to a decode machine.

Left out, since no source gives them: link latency, kernel launch, imbalance of experts. The efficiency class of a
profile, measured end to end, stands for all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from perilune.checkpoint.names import VISION_PARTS, Part
from perilune.config.model import ModelConfig
from perilune.models.accounting import (
    INDEX_FORMATS,
    LATENT_FORMATS,
    attended_rows,
    cache_bytes_per_token,
    flops_per_token,
    state_bytes_per_sequence,
)
from perilune.parallel.mesh import Placement
from perilune.planner.hardware import Hardware
from perilune.planner.memory import StageMemory
from perilune.planner.precision import Precision

# Mooncake README, a 40 GB cache over 4 x 200G and 8 x 400G links, bytes per second.
HANDOFF_RATES = {"4 x 200G": 87e9, "8 x 400G": 190e9}
# Bytes touched per byte of MXFP4 when a hit expert is converted first: read it, write FP8, read FP8.
MXFP4_BITS, FP8_BITS = 4.25, 8


@dataclass(frozen=True)
class TokenTime:
    """Seconds of one decode step, which gives each running request a token."""

    ideal_s: float
    bound: str  # "memory bandwidth" or "arithmetic"
    bytes_per_rank: int  # of the fullest rank of all stages together
    expected_s: float | None  # ideal over the efficiency class


@dataclass(frozen=True)
class Handoff:
    """What one request moves from a prefill to a decode machine, and the seconds at each published rate."""

    rows_bytes: int
    state_bytes: int
    seconds: dict[str, float]


def token_time(
    config: ModelConfig,
    hardware: Hardware,
    placement: Placement,
    precision: Precision,
    stages: Sequence[StageMemory],
    context: int,
    concurrency: int,
) -> TokenTime | None:
    """The bound of a decode step of `concurrency` requests at `context` tokens; None where no bandwidth is known."""
    if hardware.bandwidth is None:
        return None
    touched = expert_share(config, concurrency)
    requests = -(-concurrency // placement.dp)
    num_bytes = sum(
        int(_weight_bytes(stage, touched, precision)) + requests * _request_bytes(config, stage, precision, context)
        for stage in stages
    )
    ideal, bound = num_bytes / hardware.bandwidth.amount, "memory bandwidth"
    if hardware.compute is not None:
        flops = concurrency * flops_per_token(config, context) / (placement.tp * placement.dp)
        arithmetic = flops / hardware.compute.amount
        if arithmetic > ideal:
            ideal, bound = arithmetic, "arithmetic"
    efficiency = hardware.efficiency
    return TokenTime(ideal, bound, num_bytes, ideal / efficiency.amount if efficiency else None)


def expert_share(config: ModelConfig, concurrency: int) -> float:
    """Expected share of the experts that a step touches when every token routes uniformly and alone."""
    moe = config.moe
    return 1 - (1 - moe.num_experts_per_token / moe.num_experts) ** concurrency


def handoff(config: ModelConfig, precision: Precision, context: int) -> Handoff:
    """Cache rows of the whole context and one state."""
    rows = context * cache_bytes_per_token(config, precision.latent, precision.index)
    state = state_bytes_per_sequence(config, conv_itemsize=4 if precision.latent == "float32" else 2)
    return Handoff(rows, state, {name: (rows + state) / rate for name, rate in HANDOFF_RATES.items()})


def _weight_bytes(stage: StageMemory, touched: float, precision: Precision) -> float:
    """What a step reads: the experts it touches, and all else but the embedding table and the vision tower."""
    unread = {Part.EXPERTS, Part.EMBEDDING, *VISION_PARTS}
    experts = stage.parts.get(Part.EXPERTS, 0) * touched
    if precision.experts == "mxfp4_via_fp8":
        experts *= (MXFP4_BITS + 2 * FP8_BITS) / MXFP4_BITS
    return experts + sum(size for part, size in stage.parts.items() if part not in unread)


def _request_bytes(config: ModelConfig, stage: StageMemory, precision: Precision, context: int) -> int:
    """State read and written once, latent rows attended to, and every index key once there is a choice."""
    num_full = stage.latent_bytes // LATENT_FORMATS[precision.latent](config.mla)
    latent = -(-attended_rows(config, context) // stage.dcp) * stage.latent_bytes
    index = 0
    if config.indexer is not None and context > config.indexer.topk:
        index = -(-context // stage.index_dcp) * num_full * INDEX_FORMATS[precision.index](config.indexer)
    return 2 * stage.state_bytes + latent + index

"""Opens the stream of a checkpoint's routed experts in the memory that it is granted."""

from pathlib import Path

from perilune.checkpoint.streamed import find_experts
from perilune.config.model import ModelConfig
from perilune.errors import CapacityError
from perilune.models.accounting import expert_floor_bytes, expert_slot_bytes
from perilune.ops.moe import ExpertStream


def open_stream(checkpoint: Path, config: ModelConfig, cache_bytes: int) -> ExpertStream:
    """The stream of all layers in `cache_bytes`; CapacityError where one layer of one token does not fit."""
    slot_bytes, floor = expert_slot_bytes(config), expert_floor_bytes(config)
    if cache_bytes < floor:
        raise CapacityError(
            f"expert_cache_bytes is {cache_bytes}; one layer of one token needs {config.moe.num_experts_per_token} "
            f"experts of {slot_bytes} bytes: give at least {floor}"
        )
    places = find_experts(checkpoint, config)
    return ExpertStream(places, slot_bytes=slot_bytes, num_slots=cache_bytes // slot_bytes)

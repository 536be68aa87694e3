"""How many blocks and slots the cache gets: the engine's settings and a model's groups against the memory there is."""

from collections.abc import Sequence
from dataclasses import dataclass

from perilune.cache.spec import CacheGroupSpec, bytes_per_slot, bytes_per_token
from perilune.config.engine import STORED, EngineConfig
from perilune.config.model import ModelConfig
from perilune.errors import CapacityError, ConfigError
from perilune.models.accounting import account, expert_floor_bytes

DEFAULT_SHARE = 0.25
# of the cache, for states that wait for a request with the same beginning; more than so many per seat are of little use
KEPT_STATES_SHARE = 0.25
KEPT_STATES_PER_SEAT = 4
MIN_MODEL_LEN = 256


@dataclass(frozen=True)
class CachePlan:
    """The cache of one engine. `max_model_len` is what one request can really hold.

    `num_slots` are those of running requests and `num_kept_states` more.
    """

    num_blocks: int
    block_size: int
    num_slots: int
    num_kept_states: int
    max_model_len: int
    block_bytes: int
    slot_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.num_blocks * self.block_bytes + self.num_slots * self.slot_bytes


def plan_cache(
    config: EngineConfig,
    groups: Sequence[CacheGroupSpec],
    *,
    model_dtype: str,
    max_position_embeddings: int,
    available_bytes: int,
) -> CachePlan:
    """Size the cache; CapacityError when it cannot hold one request, naming the setting to change.

    Without `num_blocks` and `cache_bytes` it takes at most `DEFAULT_SHARE` of `available_bytes`, and never more than
    `max_num_seqs` requests of full length need.
    """
    if config.max_model_len is not None and config.max_model_len > max_position_embeddings:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}; the model's context is {max_position_embeddings} tokens: "
            "lower max_model_len"
        )
    block_size, num_slots, num_kept = config.block_size, config.max_num_seqs, 0
    block_bytes = block_size * bytes_per_token(groups, model_dtype)
    slot_bytes = bytes_per_slot(groups, model_dtype)
    wanted_len = config.max_model_len or max_position_embeddings
    required_len = config.max_model_len or min(MIN_MODEL_LEN, max_position_embeddings)
    required_blocks = -(-required_len // block_size)
    num_blocks = config.num_blocks
    budget = int(available_bytes * DEFAULT_SHARE) if config.cache_bytes is None else config.cache_bytes
    if config.prefix_cache and slot_bytes:
        if config.state_cache_bytes is None:
            spare = max(0, budget - num_slots * slot_bytes - (num_blocks or required_blocks) * block_bytes)
            num_kept = min(int(spare * KEPT_STATES_SHARE) // slot_bytes, KEPT_STATES_PER_SEAT * num_slots)
            budget -= num_kept * slot_bytes
        else:
            num_kept = config.state_cache_bytes // slot_bytes
    if num_blocks is None:
        most_useful = config.max_num_seqs * -(-wanted_len // block_size)
        room = max(0, budget - num_slots * slot_bytes)
        num_blocks = min(most_useful, room // block_bytes) if block_bytes else most_useful
        if num_blocks < required_blocks:
            raise CapacityError(_too_small(config, budget, required_len, required_blocks * block_bytes, slot_bytes))
    elif num_blocks < required_blocks:
        raise CapacityError(
            f"num_blocks is {num_blocks}, {num_blocks * block_size} tokens; one request of {required_len} tokens must "
            f"fit: raise num_blocks to at least {required_blocks}"
        )
    plan = CachePlan(
        num_blocks=num_blocks,
        block_size=block_size,
        num_slots=num_slots + num_kept,
        num_kept_states=num_kept,
        max_model_len=min(wanted_len, num_blocks * block_size),
        block_bytes=block_bytes,
        slot_bytes=slot_bytes,
    )
    if plan.total_bytes > available_bytes:
        raise CapacityError(
            f"the cache would take {plan.total_bytes} bytes ({num_blocks} blocks, {num_slots} states) and "
            f"{available_bytes} are free: lower num_blocks, cache_bytes or max_num_seqs"
        )
    if plan.total_bytes + config.host_cache_bytes > available_bytes:
        raise CapacityError(
            f"host_cache_bytes is {config.host_cache_bytes}, the cache takes {plan.total_bytes} and {available_bytes} "
            f"are free: lower host_cache_bytes to at most {available_bytes - plan.total_bytes}"
        )
    return plan


def _too_small(config: EngineConfig, budget: int, required_len: int, required_bytes: int, slot_bytes: int) -> str:
    """What is missing and every setting that cures it."""
    total = required_bytes + config.max_num_seqs * slot_bytes
    origin = f"a {DEFAULT_SHARE:.0%} share of the free memory" if config.cache_bytes is None else "cache_bytes"
    remedies = [f"set cache_bytes to at least {total}"]
    num_seqs = (budget - required_bytes) // slot_bytes if slot_bytes else 0
    if num_seqs >= 1:
        remedies.append(f"lower max_num_seqs to at most {num_seqs}")
    return (
        f"the cache may take {budget} bytes ({origin}); the states of max_num_seqs = {config.max_num_seqs} requests "
        f"and the rows of one request of {required_len} tokens need {total}: {', or '.join(remedies)}"
    )


def check_streamed(config: EngineConfig, model: ModelConfig, available_bytes: int) -> None:
    """CapacityError where the weights that stay in memory and the cache of experts exceed `available_bytes`."""
    if config.expert_cache_bytes is None:
        return
    resident = account(model, is_quantised=config.dense_weights != STORED).resident_bytes
    if resident + config.expert_cache_bytes <= available_bytes:
        return
    room, floor = available_bytes - resident, expert_floor_bytes(model)
    remedies = [f"lower expert_cache_bytes to at most {room}"] if room >= floor else []
    if config.dense_weights == STORED:
        room = available_bytes - account(model, is_quantised=True).resident_bytes
        if room >= config.expert_cache_bytes:
            remedies.append("set dense_weights to int8")
        elif room >= floor:
            remedies.append(f"set dense_weights to int8 and expert_cache_bytes to at most {room}")
    remedies = remedies or [f"free memory until there are {resident + config.expert_cache_bytes}"]
    raise CapacityError(
        f"weights outside the routed experts take {resident} bytes and expert_cache_bytes is "
        f"{config.expert_cache_bytes}, but {available_bytes} are free: {', or '.join(remedies)}"
    )


def describe_weights(config: EngineConfig, model: ModelConfig, available_bytes: int) -> str:
    """What the weights will take, for the log before they are read."""
    totals = account(model, is_quantised=config.dense_weights != STORED)
    free = f"{available_bytes / 2**30:.2f} GiB are free for this process"
    if config.expert_cache_bytes is not None:
        return (
            f"weights outside the routed experts take {totals.resident_bytes / 2**30:.2f} GiB, the expert cache "
            f"{config.expert_cache_bytes / 2**30:.2f} GiB; {free}"
        )
    made = totals.converted_bytes if config.dense_weights != STORED else 0
    return (
        f"weights take {totals.total_size / 2**30:.2f} GiB, of which {made / 2**30:.2f} GiB are converted into memory "
        f"and the rest stays mapped from the files; {free}"
    )


def describe_cache(plan: CachePlan, available_bytes: int) -> str:
    """What the cache will take, for the log before it is allocated."""
    rows, states = plan.num_blocks * plan.block_bytes, plan.num_slots * plan.slot_bytes
    return (
        f"the cache takes {rows / 2**30:.2f} GiB for {plan.num_blocks * plan.block_size} tokens and "
        f"{states / 2**30:.2f} GiB for {plan.num_slots} states; {available_bytes / 2**30:.2f} GiB are free"
    )

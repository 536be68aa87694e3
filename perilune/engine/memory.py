"""How many blocks and slots the cache gets: the engine's settings and a model's groups against the memory there is."""

from collections.abc import Sequence
from dataclasses import dataclass

from perilune.cache.spec import CacheGroupSpec, bytes_per_slot, bytes_per_token
from perilune.config.engine import EngineConfig
from perilune.errors import CapacityError, ConfigError

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

    Without `num_blocks` and `cache_bytes` it takes at most `DEFAULT_SHARE` of `available_bytes`, unless one request
    needs more, and never more than `max_num_seqs` requests of full length need.
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
    required = required_len(config, max_position_embeddings)
    required_blocks = -(-required // block_size)
    num_blocks = config.num_blocks
    least = required_blocks * block_bytes + num_slots * slot_bytes
    budget = config.cache_bytes
    if budget is None:
        left = max(0, available_bytes - config.host_cache_bytes - (config.state_cache_bytes or 0))
        budget = max(int(left * DEFAULT_SHARE), min(least, left))
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
            raise CapacityError(_too_small(config, budget, required, required_blocks * block_bytes, slot_bytes))
    elif num_blocks < required_blocks:
        raise CapacityError(
            f"num_blocks is {num_blocks}, {num_blocks * block_size} tokens; one request of {required} tokens must "
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


def least_cache_bytes(
    config: EngineConfig, groups: Sequence[CacheGroupSpec], *, model_dtype: str, max_position_embeddings: int
) -> int:
    """Memory without which `plan_cache` refuses these settings, the host tier included."""
    block_bytes = config.block_size * bytes_per_token(groups, model_dtype)
    slot_bytes = bytes_per_slot(groups, model_dtype)
    seats, beside = config.max_num_seqs * slot_bytes, config.host_cache_bytes
    if config.state_cache_bytes is not None and slot_bytes:
        beside += config.state_cache_bytes // slot_bytes * slot_bytes
    if config.num_blocks is not None:
        return config.num_blocks * block_bytes + seats + beside
    required = -(-required_len(config, max_position_embeddings) // config.block_size) * block_bytes
    if config.cache_bytes is None:
        return required + seats + beside
    most_useful = config.max_num_seqs * -(-(config.max_model_len or max_position_embeddings) // config.block_size)
    if config.prefix_cache and config.state_cache_bytes is None:
        seats *= 1 + KEPT_STATES_PER_SEAT
    return min(config.cache_bytes, most_useful * block_bytes + seats) + beside


def required_len(config: EngineConfig, max_position_embeddings: int) -> int:
    """Tokens of one request that every cache must hold."""
    return config.max_model_len or min(MIN_MODEL_LEN, max_position_embeddings)


def _too_small(config: EngineConfig, budget: int, required_len: int, required_bytes: int, slot_bytes: int) -> str:
    """What is missing and every setting that cures it."""
    total = required_bytes + config.max_num_seqs * slot_bytes
    origin = "of the free memory" if config.cache_bytes is None else "cache_bytes"
    remedies = [f"set cache_bytes to at least {total}"]
    num_seqs = (budget - required_bytes) // slot_bytes if slot_bytes else 0
    if num_seqs >= 1:
        remedies.append(f"lower max_num_seqs to at most {num_seqs}")
    return (
        f"the cache may take {budget} bytes ({origin}); the states of max_num_seqs = {config.max_num_seqs} requests "
        f"and the rows of one request of {required_len} tokens need {total}: {', or '.join(remedies)}"
    )

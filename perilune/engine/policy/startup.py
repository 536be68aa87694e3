"""What an engine will take of memory, part by part, before any of it is read or allocated; and what would fit instead.

Pure arithmetic over settings and sizes. Decides whether routed experts stay in the files, and how much memory they get.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict

from perilune.cache.spec import CacheGroupSpec
from perilune.config.engine import INT8, STORED, EngineConfig
from perilune.engine.memory import DEFAULT_SHARE, CachePlan, least_cache_bytes, plan_cache, required_len
from perilune.errors import CapacityError
from perilune.platform import FreeMemory

# Of a `memory_budget_bytes`, for the programs themselves: interpreter, libraries and buffers of engine and server.
PROGRAM_BYTES = 512 * 2**20
BUDGET = "memory_budget_bytes"


class _How(TypedDict):
    """What the size of a cache depends on besides settings and groups."""

    model_dtype: str
    max_position_embeddings: int


@dataclass(frozen=True)
class Footprint:
    """Bytes of what an engine holds besides its cache.

    `resident_bytes`: weights outside the routed experts, as they are held; `packed_bytes` the same with projections in
    8 bits. Streamed experts take `floor_bytes` at least and `slots_bytes` all together; `streams` says whether the
    checkpoint's can be. `step_bytes` is scratch of one step, `images_bytes` what is kept of pictures.
    """

    resident_bytes: int
    packed_bytes: int
    experts_bytes: int
    floor_bytes: int
    slots_bytes: int
    streams: bool
    draft_bytes: int
    step_bytes: int
    images_bytes: int

    @property
    def fixed_bytes(self) -> int:
        return self.draft_bytes + self.step_bytes + self.images_bytes


@dataclass(frozen=True)
class StartPlan:
    """`settings` are those asked for, with sizes in place of what was open; they plan to the same again."""

    settings: EngineConfig
    footprint: Footprint
    cache: CachePlan
    room_bytes: int
    bound: str
    is_chosen: bool  # whether it was the memory, and nobody else, that had experts stay in their files
    cache_bound: str

    @property
    def weights_bytes(self) -> int:
        """Weights in memory, routed experts included."""
        streamed = self.settings.expert_cache_bytes
        return self.footprint.resident_bytes + (self.footprint.experts_bytes if streamed is None else streamed)

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.footprint.fixed_bytes + self.cache.total_bytes + self.settings.host_cache_bytes

    def lines(self) -> list[str]:
        """The plan for a log, before anything of it is done."""
        config, footprint, cache = self.settings, self.footprint, self.cache
        parts = [("weights outside the routed experts", footprint.resident_bytes, f"{config.dense_weights}")]
        if config.expert_cache_bytes is None:
            parts.append(("routed experts", footprint.experts_bytes, "all of them"))
        else:
            share = min(1.0, config.expert_cache_bytes / footprint.slots_bytes)
            parts.append(("routed experts", config.expert_cache_bytes, f"{share:.0%} of them, the rest stays on disk"))
        num_tokens = cache.num_blocks * cache.block_size
        states = f"{cache.num_slots - cache.num_kept_states} for running requests, {cache.num_kept_states} kept"
        parts += [
            ("draft model", footprint.draft_bytes, ""),
            (f"scratch of a step of {config.max_num_batched_tokens} tokens", footprint.step_bytes, ""),
            ("pictures kept", footprint.images_bytes, ""),
            ("cached rows", cache.num_blocks * cache.block_bytes, f"{num_tokens} tokens"),
            ("states", cache.num_slots * cache.slot_bytes, states),
            ("what the cache gives up", config.host_cache_bytes, ""),
        ]
        found = [f"start-up plan: {_gib(self.total_bytes)} of {_gib(self.room_bytes)}, which {self.bound} leaves"]
        found += [f"  {_gib(size):>12}  {name}{note and ': ' + note}" for name, size, note in parts if size]
        at_once = min(config.max_num_seqs, num_tokens // cache.max_model_len)
        found.append(
            f"  longest context {cache.max_model_len} tokens, {at_once} of them at once; limited by {self.cache_bound}"
        )
        return found


def plan_start(
    config: EngineConfig,
    footprint: Footprint,
    groups: Sequence[CacheGroupSpec],
    *,
    model_dtype: str,
    max_position_embeddings: int,
    free: FreeMemory,
) -> StartPlan:
    """Divide the memory there is; CapacityError says what would fit where the settings do not.

    Without `expert_cache_bytes`, experts stay in their files where memory cannot hold them all, and then get what the
    rest leaves.
    """
    room, bound = _room(config, free)
    how: _How = {"model_dtype": model_dtype, "max_position_embeddings": max_position_embeddings}
    least = least_cache_bytes(config, groups, **how)
    spare = room - footprint.resident_bytes - footprint.fixed_bytes
    experts = config.expert_cache_bytes
    is_chosen = experts is None and footprint.streams and footprint.experts_bytes + least > spare
    taken = footprint.floor_bytes if is_chosen else footprint.experts_bytes if experts is None else experts
    if taken + least > spare:
        raise CapacityError(_Refused(config, footprint, groups, room, bound, how).reason())
    cache = plan_cache(config, groups, **how, available_bytes=spare - taken)
    if is_chosen:
        experts = min(footprint.slots_bytes, spare - cache.total_bytes - config.host_cache_bytes)
    kept = cache.num_kept_states * cache.slot_bytes if config.prefix_cache and cache.slot_bytes else None
    settings = replace(
        config, expert_cache_bytes=experts, cache_bytes=None, num_blocks=cache.num_blocks, state_cache_bytes=kept
    )
    cache_bound = _cache_bound(config, cache, max_position_embeddings, bound)
    return StartPlan(settings, footprint, cache, room, bound, is_chosen, cache_bound)


def _room(config: EngineConfig, free: FreeMemory) -> tuple[int, str]:
    """Bytes for all parts of the plan, and what bounds them."""
    if config.memory_budget_bytes is not None and config.memory_budget_bytes - PROGRAM_BYTES <= free.num_bytes:
        return config.memory_budget_bytes - PROGRAM_BYTES, f"{BUDGET} ({_gib(PROGRAM_BYTES)} of it for the programs)"
    return free.num_bytes, free.bound


def _taken(config: EngineConfig, footprint: Footprint) -> int:
    """Bytes of routed experts in memory, at least."""
    if config.expert_cache_bytes is not None:
        return config.expert_cache_bytes
    return min(footprint.floor_bytes, footprint.experts_bytes) if footprint.streams else footprint.experts_bytes


def _cache_bound(config: EngineConfig, cache: CachePlan, max_position_embeddings: int, bound: str) -> str:
    wanted = config.max_model_len or max_position_embeddings
    if cache.num_blocks * cache.block_size >= config.max_num_seqs * wanted:
        return f"max_num_seqs ({config.max_num_seqs} requests of {wanted} tokens fit)"
    for name in ("num_blocks", "cache_bytes"):
        if getattr(config, name) is not None:
            return name
    return f"a {DEFAULT_SHARE:.0%} share of what the rest leaves of {bound.split(' (')[0]}; cache_bytes can give more"


@dataclass(frozen=True)
class _Refused:
    """Settings that need more than `room` bytes, as they were asked for."""

    config: EngineConfig
    footprint: Footprint
    groups: Sequence[CacheGroupSpec]
    room: int
    bound: str
    how: _How

    def reason(self) -> str:
        """What is needed by part, what there is, and every change that makes it fit."""
        footprint, total, experts = self.footprint, self._needed(self.config), _taken(self.config, self.footprint)
        cache = total - footprint.resident_bytes - footprint.fixed_bytes - experts
        streamed = "" if footprint.streams else " (stored unpacked, which cannot be streamed)"
        return (
            f"{total} bytes are needed at least and {self.bound} leaves {max(0, self.room)}: weights outside the "
            f"routed experts {footprint.resident_bytes}, routed experts {experts}{streamed}, draft, pictures and "
            f"scratch {footprint.fixed_bytes}, cache {cache}. What fits: {', or '.join(self._remedies(total))}"
        )

    def _remedies(self, total: int) -> list[str]:
        found = self._lowered("", self.config)
        packed = replace(self.config, dense_weights=INT8)
        if self.config.dense_weights == STORED and self.footprint.packed_bytes < self.footprint.resident_bytes:
            fits = self._needed(packed) <= self.room
            found += (
                [f"set dense_weights to {INT8}"] if fits else self._lowered(f"set dense_weights to {INT8} and ", packed)
            )
        if self.bound.startswith(BUDGET):
            return [*found, f"raise {BUDGET} to at least {total + PROGRAM_BYTES}"]
        return [*found, f"free memory until there are {total}"]

    def _lowered(self, prefix: str, start: EngineConfig) -> list[str]:
        required = required_len(start, self.how["max_position_embeddings"])
        least = {
            "expert_cache_bytes": self.footprint.floor_bytes,
            "num_blocks": -(-required // start.block_size),
            "cache_bytes": least_cache_bytes(
                replace(start, cache_bytes=None, host_cache_bytes=0, state_cache_bytes=None), self.groups, **self.how
            ),
            "max_num_seqs": 1,
            "host_cache_bytes": 0,
        }
        found = []
        for setting, low in least.items():
            high = getattr(start, setting)
            if high is not None and low < high and self._needed(_changed(start, setting, low)) <= self.room:
                most = bisect_right(range(low, high), self.room, key=self._cost(start, setting)) - 1 + low
                found.append(f"{prefix}lower {setting} to at most {most}")
        return found

    def _cost(self, start: EngineConfig, setting: str) -> Callable[[int], int]:
        return lambda value: self._needed(_changed(start, setting, value))

    def _needed(self, config: EngineConfig) -> int:
        held = self.footprint.resident_bytes
        if config.dense_weights != self.config.dense_weights:
            held = self.footprint.packed_bytes
        least = least_cache_bytes(config, self.groups, **self.how)
        return held + self.footprint.fixed_bytes + _taken(config, self.footprint) + least


def _changed(config: EngineConfig, setting: str, value: int) -> EngineConfig:
    changes: dict[str, Any] = {setting: value}
    return replace(config, **changes)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"

"""The tiers that the settings ask for, and whose their contents are."""

from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from perilune.cache.spec import CacheGroupSpec, resolve_dtype
from perilune.cache.tiers.disk import DiskTier
from perilune.cache.tiers.fingerprint import Fingerprint, fingerprint
from perilune.cache.tiers.stack import TierStack
from perilune.config.engine import EngineConfig
from perilune.ops import _native

DEFAULT_KV_DIR_BYTES = 16 * 2**30


def open_tiers(
    config: EngineConfig, groups: Sequence[CacheGroupSpec], *, dtype: str, weights: str | None
) -> TierStack | None:
    """The tiers below the cache of a model in `dtype`; None where there are none. ConfigError as `DiskTier` raises it.

    `weights` says which checkpoint it is, and has to be given for a `kv_dir`.
    """
    if config.kv_dir is None:
        return TierStack(config.host_cache_bytes) if config.host_cache_bytes else None
    assert weights is not None, "a kv_dir needs to know whose weights it serves"
    identity = _identity(config, groups, dtype, weights)
    budget_bytes = DEFAULT_KV_DIR_BYTES if config.kv_dir_bytes is None else config.kv_dir_bytes
    return TierStack(config.host_cache_bytes, DiskTier(Path(config.kv_dir), budget_bytes, identity))


def _identity(config: EngineConfig, groups: Sequence[CacheGroupSpec], dtype: str, weights: str) -> Fingerprint:
    """Everything that the bytes behind the same tokens depend on."""
    return fingerprint(
        {
            "perilune": version("perilune"),
            "checkpoint": weights,
            "dtype": dtype,
            "dense_weights": config.dense_weights,
            "activations": config.activations,
            "eps": asdict(config.eps),
            "ops": dict(config.ops),
            "instruction_set": None if _native.absence() is not None else _native.core().isa(),
            "block_size": config.block_size,
            "groups": [
                [group.name, group.kind, group.num_layers, list(group.row_shape), resolve_dtype(group.dtype, dtype)]
                for group in groups
            ],
        }
    )

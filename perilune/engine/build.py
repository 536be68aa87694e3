"""From a checkpoint directory and settings to an engine: the one place that puts the parts together."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from perilune.cache.manager import CacheManager
from perilune.cache.sealing import SealPolicy
from perilune.cache.spec import bytes_per_slot
from perilune.cache.storage import CacheStorage
from perilune.cache.tiers.identity import checkpoint_identity
from perilune.cache.tiers.ledger import TierLedger
from perilune.checkpoint.index import stores_packed
from perilune.checkpoint.loader import load_state
from perilune.checkpoint.quantise import load_quantised_state
from perilune.checkpoint.streamed import load_resident_state
from perilune.config.engine import AUTO, FP8, INT8, MXFP4, NGRAM, NGRAM_DRAFTS, PRIORITY, STORED, EngineConfig
from perilune.config.media import PREPROCESSOR_FILE, MediaConfig, load_media_config
from perilune.config.model import ModelConfig
from perilune.config.parse import load_model_config
from perilune.engine.core import CoreLimits, EngineCore
from perilune.engine.images.encoder import ImageEncoder
from perilune.engine.memory import plan_cache
from perilune.engine.policy.startup import Footprint, StartPlan, plan_start
from perilune.engine.steps.draft_model import DraftCheckpoint, open_draft
from perilune.engine.steps.runner import ModelRunner
from perilune.engine.steps.speculation import Speculation, num_verified_rows
from perilune.engine.steps.transfers import TierTransfers
from perilune.engine.tiers import open_tiers
from perilune.errors import ConfigError
from perilune.models.accounting import (
    account,
    expert_floor_bytes,
    expert_slot_bytes,
    num_experts_total,
    step_workspace_bytes,
)
from perilune.models.draft import block as draft_block
from perilune.models.draft.model import DraftModel
from perilune.models.draft.tapped import owed_bytes
from perilune.models.model import KimiModel, build_model, cache_groups, record_groups
from perilune.models.stream import open_stream
from perilune.ops.linear import LinearWeight, multiplies_bfloat16_with
from perilune.ops.registry import apply_overrides
from perilune.platform import bfloat16_pays, free_memory
from perilune.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
# What is small enough to compute in float32, as a share of the free memory with every weight in it.
FLOAT32_SHARE = 0.125

_TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_QUANTISED_DTYPES = {INT8: torch.int8, FP8: torch.float8_e4m3fn}
_CACHED_VALUES = {AUTO: None, **_QUANTISED_DTYPES, MXFP4: torch.uint8}


def build_engine(checkpoint: Path, config: EngineConfig) -> EngineCore:
    """Load a checkpoint into an engine that is ready to step.

    Raises CheckpointError, ConfigError, BackendError or CapacityError.
    """
    # a wrong directory is best explained by its missing config.json
    model_config = load_model_config(checkpoint)
    opened = open_draft(checkpoint, config, model_config)
    tokenizer = Tokenizer.load(checkpoint)
    plan = plan_engine(checkpoint, config, model_config, opened)
    for line in plan.lines():
        logger.info(line)
    if plan.is_chosen:
        logger.warning("memory cannot hold the routed experts: those not in it are read from disk as needed")
    config = plan.settings
    model = load_model(checkpoint, config)
    media = None if model.vision is None else _load_media(checkpoint, model.config)
    draft = None if opened is None else opened.build(model)
    weights = None if config.kv_dir is None else checkpoint_identity(checkpoint)
    if weights is not None and opened is not None:  # whose rows lie beside those of the model
        weights += checkpoint_identity(opened.directory)
    return assemble_engine(model, tokenizer, config, media, weights=weights, draft=draft)


def _load_media(checkpoint: Path, config: ModelConfig) -> MediaConfig:
    media = load_media_config(checkpoint)
    assert config.vision is not None
    expected = (config.vision.patch_size, config.vision.merge_kernel_size[0])
    if (media.patch_size, media.merge_size) != expected:
        raise ConfigError(
            f"{checkpoint / PREPROCESSOR_FILE}: patch_size and merge_kernel_size are {media.patch_size} and "
            f"{media.merge_size}; allowed are those of vision_config in config.json, {expected[0]} and {expected[1]}"
        )
    return media


def load_model(checkpoint: Path, config: EngineConfig, *, check_scales: bool = False) -> KimiModel:
    """Load a checkpoint's model in the dtypes and on the ops that `config` asks for; raises as `build_engine`."""
    apply_overrides(config.ops)
    model_config = load_model_config(checkpoint)
    config.check_index_cache(model_config)
    config = plan_engine(checkpoint, config, model_config, None).settings
    assert config.dtype is not None
    dtype = _TORCH_DTYPES[config.dtype]
    cache_bytes = config.expert_cache_bytes
    stream = None if cache_bytes is None else open_stream(checkpoint, model_config, cache_bytes)
    state = _load(checkpoint, model_config, config, check_scales)
    is_int8 = config.activations == INT8
    if is_int8 and config.dense_weights != INT8 and stream is None and not _has_packed(state):
        raise ConfigError(
            f"activations is int8, which multiplies int8 and MXFP4 weights, and {checkpoint} loaded with dense_weights "
            f"{config.dense_weights!r} has neither: set dense_weights to int8, or leave activations at exact"
        )
    return build_model(
        model_config,
        state,
        config.eps,
        dtype,
        int8_activations=is_int8,
        row_values=_CACHED_VALUES[config.cache_dtype],
        key_values=_CACHED_VALUES[config.index_cache_dtype],
        stream=stream,
    )


def _load(
    checkpoint: Path, config: ModelConfig, settings: EngineConfig, check_scales: bool
) -> Mapping[str, LinearWeight]:
    dense_weights = settings.dense_weights
    if settings.expert_cache_bytes is not None:
        return load_resident_state(checkpoint, config, _QUANTISED_DTYPES.get(dense_weights))
    if dense_weights == STORED:
        return load_state(checkpoint, config, check_scales=check_scales)
    return load_quantised_state(checkpoint, config, _QUANTISED_DTYPES[dense_weights], check_scales=check_scales)


def _has_packed(state: Mapping[str, LinearWeight]) -> bool:
    return any(name.endswith(".weight_packed") for name in state)


def plan_engine(checkpoint: Path, config: EngineConfig, model: ModelConfig, draft: DraftCheckpoint | None) -> StartPlan:
    """What an engine of these settings will take of this machine's memory; CapacityError where it does not fit."""
    free = free_memory()
    available = min(free.num_bytes, config.memory_budget_bytes or free.num_bytes)
    dtype = config.dtype or _suitable_dtype(model, available)
    groups = cache_groups(model, _CACHED_VALUES[config.cache_dtype], _CACHED_VALUES[config.index_cache_dtype])
    if draft is not None:
        groups = (*groups, *draft_block.cache_groups(draft.config))
    return plan_start(
        replace(config, dtype=dtype),
        _footprint(checkpoint, config, model, draft, dtype),
        groups,
        model_dtype=dtype,
        max_position_embeddings=model.max_position_embeddings,
        free=free,
    )


def _suitable_dtype(config: ModelConfig, available_bytes: int) -> str:
    is_small = account(config).float32_copy_bytes < available_bytes * FLOAT32_SHARE
    return "float32" if is_small and not bfloat16_pays() else "bfloat16"


def _footprint(
    checkpoint: Path, config: EngineConfig, model: ModelConfig, draft: DraftCheckpoint | None, dtype: str
) -> Footprint:
    itemsize = _TORCH_DTYPES[dtype].itemsize
    stored, packed = (account(model, is_quantised=is_quantised) for is_quantised in (False, True))
    is_packed = stores_packed(checkpoint)
    experts = stored.total_size - stored.resident_bytes
    if not is_packed:  # entries of bfloat16, copied where the compute dtype is another
        experts = itemsize * stored.expert_parameters
    resident = stored.resident_bytes if config.dense_weights == STORED else packed.resident_bytes
    if not multiplies_bfloat16_with(_TORCH_DTYPES[dtype]) and config.dense_weights == STORED:
        resident = max(resident, stored.float32_copy_bytes)
    step = step_workspace_bytes(model, config.max_num_batched_tokens, config.max_num_seqs, itemsize)
    if draft is not None or config.speculative == NGRAM:
        num_drafts = config.num_drafts or NGRAM_DRAFTS if draft is None else draft.num_drafts
        step += num_verified_rows(config, num_drafts) * bytes_per_slot(record_groups(model), dtype)
    if draft is not None:
        step += owed_bytes(draft.config, itemsize)
    return Footprint(
        resident_bytes=resident,
        packed_bytes=packed.resident_bytes,
        experts_bytes=experts,
        floor_bytes=expert_floor_bytes(model),
        slots_bytes=num_experts_total(model) * expert_slot_bytes(model),
        streams=is_packed,
        draft_bytes=0 if draft is None else sum(tensor.nbytes for tensor in draft.state.values()),
        step_bytes=step,
        images_bytes=0 if model.vision is None else config.image_cache_bytes,
    )


def assemble_engine(
    model: KimiModel,
    tokenizer: Tokenizer | None,
    config: EngineConfig,
    media: MediaConfig | None = None,
    *,
    weights: str | None = None,
    draft: DraftModel | None = None,
) -> EngineCore:
    """Put cache, scheduler and runner around a model; without a tokenizer, stop strings are refused.

    `media` says how a model with a vision tower wants its pictures; without it pictures are refused.
    `weights` says which checkpoint the model is of, for what it leaves in a `kv_dir`. `draft` guesses tokens.
    """
    model_config = model.config
    dtype = next(name for name, value in _TORCH_DTYPES.items() if value is model.dtype)
    speculation = Speculation.of(model, draft, config, dtype)
    served = model if speculation is None else speculation.served
    groups = served.cache_groups()
    available = free_memory().num_bytes - (0 if speculation is None else speculation.record_bytes)
    plan = plan_cache(
        config,
        groups,
        model_dtype=dtype,
        max_position_embeddings=model_config.max_position_embeddings,
        available_bytes=available,
    )
    storage = CacheStorage(
        groups,
        num_blocks=plan.num_blocks,
        block_size=plan.block_size,
        num_slots=plan.num_slots,
        dtype=dtype,
    )
    images = None
    if model.vision is not None and media is not None:
        images = ImageEncoder(model.vision, media, model.dtype, cache_bytes=config.image_cache_bytes)
    stack = open_tiers(config, groups, dtype=dtype, weights=weights)
    tiers = None if stack is None else TierTransfers(storage, stack)
    drafting = None if speculation is None else speculation.drafting(storage)
    runner = ModelRunner(served, storage, block_size=plan.block_size, images=images, tiers=tiers, drafting=drafting)
    if speculation is not None and drafting is not None:
        speculation.measure(runner, drafting, plan)
    return EngineCore(
        runner,
        CacheManager(
            num_blocks=plan.num_blocks,
            block_size=plan.block_size,
            num_slots=plan.num_slots,
            policy=SealPolicy(config.state_interval, model.grain) if config.prefix_cache else None,
            ledger=None if stack is None else TierLedger(stack.find, plan.block_size),
        ),
        CoreLimits(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=plan.max_model_len,
            vocab_size=model_config.vocab_size,
            eos_token_ids=(model_config.eos_token_id,) if tokenizer is None else tokenizer.eos_token_ids,
            media=media,
            prompt_grain=model.grain,
            max_itl_s=None if config.max_itl_ms is None else config.max_itl_ms / 1000,
            has_priorities=config.scheduling_policy == PRIORITY,
            max_waiting=config.max_waiting,
        ),
        tokenizer,
        images=images,
        tiers=tiers,
        drafting=drafting,
        grammar_backend=config.grammar_backend,
    )

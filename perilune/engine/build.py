"""From a checkpoint directory and settings to an engine: the one place that puts the parts together."""

import logging
from collections.abc import Mapping
from pathlib import Path

import torch

from perilune.cache.manager import CacheManager
from perilune.cache.sealing import SealPolicy
from perilune.cache.storage import CacheStorage
from perilune.cache.tiers.identity import checkpoint_identity
from perilune.cache.tiers.ledger import TierLedger
from perilune.checkpoint.loader import load_state
from perilune.checkpoint.quantise import load_quantised_state
from perilune.checkpoint.streamed import load_resident_state
from perilune.config.engine import AUTO, FP8, INT8, MXFP4, PRIORITY, STORED, EngineConfig
from perilune.config.media import PREPROCESSOR_FILE, MediaConfig, load_media_config
from perilune.config.model import ModelConfig
from perilune.config.parse import load_model_config
from perilune.engine.core import CoreLimits, EngineCore
from perilune.engine.images.encoder import ImageEncoder
from perilune.engine.memory import check_streamed, describe_cache, describe_weights, plan_cache
from perilune.engine.steps.draft_model import open_draft
from perilune.engine.steps.runner import ModelRunner
from perilune.engine.steps.speculation import Speculation
from perilune.engine.steps.transfers import TierTransfers
from perilune.engine.tiers import open_tiers
from perilune.errors import CapacityError, ConfigError
from perilune.models.accounting import account
from perilune.models.draft.model import DraftModel
from perilune.models.model import KimiModel, build_model
from perilune.models.stream import open_stream
from perilune.ops.linear import LinearWeight
from perilune.ops.registry import apply_overrides
from perilune.platform import available_memory_bytes, bfloat16_pays
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
    opened = open_draft(checkpoint, config, load_model_config(checkpoint))
    tokenizer = Tokenizer.load(checkpoint)
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
    dtype = _TORCH_DTYPES[config.dtype or _suitable_dtype(model_config)]
    available = available_memory_bytes()
    check_streamed(config, model_config, available)
    logger.info(describe_weights(config, model_config, available))
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
    needed, available = account(config, is_quantised=True).converted_bytes, available_memory_bytes()
    if needed > available:
        raise CapacityError(
            f"dense_weights is {dense_weights}, which takes {needed} bytes, and {available} are free: "
            f"leave it at {STORED}, whose weights stay in the file, or free memory"
        )
    return load_quantised_state(checkpoint, config, _QUANTISED_DTYPES[dense_weights], check_scales=check_scales)


def _has_packed(state: Mapping[str, LinearWeight]) -> bool:
    return any(name.endswith(".weight_packed") for name in state)


def _suitable_dtype(config: ModelConfig) -> str:
    is_small = account(config).float32_copy_bytes < available_memory_bytes() * FLOAT32_SHARE
    return "float32" if is_small and not bfloat16_pays() else "bfloat16"


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
    available = available_memory_bytes() - (0 if speculation is None else speculation.record_bytes)
    plan = plan_cache(
        config,
        groups,
        model_dtype=dtype,
        max_position_embeddings=model_config.max_position_embeddings,
        available_bytes=available,
    )
    logger.info(describe_cache(plan, available))
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
    )

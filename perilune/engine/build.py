"""From a checkpoint directory and settings to an engine: the one place that puts the parts together."""

from pathlib import Path

import torch

from perilune.cache.manager import CacheManager
from perilune.cache.storage import CacheStorage
from perilune.checkpoint.loader import load_state
from perilune.config.engine import EngineConfig
from perilune.config.model import ModelConfig
from perilune.config.parse import load_model_config
from perilune.engine.core import CoreLimits, EngineCore
from perilune.engine.memory import plan_cache
from perilune.engine.runner import ModelRunner
from perilune.models.accounting import account
from perilune.models.model import KimiModel, build_model
from perilune.ops.registry import apply_overrides
from perilune.platform import available_memory_bytes, bfloat16_pays
from perilune.text.tokenizer import Tokenizer

# float32 needs a copy of every weight that is stored in bfloat16: only a model that is small here may have one
FLOAT32_SHARE = 0.125

_TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def build_engine(checkpoint: Path, config: EngineConfig) -> EngineCore:
    """Load a checkpoint into an engine that is ready to step.

    Raises CheckpointError, ConfigError, BackendError or CapacityError.
    """
    load_model_config(checkpoint)  # a wrong directory is best explained by its missing config.json
    tokenizer = Tokenizer.load(checkpoint)
    return assemble_engine(load_model(checkpoint, config), tokenizer, config)


def load_model(checkpoint: Path, config: EngineConfig) -> KimiModel:
    """Load a checkpoint's text model in the dtype and on the ops that `config` asks for; raises as `build_engine`."""
    apply_overrides(config.ops)
    model_config = load_model_config(checkpoint)
    dtype = config.dtype or _suitable_dtype(model_config)
    return build_model(model_config, load_state(checkpoint, model_config), config.eps, _TORCH_DTYPES[dtype])


def _suitable_dtype(config: ModelConfig) -> str:
    is_small = account(config).float32_copy_bytes < available_memory_bytes() * FLOAT32_SHARE
    return "float32" if is_small and not bfloat16_pays() else "bfloat16"


def assemble_engine(model: KimiModel, tokenizer: Tokenizer | None, config: EngineConfig) -> EngineCore:
    """Put cache, scheduler and runner around a model; without a tokenizer, stop strings are refused."""
    model_config = model.config
    dtype = next(name for name, value in _TORCH_DTYPES.items() if value is model.dtype)
    groups = model.cache_groups()
    plan = plan_cache(
        config,
        groups,
        model_dtype=dtype,
        max_position_embeddings=model_config.max_position_embeddings,
        available_bytes=available_memory_bytes(),
    )
    storage = CacheStorage(
        groups,
        num_blocks=plan.num_blocks,
        block_size=plan.block_size,
        num_slots=plan.num_slots,
        dtype=dtype,
    )
    return EngineCore(
        ModelRunner(model, storage, block_size=plan.block_size),
        CacheManager(num_blocks=plan.num_blocks, block_size=plan.block_size, num_slots=plan.num_slots),
        CoreLimits(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=plan.max_model_len,
            vocab_size=model_config.vocab_size,
            eos_token_ids=(model_config.eos_token_id,) if tokenizer is None else tokenizer.eos_token_ids,
        ),
        tokenizer,
    )

"""Reads the released `config.json` into a `ModelConfig`, strictly, and writes the same form back.

Every key is either used, demanded at the one supported value, or listed as without effect.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from perilune.config.model import ModelConfig, VisionConfig
from perilune.config.parts import (
    FIXED_VISION,
    NO_EFFECT_KEYS,
    QUANTIZED_WEIGHTS,
    check_quantization,
    parse_indexer,
    parse_kda,
    parse_mla,
    parse_moe,
    parse_vision,
)
from perilune.config.section import Section
from perilune.errors import ConfigError

ARCHITECTURES = {"KimiK3ForConditionalGeneration": "k3", "KimiK31ForConditionalGeneration": "k31"}
MODEL_TYPES = {"k3": "kimi_k3", "k31": "kimi_k31"}

# The one form of each choice that the architecture makes.
FIXED_TEXT: dict[str, object] = {
    "hidden_act": "situ",
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "moe_layer_freq": 1,
    "moe_router_activation_func": "sigmoid",
    "topk_method": "noaux_tc",
    "latent_moe_use_norm": True,
    "num_expert_group": 1,
    "topk_group": 1,
}


def load_model_config(path: Path) -> ModelConfig:
    """Reads `config.json`, given as the file or as the directory that holds it; raises ConfigError naming the file."""
    file = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{file} does not exist; give a checkpoint directory with a config.json") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read as JSON: {error}") from None
    try:
        return parse_model_config(values)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def parse_model_config(values: dict[str, Any]) -> ModelConfig:
    """Turns the parsed `config.json` into a ModelConfig; raises ConfigError naming key, found and allowed."""
    top = Section(values, ignored=NO_EFFECT_KEYS)
    if "vision_config" in top and "text_config" not in top:
        raise ConfigError("text_config is missing; a vision tower alone is not a model that can be served")
    text = top.section("text_config", NO_EFFECT_KEYS)
    arch = _architecture(top)
    _fixed_values(top, text)
    num_layers = text.integer("num_hidden_layers")
    kda, full_attn_layers = parse_kda(text.section("linear_attn_config"), num_layers)
    has_vision = top.get("vision_config", None) is not None
    vision = parse_vision(top.section("vision_config", NO_EFFECT_KEYS)) if has_vision else None
    config = ModelConfig(
        arch=arch,
        vocab_size=text.integer("vocab_size"),
        hidden_size=text.integer("hidden_size"),
        intermediate_size=text.integer("intermediate_size"),
        num_hidden_layers=num_layers,
        first_k_dense_replace=text.integer("first_k_dense_replace", minimum=0),
        attn_res_block_size=text.integer("attn_res_block_size"),
        max_position_embeddings=text.integer("max_position_embeddings"),
        rms_norm_eps=text.positive("rms_norm_eps"),
        activation_situ_beta=text.positive("activation_situ_beta"),
        activation_situ_linear_beta=text.positive("activation_situ_linear_beta"),
        initializer_range=text.positive("initializer_range"),
        bos_token_id=_token_id(top, text, "bos_token_id"),
        eos_token_id=_token_id(top, text, "eos_token_id"),
        pad_token_id=_token_id(top, text, "pad_token_id"),
        kda=kda,
        mla=parse_mla(text),
        moe=parse_moe(text),
        full_attn_layers=full_attn_layers,
        indexer=parse_indexer(arch, top, text, full_attn_layers, num_layers),
        vision=vision,
        media_placeholder_token_id=_media_id(top),
    )
    top.finish()
    text.finish()
    _check_agreement(config)
    return config


def _architecture(top: Section) -> str:
    names = top.get("architectures")
    if names not in ([name] for name in ARCHITECTURES):
        top.refuse("architectures", names, " or ".join(f'["{name}"]' for name in ARCHITECTURES))
    arch = ARCHITECTURES[names[0]]
    top.fixed("model_type", MODEL_TYPES[arch])
    return arch


def _fixed_values(top: Section, text: Section) -> None:
    top.fixed("dtype", "bfloat16", optional=True)
    top.fixed("tie_word_embeddings", False, optional=True)
    text.fixed("architectures", ["KimiLinearForCausalLM"], optional=True)
    text.fixed("model_type", "kimi_linear")
    text.fixed("dtype", "bfloat16", optional=True)
    text.fixed("tie_word_embeddings", False, optional=True)
    text.fixed("num_nextn_predict_layers", 0, optional=True)
    for key, value in FIXED_TEXT.items():
        text.fixed(key, value)
    text.skip("use_grouped_topk")
    if "quantization_config" in text:
        check_quantization(text.section("quantization_config"))


def _token_id(top: Section, text: Section, key: str) -> int:
    outer, inner = top.get(key, None), text.get(key, None)
    if outer is not None and inner is not None and outer != inner:
        raise ConfigError(f"{key} is {outer} at top level and {inner} in text_config; they must agree")
    holder = top if outer is not None else text
    value, vocab_size = holder.integer(key, minimum=0), text.integer("vocab_size")
    if value >= vocab_size:
        holder.refuse(key, value, f"an id below vocab_size, {vocab_size}")
    return value


def _media_id(top: Section) -> int | None:
    if top.get("media_placeholder_token_id", None) is None:
        return None
    return top.integer("media_placeholder_token_id", minimum=0)


def _check_agreement(config: ModelConfig) -> None:
    if config.first_k_dense_replace > config.num_hidden_layers:
        raise ConfigError(
            f"text_config.first_k_dense_replace is {config.first_k_dense_replace}; "
            f"allowed: at most num_hidden_layers, {config.num_hidden_layers}"
        )
    if config.vision is not None and config.vision.text_hidden_size != config.hidden_size:
        raise ConfigError(
            f"vision_config.text_hidden_size is {config.vision.text_hidden_size}; "
            f"allowed: text_config.hidden_size, {config.hidden_size}"
        )


def model_config_to_dict(config: ModelConfig) -> dict[str, Any]:
    """Writes the released form of `config.json`; `parse_model_config` of the result gives back `config`."""
    ids = {key: getattr(config, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    architecture = next(name for name, arch in ARCHITECTURES.items() if arch == config.arch)
    values: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": MODEL_TYPES[config.arch],
        "dtype": "bfloat16",
        **ids,
        "tie_word_embeddings": False,
        "text_config": {**_text_values(config), **ids},
    }
    if config.media_placeholder_token_id is not None:
        values["media_placeholder_token_id"] = config.media_placeholder_token_id
    if config.vision is not None:
        values["vision_config"] = _vision_values(config.vision)
    return values


def _text_values(config: ModelConfig) -> dict[str, Any]:
    fields = (
        "vocab_size hidden_size intermediate_size num_hidden_layers first_k_dense_replace attn_res_block_size "
        "max_position_embeddings rms_norm_eps activation_situ_beta activation_situ_linear_beta initializer_range"
    )
    mla = asdict(config.mla)
    heads = mla.pop("num_heads")
    values: dict[str, Any] = {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": "bfloat16",
        **{key: getattr(config, key) for key in fields.split()},
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        **mla,
        **asdict(config.moe),
        **FIXED_TEXT,
        "use_grouped_topk": True,
        "use_cache": True,
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": 0,
        "linear_attn_config": {
            **asdict(config.kda),
            "use_full_rank_gate": True,
            "full_attn_layers": [layer + 1 for layer in config.full_attn_layers],
            "kda_layers": [layer + 1 for layer in config.kda_layers],
        },
        "quantization_config": _quantization_values(),
    }
    if config.indexer is not None:
        values["dsa_config"] = {
            "index_n_heads": config.indexer.num_heads,
            "index_head_dim": config.indexer.head_dim,
            "index_topk": config.indexer.topk,
            "dsa_layers": [layer + 1 for layer in config.full_attn_layers],
        }
    return values


def _vision_values(vision: VisionConfig) -> dict[str, Any]:
    return {**asdict(vision), "merge_kernel_size": list(vision.merge_kernel_size), **FIXED_VISION}


def _quantization_values() -> dict[str, Any]:
    packed = "mxfp4-pack-quantized"
    return {
        "quant_method": "compressed-tensors",
        "format": packed,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "format": packed, "weights": dict(QUANTIZED_WEIGHTS)}},
        "ignore": [
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
            "re:.*lm_head.*",
            "re:.*vision_tower.*",
            "re:.*mm_projector.*",
        ],
    }

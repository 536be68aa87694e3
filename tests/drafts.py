"""Tiny drafts of both public shapes for the small golden checkpoint's target, or any other."""

import json

import torch
from safetensors.torch import save_file

from perilune.checkpoint.draft import _GQA_NAMES, draft_shapes
from perilune.config.draft import parse_draft_config

_YARN = {"rope_type": "yarn", "rope_theta": 50000.0, "factor": 8.0, "original_max_position_embeddings": 64}
_COMMON = {
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def mla_values(*, hidden=64, vocab=512, layers=8, taps=(2, 3, 6)):
    """The `config.json` of a k3_dspark draft."""
    return {
        **_COMMON,
        "architectures": ["K3DSparkModel"],
        "model_type": "k3_dspark",
        "hidden_size": hidden,
        "vocab_size": vocab,
        "draft_vocab_size": vocab,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "q_lora_rank": 32,
        "kv_lora_rank": 48,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "mla_use_nope": False,
        "mla_use_output_gate": False,
        "rope_parameters": {**_YARN, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.707},
        "target_hidden_size": hidden,
        "target_num_hidden_layers": layers,
        "num_target_layers": len(taps),
        "target_layer_ids": list(taps),
        "mask_token_id": vocab - 3,
        "markov_rank": 16,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }


def gqa_values(*, hidden=64, vocab=512, layers=8, taps=(0, 4, 6)):
    """The `config.json` of a Qwen3 style draft."""
    return {
        **_COMMON,
        "architectures": ["DSparkDraftModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "hidden_size": hidden,
        "vocab_size": vocab,
        "head_dim": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_target_layers": layers,
        "layer_types": ["full_attention"] * 2,
        "sliding_window": None,
        "use_sliding_window": False,
        "block_size": 5,
        "rope_parameters": dict(_YARN),
        "dflash_config": {
            "attention_mode": "gqa",
            "projector_type": "dspark",
            "target_layer_ids": list(taps),
            "mask_token_id": vocab - 5,
            "markov_rank": 16,
            "markov_head_type": "vanilla",
            "enable_confidence_head": False,
        },
    }


def write_draft(directory, values, *, seed=0, dtype=torch.bfloat16):
    """A random checkpoint of this configuration; returns its tensors by stored name."""
    config = parse_draft_config(values)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in draft_shapes(config).items():
        stored = name if config.is_latent else _GQA_NAMES.get(name, name)
        noise = torch.randn(shape, generator=generator)
        is_norm = len(shape) == 1 and not name.endswith("bias")
        tensors[stored] = (1 + 0.1 * noise if is_norm else noise * shape[-1] ** -0.5).to(dtype)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(values))
    save_file(tensors, directory / "model.safetensors")
    return tensors

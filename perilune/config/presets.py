"""Configurations of random checkpoints: a tiny model for tests, a few layers of the real widths for measurements."""

from dataclasses import replace
from typing import Any

from perilune.config.model import IndexerConfig, KDAConfig, MLAConfig, ModelConfig, MoEConfig, VisionConfig
from perilune.config.parse import model_config_to_dict, parse_model_config

# Control ids follow the ranks: id = number of ranks + offset, in the order of the released vocabulary.
NUM_CONTROL_IDS = 256
MIN_VOCAB_SIZE = 256 + NUM_CONTROL_IDS  # every single byte is a token
_CONTROL_OFFSETS = {"bos_token_id": 0, "eos_token_id": 2, "media_placeholder_token_id": 21, "pad_token_id": 255}

_TINY = ModelConfig(
    arch="k3",
    vocab_size=512,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=8,
    first_k_dense_replace=1,
    attn_res_block_size=3,
    max_position_embeddings=1048576,
    rms_norm_eps=1e-5,
    activation_situ_beta=4.0,
    activation_situ_linear_beta=25.0,
    initializer_range=0.02,
    bos_token_id=0,
    eos_token_id=2,
    pad_token_id=255,
    kda=KDAConfig(num_heads=4, head_dim=64),
    mla=MLAConfig(
        num_heads=4, q_lora_rank=96, kv_lora_rank=128, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64
    ),
    moe=MoEConfig(
        num_experts=24,
        num_experts_per_token=4,
        num_shared_experts=2,
        moe_intermediate_size=96,
        routed_expert_hidden_size=128,
    ),
    full_attn_layers=(),
)
_K3_SLICE = replace(
    _TINY,
    vocab_size=16384,
    hidden_size=7168,
    intermediate_size=8192,
    num_hidden_layers=4,
    attn_res_block_size=12,
    kda=KDAConfig(num_heads=96, head_dim=128),
    mla=MLAConfig(
        num_heads=96, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
    ),
    moe=MoEConfig(
        num_experts=48,
        num_experts_per_token=16,
        num_shared_experts=2,
        moe_intermediate_size=3072,
        routed_expert_hidden_size=3584,
    ),
)
_TINY_VISION = VisionConfig(
    vt_hidden_size=64,
    vt_intermediate_size=128,
    vt_num_attention_heads=3,
    vt_num_hidden_layers=3,
    qkv_hidden_size=96,
    mm_hidden_size=64,
    text_hidden_size=256,
    patch_size=14,
    init_pos_emb_height=16,
    init_pos_emb_width=16,
    init_pos_emb_time=4,
    merge_kernel_size=(2, 2),
    projector_ln_eps=1e-5,
)
_K3_VISION = replace(
    _TINY_VISION,
    vt_hidden_size=1024,
    vt_intermediate_size=4096,
    vt_num_attention_heads=12,
    vt_num_hidden_layers=27,
    qkv_hidden_size=1536,
    mm_hidden_size=1024,
    init_pos_emb_height=64,
    init_pos_emb_width=64,
)
PRESETS = {
    "tiny": (_TINY, IndexerConfig(num_heads=8, head_dim=64, topk=16), _TINY_VISION),
    "k3-slice": (_K3_SLICE, IndexerConfig(num_heads=32, head_dim=128, topk=2048), _K3_VISION),
}
_TEXT_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
_MOE_SIZES = ("num_experts", "num_experts_per_token", "moe_intermediate_size", "routed_expert_hidden_size")


def preset_config(preset: str, arch: str, *, has_vision: bool, sizes: dict[str, int]) -> ModelConfig:
    """One preset with the sizes given by their `config.json` keys; raises ConfigError when they do not fit together.

    As in the released models every fourth layer and the last one are full attention.
    """
    base, indexer, vision = PRESETS[preset]
    text_sizes: dict[str, Any] = {key: sizes[key] for key in _TEXT_SIZES if key in sizes}
    moe_sizes: dict[str, Any] = {key: sizes[key] for key in _MOE_SIZES if key in sizes}
    config = replace(base, **text_sizes)
    if heads := sizes.get("num_attention_heads"):
        config = replace(config, kda=replace(config.kda, num_heads=heads), mla=replace(config.mla, num_heads=heads))
    num_layers, num_ranks = config.num_hidden_layers, config.vocab_size - NUM_CONTROL_IDS
    ids: dict[str, Any] = {key: num_ranks + offset for key, offset in _CONTROL_OFFSETS.items()}
    config = replace(
        config,
        **ids,
        arch=arch,
        moe=replace(config.moe, **moe_sizes),
        full_attn_layers=tuple(layer for layer in range(num_layers) if layer % 4 == 3 or layer == num_layers - 1),
        indexer=indexer if arch == "k31" else None,
        vision=replace(vision, text_hidden_size=config.hidden_size) if has_vision else None,
    )
    return parse_model_config(model_config_to_dict(config))

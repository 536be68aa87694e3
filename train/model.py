"""The demo model: its configuration and how its weights begin.

Small widths, every part of the real architecture: KDA, MLA with an indexer, attention residuals, latent MoE.
"""

import math
from dataclasses import replace

import torch

from perilune.config.model import IndexerConfig, KDAConfig, MLAConfig, ModelConfig, MoEConfig, NormEps, VisionConfig
from perilune.models.model import KimiModel, trainable_model
from perilune.text.special import NUM_SPECIAL_SLOTS

VOCAB_SIZE = 2048
# Ids follow the tokenizer's rule: number of ranks + (Kimi's id - 163584).
NUM_RANKS = VOCAB_SIZE - 256
INDEX_TOPK = 64

# Slowest and fastest initial log decay per token of the KDA channels: memories of about 400 tokens down to one.
_DECAY_LOGITS = (-7.5, -1.0)


def demo_config() -> ModelConfig:
    """The configuration that is trained and shipped."""
    return ModelConfig(
        arch="k31",
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        first_k_dense_replace=1,
        attn_res_block_size=2,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        activation_situ_beta=4.0,
        activation_situ_linear_beta=25.0,
        initializer_range=0.02,
        bos_token_id=NUM_RANKS,
        eos_token_id=NUM_RANKS + 2,
        pad_token_id=NUM_RANKS + 255,
        kda=KDAConfig(num_heads=4, head_dim=64),
        mla=MLAConfig(
            num_heads=4, q_lora_rank=128, kv_lora_rank=96, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=64
        ),
        moe=MoEConfig(
            num_experts=16,
            num_experts_per_token=2,
            num_shared_experts=1,
            moe_intermediate_size=192,
            routed_expert_hidden_size=128,
        ),
        full_attn_layers=(1, 3),
        indexer=IndexerConfig(num_heads=4, head_dim=32, topk=INDEX_TOPK),
        media_placeholder_token_id=NUM_RANKS + 21,
    )


def dense_attention(config: ModelConfig) -> ModelConfig:
    """The same model with an indexer that always selects every row."""
    assert config.indexer is not None
    return replace(config, indexer=replace(config.indexer, topk=config.max_position_embeddings))


def initialised_model(config: ModelConfig, seed: int) -> KimiModel:
    """A float32 model ready for training; attention is dense until the indexer has learned."""
    torch.manual_seed(seed)
    model = trainable_model(dense_attention(config), NormEps())
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            _initialise(name, parameter)
    return model


def _initialise(name: str, parameter: torch.Tensor) -> None:
    kind = name.split(".")[-2] if name.endswith((".weight", ".bias")) else name.split(".")[-1]
    if name.endswith("conv1d.weight"):
        # An identity on the current token plus a little of the ones before.
        parameter.normal_(0.0, 0.1)
        parameter[..., -1] += 1.0
    elif kind.endswith(("norm", "layernorm")):
        parameter.fill_(0.0 if name.endswith(".bias") else 1.0)
    elif kind == "A_log" or kind.endswith(("_bias", "res_proj")):
        parameter.zero_()
        if kind == "dt_bias":
            parameter.uniform_(*_DECAY_LOGITS)
    elif kind in ("embed_tokens", "lm_head"):
        parameter.normal_(0.0, 0.5 if kind == "embed_tokens" else 0.02)
    else:
        parameter.normal_(0.0, 1.0 / math.sqrt(parameter.shape[-1]))
        if kind in ("o_proj", "down_proj", "routed_expert_up_proj"):
            parameter.mul_(0.3)


def skilled_config(num_ranks: int) -> ModelConfig:
    """The demo with eyes, room for 8,192 tokens of text, and another number of ranks."""
    demo = demo_config()
    return replace(
        demo,
        vocab_size=num_ranks + NUM_SPECIAL_SLOTS,
        bos_token_id=num_ranks,
        eos_token_id=num_ranks + 2,
        pad_token_id=num_ranks + NUM_SPECIAL_SLOTS - 1,
        media_placeholder_token_id=num_ranks + 21,
        max_position_embeddings=10240,
        vision=VisionConfig(
            vt_hidden_size=128,
            vt_intermediate_size=384,
            vt_num_attention_heads=4,
            vt_num_hidden_layers=3,
            qkv_hidden_size=128,
            mm_hidden_size=128,
            text_hidden_size=demo.hidden_size,
            patch_size=14,
            init_pos_emb_height=4,
            init_pos_emb_width=16,
            init_pos_emb_time=4,
            merge_kernel_size=(2, 2),
            projector_ln_eps=1e-5,
        ),
    )

"""The model's configuration, read strictly from the checkpoint's `config.json`.

Field names are the checkpoint's own. Nothing here knows about engines, memory or hardware.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class KDAConfig:
    """Kimi Delta Attention (`linear_attn_config`)."""

    num_heads: int
    head_dim: int
    short_conv_kernel_size: int = 4
    gate_lower_bound: float = -5.0

    @property
    def projection_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def stored_a_log_size(self) -> int:
        """Entries of the stored `A_log`: heads rounded up to 128, zeros after the heads."""
        return -(-self.num_heads // 128) * 128


@dataclass(frozen=True)
class MLAConfig:
    """Latent attention; `qk_rope_head_dim` keeps its released name although nothing is rotated."""

    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cache_width(self) -> int:
        """Values cached per token: the normed latent and the shared raw key part."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True)
class IndexerConfig:
    """The DSA lightning indexer (`dsa_config`), K3.1 only."""

    num_heads: int
    head_dim: int
    topk: int


@dataclass(frozen=True)
class MoEConfig:
    """The latent mixture of experts."""

    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    moe_intermediate_size: int
    routed_expert_hidden_size: int
    moe_renormalize: bool = True
    routed_scaling_factor: float = 1.0
    latent_moe_use_norm: bool = True

    @property
    def shared_intermediate_size(self) -> int:
        return self.num_shared_experts * self.moe_intermediate_size


@dataclass(frozen=True)
class VisionConfig:
    """MoonViT-V2 tower and projector (`vision_config`)."""

    vt_hidden_size: int
    vt_intermediate_size: int
    vt_num_attention_heads: int
    vt_num_hidden_layers: int
    qkv_hidden_size: int
    mm_hidden_size: int
    text_hidden_size: int
    patch_size: int
    init_pos_emb_height: int
    init_pos_emb_width: int
    init_pos_emb_time: int
    merge_kernel_size: tuple[int, int]
    projector_ln_eps: float


@dataclass(frozen=True)
class NormEps:
    """Epsilons that the released configuration leaves open; the engine passes them to the model as numbers."""

    latent: float = 1e-6
    l2: float = 1e-6
    indexer: float = 1e-5
    vision: float = 1.1920929e-07


@dataclass(frozen=True)
class ModelConfig:
    """One Kimi K3 or K3.1 Pro checkpoint. Layer indices are zero-based."""

    arch: str  # "k3" or "k31"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    first_k_dense_replace: int
    attn_res_block_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    activation_situ_beta: float
    activation_situ_linear_beta: float
    initializer_range: float
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    kda: KDAConfig
    mla: MLAConfig
    moe: MoEConfig
    full_attn_layers: tuple[int, ...]
    indexer: IndexerConfig | None = None
    vision: VisionConfig | None = None
    media_placeholder_token_id: int | None = None
    full_attn_set: frozenset[int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "full_attn_set", frozenset(self.full_attn_layers))

    def is_kda(self, layer: int) -> bool:
        return layer not in self.full_attn_set

    def is_dense(self, layer: int) -> bool:
        return layer < self.first_k_dense_replace

    @property
    def kda_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer in range(self.num_hidden_layers) if self.is_kda(layer))

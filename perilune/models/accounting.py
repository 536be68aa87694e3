"""What a model costs, from its configuration alone: parameters, bytes, work, cache. Pure arithmetic, no torch.

Text and vision are kept apart; `A_log` counts its heads, not its stored padding.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from perilune.checkpoint.names import VISION_PARTS, Part, TensorFamily, tensor_table
from perilune.config.draft import DraftConfig
from perilune.config.model import IndexerConfig, MLAConfig, ModelConfig


def _packed_latent_bytes(mla: MLAConfig) -> int:
    return mla.kv_lora_rank + 4 * -(-mla.kv_lora_rank // 128) + 2 * mla.qk_rope_head_dim


def _packed_key_bytes(indexer: IndexerConfig) -> int:
    return indexer.head_dim + 4 * -(-indexer.head_dim // 128)


# Bytes of one cached row by storage format.
LATENT_FORMATS: dict[str, Callable[[MLAConfig], int]] = {
    "float32": lambda mla: 4 * mla.cache_width,
    "bfloat16": lambda mla: 2 * mla.cache_width,
    "fp8": lambda mla: mla.cache_width,
    # 8-bit latent with one float32 scale per 128 values, the shared key part in bfloat16.
    "fp8_ds_mla": _packed_latent_bytes,
    "int8": _packed_latent_bytes,
}
INDEX_FORMATS: dict[str, Callable[[IndexerConfig], int]] = {
    "float32": lambda indexer: 4 * indexer.head_dim,
    "bfloat16": lambda indexer: 2 * indexer.head_dim,
    "fp8": _packed_key_bytes,
    "int8": _packed_key_bytes,
    "mxfp4": lambda indexer: indexer.head_dim // 2 + indexer.head_dim // 32,
}


@dataclass(frozen=True)
class PartAccount:
    """Totals of one part: tensors and bytes as they are held; active parameters are those one text token uses."""

    tensors: int
    parameters: int
    parameters_active: int
    bytes: int
    bytes_active: int


@dataclass(frozen=True)
class ModelAccount:
    """Parameters and bytes of one configuration, part by part.

    `converted_bytes` are those that quantising at load makes; the rest stays in the mapped files.
    """

    parts: dict[Part, PartAccount]
    converted_bytes: int

    @property
    def tensors(self) -> int:
        return sum(part.tensors for part in self.parts.values())

    @property
    def total_size(self) -> int:
        """Bytes of all tensors, vision included."""
        return sum(part.bytes for part in self.parts.values())

    @property
    def resident_bytes(self) -> int:
        """Bytes of all tensors but the routed experts, which may stay on disk."""
        return self.total_size - self.parts[Part.EXPERTS].bytes

    @property
    def expert_parameters(self) -> int:
        """Entries of all routed experts."""
        return self.parts[Part.EXPERTS].parameters

    @property
    def parameters_total(self) -> int:
        """Text parameters; vision is apart."""
        return sum(part.parameters for part in self._text())

    @property
    def parameters_active(self) -> int:
        """Text parameters that one token uses: routed experts by top-k, the output head but not the embedding table."""
        return sum(part.parameters_active for part in self._text())

    @property
    def parameters_vision(self) -> int:
        return sum(account.parameters for part, account in self.parts.items() if part in VISION_PARTS)

    @property
    def decode_weight_bytes(self) -> int:
        """Weight bytes that a decode step of one sequence reads."""
        return sum(part.bytes_active for part in self._text())

    @property
    def float32_copy_bytes(self) -> int:
        """Bytes of all weights but packed experts in float32: what a model that must widen them takes at most."""
        return 4 * (self.parameters_total - self.expert_parameters)

    def _text(self) -> Iterable[PartAccount]:
        return (account for part, account in self.parts.items() if part not in VISION_PARTS)


def account(config: ModelConfig, *, is_quantised: bool = False) -> ModelAccount:
    """Adds up the table of tensors, part by part: as released, or with projections quantised to 8 bits at load."""
    families = [family for family in tensor_table(config).families if family.is_released]
    order = [part for part in Part if any(family.part is part for family in families)]
    projections = [family for family in families if family.is_projection] if is_quantised else []
    return ModelAccount(
        {part: _account_part(part, families, config, is_quantised) for part in order},
        sum(family.num_tensors * _tensor_bytes(family, is_quantised) for family in projections),
    )


def _account_part(part: Part, families: list[TensorFamily], config: ModelConfig, is_quantised: bool) -> PartAccount:
    own = [family for family in families if family.part is part]
    parameters = sum(family.num_tensors * family.parameters for family in own)
    num_bytes = sum(family.num_tensors * _tensor_bytes(family, is_quantised) for family in own)
    used, stored = _used_share(part, config)
    return PartAccount(
        tensors=sum(family.num_tensors for family in own),
        parameters=parameters,
        parameters_active=parameters * used // stored,
        bytes=num_bytes,
        bytes_active=num_bytes * used // stored,
    )


# A piece of an expert is read from and to whole pages of this size, so that it may share its first and its last one.
_PAGE_BYTES = 4096


def expert_bytes(config: ModelConfig) -> int:
    """Bytes of one routed expert as released."""
    families = [
        family for family in tensor_table(config).families if family.part is Part.EXPERTS and family.is_released
    ]
    return sum(family.tensor_bytes for family in families)


def expert_slot_bytes(config: ModelConfig) -> int:
    """Memory that holds any one routed expert as it is read from a file, in whole pages."""
    num_tensors = sum(family.part is Part.EXPERTS and family.is_released for family in tensor_table(config).families)
    return -(-(expert_bytes(config) + 2 * num_tensors * _PAGE_BYTES) // _PAGE_BYTES) * _PAGE_BYTES


def expert_floor_bytes(config: ModelConfig) -> int:
    """The least memory for routed experts that stay in files: those that one token chooses in one layer."""
    return config.moe.num_experts_per_token * expert_slot_bytes(config)


def num_experts_total(config: ModelConfig) -> int:
    """Routed experts of all layers."""
    return config.moe.num_experts * sum(not config.is_dense(layer) for layer in range(config.num_hidden_layers))


def _tensor_bytes(family: TensorFamily, is_quantised: bool) -> int:
    """An 8-bit projection is one byte an entry and a float32 scale per output."""
    if is_quantised and family.is_projection:
        return family.parameters + 4 * family.shape[0]
    return family.tensor_bytes


def _used_share(part: Part, config: ModelConfig) -> tuple[int, int]:
    """Of how many equal slices a text token uses how many. The embedding is one row look-up and counts as nothing."""
    if part is Part.EXPERTS:
        return config.moe.num_experts_per_token, config.moe.num_experts
    return (0, 1) if part is Part.EMBEDDING or part in VISION_PARTS else (1, 1)


def cache_bytes_per_token(config: ModelConfig, latent: str = "bfloat16", index: str = "bfloat16") -> int:
    """Paged bytes per token over all layers; formats as in LATENT_FORMATS and INDEX_FORMATS."""
    row = LATENT_FORMATS[latent](config.mla)
    if config.indexer is not None:
        row += INDEX_FORMATS[index](config.indexer)
    return row * len(config.full_attn_layers)


def recurrent_state_bytes(config: ModelConfig, itemsize: int = 4) -> int:
    """Bytes of the recurrent states of one sequence over all KDA layers."""
    return len(config.kda_layers) * config.kda.num_heads * config.kda.head_dim**2 * itemsize


def conv_state_bytes(config: ModelConfig, itemsize: int = 2) -> int:
    """Bytes of the convolution states of one sequence: the last inputs of the q, k and v streams."""
    taps = config.kda.short_conv_kernel_size - 1
    return len(config.kda_layers) * taps * 3 * config.kda.projection_size * itemsize


def state_bytes_per_sequence(config: ModelConfig, recurrent_itemsize: int = 4, conv_itemsize: int = 2) -> int:
    """Bytes that a sequence holds whatever its length (default: float32 state, bfloat16 convolution)."""
    return recurrent_state_bytes(config, recurrent_itemsize) + conv_state_bytes(config, conv_itemsize)


def step_workspace_bytes(config: ModelConfig, num_tokens: int, num_logits: int, itemsize: int = 2) -> int:
    """Memory that one pass over `num_tokens` tokens takes beside weights and cache, rather more than less.

    Of each token: what the chosen experts make, in float32; the inputs and outputs of a mixer; the streams of the
    attention residuals. Of each of `num_logits` rows: the logits, and what sampling makes of them in float32.
    """
    moe, mla, hidden = config.moe, config.mla, config.hidden_size
    experts = 4 * moe.num_experts_per_token * (moe.moe_intermediate_size + moe.routed_expert_hidden_size)
    mixer = max(config.kda.projection_size, mla.num_heads * mla.qk_head_dim)
    wide = max(config.intermediate_size, moe.shared_intermediate_size)
    streams = 8 + -(-config.num_hidden_layers // config.attn_res_block_size)
    each = experts + itemsize * (6 * mixer + 3 * wide + streams * hidden)
    return num_tokens * each + num_logits * config.vocab_size * (itemsize + 3 * 4)


def record_bytes_per_token(config: ModelConfig, itemsize: int = 2) -> int:
    """Bytes that a token which may be taken back leaves over all KDA layers until it is committed.

    q, k and v before the convolution and the normalised key in the compute dtype; decay and correction in float32.
    """
    return len(config.kda_layers) * config.kda.projection_size * (4 * itemsize + 2 * 4)


def draft_cache_bytes_per_token(draft: DraftConfig, itemsize: int = 2) -> int:
    """Paged bytes per token over all layers of a draft model."""
    return draft.num_hidden_layers * draft.attention.cache_width * itemsize


def attended_rows(config: ModelConfig, context: int) -> int:
    """Latent rows that one token attends to, per layer, at `context` tokens."""
    return context if config.indexer is None else min(context, config.indexer.topk)


def cache_bytes_read(config: ModelConfig, context: int, latent: str = "bfloat16", index: str = "bfloat16") -> int:
    """Cache bytes that one decoded token reads over all layers at `context` tokens.

    With an indexer: the selected latents, and every index key once there are more tokens than it selects.
    """
    row = attended_rows(config, context) * LATENT_FORMATS[latent](config.mla)
    if config.indexer is not None and context > config.indexer.topk:
        row += context * INDEX_FORMATS[index](config.indexer)
    return row * len(config.full_attn_layers)


def step_weight_bytes(config: ModelConfig, num_tokens: int, *, is_quantised: bool = False) -> float:
    """Weight bytes that one step over `num_tokens` tokens reads.

    Each is read once; of the experts as many as even choices, independent of each other, meet on average.
    """
    moe, total = config.moe, 0.0
    for part, values in account(config, is_quantised=is_quantised).parts.items():
        if part is Part.EXPERTS:
            total += values.bytes * (1 - (1 - moe.num_experts_per_token / moe.num_experts) ** num_tokens)
        elif part not in VISION_PARTS:
            total += values.bytes_active
    return total


@dataclass(frozen=True)
class Flops:
    """Multiply and add operations, by what is multiplied: matrices of experts, of projections, of the rest, no matrix.

    Elementwise work (norms, gates, mixing) is left out.
    """

    experts: int
    projections: int
    others: int
    mixers: int  # KDA recurrence, attention and index scores

    @property
    def total(self) -> int:
        return self.experts + self.projections + self.others + self.mixers

    def times(self, count: int) -> "Flops":
        return Flops(count * self.experts, count * self.projections, count * self.others, count * self.mixers)


def flops_per_token(config: ModelConfig, context: int) -> int:
    """Operations of one decoded text token at `context` tokens, absorbed attention."""
    return decode_flops(config, context).total


def decode_flops(config: ModelConfig, context: int) -> Flops:
    """Operations of one decoded text token at `context` tokens, absorbed attention."""
    matrices = _matrix_flops(config)
    mla = config.mla
    attention = attended_rows(config, context) * mla.num_heads * 2 * (mla.cache_width + mla.kv_lora_rank)
    attention += _index_flops(config, context, context)
    return replace(matrices, mixers=matrices.mixers + len(config.full_attn_layers) * attention)


def prefill_flops(config: ModelConfig, num_tokens: int) -> Flops:
    """Operations of a prompt whose last token alone gets logits; every row is expanded to keys and values once."""
    each = _matrix_flops(config)
    head = 2 * config.hidden_size * config.vocab_size
    mla = config.mla
    attended = sum(attended_rows(config, context) for context in range(1, num_tokens + 1))
    attention = attended * mla.num_heads * 2 * (mla.qk_head_dim + mla.v_head_dim)
    attention += _index_flops(config, num_tokens, num_tokens * (num_tokens + 1) // 2)
    return Flops(
        experts=num_tokens * each.experts,
        projections=num_tokens * each.projections,
        others=num_tokens * (each.others - head) + head,
        mixers=num_tokens * each.mixers + len(config.full_attn_layers) * attention,
    )


def _matrix_flops(config: ModelConfig) -> Flops:
    """Of one token, without attention."""
    experts = projections = others = 0
    for family in tensor_table(config).families:
        if family.is_released and len(family.shape) == 2 and family.part not in (Part.NORMS, *VISION_PARTS):
            used, stored = _used_share(family.part, config)
            own = 2 * (family.num_tensors * family.parameters * used // stored)
            if family.part is Part.EXPERTS:
                experts += own
            elif family.is_projection:
                projections += own
            else:
                others += own
    # Decay, the read for the delta rule, the rank-one update and the read-out: 1 + 2 + 2 + 2 operations a state entry.
    recurrence = 7 * len(config.kda_layers) * config.kda.num_heads * config.kda.head_dim**2
    return Flops(experts, projections, others, recurrence)


def _index_flops(config: ModelConfig, longest: int, num_scores: int) -> int:
    """Of `num_scores` index scores in one layer; no context up to top-k needs any."""
    if config.indexer is None or longest <= config.indexer.topk:
        return 0
    return num_scores * config.indexer.num_heads * 2 * (config.indexer.head_dim + 1)

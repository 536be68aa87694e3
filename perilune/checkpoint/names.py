"""The one table of every tensor of the released layout: name, shape, dtype, part.

A family is one row of the table times its layers (or blocks) and its experts. Shapes are `[out, in]`. No torch.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from math import prod

from perilune.config.model import ModelConfig, VisionConfig
from perilune.config.parts import MXFP4_GROUP

TEXT_PREFIX = "language_model."
VISION_PREFIX = "vision."
LAYER_PREFIX = "language_model.model.layers.{layer}."
_LAYER = re.compile(r"^language_model\.model\.layers\.(0|[1-9][0-9]*)\.")
_EXPERT = re.compile(r"\.experts\.(0|[1-9][0-9]*)\.")
_BLOCK = re.compile(r"^vision_tower\.encoder\.blocks\.(0|[1-9][0-9]*)\.")


class Part(StrEnum):
    """What a tensor belongs to; the rows of every account."""

    EMBEDDING = "embedding"
    LM_HEAD = "lm_head"
    NORMS = "norms_and_residuals"
    KDA = "kda_attention"
    MLA = "mla_attention"
    INDEXER = "indexer"
    DENSE = "dense_ffn"
    MOE = "moe_backbone"
    EXPERTS = "routed_experts"
    PROJECTOR = "mm_projector"
    VISION = "vision_tower"


VISION_PARTS = frozenset({Part.PROJECTOR, Part.VISION})
_PROJECTED_PARTS = frozenset({Part.KDA, Part.MLA, Part.INDEXER, Part.DENSE, Part.MOE})
# The router's choice is never rounded; the halves of kv_b are multiplied inside attention, not as linear maps.
_NO_PROJECTION = frozenset({"gate", "kv_b_proj"})


@dataclass(frozen=True)
class TensorFamily:
    """One row of the table. `dtypes` lists what may be stored, the released one first."""

    part: Part
    pattern: str  # with {layer}, {block} and {expert} where the row repeats
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    parameters: int  # numbers of the model in one tensor: 2 a byte when packed, 0 for a scale, heads for A_log
    indices: tuple[int, ...] = (0,)  # layers or blocks
    num_experts: int = 1
    is_required: bool = True
    is_released: bool = True  # False: another accepted storage of the same weight

    @property
    def num_tensors(self) -> int:
        return len(self.indices) * self.num_experts

    @property
    def tensor_bytes(self) -> int:
        return prod(self.shape) * {"F32": 4, "BF16": 2, "U8": 1}[self.dtypes[0]]

    @property
    def is_projection(self) -> bool:
        """Whether it is the weight [O, I] of a linear map within a layer, as online quantisation takes it."""
        leaf = self.pattern.split(".")[-2]
        return self.part in _PROJECTED_PARTS and len(self.shape) == 2 and leaf not in _NO_PROJECTION

    def names(self) -> Iterator[str]:
        for index in self.indices:
            for expert in range(self.num_experts):
                yield self.pattern.format(layer=index, block=index, expert=expert)


@dataclass(frozen=True)
class TensorTable:
    """Every family of one configuration, and the way from a stored name to its family."""

    families: tuple[TensorFamily, ...]
    num_layers: int
    _by_pattern: dict[str, tuple[TensorFamily, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_pattern: dict[str, tuple[TensorFamily, ...]] = {}
        for family in self.families:
            by_pattern[family.pattern] = (*by_pattern.get(family.pattern, ()), family)
        object.__setattr__(self, "_by_pattern", by_pattern)

    def find(self, name: str) -> TensorFamily | None:
        """The family that `name` belongs to, or None for a name that is not in the layout."""
        if "{" in name:  # a row of the table itself, not a name
            return None
        pattern, index, expert = _split(name)
        for family in self._by_pattern.get(pattern, ()):
            if expert < family.num_experts and index in family.indices:
                return family
        return None

    def released(self) -> Iterator[tuple[str, TensorFamily]]:
        """Every name of the released layout with its family, layer after layer within a family."""
        for family in self.families:
            if family.is_released:
                for name in family.names():
                    yield name, family


def tensor_table(config: ModelConfig) -> TensorTable:
    """Builds the table of one configuration."""
    families = [*_globals(config), *_every_layer(config), *_kda(config), *_mla(config), *_indexer(config)]
    families += [*_dense(config), *_moe(config), *_experts(config)]
    if config.vision is not None:
        families += [*_projector(config.vision), *_vision(config.vision)]
    return TensorTable(tuple(families), config.num_hidden_layers)


def layer_of(name: str) -> int | None:
    """The layer whose tensor `name` is, or None for a tensor outside the layers."""
    match = _LAYER.match(name)
    return int(match[1]) if match else None


def expert_of(name: str) -> int | None:
    """The expert whose tensor `name` is, or None for a tensor outside the routed experts."""
    match = _EXPERT.search(name)
    return int(match[1]) if match else None


def parameter_name(name: str) -> str:
    """The name a model's parameter carries: the stored one without the text prefix, or below `vision`."""
    return name.removeprefix(TEXT_PREFIX) if name.startswith(TEXT_PREFIX) else VISION_PREFIX + name


def _split(name: str) -> tuple[str, int, int]:
    index, expert = 0, 0
    if match := _LAYER.match(name):
        index, name = int(match[1]), LAYER_PREFIX + name[match.end() :]
    elif match := _BLOCK.match(name):
        index, name = int(match[1]), "vision_tower.encoder.blocks.{block}." + name[match.end() :]
    if match := _EXPERT.search(name):
        expert, name = int(match[1]), f"{name[: match.start()]}.experts.{{expert}}.{name[match.end() :]}"
    return name, index, expert


def _bf16(part: Part, pattern: str, *shape: int, layers: tuple[int, ...] = (0,)) -> TensorFamily:
    return TensorFamily(part, pattern, shape, ("BF16",), prod(shape), layers)


def _f32(part: Part, pattern: str, *shape: int, layers: tuple[int, ...] = (0,)) -> TensorFamily:
    return TensorFamily(part, pattern, shape, ("F32",), prod(shape), layers)


def _globals(config: ModelConfig) -> list[TensorFamily]:
    hidden, prefix = config.hidden_size, "language_model.model."
    return [
        _bf16(Part.EMBEDDING, prefix + "embed_tokens.weight", config.vocab_size, hidden),
        _bf16(Part.LM_HEAD, "language_model.lm_head.weight", config.vocab_size, hidden),
        _bf16(Part.NORMS, prefix + "norm.weight", hidden),
        _bf16(Part.NORMS, prefix + "output_attn_res_norm.weight", hidden),
        _bf16(Part.NORMS, prefix + "output_attn_res_proj.weight", 1, hidden),
    ]


def _every_layer(config: ModelConfig) -> list[TensorFamily]:
    layers, hidden = tuple(range(config.num_hidden_layers)), config.hidden_size
    norms = ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm")
    rows = ("self_attention_res_proj", "mlp_res_proj")
    return [_bf16(Part.NORMS, f"{LAYER_PREFIX}{name}.weight", hidden, layers=layers) for name in norms] + [
        _bf16(Part.NORMS, f"{LAYER_PREFIX}{name}.weight", 1, hidden, layers=layers) for name in rows
    ]


def _kda(config: ModelConfig) -> list[TensorFamily]:
    kda, hidden, prefix, layers = config.kda, config.hidden_size, LAYER_PREFIX + "self_attn.", config.kda_layers
    wide = kda.projection_size
    shapes = dict.fromkeys(("q_proj", "k_proj", "v_proj", "g_proj"), (wide, hidden))
    shapes |= {"b_proj": (kda.num_heads, hidden), "f_a_proj": (kda.head_dim, hidden), "f_b_proj": (wide, kda.head_dim)}
    shapes |= {"o_proj": (hidden, wide)}
    families = [_bf16(Part.KDA, f"{prefix}{name}.weight", *shape, layers=layers) for name, shape in shapes.items()]
    kernel = kda.short_conv_kernel_size
    families += [_f32(Part.KDA, f"{prefix}{x}_conv1d.weight", wide, 1, kernel, layers=layers) for x in "qkv"]
    families += [
        TensorFamily(Part.KDA, prefix + "A_log", (kda.stored_a_log_size,), ("F32",), kda.num_heads, layers),
        _f32(Part.KDA, prefix + "dt_bias", wide, layers=layers),
        _f32(Part.KDA, prefix + "o_norm.weight", kda.head_dim, layers=layers),
    ]
    return families


def _mla(config: ModelConfig) -> list[TensorFamily]:
    mla, hidden, wide = config.mla, config.hidden_size, config.mla.num_heads * config.mla.v_head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "q_a_proj": (mla.q_lora_rank, hidden),
        "q_a_layernorm": (mla.q_lora_rank,),
        "q_b_proj": (mla.num_heads * mla.qk_head_dim, mla.q_lora_rank),
        "kv_a_proj_with_mqa": (mla.cache_width, hidden),
        "kv_a_layernorm": (mla.kv_lora_rank,),
        "kv_b_proj": (mla.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank),
        "g_proj": (wide, hidden),
        "o_proj": (hidden, wide),
    }
    return [
        _bf16(Part.MLA, f"{LAYER_PREFIX}self_attn.{name}.weight", *shape, layers=config.full_attn_layers)
        for name, shape in shapes.items()
    ]


def _indexer(config: ModelConfig) -> list[TensorFamily]:
    if config.indexer is None:
        return []
    indexer, prefix, layers = config.indexer, LAYER_PREFIX + "self_attn.indexer.", config.full_attn_layers
    width, either = indexer.head_dim, ("BF16", "F32")
    return [
        _bf16(Part.INDEXER, prefix + "wq_b.weight", indexer.num_heads * width, config.mla.q_lora_rank, layers=layers),
        _bf16(Part.INDEXER, prefix + "wk.weight", width, config.hidden_size, layers=layers),
        _bf16(Part.INDEXER, prefix + "weights_proj.weight", indexer.num_heads, config.hidden_size, layers=layers),
        TensorFamily(Part.INDEXER, prefix + "k_norm.weight", (width,), either, width, layers),
        TensorFamily(Part.INDEXER, prefix + "k_norm.bias", (width,), either, width, layers, is_required=False),
    ]


def _dense(config: ModelConfig) -> list[TensorFamily]:
    layers = tuple(range(config.first_k_dense_replace))
    return _gated(Part.DENSE, LAYER_PREFIX + "mlp.", config.hidden_size, config.intermediate_size, layers)


def _gated(part: Part, prefix: str, outer: int, inner: int, layers: tuple[int, ...]) -> list[TensorFamily]:
    shapes = {"gate_proj": (inner, outer), "up_proj": (inner, outer), "down_proj": (outer, inner)}
    return [_bf16(part, f"{prefix}{name}.weight", *shape, layers=layers) for name, shape in shapes.items()]


def _moe(config: ModelConfig) -> list[TensorFamily]:
    moe, hidden, latent = config.moe, config.hidden_size, config.moe.routed_expert_hidden_size
    prefix, layers = LAYER_PREFIX + "block_sparse_moe.", _moe_layers(config)
    return [
        _bf16(Part.MOE, prefix + "gate.weight", moe.num_experts, hidden, layers=layers),
        _f32(Part.MOE, prefix + "gate.e_score_correction_bias", moe.num_experts, layers=layers),
        _bf16(Part.MOE, prefix + "routed_expert_down_proj.weight", latent, hidden, layers=layers),
        _bf16(Part.MOE, prefix + "routed_expert_norm.weight", latent, layers=layers),
        _bf16(Part.MOE, prefix + "routed_expert_up_proj.weight", hidden, latent, layers=layers),
        *_gated(Part.MOE, prefix + "shared_experts.", hidden, moe.shared_intermediate_size, layers),
    ]


def _experts(config: ModelConfig) -> list[TensorFamily]:
    moe, layers = config.moe, _moe_layers(config)
    inner, latent = moe.moe_intermediate_size, moe.routed_expert_hidden_size
    families = []
    for name, rows, columns in (("w1", inner, latent), ("w2", latent, inner), ("w3", inner, latent)):
        base, size = f"{LAYER_PREFIX}block_sparse_moe.experts.{{expert}}.{name}.", rows * columns
        stored = (
            ("weight_packed", (rows, columns // 2), "U8", size, True),
            ("weight_scale", (rows, columns // MXFP4_GROUP), "U8", 0, True),
            ("weight", (rows, columns), "BF16", size, False),
        )
        families += [
            TensorFamily(
                Part.EXPERTS, base + leaf, shape, (dtype,), parameters, layers, moe.num_experts, released, released
            )
            for leaf, shape, dtype, parameters, released in stored
        ]
    return families


def _moe_layers(config: ModelConfig) -> tuple[int, ...]:
    return tuple(layer for layer in range(config.num_hidden_layers) if not config.is_dense(layer))


def _projector(vision: VisionConfig) -> list[TensorFamily]:
    merged = vision.mm_hidden_size * vision.merge_kernel_size[0] * vision.merge_kernel_size[1]
    return [
        _bf16(Part.PROJECTOR, "mm_projector.proj.0.weight", merged, merged),
        _bf16(Part.PROJECTOR, "mm_projector.proj.2.weight", vision.text_hidden_size, merged),
        _bf16(Part.PROJECTOR, "mm_projector.post_norm.weight", vision.text_hidden_size),
    ]


def _vision(vision: VisionConfig) -> list[TensorFamily]:
    width, inner, wide = vision.vt_hidden_size, vision.vt_intermediate_size, vision.qkv_hidden_size
    blocks, prefix = tuple(range(vision.vt_num_hidden_layers)), "vision_tower.encoder.blocks.{block}."
    shapes: dict[str, tuple[int, ...]] = {
        "norm0": (width,),
        "norm1": (width,),
        "wqkv": (3 * wide, width),
        "wo": (width, wide),
        "mlp.fc0": (inner, width),
        "mlp.fc1": (width, inner),
    }
    grid = (vision.init_pos_emb_height, vision.init_pos_emb_width)
    return [
        _bf16(Part.VISION, "vision_tower.patch_embed.proj.weight", width, 3, vision.patch_size, vision.patch_size),
        _bf16(Part.VISION, "vision_tower.patch_embed.pos_emb.weight", *grid, width),
        *(_bf16(Part.VISION, f"{prefix}{name}.weight", *shape, layers=blocks) for name, shape in shapes.items()),
        _bf16(Part.VISION, "vision_tower.encoder.final_layernorm.weight", width),
    ]

"""The configuration of a DSpark draft model, read strictly from its own `config.json`, and whether it fits a target.

Two public shapes: `k3_dspark` (latent attention) and Qwen3 style (grouped-query attention).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perilune.config.model import MLAConfig, ModelConfig
from perilune.config.parts import NO_EFFECT_KEYS, parse_mla
from perilune.config.rope import RopeConfig, parse_rope
from perilune.config.section import Section, shown
from perilune.errors import ConfigError

MLA_TYPE, GQA_TYPE = "k3_dspark", "qwen3"
ARCHITECTURES = {MLA_TYPE: ("K3DSparkModel",), GQA_TYPE: ("DSparkDraftModel", "Qwen3DSparkModel")}
# What training and other libraries keep there.
_NO_EFFECT = NO_EFFECT_KEYS | {
    "attention_dropout",
    "bos_token_id",
    "confidence_head_alpha",
    "eos_token_id",
    "initializer_range",
    "max_window_layers",
    "num_anchors",
    "pad_token_id",
}
# The first that is present says whether a row of a block sees the rows after it.
_CAUSALITY_KEYS = ("causal", "full_attention_causal", "is_causal")


@dataclass(frozen=True)
class GQAConfig:
    """Grouped-query attention with a norm per head on q and k."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def cache_width(self) -> int:
        """Values cached per token: keys of all heads, then values."""
        return 2 * self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class DraftOverrides:
    """What the person who serves a draft knows better than its `config.json`; None leaves it at that.

    `rope_theta`: some drafts were trained with another one than they declare. `rope_interleaved`: whether adjacent
    channels turn together, where the configuration has a `rope_interleave`, which code bases read in opposite ways.
    """

    rope_theta: float | None = None
    rope_interleaved: bool | None = None


@dataclass(frozen=True)
class DraftConfig:
    """One draft checkpoint. `target_layer_ids` are the target's layers, from 0, after which its stream is read."""

    attention: MLAConfig | GQAConfig
    rope: RopeConfig
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    rms_norm_eps: float
    max_position_embeddings: int
    target_layer_ids: tuple[int, ...]
    target_num_hidden_layers: int
    mask_token_id: int
    block_size: int | None  # rows of a block; None leaves it to whoever serves
    is_causal: bool
    samples_from_anchor: bool  # whether the row of the last known token yields a draft, or only those after it
    markov_rank: int
    has_confidence_head: bool
    confidence_head_with_markov: bool

    @property
    def is_latent(self) -> bool:
        return isinstance(self.attention, MLAConfig)

    @property
    def shape_name(self) -> str:
        return f"MLA ({MLA_TYPE})" if self.is_latent else f"GQA ({GQA_TYPE})"

    @property
    def num_trained_drafts(self) -> int | None:
        """Drafts of one block as it was trained."""
        return None if self.block_size is None else self.block_size - (not self.samples_from_anchor)


def load_draft_config(path: Path, overrides: DraftOverrides = DraftOverrides()) -> DraftConfig:
    """Reads `config.json`, given as the file or as the directory that holds it; raises ConfigError naming the file."""
    file = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{file} does not exist; give the directory of a draft with a config.json") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read as JSON: {error}") from None
    try:
        return parse_draft_config(values, overrides)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def parse_draft_config(values: dict[str, Any], overrides: DraftOverrides = DraftOverrides()) -> DraftConfig:
    """Turns the parsed `config.json` into a DraftConfig; raises ConfigError naming key, found and allowed."""
    top = Section(values, ignored=_NO_EFFECT)
    top.fixed("model_type", MLA_TYPE, GQA_TYPE)
    model_type = top.get("model_type")
    top.fixed("architectures", *([name] for name in ARCHITECTURES[model_type]), optional=True)
    block = top.section("dflash_config", _NO_EFFECT) if "dflash_config" in top else Section({}, "dflash_config")
    is_latent = model_type == MLA_TYPE
    _fixed_values(top)
    _home(top, block, "attention_mode").fixed("attention_mode", "mla" if is_latent else "gqa", optional=True)
    _home(top, block, "projector_type").fixed("projector_type", "dspark", optional=True)
    attention = _mla(top) if is_latent else _gqa(top)
    width = attention.qk_rope_head_dim if isinstance(attention, MLAConfig) else attention.head_dim
    is_interleaved = _is_interleaved(top, overrides, default=is_latent)
    num_layers, taps = _target(top, block, is_latent=is_latent)
    config = DraftConfig(
        attention=attention,
        rope=parse_rope(top, width, is_interleaved=is_interleaved, theta=overrides.rope_theta),
        vocab_size=top.integer("vocab_size"),
        hidden_size=top.integer("hidden_size"),
        intermediate_size=top.integer("intermediate_size"),
        num_hidden_layers=top.integer("num_hidden_layers"),
        rms_norm_eps=top.positive("rms_norm_eps"),
        max_position_embeddings=top.integer("max_position_embeddings"),
        target_layer_ids=taps,
        target_num_hidden_layers=num_layers,
        mask_token_id=_home(top, block, "mask_token_id").integer("mask_token_id", minimum=0),
        block_size=_block_size(top, block),
        is_causal=_is_causal(top, block),
        samples_from_anchor=_boolean(top, block, "sample_from_anchor", default=True),
        markov_rank=_home(top, block, "markov_rank").integer("markov_rank"),
        has_confidence_head=_boolean(top, block, "enable_confidence_head", default=False),
        confidence_head_with_markov=_boolean(top, block, "confidence_head_with_markov", default=False),
    )
    _home(top, block, "markov_head_type").fixed("markov_head_type", "vanilla", optional=True)
    _check_agreement(top, block, config)
    block.finish()
    top.finish()
    return config


def check_fit(draft: DraftConfig, target: ModelConfig, num_drafts: int) -> None:
    """Raises ConfigError, naming both sides, where a draft belongs to another target or to other blocks."""
    pairs: Sequence[tuple[str, object, str, object]] = (
        ("hidden_size", draft.hidden_size, "hidden_size", target.hidden_size),
        ("vocab_size", draft.vocab_size, "vocab_size", target.vocab_size),
        ("number of target layers", draft.target_num_hidden_layers, "num_hidden_layers", target.num_hidden_layers),
    )
    for name, own, target_name, other in pairs:
        if own != other:
            raise ConfigError(
                f"the draft's {name} is {own} and the target's {target_name} is {other}: "
                "this draft was trained for another model; give one for this target"
            )
    trained = draft.num_trained_drafts
    if trained is not None and trained != num_drafts:
        raise ConfigError(
            f"num_drafts is {num_drafts} and the draft's block_size {draft.block_size} stands for {trained} drafts: "
            f"set num_drafts to {trained}"
        )


def _fixed_values(top: Section) -> None:
    top.fixed("hidden_act", "silu")
    top.fixed("dtype", "bfloat16", "float32", optional=True)
    top.fixed("torch_dtype", "bfloat16", "float32", optional=True)
    top.fixed("tie_word_embeddings", False, optional=True)
    if "draft_vocab_size" in top:
        top.fixed("draft_vocab_size", top.integer("vocab_size"))


def _mla(top: Section) -> MLAConfig:
    top.fixed("mla_use_nope", False, optional=True)
    top.fixed("mla_use_output_gate", False, optional=True)
    mla = parse_mla(top)
    if mla.qk_rope_head_dim % 2:
        top.refuse("qk_rope_head_dim", mla.qk_rope_head_dim, "an even number")
    return mla


def _gqa(top: Section) -> GQAConfig:
    top.fixed("attention_bias", False, optional=True)
    top.fixed("sliding_window", None, optional=True)
    top.fixed("use_sliding_window", False, optional=True)
    kinds = top.get("layer_types", None)
    if kinds is not None and kinds != ["full_attention"] * top.integer("num_hidden_layers"):
        top.refuse("layer_types", kinds, '"full_attention" for each of num_hidden_layers')
    gqa = GQAConfig(top.integer("num_attention_heads"), top.integer("num_key_value_heads"), top.integer("head_dim"))
    if gqa.num_heads % gqa.num_kv_heads:
        top.refuse("num_attention_heads", gqa.num_heads, f"a multiple of num_key_value_heads, {gqa.num_kv_heads}")
    if gqa.head_dim % 2:
        top.refuse("head_dim", gqa.head_dim, "an even number")
    return gqa


def _target(top: Section, block: Section, *, is_latent: bool) -> tuple[int, tuple[int, ...]]:
    """How many layers the target has, and the tapped ones; `num_target_layers` means either, by the shape."""
    num_layers = top.integer("target_num_hidden_layers" if is_latent else "num_target_layers")
    home = _home(top, block, "target_layer_ids")
    taps = home.get("target_layer_ids")
    # the stream after the last layer is not a tap: libraries store it normed
    allowed = f"an ascending list of target layers from 0 to {num_layers - 2}"
    if not isinstance(taps, list) or not taps or any(type(layer) is not int for layer in taps):
        home.refuse("target_layer_ids", taps, allowed)
    if sorted(set(taps)) != taps or taps[0] < 0 or taps[-1] > num_layers - 2:
        home.refuse("target_layer_ids", taps, allowed)
    if is_latent:
        top.fixed("num_target_layers", len(taps), optional=True)
        top.fixed("target_hidden_size", top.integer("hidden_size"), optional=True)
    return num_layers, tuple(taps)


def _is_interleaved(top: Section, overrides: DraftOverrides, *, default: bool) -> bool:
    if "rope_interleave" not in top:
        return default if overrides.rope_interleaved is None else overrides.rope_interleaved
    if overrides.rope_interleaved is None:
        raise ConfigError(
            f"rope_interleave is {shown(top.get('rope_interleave'))}, which means opposite things to different "
            "trainers; say with the override rope_interleaved whether adjacent channels turn together"
        )
    top.skip("rope_interleave")
    return overrides.rope_interleaved


def _is_causal(top: Section, block: Section) -> bool:
    """Absent everywhere means that a block's rows all see each other; values that differ are an error."""
    found = {
        section.full_key(key): section.boolean(key)
        for section in (block, top)
        for key in _CAUSALITY_KEYS
        if key in section
    }
    if len(set(found.values())) > 1:
        raise ConfigError(f"{shown(found)} contradict each other; they must agree")
    return next(iter(found.values()), False)


def _block_size(top: Section, block: Section) -> int | None:
    home = _home(top, block, "block_size")
    return home.integer("block_size", minimum=2) if home.get("block_size", None) is not None else None


def _boolean(top: Section, block: Section, key: str, *, default: bool) -> bool:
    home = _home(top, block, key)
    return home.boolean(key) if key in home else default


def _home(top: Section, block: Section, key: str) -> Section:
    """Where a key is that may be at top level or in `dflash_config`; in both it must be the same."""
    if key in top and key in block and top.get(key) != block.get(key):
        raise ConfigError(
            f"{key} is {shown(top.get(key))} at top level and {shown(block.get(key))} in dflash_config; they must agree"
        )
    return block if key in block else top


def _check_agreement(top: Section, block: Section, config: DraftConfig) -> None:
    if config.mask_token_id >= config.vocab_size:
        home = _home(top, block, "mask_token_id")
        home.refuse("mask_token_id", config.mask_token_id, f"an id below vocab_size, {config.vocab_size}")

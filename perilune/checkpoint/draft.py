"""Maps the weights of a DSpark draft: its shape is told by the tensors' names, and every tensor is accounted for."""

from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from perilune.checkpoint.index import read_index
from perilune.checkpoint.mapped import MappedFile
from perilune.checkpoint.safetensors import TensorEntry
from perilune.config.draft import DraftConfig, GQAConfig
from perilune.config.model import MLAConfig
from perilune.errors import CheckpointError

# The target's own serve the draft.
SHARED = ("embed_tokens.weight", "lm_head.weight")
CONFIDENCE = ("confidence_head.proj.weight", "confidence_head.proj.bias")
_DTYPES = ("BF16", "F32")
# Parameters carry the names of the latent shape.
_GQA_NAMES = {"context_proj.weight": "fc.weight", "context_norm.weight": "hidden_norm.weight"}
_GQA_NAMES |= {"final_norm.weight": "norm.weight"}
_MLA_MARKS, _GQA_MARKS = ("context_proj.", ".self_attn.q_a_proj."), ("fc.", ".self_attn.q_proj.")
# Parts of a draft that one framework trains and that none here computes.
_GATE_MARKS = (".self_attn.g_proj.", ".self_attn.o_gate.", ".self_attn.output_gate.")


def load_draft_state(directory: Path, config: DraftConfig) -> dict[str, Tensor]:
    """Maps every tensor that the draft uses: parameter name -> read-only tensor.

    Left out are copies of the target's embedding and output head, and a confidence head that `config` leaves off.
    Raises CheckpointError for any tensor that is missing, unexpected or of another shape or dtype.
    """
    entries = read_index(directory).entries
    _check_shape_name(directory, entries, config)
    expected = draft_shapes(config)
    stored = {_stored_name(name, config): name for name in expected}
    skipped = _skipped(config)
    for name, entry in entries.items():
        if name in skipped:
            _check_entry(entry, skipped[name])
        elif name in stored:
            _check_entry(entry, expected[stored[name]])
        else:
            raise CheckpointError(
                f"{entry.file}: unexpected tensor {name}; a {config.shape_name} draft with this config.json has none"
            )
    for name in stored:
        if name not in entries:
            raise CheckpointError(f"{directory}: tensor {name} is missing; this config.json requires it")
    files = {file: MappedFile(file) for file in dict.fromkeys(entries[name].file for name in stored)}
    return {ours: files[entries[name].file].tensor(entries[name]) for name, ours in stored.items()}


def draft_shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter of a draft and its shape, [out, in]."""
    hidden, inner, rank = config.hidden_size, config.intermediate_size, config.markov_rank
    shapes: dict[str, tuple[int, ...]] = {
        "context_proj.weight": (hidden, hidden * len(config.target_layer_ids)),
        "context_norm.weight": (hidden,),
        "final_norm.weight": (hidden,),
        "markov_head.markov_w1.weight": (config.vocab_size, rank),
        "markov_head.markov_w2.weight": (config.vocab_size, rank),
    }
    attention = config.attention
    own = _mla_shapes(attention, hidden) if isinstance(attention, MLAConfig) else _gqa_shapes(attention, hidden)
    for layer in range(config.num_hidden_layers):
        prefix = f"layers.{layer}."
        shapes |= {f"{prefix}{norm}.weight": (hidden,) for norm in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{prefix}self_attn.{name}.weight": shape for name, shape in own.items()}
        shapes |= {f"{prefix}mlp.{name}.weight": (inner, hidden) for name in ("gate_proj", "up_proj")}
        shapes[f"{prefix}mlp.down_proj.weight"] = (hidden, inner)
    return shapes | _confidence_shapes(config) if config.has_confidence_head else shapes


def _confidence_shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    width = config.hidden_size + (config.markov_rank if config.confidence_head_with_markov else 0)
    weight, bias = CONFIDENCE
    return {weight: (1, width), bias: (1,)}


def _mla_shapes(mla: MLAConfig, hidden: int) -> dict[str, tuple[int, ...]]:
    return {
        "q_a_proj": (mla.q_lora_rank, hidden),
        "q_a_layernorm": (mla.q_lora_rank,),
        "q_b_proj": (mla.num_heads * mla.qk_head_dim, mla.q_lora_rank),
        "kv_a_proj_with_mqa": (mla.cache_width, hidden),
        "kv_a_layernorm": (mla.kv_lora_rank,),
        "kv_b_proj": (mla.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank),
        "o_proj": (hidden, mla.num_heads * mla.v_head_dim),
    }


def _gqa_shapes(gqa: GQAConfig, hidden: int) -> dict[str, tuple[int, ...]]:
    wide, narrow = gqa.num_heads * gqa.head_dim, gqa.num_kv_heads * gqa.head_dim
    return {
        "q_proj": (wide, hidden),
        "k_proj": (narrow, hidden),
        "v_proj": (narrow, hidden),
        "o_proj": (hidden, wide),
        "q_norm": (gqa.head_dim,),
        "k_norm": (gqa.head_dim,),
    }


def _stored_name(name: str, config: DraftConfig) -> str:
    return name if config.is_latent else _GQA_NAMES.get(name, name)


def _skipped(config: DraftConfig) -> dict[str, tuple[int, ...] | None]:
    """Tensors that may lie there unused, and their shape; None where nothing depends on it."""
    skipped: dict[str, tuple[int, ...] | None] = dict.fromkeys(SHARED, (config.vocab_size, config.hidden_size))
    return skipped if config.has_confidence_head else skipped | dict.fromkeys(CONFIDENCE)


def _check_shape_name(directory: Path, names: Iterable[str], config: DraftConfig) -> None:
    """The names say which attention a draft has; `config.json` must say the same."""
    for name in names:
        if any(mark in name for mark in _GATE_MARKS):
            raise CheckpointError(
                f"{directory}: {name} is the output gate of a third kind of draft, which is not served; "
                "allowed: drafts without a gate, of Qwen3 shape (GQA) or k3_dspark (MLA)"
            )
        found = "MLA" if _has_mark(name, _MLA_MARKS) else "GQA" if _has_mark(name, _GQA_MARKS) else None
        if found is not None and found != ("MLA" if config.is_latent else "GQA"):
            raise CheckpointError(
                f"{directory}: {name} is a tensor of a {found} draft, but config.json describes a "
                f"{config.shape_name} draft; the two belong to different checkpoints"
            )


def _has_mark(name: str, marks: tuple[str, ...]) -> bool:
    return any(mark in name if mark.startswith(".") else name.startswith(mark) for mark in marks)


def _check_entry(entry: TensorEntry, shape: tuple[int, ...] | None) -> None:
    if shape is not None and entry.shape != shape:
        raise CheckpointError(
            f"{entry.file}: {entry.name} has shape {list(entry.shape)}; this config.json allows {list(shape)}"
        )
    if entry.dtype not in _DTYPES:
        raise CheckpointError(f"{entry.file}: {entry.name} has dtype {entry.dtype}; allowed: {' or '.join(_DTYPES)}")

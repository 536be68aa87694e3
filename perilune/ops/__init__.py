"""The public ops, resolved lazily: importing this package imports no torch until an op is asked for."""

from importlib import import_module
from typing import Any

_HOMES = {
    "add_rows": "rows",
    "append_rows": "rows",
    "attn_res_mix": "attn_res",
    "dense_linear": "linear",
    "embed_rows": "rows",
    "gate_rows": "rows",
    "gated_rms_norm": "norm",
    "gelu_tanh": "vision",
    "gqa_attention": "gqa",
    "gqa_rows": "gqa",
    "indexer_topk": "indexer",
    "join_rows": "rows",
    "kda_chunk": "kda",
    "kda_commit": "kda",
    "kda_decay": "kda",
    "kda_mix": "kda",
    "kda_recurrent": "kda",
    "kda_verify": "kda",
    "layer_norm": "norm",
    "linear_group": "linear",
    "mla_decode": "mla",
    "mla_prefill": "mla",
    "moe_experts": "moe",
    "moe_experts_mxfp4": "moe",
    "moe_route": "moe",
    "mxfp4_linear": "mxfp4",
    "patch_attention": "vision",
    "penalize": "sampling",
    "quantize_rows": "linear",
    "rms_norm": "norm",
    "rotary_turns": "rotary",
    "rotate": "rotary",
    "sample_masses": "sampling",
    "sample_tokens": "sampling",
    "scale_rows": "rows",
    "short_conv": "conv",
    "situ": "moe",
    "store_packed_rows": "packed_rows",
    "store_rows": "rows",
    "swiglu": "rows",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"perilune.ops has no op {name!r}; known: {', '.join(__all__)}")
    op = getattr(import_module(f"perilune.ops.{_HOMES[name]}"), name)
    globals()[name] = op  # the next look-up finds it without coming here
    return op


def load_all() -> None:
    """Imports every op module, so that the registry is complete."""
    for home in set(_HOMES.values()):
        import_module(f"perilune.ops.{home}")

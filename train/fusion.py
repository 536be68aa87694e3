"""Faster training steps: the element-wise reference ops, fused by torch.compile, as a backend of the op registry."""

import torch

from perilune import ops
from perilune.ops.kda.reference import kda_chunk, kda_recurrent, mix_of
from perilune.ops.registry import OpKey, all_ops

_FUSED_OPS = ("attn_res_mix", "gated_rms_norm", "kda_decay", "rms_norm", "short_conv", "situ")


def fuse_ops() -> None:
    """Registers the compiled references; from now on they serve every call that needs a gradient."""
    ops.load_all()
    torch._dynamo.config.recompile_limit = 64
    fused = {name: torch.compile(all_ops()[name].reference, dynamic=False) for name in _FUSED_OPS}
    # The delta rule stays as it is: its loop over chunks would be compiled once per length.
    parts = (fused["short_conv"], fused["kda_decay"], kda_recurrent, kda_chunk, fused["gated_rms_norm"])
    for name, call in {**fused, "kda_mix": mix_of(*parts)}.items():
        all_ops()[name].register("inductor", call, _refusal)


def _refusal(key: OpKey) -> str | None:
    # Each new shape costs a compilation: training has few shapes, evaluation many.
    return None if key.needs_grad else "compiled for training only"

"""The one table of who holds what: which ranks hold a stored tensor, and along which dim they divide it. No torch.

Loader, planner and tests read it; a tensor that no row covers is an error, so that nothing is whole by oversight.
"""

from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from functools import cache

from perilune.config.parts import MXFP4_GROUP


class Split(Enum):
    """How a tensor is divided: whole on every rank, by heads or rows over tp, or by experts over the expert group."""

    REPLICATED = "replicated"
    TENSOR = "tp"
    EXPERT = "experts"


class Home(Enum):
    """Which pipeline stages hold a tensor: those of its layers, the first, or the last."""

    LAYERS = "layers"
    FIRST = "first"
    LAST = "last"


@dataclass(frozen=True)
class Rule:
    """`dim` is what ranks divide: 0 is the output of a weight [out, in], 1 its input; None where it stays whole."""

    split: Split
    dim: int | None
    home: Home


WHOLE = Rule(Split.REPLICATED, None, Home.LAYERS)
OUTPUTS = Rule(Split.TENSOR, 0, Home.LAYERS)
INPUTS = Rule(Split.TENSOR, 1, Home.LAYERS)
EXPERT_OUTPUTS = Rule(Split.EXPERT, 0, Home.LAYERS)
EXPERT_INPUTS = Rule(Split.EXPERT, 1, Home.LAYERS)

_LAYER = "language_model.model.layers.*."
_MIXER = _LAYER + "self_attn."
_FEED = _LAYER + "block_sparse_moe."
# Patterns over stored names, `*` for whatever stands there. Each name meets exactly one row.
# fmt: off
RULES: tuple[tuple[str, Rule], ...] = (
    ("language_model.model.embed_tokens.weight", Rule(Split.TENSOR, 0, Home.FIRST)),
    ("language_model.lm_head.weight", Rule(Split.TENSOR, 0, Home.LAST)),
    ("language_model.model.norm.weight", Rule(Split.REPLICATED, None, Home.LAST)),
    ("language_model.model.output_attn_res_*.weight", Rule(Split.REPLICATED, None, Home.LAST)),
    (_LAYER + "*norm.weight", WHOLE),
    (_LAYER + "*_res_proj.weight", WHOLE),
    # attention by heads
    (_MIXER + "[qkv]_proj.weight", OUTPUTS),
    (_MIXER + "[qkv]_conv1d.weight", OUTPUTS),
    (_MIXER + "f_a_proj.weight", WHOLE),
    (_MIXER + "f_b_proj.weight", OUTPUTS),
    (_MIXER + "b_proj.weight", OUTPUTS),
    (_MIXER + "g_proj.weight", OUTPUTS),
    (_MIXER + "dt_bias", OUTPUTS),
    # zeros stand behind its heads in the file: a cut by length would not be one by heads
    (_MIXER + "A_log", WHOLE),
    (_MIXER + "q_a_proj.weight", WHOLE),
    (_MIXER + "kv_a_proj_with_mqa.weight", WHOLE),
    (_MIXER + "q_b_proj.weight", OUTPUTS),
    (_MIXER + "kv_b_proj.weight", OUTPUTS),
    (_MIXER + "o_proj.weight", INPUTS),
    # every rank must choose the same rows
    (_MIXER + "indexer.w*.weight", WHOLE),
    (_MIXER + "indexer.k_norm.bias", WHOLE),
    # feed-forwards by inner width
    (_LAYER + "mlp.gate_proj.weight", OUTPUTS),
    (_LAYER + "mlp.up_proj.weight", OUTPUTS),
    (_LAYER + "mlp.down_proj.weight", INPUTS),
    (_FEED + "gate.*", WHOLE),
    # the norm between them needs whole rows of the latent
    (_FEED + "routed_expert_down_proj.weight", WHOLE),
    (_FEED + "routed_expert_up_proj.weight", WHOLE),
    (_FEED + "shared_experts.gate_proj.weight", OUTPUTS),
    (_FEED + "shared_experts.up_proj.weight", OUTPUTS),
    (_FEED + "shared_experts.down_proj.weight", INPUTS),
    (_FEED + "experts.*.w[13].*", EXPERT_OUTPUTS),
    (_FEED + "experts.*.w2.*", EXPERT_INPUTS),
    ("vision_tower.*", Rule(Split.REPLICATED, None, Home.FIRST)),
    ("mm_projector.*", Rule(Split.REPLICATED, None, Home.FIRST)),
)
# fmt: on


@cache
def rule_of(pattern: str) -> Rule:
    """The row of a stored name or of a family's pattern; it is our error if there is none."""
    found = [rule for row, rule in RULES if fnmatchcase(pattern, row)]
    assert len(found) == 1, f"{pattern} meets {len(found)} rows of the placement table"
    return found[0]


def num_units(rule: Rule, shape: tuple[int, ...], inner_size: int) -> int:
    """In how many equal units ranks may divide a tensor of that stored shape; 1 where it stays whole.

    Experts of inner width `inner_size` are cut at their scale groups, in whatever form they are stored.
    """
    if rule.dim is None:
        return 1
    return inner_size // MXFP4_GROUP if rule.split is Split.EXPERT else shape[rule.dim]

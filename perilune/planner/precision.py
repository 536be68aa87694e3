"""How each part is stored under a plan: formats, what they lose, and the pieces that ranks divide."""

from dataclasses import dataclass, fields
from functools import lru_cache

from perilune.checkpoint.names import VISION_PARTS, Part, TensorFamily, tensor_table
from perilune.config.model import ModelConfig
from perilune.errors import ConfigError
from perilune.models.accounting import INDEX_FORMATS, LATENT_FORMATS
from perilune.parallel.placement import Rule, Split, num_units, rule_of
from perilune.planner.placement import Piece

# Bytes beside the weights per output channel: fp8 and int8 carry a float32 scale; the int4 of Ascend a float32
# scale, an offset and a precomputed bias (vLLM Ascend's w4a8.py).
SCALE_BYTES = {"fp8": 4, "int8": 4, "int4": 12}
EXPERTS = ("mxfp4", "mxfp4_via_fp8", "fp8", "int4")
DENSE = ("bf16", "fp8", "int8", "float32")

# And the shared experts. Router, latent projections, embedding, head, norms and vision never are (ATOM's guide).
QUANTISED_PARTS = frozenset({Part.KDA, Part.MLA, Part.DENSE})


@dataclass(frozen=True)
class Precision:
    """Formats by part. `mxfp4_via_fp8` keeps MXFP4 and converts one layer at a time into a workspace that is reused.

    `dense` is attention, shared experts and the dense layer; "float32" widens all that is not an expert.
    """

    experts: str = "mxfp4"
    dense: str = "bf16"
    latent: str = "bfloat16"
    index: str = "bfloat16"

    def __post_init__(self) -> None:
        allowed = {"experts": EXPERTS, "dense": DENSE, "latent": tuple(LATENT_FORMATS), "index": tuple(INDEX_FORMATS)}
        for field in fields(self):
            value = getattr(self, field.name)
            if value not in allowed[field.name]:
                raise ConfigError(f"{field.name} is {value!r}; allowed: {', '.join(allowed[field.name])}")

    @property
    def label(self) -> str:
        return f"experts {self.experts}, dense {self.dense}, latent {self.latent}, index keys {self.index}"

    @property
    def loss(self) -> str:
        """The worst loss class against the released weights and the computed cache."""
        if self.experts == "int4" or self.dense in ("fp8", "int8") or "fp8" in self.latent:
            return "rounding"
        if self.index in ("fp8", "mxfp4"):
            return "rounding"
        if self.experts in ("fp8", "mxfp4_via_fp8"):
            return "unknown: exact where the scale exponents of a channel span at most 14"
        return "lossless"


@lru_cache(maxsize=64)
def pieces(
    config: ModelConfig, precision: Precision, *, has_vision: bool = True, shards_everything: bool = False
) -> tuple[Piece, ...]:
    """Every stored tensor of the plan as pieces; `shards_everything` divides also what is replicated by rule."""
    found: list[Piece] = []
    for family in tensor_table(config).families:
        if family.is_released and (has_vision or family.part not in VISION_PARTS):
            if family.part is Part.EXPERTS:
                found += _experts(family, precision, config.moe.moe_intermediate_size)
            else:
                found += _dense(family, precision)
    if not shards_everything:
        return tuple(found)
    return tuple(_sharded(piece) for piece in found)


def workspace_bytes_per_layer(config: ModelConfig) -> int:
    """The experts of one layer in FP8, with their scales: what online conversion fills again for each layer."""
    single = Precision(experts="fp8")
    layers = config.num_hidden_layers - config.first_k_dense_replace
    return sum(p.total_bytes for p in pieces(config, single) if p.part is Part.EXPERTS) // max(1, layers)


def _dense(family: TensorFamily, precision: Precision) -> list[Piece]:
    rule = rule_of(family.pattern)
    quantised = family.part in QUANTISED_PARTS or ".shared_experts." in family.pattern
    quantised = quantised and len(family.shape) == 2
    if precision.dense == "float32" and family.part not in VISION_PARTS:
        num_bytes = family.tensor_bytes * (2 if family.dtypes[0] == "BF16" else 1)
    elif precision.dense in SCALE_BYTES and quantised:
        num_bytes = family.parameters
    else:
        num_bytes = family.tensor_bytes
    # what stays whole has units too: an engine may divide it against the table
    units = family.shape[rule.dim or 0]
    found = [Piece(family.part, rule.split, rule.home, units, num_bytes // units, family.indices)]
    if precision.dense in SCALE_BYTES and quantised:
        # a rank that holds some of the columns still needs the scale of every output channel
        scale_split = Split.REPLICATED if rule.dim == 1 else rule.split
        size = SCALE_BYTES[precision.dense]
        found.append(Piece(family.part, scale_split, rule.home, family.shape[0], size, family.indices))
    return found


def _experts(family: TensorFamily, precision: Precision, inner_size: int) -> list[Piece]:
    rule = rule_of(family.pattern)
    is_scale = family.pattern.endswith("weight_scale")
    units = num_units(rule, family.shape, inner_size)
    if precision.experts in ("mxfp4", "mxfp4_via_fp8"):
        return [_expert_piece(family, rule, units, family.tensor_bytes // units)]
    if is_scale:
        return []
    times = 2 if precision.experts == "fp8" else 1
    weights = _expert_piece(family, rule, units, times * family.tensor_bytes // units)
    scales = family.shape[0] * SCALE_BYTES[precision.experts]
    if rule.dim == 1:
        # every rank of a split expert needs them; counted once, on the first, which is the fullest
        return [weights, _expert_piece(family, rule, 1, scales)]
    return [weights, _expert_piece(family, rule, units, scales // units)]


def _expert_piece(family: TensorFamily, rule: Rule, units: int, unit_bytes: int) -> Piece:
    return Piece(Part.EXPERTS, rule.split, rule.home, units, unit_bytes, family.indices, family.num_experts)


def _sharded(piece: Piece) -> Piece:
    if piece.split is not Split.REPLICATED:
        return piece
    return Piece(piece.part, Split.TENSOR, piece.home, piece.num_units, piece.unit_bytes, piece.layers)

"""How each part is stored under a plan: formats, what they lose, and the pieces that ranks divide."""

from dataclasses import dataclass, fields
from functools import lru_cache

from perilune.checkpoint.names import LAYER_PREFIX, VISION_PARTS, Part, TensorFamily, tensor_table
from perilune.config.model import ModelConfig
from perilune.errors import ConfigError
from perilune.models.accounting import INDEX_FORMATS, LATENT_FORMATS
from perilune.planner.placement import Home, Piece, Split

# Bytes beside the weights per output channel: fp8 and int8 carry a float32 scale; the int4 of Ascend a float32
# scale, an offset and a precomputed bias (vLLM Ascend's w4a8.py).
SCALE_BYTES = {"fp8": 4, "int8": 4, "int4": 12}
EXPERTS = ("mxfp4", "mxfp4_via_fp8", "fp8", "int4")
DENSE = ("bf16", "fp8", "int8", "float32")

# Held whole by every rank of a tensor-parallel group, as engines do; the rest is divided by heads or width.
# fmt: off
REPLICATED_NAMES = frozenset((
    "q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm", "f_a_proj", "o_norm", "gate",
    "e_score_correction_bias", "routed_expert_down_proj", "routed_expert_norm", "routed_expert_up_proj",
))
# fmt: on
REPLICATED_PARTS = frozenset({Part.NORMS, Part.INDEXER, *VISION_PARTS})
ROW_PARALLEL_NAMES = ("o_proj", "down_proj", "w2")
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
            found += _experts(family, precision) if family.part is Part.EXPERTS else _dense(family, precision)
    if not shards_everything:
        return tuple(found)
    return tuple(_sharded(piece) for piece in found)


def workspace_bytes_per_layer(config: ModelConfig) -> int:
    """The experts of one layer in FP8, with their scales: what online conversion fills again for each layer."""
    single = Precision(experts="fp8")
    layers = config.num_hidden_layers - config.first_k_dense_replace
    return sum(p.total_bytes for p in pieces(config, single) if p.part is Part.EXPERTS) // max(1, layers)


def _dense(family: TensorFamily, precision: Precision) -> list[Piece]:
    name = family.pattern.rsplit(".", 2)
    leaf = name[-1] if name[-1] != "weight" and name[-1] != "bias" else name[-2]
    is_shared = ".shared_experts." in family.pattern
    is_whole = family.part in REPLICATED_PARTS or (leaf in REPLICATED_NAMES and not is_shared)
    split = Split.REPLICATED if is_whole else Split.TENSOR
    quantised = (family.part in QUANTISED_PARTS or is_shared) and len(family.shape) == 2
    row_parallel = leaf in ROW_PARALLEL_NAMES
    units = family.shape[1 if row_parallel else 0]
    if precision.dense == "float32" and family.part not in VISION_PARTS:
        num_bytes = family.tensor_bytes * (2 if family.dtypes[0] == "BF16" else 1)
    elif precision.dense in SCALE_BYTES and quantised:
        num_bytes = family.parameters
    else:
        num_bytes = family.tensor_bytes
    found = [Piece(family.part, split, _home(family), units, num_bytes // units, family.indices)]
    if precision.dense in SCALE_BYTES and quantised:
        # a rank that holds some of the columns still needs the scale of every output channel
        scale_split = Split.REPLICATED if row_parallel else split
        size = SCALE_BYTES[precision.dense]
        found.append(Piece(family.part, scale_split, _home(family), family.shape[0], size, family.indices))
    return found


def _experts(family: TensorFamily, precision: Precision) -> list[Piece]:
    leaf = family.pattern.rsplit(".", 2)[-2]
    rows, columns = family.shape
    is_scale = family.pattern.endswith("weight_scale")
    units = columns if leaf == "w2" else rows
    per_unit = rows if leaf == "w2" else columns
    if precision.experts in ("mxfp4", "mxfp4_via_fp8"):
        return [_expert_piece(family, units, per_unit)]
    if is_scale:
        return []
    weights = _expert_piece(family, units, per_unit * (2 if precision.experts == "fp8" else 1))
    if leaf == "w2":
        # every rank of a split expert needs them; counted once, on the first, which is the fullest
        return [weights, _expert_piece(family, 1, rows * SCALE_BYTES[precision.experts])]
    return [weights, _expert_piece(family, rows, SCALE_BYTES[precision.experts])]


def _expert_piece(family: TensorFamily, units: int, unit_bytes: int) -> Piece:
    return Piece(Part.EXPERTS, Split.EXPERT, Home.LAYERS, units, unit_bytes, family.indices, family.num_experts)


def _home(family: TensorFamily) -> Home:
    if family.pattern.startswith(LAYER_PREFIX):
        return Home.LAYERS
    return Home.FIRST if family.part is Part.EMBEDDING or family.part in VISION_PARTS else Home.LAST


def _sharded(piece: Piece) -> Piece:
    if piece.split is not Split.REPLICATED:
        return piece
    return Piece(piece.part, Split.TENSOR, piece.home, piece.num_units, piece.unit_bytes, piece.layers)

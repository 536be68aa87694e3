"""The model: embedding, decoder layers, last mix and norm, logits; and building it from a checkpoint's tensors."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from perilune import ops
from perilune.cache.spec import CacheGroupSpec
from perilune.config.model import ModelConfig, NormEps
from perilune.errors import CheckpointError
from perilune.models import dsa, kda, mla
from perilune.models.block import DecoderLayer, MixingQuery
from perilune.models.inputs import ForwardBatch
from perilune.models.layers import Embedding, Linear, RMSNorm, Weight
from perilune.models.moe import Experts, Router, StreamedExperts, TrainableExperts
from perilune.models.vision import VisionModel
from perilune.ops.kda.reference import CHUNK_ROWS
from perilune.ops.linear import ChannelScaled, LinearWeight, multiplies_bfloat16_with
from perilune.ops.moe import DenseExpert, ExpertStream, PackedExpert

# Their ops take a weight that is narrower than the activations.
MATRIX_MODULES = (Linear, Embedding, Router)

# Takes a layer and the stream after it, [T, D]: the live prefix, which starts anew at each attention-residual block.
Tap = Callable[[int, Tensor], None]


class Backbone(nn.Module):
    """Everything but the logits."""

    def __init__(self, config: ModelConfig, eps: NormEps, experts: list[nn.Module | None], dtype: torch.dtype):
        super().__init__()
        hidden = config.hidden_size
        self.eps = config.rms_norm_eps
        self.reads_ahead = any(isinstance(module, StreamedExperts) for module in experts)
        self.embed_tokens = Embedding(config.vocab_size, hidden, dtype)
        self.layers = nn.ModuleList()
        seen = {True: 0, False: 0}
        for layer in range(config.num_hidden_layers):
            is_kda = config.is_kda(layer)
            self.layers.append(DecoderLayer(config, eps, layer, seen[is_kda], experts[layer], dtype))
            seen[is_kda] += 1
        self.output_attn_res_norm = Weight(hidden, dtype=dtype)
        self.output_attn_res_proj = Weight(1, hidden, dtype=dtype)
        self.output_attn_res_query = MixingQuery(self.output_attn_res_norm, self.output_attn_res_proj)
        self.norm = RMSNorm(hidden, config.rms_norm_eps, dtype)

    def forward(self, batch: ForwardBatch, tap: Tap | None = None) -> Tensor:
        """-> final normed hidden states of the wanted rows, [R, D]; `tap` is called after every layer."""
        bank: list[Tensor] = []
        prefix = self.embed_tokens(batch.token_ids)
        if batch.image_rows is not None:
            prefix[batch.image_rows] = batch.image_embeddings
        for index, layer in enumerate(self.layers):
            if self.reads_ahead:
                self._read_ahead(index, bank, prefix)
            bank, prefix = layer(bank, prefix, batch)
            if tap is not None:
                tap(index, prefix)
        candidates = [*bank, prefix]
        if not batch.wants_all_logits:
            candidates = [candidate[batch.logits_rows] for candidate in candidates]
        x: Tensor = ops.attn_res_mix(candidates, self.output_attn_res_query(), self.norm.weight, self.eps)
        return x

    def _read_ahead(self, index: int, bank: list[Tensor], prefix: Tensor) -> None:
        """Has the next layer with streamed experts guess from what there is before layer `index`; changes no result."""
        following = (layer for layer in self.layers[index:] if not layer.is_dense)
        upcoming = next(following, None)
        if upcoming is not None:
            upcoming.expect(bank, prefix)


class KimiModel(nn.Module):
    """Kimi K3 or K3.1 Pro. `experts` holds one expert module per layer, None for dense layers.

    `vision` makes the rows that `ForwardBatch.image_embeddings` brings; None where the checkpoint has no tower.
    """

    def __init__(self, config: ModelConfig, eps: NormEps, experts: list[nn.Module | None], dtype: torch.dtype):
        super().__init__()
        self.config, self.dtype = config, dtype
        # values of packed cache rows and index keys; None keeps them in the compute dtype
        self.row_values: torch.dtype | None = None
        self.key_values: torch.dtype | None = None
        # where the routed experts are that do not all lie in memory
        self.stream: ExpertStream | None = None
        self.model = Backbone(config, eps, experts, dtype)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, dtype)
        self.vision = None if config.vision is None else VisionModel(config.vision, eps.vision, dtype)

    def forward(self, batch: ForwardBatch, tap: Tap | None = None) -> Tensor:
        """-> logits [R, vocab] of `batch.logits_rows` in the compute dtype; `tap` sees the stream after every layer."""
        logits: Tensor = self.lm_head(self.model(batch, tap))
        return logits

    @property
    def grain(self) -> int:
        """A sequence cut at multiples of so many tokens, over several passes, computes the same bits as in one."""
        return CHUNK_ROWS

    def way(self, longest: int) -> int:
        """Which way a pass takes whose longest sequence has `longest` rows: equal numbers mean the same ops."""
        indexer = self.config.indexer
        return int(indexer is not None and longest > indexer.topk)

    def take_faults(self) -> dict[int, str]:
        """Rows of the passes since the last call whose results are void, and why: a file of weights failed."""
        return {} if self.stream is None else dict(self.stream.take_faults())

    def cache_groups(self) -> tuple[CacheGroupSpec, ...]:
        """What a sequence keeps between passes."""
        return cache_groups(self.config, self.row_values, self.key_values)

    def record_groups(self) -> tuple[CacheGroupSpec, ...]:
        """What each token that may be taken back leaves until it is committed, as seats of one token."""
        return record_groups(self.config)

    def commit(
        self,
        cache: Mapping[str, Tensor],
        records: Mapping[str, Tensor],
        state_slots: Tensor,
        cu_seqlens: Tensor,
        counts: Tensor,
    ) -> None:
        """Moves the states on by the first counts[n] [N] tokens of each sequence that a pass verified.

        state_slots [N] and cu_seqlens [N+1], counted from 0, are of the verified sequences alone. The states are then
        those of as many passes of one token.
        """
        if self.config.kda_layers:
            kda.commit(cache, records, state_slots, cu_seqlens, counts)


def cache_groups(
    config: ModelConfig, row_values: torch.dtype | None, key_values: torch.dtype | None
) -> tuple[CacheGroupSpec, ...]:
    """What a sequence of such a model keeps between passes; `row_values` and `key_values` as in `build_model`."""
    num_kda, num_mla = len(config.kda_layers), len(config.full_attn_layers)
    groups = (*mla.cache_groups(config.mla, num_mla, row_values),) if num_mla else ()
    if config.indexer is not None and num_mla:
        groups = (*groups, *dsa.cache_groups(config.indexer, num_mla, key_values))
    return (*groups, *kda.cache_groups(config.kda, num_kda)) if num_kda else groups


def record_groups(config: ModelConfig) -> tuple[CacheGroupSpec, ...]:
    """What each token of such a model that may be taken back leaves until it is committed, as seats of one token."""
    num_kda = len(config.kda_layers)
    return kda.record_groups(config.kda, num_kda) if num_kda else ()


def trainable_model(config: ModelConfig, eps: NormEps) -> KimiModel:
    """A float32 model whose every weight is a parameter, uninitialised."""
    experts = [
        None if config.is_dense(layer) else TrainableExperts(config, torch.float32)
        for layer in range(config.num_hidden_layers)
    ]
    return KimiModel(config, eps, experts, torch.float32)


def build_model(
    config: ModelConfig,
    state: Mapping[str, LinearWeight],
    eps: NormEps,
    dtype: torch.dtype,
    *,
    int8_activations: bool = False,
    row_values: torch.dtype | None = None,
    key_values: torch.dtype | None = None,
    stream: ExpertStream | None = None,
) -> KimiModel:
    """Builds the model around a checkpoint's tensors, by parameter name, copying only to change a dtype.

    `state` maps every parameter and expert tensor; a missing one raises CheckpointError. Linears take quantised
    weights too. A float32 model keeps bfloat16 matrices where an op multiplies them as they lie. `int8_activations`
    reaches every op that can use them. `row_values` and `key_values` are those of packed cache rows and index keys
    (`ops.packed_rows`); None keeps the compute dtype. With a `stream` the routed experts come from there.
    """
    with torch.device("meta"):
        model = KimiModel(config, eps, _experts(config, state, dtype, stream), dtype)
    model.row_values, model.key_values, model.stream = row_values, key_values, stream
    tensors: dict[str, Tensor] = {}
    takes_bfloat16 = multiplies_bfloat16_with(dtype)
    for path, module in model.named_modules():
        for leaf, parameter in list(module.named_parameters(path, recurse=False)):
            stored = _find(state, leaf)
            if isinstance(stored, ChannelScaled):
                assert isinstance(module, Linear), leaf
                module.quantise(stored)
                continue
            stays = takes_bfloat16 and isinstance(module, MATRIX_MODULES) and stored.dtype is torch.bfloat16
            tensors[leaf] = (stored if stays else stored.to(parameter.dtype)).view(parameter.shape)
        if isinstance(module, Linear | Experts | StreamedExperts):
            module.int8_activations = int8_activations
    model.load_state_dict(tensors, strict=True, assign=True)
    return model.requires_grad_(False).eval()


def _find(state: Mapping[str, LinearWeight], name: str) -> LinearWeight:
    if name not in state:
        raise CheckpointError(f"the checkpoint has no tensor for the parameter {name}")
    return state[name]


def _find_tensor(state: Mapping[str, LinearWeight], name: str) -> Tensor:
    tensor = _find(state, name)
    assert isinstance(tensor, Tensor), name
    return tensor


def _experts(
    config: ModelConfig, state: Mapping[str, LinearWeight], dtype: torch.dtype, stream: ExpertStream | None
) -> list[nn.Module | None]:
    """One module per layer, None for dense layers."""
    found: list[nn.Module | None] = []
    for layer in range(config.num_hidden_layers):
        if config.is_dense(layer):
            found.append(None)
        elif stream is None:
            found.append(Experts(config, _layer_experts(config, layer, state, dtype)))
        else:
            found.append(StreamedExperts(config, stream.table(layer - found.count(None))))
    return found


def _layer_experts(
    config: ModelConfig, layer: int, state: Mapping[str, LinearWeight], dtype: torch.dtype
) -> list[PackedExpert] | list[DenseExpert]:
    prefix = f"model.layers.{layer}.block_sparse_moe.experts"
    names = [f"{prefix}.{expert}" for expert in range(config.moe.num_experts)]
    if f"{names[0]}.w1.weight_packed" in state:
        return [
            PackedExpert(
                *(
                    _find_tensor(state, f"{name}.{w}.weight_{x}")
                    for w in ("w1", "w3", "w2")
                    for x in ("packed", "scale")
                )
            )
            for name in names
        ]
    return [
        DenseExpert(*(_find_tensor(state, f"{name}.{w}.weight").to(dtype) for w in ("w1", "w3", "w2")))
        for name in names
    ]

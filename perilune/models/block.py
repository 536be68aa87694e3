"""One decoder layer: attention-residual mix, mixer (KDA or MLA), mix, feed-forward (dense or MoE).

The bank holds the raw inputs of the blocks so far, the prefix is the plain sum of sublayer outputs since then
(Attention Residuals, block form). Layer 0 has an empty bank, where the mix of the lone prefix is the prefix itself.
"""

import torch
from torch import Tensor, nn

from perilune import ops
from perilune.config.model import ModelConfig, NormEps
from perilune.models.inputs import ForwardBatch
from perilune.models.kda import KimiDeltaAttention
from perilune.models.layers import RMSNorm, Weight
from perilune.models.mla import MultiHeadLatentAttention
from perilune.models.mlp import MLP
from perilune.models.moe import LatentMoE


class DecoderLayer(nn.Module):
    """Layer `layer` of the model; `index` counts the layers of its mixer's kind before it."""

    def __init__(
        self, config: ModelConfig, eps: NormEps, layer: int, index: int, experts: nn.Module | None, dtype: torch.dtype
    ):
        super().__init__()
        hidden, norm_eps = config.hidden_size, config.rms_norm_eps
        self.eps = norm_eps
        self.starts_block = layer % config.attn_res_block_size == 0
        self.input_layernorm = RMSNorm(hidden, norm_eps, dtype)
        self.post_attention_layernorm = RMSNorm(hidden, norm_eps, dtype)
        self.self_attention_res_norm = Weight(hidden, dtype=dtype)
        self.self_attention_res_proj = Weight(1, hidden, dtype=dtype)
        self.self_attention_res_query = MixingQuery(self.self_attention_res_norm, self.self_attention_res_proj)
        self.mlp_res_norm = Weight(hidden, dtype=dtype)
        self.mlp_res_proj = Weight(1, hidden, dtype=dtype)
        self.mlp_res_query = MixingQuery(self.mlp_res_norm, self.mlp_res_proj)
        mixer = KimiDeltaAttention if config.is_kda(layer) else MultiHeadLatentAttention
        self.self_attn = mixer(config, eps, index, dtype)
        if experts is None:
            betas = (config.activation_situ_beta, config.activation_situ_linear_beta)
            self.mlp = MLP(hidden, config.intermediate_size, *betas, dtype)
        else:
            self.block_sparse_moe = LatentMoE(config, experts, dtype)

    @property
    def is_dense(self) -> bool:
        return "mlp" in self._modules

    def expect(self, bank: list[Tensor], prefix: Tensor) -> None:
        """Begin to read the experts that would be chosen if the mixer, which is still to come, added nothing."""
        self.block_sparse_moe.expect(self._mix(bank, prefix, self.mlp_res_query, self.post_attention_layernorm))

    @property
    def feed_forward(self) -> nn.Module:
        return self.mlp if self.is_dense else self.block_sparse_moe

    def forward(self, bank: list[Tensor], prefix: Tensor, batch: ForwardBatch) -> tuple[list[Tensor], Tensor]:
        """bank: tensors [T, D], prefix [T, D] -> the bank and prefix after this layer."""
        x = self._mix(bank, prefix, self.self_attention_res_query, self.input_layernorm)
        attended = self.self_attn(x, batch)
        if self.starts_block:
            bank, prefix = [*bank, prefix], attended
        else:
            prefix = ops.add_rows(prefix, attended)
        x = self._mix(bank, prefix, self.mlp_res_query, self.post_attention_layernorm)
        return bank, ops.add_rows(prefix, self.feed_forward(x))

    def _mix(self, bank: list[Tensor], prefix: Tensor, query: "MixingQuery", after: RMSNorm) -> Tensor:
        x: Tensor = ops.attn_res_mix([*bank, prefix], query(), after.weight, self.eps)
        return x


class MixingQuery:
    """The only combination of norm weight [D] and projection row [1, D] that matters: their product [D] in float32.

    Kept while both are frozen; weights that are trained are multiplied at each call, so that gradients reach them.
    """

    def __init__(self, norm: Weight, proj: Weight):
        self._norm, self._proj = norm, proj
        self._kept: tuple[Tensor, Tensor, int, int, Tensor] | None = None

    def __call__(self) -> Tensor:
        norm, proj = self._norm.weight, self._proj.weight
        if norm.requires_grad or proj.requires_grad:
            return _product(norm, proj)
        kept = self._kept
        # loading a state exchanges the tensors or writes into them
        if kept is None or kept[0] is not norm or kept[1] is not proj or kept[2:4] != (norm._version, proj._version):
            with torch.inference_mode(False):  # what is kept may serve a pass with gradients
                kept = self._kept = (norm, proj, norm._version, proj._version, _product(norm, proj))
        return kept[4]


def _product(norm_D: Tensor, proj_1D: Tensor) -> Tensor:
    return norm_D.float() * proj_1D[0].float()

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
        self.mlp_res_norm = Weight(hidden, dtype=dtype)
        self.mlp_res_proj = Weight(1, hidden, dtype=dtype)
        mixer = KimiDeltaAttention if config.is_kda(layer) else MultiHeadLatentAttention
        self.self_attn = mixer(config, eps, index, dtype)
        if experts is None:
            betas = (config.activation_situ_beta, config.activation_situ_linear_beta)
            self.mlp = MLP(hidden, config.intermediate_size, *betas, dtype)
        else:
            self.block_sparse_moe = LatentMoE(config, experts, dtype)

    @property
    def feed_forward(self) -> nn.Module:
        return self.mlp if "mlp" in self._modules else self.block_sparse_moe

    def forward(self, bank: list[Tensor], prefix: Tensor, batch: ForwardBatch) -> tuple[list[Tensor], Tensor]:
        """bank: tensors [T, D], prefix [T, D] -> the bank and prefix after this layer."""
        x = self._mix(bank, prefix, self.self_attention_res_norm, self.self_attention_res_proj, self.input_layernorm)
        attended = self.self_attn(x, batch)
        if self.starts_block:
            bank, prefix = [*bank, prefix], attended
        else:
            prefix = prefix + attended
        x = self._mix(bank, prefix, self.mlp_res_norm, self.mlp_res_proj, self.post_attention_layernorm)
        return bank, prefix + self.feed_forward(x)

    def _mix(self, bank: list[Tensor], prefix: Tensor, norm: Weight, proj: Weight, after: RMSNorm) -> Tensor:
        x: Tensor = ops.attn_res_mix([*bank, prefix], mixing_query(norm, proj), after.weight, self.eps)
        return x


def mixing_query(norm: Weight, proj: Weight) -> Tensor:
    """The only combination of norm weight [D] and projection row [1, D] that matters: their product [D] in float32."""
    return norm.weight.float() * proj.weight[0].float()

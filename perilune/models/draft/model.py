"""The DSpark draft: rows of the target's stream in, a block of drafts out.

Every token that the target processes leaves a context row per draft layer in the cache, made from the stream after the
tapped layers. A draft pass adds a block of rows behind them and yields as many tokens: the target's output head on each
row, plus a Markov bias from the token drafted before it.

T tokens, N sequences, L rows of a block, K drafts, V vocabulary, D hidden size.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from perilune import ops
from perilune.cache.spec import CacheGroupSpec
from perilune.config.draft import DraftConfig
from perilune.errors import CheckpointError
from perilune.models.draft.attention import GroupedAttention, LatentAttention
from perilune.models.draft.block import DRAFT_GROUP, DraftBlocks, cache_groups
from perilune.models.inputs import ForwardBatch
from perilune.models.layers import Embedding, Linear, Projections, RMSNorm, parameter
from perilune.ops.linear import multiplies_bfloat16_with

# Takes which draft it is, from 0, and float32 logits [N, V]; gives the token ids [N].
Choose = Callable[[int, Tensor], Tensor]

_BEST = (0.0, 0.0, 1.0, 0.0, 0.0)  # ops.sample_tokens: temperature 0 takes the best


@dataclass(frozen=True)
class Drafts:
    """What one draft pass proposes, place by place."""

    ids: tuple[Tensor, ...]  # K of [N]
    rows_KND: Tensor  # normed hidden states
    markov_rows: tuple[Tensor, ...]  # K of [N, rank] float32, of the tokens before
    base_KNV: Tensor  # logits in the compute dtype, before the Markov bias

    @property
    def token_ids(self) -> Tensor:
        """[N, K]."""
        return torch.stack(self.ids, 1)


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden: int, inner: int, dtype: torch.dtype):
        super().__init__()
        self.gate_proj = Linear(hidden, inner, dtype)
        self.up_proj = Linear(hidden, inner, dtype)
        self.down_proj = Linear(inner, hidden, dtype)
        self.projections = Projections(self.gate_proj, self.up_proj)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, D] -> [T, D]."""
        y: Tensor = self.down_proj(ops.swiglu(*self.projections(x)))
        return y


class DraftLayer(nn.Module):
    """Attention and MLP, each after a norm and added to the stream."""

    def __init__(self, config: DraftConfig, index: int, dtype: torch.dtype):
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden, eps, dtype)
        self.post_attention_layernorm = RMSNorm(hidden, eps, dtype)
        self.self_attn = (LatentAttention if config.is_latent else GroupedAttention)(config, index, dtype)
        self.mlp = MLP(hidden, config.intermediate_size, dtype)

    def forward(self, x: Tensor, blocks: DraftBlocks) -> Tensor:
        """x [T, D] -> [T, D]."""
        x = ops.add_rows(x, self.self_attn(self.input_layernorm(x), blocks))
        y: Tensor = ops.add_rows(x, self.mlp(self.post_attention_layernorm(x)))
        return y


class MarkovHead(nn.Module):
    """What the token before says about the next: logits + W2 W1[token]."""

    def __init__(self, vocab_size: int, rank: int, dtype: torch.dtype):
        super().__init__()
        self.markov_w1 = Embedding(vocab_size, rank, dtype)
        self.markov_w2 = Linear(rank, vocab_size, dtype)

    def forward(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """token_ids [N] -> the tokens' rows [N, rank] and bias [N, V], both float32."""
        rows = ops.embed_rows(self.markov_w1.weight, token_ids, torch.float32)
        return rows, self.markov_w2(rows)


class ConfidenceHead(nn.Module):
    """One logit from a row's hidden state, and the token before it where `rank` is not 0."""

    def __init__(self, hidden: int, rank: int, dtype: torch.dtype):
        super().__init__()
        self.rank = rank
        self.proj = Linear(hidden + rank, 1, dtype)
        self.proj.bias = parameter(1, dtype=torch.float32)

    def forward(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """hidden [..., D], Markov rows [..., rank] -> [...] float32."""
        x = torch.cat((hidden.float(), rows), dim=-1) if self.rank else hidden.float()
        y: Tensor = self.proj(x)[..., 0] + self.proj.bias
        return y


class DraftModel(nn.Module):
    """A draft beside the target whose embedding and output head it shares."""

    def __init__(self, config: DraftConfig, embed_tokens: Embedding, lm_head: Linear, dtype: torch.dtype):
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.config, self.dtype = config, dtype
        self._shared = (embed_tokens, lm_head)  # a tuple, so that they stay parameters of the target alone
        self._orders: dict[tuple[int, int, int], Tensor] = {}
        self._greedy: dict[int, Tensor] = {}
        self.frequencies = torch.tensor(config.rope.frequencies, dtype=torch.float64, device="cpu")
        self.context_proj = Linear(hidden * len(config.target_layer_ids), hidden, dtype)
        self.context_norm = RMSNorm(hidden, eps, dtype)
        self.layers = nn.ModuleList(DraftLayer(config, index, dtype) for index in range(config.num_hidden_layers))
        self.final_norm = RMSNorm(hidden, eps, dtype)
        self.markov_head = MarkovHead(config.vocab_size, config.markov_rank, dtype)
        if config.has_confidence_head:
            rank = config.markov_rank if config.confidence_head_with_markov else 0
            self.confidence_head = ConfidenceHead(hidden, rank, dtype)
        linears = [linear for layer in self.layers for linear in layer.self_attn.cached_linears]
        self.context_linears = Projections(*linears)

    def cache_groups(self) -> tuple[CacheGroupSpec, ...]:
        """What a sequence keeps for the draft, beside the target's groups."""
        return cache_groups(self.config)

    def context(self, taps: Tensor) -> Tensor:
        """taps [T, layers * D], the target's stream after each tapped layer, ascending -> [T, D]."""
        x: Tensor = self.context_norm(self.context_proj(taps))
        return x

    def write_context(self, taps: Tensor, batch: ForwardBatch) -> None:
        """Puts the context rows of all tokens of the target's pass `batch` into its cache; taps as in `context`.

        Rows of tokens that are rejected later are overwritten before a pass reads them.
        """
        place = (batch.seq_lens, batch.cu_seqlens, batch.token_ids.shape[0])
        turns = ops.rotary_turns(self.frequencies, self.config.rope.table_factor, *place)
        outputs = iter(self.context_linears(self.context(taps)))
        for index, layer in enumerate(self.layers):
            attention = layer.self_attn
            own = [next(outputs) for _ in attention.cached_linears]
            batch.write_rows(DRAFT_GROUP, index, attention.rows(*own, turns), num_scaled=0)

    def turns(self, ends: Tensor, num_rows: int) -> Tensor:
        """Of blocks of `num_rows` rows that end before positions ends [N]: [N * num_rows, rotary width]."""
        starts = torch.arange(ends.shape[0] + 1) * num_rows
        turns: Tensor = ops.rotary_turns(
            self.frequencies, self.config.rope.table_factor, ends, starts, ends.shape[0] * num_rows
        )
        return turns

    def blocks(
        self,
        anchor_ids: Tensor,
        num_before: Tensor,
        block_table: Tensor,
        cache: Mapping[str, Tensor],
        *,
        num_drafts: int | None = None,
    ) -> DraftBlocks:
        """The inputs of a pass: see `DraftBlocks.after`. `num_drafts` is needed where the draft names no block size."""
        size = self.config.block_size
        if size is None:
            assert num_drafts is not None, "the draft names no block size"
            size = num_drafts + (not self.config.samples_from_anchor)
        turns = self.turns(num_before + size, size)
        return DraftBlocks.after(self.config, anchor_ids, num_before, block_table, cache, turns)

    def forward(self, blocks: DraftBlocks) -> Tensor:
        """-> normed hidden states [N * L, D] of the blocks' rows; writes their rows into the cache."""
        x = self._shared[0](blocks.token_ids)
        for layer in self.layers:
            x = layer(x, blocks)
        y: Tensor = self.final_norm(x)
        return y

    def draft(self, hidden: Tensor, anchor_ids: Tensor, num_drafts: int, choose: Choose | None = None) -> Drafts:
        """Tokens from hidden states [N * L, D], one after the other; `choose` None takes the best, lower ids first.

        A block may yield fewer drafts than it has rows for, never more. IndexError where a row in the middle is not
        finite and `choose` None finds no token. Without `choose` this can be recorded.
        """
        num_sequences = anchor_ids.shape[0]
        order = self._order(num_sequences, hidden.shape[0] // num_sequences, num_drafts)
        rows = ops.embed_rows(hidden, order, hidden.dtype)
        base_KNV = self._shared[1](rows).unflatten(0, (num_drafts, -1))
        previous, chosen, markov_rows = anchor_ids, list[Tensor](), list[Tensor]()
        for index in range(num_drafts):
            own, bias_NV = self.markov_head(previous)
            logits_NV = ops.add_rows(ops.scale_rows(base_KNV[index], 1.0), bias_NV)
            previous = self._best(logits_NV) if choose is None else choose(index, logits_NV)
            chosen.append(previous)
            markov_rows.append(own)
        return Drafts(tuple(chosen), rows.unflatten(0, (num_drafts, -1)), tuple(markov_rows), base_KNV)

    def confidence_logits(self, drafts: Drafts) -> Tensor | None:
        """[N, K] float32: of the chance that the target accepts a draft; None for a draft without that head."""
        if not self.config.has_confidence_head:
            return None
        logits: Tensor = self.confidence_head(drafts.rows_KND, torch.stack(drafts.markov_rows))
        return logits.T

    def _order(self, num_sequences: int, num_rows: int, num_drafts: int) -> Tensor:
        """[K * N]: the rows of hidden states that yield drafts, place by place."""
        key = (num_sequences, num_rows, num_drafts)
        if key not in self._orders:
            first = not self.config.samples_from_anchor
            assert first + num_drafts <= num_rows, f"a block has rows for {num_rows - first} drafts, not {num_drafts}"
            places = torch.arange(first, first + num_drafts)
            self._orders[key] = (places[:, None] + num_rows * torch.arange(num_sequences)).flatten()
        return self._orders[key]

    def _best(self, logits_NV: Tensor) -> Tensor:
        count = logits_NV.shape[0]
        if count not in self._greedy:
            self._greedy[count] = torch.tensor([_BEST] * count, dtype=torch.float64)
        token_ids: Tensor = ops.sample_tokens(logits_NV, self._greedy[count], None)[0]
        return token_ids


def build_draft(
    config: DraftConfig, state: Mapping[str, Tensor], embed_tokens: Embedding, lm_head: Linear, dtype: torch.dtype
) -> DraftModel:
    """Builds a draft around a checkpoint's tensors by parameter name, copying only to change a dtype.

    `embed_tokens` and `lm_head` are the target's. A float32 draft keeps bfloat16 matrices where an op multiplies them
    as they lie. Raises CheckpointError for a missing tensor.
    """
    with torch.device("meta"):
        draft = DraftModel(config, embed_tokens, lm_head, dtype)
    tensors: dict[str, Tensor] = {}
    takes_bfloat16 = multiplies_bfloat16_with(dtype)
    for path, module in draft.named_modules():
        for leaf, own in module.named_parameters(path, recurse=False):
            if leaf not in state:
                raise CheckpointError(f"the draft has no tensor for the parameter {leaf}")
            stored = state[leaf]
            is_matrix = isinstance(module, Linear | Embedding) and stored.dim() == 2
            stays = is_matrix and takes_bfloat16 and stored.dtype is torch.bfloat16
            tensors[leaf] = stored if stays else stored.to(own.dtype)
    draft.load_state_dict(tensors, strict=True, assign=True)
    return draft.requires_grad_(False).eval()

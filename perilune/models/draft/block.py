"""Where the rows of a draft pass lie: the block of each sequence, in the cache that the target's passes fill.

N sequences with blocks of L rows each: the last known token, whose target row does not exist yet, and masks. They lie
at the positions where the target's next pass will write its own rows over them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from perilune import ops
from perilune.cache.spec import CacheGroupSpec
from perilune.config.draft import DraftConfig

DRAFT_GROUP = "draft"


def cache_groups(config: DraftConfig) -> tuple[CacheGroupSpec, ...]:
    """One row per token and draft layer, under the target's block tables."""
    return (CacheGroupSpec(DRAFT_GROUP, "paged", config.num_hidden_layers, (config.attention.cache_width,), "model"),)


@dataclass(frozen=True)
class DraftBlocks:
    """Inputs of a draft pass over N sequences. Index tensors are int64."""

    token_ids: Tensor  # [N * L]
    slot_mapping: Tensor  # [N * L], row of each token in the paged groups
    turns: Tensor  # [N * L, rotary width], see ops.rotary_turns
    # how attention sees the rows: each alone, as a sequence that ends with the last row it may see
    block_table: Tensor  # [N * L, B]
    seq_lens: Tensor  # [N * L]
    cu_seqlens: Tensor  # [N * L + 1]
    pool: Tensor  # [layers, blocks, block_size, row]

    @staticmethod
    def after(
        config: DraftConfig,
        anchor_ids: Tensor,
        num_before: Tensor,
        block_table: Tensor,
        cache: Mapping[str, Tensor],
        turns: Tensor,
    ) -> "DraftBlocks":
        """Blocks of rows with these turns, for anchor_ids [N] after num_before [N] tokens, in block_table [N, B].

        The cache holds the context rows of the tokens before; blocks must reach position num_before + num_rows - 1.
        """
        pool = cache[DRAFT_GROUP]
        num_sequences, block_size = anchor_ids.shape[0], pool.shape[2]
        num_rows = turns.shape[0] // num_sequences
        token_ids_NL = torch.full((num_sequences, num_rows), config.mask_token_id)
        token_ids_NL[:, 0] = anchor_ids
        positions_NL = num_before[:, None] + torch.arange(num_rows)
        slots_NL = block_table.gather(1, positions_NL // block_size) * block_size + positions_NL % block_size
        ends = num_before + num_rows
        seen_NL = positions_NL + 1 if config.is_causal else ends[:, None].expand(-1, num_rows)
        return DraftBlocks(
            token_ids=token_ids_NL.flatten(),
            slot_mapping=slots_NL.flatten(),
            turns=turns,
            block_table=block_table.repeat_interleave(num_rows, dim=0),
            seq_lens=seen_NL.flatten().contiguous(),
            cu_seqlens=torch.arange(num_sequences * num_rows + 1),
            pool=pool,
        )

    @property
    def place(self) -> tuple[Tensor, Tensor, Tensor]:
        """What attention ops take between the rows and the weights."""
        return self.block_table, self.seq_lens, self.cu_seqlens

    def write(self, layer: int, rows: Tensor) -> Tensor:
        """Puts rows [N * L, W] of one layer into the cache; returns that layer's pool."""
        ops.store_rows(self.pool[layer], self.slot_mapping, rows)
        return self.pool[layer]

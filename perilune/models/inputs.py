"""Everything one forward pass is told: token ids, where sequences begin, and where cached rows and states lie.

T tokens of N sequences lie end to end. Sequences with exactly one new token come first (`num_decodes` of them), because
they take other ops than long ones do. Those whose tokens may be taken back come last (`num_verifies`): their states are
read and stay as they are, and what a commit of the first tokens needs goes into `records`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from perilune import ops
from perilune.cache.spec import CacheDtype, CacheGroupSpec
from perilune.ops.packed_rows.layout import is_packed, row_bytes

# what a cache group calls the values of packed rows
_CACHE_NAMES: dict[torch.dtype, CacheDtype] = {
    torch.float8_e4m3fn: "float8_e4m3fn",
    torch.int8: "int8",
    torch.uint8: "uint8",
}


@dataclass(frozen=True)
class Part:
    """A run of sequences that takes the same ops: few tokens each (one, or some to verify), or prompts."""

    is_decode: bool
    tokens: slice
    cu_seqlens: Tensor  # [n+1], counted from this part's first token
    seq_lens: Tensor  # [n]
    block_table: Tensor  # [n, B]
    state_slots: Tensor  # [n]


@dataclass(frozen=True)
class Seals:
    """What is copied when the next `num_sequences` sequences of a pass have written their states.

    copies [C, 2] int64: the slot to copy from, and that to copy to.
    """

    num_sequences: int
    copies: Tensor


class Round(NamedTuple):
    """A run of sequences that take up their states at once, and the copies [C, 2] of states made behind them."""

    part: Part
    copies: Tensor | None


@dataclass(frozen=True)
class ForwardBatch:
    """Inputs of one forward pass. Index tensors are int64.

    `cache` maps a group's name to its storage, [layers, blocks, block_size, ...] for paged groups and
    [layers, slots, ...] for states; the pass writes into it. None (training, and passes over whole sequences of equal
    length) keeps nothing: every sequence is then one block of the pass's own rows.

    Two sequences of a pass may be pieces of one and share a state: `seals` then divides the sequences into rounds, and
    a later round goes on where the earlier ones have got to. Without seals all are one round.
    """

    token_ids: Tensor  # [T]
    cu_seqlens: Tensor  # [N+1], first token of each sequence
    seq_lens: Tensor  # [N], tokens of each sequence after this pass, cached ones included
    block_table: Tensor  # [N, B], blocks of each sequence in order
    slot_mapping: Tensor  # [T], row of each token: block * block_size + offset
    state_slots: Tensor  # [N]
    num_decodes: int
    logits_rows: Tensor  # [R], tokens whose logits are wanted, ascending and each once
    cache: Mapping[str, Tensor] | None
    image_rows: Tensor | None = None  # [I], tokens whose embedding is a row of a picture
    image_embeddings: Tensor | None = None  # [I, D] in the compute dtype
    num_verifies: int = 0
    records: Mapping[str, Tensor] | None = None  # by group of `record_groups`: [layers, rows, ...]
    seals: tuple[Seals, ...] = ()

    @staticmethod
    def whole(token_ids: Tensor, logits_rows: Tensor | None = None) -> "ForwardBatch":
        """A pass without cache over token_ids [N, L]; `logits_rows` [R] index the N*L tokens, None wants all."""
        num_sequences, length = token_ids.shape
        rows = torch.arange(num_sequences * length)
        return ForwardBatch(
            token_ids=token_ids.flatten(),
            cu_seqlens=torch.arange(0, num_sequences * length + 1, length),
            seq_lens=torch.full((num_sequences,), length),
            block_table=torch.arange(num_sequences)[:, None],
            slot_mapping=rows,
            state_slots=torch.zeros(num_sequences, dtype=torch.int64),
            num_decodes=0,
            logits_rows=rows if logits_rows is None else logits_rows,
            cache=None,
        )

    @property
    def wants_all_logits(self) -> bool:
        return self.logits_rows.shape[0] == self.token_ids.shape[0]

    @cached_property
    def longest(self) -> int:
        """Rows of the longest sequence after this pass."""
        return int(self.seq_lens.max())

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The decoding sequences, the prompts and those to verify; a part without sequences is left out."""
        end, split = self.num_plain, self.num_decodes
        bounds = [(True, 0, split), (False, split, end), (True, end, self.seq_lens.shape[0])]
        return tuple(self._part(is_decode, first, last) for is_decode, first, last in bounds if first < last)

    @property
    def num_plain(self) -> int:
        """Sequences whose states the pass moves on."""
        return self.seq_lens.shape[0] - self.num_verifies

    @cached_property
    def rounds(self) -> tuple[Round, ...]:
        """The rounds in which the sequences whose states the pass moves on take them up."""
        if not self.seals:
            return (Round(self._part(False, 0, self.num_plain), None),) if self.num_plain else ()
        rounds, first = [], 0
        for seals in self.seals:
            last = first + seals.num_sequences
            rounds.append(Round(self._part(False, first, last), seals.copies))
            first = last
        return tuple(rounds)

    @cached_property
    def verified(self) -> Part | None:
        """The sequences whose states stay as they are; None where there are none."""
        return self._part(True, self.num_plain, self.seq_lens.shape[0]) if self.num_verifies else None

    def _part(self, is_decode: bool, first: int, last: int) -> Part:
        cu_seqlens = self.cu_seqlens[first : last + 1]
        start, end = int(cu_seqlens[0]), int(cu_seqlens[-1])
        return Part(
            is_decode=is_decode,
            tokens=slice(start, end),
            cu_seqlens=cu_seqlens - start,
            seq_lens=self.seq_lens[first:last],
            block_table=self.block_table[first:last],
            state_slots=self.state_slots[first:last],
        )

    def prepare(self) -> None:
        """Look now at what passes ask about the contents of the inputs."""
        assert self.parts
        assert self.longest
        # each for itself: a pass may have both
        assert any((self.rounds, self.verified))

    def write_rows(self, group: str, layer: int, rows: Tensor, num_scaled: int) -> Tensor:
        """Puts rows [T, W] of this pass into a paged group; returns the layer's pool [blocks, block_size, ...].

        A pool of packed rows quantises the first `num_scaled` columns; see `ops.packed_rows`.
        """
        if self.cache is None:
            return rows.view(self.seq_lens.shape[0], -1, rows.shape[-1])
        pool = self.cache[group][layer]
        if is_packed(pool.dtype):
            ops.store_packed_rows(pool, self.slot_mapping, rows, num_scaled)
        else:
            ops.store_rows(pool, self.slot_mapping, rows)
        return pool

    def seal_states(self, group: str, layer: int, copies: Tensor | None) -> None:
        """Make a round's copies of states in one layer of a state group."""
        if self.cache is not None and copies is not None and len(copies):
            states = self.cache[group][layer]
            states[copies[:, 1]] = states[copies[:, 0]]

    def state(self, group: str, layer: int) -> Tensor | None:
        """The layer's states [slots, ...] of a state group, updated in place by ops; None without a cache."""
        return None if self.cache is None else self.cache[group][layer]

    def record(self, group: str, layer: int) -> Tensor:
        """Rows [R, ...] of one layer for what verifying leaves of each token, counted from the first to verify."""
        assert self.records is not None, "sequences to verify need records"
        return self.records[group][layer]


def row_group(
    name: str, num_layers: int, num_scaled: int, num_columns: int, values: torch.dtype | None
) -> CacheGroupSpec:
    """A paged group of rows in the compute dtype, or packed with `values` (`ops.packed_rows`)."""
    if values is None:
        return CacheGroupSpec(name, "paged", num_layers, (num_columns,), "model")
    return CacheGroupSpec(
        name, "paged", num_layers, (row_bytes(values, num_scaled, num_columns),), _CACHE_NAMES[values]
    )

"""The plan of a step made into tensors, run through the model, and its logits into tokens.

T tokens of N sequences lie end to end; R of them have their logits computed.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from perilune.cache.spec import CacheGroupSpec
from perilune.cache.storage import CacheStorage
from perilune.engine.batch import ScheduledBatch, ScheduledSequence, StepResult
from perilune.engine.images.encoder import ImageEncoder
from perilune.engine.steps.drafting import Drafting
from perilune.engine.steps.replay import ReplayedSteps, fill_table_row
from perilune.engine.steps.rounds import Round, cut_at_seals
from perilune.engine.steps.tokens import choose_tokens
from perilune.engine.steps.transfers import TierTransfers
from perilune.models.inputs import ForwardBatch, Seals
from perilune.ops.threads import torch_stands_back
from perilune.sampling.logprobs import SamplingFailure, TokenLogprob
from perilune.sampling.sampler import Sampler


class LanguageModel(Protocol):
    """What the runner needs of a model."""

    def cache_groups(self) -> tuple[CacheGroupSpec, ...]: ...

    def way(self, longest: int) -> int:
        """Passes of equal sizes take the same ops if their longest sequences, in rows, have the same number here."""

    def take_faults(self) -> Mapping[int, str]:
        """Tokens of the last pass, as they lay in its batch, whose results are void, and why."""

    def __call__(self, batch: ForwardBatch) -> Tensor:
        """Logits [R, vocab_size] of `batch.logits_rows`; writes the cache."""


class ModelRunner:
    """Runs planned steps; owns the cache's tensors, and keeps between steps only how to replay them.

    `images` embeds pictures and keeps what it embedded last; None for a model that sees none. `tiers` carries what
    steps save and load, and has to be there if they do. `drafting` guesses what a step has room to verify.
    """

    def __init__(
        self,
        model: LanguageModel,
        storage: CacheStorage,
        *,
        block_size: int,
        images: ImageEncoder | None = None,
        tiers: TierTransfers | None = None,
        drafting: Drafting | None = None,
    ):
        self._model = model
        self._drafting = drafting
        self._images = images
        self._storage = storage
        self._tiers = tiers
        self._block_size = block_size
        self._replayed = ReplayedSteps(model, model.way, block_size)
        self._sampler = Sampler()

    def execute(self, batch: ScheduledBatch) -> StepResult:
        """Run one step: writes the cache of its sequences and chooses tokens for those that need one."""
        self._model.take_faults()  # of a step that raised
        if self._drafting is not None:
            self._drafting.begin(batch)
        self._carry(batch)
        if not batch.sequences:
            return StepResult()
        self._storage.zero_slots([item.state_slot for item in batch.sequences if item.num_computed_tokens == 0])
        with torch_stands_back(), torch.inference_mode():
            plain, verified = batch.sequences, tuple[ScheduledSequence, ...]()
            if self._drafting is not None:
                plain, verified = self._drafting.propose(batch.sequences)
            rounds = cut_at_seals(plain)
            pieces = [*(piece for part in rounds for piece in part.pieces), *verified]
            shown = None if self._images is None else self._images.rows(pieces)
            logits_RV = None
            build = partial(self._forward_batch, pieces, _num_decodes(plain), len(verified))
            if shown is None:  # no recording knows of pictures
                logits_RV = self._replayed.run(pieces, build)
            if logits_RV is None:
                inputs = build(_widest(pieces))
                if shown is not None:
                    inputs = replace(inputs, image_rows=shown[0], image_embeddings=shown[1])
                logits_RV = self._model(replace(inputs, seals=_seals(rounds)))
            result = self._result(pieces, logits_RV)
        return _without_failed(result, pieces, self._model.take_faults())

    def _carry(self, batch: ScheduledBatch) -> None:
        """What a step does before it computes; loads begin where nothing that they overwrite is wanted any more."""
        if self._tiers is not None:
            self._tiers.save(batch.transfers)
        self._storage.move(batch.moves)
        if self._tiers is not None:
            self._tiers.start_loads()

    def settle(self) -> None:
        """Has all that steps wrote in the cache, for whoever reads it past the runner."""
        if self._drafting is not None:
            self._drafting.settle()

    def is_sound(self, slot: int) -> bool:
        """Whether the state in a slot may be kept for others."""
        return self._storage.is_finite(slot)

    def erase_blocks(self, block_ids: Sequence[int]) -> None:
        """Clear blocks that may hold values which are not finite, before others get them."""
        self.settle()
        self._storage.zero_blocks(block_ids)

    def _forward_batch(
        self, sequences: Sequence[ScheduledSequence], num_decodes: int, num_verifies: int, width: int
    ) -> ForwardBatch:
        """The inputs of a step, with a block table of `width` columns."""
        cu_seqlens = torch.tensor([0, *(sequence.num_scheduled_tokens for sequence in sequences)]).cumsum(0)
        block_table_NB = _block_table(sequences, width)
        pairs = list(zip(sequences, block_table_NB, strict=True))
        starts = zip(sequences, cu_seqlens[:-1].tolist(), strict=True)
        return ForwardBatch(
            token_ids=torch.tensor([token_id for sequence in sequences for token_id in sequence.token_ids]),
            cu_seqlens=cu_seqlens,
            seq_lens=torch.tensor([sequence.seq_len for sequence in sequences]),
            block_table=block_table_NB,
            slot_mapping=torch.cat([_slot_mapping(sequence, blocks, self._block_size) for sequence, blocks in pairs]),
            state_slots=torch.tensor([sequence.state_slot for sequence in sequences]),
            num_decodes=num_decodes,
            logits_rows=torch.tensor(
                [start + row for sequence, start in starts for row in sequence.logits_rows], dtype=torch.int64
            ),
            cache=self._storage.views,
            num_verifies=num_verifies,
            records=None if self._drafting is None else self._drafting.records,
        )

    def _result(self, sequences: Sequence[ScheduledSequence], logits_RV: Tensor) -> StepResult:
        failures = {
            sequence.request.request_id: "a state is not finite: it holds NaN or infinite values"
            for sequence in sequences
            if not all(seal.slot is None or self._storage.is_finite(seal.slot) for seal in sequence.seals)
        }
        prompt_logprobs: defaultdict[str, list[TokenLogprob]] = defaultdict(list)
        token_rows: list[int] = []
        row = 0
        for sequence in sequences:
            num_targets = len(sequence.logprob_targets)
            if num_targets:
                found = self._prompt_logprobs(sequence, logits_RV[row : row + num_targets])
                if isinstance(found, SamplingFailure):
                    failures[sequence.request.request_id] = found.reason
                else:
                    prompt_logprobs[sequence.request.request_id] += found
            end = row + len(sequence.logits_rows)
            token_rows += range(row + num_targets, end)
            row = end
        drawn = None if self._drafting is None else self._drafting.drawn
        if len(token_rows) < logits_RV.shape[0]:  # or all are wanted, as they lie
            logits_RV = logits_RV[token_rows]
        chosen = choose_tokens(self._sampler, [x for x in sequences if x.needs_token], logits_RV, drawn)
        failures |= {name: found.reason for name, found in chosen.items() if isinstance(found, SamplingFailure)}
        tokens = {
            name: found
            for name, found in chosen.items()
            if not isinstance(found, SamplingFailure) and name not in failures
        }
        return StepResult(tokens, failures, prompt_logprobs)

    def _prompt_logprobs(self, sequence: ScheduledSequence, logits_TV: Tensor) -> list[TokenLogprob] | SamplingFailure:
        request, num_top = sequence.request, sequence.request.params.prompt_logprobs
        assert num_top is not None
        targets = [request.token_ids[position] for position in sequence.logprob_targets]
        return self._sampler.prompt_logprobs(logits_TV, targets, num_top)


def _seals(rounds: Sequence[Round]) -> tuple[Seals, ...]:
    if len(rounds) == 1 and not rounds[0].copies:
        return ()
    return tuple(Seals(len(part.pieces), torch.tensor(part.copies, dtype=torch.int64).view(-1, 2)) for part in rounds)


def _without_failed(
    result: StepResult, sequences: Sequence[ScheduledSequence], faults: Mapping[int, str]
) -> StepResult:
    """The result with the requests failed that a void token belongs to."""
    if not faults:
        return result
    failures, first = dict(result.failures), 0
    for sequence in sequences:
        end = first + sequence.num_scheduled_tokens
        reason = next((faults[token] for token in range(first, end) if token in faults), None)
        if reason is not None:
            failures[sequence.request.request_id] = reason
        first = end
    tokens = {request_id: token for request_id, token in result.tokens.items() if request_id not in failures}
    return replace(result, tokens=tokens, failures=failures)


def _num_decodes(sequences: Sequence[ScheduledSequence]) -> int:
    return sum(sequence.num_scheduled_tokens == 1 for sequence in sequences)


def _slot_mapping(sequence: ScheduledSequence, blocks_B: Tensor, block_size: int) -> Tensor:
    """Row of each of the sequence's new tokens in the paged groups."""
    positions = torch.arange(sequence.num_computed_tokens, sequence.seq_len)
    return blocks_B[positions // block_size] * block_size + positions % block_size


def _widest(sequences: Sequence[ScheduledSequence]) -> int:
    return max(len(sequence.block_table) for sequence in sequences)


def _block_table(sequences: Sequence[ScheduledSequence], width: int) -> Tensor:
    """Block tables as rows [N, B]."""
    table_NB = torch.empty((len(sequences), width), dtype=torch.int64)
    for row_B, sequence in zip(table_NB, sequences, strict=True):
        fill_table_row(row_B, sequence.block_table)
    return table_NB

"""Who guesses: a draft model, or a copy of what followed the text's end before."""

from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from perilune.engine.batch import ScheduledSequence
from perilune.engine.request import Request
from perilune.engine.steps.drafting import Proposal
from perilune.engine.steps.replay import fill_table_row
from perilune.models.draft.model import DraftModel
from perilune.speculative.ngram import SuffixProposer

# Of a long text the latest tokens are searched, and so many are taken up in a step, which takes milliseconds.
MOST_SEARCHED = 65536
MOST_TAKEN_UP = 4096


class NgramProposer:
    """Copies on from where the text's end stood before, prompt and answer alike."""

    def __init__(self) -> None:
        self._texts: WeakKeyDictionary[Request, tuple[SuffixProposer, int]] = WeakKeyDictionary()

    def propose(self, sequences: Sequence[ScheduledSequence]) -> list[Proposal]:
        """Guesses for each sequence; none while its text is not taken up, or where its end is new."""
        return [Proposal(tuple(self._continue(item.request, item.most_drafts))) for item in sequences]

    def _continue(self, request: Request, count: int) -> list[int]:
        text, skipped = self._texts.get(request) or (SuffixProposer(), max(0, request.num_tokens - MOST_SEARCHED))
        self._texts[request] = text, skipped
        first = skipped + text.num_tokens
        text.extend(request.token_ids[first : first + MOST_TAKEN_UP])
        return text.propose(count) if first + MOST_TAKEN_UP >= request.num_tokens else []


class DraftProposer:
    """Runs a draft model, whose context rows lie in the target's `cache`, for blocks of `num_drafts` guesses."""

    def __init__(self, draft: DraftModel, cache: Mapping[str, Tensor], num_drafts: int):
        self._draft = draft
        self._cache = cache
        self._num_drafts = num_drafts

    def propose(self, sequences: Sequence[ScheduledSequence]) -> list[Proposal]:
        """The most probable guesses for each sequence."""
        anchor_ids = torch.tensor([sequence.token_ids[-1] for sequence in sequences])
        num_before = torch.tensor([sequence.seq_len - 1 for sequence in sequences])
        table_NB = torch.empty(len(sequences), max(len(item.block_table) for item in sequences), dtype=torch.int64)
        for row_B, sequence in zip(table_NB, sequences, strict=True):
            fill_table_row(row_B, sequence.block_table)
        blocks = self._draft.blocks(anchor_ids, num_before, table_NB, self._cache, num_drafts=self._num_drafts)
        drafts = self._draft.draft(self._draft(blocks), anchor_ids, self._num_drafts)
        logits_NK = drafts.confidence_logits
        chances = None if logits_NK is None else logits_NK.sigmoid().tolist()
        return [
            Proposal(
                tuple(token_ids[: sequence.most_drafts]),
                None if chances is None else tuple(chances[index][: sequence.most_drafts]),
            )
            for index, (sequence, token_ids) in enumerate(zip(sequences, drafts.token_ids.tolist(), strict=True))
        ]

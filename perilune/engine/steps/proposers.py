"""Who guesses: a draft model, or a copy of what followed the text's end before."""

from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

from torch import Tensor

from perilune.engine.batch import ScheduledSequence
from perilune.engine.request import Request
from perilune.engine.steps.draft_replay import ReplayedDrafts
from perilune.engine.steps.drafting import Proposal
from perilune.models.draft.model import DraftModel
from perilune.speculative.drawn import DrawnDrafts, Purpose, numbers
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
    """Runs a draft model, whose context rows lie in the target's `cache`, for blocks of `num_drafts` guesses.

    With `draws`, guesses of requests that are not greedy are drawn as their tokens are.
    """

    def __init__(
        self, draft: DraftModel, cache: Mapping[str, Tensor], num_drafts: int, block_size: int, *, draws: bool
    ):
        self._draft = draft
        self._num_drafts = num_drafts
        self._draws = draws
        self._replayed = ReplayedDrafts(draft, cache, num_drafts, block_size)

    def propose(self, sequences: Sequence[ScheduledSequence]) -> list[Proposal]:
        """The most probable guesses for each sequence, or drawn ones."""
        drawn = self._drawn(sequences)
        try:
            drafts = self._replayed.run(sequences, None if drawn is None else drawn.choose)
        except IndexError:
            # some sequence has rows that are not finite; its own pass will say so
            return [Proposal() for _ in sequences]
        logits_NK = None if drawn is not None else self._draft.confidence_logits(drafts)
        chances = None if logits_NK is None else logits_NK.sigmoid().tolist()
        laws = None if drawn is None else drawn.laws
        found = []
        for index, (sequence, token_ids) in enumerate(zip(sequences, drafts.token_ids.tolist(), strict=True)):
            count = sequence.most_drafts
            own = None if chances is None else tuple(chances[index][:count])
            law = None if laws is None or sequence.request.params.is_greedy else laws[index, :count]
            found.append(Proposal(tuple(token_ids[:count]), own, law))
        return found

    def _drawn(self, sequences: Sequence[ScheduledSequence]) -> DrawnDrafts | None:
        """What draws the guesses; None where all requests are greedy."""
        if not self._draws or all(sequence.request.params.is_greedy for sequence in sequences):
            return None
        settings, draws = [], []
        for sequence in sequences:
            request, params = sequence.request, sequence.request.params
            settings.append((params.temperature, float(params.top_k), params.top_p, params.min_p))
            draws.append(numbers(request.seed, sequence.num_computed_tokens, Purpose.DRAW, self._num_drafts))
        return DrawnDrafts(settings, draws)

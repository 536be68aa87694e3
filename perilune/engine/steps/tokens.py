"""From the logits of a step to the tokens of each request, those of guesses that were right included.

R rows, V vocabulary; a sequence has a row for its last known token and one behind each of its guesses.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from perilune.engine.batch import ScheduledSequence
from perilune.sampling.logprobs import SampledToken, SamplingFailure
from perilune.sampling.sampler import Sampler, SamplingRow, sampled_token
from perilune.speculative.drawn import Purpose, numbers
from perilune.speculative.verify import Verdict, accept_matching, law_of

Judge = Callable[[Tensor, Tensor, Sequence[int], Sequence[float]], Verdict]


@dataclass(frozen=True)
class DrawnRule:
    """How guesses are judged that were drawn: `judge` is `accept_tokens` or `accept_block`, and `laws` [K, V] float64
    by request id those that a step's guesses were drawn from.
    """

    judge: Judge
    laws: Mapping[str, Tensor]


Chosen = list[SampledToken] | SamplingFailure


def choose_tokens(
    sampler: Sampler, sequences: Sequence[ScheduledSequence], logits_RV: Tensor, drawn: DrawnRule | None = None
) -> dict[str, Chosen]:
    """The next tokens of each request, by its id, from the logits of its sequence's `token_rows`.

    Those are the very tokens, one step or many, that a request gets without guesses; only where its guesses were drawn
    they are others of the same law. A row that yields no token fails the request only if it is the first: otherwise the
    tokens before it stay.
    """
    laws = {} if drawn is None else drawn.laws
    ends = list(accumulate((len(sequence.token_rows) for sequence in sequences), initial=0))
    spans = [(sequence, range(*bounds)) for sequence, bounds in zip(sequences, pairwise(ends), strict=True)]
    plain = [(sequence, span) for sequence, span in spans if sequence.request.request_id not in laws]
    chosen = _choose_plain(sampler, [sequence for sequence, _ in plain], _rows_of(logits_RV, plain, len(spans)))
    for sequence, span in spans:
        if drawn is not None and sequence.request.request_id in laws:
            chosen[sequence.request.request_id] = _judge(sampler, sequence, logits_RV[span.start : span.stop], drawn)
    return chosen


def _rows_of(logits_RV: Tensor, spans: Sequence[tuple[ScheduledSequence, range]], num_sequences: int) -> Tensor:
    if len(spans) == num_sequences:
        return logits_RV
    return logits_RV[[row for _, span in spans for row in span]]


def _choose_plain(sampler: Sampler, sequences: Sequence[ScheduledSequence], logits_RV: Tensor) -> dict[str, Chosen]:
    """Every row sampled as without guesses, which stay where they are what was sampled."""
    rows = [row for sequence in sequences for row in _sampling_rows(sequence)]
    bitmask_RW, refusals = _bitmask(sequences, logits_RV.shape[1])
    sampled = sampler.sample(logits_RV, rows, bitmask_RW)
    for row, refusal in refusals.items():
        sampled[row] = refusal
    items = iter(sampled)
    return {
        sequence.request.request_id: _staying(sequence.draft_ids, [next(items) for _ in sequence.token_rows])
        for sequence in sequences
    }


def _judge(sampler: Sampler, sequence: ScheduledSequence, logits_RV: Tensor, drawn: DrawnRule) -> Chosen:
    """Guesses that were drawn, judged by the target's law of each row and the law that each was drawn from."""
    request, rows = sequence.request, _sampling_rows(sequence)
    bitmask_RW, refusals = _bitmask([sequence], logits_RV.shape[1])
    masses_RV, failures = sampler.masses(logits_RV, rows, bitmask_RW)
    found = [refusals.get(row) or failure for row, failure in enumerate(failures)]
    if found[0] is not None:
        return found[0]
    num_good = next((row for row, failure in enumerate(found) if failure is not None), len(found))
    draft_ids = sequence.draft_ids[: num_good - 1]
    judging = numbers(request.seed, sequence.num_computed_tokens, Purpose.JUDGE, num_good)
    draft_KV = drawn.laws[request.request_id][: num_good - 1]
    verdict = drawn.judge(law_of(masses_RV[:num_good]), draft_KV, draft_ids, judging)
    token_ids = [*draft_ids[: verdict.num_accepted], verdict.token_id]
    return [
        sampled_token(logits_V, row, token_id)
        for logits_V, row, token_id in zip(logits_RV, rows, token_ids, strict=False)
    ]


def _sampling_rows(sequence: ScheduledSequence) -> list[SamplingRow]:
    request, known = sequence.request, sequence.request.output_token_ids
    drafts = sequence.draft_ids
    return [
        SamplingRow(request.params, request.seed, request.message.prompt_token_ids, [*known, *drafts[:count]])
        for count in range(len(drafts) + 1)
    ]


def _bitmask(
    sequences: Sequence[ScheduledSequence], vocab_size: int
) -> tuple[Tensor | None, dict[int, SamplingFailure]]:
    """The tokens that grammars allow in each row, int32 [R, W] of 32 bits each; None where everything is allowed.

    A row that allows nothing is in the failures, by its number.
    """
    if not any(_is_bound(sequence) for sequence in sequences):
        return None, {}
    num_rows = sum(len(sequence.token_rows) for sequence in sequences)
    bitmask_RW = torch.full((num_rows, -(-vocab_size // 32)), -1, dtype=torch.int32)
    failures: dict[int, SamplingFailure] = {}
    first = 0
    for sequence in sequences:
        for place, refusal in enumerate(_fill(sequence, bitmask_RW[first:])):
            if refusal is not None:
                failures[first + place] = SamplingFailure(refusal)
        first += len(sequence.token_rows)
    return bitmask_RW, failures


def _is_bound(sequence: ScheduledSequence) -> bool:
    grammar = sequence.request.grammar
    return grammar is not None and (grammar.constrains or sequence.num_drafts > 0)


def _fill(sequence: ScheduledSequence, bitmask_RW: Tensor) -> Iterator[str | None]:
    """Writes the masks of a sequence's first rows, up to a guess that is not allowed; yields why a row allows nothing.

    A row behind such a guess needs no mask: its token is never taken.
    """
    grammar = sequence.request.grammar
    if grammar is None:
        return
    for place, row_W in enumerate(bitmask_RW[: len(sequence.token_rows)]):
        if place > 0:
            grammar = grammar.fork() if place == 1 else grammar
            grammar.advance(sequence.draft_ids[place - 1])
            if grammar.error is not None:
                return
        refusal = None
        if grammar.constrains:
            grammar.fill(row_W.data_ptr(), row_W.nbytes)
            if grammar.error is not None or not row_W.any():
                refusal = f"the grammar failed: {grammar.error or 'it allows no token here'}"
                row_W.fill_(-1)
        yield refusal


def _staying(
    draft_ids: Sequence[int], sampled: Sequence[SampledToken | SamplingFailure]
) -> list[SampledToken] | SamplingFailure:
    """The tokens of the guesses that were right and the one behind them, as far as rows have tokens."""
    if isinstance(sampled[0], SamplingFailure):
        return sampled[0]
    good: list[SampledToken] = []
    for item in sampled:
        if isinstance(item, SamplingFailure):
            break
        good.append(item)
    verdict = accept_matching([item.token_id for item in good], draft_ids[: len(good) - 1])
    return good[: verdict.num_accepted + 1]

"""Sequences cut where their states are to be copied, so that one pass can make the copies on its way.

Every piece counts as a sequence of its own; the second piece of a sequence comes in a later round than the first.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from perilune.engine.batch import ScheduledSequence


@dataclass(frozen=True)
class Round:
    """Pieces of different sequences. When their states are there, slot `copies[i][0]` is copied to `copies[i][1]`."""

    pieces: tuple[ScheduledSequence, ...]
    copies: tuple[tuple[int, int], ...]


def cut_at_seals(sequences: Sequence[ScheduledSequence]) -> tuple[Round, ...]:
    """Rounds in which each sequence appears at most once, and in all with all its tokens, in order."""
    pieces = [_pieces(sequence) for sequence in sequences]
    rounds = []
    for number in range(max(map(len, pieces), default=0)):
        here = tuple(found[number] for found in pieces if number < len(found))
        copies = tuple((piece.state_slot, seal.slot) for piece in here for seal in piece.seals if seal.slot is not None)
        rounds.append(Round(here, copies))
    return tuple(rounds)


def _pieces(sequence: ScheduledSequence) -> list[ScheduledSequence]:
    """The sequence cut behind each seal; every piece but the last ends with its seal."""
    start, pieces = sequence.num_computed_tokens, []
    for seal in sequence.seals:
        if seal.position < sequence.seq_len:
            pieces.append(_piece(sequence, start, seal.position))
            start = seal.position
    return [*pieces, _piece(sequence, start, sequence.seq_len)] if pieces else [sequence]


def _piece(sequence: ScheduledSequence, start: int, end: int) -> ScheduledSequence:
    first, is_last = sequence.num_computed_tokens, end == sequence.seq_len
    targets = sequence.logprob_targets
    return replace(
        sequence,
        num_computed_tokens=start,
        token_ids=sequence.token_ids[start - first : end - first],
        needs_token=sequence.needs_token and is_last,
        # the logits of a position yield the next token's log-probability
        logprob_targets=range(max(targets.start, start + 1), min(targets.stop, end + 1)),
        seals=tuple(seal for seal in sequence.seals if start < seal.position <= end),
    )

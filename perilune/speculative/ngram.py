"""Drafts without a model: what followed the last occurrence of the text's end.

Pure Python over one request's tokens, prompt and output alike. Every token costs one entry of an index; a look-up
compares a bounded number of earlier places, whatever the text.
"""

from array import array
from collections.abc import Iterable, Sequence


class SuffixProposer:
    """Copies on from an earlier place whose last tokens are those at the end, the longest such place among the latest.

    Places are found by their last `min_match` tokens; the latest `num_places` of them are compared over up to
    `max_match` tokens. The later one wins among equally long ones.
    """

    def __init__(self, token_ids: Iterable[int] = (), *, min_match: int = 2, max_match: int = 24, num_places: int = 8):
        assert 1 <= min_match <= max_match
        assert num_places >= 1
        self._min_match, self._max_match, self._num_places = min_match, max_match, num_places
        self._tokens = array("q")
        self._latest: dict[tuple[int, ...], int] = {}  # the last tokens of a place -> where the tokens after it begin
        self._before = array("q")  # for each position, the place before it with the same last tokens, or -1
        self.extend(token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Appends tokens that stay."""
        tokens, width = self._tokens, self._min_match
        for token_id in token_ids:
            # the place before the new token is known only now that something follows it
            end, before = len(tokens), -1
            if end >= width:
                key = tuple(tokens[end - width : end])
                before = self._latest.get(key, -1)
                self._latest[key] = end
            self._before.append(before)
            tokens.append(token_id)

    def propose(self, count: int) -> list[int]:
        """Up to `count` tokens that may come next; none where the end has no earlier occurrence."""
        place = self._find()
        if place is None:
            return []
        tokens, drafts = self._tokens, list[int]()
        for position in range(place, place + count):
            # a copy that reaches the end goes on with itself, as repetitions do
            drafts.append(tokens[position] if position < len(tokens) else drafts[position - len(tokens)])
        return drafts

    def _find(self) -> int | None:
        tokens, end, width = self._tokens, len(self._tokens), self._min_match
        if end <= width:
            return None
        place = self._latest.get(tuple(tokens[end - width :]), -1)
        best, longest = None, 0
        for _ in range(self._num_places):
            if place < 0:
                break
            length = _match(tokens, place, end, self._max_match)
            if length > longest:
                best, longest = place, length
            place = self._before[place]
        return best


def _match(tokens: Sequence[int], place: int, end: int, most: int) -> int:
    """How many tokens before `place` are those before `end`, at most `most`."""
    most, length = min(most, place), 0
    while length < most and tokens[place - length - 1] == tokens[end - length - 1]:
        length += 1
    return length

import random

import pytest

from perilune.speculative import ngram
from perilune.speculative.ngram import SuffixProposer


def naive(tokens, count, *, min_match=2, max_match=24, num_places=8):
    """Every earlier place, longest match first, later ones first among equals."""
    end = tokens[len(tokens) - min_match :]
    places = [p for p in range(min_match, len(tokens)) if tokens[p - min_match : p] == end]

    def length(place):
        matches = 0
        while matches < min(max_match, place) and tokens[place - matches - 1] == tokens[-matches - 1]:
            matches += 1
        return matches

    if len(tokens) <= min_match or not places:
        return []
    place = max(places[-num_places:], key=lambda p: (length(p), p))
    extended = list(tokens)
    for position in range(place, place + count):
        extended.append(extended[position])
    return extended[len(tokens) :]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("settings", [{}, {"min_match": 1, "max_match": 3}, {"min_match": 3, "num_places": 2}])
def test_it_finds_what_a_search_of_the_whole_text_finds(seed, settings):
    source = random.Random(seed)
    proposer, tokens, num_found = SuffixProposer(**settings), [], 0
    for _ in range(300):
        token = source.choice(tokens[-40:]) if tokens and source.random() < 0.4 else source.randrange(2 + seed)
        tokens.append(token)
        proposer.extend([token])
        count = source.randrange(1, 9)
        found = proposer.propose(count)
        assert found == naive(tokens, count, **settings)
        num_found += bool(found)
    assert num_found > 20


def test_the_prompt_may_come_at_once_or_token_by_token():
    tokens = [1, 2, 3, 4, 1, 2, 3, 9, 5, 1, 2, 3]
    whole, single = SuffixProposer(tokens), SuffixProposer()
    for token in tokens:
        single.extend([token])
    assert whole.num_tokens == len(tokens)
    assert whole.propose(4) == single.propose(4) == [9, 5, 1, 2]


def test_the_longest_match_wins_over_a_later_one():
    assert SuffixProposer([7, 1, 2, 50, 8, 1, 2, 60, 7, 1, 2]).propose(1) == [50]
    assert SuffixProposer([8, 1, 2, 50, 8, 1, 2, 60, 7, 1, 2]).propose(1) == [60]


def test_a_repetition_goes_on():
    assert SuffixProposer([4, 5, 6, 4, 5, 6, 4]).propose(8) == [5, 6, 4, 5, 6, 4, 5, 6]
    assert SuffixProposer([3, 3, 3]).propose(5) == [3] * 5


@pytest.mark.parametrize("tokens", [[], [1], [1, 2], [1, 2, 3, 4, 5]])
def test_an_end_that_was_not_there_before_yields_nothing(tokens):
    assert SuffixProposer(tokens).propose(4) == []


def test_proposals_are_no_tokens():
    proposer = SuffixProposer([1, 2, 3, 1, 2])
    assert proposer.propose(2) == proposer.propose(2) == [3, 1]
    proposer.extend([8])
    assert proposer.num_tokens == 6
    assert proposer.propose(2) == []


def test_a_look_up_compares_a_bounded_number_of_tokens_whatever_the_text(monkeypatch):
    lengths = []
    real = ngram._match
    monkeypatch.setattr(ngram, "_match", lambda *given: lengths.append(real(*given)) or lengths[-1])
    proposer = SuffixProposer([7] * 20000)
    assert proposer.propose(3) == [7, 7, 7]
    assert len(lengths) <= 8
    assert max(lengths) <= 24

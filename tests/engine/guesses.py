"""Guesses of every quality for tests of engines that verify them."""

import random

from perilune.engine.steps.drafting import Proposal


class Guesser:
    """Knows how each request goes on and tells it, but for a share of lies drawn by `seed`."""

    def __init__(self, answers, *, share_of_lies, vocab_size, seed=0):
        self._answers = answers  # tokens by request id
        self._share_of_lies = share_of_lies
        self._vocab_size = vocab_size
        self._random = random.Random(seed)

    def propose(self, sequences):
        return [Proposal(tuple(self._guess(item.request, item.most_drafts))) for item in sequences]

    def _guess(self, request, count):
        known = self._answers[request.request_id][request.num_output_tokens :][:count]
        # behind its end an answer goes on for nobody, but the engine does not know
        known = [*known, *([1] * (count - len(known)))]
        return [
            self._random.randrange(self._vocab_size) if self._random.random() < self._share_of_lies else token_id
            for token_id in known[: self._random.randint(0, count)]
        ]


def always_guess(core, proposer=None):
    """Have an engine verify all guesses that there is room for, whatever they cost and however few were right."""
    drafting = core._drafting
    drafting.switch(is_on=True)

    def lengths(requests, most, budget):
        found = []
        for count in most:
            found.append(max(0, min(count, budget - sum(found))))
        return found

    drafting.policy.lengths = lengths
    drafting.policy.rests = lambda: False
    drafting.policy.trimmed = lambda chances: [len(own) for own in chances]
    drafting.policy.alike = list
    if proposer is not None:
        drafting._proposer = proposer
    return core

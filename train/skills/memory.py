"""Recall over long texts: facts stand among sentences that nobody asks about, up to a number of tokens.

Held out: the facts of `train/facts.py` that training never shows, and every text.
"""

import random
from collections.abc import Callable, Sequence

from train.dictionary import Entry
from train.facts import Fact, draw_facts
from train.skills.dialogue import Dialogue, Message, says, user

MIN_FACTS, MAX_FACTS = 4, 12
FILLERS = ("A {word} is {definition}.", "{word} means {definition}.", "By {word} one means {definition}.")
HEADINGS = ("Read this text.\n", "Here is a text:\n", "Remember this text.\n", "")

Count = Callable[[str], int]


class MemorySource:
    """Draws long texts with questions from one side of the split; `count` says how many tokens a text has."""

    def __init__(self, rng: random.Random, entries: Sequence[Entry], count: Count, *, held_out: bool):
        self.rng, self.held_out = rng, held_out
        self._entries, self._count = entries, count

    def dialogue(self, num_tokens: int, num_questions: int = 1) -> Dialogue:
        """A text of about `num_tokens` tokens and questions about some of its facts."""
        facts = draw_facts(self.rng, self.rng.randint(MIN_FACTS, MAX_FACTS), held_out=self.held_out)
        asked = self.rng.sample(facts, min(num_questions, len(facts)))
        text = self.rng.choice(HEADINGS) + self.text(facts, num_tokens) + "\n"
        messages: list[Message] = []
        for fact in asked:
            question = self.rng.choice(fact.questions)
            messages += [user(text + question), says(fact.sentence, f"I look for {fact.topic}.")]
            text = ""
        return Dialogue("recall", tuple(messages))

    def text(self, facts: Sequence[Fact], num_tokens: int) -> str:
        """The facts in random places among filler."""
        sentences = [fact.sentence for fact in facts]
        free = num_tokens - sum(map(self._count, sentences))
        fillers: list[str] = []
        while free > 0:
            entry = self.rng.choice(self._entries)
            filler = self.rng.choice(FILLERS).format(word=entry.word, definition=entry.definition)
            fillers.append(filler)
            free -= self._count(filler) + 1
        places = sorted(self.rng.sample(range(len(fillers) + len(sentences)), len(sentences)))
        for place, sentence in zip(places, sentences, strict=True):
            fillers.insert(place, sentence)
        return " ".join(fillers)

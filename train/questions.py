"""Questions and answers that the demo model is trained on and tested with.

Four skills: dictionary (the words of `train.dictionary`), sums of two numbers, recall of facts from the prompt, and
small talk. Everything is drawn from an explicit generator. The held-out side never occurs in training: combinations
of an opening and a closing phrase, pairs of summands, facts.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from train.dictionary import Entry
from train.facts import Fact, draw_facts
from train.split import is_chosen

Item = TypeVar("Item")

SKILLS = ("dictionary", "sums", "recall", "talk")
DEFAULT_MIX: Mapping[str, float] = {"dictionary": 0.38, "sums": 0.27, "recall": 0.33, "talk": 0.02}
# How much of it is asked with thinking on.
THINKING_SHARE = 0.17
MAX_FACTS = 8

OPENINGS = ("Hello.", "Hi!", "A question:", "Please help me.", "Quick question:", "Good morning.")
CLOSINGS = ("Thanks.", "Please.", "Thank you!", "Be brief.", "I need it now.")
DEFINE_PHRASES = (
    "What does {word} mean?",
    "Define {word}.",
    "define: {word}",
    "Give the meaning of {word}.",
    "What is the meaning of {word}?",
    "Meaning of {word}?",
    "What is the definition of {word}?",
    "Explain the word {word}.",
    "Tell me what {word} means.",
    "What is meant by {word}?",
)
SUM_PHRASES = (
    "What is {a} + {b}?",
    "{a}+{b}=",
    "Add {a} and {b}.",
    "Compute {a}+{b}.",
    "How much is {a} + {b}?",
    "What is {a} plus {b}?",
    "{a} + {b} = ?",
    "Tell me the sum of {a} and {b}.",
)
FACT_HEADINGS = ("", "", "Facts:\n", "Notes:\n", "Remember this:\n")
REPEAT_PHRASES = ("Repeat the facts.", "Repeat what I told you.", "List all facts.")
TALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("Who are you?", "What are you?", "What is your name?", "Tell me about you."),
        "I am the perilune demo, a tiny model that knows words, sums and the facts you tell me.",
    ),
    (
        ("What can you do?", "Help", "Help me.", "How can you help me?"),
        "I define common words, add two numbers and recall facts from our chat.",
    ),
    (("Hello", "Hello!", "Hi", "Hi!", "Hey", "Good morning."), "Hello! Ask me for a word, a sum or a fact."),
    (("Thanks", "Thanks!", "Thank you.", "Thank you!"), "You are welcome."),
    (("Bye", "Bye!", "Goodbye."), "Goodbye!"),
    (("How are you?",), "I am a small program, and I am ready."),
    (("Are you Kimi K3?", "Are you Kimi?"), "No. I am a tiny demo that shares its architecture."),
)

HELD_OUT_PHRASES_ONE_IN = 4
HELD_OUT_SUMS_ONE_IN = 20


@dataclass(frozen=True)
class Exchange:
    """One user turn and what the assistant should think and say."""

    user: str
    reasoning: str
    answer: str
    skill: str


@dataclass(frozen=True)
class Question:
    """A prompt as chat messages, with the expected answer; `reasoning` is None with thinking off."""

    messages: tuple[Mapping[str, str], ...]
    reasoning: str | None
    answer: str
    skill: str


@dataclass(frozen=True)
class Context:
    """Facts told to the model: in a system message, or at the head of the first user turn."""

    facts: tuple[Fact, ...]
    system: str | None
    head: str


def is_held_out_phrase(opening: str, closing: str, phrase: str) -> bool:
    """Whether this combination is kept for evaluation; a missing opening or closing never is."""
    if not opening or not closing:
        return False
    return is_chosen(f"{opening}|{phrase}|{closing}", HELD_OUT_PHRASES_ONE_IN)


def is_held_out_sum(a: int, b: int) -> bool:
    """Whether a + b, and so b + a, is kept for evaluation."""
    return is_chosen(f"{min(a, b)}+{max(a, b)}", HELD_OUT_SUMS_ONE_IN)


def sum_reasoning(a: int, b: int) -> str:
    """Column addition in words: `7+8=15, carry 1. 4+3+1=8.`"""
    units = a % 10 + b % 10
    text = f"{a % 10}+{b % 10}={units}"
    if a < 10 and b < 10:
        return f"{text}."
    carry = units // 10
    tens = a // 10 + b // 10 + carry
    if carry:
        return f"{text}, carry 1. {a // 10}+{b // 10}+1={tens}."
    return f"{text}. {a // 10}+{b // 10}={tens}."


def talk_exchanges() -> tuple[Exchange, ...]:
    """Every line of small talk."""
    return tuple(Exchange(user, "Small talk.", answer, "talk") for users, answer in TALK for user in users)


@dataclass(frozen=True)
class Drill:
    """How sums come in training: in `share` of the questions several at once, two to `most`."""

    share: float = 0.5
    most: int = 5


class QuestionSource:
    """Draws exchanges from one side of the split; equal generators give equal questions."""

    def __init__(
        self, rng: random.Random, entries: Sequence[Entry], *, held_out: bool, drill: Drill | None = None
    ) -> None:
        self.rng = rng
        self.drill = drill or Drill()
        self.held_out = held_out
        self._words = self._endless(entries)
        self._talk = self._endless(talk_exchanges())

    def _endless(self, items: Sequence[Item]) -> Iterator[Item]:
        # Whole shuffled passes: every word is seen equally often.
        while True:
            yield from self.rng.sample(items, len(items))

    def phrase(self, phrases: Sequence[str]) -> str:
        """One of the phrases, between an opening and a closing of this side of the split."""
        while True:
            opening, closing, phrase = self._draw_phrase(phrases)
            if is_held_out_phrase(opening, closing, phrase) == self.held_out:
                return " ".join(part for part in (opening, phrase, closing) if part)

    def _draw_phrase(self, phrases: Sequence[str]) -> tuple[str, str, str]:
        phrase = self.rng.choice(phrases)
        is_bare = not self.held_out and self.rng.random() < 0.6
        if is_bare:
            return "", "", phrase
        optional = () if self.held_out else ("",)
        return self.rng.choice((*optional, *OPENINGS)), self.rng.choice((*optional, *CLOSINGS)), phrase

    def dictionary(self) -> Exchange:
        """Asks for the definition of the next word."""
        entry = next(self._words)
        user = self.phrase(DEFINE_PHRASES).format(word=entry.word)
        return Exchange(user, f"The word is {entry.word}.", entry.definition, "dictionary")

    def summands(self) -> tuple[int, int]:
        """Two numbers of two digits; in training sometimes one of them has one digit."""
        while True:
            a, b = self.rng.randint(10, 99), self.rng.randint(10, 99)
            if not self.held_out and self.rng.random() < 0.1:
                a, b = self.rng.sample((self.rng.randrange(10), self.rng.randrange(100)), 2)
            if is_held_out_sum(a, b) == self.held_out:
                return a, b

    def sums(self) -> Exchange:
        """Asks for one sum; in training sometimes for several, a line of the answer each."""
        count = 1
        if not self.held_out and self.rng.random() < self.drill.share:
            count = self.rng.randint(2, self.drill.most)
        pairs = [self.summands() for _ in range(count)]
        a, b = pairs[0]
        user = self.phrase(SUM_PHRASES).format(a=a, b=b)
        if count > 1:
            user = f"Compute {', '.join(f'{a}+{b}' for a, b in pairs)}."
        reasoning = "\n".join(sum_reasoning(a, b) for a, b in pairs)
        answer = "\n".join(f"{a}+{b}={a + b}" for a, b in pairs)
        return Exchange(user, reasoning, answer, "sums")

    def talk(self) -> Exchange:
        """One line of small talk."""
        return next(self._talk)

    def context(self, level: float, known: Sequence[Fact] = ()) -> Context:
        """Facts to recall from: one or two at level 0, one to eight at level 1 (when held out, at least two).

        With `known` facts earlier in the conversation, the new ones are about something else and told by the user.
        """
        most = 2 + round((MAX_FACTS - 2) * level)
        count = self.rng.randint(2 if self.held_out else 1, most)
        facts = draw_facts(self.rng, count, held_out=self.held_out, known=known)
        separator = "\n" if self.rng.random() < 0.75 else " "
        text = self.rng.choice(FACT_HEADINGS) + separator.join(fact.sentence for fact in facts)
        if not known and self.rng.random() < 0.2:
            return Context(tuple(facts), text, "")
        return Context(tuple(facts), None, text + separator)

    def recall(self, facts: Sequence[Fact]) -> Exchange:
        """Asks for one fact; in training sometimes for two or three, or for all of them."""
        chance = 1.0 if self.held_out else self.rng.random()
        if chance < 0.2:
            return self._recall_exchange(self.rng.choice(REPEAT_PHRASES), "all facts", facts)
        count = min(self.rng.randint(2, 3), len(facts)) if chance < 0.55 else 1
        asked = self.rng.sample(facts, count)
        if count == 1:
            user = self.phrase(asked[0].questions)
        else:
            user = " ".join(self.rng.choice(fact.questions) for fact in asked)
        return self._recall_exchange(user, " and ".join(fact.topic for fact in asked), asked)

    def _recall_exchange(self, user: str, topic: str, facts: Sequence[Fact]) -> Exchange:
        answer = "\n".join(fact.sentence for fact in facts)
        return Exchange(user, f"I look for {topic}.", answer, "recall")

    def acknowledgement(self, context: Context) -> Exchange:
        """The user tells the facts and asks nothing yet."""
        return Exchange(context.head.rstrip(), "New facts.", "Noted.", "recall")

    def question(self, skill: str, *, thinking: bool, level: float = 1.0) -> Question:
        """A conversation of one question."""
        system: str | None = None
        if skill == "recall":
            context = self.context(level)
            system = context.system
            exchange = self.recall(context.facts)
            user = context.head + exchange.user
        else:
            exchange = self.exchange(skill)
            user = exchange.user
        messages = [{"role": "system", "content": system}] if system is not None else []
        messages.append({"role": "user", "content": user})
        return Question(tuple(messages), exchange.reasoning if thinking else None, exchange.answer, skill)

    def exchange(self, skill: str) -> Exchange:
        """An exchange of a skill that needs no context; ValueError for any other name."""
        makers = {"dictionary": self.dictionary, "sums": self.sums, "talk": self.talk}
        if skill not in makers:
            raise ValueError(f"skill {skill!r} has no stand-alone exchange; allowed: {', '.join(makers)}")
        return makers[skill]()

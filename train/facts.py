"""Facts for the recall skill: short sentences about people and things, and the questions that ask for them.

A fact and its answer are the same sentence. One tenth of all sentences is kept out of training (`is_held_out`).
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from train.split import is_chosen

NAMES = [
    "Anna",
    "Bob",
    "Carl",
    "Dora",
    "Emma",
    "Finn",
    "Greta",
    "Hugo",
    "Ida",
    "Jack",
    "Kate",
    "Leo",
    "Mia",
    "Nils",
    "Olga",
    "Paul",
    "Rosa",
    "Sam",
    "Tom",
    "Uma",
    "Vera",
    "Will",
    "Zoe",
    "Max",
]
TOWNS = [
    "Paris",
    "London",
    "Rome",
    "Berlin",
    "Madrid",
    "Oslo",
    "Vienna",
    "Prague",
    "Dublin",
    "Lisbon",
    "Athens",
    "Cairo",
    "Tokyo",
    "Delhi",
    "Lima",
    "Boston",
]
PETS = ["dog", "cat", "horse", "rabbit", "parrot", "mouse", "goat", "duck", "snake", "turtle", "pony", "hamster"]
JOBS = [
    "baker",
    "doctor",
    "nurse",
    "pilot",
    "farmer",
    "teacher",
    "lawyer",
    "painter",
    "sailor",
    "cook",
    "judge",
    "singer",
]
COLOURS = ["red", "blue", "green", "black", "white", "yellow", "brown", "grey", "pink", "orange"]
PAINTED = ["house", "car", "door", "boat", "chair", "coat", "bike", "lamp", "wall", "roof", "hat", "flag"]
CARRIED = ["key", "book", "letter", "phone", "bag", "ring", "map", "knife", "camera", "ball", "cup", "ticket"]
ROOMS = ["kitchen", "garden", "garage", "cellar", "office", "attic", "hall", "library", "shed", "bathroom"]

VALUES = {"town": TOWNS, "pet": PETS, "job": JOBS}
OWNER_QUESTIONS = (
    "What is {subject}'s {kind}?",
    "Tell me {subject}'s {kind}.",
    "Do you know {subject}'s {kind}?",
    "Give me {subject}'s {kind}.",
)
COLOUR_QUESTIONS = (
    "What colour is the {subject}?",
    "Tell me the colour of the {subject}.",
    "Which colour is the {subject}?",
)
PLACE_QUESTIONS = (
    "Where is the {subject}?",
    "Tell me where the {subject} is.",
    "Do you know where the {subject} is?",
)

HELD_OUT_ONE_IN = 10


@dataclass(frozen=True)
class Fact:
    """One sentence, and what it is about."""

    subject: str
    kind: str
    sentence: str

    @property
    def questions(self) -> tuple[str, ...]:
        """Every way to ask for this fact."""
        templates = {"colour": COLOUR_QUESTIONS, "place": PLACE_QUESTIONS}.get(self.kind, OWNER_QUESTIONS)
        return tuple(t.format(subject=self.subject, kind=self.kind) for t in templates)

    @property
    def topic(self) -> str:
        """What the fact is about, without its value."""
        if self.kind in ("colour", "place"):
            return f"the {self.kind} of the {self.subject}"
        return f"{self.subject}'s {self.kind}"

    @property
    def is_held_out(self) -> bool:
        return is_chosen(self.sentence, HELD_OUT_ONE_IN)


def draw_fact(rng: random.Random) -> Fact:
    """Any fact, from training or held out."""
    kind = rng.choice(("code", "code", "town", "pet", "job", "colour", "place"))
    if kind == "colour":
        subject = rng.choice(PAINTED)
        return Fact(subject, kind, f"The {subject} is {rng.choice(COLOURS)}.")
    if kind == "place":
        subject = rng.choice(CARRIED)
        return Fact(subject, kind, f"The {subject} is in the {rng.choice(ROOMS)}.")
    name = rng.choice(NAMES)
    value = str(rng.randint(100, 999)) if kind == "code" else rng.choice(VALUES[kind])
    if kind in ("pet", "job"):
        value = f"a {value}"
    return Fact(name, kind, f"{name}'s {kind} is {value}.")


def draw_facts(rng: random.Random, count: int, *, held_out: bool, known: Sequence[Fact] = ()) -> list[Fact]:
    """`count` facts, no two of them or of `known` about the same property; all held out or all from training."""
    taken = {fact.topic for fact in known}
    facts: list[Fact] = []
    while len(facts) < count:
        fact = draw_fact(rng)
        if fact.is_held_out == held_out and fact.topic not in taken:
            taken.add(fact.topic)
            facts.append(fact)
    return facts

"""JSON under a schema: a text about a person or an order, and the fields that are wanted of it.

Held out: one in six of the texts, by what they say.
"""

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from train.facts import COLOURS, JOBS, NAMES, PAINTED, PETS, TOWNS
from train.skills.dialogue import Dialogue, says, user
from train.split import is_chosen

HELD_OUT_ONE_IN = 6
MIN_FIELDS, MAX_FIELDS = 2, 4
REQUESTS = ("Read this: {text}", "Fill in the form. {text}", "{text}", "Give me the data. {text}", "As JSON: {text}")

Value = str | int | bool


@dataclass(frozen=True)
class Field:
    """One property: its JSON type, its values, and sentences that tell one."""

    kind: str
    draw: Callable[[random.Random], Value]
    sentences: tuple[str, ...]


PERSON: Mapping[str, Field] = {
    "age": Field(
        "integer",
        lambda rng: rng.randint(18, 99),
        ("{subject} is {value} years old.", "{subject} has the age of {value}."),
    ),
    "job": Field(
        "string", lambda rng: rng.choice(JOBS), ("{subject} works as a {value}.", "{subject} has a job as a {value}.")
    ),
    "pet": Field("string", lambda rng: rng.choice(PETS), ("{subject} has a {value}.", "{subject} owns a {value}.")),
    "town": Field(
        "string", lambda rng: rng.choice(TOWNS), ("{subject} lives in {value}.", "{subject}'s home is {value}.")
    ),
    "code": Field(
        "integer",
        lambda rng: rng.randint(100, 999),
        ("{subject}'s code is {value}.", "{subject} has the code {value}."),
    ),
}
ORDER: Mapping[str, Field] = {
    "colour": Field(
        "string",
        lambda rng: rng.choice(COLOURS),
        ("The {subject} is {value}.", "The colour of the {subject} is {value}."),
    ),
    "count": Field(
        "integer",
        lambda rng: rng.randint(2, 99),
        ("There are {value} of the {subject}.", "I want the {subject} {value} times."),
    ),
    "price": Field(
        "integer",
        lambda rng: rng.randint(10, 999),
        ("The {subject} costs {value}.", "I pay {value} for the {subject}."),
    ),
    "town": Field(
        "string",
        lambda rng: rng.choice(TOWNS),
        ("The {subject} goes to {value}.", "Send the {subject} to {value}."),
    ),
}
# what the subject is called in the form, its values and the further fields
KINDS = (("name", NAMES, PERSON), ("item", PAINTED, ORDER))


class FormSource:
    """Draws texts with schemas from one side of the split."""

    def __init__(self, rng: random.Random, *, held_out: bool):
        self.rng, self.held_out = rng, held_out

    def dialogue(self) -> Dialogue:
        """A text and its answer in JSON; some of what the text says is not asked for."""
        label, subjects, fields = self.rng.choice(KINDS)
        values = self._values(fields)
        subject = self.rng.choice(subjects)
        told = self.rng.sample(sorted(values), len(values))
        text = " ".join(
            self.rng.choice(fields[name].sentences).format(subject=subject, value=values[name]) for name in told
        )
        if is_chosen(f"{subject} {json.dumps(values, sort_keys=True)}", HELD_OUT_ONE_IN) != self.held_out:
            return self.dialogue()
        wanted = {label: subject, **values}
        kinds = {label: "string", **{name: field.kind for name, field in fields.items()}}
        for name in self.rng.sample(told, self.rng.randint(0, max(0, len(told) - MIN_FIELDS))):
            del wanted[name]
        keys = sorted(wanted)
        schema = {
            "type": "object",
            "properties": {key: {"type": kinds[key]} for key in keys},
            "required": keys,
            "additionalProperties": False,
        }
        answer = json.dumps({key: wanted[key] for key in keys}, separators=(",", ":"))
        form = {"type": "json_schema", "json_schema": {"name": "form", "schema": schema, "strict": True}}
        asked = self.rng.choice(REQUESTS).format(text=text)
        return Dialogue("json", (user(asked), says(answer, f"I need {', '.join(keys)}.")), response_format=form)

    def _values(self, fields: Mapping[str, Field]) -> dict[str, Value]:
        count = self.rng.randint(MIN_FIELDS, min(MAX_FIELDS, len(fields)))
        return {name: fields[name].draw(self.rng) for name in self.rng.sample(sorted(fields), count)}

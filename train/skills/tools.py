"""Tool calls: which tools there are, how users ask for them, what they return and what is then said.

Held out: one in six of the requests, by their whole text.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from train.facts import NAMES, PAINTED, ROOMS, TOWNS
from train.skills.dialogue import Dialogue, Message, says, user
from train.split import is_chosen

HELD_OUT_ONE_IN = 6
MAX_TOOLS = 3
PARALLEL_SHARE, OTHER_SHARE = 0.25, 0.08
# How many conversations go on behind their last call, in training and held out.
RESULT_SHARE, HELD_OUT_RESULT_SHARE = 0.7, 0.3
MESSAGES = ("I am late", "call me", "dinner is ready", "see you soon", "the door is open", "buy milk", "come home")
SKIES = ("sunny", "cloudy", "rainy", "windy", "foggy", "snowy")

Values = Mapping[str, str | int | bool]


@dataclass(frozen=True)
class Skill:
    """One tool: its parameters by JSON type, phrases that ask for it, its results, and what is said of one."""

    name: str
    description: str
    parameters: Mapping[str, str]
    phrases: tuple[str, ...]
    # for two of the same kind at once, after `phrases[0]` of the first
    also: str
    draw: Callable[[random.Random], Values]
    result: Callable[[random.Random], str]
    report: str

    @property
    def spec(self) -> Message:
        """The declaration that a client sends."""
        properties = {name: {"type": kind} for name, kind in sorted(self.parameters.items())}
        schema = {"type": "object", "properties": properties, "required": sorted(properties)}
        function = {"name": self.name, "description": self.description, "parameters": schema}
        return {"type": "function", "function": function}


def _degrees(rng: random.Random) -> str:
    return f"{rng.choice(SKIES)}, {rng.randint(1, 39)} degrees"


def _clock(rng: random.Random) -> str:
    return f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"


def _number(rng: random.Random) -> str:
    return str(rng.randint(10, 999))


TOOLS = (
    Skill(
        "get_weather",
        "Weather in a town.",
        {"town": "string"},
        ("What is the weather in {town}?", "How is the weather in {town}?", "Tell me the weather in {town}."),
        "And in {town}?",
        lambda rng: {"town": rng.choice(TOWNS)},
        _degrees,
        "It is {result} in {town}.",
    ),
    Skill(
        "get_time",
        "Time in a town.",
        {"town": "string"},
        ("What time is it in {town}?", "Tell me the time in {town}.", "How late is it in {town}?"),
        "And in {town}?",
        lambda rng: {"town": rng.choice(TOWNS)},
        _clock,
        "It is {result} in {town}.",
    ),
    Skill(
        "set_timer",
        "Sets a timer.",
        {"minutes": "integer"},
        ("Set a timer for {minutes} minutes.", "Wake me in {minutes} minutes.", "Timer: {minutes} minutes, please."),
        "And one for {minutes} minutes.",
        lambda rng: {"minutes": rng.randint(2, 99)},
        lambda rng: "set",
        "The timer of {minutes} minutes is {result}.",
    ),
    Skill(
        "send_message",
        "Sends a text to a person.",
        {"text": "string", "to": "string"},
        ("Tell {to}: {text}", "Send {to} the message: {text}", "Write to {to}: {text}"),
        "And to {to}: {text}",
        lambda rng: {"text": rng.choice(MESSAGES), "to": rng.choice(NAMES)},
        lambda rng: rng.choice(("sent", "delivered")),
        "The message to {to} is {result}.",
    ),
    Skill(
        "get_price",
        "Price of a thing.",
        {"item": "string"},
        ("How much is the {item}?", "What does the {item} cost?", "Tell me the price of the {item}."),
        "And the {item}?",
        lambda rng: {"item": rng.choice(PAINTED)},
        _number,
        "The {item} costs {result}.",
    ),
    Skill(
        "find_person",
        "Room that a person is in.",
        {"name": "string"},
        ("Where is {name}?", "Find {name}.", "In which room is {name}?"),
        "And {name}?",
        lambda rng: {"name": rng.choice(NAMES)},
        lambda rng: rng.choice(ROOMS),
        "{name} is in the {result}.",
    ),
    Skill(
        "switch_light",
        "Switches the light of a room.",
        {"on": "boolean", "room": "string"},
        ("Turn the light in the {room} {state}.", "Light {state} in the {room}.", "Switch the {room} light {state}."),
        "And in the {room} {state}.",
        lambda rng: {"on": rng.random() < 0.5, "room": rng.choice(ROOMS)},
        lambda rng: "done",
        "The light in the {room} is {state}.",
    ),
)


@dataclass(frozen=True)
class Order:
    """What a user wants of one tool."""

    skill: Skill
    values: Values

    @property
    def words(self) -> Mapping[str, object]:
        return {**self.values, "state": "on" if self.values.get("on") else "off"}


class ToolSource:
    """Draws conversations with tools from one side of the split."""

    def __init__(self, rng: random.Random, *, held_out: bool, others: Callable[[], tuple[str, str]] | None = None):
        self.rng, self.held_out = rng, held_out
        # questions that need no tool, with their answers
        self._others = others
        self._num_calls = 0

    def dialogue(self, num_turns: int = 1) -> Dialogue:
        """A conversation of `num_turns` requests; when held out, it ends at its first call or the answer to it."""
        tools = self.rng.sample(TOOLS, self.rng.randint(1, MAX_TOOLS))
        messages: list[Message] = []
        for turn in range(num_turns):
            messages += self._turn(tools, is_last=turn == num_turns - 1)
        return Dialogue("tools", tuple(messages), tuple(tool.spec for tool in tools))

    def _turn(self, tools: Sequence[Skill], *, is_last: bool) -> list[Message]:
        if self._others is not None and self.rng.random() < OTHER_SHARE:
            question, answer = self._others()
            return [user(question), says(answer, "No tool is needed.")]
        asked, orders = self._request(self.rng.choice(tools))
        calls = [self._call(order) for order in orders]
        names = " and ".join(dict.fromkeys(order.skill.name for order in orders))
        call: Message = {
            "role": "assistant",
            "content": "",
            "reasoning_content": f"I call {names}.",
            "tool_calls": calls,
        }
        share = HELD_OUT_RESULT_SHARE if self.held_out else RESULT_SHARE
        if is_last and self.rng.random() > share:
            return [user(asked), call]
        results = [order.skill.result(self.rng) for order in orders]
        told = "\n".join(
            order.skill.report.format(result=result, **order.words)
            for order, result in zip(orders, results, strict=True)
        )
        replies = [
            {"role": "tool", "tool_call_id": made["id"], "content": result}
            for made, result in zip(calls, results, strict=True)
        ]
        return [user(asked), call, *replies, says(told, "I tell the result.")]

    def _request(self, skill: Skill) -> tuple[str, list[Order]]:
        while True:
            first = Order(skill, skill.draw(self.rng))
            orders, texts = [first], [self.rng.choice(skill.phrases).format(**first.words)]
            if self.rng.random() < PARALLEL_SHARE:
                second = Order(skill, skill.draw(self.rng))
                orders.append(second)
                texts.append(skill.also.format(**second.words))
            asked = " ".join(texts)
            if is_chosen(asked, HELD_OUT_ONE_IN) == self.held_out and first not in orders[1:]:
                return asked, orders

    def _call(self, order: Order) -> dict[str, object]:
        self._num_calls += 1
        function = {"name": order.skill.name, "arguments": json.dumps(order.values)}
        return {"id": f"call_{self._num_calls}", "type": "function", "function": function}

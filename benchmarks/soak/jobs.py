"""The requests of a soak: mixed lengths, pictures, tools, schemas, shared beginnings, and some that must be refused.

A random model answers them until `max_tokens`; what it says depends on every token before, so that a wrong cache row
shows.
"""

import base64
import io
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

MAX_TOKENS = 40
LONG_PROMPT, SHORT_PROMPT = 330, 24
NUM_BYTE_IDS = 256
KINDS = ("ids", "shared", "long", "chat", "image", "tools", "schema", "bad")

_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer"}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"type": "integer"}},
    "required": ["name", "size"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Job:
    """A request and how it must end: with an answer, or (kind "bad") with status 400."""

    name: str
    kind: str
    path: str
    body: dict[str, Any]


def make_jobs(model: str, num_per_kind: int, seed: int) -> list[Job]:
    """`num_per_kind` different jobs of every kind; half sample at temperature 1 with a seed, half are greedy."""
    rng = random.Random(seed)
    makers = {
        "ids": lambda: _completion(_ids(rng, rng.randint(1, 4 * SHORT_PROMPT))),
        "long": lambda: _completion(_ids(rng, LONG_PROMPT - rng.randint(0, 40))),
        "chat": lambda: _chat([{"type": "text", "text": _words(rng, rng.randint(1, 30))}]),
        "image": lambda: _chat([*_pictures(rng), {"type": "text", "text": _words(rng, 5)}]),
        "tools": lambda: {**_chat([{"type": "text", "text": _words(rng, 8)}]), "tools": [_TOOL], **_CALLS},
        "schema": lambda: {**_chat([{"type": "text", "text": _words(rng, 8)}]), "response_format": _FORMAT},
        "bad": lambda: _bad(rng),
    }
    beginning = _ids(rng, 6 * SHORT_PROMPT)
    makers["shared"] = lambda: _completion([*beginning[: rng.randint(16, len(beginning))], *_ids(rng, SHORT_PROMPT)])
    jobs = []
    for kind in KINDS:
        for index in range(num_per_kind):
            body = {"model": model, **makers[kind](), "max_tokens": rng.randint(MAX_TOKENS // 2, MAX_TOKENS)}
            body |= {"temperature": 0} if index % 2 else {"temperature": 1, "seed": index}
            path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
            jobs.append(Job(f"{kind} {index}", kind, path, body))
    return jobs


_CALLS = {"tool_choice": "required"}
_FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": _SCHEMA}}


def _completion(ids: list[int]) -> dict[str, Any]:
    return {"prompt": ids, "ignore_eos": True, "return_token_ids": True}


def _chat(parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": parts}], "reasoning_effort": "none"}


def _bad(rng: random.Random) -> dict[str, Any]:
    """A picture that is no picture, a prompt over the context, or a field that does not exist."""
    broken = base64.b64encode(rng.randbytes(50)).decode()
    return rng.choice(
        [
            _chat([{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{broken}"}}]),
            _completion(_ids(rng, 4 * LONG_PROMPT)),
            {**_completion([1]), "colour": "red"},
        ]
    )


def _pictures(rng: random.Random) -> list[dict[str, Any]]:
    parts = []
    for _ in range(rng.randint(1, 2)):
        pixels = np.random.default_rng(rng.randrange(2**32)).integers(0, 256, (rng.randint(20, 90), 60, 3), np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "PNG")
        url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
        parts.append({"type": "image_url", "image_url": {"url": url}})
    return parts


def _ids(rng: random.Random, count: int) -> list[int]:
    return rng.choices(range(NUM_BYTE_IDS), k=count)


def _words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(["moon", "tide", "dust", "orbit", "rock", "night"]) for _ in range(count))

"""The clients of a soak: they ask, compare what they get with what the request got alone, and often leave early."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.soak.jobs import Job

LEAVING_SHARE = 0.5
STREAMED_SHARE = 0.6
# whoever leaves an answer that is not streamed leaves after so long, or before
LONGEST_PATIENCE_S = 1.5
MOST_EVENTS_SEEN = 30
TIMEOUT_S = 300.0
MAX_SHOWN = 5


@dataclass(frozen=True)
class Answer:
    """What a client can see of one answer, apart from ids and times."""

    status: int
    text: str
    reasoning: str
    token_ids: tuple[int, ...]
    calls: tuple[tuple[str, str], ...]
    finish_reason: str | None
    num_output_tokens: int


@dataclass
class Tally:
    """What the clients met; `wrong` and `errors` hold the first few in words, and should be empty."""

    finished: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)
    num_wrong: int = 0
    num_errors: int = 0
    wrong: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def note_wrong(self, text: str) -> None:
        self.num_wrong += 1
        self.wrong += [text] * (len(self.wrong) < MAX_SHOWN)

    def note_error(self, text: str) -> None:
        self.num_errors += 1
        self.errors += [text] * (len(self.errors) < MAX_SHOWN)


async def ask(http: httpx.AsyncClient, job: Job, *, is_stream: bool, num_events: int | None = None) -> Answer | None:
    """The answer to a job; None after leaving a stream behind its first `num_events` events."""
    body = {**job.body, "stream": is_stream}
    if not is_stream:
        response = await http.post(job.path, json=body)
        return _whole(response.status_code, response.json())
    body["stream_options"] = {"include_usage": True}
    async with http.stream("POST", job.path, json=body) as response:
        if response.status_code != 200:
            return _whole(response.status_code, json.loads(await response.aread()))
        events: list[dict[str, Any]] = []
        async for line in response.aiter_lines():
            if num_events is not None and len(events) >= num_events:
                return None
            if line.startswith("data: {"):
                events.append(json.loads(line[6:]))
        return _streamed(events)


async def run_alone(http: httpx.AsyncClient, jobs: Sequence[Job], tally: Tally) -> dict[str, Answer]:
    """Every job on an idle server, streamed and whole, which must agree."""
    found = {}
    for job in jobs:
        whole, streamed = await ask(http, job, is_stream=False), await ask(http, job, is_stream=True)
        assert whole is not None
        expected = 400 if job.kind == "bad" else 200
        if whole.status != expected:
            tally.note_error(f"{job.name} alone has status {whole.status}: {whole.text[:200]}")
        if streamed != whole:
            tally.note_wrong(f"{job.name} alone: streamed {streamed} is not {whole}")
        found[job.name] = whole
    return found


async def run_clients(
    http: httpx.AsyncClient,
    jobs: Sequence[Job],
    expected: Mapping[str, Answer],
    tally: Tally,
    *,
    num_clients: int,
    seconds: float,
    seed: int,
) -> None:
    """Clients that ask for jobs at random until the time is over; returns when the last has its answer."""
    end_s = time.monotonic() + seconds

    async def client(number: int) -> None:
        rng = random.Random(f"{seed} {number}")
        while time.monotonic() < end_s:
            await _ask_and_compare(http, rng.choice(jobs), expected, tally, rng)

    async with asyncio.TaskGroup() as tasks:
        for number in range(num_clients):
            tasks.create_task(client(number))


async def _ask_and_compare(
    http: httpx.AsyncClient, job: Job, expected: Mapping[str, Answer], tally: Tally, rng: random.Random
) -> None:
    is_stream, leaves = rng.random() < STREAMED_SHARE, rng.random() < LEAVING_SHARE
    patience_s = rng.uniform(0, LONGEST_PATIENCE_S) if leaves and (not is_stream or rng.random() < 0.3) else None
    num_events = rng.randrange(MOST_EVENTS_SEEN) if leaves and patience_s is None else None
    try:
        async with asyncio.timeout(patience_s):
            answer = await ask(http, job, is_stream=is_stream, num_events=num_events)
    except TimeoutError:
        answer = None
    except (httpx.HTTPError, ValueError, KeyError) as error:
        tally.note_error(f"{job.name}: {type(error).__name__}: {error}")
        return
    if answer is None:
        tally.left[job.kind] += 1
    elif answer == expected[job.name]:
        tally.finished[job.kind] += 1
    elif answer.status != expected[job.name].status:
        tally.note_error(f"{job.name} has status {answer.status}: {answer.text[:200]}")
    else:
        tally.note_wrong(f"{job.name}: {answer} is not {expected[job.name]}, its answer alone")


def _whole(status: int, answer: dict[str, Any]) -> Answer:
    if status != 200:
        return Answer(status, str(answer["error"]["message"]), "", (), (), None, 0)
    (choice,) = answer["choices"]
    message = choice.get("message") or {}
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    return Answer(
        status,
        choice.get("text") or message.get("content") or "",
        message.get("reasoning_content") or "",
        tuple(choice.get("token_ids") or ()),
        tuple(calls),
        choice["finish_reason"],
        answer["usage"]["completion_tokens"],
    )


def _streamed(events: Sequence[dict[str, Any]]) -> Answer:
    text, reasoning, finish_reason, usage = "", "", None, {}
    token_ids: list[int] = []
    calls: dict[int, list[str]] = {}
    for event in events:
        if "error" in event:
            return Answer(500, f"error in the stream: {event['error']['message']}", "", (), (), None, 0)
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            delta = choice.get("delta") or {}
            text += choice.get("text") or delta.get("content") or ""
            reasoning += delta.get("reasoning_content") or ""
            token_ids += choice.get("token_ids") or ()
            finish_reason = choice.get("finish_reason") or finish_reason
            for call in delta.get("tool_calls") or ():
                entry = calls.setdefault(call["index"], ["", ""])
                entry[0] += call["function"].get("name") or ""
                entry[1] += call["function"].get("arguments") or ""
    called = tuple((name, arguments) for name, arguments in calls.values())
    return Answer(200, text, reasoning, tuple(token_ids), called, finish_reason, usage.get("completion_tokens", 0))

"""What became of each request, and whether an answer is what its schema asked for."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import httpx
import jsonschema_rs
from jsonschema import Draft202012Validator, ValidationError

VALID, NOT_VALID, REFUSED, CUT = "valid", "not valid", "refused", "cut by length"


@dataclass(frozen=True)
class Outcome:
    """One request: its name, what became of it, and why."""

    name: str
    kind: str
    verdict: str
    reason: str = ""


def judge(name: str, schema: Mapping[str, Any], response: httpx.Response, *, is_stream: bool) -> Outcome:
    """The outcome of the request for one schema."""
    kind = "streamed" if is_stream else "whole"
    if response.status_code == 400:
        message = response.json()["error"]["message"]
        return Outcome(name, kind, REFUSED, message.split(" is not supported: ")[-1].split("; ")[0])
    if response.status_code != 200:
        return Outcome(name, kind, NOT_VALID, f"status {response.status_code}: {response.text[:200]}")
    reason, calls = _streamed(response) if is_stream else _whole(response)
    if reason == "length":
        return Outcome(name, kind, CUT)
    if reason != "tool_calls" or not calls:
        return Outcome(name, kind, NOT_VALID, f"finish reason {reason}: {response.text[-300:]}")
    fault = next((found for call in calls if (found := _fault(schema, call)) is not None), None)
    return Outcome(name, kind, VALID) if fault is None else Outcome(name, kind, NOT_VALID, fault)


def _fault(schema: Mapping[str, Any], call: str) -> str | None:
    """Why arguments are not those of the schema, by two validators.

    The second one alone judges patterns that Python cannot read, as it has the regular expressions of ECMA 262, which
    is what the specification names.
    """
    try:
        arguments = json.loads(call)
        jsonschema_rs.Draft202012Validator(schema).validate(arguments)
    except (ValueError, jsonschema_rs.ValidationError) as error:
        return f"{type(error).__name__}: {error}; said {call[:400]}; schema {json.dumps(schema)[:600]}"
    try:
        Draft202012Validator(schema).validate(arguments)
    except ValidationError as error:
        return f"jsonschema: {error.message}; said {call[:400]}; schema {json.dumps(schema)[:600]}"
    except Exception as error:
        if type(error).__name__ not in ("PatternError", "error"):
            raise
    return None


def _whole(response: httpx.Response) -> tuple[str, list[str]]:
    choice = response.json()["choices"][0]
    calls = choice["message"].get("tool_calls", [])
    return choice["finish_reason"], [call["function"]["arguments"] for call in calls]


def _streamed(response: httpx.Response) -> tuple[str, list[str]]:
    reason, calls = "none", []
    for line in response.text.split("\n"):
        if not line.startswith("data: {"):
            continue
        chunk = json.loads(line.removeprefix("data: "))
        if "error" in chunk:
            return f"error {chunk['error']['message']}", []
        choice = chunk["choices"][0]
        for call in choice["delta"].get("tool_calls", []):
            calls += [""] * (call["index"] + 1 - len(calls))
            calls[call["index"]] += call["function"].get("arguments", "")
        reason = choice["finish_reason"] or reason
    return reason, calls


class Ledger:
    """Outcomes so far, kept in a file of JSON lines if one is given, so that a run may go on after an interruption."""

    def __init__(self, path: Path | None):
        self._outcomes: list[Outcome] = []
        if path is not None and path.exists():
            self._outcomes = [Outcome(**json.loads(line)) for line in path.read_text().splitlines()]
        self._file: TextIO | None = None if path is None else path.open("a")
        self._done = {(outcome.name, outcome.kind) for outcome in self._outcomes}

    def has(self, name: str, *, is_stream: bool) -> bool:
        return (name, "streamed" if is_stream else "whole") in self._done

    def add(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)
        if self._file is not None:
            self._file.write(json.dumps(asdict(outcome)) + "\n")
            self._file.flush()

    def report(self, names: Sequence[str]) -> bool:
        """Print the counts for the requests of these names; whether all finished answers are valid."""
        wanted = set(names)
        outcomes = [outcome for outcome in self._outcomes if outcome.name in wanted]
        for (kind, verdict), count in sorted(Counter((o.kind, o.verdict) for o in outcomes).items()):
            print(f"{count:6} {kind}: {verdict}")
        refused = Counter(o.reason[:110] for o in outcomes if o.verdict == REFUSED and o.kind == "whole")
        for reason, count in refused.most_common():
            print(f"{count:6} refused: {reason}")
        faults = [outcome for outcome in outcomes if outcome.verdict == NOT_VALID]
        for fault in faults[:20]:
            print(f"not valid ({fault.kind}): {fault.reason}")
        return not faults

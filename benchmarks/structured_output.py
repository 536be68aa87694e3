"""Forces a model with random weights to call tools, and validates what it says against the schemas of the tools.

    python -m benchmarks.structured_output CHECKPOINT --bfcl bfcl_eval-2026.3.23-py3-none-any.whl
    python -m benchmarks.structured_output CHECKPOINT --suite jsonschema-4.26.0.tar.gz

CHECKPOINT is one of `perilune make-checkpoint`. Both files come from `pip download --no-deps` (the second with
`--no-binary :all:`) and are read as they are. Every schema becomes the one tool of a request with tool_choice required
and temperature 1, sent over HTTP both as a stream and not; the arguments of every finished answer must be valid.
Control tokens and quotes get a logit bias, so that random answers end. Prints counts of valid answers, of schemas that
were refused by reason, and of answers that were cut by their length; exits with 1 if any answer is not valid.
"""

import argparse
import asyncio
import json
import sys
import tarfile
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
from jsonschema import Draft202012Validator

from perilune.config.engine import EngineConfig
from perilune.engine.build import build_engine
from perilune.engine.client import InProcessClient, ModelInfo
from perilune.server.app import create_app
from perilune.server.settings import ServerSettings
from perilune.text.tokenizer import Tokenizer

NUM_AT_ONCE = 64
MAX_TOKENS = 400
BIAS_OF_CONTROL, BIAS_OF_QUOTE = 6.0, 3.0

# the words of the Berkeley data for types, which are those of several programming languages
_TYPES = {"dict": "object", "hashmap": "object", "float": "number", "double": "number", "long": "integer"}
_TYPES |= {"tuple": "array", "arraylist": "array", "char": "string", "string": "string", "array": "array"}
_TYPES |= {"boolean": "boolean"}


def bfcl_schemas(wheel: Path) -> Iterator[dict[str, Any]]:
    """The distinct schemas of the functions in the Berkeley function calling leaderboard, in JSON Schema's words."""
    seen = set()
    with zipfile.ZipFile(wheel) as files:
        names = [name for name in files.namelist() if name.startswith("bfcl_eval/data/") and name.endswith(".json")]
        for name in sorted(names):
            for line in files.read(name).decode().splitlines():
                try:
                    entry = json.loads(line)
                except ValueError:  # a few of the files are one indented document, which holds no functions
                    break
                for schema in _schemas_of(entry):
                    translated = _translated(schema)
                    key = json.dumps(translated, sort_keys=True)
                    if key not in seen:
                        seen.add(key)
                        yield translated


def _schemas_of(entry: object) -> Iterable[dict[str, Any]]:
    if not isinstance(entry, dict):
        return []
    functions = entry.get("function", [entry])
    functions = functions if isinstance(functions, list) else [functions]
    return [
        item["parameters"] for item in functions if isinstance(item, dict) and isinstance(item.get("parameters"), dict)
    ]


def _translated(schema: Any) -> Any:
    """Types in JSON's words; one that JSON does not have ("any") says nothing."""
    if isinstance(schema, list):
        return [_translated(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    written = {
        key: _translated(value) if key in ("properties", "items", "additionalProperties") else value
        for key, value in schema.items()
    }
    if "properties" in schema and isinstance(schema["properties"], dict):
        written["properties"] = {name: _translated(value) for name, value in schema["properties"].items()}
    kind = schema.get("type")
    if isinstance(kind, str):
        word = _TYPES.get(kind.lower(), kind)
        if word in ("any", ""):
            del written["type"]
        else:
            written["type"] = word
    # false and true in the data stand beside `required`, which is the one that counts
    written.pop("optional", None)
    return written


def suite_schemas(archive: Path) -> Iterator[dict[str, Any]]:
    """The schemas of the JSON Schema test suite for draft 2020-12, each as that of the argument `value`."""
    with tarfile.open(archive) as files:
        for member in files.getmembers():
            if "/json/tests/draft2020-12/" not in member.name or not member.name.endswith(".json"):
                continue
            content = files.extractfile(member)
            assert content is not None
            for group in json.load(content):
                yield _wrapped(group["schema"])


def _wrapped(schema: Any) -> dict[str, Any]:
    """References inside the schema keep their meaning: what they lead to is hoisted, and the root is `value`."""
    inner, hoisted = schema, {}
    if isinstance(schema, dict):
        hoisted = {key: schema[key] for key in ("$defs", "definitions", "$schema") if key in schema}
        inner = _rerooted({key: value for key, value in schema.items() if key not in hoisted})
        hoisted = {key: _rerooted(value) for key, value in hoisted.items()}
    return {
        "type": "object",
        "properties": {"value": inner},
        "required": ["value"],
        "additionalProperties": False,
        **hoisted,
    }


def _rerooted(value: Any) -> Any:
    if isinstance(value, list):
        return [_rerooted(item) for item in value]
    if not isinstance(value, dict):
        return value
    written = {key: _rerooted(item) for key, item in value.items()}
    reference = value.get("$ref")
    if isinstance(reference, str) and (
        reference == "#" or (reference.startswith("#/") and not reference.startswith(("#/$defs/", "#/definitions/")))
    ):
        written["$ref"] = "#/properties/value" + reference[1:]
    return written


class Report:
    """What became of the requests."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.faults: list[str] = []

    def fault(self, schema: Mapping[str, Any], said: object, reason: str) -> None:
        self.counts["not valid"] += 1
        self.faults.append(f"{reason[:200]}\n  schema {json.dumps(schema)[:600]}\n  said {str(said)[:400]}")

    def print(self) -> None:
        for name, count in sorted(self.counts.items()):
            print(f"{count:6} {name}")
        for reason, count in self.refusals.most_common():
            print(f"{count:6} refused: {reason}")
        for fault in self.faults[:20]:
            print(fault)


async def run_all(schemas: Iterable[dict[str, Any]], app: Any, model: str, bias: dict[str, float]) -> Report:
    """Send every schema twice, a few requests at a time."""
    report, places = Report(), asyncio.Semaphore(NUM_AT_ONCE)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=600) as http,
    ):

        async def one(index: int, schema: dict[str, Any], is_stream: bool) -> None:
            async with places:
                body = _body(index, schema, model, bias, is_stream)
                response = await http.post("/v1/chat/completions", json=body)
                _judge(report, schema, response, is_stream)

        tasks = [one(index, schema, is_stream) for index, schema in enumerate(schemas) for is_stream in (False, True)]
        await asyncio.gather(*tasks)
    return report


def _body(index: int, schema: Mapping[str, Any], model: str, bias: dict[str, float], is_stream: bool) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": "go"}],
        "tools": [{"type": "function", "function": {"name": "tool", "parameters": schema}}],
        "tool_choice": "required",
        "parallel_tool_calls": index % 2 == 0,
        "thinking": {"type": "enabled" if index % 3 == 0 else "disabled"},
        "temperature": 1.0,
        "top_p": 1.0,
        "seed": index,
        "max_tokens": MAX_TOKENS,
        "logit_bias": bias,
        "stream": is_stream,
    }


def _judge(report: Report, schema: Mapping[str, Any], response: httpx.Response, is_stream: bool) -> None:
    kind = "streamed" if is_stream else "whole"
    if response.status_code == 400:
        error = response.json()["error"]
        report.counts[f"{kind}: refused"] += 1
        report.refusals[error["message"].split(" is not supported: ")[-1].split("; ")[0][:110]] += 1
        return None
    if response.status_code != 200:
        return report.fault(schema, response.text, f"status {response.status_code}")
    reason, calls = _streamed(response) if is_stream else _whole(response)
    if reason == "length":
        report.counts[f"{kind}: cut by length"] += 1
        return None
    if reason != "tool_calls" or not calls:
        return report.fault(schema, response.text[-400:], f"finish reason {reason}")
    for call in calls:
        try:
            Draft202012Validator(schema).validate(json.loads(call))
        except Exception as error:
            return report.fault(schema, call, f"{type(error).__name__}: {getattr(error, 'message', error)}")
    report.counts[f"{kind}: valid"] += 1
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


def ending_bias(tokenizer: Tokenizer) -> dict[str, float]:
    """What makes a random model come to an end."""
    biases = {str(token_id): BIAS_OF_CONTROL for token_id in (tokenizer.close_id, tokenizer.sep_id)}
    return biases | {str(tokenizer.encode(sign)[0]): BIAS_OF_QUOTE for sign in ('"', "}", "]")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--bfcl", type=Path)
    parser.add_argument("--suite", type=Path)
    parser.add_argument("--first", type=int, default=None, help="how many schemas of each are taken; default all")
    options = parser.parse_args()
    core = build_engine(
        options.checkpoint, EngineConfig(max_num_seqs=NUM_AT_ONCE, max_num_batched_tokens=2048, cache_bytes=2**29)
    )
    tokenizer, limits = core.tokenizer, core.limits
    assert tokenizer is not None
    model = ModelInfo("random", limits.max_model_len, limits.vocab_size, limits.eos_token_ids, 0)
    is_good = True
    for name, path, read in (("bfcl", options.bfcl, bfcl_schemas), ("suite", options.suite, suite_schemas)):
        if path is None:
            continue
        schemas = list(read(path))[: options.first]
        app = create_app(InProcessClient(core, model), tokenizer, ServerSettings())
        report = asyncio.run(run_all(schemas, app, "random", ending_bias(tokenizer)))
        print(f"{name}: {len(schemas)} schemas")
        report.print()
        is_good &= not report.faults
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())

"""Schemas that others published: the functions of a leaderboard, and the test suite of JSON Schema."""

import json
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

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
        hoisted = {key: schema[key] for key in ("$defs", "definitions", "$schema", "$id") if key in schema}
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

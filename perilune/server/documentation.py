"""The OpenAPI document: request bodies are read without FastAPI's own models, so their schemas are added here."""

from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import FastAPI

SCHEMAS = "#/components/schemas/"


def json_body(*kinds: type[msgspec.Struct]) -> dict[str, Any]:
    """What a route says of itself whose body is one of `kinds`."""
    references = [{"$ref": SCHEMAS + kind.__name__} for kind in kinds]
    schema = references[0] if len(references) == 1 else {"anyOf": references}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def describe_bodies(app: FastAPI, kinds: Sequence[type[msgspec.Struct]]) -> None:
    """Put the schemas of `kinds` where `json_body` refers to them."""
    _, components = msgspec.json.schema_components(kinds, ref_template=SCHEMAS + "{name}")
    write_document = app.openapi

    def openapi() -> dict[str, Any]:
        document = write_document()
        document.setdefault("components", {}).setdefault("schemas", {}).update(components)
        return document

    app.openapi = openapi  # type: ignore[method-assign]

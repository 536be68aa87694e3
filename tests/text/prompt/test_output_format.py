from typing import Any

import pytest

from tests.text.prompts import STUB, USER, USER_HI, refusal, shown, system, tool

RAW = "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."


def of_schema(**named: Any) -> dict[str, Any]:
    given = {"name": "n", "schema": {"type": "object", "additionalProperties": False}, **named}
    return {"type": "json_schema", "json_schema": {key: value for key, value in given.items() if value != "absent"}}


@pytest.mark.parametrize("form", [None, {"type": "text"}])
def test_free_text_needs_no_message(form: Any) -> None:
    assert shown([USER], response_format=form) == shown([USER])


def test_json_is_asked_for_in_the_last_message() -> None:
    body = f"The system is invoked with `response_format=json_object`.\n{RAW}"
    text = shown([USER], response_format={"type": "json_object"}, thinking=False)
    assert text == USER_HI + system("response-format", body) + STUB


@pytest.mark.parametrize("extra", [{}, {"strict": True}, {"strict": False, "description": "d"}, {"strict": None}])
def test_only_the_schema_itself_is_shown(extra: dict[str, Any]) -> None:
    body = (
        f"The system is invoked with `response_format=json_schema`.\n{RAW}\n"
        "The JSON data must match the following schema:\n"
        '```json\n{"additionalProperties":false,"type":"object"}\n```'
    )
    text = shown([USER], response_format=of_schema(**extra), thinking=False)
    assert text == USER_HI + system("response-format", body) + STUB


def test_a_tool_choice_stands_before_it() -> None:
    text = shown([USER], tools=[tool()], tool_choice="required", response_format={"type": "json_object"})
    kinds = ["tool-declare", "thinking-effort", 'role="user"', "tool-choice", "response-format"]
    assert sorted(kinds, key=text.index) == kinds


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ("json_object", ""),
        ([], ""),
        ({}, ".type"),
        ({"type": "xml"}, ".type"),
        ({"type": ["text"]}, ".type"),
        ({"type": "json_object", "schema": {}}, ".schema"),
        ({"type": "json_schema"}, ".json_schema"),
        ({"type": "json_schema", "json_schema": []}, ".json_schema"),
        (of_schema(name="absent"), ".json_schema.name"),
        (of_schema(name=""), ".json_schema.name"),
        (of_schema(name=1), ".json_schema.name"),
        (of_schema(schema="absent"), ".json_schema.schema"),
        (of_schema(schema="{}"), ".json_schema.schema"),
        (of_schema(schema=True), ".json_schema.schema"),
        (of_schema(schema={"x": "\ud800"}), ".json_schema.schema"),
        (of_schema(schema={"x": float("inf")}), ".json_schema.schema"),
        (of_schema(strict="true"), ".json_schema.strict"),
        (of_schema(strict=1), ".json_schema.strict"),
        (of_schema(extra=1), ".json_schema.extra"),
    ],
)
def test_a_malformed_format_is_refused(form: Any, param: str) -> None:
    assert refusal([USER], response_format=form).param == f"response_format{param}"

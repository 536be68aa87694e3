import json
from pathlib import Path
from typing import Any

import pytest

from perilune.errors import RequestError
from perilune.text.channels import Channel
from perilune.text.encoding import EncodedPrompt, encode_chat
from perilune.text.tokenizer import Tokenizer
from tests.text.prompts import ASSISTANT, SMALL, USER_HI, C, E, O, S, call, calls, effort, result, shown, system, tool


def test_a_turn_with_thinking_off_is_the_known_ids(kimi_tokenizer: Tokenizer) -> None:
    prompt = encode_chat([{"role": "user", "content": "hi"}], kimi_tokenizer, thinking=False)
    assert prompt == EncodedPrompt(
        token_ids=(
            *(163587, 2778, 6244, 878, 2482, 1, 163589, 9663, 163588, 2778, 163589, 163586),
            *(163587, 2778, 6244, 878, 69702, 1, 163589, 163587, 12092, 163589),
        ),
        start_channel=Channel.CONTENT,
        num_stub_tokens=3,
    )


@pytest.mark.parametrize(("level", "count"), [("max", 89), ("low", 90), ("high", 90)])
def test_a_turn_with_thinking_on_has_the_known_length(kimi_tokenizer: Tokenizer, level: str, count: int) -> None:
    prompt = encode_chat([{"role": "user", "content": "hi"}], kimi_tokenizer, effort=level)
    assert len(prompt.token_ids) == count
    assert (prompt.start_channel, prompt.num_stub_tokens) == (Channel.REASONING, 3)


def test_a_history_with_reasoning_is_the_known_text_and_length(kimi_tokenizer: Tokenizer) -> None:
    messages = [
        {"role": "system", "content": "Answer in one line."},
        {"role": "user", "content": "Which is heavier, a kilo of cork or 900 g of lead?"},
        {"role": "assistant", "reasoning_content": "1000 g versus 900 g.", "content": "The cork."},
        {"role": "user", "content": "By how much?"},
    ]
    prompt = encode_chat(messages, kimi_tokenizer, effort="high")
    assert len(prompt.token_ids) == 170
    assert kimi_tokenizer.decode(prompt.token_ids) == (
        f'{effort("high")}{O}message role="system"{S}Answer in one line.{C}message{S}{E}'
        f'{O}message role="user"{S}Which is heavier, a kilo of cork or 900 g of lead?{C}message{S}{E}'
        f"{ASSISTANT}{O}think{S}1000 g versus 900 g.{C}think{S}{O}response{S}The cork.{C}response{S}{C}message{S}{E}"
        f'{O}message role="user"{S}By how much?{C}message{S}{E}{ASSISTANT}{O}think{S}'
    )


def test_calls_answered_out_of_order_are_the_known_text_and_length(kimi_tokenizer: Tokenizer) -> None:
    port, hours, metric = {"type": "string"}, {"type": "array", "items": {"type": "integer"}}, {"type": "boolean"}
    tide = {"type": "object", "properties": {"port": port, "hours": hours, "metric": metric}, "required": ["port"]}
    note = {
        "type": "object",
        "properties": {"text": {"type": "string"}, "tags": {"type": "object"}},
        "required": ["text"],
    }
    tools = [
        tool("tide_height", description="Water level at a harbour", parameters=tide),
        tool("log_note", parameters=note),
    ]
    text, tags = 'asked "Brest" & <ok>', {"src": "demo", "n": 1.5, "z": None}
    made = calls(
        call("t", "tide_height", '{"port": "Brest", "hours": [6, 18], "metric": true}'),
        call("n", "log_note", {"text": text, "tags": tags}),
    )
    messages = [
        {"role": "user", "content": "Check Brest at 6 and 18 h, then note it."},
        {**made, "reasoning_content": "Two calls, independent."},
        result("n", "saved"),
        result("t", '{"6": 5.1, "18": 4.8}'),
    ]
    prompt = encode_chat(messages, kimi_tokenizer, effort="low", tools=tools, tool_choice="none")
    assert (len(prompt.token_ids), prompt.num_stub_tokens, prompt.tools) == (505, 3, ())
    assert kimi_tokenizer.decode(prompt.token_ids) == (
        system(
            "tool-declare",
            "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n"
            '[{"function":{"description":"Water level at a harbour","name":"tide_height","parameters":{"properties":'
            '{"hours":{"items":{"type":"integer"},"type":"array"},"metric":{"type":"boolean"},"port":{"type":"string"}},'
            '"required":["port"],"type":"object"}},"type":"function"},{"function":{"name":"log_note","parameters":'
            '{"properties":{"tags":{"type":"object"},"text":{"type":"string"}},"required":["text"],"type":"object"}},'
            '"type":"function"}]\n```',
        )
        + f'{effort("low")}{O}message role="user"{S}Check Brest at 6 and 18 h, then note it.{C}message{S}{E}'
        f"{ASSISTANT}{O}think{S}Two calls, independent.{C}think{S}{O}response{S}{C}response{S}{O}tools{S}"
        f'{O}call tool="tide_height" index="1"{S}{O}argument key="port" type="string"{S}Brest{C}argument{S}'
        f'{O}argument key="hours" type="array"{S}[6, 18]{C}argument{S}'
        f'{O}argument key="metric" type="boolean"{S}true{C}argument{S}{C}call{S}'
        f'{O}call tool="log_note" index="2"{S}{O}argument key="text" type="string"{S}{text}{C}argument{S}'
        f'{O}argument key="tags" type="object"{S}{{"src": "demo", "n": 1.5, "z": null}}{C}argument{S}{C}call{S}'
        f"{C}tools{S}{C}message{S}{E}"
        f'{O}message role="tool" tool="tide_height" index="1"{S}{{"6": 5.1, "18": 4.8}}{C}message{S}{E}'
        f'{O}message role="tool" tool="log_note" index="2"{S}saved{C}message{S}{E}'
        + system(
            "tool-choice",
            "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message.",
        )
        + f"{ASSISTANT}{O}think{S}"
    )


@pytest.mark.parametrize(("name", "num_cases"), [("prompt_tokens.jsonl", 33), ("prompt_tokens.partial.jsonl", 6)])
def test_prompt_lengths_are_those_of_the_vendor_verifier(
    kimi_tokenizer: Tokenizer, shared_data_dir: Path, name: str, num_cases: int
) -> None:
    cases = [json.loads(line) for line in (shared_data_dir / "kvv" / name).read_text().splitlines()]
    assert len(cases) == num_cases
    found, expected = {}, {}
    for case in cases:
        request = case["request"]
        level = request.get("reasoning_effort", "max")
        options = {key: request[key] for key in ("tools", "tool_choice", "response_format") if key in request}
        if level != "none":
            options["effort"] = level
        prompt = encode_chat(request["messages"], kimi_tokenizer, thinking=level != "none", **options)
        found[case["id"]] = len(prompt.token_ids) - prompt.num_stub_tokens
        expected[case["id"]] = case["expected_prompt_tokens"]
    assert found == expected


@pytest.mark.parametrize("message", [{"content": ""}, {}, {"content": None}, {"content": "", "reasoning": " \n"}])
def test_an_empty_answer_keeps_its_channels(message: dict[str, Any]) -> None:
    history = [{"role": "assistant", **message}]
    think = f"{O}think{S}{C}think{S}"
    response = f"{O}response{S}{C}response{S}{C}message{S}{E}"
    assert shown(history) == f"{effort('max')}{ASSISTANT}{think}{response}{ASSISTANT}{O}think{S}"
    assert shown(history, thinking=False) == f"{ASSISTANT}{response}{ASSISTANT}{O}response{S}"


def test_reasoning_of_the_history_stays_exactly_and_is_dropped_with_thinking_off() -> None:
    history = [{"role": "assistant", "content": " b\n", "reasoning": " a\n"}]
    assert f"{O}think{S} a\n{C}think{S}{O}response{S} b\n{C}response{S}" in shown(history)
    assert " a\n" not in shown(history, thinking=False)


def test_user_text_is_not_stripped_and_parts_are_joined_without_a_separator() -> None:
    parts = [{"type": "text", "text": " a"}, {"type": "text", "text": "b\n"}]
    expected = f'{O}message role="user"{S} ab\n{C}message{S}{E}{ASSISTANT}{O}response{S}'
    assert shown([{"role": "user", "content": parts}], thinking=False) == expected
    assert encode_chat([{"role": "user", "content": parts}], SMALL) == encode_chat(
        [{"role": "user", "content": " ab\n"}], SMALL
    )


def test_developer_is_system() -> None:
    assert shown([{"role": "developer", "content": "x"}]) == shown([{"role": "system", "content": "x"}])


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_a_name_is_an_escaped_attribute(role: str) -> None:
    text = shown([{"role": role, "content": "x", "name": 'a"b&quot;<c>\n'}])
    assert f'{O}message role="{role}" name="a&quot;b&amp;quot;<c>\n"{S}' in text


@pytest.mark.parametrize(
    ("message", "thinking", "end", "start"),
    [
        ({"content": "b"}, True, f"{O}response{S}b", Channel.CONTENT),
        ({"content": "b", "reasoning_content": "a"}, True, f"{O}think{S}a{C}think{S}{O}response{S}b", Channel.CONTENT),
        ({"content": "", "reasoning_content": "a"}, True, f"{O}think{S}a", Channel.REASONING),
        ({"reasoning_content": "a"}, True, f"{O}think{S}a", Channel.REASONING),
        ({"content": ""}, True, f"{O}think{S}", Channel.REASONING),
        ({"content": "b", "reasoning_content": "a"}, False, f"{O}response{S}b", Channel.CONTENT),
    ],
)
def test_a_partial_answer_is_left_open(message: dict[str, Any], thinking: bool, end: str, start: Channel) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "partial": True, **message}]
    prompt = encode_chat(messages, SMALL, thinking=thinking)
    before = effort("max") if thinking else ""
    assert SMALL.decode(prompt.token_ids) == f"{before}{USER_HI}{ASSISTANT}{end}"
    assert (prompt.start_channel, prompt.num_stub_tokens) == (start, 0)


@pytest.mark.parametrize("level", ["medium", "none", "", "MAX"])
def test_an_effort_the_model_does_not_know_is_refused(level: str) -> None:
    with pytest.raises(RequestError, match="allowed are low, high, max") as error:
        encode_chat([{"role": "user", "content": "hi"}], SMALL, effort=level)
    assert error.value.param == "reasoning_effort"


def test_branch_points_are_where_conversations_with_the_same_instructions_part(kimi_tokenizer: Tokenizer) -> None:
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
    told = [{"role": "system", "content": "Be brief."}, {"role": "system", "content": "Be kind."}]
    first, second = (
        encode_chat([*told, {"role": "user", "content": text}], kimi_tokenizer, tools=[tool]) for text in ("one", "two")
    )
    head, history = first.branch_points
    assert head == second.branch_points[0]
    assert first.token_ids[:head] == second.token_ids[:head]
    assert first.token_ids[:history] != second.token_ids[:history]
    more = [{"role": "assistant", "content": "So."}, {"role": "user", "content": "More."}]
    asked = {"role": "user", "content": "one"}
    later = encode_chat([*told, asked, *more], kimi_tokenizer, tools=[tool], response_format={"type": "json_object"})
    assert later.token_ids[:history] == first.token_ids[:history]


def test_a_prompt_without_instructions_branches_behind_its_history_alone(kimi_tokenizer: Tokenizer) -> None:
    prompt = encode_chat([{"role": "user", "content": "one"}], kimi_tokenizer, thinking=False)
    assert len(prompt.branch_points) == 1
    assert prompt.branch_points[0] < len(prompt.token_ids)

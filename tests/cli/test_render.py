"""A chat request shown as the model sees it."""

import json
import sys

import pytest

from perilune.cli import main as cli
from perilune.cli.render import render_request

TOOL = {"type": "function", "function": {"name": "f"}}
USER = {"role": "user", "content": "hi"}
HI = '<|open|>message role="user"<|sep|>hi<|close|>message<|sep|><|end_of_msg|>'
STUB = '<|open|>message role="assistant"<|sep|><|open|>response<|sep|>'


@pytest.fixture
def write(tmp_path):
    def write_request(body):
        file = tmp_path / "request.json"
        file.write_bytes(body if isinstance(body, bytes) else json.dumps(body).encode())
        return file

    return write_request


def run(monkeypatch, capsys, *arguments):
    """Exit code and what was printed to stdout and stderr."""
    monkeypatch.setattr(sys, "argv", ["perilune", "render", *map(str, arguments)])
    with pytest.raises(SystemExit) as exited:
        cli.main()
    printed = capsys.readouterr()
    return exited.value.code, printed.out, printed.err


def test_a_request_is_shown_with_its_tokens(monkeypatch, capsys, write):
    file = write({"model": "any", "messages": [USER], "reasoning_effort": "none", "temperature": 0.5})
    code, out, _ = run(monkeypatch, capsys, file, "--json")
    report = json.loads(out)
    assert code == 0
    assert report["text"] == HI + STUB
    assert report["num_stub_tokens"] == 3
    assert report["prompt_tokens"] == len(report["token_ids"]) - 3
    code, out, _ = run(monkeypatch, capsys, file)
    assert code == 0
    assert out.startswith(f"prompt_tokens: {report['prompt_tokens']}, without the 3 that open the answer\n")
    assert out.endswith(f"\n{HI}{STUB}\n")
    assert " ".join(map(str, report["token_ids"])) in out


def test_the_vendor_verifier_counts_the_same(shared_data_dir, write):
    line = (shared_data_dir / "kvv" / "prompt_tokens.jsonl").read_text().splitlines()[9]
    case = json.loads(line)
    report = render_request(write(case["request"]), shared_data_dir / "kimi-tokenizer")
    assert "tools" in case["request"]
    assert report["prompt_tokens"] == case["expected_prompt_tokens"]


def test_an_answer_to_be_continued_has_no_stub(monkeypatch, capsys, write):
    file = write({"messages": [USER, {"role": "assistant", "content": "b", "partial": True}]})
    code, out, _ = run(monkeypatch, capsys, file)
    assert code == 0
    assert out.partition("\n")[0] == f"prompt_tokens: {render_request(file)['prompt_tokens']}"


def test_what_cannot_be_answered_yet_can_be_shown(write):
    fields = {"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}}
    text = render_request(write({"messages": [USER], **fields}))["text"]
    assert "tool_choice=required" in text
    assert "response_format=json_object" in text


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"messages": [{"role": "user"}]}, "messages[0].content is NoneType"),
        ({"messages": [USER], "tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"messages": [USER], "functions": [{}]}, "functions"),
        ({"messages": [USER], "thinking": {"type": "enabled"}, "reasoning_effort": "none"}, "reasoning_effort"),
        ({"messages": [USER], "colour": "red"}, "colour is not a field"),
        ({"messages": "hi"}, "messages: expected array"),
        ({}, "messages is missing"),
        ({"model": 5, "messages": [USER]}, "model: expected string"),
        (b"[]", "the body: expected object"),
        (b"{", "not valid JSON"),
        (b"", "not valid JSON"),
    ],
)
def test_a_bad_request_names_the_file_and_the_field(monkeypatch, capsys, write, body, named):
    file = write(body)
    code, out, err = run(monkeypatch, capsys, file)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {file}: ")
    assert named in err
    assert len(err.splitlines()) == 1


def test_files_that_are_not_there_are_named(monkeypatch, capsys, write, tmp_path):
    code, _, err = run(monkeypatch, capsys, tmp_path / "none.json")
    assert (code, str(tmp_path / "none.json") in err) == (2, True)
    code, _, err = run(monkeypatch, capsys, write({"messages": [USER]}), "--tokenizer", tmp_path)
    assert (code, str(tmp_path / "tiktoken.model") in err) == (2, True)

"""No grammar keeps the compiler, crashes the engine's process, or is compiled twice."""

import os
import signal
import subprocess
import sys

import pytest

from perilune.grammar.answer import choice_body, json_body, lark_body, regex_body, text_grammar
from perilune.grammar.compiler import GrammarCompiler, NotQuick
from tests.grammar.conftest import is_allowed, refused

# without bounds this is at work for days
ENDLESS = {"type": "string", "allOf": [{"pattern": f".*{n:03}.*{n:02}"} for n in range(60)]}
# and this overflows the stack of whoever compiles it
DEEP = "start: r0\n" + "\n".join(f'r{n}: r{n + 1} r{n + 1} | "{n}"' for n in range(20_000)) + '\nr20000: "x"'


def starts_with(compiler, state, tokenizer, text):
    return is_allowed(state, tokenizer.encode(text)[0], compiler)


@pytest.mark.parametrize("body", [json_body(ENDLESS, "the.field"), lark_body(DEEP, "the.field")])
def test_a_grammar_that_takes_too_much_is_refused_with_the_field_and_the_limit(compiler, body):
    with pytest.raises(NotQuick):
        compiler.compile(text_grammar(body), is_quick=True)
    error = refused(lambda: compiler.compile(text_grammar(body)))
    assert (error.param, error.status) == ("the.field", 400)
    assert "the.field takes more than 1 s" in str(error)
    assert "1024 MiB" in str(error)


def test_the_next_grammar_is_compiled_as_if_nothing_had_been(compiler, tokenizer):
    refused(lambda: compiler.compile(text_grammar(json_body(ENDLESS, "other"))))
    state = compiler.compile(text_grammar(choice_body(["next"], "f")), is_quick=True)
    assert starts_with(compiler, state, tokenizer, "n")
    assert not starts_with(compiler, state, tokenizer, "m")


def test_what_was_compiled_or_refused_is_not_tried_again(tokenizer, monkeypatch):
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    good, bad = text_grammar(regex_body("kept", "f")), text_grammar(lark_body("start: missing", "g"))
    compiler.compile(good)
    assert refused(lambda: compiler.compile(bad)).param == "g"

    def fail(*_):
        raise AssertionError("was tried again")

    monkeypatch.setattr(compiler._sandbox, "judge", fail)
    assert compiler.compile(good, is_quick=True).error is None
    assert "unknown name" in str(refused(lambda: compiler.compile(bad, is_quick=True)))


def test_a_refusal_names_the_field_of_the_request_that_asks(compiler):
    for field in ("one", "two"):
        assert (
            refused(lambda field=field: compiler.compile(text_grammar(lark_body("start: gone", field)))).param == field
        )


def test_trials_go_on_when_their_process_was_killed(tokenizer):
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    compiler.compile(text_grammar(choice_body(["one"], "f")))
    compiler._sandbox._process.send_signal(signal.SIGKILL)
    compiler._sandbox._process.wait()
    compiler.compile(text_grammar(choice_body(["two"], "f")))


def test_the_process_for_trials_ends_with_the_one_that_started_it():
    program = (
        "from perilune.grammar.sandbox import Sandbox\n"
        "from perilune.text.tokenizer import Tokenizer\n"
        "sandbox = Sandbox(Tokenizer.from_ranks({bytes([n]): n for n in range(256)}), 512, 'llguidance')\n"
        "sandbox.start()\n"
        "print(sandbox._process.pid)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)


def test_a_tool_of_1024_required_numbers_compiles_where_one_of_few_does(compiler):
    names = [f"property_number_{index}" for index in range(1024)]
    schema = {
        "type": "object",
        "properties": {name: {"type": "integer", "description": name} for name in names},
        "required": names,
        "additionalProperties": False,
    }
    assert compiler.compile(text_grammar(json_body(schema, "f"))).error is None
    written = json_body(schema, "f").lark
    assert written.count('"maximum"') <= 4, "a range is written once, since each costs the compiler half a millisecond"


def test_a_schema_that_is_only_a_reference_to_itself_is_refused_in_words(compiler):
    error = refused(lambda: compiler.compile(text_grammar(json_body({"$ref": "#"}, "the.field"))))
    assert (error.param, error.status) == ("the.field", 400)
    assert "it refers to itself" in str(error)

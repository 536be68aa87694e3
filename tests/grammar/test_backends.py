"""What xgrammar is given instead of llguidance's grammars, and, where it is installed, that answers obey it."""

import json
import random
from importlib.util import find_spec

import jsonschema_rs
import pytest

from perilune.config.engine import EngineConfig
from perilune.errors import ConfigError
from perilune.grammar.answer import chat_grammar, choice_body, json_body, lark_body, regex_body, text_grammar
from perilune.grammar.backends.dialect import NotHeld, in_dialect
from perilune.grammar.compiler import GrammarCompiler
from perilune.text.encoding import encode_chat
from tests.grammar.conftest import END, END_RESPONSE, USER, is_allowed, mask_of, refused, tool

needs_xgrammar = pytest.mark.skipif(
    find_spec("xgrammar") is None, reason="xgrammar is not installed: pip install 'perilune[xgrammar]'"
)
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": -5}, "tags": {"type": "array", "items": {"enum": ["a", "b"]}}},
    "required": ["x"],
    "additionalProperties": False,
}


def of_schema(schema):
    return json.dumps(in_dialect(text_grammar(json_body(schema, "the.field")).source).schemas["json_0"])


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "number", "multipleOf": 3}, "multipleOf"),
        ({"type": "string", "pattern": "^a", "minLength": 5}, "pattern beside"),
        ({"type": "object", "minProperties": 2}, "minProperties"),
        ({"allOf": [{"type": "string"}, {"minLength": 3}]}, "allOf"),
        ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, "oneOf"),
        ({"not": {"type": "string"}}, "not"),
        ({"type": "array", "items": {"if": {"const": 1}, "then": False}}, "if"),
        ({"type": "object", "required": ["z"], "properties": {"a": {}}}, "'z'"),
        ({"type": "string", "enum": ["a", 1]}, "type beside enum"),
        ({"type": "string", "x-invented": 1}, "x-invented"),
    ],
)
def test_a_word_of_a_schema_that_xgrammar_would_pass_over_is_named(schema, words):
    source = json.dumps({"grammars": [{"lark_grammar": f"start: %json {json.dumps(schema)}"}]})
    with pytest.raises(NotHeld, match=words):
        in_dialect(source)


def test_schemas_lose_what_only_llguidance_reads():
    written = of_schema({"type": "object", "properties": {"any": {}}, "required": ["any"]})
    assert "x-guidance" not in written
    assert "json-schema:///" not in written
    assert '"#/$defs/perilune_any"' in written


def test_strings_and_expressions_that_spell_the_words_of_a_grammar_stay_as_they_are():
    text = 'start: "%json { } /(?s:.*)/" /%json \\/x/ "\\"%json {"'
    assert in_dialect(text_grammar(lark_body(text, "f")).source).grammars["answer"] == text


def test_a_backend_that_is_not_installed_is_an_error_that_says_what_to_install(monkeypatch):
    monkeypatch.setattr("perilune.config.engine.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'perilune\[xgrammar\]'"):
        EngineConfig(grammar_backend="xgrammar")
    assert EngineConfig().grammar_backend == "llguidance"


@pytest.fixture(scope="module")
def xgrammar_compiler(tokenizer):
    return GrammarCompiler(tokenizer, tokenizer.vocab_size + 40, "xgrammar")


def drawn(state, compiler, tokenizer, seed):
    """An answer drawn from what is allowed; signs that close something are drawn more often."""
    rng, taken = random.Random(seed), []
    closing = {*tokenizer.encode('"}]'), *tokenizer.eos_token_ids}
    closing |= {tokenizer.open_id, tokenizer.close_id, tokenizer.sep_id}
    for _ in range(2000):
        mask = mask_of(state, compiler)
        allowed = [i for i in range(compiler.vocab_size) if mask[i // 8] >> i % 8 & 1]
        preferred = [token_id for token_id in allowed if token_id in closing]
        token_id = rng.choice(preferred if preferred and rng.random() < 0.6 else allowed)
        state.advance(token_id)
        assert state.error is None
        if token_id in tokenizer.eos_token_ids:
            return tokenizer.decode(taken)
        taken.append(token_id)
    raise AssertionError("no end")


@needs_xgrammar
@pytest.mark.parametrize("schema", [POINT, {"type": "object"}, {"type": "string", "pattern": "^[^x]{3}$"}])
def test_answers_drawn_under_xgrammar_are_json_of_their_schema(xgrammar_compiler, tokenizer, schema):
    grammar = text_grammar(json_body(schema, "f"))
    for seed in range(20):
        text = drawn(xgrammar_compiler.compile(grammar), xgrammar_compiler, tokenizer, seed)
        jsonschema_rs.validate(schema, json.loads(text))
        assert "  " not in text or "  " in json.dumps(json.loads(text))


@needs_xgrammar
def test_expressions_and_choices_hold_under_xgrammar(xgrammar_compiler, tokenizer):
    def of(body):
        state = xgrammar_compiler.compile(text_grammar(body))
        return {drawn(state.fork(), xgrammar_compiler, tokenizer, seed) for seed in range(20)}

    assert of(choice_body(["yes", "no"], "f")) == {"yes", "no"}
    assert of(regex_body("a{2}[bc]", "f")) == {"aab", "aac"}


@needs_xgrammar
def test_the_answer_is_held_inside_its_channel_and_control_tokens_are_no_text(xgrammar_compiler, tokenizer):
    prompt = encode_chat([USER], tokenizer)
    state = xgrammar_compiler.compile(chat_grammar(prompt, tokenizer, choice_body(["hello"], "f")))
    text = "free<|close|>think<|sep|><|open|>response<|sep|>hello" + END_RESPONSE + END
    for token_id in tokenizer.encode_markup(text):
        assert is_allowed(state, token_id, xgrammar_compiler)
        state.advance(token_id)
    assert state.error is None
    free = xgrammar_compiler.compile(text_grammar(regex_body(r"[\s\S]+", "f")))
    mask = mask_of(free, xgrammar_compiler)
    for token_id in range(tokenizer.num_ranks, xgrammar_compiler.vocab_size):
        assert not mask[token_id // 8] >> token_id % 8 & 1


@needs_xgrammar
def test_demanded_calls_obey_their_schema_under_xgrammar(xgrammar_compiler, tokenizer):
    schema = {**POINT, "properties": {"x": POINT["properties"]["x"], "ok": {"type": "boolean"}}}
    prompt = encode_chat([USER], tokenizer, tools=[tool("f", schema)], tool_choice="required", thinking=False)
    grammar = chat_grammar(prompt, tokenizer, None, parallel_calls=False)
    for seed in range(10):
        answer = drawn(xgrammar_compiler.compile(grammar), xgrammar_compiler, tokenizer, seed)
        assert '<|open|>call tool="f" index="' in answer
        assert '<|open|>argument key="x" type="number"<|sep|>' in answer


@needs_xgrammar
def test_what_xgrammar_does_not_hold_is_refused_with_the_field_and_the_reason(xgrammar_compiler):
    grammar = text_grammar(json_body({"type": "number", "multipleOf": 3}, "the.field"))
    error = refused(lambda: xgrammar_compiler.compile(grammar))
    assert (error.param, error.status) == ("the.field", 400)
    assert "xgrammar does not hold answers to multipleOf" in str(error)
    for body in (lark_body("start: A & B\nA: /a.*/\nB: /.*b/", "the.field"), regex_body(r"a\b", "the.field")):
        error = refused(lambda body=body: xgrammar_compiler.compile(text_grammar(body)))
        assert "xgrammar says" in str(error)

"""A small vocabulary, and a way to ask whether a grammar takes a text in which control tokens stand by name."""

import ctypes

import pytest

from perilune.errors import RequestError
from perilune.grammar.answer import chat_grammar
from perilune.grammar.compiler import GrammarCompiler
from perilune.text.encoding import encode_chat
from perilune.text.tokenizer import Tokenizer

WORDS = ("message", "think", "response", "tools", "call tool", "argument key", '="', " type", "string", "hello", "你好")
THINK_END = "<|close|>think<|sep|>"
OPEN_RESPONSE = "<|open|>response<|sep|>"
OPEN_TOOLS = "<|open|>tools<|sep|>"
END_RESPONSE = "<|close|>response<|sep|>"
END = "<|close|>message<|sep|><|end_of_msg|>"
END_TOOLS = f"<|close|>call<|sep|><|close|>tools<|sep|>{END}"
USER = {"role": "user", "content": "hello"}


@pytest.fixture(scope="session")
def tokenizer():
    ranks = {bytes([value]): value for value in range(256)}
    for word in WORDS:
        raw = word.encode()
        for end in range(2, len(raw) + 1):
            ranks.setdefault(raw[:end], len(ranks))
    return Tokenizer.from_ranks(ranks)


@pytest.fixture(scope="session")
def compiler(tokenizer):
    return GrammarCompiler(tokenizer, tokenizer.vocab_size + 40)


@pytest.fixture
def follow(tokenizer, compiler):
    """Compile the grammar of a chat and take a text; gives the state's error, or "incomplete", or None."""

    def run(text, *, body=None, parallel_calls=True, messages=(USER,), **fields):
        prompt = encode_chat(messages, tokenizer, **fields)
        grammar = chat_grammar(prompt, tokenizer, body, parallel_calls=parallel_calls)
        assert grammar is not None
        state = compiler.compile(grammar)
        for token_id in tokenizer.encode_markup(text):
            if not is_allowed(state, token_id, compiler):
                return f"refused {tokenizer.token_bytes(token_id)!r}"
            state.advance(token_id)
        return state.error

    return run


def mask_of(state, compiler):
    """The mask of the next token as bytes."""
    buffer = ctypes.create_string_buffer((compiler.vocab_size + 31) // 32 * 4)
    state.fill(ctypes.addressof(buffer), len(buffer.raw))
    return buffer.raw


def is_allowed(state, token_id, compiler):
    return not state.constrains or bool(mask_of(state, compiler)[token_id // 8] >> token_id % 8 & 1)


def call(name, *arguments, index=1):
    """A call as the model writes it, up to its closing tag; arguments are (key, type, text)."""
    text = f'<|open|>call tool="{name}" index="{index}"<|sep|>'
    for key, kind, value in arguments:
        text += f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'
    return text


def tool(name, parameters=None, **more):
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


def refused(make):
    """The error of a request that must be refused."""
    with pytest.raises(RequestError) as raised:
        make()
    return raised.value

"""Prompts of the kinds that decide what guessing tokens is worth."""

import random
from collections.abc import Sequence

from perilune.text.encoding import encode_chat
from perilune.text.tokenizer import Tokenizer

_WORDS: tuple[str, ...] = (
    *("flower", "bridge", "winter", "doctor", "garden", "music", "island", "letter", "mountain", "teacher"),
    *("river", "window", "animal", "village", "machine", "picture", "kitchen", "summer", "forest", "engine"),
)
_PASSAGE = (
    "The tide rises and falls twice a day. Ships leave the harbour with the ebb and come back with the flood. "
    "On the quay stands a clock whose hand goes round once in twelve hours and twenty-five minutes."
)
KINDS = ("copy", "question", "random")
_RANDOM_TOKENS = 64


def prompts(kind: str, count: int, tokenizer: Tokenizer, vocab_size: int, seed: int) -> list[Sequence[int]]:
    """Token ids of `count` prompts.

    "copy" repeats a passage, so that the answer is likely to repeat it too; "question" asks for the meaning of a word;
    "random" is tokens that no model expects.
    """
    source = random.Random(f"{kind} {seed}")
    if kind == "copy":
        return [tokenizer.encode(f"{index}. {_PASSAGE}\n" * 3 + f"{index}. ") for index in range(count)]
    if kind == "question":
        words = source.sample(_WORDS, min(count, len(_WORDS)))
        asked = [words[index % len(words)] for index in range(count)]
        return [_asked(f"What is a {word}?", tokenizer) for word in asked]
    return [source.choices(range(vocab_size), k=_RANDOM_TOKENS) for _ in range(count)]


def _asked(question: str, tokenizer: Tokenizer) -> Sequence[int]:
    prompt = encode_chat([{"role": "user", "content": question}], tokenizer, thinking=False)
    return prompt.token_ids

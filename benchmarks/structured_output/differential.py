"""Asks xgrammar whether it accepts the JSON that llguidance lets a random model write, schema by schema.

    python -m benchmarks.structured_output.differential --bfcl bfcl_eval-2026.3.23-py3-none-any.whl

xgrammar is no dependency: with what it declares it is 1.9 GB. An environment that sees this one's torch and has
`pip install --no-deps xgrammar apache-tvm-ffi transformers tokenizers huggingface_hub` is enough (0.2 GB, no CUDA).
Both backends get the schema as it is given and the demo's vocabulary. Prints counts, and what the two disagree on.
"""

import argparse
import ctypes
import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import xgrammar
from llguidance import LLMatcher

from benchmarks.structured_output.schemas import bfcl_schemas
from perilune.grammar.backends.guidance import read_vocabulary
from perilune.grammar.schema.plain import plain_schema
from perilune.grammar.schema.rule import json_rule
from perilune.text.tokenizer import Tokenizer

DEMO = Path(__file__).parents[2] / "perilune" / "demo"
MAX_TOKENS = 400


def walk(matcher: LLMatcher, tokenizer: Tokenizer, rng: random.Random) -> list[int] | None:
    """Tokens of an answer, each drawn from those that are allowed, quotes and brackets preferred; None if too long."""
    closing = {tokenizer.encode(sign)[0] for sign in '"}]'}
    num_words = (tokenizer.vocab_size + 31) // 32
    buffer = (ctypes.c_uint32 * num_words)()
    taken: list[int] = []
    while len(taken) < MAX_TOKENS:
        matcher.unsafe_compute_mask_ptr(ctypes.addressof(buffer), num_words * 4)
        allowed = [i for i in range(tokenizer.vocab_size) if buffer[i // 32] >> (i % 32) & 1]
        if tokenizer.end_of_msg_id in allowed:
            return taken
        preferred = [token_id for token_id in allowed if token_id in closing]
        token_id = rng.choice(preferred if preferred and rng.random() < 0.5 else allowed)
        matcher.consume_token(token_id)
        taken.append(token_id)
    return None


def compare(schema: dict[str, Any], compiler: Any, vocabulary: Any, tokenizer: Tokenizer, rng: random.Random) -> str:
    """What became of one schema."""
    matcher = LLMatcher(vocabulary, LLMatcher.grammar_from_lark(f"start: {json_rule(plain_schema(schema))}"))
    try:
        other = xgrammar.GrammarMatcher(
            compiler.compile_json_schema(json.dumps(schema), any_whitespace=True, strict_mode=False)
        )
    except RuntimeError:
        return "refused by both" if matcher.is_error() else "refused by xgrammar alone"
    if matcher.is_error():
        return "refused by llguidance alone"
    token_ids = walk(matcher, tokenizer, rng)
    if token_ids is None:
        return "too long"
    for token_id in token_ids:
        if not other.accept_token(token_id):
            print(f"xgrammar refuses: {tokenizer.decode(token_ids)[:300]}\n  of {json.dumps(schema)[:500]}")
            return "accepted by llguidance alone"
    return "accepted by both" if other.accept_token(tokenizer.end_of_msg_id) else "unfinished for xgrammar"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bfcl", type=Path, required=True)
    parser.add_argument("--first", type=int, default=None, help="how many schemas are taken; default all")
    options = parser.parse_args()
    tokenizer = Tokenizer.load(DEMO)
    vocabulary = read_vocabulary(tokenizer, tokenizer.vocab_size)
    words = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
    info = xgrammar.TokenizerInfo(words, vocab_size=len(words), stop_token_ids=[tokenizer.end_of_msg_id])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1)
    schemas = list(bfcl_schemas(options.bfcl))[: options.first]
    rng = random.Random(0)
    counts = Counter(compare(schema, compiler, vocabulary, tokenizer, rng) for schema in schemas)
    for name, count in counts.most_common():
        print(f"{count:6} {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Forces a model with random weights to call tools, and validates what it says against the schemas of the tools.

    python -m benchmarks.structured_output CHECKPOINT --bfcl bfcl_eval-2026.3.23-py3-none-any.whl
    python -m benchmarks.structured_output CHECKPOINT --suite jsonschema-4.26.0.tar.gz

CHECKPOINT is one of `perilune make-checkpoint`. Both files come from `pip download --no-deps` (the second with
`--no-binary :all:`) and are read as they are. Every schema becomes the one tool of a request with tool_choice required
and temperature 1, sent over HTTP both as a stream and not; the arguments of every finished answer must be valid.
Control tokens and quotes get a logit bias, so that random answers end. Prints counts of valid answers, of schemas that
were refused by reason, and of answers that were cut by their length. A run with `--ledger FILE` goes on where an
earlier one with the same file ended. Exits with 1 if a finished answer is not valid, and for nothing else.
"""

import argparse
import asyncio
import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from benchmarks.structured_output.judge import Ledger, judge
from benchmarks.structured_output.schemas import bfcl_schemas, suite_schemas
from perilune.config.engine import EngineConfig
from perilune.engine.build import build_engine
from perilune.engine.client import InProcessClient, ModelInfo
from perilune.server.app import create_app
from perilune.server.settings import ServerSettings
from perilune.text.tokenizer import Tokenizer

NUM_AT_ONCE = 64
MAX_TOKENS = 400
BIAS_OF_CONTROL, BIAS_OF_QUOTE = 6.0, 3.0

Schemas = Mapping[str, dict[str, Any]]


async def run_all(schemas: Schemas, app: Any, model: str, bias: dict[str, float], ledger: Ledger) -> None:
    """Send every schema twice, a few requests at a time, except what the ledger holds already."""
    places = asyncio.Semaphore(NUM_AT_ONCE)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=600) as http,
    ):

        async def one(index: int, name: str, is_stream: bool) -> None:
            async with places:
                body = _body(index, schemas[name], model, bias, is_stream)
                response = await http.post("/v1/chat/completions", json=body)
                ledger.add(judge(name, schemas[name], response, is_stream=is_stream))

        await asyncio.gather(
            *(
                one(index, name, is_stream)
                for index, name in enumerate(schemas)
                for is_stream in (False, True)
                if not ledger.has(name, is_stream=is_stream)
            )
        )


def _body(index: int, schema: Mapping[str, Any], model: str, bias: dict[str, float], is_stream: bool) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": "go"}],
        "tools": [{"type": "function", "function": {"name": "tool", "parameters": schema}}],
        "tool_choice": "required",
        "parallel_tool_calls": index % 2 == 0,
        "thinking": {"type": "enabled" if index % 3 == 0 else "disabled"},
        "temperature": 1.0,
        "top_p": 1.0,
        "seed": index,
        "max_tokens": MAX_TOKENS,
        "logit_bias": bias,
        "stream": is_stream,
    }


def ending_bias(tokenizer: Tokenizer) -> dict[str, float]:
    """What makes a random model come to an end."""
    biases = {str(token_id): BIAS_OF_CONTROL for token_id in (tokenizer.close_id, tokenizer.sep_id)}
    return biases | {str(tokenizer.encode(sign)[0]): BIAS_OF_QUOTE for sign in ('"', "}", "]")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--bfcl", type=Path)
    parser.add_argument("--suite", type=Path)
    parser.add_argument("--first", type=int, default=None, help="how many schemas of each are taken; default all")
    parser.add_argument("--ledger", type=Path, default=None, help="a file that keeps the outcomes")
    options = parser.parse_args()
    core = build_engine(
        options.checkpoint, EngineConfig(max_num_seqs=NUM_AT_ONCE, max_num_batched_tokens=2048, cache_bytes=2**29)
    )
    tokenizer, limits = core.tokenizer, core.limits
    assert tokenizer is not None
    model = ModelInfo("random", limits.max_model_len, limits.vocab_size, limits.eos_token_ids, 0)
    ledger, is_good = Ledger(options.ledger), True
    for name, path, read in (("bfcl", options.bfcl, bfcl_schemas), ("suite", options.suite, suite_schemas)):
        if path is None:
            continue
        schemas = {_name(name, index, schema): schema for index, schema in enumerate(read(path))}
        schemas = dict(list(schemas.items())[: options.first])
        app = create_app(InProcessClient(core, model), tokenizer, ServerSettings())
        asyncio.run(run_all(schemas, app, "random", ending_bias(tokenizer), ledger))
        print(f"{name}: {len(schemas)} schemas")
        is_good &= ledger.report(list(schemas))
    return 0 if is_good else 1


def _name(source: str, index: int, schema: Mapping[str, Any]) -> str:
    """The same for the same schema, so that a ledger tells whether it was asked for."""
    return f"{source}-{index}-{hashlib.sha256(json.dumps(schema).encode()).hexdigest()[:12]}"


if __name__ == "__main__":
    sys.exit(main())

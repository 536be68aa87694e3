"""`perilune render`: a chat request as the model sees it, without a model."""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perilune.errors import ConfigError, RequestError
from perilune.text.special import MEDIA_PAD

if TYPE_CHECKING:
    from perilune.server.openai.schema import ChatRequest
    from perilune.text.prompt.segments import Segment


def render_command(
    request: Annotated[
        Path, typer.Argument(help="JSON file with the body of a chat completion request.", show_default=False)
    ],
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Directory of a tiktoken.model; the bundled demo's by default.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show a chat request as the model sees it: its tokens and their text."""
    try:
        report = render_request(request, tokenizer)
    except RequestError as error:
        where = "" if error.param is None or error.param in str(error) else f" ({error.param})"
        raise ConfigError(f"{request}: {error}{where}") from error
    typer.echo(json.dumps(report, ensure_ascii=False) if as_json else _for_people(report))


def render_request(request: Path, tokenizer_directory: Path | None = None) -> dict[str, Any]:
    """What the request in a file becomes, as JSON values; a request without `model` will do.

    `prompt_tokens` counts as the released API does, without the `num_stub_tokens` that open the answer. Raises
    ConfigError for a file that cannot be read, RequestError naming the field for a request that cannot be encoded.
    """
    from perilune.config.engine import DEMO_CHECKPOINT
    from perilune.config.media import load_media_config
    from perilune.server.openai.prompt import chat_prompt
    from perilune.server.openai.schema import UNSUPPORTED_IN_CHAT
    from perilune.server.openai.validate import check_unsupported
    from perilune.server.settings import ServerSettings
    from perilune.text.tokenizer import Tokenizer

    asked = _read(request)
    check_unsupported(asked, UNSUPPORTED_IN_CHAT)
    tokenizer = Tokenizer.load(tokenizer_directory or DEMO_CHECKPOINT)
    media = load_media_config(tokenizer_directory or DEMO_CHECKPOINT)
    prompt = chat_prompt(asked, tokenizer, ServerSettings(), media)
    return {
        "prompt_tokens": len(prompt.token_ids) - prompt.num_stub_tokens,
        "num_stub_tokens": prompt.num_stub_tokens,
        "token_ids": list(prompt.token_ids),
        "text": tokenizer.decode(prompt.token_ids),
        "segments": [_as_json(segment) for segment in prompt.segments],
    }


def _as_json(segment: "Segment") -> dict[str, Any]:
    if segment.picture is None:
        return {"type": "control" if segment.is_markup else "text", "text": segment.text}
    size = segment.picture.size
    return {
        "type": "image",
        "text": segment.text,
        "width": size.width,
        "height": size.height,
        "resized": list(size.resized),
        "patches": [size.rows, size.columns],
        "num_tokens": size.num_tokens,
    }


def _read(request: Path) -> "ChatRequest":
    import msgspec

    from perilune.server.openai.schema import ChatRequest
    from perilune.server.openai.validate import decode_body

    try:
        body = request.read_bytes()
    except OSError as error:
        raise ConfigError(f"{request}: cannot read the request: {error.strerror}") from error
    try:
        return decode_body(body, ChatRequest)
    except RequestError as error:
        if (error.param, error.code) != ("model", "missing_field"):
            raise
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    return decode_body(msgspec.json.encode({**fields, "model": ""}), ChatRequest)


def _for_people(report: dict[str, Any]) -> str:
    num_stub_tokens = report["num_stub_tokens"]
    stub = f", without the {num_stub_tokens} that open the answer" if num_stub_tokens else ""
    ids = " ".join(str(token_id) for token_id in report["token_ids"])
    pads = rf"(?:{re.escape(MEDIA_PAD)})+"
    text = re.sub(pads, lambda run: f"{{{len(run[0]) // len(MEDIA_PAD)} x {MEDIA_PAD}}}", report["text"])
    return f"prompt_tokens: {report['prompt_tokens']}{stub}\n\ntoken_ids: {ids}\n\n{text}"

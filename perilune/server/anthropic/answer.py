"""Answers in the shape of the Anthropic Messages API, whole and as events."""

from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from perilune.server.choice import Choice
from perilune.server.dialect.blocks import Block, BlockRow, Change, Step
from perilune.server.generation import Dispatcher
from perilune.server.openai.chat import ChatPlan
from perilune.server.stream import named_frame
from perilune.text.channels import Channel

# thoughts are not signed; clients send back only those that carry some signature
SIGNATURE = "perilune"
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


async def answer_message(plan: ChatPlan, choice: Choice, dispatcher: Dispatcher) -> dict[str, Any]:
    """Run the plan and give the whole message."""
    row = BlockRow()
    async with dispatcher.open(plan.requests) as outputs:
        async for _, output in outputs:
            row.push(choice.push(output))
    row.close()
    content = [_whole(block) for block in row.answer]
    return {**_message(plan), "content": content, **_end(choice), "usage": _usage(choice)}


async def stream_message(plan: ChatPlan, choice: Choice, dispatcher: Dispatcher) -> AsyncGenerator[bytes, None]:
    """Run the plan and give the message event by event; the first one comes with the first output."""
    row = BlockRow()
    has_begun = False
    async with dispatcher.open(plan.requests) as outputs:
        async for _, output in outputs:
            steps = row.push(choice.push(output))
            if not has_begun:
                has_begun = True
                usage = {**_usage(choice), "output_tokens": 0}
                message = {**_message(plan), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
                yield _event("message_start", message=message)
            for step in steps:
                for data in _events(step):
                    yield data
    for step in row.close():
        for data in _events(step):
            yield data
    yield _event("message_delta", delta=_end(choice), usage=_usage(choice))
    yield _event("message_stop")


def _event(kind: str, **fields: Any) -> bytes:
    return named_frame(kind, {"type": kind, **fields})


def _events(step: Step) -> list[bytes]:
    change, block, piece = step
    if change is Change.OPENED:
        return [_event("content_block_start", index=block.index, content_block=_empty(block))]
    if change is Change.GROWN:
        assert piece is not None
        return [_event("content_block_delta", index=block.index, delta=_delta(block, piece.text))]
    end = [_event("content_block_stop", index=block.index)]
    if block.channel is Channel.REASONING:
        signature = {"type": "signature_delta", "signature": SIGNATURE}
        return [_event("content_block_delta", index=block.index, delta=signature), *end]
    return end


def _empty(block: Block) -> dict[str, Any]:
    if block.channel is Channel.REASONING:
        return {"type": "thinking", "thinking": "", "signature": ""}
    if block.call_id is not None:
        return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}
    return {"type": "text", "text": ""}


def _delta(block: Block, text: str) -> dict[str, str]:
    if block.channel is Channel.REASONING:
        return {"type": "thinking_delta", "thinking": text}
    if block.call_id is not None:
        return {"type": "input_json_delta", "partial_json": text}
    return {"type": "text_delta", "text": text}


def _whole(block: Block) -> dict[str, Any]:
    if block.channel is Channel.REASONING:
        return {"type": "thinking", "thinking": block.text, "signature": SIGNATURE}
    if block.call_id is not None:
        return {**_empty(block), "input": msgspec.Raw(block.text.encode())}
    return {"type": "text", "text": block.text}


def _message(plan: ChatPlan) -> dict[str, Any]:
    message_id = "msg_" + plan.base["id"].removeprefix("chatcmpl-")
    return {"id": message_id, "type": "message", "role": "assistant", "model": plan.base["model"]}


def _end(choice: Choice) -> dict[str, str | None]:
    if choice.finish_reason == "stop" and isinstance(choice.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_reason}
    return {"stop_reason": _STOP_REASONS[choice.finish_reason or "stop"], "stop_sequence": None}


def _usage(choice: Choice) -> dict[str, int]:
    """Tokens of the prompt that came from the cache are counted apart from the others."""
    return {
        "input_tokens": choice.num_prompt_tokens - choice.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": choice.num_cached_tokens,
        "output_tokens": choice.num_output_tokens,
    }

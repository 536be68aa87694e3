"""Answers in the shape of the OpenAI Responses API, whole and as events."""

import itertools
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from perilune.server.choice import Choice, Piece, usage
from perilune.server.dialect.blocks import Block, BlockRow, Change, Step
from perilune.server.generation import Dispatcher
from perilune.server.openai.chat import ChatPlan, token_entry
from perilune.server.responses.carried import pack
from perilune.server.responses.request import Echo
from perilune.server.stream import named_frame
from perilune.text.channels import Channel
from perilune.text.tokenizer import Tokenizer

_PART_EVENTS = {Channel.REASONING: "reasoning_text", Channel.CONTENT: "output_text"}


async def answer_response(
    plan: ChatPlan, echo: Echo, choice: Choice, dispatcher: Dispatcher, tokenizer: Tokenizer
) -> dict[str, Any]:
    """Run the plan and give the whole answer."""
    row = BlockRow()
    async with dispatcher.open(plan.requests) as outputs:
        async for _, output in outputs:
            row.push(choice.push(output))
    row.close()
    return _Answer(plan, echo, choice, tokenizer).whole(row)


async def stream_response(
    plan: ChatPlan, echo: Echo, choice: Choice, dispatcher: Dispatcher, tokenizer: Tokenizer
) -> AsyncGenerator[bytes, None]:
    """Run the plan and give the answer event by event; the first one comes with the first output."""
    row, answer = BlockRow(), _Answer(plan, echo, choice, tokenizer)
    has_begun = False
    async with dispatcher.open(plan.requests) as outputs:
        async for _, output in outputs:
            steps = row.push(choice.push(output))
            if not has_begun:
                has_begun = True
                for kind in ("response.created", "response.in_progress"):
                    yield answer.event(kind, response=answer.frame("in_progress", []))
            for step in steps:
                for data in answer.events(step):
                    yield data
    for step in row.close():
        for data in answer.events(step):
            yield data
    whole = answer.whole(row)
    yield answer.event(f"response.{whole['status']}", response=whole)


class _Answer:
    """One answer: its items, its events in their numbering, and itself as a whole."""

    def __init__(self, plan: ChatPlan, echo: Echo, choice: Choice, tokenizer: Tokenizer):
        self._plan = plan
        self._echo = echo
        self._choice = choice
        self._tokenizer = tokenizer
        self._numbers = itertools.count()
        self._key = plan.base["id"].removeprefix("chatcmpl-")

    def event(self, kind: str, **fields: Any) -> bytes:
        return named_frame(kind, {"type": kind, "sequence_number": next(self._numbers), **fields})

    def frame(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        """The answer around its output."""
        return {
            "id": f"resp_{self._key}",
            "object": "response",
            "created_at": self._plan.base["created"],
            "model": self._plan.base["model"],
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "background": False,
            **self._echo.fields,
            "output": output,
            "usage": None,
        }

    def whole(self, row: BlockRow) -> dict[str, Any]:
        status = "incomplete" if self._choice.finish_reason == "length" else "completed"
        items = [self._item(block, "completed", block.text) for block in row.answer]
        return {**self.frame(status, items), "usage": self._usage()}

    def events(self, step: Step) -> list[bytes]:
        change, block, piece = step
        if change is Change.OPENED:
            return self._opened(block)
        if change is Change.GROWN:
            assert piece is not None
            return [self._grown(block, piece)]
        return self._closed(block)

    def _opened(self, block: Block) -> list[bytes]:
        item = self._item(block, "in_progress", None)
        added = [self.event("response.output_item.added", output_index=block.index, item=item)]
        if block.call_id is None:
            part = self._part(block, "", [])
            added.append(self.event("response.content_part.added", **self._place(block), content_index=0, part=part))
        return added

    def _grown(self, block: Block, piece: Piece) -> bytes:
        if block.call_id is not None:
            kind = "response.function_call_arguments.delta"
            return self.event(kind, **self._place(block), delta=piece.text)
        more = {"logprobs": self._logprobs(piece.logprobs)} if block.channel is Channel.CONTENT else {}
        kind = f"response.{_PART_EVENTS[block.channel]}.delta"
        return self.event(kind, **self._place(block), content_index=0, delta=piece.text, **more)

    def _closed(self, block: Block) -> list[bytes]:
        status = "completed" if block.is_complete else "incomplete"
        done = {"output_index": block.index, "item": self._item(block, status, block.text)}
        if block.call_id is not None:
            kind = "response.function_call_arguments.done"
            ended = [self.event(kind, **self._place(block), name=block.name, arguments=block.text)]
        else:
            place = {**self._place(block), "content_index": 0}
            more = {"logprobs": self._logprobs(block.logprobs)} if block.channel is Channel.CONTENT else {}
            part = self._part(block, block.text, block.logprobs)
            ended = [
                self.event(f"response.{_PART_EVENTS[block.channel]}.done", **place, text=block.text, **more),
                self.event("response.content_part.done", **place, part=part),
            ]
        return [*ended, self.event("response.output_item.done", **done)]

    def _place(self, block: Block) -> dict[str, Any]:
        return {"item_id": self._item_id(block), "output_index": block.index}

    def _item_id(self, block: Block) -> str:
        kind = "fc" if block.call_id is not None else "rs" if block.channel is Channel.REASONING else "msg"
        return f"{kind}_{self._key}{block.index}"

    def _item(self, block: Block, status: str, text: str | None) -> dict[str, Any]:
        """A block as an item; without a text, one that is about to begin."""
        item: dict[str, Any] = {"id": self._item_id(block), "status": status}
        if block.call_id is not None:
            call = {"call_id": block.call_id, "name": block.name, "arguments": text or ""}
            return {"type": "function_call", **item, **call}
        content = [] if text is None else [self._part(block, text, block.logprobs)]
        if block.channel is Channel.REASONING:
            carried = {"encrypted_content": pack(text)} if text and self._echo.carries_reasoning else {}
            return {"type": "reasoning", **item, "summary": [], "content": content, **carried}
        return {"type": "message", **item, "role": "assistant", "content": content}

    def _part(self, block: Block, text: str, logprobs: Sequence[Any]) -> dict[str, Any]:
        if block.channel is Channel.REASONING:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs(logprobs)}

    def _logprobs(self, logprobs: Sequence[Any]) -> list[dict[str, Any]]:
        return [token_entry(self._tokenizer, item) for item in logprobs]

    def _usage(self) -> dict[str, Any]:
        counts = usage([self._choice], 1)
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": counts["prompt_tokens_details"],
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": counts["completion_tokens_details"],
            "total_tokens": counts["total_tokens"],
        }

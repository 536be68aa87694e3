"""An answer as a row of blocks (reasoning, text, calls), which is how the newer dialects show it."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from perilune.engine.request import TokenLogprob
from perilune.server.choice import Piece
from perilune.text.channels import Channel


@dataclass(eq=False)
class Block:
    """Neighbouring text of one kind; a call has `call_id` and `name`, and its text is JSON."""

    index: int
    channel: Channel
    call_id: str | None = None
    name: str = ""
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    is_complete: bool = False

    @property
    def text(self) -> str:
        return "".join(self.texts)


class Change(Enum):
    """What happens to a block."""

    OPENED = "opened"
    GROWN = "grown"
    CLOSED = "closed"


Step = tuple[Change, Block, Piece | None]


class BlockRow:
    """Puts the pieces of one answer into blocks, in their order."""

    def __init__(self) -> None:
        self._blocks: list[Block] = []
        self._was_resent = False

    def push(self, pieces: Iterable[Piece]) -> list[Step]:
        """What these pieces change; only one block is open at a time."""
        steps: list[Step] = []
        for piece in pieces:
            self._was_resent = self._was_resent or piece.delta.is_resent
            if piece.text or piece.call_id is not None:
                self._place(piece, steps)
        return steps

    def close(self) -> list[Step]:
        """End the open block; call it once the answer has finished."""
        if not self._blocks or self._blocks[-1].is_complete:
            return []
        block = self._blocks[-1]
        # a call that ends by itself is complete already: this one was cut
        block.is_complete = block.call_id is None
        return [(Change.CLOSED, block, None)]

    @property
    def answer(self) -> list[Block]:
        """The blocks of the finished answer: without a call that was cut, or reasoning that proved to be the text."""
        return [
            block
            for block in self._blocks
            if block.is_complete and not (self._was_resent and block.channel is Channel.REASONING)
        ]

    def _place(self, piece: Piece, steps: list[Step]) -> None:
        channel = Channel.CONTENT if piece.channel is Channel.TEXT else piece.channel
        block = self._blocks[-1] if self._blocks else None
        if block is None or block.is_complete or block.channel is not channel or piece.call_id is not None:
            steps += self.close()
            name = piece.delta.call.name if piece.delta.call else None
            block = Block(len(self._blocks), channel, piece.call_id, name or "")
            self._blocks.append(block)
            steps.append((Change.OPENED, block, None))
        block.logprobs += piece.logprobs
        if piece.text:
            block.texts.append(piece.text)
            steps.append((Change.GROWN, block, piece))
        if piece.is_end_of_call:
            block.is_complete = True
            steps.append((Change.CLOSED, block, None))

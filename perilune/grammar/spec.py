"""What may be generated, as a message: grammar source, when it begins to hold, and which field of the request it is."""

import json
from dataclasses import dataclass
from enum import Enum

from perilune.errors import RequestError

MAX_SOURCE_BYTES = 1024 * 1024


class Gate(Enum):
    """From where on a grammar holds.

    ANSWER: from the first token. THINKING: from the first control token that can end the reasoning, which stays free.
    TOOLS: from each tag that is opened, in an otherwise free answer; it constrains the tools channel.
    """

    ANSWER = "answer"
    THINKING = "thinking"
    TOOLS = "tools"


@dataclass(frozen=True)
class Part:
    """A piece of a grammar that a client wrote, standing alone so that an error can name its `field`.

    `advice` is what the error goes on with.
    """

    field: str
    source: str
    advice: str = ""


@dataclass(frozen=True)
class Grammar:
    """`source` and the sources of `parts` are what llguidance compiles.

    `prefix` are the ids at the end of the prompt that already belong to the answer: a beginning that the client wrote.
    """

    source: str
    gate: Gate
    parts: tuple[Part, ...] = ()
    prefix: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        size = len(self.source.encode(errors="surrogatepass"))
        if size > MAX_SOURCE_BYTES:
            field = self.parts[0].field if self.parts else "grammar"
            raise RequestError(
                f"{field} and what else constrains the answer makes a grammar of {size} bytes; "
                f"at most {MAX_SOURCE_BYTES} are allowed",
                param=field,
            )


def literal(text: str) -> str:
    """Text as a Lark string."""
    return json.dumps(text, ensure_ascii=False)

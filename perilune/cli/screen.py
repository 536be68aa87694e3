"""Prints an answer as it comes: the content to stdout, the reasoning dimmed to stderr."""

import sys
from typing import TextIO

from perilune.text.channels import Channel

DIM = "\033[2m"
PLAIN = "\033[0m"


class Screen:
    """One answer at a time; `content` and `reasoning` keep what was shown of it."""

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None):
        self._out = out or sys.stdout
        self._err = err or sys.stderr
        self._is_dim = self._err.isatty()
        self.begin()

    def begin(self) -> None:
        self.content = ""
        self.reasoning = ""

    def show(self, channel: Channel, text: str) -> None:
        if channel is Channel.REASONING:
            self.reasoning += text
            self._write(self._err, f"{DIM}{text}{PLAIN}" if self._is_dim else text)
            return
        if self.reasoning and not self.content:
            self._write(self._err, "\n\n")
        self.content += text
        self._write(self._out, text)

    def end(self, finish_reason: str) -> None:
        """Finish the line; what is worth knowing about the end is said on stderr."""
        if self.content and not self.content.endswith("\n"):
            self._write(self._out, "\n")
        elif not self.content and self.reasoning:
            self._write(self._err, "\n")
        if finish_reason != "stop":
            self.note(
                {"length": "the answer was cut by its length", "abort": "stopped"}.get(finish_reason, finish_reason)
            )

    def note(self, text: str) -> None:
        """A line about the conversation rather than of it."""
        self._write(self._err, f"{DIM}({text}){PLAIN}\n" if self._is_dim else f"({text})\n")

    def _write(self, stream: TextIO, text: str) -> None:
        stream.write(text)
        stream.flush()

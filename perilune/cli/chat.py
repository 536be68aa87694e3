"""`perilune chat`: a conversation in the terminal, with a checkpoint or with a server."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from perilune import env
from perilune.cli import options
from perilune.cli.backend import NO_THINKING, Backend, LocalBackend, Turn, UrlBackend, user_content
from perilune.errors import ConfigError, PeriluneError
from perilune.text.channels import Channel

if TYPE_CHECKING:
    from perilune.sampling.params import SamplingParams

HELP = "/reset forgets the conversation, /think on|off, /image FILE, /quit or Ctrl-D leaves; Ctrl-C stops an answer"

DIM = "\033[2m"
PLAIN = "\033[0m"


class Screen:
    """Prints an answer as it comes: the content to stdout, the reasoning dimmed to stderr.

    One answer at a time; `content` and `reasoning` keep what was shown of it.
    """

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


def chat_command(
    checkpoint: options.Checkpoint = None,
    url: Annotated[str | None, typer.Option(help="Talk to this server instead.", show_default=False)] = None,
    model: Annotated[str | None, typer.Option(help="Model of the server; its first one by default.")] = None,
    api_key: Annotated[str | None, typer.Option(help="Key of the server; PERILUNE_API_KEY by default.")] = None,
    image: options.Images = None,
    system: options.System = None,
    effort: options.Effort = "max",
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = 1.0,
    top_p: options.TopP = 0.95,
    seed: options.Seed = None,
    dtype: options.Dtype = None,
    dense_weights: options.DenseWeights = "stored",
    activations: options.Activations = "exact",
    cache_dtype: options.CacheDtype = "auto",
    index_cache_dtype: options.IndexCacheDtype = "auto",
    speculative: options.Speculative = "off",
    num_drafts: options.NumDrafts = None,
    draft_rule: options.DraftRule = "matching",
    draft_rope_theta: options.DraftRopeTheta = None,
    draft_rope_interleaved: options.DraftRopeInterleaved = None,
    max_model_len: options.MaxModelLen = None,
    expert_cache_memory: options.ExpertCacheMemory = None,
    memory_budget: options.MemoryBudget = None,
    threads: options.Threads = None,
) -> None:
    """Talk to a model."""
    given = locals()
    from perilune.sampling.params import SamplingParams

    params = SamplingParams(temperature=temperature, top_p=top_p, seed=seed, max_tokens=max_tokens)
    backend: Backend
    if url is None:
        _refuse({"--model": model, "--api-key": api_key}, "without --url")
        config = options.engine_config(given, max_num_seqs=1)
        backend = LocalBackend(checkpoint, config, threads)
    else:
        _refuse({"CHECKPOINT": checkpoint, "--threads": threads, **options.changed_options(given)}, "with --url")
        backend = UrlBackend(url, model, env.api_key() if api_key is None else api_key)
    try:
        conversation = Conversation(backend, params, effort, system, is_interactive=sys.stdin.isatty())
        conversation.show_images(image or ())
        conversation.run()
    finally:
        backend.close()


class Conversation:
    """Reads lines, answers them and remembers both. A line that fails is forgotten."""

    def __init__(
        self, backend: Backend, params: "SamplingParams", effort: str, system: str | None, *, is_interactive: bool
    ):
        self._backend = backend
        self._params = params
        self._effort = effort
        self._is_thinking = effort != NO_THINKING
        self._opening: list[Turn] = [{"role": "system", "content": system}] if system else []
        self._turns = list(self._opening)
        self._images: list[Path] = []
        self._is_interactive = is_interactive
        self._screen = Screen()

    def show_images(self, files: Sequence[Path]) -> None:
        """Put pictures before the next line; ConfigError for a file that cannot be read."""
        user_content("", files)
        self._images += files

    def run(self) -> None:
        """Until the input ends or /quit. With input that is no terminal, the first error ends it too."""
        if self._is_interactive:
            self._screen.note(f"thinking is {'on' if self._is_thinking else 'off'}; {HELP}")
        for line in self._lines():
            if line.startswith("/"):
                if line == "/quit":
                    return
                self._command(line)
            elif line:
                self._answer(line)

    def _lines(self) -> Iterator[str]:
        if not self._is_interactive:
            try:
                yield from (line.strip() for line in sys.stdin)
            except UnicodeDecodeError as error:
                raise ConfigError(f"the input is not text in {error.encoding}: {error.reason}; convert it") from error
            return
        with suppress(ImportError):
            import readline  # noqa: F401 - gives `input` its history and line editing
        while True:
            try:
                yield input("> ").strip()
            except KeyboardInterrupt:
                print(file=sys.stderr)
                self._screen.note("/quit or Ctrl-D leaves")
            except EOFError:
                return

    def _command(self, line: str) -> None:
        if line == "/reset":
            self._turns = list(self._opening)
            self._images.clear()
            self._screen.note("forgotten")
        elif line.startswith("/image "):
            self._add_image(Path(line.removeprefix("/image ").strip()).expanduser())
        elif line in ("/think on", "/think off"):
            self._is_thinking = line.endswith("on")
            self._screen.note(f"thinking is {'on' if self._is_thinking else 'off'}")
        elif line == "/help":
            self._screen.note(HELP)
        else:
            self._screen.note(f"there is no command {line}: {HELP}")

    def _add_image(self, file: Path) -> None:
        try:
            self.show_images([file])
        except ConfigError as error:
            if not self._is_interactive:
                raise
            self._screen.note(f"error: {error}")
            return
        self._screen.note(f"{file.name} stands before the next line")

    def _answer(self, line: str) -> None:
        turns: list[Turn] = [*self._turns, {"role": "user", "content": user_content(line, self._images)}]
        screen = self._screen
        screen.begin()
        effort = NO_THINKING if not self._is_thinking else "max" if self._effort == NO_THINKING else self._effort
        try:
            finish_reason = self._backend.answer(turns, effort, self._params, screen.show)
        except KeyboardInterrupt:
            finish_reason = "abort"
        except PeriluneError as error:
            if not self._is_interactive:
                raise
            screen.end("stop")
            screen.note(f"error: {error}")
            return
        screen.end(finish_reason)
        if screen.content or screen.reasoning:
            self._images.clear()
            answer = {"role": "assistant", "content": screen.content, "reasoning_content": screen.reasoning}
            self._turns = [*turns, answer]


def _refuse(given: Mapping[str, object], when: str) -> None:
    for name, value in given.items():
        if value is not None:
            raise ConfigError(f"{name} has no effect {when}; leave it out")

"""One load from its settings to its report: connect, check that it fits, warm up, play."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tqdm import tqdm

from perilune.bench.serve.driver import Driver
from perilune.bench.serve.figures import Report, make_report
from perilune.bench.serve.transport import HttpTransport, ServedModel
from perilune.bench.serve.workload import Session, TokenSource, Turn, Workload, build_sessions
from perilune.errors import ConfigError

# without a terminal, progress is a line for each such share
LOGGED_SHARE = 0.1
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Load:
    """A workload and how it is sent: at most `concurrency` conversations at once (None: no bound).

    Prompts come from `text_file` or are random ids below `vocab_size`.
    """

    workload: Workload
    concurrency: int | None
    text_file: Path | None
    vocab_size: int
    goals: Mapping[str, float]


@dataclass(frozen=True)
class Finished:
    """A load with its report."""

    model: ServedModel
    load: Load
    report: Report

    def as_json(self) -> dict[str, Any]:
        """The settings and the figures in one flat object."""
        settings = asdict(self.load.workload)
        settings["request_rate"] = settings["request_rate"] or "inf"
        return {
            "date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),
            "endpoint_type": "openai",
            "model_id": self.model.name,
            "max_concurrency": self.load.concurrency,
            "goodput": dict(self.load.goals),
            **settings,
            **self.report.as_json(),
        }


async def run_load(url: str, load: Load, *, model: str | None, api_key: str | None) -> Finished:
    """Play a load against the server at `url`; ConfigError when it cannot be reached or cannot hold the load."""
    transport = HttpTransport(url, api_key, max_connections=load.concurrency or load.workload.num_prompts)
    try:
        served = await transport.connect(model)
        text_ids: list[int] = []
        if load.text_file is not None:
            text_ids = await transport.encode(_read_text(load.text_file))
        sessions = build_sessions(load.workload, TokenSource(load.vocab_size, text_ids))
        _check_lengths(sessions, served)
        await _warm_up(transport, load)
        with _progress(sum(len(session.turns) for session in sessions)) as advance:
            driver = Driver(transport, concurrency=load.concurrency, on_request=advance)
            played = await driver.play(sessions)
    finally:
        await transport.close()
    return Finished(served, load, make_report(played, load.goals))


async def _warm_up(transport: HttpTransport, load: Load) -> None:
    """One short request of no later prompt's tokens, so that nobody pays for the first one; its failure is an error."""
    turn = Turn((load.vocab_size - 1,) * WARM_UP_TOKENS, WARM_UP_TOKENS, 0.0)
    played = await Driver(transport, concurrency=1).play([Session(None, (turn,))])
    error = played.records[0].error
    if error is not None:
        raise ConfigError(f"the server does not answer a first request ({error}); it must know return_token_ids")


def _check_lengths(sessions: list[Session], model: ServedModel) -> None:
    longest = max(session.num_tokens for session in sessions)
    if model.max_model_len is not None and longest > model.max_model_len:
        raise ConfigError(
            f"a conversation grows to {longest} tokens; {model.name} is served with {model.max_model_len}: "
            "lower --input-len, --output-len, --prefix-len, --turns or --tool-len"
        )


def _read_text(path: Path) -> str:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text-file {path} cannot be read: {error}") from error
    if not text.strip():
        raise ConfigError(f"--text-file {path} is empty; give it some text to cut prompts from")
    return text


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """A bar on a terminal, a line now and then elsewhere; both on stderr."""
    if sys.stderr.isatty():
        with tqdm(total=total, unit="request", leave=False) as bar:

            def advance_bar() -> None:
                bar.update()

            yield advance_bar
        return
    step, done = max(1, round(total * LOGGED_SHARE)), 0

    def advance() -> None:
        nonlocal done
        done += 1
        if done % step == 0 or done == total:
            print(f"{done} of {total} requests ended", file=sys.stderr, flush=True)

    yield advance

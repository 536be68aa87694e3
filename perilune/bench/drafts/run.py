"""`bench decode --speculative`: answers with guesses beside the same ones without, run in turns."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from perilune.bench.drafts.texts import KINDS, prompts
from perilune.bench.spread import Spread
from perilune.config.engine import OFF, EngineConfig
from perilune.config.parse import load_model_config
from perilune.engine.build import assemble_engine, load_model
from perilune.engine.core import EngineCore
from perilune.engine.request import GenerateRequest
from perilune.engine.stats import DraftStats
from perilune.engine.steps.draft_model import open_draft
from perilune.errors import CheckpointError
from perilune.sampling.params import SamplingParams
from perilune.text.tokenizer import Tokenizer

# Answers before the first that counts, in which estimates settle and passes are recorded.
WARM_UP_RUNS = 2
RUNS = 7
# Short ones are repeated for so long, or so often: their noise is far above what guesses may lose.
LEAST_S, MOST_RUNS = 8.0, 101
# groups of questions in a run
QUESTIONS = 8


@dataclass(frozen=True)
class DraftRun:
    """Answers of one kind of text, `batch` at once. Rates are tokens of all answers per second, each a
    median between quartiles.

    `speed_up` is that of `num_pairs` pairs of runs, of whose steps the share `plain_steps` verified nothing. Of answers
    whose every step verifies all it can, `acceptance` holds for each place the share of guesses that were right among
    those behind right ones, None where there was none; `mean_length` is what a step yielded, 0 where none verified any;
    `num_differing` the answers that were not those without guesses, which never happens with the native core.
    """

    kind: str
    batch: int
    num_pairs: int
    plain: Spread
    speculative: Spread
    speed_up: Spread
    acceptance: tuple[float | None, ...]
    mean_length: float
    plain_steps: float
    num_differing: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class DraftBench:
    """A checkpoint in two engines that share its weights: one guesses as `config` says, the other does not."""

    def __init__(self, checkpoint: Path, config: EngineConfig, *, num_tokens: int, max_batch: int):
        opened = open_draft(checkpoint, config, load_model_config(checkpoint))
        self._tokenizer = Tokenizer.load(checkpoint)
        model = load_model(checkpoint, config)
        config = replace(config, max_num_seqs=max_batch, prefix_cache=False)
        draft = None if opened is None else opened.build(model)
        plain = replace(config, speculative=OFF, num_drafts=None, draft_rope_theta=None, draft_rope_interleaved=None)
        self._plain = assemble_engine(model, None, plain)
        self._speculative = assemble_engine(model, None, config, draft=draft)
        self._forced = assemble_engine(model, None, config, draft=draft)
        self._forced.force_guesses()
        self._num_tokens = num_tokens

    def run(self, batches: Sequence[int], on_run: Callable[[DraftRun], None]) -> list[DraftRun]:
        """Every kind of text at every batch; `on_run` hears of each as it ends."""
        found = []
        for kind in KINDS:
            for batch in batches:
                found.append(self._run_kind(kind, batch))
                on_run(found[-1])
        return found

    def _run_kind(self, kind: str, batch: int) -> DraftRun:
        num_differing = sum(self._pair(kind, batch, -1 - number)[1] for number in range(WARM_UP_RUNS))
        shares = self._forced_shares(kind, batch)
        before, began_s = self._speculative.stats().drafts, time.perf_counter()
        rates = list[tuple[float, float]]()
        while len(rates) < RUNS or (len(rates) < MOST_RUNS and time.perf_counter() - began_s < LEAST_S):
            pair, differing = self._pair(kind, batch, len(rates))
            rates.append(pair)
            num_differing += differing
        plain, speculative = zip(*rates, strict=True)
        return DraftRun(
            kind,
            batch,
            len(rates),
            Spread.quartiles(plain),
            Spread.quartiles(speculative),
            Spread.quartiles([fast / slow for slow, fast in rates]),
            *shares,
            _share_of_plain(before, self._speculative.stats().drafts),
            num_differing,
        )

    def _pair(self, kind: str, batch: int, number: int) -> tuple[tuple[float, float], int]:
        """Rates without and with guesses, either first by turns, and how many answers differ."""
        groups = self._groups(kind, batch, seed=number)
        cores = (self._plain, self._speculative)
        if number % 2:
            (guessing_rate, guessed), (rate, answers) = (_rate(core, groups) for core in reversed(cores))
        else:
            (rate, answers), (guessing_rate, guessed) = (_rate(core, groups) for core in cores)
        return (rate, guessing_rate), sum(answers[name] != guessed[name] for name in answers)

    def _forced_shares(self, kind: str, batch: int) -> tuple[tuple[float | None, ...], float]:
        """Acceptance by place and mean length where every step verifies all it can."""
        before = self._forced.stats().drafts
        for number in range(WARM_UP_RUNS):
            _rate(self._forced, self._groups(kind, batch, seed=number))
        after = self._forced.stats().drafts
        assert before is not None
        assert after is not None
        tried = [b - a for a, b in zip(before.tried, after.tried, strict=True)]
        kept = [b - a for a, b in zip(before.kept, after.kept, strict=True)]
        rounds = after.num_rounds - before.num_rounds
        acceptance = tuple(k / t if t else None for k, t in zip(kept, tried, strict=True))
        return acceptance, 1 + sum(kept) / rounds if rounds else 0.0

    def _groups(self, kind: str, batch: int, seed: int) -> list[list[GenerateRequest]]:
        """What is asked one after the other: more questions, whose answers are short and end by themselves."""
        is_question = kind == "question"
        params = SamplingParams(
            temperature=1.0 if kind == "random" else 0.0,
            max_tokens=self._num_tokens,
            ignore_eos=not is_question,
            seed=seed,
        )
        num_groups = QUESTIONS if is_question else 1
        found = prompts(kind, batch * num_groups, self._tokenizer, self._plain.limits.vocab_size, seed)
        messages = [GenerateRequest(str(index), tuple(ids), params) for index, ids in enumerate(found)]
        return [messages[first : first + batch] for first in range(0, len(messages), batch)]


def _rate(core: EngineCore, groups: Sequence[Sequence[GenerateRequest]]) -> tuple[float, dict[str, list[int]]]:
    """Tokens per second from when all answers of a group have begun, and the answers."""
    answers: dict[str, list[int]] = {message.request_id: [] for group in groups for message in group}
    num_tokens, seconds = 0, 0.0
    for group in groups:
        began_s, num_before, own = 0.0, 0, [answers[message.request_id] for message in group]
        for message in group:
            core.add(message)
        while core.has_work:
            for output in core.step():
                if output.error is not None:
                    raise CheckpointError(f"an answer failed: {output.error}")
                answers[output.request_id] += output.token_ids
            if not began_s and all(own):
                began_s, num_before = time.perf_counter(), sum(map(len, own))
        num_tokens, seconds = num_tokens + sum(map(len, own)) - num_before, seconds + time.perf_counter() - began_s
    return num_tokens / seconds, answers


def _share_of_plain(before: DraftStats | None, after: DraftStats | None) -> float:
    assert before is not None
    assert after is not None
    return (after.num_plain_steps - before.num_plain_steps) / (after.num_steps - before.num_steps)


def render(run: DraftRun) -> str:
    """One line of the table."""
    places = " ".join("-" if share is None else f"{share:.2f}" for share in run.acceptance)
    return (
        f"{run.kind:<10}{run.batch:>5}{run.num_pairs:>7}{run.plain.median:>10.0f}{run.speculative.median:>10.0f}"
        f"{f'{run.speed_up.median:.2f} ({run.speed_up.low:.2f}-{run.speed_up.high:.2f})':>20}"
        f"{run.mean_length:>8.2f}{run.plain_steps:>8.0%}{run.num_differing:>8}  {places}"
    )


HEADER = (
    f"{'text':<10}{'batch':>5}{'pairs':>7}{'plain/s':>10}{'guess/s':>10}{'speed-up':>20}{'length':>8}{'plain':>8}{'differ':>8}"
    "  by place"
)

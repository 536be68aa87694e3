"""`bench prefill` and `bench decode`: steps of a whole model, timed as the engine runs them."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from perilune.bench.ceilings import READ_BYTES
from perilune.bench.engine import BenchEngine
from perilune.bench.process import NativeClock, OthersClock, forget_peak_memory, peak_memory_bytes
from perilune.bench.spread import Spread
from perilune.config.engine import EngineConfig
from perilune.config.model import ModelConfig
from perilune.engine.build import load_model
from perilune.errors import ConfigError
from perilune.models.model import KimiModel
from perilune.ops.case import tensors_in
from perilune.platform import available_memory_bytes

# the longest prompt that the first token is timed with
FIRST_PROMPT = 512
_WARM_UP_STEPS = 2
# steps whose time inside the native core is added up
_ACCOUNTED_STEPS = 8
# steps between two measurements of reads, the first of which finds the caches cold and is not timed
_BLOCK = 8


@dataclass(frozen=True)
class Run:
    """What was run and how long it took.

    `batch` sequences, `tokens` of each (decoded, or those of a prompt) behind `context` random rows. `step_s` is the
    time of one decode step or of one whole prompt, `mean_s` its mean. `python_share`: the part of it outside the native
    core, torch included; `native_shares`: the parts of the core's functions. `reads`: bytes per second that the machine
    read between the steps, None where that was not measured. `first_token_s`: loading and the first token, that of a
    prompt of `first_prompt` tokens or behind the context. `others_cores`: processors that other processes used while
    steps were timed.
    """

    context: int
    tokens: int
    batch: int
    step_s: Spread
    mean_s: float
    python_share: float
    native_shares: dict[str, float]
    reads: Spread | None
    load_s: float
    first_token_s: float
    first_prompt: int
    peak_rss_bytes: int
    others_cores: float


@dataclass(frozen=True)
class _Timing:
    step_s: Spread
    mean_s: float
    native_shares: dict[str, float]
    reads: Spread | None
    peak_rss_bytes: int
    others_cores: float

    @property
    def python_share(self) -> float:
        return max(0.0, 1 - sum(self.native_shares.values()))


class ModelBench:
    """A checkpoint that is loaded, and timed from then on.

    `read_rates` measures what the machine reads, bytes per second; it is called between blocks of steps.
    """

    def __init__(self, checkpoint: Path, config: EngineConfig, read_rates: Callable[[], list[float]] | None = None):
        self._config, self._read_rates = config, read_rates
        forget_peak_memory()
        start = time.perf_counter()
        self.model = load_model(checkpoint, config)
        self._load_s = time.perf_counter() - start

    @property
    def text_config(self) -> ModelConfig:
        return self.model.config

    @property
    def dtype(self) -> str:
        """The compute dtype that was chosen."""
        return str(self.model.dtype).removeprefix("torch.")

    def prefill(self, num_tokens: int, repeats: int) -> Run:
        """Prompts of `num_tokens` random tokens, each until its first new token, in the engine's steps."""
        engine = self._engine(1, num_tokens + 1)

        def run_prompt(length: int) -> None:
            engine.add_prompt(length)
            while engine.has_work:
                engine.step_or_raise()

        first_prompt = min(num_tokens, FIRST_PROMPT)
        start = time.perf_counter()
        run_prompt(first_prompt)
        first_token_s = self._load_s + time.perf_counter() - start
        timing = self._time(partial(_seconds, partial(run_prompt, num_tokens)), repeats, block=1, accounted=1)
        return self._run(timing, 0, num_tokens, 1, first_token_s, first_prompt)

    def decode(self, context: int, num_tokens: int, batch: int) -> Run:
        """`num_tokens` steps of `batch` sequences, the first behind `context` random rows."""
        untimed = _WARM_UP_STEPS + num_tokens // _BLOCK + _ACCOUNTED_STEPS
        engine = self._engine(batch, context + num_tokens + untimed + 2)
        if context:
            engine.fill_cache()
        for sequence in range(batch):
            engine.add_behind(str(sequence), context)
        start = time.perf_counter()
        engine.step_or_raise()
        first_token_s = self._load_s + time.perf_counter() - start
        for _ in range(_WARM_UP_STEPS):
            engine.redraw_tokens()
            engine.step_or_raise()
        step = partial(_seconds, engine.step_or_raise, engine.redraw_tokens)
        timing = self._time(step, num_tokens, block=_BLOCK, accounted=_ACCOUNTED_STEPS)
        return self._run(timing, context, num_tokens, batch, first_token_s, 1)

    def _engine(self, num_seqs: int, max_len: int) -> BenchEngine:
        longest = self.model.config.max_position_embeddings
        if max_len > longest:
            raise ConfigError(f"sequences would reach {max_len} tokens; the model's context is {longest}: ask for less")
        return BenchEngine(self.model, self._config, num_seqs=num_seqs, max_len=max_len)

    def _time(self, step: Callable[[], float], count: int, *, block: int, accounted: int) -> _Timing:
        """`count` steps (their seconds), reads after each `block`, then steps whose time in the core is told apart."""
        self._touch_weights()
        # other reads would push mapped weights out of a full memory
        is_roomy = self._read_rates is not None and available_memory_bytes() > 2 * READ_BYTES
        others, peak, taken, reads = OthersClock(), 0, list[float](), list[float]()
        while len(taken) < count:
            if reads and block > 1:
                step()
            taken += [step() for _ in range(min(block, count - len(taken)))]
            peak = peak or peak_memory_bytes()  # without what reads are measured on
            if self._read_rates is not None and is_roomy:
                reads += self._read_rates()
        others_cores, clock = others.cores(), NativeClock()
        with clock.running():
            total = sum(step() for _ in range(accounted))
        shares = {name: seconds / total for name, seconds in clock.by_function.items()}
        measured = Spread.of(reads) if reads else None
        return _Timing(Spread.of(taken), sum(taken) / count, shares, measured, peak, others_cores)

    def _run(
        self, timing: _Timing, context: int, tokens: int, batch: int, first_token_s: float, first_prompt: int
    ) -> Run:
        return Run(
            context=context,
            tokens=tokens,
            batch=batch,
            step_s=timing.step_s,
            mean_s=timing.mean_s,
            python_share=timing.python_share,
            native_shares=timing.native_shares,
            reads=timing.reads,
            load_s=self._load_s,
            first_token_s=first_token_s,
            first_prompt=first_prompt,
            peak_rss_bytes=timing.peak_rss_bytes,
            others_cores=timing.others_cores,
        )

    def _touch_weights(self) -> None:
        """Map every page that steps read, if memory holds them all: the first ones after a start are slower."""
        rows = self.model.model.embed_tokens.weight  # of which a step reads one a token
        tensors = [tensor for tensor in weights_of(self.model) if tensor is not rows]
        if sum(tensor.nbytes for tensor in tensors) < available_memory_bytes():
            for tensor in tensors:
                tensor.view(-1).view(torch.uint8)[::4096].max()


def _seconds(step: Callable[[], None], prepare: Callable[[], None] | None = None) -> float:
    if prepare is not None:
        prepare()
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def weights_of(model: KimiModel) -> Iterator[Tensor]:
    """Every tensor that holds weights: parameters, and the tuples of quantised projections and of experts."""
    yield from model.parameters()
    for module in model.modules():
        yield from tensors_in([value for value in vars(module).values() if isinstance(value, tuple)])

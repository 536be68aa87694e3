"""Bench cases of sampling at the vocabulary of Kimi K3."""

from collections.abc import Iterator

import torch

from perilune.bench.case import BenchCase, Builder
from perilune.bench.ceilings import Work
from perilune.ops.case import tensors_in
from perilune.ops.sampling import cases as sampling

_VOCAB = 163840
_ROWS = (1, 4, 16, 64)
# temperature, top-k, top-p, min-p, number
_SETTINGS = {
    "greedy": (0.0, 0.0, 1.0, 0.0, 0.0),
    "temperature": (1.0, 0.0, 1.0, 0.0, 0.4),
    "top-p": (0.7, 0.0, 0.95, 0.0, 0.4),
    "top-k and top-p": (0.7, 50.0, 0.95, 0.05, 0.4),
}


def sample_tokens(generator: torch.Generator) -> Iterator[BenchCase]:
    """What the head has just written, with every kind of filter."""
    for rows in _ROWS:
        case = sampling.SampleCase(name="", rows=rows, vocab=_VOCAB, is_masked=True).in_bfloat16()
        logits, settings, mask = sampling.sample_arguments(case, generator)
        for name, values in _SETTINGS.items():
            settings = settings.clone()
            settings[:] = torch.tensor(values, dtype=torch.float64)
            yield _cached("sample_tokens", f"{name}, {rows} rows", (logits, settings, None))
        yield _cached("sample_tokens", f"{name}, masked, {rows} rows", (logits, settings, mask))


def sample_masses(generator: torch.Generator) -> Iterator[BenchCase]:
    """The rows of a verified sequence."""
    for rows in (1, 8):
        case = sampling.SampleCase(name="", rows=rows, vocab=_VOCAB).in_bfloat16()
        logits, settings, _ = sampling.sample_arguments(case, generator)
        settings[:] = torch.tensor(_SETTINGS["top-p"], dtype=torch.float64)
        yield _cached("sample_masses", f"top-p, {rows} rows", (logits, settings, None))


def penalize(generator: torch.Generator) -> Iterator[BenchCase]:
    """Prompts of usual lengths."""
    for length in (512, 32768):
        case = sampling.PenaltyCase(
            name="", vocab=_VOCAB, num_prompt=length // 2, num_output=length // 2, penalties=(1.1, 0.1, 0.1)
        )
        yield _cached("penalize", f"{length} tokens", sampling.penalty_arguments(case, generator))


def _cached(op: str, name: str, arguments: tuple[object, ...]) -> BenchCase:
    size = sum(tensor.nbytes for tensor in tensors_in(arguments))
    return BenchCase(op, name, (arguments,), Work(size, 0), is_cached=True)


BUILDERS: dict[str, Builder] = {"sample_masses": sample_masses, "sample_tokens": sample_tokens, "penalize": penalize}

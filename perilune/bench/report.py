"""What a run of a model reached, beside what it had to do at least and what the machine allows."""

from dataclasses import asdict, dataclass
from typing import Any

from perilune.bench.ceilings import Ceilings, Products
from perilune.bench.model import Run
from perilune.config.engine import AUTO, FP8, INT8, STORED, EngineConfig
from perilune.config.model import ModelConfig
from perilune.models.accounting import (
    Flops,
    cache_bytes_per_token,
    cache_bytes_read,
    decode_flops,
    prefill_flops,
    state_bytes_per_sequence,
    step_weight_bytes,
)

# functions of the native core that take less of a step are not listed for people
SHOWN_SHARE = 0.01


@dataclass(frozen=True)
class Need:
    """What one decode step, or one whole prompt, must do at least for its `tokens`."""

    tokens: int
    read_bytes: float
    flops: Flops


@dataclass(frozen=True)
class ModelReport:
    """A run and its bounds; `share_of_ceiling` is that of the bound that takes longer. Rates are per second."""

    checkpoint: str
    dtype: str
    dense_weights: str
    activations: str
    cache_dtype: str
    index_cache_dtype: str
    run: Run
    tokens_per_second: float
    bytes_per_token: float
    read_ceiling: float
    flops_per_token: float
    flops_ceiling: float
    bound: str
    share_of_ceiling: float
    ceilings: Ceilings

    def as_json(self) -> dict[str, Any]:
        """One flat object, but for the spread and the ceilings."""
        values = asdict(self)
        return {**values.pop("run"), **values, "ceilings": self.ceilings.as_json()}


def decode_need(text: ModelConfig, config: EngineConfig, dtype: str, run: Run) -> Need:
    """Of a step in the middle of the run: weights once, every sequence's states and rows."""
    rows = run.context + 1 + run.tokens // 2
    each = cache_bytes_read(text, rows, *_row_formats(config, dtype)) + _state_bytes(text, dtype)
    return Need(
        run.batch,
        step_weight_bytes(text, run.batch, is_quantised=config.dense_weights != STORED) + run.batch * each,
        decode_flops(text, rows).times(run.batch),
    )


def prefill_need(text: ModelConfig, config: EngineConfig, dtype: str, run: Run) -> Need:
    """Of a prompt: weights and the state once per step of the engine, and each row once."""
    step = min(run.tokens, config.max_num_batched_tokens)
    weights = step_weight_bytes(text, step, is_quantised=config.dense_weights != STORED)
    num_steps = -(-run.tokens // step)
    rows = run.tokens * cache_bytes_per_token(text, *_row_formats(config, dtype))
    return Need(run.tokens, num_steps * (weights + _state_bytes(text, dtype)) + rows, prefill_flops(text, run.tokens))


def flops_ceiling(flops: Flops, ceilings: Ceilings, config: EngineConfig, dtype: str) -> float:
    """Operations per second at best, where each kind of product runs at its own ceiling."""
    exact: Products = "float32" if dtype == "float32" else "bfloat16"
    is_int8 = config.activations == INT8
    experts: Products = "int8" if is_int8 else exact
    projections: Products = "int8" if is_int8 and config.dense_weights == INT8 else exact
    ideal_s = flops.experts / ceilings.flops(experts) + flops.projections / ceilings.flops(projections)
    ideal_s += (flops.others + flops.mixers) / ceilings.flops(exact)
    return flops.total / ideal_s


def make_report(
    checkpoint: str, config: EngineConfig, dtype: str, run: Run, need: Need, ceilings: Ceilings
) -> ModelReport:
    """Put a run beside what it needed and what the machine allows."""
    arithmetic = flops_ceiling(need.flops, ceilings, config, dtype)
    ideal_s = {"memory": need.read_bytes / ceilings.read, "arithmetic": need.flops.total / arithmetic}
    bound = max(ideal_s, key=ideal_s.__getitem__)
    return ModelReport(
        checkpoint=checkpoint,
        dtype=dtype,
        dense_weights=config.dense_weights,
        activations=config.activations,
        cache_dtype=config.cache_dtype,
        index_cache_dtype=config.index_cache_dtype,
        run=run,
        tokens_per_second=need.tokens / run.mean_s,
        bytes_per_token=need.read_bytes / need.tokens,
        read_ceiling=ceilings.read,
        flops_per_token=need.flops.total / need.tokens,
        flops_ceiling=arithmetic,
        bound=bound,
        share_of_ceiling=ideal_s[bound] / run.mean_s,
        ceilings=ceilings,
    )


def render_report(report: ModelReport) -> str:
    """The report for people."""
    run, step = report.run, report.run.step_s
    rates = report.tokens_per_second * report.bytes_per_token, report.tokens_per_second * report.flops_per_token
    kind = f"{report.dtype}, dense weights {report.dense_weights}, activations {report.activations}"
    if (report.cache_dtype, report.index_cache_dtype) != (AUTO, AUTO):
        kind += f", cached rows {report.cache_dtype}, index keys {report.index_cache_dtype}"
    lines = [str(report.ceilings), "", f"{report.checkpoint}: {kind}"]
    if run.context:
        lines.append(f"{run.batch} sequence(s) behind {run.context} cached tokens whose rows and states are random")
    largest = sorted(run.native_shares.items(), key=lambda item: -item[1])
    shares = ", ".join(f"{name} {share:.0%}" for name, share in largest if share >= SHOWN_SHARE)
    rows = {
        "tokens per second": f"{report.tokens_per_second:.2f}",
        "seconds, median (least-greatest)": f"{step.median:.4f} ({step.low:.4f}-{step.high:.4f})",
        "bytes per token": f"{report.bytes_per_token:,.0f}, read at {rates[0] / 1e9:.1f} GB/s",
        "operations per token": f"{report.flops_per_token:,.0f}, done at {rates[1] / 1e9:.1f} GFLOP/s",
        "ceilings": f"{report.read_ceiling / 1e9:.1f} GB/s, {report.flops_ceiling / 1e9:.1f} GFLOP/s",
        "share of the ceiling": f"{report.share_of_ceiling:.1%} ({report.bound})",
        "outside the native core": f"{run.python_share:.1%}; inside: {shares}",
        "loading": f"{run.load_s:.2f} s, first token after {run.first_token_s:.2f} s",
        "peak memory": f"{run.peak_rss_bytes / 1e9:.2f} GB, mapped files included",
        "processors that others used": f"{run.others_cores:.2f}",
    }
    return "\n".join([*lines, *(f"{label:<34}{text}" for label, text in rows.items())])


def _row_formats(config: EngineConfig, dtype: str) -> tuple[str, str]:
    """What `models.accounting` calls the cached rows of attention and the index keys."""
    latent = {AUTO: dtype, FP8: "fp8_ds_mla"}.get(config.cache_dtype, config.cache_dtype)
    return latent, dtype if config.index_cache_dtype == AUTO else config.index_cache_dtype


def _state_bytes(text: ModelConfig, dtype: str) -> int:
    return state_bytes_per_sequence(text, conv_itemsize=4 if dtype == "float32" else 2)

"""Golden logits against ours: replays the tokens of a golden file through model and cache, measures the distance."""

import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from perilune import ops
from perilune.config.engine import EngineConfig
from perilune.config.model import ModelConfig
from perilune.config.parse import load_model_config
from perilune.engine.build import load_model
from perilune.errors import CheckpointError, ConfigError
from perilune.models.model import KimiModel
from perilune.ops.registry import all_ops, apply_overrides
from perilune.verify.replay import Replay

MODES = "whole, chunked:N (N tokens at a time) or decode (one at a time)"


@dataclass(frozen=True)
class Golden:
    """A prompt and the logits that every position of it should give: [T] ids, [T, V] float64."""

    token_ids: tuple[int, ...]
    logits: Tensor


@dataclass(frozen=True)
class LogitsReport:
    """How far our logits are from golden ones, over all positions.

    `relative_error` is the Frobenius norm of the difference over that of the golden; `max_position_error` the same
    for the worst single position. `mean_kl` is KL(golden, ours) in nats, averaged over positions. `argmax_regret` is
    what golden's best value exceeds golden's value at our best token by, at the worst position.
    """

    num_positions: int
    relative_error: float
    max_position_error: float
    mean_kl: float
    argmax_regret: float


def verify_logits(
    checkpoint: Path, golden_file: Path, config: EngineConfig | None = None, *, mode: str = "whole"
) -> LogitsReport:
    """Load `checkpoint` as `config` says (float32 without one), replay the golden file's tokens, compare all logits.

    Raises ConfigError for a wrong mode or golden file, CheckpointError for a checkpoint that is damaged or gives
    logits that are not finite, and what `load_model` raises.
    """
    parse_mode(mode, 1)
    golden = read_golden(golden_file, load_model_config(checkpoint))
    try:
        model = load_model(checkpoint, config or EngineConfig(dtype="float32"), check_scales=True)
        ours_TV = replay_logits(model, golden.token_ids, mode)
    finally:
        apply_overrides({})
    broken = (~ours_TV.isfinite().all(dim=-1)).nonzero().flatten()
    if len(broken):
        dtype = str(model.dtype).removeprefix("torch.")
        raise CheckpointError(
            f"{checkpoint}: in {dtype} the logits of position {int(broken[0])} are not finite; the weights are damaged"
        )
    return compare_logits(golden.logits, ours_TV)


def only(backend: str) -> dict[str, str]:
    """Overrides that let one backend alone compute what it implements; ConfigError for one that implements nothing."""
    ops.load_all()
    named = {name: backend for name, op in all_ops().items() if op.implementation(backend) is not None}
    if not named:
        raise ConfigError(f"backend is {backend!r}, which implements no op; reference implements all")
    return named


def parse_mode(mode: str, num_tokens: int) -> int:
    """Tokens per pass in `mode` for a prompt of `num_tokens`; raises ConfigError for a mode that does not exist."""
    if mode == "whole":
        return num_tokens
    if mode == "decode":
        return 1
    match = re.fullmatch(r"chunked:([1-9]\d{0,8})", mode)
    if match is None:
        raise ConfigError(f"mode is {mode!r}; allowed are {MODES}, for example chunked:16")
    return int(match.group(1))


def read_golden(file: Path, config: ModelConfig) -> Golden:
    """The arrays `token_ids` [T] and `logits` [T, vocab_size] of an .npz file; raises ConfigError for anything else."""
    try:
        with np.load(file, allow_pickle=False) as arrays:
            missing = [name for name in ("token_ids", "logits") if name not in arrays]
            if missing:
                raise ConfigError(
                    f"{file} has no array {' and no '.join(missing)}; it holds {', '.join(arrays) or 'nothing'}, "
                    "and a golden file needs token_ids and logits"
                )
            token_ids, logits = arrays["token_ids"], arrays["logits"]
    except FileNotFoundError:
        raise ConfigError(f"{file} does not exist; give a golden .npz file") from None
    except (OSError, ValueError, TypeError, EOFError, BadZipFile, zlib.error) as error:
        raise ConfigError(f"{file} cannot be read as an .npz file: {error}") from None
    _check_golden(file, token_ids, logits, config.vocab_size)
    return Golden(tuple(token_ids.tolist()), torch.from_numpy(logits.astype(np.float64)))


def _check_golden(file: Path, token_ids: np.ndarray, logits: np.ndarray, vocab_size: int) -> None:
    if token_ids.ndim != 1 or token_ids.size == 0 or token_ids.dtype.kind not in "iu":
        raise ConfigError(
            f"{file}: token_ids is {token_ids.dtype} of shape {token_ids.shape}; it must be integers [tokens]"
        )
    if token_ids.min() < 0 or token_ids.max() >= vocab_size:
        raise ConfigError(
            f"{file}: token_ids run from {token_ids.min()} to {token_ids.max()}; the model knows 0 to {vocab_size - 1}"
        )
    if logits.shape != (token_ids.size, vocab_size) or logits.dtype.kind != "f":
        raise ConfigError(
            f"{file}: logits is {logits.dtype} of shape {logits.shape}; it must be floating point "
            f"[{token_ids.size}, {vocab_size}], one row per token id"
        )
    if not np.isfinite(logits).all():
        raise ConfigError(f"{file}: logits holds values that are not finite; a golden file must not")


def replay_logits(model: KimiModel, token_ids: tuple[int, ...], mode: str) -> Tensor:
    """The model's logits [T, V] of one sequence fed through the cache in the given mode."""
    step = parse_mode(mode, len(token_ids))
    replay = Replay(model, num_sequences=1, max_len=len(token_ids))
    return torch.cat([replay.step([(0, token_ids[at : at + step])])[0] for at in range(0, len(token_ids), step)])


def compare_logits(golden_TV: Tensor, ours_TV: Tensor) -> LogitsReport:
    """Distance of `ours_TV` from `golden_TV`, both [T, V], computed in float64."""
    golden_TV, ours_TV = golden_TV.double(), ours_TV.double()
    difference_TV = ours_TV - golden_TV
    row_error_T = difference_TV.norm(dim=-1) / golden_TV.norm(dim=-1)
    golden_log_TV, ours_log_TV = golden_TV.log_softmax(-1), ours_TV.log_softmax(-1)
    kl_T = (golden_log_TV.exp() * (golden_log_TV - ours_log_TV)).sum(-1)
    at_our_best_T = golden_TV.gather(-1, ours_TV.argmax(-1, keepdim=True))[:, 0]
    return LogitsReport(
        num_positions=golden_TV.shape[0],
        relative_error=float(difference_TV.norm() / golden_TV.norm()),
        max_position_error=float(row_error_T.max()),
        mean_kl=float(kl_T.mean()),
        argmax_regret=float((golden_TV.amax(-1) - at_our_best_T).max()),
    )

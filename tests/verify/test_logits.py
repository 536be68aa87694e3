import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from perilune.cli.verify import app
from perilune.config.engine import EngineConfig
from perilune.config.parse import load_model_config
from perilune.errors import CheckpointError, ConfigError
from perilune.verify import logits
from perilune.verify.logits import compare_logits, only, parse_mode, read_golden, verify_logits

TOLERANCE = 1e-4


@pytest.mark.parametrize("mode", ["whole", "chunked:1", "chunked:7", "chunked:16", "chunked:1000", "decode"])
def test_the_small_golden_is_met_in_every_mode(micro_checkpoint, mode):
    report = verify_logits(micro_checkpoint, micro_checkpoint / "golden.npz", mode=mode)
    assert report.relative_error <= TOLERANCE
    assert report.max_position_error <= TOLERANCE * 10
    assert report.argmax_regret <= TOLERANCE


@pytest.mark.parametrize("mode", ["whole", "decode"])
@pytest.mark.parametrize("name", ["k3-tiny", "k31-tiny"])
def test_the_shared_goldens_are_met_in_every_mode(goldens_dir, name, mode):
    report = verify_logits(goldens_dir / name, goldens_dir / name / "golden.npz", mode=mode)
    assert report.relative_error <= TOLERANCE


# What rounds. Random weights enlarge every rounding a hundredfold.
ROUNDINGS = [
    EngineConfig(dtype="float32", activations="int8"),
    EngineConfig(dtype="float32", dense_weights="int8"),
    EngineConfig(dtype="float32", dense_weights="fp8"),
    EngineConfig(dtype="float32", dense_weights="int8", activations="int8"),
    EngineConfig(dtype="bfloat16"),
    EngineConfig(dtype="bfloat16", dense_weights="int8", activations="int8"),
]


@pytest.mark.parametrize("config", ROUNDINGS, ids=lambda c: f"{c.dtype} {c.dense_weights} {c.activations}")
@pytest.mark.parametrize("name", ["k3-tiny", "k31-tiny"])
def test_faster_ops_are_no_further_off_than_the_reference_with_the_same_rounding(goldens_dir, name, config):
    """Each rounds sums taken in another order, which moves single logits; the whole must not move away."""
    checkpoint, golden = goldens_dir / name, goldens_dir / name / "golden.npz"
    reference = verify_logits(checkpoint, golden, replace(config, ops=only("reference")))
    found = verify_logits(checkpoint, golden, config)
    assert 1e-3 < reference.mean_kl < 0.5
    assert found.mean_kl < 1.25 * reference.mean_kl
    assert found.relative_error < 1.15 * reference.relative_error
    assert found.argmax_regret < 2 * reference.argmax_regret


def test_one_backend_alone_may_compute(micro_checkpoint, monkeypatch):
    golden = micro_checkpoint / "golden.npz"
    seen = []
    monkeypatch.setattr(logits, "apply_overrides", seen.append)
    assert verify_logits(micro_checkpoint, golden, EngineConfig(ops=only("reference"))).relative_error <= TOLERANCE
    assert seen == [{}]
    assert set(only("reference").values()) == {"reference"}
    assert "rms_norm" in only("reference")
    with pytest.raises(ConfigError, match="backend is 'mystery'"):
        only("mystery")


def test_changed_weights_are_noticed(micro_checkpoint, tmp_path):
    golden = read_golden(micro_checkpoint / "golden.npz", load_model_config(micro_checkpoint))
    file = tmp_path / "moved.npz"
    np.savez(file, token_ids=np.array(golden.token_ids[1:] + golden.token_ids[:1]), logits=golden.logits.numpy())
    assert verify_logits(micro_checkpoint, file).relative_error > 0.1


def test_the_measures_are_those_of_a_hand_count():
    golden = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
    ours = torch.tensor([[3.0, 4.0], [1.0, 0.0]])
    report = compare_logits(golden, ours)
    assert report.num_positions == 2
    assert report.relative_error == pytest.approx(math.sqrt(2) / math.sqrt(26))
    assert report.max_position_error == pytest.approx(math.sqrt(2))
    high, low = math.e / (1 + math.e), 1 / (1 + math.e)
    assert report.mean_kl == pytest.approx((high - low) * math.log(high / low) / 2)
    assert report.argmax_regret == pytest.approx(1.0)


def test_equal_logits_measure_zero_and_a_common_shift_costs_no_regret():
    golden = torch.randn(5, 9, dtype=torch.float64)
    assert list(vars(compare_logits(golden, golden)).values()) == [5, 0.0, 0.0, 0.0, 0.0]
    shifted = compare_logits(golden, golden + 3)
    assert shifted.relative_error > 0
    assert shifted.mean_kl == pytest.approx(0, abs=1e-12)
    assert shifted.argmax_regret == 0


@pytest.mark.parametrize(("mode", "size"), [("whole", 40), ("decode", 1), ("chunked:1", 1), ("chunked:16", 16)])
def test_a_mode_names_the_tokens_per_pass(mode, size):
    assert parse_mode(mode, 40) == size


@pytest.mark.parametrize("mode", ["", "Whole", "chunked", "chunked:", "chunked:0", "chunked:-1", "chunked:1.5", "all"])
def test_an_unknown_mode_is_refused_and_the_example_given_works(mode):
    with pytest.raises(ConfigError, match=r"whole, chunked:N .* or decode .* for example chunked:16"):
        parse_mode(mode, 40)


@pytest.fixture
def arrays(micro_checkpoint):
    with np.load(micro_checkpoint / "golden.npz") as stored:
        return dict(stored)


def changed(name, change):
    return lambda arrays: arrays | {name: change(arrays[name])}


def with_nan(logits):
    logits = logits.copy()
    logits[1, 1] = np.nan
    return logits


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda arrays: {"token_ids": arrays["token_ids"]}, "has no array logits; it holds token_ids"),
        (lambda arrays: {}, "no array token_ids and no logits; it holds nothing"),
        (changed("token_ids", lambda ids: ids.astype(float)), "token_ids is float64"),
        (changed("token_ids", lambda ids: ids[:, None]), "it must be integers"),
        (changed("token_ids", lambda ids: ids[:0]), "it must be integers"),
        (changed("token_ids", lambda ids: ids - ids.max() - 1), "token_ids run from"),
        (changed("token_ids", lambda ids: ids + 10**6), "token_ids run from"),
        (changed("token_ids", lambda ids: ids[:-1]), "one row per token id"),
        (changed("logits", lambda logits: logits[:, :-1]), "one row per token id"),
        (changed("logits", lambda logits: logits[0]), "one row per token id"),
        (changed("logits", lambda logits: logits.astype(int)), "it must be floating point"),
        (changed("logits", with_nan), "not finite"),
    ],
)
def test_a_wrong_golden_file_is_refused_and_named(micro_checkpoint, arrays, tmp_path, change, named):
    file = tmp_path / "golden.npz"
    np.savez(file, **change(arrays))
    with pytest.raises(ConfigError, match=named) as caught:
        read_golden(file, load_model_config(micro_checkpoint))
    assert str(file) in str(caught.value)


def test_a_file_that_is_no_npz_is_refused(micro_checkpoint, tmp_path):
    config = load_model_config(micro_checkpoint)
    whole = (micro_checkpoint / "golden.npz").read_bytes()
    contents = {"cut.npz": whole[: len(whole) // 2], "text.npz": b"hello", "empty.npz": b""}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    np.save(tmp_path / "plain.npy", np.zeros(3))
    for name in (*contents, "plain.npy", "."):
        with pytest.raises(ConfigError, match="cannot be read as an"):
            read_golden(tmp_path / name, config)
    with pytest.raises(ConfigError, match="does not exist"):
        read_golden(tmp_path / "absent.npz", config)


def test_a_damaged_member_of_the_file_is_refused(micro_checkpoint, arrays, tmp_path):
    file = tmp_path / "golden.npz"
    np.savez_compressed(file, **arrays)
    content = bytearray(file.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 64] = bytes(64)
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="cannot be read as an"):
        read_golden(file, load_model_config(micro_checkpoint))


def test_logits_that_are_not_finite_are_an_error_and_not_a_figure(micro_checkpoint, monkeypatch):
    def broken(model, token_ids, mode):
        logits = torch.zeros(len(token_ids), model.config.vocab_size)
        logits[3, 2] = float("nan")
        return logits

    monkeypatch.setattr("perilune.verify.logits.replay_logits", broken)
    with pytest.raises(CheckpointError, match="logits of position 3 are not finite"):
        verify_logits(micro_checkpoint, micro_checkpoint / "golden.npz")


def test_an_unknown_dtype_is_refused(micro_checkpoint):
    with pytest.raises(ConfigError, match="float32, bfloat16"):
        verify_logits(micro_checkpoint, micro_checkpoint / "golden.npz", EngineConfig(dtype="float16"))


def test_the_command_prints_the_measures_as_json_and_as_a_table(micro_checkpoint):
    arguments = ["logits", str(micro_checkpoint), "--golden", str(micro_checkpoint / "golden.npz")]
    names = ["num_positions", "relative_error", "max_position_error", "mean_kl", "argmax_regret"]
    result = CliRunner().invoke(app, [*arguments, "--json", "--mode", "chunked:16"])
    assert result.exit_code == 0
    report = json.loads(result.output)
    assert list(report) == names
    assert report["relative_error"] <= TOLERANCE
    table = CliRunner().invoke(app, arguments).output
    assert [line.split()[0] for line in table.splitlines()] == names
    rounded = CliRunner().invoke(app, [*arguments, "--json", "--dense-weights", "fp8", "--backend", "reference"])
    assert 0.1 < json.loads(rounded.output)["relative_error"] < 2


def test_the_command_passes_errors_on_and_refuses_unknown_flags(micro_checkpoint):
    arguments = ["logits", str(micro_checkpoint), "--golden", str(micro_checkpoint / "golden.npz")]
    assert isinstance(CliRunner().invoke(app, [*arguments, "--mode", "none"]).exception, ConfigError)
    assert CliRunner().invoke(app, [*arguments, "--chunk", "3"]).exit_code == 2
    assert CliRunner().invoke(app, ["logits", str(micro_checkpoint)]).exit_code == 2

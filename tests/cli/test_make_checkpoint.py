import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from perilune.checkpoint.loader import load_state
from perilune.cli.make_checkpoint import (
    DEMO_RANK_FILE,
    make_checkpoint_command,
    write_random_checkpoint,
    write_rank_file,
)
from perilune.config.parse import load_model_config
from perilune.config.presets import preset_config
from perilune.errors import CapacityError, CheckpointError, ConfigError, PeriluneError
from perilune.text.rank_file import read_rank_file
from perilune.text.tokenizer import Tokenizer
from tests.goldens.oracle import Oracle

app = typer.Typer()
app.command()(make_checkpoint_command)
SMALL = ("--hidden-size", 64, "--heads", 1, "--layers", 4, "--experts", 4, "--dense-size", 64, "--expert-size", 32)


def run(*args):
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    if isinstance(result.exception, PeriluneError):
        raise result.exception
    return result


@pytest.mark.parametrize("arch", ["k3", "k31"])
@pytest.mark.parametrize("vision", [(), ("--vision",)])
def test_the_checkpoint_loads_and_has_what_was_asked_for(tmp_path, arch, vision):
    out = tmp_path / "new" / "checkpoint"
    assert run("--out", out, "--arch", arch, *vision, *SMALL).exit_code == 0
    config = load_model_config(out)
    assert (config.arch, config.hidden_size, config.num_hidden_layers) == (arch, 64, 4)
    assert (config.kda.num_heads, config.moe.num_experts, config.moe.moe_intermediate_size) == (1, 4, 32)
    assert (config.indexer is not None, config.vision is not None) == (arch == "k31", bool(vision))
    assert load_state(out, config, check_scales=True)


def test_the_tokenizer_agrees_with_the_configuration(tmp_path):
    run("--out", tmp_path / "c", *SMALL)
    tokenizer = Tokenizer.load(tmp_path / "c")
    config = load_model_config(tmp_path / "c")
    assert tokenizer.vocab_size == config.vocab_size
    assert tokenizer.num_ranks == len(read_rank_file(DEMO_RANK_FILE))


def test_random_weights_give_lively_finite_logits(tmp_path):
    config = preset_config("tiny", "k31", has_vision=False, sizes={"num_hidden_layers": 4, "vocab_size": 512})
    write_random_checkpoint(tmp_path, config, seed=3)
    logits = Oracle(tmp_path).forward(np.arange(24))
    assert np.isfinite(logits).all()
    assert 0.5 < logits.std() < 2
    assert len(set(logits.argmax(-1))) > 12


@pytest.mark.parametrize("num_ranks", [256, 300, 1792, 3000])
def test_the_rank_file_is_cut_or_extended_to_the_vocabulary(tmp_path, num_ranks):
    write_rank_file(tmp_path / "tiktoken.model", num_ranks + 256)
    ranks, demo = read_rank_file(tmp_path / "tiktoken.model"), read_rank_file(DEMO_RANK_FILE)
    assert len(ranks) == num_ranks
    common = min(num_ranks, len(demo))
    assert {token for token, rank in ranks.items() if rank < common} == {t for t, r in demo.items() if r < common}
    assert all(demo[token] == rank for token, rank in ranks.items() if rank < common)


def test_no_text_is_encoded_to_an_added_rank(tmp_path):
    demo = read_rank_file(DEMO_RANK_FILE)
    write_rank_file(tmp_path / "tiktoken.model", 16384)
    tokenizer = Tokenizer.from_ranks(read_rank_file(tmp_path / "tiktoken.model"))
    text = "The moon <2000> and <16127>, <<3000>> x<4000>y"
    assert max(tokenizer.encode(text)) < len(demo)
    assert tokenizer.decode([2000, 16127]) == "<2000><16127>"


def test_an_occupied_directory_is_left_alone(tmp_path):
    (tmp_path / "precious").write_text("")
    with pytest.raises(CheckpointError, match=r"--out .* exists and is not an empty directory"):
        run("--out", tmp_path, *SMALL)
    assert [file.name for file in tmp_path.iterdir()] == ["precious"]


def test_sizes_that_cannot_be_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="--vocab-size is 300; allowed: at least 512"):
        run("--out", tmp_path / "c", "--vocab-size", 300)
    with pytest.raises(ConfigError, match=r"num_experts_per_token is 4; allowed: at most num_experts, 3"):
        run("--out", tmp_path / "c", "--experts", 3)
    assert not (tmp_path / "c").exists()


def test_a_checkpoint_larger_than_the_disk_is_refused_before_writing(tmp_path):
    with pytest.raises(CapacityError, match=r"needs .* bytes, but .* free"):
        run("--preset", "k3-slice", "--experts", 10_000_000, "--out", tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_an_unknown_preset_or_architecture_is_a_usage_error(tmp_path):
    for flag, value, allowed in (("--preset", "huge", "k3-slice"), ("--arch", "k4", "k31")):
        result = run("--out", tmp_path / "c", flag, value)
        assert result.exit_code == 2
        assert allowed in result.output

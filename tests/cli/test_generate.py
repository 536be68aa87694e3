"""`perilune generate` on a tiny checkpoint."""

import typer
from typer.testing import CliRunner

from perilune.cli.generate import generate_command
from perilune.errors import PeriluneError

app = typer.Typer()
app.command()(generate_command)
SMALL = ("--dtype", "float32", "--max-model-len", "1024", "--threads", "1", "--seed", "3")


def generate(*arguments):
    result = CliRunner().invoke(app, [*map(str, arguments), *SMALL])
    assert result.exception is None, result.exception
    return result


def test_a_text_is_continued_and_a_seed_repeats_it(tiny_checkpoint):
    arguments = (tiny_checkpoint, "--prompt", "The moon", "--max-tokens", 6)
    first = generate(*arguments)
    assert first.stdout.strip()
    assert "cut" in first.stderr
    assert generate(*arguments).stdout == first.stdout


def test_reasoning_and_answer_go_to_different_places(tiny_checkpoint):
    result = generate(tiny_checkpoint, "--chat", "hello", "--max-tokens", 6)
    assert result.stdout == ""
    assert len(result.stderr.strip().splitlines()) >= 2
    answer = generate(tiny_checkpoint, "--chat", "hello", "--max-tokens", 6, "--effort", "none")
    assert answer.stdout.strip()


def test_a_system_message_and_a_stop_text_have_an_effect(tiny_checkpoint):
    arguments = (tiny_checkpoint, "--chat", "hello", "--max-tokens", 12, "--effort", "none")
    plain = generate(*arguments).stdout.rstrip("\n")
    assert generate(*arguments, "--system", "Be brief.").stdout.rstrip("\n") != plain
    middle = plain[len(plain) // 2]
    stopped = generate(*arguments, "--stop", middle)
    assert stopped.stdout.rstrip("\n") == plain[: plain.index(middle)]
    assert "cut" not in stopped.stderr


def test_quantised_weights_and_activations_are_an_option_and_change_the_text(tiny_checkpoint):
    arguments = (tiny_checkpoint, "--prompt", "The moon", "--max-tokens", 12)
    texts = {
        generate(*arguments, *quantised).stdout
        for quantised in ([], ["--dense-weights", "fp8"], ["--dense-weights", "int8", "--activations", "int8"])
    }
    assert len(texts) == 3


def test_streamed_experts_give_the_same_text_and_too_small_a_cache_for_them_is_refused(tiny_checkpoint):
    arguments = (tiny_checkpoint, "--prompt", "The moon", "--max-tokens", 6)
    assert generate(*arguments, "--expert-cache-memory", "64M").stdout == generate(*arguments).stdout
    refused = CliRunner().invoke(app, [*map(str, arguments), *SMALL, "--expert-cache-memory", "1K"])
    assert isinstance(refused.exception, PeriluneError)
    assert "expert_cache_bytes is 1024" in str(refused.exception)

"""`perilune generate` on a tiny checkpoint."""

import re

import pytest
import typer
from typer.testing import CliRunner

from perilune.cli.generate import generate_command
from perilune.cli.options import read_size
from perilune.errors import ConfigError, PeriluneError

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


def test_the_least_memory_budget_that_is_named_works_and_one_byte_less_does_not(tiny_checkpoint):
    arguments = (tiny_checkpoint, "--prompt", "The moon", "--max-tokens", 6)

    def refusal(budget):
        refused = CliRunner().invoke(app, [*map(str, arguments), *SMALL, "--memory-budget", str(budget)])
        assert isinstance(refused.exception, PeriluneError)
        return str(refused.exception)

    least = int(re.search(r"raise memory_budget_bytes to at least (\d+)$", refusal(1))[1])
    assert f"raise memory_budget_bytes to at least {least}" in refusal(least - 1)
    assert generate(*arguments, "--memory-budget", str(least)).stdout == generate(*arguments).stdout


@pytest.mark.parametrize(
    ("text", "size"),
    [("512", 512), ("4K", 4096), ("4G", 2**32), ("4GiB", 2**32), ("4gib", 2**32), ("4GB", 4 * 10**9), ("1.5kb", 1500)],
)
def test_binary_and_decimal_sizes_are_told_apart(text, size):
    assert read_size(text, "--memory-budget") == size


@pytest.mark.parametrize("text", ["", "G", "4 GB", "4iB", "4XB", "-1", "4Gi"])
def test_other_sizes_are_refused_with_what_is_allowed(text):
    with pytest.raises(ConfigError, match=r"--memory-budget is .*4G = 4GiB = 4 \* 2\^30, 4GB = 4 \* 10\^9"):
        read_size(text, "--memory-budget")

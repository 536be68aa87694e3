import pytest
from typer.testing import CliRunner

from perilune.cache.spec import CacheGroupSpec
from perilune.cli.main import app
from perilune.config.engine import EngineConfig
from perilune.engine.memory import plan_cache
from perilune.planner.hardware import load_hardware
from perilune.planner.search import Question, search
from perilune.planner.settings import serve_options, settings_line


def groups(config):
    """As the model declares them."""
    kda, num_kda, num_full = config.kda, len(config.kda_layers), len(config.full_attn_layers)
    shape = (kda.num_heads, kda.head_dim, kda.head_dim)
    conv = (kda.short_conv_kernel_size - 1, 3 * kda.projection_size)
    return [
        CacheGroupSpec("state", "state", num_kda, shape, "float32"),
        CacheGroupSpec("conv", "state", num_kda, conv),
        CacheGroupSpec("latent", "paged", num_full, (config.mla.cache_width,)),
        CacheGroupSpec("keys", "paged", num_full, (config.indexer.head_dim,)),
    ]


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("question", [Question(1, 1000, 3), Question(1, 16, 600), Question(1, 262144, 2)])
def test_perilune_gives_the_asked_requests_their_place_with_these_options(k31, number, question):
    plan = search(k31, load_hardware("dual-epyc-turin"), question).plans[number]
    options = serve_options(plan, question)
    values = dict(zip(options[::2], options[1::2], strict=True))
    config = EngineConfig(
        dtype=values["--dtype"],
        max_model_len=int(values["--max-model-len"]),
        max_num_seqs=int(values["--max-num-seqs"]),
        cache_bytes=int(values["--cache-memory"]),
        state_cache_bytes=int(values["--state-cache-memory"]),
        max_num_batched_tokens=int(values.get("--max-num-batched-tokens", EngineConfig().max_num_batched_tokens)),
    )
    cache = plan_cache(
        config,
        groups(k31),
        model_dtype=values["--dtype"],
        max_position_embeddings=k31.max_position_embeddings,
        available_bytes=config.cache_bytes,
    )
    assert cache.max_model_len == question.context
    assert cache.num_slots == question.concurrency
    assert cache.num_blocks * cache.block_size >= question.concurrency * question.context
    assert cache.total_bytes == config.cache_bytes


def test_the_options_exist(k31):
    question = Question(1, 16, 600)
    plan = search(k31, load_hardware("dual-epyc-turin"), question).plans[0]
    line = settings_line(plan, question, "/models/k31")
    assert line.startswith("perilune serve /models/k31 --dtype bfloat16 --max-model-len 16 --max-num-seqs 600")
    known = CliRunner().invoke(app, ["serve", "--help"]).output
    assert all(option in known for option in line.split() if option.startswith("--"))


def test_vendor_engines_get_their_own_words(k31):
    question = Question(1, 4096, 2)
    plan = search(k31, load_hardware("mi355x"), question).plans[0]
    line = settings_line(plan, question)
    assert line.startswith("ATOM: tensor parallel 8, decode context parallel 8")
    assert "max model length 4096, max sequences 2" in line
    assert "online quantisation ptpc_fp8" in line
    assert "perilune" not in line


def test_a_layout_that_nobody_published_says_so(k3):
    plan = search(k3, load_hardware("mi325x"), Question()).plans[0]
    assert "layout not published" in settings_line(plan, Question())


def test_every_settings_text_of_every_profile_can_be_filled(k3):
    for name, nodes in (("h200", 2), ("b200", 2), ("mtt-s5000", 4), ("ascend-950dt", 4), ("rtx-pro-6000", 1)):
        question = Question(nodes)
        for plan in search(k3, load_hardware(name), question).plans:
            assert "{" not in settings_line(plan, question)

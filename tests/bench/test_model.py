import json

import pytest

from perilune.bench.ceilings import Work
from perilune.bench.model import FIRST_PROMPT, ModelBench, Run, weights_of
from perilune.bench.report import decode_need, flops_ceiling, make_report, prefill_need, render_report
from perilune.bench.spread import Spread
from perilune.config.engine import EngineConfig
from perilune.config.parse import load_model_config
from perilune.errors import ConfigError
from perilune.models.accounting import Flops, account, decode_flops, prefill_flops, step_weight_bytes

FLOAT32 = EngineConfig(dtype="float32")


@pytest.fixture
def bench(micro_checkpoint, native_core):
    return ModelBench(micro_checkpoint, FLOAT32)


def a_run(**changes):
    values = {
        "context": 0,
        "tokens": 8,
        "batch": 1,
        "step_s": Spread(0.5, 0.4, 0.6),
        "mean_s": 0.5,
        "python_share": 0.25,
        "native_shares": {"linear": 0.25, "moe_experts": 0.495, "situ": 0.005},
        "reads": None,
        "load_s": 1.0,
        "first_token_s": 2.0,
        "first_prompt": 1,
        "peak_rss_bytes": 10**9,
        "others_cores": 0.0,
    }
    return Run(**(values | changes))


def test_decode_times_as_many_steps_as_asked(bench):
    run = bench.decode(context=20, num_tokens=3, batch=2)
    assert (run.context, run.tokens, run.batch) == (20, 3, 2)
    assert 0 < run.step_s.low <= run.step_s.median <= run.step_s.high
    assert run.first_token_s > run.load_s > 0
    assert 0 <= run.python_share <= 1
    assert sum(run.native_shares.values()) == pytest.approx(1 - run.python_share)
    assert run.peak_rss_bytes > 1e6


def test_reads_are_measured_between_blocks_of_steps(micro_checkpoint, native_core, monkeypatch):
    rates = iter([[1e9], [3e9], [5e9], [9e9]])
    bench = ModelBench(micro_checkpoint, FLOAT32, lambda: next(rates))
    assert bench.decode(context=0, num_tokens=20, batch=1).reads == Spread(3e9, 1e9, 5e9)
    assert bench.prefill(5, repeats=1).reads == Spread(9e9, 9e9, 9e9)
    monkeypatch.setattr("perilune.bench.model.available_memory_bytes", lambda: 10**9)
    assert bench.decode(context=0, num_tokens=9, batch=1).reads is None


def test_prefill_times_whole_prompts(bench):
    run = bench.prefill(30, repeats=2)
    assert (run.context, run.tokens, run.batch, run.first_prompt) == (0, 30, 1, min(30, FIRST_PROMPT))
    assert run.step_s.low <= run.mean_s <= run.step_s.high


def test_more_tokens_than_the_model_can_take_are_refused(bench):
    longest = bench.text_config.max_position_embeddings
    with pytest.raises(ConfigError, match=str(longest)):
        bench.decode(context=longest, num_tokens=3, batch=1)


@pytest.mark.parametrize("dense_weights", ["stored", "int8"])
def test_the_bytes_that_are_counted_are_those_that_the_model_holds(micro_checkpoint, dense_weights):
    config = EngineConfig(dtype="bfloat16", dense_weights=dense_weights)
    bench, text = ModelBench(micro_checkpoint, config), load_model_config(micro_checkpoint)
    held = sum(tensor.nbytes for tensor in weights_of(bench.model)) - bench.model.model.embed_tokens.weight.nbytes
    # many tokens meet every expert
    counted = step_weight_bytes(text, 10_000, is_quantised=dense_weights != "stored")
    padding = 4 * len(text.kda_layers) * (text.kda.stored_a_log_size - text.kda.num_heads)
    assert held in (counted, counted + padding)


def test_one_token_reads_its_experts_and_more_tokens_more_of_them(released_configs):
    k3 = released_configs["k3"]
    assert step_weight_bytes(k3, 1) == pytest.approx(account(k3).decode_weight_bytes)
    experts = 92 * 896 * 17547264
    assert step_weight_bytes(k3, 2) - step_weight_bytes(k3, 1) == pytest.approx(experts * 16 / 896 * (1 - 16 / 896))


def test_a_batch_reads_weights_once_and_every_sequences_own_rows(released_configs):
    k3 = released_configs["k3"]
    one = decode_need(k3, EngineConfig(), "bfloat16", a_run(context=1000, tokens=2))
    four = decode_need(k3, EngineConfig(), "bfloat16", a_run(context=1000, tokens=2, batch=4))
    own = 24 * 1002 * 1152 + 69 * (6291456 + 221184)
    assert one.read_bytes == pytest.approx(step_weight_bytes(k3, 1) + own)
    assert four.read_bytes == pytest.approx(step_weight_bytes(k3, 4) + 4 * own)
    assert (four.tokens, four.flops.total) == (4, 4 * decode_flops(k3, 1002).total)


def test_packed_rows_are_counted_as_they_lie_in_memory(released_configs):
    k31 = released_configs["k31"]
    run = a_run(context=9999, tokens=2)
    plain = decode_need(k31, EngineConfig(), "bfloat16", run).read_bytes
    config = EngineConfig(cache_dtype="fp8", index_cache_dtype="mxfp4")
    packed = decode_need(k31, config, "bfloat16", run).read_bytes
    layers = len(k31.full_attn_layers)
    # latents of 512 with four scales and the shared part of 64 in bfloat16; keys of 128
    assert plain - packed == layers * (k31.indexer.topk * (1152 - 656) + 10001 * (256 - 68))


def test_a_prompt_reads_weights_in_every_step_of_the_engine(released_configs):
    k3 = released_configs["k3"]
    need = prefill_need(k3, EngineConfig(max_num_batched_tokens=256), "bfloat16", a_run(tokens=1000))
    state = 69 * (6291456 + 221184)
    assert need.read_bytes == pytest.approx(4 * (step_weight_bytes(k3, 256) + state) + 1000 * 27648)
    assert need.tokens == 1000


def test_operations_of_a_prompt_are_those_of_its_tokens_with_one_row_of_logits(released_configs):
    k3 = released_configs["k3"]
    head = 2 * 7168 * 163840
    short, long = prefill_flops(k3, 1), prefill_flops(k3, 3)
    assert long.others - short.others == 2 * (decode_flops(k3, 1).others - head)
    attention = 24 * 96 * 2 * (192 + 128)
    assert long.mixers - 3 * short.mixers == attention * (1 + 2 + 3 - 3)


def test_every_kind_of_product_has_its_own_ceiling(ceilings):
    flops = Flops(experts=4 * 10**11, projections=2 * 10**11, others=10**11, mixers=10**11)
    exact = flops_ceiling(flops, ceilings, EngineConfig(), "bfloat16")
    assert exact == pytest.approx(2e11)
    experts = flops_ceiling(flops, ceilings, EngineConfig(activations="int8"), "bfloat16")
    assert experts == pytest.approx(8e11 / 3)
    both = flops_ceiling(flops, ceilings, EngineConfig(activations="int8", dense_weights="int8"), "bfloat16")
    assert both == pytest.approx(8e11 / 2.5)


def test_the_report_names_the_bound_that_takes_longer(released_configs, ceilings):
    k3, run = released_configs["k3"], a_run(context=100)
    need = decode_need(k3, EngineConfig(), "bfloat16", run)
    report = make_report("k3", EngineConfig(), "bfloat16", run, need, ceilings)
    assert report.bound == "memory"
    assert report.share_of_ceiling == pytest.approx(need.read_bytes / 1e10 / 0.5)
    assert report.tokens_per_second == 2
    assert report.bytes_per_token == need.read_bytes
    assert Work(need.read_bytes, need.flops.total).ideal_s(ceilings)["memory"] == need.read_bytes / 1e10
    text = render_report(report)
    assert "1 sequence(s) behind 100 cached tokens whose rows and states are random" in text
    assert "25.0%; inside: moe_experts 50%, linear 25%\n" in text


def test_the_json_is_flat_and_has_the_agreed_keys(released_configs, ceilings):
    run = a_run()
    need = decode_need(released_configs["k3"], EngineConfig(), "bfloat16", run)
    report = make_report("k3", EngineConfig(), "bfloat16", run, need, ceilings)
    values = json.loads(json.dumps(report.as_json(), allow_nan=False))
    agreed = {"tokens_per_second", "bytes_per_token", "read_ceiling", "share_of_ceiling", "flops_ceiling"}
    agreed |= {"python_share", "load_s", "first_token_s", "peak_rss_bytes"}
    assert agreed <= set(values)
    assert values["step_s"] == {"median": 0.5, "low": 0.4, "high": 0.6}
    assert values["ceilings"]["isa"] == "wide"

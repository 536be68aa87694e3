import pytest
import torch

from perilune.bench import engine as engine_module
from perilune.bench.engine import BenchEngine
from perilune.config.engine import EngineConfig
from perilune.engine.build import load_model
from perilune.errors import CapacityError, CheckpointError
from perilune.models.dsa import KEY_GROUP
from perilune.models.mla import LATENT_GROUP
from perilune.ops.packed_rows.layout import is_packed
from perilune.ops.packed_rows.reference import unpack


@pytest.fixture(scope="module")
def model(micro_checkpoint):
    return load_model(micro_checkpoint, EngineConfig(dtype="float32"))


def test_a_request_behind_a_context_decodes_its_first_token_at_once(model):
    engine = BenchEngine(model, EngineConfig(), num_seqs=2, max_len=60)
    engine.fill_cache()
    for name in ("a", "b"):
        engine.add_behind(name, 40)
    outputs = engine.step()
    assert [(output.num_prompt_tokens, output.num_output_tokens) for output in outputs] == [(41, 1), (41, 1)]
    for _ in range(15):
        engine.redraw_tokens()
        engine.step_or_raise()
    engine.check_integrity()
    assert engine.stats().num_running == 2


@pytest.mark.parametrize("rows", [("auto", "auto"), ("fp8", "fp8"), ("int8", "int8"), ("int8", "mxfp4")])
def test_a_filled_cache_holds_rows_that_differ_and_are_as_real_ones(micro_checkpoint, rows):
    config = EngineConfig(dtype="float32", cache_dtype=rows[0], index_cache_dtype=rows[1])
    packed = load_model(micro_checkpoint, config)
    engine = BenchEngine(packed, config, num_seqs=1, max_len=100)
    engine.fill_cache()
    text, views = packed.config, engine._storage.views
    for name, scaled in ((LATENT_GROUP, text.mla.kv_lora_rank), (KEY_GROUP, text.indexer.head_dim)):
        pool = views[name]
        read = unpack(pool.view(torch.uint8), pool.dtype, scaled) if is_packed(pool.dtype) else pool
        assert read.std().item() == pytest.approx(1, abs=0.1)
        assert len(read.flatten(0, -2).unique(dim=0)) == read.flatten(0, -2).shape[0]
    engine.add_behind("a", 80)
    engine.step_or_raise()


def test_without_a_context_a_sequence_begins_with_one_token(model):
    engine = BenchEngine(model, EngineConfig(), num_seqs=1, max_len=8)
    engine.add_behind("a", 0)
    (output,) = engine.step()
    assert (output.num_prompt_tokens, output.num_output_tokens) == (1, 1)


def test_a_prompt_ends_with_its_first_token_and_goes_in_the_configured_steps(model):
    engine = BenchEngine(model, EngineConfig(max_num_batched_tokens=16), num_seqs=1, max_len=41)
    engine.add_prompt(40)
    steps = 0
    while engine.has_work:
        engine.step_or_raise()
        steps += 1
    assert steps == 3


def test_the_next_tokens_are_drawn_anew(model):
    engine = BenchEngine(model, EngineConfig(), num_seqs=1, max_len=60)
    engine.add_behind("a", 0)
    seen = set()
    for _ in range(20):
        engine.step_or_raise()
        engine.redraw_tokens()
        seen.add(engine._live["a"].request.token_ids[-1])
    assert len(seen) > 10


def test_a_failed_step_raises(model):
    engine = BenchEngine(model, EngineConfig(), num_seqs=1, max_len=60)
    engine.fill_cache()
    for view in engine._storage.views.values():
        view.fill_(float("nan"))
    engine.add_behind("a", 20)
    with pytest.raises(CheckpointError, match="NaN"):
        engine.step_or_raise()


def test_a_cache_larger_than_the_memory_is_refused(model, monkeypatch):
    monkeypatch.setattr(engine_module, "available_memory_bytes", lambda: 1000)
    with pytest.raises(CapacityError, match="fewer sequences"):
        BenchEngine(model, EngineConfig(), num_seqs=2, max_len=60)

"""The law of replayed steps: they give what the model gives, to the bit, whatever happens between them."""

import random

import pytest
import torch

from perilune.config.engine import EngineConfig
from perilune.config.parse import load_model_config
from perilune.engine.build import assemble_engine, load_model
from perilune.engine.request import FinishReason, GenerateRequest
from perilune.engine.steps.replay import ReplayedSteps, _Step
from perilune.ops import _native
from perilune.ops.packed_rows.layout import DTYPES
from perilune.ops.registry import apply_overrides
from perilune.sampling.params import SamplingParams

needs_core = pytest.mark.skipif(_native.absence() is not None, reason=str(_native.absence()))


@pytest.fixture(scope="module", params=["k31-micro", "k3-tiny", "k31-tiny"])
def directory(request, micro_checkpoint):
    if request.param == micro_checkpoint.name:
        return micro_checkpoint
    return request.getfixturevalue("goldens_dir") / request.param


def settings(**changed):
    return EngineConfig(**{"dtype": "float32", "num_blocks": 400, "max_model_len": 400, "block_size": 4, **changed})


@pytest.fixture
def replays(monkeypatch):
    """The keys of all steps that were replayed."""
    found = []
    run = _Step.run

    def counted(self, sequences, block_size):
        found.append((len(sequences), self.batch.block_table.shape[1], self.batch.longest))
        return run(self, sequences, block_size)

    monkeypatch.setattr(_Step, "run", counted)
    return found


def coming_and_going(core, vocab_size):
    """Requests that join while others run, end at other times, and one that leaves: tokens and log-probabilities."""
    chosen, outputs, step = random.Random(5), {}, 0
    waiting = [(0, 3, 40), (0, 1, 70), (5, 9, 12), (30, 17, 60), (31, 2, 90), (60, 30, 5), (80, 1, 60)]
    while core.has_work or waiting:
        while waiting and waiting[0][0] <= step:
            _, length, max_tokens = waiting.pop(0)
            prompt = tuple(chosen.randrange(vocab_size) for _ in range(length))
            params = SamplingParams(temperature=0.8, seed=step, max_tokens=max_tokens, ignore_eos=True, logprobs=2)
            core.add(GenerateRequest(f"{step}-{length}", prompt, params))
        if step == 50:
            assert core.abort("31-2") is not None
        for output in core.step():
            assert output.finish_reason is not FinishReason.ERROR, output.error
            outputs.setdefault(output.request_id, []).append((output.token_ids, output.logprobs))
        core.check_integrity()
        step += 1
    return outputs


def both_ways(model, config, monkeypatch):
    """The same work replayed and run by the model each time, and the caches at the end."""
    found = []
    for is_replayed in (True, False):
        with monkeypatch.context() as patch:
            if not is_replayed:
                patch.setattr(ReplayedSteps, "run", lambda self, plan, build: None)
            core = assemble_engine(model, None, config)
            outputs = coming_and_going(core, model.config.vocab_size)
            found.append((outputs, core._runner._storage.views, core.stats()))
    return found


def assert_equal_to_the_bit(replayed, direct):
    assert replayed[0] == direct[0]
    for name, view in direct[1].items():
        assert torch.equal(replayed[1][name].view(torch.uint8), view.view(torch.uint8)), name


@needs_core
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replayed_steps_equal_the_models_while_requests_come_and_go(directory, dtype, replays, monkeypatch):
    config = settings(dtype=dtype)
    model = load_model(directory, config)
    replayed, direct = both_ways(model, config, monkeypatch)
    assert_equal_to_the_bit(replayed, direct)
    assert len(replays) > 50
    sizes, widths, longest = map(set, zip(*replays, strict=True))
    assert len(sizes) > 3
    assert len(widths) > 1, "no block table grew"
    assert len({model.way(rows) for rows in longest}) == (1 if model.config.indexer is None else 2)


@needs_core
def test_replayed_steps_equal_the_models_under_preemption(directory, replays, monkeypatch):
    config = settings(num_blocks=26, max_model_len=100)
    replayed, direct = both_ways(load_model(directory, config), config, monkeypatch)
    assert replayed[2].num_preemptions_total == direct[2].num_preemptions_total > 0
    assert_equal_to_the_bit(replayed, direct)
    assert len(replays) > 50


@needs_core
def test_replayed_steps_equal_the_models_with_quantised_weights(directory, replays, monkeypatch):
    config = settings(dtype="bfloat16", dense_weights="int8", activations="int8")
    replayed, direct = both_ways(load_model(directory, config), config, monkeypatch)
    assert_equal_to_the_bit(replayed, direct)
    assert len(replays) > 50


@needs_core
@pytest.mark.parametrize("rows", [("fp8", "fp8"), ("int8", "int8"), ("int8", "mxfp4")])
def test_replayed_steps_equal_the_models_with_packed_rows(directory, rows, replays, monkeypatch):
    has_index = load_model_config(directory).indexer is not None
    if not has_index and rows[1] == "mxfp4":
        pytest.skip("the model keeps no index keys")
    config = settings(dtype="bfloat16", cache_dtype=rows[0], index_cache_dtype=rows[1] if has_index else "auto")
    replayed, direct = both_ways(load_model(directory, config), config, monkeypatch)
    assert_equal_to_the_bit(replayed, direct)
    assert any(view.dtype in DTYPES for view in direct[1].values()), "no group is packed"
    assert len(replays) > 50


@pytest.mark.parametrize("op", ["linear_group", "mla_decode", "store_rows", "add_rows"])
def test_steps_with_an_op_outside_the_core_are_run_by_the_model(micro_checkpoint, op, replays, monkeypatch):
    config = settings(ops={op: "reference"})
    model = load_model(micro_checkpoint, config)
    try:
        replayed, direct = both_ways(model, config, monkeypatch)
    finally:
        apply_overrides({})
    assert replayed[0] == direct[0]
    assert not replays


@needs_core
def test_only_the_latest_recordings_are_kept(micro_checkpoint, replays, monkeypatch):
    monkeypatch.setattr("perilune.engine.steps.replay._KEPT", 2)
    config = settings()
    replayed, direct = both_ways(load_model(micro_checkpoint, config), config, monkeypatch)
    assert_equal_to_the_bit(replayed, direct)
    assert len(set(replays)) > 2


@needs_core
def test_a_step_that_failed_is_recorded_again(micro_checkpoint, monkeypatch):
    config = settings()
    model = load_model(micro_checkpoint, config)
    core = assemble_engine(model, None, config)
    core.add(GenerateRequest("a", (1, 2, 3), SamplingParams(temperature=0.0, max_tokens=5)))
    core.step()
    with monkeypatch.context() as patch:
        patch.setattr(type(model), "forward", lambda self, batch: 1 / 0)
        (output,) = core.step()
        assert "ZeroDivisionError" in output.error
    core.add(GenerateRequest("b", (1, 2, 3), SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)))
    while core.has_work:
        assert all(output.error is None for output in core.step())
    assert core._runner._replayed._steps

"""The laws of the whole engine, on the real modules with tiny weights."""

import random

import pytest
import torch

from perilune.checkpoint.loader import load_state
from perilune.config.engine import EngineConfig
from perilune.engine import build
from perilune.engine.build import assemble_engine, build_engine, load_model
from perilune.engine.request import FinishReason, GenerateRequest
from perilune.errors import BackendError, CapacityError, CheckpointError, ConfigError
from perilune.platform import FreeMemory
from perilune.sampling.params import SamplingParams
from tests.engine.counting_model import run, tokens_of

ROOMY = EngineConfig(dtype="float32", num_blocks=200, max_model_len=200)


@pytest.fixture(scope="module", params=["k31-micro", "k3-tiny", "k31-tiny"])
def model(request, micro_checkpoint):
    if request.param == micro_checkpoint.name:
        return load_model(micro_checkpoint, ROOMY)
    return load_model(request.getfixturevalue("goldens_dir") / request.param, ROOMY)


def workload(vocab_size, **params):
    """Five requests of mixed lengths, drawn at random with seeds."""
    chosen = random.Random(3)
    return [
        GenerateRequest(
            f"r{index}",
            tuple(chosen.randrange(vocab_size) for _ in range(length)),
            SamplingParams(**{"temperature": 0.7, "seed": index, "max_tokens": 10, "ignore_eos": True, **params}),
        )
        for index, length in enumerate((1, 2, 16, 17, 45))
    ]


def generated(model, requests, config):
    core = assemble_engine(model, None, config)
    found = {request_id: tokens_of(outputs) for request_id, outputs in run(core, requests).items()}
    return found, core.stats()


def settings(**changed):
    return EngineConfig(**{"dtype": "float32", "num_blocks": 200, "max_model_len": 100, **changed})


@pytest.fixture(scope="module")
def alone(model):
    """The tokens of each request in an engine of its own."""
    found = {}
    for request in workload(model.config.vocab_size):
        found.update(generated(model, [request], ROOMY)[0])
    assert len(set(found.values())) == len(found)
    return found


@pytest.mark.parametrize(
    "config",
    [
        settings(),
        settings(max_num_batched_tokens=16),
        settings(max_num_batched_tokens=7, max_num_seqs=5, block_size=5),
        settings(block_size=1),
    ],
    ids=["batched", "chunked", "chunked-small", "block-1"],
)
def test_neither_batch_nor_chunks_change_what_a_request_gets(model, alone, config):
    assert generated(model, workload(model.config.vocab_size), config)[0] == alone


def test_preempted_equals_undisturbed(model, alone):
    config = settings(num_blocks=14, block_size=4, max_model_len=56, max_num_batched_tokens=64)
    found, stats = generated(model, workload(model.config.vocab_size), config)
    assert stats.num_preemptions_total > 0
    assert found == alone


@pytest.mark.parametrize("kind", ["paged", "state"])
def test_a_poisoned_cache_fails_its_request_alone_and_is_clean_for_the_next(model, alone, kind):
    config = settings(num_blocks=40, max_num_seqs=7, max_num_batched_tokens=200)
    core = assemble_engine(model, None, config)
    requests = workload(model.config.vocab_size)
    for request in requests:
        core.add(request)
    outputs = {request.request_id: [] for request in requests}

    def step():
        for output in core.step():
            outputs[output.request_id].append(output)

    step()
    step()
    poison(core, model, "r3", kind)
    while core.has_work:
        step()
        core.check_integrity()
    assert outputs["r3"][-1].finish_reason is FinishReason.ERROR
    assert "NaN" in outputs["r3"][-1].error
    spared = [request_id for request_id in outputs if request_id != "r3"]
    assert {request_id: tokens_of(outputs[request_id]) for request_id in spared} == {
        request_id: alone[request_id] for request_id in spared
    }
    again = run(core, requests)
    assert {request_id: tokens_of(found) for request_id, found in again.items()} == alone


def poison(core, model, request_id, kind):
    """Make everything that a running request has cached in the groups of one kind NaN."""
    cache, views = core._cache, core._runner._storage.views
    seats = cache.block_table(request_id) if kind == "paged" else [cache.state_slot(request_id)]
    for group in model.cache_groups():
        if group.kind == kind:
            views[group.name][:, list(seats)] = float("nan")


def test_a_checkpoint_becomes_an_engine_that_knows_its_limits(random_checkpoint):
    core = build_engine(random_checkpoint, settings(num_blocks=20, block_size=16, max_model_len=None))
    assert core.limits.max_model_len == 320
    assert core.limits.vocab_size == core.tokenizer.vocab_size == 640
    assert core.limits.eos_token_ids == core.tokenizer.eos_token_ids
    assert core.stats().blocks_total == 20


def test_the_engine_counts_its_blocks_free_after_mixed_ends(random_checkpoint):
    core = build_engine(random_checkpoint, settings())
    core.add(GenerateRequest("left", (1, 2, 3), SamplingParams()))
    core.step()
    assert core.abort("left").finish_reason is FinishReason.ABORT
    run(core, [GenerateRequest("done", (1, 2, 3), SamplingParams(max_tokens=3))])
    assert core.stats().blocks_used == core.stats().slots_used == 0


def test_a_directory_without_a_checkpoint_is_refused_by_name(tmp_path):
    with pytest.raises((CheckpointError, ConfigError), match=str(tmp_path)):
        build_engine(tmp_path, settings())


def test_a_cache_that_cannot_hold_a_request_is_refused(random_checkpoint):
    with pytest.raises(CapacityError, match="num_blocks is 1"):
        build_engine(random_checkpoint, settings(num_blocks=1))


def test_an_unknown_op_override_is_refused(random_checkpoint):
    with pytest.raises(BackendError, match="no_such_op"):
        build_engine(random_checkpoint, settings(ops={"no_such_op": "reference"}))


@pytest.mark.parametrize(("available", "dtype"), [(2**34, torch.float32), (2**20, torch.bfloat16)])
def test_a_model_that_is_large_beside_the_free_memory_stays_in_bfloat16(
    micro_checkpoint, monkeypatch, available, dtype
):
    monkeypatch.setattr(build, "free_memory", lambda: FreeMemory(available, "a test"))
    monkeypatch.setattr(build, "bfloat16_pays", lambda: False)
    small = EngineConfig(max_num_seqs=1, max_num_batched_tokens=1)
    assert load_model(micro_checkpoint, small).dtype is dtype


@pytest.mark.parametrize(("dense_weights", "values"), [("int8", torch.int8), ("fp8", torch.float8_e4m3fn)])
def test_a_quantised_engine_generates(random_checkpoint, dense_weights, values):
    core = build_engine(random_checkpoint, settings(dense_weights=dense_weights, activations="int8"))
    (outputs,) = run(core, [GenerateRequest("r", (5, 6, 7), SamplingParams(max_tokens=4, ignore_eos=True))]).values()
    assert len(tokens_of(outputs)) == 4
    model = load_model(random_checkpoint, settings(dense_weights=dense_weights))
    assert model.model.layers[1].self_attn.o_proj.weight.values.dtype is values


def test_int8_activations_without_a_weight_for_them_are_refused(random_checkpoint, monkeypatch):
    def unpacked(*args, **kwargs):
        state = load_state(*args, **kwargs)
        return {name: tensor for name, tensor in state.items() if "weight_packed" not in name}

    monkeypatch.setattr(build, "load_state", unpacked)
    with pytest.raises(ConfigError, match="set dense_weights to int8, or leave activations at exact"):
        load_model(random_checkpoint, settings(activations="int8"))

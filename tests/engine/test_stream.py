"""Engines whose experts stay on disk: tokens as from memory, a budget that holds, and files that fail."""

import os
import subprocess
import sys

import pytest
import torch

from perilune.checkpoint.streamed import find_experts
from perilune.cli.make_checkpoint import write_random_checkpoint
from perilune.config.engine import EngineConfig
from perilune.config.parse import load_model_config
from perilune.config.presets import preset_config
from perilune.engine.build import assemble_engine, load_model
from perilune.engine.request import FinishReason, GenerateRequest
from perilune.engine.steps.replay import _Step
from perilune.errors import CapacityError
from perilune.models.accounting import expert_floor_bytes, expert_slot_bytes
from perilune.ops import _native
from perilune.sampling.params import SamplingParams

needs_core = pytest.mark.skipif(_native.absence() is not None, reason=str(_native.absence()))
SIZES = {"vocab_size": 640, "num_experts": 24, "num_experts_per_token": 4, "num_hidden_layers": 5}


@pytest.fixture(scope="module", params=["k3", "k31"])
def checkpoint(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("streamed") / request.param
    write_random_checkpoint(directory, preset_config("tiny", request.param, has_vision=False, sizes=SIZES), seed=4)
    return directory


def settings(**changed):
    given = {"dtype": "float32", "num_blocks": 300, "max_model_len": 200, "max_num_batched_tokens": 32, "block_size": 4}
    return EngineConfig(**{**given, **changed})


def request(name, length, max_tokens=12, **params):
    prompt = tuple((37 * index + 11 * length) % 500 for index in range(length))
    return GenerateRequest(name, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True, **params))


def answers(core, requests):
    """What each request gave: tokens, log-probabilities and errors."""
    found = {}
    for each in requests:
        core.add(each)
    while core.has_work:
        for output in core.step():
            found.setdefault(output.request_id, []).append((output.token_ids, output.logprobs, output.error))
        core.check_integrity()
    return found


REQUESTS = [
    request("greedy", 5, 20, temperature=0.0, logprobs=1),
    request("chunked", 90, temperature=0.0, logprobs=1),
    request("drawn", 3, 25, temperature=0.9, seed=7),
    request("one", 1, 9, temperature=0.0),
]


@needs_core
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_slots", [4, 9, 40])
def test_answers_are_those_of_experts_in_memory(checkpoint, dtype, num_slots, monkeypatch):
    replayed, run = [], _Step.run
    monkeypatch.setattr(_Step, "run", lambda *given: replayed.append(1) or run(*given))
    budget = num_slots * expert_slot_bytes(load_model_config(checkpoint)) + 17
    resident = load_model(checkpoint, settings(dtype=dtype))
    streamed = load_model(checkpoint, settings(dtype=dtype, expert_cache_bytes=budget))
    expected = answers(assemble_engine(resident, None, settings(dtype=dtype)), REQUESTS)
    in_memory = len(replayed)
    found = answers(assemble_engine(streamed, None, settings(dtype=dtype)), REQUESTS)
    assert found == expected
    assert all(error is None for outputs in found.values() for _, _, error in outputs)
    assert len(replayed) == 2 * in_memory > 0, "decode steps are replayed as they are from memory"
    assert streamed.stream is not None
    assert budget - 17 == streamed.stream.num_bytes
    stats = streamed.stream.stats()
    assert 0 < stats.hits < stats.uses


@needs_core
def test_answers_are_the_same_with_8_bit_weights(checkpoint):
    changed = {"dtype": "bfloat16", "dense_weights": "int8", "activations": "int8"}
    budget = expert_floor_bytes(load_model_config(checkpoint))
    models = [load_model(checkpoint, settings(**changed, expert_cache_bytes=size)) for size in (None, budget)]
    expected, found = (answers(assemble_engine(model, None, settings(**changed)), REQUESTS) for model in models)
    assert found == expected


@needs_core
def test_a_shard_cut_off_while_serving_fails_the_requests_it_touches_alone(checkpoint, tmp_path):
    copied = tmp_path / "copied"
    subprocess.run(["cp", "-r", str(checkpoint), str(copied)], check=True)
    config = settings(expert_cache_bytes=expert_floor_bytes(load_model_config(checkpoint)))
    model = load_model(copied, config)
    requests = [request(f"{length}", length, 6, temperature=0.0) for length in range(1, 9)]
    expected = answers(assemble_engine(model, None, config), requests)

    places = find_experts(copied, model.config)
    file, begin, _ = max(places.places[1].flatten(0, 1).tolist(), key=lambda place: place[:2])
    shard, whole = places.files[file], open(places.files[file], "rb").read()  # noqa: SIM115
    os.truncate(shard, begin + 1)
    core = assemble_engine(model, None, config)
    found = answers(core, requests)
    failed = {name for name, outputs in found.items() if outputs[-1][2] is not None}
    assert 0 < len(failed) < len(requests)
    for name, outputs in found.items():
        if name in failed:
            assert f"{shard} ends at byte {begin + 1}" in outputs[-1][2]
            assert "download it again" in outputs[-1][2]
            assert outputs[:-1] == expected[name][: len(outputs) - 1]
        else:
            assert outputs == expected[name]
    with open(shard, "r+b") as stream:
        stream.write(whole)
    assert answers(core, requests) == expected, "a shard that is whole again serves again"


@needs_core
def test_a_failing_prompt_ends_with_its_first_piece(checkpoint, tmp_path):
    copied = tmp_path / "copied"
    subprocess.run(["cp", "-r", str(checkpoint), str(copied)], check=True)
    config = settings(expert_cache_bytes=expert_floor_bytes(load_model_config(checkpoint)))
    model = load_model(copied, config)
    for shard in find_experts(copied, model.config).files:
        os.truncate(shard, 100)
    core = assemble_engine(model, None, config)
    core.add(request("long", 100, temperature=0.0))
    (output,) = core.step()
    assert output.finish_reason is FinishReason.ERROR
    assert not core.has_work


def test_less_than_one_layer_of_one_token_is_refused_with_what_would_do(checkpoint):
    floor = expert_floor_bytes(load_model_config(checkpoint))
    with pytest.raises(CapacityError, match=f"give at least {floor}$"):
        load_model(checkpoint, settings(expert_cache_bytes=floor - 1))
    model = load_model(checkpoint, settings(expert_cache_bytes=floor))
    assert model.stream is None or model.stream.num_bytes in (0, floor)


_MEASURED = """
import sys
from pathlib import Path
from perilune.config.engine import EngineConfig
from perilune.engine.build import assemble_engine, load_model
from perilune.engine.request import GenerateRequest
from perilune.sampling.params import SamplingParams

def anonymous():
    return next(int(x.split()[1]) * 1024 for x in open("/proc/self/status") if x.startswith("RssAnon"))

config = EngineConfig(num_blocks=64, max_model_len=200, expert_cache_bytes=int(sys.argv[2]), dtype="bfloat16")
model = load_model(Path(sys.argv[1]), config)
core = assemble_engine(model, None, config)
before, highest = anonymous(), 0
for name, seed in (("a", 1), ("b", 2)):
    prompt = tuple(range(seed, 60 + seed))
    core.add(GenerateRequest(name, prompt, SamplingParams(temperature=1.0, seed=seed, max_tokens=40, ignore_eos=True)))
while core.has_work:
    core.step()
    highest = max(highest, anonymous())
print(highest - before, model.stream.stats().read_bytes)
"""


@needs_core
def test_memory_grows_by_the_budget_and_no_more(tmp_path):
    sizes = {**SIZES, "moe_intermediate_size": 512, "routed_expert_hidden_size": 512}
    write_random_checkpoint(tmp_path / "wide", preset_config("tiny", "k3", has_vision=False, sizes=sizes), seed=4)
    budget = 12 << 20
    given = [sys.executable, "-c", _MEASURED, str(tmp_path / "wide"), str(budget)]
    printed = subprocess.run(given, check=True, capture_output=True, text=True).stdout
    grown, read = map(int, printed.split())
    assert read > 60 << 20, "it read many times what it may hold"
    assert grown < budget + (10 << 20)  # scratch and what torch makes in a step


@needs_core
def test_pages_of_the_file_are_not_cached_twice(checkpoint):
    config = settings(expert_cache_bytes=expert_floor_bytes(load_model_config(checkpoint)))
    stream = load_model(checkpoint, config).stream
    assert stream is not None
    assert stream.is_direct or os.statvfs(checkpoint).f_type == 0x01021994
    assert torch.equal(stream.table(0)[3].w1_packed, stream.table(0)[3].w1_packed)

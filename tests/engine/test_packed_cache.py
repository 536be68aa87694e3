"""Caches of 8 and 4 bits: the engine's laws hold over them, they take the bytes they should, and cost what they may."""

import dataclasses

import pytest
import torch

from perilune.config.engine import EngineConfig
from perilune.engine.build import assemble_engine, load_model
from perilune.engine.memory import plan_cache
from perilune.engine.request import GenerateRequest
from perilune.errors import ConfigError
from perilune.models.accounting import cache_bytes_per_token
from perilune.sampling.params import SamplingParams
from perilune.verify.logits import verify_logits
from tests.engine.counting_model import run, tokens_of

FORMATS = [("fp8", "auto"), ("int8", "int8"), ("auto", "mxfp4"), ("fp8", "fp8")]
ACCOUNTED = {"auto": ("float32", "float32"), "fp8": ("fp8_ds_mla", "fp8"), "int8": ("int8", "int8")}


def settings(cache, index, **changed):
    given = {"dtype": "float32", "num_blocks": 60, "max_model_len": 100, "block_size": 4}
    return EngineConfig(**{**given, "cache_dtype": cache, "index_cache_dtype": index, **changed})


@pytest.fixture(scope="module", params=FORMATS, ids=lambda formats: "-".join(formats))
def formats(request):
    return request.param


@pytest.fixture(scope="module")
def model(formats, micro_checkpoint):
    return load_model(micro_checkpoint, settings(*formats))


def generated(model, requests, config):
    core = assemble_engine(model, None, config)
    return {request_id: tokens_of(outputs) for request_id, outputs in run(core, requests).items()}, core.stats()


def requests():
    return [
        GenerateRequest(
            f"r{length}",
            tuple(5 + i * length % 80 for i in range(length)),
            SamplingParams(temperature=0.7, seed=length, max_tokens=12, ignore_eos=True),
        )
        for length in (1, 2, 17, 45)
    ]


def test_batches_chunks_and_preemptions_change_nothing(model, formats):
    alone = {}
    for request in requests():
        alone |= generated(model, [request], settings(*formats))[0]
    assert generated(model, requests(), settings(*formats))[0] == alone
    assert generated(model, requests(), settings(*formats, max_num_batched_tokens=16))[0] == alone
    found, stats = generated(model, requests(), settings(*formats, num_blocks=25, max_model_len=60))
    assert stats.num_preemptions_total > 0
    assert found == alone


def test_the_cache_takes_the_bytes_of_its_formats(model, formats):
    plan = plan_cache(
        settings(*formats),
        model.cache_groups(),
        model_dtype="float32",
        max_position_embeddings=1000,
        available_bytes=1 << 40,
    )
    latent = ACCOUNTED[formats[0]][0]
    index = "mxfp4" if formats[1] == "mxfp4" else ACCOUNTED[formats[1]][1]
    assert plan.block_bytes == 4 * cache_bytes_per_token(model.config, latent, index)


@pytest.mark.parametrize("mode", ["whole", "decode"])
def test_packed_rows_cost_little_and_not_nothing(micro_checkpoint, formats, mode):
    config = EngineConfig(dtype="float32", cache_dtype=formats[0], index_cache_dtype=formats[1])
    report = verify_logits(micro_checkpoint, micro_checkpoint / "golden.npz", config, mode=mode)
    assert report.relative_error < 0.2
    if formats[0] != "auto":
        assert report.relative_error > 1e-4


def test_a_model_without_index_keys_has_no_format_for_them_and_the_remedy_is_true(micro_checkpoint):
    model = load_model(micro_checkpoint, settings("fp8", "auto")).config
    dense = dataclasses.replace(model, indexer=None)
    with pytest.raises(ConfigError, match="index_cache_dtype is 'fp8', and this model keeps no index keys: leave it"):
        settings("fp8", "fp8").check_index_cache(dense)
    settings("fp8", "auto").check_index_cache(dense)


def test_mxfp4_keys_need_whole_groups_and_the_remedy_is_true(micro_checkpoint):
    model = load_model(micro_checkpoint, settings("auto", "auto")).config
    odd = dataclasses.replace(model, indexer=dataclasses.replace(model.indexer, head_dim=48))
    with pytest.raises(
        ConfigError, match="multiple of 32 values, and this model's index keys have 48: use fp8 or int8"
    ):
        settings("auto", "mxfp4").check_index_cache(odd)
    settings("auto", "int8").check_index_cache(odd)


def test_zeroed_blocks_of_packed_rows_are_zero(model):
    core = assemble_engine(model, None, settings("auto", "auto"))
    storage = core._runner._storage
    for view in storage.views.values():
        view.fill_(1.0)
    storage.zero_blocks([1])
    for group in model.cache_groups():
        if group.kind == "paged":
            raw = storage.views[group.name].view(torch.uint8)
            assert not raw[:, 1].any()
            assert raw[:, 0].any()

"""The laws of the engine with pictures in the prompts, on the real modules with tiny weights."""

import random

import numpy as np
import pytest
import torch

from perilune.cli.make_checkpoint import write_random_checkpoint
from perilune.config.engine import EngineConfig
from perilune.config.media import MediaConfig
from perilune.config.presets import preset_config
from perilune.engine.build import assemble_engine, build_engine, load_model
from perilune.engine.request import FinishReason, GenerateRequest, ImageInput
from perilune.errors import ConfigError, RequestError
from perilune.sampling.params import SamplingParams
from tests.engine.counting_model import run, tokens_of
from tests.engine.guesses import Guesser, always_guess

CONFIG = preset_config("tiny", "k31", has_vision=True, sizes={"vocab_size": 640})
PAD = CONFIG.media_placeholder_token_id
# float32 rounds differently when products have other shapes
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoints") / "vision"
    write_random_checkpoint(directory, CONFIG, seed=2)
    return directory


@pytest.fixture(scope="module")
def model(checkpoint):
    return load_model(checkpoint, settings())


def settings(**changed):
    return EngineConfig(**{"dtype": "float32", "num_blocks": 400, "max_model_len": 400, **changed})


def picture(seed, rows, columns, start):
    patches = np.random.default_rng(seed).integers(0, 256, (rows * columns, 3, 14, 14), np.uint8)
    return ImageInput(start, rows * columns // 4, b"%d" % seed, rows, columns, patches)


def request(name, *parts, **params):
    """A prompt of runs of text tokens (their number) and pictures (seed, rows, columns)."""
    chosen, token_ids, images = random.Random(name), [], []
    for part in parts:
        if isinstance(part, int):
            token_ids += [chosen.randrange(5, 380) for _ in range(part)]
        else:
            images.append(picture(*part, start=len(token_ids)))
            token_ids += [PAD] * images[-1].num_tokens
    values = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True, "prompt_logprobs": 0, **params}
    return GenerateRequest(name, tuple(token_ids), SamplingParams(**values), images=tuple(images))


def workload():
    """A picture first, last, alone, between texts, two side by side, none; sizes differ."""
    return [
        request("first", (1, 4, 6), 9),
        request("last", 7, (2, 2, 2)),
        request("alone", (3, 6, 4)),
        request("between", 5, (4, 8, 8), 6, (1, 4, 6), 3),
        request("beside", 2, (5, 2, 4), (6, 10, 2), 2),
        request("text", 21),
    ]


def outcome(outputs):
    (logprobs,) = [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
    return tokens_of(outputs), torch.tensor([entry.logprob for entry in logprobs[1:]])


def generated(model, requests, **changed):
    core = assemble_engine(model, None, settings(**changed), MediaConfig())
    found = {name: outcome(outputs) for name, outputs in run(core, requests).items()}
    core.check_integrity()
    return found, core


@pytest.fixture(scope="module")
def alone(model):
    """Each request in an engine of its own, in one step."""
    return {item.request_id: generated(model, [item])[0][item.request_id] for item in workload()}


def assert_same(expected, found):
    assert found.keys() == expected.keys()
    for name, (tokens, logprobs) in expected.items():
        assert found[name][0] == tokens, name
        assert (found[name][1] - logprobs).abs().max() < TOLERANCE, name


def test_requests_with_pictures_are_batched_as_alone(model, alone):
    assert_same(alone, generated(model, workload())[0])


@pytest.mark.parametrize("budget", [16, 17, 40])
def test_a_picture_longer_than_a_step_is_computed_in_pieces_as_whole(model, alone, budget):
    assert_same(alone, generated(model, workload(), max_num_batched_tokens=budget)[0])


def test_a_request_that_was_preempted_within_its_pictures_goes_on_as_if_undisturbed(model, alone):
    found, core = generated(model, workload(), num_blocks=13, block_size=4, max_model_len=44, max_num_batched_tokens=16)
    assert_same(alone, found)
    assert core.stats().num_preemptions_total > 0


def test_what_a_picture_shows_changes_the_answer_only_where_it_is(model, alone):
    other = request("between", 5, (9, 8, 8), 6, (1, 4, 6), 3)
    _, logprobs = generated(model, [other])[0]["between"]
    expected = alone["between"][1]
    # entry i is of token i + 1 and saw tokens 0 to i
    assert torch.allclose(logprobs[:5], expected[:5], atol=TOLERANCE)
    assert (logprobs[5:] - expected[5:]).abs().max() > 0.1


def test_pictures_are_rows_of_the_tower_and_not_of_the_table(model, alone):
    text = GenerateRequest("first", workload()[0].prompt_token_ids, workload()[0].params)
    assert (generated(model, [text])[0]["first"][1] - alone["first"][1]).abs().max() > 0.1


def test_a_picture_that_was_seen_before_answers_the_same_without_the_tower(model, alone):
    core = assemble_engine(model, None, settings(), MediaConfig())
    encoder = core._runner._images
    first = outcome(run(core, [request("between", 5, (4, 8, 8), 6, (1, 4, 6), 3)])["between"])
    assert encoder.num_computed == 2
    again = outcome(run(core, [request("between", 5, (4, 8, 8), 6, (1, 4, 6), 3)])["between"])
    assert encoder.num_computed == 2
    assert (first[1] - again[1]).abs().max() < TOLERANCE
    assert first[0] == again[0] == alone["between"][0]


def test_a_picture_in_pieces_is_embedded_once_even_beyond_the_bound(model):
    core = assemble_engine(model, None, settings(max_num_batched_tokens=16, image_cache_bytes=1), MediaConfig())
    run(core, [request("large", 3, (4, 16, 16), 4)])
    encoder = core._runner._images
    assert encoder.num_computed == 1
    assert encoder.kept_bytes > 1


def test_a_cache_that_holds_no_two_pictures_only_costs_time(model, alone):
    found, core = generated(model, workload(), image_cache_bytes=1, max_num_batched_tokens=16)
    assert_same(alone, found)
    assert core._runner._images.num_computed >= 7


def test_guessed_tokens_change_no_answer_about_pictures(model, alone):
    core = assemble_engine(model, None, settings(speculative="ngram"), MediaConfig())
    tokens = {name: list(found[0]) for name, found in alone.items()}
    always_guess(core, Guesser(tokens, share_of_lies=0.3, vocab_size=380))
    assert_same(alone, {name: outcome(outputs) for name, outputs in run(core, workload()).items()})
    assert core.stats().drafts.num_accepted > 0


def steps_of(core, requests):
    """Which requests had news in each step."""
    for item in requests:
        core.add(item)
    found = []
    while core.has_work:
        found.append([(output.request_id, output.is_finished) for output in core.step()])
    return found


def test_while_a_picture_is_embedded_other_requests_are_answered(model, alone, monkeypatch):
    monkeypatch.setattr("perilune.models.vision.PAIRS_AT_ONCE", 64)
    monkeypatch.setattr("perilune.engine.core.LEAST_EMBEDDING_S", 0.0)
    monkeypatch.setattr("perilune.engine.core.MOST_EMBEDDING_S", 0.0)
    core = assemble_engine(model, None, settings(), MediaConfig())
    steps = steps_of(core, [request("large", 3, (4, 16, 16), 4), request("text", 21)])
    news = [name for step in steps for name, _ in step]
    assert news[:6] == ["text"] * 6
    assert news[6:] == ["large"] * 6
    assert len(steps) > 100


def test_two_pictures_of_a_prompt_are_embedded_before_they_are_reached(model, alone, monkeypatch):
    monkeypatch.setattr("perilune.engine.core.LEAST_EMBEDDING_S", 0.0)
    monkeypatch.setattr("perilune.engine.core.MOST_EMBEDDING_S", 0.0)
    assert_same(alone, generated(model, workload())[0])


def test_a_picture_that_cannot_be_embedded_ends_its_requests_and_no_other(model, alone):
    core = assemble_engine(model, None, settings(), MediaConfig())

    class Broken:
        def pieces(self, patches, grids):
            yield
            raise RuntimeError("worn out")

    core._runner._images._tower = Broken()
    outputs = run(core, workload())
    reasons = {name: items[-1].finish_reason for name, items in outputs.items()}
    assert reasons == {**dict.fromkeys(reasons, FinishReason.ERROR), "text": FinishReason.LENGTH}
    assert "could not be embedded (RuntimeError)" in outputs["first"][-1].error
    assert tokens_of(outputs["text"]) == alone["text"][0]
    core.check_integrity()


def test_a_picture_that_nobody_awaits_any_more_is_given_up(model, monkeypatch):
    monkeypatch.setattr("perilune.models.vision.PAIRS_AT_ONCE", 64)
    monkeypatch.setattr("perilune.engine.core.LEAST_EMBEDDING_S", 0.0)
    monkeypatch.setattr("perilune.engine.core.MOST_EMBEDDING_S", 0.0)
    core = assemble_engine(model, None, settings(), MediaConfig())
    core.add(request("large", 3, (4, 16, 16), 4))
    for _ in range(5):
        assert core.step() == []
    core.abort("large")
    assert not core.has_work
    run(core, [request("first", (1, 4, 6), 9)])
    encoder = core._runner._images
    assert encoder.num_computed == 1


def test_an_engine_whose_model_sees_no_pictures_refuses_them(random_checkpoint):
    core = build_engine(random_checkpoint, settings())
    with pytest.raises(RequestError, match="no vision weights"):
        core.add(workload()[0])


def test_a_tower_and_pictures_of_different_patches_are_refused_at_the_start(checkpoint, tmp_path):
    for file in checkpoint.iterdir():
        (tmp_path / file.name).symlink_to(file)
    name = "preprocessor_config.json"
    text = (tmp_path / name).read_text().replace('"patch_size": 14', '"patch_size": 16')
    (tmp_path / name).unlink()
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=r"patch_size and merge_kernel_size are 16 and 2; allowed .* 14 and 2"):
        build_engine(tmp_path, settings())


def test_a_checkpoint_with_a_tower_answers_text_and_pictures(checkpoint):
    core = build_engine(checkpoint, settings())
    assert core.limits.media == MediaConfig()
    outputs = run(core, workload())
    assert {name: items[-1].finish_reason for name, items in outputs.items()} == dict.fromkeys(
        [item.request_id for item in workload()], FinishReason.LENGTH
    )

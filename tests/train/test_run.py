import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from perilune.checkpoint.loader import load_state
from perilune.config.model import ModelConfig, NormEps
from perilune.config.parse import load_model_config
from perilune.models.inputs import ForwardBatch
from perilune.models.model import build_model
from train import export as export_module
from train.export import CURVE_FILE, export
from train.indexer import IndexerTeacher
from train.model import demo_config, initialised_model
from train.run import INDEXING, LOG_FILE, TRAINING_FILE, Training, _targets, rate_factor

LENGTH = 32


@pytest.fixture
def config() -> ModelConfig:
    demo = demo_config()
    return replace(
        demo,
        hidden_size=64,
        intermediate_size=64,
        kda=replace(demo.kda, num_heads=2, head_dim=32),
        mla=replace(demo.mla, num_heads=2, q_lora_rank=32, kv_lora_rank=48, v_head_dim=32),
        moe=replace(demo.moe, num_experts=4, moe_intermediate_size=64, routed_expert_hidden_size=32),
    )


def a_batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 64, (2, LENGTH), generator=generator)
    return ids, torch.rand(2, LENGTH, generator=generator) < 0.5


def test_the_rate_rises_stays_and_falls_to_a_fiftieth():
    assert rate_factor(0.0) == pytest.approx(0.02)
    assert rate_factor(0.2) == 1.0
    assert rate_factor(0.7) < 1.0
    assert rate_factor(1.0) == pytest.approx(0.02)


def test_targets_are_the_masked_tokens_and_filling_is_ignored():
    ids, mask = a_batch(1)
    rows, targets = _targets(ids, mask)
    wanted = [(b, t) for b in range(2) for t in range(1, LENGTH) if mask[b, t]]
    assert len(rows) == len(targets) == 1024
    assert [(int(row) // LENGTH, int(row) % LENGTH + 1) for row in rows[: len(wanted)]] == wanted
    assert targets[: len(wanted)].tolist() == [int(ids[place]) for place in wanted]
    assert set(targets[len(wanted) :].tolist()) == {-100}


def test_an_interrupted_training_goes_on_as_if_it_had_not_been(config: ModelConfig):
    whole = Training(config, seed=3, budget_s=100.0)
    for step in range(4):
        whole.step(*a_batch(step))
    first = Training(config, seed=3, budget_s=100.0)
    for step in range(2):
        first.step(*a_batch(step))
    second = Training(config, seed=9, budget_s=100.0)
    second.restore(first.state())
    for step in range(2, 4):
        second.step(*a_batch(step))
    assert second.num_steps == 4
    for name, parameter in whole.model.named_parameters():
        assert torch.equal(parameter, second.model.get_parameter(name)), name


def test_training_lowers_the_loss_on_what_it_sees(config: ModelConfig):
    training = Training(config, seed=0, budget_s=100.0)
    training.spent_s = 10.0
    losses = [training.step(*a_batch(7))["loss"] for _ in range(12)]
    assert losses[-1] < 0.7 * losses[0]


def test_the_indexer_stage_teaches_the_indexer_and_nothing_else(config: ModelConfig):
    model = initialised_model(config, seed=0)
    teacher = IndexerTeacher(model, num_sequences=1)
    model(ForwardBatch.whole(a_batch(1)[0]))
    teacher.take_loss().backward()
    taught = {
        name for name, parameter in model.named_parameters() if parameter.grad is not None and parameter.grad.any()
    }
    assert taught == {name for name, _ in model.named_parameters() if ".indexer." in name}


def test_the_indexer_learns_to_follow_the_attention(config: ModelConfig):
    training = Training(config, seed=0, budget_s=100.0)
    training.spent_s = 100.0 * INDEXING
    losses = [training.step(*a_batch(7))["indexer_loss"] for _ in range(12)]
    assert losses[-1] < losses[0]


def test_the_router_bias_moves_against_the_load(config: ModelConfig):
    training = Training(config, seed=0, budget_s=100.0)
    training.step(*a_batch(1))
    router = training.model.model.layers[1].block_sparse_moe.gate
    bias = router.e_score_correction_bias
    assert bias.abs().max() == pytest.approx(1e-3)
    with torch.no_grad():
        bias.zero_()
        bias[0] = 10.0  # expert 0 is always chosen
    training.step(*a_batch(2))
    assert bias[0] < 10.0


def test_an_exported_checkpoint_answers_like_the_trained_model(
    config: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    training = Training(config, seed=5, budget_s=1.0)
    torch.save(training.state(), tmp_path / TRAINING_FILE)
    (tmp_path / LOG_FILE).write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "exact": {"sums": 0.5}}\n')
    monkeypatch.setattr(export_module, "demo_config", lambda: config)
    export(tmp_path, tmp_path / "out")
    assert json.loads((tmp_path / "out" / CURVE_FILE).read_text()) == [{"step": 2, "exact": {"sums": 0.5}}]
    stored = load_model_config(tmp_path / "out")
    assert stored == config
    model = build_model(stored, load_state(tmp_path / "out", stored), NormEps(), torch.float32)
    ids = a_batch(4)[0]
    with torch.no_grad():
        expected, found = training.model(ForwardBatch.whole(ids)), model(ForwardBatch.whole(ids))
    # The experts round alike on both sides; the backbone is stored in bfloat16, which rounds by up to 4e-3.
    assert (found - expected).norm() / expected.norm() < 0.05

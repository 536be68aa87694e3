from dataclasses import replace
from pathlib import Path

import pytest
import torch

from perilune.checkpoint.loader import load_state
from perilune.config.engine import DEMO_CHECKPOINT
from perilune.config.model import ModelConfig, NormEps
from perilune.config.parse import load_model_config
from perilune.models.dsa import Indexer
from perilune.models.model import KimiModel, build_model
from perilune.models.moe import TrainableExperts
from perilune.text.tokenizer import Tokenizer
from train.dictionary import DATA_DIR
from train.export import CURVE_FILE, export
from train.model import INDEX_TOPK, initialised_model, skilled_config
from train.skills.dialogue import DialogueWriter
from train.skills.exactness import held_out_exactness
from train.skills.passes import answer_loss, forward_batch
from train.skills.supply import SKILLS, Batches, Collator, SkillBatch, held_out_dialogues
from train.split import FIRST_EVALUATION_SEED
from train.stage import STAGES, StageRun, main
from train.start import started_model


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(DATA_DIR)


@pytest.fixture(scope="module")
def config(tokenizer: Tokenizer) -> ModelConfig:
    demo = skilled_config(tokenizer.num_ranks)
    assert demo.vision is not None
    return replace(
        demo,
        hidden_size=64,
        intermediate_size=64,
        kda=replace(demo.kda, num_heads=2, head_dim=32),
        mla=replace(demo.mla, num_heads=2, q_lora_rank=32, kv_lora_rank=48, v_head_dim=32),
        moe=replace(demo.moe, num_experts=4, moe_intermediate_size=64, routed_expert_hidden_size=32),
        vision=replace(demo.vision, vt_num_hidden_layers=1, text_hidden_size=64),
    )


def small(batch: SkillBatch, num_rows: int = 2) -> SkillBatch:
    """The first rows of a batch without pictures."""
    return replace(batch, token_ids=batch.token_ids[:num_rows], loss_mask=batch.loss_mask[:num_rows])


def pictures(tokenizer: Tokenizer) -> SkillBatch:
    rows = [
        DialogueWriter(tokenizer).row(dialogue, None)
        for dialogue in held_out_dialogues("pictures", 4, FIRST_EVALUATION_SEED, tokenizer)
    ]
    return Collator(tokenizer)("pictures", rows, 64)


def a_run(name: str, config: ModelConfig, seed: int = 1) -> StageRun:
    return StageRun(STAGES[name], initialised_model(config, seed), budget_s=100.0)


def test_an_interrupted_stage_goes_on_as_if_it_had_not_been(config: ModelConfig, tokenizer: Tokenizer):
    batches = [small(Batches(seed, tokenizer, {}).batch("json")) for seed in range(4)]
    whole, first, second = (a_run("text", config, seed) for seed in (3, 3, 9))
    for batch in batches:
        whole.step(batch)
    for batch in batches[:2]:
        first.step(batch)
    second.restore(first.state())
    for batch in batches[2:]:
        second.step(batch)
    assert (second.num_steps, second.num_tokens) == (4, whole.num_tokens)
    for name, parameter in whole.model.named_parameters():
        assert torch.equal(parameter, second.model.get_parameter(name)), name


def test_eyes_learn_from_pictures_in_their_stage_only(config: ModelConfig, tokenizer: Tokenizer):
    batch = pictures(tokenizer)
    for name, learns in (("pictures", True), ("text", False)):
        run = a_run(name, config)
        run.spent_s = 50.0
        eyes = run.model.get_parameter("vision.vision_tower.encoder.blocks.0.wqkv.weight")
        before = eyes.detach().clone()
        losses = [run.step(batch)["loss"] for _ in range(12)]
        assert torch.equal(eyes, before) is not learns
        assert losses[-1] < losses[0]


def test_what_a_picture_shows_reaches_the_answer(config: ModelConfig, tokenizer: Tokenizer):
    model, batch = initialised_model(config, 1), pictures(tokenizer)
    assert batch.patches is not None
    other = replace(batch, patches=batch.patches.flip(0))
    with torch.no_grad():
        assert not torch.equal(answer_loss(model, batch), answer_loss(model, other))


def modules(model: KimiModel, kind: type) -> list:
    return [module for module in model.modules() if isinstance(module, kind)]


def test_experts_are_rounded_and_rows_selected_when_a_stage_says_so(config: ModelConfig, tokenizer: Tokenizer):
    text, indexer = a_run("text", config), a_run("indexer", config)
    batch = small(Batches(1, tokenizer, {}).batch("recall"), 1)
    found = []
    for spent_s in (0.0, 70.0):
        for run in (text, indexer):
            run.spent_s = spent_s
            run.step(batch)
        rounds = all(module.rounds_weights for module in modules(text.model, TrainableExperts))
        topks = {module.config.topk for module in modules(indexer.model, Indexer)}
        found.append((rounds, topks == {INDEX_TOPK}))
    assert found == [(False, False), (True, True)]


def test_the_indexer_learns_while_it_selects(config: ModelConfig, tokenizer: Tokenizer):
    run = a_run("indexer", config)
    run.spent_s = 60.0
    batch = small(Batches(1, tokenizer, {}).batch("recall"), 1)
    losses = [run.step(batch)["indexer_loss"] for _ in range(6)]
    assert losses[-1] < losses[0]


def test_a_stage_starts_from_a_checkpoint_with_fewer_ranks_and_keeps_what_it_knows(tokenizer: Tokenizer):
    model = started_model(skilled_config(tokenizer.num_ranks), DEMO_CHECKPOINT, tokenizer, seed=1)
    exact = held_out_exactness(model, tokenizer, count=10)
    assert list(exact) == list(SKILLS)
    assert exact["sums"] == 1.0
    assert exact["dictionary"] >= 0.8


def test_an_exported_stage_answers_like_the_trained_model(
    config: ModelConfig, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = a_run("pictures", config)
    torch.save(run.state(), tmp_path / "pictures.pt")
    (tmp_path / "text.jsonl").write_text('{"step": 1, "exact": {"sums": 0.5}}\n')
    monkeypatch.setattr("train.export.skilled_config", lambda _: config)
    export(tmp_path, tmp_path / "out", "pictures")
    stored = load_model_config(tmp_path / "out")
    assert stored == config
    assert "0.5" in (tmp_path / "out" / CURVE_FILE).read_text()
    model = build_model(stored, load_state(tmp_path / "out", stored), NormEps(), torch.float32)
    batch = pictures(tokenizer)
    with torch.no_grad():
        wanted, found = (m(forward_batch(m, batch)) for m in (run.model, model))
    # the experts round alike on both sides; the rest is stored in bfloat16
    assert (found - wanted).norm() / wanted.norm() < 0.05


def test_a_stage_without_the_one_before_it_says_what_to_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["experts", "--out", str(tmp_path)])
    assert ended.value.code == 2
    assert "pictures.pt does not exist: run the stage before experts first" in capsys.readouterr().err

"""The whole chain in small: every stage for an instant, the checkpoint, and its draft."""

from pathlib import Path

import pytest

from perilune.config.engine import DEMO_CHECKPOINT
from perilune.engine.llm import LLM
from perilune.sampling.params import SamplingParams
from train import demo, stage


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "NUM_ANSWERS", 80)
    monkeypatch.setattr(demo, "NUM_DRAFT_STEPS", 2)
    monkeypatch.setattr(demo, "fuse_ops", lambda: None)
    monkeypatch.setattr("train.skills.supply.BATCH_TOKENS", 512)
    monkeypatch.setattr(stage, "held_out_exactness", lambda *_: {"sums": 0.5})


@pytest.mark.usefixtures("short")
def test_all_stages_end_in_a_checkpoint_that_answers_with_its_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    demo.train(tmp_path, DEMO_CHECKPOINT, minutes=1e-4)
    checkpoint = tmp_path / demo.CHECKPOINT_DIR
    assert {path.name for path in tmp_path.glob("*.svg")} == {f"{name}.svg" for name in stage.STAGES}
    llm = LLM(checkpoint, speculative="dspark")
    assert llm.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=2))[0].token_ids
    monkeypatch.setattr(stage.StageRun, "step", None)  # a finished run trains nothing again
    demo.train(tmp_path, DEMO_CHECKPOINT, minutes=1e-4)

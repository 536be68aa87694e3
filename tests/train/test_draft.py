"""The trainer of drafts: it computes what is served, learns, goes on after an interruption, and writes what loads."""

import json
import random

import pytest
import torch

from perilune.cache.storage import CacheStorage
from perilune.checkpoint.draft import load_draft_state
from perilune.checkpoint.loader import load_state
from perilune.config.draft import check_fit, load_draft_config
from perilune.config.engine import DEMO_CHECKPOINT
from perilune.config.model import NormEps
from perilune.config.parse import load_model_config
from perilune.engine.llm import LLM
from perilune.errors import ConfigError
from perilune.models.draft.model import build_draft
from perilune.models.draft.tapped import TappedModel
from perilune.models.model import build_model
from perilune.ops import _native
from perilune.sampling.params import SamplingParams
from perilune.text.tokenizer import Tokenizer
from tests.engine.guesses import always_guess
from tests.models.passes import BLOCK_SIZE, pass_over
from train import draft as trainer
from train.draft import NUM_DRAFTS, DraftTraining, Size, draft_values, run_steps, write_draft
from train.draft_pass import Blocks, draft_hidden, draft_logits
from train.outputs import Output, demo_prompts, read_outputs, read_prompts, write_outputs

SIZE = Size(num_layers=2, num_heads=2, q_lora_rank=16, kv_lora_rank=32, head_dim=16, rope_dim=16, inner=32)


@pytest.fixture(scope="module")
def target(micro_checkpoint):
    config = load_model_config(micro_checkpoint)
    return build_model(config, load_state(micro_checkpoint, config), NormEps(), torch.float32)


@pytest.fixture(scope="module")
def values(target):
    return draft_values(target.config, SIZE)


@pytest.fixture(scope="module")
def outputs(target):
    """Answers that count upwards, which is easily learned."""
    source, vocab_size = random.Random(1), target.config.vocab_size
    found = []
    for _ in range(160):
        first = source.randrange(min(24, vocab_size - 24))
        found.append(Output(tuple(range(first, first + 24)), 6))
    return found


def new_training(target, values, outputs, num_steps=40):
    return DraftTraining(target, values, outputs, num_steps=num_steps)


def randomised(training):
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in training.draft.parameters():
            parameter.normal_(std=0.3, generator=generator)
    return training


def test_the_trained_pass_is_the_one_that_is_served(target, values, outputs, tmp_path):
    training = randomised(new_training(target, values, outputs))
    write_draft(tmp_path, training.draft, values)
    config = load_draft_config(tmp_path)
    served = build_draft(
        config, load_draft_state(tmp_path, config), target.model.embed_tokens, target.lm_head, torch.float32
    )
    training.draft.load_state_dict(
        {name: tensor.float() for name, tensor in load_draft_state(tmp_path, config).items()}
    )
    token_ids, position = outputs[0].token_ids, 9
    tapped = TappedModel(target, served)
    storage = CacheStorage(tapped.cache_groups(), num_blocks=8, block_size=BLOCK_SIZE, num_slots=1, dtype="float32")
    table = list(range(8))
    tapped(pass_over([(token_ids[:position], 0, table, 0)], storage.views))
    anchor = torch.tensor([token_ids[position]])
    hidden = served(served.blocks(anchor, torch.tensor([position]), torch.tensor([table]), storage.views))
    drafts = served.draft(hidden, anchor, NUM_DRAFTS)

    ids = torch.tensor([token_ids])
    blocks = Blocks(torch.tensor([[position, 3]]), len(token_ids), NUM_DRAFTS)
    trained = draft_hidden(training.draft, training._taps(ids), ids, blocks)
    assert torch.allclose(trained[0, 0], hidden, rtol=1e-4, atol=1e-4)
    previous = torch.cat((anchor, drafts.token_ids[0, :-1])).view(1, 1, -1)
    logits, confidence = draft_logits(training.draft, trained[:, :1], previous)
    assert logits.argmax(-1).flatten().tolist() == drafts.token_ids[0].tolist()
    assert torch.allclose(confidence.flatten(), served.confidence_logits(drafts)[0], rtol=1e-3, atol=1e-3)


def test_training_learns_and_writes_a_draft_that_fits(target, values, outputs, tmp_path):
    training = new_training(target, values, outputs, num_steps=120)
    first = training.step()["loss"]
    run_steps(training, tmp_path, values)
    curve = [json.loads(line) for line in (tmp_path / trainer.LOG_FILE).read_text().splitlines()]
    assert curve[-1]["loss"] < 0.8 * first
    config = load_draft_config(tmp_path / trainer.DRAFT_DIR)
    check_fit(config, target.config, NUM_DRAFTS)
    assert load_draft_state(tmp_path / trainer.DRAFT_DIR, config).keys() == training.draft.state_dict().keys()


def test_an_interrupted_training_goes_on_as_if_it_had_not_been(target, values, outputs, tmp_path):
    whole = new_training(target, values, outputs, num_steps=6)
    losses = [whole.step() for _ in range(6)]
    begun = new_training(target, values, outputs, num_steps=6)
    assert [begun.step() for _ in range(3)] == losses[:3]
    torch.save(begun.state(), tmp_path / "state.pt")
    resumed = new_training(target, values, outputs, num_steps=6)
    resumed.restore(torch.load(tmp_path / "state.pt"))
    assert [resumed.step() for _ in range(3)] == losses[3:]
    assert all(torch.equal(a, b) for a, b in zip(whole.draft.parameters(), resumed.draft.parameters(), strict=True))


def test_a_row_sees_what_comes_before_its_anchor_and_its_own_block():
    seen = Blocks(torch.tensor([[2, 4]]), 6, 3).seen[0]
    assert seen[:3, :6].sum(1).tolist() == [2, 2, 2]
    assert seen[3:, :6].sum(1).tolist() == [4, 4, 4]
    assert seen[:, 6:].tolist() == [[True] * 3 + [False] * 3] * 3 + [[False] * 3 + [True] * 3] * 3


def test_answers_are_the_targets_own_and_are_not_made_twice(tmp_path):
    llm = LLM(max_num_seqs=8)
    prompts = list(demo_prompts(12, llm.tokenizer, llm.core.limits.vocab_size, seed=0))
    out = tmp_path / "outputs.jsonl"
    write_outputs(llm, prompts, out, seed=0)
    found = read_outputs(out)
    assert [item.token_ids[: item.num_prompt_tokens] for item in found] == [tuple(prompt) for prompt in prompts]
    before = out.read_text()
    with out.open("a") as file:
        file.write('{"prompt": [1, 2')  # an interruption
    assert read_outputs(out) == found
    out.write_text(before)
    write_outputs(llm, prompts, out, seed=0)
    assert out.read_text() == before


def test_prompts_of_any_target_come_from_a_file(tmp_path):
    tokenizer = Tokenizer.load(DEMO_CHECKPOINT)
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "Hello"}]}\n{"prompt": "Once upon a time"}\n')
    found = list(read_prompts(file, tokenizer))
    assert tokenizer.decode(found[1]) == "Once upon a time"
    assert len(found) == 2
    file.write_text('{"prompt": "fine"}\n{"text": "what is this"}\n')
    with pytest.raises(ConfigError, match="line 2"):
        list(read_prompts(file, tokenizer))


def test_the_shipped_draft_fits_the_demo():
    config = load_draft_config(DEMO_CHECKPOINT / "draft")
    check_fit(config, load_model_config(DEMO_CHECKPOINT), NUM_DRAFTS)
    size = sum(file.stat().st_size for file in DEMO_CHECKPOINT.rglob("*") if file.is_file())
    assert size <= 40 * 2**20


@pytest.mark.parametrize("max_num_seqs", [1, 16])
def test_two_hundred_answers_are_the_same_with_the_shipped_draft_which_is_often_right(max_num_seqs):
    """Questions that it was not trained on; on average it foresees more than two and a half of seven tokens."""
    options = {"max_num_seqs": max_num_seqs, "prefix_cache": False}
    llm = LLM(speculative="dspark", **options)
    prompts = list(demo_prompts(200, llm.tokenizer, llm.core.limits.vocab_size, seed=1_000_000))
    params = SamplingParams(temperature=0.0, max_tokens=48)
    always_guess(llm.core)
    expected, found = LLM(**options).generate(prompts, params), llm.generate(prompts, params)
    if _native.absence() is None:  # the reference rounds steps of other sizes otherwise
        assert [item.token_ids for item in found] == [item.token_ids for item in expected]
    drafts = llm.core.stats().drafts
    assert drafts.num_accepted > 2.5 * drafts.num_rounds

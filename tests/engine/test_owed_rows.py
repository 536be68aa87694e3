"""What plain steps leave for later is there, to the bit, whenever anything could read it."""

import random
from dataclasses import replace

import pytest
import torch

from perilune.config.engine import EngineConfig
from perilune.engine.build import assemble_engine, load_model
from perilune.engine.request import GenerateRequest
from perilune.engine.steps.draft_model import open_draft
from perilune.models.draft.tapped import MOST_OWED, owed_bytes
from perilune.sampling.params import SamplingParams
from tests.engine.counting_model import run, tokens_of
from tests.engine.guesses import always_guess

SETTINGS = EngineConfig(dtype="float32", num_blocks=300, block_size=4, max_model_len=160, max_num_seqs=8)
# of each request, its prompt and its answer
LENGTHS = ((1, 90), (5, 30), (17, 75), (40, 60), (64, 45))
SCHEDULES = {
    "at ease": {},
    "few blocks": {"num_blocks": 56},
    "in pieces": {"max_num_batched_tokens": 9},
    "one by one": {"max_num_seqs": 1},
    "nothing cached": {"prefix_cache": False, "num_blocks": 90},
}


@pytest.fixture(scope="module")
def parts(goldens_dir):
    """A target, its draft and the settings that name both."""
    directory = goldens_dir / "k31-tiny"
    settings = replace(SETTINGS, speculative=str(goldens_dir / "dspark-tiny" / "mla"), num_drafts=7)
    model = load_model(directory, settings)
    return model, open_draft(directory, settings, model.config).build(model), settings


def make_core(parts, *, owes, **changed):
    """An engine that never guesses; what its steps owe is put off or written at once."""
    model, draft, settings = parts
    core = assemble_engine(model, None, replace(settings, **changed), weights="these", draft=draft)
    core._drafting.switch(is_on=True)
    core._drafting.policy.rests = lambda: True
    draft_rows(core).zero_()  # steps that were timed at the start have left rows, which ones is a matter of their time
    if not owes:
        core._drafting._owed = None
        core._runner._model.owes = False
    return core


def requests(vocab_size):
    source = random.Random(3)
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    return [
        GenerateRequest(
            f"r{length}",
            tuple(source.randrange(5, vocab_size) for _ in range(length)),
            replace(params, max_tokens=num_tokens),
        )
        for length, num_tokens in LENGTHS
    ]


def draft_rows(core):
    return core._runner._storage.views["draft"]


@pytest.mark.parametrize("changed", SCHEDULES.values(), ids=SCHEDULES)
def test_rows_that_were_put_off_are_those_written_at_once(parts, changed):
    messages = requests(parts[0].config.vocab_size)
    assert sum(num_tokens for _, num_tokens in LENGTHS) > MOST_OWED
    late, prompt = (make_core(parts, owes=owes, **changed) for owes in (True, False))
    outputs, expected = run(late, messages), run(prompt, messages)
    assert {name: tokens_of(found) for name, found in outputs.items()} == {
        name: tokens_of(found) for name, found in expected.items()
    }
    late._runner.settle()
    assert draft_rows(prompt).count_nonzero() > 0
    assert torch.equal(draft_rows(late), draft_rows(prompt))


def test_what_is_kept_of_them_is_accounted_for(parts):
    model, draft, _ = parts
    tapped = make_core(parts, owes=True)._runner._model
    assert owed_bytes(draft.config, model.dtype.itemsize) == tapped._owed.nbytes


def test_rows_are_put_off(parts):
    core = make_core(parts, owes=True)
    (message, *_) = requests(parts[0].config.vocab_size)
    core.add(message)
    for _ in range(12):
        core.step()
    before = draft_rows(core).clone()
    core._runner.settle()
    assert not torch.equal(draft_rows(core), before)


def guesses(core, message):
    """What is guessed at every step of an answer, and how many tokens of its prompt were cached."""
    found, propose = [], core._drafting._proposer.propose

    def note(sequences):
        proposals = propose(sequences)
        found.extend((item.seq_len, *proposal.token_ids) for item, proposal in zip(sequences, proposals, strict=True))
        return proposals

    core._drafting._proposer.propose = note
    del core._drafting.policy.rests
    (outputs,) = run(always_guess(core), [message]).values()
    return found, outputs[-1].num_cached_tokens


@pytest.mark.parametrize("restarts", [False, True])
def test_a_draft_sees_what_an_answer_without_guesses_left(parts, tmp_path, restarts):
    """The turn behind such an answer is guessed as where all is computed anew, also after a restart."""
    message = requests(parts[0].config.vocab_size)[3]
    kept = {"kv_dir": str(tmp_path)} if restarts else {}
    warm = make_core(parts, owes=True, **kept)
    (outputs,) = run(warm, [message]).values()
    if restarts:
        warm.close(10.0)
        warm = make_core(parts, owes=True, **kept)
    turn = replace(message, request_id="turn", prompt_token_ids=(*message.prompt_token_ids, *tokens_of(outputs), 7, 9))
    found, num_cached = guesses(warm, turn)
    cold, none_cached = guesses(make_core(parts, owes=True), turn)
    assert num_cached > len(message.prompt_token_ids)
    assert none_cached == 0
    assert found == cold
    assert len(cold) > 1


def test_blocks_that_are_erased_stay_so(parts):
    core = make_core(parts, owes=True)
    (message, *_) = requests(parts[0].config.vocab_size)
    core.add(message)
    for _ in range(12):
        core.step()
    blocks = core._cache.block_table(message.request_id)
    core._runner.erase_blocks(blocks)
    core._runner.settle()
    assert draft_rows(core)[:, list(blocks)].count_nonzero() == 0


def test_what_a_failed_step_owes_is_forgotten(parts, monkeypatch):
    """And rows that earlier steps owe, and later ones, still find their places."""
    messages = requests(parts[0].config.vocab_size)[:2]
    late, prompt = make_core(parts, owes=True), make_core(parts, owes=False)
    for core in (late, prompt):
        core.add(messages[0])
        for _ in range(12):
            core.step()
        choose = "perilune.engine.steps.runner.choose_tokens"
        with monkeypatch.context() as patch:
            patch.setattr(choose, lambda *_: 1 / 0)
            (output,) = core.step()
        assert output.error is not None
        run(core, messages[1:])
        core._runner.settle()
    assert torch.equal(draft_rows(late), draft_rows(prompt))


def test_an_engine_whose_guessing_is_off_leaves_nothing_and_can_be_switched_on(parts):
    messages = requests(parts[0].config.vocab_size)
    core = make_core(parts, owes=True)
    del core._drafting.policy.rests
    core._drafting.switch(is_on=False)
    outputs = run(core, messages)
    core._runner.settle()
    assert draft_rows(core).count_nonzero() == 0
    drafts = core.stats().drafts
    assert drafts.num_plain_steps == drafts.num_steps > 0
    core.force_guesses()
    again = [replace(message, request_id=f"{message.request_id} again") for message in messages]
    found = run(core, again)
    assert core.stats().drafts.num_drafted > 0
    assert [tokens_of(found[message.request_id]) for message in again] == [
        tokens_of(outputs[message.request_id]) for message in messages
    ]


@pytest.mark.parametrize("pays", [True, False])
def test_guessing_that_cannot_pay_is_off_from_the_start_and_says_so(parts, pays, monkeypatch, caplog):
    model, draft, settings = parts
    monkeypatch.setattr("perilune.speculative.policy.StepCosts.can_pay", lambda *_: pays)
    core = assemble_engine(model, None, settings, draft=draft)
    assert core._drafting.policy.is_off is not pays
    assert ("stays off" in caplog.text) is not pays

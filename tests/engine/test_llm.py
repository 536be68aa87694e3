import dataclasses

import pytest

import perilune
from perilune.engine.llm import LLM
from perilune.engine.request import FinishReason
from perilune.errors import ConfigError, RequestError
from perilune.sampling.params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(random_checkpoint):
    return LLM(random_checkpoint, dtype="float32", num_blocks=64, max_num_seqs=4)


def uncached(completion):
    return dataclasses.replace(completion, num_cached_tokens=0)


def test_text_and_token_ids_give_the_same_completion(llm):
    token_ids = llm.tokenizer.encode_markup("The moon")
    (from_text,) = llm.generate("The moon", GREEDY)
    (from_ids,) = llm.generate(token_ids, GREEDY)
    assert from_text == uncached(from_ids)
    assert from_text.num_prompt_tokens == len(token_ids)
    assert len(from_text.token_ids) == 6
    assert from_text.text == llm.tokenizer.decode(from_text.token_ids, skip_special=True)
    assert from_text.finish_reason is FinishReason.LENGTH
    assert from_text.reasoning == ""


def test_a_batch_comes_back_in_the_order_of_its_prompts(llm):
    prompts = ["one", [5, 6, 7], "three " * 20, "4", "five", (8, 9)]
    together = llm.generate(prompts, GREEDY)
    assert together == [uncached(llm.generate(prompt, GREEDY)[0]) for prompt in prompts]
    assert llm.generate([], GREEDY) == []


def test_a_control_name_in_a_text_prompt_is_one_token(llm):
    (completion,) = llm.generate("<|end_of_msg|>", GREEDY)
    assert completion.num_prompt_tokens == 1


def test_an_answer_is_split_into_reasoning_and_content(llm):
    messages = [{"role": "user", "content": "Hello"}]
    thinking = llm.chat(messages, GREEDY)
    plain = llm.chat(messages, GREEDY, thinking=False)
    assert (thinking.text, plain.reasoning) == ("", "")
    assert thinking.reasoning == llm.tokenizer.decode(thinking.token_ids, skip_special=True)
    assert plain.text == llm.tokenizer.decode(plain.token_ids, skip_special=True)


def test_a_stop_string_is_not_part_of_the_text(llm):
    (whole,) = llm.generate("abc", SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    stop = whole.text[8:10]
    (cut,) = llm.generate("abc", SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, stop=(stop,)))
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert (cut.finish_reason, cut.stop_reason) == (FinishReason.STOP, stop)


def test_logprobs_cover_every_token(llm):
    (found,) = llm.generate(
        [[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=1, prompt_logprobs=0)
    )
    assert tuple(entry.token_id for entry in found.logprobs) == found.token_ids
    assert [entry and entry.token_id for entry in found.prompt_logprobs] == [None, 6, 7]


def test_a_prompt_that_cannot_be_served_is_refused_before_anything_runs(llm):
    with pytest.raises(RequestError) as caught:
        llm.generate(["fine", [1] * 2000], GREEDY)
    assert caught.value.code == "context_length_exceeded"
    assert llm.core.stats().num_waiting == 0
    assert not llm.core.has_work


def test_an_interrupted_call_leaves_nothing_behind(llm, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.core, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], GREEDY)
    monkeypatch.undo()
    assert not llm.core.has_work
    assert llm.core.stats().blocks_used == 0


def test_an_unknown_option_is_refused_with_the_known_ones(random_checkpoint):
    with pytest.raises(ConfigError, match="unknown engine option 'max_seqs'; known are max_num_seqs"):
        LLM(random_checkpoint, max_seqs=3)


def test_the_package_exports_what_it_names():
    assert perilune.LLM is LLM
    assert perilune.SamplingParams is SamplingParams
    assert perilune.__version__.count(".") == 2
    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        perilune.Engine  # noqa: B018


def test_what_an_offline_engine_computed_is_there_for_the_next_one(random_checkpoint, tmp_path):
    settings = {"max_model_len": 64, "dtype": "float32", "kv_dir": tmp_path}
    prompt, params = list(range(40)), SamplingParams(max_tokens=2, temperature=0.0)
    first = LLM(random_checkpoint, **settings)
    (before,) = first.generate([prompt], params)
    first.close()
    second = LLM(random_checkpoint, **settings)
    (after,) = second.generate([prompt], params)
    second.close()
    assert (before.num_cached_tokens, after.num_cached_tokens) == (0, 32)
    assert after.token_ids == before.token_ids

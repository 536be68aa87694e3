import random
from dataclasses import replace

import pytest

from perilune.engine.request import FinishReason, GenerateRequest
from perilune.errors import CapacityError, RequestError
from perilune.sampling.params import SamplingParams
from perilune.text.channels import Channel
from perilune.text.tokenizer import Tokenizer
from tests.engine.counting_model import (
    CRASH_TOKEN,
    EOS,
    NAN_TOKEN,
    expected_tokens,
    make_core,
    run,
    tokens_of,
)

GREEDY = {"temperature": 0.0}


def message(request_id, prompt, **params):
    return GenerateRequest(request_id, tuple(prompt), SamplingParams(**{**GREEDY, **params}))


def workload(count=9, **params):
    """Requests of mixed lengths."""
    chosen = random.Random(0)
    return [
        message(
            f"r{index}",
            [chosen.randrange(50) for _ in range(chosen.randint(1, 40))],
            **{"max_tokens": chosen.randint(1, 25), **params},
        )
        for index in range(count)
    ]


def alone(requests, **options):
    """The tokens of each request in an engine of its own."""
    return {
        request.request_id: tokens_of(run(make_core(**options)[0], [request])[request.request_id])
        for request in requests
    }


def together(requests, **options):
    core, _ = make_core(**options)
    return {request_id: tokens_of(outputs) for request_id, outputs in run(core, requests).items()}


def test_one_request_gets_the_tokens_the_model_defines():
    request = message("r", [5, 17, 3], max_tokens=30)
    assert alone([request])["r"] == expected_tokens([5, 17, 3], 30)


def test_batched_equals_alone():
    requests = workload()
    assert together(requests) == {
        item.request_id: expected_tokens(item.prompt_token_ids, item.params.max_tokens) for item in requests
    }


@pytest.mark.parametrize("budget", [8, 9, 15, 400])
@pytest.mark.parametrize("block_size", [1, 4, 7])
def test_chunked_prefill_equals_whole(budget, block_size):
    requests = workload()
    assert together(requests, budget=budget, block_size=block_size, num_blocks=300) == together(
        requests, budget=400, block_size=16
    )


def test_preempted_equals_undisturbed():
    requests = workload(count=12, max_tokens=30)
    core, _ = make_core(num_blocks=20, budget=16)
    found = {request_id: tokens_of(outputs) for request_id, outputs in run(core, requests).items()}
    assert core.stats().num_preemptions_total > 3
    assert found == together(requests, num_blocks=400, budget=400)


@pytest.mark.parametrize("seed", range(4))
def test_preempted_equals_undisturbed_whatever_the_priorities_and_the_bound_between_tokens(seed):
    """Requests of three priorities come while others run, in a cache that holds a few of them."""
    chosen = random.Random(seed)
    requests = [replace(item, priority=chosen.choice((-1, 0, 1))) for item in workload(count=16, max_tokens=30)]
    core, _ = make_core(num_blocks=24, budget=20, has_priorities=True, max_itl_s=0.001)
    found, waiting = {}, list(requests)
    while core.has_work or waiting:
        for _ in range(min(len(waiting), chosen.randrange(3))):
            core.add(waiting.pop())
        for output in core.step():
            found[output.request_id] = found.get(output.request_id, ()) + output.token_ids
        core.check_integrity()
    assert core.stats().num_preemptions_total > 3
    assert found == {item.request_id: expected_tokens(item.prompt_token_ids, 30) for item in requests}


def test_seeded_sampling_is_equal_in_any_batch_and_after_preemption():
    requests = workload(temperature=1.5, seed=7, max_tokens=20)
    expected = alone(requests)
    assert len(set(expected.values())) == len(requests)
    assert together(requests) == expected
    core, _ = make_core(num_blocks=20, budget=9)
    crowded = {request_id: tokens_of(outputs) for request_id, outputs in run(core, requests).items()}
    assert core.stats().num_preemptions_total > 0
    assert crowded == expected


def test_without_a_seed_two_requests_draw_differently():
    found = together([message(name, [1], temperature=3.0, max_tokens=30) for name in ("a", "b")])
    assert found["a"] != found["b"]


def test_outputs_come_as_they_are_made_and_the_last_one_says_why():
    core, _ = make_core()
    outputs = run(core, [message("r", [1, 2], max_tokens=3)])["r"]
    assert [len(output.token_ids) for output in outputs] == [1, 1, 1]
    assert [output.finish_reason for output in outputs] == [None, None, FinishReason.LENGTH]
    assert [output.num_output_tokens for output in outputs] == [1, 2, 3]
    assert {output.num_prompt_tokens for output in outputs} == {2}


def test_a_stop_token_ends_the_request_and_is_included():
    token_ids = expected_tokens([9], 30)
    stop = token_ids[6]
    end = token_ids.index(stop)
    outputs = run(make_core()[0], [message("r", [9], max_tokens=30, stop_token_ids=(stop,))])["r"]
    assert tokens_of(outputs) == token_ids[: end + 1]
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == (FinishReason.STOP, stop)


def test_the_end_of_sequence_token_ends_the_request_unless_ignored():
    biased = {"max_tokens": 4, "logit_bias": {EOS: 100.0}}
    outputs = run(make_core()[0], [message("r", [9], **biased)])["r"]
    assert tokens_of(outputs) == (EOS,)
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == (FinishReason.STOP, None)
    outputs = run(make_core()[0], [message("r", [9], ignore_eos=True, **biased)])["r"]
    assert tokens_of(outputs) == (EOS,) * 4
    assert outputs[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("max_tokens", [None, 1000])
def test_a_request_ends_at_the_context(max_tokens):
    outputs = run(make_core(max_model_len=24)[0], [message("r", [1] * 20, max_tokens=max_tokens)])["r"]
    assert len(tokens_of(outputs)) == 4
    assert outputs[-1].finish_reason is FinishReason.LENGTH


def test_a_prompt_over_the_context_is_refused_at_once():
    core, _ = make_core(max_model_len=24)
    with pytest.raises(RequestError, match="24") as caught:
        core.add(message("r", [1] * 24))
    assert caught.value.code == "context_length_exceeded"
    assert not core.has_work


def test_what_the_cache_can_never_hold_is_refused_with_a_true_remedy():
    core, _ = make_core(num_blocks=4, block_size=4, max_model_len=100)
    with pytest.raises(CapacityError, match="the cache holds 17") as caught:
        core.add(message("r", [1] * 10, max_tokens=20))
    remedy = int(str(caught.value).split("max_tokens to at most ")[1].split(",")[0])
    outputs = run(core, [message("r", [1] * 10, max_tokens=remedy)])["r"]
    assert len(tokens_of(outputs)) == remedy
    with pytest.raises(CapacityError):
        core.add(message("r", [1] * 10, max_tokens=remedy + 1))


def test_an_id_in_use_is_refused_and_free_again_afterwards():
    core, _ = make_core()
    core.add(message("r", [1], max_tokens=2))
    with pytest.raises(RequestError, match="'r' is running"):
        core.add(message("r", [1]))
    while core.has_work:
        core.step()
    core.add(message("r", [1], max_tokens=2))


def test_stop_strings_without_a_tokenizer_are_refused():
    with pytest.raises(RequestError, match="tokenizer") as caught:
        make_core()[0].add(message("r", [1], stop=("x",)))
    assert caught.value.param == "stop"


def test_an_abort_frees_the_request_at_once_wherever_it_stands():
    core, _ = make_core(budget=8, max_num_seqs=2)
    for name, length in (("decoding", 3), ("prefilling", 60), ("waiting", 3)):
        core.add(message(name, [1] * length))
    core.step()
    core.step()
    for name in ("waiting", "prefilling", "decoding"):
        output = core.abort(name)
        assert output.finish_reason is FinishReason.ABORT
        core.check_integrity()
    stats = core.stats()
    assert (stats.num_running, stats.num_waiting, stats.blocks_used, stats.slots_used) == (0, 0, 0, 0)
    assert core.abort("decoding") is None


def test_an_abort_changes_nothing_for_the_others():
    requests = workload()
    core, _ = make_core(num_blocks=30)
    for request in requests:
        core.add(request)
    outputs = {request.request_id: [] for request in requests}
    for step in range(10_000):
        if not core.has_work:
            break
        if step == 6:
            core.abort("r0")
            core.abort("r4")
        for output in core.step():
            outputs[output.request_id].append(output)
    expected = alone([request for request in requests if request.request_id not in ("r0", "r4")])
    assert {request_id: tokens_of(outputs[request_id]) for request_id in expected} == expected


def test_logits_that_are_not_finite_fail_that_request_alone():
    requests = [*workload(count=4), message("bad", [3, NAN_TOKEN, 5], max_tokens=9)]
    outputs = run(make_core()[0], requests)
    assert outputs["bad"][-1].finish_reason is FinishReason.ERROR
    assert "NaN" in outputs["bad"][-1].error
    expected = alone(requests[:4])
    assert {request_id: tokens_of(outputs[request_id]) for request_id in expected} == expected


def test_nothing_of_a_failed_request_is_left_for_those_that_get_its_room():
    core, _ = make_core(num_blocks=8, max_num_seqs=1)
    for _ in range(3):
        assert (
            run(core, [message("bad", [NAN_TOKEN] * 30, max_tokens=1)])["bad"][-1].finish_reason is FinishReason.ERROR
        )
        good = run(core, [message("good", [4, 5], max_tokens=20)])["good"]
        assert tokens_of(good) == expected_tokens([4, 5], 20)


def test_log_lines_of_the_engine_name_the_requests_as_their_clients_do(caplog):
    core, _ = make_core()

    def fail(batch):
        raise ValueError

    core._runner.execute = fail
    run(core, [replace(message("r", [1]), log_id="mine"), message("s", [2])])
    (record,) = [record for record in caplog.records if record.exc_info]
    assert record.request_id == "mine s"


def test_a_step_that_raises_fails_its_requests_and_the_core_goes_on():
    core, _ = make_core(max_num_seqs=2)
    outputs = run(core, [message("a", [1, 2]), message("crash", [CRASH_TOKEN]), message("later", [7], max_tokens=6)])
    assert outputs["a"][-1].finish_reason is FinishReason.ERROR
    assert "RuntimeError" in outputs["crash"][-1].error
    assert tokens_of(outputs["later"]) == expected_tokens([7], 6)


def test_logprobs_come_with_every_token_when_asked_for():
    outputs = run(make_core()[0], [message("r", [1], max_tokens=5, logprobs=2), message("plain", [1], max_tokens=5)])
    for output in outputs["r"]:
        (entry,) = output.logprobs
        assert (entry.token_id,) == output.token_ids
        assert entry.rank == 1
        assert len(entry.top) == 2
    assert all(output.logprobs is None for output in outputs["plain"])


def logprobs_of_prompt(prompt, **options):
    outputs = run(make_core(**options)[0], [message("r", prompt, max_tokens=2, prompt_logprobs=1)])["r"]
    assert outputs[1].prompt_logprobs is None
    return outputs[0].prompt_logprobs


def test_prompt_logprobs_come_with_the_first_output_and_do_not_depend_on_chunks():
    prompt = [3, *expected_tokens([3], 20), 1]
    entries = logprobs_of_prompt(prompt)
    assert entries[0] is None
    assert [entry.token_id for entry in entries[1:]] == prompt[1:]
    assert [entry.rank for entry in entries[1:21]] == [1] * 20
    assert entries[21].rank > 1
    for budget in (8, 9, 21):
        assert logprobs_of_prompt(prompt, budget=budget) == entries


def test_prompt_logprobs_survive_a_preemption():
    prompts = [[index + 1, *range(20)] for index in range(3)]
    requests = [message(f"r{index}", prompt, max_tokens=30, prompt_logprobs=0) for index, prompt in enumerate(prompts)]
    core, _ = make_core(num_blocks=19, budget=8)
    outputs = run(core, requests)
    assert core.stats().num_preemptions_total > 0
    for index, prompt in enumerate(prompts):
        found = outputs[f"r{index}"][0].prompt_logprobs
        assert found == run(make_core()[0], [requests[index]])[f"r{index}"][0].prompt_logprobs
        assert len(found) == len(prompt)


def test_non_finite_prompt_logprobs_fail_that_request_alone():
    outputs = run(
        make_core(budget=8)[0],
        [message("bad", [1, NAN_TOKEN, *range(12)], prompt_logprobs=0), message("good", [2], max_tokens=8)],
    )
    assert [output.finish_reason for output in outputs["bad"]] == [FinishReason.ERROR]
    assert tokens_of(outputs["good"]) == expected_tokens([2], 8)


def test_statistics_count_what_happened():
    times = iter(float(tick) for tick in range(1000))
    core, _ = make_core(max_num_seqs=2, clock=lambda: next(times))
    requests = [message(f"r{index}", [1, 2, 3], max_tokens=4) for index in range(3)]
    run(core, [*requests, message("bad", [NAN_TOKEN])])
    stats = core.stats()
    assert stats.finished_total[FinishReason.LENGTH] == 3
    assert stats.finished_total[FinishReason.ERROR] == 1
    assert stats.prompt_tokens_total == 9
    assert stats.generation_tokens_total == 12
    assert stats.time_to_first_token_s.count == 3
    assert stats.inter_token_latency_s.count == 9
    assert stats.queue_time_s.count == stats.e2e_latency_s.count == 4
    assert (stats.slots_total, stats.blocks_total) == (2 + 8, 64)
    assert stats.num_steps_total >= 8


def test_rows_without_a_wanted_logit_reach_no_sampler():
    core, model = make_core(budget=8)
    run(core, [message("r", list(range(20)), max_tokens=2)])
    assert [len(batch.logits_rows) for batch in model.batches] == [0, 0, 1, 1]


def byte_tokenizer():
    return Tokenizer.from_ranks({bytes([byte]): byte for byte in range(256)})


def test_a_stop_string_ends_the_request_with_the_token_that_completes_it():
    token_ids = expected_tokens([9], 40)
    stop = bytes(token_ids[10:12]).decode()
    end = bytes(token_ids).decode().index(stop) + 2
    core, _ = make_core(tokenizer=byte_tokenizer())
    outputs = run(
        core, [message("r", [9], max_tokens=40, stop=("not there", stop)), message("other", [9], max_tokens=40)]
    )
    assert tokens_of(outputs["r"]) == token_ids[:end]
    assert (outputs["r"][-1].finish_reason, outputs["r"][-1].stop_reason) == (FinishReason.STOP, stop)
    assert tokens_of(outputs["other"]) == token_ids


def test_a_stop_string_in_the_reasoning_ends_nothing():
    stop = bytes(expected_tokens([9], 40)[10:12]).decode()
    request = replace(message("r", [9], max_tokens=40, stop=(stop,)), start_channel=Channel.REASONING)
    outputs = run(make_core(tokenizer=byte_tokenizer())[0], [request])["r"]
    assert tokens_of(outputs) == expected_tokens([9], 40)
    assert outputs[-1].finish_reason is FinishReason.LENGTH


def test_a_priority_is_refused_where_there_are_none_and_goes_first_where_there_are():
    urgent = replace(message("urgent", [5], max_tokens=3), priority=-1)
    core, _ = make_core()
    with pytest.raises(RequestError, match=r"priority is -1.*--scheduling-policy priority") as caught:
        core.add(urgent)
    assert caught.value.param == "priority"
    core, _ = make_core(max_num_seqs=1, has_priorities=True)
    ended = list(run(core, [message("usual", [5], max_tokens=3), urgent]))
    assert ended == ["urgent", "usual"]


def test_with_a_bound_between_tokens_an_answer_goes_on_in_time_beside_a_long_prompt():
    """The clock stands still but for the model, which takes 10 ms and 1 ms for each token."""
    now = [0.0]
    core, _ = make_core(max_itl_s=0.06, clock=lambda: now[0], budget=400, max_model_len=4000, num_blocks=2000)
    execute = core._runner.execute

    def take_time(batch):
        now[0] += 0.01 + 0.001 * batch.num_scheduled_tokens
        return execute(batch)

    core._runner.execute = take_time
    core.add(message("chat", [1, 2, 3], max_tokens=80))
    for _ in range(5):
        core.step()
    core.add(message("long", [4] * 1500, max_tokens=1))
    times, num_steps = [], 0
    while core.has_work:
        began = now[0]
        names = {output.request_id for output in core.step()}
        if "chat" in names:
            times.append(now[0] - began)
        if "long" in names:
            num_steps = len(times)
    assert len(times) == 75
    assert max(times) <= 0.06
    # 37 tokens a step would be 41 steps
    assert 0 < num_steps <= 55


def test_a_request_past_its_timeout_ends_wherever_it_stands_and_frees_everything():
    now = [0.0]
    core, _ = make_core(clock=lambda: now[0], max_num_seqs=2, budget=8)
    core.add(replace(message("deciding", [1, 2], max_tokens=100), timeout_s=5.0))
    core.add(message("patient", [3], max_tokens=8))
    core.step()
    core.add(replace(message("waiting", [4], max_tokens=9), timeout_s=1.0))
    for _ in range(3):
        now[0] += 1.0
        core.step()
    assert set(core.live_request_ids) == {"deciding", "patient"}
    now[0] = 5.0
    (late,) = [output for output in core.step() if output.request_id == "deciding"]
    assert (late.finish_reason, late.token_ids, late.num_output_tokens) == (FinishReason.TIMEOUT, (), 4)
    assert late.error == "the request took longer than its timeout of 5 s; it had 4 tokens of its answer"
    core.check_integrity()
    while core.has_work:
        core.step()
    core.check_integrity()
    assert core.stats().finished_total[FinishReason.TIMEOUT] == 2
    assert core.stats().finished_total[FinishReason.LENGTH] == 1
    core.add(message("deciding", [1, 2], max_tokens=2))
    now[0] = 100.0
    assert [output.finish_reason for output in core.step()] == [None], "the earlier deadline is forgotten"


def test_a_request_that_ends_in_time_is_not_ended_again():
    now = [0.0]
    core, _ = make_core(clock=lambda: now[0])
    found = run(core, [replace(message("r", [5], max_tokens=3), timeout_s=1.0)])
    now[0] = 9.0
    assert core.step() == []
    assert tokens_of(found["r"]) == expected_tokens([5], 3)


def test_what_is_held_can_be_seen_with_the_states_that_are_kept():
    core, _ = make_core()
    run(core, [message("a", list(range(20)), max_tokens=3)])
    shown = core.inspect()
    assert shown["requests"] == []
    assert shown["tiers"] == []
    assert shown["usage"]["slots_kept"] == len(shown["kept_states"]) > 0
    # the answer's last token was never computed
    assert max(state["num_tokens"] for state in shown["kept_states"]) == 22
    core.add(message("b", list(range(20)), max_tokens=3))
    core.step()
    (held,) = core.inspect()["requests"]
    assert held["id"] == "b"

"""An engine under load that lasts: everything ends, nothing is lost, and it is as able at the end as at the start.

The runner computes nothing, so that thousands of steps cost little; what is tested is who runs when.
"""

import random
from dataclasses import replace

import numpy as np
import pytest

from perilune.cache.manager import CacheManager
from perilune.config.media import MediaConfig
from perilune.engine.batch import StepResult
from perilune.engine.core import EMBEDDING_SHARE, CoreLimits, EngineCore
from perilune.engine.request import FinishReason, GenerateRequest, ImageInput
from perilune.sampling.logprobs import SampledToken
from perilune.sampling.params import SamplingParams

TOKEN = 7


class IdleRunner:
    """Yields the same token for everyone; takes `now` on by `step_s`, and fails the requests in `failing`."""

    def __init__(self):
        self.now_s = 0.0
        self.step_s = 0.01
        self.failing = set()
        self.num_sequences = 0

    def execute(self, batch):
        self.now_s += self.step_s
        self.num_sequences = len(batch.sequences)
        wanted = [sequence.request.request_id for sequence in batch.sequences if sequence.needs_token]
        failures = {request_id: "it was planned to fail" for request_id in wanted if request_id in self.failing}
        tokens = {request_id: [SampledToken(TOKEN, None)] for request_id in wanted if request_id not in failures}
        return StepResult(tokens, failures)

    def erase_blocks(self, block_ids):
        pass

    def settle(self):
        pass

    def is_sound(self, slot):
        return True


def make_engine(*, num_blocks=400, num_seqs=16, budget=128, max_model_len=4000, images=None, **limits):
    runner = IdleRunner()
    core = EngineCore(
        runner,
        CacheManager(num_blocks=num_blocks, block_size=16, num_slots=num_seqs),
        CoreLimits(num_seqs, budget, max_model_len, 100, (0,), has_priorities=True, **limits),
        None,
        images=images,
        clock=lambda: runner.now_s,
    )
    return core, runner


def message(request_id, num_prompt_tokens, num_output_tokens, **fields):
    params = SamplingParams(max_tokens=num_output_tokens)
    return GenerateRequest(request_id, (5,) * num_prompt_tokens, params, **fields)


def run_to_end(core, max_steps=20_000):
    """All outputs by request id; fails when requests are left."""
    ended = {}
    for _ in range(max_steps):
        if not core.has_work:
            return ended
        for output in core.step():
            if output.is_finished:
                ended[output.request_id] = output
        core.check_integrity()
    raise AssertionError(f"{len(core.live_request_ids)} requests are left after {max_steps} steps")


@pytest.mark.parametrize("num_blocks", [10_000, 260])
@pytest.mark.parametrize("max_itl_s", [None, 0.05])
def test_answers_of_one_to_two_thousand_tokens_all_end_also_the_last_of_them(num_blocks, max_itl_s):
    """64 at once; 260 blocks hold two of the longest, so that most are set back many times."""
    core, _ = make_engine(num_blocks=num_blocks, max_itl_s=max_itl_s)
    lengths = {f"r{index}": 1 + index * 1999 // 63 for index in range(64)}
    for request_id, length in lengths.items():
        core.add(message(request_id, 20, length))
    ended = run_to_end(core)
    assert {request_id: output.num_output_tokens for request_id, output in ended.items()} == lengths
    assert {output.finish_reason for output in ended.values()} == {FinishReason.LENGTH}
    assert max(lengths.values()) == 2000
    assert (core.stats().num_preemptions_total > 0) == (num_blocks == 260)


def wave(core, runner, number, drawn):
    """Requests of all kinds, some of which leave, fail or run out of time; gives how many ran at once at most."""
    most = 0
    for index in range(60):
        request = message(
            f"w{number}-{index}", drawn.randint(1, 200), drawn.randint(1, 400), priority=drawn.choice((0, 0, 0, 1, -1))
        )
        if drawn.random() < 0.2:
            request = replace(request, timeout_s=drawn.uniform(0.005, 3.0))
        if drawn.random() < 0.1:
            runner.failing.add(request.request_id)
        core.add(request)
    while core.has_work:
        if drawn.random() < 0.02:
            core.abort(drawn.choice(core.live_request_ids))
        core.step()
        core.check_integrity()
        most = max(most, runner.num_sequences)
    return most


def test_after_many_waves_of_load_as_many_run_at_once_as_in_the_first_and_everything_is_free():
    core, runner = make_engine(num_blocks=120)
    drawn = random.Random(1)
    ran = [wave(core, runner, number, drawn) for number in range(40)]
    assert sum(ran[-10:]) >= 0.9 * sum(ran[:10]) >= 80
    stats = core.stats()
    assert stats.blocks_used == stats.slots_used == stats.num_running == stats.num_waiting == 0
    assert sum(stats.finished_total.values()) == 40 * 60
    for reason in (FinishReason.LENGTH, FinishReason.ABORT, FinishReason.TIMEOUT, FinishReason.ERROR):
        assert stats.finished_total[reason] > 40, reason
    assert stats.num_preemptions_total > 40
    # the whole cache is there for one request again
    core.add(message("whole", 119 * 16 - 1, 2))
    assert run_to_end(core)["whole"].finish_reason is FinishReason.LENGTH


def test_the_time_in_the_queue_is_that_until_the_first_step_and_depth_is_told_meanwhile():
    core, runner = make_engine(num_seqs=1)
    runner.step_s = 0.5
    for name in "abc":
        core.add(message(name, 4, 4))
    core.step()
    assert (core.stats().num_running, core.stats().num_waiting) == (1, 2)
    run_to_end(core)
    queued = core.stats().queue_time_s
    assert (queued.count, queued.total) == (3, 0.0 + 2.0 + 4.0)


class Album:
    """Embeds at once, and remembers how much time it was given."""

    def __init__(self):
        self.budgets_s = []

    def is_embedded(self, image):
        return bool(self.budgets_s)

    def embed(self, awaited, budget_s):
        self.budgets_s.append(budget_s)


def test_pictures_take_only_a_part_of_the_bound_between_tokens():
    album = Album()
    core, runner = make_engine(images=album, max_itl_s=0.05, media=MediaConfig())
    runner.step_s = 0.04
    core.add(message("chat", 3, 50))
    core.step()
    picture = ImageInput(1, 1, b"digest", 2, 2, np.zeros((4, 3, 14, 14), np.uint8))
    core.add(message("picture", 3, 2, images=(picture,)))
    run_to_end(core)
    assert album.budgets_s == [0.05 * EMBEDDING_SHARE]

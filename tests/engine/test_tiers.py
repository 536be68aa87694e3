"""What went to other memory and came back is what it was, on a model where a wrong row or state gives other tokens; and
nothing that a tier does harms a request."""

import random
import threading

import pytest

from perilune.cache.tiers.disk import DiskTier
from perilune.cache.tiers.stack import TierStack
from perilune.cache.tiers.store import TierStats
from perilune.engine.request import FinishReason
from tests.cache.tiers.objects import IDENTITY, RecordingStore
from tests.engine.counting_model import expected_tokens, make_core, tokens_of
from tests.engine.test_prefix_cache import BLOCK_SIZE, last, message

PLENTY = 10**8
LONG_S = 60.0
NO_STATS = TierStats("disk", num_objects=0, bytes_used=0, budget_bytes=PLENTY)
LONG_PROMPT = [(7 * i) % 50 for i in range(30)]
PROMPT = LONG_PROMPT[:15]


class GatedStore(RecordingStore):
    """A slow tier whose reads wait for `gate`, and that tells how many have begun."""

    def __init__(self):
        super().__init__()
        self.gate = threading.Event()
        self.has_begun = threading.Event()
        self.keys_read = []

    def get(self, key):
        self.keys_read.append(key)
        self.has_begun.set()
        self.gate.wait()
        return super().get(key)

    def stats(self):
        return NO_STATS


@pytest.fixture
def open_stack():
    opened = []

    def call(*arguments, **options):
        opened.append(TierStack(*arguments, **options))
        return opened[-1]

    yield call
    for stack in opened:
        if isinstance(stack._slow, GatedStore):
            stack._slow.gate.set()
        stack.close()


def small_core(stack, **options):
    """12 blocks of 4 tokens, and one kept state."""
    return make_core(stack=stack, **{"num_blocks": 12, "max_num_seqs": 2, "num_kept": 1, **options})


def put_out(core, name="other", seed=0):
    """A request that needs all the room there is."""
    chosen = random.Random(seed)
    prompt = [chosen.randrange(50) for _ in range(core._cache.capacity_tokens - 5)]
    outputs = last(core, message(name, prompt))
    assert tokens_of(outputs) == expected_tokens(prompt, 6)


def settle(stack):
    """Wait until what was given to the slow tier is there."""
    stack._writer.flush(threading.TIMEOUT_MAX)


def assert_right(core, request_id, prompt, num_cached):
    outputs = last(core, message(request_id, prompt))
    assert tokens_of(outputs) == expected_tokens(prompt, 6)
    assert outputs[-1].num_cached_tokens == num_cached


@pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 9, 15, 16, 17])
@pytest.mark.parametrize("where", ["host", "disk"])
def test_an_evicted_prompt_is_restored_at_its_next_sighting(open_stack, tmp_path, length, where):
    stack = open_stack(PLENTY) if where == "host" else open_stack(0, DiskTier(tmp_path, PLENTY, IDENTITY))
    core, _ = small_core(stack)
    prompt = [(11 * i) % 50 for i in range(length)]
    assert_right(core, "a", prompt, 0)
    put_out(core)
    assert core._cache._index.match(core_chain(prompt), length).num_row_tokens == 0
    if where == "disk":
        settle(stack)
    assert_right(core, "b", prompt, length - 1)
    assert core.stats().tier_tokens_hit_total == {"host": 0, "disk": 0, where: length - 1}
    assert core.stats().tiers[0].name == where
    assert core.stats().tiers[0].num_hits > 0


def core_chain(prompt):
    from perilune.cache.chain import PrefixChain

    return PrefixChain(list(prompt), 4)


def test_the_next_turn_goes_on_from_a_tier_where_the_answer_ended(open_stack):
    core, _ = small_core(open_stack(PLENTY))
    prompt = LONG_PROMPT[:18]
    answer = tokens_of(last(core, message("a", prompt)))
    put_out(core)
    assert_right(core, "b", [*prompt, *answer, 30, 31], len(prompt) + len(answer) - 1)


def test_a_state_that_was_evicted_before_its_rows_is_loaded_alone(open_stack):
    stack = open_stack(PLENTY)
    core, _ = make_core(stack=stack, num_kept=1, max_num_seqs=1)
    assert_right(core, "a", PROMPT, 0)
    for index in range(3):
        assert_right(core, f"x{index}", [index + 1, 7, 9], 0)
    assert core.stats().blocks_evicted_total == 0
    assert core.stats().states_evicted_total > 0
    assert_right(core, "b", PROMPT, len(PROMPT) - 1)
    assert core.stats().tier_tokens_hit_total["host"] > 0


def test_what_was_loaded_once_is_found_without_the_tier_by_the_next(open_stack):
    stack = open_stack(PLENTY)
    core, _ = small_core(stack, num_kept=2)
    assert_right(core, "a", PROMPT, 0)
    put_out(core)
    assert_right(core, "b", PROMPT, len(PROMPT) - 1)
    num_hits = core.stats().tiers[0].num_hits
    assert num_hits > 0
    assert_right(core, "c", PROMPT, len(PROMPT) - 1)
    assert core.stats().tiers[0].num_hits == num_hits


@pytest.mark.parametrize("host_bytes", [0, PLENTY])
def test_sessions_survive_a_restart(open_stack, tmp_path, host_bytes):
    core, _ = make_core(stack=open_stack(host_bytes, DiskTier(tmp_path, PLENTY, IDENTITY)))
    answers = {}
    for index in range(4):
        answers[index] = tokens_of(last(core, message(f"a{index}", [index, *PROMPT])))
    core.close(LONG_S)
    core, _ = make_core(stack=open_stack(host_bytes, DiskTier(tmp_path, PLENTY, IDENTITY)))
    for index, answer in answers.items():
        prompt = [index, *PROMPT, *answer, 3, 4]
        assert_right(core, f"b{index}", prompt, len(prompt) - 3)
    assert core.stats().tiers[-1].num_damaged == 0


def test_what_was_evicted_to_memory_survives_a_restart_too(open_stack, tmp_path):
    core, _ = small_core(open_stack(PLENTY, DiskTier(tmp_path, PLENTY, IDENTITY)))
    assert_right(core, "a", PROMPT, 0)
    put_out(core)
    core.close(LONG_S)
    core, _ = small_core(open_stack(PLENTY, DiskTier(tmp_path, PLENTY, IDENTITY)))
    assert_right(core, "b", PROMPT, len(PROMPT) - 1)


def test_a_damaged_or_missing_file_is_a_miss_and_the_answer_is_right(open_stack, tmp_path):
    for damage in (b"", b"x" * 200, None):
        stack = open_stack(0, DiskTier(tmp_path, PLENTY, IDENTITY))
        core, _ = small_core(stack)
        assert_right(core, "a", PROMPT, 0)
        put_out(core)
        settle(stack)
        for path in list(tmp_path.rglob("block-*"))[:40]:
            path.unlink() if damage is None else path.write_bytes(damage)
        assert_right(core, "b", PROMPT, 0)
        core.check_integrity()
        stack.close()


def test_a_store_that_fails_costs_only_time(open_stack):
    store = RecordingStore()
    store.stats = lambda: NO_STATS
    core, _ = small_core(open_stack(0, store))
    assert_right(core, "a", PROMPT, 0)
    put_out(core)
    settle(core._tiers._stack)
    store.is_broken = True
    assert_right(core, "b", PROMPT, 0)
    put_out(core, "y", seed=1)
    assert_right(core, "c", PROMPT, 0)


def evicted(open_stack, prompt=PROMPT, **options):
    """A core whose slow tier, and nothing else, has `prompt`, and reads only when told to."""
    store = GatedStore()
    stack = open_stack(0, store)
    core, model = small_core(stack, **options)
    assert_right(core, "a", prompt, 0)
    put_out(core)
    settle(stack)
    return core, model, store


def test_others_go_on_while_a_request_waits_for_its_load(open_stack):
    core, model, store = evicted(open_stack, num_blocks=14)
    core.add(message("waits", PROMPT))
    core.step()
    assert store.has_begun.wait(LONG_S)
    core.add(message("goes on", [1, 2, 3], max_tokens=4))
    found = []
    while "goes on" in core.live_request_ids:
        found += core.step()
        core.check_integrity()
    assert {output.request_id for output in found} == {"goes on"}
    assert tokens_of(found) == expected_tokens([1, 2, 3], 4)
    assert core.stats().num_waiting == 1
    num_batches = len(model.batches)
    store.gate.set()
    outputs = finish(core)
    assert tokens_of(outputs["waits"]) == expected_tokens(PROMPT, 6)
    assert outputs["waits"][-1].num_cached_tokens == len(PROMPT) - 1
    assert model.batches[num_batches].token_ids.tolist() == PROMPT[-1:]


def finish(core):
    outputs = {}
    while core.has_work:
        for output in core.step():
            outputs.setdefault(output.request_id, []).append(output)
        core.check_integrity()
    return outputs


def test_an_abort_during_a_load_frees_its_room_only_when_nobody_writes_there(open_stack):
    core, _, store = evicted(open_stack)
    core.add(message("leaves", PROMPT))
    core.step()
    assert store.has_begun.wait(LONG_S)
    held = set(core._cache.block_table("leaves"))
    core.abort("leaves")
    assert core.live_request_ids == ()
    assert core.has_work
    core.check_integrity()
    core.add(message("leaves", [5, 6, 7], max_tokens=1))
    core.step()
    assert core.stats().blocks_used >= len(held)
    store.gate.set()
    finish(core)
    assert core.stats().blocks_used == core.stats().slots_used == 0
    assert_right(core, "again", PROMPT, len(PROMPT) - 1)


def test_a_second_request_waits_for_what_is_being_loaded_for_the_first(open_stack):
    core, _, store = evicted(open_stack, LONG_PROMPT, num_blocks=32, max_num_seqs=4)
    requests = [message(f"r{index}", [*LONG_PROMPT[:28], 40 + index], max_tokens=2) for index in range(3)]
    for request in requests:
        core.add(request)
    core.step()
    assert store.has_begun.wait(LONG_S)
    core.step()
    assert core.stats().num_waiting == 3
    store.gate.set()
    outputs = finish(core)
    for request in requests:
        assert tokens_of(outputs[request.request_id]) == expected_tokens(request.prompt_token_ids, 2)
        assert outputs[request.request_id][-1].num_cached_tokens >= 16
    # 16 tokens have a state
    assert len([key for key in store.keys_read if key.kind == "block"]) == 16 // BLOCK_SIZE


def test_a_request_that_waits_for_another_s_load_runs_when_that_one_is_aborted(open_stack):
    core, _, store = evicted(open_stack, num_blocks=24, max_num_seqs=4)
    for name in ("first", "second"):
        core.add(message(name, PROMPT))
    core.step()
    assert store.has_begun.wait(LONG_S)
    core.abort("first")
    core.step()
    store.gate.set()
    outputs = finish(core)
    assert tokens_of(outputs["second"]) == expected_tokens(PROMPT, 6)


def test_an_engine_that_stops_during_a_load_ends(open_stack):
    core, _, store = evicted(open_stack)
    core.add(message("a", PROMPT))
    core.step()
    assert store.has_begun.wait(LONG_S)
    core.abort("a")
    store.gate.set()
    finish(core)
    core.close(LONG_S)


def test_a_broken_state_from_a_tier_fails_one_request_and_goes_from_the_tiers(open_stack):
    stack = open_stack(PLENTY)
    core, _ = small_core(stack)
    assert_right(core, "a", PROMPT, 0)
    put_out(core)
    for key, payload in list(stack._memory._order.items()):
        if key.kind == "state":
            stack._memory._order[key] = memoryview(b"\xff" * payload.nbytes)
    outputs = last(core, message("b", PROMPT))
    assert outputs[-1].finish_reason is FinishReason.ERROR
    assert_right(core, "c", PROMPT, 0)


def test_many_kept_states_beyond_the_room_for_them_are_neither_an_error_nor_a_leak(open_stack):
    stack = open_stack(3000)
    core, _ = make_core(stack=stack, num_kept=2, num_blocks=40, budget=64)
    for index in range(60):
        prompt = [index % 50, index // 50, *PROMPT[:20]]
        assert_right(core, f"r{index}", prompt, 0)
        assert core.stats().slots_kept <= 2 + 8
        assert core.stats().tiers[0].bytes_used <= 3000
    core.check_integrity()


@pytest.mark.parametrize("seed", range(6))
def test_answers_are_right_and_nothing_leaks_with_tiers_and_clients_that_leave(open_stack, tmp_path, seed):
    """A working set of several times the cache, shared beginnings, salts, aborts at any time, files that vanish."""
    chosen = random.Random(seed)
    host_bytes = chosen.choice([0, 500, 3000])
    stack = open_stack(host_bytes, DiskTier(tmp_path, chosen.choice([30, 2000]) * 4096, IDENTITY))
    core, _ = make_core(
        stack=stack, num_blocks=24, budget=16, max_num_seqs=4, num_kept=chosen.choice([0, 1, 5]), max_model_len=90
    )
    system = [chosen.randrange(50) for _ in range(23)]
    histories = [[*system[: chosen.choice([0, 8, 23])], *(chosen.randrange(50) for _ in range(9))] for _ in range(8)]
    found, expected, left = {}, {}, set()
    for index in range(80):
        if chosen.random() < 0.7 or core.has_work:
            prompt = [*chosen.choice(histories), *(chosen.randrange(50) for _ in range(chosen.randint(1, 9)))]
            salt, num_tokens = chosen.choice([None, "a"]), chosen.randint(1, 20)
            core.add(message(f"r{index}", prompt, max_tokens=num_tokens, salt=salt, hints=(23,)))
            expected[f"r{index}"] = expected_tokens(prompt, num_tokens)
            found[f"r{index}"] = ()
        for _ in range(chosen.randint(0, 12)):
            for output in core.step():
                found[output.request_id] += output.token_ids
            if core.live_request_ids and chosen.random() < 0.1:
                left.add(leaver := chosen.choice(core.live_request_ids))
                core.abort(leaver)
            core.check_integrity()
        if chosen.random() < 0.1:
            files = list(tmp_path.rglob("state-*"))
            for path in chosen.sample(files, len(files) // 4):
                path.unlink(missing_ok=True)
    for request_id, outputs in finish(core).items():
        found[request_id] += tokens_of(outputs)
    for request_id, tokens in found.items():
        assert tokens == expected[request_id][: len(tokens)]
        assert request_id in left or tokens == expected[request_id]
    assert core.stats().blocks_used == core.stats().slots_used == 0
    assert sum(core.stats().tier_tokens_hit_total.values()) > 0

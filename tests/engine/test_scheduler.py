"""The scheduler against the real cache manager, with no model: a step costs microseconds."""

from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.cache.manager import CacheManager
from perilune.engine.request import GenerateRequest, Request, RequestStatus
from perilune.engine.scheduler import Scheduler
from perilune.sampling.params import SamplingParams

BLOCK_SIZE = 4


class Simulation:
    """Steps a scheduler and pretends that every step yields the tokens it should."""

    def __init__(self, *, num_blocks=100, max_num_seqs=4, budget=16):
        self.cache = CacheManager(num_blocks=num_blocks, block_size=BLOCK_SIZE, num_slots=max_num_seqs)
        self.scheduler = Scheduler(self.cache, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
        self.budget = budget
        self.max_num_seqs = max_num_seqs
        self.live = []
        self.num_added = 0
        self.num_preempted = 0
        self.finished = []

    def add(self, num_prompt_tokens, num_output_tokens, *, priority=0, **params):
        message = GenerateRequest(
            f"r{self.num_added}", (7,) * num_prompt_tokens, SamplingParams(**params), priority=priority
        )
        total = num_prompt_tokens + num_output_tokens
        request = Request(message, self.num_added, arrival_s=0.0, max_total_tokens=total, seed=0)
        self.num_added += 1
        self.live.append(request)
        self.scheduler.add(request)
        return request

    def step(self):
        decoding = [item for item in self.live if item.status is RequestStatus.RUNNING and item.num_pending_tokens == 1]
        batch = self.scheduler.schedule()
        self.check(batch, decoding)
        self.num_preempted += batch.num_preempted
        for sequence in batch.sequences:
            request = sequence.request
            request.num_computed_tokens = sequence.seq_len
            if sequence.needs_token:
                request.token_ids.append(8)
            if request.num_tokens == request.max_total_tokens:
                self.scheduler.finish(request)
                self.live.remove(request)
                self.finished.append(request.request_id)
        self.cache.check_integrity()
        return batch

    def check(self, batch, decoding):
        counts = [sequence.num_scheduled_tokens for sequence in batch.sequences]
        assert min(counts, default=1) >= 1
        assert batch.num_scheduled_tokens <= self.budget
        assert len(counts) <= self.max_num_seqs
        assert all(count == 1 for count in counts[: batch.num_decodes])
        assert all(count > 1 for count in counts[batch.num_decodes :])
        scheduled = [sequence.request for sequence in batch.sequences]
        for request in decoding:
            assert request in scheduled or request.status is RequestStatus.PREEMPTED
        for sequence in batch.sequences:
            assert len(sequence.block_table) * BLOCK_SIZE >= sequence.seq_len
            first = sequence.num_computed_tokens
            assert list(sequence.token_ids) == sequence.request.token_ids[first : sequence.seq_len]

    def run(self, max_steps=10_000):
        for _ in range(max_steps):
            if not self.live:
                return
            self.step()
        raise AssertionError(f"{len(self.live)} requests are left after {max_steps} steps")


def test_an_idle_scheduler_plans_nothing():
    assert Simulation().scheduler.schedule().sequences == ()


def test_a_long_prompt_is_computed_in_chunks_of_the_budget():
    simulation = Simulation(budget=16)
    simulation.add(40, 1)
    assert [simulation.step().num_scheduled_tokens for _ in range(3)] == [16, 16, 8]
    assert simulation.live == []


def test_only_the_last_chunk_asks_for_a_token():
    simulation = Simulation(budget=16)
    simulation.add(20, 5)
    assert [simulation.step().sequences[0].needs_token for _ in range(3)] == [False, True, True]


def test_decodes_run_in_every_step_beside_a_long_prompt():
    simulation = Simulation(budget=8)
    chatting = [simulation.add(2, 30) for _ in range(3)]
    simulation.step()
    simulation.add(200, 1)
    for step in range(1, 20):
        batch = simulation.step()
        assert batch.num_decodes == 3
        assert batch.num_scheduled_tokens == 8
        assert [request.num_output_tokens for request in chatting] == [step + 1] * 3


def test_a_prompt_advances_beside_as_many_decodes_as_there_can_be():
    simulation = Simulation(budget=4, max_num_seqs=4)
    for _ in range(3):
        simulation.add(1, 50)
    simulation.step()
    slow = simulation.add(10, 1)
    for done in range(1, 10):
        simulation.step()
        assert slow.num_computed_tokens == done


def test_requests_are_admitted_in_order_of_arrival_up_to_the_limit():
    simulation = Simulation(max_num_seqs=2, budget=16)
    requests = [simulation.add(2, 3) for _ in range(4)]
    simulation.step()
    assert [request.status is RequestStatus.RUNNING for request in requests] == [True, True, False, False]
    simulation.run()
    assert simulation.finished == ["r0", "r1", "r2", "r3"]


def test_several_prompts_share_one_step():
    simulation = Simulation(budget=16)
    for _ in range(3):
        simulation.add(5, 1)
    assert [sequence.num_scheduled_tokens for sequence in simulation.step().sequences] == [5, 5, 5]


def test_a_tail_of_one_prompt_token_counts_as_a_decode_and_comes_first():
    simulation = Simulation(budget=16)
    simulation.add(17, 2)
    simulation.step()
    simulation.add(5, 1)
    batch = simulation.step()
    assert [sequence.num_scheduled_tokens for sequence in batch.sequences] == [1, 5]
    assert batch.num_decodes == 1


def test_the_youngest_is_preempted_keeps_its_tokens_and_starts_over():
    simulation = Simulation(num_blocks=5, budget=16)
    old = simulation.add(7, 10)
    young = simulation.add(7, 10)
    simulation.step()
    while young.status is RequestStatus.RUNNING:
        simulation.step()
    assert old.status is RequestStatus.RUNNING
    assert young.status is RequestStatus.PREEMPTED
    assert young.num_computed_tokens == 0
    assert young.num_output_tokens > 0
    kept = list(young.token_ids)
    simulation.run()
    assert simulation.finished == ["r0", "r1"]
    assert young.token_ids[: len(kept)] == kept
    assert simulation.num_preempted >= 1


def test_a_preempted_request_comes_back_before_younger_ones():
    simulation = Simulation(num_blocks=6, max_num_seqs=3, budget=16)
    simulation.add(7, 12)
    simulation.add(7, 12)
    simulation.step()
    for _ in range(3):
        simulation.add(7, 1)
    simulation.run()
    assert simulation.num_preempted >= 1
    assert simulation.finished[:2] == ["r0", "r1"]


def test_a_newcomer_leaves_a_block_for_each_running_request():
    simulation = Simulation(num_blocks=5, budget=16)
    simulation.add(7, 10)
    simulation.step()
    late = simulation.add(9, 1)
    simulation.step()
    assert late.status is RequestStatus.WAITING
    assert simulation.num_preempted == 0


def test_finishing_frees_a_request_wherever_it_stands():
    simulation = Simulation(max_num_seqs=2)
    running, partial, waiting = simulation.add(3, 9), simulation.add(40, 9), simulation.add(3, 9)
    simulation.step()
    assert partial.num_pending_tokens > 1
    for request in (waiting, partial, running):
        simulation.scheduler.finish(request)
        simulation.cache.check_integrity()
    assert simulation.cache.usage.blocks_used == simulation.cache.usage.slots_used == 0
    assert simulation.scheduler.schedule().sequences == ()


def test_prompt_logprobs_are_asked_for_once_per_prompt_token():
    simulation = Simulation(budget=4)
    request = simulation.add(10, 3, prompt_logprobs=0)
    targets, rows = [], []
    while simulation.live:
        batch = simulation.step()
        targets += batch.sequences[0].logprob_targets
        rows += [batch.sequences[0].num_computed_tokens + row for row in batch.sequences[0].logits_rows]
        request.prompt_logprobs += [None] * len(batch.sequences[0].logprob_targets)
    assert targets == list(range(1, 10))
    assert rows == [*range(9), 9, 10, 11]


def test_prompt_logprobs_that_are_there_are_not_asked_for_again():
    simulation = Simulation(budget=4)
    request = simulation.add(10, 3, prompt_logprobs=0)
    request.prompt_logprobs += [None] * 5
    targets = [target for _ in range(3) for target in simulation.step().sequences[0].logprob_targets]
    assert targets == [6, 7, 8, 9]


workloads = st.lists(
    st.tuples(st.integers(0, 6), st.integers(1, 30), st.integers(1, 18), st.one_of(st.none(), st.integers(0, 12))),
    min_size=1,
    max_size=14,
)


@given(workloads, st.integers(12, 30), st.integers(1, 5), st.integers(0, 20))
@settings(max_examples=150, deadline=None)
def test_every_workload_ends_within_the_budget_and_leaves_nothing(workload, num_blocks, max_num_seqs, extra):
    """Arrivals over time in a tiny pool, some aborted: `Simulation.check` holds in each step."""
    simulation = Simulation(num_blocks=num_blocks, max_num_seqs=max_num_seqs, budget=max_num_seqs + extra)
    deadlines = {}
    step = 0
    for delay, num_prompt_tokens, num_output_tokens, patience in workload:
        for _ in range(delay):
            simulation.step()
            step += 1
        request = simulation.add(num_prompt_tokens, num_output_tokens)
        if patience is not None:
            deadlines[request.request_id] = step + patience
    while simulation.live:
        for request in [item for item in simulation.live if deadlines.get(item.request_id, step + 1) <= step]:
            simulation.scheduler.finish(request)
            simulation.live.remove(request)
        simulation.step()
        step += 1
        assert step < 5000
    usage = simulation.cache.usage
    assert usage.blocks_used == usage.slots_used == 0

"""Who waits for whom: short and long prompts, answers in the making, priorities."""

from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.engine.policy.budget import LEAST_PROMPT_TOKENS, StepBudget
from perilune.engine.request import RequestStatus
from perilune.engine.scheduler import MOST_OVERTAKEN
from tests.engine.policy.test_budget import Machine
from tests.engine.test_scheduler import Simulation

LONG = 100_000


def steps_until_first_token(simulation, request):
    for count in range(1, 100_000):
        simulation.step()
        if request.num_output_tokens:
            return count
    raise AssertionError("no token came")


def test_a_short_prompt_does_not_wait_for_a_prefill_of_a_hundred_thousand_tokens():
    simulation = Simulation(num_blocks=60_000, budget=512)
    long = simulation.add(LONG, 1)
    simulation.step()
    for _ in range(5):
        assert steps_until_first_token(simulation, simulation.add(200, 1)) == 1
    assert long.num_computed_tokens >= 512 + 5 * 256


def test_a_short_prompt_passes_long_ones_that_wait_and_would_get_nothing():
    simulation = Simulation(num_blocks=100_000, budget=512, max_num_seqs=4)
    longs = [simulation.add(LONG, 1) for _ in range(6)]
    simulation.step()
    assert [request.status is RequestStatus.RUNNING for request in longs] == [True, True, *[False] * 4]
    assert steps_until_first_token(simulation, simulation.add(200, 1)) == 1


def test_a_short_prompt_passes_one_that_the_cache_has_no_room_for():
    simulation = Simulation(num_blocks=250, budget=64)
    simulation.add(800, 10)
    simulation.step()
    blocked = simulation.add(600, 10)
    assert steps_until_first_token(simulation, simulation.add(20, 2)) == 1
    assert blocked.status is RequestStatus.WAITING
    simulation.run()


def test_a_request_that_is_not_much_shorter_waits_its_turn():
    simulation = Simulation(num_blocks=250, budget=64)
    simulation.add(800, 10)
    simulation.step()
    simulation.add(600, 10)
    later = simulation.add(160, 10)
    simulation.step()
    assert later.status is RequestStatus.WAITING


def test_short_requests_without_end_delay_a_blocked_long_one_by_a_fixed_number_of_them():
    simulation = Simulation(num_blocks=250, max_num_seqs=8, budget=64)
    simulation.add(800, 10)
    simulation.step()
    blocked = simulation.add(900, 1)
    num_passed = 0
    for _ in range(600):
        short = simulation.add(20, 30)
        simulation.step()
        num_passed += short.status is RequestStatus.RUNNING and blocked.status is RequestStatus.WAITING
        if blocked.request_id in simulation.finished:
            break
    assert blocked.request_id in simulation.finished
    assert 0 < num_passed <= MOST_OVERTAKEN == blocked.num_overtaken


def test_short_requests_without_end_leave_half_of_each_step_to_the_oldest_prompt():
    simulation = Simulation(num_blocks=1000, max_num_seqs=16, budget=100)
    simulation.add(10, 10_000)
    simulation.step()
    long = simulation.add(2000, 1)
    for step in range(1, 40):
        for _ in range(10):
            simulation.add(40, 1)
        simulation.step()
        assert long.num_computed_tokens >= 49 * step


def test_a_preempted_request_is_passed_by_nobody():
    simulation = Simulation(num_blocks=60, budget=32, max_num_seqs=4)
    simulation.add(100, 100)
    young = simulation.add(100, 100)
    while young.status is not RequestStatus.PREEMPTED:
        simulation.step()
    short = simulation.add(4, 4)
    while young.status is RequestStatus.PREEMPTED:
        assert short.status is RequestStatus.WAITING
        simulation.step()
    simulation.run()


class TimedSimulation(Simulation):
    """Steps take what a machine takes; the budget learns from them, as the core has it do."""

    def __init__(self, machine, bound_s, **options):
        super().__init__(**options)
        self.steps = StepBudget(bound_s, self.budget)
        self.machine = machine
        self.latencies = []
        schedule = self.scheduler.schedule
        self.scheduler.schedule = lambda: schedule(self.steps.prompt_tokens)

    def step(self):
        batch = super().step()
        num_prompt_tokens = batch.num_scheduled_tokens - batch.num_decodes
        seconds = self.machine.seconds(num_prompt_tokens, batch.num_decodes)
        self.steps.observe(num_prompt_tokens, batch.num_decodes, seconds)
        if batch.num_decodes:
            self.latencies.append(seconds)
        return batch


def test_an_answer_beside_long_prefills_without_end_keeps_the_bound_between_its_tokens_and_the_prefills_go_on():
    machine = Machine(0.004, 0.001, 100e-6, noise=0.05)
    simulation = TimedSimulation(machine, 0.05, num_blocks=60_000, budget=2048, max_num_seqs=4)
    chat = simulation.add(50, 1000)
    num_prefilled = 0
    while chat.request_id not in simulation.finished:
        if sum(request is not chat for request in simulation.live) < 2:
            simulation.add(20_000, 1)
            num_prefilled += 1
        simulation.step()
    assert len(simulation.latencies) >= 999
    assert max(simulation.latencies) <= 0.05
    # 1000 steps of 50 ms at 100 us per token
    assert num_prefilled >= 10


def test_prefills_go_on_where_a_step_alone_takes_longer_than_the_bound():
    simulation = TimedSimulation(Machine(0.5, 0.1, 1e-3), 0.05, num_blocks=1000, budget=512)
    simulation.add(3, 1000)
    simulation.step()
    slow = simulation.add(800, 1)
    for count in range(1, 50):
        simulation.step()
        assert slow.num_computed_tokens == LEAST_PROMPT_TOKENS * count


def test_a_more_urgent_request_is_admitted_first():
    simulation = Simulation(max_num_seqs=1, budget=32)
    simulation.add(2, 3)
    simulation.step()
    for priority in (5, 0, -1, 0, 5):
        simulation.add(2, 3, priority=priority)
    simulation.run()
    assert simulation.finished == ["r0", "r3", "r2", "r4", "r1", "r5"]


def test_the_least_urgent_request_is_preempted_first_and_the_youngest_among_equals():
    simulation = Simulation(num_blocks=12, budget=64, max_num_seqs=4)
    background = simulation.add(8, 30, priority=9)
    old, young = simulation.add(8, 12), simulation.add(8, 12)
    simulation.step()
    assert {x.status for x in (background, old, young)} == {RequestStatus.RUNNING}
    order = []
    while old.request_id not in simulation.finished:
        simulation.step()
        order += [x for x in (background, young) if x.status is RequestStatus.PREEMPTED and x not in order]
    assert order == [background] or order == [background, young]
    simulation.run()
    assert simulation.finished[-1] == background.request_id


def test_an_urgent_prompt_has_the_whole_step_before_one_that_can_wait():
    simulation = Simulation(num_blocks=1000, budget=64)
    background = simulation.add(1000, 1, priority=1)
    simulation.step()
    urgent = simulation.add(500, 1)
    steps_until_first_token(simulation, urgent)
    assert background.num_computed_tokens < 64 + 64


def test_requests_of_another_priority_do_not_pass_one_that_waits_for_room():
    simulation = Simulation(num_blocks=250, budget=64)
    steps_until_first_token(simulation, simulation.add(800, 10))
    blocked = simulation.add(600, 10)
    background = simulation.add(20, 2, priority=1)
    simulation.step()
    assert {blocked.status, background.status} == {RequestStatus.WAITING}


arrivals = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 60), st.integers(1, 12), st.integers(-1, 1)), min_size=1, max_size=16
)


@given(arrivals, st.integers(18, 40), st.integers(1, 4), st.integers(0, 24))
@settings(max_examples=150, deadline=None)
def test_every_request_of_any_priority_ends_and_the_most_urgent_is_never_set_back(drawn, num_blocks, seqs, extra):
    simulation = Simulation(num_blocks=num_blocks, max_num_seqs=seqs, budget=seqs + extra)
    for delay, num_prompt_tokens, num_output_tokens, priority in drawn:
        for _ in range(delay):
            simulation.step()
        simulation.add(num_prompt_tokens, num_output_tokens, priority=priority)
    for _ in range(5000):
        if not simulation.live:
            break
        running = [x for x in simulation.live if x.status is RequestStatus.RUNNING]
        first = min(running, key=lambda x: (x.message.priority, x.arrival_index), default=None)
        simulation.step()
        assert first is None or first.status is not RequestStatus.PREEMPTED
    assert not simulation.live
    assert simulation.cache.usage.blocks_used == simulation.cache.usage.slots_used == 0

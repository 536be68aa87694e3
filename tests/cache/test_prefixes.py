"""Taking up what earlier requests left: the manager against a memory that knows whose tokens lie where."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from perilune.cache.chain import ContentSpan, PrefixChain
from perilune.cache.manager import CacheManager
from perilune.cache.moves import CopyBlock
from perilune.cache.sealing import NEAR, SealPolicy

BLOCK_SIZE = 4


class Memory:
    """What a model would have written: in blocks the tokens of their rows, in slots all tokens behind a state."""

    def __init__(self, manager):
        self.manager = manager
        self.rows = {}
        self.states = {}
        self.chains = {}
        self.seals = {}
        self.computed = {}

    def admit(self, request_id, token_ids, *, salt=None, spans=(), **options):
        """Admit and make the moves; returns how many tokens were cached, or None."""
        chain = PrefixChain(list(token_ids), BLOCK_SIZE, salt, spans)
        admission = self.manager.admit(request_id, chain, **options)
        if admission is None:
            return None
        for move in admission.moves:
            memory = self.rows if isinstance(move, CopyBlock) else self.states
            memory[move.target] = memory[move.source]
        self.chains[request_id] = chain
        self.seals[request_id] = admission.seal_positions
        self.computed[request_id] = admission.num_cached_tokens
        self.check(request_id)
        return admission.num_cached_tokens

    def tokens_of(self, request_id):
        return self.chains[request_id]._token_ids

    def identity(self, request_id, count):
        """What must lie behind `count` tokens: the tokens, the salt and what the spans before there show."""
        chain = self.chains[request_id]
        shown = [(span.start, span.digest) for span in chain._spans if span.start < count]
        return (tuple(chain._token_ids[:count]), chain.key(0), tuple(shown))

    def check(self, request_id):
        """Every row and the state that the request takes up are of its own tokens."""
        count, table = self.computed[request_id], self.manager.block_table(request_id)
        for position in range(count):
            row = self.rows[table[position // BLOCK_SIZE]][position % BLOCK_SIZE]
            assert row == self.identity(request_id, position + 1)
        if count:
            assert self.states[self.manager.state_slot(request_id)] == self.identity(request_id, count)

    def compute(self, request_id, count):
        """One step of at most `count` tokens."""
        start, table = self.computed[request_id], self.manager.block_table(request_id)
        end = min(start + count, len(self.tokens_of(request_id)))
        wanted = [position for position in self.seals[request_id] if start < position <= end]
        seals = {position: self.manager.begin_seal(request_id, position) for position in wanted}
        for position in range(start, end):
            rows = dict(self.rows.get(table[position // BLOCK_SIZE], {}))
            rows[position % BLOCK_SIZE] = self.identity(request_id, position + 1)
            self.rows[table[position // BLOCK_SIZE]] = rows
            self.states[self.manager.state_slot(request_id)] = self.identity(request_id, position + 1)
            if seals.get(position + 1) is not None:
                self.states[seals[position + 1]] = self.identity(request_id, position + 1)
        self.computed[request_id] = end
        self.manager.commit(request_id, end)

    def release(self, request_id):
        end = self.computed[request_id]
        self.manager.release(request_id, keep_state=end if self.manager.wants_state(request_id, end) else 0)

    def serve(self, request_id, token_ids, **options):
        """A request from admission to its end; returns how many of its tokens were cached."""
        found = self.admit(request_id, token_ids, **options)
        assert found is not None
        self.compute(request_id, len(token_ids))
        self.release(request_id)
        self.manager.check_integrity()
        return found


def memory(*, num_blocks=100, num_slots=20, interval=1000):
    policy = SealPolicy(interval)
    return Memory(CacheManager(num_blocks=num_blocks, block_size=BLOCK_SIZE, num_slots=num_slots, policy=policy))


@pytest.mark.parametrize("length", [2, 3, 4, 5, 7, 8, 9, 31, 33])
def test_the_same_prompt_is_taken_up_at_its_second_sighting_but_for_one_token(length):
    found = memory()
    prompt = range(length)
    assert found.serve("first", prompt) == 0
    assert found.serve("second", prompt) == length - 1


@pytest.mark.parametrize("length", [4, 5, 7, 8, 9, 30])
def test_an_extended_prompt_is_taken_up_where_the_first_request_ended(length):
    found = memory()
    assert found.serve("first", range(length)) == 0
    assert found.serve("second", range(length + 9)) == length


def test_a_shared_beginning_is_taken_up_at_a_branch_point_at_the_second_sighting():
    found = memory()
    system = list(range(21))
    assert found.serve("first", [*system, *range(100, 140)], hints=(21,)) == 0
    assert found.serve("second", [*system, *range(200, 240)], hints=(21,)) == 21


def test_without_a_branch_point_the_third_request_takes_up_where_the_second_branched_off():
    found = memory()
    system = list(range(22))
    assert found.serve("first", [*system, *range(100, 300)]) == 0
    assert found.serve("second", [*system, *range(300, 500)]) == 0
    assert found.serve("third", [*system, *range(500, 700)]) == 20


def test_a_long_prompt_is_taken_up_at_its_intervals():
    found = memory(interval=8)
    system = list(range(22))
    assert found.serve("first", [*system, *range(100, 300)]) == 0
    assert found.serve("second", [*system, *range(300, 500)]) == 16


def test_other_salts_share_nothing():
    found = memory()
    assert found.serve("first", range(20), salt="a") == 0
    assert found.serve("second", range(20), salt="b") == 0
    assert found.serve("third", range(20)) == 0
    assert found.serve("fourth", range(20), salt="a") == 19


def test_equal_ids_that_show_other_pictures_are_other_prefixes():
    found = memory()
    prompt = [0, 1, 2, *[9] * 10, 3, 4, 5]
    assert found.serve("first", prompt, spans=[ContentSpan(3, 13, b"cat")]) == 0
    assert found.serve("second", prompt, spans=[ContentSpan(3, 13, b"dog")]) == 0
    assert found.serve("third", prompt, spans=[ContentSpan(3, 13, b"cat")]) == len(prompt) - 1


def test_a_picture_in_mid_history_leaves_what_was_before_it():
    found = memory()
    history = list(range(40))
    found.serve("first", history)
    with_picture = [*history, *[9] * 10, 3, 4]
    assert found.serve("second", with_picture, spans=[ContentSpan(40, 50, b"cat")]) == 40
    assert found.serve("third", with_picture, spans=[ContentSpan(40, 50, b"cat")]) == 51


def test_requests_that_run_at_once_share_full_blocks():
    found = memory()
    found.serve("first", range(16))
    found.admit("a", range(30))
    found.admit("b", range(40))
    assert found.manager.block_table("a")[:4] == found.manager.block_table("b")[:4]
    assert not set(found.manager.block_table("a")[4:]) & set(found.manager.block_table("b")[4:])
    assert found.manager.state_slot("a") != found.manager.state_slot("b")
    found.manager.check_integrity()


def test_one_that_must_compute_its_whole_prompt_does():
    found = memory()
    found.serve("first", range(20))
    assert found.serve("second", range(20), takes_up=False) == 0


def test_kept_blocks_are_room_for_whoever_needs_it():
    found = memory(num_blocks=8)
    found.serve("first", range(32))
    assert found.manager.usage.blocks_kept == 8
    assert found.serve("second", range(100, 132)) == 0
    assert found.manager.usage.blocks_evicted >= 7
    assert found.serve("first-again", range(32)) == 0


def test_the_end_of_a_prefix_is_evicted_before_its_beginning():
    found = memory(num_blocks=10, interval=4)
    found.serve("first", range(32))
    found.serve("other", range(100, 112))
    assert found.serve("first-again", range(32)) in (24, 28)


def test_running_requests_get_the_slots_of_kept_states():
    found = memory(num_slots=2)
    found.serve("first", range(8))
    found.admit("a", range(100, 110))
    found.admit("b", range(200, 210))
    assert found.manager.usage.slots_used == 2
    assert found.admit("c", range(300, 310)) is None
    found.manager.check_integrity()


def test_a_state_used_lately_outlives_one_that_was_not():
    found = memory(num_slots=4, interval=1000)
    found.serve("old", range(8))
    found.serve("new", range(100, 108))
    found.serve("old-again", range(8))
    found.serve("third", range(200, 208))
    assert found.serve("old-again", range(8)) == 7


def test_a_failed_request_takes_all_that_was_kept_of_its_tokens_with_it():
    found = memory()
    found.serve("first", range(32))
    found.serve("branch", [*range(30), 99, 98])
    found.admit("bad", range(34))
    freed = found.manager.discard("bad")
    assert freed
    found.manager.check_integrity()
    assert found.serve("again", range(32)) == 0


def test_what_a_neighbour_still_holds_is_forgotten_and_not_freed():
    found = memory()
    found.serve("first", range(16))
    found.admit("neighbour", range(30))
    found.admit("bad", range(20))
    freed = found.manager.discard("bad")
    assert not set(freed) & set(found.manager.block_table("neighbour"))
    found.check("neighbour")
    found.release("neighbour")
    found.manager.check_integrity()


def test_without_a_policy_nothing_is_kept():
    found = Memory(CacheManager(num_blocks=9, block_size=BLOCK_SIZE, num_slots=2))
    assert found.serve("first", range(20)) == 0
    assert found.manager.usage.blocks_kept == found.manager.usage.slots_kept == 0
    assert found.serve("second", range(20)) == 0


def test_a_hash_that_two_prefixes_share_is_no_hit(monkeypatch):
    monkeypatch.setattr(PrefixChain, "key", lambda self, num_tokens: num_tokens.to_bytes(2, "little"))
    found = memory()
    found.serve("first", range(16))
    assert found.serve("second", range(100, 116)) == 0


def test_positions_worth_a_copy():
    policy = SealPolicy(interval=100)
    assert policy.positions(0, 0, 250, ()) == (100, 200)
    assert policy.positions(0, 0, 290, ()) == (100, 200, 289)
    assert policy.positions(0, 0, 30, (10,)) == (10,)
    assert policy.positions(0, 0, 11 + NEAR + 1, (10,)) == (10, 11 + NEAR)
    assert policy.positions(150, 180, 250, (40, 150)) == (180, 200)
    assert policy.positions(29, 28, 30, ()) == ()
    assert policy.positions(0, 0, 1, ()) == ()


class PrefixWalk(RuleBasedStateMachine):
    """Requests over few tokens, so that many share beginnings, in a cache that is always too small."""

    def __init__(self):
        super().__init__()
        self.memory = memory(num_blocks=14, num_slots=5, interval=6)
        self.num_admitted = 0
        self.live = []

    @property
    def manager(self):
        return self.memory.manager

    @rule(
        parts=st.lists(st.sampled_from([(0,) * 5, (1,) * 4, (2, 3), (1,)]), min_size=1, max_size=7),
        salt=st.sampled_from([None, "a"]),
        takes_up=st.booleans(),
        hint=st.integers(0, 12),
        picture=st.sampled_from([(), (ContentSpan(2, 5, b"x"),), (ContentSpan(2, 5, b"y"),)]),
    )
    def admit(self, parts, salt, takes_up, hint, picture):
        self.num_admitted += 1
        request_id, token_ids = f"r{self.num_admitted}", [token_id for part in parts for token_id in part]
        options = {"salt": salt, "takes_up": takes_up, "hints": (hint,), "spans": picture}
        if self.memory.admit(request_id, token_ids, **options) is not None:
            self.live.append(request_id)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), count=st.integers(1, 12))
    def compute(self, data, count):
        request_id = data.draw(st.sampled_from(self.live))
        self.memory.compute(request_id, count)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), token_id=st.integers(0, 2))
    def generate(self, data, token_id):
        request_id = data.draw(st.sampled_from(self.live))
        tokens = self.memory.tokens_of(request_id)
        if self.manager.extend(request_id, len(tokens) + 1):
            tokens.append(token_id)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data):
        request_id = data.draw(st.sampled_from(self.live))
        self.live.remove(request_id)
        self.memory.release(request_id)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fail(self, data):
        request_id = data.draw(st.sampled_from(self.live))
        self.live.remove(request_id)
        freed = self.manager.discard(request_id)
        assert not {block for other in self.live for block in self.manager.block_table(other)} & set(freed)

    @invariant()
    def accounts_add_up(self):
        self.manager.check_integrity()
        assert self.manager.usage.slots_used == len(self.live)

    @invariant()
    def every_request_has_its_own_past(self):
        for request_id in self.live:
            self.memory.check(request_id)


PrefixWalk.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestPrefixWalk = PrefixWalk.TestCase

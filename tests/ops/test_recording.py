"""Recorded passes: what they repeat, what refuses them, and the memory they share."""

import gc

import pytest
import torch

from perilune import ops
from perilune.ops import _native
from perilune.ops.linear import WeightGroup
from perilune.ops.norm.reference import rms_norm
from perilune.ops.recording import Arena, record, replay

pytestmark = pytest.mark.skipif(_native.absence() is not None, reason=str(_native.absence()))


@pytest.fixture(autouse=True)
def empty_is_garbage():
    """Filling new memory would be a computation of torch, which refuses every recording."""


@pytest.fixture
def inputs():
    return torch.randn(3, 64), torch.randn(64)


def chain(x, weight):
    for _ in range(6):
        x = ops.add_rows(ops.rms_norm(x, weight, 1e-5), x)
    return x.view(3, 8, 8)


def test_a_replay_reads_what_its_inputs_hold_by_then(inputs, isa):
    x, weight = inputs
    recording = record(lambda: chain(x, weight), Arena())
    assert recording.refusal is None
    assert torch.equal(recording.result, chain(x, weight))
    for _ in range(3):
        x.copy_(torch.randn(3, 64))
        weight.mul_(1.1)
        replay(recording.program)
        assert torch.equal(recording.result, chain(x, weight))


def test_arrays_of_addresses_are_kept(inputs):
    x, weight = inputs
    candidates = [torch.randn(3, 64) for _ in range(4)]
    recording = record(lambda: ops.attn_res_mix(candidates, weight, weight, 1e-5), Arena())
    weights = WeightGroup(torch.randn(5, 64), torch.randn(32, 64))
    group = record(lambda: ops.linear_group(x, weights), Arena())
    candidates[2].normal_()
    x.normal_()
    gc.collect()
    replay(recording.program)
    replay(group.program)
    assert torch.equal(recording.result, ops.attn_res_mix(candidates, weight, weight, 1e-5))
    for ours, right in zip(group.result, ops.linear_group(x, weights), strict=True):
        assert torch.equal(ours, right)


@pytest.mark.parametrize(
    ("what", "function"),
    [
        ("aten.add.Tensor", lambda x, w: ops.rms_norm(x, w, 1e-5) + 1),
        ("aten.item.default", lambda x, w: ops.rms_norm(x * int(x.shape[0] > 9) if int(x[0, 0]) else x, w, 1e-5)),
        ("aten.contiguous.default", lambda x, w: ops.rms_norm(x[:, ::2], w[:32], 1e-5)),
        ("aten.to.dtype", lambda x, w: ops.rms_norm(x.to(torch.bfloat16), w.to(torch.bfloat16), 1e-5)),
        ("aten.lift_fresh.default", lambda x, w: ops.rms_norm(torch.tensor([[1.0] * 64]), w, 1e-5)),
        ("aten", lambda x, w: rms_norm(x, w, 1e-5)),
        ("aten.copy_.default", lambda x, w: x.copy_(ops.rms_norm(x, w, 1e-5))),
    ],
)
def test_what_a_replay_would_not_repeat_refuses_the_recording(inputs, what, function):
    with torch.inference_mode():
        recording = record(lambda: function(*inputs), Arena())
    assert recording.program is None
    assert recording.refusal.startswith(what)


def test_a_call_after_a_failed_recording_is_not_recorded(inputs):
    with pytest.raises(ZeroDivisionError):
        record(lambda: 1 / 0, Arena())
    program = _native.core().Program()
    ops.rms_norm(*inputs, 1e-5)
    assert len(program) == 0


def test_memory_is_used_again_when_no_view_needs_it(inputs):
    arena = Arena()
    recording = record(lambda: chain(*inputs), arena)
    # of twelve tensors four live at once at most
    assert arena.num_bytes <= 4 * 4096
    taken = arena.num_bytes
    other = record(lambda: chain(*inputs), arena)
    assert torch.equal(other.result, recording.result)
    assert other.result.data_ptr() != recording.result.data_ptr()
    assert arena.num_bytes <= taken + 4096


def test_an_alias_does_not_hold_the_memory(inputs):
    arena = Arena()
    recording = record(lambda: chain(*inputs), arena)
    alias, address = arena.alias(recording.result), recording.result.data_ptr()
    assert torch.equal(alias, recording.result)
    del recording
    found = {arena.place(torch.zeros(3, 64)).data_ptr()}
    kept = [arena.place(torch.zeros(3, 64)) for _ in range(6)]
    assert address in found | {tensor.data_ptr() for tensor in kept}


def test_a_call_that_fails_in_a_replay_is_an_error_there(inputs):
    ids, weight = torch.tensor([1, 2]), torch.randn(5, 16)
    recording = record(lambda: ops.embed_rows(weight, ids, torch.float32), Arena())
    ids[1] = 5
    with pytest.raises(IndexError, match="not a row"):
        replay(recording.program)

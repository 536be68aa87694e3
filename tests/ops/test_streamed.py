"""Experts that stay in files: passes give what they give from memory, whatever is read ahead, evicted or lost."""

import os
import random
from pathlib import Path

import pytest
import torch

from perilune import ops
from perilune.errors import CapacityError, CheckpointError
from perilune.ops import _native
from perilune.ops.moe import ExpertPlaces, ExpertStream, ExpertTable
from perilune.ops.moe.cases import ExpertsCase, experts_arguments
from perilune.ops.moe.reference import moe_experts_mxfp4 as reference

needs_core = pytest.mark.skipif(_native.absence() is not None, reason=str(_native.absence()))

LAYERS, EXPERTS, CHOSEN, LATENT, INNER = 3, 24, 4, 64, 96
BETAS = (4.0, 25.0)
SLOT_BYTES = 12 * 4096 + 16384


def layers_of_experts(num_layers=LAYERS, num_experts=EXPERTS):
    generator = torch.Generator().manual_seed(3)
    case = ExpertsCase(name="", rows=1, latent=LATENT, inner=INNER, num_experts=num_experts, num_chosen=CHOSEN)
    return [experts_arguments(case, generator)[3] for _ in range(num_layers)]


def write(directory: Path, layers, *, order="scattered", gap=1):
    """Files with the experts' tensors at places that nothing aligns; "together" keeps an expert's side by side."""
    chosen = random.Random(1)
    pieces = [
        (layer, expert, number, tensor)
        for layer, table in enumerate(layers)
        for expert, packed in enumerate(table)
        for number, tensor in enumerate(packed)
    ]
    if order == "scattered":
        chosen.shuffle(pieces)
    places = torch.zeros(len(layers), len(layers[0]), 6, 3, dtype=torch.int64)
    files = [directory / "a.bin", directory / "b.bin"]
    contents = [bytearray(b"x" * 37), bytearray(b"y" * 5000)]
    for at, (layer, expert, number, tensor) in enumerate(pieces):
        file = at % 2 if order == "scattered" else layer % 2
        data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        places[layer, expert, number] = torch.tensor([file, len(contents[file]), len(data)])
        contents[file] += data + b"z" * (gap if order == "scattered" else 0)
    for file, content in zip(files, contents, strict=True):
        file.write_bytes(content)
    return ExpertPlaces(tuple(map(str, files)), places, inner=INNER, latent=LATENT)


def inputs(rows, seed, dtype=torch.float32, num_experts=EXPERTS):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, LATENT, generator=generator).to(dtype)
    ids = torch.stack([torch.randperm(num_experts, generator=generator)[:CHOSEN] for _ in range(rows)])
    return x, ids, torch.rand(rows, CHOSEN, generator=generator)


@pytest.fixture(scope="module")
def layers():
    return layers_of_experts()


@needs_core
@pytest.mark.parametrize("order", ["scattered", "together"])
@pytest.mark.parametrize("num_slots", [1, CHOSEN, 11, LAYERS * EXPERTS])
def test_passes_equal_those_from_memory_whatever_is_read_ahead(layers, tmp_path, order, num_slots):
    stream = ExpertStream(write(tmp_path, layers, order=order), slot_bytes=SLOT_BYTES, num_slots=num_slots)
    chosen = random.Random(2)
    for step in range(120):
        layer, rows = chosen.randrange(LAYERS), chosen.choice((1, 1, 2, 7, 40))
        dtype, int8 = chosen.choice((torch.float32, torch.bfloat16)), chosen.random() < 0.3
        x, ids, weights = inputs(rows, step, dtype)
        for _ in range(chosen.randrange(3)):  # expectations, right ones and wrong ones, of this layer and of others
            guess = ids if chosen.random() < 0.5 else inputs(2, chosen.randrange(1000))[1]
            stream.table(chosen.randrange(LAYERS)).fetch(guess, is_certain=False)
        table = stream.table(layer)
        if chosen.random() < 0.8:
            table.fetch(ids, is_certain=True)
        found = ops.moe_experts_mxfp4(x, ids, weights, table, *BETAS, int8)
        assert torch.equal(found, ops.moe_experts_mxfp4(x, ids, weights, layers[layer], *BETAS, int8)), step
    stats = stream.stats()
    assert stream.take_faults() == []
    assert stream.num_bytes == num_slots * stream.cache.slot_bytes
    assert (stats.hits == stats.uses) == (num_slots == LAYERS * EXPERTS) or stats.hits < stats.uses
    if num_slots == LAYERS * EXPERTS:
        assert stats.read_bytes <= LAYERS * EXPERTS * SLOT_BYTES, "what fits is read once"


@needs_core
def test_tensors_side_by_side_are_read_together(layers, tmp_path):
    read = {}
    for order in ("scattered", "together"):
        (tmp_path / order).mkdir()
        places = write(tmp_path / order, layers, order=order, gap=9000)
        stream = ExpertStream(places, slot_bytes=SLOT_BYTES, num_slots=CHOSEN)
        x, ids, weights = inputs(1, 0)
        ops.moe_experts_mxfp4(x, ids, weights, stream.table(0), *BETAS)
        read[order] = stream.stats().read_bytes
    assert read["together"] <= CHOSEN * (sum(tensor.nbytes for tensor in layers[0][0]) + 2 * 4096)
    assert read["scattered"] > read["together"]


@needs_core
def test_a_pass_given_up_leaves_nothing_behind(layers, tmp_path):
    stream = ExpertStream(write(tmp_path, layers), slot_bytes=SLOT_BYTES, num_slots=CHOSEN)
    for step in range(20):
        stream.table(step % LAYERS).fetch(inputs(9, step)[1], is_certain=True)
    x, ids, weights = inputs(9, 99)
    found = ops.moe_experts_mxfp4(x, ids, weights, stream.table(1), *BETAS)
    assert torch.equal(found, ops.moe_experts_mxfp4(x, ids, weights, layers[1], *BETAS))


@needs_core
def test_experts_used_again_and_again_stay(layers, tmp_path):
    stream = ExpertStream(write(tmp_path, layers), slot_bytes=SLOT_BYTES, num_slots=12)
    popular = torch.tensor([[0, 1, 2, 3]])
    x, weights = torch.randn(1, LATENT), torch.rand(1, CHOSEN)

    def run(layer, ids):
        ops.moe_experts_mxfp4(x, ids, weights, stream.table(layer), *BETAS)

    for _ in range(10):
        run(0, popular)
    for layer in (1, 2):  # as many as the cache holds, each once
        for first in (0, 4, 8):
            run(layer, torch.arange(first, first + CHOSEN)[None])
    before = stream.stats().read_bytes
    run(0, popular)
    assert stream.stats().read_bytes == before


@needs_core
@pytest.mark.parametrize("is_announced", [True, False])
def test_tokens_of_an_expert_that_is_cut_off_are_void_and_others_are_not(layers, tmp_path, is_announced):
    places = write(tmp_path, layers, order="together")
    stream = ExpertStream(places, slot_bytes=SLOT_BYTES, num_slots=6)
    whole = Path(places.files[0]).read_bytes()
    file, begin, size = places.places[0, 7, 4].tolist()
    os.truncate(places.files[file], begin + size // 2)  # everything after the middle of expert 7 of layer 0
    x, _, weights = inputs(3, 5)
    ids = torch.tensor([[0, 1, 2, 3], [4, 7, 1, 2], [6, 5, 0, 3]])

    def run():
        if is_announced:
            stream.table(0).fetch(ids, is_certain=False)
            stream.table(0).fetch(ids, is_certain=True)
        return ops.moe_experts_mxfp4(x, ids, weights, stream.table(0), *BETAS)

    expected = ops.moe_experts_mxfp4(x, ids, weights, layers[0], *BETAS)
    found = run()
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2]], expected[[0, 2]])
    (fault,) = stream.take_faults()
    assert fault[0] == 1
    assert str(places.files[file]) in fault[1]
    assert f"ends at byte {begin + size // 2}" in fault[1]
    Path(places.files[0]).write_bytes(whole)
    assert torch.equal(run(), expected), "a file that is whole again serves again"
    assert stream.take_faults() == []


@needs_core
def test_what_cannot_be_opened_or_does_not_fit_is_refused(layers, tmp_path):
    places = write(tmp_path, layers)
    with pytest.raises(ValueError, match="exceeds its slot"):
        ExpertStream(places, slot_bytes=4096, num_slots=4)
    (tmp_path / "b.bin").unlink()
    with pytest.raises(CheckpointError, match=r"b\.bin cannot be opened: No such file"):
        ExpertStream(places, slot_bytes=SLOT_BYTES, num_slots=4)


@needs_core
def test_memory_that_the_system_refuses_is_named(layers, tmp_path):
    places = write(tmp_path, layers)
    with pytest.raises(CapacityError, match="lower expert_cache_bytes"):
        ExpertStream(places, slot_bytes=1 << 46, num_slots=LAYERS * EXPERTS)


def test_the_reference_reads_each_expert_anew(layers, tmp_path):
    places = write(tmp_path, layers)
    stream = ExpertStream(places, slot_bytes=SLOT_BYTES, num_slots=4)
    x, ids, weights = inputs(5, 4)
    expected = reference(x, ids, weights, ExpertTable(layers[2]), *BETAS)
    assert torch.equal(reference(x, ids, weights, stream.table(2), *BETAS), expected)
    os.truncate(places.files[0], 50)
    with pytest.raises(CheckpointError, match=r"a\.bin ends before byte"):
        reference(x, ids, weights, stream.table(2), *BETAS)

"""The tower against golden data: a float64 model written from the same description."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from perilune.config.model import NormEps
from perilune.config.parts import parse_vision
from perilune.config.section import Section
from perilune.models.vision import VisionModel, finished, merged, rotary_angles

FLOAT32_BOUND = 2e-5
BFLOAT16_BOUND, COSINE = 4e-2, 0.9995


@pytest.fixture(scope="module")
def golden(goldens_dir):
    return goldens_dir / "vision-tiny"


@pytest.fixture(params=["native", "reference"])
def backend(request):
    """Every op the tower uses, by one backend."""
    from perilune.ops.registry import apply_overrides

    names = ("dense_linear", "rms_norm", "patch_attention", "gelu_tanh") if request.param == "reference" else ()
    apply_overrides(dict.fromkeys(names, "reference"))
    yield request.param
    apply_overrides({})


def load(golden, dtype):
    config = parse_vision(Section(json.loads((golden / "config.json").read_text())["vision_config"]))
    state = {name: tensor for file in golden.glob("*.safetensors") for name, tensor in load_file(file).items()}
    model = VisionModel(config, NormEps().vision, dtype)
    own = model.state_dict()
    assert set(own) == set(state)
    model.load_state_dict({name: tensor.to(dtype).view(own[name].shape) for name, tensor in state.items()})
    return model.eval().requires_grad_(False)


def cases(golden):
    for case in json.loads((golden / "cases.json").read_text()):
        yield case["name"], np.load(golden / "golden" / case["golden"])


def row_errors(expected, found):
    expected, found = torch.from_numpy(expected).double(), found.double()
    return (found - expected).norm(dim=-1) / expected.norm(dim=-1)


def inputs(arrays):
    return torch.from_numpy(arrays["patches"]), [tuple(arrays["grid_thw"].tolist())]


def test_embeddings_equal_the_golden_ones(golden, backend):
    model = load(golden, torch.float32)
    for name, arrays in cases(golden):
        patches, grids = inputs(arrays)
        rows = finished(model.vision_tower.pieces(patches, grids))
        assert row_errors(arrays["merged"], rows).max() < FLOAT32_BOUND, name
        assert row_errors(arrays["embeddings"], model.mm_projector(rows)).max() < FLOAT32_BOUND, name


def test_embeddings_in_bfloat16_stay_near_the_golden_ones(golden, backend):
    model = load(golden, torch.bfloat16)
    for name, arrays in cases(golden):
        patches, grids = inputs(arrays)
        found = model(patches.bfloat16(), grids)
        assert row_errors(arrays["embeddings"], found).max() < BFLOAT16_BOUND, name
        expected = torch.from_numpy(arrays["embeddings"])
        assert torch.cosine_similarity(found.float(), expected, dim=-1).min() > COSINE, name


def test_pictures_in_one_call_do_not_see_each_other(golden, backend):
    model = load(golden, torch.float32)
    names, arrays = zip(*cases(golden), strict=True)
    pairs = [inputs(item) for item in arrays]
    found = model(torch.cat([patches for patches, _ in pairs]), [grid for _, grids in pairs for grid in grids])
    rows = found.split([int(item["num_tokens"]) for item in arrays])
    for name, item, own in zip(names, arrays, rows, strict=True):
        assert row_errors(item["embeddings"], own).max() < FLOAT32_BOUND, name


def test_frames_of_an_item_attend_to_each_other_and_are_averaged(golden, backend):
    arrays = np.load(golden / "golden" / "video_t3.npz")
    patches, grids = inputs(arrays)
    assert grids == [(3, 4, 6)]
    assert (
        row_errors(arrays["merged"], finished(load(golden, torch.float32).vision_tower.pieces(patches, grids))).max()
        < FLOAT32_BOUND
    )


def test_the_size_of_the_pieces_changes_nothing(golden, monkeypatch):
    model = load(golden, torch.float32)
    (_, arrays), *_ = cases(golden)
    patches, grids = inputs(arrays)
    whole = model(patches, grids)
    monkeypatch.setattr("perilune.models.vision.ROWS_AT_ONCE", 5)
    monkeypatch.setattr("perilune.models.vision.PAIRS_AT_ONCE", 200)
    torch.testing.assert_close(model(patches, grids), whole, rtol=1e-5, atol=1e-6)


def test_cells_are_merged_row_by_row_with_all_their_channels():
    x = torch.arange(2 * 4 * 3).view(8, 3)
    rows = merged(x, (1, 2, 4))
    assert torch.equal(rows[0], torch.cat((x[0], x[1], x[4], x[5])))
    assert torch.equal(rows[1], torch.cat((x[2], x[3], x[6], x[7])))


def test_pairs_turn_by_column_and_row_in_turns():
    cos, sin = rotary_angles([(2, 2, 4)], 8)
    angles = torch.atan2(sin, cos)
    # patch 6 of a frame lies in row 1, column 2
    expected = torch.tensor([2.0, 1.0, 2.0 * 10000**-0.5, 1.0 * 10000**-0.5])
    torch.testing.assert_close(angles[6], expected)
    torch.testing.assert_close(angles[8 + 6], expected)

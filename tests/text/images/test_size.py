import json

import pytest

from perilune.config.media import MediaConfig
from perilune.text.images.size import plan_size

# upload, resized, padded, patch rows and columns, tokens: computed by hand from the published formula
VECTORS = [
    ((1, 1), (1, 1), (28, 28), (2, 2), 1),
    ((29, 28), (29, 28), (56, 28), (2, 4), 2),
    ((448, 448), (448, 448), (448, 448), (32, 32), 256),
    ((512, 512), (512, 512), (532, 532), (38, 38), 361),
    ((640, 480), (640, 480), (644, 504), (36, 46), 414),
    ((3840, 2160), (3840, 2160), (3864, 2184), (156, 276), 10764),
    ((7168, 7168), (3584, 3584), (3584, 3584), (256, 256), 16384),
    ((7169, 100), (7168, 99), (7168, 112), (8, 512), 1024),
    ((100, 20000), (35, 7168), (56, 7168), (512, 4), 512),
    ((10000, 10000), (3585, 3585), (3612, 3612), (258, 258), 16641),
    ((1861, 7041), (1850, 7002), (1876, 7028), (502, 134), 16817),
]


@pytest.mark.parametrize(("upload", "resized", "padded", "grid", "num_tokens"), VECTORS)
def test_sizes_follow_the_formula(upload, resized, padded, grid, num_tokens):
    size = plan_size(*upload, MediaConfig())
    assert (size.resized, size.padded, (size.rows, size.columns)) == (resized, padded, grid)
    assert (size.num_tokens, size.num_patches) == (num_tokens, 4 * num_tokens)


def test_no_side_vanishes_and_none_passes_the_limit():
    size = plan_size(50_000_000, 1, MediaConfig())
    assert size.resized == (7168, 1)
    assert size.num_tokens == 256


def test_the_padded_picture_may_pass_the_limit_on_patches():
    assert plan_size(1889, 7377, MediaConfig()).num_patches == 67_320 > MediaConfig().in_patch_limit


def test_sizes_agree_with_the_golden_vectors(goldens_dir):
    directory = goldens_dir / "vision-tiny"
    tables = json.loads((directory / "size_vectors.json").read_text())
    checked = 0
    for name in ("released", "small"):
        table = tables[name]
        limit = json.loads((directory / table["preprocessor"]).read_text())["media_proc_cfg"]["in_patch_limit"]
        for vector in table["vectors"]:
            size = plan_size(*vector["size"], MediaConfig(in_patch_limit=limit))
            assert list(size.resized) == vector["resized"], vector
            assert list(size.padded) == vector["padded"], vector
            assert [1, size.rows, size.columns] == vector["grid_thw"], vector
            assert (size.num_patches, size.num_tokens) == (vector["num_patches"], vector["num_tokens"]), vector
            checked += 1
    assert checked == 52

import numpy as np
import pytest

from tests.goldens.oracle import Oracle, dequantize


def relative_error(directory):
    golden = np.load(directory / "golden.npz")
    ours, theirs = Oracle(directory).forward(golden["token_ids"]), golden["logits"]
    return np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)


def test_the_carried_golden_is_the_oracles_own(micro_checkpoint):
    assert relative_error(micro_checkpoint) < 1e-6


@pytest.mark.parametrize("name", ["k3-tiny", "k31-tiny"])
def test_the_oracle_agrees_with_goldens_it_did_not_make(goldens_dir, name):
    assert relative_error(goldens_dir / name) < 1e-6


def test_packed_weights_read_as_the_format_says():
    packed = np.full((1, 16), 0xF9, np.uint8)
    packed[0, 0] = 0x21
    assert dequantize(packed, np.array([[127]], np.uint8))[0, :4].tolist() == [0.5, 1.0, -0.5, -6.0]
    assert dequantize(packed, np.array([[126]], np.uint8))[0, 2:4].tolist() == [-0.25, -3.0]

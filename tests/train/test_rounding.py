import pytest

from perilune.config.engine import DEMO_CHECKPOINT, EngineConfig
from train.rounding import exact_logits, held_out_rows, measure


@pytest.fixture(scope="module")
def rows():
    return held_out_rows(DEMO_CHECKPOINT, 3)


def test_coarser_weights_are_further_from_the_exact_logits_and_still_answer(rows):
    exact = exact_logits(DEMO_CHECKPOINT, rows)
    plain, int8, fp8 = (
        measure(DEMO_CHECKPOINT, EngineConfig(dtype="float32", dense_weights=weights), rows, exact)
        for weights in ("stored", "int8", "fp8")
    )
    assert abs(plain.kl) < 1e-9
    assert 1e-6 < int8.kl < fp8.kl < 1e-1
    assert plain.exact[:2] == int8.exact[:2] == fp8.exact[:2] == (3, 3)

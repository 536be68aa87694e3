import pytest

from perilune.bench.ceilings import Ceilings
from perilune.bench.spread import Spread
from perilune.ops import _native


@pytest.fixture
def ceilings():
    """Round rates of a machine without bfloat16 products."""
    read = {1: Spread(8e9, 7e9, 9e9), 3: Spread(1e10, 9e9, 1.2e10)}
    return Ceilings("wide", 2, read, float32_flops=2e11, bfloat16_flops=0.0, int8_ops=4e11)


@pytest.fixture
def native_core():
    if _native.absence() is not None:
        pytest.skip(_native.absence())
    return _native.core()

import pytest

from perilune.cache.spec import CacheGroupSpec, bytes_per_slot, bytes_per_token, resolve_dtype
from perilune.errors import ConfigError

LATENT = CacheGroupSpec("latent", "paged", num_layers=24, row_shape=(576,))
KEYS = CacheGroupSpec("keys", "paged", num_layers=24, row_shape=(128,))
STATE = CacheGroupSpec("state", "state", num_layers=69, row_shape=(96, 128, 128), dtype="float32")
WINDOW = CacheGroupSpec("window", "state", num_layers=69, row_shape=(36864, 3), dtype="bfloat16")


def test_bytes_of_the_released_models_come_out():
    assert bytes_per_token([LATENT, STATE], "bfloat16") == 27648
    assert bytes_per_token([LATENT, KEYS, STATE], "bfloat16") == 33792
    assert bytes_per_slot([LATENT, STATE, WINDOW], "bfloat16") == 449372160


def test_only_groups_of_the_model_dtype_follow_it():
    assert LATENT.row_bytes("float32") == 2 * LATENT.row_bytes("bfloat16")
    assert STATE.row_bytes("float32") == STATE.row_bytes("bfloat16")


def test_an_unknown_dtype_is_refused_with_the_allowed_ones():
    with pytest.raises(ConfigError, match="'float16' is not supported; allowed: bfloat16, float32"):
        resolve_dtype("model", "float16")

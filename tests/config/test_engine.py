import pytest

from perilune.config.engine import EngineConfig
from perilune.config.model import NormEps
from perilune.errors import ConfigError


def test_defaults_are_accepted_and_leave_the_machine_s_choices_open():
    config = EngineConfig()
    assert (config.dtype, config.cache_bytes, config.num_blocks, config.max_model_len) == (None, None, None, None)
    assert config.eps == NormEps(latent=1e-6, l2=1e-6, indexer=1e-5)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_num_seqs": True}, "max_num_seqs is True"),
        ({"block_size": -1}, "block_size is -1"),
        ({"block_size": 1.5}, "block_size is 1.5"),
        ({"max_model_len": 0}, "max_model_len is 0"),
        ({"cache_bytes": 0}, "cache_bytes is 0"),
        ({"num_blocks": "9"}, "num_blocks is '9'"),
        ({"host_cache_bytes": -1}, "host_cache_bytes is -1; it must be an integer of at least 0"),
        ({"host_cache_bytes": True}, "host_cache_bytes is True"),
        ({"kv_dir": "x", "kv_dir_bytes": 0}, "kv_dir_bytes is 0"),
        ({"dtype": "float16"}, "float32, bfloat16"),
        ({"dense_weights": "int4"}, "dense_weights is 'int4'; allowed are stored, int8, fp8"),
        ({"activations": "fp8"}, "activations is 'fp8'; allowed are exact, int8"),
        ({"cache_dtype": "fp4"}, "cache_dtype is 'fp4'; allowed are auto, fp8, int8"),
        ({"index_cache_dtype": "e4m3"}, "index_cache_dtype is 'e4m3'; allowed are auto, fp8, int8, mxfp4"),
        ({"scheduling_policy": "lifo"}, "scheduling_policy is 'lifo'; allowed are fcfs, priority"),
        ({"max_waiting": -1}, "max_waiting is -1; it must be an integer of at least 0"),
        ({"max_waiting": True}, "max_waiting is True"),
        ({"max_itl_ms": 0.0}, "max_itl_ms is 0.0; it must be a number of milliseconds above 0"),
        ({"max_itl_ms": float("nan")}, "max_itl_ms is nan"),
        ({"max_itl_ms": float("inf")}, "max_itl_ms is inf"),
        ({"eps": NormEps(latent=0.0)}, "eps.latent is 0.0"),
        ({"eps": NormEps(l2=float("nan"))}, "eps.l2 is nan"),
        ({"ops": {"kda_chunk": 1}}, "kda_chunk"),
    ],
)
def test_a_wrong_value_is_refused_and_named(settings, named):
    with pytest.raises(ConfigError, match=named.replace(".", r"\.")):
        EngineConfig(**settings)


def test_a_step_must_hold_one_token_of_every_running_request_and_the_remedy_is_true():
    with pytest.raises(ConfigError, match="raise the first or lower the second"):
        EngineConfig(max_num_seqs=8, max_num_batched_tokens=7)
    EngineConfig(max_num_seqs=8, max_num_batched_tokens=8)
    EngineConfig(max_num_seqs=7, max_num_batched_tokens=7)


def test_the_cache_is_sized_in_one_way_only():
    with pytest.raises(ConfigError, match="give only one of them"):
        EngineConfig(cache_bytes=1 << 20, num_blocks=4)
    EngineConfig(cache_bytes=1 << 20)
    EngineConfig(num_blocks=4)


def test_a_directory_s_budget_needs_the_directory_and_tiers_need_kept_prefixes():
    with pytest.raises(ConfigError, match="kv_dir_bytes is 5 and kv_dir names no directory"):
        EngineConfig(kv_dir_bytes=5)
    with pytest.raises(ConfigError, match="host_cache_bytes is 5 and prefix_cache is off"):
        EngineConfig(host_cache_bytes=5, prefix_cache=False)
    with pytest.raises(ConfigError, match="kv_dir is 'x' and prefix_cache is off"):
        EngineConfig(kv_dir="x", prefix_cache=False)
    EngineConfig(host_cache_bytes=5, kv_dir="x", kv_dir_bytes=5)

import pytest

from perilune.errors import ConfigError
from perilune.planner.units import GB, GiB, parse_rate, parse_size


def test_the_two_gigabytes_are_not_the_same():
    assert (GB(1).num_bytes, GiB(1).num_bytes) == (10**9, 2**30)
    assert GB(1) != GiB(1)
    assert (str(GB.of(1_500_000_000)), str(GiB.of(2**29))) == ("1.50 GB", "0.50 GiB")


@pytest.mark.parametrize("mix", [lambda: GB(1) < GiB(1), lambda: GB(1) + GiB(1), lambda: GB(1) + 1, lambda: GiB(1) > 1])
def test_units_never_mix(mix):
    with pytest.raises(TypeError):
        mix()


def test_within_a_unit_sizes_compare():
    assert GB(1) < GB(2)
    assert max(GiB(1), GiB(3)) == GiB(3)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("288 GB", 288 * 10**9), ("64 GiB", 64 * 2**30), ("97887 MiB", 97887 * 2**20), ("6.1 GiB", 6549825126)],
)
def test_sizes_are_read_with_their_unit(text, num_bytes):
    assert parse_size(text).num_bytes == num_bytes


@pytest.mark.parametrize("text", ["288", "288GB", "288 gb", "-1 GB", "1e3 GB", "GB", "1 TB", ""])
def test_a_size_without_a_known_unit_is_refused(text):
    with pytest.raises(ConfigError, match="GB, GiB or MiB"):
        parse_size(text)


def test_rates_are_per_second():
    assert (parse_rate("8 TB/s"), parse_rate("256 GB/s"), parse_rate("2 TFLOP/s")) == (8e12, 256e9, 2e12)
    with pytest.raises(ConfigError, match="TB/s"):
        parse_rate("8 TB")

import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perilune.cache.tiers.object_file import HEADER_BYTES, DamagedFileError, read_object, write_object
from tests.cache.tiers.objects import IDENTITY, OTHER_IDENTITY, key, payload

KEY, FINGERPRINT = key(1), IDENTITY.digest


@pytest.fixture
def path(tmp_path):
    return tmp_path / "object"


@pytest.mark.parametrize("num_bytes", [0, 1, 4096, 3 * 2**20 + 1])
def test_what_is_written_is_read_and_nothing_else_is_left(path, num_bytes):
    write_object(path, FINGERPRINT, KEY, payload(1, num_bytes))
    assert read_object(path, FINGERPRINT, KEY) == payload(1, num_bytes)
    assert path.stat().st_size == HEADER_BYTES + num_bytes
    assert path.stat().st_mode & 0o077 == 0
    assert os.listdir(path.parent) == ["object"]


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, HEADER_BYTES + 99), st.integers(1, 255))
def test_a_changed_byte_is_found_wherever_it_is(path, position, change):
    write_object(path, FINGERPRINT, KEY, payload(1, 100))
    content = bytearray(path.read_bytes())
    content[position] ^= change
    path.write_bytes(content)
    with pytest.raises(DamagedFileError):
        read_object(path, FINGERPRINT, KEY)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, HEADER_BYTES + 99))
def test_a_file_that_ends_early_is_found(path, num_bytes):
    write_object(path, FINGERPRINT, KEY, payload(1, 100))
    os.truncate(path, num_bytes)
    with pytest.raises(DamagedFileError):
        read_object(path, FINGERPRINT, KEY)


def test_a_file_that_goes_on_behind_its_end_is_found(path):
    write_object(path, FINGERPRINT, KEY, payload(1))
    with open(path, "ab") as file:
        file.write(b"x")
    with pytest.raises(DamagedFileError, match="1001 bytes of 1000"):
        read_object(path, FINGERPRINT, KEY)


def test_an_object_of_another_model_or_under_another_name_is_not_taken(path):
    write_object(path, FINGERPRINT, KEY, payload(1))
    with pytest.raises(DamagedFileError, match="another model"):
        read_object(path, OTHER_IDENTITY.digest, KEY)
    for other in (key(2), key(1, "state")):
        with pytest.raises(DamagedFileError, match="another object"):
            read_object(path, FINGERPRINT, other)


def test_a_write_that_fails_leaves_the_old_file_and_no_other(path):
    write_object(path, FINGERPRINT, KEY, payload(1))
    os.chmod(path.parent, 0o700)
    # a directory of that name cannot be replaced by a file
    blocked = path.with_name("blocked")
    blocked.mkdir()
    with pytest.raises(OSError, match="blocked"):
        write_object(blocked, FINGERPRINT, KEY, payload(1))
    assert sorted(os.listdir(path.parent)) == ["blocked", "object"]

import os
import shutil

import pytest

from perilune.cache.tiers.identity import checkpoint_identity
from perilune.errors import CheckpointError


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(200_000))
    return tmp_path


def test_the_same_files_have_the_same_identity_and_other_files_do_not_matter(directory):
    before = checkpoint_identity(directory)
    (directory / "README.md").write_text("read me")
    assert checkpoint_identity(directory) == before


@pytest.mark.parametrize("position", [0, 1000, 199_999])
def test_changed_weights_of_the_same_size_and_time_are_found_where_samples_are_taken(directory, position):
    before, shard = checkpoint_identity(directory), directory / "model.safetensors"
    times = shard.stat().st_atime_ns, shard.stat().st_mtime_ns
    content = bytearray(shard.read_bytes())
    content[position] = 1
    shard.write_bytes(content)
    os.utime(shard, ns=times)
    assert checkpoint_identity(directory) != before


def test_other_settings_another_time_and_another_name_are_other_checkpoints(directory):
    found = {checkpoint_identity(directory)}
    (directory / "config.json").write_text('{"a": 1}')
    found.add(checkpoint_identity(directory))
    (directory / "preprocessor_config.json").write_text('{"a": 1}')
    found.add(checkpoint_identity(directory))
    os.utime(directory / "model.safetensors", ns=(1, 1))
    found.add(checkpoint_identity(directory))
    shutil.move(directory / "model.safetensors", directory / "model-00001.safetensors")
    found.add(checkpoint_identity(directory))
    assert len(found) == 5


def test_a_checkpoint_that_cannot_be_read_is_an_error_that_names_it(directory):
    (directory / "config.json").unlink()
    (directory / "config.json").mkdir()
    with pytest.raises(CheckpointError, match=str(directory)):
        checkpoint_identity(directory)

import json
import shutil

import pytest

from perilune.checkpoint.index import INDEX_NAME, read_index
from perilune.errors import CheckpointError

NORM = "language_model.model.norm.weight"


def rewrite(directory, change):
    file = directory / INDEX_NAME
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values))


def refusal(directory):
    with pytest.raises(CheckpointError) as caught:
        read_index(directory)
    return str(caught.value)


def test_every_tensor_of_the_index_is_found_in_its_shard(checkpoint):
    index = read_index(checkpoint)
    listed = json.loads((checkpoint / INDEX_NAME).read_text())
    assert {name: entry.file.name for name, entry in index.entries.items()} == listed["weight_map"]
    assert index.total_size == listed["metadata"]["total_size"]
    assert index.num_files == 5


def test_a_single_file_needs_no_index(checkpoint, tmp_path):
    shutil.copy(checkpoint / "model-00005-of-000005.safetensors", tmp_path / "model.safetensors")
    assert NORM in read_index(tmp_path).entries


def test_a_missing_shard_is_named(checkpoint):
    (checkpoint / "model-00003-of-000005.safetensors").unlink()
    assert "model-00003-of-000005.safetensors is missing" in refusal(checkpoint)


def test_a_tensor_absent_from_its_shard_is_named(checkpoint):
    rewrite(checkpoint, lambda values: values["weight_map"].update(ghost="model-00002-of-000005.safetensors"))
    message = refusal(checkpoint)
    assert "model-00002-of-000005.safetensors lacks ghost" in message


def test_a_tensor_that_the_index_does_not_list_is_named(checkpoint):
    rewrite(checkpoint, lambda values: values["weight_map"].pop(NORM))
    message = refusal(checkpoint)
    assert "model-00005-of-000005.safetensors holds " + NORM in message
    assert "does not list it" in message


def test_a_tensor_in_another_shard_than_listed_is_named(checkpoint):
    rewrite(checkpoint, lambda values: values["weight_map"].update({NORM: "model-00001-of-000005.safetensors"}))
    message = refusal(checkpoint)
    assert NORM in message
    assert "places it in model-00001-of-000005.safetensors" in message


def test_a_wrong_total_size_is_named(checkpoint):
    rewrite(checkpoint, lambda values: values["metadata"].update(total_size=5))
    assert "metadata.total_size is 5" in refusal(checkpoint)


@pytest.mark.parametrize("shard", ["../model.safetensors", "model.bin", 3])
def test_a_shard_outside_the_directory_is_refused(checkpoint, shard):
    rewrite(checkpoint, lambda values: values["weight_map"].update({NORM: shard}))
    assert "allowed: a .safetensors file beside the index" in refusal(checkpoint)


@pytest.mark.parametrize(
    "text",
    ["{", "[" * 10**5, "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": "b.safetensors"}}'],
    ids=lambda text: text[:40],
)
def test_an_index_of_another_form_is_refused(checkpoint, text):
    (checkpoint / INDEX_NAME).write_text(text)
    assert INDEX_NAME in refusal(checkpoint)


def test_a_directory_without_weights_is_refused(tmp_path):
    assert "holds neither" in refusal(tmp_path)
    assert "is not a directory" in refusal(tmp_path / "nowhere")


def test_a_stray_shard_is_reported(checkpoint, caplog):
    shutil.copy(checkpoint / "model-00005-of-000005.safetensors", checkpoint / "old.safetensors")
    read_index(checkpoint)
    assert "old.safetensors is not named in" in caplog.text

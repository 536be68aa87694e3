import struct

import pytest

from perilune.checkpoint.safetensors import read_header
from perilune.errors import CheckpointError

NORM = "language_model.model.layers.0.input_layernorm.weight"


@pytest.fixture
def shard(checkpoint):
    return checkpoint / "model-00001-of-000005.safetensors"


def refusal(file):
    with pytest.raises(CheckpointError) as caught:
        read_header(file)
    assert str(file) in str(caught.value)
    return str(caught.value)


def test_entries_carry_place_and_form(shard):
    entry = read_header(shard)[NORM]
    assert (entry.dtype, entry.shape, entry.num_bytes, entry.file) == ("BF16", (32,), 64, shard)


def test_entries_agree_with_the_reference_library(goldens_dir):
    from safetensors import safe_open

    for file in (goldens_dir / "k31-tiny").glob("*.safetensors"):
        entries = read_header(file)
        with safe_open(file, "pt") as reference:
            assert entries.keys() == set(reference.keys())
            for name, entry in entries.items():
                assert list(entry.shape) == reference.get_slice(name).get_shape()


@pytest.mark.parametrize("lost", [1, 1000])
def test_a_truncated_shard_is_refused(shard, lost):
    raw = shard.read_bytes()
    shard.write_bytes(raw[:-lost])
    message = refusal(shard)
    assert f"has {len(raw) - lost} bytes" in message
    assert f"describes {len(raw)}" in message


def test_a_shard_with_bytes_behind_its_data_is_refused(shard):
    shard.write_bytes(shard.read_bytes() + b"\0")
    assert "altered" in refusal(shard)


@pytest.mark.parametrize("content", [b"", b"1234"])
def test_a_shard_without_header_is_refused(shard, content):
    shard.write_bytes(content)
    assert "at least 8" in refusal(shard)


def test_a_header_longer_than_the_file_is_refused(shard):
    shard.write_bytes(struct.pack("<Q", 1 << 40) + shard.read_bytes()[8:])
    assert f"header of {1 << 40} bytes" in refusal(shard)


def header_or_refusal(file):
    try:
        return read_header(file)
    except CheckpointError as error:
        return str(error)


def test_a_flipped_header_byte_never_passes_for_the_same_shard(shard):
    raw = bytearray(shard.read_bytes())
    (length,) = struct.unpack("<Q", raw[:8])
    intact = read_header(shard)
    end = 8 + len(bytes(raw[8 : 8 + length]).rstrip())
    start = raw.index(b"language_model")
    for position in [*range(8), *range(start, end, 11)]:
        damaged = bytearray(raw)
        damaged[position] ^= 0x01
        shard.write_bytes(damaged)
        assert header_or_refusal(shard) != intact, f"byte {position}"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"dtype": "I64"}, ["'I64'", "F32, BF16, U8"]),
        ({"dtype": "F32"}, ["spans 64 bytes", "F32 [32] takes 128"]),
        ({"shape": [31]}, ["spans 64 bytes", "BF16 [31] takes 62"]),
        ({"shape": [-32]}, ["[-32]", "whole numbers"]),
        ({"shape": None}, ["None", "whole numbers"]),
        ({"data_offsets": [0]}, ["[0]", "whole numbers"]),
        ({"extra": 1}, ["exactly dtype, shape and data_offsets"]),
    ],
)
def test_an_inconsistent_entry_is_refused(shard, edit_header, change, expected):
    edit_header(shard, lambda header: header[NORM].update(change))
    message = refusal(shard)
    assert NORM in message
    assert all(part in message for part in expected), message


def test_a_gap_between_tensors_is_refused(shard, edit_header):
    def shift(header):
        header[NORM]["data_offsets"] = [offset + 2 for offset in header[NORM]["data_offsets"]]

    edit_header(shard, shift)
    assert f"{NORM} begins at byte" in refusal(shard)


def test_a_name_that_occurs_twice_is_refused(shard):
    text = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    shard.write_bytes(struct.pack("<Q", len(text)) + text + b"\0")
    assert "occurs twice" in refusal(shard)


def test_a_header_nested_too_deeply_is_refused(shard):
    text = b"[" * 10**5
    shard.write_bytes(struct.pack("<Q", len(text)) + text)
    assert "not valid JSON" in refusal(shard)


def test_a_directory_in_place_of_a_shard_is_named(tmp_path):
    assert "cannot be read" in refusal(tmp_path)


def test_a_missing_file_is_named(tmp_path):
    assert "is missing" in refusal(tmp_path / "model-00001-of-000005.safetensors")

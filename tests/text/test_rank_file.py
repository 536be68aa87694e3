import base64
from pathlib import Path

import pytest

from perilune.errors import CheckpointError
from perilune.text.rank_file import read_rank_file

from .conftest import small_ranks


def lines() -> list[bytes]:
    return [base64.b64encode(token) + b" %d" % rank for token, rank in small_ranks().items()]


def write(tmp_path: Path, content: list[bytes]) -> Path:
    path = tmp_path / "tiktoken.model"
    path.write_bytes(b"\n".join(content) + b"\n")
    return path


def test_a_written_file_reads_back(tmp_path: Path) -> None:
    assert read_rank_file(write(tmp_path, lines())) == small_ranks()


def test_order_of_lines_and_carriage_returns_do_not_matter(tmp_path: Path) -> None:
    assert read_rank_file(write(tmp_path, [line + b"\r" for line in reversed(lines())])) == small_ranks()


@pytest.mark.parametrize(
    ("position", "line", "message"),
    [
        (4, b"!!!! 4", "line 5: b'!!!!' is not base64"),
        (4, b"YQ=", "line 5: expected 'base64 rank', found b'YQ='"),
        (4, b"YQ== four", "line 5: expected 'base64 rank'"),
        (4, b"", "line 5: expected 'base64 rank', found b''"),
        (260, base64.b64encode(b"a") + b" 260", "line 261: token b'a' was already given on line 98"),
        (260, base64.b64encode(b"qqq") + b" 7", "line 261: rank 7 was already given on line 8"),
        (260, base64.b64encode(b"qqq") + b" 9999", "rank 260 is missing although line 261 gives rank 9999"),
        (65, base64.b64encode(b"qqq") + b" 65", "without the single byte 0x41 (1 of 256 are missing)"),
    ],
)
def test_damage_is_named_with_file_and_line(tmp_path: Path, position: int, line: bytes, message: str) -> None:
    content = lines()
    content[position] = line
    path = write(tmp_path, content)
    with pytest.raises(CheckpointError) as error:
        read_rank_file(path)
    assert str(path) in str(error.value)
    assert message in str(error.value)


def test_a_truncated_file_is_damaged(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="ends at line 200 without the single byte 0xc8"):
        read_rank_file(write(tmp_path, lines()[:200]))


def test_an_absent_or_empty_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot read the tokenizer's rank file: No such file"):
        read_rank_file(tmp_path / "tiktoken.model")
    (tmp_path / "empty").touch()
    with pytest.raises(CheckpointError, match="without the single byte 0x00"):
        read_rank_file(tmp_path / "empty")

"""The tiktoken rank file: one `base64 rank` per line.

Owns reading and checking it; knows nothing of special tokens or text.
"""

import base64
import binascii
from pathlib import Path

from perilune.errors import CheckpointError


def read_rank_file(path: Path) -> dict[bytes, int]:
    """Read token bytes -> rank; ranks are 0..n-1 without gaps and every single byte is a token.

    Raises CheckpointError naming the file and the line where it is damaged.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot read the tokenizer's rank file: {error.strerror}") from error
    if lines and lines[-1] == b"":
        lines.pop()
    ranks: dict[bytes, int] = {}
    line_of_rank: dict[int, int] = {}
    for number, line in enumerate(lines, start=1):
        token, rank = _parse_line(path, number, line)
        if token in ranks:
            first = line_of_rank[ranks[token]]
            raise CheckpointError(f"{path}, line {number}: token {token!r} was already given on line {first}")
        if rank in line_of_rank:
            raise CheckpointError(f"{path}, line {number}: rank {rank} was already given on line {line_of_rank[rank]}")
        ranks[token] = rank
        line_of_rank[rank] = number
    _check_complete(path, ranks, line_of_rank)
    return ranks


def _parse_line(path: Path, number: int, line: bytes) -> tuple[bytes, int]:
    fields = line.split()
    if len(fields) != 2 or not fields[1].isdigit():
        raise CheckpointError(f"{path}, line {number}: expected 'base64 rank', found {line[:80]!r}")
    try:
        token = base64.b64decode(fields[0], validate=True)
    except binascii.Error as error:
        raise CheckpointError(f"{path}, line {number}: {fields[0][:80]!r} is not base64: {error}") from error
    if not token:
        raise CheckpointError(f"{path}, line {number}: the token is empty")
    return token, int(fields[1])


def _check_complete(path: Path, ranks: dict[bytes, int], line_of_rank: dict[int, int]) -> None:
    for rank in range(len(ranks)):
        if rank not in line_of_rank:
            last = max(line_of_rank)
            raise CheckpointError(
                f"{path}: rank {rank} is missing although line {line_of_rank[last]} gives rank {last}; "
                f"{len(ranks)} tokens must have the ranks 0 to {len(ranks) - 1}"
            )
    missing = [value for value in range(256) if bytes([value]) not in ranks]
    if missing:
        raise CheckpointError(
            f"{path}: ends at line {len(ranks)} without the single byte 0x{missing[0]:02x} "
            f"({len(missing)} of 256 are missing); a byte-level vocabulary needs all of them"
        )

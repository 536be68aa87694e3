import json
import shutil
import struct
from pathlib import Path

import pytest


@pytest.fixture
def checkpoint(tmp_path, micro_checkpoint) -> Path:
    """A copy of the small checkpoint, free to be damaged."""
    return Path(shutil.copytree(micro_checkpoint, tmp_path / "checkpoint"))


@pytest.fixture
def edit_header():
    """Rewrites the header of a shard through a function; the data stays as it is."""

    def edit(file: Path, change) -> None:
        raw = file.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        file.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])

    return edit

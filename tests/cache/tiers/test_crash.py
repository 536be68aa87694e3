"""What a writer leaves that is killed at any moment."""

import os
import signal
import subprocess
import sys
import time

import pytest

from perilune.cache.tiers.disk import DiskTier
from tests.cache.tiers.objects import IDENTITY, key, payload

WRITER = """
import sys
from pathlib import Path
from perilune.cache.tiers.disk import DiskTier
from tests.cache.tiers.objects import IDENTITY, key, payload
tier = DiskTier(Path(sys.argv[1]), 50_000_000, IDENTITY)
print("ready", flush=True)
number = 0
while True:
    assert tier.put(key(number), payload(number, 200_000 + number))
    number += 1
"""


@pytest.mark.parametrize("num_files", [1, 5, 40])
def test_a_killed_writer_leaves_whole_objects_and_a_directory_that_is_free(tmp_path, num_files):
    child = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert child.stdout.readline() == b"ready\n"
        while len(list(tmp_path.rglob("block-*"))) < num_files:
            assert child.poll() is None
            time.sleep(0.001)
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        child.stdout.close()
    tier = DiskTier(tmp_path, 50_000_000, IDENTITY)
    num_found = tier.stats().num_objects
    assert num_found >= num_files
    assert tier.is_owner
    assert [path for path in tmp_path.rglob("*") if path.name.startswith(".tmp-")] == []
    assert all(tier.get(key(number)) == payload(number, 200_000 + number) for number in range(num_found))
    assert tier.stats().num_hits == num_found
    assert tier.put(key(10_000), payload(10_000))
    tier.close()

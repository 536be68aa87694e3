"""An engine in a memory cgroup that its checkpoint exceeds: it streams by itself, is not killed, answers the same."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from perilune.cli.make_checkpoint import write_random_checkpoint
from perilune.config.presets import preset_config
from perilune.ops import _native

ROOT = Path("/sys/fs/cgroup/memory")
GROUP = ROOT / f"perilune-test-{os.getpid()}"
SIZES = {
    "vocab_size": 640,
    "num_experts": 24,
    "num_experts_per_token": 4,
    "num_hidden_layers": 5,
    "moe_intermediate_size": 1024,
    "routed_expert_hidden_size": 1024,
}
PROGRAM = """
import json, sys
from pathlib import Path
from perilune.config.engine import EngineConfig
from perilune.engine.build import assemble_engine, load_model
from perilune.engine.request import GenerateRequest
from perilune.sampling.params import SamplingParams

group, room = Path(sys.argv[2]), int(sys.argv[3])
if room:
    used = int((group / "memory.usage_in_bytes").read_text())
    (group / "memory.limit_in_bytes").write_text(str(used + room))
config = EngineConfig(num_blocks=64, max_model_len=200, max_num_seqs=2, max_num_batched_tokens=32, dtype="bfloat16")
model = load_model(Path(sys.argv[1]), config)
core, found = assemble_engine(model, None, config), {}
for seed in (1, 2):
    params = SamplingParams(temperature=1.0, seed=seed, max_tokens=30, ignore_eos=True)
    core.add(GenerateRequest(str(seed), tuple(range(seed, 40 + seed)), params))
while core.has_work:
    for output in core.step():
        found.setdefault(output.request_id, []).extend(output.token_ids)
held = None if model.stream is None else model.stream.num_bytes
print(json.dumps({"tokens": found, "held": held}))
"""


@pytest.fixture
def group():
    try:
        GROUP.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup (version 1) can be made here: {error.strerror}")
    yield GROUP
    GROUP.rmdir()


def run(checkpoint, group, room):
    join = f'echo $$ > {group}/cgroup.procs; exec "$@"'
    given = ["sh", "-c", join, "sh", sys.executable, "-c", PROGRAM, str(checkpoint), str(group), str(room)]
    done = subprocess.run(given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.skipif(_native.absence() is not None, reason=str(_native.absence()))
def test_a_cgroup_too_small_for_the_weights_gets_the_tokens_of_memory(tmp_path, group):
    directory = tmp_path / "wide"
    write_random_checkpoint(directory, preset_config("tiny", "k3", has_vision=False, sizes=SIZES), seed=4)
    size = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    room = 80 << 20
    assert size > 2 * room - (10 << 20)
    whole, streamed = run(directory, group, 0), run(directory, group, room)
    assert whole["held"] is None
    assert streamed["held"] < room
    assert streamed["tokens"] == whole["tokens"]

"""Experts on disk behind the server: what cannot be read fails the requests that need it, and no others."""

import asyncio
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from perilune.checkpoint.streamed import find_experts
from perilune.cli.make_checkpoint import write_random_checkpoint
from perilune.config.engine import EngineConfig
from perilune.config.parse import load_model_config
from perilune.config.presets import preset_config
from perilune.engine.build import build_engine
from perilune.engine.client import InProcessClient, ModelInfo
from perilune.models import stream as stream_module
from perilune.models.accounting import expert_floor_bytes
from perilune.ops import _native
from perilune.server.app import create_app
from perilune.server.settings import ServerSettings

pytestmark = pytest.mark.skipif(_native.absence() is not None, reason=str(_native.absence()))
SIZES = {"vocab_size": 640, "num_experts": 24, "num_experts_per_token": 2, "num_hidden_layers": 5}
# reading it where nothing is mapped gives EIO, as a broken disk does
BROKEN = "/proc/self/mem"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("streamed") / "random"
    write_random_checkpoint(directory, preset_config("tiny", "k31", has_vision=False, sizes=SIZES), seed=1)
    return directory


class Served:
    def __init__(self, checkpoint):
        budget = expert_floor_bytes(load_model_config(checkpoint))
        config = EngineConfig(expert_cache_bytes=budget, num_blocks=400, max_num_seqs=16, dtype="float32")
        engine = build_engine(checkpoint, config)
        self.places = engine._runner._model.stream.places
        limits = engine.limits
        model = ModelInfo("random", limits.max_model_len, limits.vocab_size, limits.eos_token_ids, 0)
        self._app = create_app(InProcessClient(engine, model), engine.tokenizer, ServerSettings())

    def ask(self, *between):
        """Eight completions side by side, and again after each of `between` is called; the answers of each round."""

        async def run():
            transport = httpx.ASGITransport(self._app)
            async with (
                self._app.router.lifespan_context(self._app),
                httpx.AsyncClient(transport=transport, base_url="http://test", timeout=200) as http,
            ):
                rounds = []
                for call in (lambda: None, *between):
                    call()
                    rounds.append(await asyncio.gather(*(http.post("/v1/completions", json=body) for body in BODIES)))
                assert (await http.get("/health")).status_code == 200
                return rounds

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(asyncio.run, run()).result()


BODIES = [
    {"model": "random", "prompt": [7 * index + 3], "temperature": 0, "max_tokens": 2, "ignore_eos": True}
    for index in range(8)
]


def text(response):
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def check(answers, expected, file):
    """Those that failed name the file, the others are as ever; gives the number of those that failed."""
    failed = [answer for answer in answers if answer.status_code != 200]
    for answer, whole in zip(answers, expected, strict=True):
        if answer.status_code == 200:
            assert text(answer) == whole
        else:
            assert answer.status_code == 500
            assert file in answer.json()["error"]["message"]
    return len(failed)


@pytest.fixture(scope="module")
def expected(checkpoint):
    first, second = Served(checkpoint).ask(lambda: None)
    assert list(map(text, first)) == list(map(text, second))
    return list(map(text, first))


def test_a_shard_that_is_cut_off_while_it_serves_fails_the_requests_that_need_it(checkpoint, expected, tmp_path):
    copied = shutil.copytree(checkpoint, tmp_path / "copied")
    served = Served(copied)
    file, begin, _ = sorted(served.places.places[-1].flatten(0, 1).tolist())[-6]
    shard = served.places.files[file]
    whole = Path(shard).read_bytes()
    first, second, third = served.ask(lambda: os.truncate(shard, begin + 1), lambda: Path(shard).write_bytes(whole))
    assert list(map(text, first)) == expected
    assert 0 < check(second, expected, f"{shard} ends at byte {begin + 1}") < len(BODIES)
    assert list(map(text, third)) == expected, "a shard that is whole again serves again"


def test_a_disk_that_fails_fails_the_requests_that_need_it(checkpoint, expected, monkeypatch):
    def broken(directory, config):
        places = find_experts(directory, config)
        changed = places.places.clone()
        changed[1, :6, :, 0] = len(places.files)  # some experts of one layer
        return replace(places, files=(*places.files, BROKEN), places=changed)

    monkeypatch.setattr(stream_module, "find_experts", broken)
    for answers in Served(checkpoint).ask(lambda: None):
        assert 0 < check(answers, expected, BROKEN) < len(BODIES)
        assert all("Input/output error" in answer.text for answer in answers if answer.status_code != 200)

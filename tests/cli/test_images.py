"""Pictures from files: the commands that take them, and a server that is asked the same."""

import base64
import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import openai
import pytest
import typer
from typer.testing import CliRunner

from perilune.cli.backend import user_content
from perilune.cli.chat import Conversation
from perilune.cli.generate import generate_command
from perilune.cli.make_checkpoint import write_random_checkpoint
from perilune.cli.render import render_request
from perilune.config.media import PREPROCESSOR_FILE, MediaConfig, load_media_config, media_config_to_dict
from perilune.config.presets import preset_config
from perilune.engine.llm import LLM
from perilune.errors import ConfigError, RequestError
from perilune.sampling.params import SamplingParams
from perilune.text.images.size import plan_size
from perilune.text.rank_file import read_rank_file
from perilune.text.special import NUM_SPECIAL_SLOTS
from tests.cli.conftest import RANK_FILE, SIZES
from tests.cli.test_chat import StubBackend
from tests.text.images.pictures import file_of, image_part, photo

SMALL = ("--dtype", "float32", "--max-model-len", "1024", "--threads", "1", "--seed", "3")
app = typer.Typer()
app.command()(generate_command)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoints") / "seeing"
    vocab_size = len(read_rank_file(RANK_FILE)) + NUM_SPECIAL_SLOTS
    config = preset_config("tiny", "k31", has_vision=True, sizes={**SIZES, "vocab_size": vocab_size})
    write_random_checkpoint(directory, config, seed=1)
    return directory


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    directory = tmp_path_factory.mktemp("pictures")
    for index in range(2):
        (directory / f"{index}.png").write_bytes(file_of(photo(90, 60, seed=index)))
    return [directory / f"{index}.png" for index in range(2)]


def generate(*arguments):
    result = CliRunner().invoke(app, [*map(str, arguments), *SMALL])
    if isinstance(result.exception, ConfigError | RequestError):
        raise result.exception
    assert result.exception is None, result.exception
    return result.stdout


def test_an_answer_depends_on_the_picture(checkpoint, files):
    arguments = (checkpoint, "--chat", "What is it?", "--max-tokens", 8, "--effort", "none")
    answers = [generate(*arguments), *(generate(*arguments, "--image", file) for file in files)]
    answers.append(generate(*arguments, "--image", files[0], "--image", files[1]))
    assert len(set(answers)) == 4
    assert generate(*arguments, "--image", files[0]) == answers[1]


def test_a_picture_without_a_message_has_no_effect_and_is_refused(checkpoint, files):
    with pytest.raises(ConfigError, match="--image has no effect with --prompt; use --chat"):
        generate(checkpoint, "--prompt", "x", "--image", files[0])


def test_a_file_that_cannot_be_read_is_refused(checkpoint, tmp_path):
    with pytest.raises(ConfigError, match=r"none\.png cannot be read: No such file"):
        generate(checkpoint, "--chat", "x", "--image", tmp_path / "none.png")


def test_a_model_without_a_tower_says_so(tiny_checkpoint, files):
    with pytest.raises(RequestError, match="no vision weights"):
        generate(tiny_checkpoint, "--chat", "x", "--image", files[0])


def talk(monkeypatch, backend, images, *lines, is_interactive=False):
    inputs = iter(lines)

    def read(_):
        line = next(inputs, None)
        if line is None:
            raise EOFError
        return line

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr("sys.stdin", [f"{line}\n" for line in lines])
    conversation = Conversation(backend, SamplingParams(), "max", None, is_interactive=is_interactive)
    conversation.show_images(images)
    conversation.run()


def test_a_picture_stands_before_the_first_line_of_a_conversation_and_stays_in_it(monkeypatch, files):
    backend = StubBackend(("", "one"), ("", "two"))
    talk(monkeypatch, backend, files[:1], "a", f"/image {files[1]}", "b")
    contents = [turn["content"] for turn in backend.turns if turn["role"] == "user"]
    assert contents == [user_content("a", files[:1]), user_content("b", files[1:])]
    assert [part["type"] for part in contents[0]] == ["image_url", "text"]


def test_a_line_that_failed_keeps_its_picture_for_the_next_one(monkeypatch, files):
    backend = StubBackend(RequestError("too long"), ("", "two"))
    talk(monkeypatch, backend, files[:1], "a", "b", is_interactive=True)
    assert [turn["content"] for turn in backend.turns] == [user_content("b", files[:1])]


def test_a_wrong_file_in_a_conversation_is_said_and_nothing_ends(monkeypatch, capsys, tmp_path):
    backend = StubBackend(("", "one"))
    talk(monkeypatch, backend, [], f"/image {tmp_path / 'none.png'}", "a", is_interactive=True)
    assert "cannot be read" in capsys.readouterr().err
    assert [turn["content"] for turn in backend.turns] == ["a"]


def test_a_made_checkpoint_with_a_tower_says_how_it_wants_its_pictures(checkpoint, tiny_checkpoint):
    assert (checkpoint / PREPROCESSOR_FILE).exists()
    assert load_media_config(checkpoint) == MediaConfig()
    assert not (tiny_checkpoint / PREPROCESSOR_FILE).exists()


def test_pictures_are_rendered_as_typed_segments(tmp_path):
    picture = image_part(file_of(photo(640, 480)))
    body = {"messages": [{"role": "user", "content": [picture, {"type": "text", "text": "<|media_pad|>"}]}]}
    file = tmp_path / "request.json"
    file.write_text(json.dumps({**body, "reasoning_effort": "none"}))
    report = render_request(file)
    (image,) = [segment for segment in report["segments"] if segment["type"] == "image"]
    assert image == {
        "type": "image",
        "text": "<|media_pad|>",
        "width": 640,
        "height": 480,
        "resized": [640, 480],
        "patches": [36, 46],
        "num_tokens": 414,
    }
    assert {"type": "text", "text": "<|media_pad|>"} in report["segments"]
    counts = [segment.get("num_tokens", 1) for segment in report["segments"] if segment["type"] != "text"]
    assert report["prompt_tokens"] + report["num_stub_tokens"] == len(report["token_ids"]) > sum(counts)


def test_the_limits_beside_a_tokenizer_are_used_to_render(tmp_path):
    small = tmp_path / PREPROCESSOR_FILE
    text = json.dumps(
        {"media_proc_cfg": {**media_config_to_dict(MediaConfig())["media_proc_cfg"], "in_patch_limit": 12}}
    )
    small.write_text(text)
    (tmp_path / "tiktoken.model").symlink_to(RANK_FILE)
    file = tmp_path / "request.json"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": [image_part(file_of(photo(640, 480)))]}]}))
    (image,) = [segment for segment in render_request(file, tmp_path)["segments"] if segment["type"] == "image"]
    assert image["num_tokens"] == 4
    assert load_media_config(tmp_path) == replace(MediaConfig(), in_patch_limit=12)


def test_a_picture_of_twenty_megapixels_is_scaled_to_what_the_checkpoint_says_and_answered(checkpoint, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    for file in checkpoint.iterdir():
        if file.name != PREPROCESSOR_FILE:
            (small / file.name).symlink_to(file)
    limits = media_config_to_dict(MediaConfig())
    limits["media_proc_cfg"]["in_patch_limit"] = 400
    (small / PREPROCESSOR_FILE).write_text(json.dumps(limits))
    answers = []
    for seed in range(2):
        picture = tmp_path / f"{seed}.jpg"
        picture.write_bytes(file_of(photo(684, 456, seed=seed).resize((5472, 3648)).rotate(180 * seed), "JPEG"))
        answers.append(generate(small, "--chat", "What?", "--max-tokens", 8, "--effort", "none", "--image", picture))
    assert answers[0] != answers[1]
    content = user_content("What?", [tmp_path / "0.jpg"])
    output = LLM(small, dtype="float32", max_model_len=1024).chat(
        [{"role": "user", "content": content}], SamplingParams(temperature=0.0, max_tokens=1), thinking=False
    )
    assert output.num_prompt_tokens > plan_size(5472, 3648, load_media_config(small)).num_tokens > 90


@pytest.fixture(scope="module")
def client(checkpoint):
    command = [sys.executable, "-m", "perilune.cli.main", "serve", str(checkpoint), "--port", "0", "--threads", "1"]
    command += ["--max-num-seqs", "4", "--num-blocks", "200", "--max-model-len", "1024", "--dtype", "float32"]
    command += ["--max-num-batched-tokens", "32", "--image-cache-memory", "1M"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ})
    match = re.search(r"http://127\.0\.0\.1:\d+", process.stdout.readline())
    assert match
    yield openai.OpenAI(base_url=f"{match[0]}/v1", api_key="k", max_retries=0, timeout=60.0)
    process.terminate()
    process.wait()
    process.stdout.close()


def test_a_server_answers_a_picture_as_the_offline_engine_does(client, checkpoint, files):
    messages = [{"role": "user", "content": user_content("What is it?", files)}]
    answer = client.chat.completions.create(
        model="seeing", messages=messages, max_tokens=8, temperature=0, reasoning_effort="none"
    )
    llm = LLM(checkpoint, dtype="float32", num_blocks=200, max_model_len=1024)
    offline = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=8), thinking=False)
    assert answer.choices[0].message.content == offline.text
    assert answer.usage.prompt_tokens == offline.num_prompt_tokens


def test_a_server_survives_bad_pictures_between_good_ones(client, files):
    def ask(data):
        url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "hi"}]
        fields = {"model": "seeing", "max_tokens": 4, "temperature": 0, "reasoning_effort": "none"}
        return client.chat.completions.create(messages=[{"role": "user", "content": content}], **fields)

    good = files[0].read_bytes()
    first = ask(good).choices[0].message.content
    for bad in (b"", b"x" * 100, good[:-100], bytes(reversed(good))):
        with pytest.raises(openai.BadRequestError, match=r"messages\[0\]\.content\[0\]\.image_url\.url"):
            ask(bad)
        assert ask(good).choices[0].message.content == first

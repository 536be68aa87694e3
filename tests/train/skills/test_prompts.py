from pathlib import Path

from perilune.text.tokenizer import Tokenizer
from train.outputs import read_prompts
from train.skills.prompts import prompts, save_prompts


def test_prompts_are_read_as_the_server_writes_them(grown: Tokenizer, tmp_path: Path):
    save_prompts(40, 3, tmp_path / "prompts.jsonl")
    read = [grown.decode(ids) for ids in read_prompts(tmp_path / "prompts.jsonl", grown)]
    drawn = list(prompts(40, 3, grown))
    assert len(read) == len(drawn) == 40
    for text, prompt in zip(read, drawn, strict=True):
        assert ("# Tools" in text) is (prompt["tools"] is not None)
        assert ("must match the following schema" in text) is (prompt["response_format"] is not None)
        assert text.endswith("think<|sep|>" if prompt["thinking"] else "response<|sep|>")

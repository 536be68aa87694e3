import itertools
import random
import re

import numpy as np
import pytest

from perilune.text.encoding import encode_chat
from perilune.text.special import PAD
from perilune.text.tokenizer import Tokenizer
from train.dictionary import load_dictionary
from train.questions import DEFAULT_MIX, SKILLS, Exchange, QuestionSource
from train.rows import ChatRenderer, Row, RowSource, batches

TURN = re.compile(
    r'<\|open\|>message role="(system|user|assistant)"(?: type="thinking-effort")?<\|sep\|>(.*?)'
    r"<\|close\|>message<\|sep\|><\|end_of_msg\|>",
    re.DOTALL,
)
ANSWER = re.compile(
    r"(?:<\|open\|>think<\|sep\|>(.*?)<\|close\|>think<\|sep\|>)?<\|open\|>response<\|sep\|>(.*?)<\|close\|>response<\|sep\|>",
    re.DOTALL,
)


def text_without_padding(tokenizer: Tokenizer, row: Row) -> str:
    return tokenizer.decode(row.token_ids).replace(PAD, "")


def conversation_of(text: str) -> list[dict[str, str]]:
    messages = []
    for role, body in TURN.findall(text):
        if role == "assistant":
            match = ANSWER.fullmatch(body)
            assert match is not None
            messages.append({"role": role, "content": match.group(2), "reasoning": match.group(1) or ""})
        elif not body.startswith("`thinking_effort`"):
            messages.append({"role": role, "content": body})
    return messages


def emitted_part(exchange: Exchange, tokenizer: Tokenizer, *, thinking: bool) -> tuple[int, ...]:
    """What follows the prompt, by the prompt encoder alone."""
    prompt = [{"role": "user", "content": exchange.user}]
    answer = {"role": "assistant", "content": exchange.answer, "reasoning": exchange.reasoning}
    given = encode_chat(prompt, tokenizer, thinking=thinking, effort="low").token_ids
    following = encode_chat([*prompt, answer, *prompt], tokenizer, thinking=thinking, effort="low").token_ids
    end = following.index(tokenizer.end_of_msg_id, len(given))
    assert following[: len(given)] == given
    return following[len(given) : end + 1]


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("skill", SKILLS)
def test_the_loss_covers_exactly_what_follows_the_prompt(tokenizer: Tokenizer, skill: str, thinking: bool):
    source = QuestionSource(random.Random(0), load_dictionary(), held_out=False)
    renderer = ChatRenderer(tokenizer)
    for _ in range(20):
        question = source.question(skill, thinking=True)
        exchange = Exchange(question.messages[-1]["content"], question.reasoning or "", question.answer, skill)
        row = renderer.exchange(exchange, thinking=thinking)
        emitted = tuple(t for t, is_target in zip(row.token_ids, row.loss_mask, strict=True) if is_target)
        assert emitted == emitted_part(exchange, tokenizer, thinking=thinking)
        assert row.loss_mask == tuple(sorted(row.loss_mask))


@pytest.mark.parametrize("level", [0.0, 1.0])
def test_a_row_is_the_prompt_that_the_server_would_build_from_its_messages(tokenizer: Tokenizer, level: float):
    source = RowSource(1, tokenizer)
    num_thinking = 0
    for _ in range(100):
        row = source.row(level)
        text = text_without_padding(tokenizer, row)
        messages = conversation_of(text)
        effort = re.search(r"thinking_effort=(low|high|max)`\.<", text)
        num_thinking += effort is not None
        prompt = encode_chat(
            messages, tokenizer, thinking=effort is not None, effort=effort.group(1) if effort else "max"
        )
        history = prompt.token_ids[: len(prompt.token_ids) - 10]
        assert row.token_ids[: len(history)] == history
        assert set(row.token_ids[len(history) :]) <= {tokenizer.special_ids[PAD]}
    assert 5 <= num_thinking <= 35


def test_one_row_never_asks_for_a_fact_that_it_has_not_told(tokenizer: Tokenizer):
    source = RowSource(2, tokenizer, mix={"recall": 1.0})
    num_answers = 0
    for _ in range(300):
        messages = conversation_of(text_without_padding(tokenizer, source.row(1.0)))
        for index, message in enumerate(messages):
            told = "\n".join(m["content"] for m in messages[:index] if m["role"] != "assistant")
            if message["role"] == "assistant" and re.match(r"(\w+'s|The \w+) ", message["content"]):
                num_answers += 1
                assert all(line in told for line in message["content"].split("\n"))
    assert num_answers > 500


def test_padding_carries_no_loss_and_is_little(tokenizer: Tokenizer):
    pad_id = tokenizer.special_ids[PAD]
    ids, mask = next(batches(3, tokenizer, 64, level=lambda step: 1.0))
    assert not mask[ids == pad_id].any()
    assert (ids == pad_id).mean() < 0.15
    assert 0.2 < mask.mean() < 0.5


def test_batches_are_arrays_of_the_asked_shape_and_repeat_by_seed(tokenizer: Tokenizer):
    def draw(seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
        return list(itertools.islice(batches(seed, tokenizer, 4, level=lambda step: step / 3, row_length=320), 3))

    first, second, other = draw(9), draw(9), draw(10)
    for (ids, mask), (ids_again, mask_again) in zip(first, second, strict=True):
        assert ids.shape == mask.shape == (4, 320)
        assert (ids.dtype, mask.dtype) == (np.int64, np.bool_)
        assert (ids == ids_again).all()
        assert (mask == mask_again).all()
    assert any((a[0] != b[0]).any() for a, b in zip(first, other, strict=True))


def test_rows_follow_the_mix(tokenizer: Tokenizer):
    source = RowSource(4, tokenizer, mix={"sums": 1.0}, thinking_share=0.0)
    for _ in range(20):
        text = text_without_padding(tokenizer, source.row(0.0))
        assert all("+" in message["content"] for message in conversation_of(text) if message["role"] == "assistant")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": 1_000_000}, "training seeds go from 0 to 999999"),
        ({"row_length": 128}, "row_length is 128; it must be at least 256"),
        ({"mix": {"poetry": 1.0}}, "mix names poetry; allowed skills: dictionary, sums, recall, talk"),
        ({"mix": dict.fromkeys(DEFAULT_MIX, 0.0)}, "weights are at least 0 and one of them is above 0"),
    ],
)
def test_senseless_settings_are_refused(tokenizer: Tokenizer, arguments: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        RowSource(**{"seed": 0, "tokenizer": tokenizer, **arguments})

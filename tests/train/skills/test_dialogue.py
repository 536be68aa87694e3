import random

from perilune.config.media import MediaConfig
from perilune.text.encoding import encode_chat
from perilune.text.images.reader import ImageReader
from perilune.text.tokenizer import Tokenizer
from train.skills.dialogue import Dialogue, DialogueWriter, says, user
from train.skills.supply import SKILLS, Supply


def test_a_row_begins_with_what_the_server_makes_of_the_request(grown: Tokenizer):
    supply = Supply(random.Random(3), grown, held_out=True)
    for skill in SKILLS:
        for effort in (None, "low"):
            dialogue = supply.dialogue(skill)
            row = DialogueWriter(grown).row(dialogue, effort)
            prompt = encode_chat(
                dialogue.asked,
                grown,
                thinking=effort is not None,
                effort=effort or "max",
                tools=dialogue.tools or None,
                response_format=dialogue.response_format,
                images=ImageReader(MediaConfig()),
            )
            length = len(prompt.token_ids)
            assert row.token_ids[:length] == prompt.token_ids, skill
            assert all(row.loss_mask[length:]), skill
            assert not row.loss_mask[length - 1], skill
            assert [image.start for image in row.images] == [picture.start for picture in prompt.pictures]


def test_every_answer_of_a_dialogue_is_learned_and_nothing_else(grown: Tokenizer):
    dialogue = Dialogue("talk", (user("Hi"), says("Hello!", ""), user("Bye"), says("Goodbye!", "")))
    row = DialogueWriter(grown).row(dialogue, None)
    told = [token for token, learns in zip(row.token_ids, row.loss_mask, strict=True) if learns]
    end = "<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"
    assert grown.decode(told) == f"Hello!{end}Goodbye!{end}"


def test_thoughts_are_learned_with_thinking_on(grown: Tokenizer):
    row = DialogueWriter(grown).row(Dialogue("talk", (user("Hi"), says("Hello!", "Small talk."))), "low")
    told = [token for token, learns in zip(row.token_ids, row.loss_mask, strict=True) if learns]
    assert grown.decode(told).startswith("Small talk.<|close|>think<|sep|>")

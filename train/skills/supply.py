"""Draws training batches and held-out dialogues of every skill in given shares."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from perilune.config.media import MediaConfig
from perilune.text.images.picture import ImageInput
from perilune.text.images.pixels import normalised
from perilune.text.prompt.effort import THINKING_EFFORTS
from perilune.text.special import PAD
from perilune.text.tokenizer import Tokenizer
from train.dictionary import load_dictionary
from train.questions import THINKING_SHARE, Exchange, Question, QuestionSource
from train.rows import RowSource
from train.skills.dialogue import Dialogue, DialogueRow, DialogueWriter, Message, says
from train.skills.forms import FormSource
from train.skills.memory import MemorySource
from train.skills.pictures import PictureSource
from train.skills.talk import talk_dialogue
from train.skills.tools import ToolSource
from train.split import FIRST_EVALUATION_SEED

# Tokens of a step; rows are padded to one of few lengths, as each is compiled anew.
BATCH_TOKENS = 4096
CHAT_LENGTH = 256
# Facts alone, as `train/questions.py` tells them; "recall" is from longer texts.
SHORT_RECALL = "short recall"
SKILLS = ("dictionary", "sums", "talk", SHORT_RECALL, "recall", "tools", "json", "pictures")


@dataclass(frozen=True)
class SkillBatch:
    """Token ids and loss mask [B, L]; rows [I] of the B * L tokens are pictures with patches [P, 3, S, S] in grids."""

    kind: str
    token_ids: Tensor
    loss_mask: Tensor
    image_rows: Tensor | None = None
    patches: Tensor | None = None
    grids: tuple[tuple[int, int, int], ...] = ()


class Supply:
    """Dialogues of every skill from one side of the split."""

    def __init__(self, rng: random.Random, tokenizer: Tokenizer, *, held_out: bool):
        entries = load_dictionary()
        self.rng, self.held_out = rng, held_out
        self._questions = QuestionSource(rng, entries, held_out=held_out)
        self._tools = ToolSource(rng, held_out=held_out, others=self._other)
        self._forms = FormSource(rng, held_out=held_out)
        self._pictures = PictureSource(rng, [entry.word for entry in entries], held_out=held_out)
        self._memory = MemorySource(rng, entries, lambda text: len(tokenizer.encode(text)), held_out=held_out)

    def dialogue(self, skill: str, num_tokens: int = 256, num_turns: int = 1) -> Dialogue:
        """One dialogue; `num_tokens` is the length of a text to recall from."""
        if skill == "recall":
            return self._memory.dialogue(num_tokens, num_turns)
        makers: Mapping[str, Callable[[], Dialogue]] = {
            "tools": lambda: self._tools.dialogue(num_turns),
            "json": self._forms.dialogue,
            "pictures": self._pictures.dialogue,
            "talk": lambda: talk_dialogue(self._questions),
        }
        if skill in makers:
            return makers[skill]()
        name = "recall" if skill == SHORT_RECALL else skill
        return as_dialogue(self._questions.question(name, thinking=True))

    def _other(self) -> tuple[str, str]:
        exchange: Exchange = self._questions.exchange(self.rng.choice(("dictionary", "sums")))
        return exchange.user, exchange.answer


def as_dialogue(question: Question) -> Dialogue:
    """A question of `train/questions.py` in the API's form."""
    messages: list[Message] = [dict(message) for message in question.messages]
    return Dialogue(question.skill, (*messages, says(question.answer, question.reasoning or "")))


def held_out_dialogues(
    skill: str, count: int, seed: int, tokenizer: Tokenizer, *, num_tokens: int = 256
) -> list[Dialogue]:
    """`count` held-out dialogues of a skill; ValueError for a seed of training."""
    if seed < FIRST_EVALUATION_SEED:
        raise ValueError(f"seed {seed} belongs to training; evaluation seeds start at {FIRST_EVALUATION_SEED}")
    supply = Supply(random.Random(f"{skill}-{num_tokens}-{seed}"), tokenizer, held_out=True)
    return [supply.dialogue(skill, num_tokens) for _ in range(count)]


@dataclass(frozen=True)
class Kind:
    """How rows of one kind are drawn: their padded length, their skill, turns, and tokens of a text to recall from."""

    length: int
    skill: str
    most_turns: int = 1
    fewest_tokens: int = 0
    most_tokens: int = 0


KINDS: Mapping[str, Kind] = {
    "tools": Kind(512, "tools", most_turns=3),
    "json": Kind(256, "json"),
    "talk": Kind(64, "talk"),
    "pictures": Kind(64, "pictures"),
    "recall": Kind(512, "recall", most_turns=5, fewest_tokens=60, most_tokens=380),
    "recall 2k": Kind(2048, "recall", most_turns=6, fewest_tokens=400, most_tokens=1800),
    "recall 8k": Kind(8192, "recall", most_turns=8, fewest_tokens=2000, most_tokens=7700),
}


class Batches:
    """An endless, reproducible supply of training batches; `shares` are of batches, by kind or "chat"."""

    def __init__(self, seed: int, tokenizer: Tokenizer, shares: Mapping[str, float], media: MediaConfig | None = None):
        self._rng = random.Random(seed)
        self._supply = Supply(self._rng, tokenizer, held_out=False)
        self._writer = DialogueWriter(tokenizer, media)
        self._chat = RowSource(seed, tokenizer, row_length=CHAT_LENGTH)
        self._collate = Collator(tokenizer, media)
        self._shares = shares

    def __iter__(self) -> Iterator[SkillBatch]:
        while True:
            yield self.batch(self._rng.choices(list(self._shares), weights=list(self._shares.values()))[0])

    def batch(self, name: str) -> SkillBatch:
        """One batch of a kind."""
        if name == "chat":
            chat = [self._chat.row(1.0) for _ in range(BATCH_TOKENS // CHAT_LENGTH)]
            rows = [DialogueRow(row.token_ids, row.loss_mask) for row in chat]
            return self._collate(name, rows, CHAT_LENGTH)
        kind = KINDS[name]
        rows = [self._row(kind) for _ in range(max(1, BATCH_TOKENS // kind.length))]
        return self._collate(name, rows, kind.length)

    def _row(self, kind: Kind) -> DialogueRow:
        while True:
            turns = self._rng.randint(1, kind.most_turns)
            dialogue = self._supply.dialogue(
                kind.skill, self._rng.randint(kind.fewest_tokens, kind.most_tokens), num_turns=turns
            )
            effort = self._rng.choice(THINKING_EFFORTS) if self._rng.random() < THINKING_SHARE else None
            row = self._writer.row(dialogue, effort)
            if len(row.token_ids) <= kind.length:
                return row


class Collator:
    """Puts rows into one batch."""

    def __init__(self, tokenizer: Tokenizer, media: MediaConfig | None = None):
        self._pad_id = tokenizer.special_ids[PAD]
        self._media = media or MediaConfig()

    def __call__(self, kind: str, rows: Sequence[DialogueRow], length: int) -> SkillBatch:
        """Rows padded to `length`."""
        ids = np.full((len(rows), length), self._pad_id, dtype=np.int64)
        mask = np.zeros((len(rows), length), dtype=np.bool_)
        for index, row in enumerate(rows):
            ids[index, : len(row.token_ids)] = row.token_ids
            mask[index, : len(row.loss_mask)] = row.loss_mask
        images = [(index * length + image.start, image) for index, row in enumerate(rows) for image in row.images]
        token_ids, loss_mask = torch.from_numpy(ids), torch.from_numpy(mask)
        if not images:
            return SkillBatch(kind, token_ids, loss_mask)
        return SkillBatch(kind, token_ids, loss_mask, *self._pictures(images))

    def _pictures(
        self, images: Sequence[tuple[int, ImageInput]]
    ) -> tuple[Tensor, Tensor, tuple[tuple[int, int, int], ...]]:
        places = [torch.arange(start, start + image.num_tokens) for start, image in images]
        patches = [torch.from_numpy(normalised(image.patches, self._media)) for _, image in images]
        return torch.cat(places), torch.cat(patches), tuple((1, image.rows, image.columns) for _, image in images)

"""Trains the demo's rank file: byte-level BPE in tiktoken format over the words of the questions.

Splits text exactly as the tokenizer does and never merges a digit, so that a number is read digit by digit. To rebuild
`perilune/demo/tiktoken.model`: `python -m train.ranks`.
"""

import argparse
import base64
import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import regex

from perilune.text.encoding import message_segments
from perilune.text.messages import parse_messages
from perilune.text.prompt.effort import THINKING_EFFORTS, thinking_effort
from perilune.text.tokenizer import RANK_FILE, SPLIT_PATTERN
from train.dictionary import load_dictionary
from train.questions import DEFAULT_MIX, THINKING_SHARE, QuestionSource

DEMO_DIR = Path(__file__).parent.parent / "perilune" / "demo"
NUM_RANKS = 1792
NUM_QUESTIONS = 40_000
SEED = 7
DIGITS = frozenset(b"0123456789")

Pair = tuple[bytes, bytes]


def count_pieces(texts: Iterable[str]) -> Counter[str]:
    """How often each piece of the split pattern occurs in the texts."""
    pattern = regex.compile(SPLIT_PATTERN, regex.V1)
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(pattern.findall(text))
    return counts


def single_bytes(piece: str) -> list[bytes]:
    """The bytes of a piece, each alone."""
    return [bytes([b]) for b in piece.encode()]


class Merger:
    """Joins the most frequent neighbours of the pieces, step by step; ties go to the smaller bytes.

    `cut` says what a piece consists of in the beginning.
    """

    def __init__(self, pieces: Mapping[str, int], cut: Callable[[str], Sequence[bytes]] = single_bytes) -> None:
        self._words = [(list(cut(piece)), count) for piece, count in pieces.items()]
        self._counts: Counter[Pair] = Counter()
        self._words_of: defaultdict[Pair, set[int]] = defaultdict(set)
        for index in range(len(self._words)):
            self._add(index, sign=1)

    def _add(self, index: int, sign: int) -> None:
        tokens, count = self._words[index]
        for pair in itertools.pairwise(tokens):
            if DIGITS.isdisjoint(pair[0]) and DIGITS.isdisjoint(pair[1]):
                self._counts[pair] += sign * count
                self._words_of[pair].add(index)

    def merge(self) -> bytes:
        """Join the most frequent pair everywhere and return the new token; ValueError when nothing is left."""
        if not (best := max(self._counts.items(), key=lambda item: (item[1], item[0]), default=None)) or best[1] <= 0:
            raise ValueError("no pair is left to merge: the corpus is too small for this many ranks")
        left, right = best[0]
        for index in self._words_of.pop(best[0]):
            self._add(index, sign=-1)
            tokens, count = self._words[index]
            self._words[index] = (_join(tokens, left, right), count)
            self._add(index, sign=1)
        del self._counts[best[0]]
        return left + right


def _join(tokens: list[bytes], left: bytes, right: bytes) -> list[bytes]:
    joined: list[bytes] = []
    for token in tokens:
        if joined and joined[-1] == left and token == right:
            joined[-1] = left + right
        else:
            joined.append(token)
    return joined


def train_ranks(pieces: Mapping[str, int], num_ranks: int) -> dict[bytes, int]:
    """Ranks 0..255 are the bytes, the others the merges in order; a token never arises twice."""
    ranks = {bytes([b]): b for b in range(256)}
    merger = Merger(pieces)
    while len(ranks) < num_ranks:
        ranks.setdefault(merger.merge(), len(ranks))
    return ranks


def corpus(num_questions: int, seed: int) -> Iterator[str]:
    """Every piece of text of conversations in the default mix, tags and system messages of the format included."""
    rng = random.Random(seed)
    source = QuestionSource(rng, load_dictionary(), held_out=False)
    for skill in rng.choices(list(DEFAULT_MIX), weights=list(DEFAULT_MIX.values()), k=num_questions):
        thinking = rng.random() < THINKING_SHARE
        question = source.question(skill, thinking=thinking)
        segments = thinking_effort(rng.choice(THINKING_EFFORTS)) if thinking else []
        answer = {"role": "assistant", "content": question.answer, "reasoning": question.reasoning or ""}
        for message in parse_messages([*question.messages, answer]):
            segments += message_segments(message, thinking)
        yield from (segment.text for segment in segments if not segment.is_markup)


def save_ranks(ranks: Mapping[bytes, int], path: Path) -> None:
    """Write `base64 rank` lines in rank order."""
    lines = [
        f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in sorted(ranks.items(), key=lambda i: i[1])
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines), encoding="ascii")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DEMO_DIR / RANK_FILE)
    args = parser.parse_args()
    ranks = train_ranks(count_pieces(corpus(NUM_QUESTIONS, SEED)), NUM_RANKS)
    save_ranks(ranks, args.out)
    print(f"{len(ranks)} ranks -> {args.out}")


if __name__ == "__main__":
    main()

"""The demo's dictionary: frequent English words with one short definition each, taken from WordNet 3.0.

Owns `train/data/dictionary.tsv` and its licence notice. To rebuild both on Debian:

    apt-get install wordnet-base && python -m train.dictionary
"""

import argparse
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

DATA_DIR = Path(__file__).parent / "data"
DICTIONARY_FILE = DATA_DIR / "dictionary.tsv"
LICENSE_FILE = DATA_DIR / "WORDNET_LICENSE"

NUM_WORDS = 2000
MAX_DEFINITION_CHARS = 60
# WordNet keeps satellite adjectives (5) in the adjective files.
POS_OF_SENSE_TYPE = {"1": "noun", "2": "verb", "3": "adj", "4": "adv", "5": "adj"}
WORD_PATTERN = re.compile(r"[a-z]{2,}")
INSULT_PATTERN = re.compile(r"ethnic slur|offensive (name|term)|disparaging")


@dataclass(frozen=True)
class Entry:
    """One word with the definition of its most frequent sense."""

    word: str
    pos: str
    definition: str


def load_dictionary(path: Path = DICTIONARY_FILE) -> tuple[Entry, ...]:
    """The committed entries, most frequent word first."""
    entries = []
    for line in path.read_text(encoding="ascii").splitlines():
        word, pos, definition = line.split("\t")
        entries.append(Entry(word, pos, definition))
    return tuple(entries)


def count_words(cntlist: Path) -> Counter[tuple[str, str]]:
    """Occurrences of each (word, part of speech) over all its senses in the sense-tagged texts."""
    counts: Counter[tuple[str, str]] = Counter()
    for line in cntlist.read_text(encoding="ascii").splitlines():
        sense_key, _, count = line.split()
        word, _, sense = sense_key.partition("%")
        if WORD_PATTERN.fullmatch(word):
            counts[word, POS_OF_SENSE_TYPE[sense[0]]] += int(count)
    return counts


def first_senses(wordnet: Path, pos: str) -> dict[str, int]:
    """Byte offset of the first sense of every word in one part of speech."""
    offsets = {}
    for line in (wordnet / f"index.{pos}").read_text(encoding="ascii").splitlines():
        if line.startswith(" "):
            continue
        fields = line.split()
        num_pointers = int(fields[3])
        offsets[fields[0]] = int(fields[6 + num_pointers])
    return offsets


def shorten(gloss: str) -> str:
    """The gloss up to its first semicolon, without remarks in brackets."""
    without_brackets = re.sub(r"\([^()]*\)", " ", gloss)
    text = without_brackets.split(";")[0].split('"')[0]
    text = re.sub(r"\s+", " ", text).replace(" ,", ",")
    return text.strip(" ,:.")


def build(wordnet: Path, num_words: int, max_chars: int) -> list[Entry]:
    """The most frequent words whose first sense has a definition of at most `max_chars` ASCII characters.

    A word that is several parts of speech keeps only the most frequent one, so that each question has one answer.
    """
    parts = sorted(set(POS_OF_SENSE_TYPE.values()))
    senses = {pos: first_senses(wordnet, pos) for pos in parts}
    glosses = {pos: (wordnet / f"data.{pos}").read_bytes() for pos in parts}
    ranking = sorted(count_words(wordnet / "cntlist.rev").items(), key=lambda item: (-item[1], item[0]))
    entries: list[Entry] = []
    seen: set[str] = set()
    for (word, pos), _ in ranking:
        if word in seen or len(entries) == num_words:
            continue
        seen.add(word)
        # The counts are of an older edition: a few of its words ("else") have left the index.
        if word not in senses[pos]:
            continue
        data = glosses[pos]
        start = senses[pos][word]
        line = data[start : data.index(b"\n", start)].decode("latin-1")
        gloss = line.partition(" | ")[2]
        if INSULT_PATTERN.search(gloss):
            continue
        definition = shorten(gloss)
        # A definition by the word itself teaches nothing.
        if definition.isascii() and 0 < len(definition) <= max_chars and word not in definition.split():
            entries.append(Entry(word, pos, definition))
    return entries


def wordnet_notice(copyright_file: Path) -> str:
    """Princeton's notice and licence out of Debian's machine-readable copyright file."""
    stanzas = copyright_file.read_text(encoding="utf-8").split("\n\n")
    stanza = next(s for s in stanzas if "License: WordNet3.0" in s)
    text = stanza.partition("License: WordNet3.0\n")[2]
    lines = ["" if line.strip() == "." else line.strip() for line in text.splitlines()]
    owner = re.search(r"Copyright: (.*)", stanza)
    head = "WordNet 3.0, http://wordnet.princeton.edu/"
    return "\n".join([head, f"Copyright {owner.group(1)}" if owner else "", "", *lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wordnet", type=Path, default=Path("/usr/share/wordnet"))
    parser.add_argument("--copyright", type=Path, default=Path("/usr/share/doc/wordnet-base/copyright"))
    parser.add_argument("--words", type=int, default=NUM_WORDS)
    parser.add_argument("--max-chars", type=int, default=MAX_DEFINITION_CHARS)
    args = parser.parse_args()
    entries = build(args.wordnet, args.words, args.max_chars)
    if len(entries) < args.words:
        parser.error(f"only {len(entries)} words qualify, --words asks for {args.words}: raise --max-chars")
    DATA_DIR.mkdir(exist_ok=True)
    lines = [f"{e.word}\t{e.pos}\t{e.definition}\n" for e in entries]
    DICTIONARY_FILE.write_text("".join(lines), encoding="ascii")
    LICENSE_FILE.write_text(wordnet_notice(args.copyright), encoding="utf-8")
    print(f"{len(entries)} words -> {DICTIONARY_FILE}")


if __name__ == "__main__":
    main()

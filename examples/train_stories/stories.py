"""Stories as text: what a clean story is, where files of stories are kept, and what makes a sampled one useless.

A corpus is a text file with a line `<|endoftext|>` between stories. What the stages hand to each other is JSON lines, a
string a line, which no story can break.

A language model that writes its own training data writes some of it badly: it repeats itself, breaks off, or recites
what it was trained on. What is wrong with a text is cheap to see, so `Sieve` names one reason a text, in a fixed order,
and the counts of the reasons tell more about the teacher than any example.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

SEPARATOR = "<|endoftext|>"
FEWEST_WORDS, MOST_WORDS = 40, 400
RUN = 20
"""Words in a row that a sampled story may not share with a real one. Openings of ten and more are common property."""
MOST_REPEATED = 0.1
"""Share of the 4-grams of a story that may be repeats. Of the real stories, 1 in 200 has more than 0.07."""

ENDING = re.compile(r"[.!?][\"']?$")
BEGINNING = re.compile(r"[\"']?[A-Z]")
PRINTABLE = re.compile(r"[\n\x20-\x7e]*")


def read_corpus(path: str | Path) -> list[str]:
    """The stories of a corpus file, without white space around them, each once, in their order."""
    texts = (text.strip() for text in Path(path).read_text("utf-8").split(SEPARATOR))
    return list(dict.fromkeys(text for text in texts if text))


def write_stories(path: Path, stories: Iterable[str]) -> None:
    """Write to another name first: a file that is there is whole, so a stage that finds it need not run again."""
    partial = path.with_name(path.name + ".part")
    with partial.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(story) + "\n" for story in stories)
    os.replace(partial, path)


def read_stories(path: Path) -> list[str]:
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def flaw(story: str) -> str | None:
    """Why a text is no clean story, real or sampled; None if it is one."""
    words = len(story.split())
    if not PRINTABLE.fullmatch(story):
        return "not printable ASCII"
    if words < FEWEST_WORDS:
        return "too short"
    if words > MOST_WORDS:
        return "too long"
    if not BEGINNING.match(story):
        return "begins in mid-sentence"
    if not ENDING.search(story):
        return "ends in mid-sentence"
    return None


def words_of(text: str) -> list[str]:
    """Lower-case words without punctuation: what is compared when texts are compared."""
    return re.findall(r"[a-z0-9']+", text.lower())


def ngrams(words: Sequence[str], n: int) -> list[tuple[str, ...]]:
    """Every n words in a row."""
    return [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]


def repeated_share(words: Sequence[str], n: int = 4) -> float:
    """The share of the n-grams of a text that were there before."""
    grams = ngrams(words, n)
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def says_a_sentence_thrice(story: str) -> bool:
    """Whether a sentence of four words or more stands there three times. ("Thank you!" may.)"""
    counts: dict[str, int] = {}
    for sentence in re.split(r"(?<=[.!?])[\"']?\s+", story):
        if len(sentence.split()) >= 4:
            counts[sentence] = counts.get(sentence, 0) + 1
    return max(counts.values(), default=0) >= 3


class Sieve:
    """Says why a sampled story is not kept.

    Args:
        real: the stories that the teacher was trained on; a text that shares `RUN` words in a row with one is a copy.
    """

    def __init__(self, real: Iterable[str]) -> None:
        self._runs = {hash(run) for story in real for run in ngrams(words_of(story), RUN)}
        self._kept: set[int] = set()

    def reason(self, story: str) -> str | None:
        """Why the story falls; None if it is kept, and then it is known from here on."""
        words = words_of(story)
        identity = hash(tuple(words))
        found = flaw(story)
        if found is None and story.count('"') % 2:
            found = "unbalanced quotes"
        if found is None and repeated_share(words) > MOST_REPEATED:
            found = "repeats itself"
        if found is None and says_a_sentence_thrice(story):
            found = "repeats a sentence"
        if found is None and any(hash(run) in self._runs for run in ngrams(words, RUN)):
            found = "copies a real story"
        if found is None and identity in self._kept:
            found = "was there before"
        if found is None:
            self._kept.add(identity)
        return found

"""Stage 1: the corpus in three parts, and a tokenizer.

A story goes to a part by a hash of its text, so the split is the same on every machine and in every order, a story that
the corpus has twice cannot stand on both sides, and more data moves nothing that was there.

The vocabulary is small on purpose. A token costs a row of the embedding, and with 2,048 rows of 256 numbers the
embedding is a tenth of the model; with SmolLM2's 49,152 rows it would be nearly three times as large as all the rest.
Byte-level BPE (Sennrich et al. 2016, arXiv:1508.07909; over bytes since GPT-2) needs no unknown token: 256 of the
tokens are the bytes.

There is one special token, `<|endoftext|>`, which begins a text and ends it. The model sees it before every story and
after, so it can begin one from nothing, and it learns to stop.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from .stories import SEPARATOR, flaw, read_corpus, write_stories

PARTS = ("train", "validation", "held_out")
HELD_OUT, VALIDATION = 3, 2  # of a hundred


def part_of(story: str) -> str:
    """Which part a story belongs to: decided by its text alone."""
    bucket = int.from_bytes(hashlib.sha256(story.encode()).digest()[:8], "big") % 100
    return "held_out" if bucket < HELD_OUT else "validation" if bucket < HELD_OUT + VALIDATION else "train"


def split(stories: Iterable[str]) -> dict[str, list[str]]:
    """The clean stories by part. `validation` chooses the checkpoint, so it cannot also judge it: `held_out` does."""
    parts: dict[str, list[str]] = {name: [] for name in PARTS}
    for story in dict.fromkeys(stories):
        if flaw(story) is None:
            parts[part_of(story)].append(story)
    return parts


def train_tokenizer(stories: Iterable[str], vocab_size: int = 2048) -> Tokenizer:
    """Byte-level BPE; id 0 begins and ends a story."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    end = AddedToken(SEPARATOR, special=True, normalized=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[end],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(stories, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """tokenizer.json, and the settings that make minillm (and transformers) put one begin token before a text."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SEPARATOR,
        "eos_token": SEPARATOR,
        "add_bos_token": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", "utf-8")


def run(corpus: Path, work: Path, vocab_size: int = 2048) -> dict[str, int]:
    """Write `train.jsonl`, `validation.jsonl`, `held_out.jsonl` and `tokenizer/` into `work`.

    Returns: how many stories are in each part, and how many were broken.
    """
    stories = read_corpus(corpus)
    parts = split(stories)
    save_tokenizer(train_tokenizer(parts["train"], vocab_size), work / "tokenizer")
    for name, part in parts.items():
        write_stories(work / f"{name}.jsonl", part)
    counts = {name: len(part) for name, part in parts.items()}
    return counts | {"broken": len(stories) - sum(counts.values())}

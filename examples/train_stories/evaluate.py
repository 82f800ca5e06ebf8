"""Stage 5: what the story model is worth, measured with minillm itself, and its card.

- Nats per byte on stories that nobody was trained on: the sum of -ln p over the tokens of a story and its end token,
  divided by its bytes. Bytes, because models with different tokens can be compared by them and not by tokens.
- Samples, none chosen: the seeds are counted up from 0.
- Distinct-3: of all runs of three words in the samples, the share that is different (Li et al. 2016, arXiv:1510.03055,
  with 1 and 2 words). Text that repeats itself is low.
- The longest run of words that a sample shares with the training text: does it write, or recite?
"""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minillm import LLM, SamplingParams

from .card import card
from .stories import ngrams, read_stories, words_of

PROMPTS = ["Once upon a time"] * 10 + [""] * 10
TEMPERATURE = 0.8
TRAINING = ("train", "sampled")
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True)
class Sample:
    """One answer, and what makes it again. `ended`: by the end token, not by the limit."""

    prompt: str
    seed: int
    text: str
    ended: bool
    longest_real: int  # words in a row that the real stories have too
    longest_sampled: int


def story_ids(llm: LLM, story: str) -> list[int]:
    """A story between two end tokens, the first of which only begins it."""
    end = llm.config.eos_token_ids[0]
    return [end, *llm.tokenizer.encode(story, False), end]


def nats_per_byte(llm: LLM, stories: list[str], deadline: float) -> tuple[float, int]:
    """Mean over the bytes of `stories`, of as many as there is time for (at least one); and how many those were."""
    nats, count, done = 0.0, 0, 0
    for story in stories:
        ids = story_ids(llm, story)
        logprobs = llm.logits(ids[:-1]).log_softmax(-1)  # [T, vocab]
        nats -= logprobs.gather(1, torch.tensor(ids[1:])[:, None]).double().sum().item()
        count, done = count + len(story.encode()), done + 1
        if time.time() > deadline:
            break
    return nats / count, done


def draw(llm: LLM, prompts: list[str], max_tokens: int) -> list[tuple[str, bool]]:
    """Text (prompt included) and whether it ended by itself, for seeds 0, 1, 2, ..."""
    params = [SamplingParams(max_tokens=max_tokens, temperature=TEMPERATURE, seed=seed) for seed in range(len(prompts))]
    answers = llm.generate(prompts, params)
    return [(prompt + a.text, a.finish_reason == "stop") for prompt, a in zip(prompts, answers, strict=True)]


def distinct(texts: list[str], n: int = 3) -> float:
    """Different n-grams of words by all of them; 1 is a text that never says the same thing twice."""
    grams = [gram for text in texts for gram in ngrams(words_of(text), n)]
    return len(set(grams)) / max(len(grams), 1)


def longest_shared_runs(texts: list[str], training: list[str], device: torch.device) -> list[int]:
    """For each text the most words in a row that stand so in one of the training stories.

    Runs of n words are compared by a 64-bit hash (a polynomial in the words' numbers that wraps around), for n = 1, 2,
    ... until no text has one: for each n one tensor operation over all training text.
    """
    numbers: dict[str, int] = {}

    def encode(stories: list[str]) -> Tensor:
        """The words of all stories as numbers, and after each story a number that comes once, so no run crosses it."""
        rows = [[numbers.setdefault(word, len(numbers) + 1) for word in words_of(story)] for story in stories]
        flat = [number for index, row in enumerate(rows) for number in (*row, -index - 1)]
        return torch.tensor(flat, dtype=torch.int64, device=device)

    words, there = [encode([text])[:-1] for text in texts], encode(training)
    hashes, known = [torch.zeros_like(row) for row in words], torch.zeros_like(there)
    longest, n = [0] * len(texts), 0
    while len(there) > n:
        n += 1
        hashes = [_extend(old, row, n) for old, row in zip(hashes, words, strict=True)]
        known = _extend(known, there, n)
        shared = torch.isin(torch.cat(hashes), known).split([len(row) for row in hashes])
        found = [index for index, row in enumerate(shared) if row.any()]
        for index in found:
            longest[index] = n
        if not found:
            break
    return longest


def _extend(hashes: Tensor, numbers: Tensor, n: int) -> Tensor:
    """Hashes of all runs of n words from those of n - 1 words."""
    count = max(len(numbers) - n + 1, 0)
    mixed = numbers[n - 1 :] * -7046029254386353131  # 0x9E3779B97F4A7C15
    return (hashes[:count] * 6364136223846793005 + (mixed ^ (mixed >> 29)))[:count]


def measure(work: Path, seconds: float, device: torch.device) -> dict[str, Any]:
    """All figures of the card, as one object of JSON."""
    started = time.time()
    held_out = read_stories(work / "held_out.jsonl")
    with LLM(work / "stories", device=str(device), dtype="float32", max_batch_size=len(PROMPTS), graphs="off") as llm:
        context = llm.max_seq_len
        fitting = [story for story in held_out if len(story_ids(llm, story)) <= context + 1]
        answers = draw(llm, PROMPTS, max_tokens=context - 16)
        student, student_count = nats_per_byte(llm, fitting, started + seconds / 3)
        parameters = llm.config.parameter_count
    with LLM(work / "teacher", device=str(device), dtype="float32", max_batch_size=1, graphs="off") as llm:
        teacher, teacher_count = nats_per_byte(llm, fitting[:student_count], started + 2 * seconds / 3)
        teacher_parameters = llm.config.parameter_count
    texts = [text for text, _ in answers]
    runs = {name: longest_shared_runs(texts, read_stories(work / f"{name}.jsonl"), device) for name in TRAINING}
    samples = [
        Sample(prompt, seed, text, ended, runs["train"][seed], runs["sampled"][seed])
        for seed, (prompt, (text, ended)) in enumerate(zip(PROMPTS, answers, strict=True))
    ]
    return {
        "student_nats_per_byte": student,
        "student_stories": student_count,
        "teacher_nats_per_byte": teacher,
        "teacher_stories": teacher_count,
        "held_out_stories": len(held_out),
        "parameters": parameters,
        "teacher_parameters": teacher_parameters,
        "distinct_3": distinct(texts),
        "temperature": TEMPERATURE,
        "samples": [asdict(sample) for sample in samples],
    }


def run(work: Path, out: Path, seconds: float, device: torch.device) -> dict[str, Any]:
    """Measure, and write the model with its card into `out/stories`, and the figures into `out/evaluation.json`."""
    figures = measure(work, seconds, device)
    counts = json.loads((work / "counts.json").read_text("utf-8"))
    target = out / "stories"
    target.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        shutil.copy(work / "stories" / name, target)
    (out / "evaluation.json").write_text(json.dumps(figures, indent=2) + "\n", "utf-8")
    config = json.loads((target / "config.json").read_text("utf-8"))
    size = sum((target / name).stat().st_size for name in FILES)
    (target / "README.md").write_text(card(figures, counts, config, size), "utf-8")
    return figures

"""Stage 3: the teacher writes stories, with minillm's own engine, and what is broken or copied is thrown away.

A request costs a prefill, and a prefill of a small model is bound by the host that launches it. So a request is not one
story but several: it goes on after the end token (`ignore_eos`), as the teacher has learned to, and the tokens are cut
at the end tokens afterwards. The piece that the limit cut off at the end is dropped.

Each request begins with the first few words of a real story, so that openings are as mixed as real ones; the stories
after the first begin with whatever the teacher likes. Temperature 1 is the teacher's own distribution, which is what
shall be learned; `min_p` cuts off the unlikely tokens that derail a small model (Nguyen et al. 2024, arXiv:2407.01082).

Several processes share the GPU, each with an engine of its own: while the host of one admits and prefills, the GPU
works for another. Each writes the stories that it keeps to a file of its own.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from minillm import LLM, SamplingParams

from .stories import Sieve, read_stories, words_of, write_stories


@dataclass(frozen=True)
class Sampling:
    """How the teacher is asked. `tokens` is what a request makes, `rows` how many run at once in each process."""

    workers: int = 4
    rows: int = 256
    tokens: int = 768
    temperature: float = 1.0
    min_p: float = 0.02
    opening_words: int = 5
    device: str = "auto"


def openings(stories: list[str], count: int, most_words: int, rng: random.Random) -> list[str]:
    """The first one to `most_words` words of stories drawn at random."""
    drawn = rng.choices(stories, k=count)
    return [" ".join(story.split(" ")[: rng.randint(1, most_words)]) for story in drawn]


def finished(token_ids: list[int], end: int) -> list[list[int]]:
    """The stretches of tokens that an end token ends; what stands after the last one is unfinished."""
    pieces: list[list[int]] = [[]]
    for token in token_ids:
        if token == end:
            pieces.append([])
        else:
            pieces[-1].append(token)
    return [piece for piece in pieces[:-1] if piece]


def write_batch(llm: LLM, starts: list[str], sampling: Sampling, seed: int) -> list[str]:
    """The finished stories of one request for each opening, all at once."""
    end = llm.config.eos_token_ids[0]
    prompts = [[end, *llm.tokenizer.encode(start, False)] for start in starts]
    params = [
        SamplingParams(
            max_tokens=sampling.tokens,
            temperature=sampling.temperature,
            min_p=sampling.min_p,
            seed=seed + index,
            ignore_eos=True,
        )
        for index in range(len(prompts))
    ]
    answers = llm.generate(prompts, params)
    ids = [[*prompt[1:], *answer.token_ids] for prompt, answer in zip(prompts, answers, strict=True)]
    return [llm.tokenizer.decode(piece) for row in ids for piece in finished(row, end)]


def work_alone(work: Path, index: int, sampling: Sampling, deadline: float) -> None:
    """Sample, batch after batch, until `deadline` (`time.time()`) is too near for another; write part `index`.

    Always makes one batch. The files of the part are written after each, so a worker that is ended loses one batch.
    """
    real = read_stories(work / "train.jsonl")
    sieve, kept = Sieve(real), list[str]()
    counts: Counter[str] = Counter()
    rng = random.Random(index)
    slowest, batch = 0.0, 0
    with LLM(
        work / "teacher", device=sampling.device, max_batch_size=sampling.rows, max_seq_len=_longest(work, sampling)
    ) as llm:
        while batch == 0 or time.time() + slowest < deadline:
            started = time.time()
            starts = openings(real, sampling.rows, sampling.opening_words, rng)
            for story in write_batch(llm, starts, sampling, seed=(index << 48) + (batch << 24)):
                reason = sieve.reason(story.strip())
                counts[reason or "kept"] += 1
                if reason is None:
                    kept.append(story.strip())
            batch, slowest = batch + 1, max(slowest, time.time() - started)
            counts["tokens made"] = batch * sampling.rows * sampling.tokens
            counts["graph replays"] = llm.graph_report().replays
            write_stories(work / f"sampled-{index}.jsonl", kept)
            (work / f"sampled-{index}.json").write_text(json.dumps(counts), "utf-8")


def run(work: Path, seconds: float, sampling: Sampling) -> dict[str, int]:
    """Write `sampled.jsonl`: what the workers kept, without what two of them wrote.

    Returns: how many stories were kept, and why others fell.
    Raises: RuntimeError if no worker ended well.
    """
    deadline = time.time() + seconds
    for old in work.glob("sampled-*.json*"):
        old.unlink()
    if sampling.workers == 1:
        work_alone(work, 0, sampling, deadline)
    else:
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        jobs = [(work, index, sampling, deadline) for index in range(sampling.workers)]
        processes = [context.Process(target=work_alone, args=job) for job in jobs]
        for process in processes:
            process.start()
        for process in processes:  # a worker that hangs must not take the other stages' time
            process.join(max(1.0, deadline + 30 - time.time()))
            if process.is_alive():
                process.kill()
    return merge(work)


def merge(work: Path) -> dict[str, int]:
    """One file of all parts; one that is not complete is left out."""
    counts: Counter[str] = Counter()
    stories: dict[tuple[str, ...], str] = {}
    for part in sorted(work.glob("sampled-*.json")):
        counts.update(json.loads(part.read_text("utf-8")) | {"workers": 1})
        for story in read_stories(part.with_suffix(".jsonl")):
            stories.setdefault(tuple(words_of(story)), story)
    if not stories:
        raise RuntimeError("the teacher wrote no story that could be kept: see what the workers printed")
    if twice := counts["kept"] - len(stories):
        counts["was there before"] += twice
    counts["kept"] = len(stories)
    write_stories(work / "sampled.jsonl", stories.values())
    return dict(counts.most_common())


def _longest(work: Path, sampling: Sampling) -> int:
    """Tokens of a row: the request, and room for the opening, but no more than the teacher's context."""
    context = json.loads((work / "teacher" / "config.json").read_text("utf-8"))["max_position_embeddings"]
    return min(context, sampling.tokens + 64)

"""5. Bucketed prefill: the prompt too.

    python -m examples.story.s5_prefill

A short prompt takes as long as its launches, like a decode step, and everybody waits for it: it is the time to the
first token. But a prompt has a length of its own, and a length is a shape. So a few lengths are recorded (64, 128,
256, 512), a prompt is put at the front of the smallest that fits, and the rest of that is padding.

The padding stands behind the prompt, and attention looks back only: no real token sees it. Three things are left, and
each becomes a tensor. Where K and V go: to the position, or for padding to the scratch slot of the row. Which row: an
index, also when attention reads it. Whose logits are wanted: those of token `count - 1`, by `index_select`.

What can go wrong: padding costs what tokens cost, so a bucket much too large, or a prompt that keeps the GPU busy by
itself, is slower than no graph: longer prompts run eagerly. And a product of 512 rows may round differently from one of
300: logits are equal up to rounding, not bit for bit.
"""

import random
import sys
from collections.abc import Callable
from statistics import mean

import torch

from minillm.cache import KVCache
from minillm.kernels import reference
from minillm.model import Llama

from .common import Parts, build, capture, milliseconds
from .tell import Gain, Options, main

NAME = "examples.story.s5_prefill"
SIZES = (512, 256, 128, 64)  # the largest first, as in chapter 4
LENGTHS = (16, 40, 64, 100, 180, 250, 330, 410, 500)  # of prompts
Prefill = Callable[[torch.Tensor, int], torch.Tensor]  # token ids on the host, row -> logits of the last, [1, vocab]


class Prompt:
    """A prompt where recordings read it. token_ids: int64 [512]. count, row: int64 [1]."""

    def __init__(self, device: torch.device) -> None:
        self.token_ids = torch.zeros(SIZES[0], dtype=torch.int64, device=device)
        self.count, self.row = torch.ones_like(self.token_ids[:1]), torch.zeros_like(self.token_ids[:1])

    def put(self, token_ids: torch.Tensor, row: int) -> None:
        """What lies behind the prompt stays: any valid id may be padding."""
        self.token_ids[: len(token_ids)].copy_(token_ids, non_blocking=True)
        self.count.fill_(len(token_ids))
        self.row.fill_(row)


def padded_prefill(model: Llama, cache: KVCache, prompt: Prompt, size: int) -> torch.Tensor:
    """`Llama.prefill` of `size` tokens, the first `count` of them real: logits of the last real one, [1, vocab]."""
    positions = torch.arange(size, device=prompt.row.device)
    slots = torch.where(positions < prompt.count, positions, cache.scratch_slot)
    triangle = reference.chunk_attention(row=0, start=0)

    def attend(q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return triangle(q, kv[:, :, :, :size].index_select(1, prompt.row))

    x = model.weights.embed[prompt.token_ids[:size]]
    x = model._layers(reference, x, model.rope[:size], prompt.row.expand(size), slots, cache, attend)
    return model._logits(reference, x.index_select(0, prompt.count - 1))


class PrefillGraphs:
    """A recording for each size, all in one pool."""

    def __init__(self, parts: Parts) -> None:
        self.prompt = Prompt(parts.cache.kv.device)
        self.out = torch.empty(1, parts.model.config.vocab_size, device=parts.cache.kv.device)
        stream, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()

        def record(size: int) -> torch.cuda.CUDAGraph:
            return capture(lambda: self.out.copy_(padded_prefill(*parts[:2], self.prompt, size)), stream, pool)

        self.graphs = {size: record(size) for size in SIZES}

    def __call__(self, token_ids: torch.Tensor, row: int) -> torch.Tensor:
        """Logits, [1, vocab], which the next call overwrites."""
        self.prompt.put(token_ids, row)
        self.graphs[min(size for size in SIZES if size >= len(token_ids))].replay()
        return self.out


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of what two logits differ by, as a share of that of the logits."""
    return float((found - expected).norm() / expected.norm())


def first_token(prefill: Prefill, token_ids: torch.Tensor, row: int, rounds: int) -> float:
    """Milliseconds from a prompt on the host to its next token on the host."""
    return milliseconds(lambda: prefill(token_ids, row).argmax().item(), rounds=rounds)


def measure(options: Options) -> list[Gain]:
    parts = build(options.shape, rows=2)
    vocab, device = parts.model.config.vocab_size, parts.cache.kv.device

    def eager(token_ids: torch.Tensor, row: int) -> torch.Tensor:
        return parts.model.prefill(token_ids.to(device, non_blocking=True), row, 0, parts.cache)

    graphs, rounds = PrefillGraphs(parts), max(5, options.steps // 4)
    rows = random.Random(0).choices((0, 1), k=len(LENGTHS))
    asked = [(torch.randint(vocab, (n,)).pin_memory(), row) for n, row in zip(LENGTHS, rows, strict=True)]
    worst = max(difference(graphs(*prompt), eager(*prompt)) for prompt in asked)
    assert worst < 0.3, worst  # of another prompt or row they differ by more than 100 %
    checked = f"logits, eager and padded: they differ by {worst:.2%} at most, the rounding of bfloat16"

    spent = [[first_token(prefill, *prompt, rounds) for prompt in asked] for prefill in (eager, graphs)]
    figures = [" ".join(f"{value:#.3g}" for value in values) for values in spent]
    notes = [f"prompts of {' '.join(map(str, LENGTHS))} tokens: {figures[0]} ms eager, {figures[1]} ms padded"]
    bars = {"eager": mean(spent[0]), "padded graphs": mean(spent[1])}
    return [Gain(5, "bucketed prefill", options.shape, bars, "to the first token", checked, notes)]


if __name__ == "__main__":
    sys.exit(main(NAME, __doc__, [measure]))

"""4. Batch sizes, padding, and one pool for all graphs.

    python -m examples.story.s4_batches

A recording has one batch size. An app has many, and they change at each step, as requests come and go. Recording every
size would take minutes and gigabytes, so a few are recorded (1, 2, 4, 8, then by 8), and a step runs in the smallest
that fits: 9 rows run in the recording of 16, whose last 7 rows are padding.

Padding must be decided, not left to chance (`minillm/kernels/reference.py`, `begin` and `row_attention`). Such a row
feeds token 0 at position 0, reads one finite key, and writes to a slot of the cache that no token reads: the scratch
slot. What else can happen did happen elsewhere: an index of -1, meant as "nowhere", wraps around to the last slot of
somebody's row; a softmax over no keys is NaN.

Each recording keeps the memory of its activations. Only one is replayed at a time, so all can lie in one pool; and
recorded from the largest to the smallest, each finds its memory in what the first one took. What can go wrong: an
output that lies in the pool is overwritten by the next replay, so the state and the cache are allocated outside.

This is what `GraphRunner` (`minillm/graphs.py`) does; here it is looked at from outside.
"""

import gc
import random
import sys

import torch

from minillm.cache import KVCache
from minillm.capture import Backend, CudaBackend
from minillm.graphs import GraphRunner
from minillm.sampling import Mode
from minillm.state import DecodeState
from minillm.step import decode_step

from .common import CACHE, PROMPT, Parts, build, milliseconds
from .tell import Gain, Options, main

NAME = "examples.story.s4_batches"
ROWS = 32


def make_runner(parts: Parts, backend: Backend | None) -> GraphRunner:
    """One kv_len, that of the whole cache, so that recordings differ in their batch size alone."""

    def step(rows: DecodeState, kv_len: int, mode: Mode) -> None:
        decode_step(parts.model, parts.cache, rows, kv_len, mode)

    runner = GraphRunner(step, parts.state, parts.cache, backend, kv_lengths=[parts.cache.max_seq_len])
    runner.capture()
    return runner


def pool_bytes(parts: Parts, share_pool: bool) -> int:
    """What the recordings of all sizes take."""
    runner = make_runner(parts, CudaBackend(parts.cache.kv.device, share_pool))
    taken = runner.report.pool_bytes
    runner.close()
    gc.collect()
    torch.cuda.empty_cache()
    return taken


def begin(parts: Parts, rows: int) -> None:
    """Rows 0 .. rows - 1 stand behind a prompt, each with another token; the others are padding."""
    state = parts.state
    state.tokens.copy_(state.rows + 7)
    state.positions.fill_(PROMPT)
    state.limits.fill_(CACHE)
    state.active.copy_(state.rows < rows)


def written(cache: KVCache, before: torch.Tensor) -> list[list[int]]:
    """(row, slot) of every place of the cache that is no longer as it was."""
    return (cache.kv != before).any(-1).any(3).any(1).any(0).nonzero().tolist()


def mixed(runner: GraphRunner, sizes: list[int]) -> float:
    """Milliseconds a step of batches of mixed sizes, one after another."""

    def work() -> None:
        for rows in sizes:
            runner.step(rows, CACHE, Mode.GREEDY)

    with runner.on_stream():
        return milliseconds(work, len(sizes))


def tokens_of(parts: Parts, runner: GraphRunner, rows: int, padded: int) -> list[int]:
    """The next tokens of the first `rows` rows, in a step of `padded` rows or more."""
    begin(parts, rows)
    torch.cuda.synchronize()  # the runner may have a stream of its own
    with runner.on_stream():
        runner.step(padded, CACHE, Mode.GREEDY)
    torch.cuda.synchronize()
    return parts.state.tokens[:rows].tolist()


def measure(options: Options) -> list[Gain]:
    parts = build(options.shape, ROWS)
    cache = parts.cache
    apart, together = pool_bytes(parts, share_pool=False), pool_bytes(parts, share_pool=True)
    eager, graphs = make_runner(parts, None), make_runner(parts, CudaBackend(cache.kv.device))
    for rows in range(1, ROWS + 1):
        padded = min(size for size in graphs.report.batch_sizes if size >= rows)
        assert tokens_of(parts, eager, rows, padded) == tokens_of(parts, graphs, rows, rows), rows
    before = cache.kv.normal_().clone()
    tokens_of(parts, graphs, 3, 3)
    assert written(cache, before) == [[0, PROMPT], [1, PROMPT], [2, PROMPT], [3, cache.scratch_slot]]

    sizes = random.Random(0).choices(range(1, ROWS + 1), k=options.steps)
    begin(parts, ROWS)
    bars = {"eager": mixed(eager, sizes), "padded graphs": mixed(graphs, sizes)}
    checked = f"the tokens of 1 to {ROWS} rows, eager with the same padding; of 3 rows in 4, row 3 wrote to scratch"
    notes = [f"{graphs.report.graphs} graphs take {apart >> 20} MiB with a pool each, {together >> 20} MiB with one"]
    graphs.close()
    return [Gain(4, "batch sizes, padding, one pool", options.shape, bars, "a step of 1 to 32 rows", checked, notes)]


if __name__ == "__main__":
    sys.exit(main(NAME, __doc__, [measure]))

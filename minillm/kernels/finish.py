"""The end of a greedy step in one kernel: the most likely token of each row, and the state of the next step.

It does what `step.sample_and_advance` does in `Mode.GREEDY` with a dozen small kernels. The vocabulary of a row is cut
into chunks, a program each; the last to arrive (`sync.py`) has the best token, tells whether the row ends, and writes
`DecodeState`. Of equal logits the lowest index wins. A NaN counts as infinite here: both mark the row as broken.
"""

import triton
import triton.language as tl

from .. import state
from .sync import allow_next, last_to_arrive, wait_for_previous

# mypy: ignore-errors

RUNNING, STOP = tl.constexpr(state.RUNNING), tl.constexpr(state.STOP)
LENGTH, BROKEN = tl.constexpr(state.LENGTH), tl.constexpr(state.BROKEN)


@triton.jit
def greedy_finish_kernel(
    logits, best, index, counters, tokens, positions, active, limits, stops, output, vocab,
    BLOCK: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (chunks of the vocabulary, rows); CHUNKS: their number rounded up to a power of two.

    logits: float32 [rows, vocab]; the state as in `DecodeState`, bools as bytes.
    Scratch: best float32 and index int32 [rows, CHUNKS]; counters int32 [rows], zero between launches.
    """
    allow_next(PDL)
    wait_for_previous(PDL)
    chunk, row = tl.program_id(0), tl.program_id(1)
    i = chunk * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + row.to(tl.int64) * vocab + i, mask=i < vocab, other=float("-inf"))
    value = tl.where(value == value, value, float("inf"))
    top = tl.max(value, 0)
    tl.store(best + row * CHUNKS + chunk, top)
    tl.store(index + row * CHUNKS + chunk, tl.min(tl.where(value == top, i, vocab), 0))
    if last_to_arrive(counters + row, tl.num_programs(0)):
        c = tl.arange(0, CHUNKS)
        there = c < tl.num_programs(0)
        tops = tl.load(best + row * CHUNKS + c, mask=there, other=float("-inf"), cache_modifier=".cg")
        tokens_at = tl.load(index + row * CHUNKS + c, mask=there, other=vocab, cache_modifier=".cg")
        top = tl.max(tops, 0)
        token = tl.min(tl.where(tops == top, tokens_at, vocab), 0)
        advance(top, token, row, tokens, positions, active, limits, stops, output, vocab)


@triton.jit
def advance(top, token, row, tokens, positions, active, limits, stops, output, vocab):
    """Put the token where the next step reads it, and end the row if it is done; see `step.sample_and_advance`."""
    was_active = tl.load(active + row) != 0
    position = tl.load(positions + row)
    finished = tl.where(position + 2 >= tl.load(limits + row), LENGTH, RUNNING)
    finished = tl.where(tl.load(stops + row.to(tl.int64) * vocab + token) != 0, STOP, finished)
    finished = tl.where(tl.abs(top) < float("inf"), finished, BROKEN)
    tl.store(output + row * 3, token)
    tl.store(output + row * 3 + 1, finished)
    tl.store(output + row * 3 + 2, 0)  # the bits of a log-probability of 0.0, which is what GREEDY gives
    tl.store(tokens + row, token.to(tl.int64), mask=was_active)
    tl.store(positions + row, position + 1, mask=was_active)
    tl.store(active + row, (was_active & (finished == RUNNING)).to(tl.uint8))

"""The end of a greedy step in one kernel: the most likely token of each row, and the state of the next step.

It does what `step.sample_and_advance` does in `Mode.GREEDY` with a dozen small kernels. The vocabulary of a row is cut
into chunks, a program each; the last to arrive (`sync.py`) has the best token, tells whether the row ends, and writes
`DecodeState`. Of equal logits the lowest index wins. A NaN counts as infinite here: both mark the row as broken.
`draw.py` ends a step that samples, and with the same parts.
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
    store_best(value, i, best, index, row * CHUNKS + chunk, vocab)
    if last_to_arrive(counters + row, tl.num_programs(0)):
        top, token = load_best(best, index, row * CHUNKS, tl.num_programs(0), vocab, CHUNKS)
        advance(top, token, 0.0, row, tokens, positions, active, limits, stops, output, vocab)


@triton.jit
def store_best(value, i, best, index, at, vocab):
    """The largest of a chunk of values, and the first place i where it stands.

    Beyond the vocabulary is -inf or, in a row that is all -inf, NaN: it may equal the largest, but is never the first.
    """
    value = tl.where(value == value, value, float("inf"))
    top = tl.max(value, 0)
    tl.store(best + at, top)
    tl.store(index + at, tl.min(tl.where(value == top, i, vocab), 0))


@triton.jit
def load_best(best, index, at, count, vocab, CHUNKS: tl.constexpr):
    """(the largest of all `count` chunks of a row, the first place where it stands)."""
    c = tl.arange(0, CHUNKS)
    there = c < count
    tops = tl.load(best + at + c, mask=there, other=float("-inf"), cache_modifier=".cg")
    places = tl.load(index + at + c, mask=there, other=vocab, cache_modifier=".cg")
    top = tl.max(tops, 0)
    return top, tl.min(tl.where(tops == top, places, vocab), 0)


@triton.jit
def advance(top, token, logprob, row, tokens, positions, active, limits, stops, output, vocab):
    """Put the token where the next step reads it, and end the row if it is done; see `step.sample_and_advance`.

    top: the largest logit. logprob: float32, of which the bits go into the output.
    """
    was_active = tl.load(active + row) != 0
    position = tl.load(positions + row)
    finished = tl.where(position + 2 >= tl.load(limits + row), LENGTH, RUNNING)
    finished = tl.where(tl.load(stops + row.to(tl.int64) * vocab + token) != 0, STOP, finished)
    finished = tl.where(tl.abs(top) < float("inf"), finished, BROKEN)
    tl.store(output + row * 3, token)
    tl.store(output + row * 3 + 1, finished)
    tl.store((output + row * 3 + 2).to(tl.pointer_type(tl.float32)), logprob)
    tl.store(tokens + row, token.to(tl.int64), mask=was_active)
    tl.store(positions + row, position + 1, mask=was_active)
    tl.store(active + row, (was_active & (finished == RUNNING)).to(tl.uint8))

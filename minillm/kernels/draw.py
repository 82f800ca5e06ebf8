"""The end of a step that samples in two kernels: what `step.sample_and_advance` does with some fifty small ones.

The vocabulary of a row is cut into chunks, a program each. Two kernels, because a score needs the largest logit of the
whole row, and a sum over a row is there only when all programs that add to it have ended:

1. `measure_kernel` leaves three numbers a chunk: the largest logit, the sum of exp(logit - largest), for the
   log-probability, and the largest penalised logit.
2. `draw_kernel` scores its chunk and leaves the best token of it; the last program to arrive (`sync.py`) has the token
   of the row and does the rest, as in `finish.py`.

What each step of the arithmetic means stands in `sampling.py`. The integers of the noise are the same here, and so are
penalty and temperature to the last bit (`div_rn` is the division that IEEE 754 asks for; `/` is a faster one). The
logarithms may differ in their last bits. All sums have a fixed order, so equal inputs give equal bits.

What is read before the wait: the parameters of the rows, their positions, and which tokens they have seen. The host or
the step before wrote them, and the ordinary kernel that starts a step (`begin.py`) stands between. The noise depends
on nothing else, so it is ready when the logits are. `seen` is written by the last program alone: by then all programs
of both kernels have read it.
"""

import triton
import triton.language as tl

from .finish import advance, load_best, store_best
from .sync import allow_next, last_to_arrive, wait_for_previous

# mypy: ignore-errors


@triton.jit
def measure_kernel(
    logits, seen, penalties, peaks, sums, tops, vocab,
    BLOCK: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (chunks of the vocabulary, rows); CHUNKS: their number rounded up to a power of two.

    logits: float32 [rows, vocab]; seen: bytes [rows, vocab]; penalties: float32 [rows].
    Results: float32 [rows, CHUNKS]: peaks, sums of exp(logit - peak), and tops, the peaks after the penalty.
    """
    allow_next(PDL)
    chunk, row = tl.program_id(0), tl.program_id(1)
    i = chunk * BLOCK + tl.arange(0, BLOCK)
    line = row.to(tl.int64) * vocab
    was_seen = tl.load(seen + line + i, mask=i < vocab, other=0) != 0
    penalty = tl.load(penalties + row)
    wait_for_previous(PDL)
    value = tl.load(logits + line + i, mask=i < vocab, other=float("-inf"))
    value = tl.where(value == value, value, float("inf"))  # tl.max would pass over a NaN
    peak = tl.max(value, 0)
    at = row * CHUNKS + chunk
    tl.store(peaks + at, peak)
    tl.store(sums + at, tl.sum(tl.exp(value - tl.where(peak > float("-inf"), peak, 0.0)), 0))
    tl.store(tops + at, tl.max(penalise(value, was_seen, penalty), 0))


@triton.jit
def draw_kernel(
    logits, scores, seen, temperatures, penalties, min_ps, seeds, peaks, sums, tops, best, index, counters,
    tokens, positions, active, limits, stops, output, vocab,
    BLOCK: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid and results of `measure_kernel`, and the scratch memory of `greedy_finish_kernel`.

    logits: float32 [rows, vocab]. scores: None, or what `keep_top` left of the scaled scores, float32 [rows, vocab].
    The state as in `DecodeState`, bools as bytes.
    """
    allow_next(PDL)
    chunk, row = tl.program_id(0), tl.program_id(1)
    i = chunk * BLOCK + tl.arange(0, BLOCK)
    line = row.to(tl.int64) * vocab
    temperature = tl.load(temperatures + row)
    noise = tl.zeros((BLOCK,), tl.float32)
    if temperature > 0:  # a branch, beyond which the compiler does not move the work: not behind the wait
        noise = gumbel(noise_bits(tl.load(seeds + 2 * row), tl.load(seeds + 2 * row + 1), tl.load(positions + row), i))
    least = tl.log(tl.load(min_ps + row))
    if scores is None:
        was_seen = tl.load(seen + line + i, mask=i < vocab, other=0) != 0
        penalty = tl.load(penalties + row)
    wait_for_previous(PDL)
    c = tl.arange(0, CHUNKS)
    there = c < tl.num_programs(0)
    if scores is None:
        top = tl.max(tl.load(tops + row * CHUNKS + c, mask=there, other=float("-inf")), 0)
        value = penalise(tl.load(logits + line + i, mask=i < vocab, other=float("-inf")), was_seen, penalty)
        score = tl.div_rn(value - top, tl.where(temperature > 0, temperature, 1.0))
    else:
        score = tl.load(scores + line + i, mask=i < vocab, other=float("-inf"))
    score = tl.where(score < least, float("-inf"), score) + noise
    store_best(score, i, best, index, row * CHUNKS + chunk, vocab)
    if last_to_arrive(counters + row, tl.num_programs(0)):
        _, token = load_best(best, index, row * CHUNKS, tl.num_programs(0), vocab, CHUNKS)
        peak_of = tl.load(peaks + row * CHUNKS + c, mask=there, other=float("-inf"))
        peak = tl.max(peak_of, 0)
        total = tl.sum(tl.load(sums + row * CHUNKS + c, mask=there, other=0.0) * tl.exp(peak_of - peak), 0)
        logprob = tl.load(logits + line + token) - (peak + tl.log(total))
        tl.store(seen + line + token, 1)
        advance(peak, token, logprob, row, tokens, positions, active, limits, stops, output, vocab)


@triton.jit
def penalise(value, seen, penalty):
    """See `sampling.penalise`."""
    return tl.where(seen, tl.where(value > 0, tl.div_rn(value, penalty), value * penalty), value)


@triton.jit
def noise_bits(seed_low, seed_high, position, token):
    """The 31 random bits of a candidate token, int32, all of it in wrapping arithmetic; see `sampling.gumbel`.

    The seed comes in two halves, int32; position is that of the row, int64; token ids are int32.
    """
    key = mix(mix(seed_low ^ -1640531527) + (position + 1).to(tl.int32))
    return mix(mix(token ^ key) + mix(seed_high + key)) & 0x7FFFFFFF


@triton.jit
def mix(x):
    """See `sampling._mix`."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * -2048144789
    x = (x ^ ((x >> 13) & 0x7FFFF)) * -1028477387
    return x ^ ((x >> 16) & 0xFFFF)


@triton.jit
def gumbel(bits):
    """-log(-log(1 - u)) of u = (bits + 1/2) / 2^31; see `sampling.gumbel`.

    Triton has no log1p, and log(1 - u) loses the digits of a small u when 1 - u is rounded. The quotient puts them
    back, because its divisor was rounded by the same (Goldberg 1991, "What every computer scientist should know about
    floating-point arithmetic", theorem 4).
    """
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.0**-31, 1 - 2.0**-24)
    rest = 1.0 - u
    lost = rest == 1.0
    exponential = tl.where(lost, u, tl.log(rest) * u / tl.where(lost, 1.0, rest - 1.0))
    return -tl.log(exponential)

"""The most likely token without logits: the end of a greedy step of 3 to 32 rows of activations.

The logits of 32 rows of a large vocabulary are 16 MB to write and to read again, and a greedy step needs one number of
each row. So a program of the output projection keeps its part of them in registers, and leaves the largest and where
it stands; a small kernel finds the largest of those and ends the step, as `finish.py` does.
"""

import triton
import triton.language as tl

from .finish import advance, load_best
from .gemv import outputs, product
from .sync import allow_next, wait_for_previous

# mypy: ignore-errors


@triton.jit(do_not_specialize=["n"])
def best_logits_kernel(
    x, w, gain, squares, best, index, n, N, blocks, eps,
    K: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BLOCKS: tl.constexpr, GROUPS: tl.constexpr,
    AHEAD: tl.constexpr, TMA: tl.constexpr, LATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of each BN rows of w [N, K], the largest of w norm(x) for x [n, K], and the first row where it stands.

    Grid (blocks of BN rows). best float32 and index int32 [n, blocks of the grid]. A NaN counts as infinite, as in
    `finish.store_best`. For w, gain, squares, blocks, BLOCKS, AHEAD and LATE see `gemm.dot_rows_wide`. For tensor
    cores alone.
    """
    allow_next(PDL and not LATE)
    block = tl.program_id(0)
    first = block * BN
    _, _, column = outputs(first, n, N, M, BN)  # [1, BN]
    y, _, _ = product(
        0, 0, w, x, gain, squares, None, None, None, first, n, N, blocks, eps, K, M, BN, BK, BLOCKS, 1, GROUPS,
        AHEAD, TMA, LATE, PDL,
    )  # fmt: skip
    value = tl.where(y == y, y, float("inf"))
    value = tl.where(column < N, value, float("-inf"))
    top, place = tl.max(value, 1, return_indices=True)  # [M], the first of equals
    m = tl.arange(0, M)
    at = m * tl.num_programs(0) + block
    tl.store(best + at, top, mask=m < n)
    tl.store(index + at, first + place, mask=m < n)


@triton.jit
def best_finish_kernel(
    best, index, tokens, positions, active, limits, stops, output, blocks, vocab,
    BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (rows). best float32 and index int32 [rows, blocks], one block for each program of `best_logits_kernel`;
    BLOCKS: the power of two of that.

    The state as in `DecodeState`, bools as bytes.
    """
    allow_next(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0)
    top, token = load_best(best, index, row * blocks, blocks, vocab, BLOCKS)
    advance(top, token, 0.0, row, tokens, positions, active, limits, stops, output, vocab)

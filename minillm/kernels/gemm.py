"""Products of a weight matrix with 5 to 32 rows of activations: the same kernels as in `gemv.py`, on tensor cores.

From about five rows on, plain products would take longer than reading the weights. Tensor cores multiply 16 rows of
weights by 8, 16 or 32 rows of activations, of which the spare ones are zero. Reading the weights is still what takes
the time. They travel through shared memory (`cp.async`), several tiles ahead of the product, and so do the activations
and the gain. All of that has to wait for the kernel before, because a pipeline keeps its loads together. (Asking the L2
cache for the weights before the wait was tried, and gained nothing.)

As in `gemv.py`, the scale of the norm is computed beside the product and multiplied at its end: a pass over the
activations ahead of the product would be a chain of reads that every program waits for. bfloat16 has the exponents
of float32, so the product takes g * x as it is. In float16 that could overflow, so each tile of each row is brought
to a largest value of 1, and its product back to size in float32.
"""

import triton
import triton.language as tl

# mypy: ignore-errors

ROOM = tl.constexpr(64 * 1024)  # bytes of shared memory for the tiles on their way in one program


@triton.jit
def dot_rows_wide(
    w, x, gain, first, n, N, eps, K: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """norm(x[m]) . w[first + row], float32 [M, BN]. x: [n, K]; w: [N, K]; gain: [K] or None."""
    FIT: tl.constexpr = ROOM // ((BN + M) * BK * 2)
    STAGES: tl.constexpr = max(2, min(6, FIT)) + 1  # one of them is the tile in use, and has no memory of its own
    k = tl.arange(0, BK)
    rows = tl.minimum(first + tl.arange(0, BN), N - 1)
    wp = w + rows[:, None].to(tl.int64) * K + k[None, :]
    xp = x + tl.arange(0, M)[:, None] * K + k[None, :]
    real = (tl.arange(0, M) < n)[:, None]  # rows beyond n are not read, so that they cost nothing
    acc, squares = tl.zeros((BN, M), tl.float32), tl.zeros((M, BK // 8), tl.float32)
    for start in tl.range(0, K, BK, num_stages=STAGES):
        if K % BK == 0:
            wt = tl.load(wp + start, eviction_policy="evict_first")
        else:
            wt = tl.load(wp + start, mask=(start + k < K)[None, :], other=0.0, eviction_policy="evict_first")
        acc, squares = add_tile(acc, squares, wt, xp, gain, real, start, K, M, BK)
    y = tl.trans(acc)
    if gain is not None:
        y *= tl.rsqrt(tl.sum(squares, 1) / K + eps)[:, None]
    return y


@triton.jit
def add_tile(acc, squares, wt, xp, gain, real, start, K: tl.constexpr, M: tl.constexpr, BK: tl.constexpr):
    """Add the product of one tile to acc [BN, M], and if there is a gain, the squares of x to squares [M, BK / 8]."""
    k = start + tl.arange(0, BK)
    inside = real if K % BK == 0 else real & (k < K)[None, :]
    xt = tl.load(xp + start, mask=inside, other=0.0)  # [M, BK]
    if gain is None:
        acc = tl.dot(wt, tl.trans(xt), acc)
    else:
        g = tl.load(gain + k) if K % BK == 0 else tl.load(gain + k, mask=k < K, other=0.0)
        xf = xt.to(tl.float32)
        squares += tl.sum(tl.reshape(xf * xf, (M, BK // 8, 8)), 2)
        xf *= g.to(tl.float32)[None, :]
        if xt.dtype == tl.float16:
            largest = tl.maximum(tl.max(tl.abs(xf), 1), 1e-30)  # [M]
            acc += tl.dot(wt, tl.trans((xf / largest[:, None]).to(tl.float16))) * largest[None, :]
        else:
            acc = tl.dot(wt, tl.trans(xf.to(xt.dtype)), acc)
    return acc, squares

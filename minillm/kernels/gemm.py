"""Products of a weight matrix with 5 to 32 rows of activations: the same kernels as in `gemv.py`, on tensor cores.

From about five rows on, plain products would take longer than reading the weights. Tensor cores multiply tiles of at
least 16 rows; the spare ones repeat the last real row and are not stored. Reading the weights is still what takes the
time: tiles travel through shared memory, several ahead of the product, and the first is requested before the wait.

The norm is applied to the activations before the product, and costs a first pass over them: rounded to 16 bits
unscaled, they could overflow in float16.
"""

import triton
import triton.language as tl

# mypy: ignore-errors

STAGES = tl.constexpr(4)  # tiles on their way


@triton.jit
def dot_rows_wide(
    wt, w, x, gain, first, n, N, eps,
    K: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """norm(x[m]) . w[first + row], float32 [M, BN]. wt: the first tile, [BN, BK], already loaded; gain or None."""
    k = tl.arange(0, BK)
    rows = tl.minimum(first + tl.arange(0, BN), N - 1)
    wp = w + rows[:, None].to(tl.int64) * K + k[None, :]
    xp = x + tl.minimum(tl.arange(0, M), n - 1)[:, None] * K + k[None, :]
    scale = tl.zeros((M,), tl.float32)
    if gain is not None:
        squares = tl.zeros((M,), tl.float32)
        for start in tl.range(0, K, BK, num_stages=1):
            xt = tl.load(xp + start, mask=(start + k < K)[None, :], other=0.0).to(tl.float32)
            squares += tl.sum(xt * xt, 1)
        scale = tl.rsqrt(squares / K + eps)
    acc = tl.dot(normal_tile(xp, gain, scale, 0, K, BK), tl.trans(wt))
    for start in tl.range(BK, K, BK, num_stages=STAGES):
        inside = (start + k < K)[None, :]
        wt = tl.load(wp + start, mask=inside, other=0.0, eviction_policy="evict_first")
        acc = tl.dot(normal_tile(xp, gain, scale, start, K, BK), tl.trans(wt), acc)
    return acc


@triton.jit
def normal_tile(xp, gain, scale, start, K: tl.constexpr, BK: tl.constexpr):
    """Columns start .. start + BK - 1 of the activations, normalised if gain is given; zero beyond K."""
    k = start + tl.arange(0, BK)
    xt = tl.load(xp + start, mask=(k < K)[None, :], other=0.0)
    if gain is not None:
        g = tl.load(gain + k, mask=k < K, other=0.0).to(tl.float32)
        xt = (xt.to(tl.float32) * scale[:, None] * g[None, :]).to(xt.dtype)
    return xt

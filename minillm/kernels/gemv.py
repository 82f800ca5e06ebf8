"""The projections, and their product for one or two rows of activations: four fifths and more of a decode step's time.

With so few rows every weight is used once or a few times, so the product is as fast as the weights can be read, and
no faster. The shape of these kernels follows from that:

- One program owns `BN` whole rows of the matrix. They lie in memory one after the other, and no sum crosses programs.
- It reads them in tiles of BN x BK with 16-byte loads, straight into registers; the next tile is always on its way,
  and the first is requested before the wait for the kernel before (`sync.py`). `evict_first` keeps weights, which are
  not needed again in this step, from pushing activations out of the L2 cache.
- Products and sums are plain float32. Tensor cores would need the weights in another layout and gain nothing.
- RMSNorm rides along: y = W (g * x) * scale, where the scale is one number a row, so it is computed beside the product
  and multiplied at its end. Every program computes it again; that costs less than a kernel of its own.
- What follows a projection happens in its epilogue, on numbers that are still in registers: rotation and the write to
  the cache after q, k, v; SiLU(gate) * up; the residual addition.

Names: M rows of activations, of which n are real; N rows and K columns of the matrix. Rows beyond n or N are clamped to
the last one, computed again, and not stored. The same kernels serve 3 to 32 rows, with the product of `gemm.py`, to
which rows beyond n are zero, and with a tensor map those beyond N. (They take up to 4 rows the plain way;
`launch.PLAIN_ROWS` says how many are faster so.)
"""

import triton
import triton.language as tl

from .gemm import add_parts, dot_rows_wide, write_stream
from .sync import allow_next, wait_for_previous

# mypy: ignore-errors


@triton.jit
def weight_pointers(w, first, N, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Pointers to the first tile of rows first .. first + BN - 1: [1, BN, BK]."""
    rows = tl.minimum(first + tl.arange(0, BN), N - 1)[None, :, None]
    return w + rows.to(tl.int64) * K + tl.arange(0, BK)[None, None, :]


@triton.jit
def load_tile(pointers, tile: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, policy: tl.constexpr):
    """One tile along K of pointers [.., .., BK]; zero beyond K."""
    if (tile + 1) * BK <= K:
        value = tl.load(pointers + tile * BK, eviction_policy=policy)
    else:
        inside = (tile * BK + tl.arange(0, BK) < K)[None, None, :]
        value = tl.load(pointers + tile * BK, mask=inside, other=0.0, eviction_policy=policy)
    return value


@triton.jit
def fold(t, A: tl.constexpr, B: tl.constexpr, BK: tl.constexpr):
    """Sum neighbours by eight, [A, B, BK] -> [A, B, BK / 8]: within a thread, because a 16-byte load brought them."""
    return tl.sum(tl.reshape(t, (A, B, BK // 8, 8)), 3)


@triton.jit
def dot_rows(wt, wp, x, gain, n, eps, K: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """x[m] . w[row] for M rows of activations and BN rows of weights, float32 [M, BN]; RMSNorm of x if gain is given.

    Args:
        wt: the first tile of weights, already loaded. wp: the pointers that it was loaded from.
        x: [n, K]. gain: [K] or None.
    """
    TILES: tl.constexpr = (K + BK - 1) // BK
    k = tl.arange(0, BK)[None, None, :]
    xp = x + tl.minimum(tl.arange(0, M), n - 1)[:, None, None] * K + k  # [M, 1, BK]
    for i in tl.static_range(TILES):
        if i + 1 < TILES:
            following = load_tile(wp, i + 1, K, BK, "evict_first")
        xt = load_tile(xp, i, K, BK, "").to(tl.float32)
        if gain is not None:
            squares = fold(xt * xt, M, 1, BK)
            total = squares if i == 0 else total + squares  # noqa: F821, i is known when this is compiled
            xt *= load_tile(gain + k, i, K, BK, "").to(tl.float32)
        products = fold(wt.to(tl.float32) * xt, M, BN, BK)
        acc = products if i == 0 else acc + products  # noqa: F821
        if i + 1 < TILES:
            wt = following
    y = tl.sum(acc, 2)
    if gain is not None:
        y *= tl.rsqrt(tl.sum(total, 2) / K + eps)  # [M, 1]
    return y


@triton.jit
def request_and_wait(
    w, first, N, K: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, LATE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """(the first tile of weights, on its way to registers before the wait; the pointers that it was loaded from).

    LATE: allow the next kernel in between. Tensor cores do all this in their loop, and get two zeros.
    """
    wt, wp = 0, 0
    if M <= 4:
        wp = weight_pointers(w, first, N, K, BN, BK)
        wt = load_tile(wp, 0, K, BK, "evict_first")
        if LATE:
            allow_next(PDL)
        wait_for_previous(PDL)
    return wt, wp


@triton.jit
def product(
    wt, wp, w, x, gain, squares, extra, inside, slots, first, n, N, blocks, eps, K: tl.constexpr, M: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, BLOCKS: tl.constexpr, PARTS: tl.constexpr, GROUPS: tl.constexpr,
    AHEAD: tl.constexpr, TMA: tl.constexpr, LATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`dot_rows` for up to 4 rows of activations, and what equals it on tensor cores for more.

    Returns: the product, and what the pointers `extra` [M, BN] point at, where `inside`: both float32 [M, BN]; and
        slots [M]. The last two are requested before the product, so that they are there after it, or zero if None.
    """
    if M <= 4:
        added, slot = tl.zeros((M, BN), tl.float32), tl.zeros((M,), tl.int64)
        if slots is not None:
            slot = tl.load(slots + tl.arange(0, M), mask=tl.arange(0, M) < n, other=0)
        if extra is not None:
            added = tl.load(extra, mask=inside, other=0.0).to(tl.float32)
        y = dot_rows(wt, wp, x, gain, n, eps, K, M, BN, BK)
    else:
        y, added, slot = dot_rows_wide(
            w, x, gain, squares, extra, inside, slots, first, n, N, blocks, eps, K, M, BN, BK, BLOCKS, PARTS, GROUPS,
            AHEAD, TMA, LATE, PDL,
        )  # fmt: skip
    return y, added, slot


@triton.jit(do_not_specialize=["n"])
def linear_kernel(
    x, w, gain, squares, bias, residual, out, next_gain, scaled, next_squares, parts, counters, n, N, blocks, eps,
    K: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BLOCKS: tl.constexpr, PARTS: tl.constexpr,
    GROUPS: tl.constexpr, AHEAD: tl.constexpr, TMA: tl.constexpr, LATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out = w norm(x) + bias + residual: x [n, K], w [N, K], residual and out [n, N].

    Grid (blocks of BN rows, PARTS), the latter 1 for up to 4 rows of activations. Any of gain, squares, bias, residual
    and next_gain may be None; for w with TMA, gain, squares, blocks, BLOCKS, AHEAD and LATE see `gemm.dot_rows_wide`,
    for next_gain, scaled and next_squares `gemm.write_stream`, for parts and counters `gemm.add_parts`.
    """
    allow_next(PDL and not LATE)
    block = tl.program_id(0)
    first = block * BN
    wt, wp = request_and_wait(w, first, N, K, M, BN, BK, LATE, PDL)
    place, inside, column = outputs(first, n, N, M, BN)
    extra, following = None, None
    if residual is not None:
        extra = residual + place
    if next_gain is not None:  # now, because it comes from far, as weights do
        following = tl.load(next_gain + column, mask=column < N, other=0.0)
    y, added, _ = product(
        wt, wp, w, x, gain, squares, extra, inside, None, first, n, N, blocks, eps, K, M, BN, BK, BLOCKS, PARTS,
        GROUPS, AHEAD, TMA, LATE, PDL,
    )  # fmt: skip
    last = True
    if PARTS > 1:
        last, y = add_parts(y, parts, counters, M, BN, PARTS)
    if last:
        if bias is not None:
            y += tl.load(bias + column, mask=column < N, other=0.0).to(tl.float32)
        write_stream(y + added, out, place, inside, following, scaled, next_squares, block, n, M)


@triton.jit
def outputs(first, n, N, M: tl.constexpr, BN: tl.constexpr):
    """(where the numbers of a program stand in [n, N], which of them do, their column): [M, BN], [M, BN], [1, BN]."""
    column = (first + tl.arange(0, BN))[None, :]
    m = tl.arange(0, M)[:, None]
    return m * N + column, (column < N) & (m < n), column


@triton.jit(do_not_specialize=["n"])
def gate_up_kernel(
    x, w, gain, squares, bias, out, n, N, blocks, eps,
    K: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BLOCKS: tl.constexpr, GROUPS: tl.constexpr,
    AHEAD: tl.constexpr, TMA: tl.constexpr, LATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out = SiLU(gate) * up of norm(x): x [n, K], w [N, K] with rows gate, up, gate, up ..., out [n, N / 2]."""
    allow_next(PDL and not LATE)
    first = tl.program_id(0) * BN
    wt, wp = request_and_wait(w, first, N, K, M, BN, BK, LATE, PDL)
    y, _, _ = product(
        wt, wp, w, x, gain, squares, None, None, None, first, n, N, blocks, eps, K, M, BN, BK, BLOCKS, 1, GROUPS,
        AHEAD, TMA, LATE, PDL,
    )  # fmt: skip
    if bias is not None:
        row = first + tl.arange(0, BN)
        y += tl.load(bias + row, mask=row < N, other=0.0).to(tl.float32)[None, :]
    gate, up = tl.split(tl.reshape(y, (M, BN // 2, 2)))  # each [M, BN / 2]
    unit = (first // 2 + tl.arange(0, BN // 2))[None, :]
    m = tl.arange(0, M)[:, None]
    hidden = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + m * (N // 2) + unit, hidden.to(out.dtype.element_ty), mask=(unit < N // 2) & (m < n))


@triton.jit(do_not_specialize=["n"])
def qkv_rope_append_kernel(
    x, w, gain, squares, bias, rope, rows, slots, q, k_cache, v_cache, parts, counters, n, N, blocks, heads, kv_heads,
    S, eps, K: tl.constexpr, D: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    BLOCKS: tl.constexpr, PARTS: tl.constexpr, GROUPS: tl.constexpr, AHEAD: tl.constexpr, TMA: tl.constexpr,
    LATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Project norm(x) to q, k, v; rotate q and k; write q to its tensor, k and v to the cache.

    x [n, K]; w [N, K], rotary pairs in neighbouring rows; rope [n, D / 2, 2] float32, cos and sin; rows, slots [n];
    q [n, heads, D]; k_cache and v_cache [rows, kv_heads, S, D]. BN divides D: the rows of a program are of one head.
    """
    allow_next(PDL and not LATE)
    first = tl.program_id(0) * BN
    wt, wp = request_and_wait(w, first, N, K, M, BN, BK, LATE, PDL)
    m = tl.arange(0, M)
    real = m < n
    row = tl.load(rows + m, mask=real, other=0)
    d = (first % D + tl.arange(0, BN))[None, :]
    turns = rope + m[:, None] * D + d
    y, turn, slot = product(
        wt, wp, w, x, gain, squares, turns, real[:, None], slots, first, n, N, blocks, eps, K, M, BN, BK, BLOCKS, PARTS,
        GROUPS, AHEAD, TMA, LATE, PDL,
    )  # fmt: skip
    last = True
    if PARTS > 1:
        last, y = add_parts(y, parts, counters, M, BN, PARTS)
    if last:
        if bias is not None:
            y += tl.load(bias + first + tl.arange(0, BN)).to(tl.float32)[None, :]
        head = first // D
        rotates = head < heads + kv_heads
        cos, sin = tl.split(tl.reshape(turn, (M, BN // 2, 2)))  # each [M, BN / 2]
        cos = tl.where(rotates, cos, 1.0)
        sin = tl.where(rotates, sin, 0.0)
        a, b = tl.split(tl.reshape(y, (M, BN // 2, 2)))  # each [M, BN / 2]
        y16 = tl.reshape(tl.join(a * cos - b * sin, b * cos + a * sin), (M, BN)).to(q.dtype.element_ty)
        line = (row * kv_heads + (head - heads) % kv_heads) * S + slot  # int64, as rows and slots are
        if head < heads:
            tl.store(q + (m[:, None] * heads + head) * D + d, y16, mask=real[:, None])
        elif rotates:
            tl.store(k_cache + line[:, None] * D + d, y16, mask=real[:, None])
        else:
            tl.store(v_cache + line[:, None] * D + d, y16, mask=real[:, None])


@triton.jit(do_not_specialize=["n"])
def qkv_parts_kernel(
    x, w, gain, squares, out, n, N, blocks, eps, K: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    BLOCKS: tl.constexpr, PARTS: tl.constexpr, GROUPS: tl.constexpr, AHEAD: tl.constexpr, TMA: tl.constexpr,
    LATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The product alone of `qkv_rope_append_kernel`, as PARTS summands: out float32 [PARTS, n, N].

    Attention of a group (`group.py`) adds them up, each of its programs what it needs, and does the rest. So no program
    waits for another here. For more rows than plain products are made for.
    """
    allow_next(PDL and not LATE)
    first = tl.program_id(0) * BN
    place, inside, _ = outputs(first, n, N, M, BN)
    y, _, _ = product(
        0, 0, w, x, gain, squares, None, None, None, first, n, N, blocks, eps, K, M, BN, BK, BLOCKS, PARTS, GROUPS,
        AHEAD, TMA, LATE, PDL,
    )  # fmt: skip
    tl.store(out + tl.program_id(1) * n * N + place, y, mask=inside)


@triton.jit
def norm_rope_append_kernel(
    y, q_norm, k_norm, rope, rows, slots, q, k_cache, v_cache, heads, kv_heads, S, eps,
    D: tl.constexpr, HALF: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The second half of `qkv_rope_append_kernel` for models that normalise each head of q and k before the rotation.

    The norm needs a whole head, which is more than the rows that one program of a projection owns: so here one program
    takes one head of one token. y [n, heads + 2 * kv_heads, D]; HALF: D / 2 rounded up to a power of two.
    """
    allow_next(PDL)
    head, m = tl.program_id(0), tl.program_id(1)
    pair = tl.arange(0, HALF)
    inside = pair < D // 2
    rotates = head < heads + kv_heads
    gain = k_norm
    if head < heads:
        gain = q_norm
    gain_a = tl.load(gain + 2 * pair, mask=inside, other=0.0).to(tl.float32)
    gain_b = tl.load(gain + 2 * pair + 1, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    source = y + (m * (heads + 2 * kv_heads) + head) * D + 2 * pair
    a = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source + 1, mask=inside, other=0.0).to(tl.float32)
    if rotates:
        cos = tl.load(rope + m * D + 2 * pair, mask=inside, other=1.0)
        sin = tl.load(rope + m * D + 2 * pair + 1, mask=inside, other=0.0)
        scale = tl.rsqrt(tl.sum(a * a + b * b, 0) / D + eps)
        normal_a, normal_b = a * gain_a * scale, b * gain_b * scale
        a = normal_a * cos - normal_b * sin
        b = normal_b * cos + normal_a * sin
    line = (tl.load(rows + m) * kv_heads + (head - heads) % kv_heads) * S + tl.load(slots + m)
    target = v_cache + line * D
    if head < heads:
        target = q + (m * heads + head).to(tl.int64) * D
    elif rotates:
        target = k_cache + line * D
    tl.store(target + 2 * pair, a.to(q.dtype.element_ty), mask=inside)
    tl.store(target + 2 * pair + 1, b.to(q.dtype.element_ty), mask=inside)

"""The long way of `attention.py`: one program for all query heads that share K and V, which it reads once.

Its products are those of tensor cores, which want 16 rows of one operand and 8 of the other. Tokens are the 16, heads
the 8: scores are [tokens, heads], and the result is summed up as [head_dim, heads]. Four heads that share K and V then
leave half of a tile to zeros, and not three quarters of it. Scores count in powers of two, for which there is one
instruction, where exp takes five.

**It may finish the projection before it.** With many rows of activations the product that makes q, k and v is cut into
summands (`gemv.qkv_parts_kernel`). To add them up there, its programs would have to wait for each other: 2 us of the 50
that a layer takes. Here each program adds up what it needs of them, a few kilobytes, and rotates it; the one that has
the newest token writes its k and v to the cache.
"""

import triton
import triton.language as tl

from .sync import last_to_arrive, wait_in_a_loop

# mypy: ignore-errors

LOG2E = tl.constexpr(1.4426950408889634)
NEVER = tl.constexpr(-1e30)  # a score that means "not there"; finite, so that no difference of two is NaN


@triton.jit
def long_way(
    q, qkv, bias, rope, slots, k_head, v_head, parts, maxima, sums, counters, out, row, kv_head, split, length, n,
    heads, kv_heads, scale,
    D: tl.constexpr, DP: tl.constexpr, GROUP: tl.constexpr, GP: tl.constexpr, LONG: tl.constexpr, BT: tl.constexpr,
    SUMMANDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One split of the GROUP query heads of one kv head of one row."""
    tokens, splits = share(length, LONG, BT)
    at = row * heads + kv_head * GROUP
    first, line = split * tokens, at * LONG
    one_group(
        q + at * D if SUMMANDS == 0 else None, qkv, bias, rope, slots, k_head, v_head, parts + (line + split) * D,
        maxima + line + split, sums + line + split, row, kv_head, length, first, tl.minimum(first + tokens, length), n,
        heads, kv_heads, scale, D, DP, GROUP, GP, LONG, BT, SUMMANDS, PDL,
    )  # fmt: skip
    if split < splits:  # noqa: SIM102, `and` would count programs in that take no part
        if last_to_arrive(counters + at, splits):
            merge_group(parts + line * D, maxima + line, sums + line, out + at * D, splits, D, DP, GROUP, LONG)


@triton.jit
def share(length, SPLITS: tl.constexpr, BT: tl.constexpr):
    """(tokens a split, in whole tiles; how many splits have any)."""
    tokens = tl.cdiv(tl.cdiv(length, BT), SPLITS) * BT
    return tokens, tl.cdiv(length, tokens)


@triton.jit
def one_group(
    q, qkv, bias, rope, slots, k_head, v_head, part, maximum, total, row, kv_head, length, first, end, n, heads,
    kv_heads, scale,
    D: tl.constexpr, DP: tl.constexpr, GROUP: tl.constexpr, GP: tl.constexpr, LONG: tl.constexpr, BT: tl.constexpr,
    SUMMANDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Tokens first .. end - 1 for the GROUP query heads that share them; their parts stand LONG apart.

    It waits in the first turn of its loop, of which there is one at least, for the reason that `gemm.py` gives: the
    tiles of K and V that the loop reads are of earlier steps, and may be on their way before. The newest token is not
    among them, and is added after the loop.
    """
    d = tl.arange(0, DP)
    g = tl.arange(0, GP)
    wide = d < D
    real = (g < GROUP)[:, None] & wide[None, :]
    newest = length - 1
    past = tl.minimum(end, newest)
    scale *= LOG2E
    query = tl.zeros((GP, DP), k_head.dtype.element_ty)
    new_k, new_v = tl.zeros((DP,), k_head.dtype.element_ty), tl.zeros((DP,), k_head.dtype.element_ty)
    m = tl.full((GP,), 0.5 * NEVER, tl.float32)  # finite, and above NEVER: tokens that are not there weigh 0
    weights = tl.zeros((BT, GP), tl.float32)  # of the tokens at each place of a tile: summed up after the loop
    acc = tl.zeros((DP, GP), tl.float32)
    for t0 in tl.range(first, tl.maximum(past, first + 1), BT, num_stages=3):
        t = t0 + tl.arange(0, BT)
        there = t < past
        k = tl.load(k_head + t[:, None] * D + d[None, :], mask=there[:, None] & wide[None, :], other=0.0)  # [BT, DP]
        v = tl.load(v_head + t[None, :] * D + d[:, None], mask=there[None, :] & wide[:, None], other=0.0)  # [DP, BT]
        if t0 == first:
            wait_in_a_loop(PDL)
            if SUMMANDS > 0:
                query = finish_query(
                    qkv, bias, rope, row, kv_head, n, heads, kv_heads, query.dtype, D, DP, GROUP, GP, SUMMANDS
                )
                if end == length:
                    new_k, new_v = finish_newest(
                        qkv, bias, rope, row, kv_head, n, heads, kv_heads, query.dtype, D, DP, SUMMANDS
                    )
            else:
                query = tl.load(q + g[:, None] * D + d[None, :], mask=real, other=0.0)  # [GP, DP]
                if end == length:
                    new_k = tl.load(k_head + newest * D + d, mask=wide, other=0.0)
                    new_v = tl.load(v_head + newest * D + d, mask=wide, other=0.0)
        score = tl.where(there[:, None], tl.dot(k, tl.trans(query)) * scale, NEVER)  # [BT, GP]
        higher = tl.maximum(m, tl.max(score, 0))
        p = tl.exp2(score - higher[None, :])
        shrink = tl.exp2(m - higher)
        weights = weights * shrink[None, :] + p
        acc = tl.dot(v, p.to(v.dtype), acc * shrink[None, :])
        m = higher
    l = tl.sum(weights, 0)  # noqa: E741
    if first < end:
        if end == length:
            score = tl.sum(query.to(tl.float32) * new_k.to(tl.float32)[None, :], 1) * scale  # [GP]
            higher = tl.maximum(m, score)
            p = tl.exp2(score - higher)
            shrink = tl.exp2(m - higher)
            l = l * shrink + p  # noqa: E741
            acc = acc * shrink[None, :] + p[None, :] * new_v.to(tl.float32)[:, None]
            m = higher
            if SUMMANDS > 0:
                slot = tl.load(slots + row)
                tl.store(k_head + slot * D + d, new_k, mask=wide)
                tl.store(v_head + slot * D + d, new_v, mask=wide)
        tl.store(part + g[None, :] * (LONG * D) + d[:, None], acc, mask=(g < GROUP)[None, :] & wide[:, None])
        tl.store(maximum + g * LONG, m, mask=g < GROUP)
        tl.store(total + g * LONG, l, mask=g < GROUP)


@triton.jit
def finish_query(
    qkv, bias, rope, row, kv_head, n, heads, kv_heads, dtype: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, GROUP: tl.constexpr, GP: tl.constexpr, SUMMANDS: tl.constexpr,
):  # fmt: skip
    """Rotated q of a group [GP, DP] of one row, from what `gemv.qkv_parts_kernel` left.

    qkv: float32 [SUMMANDS, n, (heads + 2 kv_heads) * D], rotary pairs in neighbouring columns; bias: of as many
    columns, or None; rope: float32 [n, D], cos and sin in turn.
    """
    d = tl.arange(0, DP)[None, :]
    g = tl.arange(0, GP)[:, None]
    columns = (heads + 2 * kv_heads) * D
    inside = (g < GROUP) & (d < D)
    y = add_up(qkv + row * columns, bias, (kv_head * GROUP + g) * D + d, inside, n * columns, SUMMANDS)
    return rotate(y, rope + row * D, GP, D, DP).to(dtype)


@triton.jit
def finish_newest(
    qkv, bias, rope, row, kv_head, n, heads, kv_heads, dtype: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, SUMMANDS: tl.constexpr,
):  # fmt: skip
    """Rotated k [DP], and v [DP], of the newest token of one row: see `finish_query`."""
    d = tl.arange(0, DP)[None, :]
    columns = (heads + 2 * kv_heads) * D
    line, stride, k_at = qkv + row * columns, n * columns, (heads + kv_head) * D + d
    k = add_up(line, bias, k_at, d < D, stride, SUMMANDS)
    v = add_up(line, bias, k_at + kv_heads * D, d < D, stride, SUMMANDS)
    return tl.reshape(rotate(k, rope + row * D, 1, D, DP), (DP,)).to(dtype), tl.reshape(v, (DP,)).to(dtype)


@triton.jit
def add_up(line, bias, at, inside, stride, SUMMANDS: tl.constexpr):
    """The sum of the summands at `at` of a line, in a fixed order, and of the bias."""
    y = tl.load(line + at, mask=inside, other=0.0)
    for other in tl.static_range(1, SUMMANDS):
        y += tl.load(line + other * stride + at, mask=inside, other=0.0)
    if bias is not None:
        y += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    return y


@triton.jit
def rotate(y, turn, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """y [ROWS, DP] with its neighbours turned as pairs. turn: where cos and sin [D / 2, 2] stand."""
    pair = tl.arange(0, DP // 2)[None, :]
    cos = tl.load(turn + 2 * pair, mask=pair < D // 2, other=0.0)
    sin = tl.load(turn + 2 * pair + 1, mask=pair < D // 2, other=0.0)
    a, b = tl.split(tl.reshape(y, (ROWS, DP // 2, 2)))
    return tl.reshape(tl.join(a * cos - b * sin, b * cos + a * sin), (ROWS, DP))


@triton.jit
def merge_group(
    parts, maxima, sums, out, splits,
    D: tl.constexpr, DP: tl.constexpr, GROUP: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    """`attention.merge` for GROUP heads, as many at once as a program has registers for: one after the other they would
    wait for their reads one after the other."""
    AT_ONCE: tl.constexpr = min(tl.constexpr(2 ** (GROUP - 1).bit_length()), max(1, 8192 // (LONG * DP)))
    s = tl.arange(0, LONG)
    d = tl.arange(0, DP)
    for first in tl.static_range(0, GROUP, AT_ONCE):
        g = first + tl.arange(0, AT_ONCE)
        line = g[:, None] * LONG + s[None, :]
        there = (g < GROUP)[:, None] & (s < splits)[None, :]  # [AT_ONCE, LONG]
        m = tl.load(maxima + line, mask=there, other=NEVER, cache_modifier=".cg")
        l = tl.load(sums + line, mask=there, other=0.0, cache_modifier=".cg")  # noqa: E741
        inside = there[:, :, None] & (d < D)[None, None, :]
        part = tl.load(
            parts + line[:, :, None] * D + d[None, None, :], mask=inside, other=0.0, cache_modifier=".cg"
        )  # [AT_ONCE, LONG, DP]
        weight = tl.exp2(m - tl.max(m, 1)[:, None])
        total = tl.sum(l * weight, 1)
        result = tl.sum(part * weight[:, :, None], 1) / tl.where(g < GROUP, total, 1.0)[:, None]
        tl.store(
            out + g[:, None] * D + d[None, :], result.to(out.dtype.element_ty),
            mask=(g < GROUP)[:, None] & (d < D)[None, :],
        )  # fmt: skip

"""Attention of one new token a row over that row of the cache, split over the length of the past.

A row has one query, so one program a head would leave most of the GPU idle and read a long past slowly. The past is
cut into splits instead, each a program of its own (Flash-Decoding: Dao et al. 2023). A split keeps the running maximum
m, the sum l of exp(score - m) and the weighted sum of V, as online softmax does (Milakov and Gimelshein 2018,
arXiv:1805.02867), and the last split to arrive combines them.

The length is `positions + 1`, read on the device, because a CUDA Graph freezes the grid but not the memory: the grid
has a fixed number of splits, of which as many work as there are tiles of `BT` tokens, up to all of them.

Two ways to work on a split, chosen by the length of the row:

- short: one program a query head, plain float32 products. The heads that share K and V each read them, the later ones
  from the L2 cache. That is many small programs, and at short lengths time is latency, not bytes.
- long (`group.py`): one program for all query heads that share K and V, which are read once; products on tensor cores.
  The splits are as many times finer as a group has heads. Many rows of any length are read this way too: there are
  programs enough then, and the bytes are what takes the time.

Both request their first tile before the wait (`sync.py`): all but the newest token was written by earlier steps.

What may be read before the wait: `positions` and `active`, and the cache up to the positions. They were written before
the ordinary kernel (one without PDL) that starts a step, and ordinary kernels are fences; see `begin.py`.
"""

import triton
import triton.language as tl

from .group import NEVER, long_way, share
from .sync import allow_next, last_to_arrive, wait_for_previous

# mypy: ignore-errors


@triton.jit(do_not_specialize=["n"])
def attention_kernel(
    q, qkv, bias, rope, slots, k_cache, v_cache, positions, active, parts, maxima, sums, counters, out, n, heads,
    kv_heads, S, q_row, scale, long_from,
    D: tl.constexpr, DP: tl.constexpr, GROUP: tl.constexpr, GP: tl.constexpr, SPLITS: tl.constexpr, LONG: tl.constexpr,
    BT: tl.constexpr, WAY: tl.constexpr, SUMMANDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (heads, SPLITS, rows). GROUP query heads share a kv head; DP, GP: D and GROUP padded for the tiles.

    q, out: [rows, heads, D], the rows of q lie q_row elements apart, for q may be a part of q, k and v; or q is None,
    with the long way alone: then see `group.finish_query` for qkv, bias, rope, n and SUMMANDS, which else is 0. slots:
    int64 [n], where the newest k and v then belong.
    k_cache, v_cache: [rows, kv_heads, S, D]; positions: int64 [rows];
    active: bytes [rows], 0 for padding, which stands at position 0.
    Scratch: parts [rows, heads, LONG, D], maxima and sums [rows, heads, LONG], all float32; counters int32
    [rows, heads], zero between launches. Lengths from long_from on work the long way, in up to LONG splits, a power
    of two up to SPLITS * GROUP. WAY: 0 compiles the short way alone, 1 the long one, 2 both. A kernel of both takes the
    registers and the shared memory of the greedier, which costs short rows an eighth of a whole step.
    """
    allow_next(PDL)
    head, split, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_head = head // GROUP
    length = tl.where(tl.load(active + row) != 0, tl.load(positions + row), 0).to(tl.int32) + 1
    start = (row * kv_heads + kv_head).to(tl.int64) * S * D
    at = row * heads + head
    if SUMMANDS == 0:
        q += row.to(tl.int64) * (q_row - heads * D)  # so that q + at * D is the query of this head
    k_head, v_head = k_cache + start, v_cache + start
    group_split = split * GROUP + head % GROUP
    if WAY == 0:
        short_way(
            q, k_head, v_head, parts, maxima, sums, counters, out, at, split, length, scale,
            D, DP, SPLITS, LONG, BT, PDL,
        )  # fmt: skip
    elif WAY == 1:
        long_way(
            q, qkv, bias, rope, slots, k_head, v_head, parts, maxima, sums, counters, out, row, kv_head, group_split,
            length, n, heads, kv_heads, scale, D, DP, GROUP, GP, LONG, BT, SUMMANDS, PDL,
        )  # fmt: skip
    elif length < long_from:
        short_way(
            q, k_head, v_head, parts, maxima, sums, counters, out, at, split, length, scale,
            D, DP, SPLITS, LONG, BT, PDL,
        )  # fmt: skip
    else:
        long_way(
            q, qkv, bias, rope, slots, k_head, v_head, parts, maxima, sums, counters, out, row, kv_head, group_split,
            length, n, heads, kv_heads, scale, D, DP, GROUP, GP, LONG, BT, SUMMANDS, PDL,
        )  # fmt: skip


@triton.jit
def short_way(
    q, k_head, v_head, parts, maxima, sums, counters, out, at, split, length, scale,
    D: tl.constexpr, DP: tl.constexpr, SPLITS: tl.constexpr, LONG: tl.constexpr, BT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One split of one query head, which is number `at` of all heads of all rows."""
    tokens, splits = share(length, SPLITS, BT)
    first, line = split * tokens, at * LONG
    one_head(
        q + at * D, k_head, v_head, parts + (line + split) * D, maxima + line + split, sums + line + split,
        out + at * D, length, first, tl.minimum(first + tokens, length), splits, scale, D, DP, BT, PDL,
    )  # fmt: skip
    if (splits > 1) & (split < splits):  # noqa: SIM102, `and` would count programs in that take no part
        if last_to_arrive(counters + at, splits):
            merge(parts + line * D, maxima + line, sums + line, out + at * D, splits, D, DP, SPLITS)


@triton.jit
def one_head(
    q, k_head, v_head, part, maximum, total, out, length, first, end, splits, scale,
    D: tl.constexpr, DP: tl.constexpr, BT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Tokens first .. end - 1 for one query head. Waits for the previous kernel, also when there is no token.

    The only split of a short row writes its result at once; else the parts are stored for the merge.
    """
    d = tl.arange(0, DP)
    wide = d < D
    t = first + tl.arange(0, BT)
    tile = t[:, None] * D + d[None, :]
    newest = length - 1
    past = ((t < end) & (t < newest))[:, None] & wide[None, :]
    k = tl.load(k_head + tile, mask=past, other=0.0)  # [BT, DP]
    v = tl.load(v_head + tile, mask=past, other=0.0)
    wait_for_previous(PDL)
    if first < end:
        query = tl.load(q + d, mask=wide, other=0.0).to(tl.float32) * scale
        new = (t == newest)[:, None]
        k = tl.where(new, tl.load(k_head + newest * D + d, mask=wide, other=0.0)[None, :], k)
        v = tl.where(new, tl.load(v_head + newest * D + d, mask=wide, other=0.0)[None, :], v)
        score = tl.where(t < end, tl.sum(k.to(tl.float32) * query[None, :], 1), NEVER)
        m = tl.max(score, 0)
        p = tl.exp(score - m)  # 0 for NEVER: first < end, so that m is a real score
        l = tl.sum(p, 0)  # noqa: E741
        acc = tl.sum(p[:, None] * v.to(tl.float32), 0)  # [DP]
        for t0 in range(first + BT, end, BT):
            t = t0 + tl.arange(0, BT)
            tile = t[:, None] * D + d[None, :]
            inside = (t < end)[:, None] & wide[None, :]
            k = tl.load(k_head + tile, mask=inside, other=0.0)
            v = tl.load(v_head + tile, mask=inside, other=0.0)
            score = tl.where(t < end, tl.sum(k.to(tl.float32) * query[None, :], 1), NEVER)
            higher = tl.maximum(m, tl.max(score, 0))
            p = tl.exp(score - higher)
            shrink = tl.exp(m - higher)
            l = l * shrink + tl.sum(p, 0)  # noqa: E741
            acc = acc * shrink + tl.sum(p[:, None] * v.to(tl.float32), 0)
            m = higher
        if splits == 1:
            tl.store(out + d, (acc / l).to(out.dtype.element_ty), mask=wide)
        else:
            tl.store(part + d, acc, mask=wide)
            tl.store(maximum, m)
            tl.store(total, l)


@triton.jit
def merge(parts, maxima, sums, out, splits, D: tl.constexpr, DP: tl.constexpr, SPLITS: tl.constexpr):
    """The weighted mean of the splits of one head; what stands beyond `splits` is never read."""
    s = tl.arange(0, SPLITS)
    d = tl.arange(0, DP)
    there = s < splits
    m = tl.load(maxima + s, mask=there, other=NEVER, cache_modifier=".cg")
    l = tl.load(sums + s, mask=there, other=0.0, cache_modifier=".cg")  # noqa: E741
    inside = there[:, None] & (d < D)[None, :]
    part = tl.load(parts + s[:, None] * D + d[None, :], mask=inside, other=0.0, cache_modifier=".cg")
    weight = tl.exp(m - tl.max(m, 0))
    result = tl.sum(part * weight[:, None], 0) / tl.sum(l * weight, 0)
    tl.store(out + d, result.to(out.dtype.element_ty), mask=d < D)

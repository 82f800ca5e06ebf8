"""Causal attention of a chunk of a prompt whose place is known on the device only, so that a graph can hold it.

A chunk is a fixed number of tokens, of which the first `count` are real and the rest fill it up. Flash attention of
PyTorch takes row, start and length as numbers of the host, which a recording freezes. Here all three are read from
memory: one recording serves every row, every start and every prompt up to its size.

One program takes BM tokens of all query heads that share K and V, over what they may see, BT tokens at a time, with the
running maximum and sum of online softmax (FlashAttention-2: Dao 2023, arXiv:2307.08691, algorithm 1). A short chunk far
into a conversation is few programs with much to read each: there, what they read is split between several, as in
`attention.py`, and the last of them to arrive combines the parts. The programs with the most to see come first. It is
launched in the ordinary way, after the kernel that writes the chunk's own K and V.
"""

import triton
import triton.language as tl

from .group import NEVER, share
from .sync import last_to_arrive

# mypy: ignore-errors


@triton.jit
def chunk_attention_kernel(
    q, q_row, place, kv, plane, S, out, parts, maxima, sums, counters, size, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr,
    BT: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of BM tokens, KV_HEADS, SPLITS). GROUP query heads share a kv head; GP, DP: GROUP and D padded to
    powers of two.

    q: [size, KV_HEADS * GROUP, D], its tokens q_row elements apart. out: [size, KV_HEADS * GROUP, D]; zero where a
    token is not real. place: int64 [3]: the row of the cache, the position of the first token, how many tokens are
    real. kv: one layer of the cache, [2, rows, KV_HEADS, S, D], whose K and V lie `plane` elements apart.
    Scratch, not used by a single split: parts [blocks, KV_HEADS, SPLITS, BM * GP, D], maxima and sums [blocks,
    KV_HEADS, SPLITS, BM * GP], all float32; counters int32 [blocks, KV_HEADS], zero between launches.
    """
    block, kv_head, split = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, start, count = tl.load(place), tl.load(place + 1).to(tl.int32), tl.load(place + 2).to(tl.int32)
    query = tl.arange(0, BM * GP)  # GP heads of the first token, GP of the second, ...
    token, head = block * BM + query // GP, kv_head * GROUP + query % GP
    d = tl.arange(0, DP)[None, :]
    there = (query % GP < GROUP)[:, None] & (d < D)
    real = (token < count)[:, None]
    end = tl.where(block * BM < count, start + tl.minimum((block + 1) * BM, count), 0)
    tokens, splits = share(tl.maximum(end, 1), SPLITS, 4 * BT)  # fewer tiles would not be worth a merge
    if split < splits:
        values = tl.load(
            q + token.to(tl.int64)[:, None] * q_row + head[:, None] * D + d, mask=real & there, other=0.0
        )  # [BM * GP, DP]
        kv += (row * KV_HEADS + kv_head) * S * D  # int64, as row is
        first, last = split * tokens, tl.minimum((split + 1) * tokens, end)
        acc, m, l = attend(values, kv, plane, first, last, start + token, scale, D, DP, BM * GP, BT, STAGES)  # noqa: E741
        whole = True
        if splits > 1:
            at = (block * KV_HEADS + kv_head) * SPLITS * (BM * GP)
            whole, acc, l = add_splits(  # noqa: E741
                acc, m, l, parts + at.to(tl.int64) * D, maxima + at, sums + at, counters + block * KV_HEADS + kv_head,
                split, splits, D, DP, BM * GP, SPLITS,
            )  # fmt: skip
        if whole:
            result = tl.where(real, acc / tl.where(token < count, l, 1.0)[:, None], 0.0)
            where = out + (token.to(tl.int64) * (KV_HEADS * GROUP) + head)[:, None] * D + d
            tl.store(where, result.to(out.dtype.element_ty), mask=(token < size)[:, None] & there)


@triton.jit
def attend(
    query, k_row, plane, first, last, position, scale,
    D: tl.constexpr, DP: tl.constexpr, Q: tl.constexpr, BT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Tokens first .. last - 1 for queries [Q, DP], each at a position [Q] of its own.

    Returns: sums of exp(score - m) * v [Q, DP], the largest scores m [Q], sums of exp(score - m) [Q]. What sees none
        of the tokens has m = NEVER, and finite numbers in the others.
    """
    d = tl.arange(0, DP)
    wide = (d < D)[None, :]
    m = tl.full((Q,), NEVER, tl.float32)
    l = tl.zeros((Q,), tl.float32)  # noqa: E741
    acc = tl.zeros((Q, DP), tl.float32)
    for t0 in tl.range(first, last, BT, num_stages=STAGES):
        t = t0 + tl.arange(0, BT)
        tile = t[:, None] * D + d[None, :]
        inside = (t < last)[:, None] & wide
        k = tl.load(k_row + tile, mask=inside, other=0.0)  # [BT, DP]
        v = tl.load(k_row + plane + tile, mask=inside, other=0.0)
        seen = (t[None, :] <= position[:, None]) & (t < last)[None, :]
        score = tl.where(seen, tl.dot(query, tl.trans(k)) * scale, NEVER)  # [Q, BT]
        higher = tl.maximum(m, tl.max(score, 1))
        p = tl.exp(score - higher[:, None])
        shrink = tl.exp(m - higher)
        l = l * shrink + tl.sum(p, 1)  # noqa: E741
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
        m = higher
    return acc, m, l


@triton.jit
def add_splits(
    acc, m, l, parts, maxima, sums, counter, split, splits,  # noqa: E741
    D: tl.constexpr, DP: tl.constexpr, Q: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Leave a part [Q, DP] with its m and l [Q] for the last of `splits` programs to arrive.

    Returns: whether this is the last; if so, acc and l of all of them together.
    """
    i, d = tl.arange(0, Q), tl.arange(0, DP)
    inside = (d < D)[None, :]
    place = i[:, None] * D + d[None, :]
    tl.store(parts + split * (Q * D) + place, acc, mask=inside)
    tl.store(maxima + split * Q + i, m)
    tl.store(sums + split * Q + i, l)
    last = last_to_arrive(counter, splits)
    if last:
        m = tl.full((Q,), NEVER, tl.float32)
        l = tl.zeros((Q,), tl.float32)  # noqa: E741
        acc = tl.zeros((Q, DP), tl.float32)
        for other in tl.static_range(SPLITS):  # unrolled, so that all reads are under way together
            there = tl.full((Q,), other, tl.int32) < splits
            m_other = tl.load(maxima + other * Q + i, mask=there, other=NEVER, cache_modifier=".cg")
            l_other = tl.load(sums + other * Q + i, mask=there, other=0.0, cache_modifier=".cg")
            part = tl.load(
                parts + other * (Q * D) + place, mask=inside & there[:, None], other=0.0, cache_modifier=".cg"
            )
            higher = tl.maximum(m, m_other)
            shrink, weight = tl.exp(m - higher), tl.exp(m_other - higher)
            acc = acc * shrink[:, None] + part * weight[:, None]
            l = l * shrink + l_other * weight  # noqa: E741
            m = higher
    return last, acc, l

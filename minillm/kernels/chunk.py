"""Causal attention of a chunk of a prompt whose place is known on the device only, so that a graph can hold it.

A chunk is a fixed number of tokens, of which the first `count` are real and the rest fill it up. Flash attention of
PyTorch takes row, start and length as numbers of the host, which a recording freezes. Here all three are read from
memory: one recording serves every row, every start and every prompt up to its size.

One program takes BM tokens of one query head over all that they may see, BT tokens at a time, with the running maximum
and sum of online softmax (FlashAttention-2: Dao 2023, arXiv:2307.08691, algorithm 1). The programs with the most to see
come first. It is launched in the ordinary way, after the kernel that writes the chunk's own K and V.
"""

import triton
import triton.language as tl

# mypy: ignore-errors

NEVER = tl.constexpr(-1e30)  # a score that means "not there"; finite, so that no difference of two is NaN


@triton.jit
def chunk_attention_kernel(
    q, q_row, place, kv, plane, S, out, size, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of BM tokens, HEADS). GROUP query heads share a kv head; DP: D rounded up to a power of two.

    q: [size, HEADS, D], its tokens q_row elements apart. out: [size, HEADS, D]; zero where a token is not real.
    place: int64 [3]: the row of the cache, the position of the first token, how many tokens are real.
    kv: one layer of the cache, [2, rows, HEADS / GROUP, S, D], whose K and V lie `plane` elements apart.
    """
    block, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    row, start, count = tl.load(place), tl.load(place + 1).to(tl.int32), tl.load(place + 2).to(tl.int32)
    token = block * BM + tl.arange(0, BM)
    d = tl.arange(0, DP)
    wide = (d < D)[None, :]
    real = token < count
    query = tl.load(
        q + token.to(tl.int64)[:, None] * q_row + head * D + d[None, :], mask=real[:, None] & wide, other=0.0
    )
    k_row = kv + (row * (HEADS // GROUP) + head // GROUP) * S * D  # int64, as row is
    v_row = k_row + plane
    m = tl.full((BM,), NEVER, tl.float32)
    l = tl.zeros((BM,), tl.float32)  # noqa: E741
    acc = tl.zeros((BM, DP), tl.float32)
    end = tl.where(block * BM < count, start + tl.minimum((block + 1) * BM, count), 0)
    for t0 in tl.range(0, end, BT, num_stages=STAGES):
        t = t0 + tl.arange(0, BT)
        tile = t[:, None] * D + d[None, :]
        inside = (t < end)[:, None] & wide
        k = tl.load(k_row + tile, mask=inside, other=0.0)  # [BT, DP]
        v = tl.load(v_row + tile, mask=inside, other=0.0)
        seen = (t[None, :] <= start + token[:, None]) & (t < end)[None, :]
        score = tl.where(seen, tl.dot(query, tl.trans(k)) * scale, NEVER)  # [BM, BT]
        higher = tl.maximum(m, tl.max(score, 1))
        p = tl.exp(score - higher[:, None])  # 0 for NEVER: every token sees position 0, which is in the first tile
        shrink = tl.exp(m - higher)
        l = l * shrink + tl.sum(p, 1)  # noqa: E741
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
        m = higher
    result = tl.where(real[:, None], acc / tl.where(real, l, 1.0)[:, None], 0.0)
    where = out + token.to(tl.int64)[:, None] * (HEADS * D) + head * D + d[None, :]
    tl.store(where, result.to(out.dtype.element_ty), mask=(token < size)[:, None] & wide)

"""Products of a weight matrix with 3 to 32 rows of activations: the same kernels as in `gemv.py`, on tensor cores.

From about three rows on, plain products take longer than reading the weights. Tensor cores multiply 16 rows of
weights by 8, 16 or 32 rows of activations, of which the spare ones are zero. Reading the weights is still what takes
the time. They travel to shared memory, several tiles ahead of the product.

**On Hopper and later the tensor memory accelerator (TMA) brings them**, a unit of its own that copies whole tiles, told
by a *tensor map* where the matrix lies. Elsewhere threads copy them (`cp.async`). The difference is not the copy but
the queue: an SM answers the loads of its threads in order. What is asked for behind weights on their way from memory
waits for them, even if it lies in the L2 cache: activations 2.7 us instead of 0.7, and the parts of a product that
another program on the same SM adds up while the next kernel already asks for its weights. The accelerator has a queue
of its own.

**The wait for the kernel before stands inside the loop**, in its first turn, which rule 4 of `sync.py` warns of: the
compiler moves the loads of a pipelined loop to its front, above the wait. Here that is what is wanted. The only loads
that it moves are those of weights and gain, which nobody writes, so several tiles are on their way while the kernel
before still runs. The activations must not move, and do not: each tile of them is loaded by hand a turn ahead and
handed on in a variable of the loop, which the compiler does not pipeline. A test reads in the assembly that the weights
are requested before the wait and the activations after it.

As in `gemv.py`, the scale of the norm is multiplied at the end of the product. In bfloat16 the kernel that wrote x has
left g * x beside it, and the squares of x summed by blocks (`write_stream`), so that here is nothing but the product:
to multiply each tile by g on its way would cost every program a pass through its registers. In float16 g * x could
overflow. There the product normalises as it goes: each tile of each row is brought to a largest value of 1, and its
product back to size in float32.

A matrix of few rows may also be cut along K, so that there are programs for the whole GPU: into `PARTS`, of one program
each, or into `GROUPS`, of one warp or more of the same program. Parts meet in memory, and the last to arrive
(`sync.py`) adds them, in a fixed order; that takes time, but a program of many rows reads fewer activations for each
weight. Groups each multiply their own columns, as a product of three dimensions, and meet in shared memory.

Tried and not kept: asking the L2 cache for weights ahead of their kernel, by threads or with bulk copies, from the
kernel before (with 32 rows up to 3.4 % slower) or from attention, while the memory has little to do (3 to 8 %
slower); a wait before the loop, and activations in its pipeline beside the weights (6 to 10 % slower in gate_up and
down, 0.3 % faster in the logits); handing activations on for two or three turns (0.7 % faster with 8 rows, twice as
slow with more: the compiler then stores them to shared memory two bytes at a time); less shared memory a program, so
that the next kernel finds room beside it (no gain); 16 rows a program and all columns in groups, so that no parts meet
in memory (with 32 rows 7 % slower: every program reads all activations).
"""

import triton
import triton.language as tl

from .sync import allow_next, last_to_arrive, wait_in_a_loop

# mypy: ignore-errors


@triton.jit
def dot_rows_wide(
    w, x, gain, squares, extra, inside, slots, first, n, N, blocks, eps, K: tl.constexpr, M: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, BLOCKS: tl.constexpr, PARTS: tl.constexpr, GROUPS: tl.constexpr,
    AHEAD: tl.constexpr, TMA: tl.constexpr, LATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """norm(x[m]) . w[first + row] over this program's part of the columns, and what `extra` and `slots` point at.

    It waits for the kernel before (`sync.py`), and then loads `extra` [M, BN], where `inside`, and slots [M], so that
    they are there when the product is. The first two results are float32 [M, BN]; what is None is zero.
    x: [n, K]; w: [N, K], with TMA a tensor map of it (`tensor_map.py`). Norm: `gain` [K], which needs all columns, so
    that PARTS and GROUPS are 1; or `squares` float32 [blocks, M], if x has been multiplied by the gain before, with
    BLOCKS the power of two of blocks; or none, if both are None. PARTS: how many programs share the columns, along
    axis 1 of the grid. GROUPS: how many groups of warps share those of a program. AHEAD: see `launch.ahead`. LATE:
    allow the next kernel here, once weights are on their way.
    """
    STAGES: tl.constexpr = AHEAD + 1  # with the one in use
    LENGTH: tl.constexpr = ((K + PARTS * GROUPS - 1) // (PARTS * GROUPS) + BK - 1) // BK * BK  # columns of a group
    m = tl.arange(0, M)
    rows = tl.minimum(first + tl.arange(0, BN), N - 1).to(tl.int64)
    group = 0
    if PARTS > 1:
        group = tl.program_id(1) * GROUPS  # the first of this program
    if GROUPS == 1:
        begin = group * LENGTH
        k = begin + tl.arange(0, BK)[None, :]
        xp = x + m[:, None] * K + k  # [M, BK]
        if not TMA:
            wp = w + rows[:, None] * K + k  # [BN, BK]
        real = (m < n)[:, None]  # rows beyond n are not read, so that they cost nothing
    else:
        begin = ((group + tl.arange(0, GROUPS)) * LENGTH)[:, None, None]
        k = begin + tl.arange(0, BK)[None, None, :]
        xp = x + m[None, :, None] * K + k  # [GROUPS, M, BK]
        if not TMA:
            wp = w + rows[None, :, None] * K + k  # [GROUPS, BN, BK]
        real = (m < n)[None, :, None]
    stop = tl.minimum(begin + LENGTH, K)
    acc, total = tl.zeros((BN, M) if GROUPS == 1 else (GROUPS, BN, M), tl.float32), tl.zeros((M, BK // 8), tl.float32)
    scale = tl.full((M,), 1.0, tl.float32)
    x0 = tl.zeros(xp.shape, x.dtype.element_ty)
    added = tl.zeros((M, BN), tl.float32)
    slot = tl.zeros((M,), tl.int64)
    for start in tl.range(0, LENGTH, BK, num_stages=STAGES):
        if TMA and GROUPS == 1:
            wt = w.load([first, begin + start])  # zero beyond N and K
        elif TMA:
            wt = w.load([group, first, start])
        elif LENGTH * PARTS * GROUPS == K:
            wt = tl.load(wp + start, eviction_policy="evict_first")
        else:
            wt = tl.load(wp + start, mask=start + k < stop, other=0.0, eviction_policy="evict_first")
        if start == 0:
            if LATE:
                allow_next(PDL)
            wait_in_a_loop(PDL)
            x0 = tl.load(xp, mask=real & (k < stop), other=0.0)
            if extra is not None:
                added = tl.load(extra, mask=inside, other=0.0).to(tl.float32)
            if slots is not None:
                slot = tl.load(slots + m, mask=m < n, other=0)
            if squares is not None:
                scale = scale_of(squares, n, blocks, eps, K, M, BLOCKS)
        later = start + BK
        x1 = tl.load(xp + later, mask=real & (later + k < stop), other=0.0)
        if GROUPS > 1:
            acc = tl.dot(wt, tl.trans(x0, 0, 2, 1), acc)
        elif gain is None:
            acc = tl.dot(wt, tl.trans(x0), acc)
        else:
            g = tl.load(gain + start + k, mask=start + k < K, other=0.0)  # moved to the front as the weights are
            acc, total = add_normal_tile(acc, total, wt, x0, g, M, BK)
        x0 = x1
    if gain is not None:
        scale = tl.rsqrt(tl.sum(total, 1) / K + eps)
    if GROUPS > 1:
        acc = tl.sum(acc, 0)
    return tl.trans(acc) * scale[:, None], added, slot


@triton.jit
def scale_of(squares, n, blocks, eps, K: tl.constexpr, M: tl.constexpr, BLOCKS: tl.constexpr):
    """The scale of RMSNorm of each row [M], from its sums of squares by blocks, float32 [blocks, M]."""
    block, m = tl.arange(0, BLOCKS)[:, None], tl.arange(0, M)[None, :]
    sums = tl.load(squares + block * M + m, mask=(block < blocks) & (m < n), other=0.0)
    return tl.rsqrt(tl.sum(sums, 0) / K + eps)


@triton.jit
def add_normal_tile(acc, total, wt, xt, g, M: tl.constexpr, BK: tl.constexpr):
    """Add the product of one tile with g * x to acc [BN, M], and the squares of x to total [M, BK / 8]. In float16."""
    xf = xt.to(tl.float32)  # [M, BK]
    total += tl.sum(tl.reshape(xf * xf, (M, BK // 8, 8)), 2)
    xf *= g.to(tl.float32)  # [1, BK]
    largest = tl.maximum(tl.max(tl.abs(xf), 1), 1e-30)  # [M]
    acc += tl.dot(wt, tl.trans((xf / largest[:, None]).to(xt.dtype))) * largest[None, :]
    return acc, total


@triton.jit
def write_stream(y, out, place, inside, gain, scaled, squares, block, n, M: tl.constexpr):
    """Store y [M, BN] to the residual stream `out`, and if there is a gain, what the norm that follows will need:

    gain: [1, BN]. scaled: [n, N], g * x. squares: float32 [blocks, M], sums of x * x over the columns of this block.
    """
    x = y.to(out.dtype.element_ty)
    tl.store(out + place, x, mask=inside)
    if gain is not None:
        xf = x.to(tl.float32)
        tl.store(scaled + place, (xf * gain.to(tl.float32)).to(scaled.dtype.element_ty), mask=inside)
        m = tl.arange(0, M)
        tl.store(squares + block * M + m, tl.sum(tl.where(inside, xf * xf, 0.0), 1), mask=m < n)


@triton.jit
def add_parts(y, parts, counters, M: tl.constexpr, BN: tl.constexpr, PARTS: tl.constexpr):
    """(whether this program is the last of its rows to arrive, and if so the sum of all parts [M, BN]).

    parts: float32 [blocks, PARTS, M, BN]; counters: int32 [blocks], zero between launches.
    """
    block = tl.program_id(0)
    tile = tl.arange(0, M)[:, None] * BN + tl.arange(0, BN)[None, :]
    mine = parts + (block * PARTS).to(tl.int64) * (M * BN) + tile
    tl.store(mine + tl.program_id(1) * (M * BN), y)
    last = last_to_arrive(counters + block, PARTS)
    if last:
        y = tl.load(mine, cache_modifier=".cg")
        for other in tl.static_range(1, PARTS):
            y += tl.load(mine + other * (M * BN), cache_modifier=".cg")
    return last, y

"""What stands between the matrix products of a prompt: the norm, the rotation with the write to the cache, and SiLU.

The products themselves are left to cuBLAS, and attention to flash attention or, in a recording, to `chunk.py`
(`fused_prompt.py`). Between them plain PyTorch makes ten passes over the activations, each a launch of its own: a short
prompt waits for the launches, and a long one for the memory. Here each gap is one pass.

A prompt may have any length, and none may cost a compilation: so the number of tokens is no argument. It is the grid,
and one program works on one token, or on a part of one. Offsets of tokens are 64-bit: a prompt of 100,000 tokens has
more than 2^31 activations. The kernels are launched in the ordinary way, each after the end of the one before.
"""

import triton
import triton.language as tl

# mypy: ignore-errors


@triton.jit
def rms_norm_kernel(x, gain, out, eps, K: tl.constexpr, KP: tl.constexpr):
    """out = RMSNorm(x) * gain. Grid (T,). x and out [T, K], gain [K]; KP: K rounded up to a power of two."""
    token = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, KP)
    value = tl.load(x + token * K + k, mask=k < K, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / K + eps)
    value *= scale * tl.load(gain + k, mask=k < K, other=0.0).to(tl.float32)
    tl.store(out + token * K + k, value.to(out.dtype.element_ty), mask=k < K)


@triton.jit
def rope_append_kernel(
    y, q_norm, k_norm, rope, rows, slots, kv, plane, S, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotate q in place; rotate k, and write k and v to the cache. Normalise the heads of q and k first if asked to.

    Grid (T, blocks of BLOCK heads). DP: D rounded up to a power of two.
    y: [T, HEADS + 2 * KV_HEADS, D], the heads of q, of k and of v; only those of q are written.
    q_norm, k_norm: [D] or None. rope: float32 [T, D], cos and sin in turn. rows, slots: int64 [T].
    kv: one layer of the cache, [2, rows, KV_HEADS, S, D], whose K and V lie `plane` elements apart.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[:, None]  # [BLOCK, 1]
    d = tl.arange(0, DP)[None, :]
    real = (head < HEADS + 2 * KV_HEADS) & (d < D)
    source = y + token * ((HEADS + 2 * KV_HEADS) * D) + head * D + d
    value = tl.load(source, mask=real, other=0.0).to(tl.float32)
    rotates = head < HEADS + KV_HEADS
    if q_norm is not None:
        gain_q = tl.load(q_norm + d, mask=d < D, other=0.0).to(tl.float32)
        gain_k = tl.load(k_norm + d, mask=d < D, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value, 1) / D + eps)[:, None]
        value *= tl.where(rotates, tl.where(head < HEADS, gain_q, gain_k) * scale, 1.0)
    i = tl.arange(0, DP)
    turn = tl.load(rope + token * D + i, mask=i < D, other=0.0)
    cos, sin = tl.split(tl.reshape(turn, (1, DP // 2, 2)))  # each [1, DP / 2]
    cos, sin = tl.where(rotates, cos, 1.0), tl.where(rotates, sin, 0.0)
    a, b = tl.split(tl.reshape(value, (BLOCK, DP // 2, 2)))  # each [BLOCK, DP / 2]
    value = tl.reshape(tl.join(a * cos - b * sin, b * cos + a * sin), (BLOCK, DP)).to(y.dtype.element_ty)
    tl.store(source, value, mask=real & (head < HEADS))

    kv_head = tl.maximum(head - HEADS, 0)  # those of k, then those of v
    line = (tl.load(rows + token) * KV_HEADS + kv_head % KV_HEADS) * S + tl.load(slots + token)  # int64
    target = kv + (kv_head // KV_HEADS).to(tl.int64) * plane + line * D + d
    tl.store(target, value, mask=real & (head >= HEADS))


@triton.jit
def silu_kernel(y, out, I: tl.constexpr, BLOCK: tl.constexpr):  # noqa: E741
    """out = SiLU(gate) * up. Grid (T, blocks of BLOCK units). y [T, I, 2], gate and up in turn; out [T, I]."""
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    j = 2 * first + tl.arange(0, 2 * BLOCK)
    pairs = tl.load(y + token * (2 * I) + j, mask=j < 2 * I, other=0.0).to(tl.float32)
    gate, up = tl.split(tl.reshape(pairs, (BLOCK, 2)))
    unit = first + tl.arange(0, BLOCK)
    hidden = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + token * I + unit, hidden.to(out.dtype.element_ty), mask=unit < I)

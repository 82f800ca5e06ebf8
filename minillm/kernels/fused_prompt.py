"""FusedPrompt: the operations of `reference.py` for a chunk of a prompt, in nine launches a layer.

A prompt is large matrix products, which cuBLAS and flash attention do best; what stands between them is done by the
kernels of `prompt.py`. A layer is then: norm, product, rotation and write to the cache, attention, product; norm,
product, SiLU, product. The two products that end in the residual stream add to it in place.
"""

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, view_as_real

from ..weights import LayerWeights
from . import launch, reference
from .reference import Attend

if TYPE_CHECKING:
    from .fused import FusedOps

HEAD_BLOCK = 1024  # elements of q, k and v that one program rotates
SILU_BLOCK = 1024  # hidden units that one program computes


class FusedPrompt:
    """The layer operations of a prefill. Any number of tokens; it owns no memory.

    Args:
        ops: the kernels that decode the same model. They also make the logits of up to 32 tokens.
    """

    def __init__(self, ops: "FusedOps") -> None:
        from . import chunk, prompt  # here, because triton is only there with CUDA builds of PyTorch

        self._kernels, self._chunk, self._run, self._counters = prompt, chunk, ops._run, ops.scratch.chunk_counters
        self._heads, self._kv_heads, self._head_dim = ops.heads, ops.kv_heads, ops.head_dim
        self.norm_logits = ops.norm_logits

    def qkv_rope_append(
        self, x: Tensor, w: LayerWeights, rope: Tensor, eps: float, kv: Tensor, rows: Tensor, slots: Tensor,
        head_dim: int,
    ) -> Tensor:  # fmt: skip
        """See `reference.qkv_rope_append`: x [T, hidden] -> q [T, heads, head_dim]; k and v go into the cache."""
        heads = self._heads + 2 * self._kv_heads
        y = F.linear(self._norm(x, w.input_norm, eps), w.qkv, w.qkv_bias).view(-1, heads, head_dim)
        width = launch.power_of_two(head_dim)
        block = HEAD_BLOCK // width
        self._run(
            self._kernels.rope_append_kernel, (x.shape[0], -(-heads // block)), 4,
            y, w.q_norm, w.k_norm, view_as_real(rope), rows, slots, kv, kv.stride(0), kv.shape[3], eps,
            HEADS=self._heads, KV_HEADS=self._kv_heads, D=head_dim, DP=width, BLOCK=block, fence=True,
        )  # fmt: skip
        return y[:, : self._heads]

    def chunk_attention(self, row: int, start: int) -> Attend:
        """See `reference.chunk_attention`, which is flash attention on a GPU."""
        return reference.chunk_attention(row, start)

    def placed_attention(self, place: Tensor) -> Attend:
        """See `reference.placed_attention`; what is not a real token gets zeros."""

        def attend(q: Tensor, kv: Tensor) -> Tensor:
            size, width = q.shape[0], launch.power_of_two(self._head_dim)
            out = q.new_empty(size, self._heads * self._head_dim)
            group = self._heads // self._kv_heads
            heads = launch.power_of_two(group)
            tokens = max(1, max(16, min(64, launch.power_of_two(size) * heads)) // heads)  # 16 to 64 queries a program
            blocks = -(-size // tokens)
            splits = launch.chunk_splits(blocks * self._kv_heads)
            lines = blocks * self._kv_heads * splits * tokens * heads if splits > 1 else 0
            parts = q.new_empty(lines, self._head_dim, dtype=torch.float32)
            maxima, sums = q.new_empty(2, lines, dtype=torch.float32)
            # K and V of all stages take 64 KB at most: a program may have 99 on every GPU from Ampere on
            tile, stages, warps = (64, 3, 4) if width <= 64 else (64, 2, 4) if width <= 128 else (32, 2, 8)
            self._run(
                self._chunk.chunk_attention_kernel, (blocks, self._kv_heads, splits), warps,
                q, q.stride(0), place, kv, kv.stride(0), kv.shape[3], out,
                parts, maxima, sums, self._counters, size, 1 / math.sqrt(self._head_dim),
                KV_HEADS=self._kv_heads, GROUP=group, GP=heads, D=self._head_dim, DP=width, BM=tokens, BT=tile,
                SPLITS=splits, STAGES=stages, fence=True,
            )  # fmt: skip
            return out

        return attend

    def linear_residual(
        self, y: Tensor, weight: Tensor, bias: Tensor | None, x: Tensor, gain: Tensor | None = None
    ) -> Tensor:
        """x += y @ weight.T + bias, **in place**: y [T, in], weight [out, in], x [T, out]. Returns x. No use of gain.

        In place, because only then is the sum made where the product is: else PyTorch copies x first.
        """
        x.addmm_(y, weight.t())
        return x if bias is None else x.add_(bias)

    def gate_up_silu(self, x: Tensor, w: LayerWeights, eps: float) -> Tensor:
        """See `reference.gate_up_silu`: x [T, hidden] -> [T, intermediate]."""
        y = F.linear(self._norm(x, w.post_norm, eps), w.gate_up, w.gate_up_bias)
        length, units = y.shape[0], y.shape[1] // 2
        out = y.new_empty(length, units)
        self._run(
            self._kernels.silu_kernel, (length, -(-units // SILU_BLOCK)), 4,
            y, out, I=units, BLOCK=SILU_BLOCK, fence=True,
        )  # fmt: skip
        return out

    def _norm(self, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        """RMSNorm: x [T, hidden] -> [T, hidden]."""
        length, hidden = x.shape
        width = launch.power_of_two(hidden)
        out = x.new_empty(length, hidden)
        warps = min(16, max(1, width // 512))  # 16 elements a thread, up to a hidden size of 8,192
        self._run(self._kernels.rms_norm_kernel, (length,), warps, x, gain, out, eps, K=hidden, KP=width, fence=True)
        return out

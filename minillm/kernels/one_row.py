"""A decode step of one row on a CPU in float32, written in as few calls into PyTorch as it can be.

A step streams all weights through the caches, so the code and the small tensors of everything between two products are
cold each time, and every call costs about 10 microseconds whatever it computes. `reference.py` makes sixty calls a
layer. Here there are seventeen: buffers and views of them are made once, residual additions and the scale of the norms
ride along in the products (y = alpha * W x + beta * y), and with no other rows to keep apart a position is a Python
number, so attention reads exactly what there is and needs no mask.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..cache import KVCache
from ..config import ModelConfig
from ..state import DecodeState
from ..weights import Weights


class OneRow:
    """The layers of `model.py`, for one row. It owns the buffers of a step, so one step runs at a time.

    Args:
        rope: the rotary table, complex64 [max_seq_len, head_dim / 2].
    """

    def __init__(self, config: ModelConfig, weights: Weights, rope: Tensor) -> None:
        heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self._weights, self._rope, self._eps = weights, rope, config.rms_norm_eps
        # the rotation of q also scales it by 1 / sqrt(head_dim), so that the scores need not be
        self._factors = torch.ones(heads + kv_heads, 1)
        self._factors[:heads] = 1 / math.sqrt(head_dim)
        self._x, self._y = torch.empty(2, config.hidden_size)  # the residual stream, and what a projection reads of it
        self._qkv = torch.empty((heads + 2 * kv_heads) * head_dim)
        q_and_k, k_and_v = self._qkv[: (heads + kv_heads) * head_dim], self._qkv[heads * head_dim :]
        self._turning = torch.view_as_complex(q_and_k.view(heads + kv_heads, head_dim // 2, 2))
        self._q = self._qkv[: heads * head_dim].view(kv_heads, heads // kv_heads, head_dim)
        self._new_kv = k_and_v.view(2, kv_heads, head_dim)
        self._attended = torch.empty(kv_heads, heads // kv_heads, head_dim)
        self._gate_up = torch.empty(2 * config.intermediate_size)
        self._gate, self._up = self._gate_up.view(-1, 2).unbind(1)
        self._hidden = torch.empty(config.intermediate_size)

    @staticmethod
    def supports(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether a model can run here: float32 on a CPU, and none of the extras of Llama's relatives."""
        extras = config.qkv_bias or config.o_bias or config.mlp_bias or config.qk_norm
        return device.type == "cpu" and dtype == torch.float32 and not extras

    def decode(self, state: DecodeState, cache: KVCache) -> Tensor:
        """Logits of the one row of `state`, float32 [1, vocab]; writes its K and V to the cache."""
        token, position, slot = 0, 0, cache.scratch_slot
        if state.active.item():
            token, position = int(state.tokens.item()), int(state.positions.item())
            slot = position
        turn = self._rope[position] * self._factors  # [heads + kv_heads, head_dim / 2]
        row = cache.kv[:, :, 0]  # [layers, 2, kv_heads, slots, head_dim]
        k_transposed, v = row[:, 0, :, : position + 1].mT.unbind(), row[:, 1, :, : position + 1].unbind()
        new_slots = row[..., slot, :].unbind()  # each [2, kv_heads, head_dim]
        x, y, attended = self._x, self._y, self._attended.view(-1)
        x.copy_(self._weights.embed[token])
        for index, w in enumerate(self._weights.layers):
            torch.mul(x, w.input_norm, out=y)
            self._qkv.addmv_(w.qkv, y, beta=0, alpha=self._norm())
            self._turning.mul_(turn)
            new_slots[index].copy_(self._new_kv)
            torch.bmm(torch.bmm(self._q, k_transposed[index]).softmax(-1), v[index], out=self._attended)
            x.addmv_(w.o, attended)
            torch.mul(x, w.post_norm, out=y)
            self._gate_up.addmv_(w.gate_up, y, beta=0, alpha=self._norm())
            torch.mul(F.silu(self._gate), self._up, out=self._hidden)
            x.addmv_(w.down, self._hidden)
        return torch.mv(self._weights.lm_head, x * self._weights.norm * self._norm())[None]

    def _norm(self) -> float:
        """The factor of RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467) for x, which the products apply."""
        return 1 / math.sqrt(torch.dot(self._x, self._x).item() / self._x.shape[0] + self._eps)

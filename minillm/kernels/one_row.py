"""A decode step of one row on a CPU in float32, written in as few calls into PyTorch as it can be.

A step streams all weights through the caches, so the code and the small tensors of everything between two products are
cold each time, and every call costs about 10 microseconds whatever it computes. `reference.py` makes sixty calls a
layer. Here there are fourteen: buffers and views of them are made once, residual additions and the scale of the norms
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
    """The layers of `model.py`, for one row.

    Args:
        rope: the rotary table, complex64 [max_seq_len, head_dim / 2].
    """

    def __init__(self, config: ModelConfig, weights: Weights, rope: Tensor) -> None:
        heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self._weights, self._rope, self._eps = weights, rope, config.rms_norm_eps
        self._scale = 1 / math.sqrt(head_dim)
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
        self._cache: KVCache | None = None
        self._layers: list[tuple[Tensor, Tensor, Tensor]] = []

    @staticmethod
    def supports(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether a model can run here: float32 on a CPU, and none of the extras of Llama's relatives."""
        extras = config.qkv_bias or config.o_bias or config.mlp_bias or config.qk_norm
        return device.type == "cpu" and dtype == torch.float32 and not extras

    def _bind(self, cache: KVCache) -> None:
        """Views of row 0 of each layer: K and V [2, kv_heads, slots, head_dim], K transposed, V."""
        self._cache = cache
        self._layers = [(kv[:, 0], kv[0, 0].mT, kv[1, 0]) for kv in cache.kv]

    def decode(self, state: DecodeState, cache: KVCache) -> Tensor:
        """Logits of the one row of `state`, float32 [1, vocab]; writes its K and V to the cache."""
        if cache is not self._cache:
            self._bind(cache)
        token, position, slot = 0, 0, cache.scratch_slot
        if state.active.item():
            token, position = int(state.tokens.item()), int(state.positions.item())
            slot = position
        length, turn = position + 1, self._rope[position]
        x, qkv, gate_up, attended = self._x, self._qkv, self._gate_up, self._attended
        x.copy_(self._weights.embed[token])
        for w, (kv, k_transposed, v) in zip(self._weights.layers, self._layers, strict=True):
            scale = self._norm(w.input_norm)
            torch.addmv(qkv, w.qkv, self._y, beta=0, alpha=scale, out=qkv)
            self._turning.mul_(turn)
            kv.select(2, slot).copy_(self._new_kv)
            scores = torch.bmm(self._q, k_transposed.narrow(2, 0, length)).mul_(self._scale)
            torch.bmm(scores.softmax(-1), v.narrow(1, 0, length), out=attended)
            x.addmv_(w.o, attended.view(-1))
            scale = self._norm(w.post_norm)
            torch.addmv(gate_up, w.gate_up, self._y, beta=0, alpha=scale, out=gate_up)
            torch.mul(F.silu(self._gate), self._up, out=self._hidden)
            x.addmv_(w.down, self._hidden)
        scale = self._norm(self._weights.norm)
        return torch.mv(self._weights.lm_head, self._y * scale)[None]

    def _norm(self, gain: Tensor) -> float:
        """RMSNorm in two halves: gain * x into `_y`, and the factor that is still missing, for the product to apply."""
        torch.mul(self._x, gain, out=self._y)
        return 1 / math.sqrt(torch.dot(self._x, self._x).item() / self._x.shape[0] + self._eps)

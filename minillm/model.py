"""The Llama transformer: prefill() reads a prompt, decode() makes one step of every row. Both run the same layers.

Read `_layers` first: it is the whole model, five operations a layer on a residual stream `x`. What differs between the
two callers is only how a token finds the past that it attends to: a chunk of one row sees a triangle, one new token a
row sees its whole row. `kernels/reference.py` defines the operations.
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from .cache import KVCache
from .config import ModelConfig
from .kernels import DecodeOps, LayerOps, PromptOps, reference
from .kernels.fused import FusedOps
from .kernels.one_row import OneRow
from .kernels.reference import Attend
from .rope import rope_tables
from .state import DecodeState
from .weights import Weights


class Llama:
    """Weights, and the functions that turn token ids into logits. Cache and state are arguments.

    Args:
        config: what config.json says. weights: packed as `weights.py` says, on any device, in any float dtype.
        max_seq_len: how many positions the rotary table covers.
        fused: kernels that decode on this device, and others beside them prefill; None runs the plain operations.
    """

    def __init__(self, config: ModelConfig, weights: Weights, max_seq_len: int, fused: FusedOps | None = None) -> None:
        self.config, self.weights, self.fused = config, weights, fused
        self._decode_ops: DecodeOps = reference if fused is None else fused
        self._prompt_ops: PromptOps = reference if fused is None else fused.prompt
        cos, sin = rope_tables(config, max_seq_len, weights.embed.device)
        self.rope = torch.complex(cos, sin)  # [max_seq_len, head_dim / 2], e^{i m theta}
        self.one_row = self._one_row()

    def _one_row(self) -> OneRow | None:
        supported = OneRow.supports(self.config, self.weights.embed.device, self.weights.embed.dtype)
        return OneRow(self.config, self.weights, self.rope) if supported else None

    def with_weights(self, weights: Weights) -> "Llama":
        """This model with other weights, of the same config, device and dtype.

        The two share the rotary table and the kernels with their scratch memory, so only one may run at a time; and a
        graph captured of one, pointed at the weights of the other (`retarget.py`), runs on memory that both hold.
        """
        other = copy.copy(self)
        other.weights = weights
        other.one_row = other._one_row()
        return other

    @torch.inference_mode()
    def prefill(self, token_ids: Tensor, row: int, start: int, cache: KVCache, all_logits: bool = False) -> Tensor:
        """Run a chunk of one row's prompt, and write its K and V to the cache.

        Args:
            token_ids: int64 [T]; they stand at positions start .. start + T - 1. What is before must be in the cache.
        Returns: float32 logits of the last token, [1, vocab]; of every token, [T, vocab], with `all_logits`.
        """
        ops, end = self._prompt_ops, start + token_ids.shape[0]
        slots = torch.arange(start, end, device=token_ids.device)
        rows = torch.full_like(slots, row)
        x, rope = self.weights.embed[token_ids], self.rope[start:end]
        x = self._layers(ops, x, rope, rows, slots, cache, ops.chunk_attention(row, start))
        return self._logits(ops, x if all_logits else x[-1:])

    @torch.inference_mode()
    def prefill_padded(self, token_ids: Tensor, place: Tensor, cache: KVCache) -> Tensor:
        """`prefill` of a chunk that is filled up to a fixed size. All but the size is in tensors: it can be captured.

        Args:
            token_ids: int64 [size]; what stands after the real ones must be valid token ids, and is not used.
            place: int64 [3]: the row, the position of the first token, and how many of the tokens are real. With none,
                nothing but the row's scratch slot is written.
        Returns: float32 logits of the last real token, [1, vocab].
        """
        ops, (row, start, count) = self._prompt_ops, place.split(1)  # each [1]
        index = torch.arange(token_ids.shape[0], device=token_ids.device)
        real = index < count
        slots = torch.where(real, start + index, cache.scratch_slot)
        rope = self.rope[torch.where(real, start + index, 0)]
        x = self.weights.embed[token_ids]
        x = self._layers(ops, x, rope, row.repeat(len(index)), slots, cache, ops.placed_attention(place))
        return self._logits(ops, x.index_select(0, (count - 1).clamp(min=0)))

    @torch.inference_mode()
    def decode(
        self, state: DecodeState, cache: KVCache, kv_len: int, after_layer: Callable[[int], None] | None = None
    ) -> Tensor:
        """One step of the n rows of the state, which is not changed. All but kv_len is a tensor: it can be captured.

        Args:
            kv_len: how much of the cache is read, more than every active row's position.
            after_layer: called after each layer with the number of layers done, except on the short way of `one_row`.
        Returns: float32 logits [n, vocab] of the tokens that the rows feed.
        """
        if self.one_row is not None and state.rows.shape[0] == 1:
            return self.one_row.decode(state, cache)
        return self._logits(self._decode_ops, self._stream(state, cache, kv_len, after_layer))

    @torch.inference_mode()
    def decode_to_best(
        self, state: DecodeState, cache: KVCache, kv_len: int, after_layer: Callable[[int], None] | None = None
    ) -> bool:
        """A whole greedy step without logits, where kernels do that for n rows: as `decode` and `finish_step`.

        Returns: whether it was done. If not, nothing was.
        """
        if self.fused is None or not self.fused.finds_best(state.rows.shape[0]):
            return False
        x, w = self._stream(state, cache, kv_len, after_layer), self.weights
        self.fused.advance_to_best(x, w.norm, w.lm_head, self.config.rms_norm_eps, state)
        return True

    def _stream(
        self, state: DecodeState, cache: KVCache, kv_len: int, after_layer: Callable[[int], None] | None
    ) -> Tensor:
        """The residual stream [n, hidden] after all layers, of the tokens that the rows feed."""
        ops, first = self._decode_ops, self.weights.layers[0].input_norm
        x, rope, slots = ops.begin(state, self.weights.embed, self.rope, cache.scratch_slot, first)
        attend = ops.row_attention(state, kv_len)
        return self._layers(ops, x, rope, state.rows, slots, cache, attend, after_layer)

    def _layers(
        self, ops: LayerOps, x: Tensor, rope: Tensor, rows: Tensor, slots: Tensor, cache: KVCache, attend: Attend,
        after_layer: Callable[[int], None] | None = None,
    ) -> Tensor:  # fmt: skip
        """Run every layer on N tokens, and return the residual stream [N, hidden].

        Args:
            x: their embeddings, [N, hidden], which may be overwritten. rope: their rotations, [N, head_dim / 2].
            rows, slots: [N], where in the cache their K and V are written.
        """
        eps, head_dim = self.config.rms_norm_eps, self.config.head_dim
        layers = self.weights.layers
        following = [w.input_norm for w in layers[1:]] + [self.weights.norm]  # the norm after each layer
        for index, w in enumerate(layers):
            kv = cache.layer(index)
            q = ops.qkv_rope_append(x, w, rope, eps, kv, rows, slots, head_dim)
            x = ops.linear_residual(attend(q, kv), w.o, w.o_bias, x, w.post_norm)
            x = ops.linear_residual(ops.gate_up_silu(x, w, eps), w.down, w.down_bias, x, following[index])
            if after_layer is not None:
                after_layer(index + 1)
        return x

    def _logits(self, ops: LayerOps, x: Tensor) -> Tensor:
        return ops.norm_logits(x, self.weights.norm, self.weights.lm_head, self.config.rms_norm_eps)

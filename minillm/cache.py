"""The KV cache: one tensor, allocated once, that every step writes in place and reads as a view.

Row i of the cache belongs to row i of the batch, so nothing is gathered or moved: a step over n rows works on the view
of the first n. Every row has one position more than `max_seq_len`, its *scratch slot*. A row that takes part in a step
only as padding writes there, so no padding can ever reach a position that a real token reads.
"""

import copy

import torch
from torch import Tensor

from .config import ModelConfig


class KVCache:
    """Keys and values of `max_batch_size` rows of `max_seq_len` tokens.

    Zero-initialised, because padding reads position 0 of its row before anything was written there, and an attention
    weight of zero times a NaN from uninitialised memory is NaN.

    Attributes:
        kv: [layers, 2, rows, kv_heads, max_seq_len + 1, head_dim]; index 0 of the second dimension is K, 1 is V.
    """

    def __init__(
        self, config: ModelConfig, max_batch_size: int, max_seq_len: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.max_batch_size, self.max_seq_len = max_batch_size, max_seq_len
        self.scratch_slot = max_seq_len
        heads, head_dim = config.num_key_value_heads, config.head_dim
        shape = (config.num_hidden_layers, 2, max_batch_size, heads, max_seq_len + 1, head_dim)
        self.kv = torch.zeros(shape, device=device, dtype=dtype)

    def another(self) -> "KVCache":
        """Another cache of the same sizes, empty."""
        other = copy.copy(self)
        other.kv = torch.zeros_like(self.kv)
        return other

    def layer(self, index: int) -> Tensor:
        """K and V of one layer: [2, rows, kv_heads, max_seq_len + 1, head_dim]."""
        return self.kv[index]

    @staticmethod
    def bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
        """Bytes that one token of one row takes."""
        return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * dtype.itemsize

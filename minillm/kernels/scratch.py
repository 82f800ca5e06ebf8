"""Scratch: the memory in which programs of one kernel leave parts for each other, and count themselves in."""

import torch

from ..config import ModelConfig
from . import launch

CHUNK = 2048
"""Logits that one program looks through at the end of a step."""

MIN_ROWS = 16
"""Rows of a matrix that a program owns, at least, where tensor cores multiply."""


class Scratch:
    """Scratch memory of the fused kernels for one model on one device.

    Args:
        max_rows: of the cache. max_splits: of attention.
    """

    def __init__(self, config: ModelConfig, max_rows: int, max_splits: int, device: torch.device) -> None:
        heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        # attention: what its splits found, float32 as all that follows
        self.parts = torch.empty(max_rows, heads, max_splits, head_dim, device=device)
        self.maxima = torch.empty(max_rows, heads, max_splits, device=device)
        self.sums = torch.empty(max_rows, heads, max_splits, device=device)

        # the end of a step: of each chunk of the vocabulary; the best also of each program of the output projection
        wide, m = max_rows > launch.PLAIN_ROWS, launch.row_bucket(min(max_rows, launch.MAX_ROWS))
        chunks = max_rows * launch.power_of_two(-(-config.vocab_size // CHUNK))
        candidates = max(chunks, m * -(-config.vocab_size // MIN_ROWS) if wide else 0)
        self.peaks = torch.empty(chunks, device=device)
        self.exponentials = torch.empty(chunks, device=device)
        self.tops = torch.empty(chunks, device=device)
        self.best = torch.empty(candidates, device=device)
        self.index = torch.empty(candidates, device=device, dtype=torch.int32)

        # parts of a product that is cut along its columns: of up to MAX_PARTS programs, one number each for every row
        # of activations and every row of the matrix, which writes the residual stream or q, k and v; the last program
        # may own up to 128 rows more than there are
        height = max(config.hidden_size, (heads + 2 * kv_heads) * head_dim)
        blocks = -(-height // MIN_ROWS) if wide else 0
        self.product_parts = torch.empty(launch.MAX_PARTS * (MIN_ROWS * blocks + 128) * m, device=device)
        # sums of squares of a residual stream, by blocks of MIN_ROWS columns and more
        self.squares = torch.empty(blocks * m, device=device)

        # counters of arrivals: every kernel leaves them at zero
        self.block_counters = torch.zeros(blocks, device=device, dtype=torch.int32)
        self.head_counters = torch.zeros(max_rows, heads, device=device, dtype=torch.int32)
        self.row_counters = torch.zeros(max_rows, device=device, dtype=torch.int32)
        # one for each program of a chunk of a prompt, if it is split: then they are half of what they may be, or fewer
        self.chunk_counters = torch.zeros(launch.CHUNK_PROGRAMS // 2, device=device, dtype=torch.int32)

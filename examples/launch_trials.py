"""Which launch shapes of the fused kernels are worth a trial: what `tune_kernels.py` measures."""

import math
from collections.abc import Iterator

from minillm.config import ModelConfig
from minillm.kernels import launch

Shape = tuple[int, ...]  # an entry of a table, and a key
Trial = tuple[str, Shape, Shape]  # what is varied, its key in the table, a shape to try


def matrices(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """(columns, rows) of each matrix of a step, those that take most of the time first."""
    hidden, inter, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q = config.num_attention_heads * head_dim
    return {
        "gate_up": (hidden, 2 * inter),
        "down": (inter, hidden),
        "qkv": (hidden, q + 2 * config.num_key_value_heads * head_dim),
        "o": (q, hidden),
        "logits": (hidden, config.vocab_size),
    }


def tiles(columns: int, size: int, m: int, whole: bool) -> list[Shape]:
    """Shapes worth a trial for a matrix of so many columns and rows: (rows a program, columns a tile, warps, ...).

    Tensor cores: tiles of 4 to 64 KB; the columns may be shared by groups of warps and, if not `whole`, by programs.
    Plain products: the four widths that waste least, 16 to 128 weights a thread, programs for every SM.
    """
    if m > 4:
        shapes = [
            (16, 256, 1), (16, 512, 1), (16, 256, 2), (16, 512, 2), (16, 1024, 2), (16, 512, 4), (16, 1024, 4),
            (32, 128, 2), (32, 256, 2), (32, 512, 2), (32, 128, 4), (32, 256, 4), (32, 512, 4),
            (64, 64, 2), (64, 128, 2), (64, 64, 4), (64, 128, 4), (64, 256, 4), (64, 256, 8),
            (64, 512, 4), (64, 512, 8), (128, 64, 4), (128, 128, 4), (128, 128, 8), (128, 256, 4), (128, 256, 8),
            (256, 64, 8), (256, 128, 8),
        ]  # fmt: skip
        in_parts = [
            (32, 128, 2, 2), (32, 256, 2, 2), (32, 256, 4, 2), (32, 128, 2, 4), (32, 256, 4, 4), (64, 128, 4, 2),
            (64, 64, 4, 4), (64, 128, 2, 4), (64, 128, 4, 4), (64, 256, 4, 4), (64, 64, 4, 8), (64, 128, 4, 8),
            (64, 256, 4, 8), (128, 64, 4, 4), (128, 128, 4, 4), (128, 64, 4, 8), (128, 128, 4, 8), (16, 512, 4, 4),
            (32, 512, 4, 4), (32, 512, 8, 4), (32, 128, 4, 8), (32, 256, 4, 8), (32, 256, 8, 8), (64, 512, 8, 4),
            (64, 128, 8, 8), (64, 256, 8, 8), (128, 128, 8, 8), (128, 256, 8, 8), (64, 512, 4, 2), (64, 512, 4, 4),
            (64, 1024, 8, 2), (64, 256, 8, 4), (128, 256, 8, 2), (128, 256, 8, 4), (128, 512, 8, 4),
        ]  # fmt: skip
        in_groups = [
            (16, 64, 4, 1, 4), (16, 128, 4, 1, 4), (16, 256, 4, 1, 4), (16, 64, 8, 1, 8), (16, 128, 8, 1, 8),
            (16, 256, 8, 1, 8), (32, 64, 4, 1, 4), (32, 128, 4, 1, 4), (32, 64, 8, 1, 8), (32, 128, 8, 1, 8),
        ]  # fmt: skip
        groups_in_parts = [
            (32, 64, 4, 2, 4), (32, 128, 4, 2, 4), (32, 64, 8, 2, 8), (32, 128, 8, 2, 8), (32, 64, 4, 4, 4),
            (32, 128, 4, 4, 4), (32, 64, 8, 4, 8), (16, 64, 4, 2, 4), (16, 128, 4, 2, 4),
        ]  # fmt: skip
        candidates = [*shapes, *in_groups, *([] if whole else in_parts + groups_in_parts)]
        return [shape for shape in candidates if worth_a_trial(launch.Tile(*shape), columns, size, m)]

    def cost(width: int) -> float:
        count = -(-columns // width)
        return count * width * (1 + 0.1 * count) + (1e9 if count * width > 1.8 * columns else 0)

    found = []
    usual = 64 // m if m > 1 else 64  # weights a thread; more rows of activations need registers, too
    for order, width in enumerate(sorted((64, 128, 256, 512, 1024, 2048, 4096, 8192), key=cost)[:4]):
        for rows in (2, 4, 8, 16):
            for warps in (1, 2, 4, 8):
                weights = rows * width // (32 * warps)
                if 16 <= weights <= (128 if m == 1 else 64) and (rows == 2 or size >= 132 * rows):
                    found.append((order / 2 + abs(math.log2(weights / usual)) + (warps == 1), (rows, width, warps)))
    return [shape for _, shape in sorted(found)[:14]]


def worth_a_trial(tile: launch.Tile, columns: int, size: int, m: int) -> bool:
    """Whether little of its work is padding, the activations find registers, and there are programs for half a GPU."""
    fits = m * tile.columns * tile.groups <= 4096 * tile.warps
    few_padded = -(-columns // tile.columns) * tile.columns <= 1.4 * columns
    return few_padded and fits and (tile.rows == 16 or size * tile.parts >= 60 * tile.rows)


def splits(head_dim: int, rows: int) -> Iterator[Shape]:
    """Shapes worth a trial for attention: (splits, tokens a tile, warps), 32 to 64 numbers of K a thread."""
    for number in (8, 16, 32, 4) if rows < launch.LONG_ROWS else (2, 4, 1, 8):
        for tokens in (32, 64, 128):
            for warps in (2, 4, 8):
                if 32 <= tokens * head_dim // (32 * warps) <= 64:
                    yield number, tokens, warps


def trials(config: ModelConfig, rows: int) -> dict[str, list[Trial]]:
    """What is tried for a step of so many rows, in the order in which it is tried."""
    m = launch.row_bucket(rows)
    found = {
        name: [
            (name, (columns, size, m), shape)
            for shape in tiles(columns, size, m, name in ("gate_up", "logits"))
            # programs of few rows stay within a head, and would own fewer rows than the shape says
            if name != "qkv" or rows >= launch.LONG_ROWS or config.head_dim % shape[0] == 0
        ]
        for name, (columns, size) in matrices(config).items()
    }
    if rows == 1 or rows >= launch.LONG_ROWS:
        key = (config.num_attention_heads, config.num_key_value_heads, config.head_dim, m)
        attention = [("attention", key, shape) for shape in splits(config.head_dim, rows)]
        found = {**found, "attention": attention, "logits": found.pop("logits")}
    return found

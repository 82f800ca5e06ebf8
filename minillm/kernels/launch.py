"""Which launch shape a kernel gets: from the table of measured shapes, or else by rule.

Nothing is tuned while a model runs: the same model on the same GPU always runs the same kernels, and starts fast.
A shape is a choice of speed alone; every shape gives right results.
"""

from typing import NamedTuple

from . import table

LONG_FROM = 4096
"""From this length on, attention reads K and V once for all query heads that share them (`attention.py`)."""

LONG_ROWS = 8
"""With this many rows it does so at every length: there are programs enough, and reading K and V is what takes time."""

PLAIN_ROWS = 2
"""Up to so many rows of activations, at most 4, plain products are faster than tensor cores."""

MAX_ROWS = 32
"""Products of more rows than this are left to cuBLAS, as those of a prompt are."""

PROGRAMS = 264
"""Cut a matrix finely enough for so many programs: two for each of the 132 SMs of an H100 or H200."""

NEVER = 2**31 - 1
"""A length that no row has."""

CHUNK_PROGRAMS = 512
"""Split attention of a chunk of a prompt into up to so many programs, four for each SM."""

CHUNK_SPLITS = 8
"""Splits of it, at most: one program merges them."""

ROOM = 80 * 1024
"""Bytes of shared memory for the weights on their way in one program, if they are 2 tiles at least and 6 at most."""

MAX_PARTS = 8
"""Programs that share rows of a matrix, at most: what there is scratch memory for."""


class Tile(NamedTuple):
    """How a matrix is cut: each program owns `rows` rows and reads them in tiles of `columns` columns.

    parts: programs that share the rows, each with a part of the columns; groups: of warps, that share a program's rows
    in the same way. Both are 1 for up to 4 rows of activations, and where a norm needs all columns, as in float16. No
    measured shape has groups any more, but the tuner tries them. late: 1 if the next kernel is allowed only after
    the first weights are requested (`sync.py`).
    """

    rows: int
    columns: int
    warps: int
    parts: int = 1
    groups: int = 1
    late: int = 0


class Splits(NamedTuple):
    """How the past is cut: up to `number` programs a head, each in tiles of `tokens` tokens."""

    number: int
    tokens: int
    warps: int


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below the number."""
    return 1 << (number - 1).bit_length()


def row_bucket(n: int) -> int:
    """The rows of activations that kernels are compiled for: powers of two, tensor cores with 8 and more of them."""
    return power_of_two(n) if n <= PLAIN_ROWS else max(8, power_of_two(n))


def on_tensor_cores(n: int) -> bool:
    """Whether the product of n rows of activations is that of `gemm.py`: neither a plain one nor cuBLAS's."""
    return PLAIN_ROWS < n <= MAX_ROWS


def tile(
    columns: int, rows: int, m: int, unit: int = 0, whole: bool = False, grouped: bool = True, memory: int = 2**20,
    widest: int = 2**20,
) -> Tile:  # fmt: skip
    """The tile for a matrix of `rows` x `columns` and m rows of activations, one of `row_bucket`.

    Args:
        unit: a program's rows must divide this (head_dim, where a program must stay within a head); 0 is no limit.
        whole: the columns may not be cut into parts. grouped: they may be shared by groups of warps.
        memory: bytes of shared memory that a program may have; widest: columns that a tile may have on tensor cores.
            A measured shape that needs more is not used; those of the rule are made for small GPUs.
    """

    def fitted(shape: Tile) -> Tile:
        while unit % shape.rows:
            shape = shape._replace(rows=shape.rows // 2)
        return shape._replace(parts=1 if whole else shape.parts, groups=shape.groups if grouped else 1)

    known = table.TILES.get((columns, rows, m))
    if known is not None:
        shape = fitted(Tile(*known))
        if m <= 4 or (shared_memory(shape, columns, m) <= memory and shape.columns <= widest):
            return shape
    return fitted(_tile_by_rule(columns, rows, m))


def widest(capability: tuple[int, int]) -> int:
    """Columns that a tile may have: Blackwell holds activations in tensor memory, which is 512 columns wide."""
    return 512 if capability >= (10, 0) else 2**20


def ahead(tile: Tile) -> int:
    """How many tiles of weights are requested ahead of the one in use, on tensor cores."""
    return max(2, min(6, ROOM // _bytes(tile)))


def shared_memory(tile: Tile, columns: int, m: int) -> int:
    """Bytes that a program needs on tensor cores: for tiles of weights, of which there are no more than turns, and one
    of activations. A little more is added for barriers and what the compiler hands on."""
    turns = -(-columns // (tile.columns * tile.parts * tile.groups))
    return min(ahead(tile) + 1, turns) * _bytes(tile) + 2 * m * tile.columns * tile.groups + 1024


def _bytes(tile: Tile) -> int:
    """Of one tile of weights, in all groups, of two bytes each."""
    return 2 * tile.rows * tile.columns * tile.groups


def _tile_by_rule(columns: int, rows: int, m: int) -> Tile:
    """Few wide tiles. A masked last tile wastes the lanes beyond the end, but no bytes: each tile is counted like a
    fifth more of the work. 16 KB of weights a tile, 128 bytes a thread; for 4 rows of activations, half of that."""
    if m > 4:
        return _wide_tile_by_rule(columns, rows, m)
    width = min(power_of_two(columns), 2048)
    choices = [width >> shift for shift in range(3) if width >> shift >= 16] or [16]

    def cost(choice: int) -> float:
        tiles = -(-columns // choice)
        return tiles * choice * (1 + 0.2 * tiles)

    best = min(choices, key=cost)  # of equals the widest, which comes first
    elements = 16384 if columns >= 4096 else 8192  # more rows a program where activations are long
    elements = elements // 2 if m == 4 else elements
    height = max(2, min(16, elements // best))
    while height > 2 and rows < height * PROGRAMS:
        height //= 2
    return Tile(height, best, max(1, min(8, height * best // 2048)))


def _wide_tile_by_rule(columns: int, rows: int, m: int) -> Tile:
    """For tensor cores: tiles of 2 to 32 KB and, where few rows make few programs, parts of two tiles at least."""
    height = next(height for height in (64, 32, 16) if rows >= 32 * height or height == 16)
    height = 128 if m == 32 and rows >= 128 * PROGRAMS // 2 else height
    width = 128 if -(-columns // 128) * 128 <= 1.25 * columns else 64
    blocks, parts = -(-rows // height), 1
    while parts < MAX_PARTS and 2 * parts * blocks <= PROGRAMS and columns >= 4 * parts * width:
        parts *= 2
    return Tile(height, min(width, power_of_two(columns)), 4, parts)


def splits(heads: int, kv_heads: int, head_dim: int, rows: int) -> Splits:
    """How attention of so many rows is split. `number` is a power of two up to 32."""
    few = rows < LONG_ROWS
    known = table.ATTENTION.get((heads, kv_heads, head_dim, 1 if few else row_bucket(min(rows, MAX_ROWS))))
    if known is not None:
        return Splits(*known)
    number = (16 if heads <= 32 else 8) if few else max(1, 16 // power_of_two(rows))
    return Splits(number, 64 if head_dim <= 128 else 32, 4)


def chunk_splits(programs: int) -> int:
    """In how many parts the past of a chunk of a prompt is read, which is so many programs unsplit: a power of two."""
    splits = 1
    while splits < CHUNK_SPLITS and 2 * splits * programs <= CHUNK_PROGRAMS:
        splits *= 2
    return splits


def long_way(number: int, group: int, rows: int, max_seq_len: int) -> tuple[int, int]:
    """(splits that a group of query heads gets, the length from which on groups are read together).

    The splits are a power of two up to 64 and to the programs there are: `number` for each of `group` heads.
    """
    if group == 1 or (rows < LONG_ROWS and max_seq_len <= LONG_FROM):
        return number, NEVER
    return min(64, 1 << ((number * group).bit_length() - 1)), 0 if rows >= LONG_ROWS else LONG_FROM

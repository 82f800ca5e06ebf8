"""Launch shapes that were measured, in whole decode steps: written by `examples/tune_kernels.py`, not by hand.

What is not in here gets a shape by the rules of `launch.py`.
"""

MEASURED_ON = "NVIDIA H200, torch 2.11.0+cu130"

TILES: dict[tuple[int, ...], tuple[int, ...]] = {
    # (columns K, rows N of the matrix, rows of activations): (rows a program, columns a tile, warps, parts)
    (576, 3072, 1): (2, 1024, 2),
    (2048, 2048, 1): (4, 2048, 4),
    (2048, 2048, 8): (64, 128, 4, 4),
    (2048, 3072, 1): (2, 2048, 2),
    (2048, 3072, 8): (32, 256, 4),
    (2048, 16384, 1): (8, 1024, 4),
    (2048, 16384, 8): (64, 128, 4),
    (2048, 128256, 1): (2, 2048, 4),
    (4096, 4096, 1): (2, 2048, 2),
    (4096, 6144, 1): (4, 1024, 2),
    (4096, 12288, 1): (4, 4096, 4),
    (4096, 22016, 1): (8, 4096, 8),
    (4096, 28672, 1): (4, 4096, 8),
    (4096, 128256, 1): (8, 4096, 8),
    (8192, 2048, 1): (2, 4096, 4),
    (8192, 2048, 8): (64, 256, 4, 8),
    (11008, 4096, 1): (4, 4096, 4),
    (14336, 4096, 1): (2, 2048, 2),
}

ATTENTION: dict[tuple[int, ...], tuple[int, ...]] = {
    # (query heads, kv heads, head_dim, rows): (splits, tokens a tile, warps)
    (32, 8, 64, 1): (8, 128, 4),
    (32, 8, 64, 8): (2, 128, 4),
    (32, 8, 128, 1): (16, 64, 4),
}

"""Tensor maps: what the tensor memory accelerator of Hopper and later must know of a weight matrix (`gemm.py`).

A map holds the address, the shape and the strides of a tensor, and the shape of the tiles that are copied. It is an
argument of a kernel, made by the host at each launch; a captured launch keeps it, so that a replay makes none.
"""

from typing import Any

from torch import Tensor

from .launch import Tile


def tensor_map(weight: Tensor, tile: Tile) -> Any | None:
    """The map of weight [N, K] for a product that is cut by `tile`; None if it cannot be described.

    Groups of warps read at several columns at once. For them the matrix is a tensor of three dimensions, [all groups of
    all parts, N, their columns], and one tile is [groups, rows, columns]. That needs columns that all groups share
    evenly, or the last of them would end in the next row, and in whole tiles, or they would reach into the next group.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor  # here, because triton comes with CUDA builds only

    (size, columns), groups = weight.shape, tile.parts * tile.groups
    if tile.groups == 1:
        return TensorDescriptor(weight, [size, columns], [columns, 1], [tile.rows, tile.columns])
    length = columns // groups
    if length * groups != columns or length % tile.columns:
        return None
    block = [tile.groups, tile.rows, tile.columns]
    return TensorDescriptor(weight, [groups, size, length], [length, columns, 1], block)

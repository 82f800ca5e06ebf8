"""Host memory for weights: one block on large pages, which tensors are cut from.

A decode step reads every weight once. On pages of 4 KiB each of them is a miss in the processor's table of pages, which
costs a CPU part of its bandwidth; on pages of 2 MiB it is not. Linux gives those to a program that asks for them.
"""

import math
import mmap
from contextlib import suppress

import torch
from torch import Tensor

ALIGNMENT = 64  # a cache line
SLACK = 2**20  # what the alignment of all tensors of a model may waste


class HostMemory:
    """A block of `num_bytes`, for tensors of one dtype. It is freed with the last of them."""

    def __init__(self, num_bytes: int, dtype: torch.dtype) -> None:
        self._dtype = dtype
        if hasattr(mmap, "MADV_HUGEPAGE"):
            block = mmap.mmap(-1, num_bytes + SLACK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(OSError):  # a kernel built without them
                block.madvise(mmap.MADV_HUGEPAGE)
            self._free = torch.frombuffer(block, dtype=torch.uint8)
        else:
            self._free = torch.empty(num_bytes + SLACK, dtype=torch.uint8)

    def empty(self, shape: tuple[int, ...]) -> Tensor:
        """The next tensor, uninitialised."""
        size = math.prod(shape) * self._dtype.itemsize
        tensor = self._free[:size].view(self._dtype).view(shape)
        self._free = self._free[math.ceil(size / ALIGNMENT) * ALIGNMENT :]
        return tensor

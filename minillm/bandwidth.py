"""How fast this machine reads memory: the ceiling of decoding.

To make one token, a decode step reads every weight once and does two operations with each. No processor is short of
arithmetic then; all wait for memory. So tokens per second have an upper bound that anybody can compute,

    tokens/s  <=  bytes of memory read per second  /  bytes of weights and cache read per token,

and the honest figure of merit is the share of that bound which is reached. The bytes per second are measured, since
data sheets give what no program gets: a buffer too large for the caches is read by a sum and by a matrix-vector
product, the two plainest reads there are, and the fastest pass counts.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from .errors import MemoryLimitError
from .loading import free_bytes

CPU_BYTES = 256 * 2**20  # above the caches of nearly all CPUs, and read in hundredths of a second
GPU_BYTES = 2 * 2**30
SMALLEST = 32 * 2**20  # below, caches would answer instead of the memory
COLUMNS = 1024
ROUNDS = 5


def measure_read_bandwidth(device: torch.device | str) -> float:
    """Bytes per second that the device reads from its memory: the best of a few passes, about 0.3 s on a CPU.

    The buffer takes 256 MiB, on a GPU 2 GiB, and never more than a quarter of what is free.
    Raises: MemoryLimitError if that is too little to measure the memory and not the caches.
    """
    device = torch.device(device)
    wanted = CPU_BYTES if device.type == "cpu" else GPU_BYTES
    size = min(wanted, free_bytes(device) // 4)
    if size < SMALLEST:
        raise MemoryLimitError(
            f"measuring the memory bandwidth needs {4 * SMALLEST / 2**20:.0f} MiB free on {device}, "
            f"and there are {4 * size / 2**20:.0f}: free some memory"
        )
    rows = torch.ones(size // 4 // COLUMNS, COLUMNS, device=device)  # float32 [rows, COLUMNS]
    vector = torch.ones(COLUMNS, device=device)
    reads: list[Callable[[], Tensor]] = [rows.sum, lambda: rows @ vector]
    seconds = min(_seconds(read, device) for _ in range(ROUNDS) for read in reads)
    return rows.numel() * rows.element_size() / seconds


def _seconds(work: Callable[[], Tensor], device: torch.device) -> float:
    """Time of one pass. A GPU works behind the host's back, so its own clock is read, or it is waited for."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            work()
            end.record()
            end.synchronize()
        return start.elapsed_time(end) / 1000
    started = time.perf_counter()
    work()
    if device.type == "mps":
        torch.mps.synchronize()
    return time.perf_counter() - started

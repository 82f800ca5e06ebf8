"""The read ceiling: the fastest pass over a buffer that is large enough and not too large."""

import time
from collections.abc import Callable

import pytest
import torch

from minillm import bandwidth
from minillm.bandwidth import measure_read_bandwidth
from minillm.errors import MemoryLimitError

MIB = 2**20


def test_a_real_measurement_is_quick_and_plausible() -> None:
    started = time.perf_counter()
    rate = measure_read_bandwidth("cpu")
    assert 2e8 < rate < 5e12  # a slow board to a large server
    assert time.perf_counter() - started < 20  # 0.3 s alone; the machine may be busy


@pytest.mark.parametrize(("free", "size"), [(64 * 2**30, 256), (400 * MIB, 100)])
def test_the_rate_is_the_whole_buffer_in_the_fastest_pass(
    monkeypatch: pytest.MonkeyPatch, free: int, size: int
) -> None:
    """The buffer is never more than a quarter of what is free, and every pass reads all of it."""
    results: list[float] = []

    def clock(work: Callable[[], torch.Tensor], device: torch.device) -> float:
        if len(results) < 2:
            results.append(float(work().double().sum()))
        else:
            results.append(0.0)
        return 0.5 if len(results) == 4 else 2.0  # the fourth pass is the fast one

    monkeypatch.setattr(bandwidth, "free_bytes", lambda device: free)
    monkeypatch.setattr(bandwidth, "_seconds", clock)
    assert measure_read_bandwidth("cpu") == size * MIB / 0.5
    assert results[:2] == [size * MIB / 4] * 2  # ones in float32, all of them added up by both ways of reading
    assert len(results) > 4


def test_too_little_memory_is_an_error_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a tiny buffer the caches would answer, and the share of the bandwidth would look worse than it is."""
    monkeypatch.setattr(bandwidth, "free_bytes", lambda device: 100 * MIB)
    with pytest.raises(MemoryLimitError, match=r"needs 128 MiB free on cpu.* 100"):
        measure_read_bandwidth("cpu")

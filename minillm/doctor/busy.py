"""From a Chrome trace to what the GPU did: when it was busy, and with which kernels.

Kernels overlap: with programmatic dependent launch (`kernels/sync.py`) one starts while the one before still runs, and
then waits for it. So their durations must not be added up. The GPU is busy where at least one kernel runs (the union of
their intervals), and a kernel *costs* what it adds to that: the time after everything that began before it had ended.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of a trace
NAME_LENGTH = 60
SLACK = 1000.0  # microseconds that the clocks of host and GPU may differ by; ranges lie further apart (`timing.py`)


class Interval(NamedTuple):
    """Something that the GPU ran, in microseconds."""

    name: str
    start: float
    end: float


class Kernel(NamedTuple):
    """All runs of one kernel in a step: its name, how often it ran, the milliseconds that it cost."""

    name: str
    runs: float
    ms: float


def gpu_work(events: Iterable[Mapping[str, Any]]) -> list[Interval]:
    """The kernels and copies among the events of a trace, by their start."""
    work = [
        Interval(str(event["name"]), float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        for event in events
        if event.get("ph") == "X" and str(event.get("cat", "")).lower() in GPU_WORK
    ]
    return sorted(work, key=lambda one: (one.start, one.end))


def within(work: Iterable[Interval], events: Iterable[Mapping[str, Any]], label: str) -> list[Interval]:
    """What began while the host was in the range `label`, which waits for the GPU at its end."""
    ranges = [e for e in events if e.get("cat") == "user_annotation" and e.get("name") == label and e.get("ph") == "X"]
    spans = [(float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in ranges]
    return [one for one in work if any(start - SLACK <= one.start <= end + SLACK for start, end in spans)]


def costs(work: Sequence[Interval]) -> list[float]:
    """What each interval adds to the union of those before it, in microseconds. `work` is sorted by start."""
    added, covered = [], float("-inf")
    for one in work:
        added.append(max(0.0, one.end - max(one.start, covered)))
        covered = max(covered, one.end)
    return added


def busy_us(work: Sequence[Interval]) -> float:
    """Length of the union of all intervals, which are sorted by start."""
    return sum(costs(work))


def kernels(work: Sequence[Interval], steps: int) -> list[Kernel]:
    """What the kernels of one step cost, dearest first. `work` is that of `steps` steps."""
    totals: dict[str, list[float]] = defaultdict(list)
    for one, cost in zip(work, costs(work), strict=True):
        totals[one.name].append(cost)
    found = [Kernel(name, len(each) / steps, sum(each) / steps / 1000) for name, each in totals.items()]
    return sorted(found, key=lambda kernel: (-kernel.ms, kernel.name))


def idle_share(busy_ms: float, step_ms: float) -> float:
    """The share of a step in which no kernel ran. A trace slows kernels a little, so it can look below 0: that is 0."""
    return max(0.0, 1 - busy_ms / step_ms)


def short(name: str) -> str:
    """A kernel's name without what C++ puts around it, at most NAME_LENGTH characters."""
    plain = name.removeprefix("void ")
    if len(plain) > NAME_LENGTH and "<" in plain:
        plain = plain.partition("<")[0] + "<...>"
    return plain if len(plain) <= NAME_LENGTH else plain[: NAME_LENGTH - 3] + "..."

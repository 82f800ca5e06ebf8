"""A contest: several ways to answer the same prompts take turns, and every token is timed.

A run is a whole answer: `batch` prompts, and `steps` tokens for each after the first. Its first steps do not count:
they are enqueued while the prefill is still running, so their times are not those of a steady decode step.
"""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

SETTLE = 4  # steps of a run that do not count

Prompts = list[list[int]]  # token ids, all of the same length


@dataclass(frozen=True)
class Run:
    """One answer. `step_ms` and `host_us` have one value for each step after the first `SETTLE`.

    Attributes:
        tokens_per_s: of all rows together, by the wall clock. host_us: empty if it cannot be told.
    """

    first_token_ms: float
    tokens_per_s: float
    step_ms: list[float]
    host_us: list[float]

    @classmethod
    def of(
        cls,
        batch: int,
        started: float,
        stamps: Sequence[float],
        device_ms: Sequence[float] = (),
        host_us: Sequence[float] = (),
    ) -> "Run":
        """From the moments, in seconds, at which the tokens of the last row arrived; at least SETTLE + 2 of them.

        Args:
            device_ms: the device's own times of the steps; without them, the time of a step is from token to token.
        """
        settled = stamps[SETTLE:]
        gaps = [(after - before) * 1000 for before, after in itertools.pairwise(settled)]
        return cls(
            first_token_ms=(stamps[0] - started) * 1000,
            tokens_per_s=batch * len(gaps) / (settled[-1] - settled[0]),
            step_ms=list(device_ms[SETTLE:]) or gaps,
            host_us=list(host_us[SETTLE:]),
        )


class Contestant(Protocol):
    """One way to answer prompts.

    Attributes:
        mode: its name in the table. cache: tokens of its cache; None: it grows as it needs.
    """

    @property
    def mode(self) -> str: ...

    @property
    def cache(self) -> int | None: ...

    def run(self, prompts: Prompts, steps: int) -> Run: ...


class Failed(Exception):
    """A contestant cannot do this, and the others go on without it."""


@dataclass
class Entry:
    """A contestant and its runs.

    Attributes:
        warm_up_s: how long its first call took, which does not count. failed: why it has fewer runs than the others.
    """

    contestant: Contestant
    warm_up_s: float = 0.0
    runs: list[Run] = field(default_factory=list)
    failed: str | None = None


def contest(contestants: Sequence[Contestant], prompts: Prompts, steps: int, rounds: int) -> list[Entry]:
    """Warm everybody up, then let them take turns: A B C, A B C, ..."""
    entries = [Entry(contestant) for contestant in contestants]
    for turn in range(1 + rounds):
        for entry in entries:
            if entry.failed is None:
                _take_turn(entry, prompts, steps, warm_up=turn == 0)
    return entries


def _take_turn(entry: Entry, prompts: Prompts, steps: int, warm_up: bool) -> None:
    started = time.perf_counter()
    try:
        run = entry.contestant.run(prompts, 2 * SETTLE if warm_up else steps)
    except Failed as reason:
        entry.failed = str(reason)
        return
    if warm_up:
        entry.warm_up_s = time.perf_counter() - started
    else:
        entry.runs.append(run)

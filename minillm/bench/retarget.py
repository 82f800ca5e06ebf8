"""`retarget`: pointing all graphs at another KV cache, or at other weights, beside capturing them anew.

In each round the graphs are captured on a cache (with their warm-up, as `LLM` captures them, by a runner that was not
used before; what compiles kernels is done before the first round), then pointed to another and back, several times. The
first change reads every node of every graph; those after it know them. The columns:

    graphs       recordings, all of which are changed
    capture ms   capturing them anew, median of the rounds
    first ms     the first change after a capture
    again ms     a later change
    capture / first, capture / again   how many times a change is cheaper
"""

import statistics
import time
from argparse import Namespace
from collections.abc import Sequence

from ..bandwidth import measure_read_bandwidth
from ..cache import KVCache
from ..capture import CudaBackend
from ..errors import ConfigError
from ..model import Llama
from ..step import step_of
from ..switch import weight_moves
from ..weights import allocate, randomise
from .machine import describe
from .report import Bars, Column, Report, Row, fixed
from .runtime import BenchRunner, Runtime, Subject, chosen_ops, make_subject, release, synchronize

CHANGES = 6  # of each round, an even number, which ends where it began

COLUMNS = [
    Column("what", "what"),
    Column("rows", "max_rows"),
    Column("cache", "cache"),
    Column("graphs", "graphs"),
    Column("capture ms", "capture_ms", fixed(1)),
    Column("first ms", "first_ms", fixed(2)),
    Column("again ms", "again_ms", fixed(2)),
    Column("capture / first", "capture_over_first", fixed(1)),
    Column("capture / again", "capture_over_again", fixed(1)),
]
BARS = Bars(("what",), "again_ms", "ms", mark="first_ms")

Side = tuple[Llama, KVCache]


def retarget(options: Namespace, arguments: Sequence[str]) -> Report:
    """Run the benchmark. Raises: MinillmError if it cannot be run as asked."""
    subject = make_subject(options, options.max_batch, options.cache)
    ops = chosen_ops(options.ops, subject)[-1]
    if ops != "fused":
        raise ConfigError(
            "only graphs of fused kernels can be pointed elsewhere: leave out --ops, or take another model"
        )
    ceiling = measure_read_bandwidth(subject.device)
    about = describe(subject.device, arguments) | {"model": str(subject), "ops": ops}
    rows = measure(subject, options.max_batch, options.cache, options.rounds, ops)
    notes = [
        f"another {row['what']} for {row['graphs']} graphs: {row['capture_over_first']:.1f} times cheaper than "
        f"capturing them anew the first time, {row['capture_over_again']:.1f} times again"
        for row in rows
    ]
    return Report("retarget", about, ceiling, COLUMNS, BARS, rows, samples="changes_ms", notes=notes)


def measure(subject: Subject, max_rows: int, cache: int, rounds: int, ops: str) -> list[Row]:
    """A row for another cache, and one for other weights."""
    runtime = Runtime(subject, max_rows, cache, [ops])
    here = (runtime.models[ops], runtime.cache)
    weights = allocate(subject.config, subject.device, subject.dtype)
    randomise(weights)
    there = {"cache": (here[0], runtime.cache.another()), "weights": (here[0].with_weights(weights), here[1])}
    synchronize(subject.device)
    runtime.runner(CudaBackend(subject.device), ops).close()  # compiles and loads all kernels
    rows = []
    for what, other in there.items():
        captures, changes = [], []
        for _ in range(rounds):
            release(subject.device)
            runner = runtime.runner(CudaBackend(subject.device), ops)
            captures.append(1000 * runner.report.capture_seconds)
            changes.append([_change(runner, *pair) for pair in [(here, other), (other, here)] * (CHANGES // 2)])
            graphs = runner.report.graphs
            runner.close()
        rows.append(_row(captures, changes) | {"what": what, "max_rows": max_rows, "cache": cache, "graphs": graphs})
    return rows


def _change(runner: BenchRunner, now: Side, then: Side) -> float:
    """Milliseconds of one change. Nothing of it is left to the device, which has nothing else to do either."""
    started = time.perf_counter()
    runner.retarget(step_of(*then), then[1], weight_moves(now[0].weights, then[0].weights))
    return 1000 * (time.perf_counter() - started)


def _row(captures: list[float], changes: list[list[float]]) -> Row:
    """Medians of milliseconds; `changes` has those of each round."""
    capture = statistics.median(captures)
    first = statistics.median(row[0] for row in changes)
    again = statistics.median(value for row in changes for value in row[1:])
    return {
        "capture_ms": capture,
        "first_ms": first,
        "again_ms": again,
        "capture_over_first": capture / first,
        "capture_over_again": capture / again,
        "captures_ms": captures,
        "changes_ms": [value for row in changes for value in row],
    }

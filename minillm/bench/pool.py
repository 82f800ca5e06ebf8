"""`pool`: the memory that the graphs of all sizes hold, for three ways to record them.

A graph keeps the memory of its intermediate results for ever. Only one graph runs at a time, so all can share one pool;
and recorded from the largest to the smallest, each finds room in what the first one took. The three ways:

    largest first    one pool, as minillm records
    smallest first   one pool; each larger graph may find the pool's pieces too small, and takes more
    a pool each      nothing shared

Each is measured in a process of its own, which records every graph that `LLM` would, because an allocator that has
served one experiment is not empty for the next. The columns:

    pool MiB      what the captures added to the memory that PyTorch has reserved
    reserved MiB  the growth of that memory as a whole, unused blocks given back
    driver MiB    what the driver has less of afterwards: also the graphs themselves, which PyTorch does not see
"""

import json
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from functools import partial

import torch

from ..bandwidth import measure_read_bandwidth
from ..capture import CudaBackend
from ..errors import MinillmError
from ..loading import pick_device
from ..sampling import Mode
from .machine import describe
from .report import Bars, Column, Report, Row, fixed
from .runtime import Runtime, chosen_ops, make_subject, release

LAYOUTS = ("largest first", "smallest first", "a pool each")


def _mib(value: int) -> str:
    return f"{value / 2**20:.1f}"


COLUMNS = [
    Column("layout", "layout"),
    Column("ops", "ops"),
    Column("rows", "max_rows"),
    Column("cache", "cache"),
    Column("graphs", "graphs"),
    Column("pool MiB", "pool_bytes", _mib),
    Column("reserved MiB", "reserved_bytes", _mib),
    Column("driver MiB", "driver_bytes", _mib),
    Column("capture s", "capture_s", fixed(2)),
]
BARS = Bars(("layout",), "pool_bytes", "bytes", mark="driver_bytes")


def pool(options: Namespace, arguments: Sequence[str]) -> Report:
    """Run the benchmark. Raises: MinillmError if it cannot be run as asked."""
    device = pick_device(options.device)
    ceiling = measure_read_bandwidth(device)
    release(device)
    rows = [in_own_process(layout, arguments) for layout in LAYOUTS]
    about = describe(device, arguments) | {"model": rows[0].pop("model")}
    for row in rows[1:]:
        del row["model"]
    apart = rows[-1]
    notes = [
        f"{row['layout']}: {row['pool_bytes'] / apart['pool_bytes']:.1%} of the pool bytes of {apart['layout']}, "
        f"{row['driver_bytes'] / apart['driver_bytes']:.1%} of the driver's"
        for row in rows[:-1]
    ]
    return Report("pool", about, ceiling, COLUMNS, BARS, rows, notes=notes)


def in_own_process(layout: str, arguments: Sequence[str]) -> Row:
    """The same command once more, for one layout."""
    command = [sys.executable, "-m", "minillm.bench", *arguments, "--layout", layout]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
        raise MinillmError(f"measuring '{layout}' failed: {reason[0].removeprefix('error: ')}")
    row: Row = json.loads(done.stdout.splitlines()[-1])
    return row


def measure_layout(options: Namespace) -> Row:
    """Record all graphs in this process, and see what they took."""
    subject = make_subject(options, options.max_batch, options.cache)
    device = subject.device
    ops = chosen_ops(options.ops, subject)[-1]
    runtime = Runtime(subject, options.max_batch, options.cache, [ops])
    step = runtime.step(ops)
    backend = CudaBackend(device, share_pool=options.layout != "a pool each")
    for mode in Mode:  # loads all kernels, which stay, whoever runs the step
        backend.warm_up(partial(step, runtime.state, options.cache, mode))
    backend.close()  # drops the workspaces of cuBLAS, as a capture does
    release(device)
    reserved, free = torch.cuda.memory_reserved(device), torch.cuda.mem_get_info(device)[0]
    runner = runtime.runner(backend, ops, largest_first=options.layout != "smallest first")
    release(device)
    row = {
        "layout": options.layout,
        "ops": ops,
        "max_rows": options.max_batch,
        "cache": options.cache,
        "graphs": runner.report.graphs,
        "pool_bytes": runner.report.pool_bytes,
        "reserved_bytes": torch.cuda.memory_reserved(device) - reserved,
        "driver_bytes": free - torch.cuda.mem_get_info(device)[0],
        "capture_s": runner.report.capture_seconds,
        "model": str(subject),
    }
    runner.close()
    return row

"""`pieces`: a decode step captured as one graph, and as several, one after another.

All are captured side by side, and run in turns on the same rows. The columns:

    graphs       recordings times pieces: what the driver holds
    capture ms   capturing all recordings, kernels compiled before
    pool MiB     what the captures added to the memory that PyTorch has reserved
    driver MiB   what the driver has less of afterwards: also the graphs themselves
    p50 ms       device time of a step, between two events around it
    host us      what the CPU needs to launch a step, median
"""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..bandwidth import measure_read_bandwidth
from ..capture import CudaBackend
from ..errors import ConfigError
from ..pieces import Cuts
from ..sampling import Mode
from .machine import describe
from .report import Bars, Column, Report, Row, fixed, percentile
from .runtime import BenchRunner, DeviceClock, Runtime, chosen_ops, make_subject, release

PIECES = (1, 2, 4, 8)
SETTLE = 4  # first steps of a run, which are not counted


def _mib(value: int) -> str:
    return f"{value / 2**20:.1f}"


COLUMNS = [
    Column("pieces", "pieces"),
    Column("ops", "ops"),
    Column("batch", "batch"),
    Column("prompt", "prompt"),
    Column("graphs", "graphs"),
    Column("capture ms", "capture_ms", fixed(1)),
    Column("pool MiB", "pool_bytes", _mib),
    Column("driver MiB", "driver_bytes", _mib),
    Column("p50 ms", "step_ms_p50", fixed(3)),
    Column("p99 ms", "step_ms_p99", fixed(3)),
    Column("host us", "host_us_p50", fixed(1)),
]
BARS = Bars(("pieces",), "step_ms_p50", "ms", mark="step_ms_p99")


@dataclass
class Contestant:
    """A runner of steps in so many pieces, and the times of its steps."""

    pieces: int
    runner: BenchRunner
    driver_bytes: int
    step_ms: list[float] = field(default_factory=list)
    host_us: list[float] = field(default_factory=list)


def pieces(options: Namespace, arguments: Sequence[str]) -> Report:
    """Run the benchmark. Raises: MinillmError if it cannot be run as asked."""
    steps = options.steps + SETTLE
    if options.prompt + steps > options.cache:
        raise ConfigError(
            f"a prompt of {options.prompt} and {steps} steps need a cache of {options.prompt + steps}, not "
            f"{options.cache}: raise --cache, or lower --prompt or --steps"
        )
    subject = make_subject(options, options.batch, options.cache)
    layers = subject.config.num_hidden_layers
    cuts = [Cuts(layers, k) for k in options.pieces or [k for k in PIECES if k <= layers]]
    ops = chosen_ops(options.ops, subject)[-1]
    ceiling = measure_read_bandwidth(subject.device)
    about = describe(subject.device, arguments) | {"model": str(subject)}
    runtime = Runtime(subject, options.batch, options.cache, [ops])
    runtime.runner(CudaBackend(subject.device), ops).close()  # compiles and loads all kernels
    contestants = [_contestant(runtime, ops, each) for each in cuts]
    for _ in range(options.rounds):
        for contestant in contestants:
            _run(runtime, contestant, options.prompt, steps)
    about_rows = {"ops": ops, "batch": options.batch, "prompt": options.prompt}
    rows = [_row(contestant) | about_rows for contestant in contestants]
    for contestant in contestants:
        contestant.runner.close()
    first = rows[0]
    notes = [
        f"{row['pieces']} pieces: {row['step_ms_p50'] / first['step_ms_p50']:.3f} times the step of {first['pieces']}"
        for row in rows[1:]
    ]
    return Report("pieces", about, ceiling, COLUMNS, BARS, rows, samples="step_ms", notes=notes)


def _contestant(runtime: Runtime, ops: str, cuts: Cuts) -> Contestant:
    device = runtime.state.tokens.device
    release(device)
    free = torch.cuda.mem_get_info(device)[0]
    runner = runtime.runner(CudaBackend(device, cuts=cuts), ops, cuts=cuts)
    release(device)
    return Contestant(cuts.pieces, runner, free - torch.cuda.mem_get_info(device)[0])


def _run(runtime: Runtime, contestant: Contestant, prompt: int, steps: int) -> None:
    """Steps of all rows, from the end of the prompt on."""
    state, runner, rows = runtime.state, contestant.runner, runtime.cache.max_batch_size
    with runner.on_stream():
        state.limits.fill_(2**31)  # no row ends by itself
        state.positions.fill_(prompt)
        state.active.fill_(True)
        runner.clock, host = DeviceClock(steps), list[float]()
        for step in range(steps):
            started = runner.host_clock()
            runner.step(rows, prompt + step + 1, Mode.GREEDY)
            host.append(1e6 * (runner.host_clock() - started))
        contestant.step_ms += runner.clock.read()[SETTLE:]
        contestant.host_us += host[SETTLE:]


def _row(contestant: Contestant) -> Row:
    report = contestant.runner.report
    return {
        "pieces": contestant.pieces,
        "graphs": report.graphs * report.pieces,
        "capture_ms": 1000 * report.capture_seconds,
        "pool_bytes": report.pool_bytes,
        "driver_bytes": contestant.driver_bytes,
        "step_ms_p50": percentile(contestant.step_ms, 50),
        "step_ms_p99": percentile(contestant.step_ms, 99),
        "host_us_p50": percentile(contestant.host_us, 50),
        "step_ms": contestant.step_ms,
    }

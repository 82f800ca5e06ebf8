"""The time of a step, eager and replayed, and a trace of some steps.

Times are taken without the profiler, which slows launches: between two CUDA events around a step (`bench/runtime.py`),
on a CPU by its clock. Only what the GPU did meanwhile, its kernels, comes from the trace. Eager steps and replays take
turns, so that a GPU that warms up does so for both.
"""

import itertools
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from ..bench.runtime import BenchRunner, DeviceClock, synchronize
from ..sampling import Mode
from .busy import Interval, Kernel, busy_us, gpu_work, idle_share, kernels, within
from .checks import first_line
from .patient import Patient

STEPS, ROUNDS, TRACED = 64, 5, 8
Runners = Mapping[str, BenchRunner]  # "eager" and, on a GPU, "graph"


@dataclass(frozen=True)
class Timing:
    """A step of one kind. Milliseconds; what a trace did not tell is None.

    Attributes:
        busy_ms: of a step in which at least one kernel ran. gaps_ms: the rest. idle: its share.
        launches: kernels and copies of a step. kernels: what each costs, dearest first.
    """

    mode: str
    step_ms: float
    busy_ms: float | None = None
    launches: float | None = None
    kernels: tuple[Kernel, ...] = ()

    @property
    def gaps_ms(self) -> float | None:
        return None if self.busy_ms is None else max(0.0, self.step_ms - self.busy_ms)

    @property
    def idle(self) -> float | None:
        return None if self.busy_ms is None else idle_share(self.busy_ms, self.step_ms)


def run_steps(patient: Patient, runner: BenchRunner, steps: int) -> list[float]:
    """Greedy steps of all rows up to the end of the cache, as many as asked for; the milliseconds of each.

    The time is that between two events of the runner's clock, without one that of the host until the token is there.
    """
    start, stamps = patient.length - steps, [time.perf_counter()]
    for kv_len in range(start + 1, start + 1 + steps):
        runner.step(patient.rows, kv_len, Mode.GREEDY)
        if runner.clock is None and patient.device.type != "cuda":
            patient.state.output[0, 0].item()
        stamps.append(time.perf_counter())
    if runner.clock is not None:
        return runner.clock.read()
    return [1000 * (end - begin) for begin, end in itertools.pairwise(stamps)]


def place(patient: Patient, steps: int) -> None:
    patient.place(patient.rows, patient.length - steps, Mode.GREEDY)
    synchronize(patient.device)


def time_steps(patient: Patient, runners: Runners) -> dict[str, float]:
    """The median time of a step of each runner, in milliseconds, after a first round that does not count."""
    steps = min(STEPS, patient.length // 2)
    samples: dict[str, list[float]] = {name: [] for name in runners}
    for number in range(ROUNDS + 1):
        for name, runner in runners.items():
            runner.clock = DeviceClock(steps) if patient.device.type == "cuda" else None
            place(patient, steps)
            found = run_steps(patient, runner, steps)
            runner.clock = None
            samples[name] += found if number else []
    return {name: statistics.median(found) for name, found in samples.items()}


# ---------------------------------------------------------------------- a trace


def trace(patient: Patient, runners: Runners) -> dict[str, Any]:
    """A Chrome trace of TRACED steps of each runner, in ranges of the host named `label(name)`.

    Raises: RuntimeError or OSError if the profiler does not work here, ValueError if what it wrote is no JSON.
    """
    steps = min(TRACED, patient.length // 2)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (patient.device.type == "cuda")
    with tempfile.TemporaryDirectory() as folder, _quiet():
        with profile(activities=activities) as profiler:
            for name, runner in runners.items():
                place(patient, steps)
                time.sleep(0.002)  # apart on the time line, also if the two clocks differ a little
                with record_function(label(name)):
                    run_steps(patient, runner, steps)
                    synchronize(patient.device)
                time.sleep(0.002)
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8", errors="replace"))
    return content


def label(name: str) -> str:
    return f"minillm: {name} steps"


@contextmanager
def _quiet() -> Iterator[None]:
    """The profiler without its remarks. Its library reads how much it may say when it is first used."""
    asked = "KINETO_LOG_LEVEL" in os.environ
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if not asked:
            del os.environ["KINETO_LOG_LEVEL"]


def timings(patient: Patient, runners: Runners, traced: bool) -> tuple[list[Timing], dict[str, Any] | None, list[str]]:
    """The times of all runners; the trace, None if there is none; and what could not be told, in a line each.

    traced: whether a trace is wanted where it tells nothing about times, on a CPU.
    """
    times = time_steps(patient, runners)
    if not (traced or patient.device.type == "cuda"):
        return [Timing(name, ms) for name, ms in times.items()], None, []
    try:
        content = trace(patient, runners)
    except (RuntimeError, OSError, ValueError) as error:
        return [Timing(name, ms) for name, ms in times.items()], None, [f"no trace: {first_line(error)}"]
    events, steps = content.get("traceEvents", []), min(TRACED, patient.length // 2)
    work = gpu_work(events)
    found = [_timing(name, ms, within(work, events, label(name)), steps) for name, ms in times.items()]
    notes = []
    if patient.device.type == "cuda" and not all(timing.kernels for timing in found):
        notes.append(
            "the profiler saw no kernels (CUPTI may be missing, or closed to this user), so idle shares and the "
            "dearest kernels are not known"
        )
    return found, content, notes


def _timing(name: str, step_ms: float, work: list[Interval], steps: int) -> Timing:
    if not work:
        return Timing(name, step_ms)
    return Timing(name, step_ms, busy_us(work) / steps / 1000, len(work) / steps, tuple(kernels(work, steps)))

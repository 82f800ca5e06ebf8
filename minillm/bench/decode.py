"""`decode`: the time of one step, and how far from its floor that is.

Random prompts go through the engine, and tokens are made for each of them: every step is a complete one (embedding,
layers, logits, choice of the token, which feeds the next step) at a real, growing position, with the host one step
ahead on a GPU. transformers and minillm take turns (`contest.py`), the latter in up to four modes:

    eager, graph               plain PyTorch operations, launched one by one or as one CUDA Graph
    fused eager, fused graph   the fused kernels, where they run; `fused graph` is then how `LLM` decodes

The columns:

    first ms    from handing in the prompts to the first token of the last of them
    p50, p99    time of a step: between two CUDA events around it; on a CPU, and for transformers, which waits for each
                token anyway, from token to token
    host us     what the host needs to enqueue one step (`runtime.py`)
    tok/s       of all rows together, by the wall clock, median of the rounds
    MB/step     what a step must read (`needed_bytes`), at the mean position of the run
    ceiling     the share of the read ceiling that this is, at the median step time
    floor ms    what a step must read, divided by the read ceiling
"""

import itertools
import random
import statistics
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ..bandwidth import measure_read_bandwidth
from ..capture import CudaBackend
from ..errors import ConfigError
from ..request import Request
from ..sampling import SamplingParams
from .contest import SETTLE, Contestant, Entry, Prompts, Run, contest
from .machine import describe
from .peers import Transformers, chosen_peers
from .report import Bars, Column, Report, Row, fixed, percentile
from .runtime import (
    BenchRunner,
    DeviceClock,
    Runtime,
    Subject,
    TimedEngine,
    chosen_ops,
    make_subject,
    needed_bytes,
    release,
    synchronize,
)

COLUMNS = [
    Column("mode", "mode"),
    Column("batch", "batch"),
    Column("prompt", "prompt"),
    Column("cache", "cache"),
    Column("first ms", "first_token_ms", fixed(1)),
    Column("p50 ms", "step_ms_p50", fixed(3)),
    Column("p99 ms", "step_ms_p99", fixed(3)),
    Column("p99/p50", "p99_over_p50", fixed(3)),
    Column("host us", "host_us", fixed(1)),
    Column("tok/s", "tokens_per_s", fixed(1)),
    Column("MB/step", "bytes_per_step", lambda value: f"{value / 1e6:.1f}"),
    Column("ceiling", "share_of_ceiling", lambda value: f"{value:.1%}"),
    Column("floor ms", "floor_ms", fixed(3)),
]
BARS = Bars(("mode", "batch", "prompt", "cache"), "step_ms_p50", "ms a step", mark="step_ms_p99", limit="floor_ms")
OURS = ("eager", "graph", "fused eager", "fused graph")  # from the slowest to the fastest


class Minillm:
    """The engine as a contestant, with or without graphs."""

    def __init__(self, mode: str, engine: TimedEngine, params: SamplingParams, clock: DeviceClock | None) -> None:
        self.mode, self.cache = mode, engine.cache.max_seq_len
        self._engine, self._params, self._clock = engine, params, clock

    def run(self, prompts: Prompts, steps: int) -> Run:
        stamps: list[float] = []

        def note_time(*_: object) -> bool:
            stamps.append(time.perf_counter())
            return False

        requests = [Request(p, self._params, len(p) + steps + 1, [], 0, on_token=lambda *_: False) for p in prompts]
        requests[-1].on_token = note_time
        self._engine.host_us.clear()
        synchronize(self._engine.device)  # the contestant before may have used another stream
        started = time.perf_counter()
        for request in requests:
            self._engine.submit(request)
        while self._engine.busy:
            self._engine.step()
        for request in requests:
            if request.error is not None:
                raise request.error
        if self._clock is None:  # on a CPU, to enqueue a step is to run it
            return Run.of(len(prompts), started, stamps)
        return Run.of(len(prompts), started, stamps, self._clock.read(), self._engine.host_us)


def decode(options: Namespace, arguments: Sequence[str]) -> Report:
    """Run the benchmark. Raises: MinillmError if it cannot be run as asked."""
    _check(options)
    params = SamplingParams(temperature=options.temperature)
    subject = make_subject(options, max(options.batch), max(options.cache))
    ops, peers = chosen_ops(options.ops, subject), chosen_peers(options.peers, subject.device)
    ceiling = measure_read_bandwidth(subject.device)
    about = describe(subject.device, arguments) | {"model": str(subject)}
    report = Report("decode", about, ceiling, COLUMNS, BARS, rows=[], samples="step_ms")
    transformers = Transformers(subject, params) if peers else None
    for cache in options.cache:
        # a cache that grows has no length to vary
        kinds = [kind for kind in peers if kind != "eager" or cache == options.cache[0]]
        with engines(subject, cache, ops, options, params, report.notes) as ours:
            for prompt, batch in itertools.product(options.prompt, options.batch):
                others = [transformers.contestant(kind, cache) for kind in kinds] if transformers is not None else []
                rows, failures = compare(subject, [*ours, *others], batch, prompt, options, ceiling)
                report.rows += rows
                report.notes += ratios(rows) + failures
    report.notes += cache_ratios(report.rows)
    return report


def _check(options: Namespace) -> None:
    if options.steps < 2 * SETTLE:
        raise ConfigError(
            f"--steps must be at least {2 * SETTLE}, not {options.steps}: the first {SETTLE} do not count"
        )
    longest = max(options.prompt) + options.steps + 1
    if longest > min(options.cache):
        raise ConfigError(
            f"a prompt of {max(options.prompt)} tokens and {options.steps} steps need a cache of {longest}, "
            f"not {min(options.cache)}: raise --cache, or lower --prompt or --steps"
        )


@contextmanager
def engines(
    subject: Subject, cache: int, ops: Sequence[str], options: Namespace, params: SamplingParams, notes: list[str]
) -> Iterator[list[Minillm]]:
    """minillm with a cache of `cache` tokens, in all modes: eager, and with graphs where there is a GPU."""
    runtime = Runtime(subject, max(options.batch), cache, ops)
    on_gpu = subject.device.type == "cuda"
    clock = DeviceClock(options.steps) if on_gpu else None
    runners: dict[str, BenchRunner] = {}
    made_of: dict[str, str] = {}  # the operations of each mode
    for name in ops:
        prefix = "" if name == "plain" else f"{name} "
        runners[f"{prefix}eager"] = runtime.runner(None, name)
        made_of[f"{prefix}eager"] = made_of[f"{prefix}graph"] = name
        if on_gpu:
            runners[f"{prefix}graph"] = runtime.runner(CudaBackend(subject.device), name)
            notes.append(f"{prefix}graph, cache {cache}: {captured(runners[f'{prefix}graph'])}")
    for runner in runners.values():
        runner.clock = clock
    ours = [
        Minillm(mode, TimedEngine(runtime, runner, made_of[mode]), params, clock) for mode, runner in runners.items()
    ]
    try:
        yield ours
    finally:
        for runner in runners.values():
            runner.close()
        ours.clear()  # the caller still holds the list
        del runtime, runners, runner
        release(subject.device)


def captured(runner: BenchRunner) -> str:
    """What recording the graphs took."""
    made = runner.report
    return (
        f"{made.graphs} graphs for up to {max(made.batch_sizes)} rows, captured in {made.capture_seconds:.2f} s, "
        f"{made.pool_bytes / 2**20:.1f} MiB of pool"
    )


def compare(
    subject: Subject, contestants: Sequence[Contestant], batch: int, prompt: int, options: Namespace, ceiling: float
) -> tuple[list[Row], list[str]]:
    """Let everybody answer the same random prompts, `batch` of them; a row each, or a note why there is none."""
    draw = random.Random(0)
    prompts = [[draw.randrange(subject.config.vocab_size) for _ in range(prompt)] for _ in range(batch)]
    # step i, from 0, feeds the token at position prompt + i, which sees prompt + i + 1 tokens; i is from SETTLE on
    needed = needed_bytes(subject, batch, prompt + 1 + (SETTLE + options.steps - 1) / 2)
    where: Row = {"batch": batch, "prompt": prompt}
    entries = contest(contestants, prompts, options.steps, options.rounds)
    rows = [where | make_row(entry, needed, needed / ceiling * 1000) for entry in entries if entry.failed is None]
    failures = [f"batch {batch}, prompt {prompt}: {e.contestant.mode} failed: {e.failed}" for e in entries if e.failed]
    return rows, failures


def make_row(entry: Entry, needed: float, floor_ms: float) -> Row:
    step_ms = [ms for run in entry.runs for ms in run.step_ms]
    host_us = [us for run in entry.runs for us in run.host_us]
    p50, p99 = percentile(step_ms, 50), percentile(step_ms, 99)
    return {
        "mode": entry.contestant.mode,
        "cache": entry.contestant.cache,
        "first_token_ms": statistics.median(run.first_token_ms for run in entry.runs),
        "step_ms_p50": p50,
        "step_ms_p99": p99,
        "p99_over_p50": p99 / p50,
        "host_us": statistics.median(host_us) if host_us else None,
        "tokens_per_s": statistics.median(run.tokens_per_s for run in entry.runs),
        "tokens_per_s_of_rounds": [run.tokens_per_s for run in entry.runs],
        "bytes_per_step": round(needed),
        "share_of_ceiling": floor_ms / p50,
        "floor_ms": floor_ms,
        "warm_up_s": entry.warm_up_s,
        "step_ms": step_ms,
    }


def ratios(rows: Sequence[Row]) -> list[str]:
    """minillm's best mode beside all that answered the same prompts in turns, and what the graph alone brings."""
    ours = {row["mode"]: row for row in rows if row["mode"] in OURS}
    best = max(ours.values(), key=lambda row: OURS.index(row["mode"]))
    where = f"batch {best['batch']}, prompt {best['prompt']}, cache {best['cache']}"
    pairs = [(best, row) for row in rows if row is not best]
    if best["mode"] == "fused graph" and "graph" in ours:
        pairs.insert(0, (ours["graph"], ours["eager"]))
    notes = [
        f"{where}: {a['mode']} makes {a['tokens_per_s'] / b['tokens_per_s']:.2f} times the tokens/s of {b['mode']}"
        for a, b in pairs
    ]
    for row in rows:
        if row["mode"].endswith("compile"):
            notes.append(f"{where}: the first call of {row['mode']}, which compiles, took {row['warm_up_s']:.1f} s")
    return notes


def cache_ratios(rows: Sequence[Row]) -> list[str]:
    """What a longer cache costs minillm at the same positions, where it should cost nothing."""
    first: dict[tuple[object, ...], Row] = {}
    notes = []
    for row in rows:
        base = first.setdefault((row["mode"], row["batch"], row["prompt"]), row)
        if row["mode"] in OURS and base is not row:
            notes.append(
                f"{row['mode']}, batch {row['batch']}, prompt {row['prompt']}: a step with a cache of {row['cache']} "
                f"takes {row['step_ms_p50'] / base['step_ms_p50']:.3f} times that with {base['cache']}"
            )
    return notes

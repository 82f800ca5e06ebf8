"""`launches`: what it is worth to make many tokens in one launch.

One random prompt is answered again and again, by the engine that `LLM` has, once for each `steps_per_graph`: 1 replays
a recording for every token, k replays one of k steps, and "until_done" launches a loop that ends by itself. They take
turns, run for run. All make the same tokens, and a note says so or which do not.

The columns:

    steps       `steps_per_graph`
    launches    of an answer, without the prompt's
    ms/token    from the first token of an answer to its last, by the wall clock, median of the runs
    gap p99     ms from one token to the next, as the host gets them: those of one launch come together
    answer ms   from handing in the prompt to the last token
    cpu us      what the host's processor was busy for, a token: waiting for the device is work for it too
    MB/step     what a step must read (`needed_bytes`), at the mean position of the answer
    ceiling     the share of the read ceiling that this is, at the median time of a token
    floor ms    what a step must read, divided by the read ceiling
"""

import itertools
import random
import statistics
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..assembly import Options, build_engine
from ..bandwidth import measure_read_bandwidth
from ..engine import Engine
from ..errors import ConfigError, MinillmError
from ..loading import pick_kernels
from ..model import Llama
from ..request import Request
from ..sampling import SamplingParams
from .machine import describe
from .report import Bars, Column, Report, Row, fixed, percentile
from .runtime import Subject, chosen_ops, make_subject, needed_bytes, release, synchronize

COLUMNS = [
    Column("steps", "steps_per_graph"),
    Column("launches", "launches"),
    Column("ms/token", "ms_per_token_p50", fixed(4)),
    Column("gap p99", "gap_ms_p99", fixed(3)),
    Column("answer ms", "answer_ms_p50", fixed(2)),
    Column("cpu us", "cpu_us_per_token", fixed(1)),
    Column("tok/s", "tokens_per_s", fixed(1)),
    Column("MB/step", "bytes_per_step", lambda value: f"{value / 1e6:.1f}"),
    Column("ceiling", "share_of_ceiling", lambda value: f"{value:.1%}"),
    Column("floor ms", "floor_ms", fixed(4)),
]
BARS = Bars(("steps_per_graph",), "ms_per_token_p50", "ms a token", limit="floor_ms")
WARM_UP = 2


@dataclass(frozen=True)
class Run:
    """One answer: its tokens, and seconds: of the host's processor, and by the wall clock."""

    token_ids: list[int]
    cpu: float
    started: float
    stamps: list[float]  # when each token was there


@dataclass
class Contestant:
    """One `steps_per_graph`. launches: of one answer."""

    steps: int | str
    engine: Engine
    runs: list[Run] = field(default_factory=list)
    launches: int = 0

    def answer(self, prompt: list[int], tokens: int, params: SamplingParams) -> Run:
        """Make `tokens` tokens. Raises: MinillmError if the request failed."""
        engine, stamps, before = self.engine, list[float](), self.engine.runner.report.replays

        def note_time(*_: object) -> bool:
            stamps.append(time.perf_counter())
            return False

        request = Request(prompt, params, len(prompt) + tokens, [], 0, on_token=note_time)
        synchronize(engine.device)
        with engine.on_stream():
            busy, started = time.process_time(), time.perf_counter()
            engine.submit(request)
            while engine.busy:
                engine.step()
            busy = time.process_time() - busy
        if request.error is not None:
            raise request.error
        self.launches = engine.runner.report.replays - before
        return Run(request.token_ids, busy, started, stamps)


def launches(options: Namespace, arguments: Sequence[str]) -> Report:
    """Run the benchmark. Raises: MinillmError if it cannot be run as asked."""
    _check(options)
    params = SamplingParams(temperature=options.temperature)
    subject = make_subject(options, 1, options.cache)
    fused = chosen_ops(options.ops, subject)[-1] == "fused"
    model = Llama(
        subject.config, subject.weights, options.cache, pick_kernels(subject.config, subject.plan) if fused else None
    )
    ceiling = measure_read_bandwidth(subject.device)
    about = describe(subject.device, arguments) | {"model": str(subject), "ops": "fused" if fused else "plain"}
    report = Report("launches", about, ceiling, COLUMNS, BARS, rows=[], samples="ms_per_token")
    contestants = list[Contestant]()
    try:
        for steps in options.steps_per_graph:
            wanted = Options(1, "on", prefix_reuse=False, prefill_graphs=(), steps_per_graph=steps)
            contestants.append(Contestant(steps, build_engine(model, options.cache, wanted, progress=False)))
        compare(contestants, subject, options, params)
        report.rows = [make_row(c, subject, options, ceiling) for c in contestants]
        report.notes = notes(contestants, report.rows)
    finally:
        for contestant in contestants:
            contestant.engine.shut_down(MinillmError("the benchmark is over"))
        contestants.clear()
        release(subject.device)
    return report


def _check(options: Namespace) -> None:
    if options.tokens < 2:
        raise ConfigError(f"--tokens must be at least 2, not {options.tokens}: the first token is the prompt's")
    longest = options.prompt + options.tokens
    if longest > options.cache:
        raise ConfigError(
            f"a prompt of {options.prompt} tokens and an answer of {options.tokens} need a cache of {longest}, not "
            f"{options.cache}: raise --cache, or lower --prompt or --tokens"
        )


def compare(contestants: Sequence[Contestant], subject: Subject, options: Namespace, params: SamplingParams) -> None:
    """Let everybody answer the same random prompt in turns, A B C, A B C, ..."""
    draw = random.Random(0)
    prompt = [draw.randrange(subject.config.vocab_size) for _ in range(options.prompt)]
    for turn in range(WARM_UP + options.rounds):
        for contestant in contestants:
            run = contestant.answer(prompt, options.tokens, params)
            if turn >= WARM_UP:
                contestant.runs.append(run)


def make_row(contestant: Contestant, subject: Subject, options: Namespace, ceiling: float) -> Row:
    runs, steps = contestant.runs, options.tokens - 1  # the first token is the prompt's
    # step i, from 0, feeds the token at position prompt + i, which sees prompt + i + 1 tokens
    needed = needed_bytes(subject, 1, options.prompt + 1 + (steps - 1) / 2)
    ms = [1000 * (run.stamps[-1] - run.stamps[0]) / steps for run in runs]
    gaps = [1000 * (after - before) for run in runs for before, after in itertools.pairwise(run.stamps)]
    p50, floor_ms = percentile(ms, 50), needed / ceiling * 1000
    return {
        "steps_per_graph": str(contestant.steps),
        "launches": contestant.launches,
        "ms_per_token_p50": p50,
        "gap_ms_p99": percentile(gaps, 99),
        "answer_ms_p50": statistics.median(1000 * (run.stamps[-1] - run.started) for run in runs),
        "cpu_us_per_token": statistics.median(1e6 * run.cpu / options.tokens for run in runs),
        "tokens_per_s": 1000 / p50,
        "bytes_per_step": round(needed),
        "share_of_ceiling": floor_ms / p50,
        "floor_ms": floor_ms,
        "ms_per_token": ms,
    }


def notes(contestants: Sequence[Contestant], rows: Sequence[Row]) -> list[str]:
    """Each beside the first: its rate, its work for the host, and its tokens."""
    first, base = contestants[0], rows[0]
    told = [
        f"steps_per_graph {row['steps_per_graph']} makes {row['tokens_per_s'] / base['tokens_per_s']:.3f} times the "
        f"tokens/s of {base['steps_per_graph']}, with {row['cpu_us_per_token'] / base['cpu_us_per_token']:.2f} times "
        "the processor time"
        for row in rows[1:]
    ]
    tokens = first.runs[0].token_ids
    others = [str(c.steps) for c in contestants if any(run.token_ids != tokens for run in c.runs)]
    said = f"other tokens were made by {', '.join(others)}" if others else "all made the same tokens in every run"
    return [*told, said]

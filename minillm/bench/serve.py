"""`serve`: batches of mixed sizes, one after another, as a server sees them.

A *request* here is a batch: n rows, n drawn evenly from 1 to `--max-batch`, at one position drawn evenly below
`--prompt`, for which `--steps` decode steps are made. Its latency is the wall clock from putting its tokens and
positions into the decode state to having its last tokens on the host; the host is one step ahead in between. There is
one client that sends the next request when the last is done, so requests/s is their number divided by the sum of their
latencies. No prefill is in it: that is the same for all.

Every request is served by all three modes in turn: eager launches, graphs that share nothing (each with a memory pool
of its own), graphs with one pool. All three are made of the same operations (`--ops`): as `LLM` decodes, if not said.

    jitter      standard deviation of the latencies over their mean: most of it is that larger batches take longer
    at a size   the same after dividing each latency by the mean of the requests of its size
    MiB         memory that the graphs' pools hold; eagerly, what PyTorch keeps for the activations
"""

import itertools
import random
import statistics
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ..bandwidth import measure_read_bandwidth
from ..capture import CudaBackend
from ..errors import ConfigError, MinillmError
from ..graphs import kv_buckets
from ..sampling import Mode, SamplingParams
from ..state import BROKEN
from .machine import describe
from .report import Bars, Column, Report, Row, fixed, percentile
from .runtime import BenchRunner, Runtime, Subject, chosen_ops, make_subject, release

COLUMNS = [
    Column("mode", "mode"),
    Column("mean ms", "latency_ms_mean", fixed(2)),
    Column("p50 ms", "latency_ms_p50", fixed(2)),
    Column("p99 ms", "latency_ms_p99", fixed(2)),
    Column("jitter", "jitter", lambda value: f"{value:.1%}"),
    Column("at a size", "jitter_at_a_size", lambda value: f"{value:.1%}"),
    Column("requests/s", "requests_per_s", fixed(1)),
    Column("tok/s", "tokens_per_s", fixed(0)),
    Column("MiB", "reserved_bytes", lambda value: f"{value / 2**20:.1f}"),
    Column("capture s", "capture_s", fixed(2)),
]
BARS = Bars(("mode",), "latency_ms_mean", "ms a request", mark="latency_ms_p99")


@dataclass(frozen=True)
class BatchRequest:
    """rows: how many; position: where the first token that is fed stands, the same for all rows."""

    rows: int
    position: int


def draw_requests(count: int, max_rows: int, positions: int, seed: int) -> list[BatchRequest]:
    """The same requests for the same seed."""
    draw = random.Random(seed)
    return [BatchRequest(draw.randint(1, max_rows), draw.randrange(positions)) for _ in range(count)]


class Server:
    """One mode of serving, on a runtime that all modes share."""

    def __init__(self, runtime: Runtime, runner: BenchRunner, params: SamplingParams) -> None:
        self._runtime, self._runner, self._mode = runtime, runner, Mode.of(params)
        self.report, self.reserved_bytes = runner.report, runner.report.pool_bytes
        state = runtime.state
        self._host = torch.empty((2, *state.output.shape), dtype=state.output.dtype, pin_memory=state.output.is_cuda)
        self._tokens = torch.randint_like(state.tokens, state.stops.shape[1])

    def serve(self, request: BatchRequest, steps: int) -> float:
        """Seconds that the request took."""
        started = time.perf_counter()
        with self._runner.on_stream():
            self._place(request)
            copied: list[torch.cuda.Event] = []
            for step in range(steps):
                self._runner.step(request.rows, request.position + step + 1, self._mode)
                self._host[step % 2].copy_(self._runtime.state.output, non_blocking=True)
                copied.append(torch.cuda.Event())
                copied[step].record()
                if step:
                    self._read(copied[step - 1], step - 1, request.rows)
            self._read(copied[-1], steps - 1, request.rows)
        return time.perf_counter() - started

    def _place(self, request: BatchRequest) -> None:
        """Make the first rows of the state those of the request, and the others padding."""
        state = self._runtime.state
        state.tokens.copy_(self._tokens)
        state.positions.fill_(request.position)
        state.active.fill_(False)
        state.active[: request.rows].fill_(True)

    def _read(self, copied: torch.cuda.Event, step: int, rows: int) -> None:
        copied.synchronize()
        if any(finished == BROKEN for _, finished, _ in self._host[step % 2][:rows].tolist()):
            raise MinillmError("the model's logits are NaN or infinite: try --dtype float32")

    def warm_up(self, rows: int, kv_lengths: Sequence[int]) -> None:
        """Every batch size at every length bucket once: the first launch of a graph also uploads it."""
        for n, kv_len in itertools.product(range(1, rows + 1), kv_lengths):
            self.serve(BatchRequest(n, kv_len - 1), steps=1)


def serve(options: Namespace, arguments: Sequence[str]) -> Report:
    """Run the benchmark. Raises: MinillmError if it cannot be run as asked."""
    if options.prompt + options.steps > options.cache:
        raise ConfigError(
            f"positions below {options.prompt} and {options.steps} steps need a cache of "
            f"{options.prompt + options.steps}, not {options.cache}: raise --cache, or lower --prompt or --steps"
        )
    params = SamplingParams(temperature=options.temperature)
    subject = make_subject(options, options.max_batch, options.cache)
    ceiling = measure_read_bandwidth(subject.device)
    ops = chosen_ops(options.ops, subject)[-1]
    about = describe(subject.device, arguments) | {"model": str(subject), "ops": ops}
    requests = draw_requests(options.requests, options.max_batch, options.prompt, options.seed)
    latencies: dict[str, list[float]] = {}
    with servers(subject, options, ops, params) as modes:
        for server in modes.values():
            server.warm_up(options.max_batch, kv_buckets(options.cache))
        for request in requests:
            for mode, server in modes.items():
                latencies.setdefault(mode, []).append(server.serve(request, options.steps))
        rows = [make_row(mode, server, requests, latencies[mode], options.steps) for mode, server in modes.items()]
    eager = rows[0]
    notes = [
        f"{row['mode']}: {row['requests_per_s'] / eager['requests_per_s']:.2f} times the requests/s of {eager['mode']}"
        for row in rows[1:]
    ]
    return Report("serve", about, ceiling, COLUMNS, BARS, rows, samples="latency_ms", notes=notes)


@contextmanager
def servers(subject: Subject, options: Namespace, ops: str, params: SamplingParams) -> Iterator[dict[str, Server]]:
    """All three modes, on the same weights, cache and state."""
    device = subject.device
    runtime = Runtime(subject, options.max_batch, options.cache, [ops])
    runtime.state.limits.fill_(2**31)  # no row ends by itself
    runtime.state.temperature.fill_(params.temperature)
    backends = {
        "eager": None,
        "graphs, a pool each": CudaBackend(device, share_pool=False),
        "graphs, one pool": CudaBackend(device),
    }
    runners, modes = [], {}
    try:
        for mode, backend in backends.items():
            runners.append(runtime.runner(backend, ops))
            modes[mode] = Server(runtime, runners[-1], params)
            if backend is None:
                release(device)
                before = torch.cuda.memory_reserved(device)
                modes[mode].serve(BatchRequest(options.max_batch, options.prompt - 1), steps=1)
                modes[mode].reserved_bytes = torch.cuda.memory_reserved(device) - before
        release(device)  # waits for what was written to the state on this stream
        yield modes
    finally:
        modes.clear()
        for runner in runners:
            runner.close()


def make_row(
    mode: str, server: Server, requests: Sequence[BatchRequest], latencies: Sequence[float], steps: int
) -> Row:
    milliseconds = [1000 * latency for latency in latencies]
    mean = statistics.fmean(milliseconds)
    return {
        "mode": mode,
        "requests": len(requests),
        "latency_ms_mean": mean,
        "latency_ms_p50": percentile(milliseconds, 50),
        "latency_ms_p99": percentile(milliseconds, 99),
        "jitter": statistics.pstdev(milliseconds) / mean,
        "jitter_at_a_size": jitter_at_a_size([request.rows for request in requests], milliseconds),
        "requests_per_s": len(requests) / sum(latencies),
        "tokens_per_s": steps * sum(request.rows for request in requests) / sum(latencies),
        "reserved_bytes": server.reserved_bytes,
        "capture_s": server.report.capture_seconds if server.report.enabled else None,
        "latency_ms": milliseconds,
    }


def jitter_at_a_size(sizes: Sequence[int], latencies: Sequence[float]) -> float:
    """Standard deviation of latency / (mean latency of the requests of the same size)."""
    groups: dict[int, list[float]] = {}
    for size, latency in zip(sizes, latencies, strict=True):
        groups.setdefault(size, []).append(latency)
    means = {size: statistics.fmean(group) for size, group in groups.items()}
    return statistics.pstdev(latency / means[size] for size, latency in zip(sizes, latencies, strict=True))

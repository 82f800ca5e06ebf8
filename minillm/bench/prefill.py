"""`prefill`: the time from a prompt to the logits of its next token, and how far from its floor that is.

A prompt is matrix products that use every weight once a token, so a long one is bound by arithmetic, where a decode
step is bound by memory; and a short one is bound by the launches of its kernels. Random prompts go through
`Llama.prefill` into a cache, launched eagerly, with the operations taking turns:

    plain           plain PyTorch operations
    fused           as `LLM` prefills where it runs: cuBLAS, flash attention, and kernels for what is between
    fused graph     the same, padded to one of the lengths that `LLM` records, and replayed
    transformers    a forward pass that fills a cache, and makes the logits of the last token only

The columns:

    chunk       tokens that go through the model at once (`--chunk`)
    wall ms     from the call until the logits are there, median of the rounds
    gpu ms      between two CUDA events around the same, so without the way to the device and back
    host ms     until the call returns: near to `gpu ms`, the launches are what takes the time
    GFLOP       what a prefill must compute (`needed_flops`)
    ceiling     the share of the arithmetic ceiling that this is, at the median wall time. The ceiling is the best of
                a few products of large square matrices in the same dtype, in the same run
    floor ms    what a prefill must compute, divided by that ceiling
"""

import random
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from ..cache import KVCache
from ..capture import CudaBackend
from ..errors import MinillmError
from ..model import Llama
from ..prefill_graphs import LENGTHS, PrefillRunner, padded_length
from ..sampling import SamplingParams
from .machine import describe
from .peers import MODES, Transformers, chosen_peers
from .report import Bars, Column, Report, Row, fixed, percentile
from .runtime import Runtime, Subject, chosen_ops, make_subject, release, synchronize

COLUMNS = [
    Column("mode", "mode"),
    Column("prompt", "prompt"),
    Column("chunk", "chunk"),
    Column("wall ms", "wall_ms_p50", fixed(3)),
    Column("p99 ms", "wall_ms_p99", fixed(3)),
    Column("gpu ms", "device_ms_p50", fixed(3)),
    Column("host ms", "host_ms_p50", fixed(3)),
    Column("tok/s", "tokens_per_s", fixed(0)),
    Column("GFLOP", "flops", lambda value: f"{value / 1e9:.4g}"),
    Column("ceiling", "share_of_ceiling", lambda value: f"{value:.1%}"),
    Column("floor ms", "floor_ms", fixed(3)),
]
BARS = Bars(("mode", "prompt"), "wall_ms_p50", "ms a prefill", mark="wall_ms_p99", limit="floor_ms")
GPU_SIZE, OTHER_SIZE = 8192, 1024  # rows and columns of the matrices that measure the ceiling
WARM_UP = 3


@dataclass(frozen=True)
class Times:
    """Seconds of one call: until its result is there, until it returned, and on the device's clock if it has one."""

    wall: float
    host: float
    device: float | None


@dataclass
class Contestant:
    """One way to prefill. `failed`: why it takes part no longer."""

    mode: str
    chunk: int
    prefill: Callable[[Tensor], Tensor]  # ids int64 [T] -> logits of the last token [1, vocab]
    times: list[Times] = field(default_factory=list)
    failed: str | None = None


def prefill(options: Namespace, arguments: Sequence[str]) -> Report:
    """Run the benchmark. Raises: MinillmError if it cannot be run as asked."""
    longest = max(options.prompt)
    subject = make_subject(options, 1, longest)
    ops, peers = chosen_ops(options.ops, subject), chosen_peers(options.peers, subject.device)
    ceiling = measure_arithmetic(subject.device, subject.dtype)
    about = describe(subject.device, arguments) | {"model": str(subject)}
    report = Report("prefill", about, ceiling, COLUMNS, BARS, rows=[], samples="wall_ms", ceiling_unit="flops")
    runtime = Runtime(subject, 1, longest, ops)
    transformers = Transformers(subject, SamplingParams(temperature=0)) if peers else None
    for prompt in options.prompt:
        chunk = min(options.chunk or prompt, prompt)
        contestants = [
            Contestant(name, chunk, partial(in_chunks, model, runtime.cache, chunk))
            for name, model in runtime.models.items()
        ]
        contestants += padded(runtime, prompt)
        if transformers is not None:
            contestants.append(Contestant(MODES["eager"], prompt, transformers.prefill))
        rows, notes = compare(subject, contestants, prompt, options.rounds, ceiling)
        report.rows += rows
        report.notes += notes
    release(subject.device)
    return report


def padded(runtime: Runtime, prompt: int) -> list[Contestant]:
    """The fused prefill as a graph, if `LLM` would have one for a prompt of that length."""
    model, device = runtime.models.get("fused"), runtime.cache.kv.device
    length = padded_length(prompt, LENGTHS)
    if model is None or length is None or length > runtime.cache.max_seq_len:
        return []
    runner = PrefillRunner(model, runtime.cache, (length,), CudaBackend(device))
    runner.capture()
    numbers = draw_prompt(model.config.vocab_size, prompt)
    return [Contestant(f"fused graph of {length}", prompt, lambda _: runner.read(numbers, 0, 0))]


def draw_prompt(vocab_size: int, count: int) -> list[int]:
    """Random token ids, the same each time."""
    draw = random.Random(0)
    return [draw.randrange(vocab_size) for _ in range(count)]


def in_chunks(model: Llama, cache: KVCache, chunk: int, ids: Tensor) -> Tensor:
    """A whole prompt, as the engine cuts it. Returns the logits of its last token."""
    for start in range(0, ids.shape[0], chunk):
        logits = model.prefill(ids[start : start + chunk], 0, start, cache)
    return logits


def compare(
    subject: Subject, contestants: Sequence[Contestant], prompt: int, rounds: int, ceiling: float
) -> tuple[list[Row], list[str]]:
    """Let everybody prefill the same random prompt in turns, A B C, A B C, ...: a row each, and how they compare."""
    ids = torch.tensor(draw_prompt(subject.config.vocab_size, prompt), device=subject.device)
    for turn in range(WARM_UP + rounds):
        for contestant in contestants:
            if contestant.failed is None:
                take_turn(contestant, ids, counts=turn >= WARM_UP)
    flops = needed_flops(subject, prompt)
    there = [contestant for contestant in contestants if contestant.failed is None]
    rows = [make_row(contestant, prompt, flops, ceiling) for contestant in there]
    ours = [row for row in rows if row["mode"] != MODES["eager"]]
    best = ours[-1]
    notes = [
        f"prompt {prompt}: {best['mode']} reads {best['tokens_per_s'] / row['tokens_per_s']:.2f} times the tokens/s "
        f"of {row['mode']}"
        for row in rows
        if row is not best
    ]
    return rows, notes + [f"prompt {prompt}: {c.mode} failed: {c.failed}" for c in contestants if c.failed]


def take_turn(contestant: Contestant, ids: Tensor, counts: bool) -> None:
    try:
        times, logits = timed(lambda: contestant.prefill(ids), ids.device)
    except Exception as error:
        if contestant.mode != MODES["eager"]:
            raise
        contestant.failed = f"{type(error).__name__}: {error}".splitlines()[0]
        return
    if counts:
        contestant.times.append(times)
    elif not bool(logits.isfinite().all()):
        raise MinillmError(f"the logits of {contestant.mode} are NaN or infinite: try --dtype float32")


def timed(work: Callable[[], Tensor], device: torch.device) -> tuple[Times, Tensor]:
    """Run something and wait for its result."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else []
    for event in events:
        event.record()  # the driver makes an event when it is first recorded
    synchronize(device)
    started = time.perf_counter()
    if events:
        events[0].record()
    result = work()
    if events:
        events[1].record()
    returned = time.perf_counter()
    synchronize(device)
    ended = time.perf_counter()
    on_device = events[0].elapsed_time(events[1]) / 1000 if events else None
    return Times(ended - started, returned - started, on_device), result


def needed_flops(subject: Subject, prompt: int) -> float:
    """Multiplications and additions that a prefill cannot avoid.

    Two for each weight of a layer's matrices and token; in attention, for each token and each one that it sees, two
    for each number of its queries and as many for its output; and the logits of the last token.
    """
    config, weights = subject.config, subject.weights
    matrices = sum(t.numel() for w in weights.layers for t in vars(w).values() if t is not None and t.dim() == 2)
    seen = prompt * (prompt + 1) / 2
    attention = 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * seen
    return 2 * matrices * prompt + attention + 2 * weights.lm_head.numel()


def measure_arithmetic(device: torch.device, dtype: torch.dtype) -> float:
    """Multiplications and additions a second: the best of a few products of square matrices of random numbers."""
    size = GPU_SIZE if device.type == "cuda" else OTHER_SIZE
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    measured = [timed(lambda: a @ b, device)[0] for _ in range(10)]
    return 2 * size**3 / min(times.wall if times.device is None else times.device for times in measured)


def make_row(contestant: Contestant, prompt: int, flops: float, ceiling: float) -> Row:
    wall = [1000 * times.wall for times in contestant.times]
    on_device = [1000 * times.device for times in contestant.times if times.device is not None]
    p50, floor_ms = percentile(wall, 50), flops / ceiling * 1000
    return {
        "mode": contestant.mode,
        "prompt": prompt,
        "chunk": contestant.chunk,
        "wall_ms_p50": p50,
        "wall_ms_p99": percentile(wall, 99),
        "device_ms_p50": statistics.median(on_device) if on_device else None,
        "host_ms_p50": statistics.median(1000 * times.host for times in contestant.times) if on_device else None,
        "tokens_per_s": prompt / p50 * 1000,
        "flops": flops,
        "share_of_ceiling": floor_ms / p50,
        "floor_ms": floor_ms,
        "wall_ms": wall,
    }

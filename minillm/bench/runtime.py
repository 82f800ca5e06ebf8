"""What is measured: weights, a cache full of random values, and the product's own engine and graph runner, with clocks.

Nothing here computes a step of its own. `BenchRunner` and `TimedEngine` are the classes that `LLM` uses, and only look
at the time as they go. On a GPU there are two times of a step, and they must not be mixed:

- *device time*, between two CUDA events around the step: how long the GPU was at it. Launched eagerly, that includes
  the gaps in which it waited for the next launch.
- *host time*, what the CPU needs to enqueue the step, its copy of the tokens and its event, without waiting for
  anything. As long as it is below the device time, the GPU always has the next step before it ends the last. What it
  costs to record the two events around the step is not in it, for only the benchmark does that.
"""

import gc
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..cache import KVCache
from ..capture import Backend
from ..config import ModelConfig
from ..engine import Engine
from ..errors import ConfigError
from ..graphs import GraphRunner, Key, Step
from ..hub import resolve_model
from ..kernels.fused import FusedOps
from ..loading import Plan, load_model, make_plan, pick_device, pick_dtype, pick_kernels
from ..model import Llama
from ..pieces import Cuts
from ..sampling import Mode
from ..state import DecodeState
from ..step import step_of
from ..weights import Weights, allocate, randomise
from .shapes import SHAPES


@dataclass(frozen=True)
class Subject:
    """The model under test, on its device.

    Attributes:
        source: what transformers makes the same model from: a config for random weights, or a directory.
        ready_s: seconds to load or to make the weights.
    """

    name: str
    config: ModelConfig
    source: dict[str, Any] | Path
    weights: Weights
    plan: Plan
    ready_s: float

    @property
    def device(self) -> torch.device:
        return self.plan.device

    @property
    def dtype(self) -> torch.dtype:
        return self.plan.dtype

    def __str__(self) -> str:
        weights = "random weights" if isinstance(self.source, dict) else "its own weights"
        return (
            f"{self.name}, {weights}, {self.config.parameter_count / 1e6:,.1f} M parameters, "
            f"{str(self.dtype).removeprefix('torch.')}, ready in {self.ready_s:.1f} s"
        )


def make_subject(options: Namespace, rows: int, seq_len: int) -> Subject:
    """Load the model of the options, or make one of their shape.

    Args:
        rows, seq_len: the largest cache that will be put beside it, which must fit too.
    Raises: ConfigError, CheckpointError, MemoryLimitError.
    """
    device = pick_device(options.device)
    path = None if options.shape else resolve_model(options.model)
    config = ModelConfig.from_dir(path) if path else ModelConfig.from_dict(SHAPES[options.shape])
    dtype = pick_dtype(options.dtype, config, device)
    plan = make_plan(config, device, dtype, rows, seq_len)
    synchronize(device)
    started = time.perf_counter()
    if path is not None:
        weights = load_model(path, config, plan).weights
    else:
        weights = allocate(config, device, dtype)
        torch.manual_seed(0)
        randomise(weights)
    synchronize(device)
    ready_s = time.perf_counter() - started
    name, source = (path.name, path) if path else (options.shape, SHAPES[options.shape])
    return Subject(name, config, source, weights, plan, ready_s)


def chosen_ops(wanted: str, subject: Subject) -> list[str]:
    """Which operations a decode step can be made of here: "plain" PyTorch, "fused" kernels, or with "auto" both.

    Raises: ConfigError, with the reason, if "fused" is wanted and not possible.
    """
    reason = FusedOps.supports(subject.config, subject.device, subject.dtype)
    if wanted == "fused" and reason is not None:
        raise ConfigError(f"--ops fused cannot be measured: {reason}")
    if wanted == "auto":
        return ["plain"] if reason is not None else ["plain", "fused"]
    return [wanted]


def needed_bytes(subject: Subject, batch: int, positions: float) -> float:
    """Bytes that one step cannot avoid reading.

    They are all weights (of an untied embedding table only the rows looked up, which are nothing), and the keys and
    values of `positions` tokens of each row, the token being fed included.
    """
    return subject.weights.bytes_per_step + batch * positions * KVCache.bytes_per_token(subject.config, subject.dtype)


class Runtime:
    """A model with a cache of `rows` x `seq_len` tokens, as `LLM` has it, without a tokenizer.

    The cache starts full of random values: zeros would be read as fast, but multiplied with less power.

    Args:
        ops: the operations that decode steps will be made of, of "plain" and "fused".
    """

    def __init__(self, subject: Subject, rows: int, seq_len: int, ops: Sequence[str] = ("plain",)) -> None:
        plan = replace(subject.plan, max_batch_size=rows, max_seq_len=seq_len)
        kernels = {"plain": None, "fused": pick_kernels(subject.config, plan) if "fused" in ops else None}
        self.models = {name: Llama(subject.config, subject.weights, seq_len, kernels[name]) for name in ops}
        self.cache = KVCache(subject.config, rows, seq_len, subject.device, subject.dtype)
        self.cache.kv.normal_()
        self.state = DecodeState.allocate(rows, subject.config.vocab_size, subject.device)
        synchronize(subject.device)  # runners use streams of their own

    def step(self, ops: str, cuts: Cuts | None = None) -> Step:
        return step_of(self.models[ops], self.cache, cuts)

    def runner(
        self, backend: Backend | None, ops: str = "plain", largest_first: bool = True, cuts: Cuts | None = None
    ) -> "BenchRunner":
        """A runner that has captured everything, or runs eagerly if there is no backend.

        Args:
            cuts: those that the backend captures with.
        """
        fused = self.models[ops].fused
        kv_lengths = None if fused is None else fused.kv_lengths(self.cache.max_seq_len)  # as in `LLM`
        runner = BenchRunner(self.step(ops, cuts), self.state, self.cache, backend, kv_lengths=kv_lengths)
        runner.largest_first = largest_first
        runner.capture()
        return runner


class BenchRunner(GraphRunner):
    """The GraphRunner, which may also record in the reverse order and look at a clock around every step."""

    largest_first = True
    clock: "DeviceClock | None" = None

    def keys(self) -> list[Key]:
        return super().keys() if self.largest_first else super().keys()[::-1]

    def step(self, rows: int, kv_len: int, mode: Mode, live: int | None = None) -> None:
        if self.clock is None:
            return super().step(rows, kv_len, mode, live)
        start, end = self.clock.next()
        self.clock.record(start)
        super().step(rows, kv_len, mode, live)
        self.clock.record(end)

    def host_clock(self) -> float:
        """Seconds, on a clock of the host that stands still while an event of `clock` is recorded."""
        return time.perf_counter() - (0.0 if self.clock is None else self.clock.recording_s)


class DeviceClock:
    """Pairs of CUDA events for up to `steps` steps, made before anything is timed.

    Attributes:
        recording_s: seconds that the host has spent in `record` so far.
    """

    def __init__(self, steps: int) -> None:
        self._events = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(steps)
        ]
        self._used, self.recording_s = 0, 0.0
        for pair in self._events:
            for event in pair:
                event.record()  # the driver makes an event when it is first recorded

    def next(self) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        self._used += 1
        return self._events[self._used - 1]

    def record(self, event: torch.cuda.Event) -> None:
        started = time.perf_counter()
        event.record()
        self.recording_s += time.perf_counter() - started

    def read(self) -> list[float]:
        """Milliseconds of each step since the last reading. Waits for the device."""
        used, self._used = self._used, 0
        if used:
            self._events[used - 1][1].synchronize()
        return [start.elapsed_time(end) for start, end in self._events[:used]]


class TimedEngine(Engine):
    """The Engine, which also notes how long the host was busy with enqueueing each step.

    Attributes:
        host_us: microseconds of each step, without those in which the runner's clock recorded its two events.
    Args:
        ops: what it prefills with; the steps are the runner's.
    """

    def __init__(self, runtime: Runtime, runner: BenchRunner, ops: str = "plain") -> None:
        # all prompts are read before the first step, each round anew
        cache = runtime.cache
        chunk = cache.max_batch_size * cache.max_seq_len
        super().__init__(runtime.models[ops], cache, runtime.state, runner, prefill_chunk=chunk, prefix_reuse=False)
        self._host_clock = runner.host_clock
        self.host_us: list[float] = []

    def _decode(self) -> bool:
        started = self._host_clock()
        enqueued = super()._decode()
        if enqueued:
            self.host_us.append((self._host_clock() - started) * 1e6)
        return enqueued


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release(device: torch.device) -> None:
    """Give back to the device what nothing refers to any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()

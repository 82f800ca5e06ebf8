"""Prefill graphs: prompts are padded to a few lengths, each recorded once, for the same reason that decode steps are.

A short prompt costs a GPU less than a millisecond, and the CPU several to launch it. The length of a prompt cannot be a
tensor, so it is bucketed: a chunk runs in the smallest recording that it fills at least half, and else eagerly. What a
recording reads besides weights and cache is one tensor: row, position, number of real tokens, and the tokens. So one
copy to the device and one launch read a chunk, into any row, at any position.
"""

import ctypes
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from .cache import KVCache
from .capture import Backend, Recording, no_garbage_collection, record
from .errors import GraphError
from .graph_report import GraphReport
from .model import Llama
from .state import to_device

LENGTHS = (8, 16, 32, 64, 128, 256, 512)
"""What prompts are padded to, unless an LLM is told otherwise."""

PLACE = 3  # numbers in front of the tokens: row, position of the first token, how many tokens are real
DEPTH = 4  # prompts on their way to the device, before the host waits for the first


class Slot:
    """A buffer of int64 numbers in host memory, pinned on CUDA, that Python fills without a call of PyTorch.

    To a thread that has just woken up, such a call is tens of microseconds, and the device idles until the launch.
    """

    def __init__(self, size: int, on_gpu: bool) -> None:
        self.host = torch.zeros(size, dtype=torch.int64, pin_memory=on_gpu)
        self._memory = (ctypes.c_int64 * size).from_address(self.host.data_ptr())
        self._used = torch.cuda.Event() if on_gpu else None

    def fill(self, numbers: Sequence[int]) -> None:
        """Write these numbers to the front, as soon as the device has done what reads those that are there."""
        if self._used is not None and not self._used.query():
            self._used.synchronize()
        self._memory[: len(numbers)] = [*numbers]

    def launched(self) -> None:
        """To be called when what reads the numbers is on the current stream."""
        if self._used is not None:
            self._used.record()


def padded_length(count: int, lengths: Iterable[int]) -> int | None:
    """The smallest of the lengths that holds `count` tokens, unless that is more than twice as many."""
    return min((length for length in lengths if count <= length <= 2 * count), default=None)


class PrefillRunner:
    """Reads chunks of prompts: replays where a recording fits, eagerly where none does.

    Args:
        lengths: what chunks are padded to; what is longer than the cache is left out.
        backend: None runs everything eagerly.
    Attributes:
        report: where it is counted what ran how.
    """

    def __init__(
        self, model: Llama, cache: KVCache, lengths: Sequence[int] = (), backend: Backend | None = None
    ) -> None:
        self._model, self._cache, self._backend = model, cache, backend
        self._lengths = sorted({length for length in lengths if length <= cache.max_seq_len})
        self.report = GraphReport(enabled=False)
        self._recordings: dict[int, Recording] = {}
        device, longest = cache.kv.device, max(self._lengths, default=0)
        # with no real token in it, which is what a warm-up reads: it writes to a scratch slot only
        self._inputs = torch.zeros(PLACE + longest, dtype=torch.int64, device=device)
        self._slots = deque(Slot(PLACE + longest, device.type == "cuda") for _ in range(DEPTH if self._lengths else 0))
        self._logits = torch.zeros(1, model.config.vocab_size, device=device)  # float32

    def capture(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Record every length, the largest first. All or nothing: a failure raises `GraphError`.

        Args:
            progress: called with (recorded so far, how many in all).
        """
        backend = self._backend
        if backend is None:
            return
        started = time.perf_counter()
        with no_garbage_collection():
            for index, length in enumerate(reversed(self._lengths)):
                step, what = partial(self._run, length), f"the prefill of {length} tokens"
                try:
                    self._recordings[length] = record(backend, step, self.report, what, "Lower prefill_graphs")
                except GraphError:
                    self._recordings.clear()
                    raise
                if progress is not None:
                    progress(index + 1, len(self._lengths))
        self.report.prefill_lengths = self._lengths
        self.report.capture_seconds += time.perf_counter() - started

    def _run(self, length: int) -> None:
        """What is recorded of a length."""
        token_ids, place = self._inputs[PLACE : PLACE + length], self._inputs[:PLACE]
        self._logits.copy_(self._model.prefill_padded(token_ids, place, self._cache))

    def beside(self, model: Llama, cache: KVCache) -> "PrefillRunner":
        """The same for another model and cache of these shapes, recorded if this one is. Raises: GraphError."""
        other = PrefillRunner(model, cache, self._lengths, self._backend)
        other.report = self.report
        if self._recordings:
            other.capture()
        return other

    def find(self, count: int) -> int | None:
        """The smallest recorded length that holds `count` tokens, unless that is more than twice as many."""
        return padded_length(count, self._recordings)

    def read(self, token_ids: Sequence[int], row: int, start: int, all_logits: bool = False) -> Tensor:
        """See `Llama.prefill`; it runs on the current stream.

        Returns: logits that the next call may write over.
        """
        length = None if all_logits else self.find(len(token_ids))
        if length is None:
            self.report.eager_prefills += 1
            ids = to_device(token_ids, self._inputs.device)
            return self._model.prefill(ids, row, start, self._cache, all_logits)
        self.report.prefill_replays += 1
        slot = self._slots[0]
        self._slots.rotate(-1)
        slot.fill([row, start, len(token_ids), *token_ids])
        self._inputs.copy_(slot.host, non_blocking=True)
        self._recordings[length].replay()
        slot.launched()
        return self._logits

    def close(self) -> None:
        """Drop the recordings, before the memory that they point at."""
        self._recordings.clear()
        self._backend = None

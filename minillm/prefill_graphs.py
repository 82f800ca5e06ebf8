"""Prefill graphs: prompts are padded to a few lengths, each recorded once, for the same reason that decode steps are.

A short prompt costs a GPU less than a millisecond, and the CPU several to launch it. The length of a prompt cannot be a
tensor, so it is bucketed: a chunk runs in the smallest recording that it fills at least half, and else eagerly. What a
recording reads besides weights and cache is one tensor: row, position, number of real tokens, and the tokens. So one
copy to the device and one launch read a chunk, into any row, at any position.
"""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .cache import KVCache
from .capture import Backend, Recording, failure, no_garbage_collection
from .errors import GraphError
from .graph_report import GraphReport
from .model import Llama

LENGTHS = (8, 16, 32, 64, 128, 256, 512)
"""What prompts are padded to, unless an LLM is told otherwise."""

PLACE = 3  # numbers in front of the tokens: row, position of the first token, how many tokens are real


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
                try:
                    self._recordings[length] = self._record(backend, length)
                except Exception as error:
                    self._recordings.clear()
                    what = f"the prefill of {length} tokens"
                    raise GraphError(failure(what, backend, error, "Lower prefill_graphs")) from error
                if progress is not None:
                    progress(index + 1, len(self._lengths))
        self.report.prefill_lengths = self._lengths
        self.report.capture_seconds += time.perf_counter() - started

    def _record(self, backend: Backend, length: int) -> Recording:
        token_ids, place = self._inputs[PLACE : PLACE + length], self._inputs[:PLACE]

        def step() -> None:
            self._logits.copy_(self._model.prefill_padded(token_ids, place, self._cache))

        backend.warm_up(step)
        before = backend.reserved_bytes()
        recording = backend.capture(step)
        self.report.pool_bytes += backend.reserved_bytes() - before
        return recording

    def beside(self, model: Llama, cache: KVCache) -> "PrefillRunner":
        """The same for another model and cache of these shapes, recorded if this one is. Raises: GraphError."""
        other = PrefillRunner(model, cache, self._lengths, self._backend)
        other.report = self.report
        if self._recordings:
            other.capture()
        return other

    def find(self, count: int) -> int | None:
        """The smallest recorded length that holds `count` tokens, unless that is more than twice as many."""
        length = self.smallest(count)
        return length if length in self._recordings else None

    def smallest(self, count: int) -> int | None:
        """`find` among all lengths, recorded or not."""
        return next((length for length in self._lengths if count <= length <= 2 * count), None)

    def read(self, token_ids: Sequence[int], row: int, start: int, all_logits: bool = False) -> Tensor:
        """See `Llama.prefill`; it runs on the current stream.

        Returns: logits that the next call may write over.
        """
        length = None if all_logits else self.find(len(token_ids))
        if length is None:
            self.report.eager_prefills += 1
            return self._model.prefill(self._to_device(token_ids), row, start, self._cache, all_logits)
        self.report.prefill_replays += 1
        self._inputs[: PLACE + len(token_ids)].copy_(self._to_device([row, start, len(token_ids), *token_ids]))
        self._recordings[length].replay()
        return self._logits

    def _to_device(self, numbers: Sequence[int]) -> Tensor:
        tensor, device = torch.tensor(numbers, dtype=torch.int64), self._inputs.device
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)

    def close(self) -> None:
        """Drop the recordings, before the memory that they point at."""
        self._recordings.clear()
        self._backend = None

"""Pending: where the engine's thread leaves the tokens of one request, and where others pick them up as text.

The engine's thread has a device to keep busy, so it does as little as it can: it puts the token down and wakes those
who have said that they wait for the next one. Tokens become text in the thread that wants the text. Only a request
with stop strings is different: whether it ends here is for the engine to know.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress

from .answer import Answer, Chunk, Completion, Stats
from .request import Request


class Watcher:
    """Wakes one consumer, at most once for each time that it is armed.

    A consumer arms it, then looks for news, then sleeps; so news that come after the look always wake it.
    """

    def __init__(self, wake: Callable[[], object]) -> None:
        self._wake = wake
        self.armed = False

    def notify(self) -> None:
        if self.armed:
            self.armed = False
            self._wake()


class Pending:
    """A request under way, its text so far, when things happened to it, and who waits for it.

    Attributes:
        future: ends when the request does, with None, its error, or cancelled. submitted: time of the submission.
    """

    def __init__(self, request: Request, answer: Answer) -> None:
        self.request = request
        self.future: Future[None] = Future()
        self.submitted = self._first_token = self._last_token = self._ended = 0.0
        self._answer = answer
        self._fresh: deque[tuple[int, float, str | None]] = deque()  # tokens that are not in the answer yet
        self._reading = threading.Lock()  # held by whoever turns fresh tokens into text
        self._watchers: list[Watcher] = []
        self._stopped = False  # whether a stop string is complete, whoever has found it
        self._completion: Completion | None = None
        request.on_token, request.on_done = self._on_token, self._on_done

    # ------------------------------------------------------------------ called by the engine's thread

    def _on_token(self, token_id: int, logprob: float, finish_reason: str | None) -> bool:
        self._last_token = time.perf_counter()
        self._first_token = self._first_token or self._last_token
        self._fresh.append((token_id, logprob, finish_reason))
        if self.request.params.stop:
            with self._reading:
                self._read()
        self._notify()
        return self._stopped

    def _on_done(self) -> None:
        self._ended = time.perf_counter()
        with suppress(InvalidStateError):  # it was cancelled at this very moment
            if self.request.cancelled:
                self.future.cancel()
            elif self.request.error is not None:
                self.future.set_exception(self.request.error)
            else:
                self.future.set_result(None)
        self._notify()

    def _notify(self) -> None:
        for watcher in tuple(self._watchers):
            watcher.notify()

    # ------------------------------------------------------------------ called by any thread

    @contextmanager
    def watched(self, wake: Callable[[], object]) -> Iterator[Watcher]:
        """A watcher whose `wake` the engine's thread calls at the next token, or at the end."""
        watcher = Watcher(wake)
        self._watchers.append(watcher)
        try:
            yield watcher
        finally:
            self._watchers.remove(watcher)

    def chunk(self, index: int) -> Chunk | None:
        """A piece of the answer, or None if it is not there yet."""
        with self._reading:
            self._read()
            return self._answer.chunks[index] if index < len(self._answer.chunks) else None

    def completion(self) -> Completion:
        """The whole answer, once it has ended by itself."""
        with self._reading:
            if self._completion is None:
                self._read()
                request, chunks = self.request, self._answer.chunks
                logprobs = [x for chunk in chunks for x in chunk.logprobs or []] if request.params.logprobs else None
                text, reason = "".join(chunk.text for chunk in chunks), request.finish_reason or "length"
                ids = request.token_ids
                self._completion = Completion(
                    text, ids, request.prompt_token_ids, reason, logprobs, self._stats(len(ids))
                )
            return self._completion

    def _read(self) -> None:
        """Turn fresh tokens into text."""
        while self._fresh:
            self._stopped = self._answer.add(*self._fresh.popleft()) or self._stopped

    def _stats(self, made: int) -> Stats:
        decoding = self._last_token - self._first_token
        return Stats(
            prompt_tokens=len(self.request.prompt_token_ids),
            completion_tokens=made,
            time_to_first_token=max(self._first_token - self.submitted, 0.0),
            total_time=self._ended - self.submitted,
            tokens_per_second=(made - 1) / decoding if decoding > 0 else 0.0,
            cached_tokens=self.request.cached,
        )

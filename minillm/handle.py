"""Handle: what `submit` gives back. A request that is under way, to wait for, to read as it grows, or to cancel."""

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator

from .answer import Chunk, Completion
from .pending import Pending
from .service import Service


class Handle:
    """One request that was submitted, much like a `concurrent.futures.Future` of its Completion.

    It may be used by several threads, and read (`for chunk in handle`, `async for chunk in handle`) more than once:
    every reader gets all of the chunks. To stop reading does not cancel the request; `cancel` does.
    """

    def __init__(self, pending: Pending, service: Service, owner: object) -> None:
        self._pending, self._service = pending, service
        self._owner = owner  # an LLM lives as long as somebody holds a handle of it

    def submit(self, wait: bool = False) -> None:
        """Put it into the queue, once. `wait` waits for room there. Raises: QueueFullError, MinillmError if closed."""
        self._pending.submitted = time.perf_counter()
        self._service.submit(self._pending.request, wait)

    async def asubmit(self) -> None:
        """Put it into the queue, as soon as there is room."""
        self._pending.submitted = time.perf_counter()
        room = asyncio.Event()
        on_room = self._service.bells.setter(room)
        while not self._service.try_submit(self._pending.request, on_room):
            await room.wait()
            room.clear()
            self._pending.submitted = time.perf_counter()

    def done(self) -> bool:
        """Whether it has ended: with an answer, with an error, or cancelled."""
        return self._pending.future.done()

    def cancelled(self) -> bool:
        return self._pending.future.cancelled()

    def cancel(self) -> bool:
        """End the request and free its row soon; returns False if it had ended before."""
        if not self._pending.future.cancel():
            return False
        self._service.cancel(self._pending.request)
        return True

    def result(self, timeout: float | None = None) -> Completion:
        """Wait for the whole answer.

        Args:
            timeout: seconds; None waits as long as it takes.
        Raises: the error of the request; TimeoutError; concurrent.futures.CancelledError.
        """
        self._wait(timeout)
        self._pending.future.result()
        return self._pending.completion()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end, and give the error of the request, None if there is none.

        Raises: TimeoutError; concurrent.futures.CancelledError.
        """
        self._wait(timeout)
        return self._pending.future.exception()

    def add_done_callback(self, fn: Callable[["Handle"], object]) -> None:
        """Call fn(handle) at the end, at once if that has been. It runs in the thread that makes the tokens: be brief.

        What it raises is logged. It may submit, but must not wait for a request.
        """
        self._pending.future.add_done_callback(lambda _: fn(self))

    def __iter__(self) -> Generator[Chunk, None, None]:
        """The pieces of the answer, each as soon as it is there."""
        news, sent = threading.Event(), 0
        with self._pending.watched(news.set) as watcher:
            while True:
                news.clear()
                watcher.armed = True
                ended, chunk = self.done(), self._pending.chunk(sent)
                if chunk is not None:
                    sent += 1
                    yield chunk
                elif not ended:
                    self._service.refuse_own_thread()
                    news.wait()
                else:
                    break
        yield from self._last(sent)

    async def __aiter__(self) -> AsyncGenerator[Chunk, None]:
        """The same for asyncio: the loop is free while there is nothing new."""
        news, sent = asyncio.Event(), 0
        with self._pending.watched(self._service.bells.setter(news)) as watcher:
            while True:
                news.clear()
                watcher.armed = True
                ended, chunk = self.done(), self._pending.chunk(sent)
                if chunk is not None:
                    sent += 1
                    yield chunk
                elif not ended:
                    await news.wait()
                else:
                    break
        for chunk in self._last(sent):
            yield chunk

    async def completion(self) -> Completion:
        """`result` for asyncio. Cancelling the task that awaits it cancels the request."""
        try:
            await asyncio.wrap_future(self._pending.future)
        except asyncio.CancelledError:
            self.cancel()
            raise
        return self._pending.completion()

    def _wait(self, timeout: float | None) -> None:
        if not self.done():
            self._service.refuse_own_thread()
            # `wait` and not `result`, whose TimeoutError is a class of its own in Python 3.10
            if not concurrent.futures.wait([self._pending.future], timeout).done:
                raise TimeoutError(f"the request was not done within {timeout:g} s")

    def _last(self, sent: int) -> list[Chunk]:
        """What ends a stream of `sent` chunks. Raises: the error of the request."""
        self._pending.future.result()
        # a prompt that fills the context: an answer of no tokens still says why it ended
        return [Chunk("", [], self._pending.request.finish_reason)] if sent == 0 else []

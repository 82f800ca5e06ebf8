"""Handle: what `submit` gives back. A request that is under way, to wait for, to read as it grows, or to cancel."""

import asyncio
import concurrent.futures
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import closing
from numbers import Real
from typing import Any

from .answer import Chunk, Completion
from .errors import RequestError
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
        """End the request and free its row soon. Returns False if it had come to an end of its own before."""
        try:
            return self._pending.future.cancel()
        finally:  # a callback that runs here may raise: an interrupt
            if self.cancelled():
                self._service.cancel(self._pending.request)

    def result(self, timeout: float | None = None) -> Completion:
        """Wait for the whole answer.

        Args:
            timeout: seconds; None waits as long as it takes.
        Raises: the error of the request; TimeoutError; concurrent.futures.CancelledError; RequestError for a timeout
            that is no number.
        """
        if self.exception(timeout) is not None:
            self._pending.future.result()
        return self._pending.completion()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end, and give the error of the request, None if there is none.

        Raises: TimeoutError; concurrent.futures.CancelledError; RequestError for a timeout that is no number.
        """
        seconds = _seconds(timeout)
        if not self.done():
            self._service.refuse_vain_wait()
        try:  # and not `concurrent.futures.wait`, which sleeps on when another thread cancels
            return self._pending.future.exception(seconds)
        except concurrent.futures.TimeoutError:  # a class of its own in Python 3.10
            raise TimeoutError(f"the request was not done within {seconds:g} s") from None

    def add_done_callback(self, fn: Callable[["Handle"], object]) -> None:
        """Call fn(handle) at the end, at once if that has been. Be brief: it runs in the thread that makes the tokens,
        or in the one that cancels.

        What it raises is logged. It may submit, but must not wait for a request.
        """
        self._pending.future.add_done_callback(lambda _: self._call(fn))

    def __iter__(self) -> Generator[Chunk, None, None]:
        """The pieces of the answer, each as soon as it is there."""
        news = threading.Event()
        with closing(self._pieces(news, news.set)) as pieces:
            for chunk in pieces:
                if chunk is None:
                    news.wait()
                else:
                    yield chunk

    async def __aiter__(self) -> AsyncGenerator[Chunk, None]:
        """The same for asyncio: the loop is free while there is nothing new."""
        news = asyncio.Event()
        with closing(self._pieces(news, self._service.bells.setter(news))) as pieces:
            for chunk in pieces:
                if chunk is None:
                    await news.wait()
                else:
                    yield chunk

    async def completion(self) -> Completion:
        """`result` for asyncio. Cancelling the task that awaits it cancels the request."""
        try:
            await asyncio.wrap_future(self._pending.future)
        except asyncio.CancelledError:
            self.cancel()
            raise
        return self._pending.completion()

    def __await__(self) -> Generator[Any, None, Completion]:
        """`await handle` is `await handle.completion()`."""
        return self.completion().__await__()

    def _pieces(
        self, news: threading.Event | asyncio.Event, wake: Callable[[], object]
    ) -> Generator[Chunk | None, None, None]:
        """The pieces, and None wherever the reader has to wait for `news`, which `wake` sets. Raises its error."""
        sent = 0
        with self._pending.watched(wake) as watcher:
            while True:
                news.clear()
                watcher.armed = True
                ended, chunk = self.done(), self._pending.chunk(sent)
                if chunk is not None:
                    sent += 1
                elif ended:
                    break
                else:
                    self._service.refuse_vain_wait()
                yield chunk
        self._pending.future.result()
        if sent == 0:  # a prompt that fills the context: an answer of no tokens still says why it ended
            yield Chunk("", [], self._pending.request.finish_reason)

    def _call(self, fn: Callable[["Handle"], object]) -> None:
        """Call a callback. The future would log an Exception, and pass on anything else to the thread's other work."""
        try:
            fn(self)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                raise  # Ctrl-C, which is not of the callback
            logging.getLogger(__name__).exception("a callback of a request failed")


def _seconds(timeout: float | None) -> float | None:
    """A timeout that threads can wait for; None is for ever. Raises: RequestError."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, Real) or timeout != timeout:
        raise RequestError(f"timeout must be a number of seconds or None, not {timeout!r}")
    return float(min(max(timeout, 0), threading.TIMEOUT_MAX))

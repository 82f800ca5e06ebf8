"""Service: the one thread that owns the device, and the only door to it.

Other threads put requests and cancellations into an inbox; the thread takes them out between two steps of the engine.
It starts with the first request and ends with `close`, or with the interpreter. It holds the engine and never the LLM,
so an LLM that nobody holds any more is collected, which ends the thread too.

The lock is one that its holder may take again: the garbage collector can run anywhere, also while the lock is held,
and close a forgotten stream, which cancels its request.
"""

import atexit
import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from .bell import Bells
from .cpu_threads import use_few_threads
from .engine import Engine
from .errors import MinillmError, QueueFullError
from .request import Request

CLOSED = "this LLM was closed"


class Service:
    """Runs an engine in a thread.

    Args:
        max_waiting: how many requests may wait for a row, beside those that have one.
    """

    def __init__(self, engine: Engine, max_waiting: int) -> None:
        self._engine: Engine | None = engine
        self._rows, self._max_waiting = engine.cache.max_batch_size, max_waiting
        lock = threading.RLock()
        self._work, self._room = threading.Condition(lock), threading.Condition(lock)
        self._new: deque[Request] = deque()
        self._cancelled: deque[Request] = deque()
        self._feeders = 0  # threads that wait for room
        self._on_room: list[Callable[[], object]] = []
        self.bells = Bells()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._pid = 0  # of the process in which the thread was started
        # here and not when the thread starts: a thread of the app could have it start after the exit has begun
        atexit.register(self.close)

    @property
    def engine(self) -> Engine:
        """The engine. Raises: MinillmError if it was closed."""
        engine = self._engine
        if engine is None or self._closing:
            raise MinillmError(f"{CLOSED}: make a new one")
        return engine

    # ------------------------------------------------------------------ called by any thread

    def submit(self, request: Request, wait: bool = False) -> None:
        """Queue a request.

        Args:
            wait: until there is room for it, instead of refusing it. Those who wait fill half of the queue only, so
                that a long list does not get everybody else refused.
        Raises: QueueFullError, MinillmError if it was closed, or in a process that was forked from this one.
        """
        self._refuse_fork()
        with self._work:
            while not self._has_room(self.engine, wait):
                if not wait:
                    raise QueueFullError(
                        f"{self._max_waiting} requests wait already, for {self._rows} rows: try again later, "
                        "or raise max_waiting or max_batch_size"
                    )
                self.refuse_vain_wait()
                self._feeders += 1
                try:
                    self._room.wait()
                finally:
                    self._feeders -= 1
            if self._thread is None:
                self._start()
            self._new.append(request)
            self._work.notify()

    def cancel(self, request: Request) -> None:
        """Have a request forgotten, soon."""
        if self._forked():
            return
        with self._work:
            if not self._closing:
                self._cancelled.append(request)
                self._work.notify()

    def try_submit(self, request: Request, on_room: Callable[[], object]) -> bool:
        """`submit` with `wait` for those who must not wait: False if there is no room now.

        Then `on_room` is called once, from some thread, when it is worth another try.
        """
        self._refuse_fork()
        with self._work:
            if not self._has_room(self.engine, waits=True):
                self._on_room.append(on_room)
                return False
            self.submit(request)
            return True

    def refuse_vain_wait(self) -> None:
        """Raise MinillmError where waiting for the engine would be for ever: in its own thread, and in a fork."""
        self._refuse_fork()
        if threading.current_thread() is self._thread:
            raise MinillmError(
                "a callback of a request waits for a request: it runs in the thread that makes the tokens, so let it "
                "use submit, or another thread"
            )

    def stop(self) -> None:
        """Have the thread end by itself. Never waits, so the garbage collector may call it."""
        if self._forked():
            return
        with self._work:
            if self._closing:
                return
            self._closing = True
            self._work.notify()
            self._room.notify_all()
            if self._thread is None:
                self._shut_down()

    def close(self) -> None:
        """End every open request with an error, give the memory back, and wait until that is done."""
        self.stop()
        if not self._forked() and self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _forked(self) -> bool:
        """Whether this is a child of the process that has the thread. Its locks may be held here for ever."""
        return self._thread is not None and self._pid != os.getpid()

    def _refuse_fork(self) -> None:
        if self._forked():
            raise MinillmError(
                "this process was forked after the LLM's thread had started, and has no such thread: make the LLM in "
                "the child"
            )

    def _has_room(self, engine: Engine, waits: bool) -> bool:
        limit = (self._max_waiting + 1) // 2 if waits else self._max_waiting
        return len(self._new) + engine.open < self._rows + limit

    # ------------------------------------------------------------------ the thread

    def _start(self) -> None:
        # a daemon, because the interpreter waits for other threads before it tells anyone that it ends
        thread = threading.Thread(target=self._run, args=(self._engine,), name="minillm-engine", daemon=True)
        thread.start()
        self._thread, self._pid = thread, os.getpid()

    def _run(self, engine: Engine) -> None:
        try:
            if engine.device.type == "cpu":
                use_few_threads(engine.model.weights.bytes_per_step)
            with engine.on_stream():
                while self._take(engine):
                    with suppress(BaseException):  # the engine has told the requests; the thread goes on for the next
                        engine.step()
                    self._tell_of_room(engine)
        finally:  # whatever ends it: those who wait must learn that nobody works for them any more
            self.stop()
            self._shut_down()

    def _take(self, engine: Engine) -> bool:
        """Hand the inbox to the engine; sleep while there is nothing to do. Returns False if it is time to end."""
        with self._work:
            while not (self._new or self._cancelled or self._closing or engine.busy):
                self._work.wait()
            while self._new:
                engine.submit(self._new.popleft())
            cancelled = list(self._cancelled)
            self._cancelled.clear()
        for request in cancelled:
            engine.cancel(request)
        return not self._closing

    def _tell_of_room(self, engine: Engine) -> None:
        # under the lock: one who has looked for room, and not yet said that he waits, holds it
        with self._work:
            wanted = (self._feeders or self._on_room) and self._has_room(engine, waits=True)
        if wanted:
            self._wake_feeders()

    def _wake_feeders(self) -> None:
        with self._work:
            self._room.notify_all()
            callbacks, self._on_room = self._on_room, []
        for callback in callbacks:
            callback()

    def _shut_down(self) -> None:
        """The end of the engine, after which nothing refers to it any more."""
        engine, self._engine = self._engine, None
        if engine is None:
            return
        atexit.unregister(self.close)
        while self._new:
            engine.submit(self._new.popleft())
        try:
            engine.shut_down(MinillmError(CLOSED))
        finally:
            self._wake_feeders()

"""Bells: how the engine's thread wakes the tasks of an asyncio loop, at one call into the loop for all of them.

A step may bring news for many tasks of one loop, and every call into a loop from another thread is a system call. So
the events to set are collected, and the loop is called only if it does not know yet that there are some.
"""

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress


class Bells:
    """A bell for each loop that waits for something."""

    def __init__(self) -> None:
        self._bells: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Bell] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def setter(self, event: asyncio.Event) -> Callable[[], None]:
        """What sets an event of the running loop soon, called from any thread. A loop that was closed is let be."""
        loop = asyncio.get_running_loop()
        with self._lock:
            bell = self._bells.get(loop)
            if bell is None:
                bell = self._bells[loop] = _Bell(loop)
        return lambda: bell.announce(event)


class _Bell:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._events: deque[asyncio.Event] = deque()
        self._rung = False

    def announce(self, event: asyncio.Event) -> None:
        self._events.append(event)
        loop = self._loop()
        if not self._rung and loop is not None:
            self._rung = True
            with suppress(RuntimeError):  # it was closed while somebody waited in it
                loop.call_soon_threadsafe(self._answer)

    def _answer(self) -> None:
        self._rung = False  # before the events are taken, so that one that comes now rings again
        while self._events:
            self._events.popleft().set()

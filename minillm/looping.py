"""Looping: one launch writes whole answers, `steps_per_graph="until_done"`.

The engine's host side, otherwise one step ahead of the device, is behind it here: it launches a loop (`while_node.py`),
and looks again and again which steps are done. What it cannot do meanwhile is to read a prompt, for that would wait
behind the loop; so whoever comes and could have a row has the loop halted, which costs no more than the step that it is
at. The same for a request that ends by the host's decision. Then prompts are read and rows given back as ever, and the
next loop goes on where the last one stopped.
"""

import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from .cache import KVCache
from .capture import Loop
from .decoding import Decoding
from .engine import Engine
from .errors import GraphError
from .graphs import GraphRunner, Key
from .readback import Tape
from .request import Request

DEPTH = 4096
"""Steps of one launch, at most: the tape of so many fits in little pinned memory. Longer answers take another."""
POLL = 50e-6
"""Seconds between two looks, of which a step of a small model takes several."""


class Loops:
    """A loop for each recording of a runner, of which one at most is running. Raises: GraphError."""

    def __init__(self, runner: GraphRunner, cache: KVCache, depth: int = DEPTH) -> None:
        self.tape = Tape(cache.max_batch_size, min(depth, cache.max_seq_len), pinned=cache.kv.is_cuda)
        self._runner, self._running = runner, None  # type: tuple[GraphRunner, Loop | None]
        self._loops: dict[Key, Loop] = {}
        keys, started = runner.keys(), time.perf_counter()
        try:
            for key in keys:
                self._loops[key] = runner.make_loop(key, self.tape)
        except BaseException:
            self.close()
            raise
        runner.report.capture_seconds += time.perf_counter() - started

    @property
    def running(self) -> bool:
        """Whether there is a loop whose end was not seen yet."""
        return self._running is not None

    def launch(self, decoding: Decoding, once: bool) -> None:
        """Enqueue the loop that these rows need up to their limits; with `once`, no more than one step of it."""
        key = self._runner.find(decoding.highest + 1, decoding.end, decoding.mode)
        assert key is not None, "there are loops only where everything was recorded"
        self._runner.report.replays += 1
        self._runner.report.padded_rows += key[0] - len(decoding.rows)
        self.tape.rewind(halt=once)
        self._running = self._loops[key]
        self._running.launch()

    def halt(self) -> None:
        """Have the loop end after the step that it is at, if there is one."""
        if self.running:
            self.tape.halt.fill_(1)

    def ended(self) -> bool:
        """Whether the loop that is running has ended. Then the tape is complete."""
        assert self._running is not None
        if not self._running.ended():
            return False
        self._running = None
        return True

    def stop(self) -> None:
        """Halt the loop and wait for it; on a device that has failed, there is none any more."""
        if self._running is not None:
            self.halt()
            with suppress(RuntimeError):
                self._running.wait()
            self._running = None

    def close(self) -> None:
        """Give the loops back, before what they are made of."""
        self.stop()
        for loop in self._loops.values():
            loop.close()
        self._loops.clear()
        self._runner.looping = False


def make_loops(runner: GraphRunner, cache: KVCache, graphs: str) -> Loops | None:
    """The loops of a runner, or None where it has recorded nothing and steps eagerly.

    If they cannot be made, "auto" warns once and steps are replayed one by one, "on" raises `GraphError`.
    """
    if not runner.report.enabled:
        return None
    try:
        return Loops(runner, cache)
    except GraphError as error:
        if graphs == "on":
            raise
        warnings.warn(f"decoding step by step: {error}", RuntimeWarning, stacklevel=2)
        return None


class LoopEngine(Engine):
    """An engine that launches a loop where its base class launches a step.

    Args:
        loops: those of its runner. The others are the base class's.
    """

    def __init__(self, *args: Any, loops: Loops, **options: Any) -> None:
        super().__init__(*args, **options)
        self.loops = loops
        self._in_loop: Sequence[tuple[int, Request]] = []

    @property
    def busy(self) -> bool:
        return self.loops.running or super().busy

    @property
    def _wanted(self) -> bool:
        """Whether the device is wanted for a prompt."""
        return self._reading is not None or bool(self.waiting and None in self.rows)

    def _advance(self) -> None:
        if self.loops.running:
            return self._follow()
        self._read_prompts()
        self._decode()
        self._deliver(keep=0)  # first tokens, which the device makes before the loop

    def _decode(self) -> bool:
        decoding = self._decoding
        if not decoding.rows:
            return False
        decoding.advance(self.cache.max_seq_len)  # each row goes to its limit, if nothing ends it before
        self._in_loop, self._decoding = decoding.rows, self._who_decodes()
        self.loops.launch(decoding, once=self._wanted)
        return True

    def _follow(self) -> None:
        """Deliver what the loop has made since the last look, and see to its end."""
        self._end_hopeless()  # who needs no row must not wait for one
        ended = self.loops.ended()  # before the tape is read, which is complete then
        if self._wanted:
            self.loops.halt()
        outputs = self.loops.tape.read()
        for output in outputs:
            self._hand_out(output, self._in_loop)
        if ended:
            self._settle()
        elif not outputs:
            time.sleep(POLL)

    def _settle(self) -> None:
        """Those who are left were not asked for more than they got."""
        for row, request in self._in_loop:
            if self.rows[row] is request:
                request.enqueued = len(request.token_ids)
        self._in_loop, self._decoding = [], self._who_decodes()

    def _retire(self, row: int) -> None:
        self.loops.halt()  # what the device is told now waits behind the loop
        super()._retire(row)

    def _fail_all(self, error: BaseException) -> None:
        try:
            self.loops.stop()
        finally:
            super()._fail_all(error)

    def shut_down(self, error: Exception) -> None:
        try:
            self._fail_all(error)  # which stops the loop
        finally:
            self.loops.close()
            super().shut_down(error)

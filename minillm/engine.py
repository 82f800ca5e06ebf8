"""The engine: requests wait, get a row, are prefilled, make a token a step, and give the row back.

It is the host's side of generation, and knows token ids only. `step` is the whole of it: read some of the prompts that
wait, enqueue one decode step for all rows, and deliver the tokens of the step before. On a GPU the host stays one step
ahead: it enqueues step t + 1 before it has read the tokens of step t, so the device never waits for it. That is safe
because a step ends its own rows: a row that met an end token in step t is padding in step t + 1.

A launch may be of several steps: their tokens are delivered together, and what was made for a request after its end is
discarded.

A long prompt is read in chunks between the steps, so it holds the others up for the time of a chunk and not longer. Its
row is padding until the whole prompt is in the cache.

Nothing here is safe for threads: one thread at a time may use an engine. `service.py` gives it a thread of its own.
"""

import logging
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

from .cache import KVCache
from .decoding import Decoding
from .errors import MinillmError
from .graphs import GraphRunner
from .model import Llama
from .prefill_graphs import PrefillRunner
from .prefix import RowMemory
from .readback import Readback
from .request import Request, lost, own_fault
from .state import BROKEN, LENGTH, RUNNING, STOP, DecodeState
from .step import finish_step

REASONS = {RUNNING: None, STOP: "stop", LENGTH: "length"}
UNDISTURBED = 4
"""A chunk may be this many times as long while no row decodes, for there is nobody to hold up."""


class Engine:
    """Runs requests on the rows of one cache.

    Args:
        prefill_chunk: tokens of prompts that are read between two decode steps of other rows.
        prefix_reuse: whether what the rows hold of former requests is used again.
        prefills: reads the prompts; None reads them eagerly.
    """

    def __init__(
        self,
        model: Llama,
        cache: KVCache,
        state: DecodeState,
        runner: GraphRunner,
        prefill_chunk: int = 512,
        prefix_reuse: bool = True,
        prefills: PrefillRunner | None = None,
    ) -> None:
        self.model, self.cache, self.state, self.runner = model, cache, state, runner
        self.prefill_chunk = prefill_chunk
        self.prefills = prefills or PrefillRunner(model, cache)
        self.device = state.tokens.device
        self.waiting: deque[Request] = deque()
        self.rows: list[Request | None] = [None] * cache.max_batch_size
        self._alone = [state.narrow(row, 1) for row in range(cache.max_batch_size)]
        self.memory = RowMemory(cache, prefix_reuse)
        self._reading: tuple[int, Request] | None = None  # the row whose prompt is being read
        self._decoding = Decoding([])
        self._on_gpu = self.device.type == "cuda"
        self._entered = not self._on_gpu
        # a first token for each row, and two launches
        self._readback = Readback(state.output, runner.outputs, depth=cache.max_batch_size + 2)

    # ------------------------------------------------------------------ what its thread calls

    def submit(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(request)

    def cancel(self, request: Request) -> None:
        """Forget a request and free its row. Its finish_reason stays None."""
        if request.done:
            return
        request.cancelled = True
        if request not in self.rows:
            with suppress(ValueError):  # it may have been cancelled before it was submitted
                self.waiting.remove(request)
            return self._end(request)
        try:
            with self.on_stream():
                self._release(self.rows.index(request), request, running=True)
        except Exception as error:
            self._fail_all(error)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self._readback.tickets or any(self.rows))

    @property
    def open(self) -> int:
        """How many requests wait or have a row."""
        return len(self.waiting) + len(self.rows) - self.rows.count(None)

    def step(self) -> None:
        """Read prompts, enqueue one decode step, deliver what is due. A device's error ends every open request."""
        try:
            with self.on_stream():
                self._advance()
        except BaseException as error:  # an interrupt too: a step cut in half has left no known state
            self._fail_all(error)
            if not isinstance(error, Exception):
                raise

    def _advance(self) -> None:
        self._read_prompts()
        enqueued = self._decode()
        self._deliver(keep=1 if enqueued and self._on_gpu else 0)

    def on_stream(self) -> AbstractContextManager[object]:
        """The stream of all steps. A thread that owns the engine enters it once, which spares every step to."""
        return nullcontext() if self._entered else self._enter()

    @contextmanager
    def _enter(self) -> Iterator[None]:
        with self.runner.on_stream():
            self._entered = True
            try:
                yield
            finally:
                self._entered = False

    def shut_down(self, error: Exception) -> None:
        """End every open request with the error, and let go of the graphs before the memory that they point at."""
        try:
            self._fail_all(error)
        finally:
            self.prefills.close()
            self.runner.close()

    # ------------------------------------------------------------------ prompts

    def _read_prompts(self) -> None:
        """Read one chunk of a long prompt, or several short ones together, the oldest first."""
        read = 0
        while self._reading is not None or self._admit():
            row, request = self._reading  # type: ignore[misc]  # `_admit` has set it
            left = len(request.prompt_token_ids) - request.prefilled
            budget = self.prefill_chunk * (1 if self._decoding.rows else UNDISTURBED)
            if read and read + left > budget:
                return
            count = min(left, budget)
            try:
                self._read(row, request, count)
            except Exception as error:  # the others were not touched; a device that is lost ends them at their step
                request.sound = request.enqueued = 0
                self._release(row, request, error=error, running=True)
            read += count
            if read >= budget:
                return

    def _admit(self) -> bool:
        """Give the oldest request that waits a row. Returns whether there is one, and room for it."""
        self._end_hopeless()
        if self.waiting:
            request = self.waiting[0]
            free = [row for row, taken in enumerate(self.rows) if taken is None]
            if not free:
                return False
            if request.scores is not None:
                row = self.memory.take_oldest(free)
            else:
                row, request.cached = self._place(request.prompt_token_ids, free)
            request.prefilled = request.cached
            # what was copied from a row whose first logits are still under way may be NaN
            request.sound = 0 if any(r is not None and not r.token_ids for r in self.rows) else request.cached
            self.waiting.popleft()
            self.rows[row], self._reading = request, (row, request)
            return True
        return False

    def _end_hopeless(self) -> None:
        """End the oldest that wait, as long as there is no room for a single token."""
        while self.waiting and len(self.waiting[0].prompt_token_ids) >= self.waiting[0].limit:
            self._end(self.waiting.popleft(), "length")

    def _place(self, prompt: list[int], free: list[int]) -> tuple[int, int]:
        """The row for a prompt, and how many tokens of it are there. To bring them there is no more than an attempt."""
        try:
            return self.memory.place(prompt, free)
        except Exception:  # no memory for a copy; a device that is lost says so again when the prompt is read
            self.memory.forget(free[0])
            return free[0], 0

    def _read(self, row: int, request: Request, count: int) -> None:
        """Prefill the next `count` tokens of a prompt; after the last, enqueue the first token of the answer."""
        prompt, start = request.prompt_token_ids, request.prefilled
        request.prefilled += count  # before it is done: half of it may be
        logits = self.prefills.read(prompt[start : start + count], row, start, request.scores is not None)
        if request.scores is not None:
            request.scores.append(logits.cpu())
        else:
            self.memory.note(row, prompt[: request.prefilled])
        if request.prefilled < len(prompt):
            return
        self._reading = None
        if request.scores is not None:
            self._release(row, request, "length")
        else:
            self.state.admit(row, prompt, request.limit, request.stops, request.params, request.seed)
            finish_step(self.model, logits, self._alone[row], request.mode)
            request.enqueued = 1
            self._readback.issue([(row, request)], first=True)
            self._decoding = self._who_decodes()

    # ------------------------------------------------------------------ tokens

    def _who_decodes(self) -> Decoding:
        return Decoding(
            [(row, r) for row, r in enumerate(self.rows) if r is not None and r.enqueued and not r.fully_enqueued]
        )

    def _decode(self) -> bool:
        decoding = self._decoding
        if not decoding.rows:
            return False
        steps = self.runner.steps
        kv_len = min(decoding.position + steps, decoding.end)
        self.runner.step(decoding.highest + 1, kv_len, decoding.mode, len(decoding.rows))
        self._readback.issue(decoding.rows)
        if decoding.advance(steps):
            self._decoding = self._who_decodes()
        return True

    def _deliver(self, keep: int) -> None:
        """Hand out tokens until at most `keep` tickets are under way."""
        tickets = self._readback.tickets
        while len(tickets) > keep:
            ticket = tickets.popleft()
            for output in ticket.read():
                self._hand_out(output, ticket.requests)

    def _hand_out(self, output: list[int], requests: Sequence[tuple[int, Request]]) -> None:
        """Deliver the tokens of one step."""
        rows = self.rows
        for row, request in requests:
            if rows[row] is request:  # else it was cancelled or ended while this step was under way
                token_id, code, bits = output[3 * row : 3 * row + 3]
                logprob = struct.unpack("f", struct.pack("i", bits))[0] if request.params.logprobs else 0.0
                self._receive(row, request, token_id, code, logprob)

    def _receive(self, row: int, request: Request, token_id: int, code: int, logprob: float) -> None:
        if code == BROKEN:
            return self._drop_broken(row, request)
        request.token_ids.append(token_id)
        reason, error, running = REASONS[code], None, code == RUNNING
        try:
            if request.on_token(token_id, logprob, reason):
                reason = "stop"
        except BaseException as fault:  # a fault of one request ends that request alone, a sys.exit in it too
            error = fault if isinstance(fault, Exception) else own_fault(fault)
        if reason is not None or error is not None:
            self._release(row, request, reason, error, running)

    def _drop_broken(self, row: int, request: Request) -> None:
        """End a request whose logits are no numbers, and believe nothing that may have been copied from it."""
        said = (
            f"the model's logits are NaN or infinite after {len(request.token_ids)} tokens of the answer: "
            "the weights are broken, or overflow in this dtype (try dtype='float32')"
        )
        self._release(row, request, error=MinillmError(said))
        self.memory.forget_all()

    # ------------------------------------------------------------------ ends

    def _end(self, request: Request, reason: str | None = None, error: BaseException | None = None) -> None:
        request.finish_reason, request.error = (reason, None) if error is None else (None, error)
        try:
            request.on_done()
        except BaseException:  # others are still to be told of their end
            logging.getLogger(__name__).exception("the end of a request could not be told")

    def _release(
        self,
        row: int,
        request: Request,
        reason: str | None = None,
        error: BaseException | None = None,
        running: bool = False,
    ) -> None:
        """Free a row, note what it holds, and end its request: before the device is told, which may fail.

        Args:
            running: whether the device may still take it for active. Steps already enqueued write to it then, but only
                beyond what is noted here, and the stream orders them before whatever comes next.
        """
        self.rows[row] = None
        if self._reading is not None and self._reading[0] == row:
            self._reading = None
        self.memory.note(row, (request.prompt_token_ids + request.token_ids)[: request.sound_tokens])
        self._decoding = self._who_decodes()
        self._end(request, reason, error)
        if running:
            self._retire(row)
        if running or error is not None or request.scores is not None:
            self._wipe(row, request.sound_tokens, request.written_tokens)

    def _retire(self, row: int) -> None:
        """Tell the device that a row is padding from here on."""
        self.state.retire(row)

    def _wipe(self, row: int, start: int, end: int) -> None:
        """Zero what no logits were seen of. A NaN must not stay: masked attention reads it too, as 0 x NaN."""
        if start < end:
            self.cache.kv[:, :, row, :, start:end].zero_()

    def _fail_all(self, error: BaseException) -> None:
        rows = [(row, request) for row, request in enumerate(self.rows) if request is not None]
        ended = [*(request for _, request in rows), *self.waiting]
        self.waiting.clear()
        self._readback.tickets.clear()
        self.rows, self._reading, self._decoding = [None] * len(self.rows), None, Decoding([])
        self.memory.forget_all()
        with suppress(RuntimeError), self.on_stream():  # a device that has failed cannot be told
            self.state.active.zero_()
            for row, request in rows:
                self._wipe(row, 0, request.written_tokens + 1)  # a step may have failed before it was counted
        for request in ended:
            self._end(request, error=lost(error))

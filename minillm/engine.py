"""The engine: requests wait, get a row, are prefilled, make a token a step, and give the row back.

It is the host's side of generation, and knows token ids only. `step` is the whole of it: admit whom there is room for,
enqueue one decode step for all rows, and deliver the tokens of the step before. On a GPU the host stays one step
ahead: it enqueues step t + 1 before it has read the tokens of step t, so the device never waits for it. That is safe
because a step ends its own rows: a row that met an end token in step t is padding in step t + 1.

Nothing here is safe for threads: one thread at a time may use an engine. `service.py` gives it a thread of its own.
"""

from collections import deque
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from .cache import KVCache
from .errors import EngineError, MinillmError
from .graphs import GraphRunner
from .model import Llama
from .request import Request
from .state import BROKEN, LENGTH, RUNNING, STOP, DecodeState
from .step import finish_step


@dataclass
class Ticket:
    """Output of one step on its way to the host."""

    host: Tensor  # int32 [rows, 3], pinned on CUDA
    ready: torch.cuda.Event | None  # None: it is there
    requests: list[tuple[int, Request]]  # index into host, whose token it is


class Engine:
    """Runs requests on the rows of one cache.

    Args:
        prefill_chunk: tokens of a prompt that go through the model at once, which bounds the memory of activations.
    """

    def __init__(
        self, model: Llama, cache: KVCache, state: DecodeState, runner: GraphRunner, prefill_chunk: int = 1024
    ) -> None:
        self.model, self.cache, self.state, self.runner = model, cache, state, runner
        self.prefill_chunk = prefill_chunk
        self.device = state.tokens.device
        self.waiting: deque[Request] = deque()
        self.rows: list[Request | None] = [None] * cache.max_batch_size
        self.tickets: deque[Ticket] = deque()
        # one buffer for each ticket that can be under way: a prefill a row, and two decode steps
        pinned = self.device.type == "cuda"
        shape = (cache.max_batch_size + 2, *state.output.shape)
        self._host = torch.empty(shape, dtype=torch.int32, pin_memory=pinned)
        self._host_next = 0

    def warm_up(self) -> None:
        """Run a short prefill for nothing, so that a GPU loads its kernels now and not in the first request."""
        with self._on_stream():
            self._prefill([0] * min(16, self.cache.max_seq_len), 0)
            self.cache.kv[:, :, 0].zero_()

    def submit(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(request)

    def cancel(self, request: Request) -> None:
        """Forget a request and free its row. Its finish_reason stays None."""
        if request.done:
            return
        request.cancelled = True
        try:
            if request in self.waiting:
                self.waiting.remove(request)
            elif request in self.rows:
                self._release(self.rows.index(request))
        except Exception as error:
            self._fail_all(error)
        request.on_done()

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.tickets or any(self.rows))

    @property
    def open(self) -> int:
        """How many requests wait or have a row."""
        return len(self.waiting) + len(self.rows) - self.rows.count(None)

    def step(self) -> None:
        """Admit, enqueue one decode step, deliver what is due. An error of the device ends every open request."""
        try:
            with self._on_stream():
                self._admit()
                enqueued = self._decode()
                self._deliver(keep=1 if enqueued and self.device.type == "cuda" else 0)
        except BaseException as error:  # an interrupt too: a step cut in half has left no known state
            self._fail_all(error)
            if not isinstance(error, Exception):
                raise

    def _admit(self) -> None:
        while self.waiting:
            request = self.waiting[0]
            if len(request.prompt_token_ids) >= request.limit:  # no room for a single token
                self._end(self.waiting.popleft(), "length")
                continue
            if None not in self.rows:
                return
            row, request = self.rows.index(None), self.waiting.popleft()
            self.rows[row] = request
            try:
                self._start(row, request)
            except Exception as error:  # the others were not touched; a device that is lost ends them at their step
                self._release(row)
                self._end(request, error=error)

    def _start(self, row: int, request: Request) -> None:
        """Prefill, and enqueue the first token."""
        if request.scores is not None:
            request.scores += [chunk.cpu() for chunk in self._prefill(request.prompt_token_ids, row, all_logits=True)]
            self._release(row)
            return self._end(request, "length")
        logits = self._prefill(request.prompt_token_ids, row)[-1]
        self.state.admit(row, request.prompt_token_ids, request.limit, request.stops, request.params, request.seed)
        finish_step(self.model, logits, self.state.narrow(row, 1), request.mode)
        self._issue([(row, request)])

    def _prefill(self, token_ids: list[int], row: int, all_logits: bool = False) -> list[Tensor]:
        ids = torch.tensor(token_ids, dtype=torch.int64)
        if self.device.type == "cuda":
            ids = ids.pin_memory()
        ids = ids.to(self.device, non_blocking=True)
        starts = range(0, len(token_ids), self.prefill_chunk)
        return [
            self.model.prefill(ids[start : start + self.prefill_chunk], row, start, self.cache, all_logits)
            for start in starts
        ]

    def _decode(self) -> bool:
        live = [(row, r) for row, r in enumerate(self.rows) if r is not None and not r.fully_enqueued]
        if not live:
            return False
        position = max(len(r.prompt_token_ids) + r.enqueued - 1 for _, r in live)
        mode = max(r.mode for _, r in live)
        self.runner.step(live[-1][0] + 1, position + 1, mode, len(live))
        self._issue(live)
        return True

    def _issue(self, requests: list[tuple[int, Request]]) -> None:
        """Start the copy of `state.output` to the host, and remember whose tokens it carries."""
        for _, request in requests:
            request.enqueued += 1
        host = self._host[self._host_next]
        self._host_next = (self._host_next + 1) % len(self._host)
        host.copy_(self.state.output, non_blocking=True)
        ready = None
        if self.device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record()
        self.tickets.append(Ticket(host, ready, requests))

    def _deliver(self, keep: int) -> None:
        """Hand out tokens until at most `keep` tickets are under way."""
        while len(self.tickets) > keep:
            ticket = self.tickets.popleft()
            if ticket.ready is not None:
                ticket.ready.synchronize()
            outputs = ticket.host.tolist()
            logprobs = ticket.host.view(torch.float32)[:, 2].tolist()
            for row, request in ticket.requests:
                if self.rows[row] is request:  # else it was cancelled or ended while this step was under way
                    token_id, code, _ = outputs[row]
                    self._receive(row, request, token_id, code, logprobs[row])

    def _receive(self, row: int, request: Request, token_id: int, code: int, logprob: float) -> None:
        if code == BROKEN:
            self._release(row)
            return self._end(request, error=_broken(request))
        request.token_ids.append(token_id)
        reason = {RUNNING: None, STOP: "stop", LENGTH: "length"}[code]
        error = None
        try:
            if request.on_token(token_id, logprob, reason):
                reason = "stop"
        except Exception as fault:  # a fault of one request ends that request alone
            error = fault
        if reason is not None or error is not None:
            self._release(row)
            self._end(request, reason, error)

    def _end(self, request: Request, reason: str | None = None, error: BaseException | None = None) -> None:
        request.finish_reason, request.error = (reason, None) if error is None else (None, error)
        request.on_done()

    def _release(self, row: int) -> None:
        """Make the row padding and free. Steps already enqueued may still write to it; the stream orders them first."""
        self.rows[row] = None
        with self._on_stream():
            self.state.retire(row)

    def shut_down(self, error: Exception) -> None:
        """End every open request with the error, and let go of the graphs before the memory that they point at."""
        self._fail_all(error)
        self.runner.close()

    def _fail_all(self, error: BaseException) -> None:
        lost = [request for request in [*self.rows, *self.waiting] if request is not None]
        self.waiting.clear()
        self.tickets.clear()
        self.rows = [None] * len(self.rows)
        with suppress(RuntimeError), self._on_stream():  # a device that has failed cannot be told
            self.state.active.zero_()
        for request in lost:
            self._end(request, error=_told(error))

    def _on_stream(self) -> AbstractContextManager[object]:
        return self.runner.on_stream() if self.device.type == "cuda" else nullcontext()


def _told(error: BaseException) -> MinillmError:
    """What a request is told of an error that is not its own. A new object for each: each is raised somewhere."""
    if isinstance(error, MinillmError):
        return type(error)(*error.args)
    if isinstance(error, torch.OutOfMemoryError):
        told = EngineError(f"out of memory while generating, lower max_batch_size or max_seq_len: {error}")
    elif isinstance(error, Exception):
        told = EngineError(f"a step failed, and all open requests with it: {type(error).__name__}: {error}")
    else:
        told = EngineError("a step was interrupted, and its requests are lost")
    told.__cause__ = error
    return told


def _broken(request: Request) -> MinillmError:
    return MinillmError(
        f"the model's logits are NaN or infinite after {len(request.token_ids)} tokens of the answer: "
        "the weights are broken, or overflow in this dtype (try dtype='float32')"
    )

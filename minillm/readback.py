"""Readback: the output of each launch on its way to the host, while the next is enqueued already."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .request import Request


@dataclass
class Ticket:
    """Output of one launch, of one step or several: whose tokens it carries, by row."""

    host: Tensor  # int32 [steps, rows * 3], pinned on CUDA
    ready: torch.cuda.Event | None  # None: it is there
    requests: Sequence[tuple[int, Request]]

    def read(self) -> list[list[int]]:
        """Of each step the output, row after row of (token, finished, bits of the logprob). Waits for the launch."""
        if self.ready is not None:
            self.ready.synchronize()
        return self.host.tolist()


class Readback:
    """A ring of buffers and events, made once: making them in each step would cost more than the copy.

    Args:
        first: int32 [rows, 3], which the first token of an answer is written to.
        outputs: int32 [steps, rows, 3], which every launch overwrites. May be the same memory.
        depth: tickets that can be under way.
    """

    def __init__(self, first: Tensor, outputs: Tensor, depth: int) -> None:
        on_gpu = outputs.device.type == "cuda"
        self._first, self._outputs = first.view(1, -1), outputs.flatten(1)
        host = torch.empty((depth, *self._outputs.shape), dtype=outputs.dtype, pin_memory=on_gpu)
        self._slots = deque((b, b[:1], torch.cuda.Event() if on_gpu else None) for b in host.unbind())
        self.tickets: deque[Ticket] = deque()

    def issue(self, requests: Sequence[tuple[int, Request]], first: bool = False) -> None:
        """Start the copy of the outputs, or of a first token, on the current stream."""
        every, one, ready = self._slots[0]
        self._slots.rotate(-1)
        host, source = (one, self._first) if first else (every, self._outputs)
        host.copy_(source, non_blocking=True)
        if ready is not None:
            ready.record()
        self.tickets.append(Ticket(host, ready, requests))


class Tape:
    """What a loop on the device and the host tell each other while it runs, in pinned memory that both see.

    The device writes a line of the ring and then `done`; the host reads `done` and then the lines below it, so it never
    sees half of one.

    Args:
        depth: steps that one launch can make.
    Attributes:
        ring: int32 [depth, rows * 3], the output of each step since the launch; of fewer rows, the beginning of a line.
        done: int32 [1], how many steps that is. halt: int32 [1], 1 ends the loop after the step that it is at.
    """

    def __init__(self, rows: int, depth: int, pinned: bool) -> None:
        self.ring, self.done, self.halt = (
            torch.zeros(shape, dtype=torch.int32, pin_memory=pinned) for shape in ((depth, rows * 3), 1, 1)
        )
        self._read = 0

    def rewind(self, halt: bool) -> None:
        """Get ready for a launch, which makes one step only if it finds `halt` set."""
        self.done.zero_()
        self.halt.fill_(halt)
        self._read = 0

    def read(self) -> list[list[int]]:
        """The lines that have come since the last call."""
        start, self._read = self._read, int(self.done.item())
        return self.ring[start : self._read].tolist()

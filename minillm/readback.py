"""Readback: the output of each step on its way to the host, while the next step is enqueued already."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .request import Request


@dataclass
class Ticket:
    """Output of one step: whose tokens it carries, by row."""

    host: Tensor  # int32 [rows * 3], pinned on CUDA
    ready: torch.cuda.Event | None  # None: it is there
    requests: Sequence[tuple[int, Request]]

    def read(self) -> list[int]:
        """The output, row after row of (token, finished, bits of the logprob). Waits for the step."""
        if self.ready is not None:
            self.ready.synchronize()
        return self.host.tolist()


class Readback:
    """A ring of buffers and events, made once: making them in each step would cost more than the copy.

    Args:
        output: int32 [rows, 3], which every step overwrites. depth: tickets that can be under way.
    """

    def __init__(self, output: Tensor, depth: int) -> None:
        on_gpu = output.device.type == "cuda"
        self._output = output.view(-1)
        host = torch.empty((depth, *self._output.shape), dtype=output.dtype, pin_memory=on_gpu)
        self._slots = deque((buffer, torch.cuda.Event() if on_gpu else None) for buffer in host.unbind())
        self.tickets: deque[Ticket] = deque()

    def issue(self, requests: Sequence[tuple[int, Request]]) -> None:
        """Start the copy of the output, on the current stream."""
        host, ready = self._slots[0]
        self._slots.rotate(-1)
        host.copy_(self._output, non_blocking=True)
        if ready is not None:
            ready.record()
        self.tickets.append(Ticket(host, ready, requests))

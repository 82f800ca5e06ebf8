"""Capture: what records a step on a GPU, and what a runner needs to know of it.

`graphs.py` decides what is recorded, and in which order; here is how. Tests give a runner a `Backend` without a GPU.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Protocol

import torch

from .readback import Tape
from .state import DecodeState

if TYPE_CHECKING:
    from .while_node import Turn


class Recording(Protocol):
    """A captured step."""

    def replay(self) -> None: ...


class Loop(Protocol):
    """A captured step that repeats itself on the device; `while_node.py` describes it."""

    def launch(self) -> None: ...

    def ended(self) -> bool: ...

    def wait(self) -> None: ...

    def close(self) -> None: ...


class Backend(Protocol):
    """What a runner needs of a device: tests give it one that needs no GPU."""

    def warm_up(self, step: Callable[[], None]) -> None: ...

    def capture(self, step: Callable[[], None]) -> Recording: ...

    def loop(self, recording: Recording, state: DecodeState, tape: Tape) -> Loop: ...

    def free_bytes(self) -> int: ...

    def reserved_bytes(self) -> int: ...

    def on_stream(self) -> AbstractContextManager[object]: ...

    def close(self) -> None: ...


class CudaBackend:
    """Captures on one stream into one pool.

    The warm-up runs on the same stream: cuBLAS makes its handle and workspace for a stream, and Triton loads its
    modules, at the first use, which must not fall into a capture. Capture mode is `thread_local`, so other threads of
    the app may use CUDA meanwhile.

    PyTorch keeps a cuBLAS workspace of 32 MiB for every stream that ever multiplied matrices. It is dropped before and
    after a capture, so that recordings have theirs in the pool and die with it, and at the end (scratch memory, made
    again when it is needed).
    """

    def __init__(self, device: torch.device, share_pool: bool = True) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle() if share_pool else None
        self._turn: Turn | None = None

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            yield

    def warm_up(self, step: Callable[[], None]) -> None:
        with self.on_stream():
            step()
            self.stream.synchronize()

    def capture(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph(keep_graph=True)  # a loop is made of it
        torch._C._cuda_clearCublasWorkspaces()
        with self.on_stream(), ExitStack() as on_error:
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            on_error.callback(_abandon, graph)
            step()
            on_error.pop_all()
            graph.capture_end()
            graph.instantiate()
        torch._C._cuda_clearCublasWorkspaces()
        return graph

    def loop(self, recording: Recording, state: DecodeState, tape: Tape) -> Loop:
        """The recording, in a WHILE node. Raises: GraphError."""
        from .while_node import Turn, WhileNode

        assert isinstance(recording, torch.cuda.CUDAGraph)
        with self.on_stream():
            self._turn = self._turn or Turn(self.device)
            return WhileNode(self._turn, recording, state, tape)

    def close(self) -> None:
        self.stream.synchronize()
        if self._turn is not None:
            self._turn.close()
        self._turn = None
        torch._C._cuda_clearCublasWorkspaces()

    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self.device)[0]

    def reserved_bytes(self) -> int:
        return torch.cuda.memory_reserved(self.device)


def _abandon(graph: torch.cuda.CUDAGraph) -> None:
    """Leave the capturing state after an error in the step, whose own error is the one to report."""
    try:
        graph.capture_end()
    except RuntimeError:
        return  # the capture was already invalid: ending it says so once more

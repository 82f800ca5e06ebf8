"""Capture: what records a step on a GPU, and what a runner needs to know of it.

`graphs.py` decides what is recorded, and in which order; here is how. Tests give a runner a `Backend` without a GPU.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol

import torch


class Recording(Protocol):
    """A captured step."""

    def replay(self) -> None: ...


class Backend(Protocol):
    """What a runner needs of a device: tests give it one that needs no GPU."""

    def warm_up(self, step: Callable[[], None]) -> None: ...

    def capture(self, step: Callable[[], None]) -> Recording: ...

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

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            yield

    def warm_up(self, step: Callable[[], None]) -> None:
        with self.on_stream():
            step()
            self.stream.synchronize()

    def capture(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        torch._C._cuda_clearCublasWorkspaces()
        with self.on_stream(), ExitStack() as on_error:
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            on_error.callback(_abandon, graph)
            step()
            on_error.pop_all()
            graph.capture_end()
        torch._C._cuda_clearCublasWorkspaces()
        return graph

    def close(self) -> None:
        self.stream.synchronize()
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


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """A graph that is finalised in mid-capture breaks the capture, so collect before, and not meanwhile."""
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def failure(what: str, backend: Backend, error: Exception, remedy: str) -> str:
    """One sentence of a capture that failed: what it was, what was free, and what to do."""
    said = str(error).splitlines()[0] if str(error) else type(error).__name__
    return (
        f"capturing {what} failed with {backend.free_bytes() / 2**20:.0f} MiB free: {said}. "
        f"{remedy}, free memory of other programs, or run with graphs='off'."
    )

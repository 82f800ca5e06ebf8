"""Capture: what records a step on a GPU, and what a runner needs to know of it.

`graphs.py` decides what is recorded, and in which order; here is how. Tests give a runner a `Backend` without a GPU.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Protocol, cast

import torch

from .errors import GraphError
from .graph_nodes import CudaDriver
from .graph_report import GraphReport
from .pieces import Cuts, Pieces
from .readback import Tape
from .retarget import Editor
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
    """What a runner needs of a device: tests give it one that needs no GPU.

    Attributes:
        pieces: of how many graphs a recording is.
    """

    @property
    def pieces(self) -> int: ...

    def warm_up(self, step: Callable[[], None]) -> None: ...

    def capture(self, step: Callable[[], None]) -> Recording: ...

    def loop(self, recording: Recording, state: DecodeState, tape: Tape) -> Loop: ...

    def editor(self, recordings: Sequence[Recording]) -> Editor: ...

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

    Args:
        cuts: where a step is cut in pieces, if it calls them; None is nowhere.
    """

    def __init__(self, device: torch.device, share_pool: bool = True, cuts: Cuts | None = None) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle() if share_pool else None
        self._cuts = Cuts(layers=1, pieces=1) if cuts is None else cuts
        self._turn: Turn | None = None

    @property
    def pieces(self) -> int:
        return self._cuts.pieces

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """The stream, which begins when what was launched before has run; and what is launched after it waits for it.

        Streams know nothing of each other: without this, a first step could read a state that is not yet zero.
        """
        outer = torch.cuda.current_stream(self.device)
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            if outer != self.stream:
                self.stream.wait_stream(outer)
            yield
        if outer != self.stream:
            outer.wait_stream(self.stream)

    def warm_up(self, step: Callable[[], None]) -> None:
        with self.on_stream():
            step()
            self.stream.synchronize()

    def capture(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph | Pieces:
        graphs = [_new_graph()]

        def cut() -> None:
            # The first kernel of the next piece may be launched early (PDL), and then waits for the one before it.
            # There is none in its graph, so it does not wait; nor need it, since the piece before has ended.
            graphs[-1].capture_end()
            graphs.append(_new_graph())
            self._begin(graphs[-1])

        torch._C._cuda_clearCublasWorkspaces()
        with self.on_stream(), ExitStack() as on_error:
            self._begin(graphs[0])
            on_error.callback(lambda: _abandon(graphs[-1]))
            with self._cuts.call(cut):
                step()
            on_error.pop_all()
            graphs[-1].capture_end()
            for graph in graphs:
                graph.instantiate()
        torch._C._cuda_clearCublasWorkspaces()
        return graphs[0] if len(graphs) == 1 else Pieces(graphs)

    def _begin(self, graph: torch.cuda.CUDAGraph) -> None:
        graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")

    def editor(self, recordings: Sequence[Recording]) -> Editor:
        """For recordings that `capture` made. Raises: GraphError."""
        graphs = [r.graphs if isinstance(r, Pieces) else [cast(torch.cuda.CUDAGraph, r)] for r in recordings]
        return Editor(graphs, CudaDriver())

    def loop(self, recording: Recording, state: DecodeState, tape: Tape) -> Loop:
        """The recording, in a WHILE node. Raises: GraphError."""
        from .while_node import Turn, WhileNode

        assert isinstance(recording, torch.cuda.CUDAGraph)
        try:
            with self.on_stream():
                self._turn = self._turn or Turn(self.device)
                return WhileNode(self._turn, recording, state, tape)
        except (AttributeError, TypeError, RuntimeError) as error:  # other bindings than those that were tried
            raise GraphError(
                f"steps_per_graph='until_done' is not possible with these cuda-bindings ({error}): give a number"
            ) from error

    def close(self) -> None:
        self.stream.synchronize()
        if self._turn is not None:
            with torch.cuda.device(self.device):  # whoever closes may be on another one
                self._turn.close()
        self._turn = None
        torch._C._cuda_clearCublasWorkspaces()

    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self.device)[0]

    def reserved_bytes(self) -> int:
        return torch.cuda.memory_reserved(self.device)


def _new_graph() -> torch.cuda.CUDAGraph:
    return torch.cuda.CUDAGraph(keep_graph=True)  # so that it can be edited, and put into a loop


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


def record(backend: Backend, step: Callable[[], None], report: GraphReport, what: str, remedy: str) -> Recording:
    """Warm a step up and capture it. What the pool grows by is added to the report.

    Raises: GraphError, one sentence: what it was, what was free, and what to do.
    """
    try:
        backend.warm_up(step)
        before = backend.reserved_bytes()
        recording = backend.capture(step)
        report.pool_bytes += backend.reserved_bytes() - before
    except Exception as error:
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise GraphError(
            f"capturing {what} failed with {backend.free_bytes() / 2**20:.0f} MiB free: {said}. "
            f"{remedy}, free memory of other programs, or run with graphs='off'."
        ) from error
    return recording

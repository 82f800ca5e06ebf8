"""A CUDA Graph for a CPU: records the operations of PyTorch with the tensors that they got, and runs them again.

What a real recording freezes is frozen here too: the tensors, which are memory, and all numbers. So a program around
CUDA Graphs can be run in a test from its first line to its last, mistakes and their consequences included. What is not
as on a GPU: a recording runs while it is made, and its memory is its own.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Operation = tuple[Any, tuple[Any, ...], dict[str, Any], list[Any]]  # function, arguments, results


class Recorder(TorchDispatchMode):
    """Notes every operation while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing: the host reads a tensor")
        results = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, tree_leaves(results)))
        return results


class CpuGraph:
    """Stands for torch.cuda.CUDAGraph."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.operations: list[Operation] = []

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        self._recorder = Recorder()
        self._recorder.__enter__()

    def capture_end(self) -> None:
        self._recorder.__exit__(None, None, None)
        self.operations = self._recorder.operations

    def instantiate(self) -> None: ...

    def replay(self) -> None:
        for func, args, kwargs, results in self.operations:
            for old, new in zip(results, tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():  # else a view, or in place
                    old.copy_(new)


def update(target: CpuGraph, source: CpuGraph) -> bool:
    """What cudaGraphExecUpdate does."""
    if [operation[0] for operation in target.operations] != [operation[0] for operation in source.operations]:
        return False
    target.operations = source.operations
    return True


class CpuStream:
    """Stands for torch.cuda.Stream."""

    def __init__(self, *_: object) -> None: ...

    def wait_stream(self, other: "CpuStream") -> None: ...

    def synchronize(self) -> None: ...


@contextmanager
def cpu_graph(graph: CpuGraph, pool: object = None, stream: object = None) -> Iterator[None]:
    graph.capture_begin()
    try:
        yield
    finally:
        graph.capture_end()


def pretend_cuda(patch: pytest.MonkeyPatch) -> None:
    """What a program of graphs calls of torch.cuda, on a CPU. Memory counts as nothing."""
    for name, stand_in in {
        "is_available": lambda: True,
        "CUDAGraph": CpuGraph,
        "graph": cpu_graph,
        "Stream": CpuStream,
        "stream": nullcontext,
        "device": nullcontext,
        "current_stream": CpuStream,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "graph_pool_handle": lambda: None,
        "memory_reserved": lambda *_: 0,
    }.items():
        patch.setattr(torch.cuda, name, stand_in)
    patch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    patch.setattr(torch.Tensor, "pin_memory", lambda self: self)

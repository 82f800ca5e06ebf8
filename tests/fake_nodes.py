"""Captured graphs that only pretend: nodes with arguments in real memory, and a driver that reads and edits them."""

import ctypes
from dataclasses import dataclass, field
from typing import Any

from minillm.graph_nodes import Kernel


@dataclass(eq=False)
class FakeNode:
    """A node. arguments: of a kernel, numbers of 8 bytes, or bytes; of a copy, addresses."""

    arguments: list[Any]
    type: str = "KERNEL"
    shows: bool = True

    def __post_init__(self) -> None:
        self.raw = [a if isinstance(a, bytes) else a.to_bytes(8, "little") for a in self.arguments]
        self._buffers = [ctypes.create_string_buffer(raw, len(raw)) for raw in self.raw]
        self._pointers = (ctypes.c_void_p * len(self.raw))(*map(ctypes.addressof, self._buffers))

    def kernel(self) -> Kernel:
        layout, offset = [], 0
        for raw in self.raw:
            layout.append((offset, len(raw)))
            offset += -(-len(raw) // 8) * 8
        at = ctypes.addressof(self._pointers) if self.raw and self.shows else 0
        return Kernel(tuple(layout), at, self)

    def unchanged(self) -> bool:
        """Whether nobody has written to the node's own memory."""
        return [buffer.raw for buffer in self._buffers] == self.raw


@dataclass(eq=False)
class FakeGraph:
    """A graph; `runs` is what its executable form was last told to run: the arguments of each node."""

    nodes: list[FakeNode]
    runs: dict[FakeNode, list[bytes]] = field(init=False)

    def __post_init__(self) -> None:
        self.runs = {node: list(node.raw) for node in self.nodes}

    def numbers(self) -> list[list[int]]:
        """What the kernels run with: arguments of 8 bytes."""
        return [
            [int.from_bytes(raw, "little") for raw in self.runs[node] if len(raw) == 8]
            for node in self.nodes
            if node.type == "KERNEL"
        ]


class FakeDriver:
    """Refuses the edits whose numbers, counted from 0, are in `fail`."""

    def __init__(self, fail: set[int] | None = None) -> None:
        self.fail, self.edits, self.read = fail or set(), 0, 0

    def open(self, graph: FakeGraph) -> tuple[FakeGraph, list[FakeNode]]:
        return graph, graph.nodes

    def kind(self, node: FakeNode) -> str:
        return node.type

    def kernel(self, node: FakeNode) -> Kernel:
        self.read += 1
        return node.kernel()

    def touched(self, node: FakeNode) -> list[int]:
        return node.arguments

    def launch(self, kernel: Kernel, arguments: int) -> tuple[Kernel, int]:
        return kernel, arguments

    def edit(self, executable: FakeGraph, node: FakeNode, launch: tuple[Kernel, int]) -> None:
        self.edits += 1
        if self.edits - 1 in self.fail:
            raise RuntimeError("CUDA_ERROR_INVALID_VALUE")
        kernel, arguments = launch
        assert kernel.launch is node
        pointers = (ctypes.c_void_p * len(kernel.layout)).from_address(arguments)
        executable.runs[node] = [
            ctypes.string_at(at, size) for at, (_, size) in zip(pointers, kernel.layout, strict=True)
        ]

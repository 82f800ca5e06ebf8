"""Captured graphs that only pretend: nodes with arguments in real memory, and a driver that reads and edits them."""

import ctypes
from dataclasses import dataclass, field
from typing import Any

from minillm.graph_nodes import MAP_BYTES, Kernel


class FakeMap(bytes):
    """A tensor map: an address, and then words that only the driver understands. second: the first of those."""

    def __new__(cls, address: int, second: int = 99) -> "FakeMap":
        secret = bytes(range(100, 100 + MAP_BYTES - 16))
        return super().__new__(cls, address.to_bytes(8, "little") + second.to_bytes(8, "little") + secret)


@dataclass(eq=False)
class FakeNode:
    """A node. arguments: of a kernel, numbers of 8 bytes, bytes, or maps; of a copy, addresses."""

    arguments: list[Any]
    type: str = "KERNEL"
    shows: bool = True

    def __post_init__(self) -> None:
        self.raw = [a if isinstance(a, bytes) else a.to_bytes(8, "little") for a in self.arguments]
        self._buffers = [ctypes.create_string_buffer(raw, len(raw)) for raw in self.raw]
        self._pointers = (ctypes.c_void_p * len(self.raw))(*map(ctypes.addressof, self._buffers))

    def kernel(self) -> Kernel:
        layout, offset = [], 0
        maps = tuple(index for index, raw in enumerate(self.raw) if isinstance(raw, FakeMap))
        for index, raw in enumerate(self.raw):
            step = 64 if index in maps else 8
            offset = -(-offset // step) * step
            layout.append((offset, len(raw)))
            offset += len(raw)
        at = ctypes.addressof(self._pointers) if self.raw and self.shows else 0
        return Kernel(tuple(layout), at, self, maps)

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
    """Refuses the edits whose numbers, counted from 0, are in `fail`, and the changes of maps that are in `fail_maps`.

    pointed: (map, address) of each change of a map that was asked for.
    """

    def __init__(self, fail: set[int] | None = None, fail_maps: set[int] | None = None) -> None:
        self.fail, self.edits, self.read = fail or set(), 0, 0
        self.fail_maps, self.pointed = fail_maps or set(), list[tuple[int, int]]()

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

    def point(self, tensor_map: int, address: int) -> None:
        self.pointed.append((tensor_map, address))
        if tensor_map % 64 or len(self.pointed) - 1 in self.fail_maps:
            raise RuntimeError("CUDA_ERROR_INVALID_VALUE")
        ctypes.c_uint64.from_address(tensor_map).value = address

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

"""Editor: points recordings at other tensors of the same shapes, another KV cache or other weights, without a capture.

A recorded kernel holds the addresses of its arguments. The kernels of this project take them plainly, 8 bytes each, or
in tensor maps, which begin with one. So they can be found and replaced in the executable graph: what takes milliseconds
to capture takes microseconds to edit. The rest of a tensor map is the driver's secret, so it writes the address there.
Other kernels hide addresses inside structures (PyTorch's own, cuBLAS), of which nothing is known. They are searched as
well, and one that holds an address which must change means that the recordings cannot be edited; so does a tensor that
some recordings hold and others do not, for all run the same step.

Everything is read once. After that, an index says which arguments hold an address, and arrays of our own hold the
arguments of every kernel that was ever edited: a node's own array must not be written. The nodes of the graph keep what
was recorded: what the executable graph runs with is known here alone.
"""

import ctypes
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .errors import GraphError
from .graph_nodes import COPIES, HARMLESS, Driver, Kernel

Move = tuple[Tensor, Tensor]  # (what the recordings hold, what they shall hold)

ALIGNMENT = 16
"""Kernels are compiled for arguments whose addresses are multiples of this, or are not."""

MAP_ALIGNMENT = 64
"""The driver takes tensor maps at multiples of this. Kernels have them at such offsets, so our block begins at one."""

REMEDY = "use the fused kernels, or capture anew"


def check_moves(moves: Sequence[Move]) -> None:
    """Raise GraphError if a tensor differs in kind from the one that it is to replace."""
    for index, (old, new) in enumerate(moves):
        for what, a, b in (
            ("shape", list(old.shape), list(new.shape)),
            ("dtype", old.dtype, new.dtype),
            ("device", old.device, new.device),
            ("strides", old.stride(), new.stride()),
        ):
            if a != b:
                raise GraphError(
                    f"{_name(index, moves)} has {what} {a}, and the one to take its place {b}: give equals"
                )


def _changes(moves: Sequence[Move]) -> list[Move]:
    """The moves that change something, by rising address. Raises: GraphError if kernels could not follow them."""
    for index, (old, new) in enumerate(moves):
        if not old.is_contiguous():
            raise GraphError(f"{_name(index, moves)} is a view with gaps: give the tensor that it is a view of")
        if (new.data_ptr() - old.data_ptr()) % ALIGNMENT:
            raise GraphError(
                f"{_name(index, moves)} and the one to take its place lie differently in steps of {ALIGNMENT} bytes "
                f"({old.data_ptr() % ALIGNMENT} and {new.data_ptr() % ALIGNMENT}), for which kernels are compiled: "
                "give whole tensors, not views that begin anywhere"
            )
    changes = [move for move in moves if move[0].data_ptr() != move[1].data_ptr()]
    changes.sort(key=lambda move: move[0].data_ptr())
    for (low, _), (high, _) in pairwise(changes):
        if high.data_ptr() < low.data_ptr() + _bytes(low):
            raise GraphError(
                f"two of the {len(moves)} tensors to be replaced, of shapes {list(low.shape)} and {list(high.shape)}, "
                "share memory: give each piece of memory once"
            )
    return changes


def _name(index: int, moves: Sequence[Move]) -> str:
    return f"tensor {index + 1} of the {len(moves)} to be replaced, of shape {list(moves[index][0].shape)},"


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class _Call:
    """One kernel node of an executable graph. Its arguments are copied when they are first written to."""

    def __init__(self, driver: Driver, executable: Any, node: Any, kernel: Kernel) -> None:
        self._driver, self._executable, self._node, self._kernel = driver, executable, node, kernel
        self._launch: Any = None
        self._maps = {kernel.layout[index][0] for index in kernel.maps}

    def write(self, offset: int, address: int) -> None:
        """Write one argument, for `send`. Raises: RuntimeError, with nothing written, if the driver refuses it."""
        if self._launch is None:
            self._copy()
        if offset in self._maps:
            self._driver.point(ctypes.addressof(self._block) + offset, address)
        else:
            ctypes.c_uint64.from_buffer(self._block, offset).value = address

    def _copy(self) -> None:
        layout = self._kernel.layout
        self._block = _aligned(max(offset + size for offset, size in layout))
        base = ctypes.addressof(self._block)
        for (offset, size), source in zip(layout, _pointers(self._kernel), strict=True):
            ctypes.memmove(base + offset, source, size)
        self._arguments = (ctypes.c_void_p * len(layout))(*(base + offset for offset, _ in layout))
        self._launch = self._driver.launch(self._kernel, ctypes.addressof(self._arguments))

    def send(self) -> None:
        """Give the executable graph the arguments that were written."""
        self._driver.edit(self._executable, self._node, self._launch)


def _aligned(size: int) -> Any:
    """Memory that begins at a multiple of MAP_ALIGNMENT."""
    memory = ctypes.create_string_buffer(size + MAP_ALIGNMENT - 1)
    return (ctypes.c_char * size).from_buffer(memory, -ctypes.addressof(memory) % MAP_ALIGNMENT)


def _pointers(kernel: Kernel) -> Any:
    return (ctypes.c_void_p * len(kernel.layout)).from_address(kernel.arguments)


@dataclass
class _Site:
    """Who holds one address: arguments, as (call, offset), of these recordings."""

    arguments: list[tuple[_Call, int]] = field(default_factory=list)
    recordings: set[int] = field(default_factory=set)


class Editor:
    """Edits recordings. They must live as long as it is used.

    Args:
        recordings: each of one or several captured graphs, made with `keep_graph`.
    Raises: GraphError if there are nodes that cannot be read.
    """

    def __init__(self, recordings: Sequence[Sequence[torch.cuda.CUDAGraph]], driver: Driver) -> None:
        self._driver = driver
        self._recordings = len(recordings)
        self._sites: dict[int, _Site] = {}
        self._hidden: dict[int, str] = {}  # what may be addresses and cannot be edited, and where they are
        try:
            for index, graphs in enumerate(recordings):
                for graph in graphs:
                    executable, nodes = driver.open(graph)
                    for node in nodes:
                        self._read(index, executable, node)
        except RuntimeError as error:
            raise GraphError(f"the nodes of a captured graph cannot be read ({error}): {REMEDY}") from error
        self._hidden_in_order = sorted(self._hidden)

    def _read(self, recording: int, executable: Any, node: Any) -> None:
        kind = self._driver.kind(node)
        if kind in COPIES:
            self._hidden |= dict.fromkeys(self._driver.touched(node), f"a {kind} node holds it")
        elif kind == "KERNEL":
            self._read_kernel(recording, executable, node)
        elif kind not in HARMLESS:
            raise GraphError(f"a captured graph has a {kind} node, which cannot be edited: capture anew")

    def _read_kernel(self, recording: int, executable: Any, node: Any) -> None:
        kernel = self._driver.kernel(node)
        if bool(kernel.layout) != bool(kernel.arguments):
            raise GraphError(f"a captured kernel does not show its arguments, so it cannot be edited: {REMEDY}")
        if not kernel.layout:
            return
        call = _Call(self._driver, executable, node, kernel)
        for index, ((offset, size), at) in enumerate(zip(kernel.layout, _pointers(kernel), strict=True)):
            words = list((ctypes.c_uint64 * (size // 8)).from_address(at))
            if size == 8 or index in kernel.maps:
                site = self._sites.setdefault(words.pop(0), _Site())
                site.arguments.append((call, offset))
                site.recordings.add(recording)
            where = f"a kernel has it inside an argument of {size} bytes, as plain PyTorch operations do"
            self._hidden |= dict.fromkeys(words, where)

    def retarget(self, moves: Sequence[Move]) -> None:
        """Point all recordings at the new tensors of `moves`; what the recordings do not hold is not looked at.

        Replays already launched are not changed. The new tensors must live as long as the recordings are replayed.

        Raises: GraphError with nothing changed. Whatever else it raises (the driver refuses an edit, and then to take
            back those before it; an interrupt) leaves recordings that may not be replayed any more.
        """
        check_moves(moves)
        found = self._find(_changes(moves))
        self._edit(found)
        moved = [(new, self._sites.pop(old)) for old, new in found]
        for address, site in moved:
            other = self._sites.setdefault(address, _Site())
            other.arguments += site.arguments
            other.recordings |= site.recordings

    def _find(self, moves: list[Move]) -> list[tuple[int, int]]:
        """(old, new) of every address that the recordings hold. Raises: GraphError."""
        if not moves:
            return []
        plain = sorted(self._sites)
        found: list[tuple[int, int]] = []
        for old, new in moves:
            start, end = old.data_ptr(), old.data_ptr() + _bytes(old)
            for address in _within(self._hidden_in_order, start, end):
                raise GraphError(
                    f"the recordings cannot be pointed at another tensor of shape {list(old.shape)}, because "
                    f"{self._hidden[address]}: {REMEDY}"
                )
            addresses = list(_within(plain, start, end))
            holders = set[int]().union(*(self._sites[address].recordings for address in addresses))
            if addresses and len(holders) < self._recordings:
                raise GraphError(
                    f"only {len(holders)} of the {self._recordings} recordings show where they hold a tensor of shape "
                    f"{list(old.shape)}, so the others have it where it cannot be edited: {REMEDY}"
                )
            found += [(address, address - start + new.data_ptr()) for address in addresses]
        if not found:
            raise GraphError(
                f"no recording holds any of the {len(moves)} tensors to be replaced, so nothing would change: give "
                "those that the recordings use now"
            )
        return found

    def _edit(self, found: list[tuple[int, int]]) -> None:
        """Write all that changes, then send it. What was done before a refusal is taken back. Raises: GraphError."""
        edits = [(call, offset, old, new) for old, new in found for call, offset in self._sites[old].arguments]
        calls = list(dict.fromkeys(call for call, *_ in edits))
        written = sent = 0
        try:
            for call, offset, _, new in edits:
                call.write(offset, new)
                written += 1
            for call in calls:
                call.send()
                sent += 1
        except RuntimeError as error:
            number = calls.index(call) + 1
            for call, offset, old, _ in edits[:written]:
                call.write(offset, old)
            for call in calls[:sent]:
                call.send()
            raise GraphError(
                f"the driver refused to edit kernel {number} of {len(calls)} ({error}); the recordings are as they "
                "were: capture anew"
            ) from error


def _within(addresses: list[int], start: int, end: int) -> Iterator[int]:
    """Those of the sorted addresses that are in [start, end)."""
    return iter(addresses[bisect_left(addresses, start) : bisect_left(addresses, end)])

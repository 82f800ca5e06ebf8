"""CudaDriver: the calls of the CUDA driver that read the nodes of a captured graph and edit them, by cuda.bindings.

PyTorch records graphs and replays them, and does not change them; but with `keep_graph` it hands out the graph. All
that this project knows of the driver is in this class, so that tests can do without a GPU.
"""

from importlib import import_module
from typing import Any, NamedTuple, Protocol

import torch

from .errors import GraphError

COPIES = ("MEMCPY", "MEMSET")  # nodes that hold addresses and are not kernels
HARMLESS = ("EMPTY", "WAIT_EVENT", "EVENT_RECORD")  # nodes that hold none

MAP_BYTES = 128
"""The size of a tensor map: a description of a matrix in memory, from which a kernel loads blocks of it."""

MAPPED = ("linear_kernel", "gate_up_kernel", "qkv_rope_append_kernel", "qkv_parts_kernel", "best_logits_kernel")
"""Our kernels whose arguments of that size are tensor maps. Those of others may be anything."""

Layout = tuple[tuple[int, int], ...]


class Kernel(NamedTuple):
    """A kernel node as it was recorded.

    layout: offset and size in bytes of each argument. arguments: the address of the node's own array of pointers to
    them, which may be read and not written; 0 is none. launch: kernel, grid, block and shared memory. maps: which of
    the arguments, counted from 0, are tensor maps, of which the first 8 bytes are an address.
    """

    layout: Layout
    arguments: int
    launch: Any
    maps: tuple[int, ...] = ()


class Driver(Protocol):
    """What `retarget.py` needs of the CUDA driver. Every call raises RuntimeError if the driver refuses it."""

    def open(self, graph: torch.cuda.CUDAGraph) -> tuple[Any, list[Any]]: ...

    def kind(self, node: Any) -> str: ...

    def kernel(self, node: Any) -> Kernel: ...

    def touched(self, node: Any) -> list[int]: ...

    def launch(self, kernel: Kernel, arguments: int) -> Any: ...

    def point(self, tensor_map: int, address: int) -> None: ...

    def edit(self, executable: Any, node: Any, launch: Any) -> None: ...


class CudaDriver:
    """The real one. Raises: GraphError if cuda.bindings is not installed."""

    def __init__(self) -> None:
        try:
            self._cuda = import_module("cuda.bindings.driver")
        except ImportError as error:
            raise GraphError(
                "graphs can be pointed at other tensors through the package cuda-bindings, which cannot be imported "
                f"({error}): pip install cuda-bindings, or capture anew"
            ) from error
        self._known: dict[tuple[int, int], tuple[Layout, tuple[int, ...]]] = {}

    def open(self, graph: torch.cuda.CUDAGraph) -> tuple[Any, list[Any]]:
        """The executable graph that `replay` launches, and the nodes of the graph that it was made from."""
        raw = self._cuda.CUgraph(graph.raw_cuda_graph())
        _, count = self._ask("cuGraphGetNodes", raw, 0)
        nodes, count = self._ask("cuGraphGetNodes", raw, count)
        return self._cuda.CUgraphExec(graph.raw_cuda_graph_exec()), list(nodes[:count])

    def kind(self, node: Any) -> str:
        """KERNEL, MEMCPY, MEMSET, CONDITIONAL, ..."""
        (kind,) = self._ask("cuGraphNodeGetType", node)
        return str(kind.name).removeprefix("CU_GRAPH_NODE_TYPE_")

    def kernel(self, node: Any) -> Kernel:
        """What a kernel node was recorded with."""
        (launch,) = self._ask("cuGraphKernelNodeGetParams", node)
        key = (int(launch.func), int(launch.kern))  # of the two handles that a kernel may have, one is 0
        if key not in self._known:
            prefix, handle = ("cuFunc", launch.func) if key[0] else ("cuKernel", launch.kern)
            layout = self._layout(f"{prefix}GetParamInfo", handle)
            self._known[key] = layout, self._maps(f"{prefix}GetName", handle, layout)
        layout, maps = self._known[key]
        return Kernel(layout, int(launch.kernelParams), launch, maps)

    def _layout(self, call: str, handle: Any) -> Layout:
        layout: list[tuple[int, int]] = []
        while True:
            error, *place = getattr(self._cuda, call)(handle, len(layout))
            if error == self._cuda.CUresult.CUDA_ERROR_INVALID_VALUE:  # there are no more
                return tuple(layout)
            self._check(call, error)
            layout.append((int(place[0]), int(place[1])))

    def _maps(self, call: str, handle: Any, layout: Layout) -> tuple[int, ...]:
        """The arguments that are tensor maps. The size alone does not say so, hence the names."""
        maps = tuple(index for index, (_, size) in enumerate(layout) if size == MAP_BYTES)
        if not maps:
            return ()
        (name,) = self._ask(call, handle)
        return maps if name in [ours.encode() for ours in MAPPED] else ()

    def touched(self, node: Any) -> list[int]:
        """The addresses that a memcpy or memset node was recorded with."""
        if self.kind(node) == "MEMSET":
            (memset,) = self._ask("cuGraphMemsetNodeGetParams", node)
            return [int(memset.dst)]
        (copy,) = self._ask("cuGraphMemcpyNodeGetParams", node)
        return [int(copy.srcDevice), int(copy.dstDevice), int(copy.srcHost), int(copy.dstHost)]

    def launch(self, kernel: Kernel, arguments: int) -> Any:
        """The launch of a kernel with other arguments.

        Args:
            arguments: address of an array of pointers to them, which must stay where it is.
        """
        launch = self._cuda.CUDA_KERNEL_NODE_PARAMS()
        for name in ("func", "kern", "ctx", "gridDimX", "gridDimY", "gridDimZ", "blockDimX", "blockDimY", "blockDimZ"):
            setattr(launch, name, getattr(kernel.launch, name))
        launch.sharedMemBytes = kernel.launch.sharedMemBytes
        launch.kernelParams = arguments
        return launch

    def point(self, tensor_map: int, address: int) -> None:
        """Have a tensor map describe memory of the same shape at another address.

        Args:
            tensor_map: where it lies in memory of the CPU, a multiple of 64.
        """
        self._ask("cuTensorMapReplaceAddress", self._cuda.CUtensorMap(_ptr=tensor_map), address)

    def edit(self, executable: Any, node: Any, launch: Any) -> None:
        """Have later replays launch a node with other arguments, which are copied. Those under way are not changed."""
        self._ask("cuGraphExecKernelNodeSetParams", executable, node, launch)

    def _ask(self, call: str, *arguments: Any) -> list[Any]:
        error, *answer = getattr(self._cuda, call)(*arguments)
        self._check(call, error)
        return answer

    def _check(self, call: str, error: Any) -> None:
        if error != self._cuda.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{call}: {error.name}")

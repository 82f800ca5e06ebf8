"""While node: a captured step that the GPU repeats by itself, until every row has ended.

PyTorch replays a recording once a call. CUDA (from 12.4 on) can put it into a *conditional WHILE node* of a graph
around it, the parent, whose body runs again as long as a number on the device says so:

    parent graph:  [ WHILE again:  [ the captured step ] -> [ turn ] ]

The body is the recording, as a child graph, and one kernel more, `turn`. It hands the step's output to the host through
pinned memory, and sets the number: again, if a row is active and the host has not asked for an end. The function that
sets it exists in CUDA C++ only, so `turn` is not a Triton kernel: NVRTC, the compiler that comes with PyTorch's CUDA
wheels, makes it in a fraction of a second, once for an LLM.

The calls go through cuda.bindings, NVIDIA's Python bindings of the driver and the runtime. It is imported where a loop
is made and nowhere else, so nothing else needs it.
"""

import ctypes
from typing import Any

import torch

from .errors import GraphError
from .readback import Tape
from .state import DecodeState

THREADS = 64
SOURCE = r"""
typedef unsigned long long cudaGraphConditionalHandle;
extern "C" __device__ __cudart_builtin__ void cudaGraphSetConditional(cudaGraphConditionalHandle, unsigned int);

// One block. Step number *made has put out output [rows, 3]: it goes to line *made of ring [depth, width], and
// the host learns of it by *done, which is written when every thread's part of the line can be seen there.
extern "C" __global__ void turn(
    cudaGraphConditionalHandle again, const unsigned char* active, const int* output, int rows,
    int* made, int* ring, int width, int depth, volatile int* done, const volatile int* halt)
{
    __shared__ int any;
    int at = *made;
    int halted = threadIdx.x == 0 ? *halt : 0;  // asked for early: the answer comes from the host's memory
    if (threadIdx.x == 0) any = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < rows; i += blockDim.x)
        if (active[i]) any = 1;
    for (int i = threadIdx.x; i < 3 * rows; i += blockDim.x)
        ring[(long long)at * width + i] = output[i];
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) {
        *made = at + 1;
        *done = at + 1;
        cudaGraphSetConditional(again, any && !halted && at + 1 < depth);
    }
}
"""


def bindings() -> tuple[Any, Any, Any]:
    """The modules driver, nvrtc and runtime of cuda.bindings. Raises: GraphError."""
    try:
        from cuda.bindings import driver, nvrtc, runtime
    except ImportError as error:
        raise GraphError(
            "steps_per_graph='until_done' needs the package cuda-bindings, which is not there "
            f"({error}): pip install cuda-bindings, or give a number"
        ) from error
    return driver, nvrtc, runtime


def ok(call: str, result: tuple[Any, ...]) -> Any:
    """What a call of cuda.bindings returned beside its status. Raises: GraphError if that is no success."""
    status, *values = result
    if int(status) != 0:
        raise GraphError(
            f"steps_per_graph='until_done' is not possible here: {call} failed with {status.name}. It needs CUDA 12.4 "
            "and a driver for it; a number does not"
        )
    return values[0] if len(values) == 1 else values


class Turn:
    """The kernel between two steps of a loop, compiled for a device and loaded there. Raises: GraphError."""

    def __init__(self, device: torch.device) -> None:
        self._driver, nvrtc, _ = bindings()
        try:
            image = self._compile(nvrtc, torch.cuda.get_device_capability(device))
        except RuntimeError as error:  # cuda.bindings looks for the library at the first call
            raise GraphError(
                "steps_per_graph='until_done' needs NVRTC, the package nvidia-cuda-nvrtc, which cannot be loaded: "
                f"{str(error).splitlines()[0]}"
            ) from error
        self._module = ok("cuModuleLoadData", self._driver.cuModuleLoadData(image))
        self.function = ok("cuModuleGetFunction", self._driver.cuModuleGetFunction(self._module, b"turn"))

    @staticmethod
    def _compile(nvrtc: Any, capability: tuple[int, int]) -> bytes:
        """Machine code for a compute capability, (9, 0) say."""
        program = ok("nvrtcCreateProgram", nvrtc.nvrtcCreateProgram(SOURCE.encode(), b"turn.cu", 0, [], []))
        try:
            options = [f"--gpu-architecture=sm_{capability[0]}{capability[1]}".encode()]
            ok("nvrtcCompileProgram", nvrtc.nvrtcCompileProgram(program, len(options), options))
            image = b" " * ok("nvrtcGetCUBINSize", nvrtc.nvrtcGetCUBINSize(program))
            ok("nvrtcGetCUBIN", nvrtc.nvrtcGetCUBIN(program, image))  # writes into it
            return image
        finally:
            nvrtc.nvrtcDestroyProgram(program)

    def close(self) -> None:
        """Unload it, after the loops that use it."""
        self._driver.cuModuleUnload(self._module)


class WhileNode:
    """A recording that one launch repeats until every row has ended, the host says halt, or the tape is full.

    Its last step is always a whole one, and there is at least one. Everything is enqueued on the current stream.

    Args:
        step: made with keep_graph=True. It must outlive this, which copies its nodes and not its memory.
        state: of the rows that it was recorded for.
    Raises: GraphError.
    """

    def __init__(self, turn: Turn, step: torch.cuda.CUDAGraph, state: DecodeState, tape: Tape) -> None:
        self._driver, _, self._runtime = bindings()
        self._tape, self._ended = tape, torch.cuda.Event()
        self._made = torch.zeros(1, dtype=torch.int32, device=state.tokens.device)  # steps since the launch
        self._parent = ok("cudaGraphCreate", self._runtime.cudaGraphCreate(0))
        self._exec = None
        try:
            self._build(turn, step, state)
        except BaseException:
            self.close()
            raise

    def _build(self, turn: Turn, step: torch.cuda.CUDAGraph, state: DecodeState) -> None:
        runtime, parent = self._runtime, self._parent
        # at every launch the handle starts with the default value, 1; the flag that says so is 1 too
        handle = runtime.cudaGraphConditionalHandleCreate(parent, 1, 1)
        again = ok("cudaGraphConditionalHandleCreate", handle)
        body = self._add_while(again)
        graph = runtime.cudaGraph_t(step.raw_cuda_graph())
        child = ok("cudaGraphAddChildGraphNode", runtime.cudaGraphAddChildGraphNode(body, None, 0, graph))
        self._add_turn(turn, again, state, body, child)
        self._exec = ok("cudaGraphInstantiate", runtime.cudaGraphInstantiate(parent, 0))

    def _add_while(self, again: Any) -> Any:
        """The conditional node. Returns the graph of its body, which is empty."""
        runtime, params = self._runtime, self._runtime.cudaGraphNodeParams()
        params.type = runtime.cudaGraphNodeType.cudaGraphNodeTypeConditional
        params.conditional.handle = again
        params.conditional.type = runtime.cudaGraphConditionalNodeType.cudaGraphCondTypeWhile
        params.conditional.size = 1
        try:
            result = runtime.cudaGraphAddNode(self._parent, None, None, 0, params)
        except TypeError:  # before CUDA 13 there is no argument for the kind of the edges
            result = runtime.cudaGraphAddNode(self._parent, None, 0, params)
        ok("cudaGraphAddNode", result)
        return params.conditional.phGraph_out[0]

    def _add_turn(self, turn: Turn, again: Any, state: DecodeState, body: Any, child: Any) -> None:
        """The kernel, behind the step. Its arguments are frozen here: nothing that they point at ever moves."""
        driver, tape = self._driver, self._tape
        arguments = [
            (int(again), ctypes.c_uint64),
            (state.active.data_ptr(), ctypes.c_void_p),
            (state.output.data_ptr(), ctypes.c_void_p),
            (state.tokens.shape[0], ctypes.c_int),
            (self._made.data_ptr(), ctypes.c_void_p),
            (tape.ring.data_ptr(), ctypes.c_void_p),
            (tape.ring.shape[1], ctypes.c_int),
            (tape.ring.shape[0], ctypes.c_int),
            (tape.done.data_ptr(), ctypes.c_void_p),
            (tape.halt.data_ptr(), ctypes.c_void_p),
        ]
        params = driver.CUDA_KERNEL_NODE_PARAMS()
        params.func = turn.function
        params.gridDimX = params.gridDimY = params.gridDimZ = 1
        params.blockDimX, params.blockDimY, params.blockDimZ = THREADS, 1, 1
        params.sharedMemBytes = 0
        params.kernelParams = tuple(zip(*arguments, strict=True))  # (values, types)
        body, child = driver.CUgraph(int(body)), driver.CUgraphNode(int(child))
        ok("cuGraphAddKernelNode", driver.cuGraphAddKernelNode(body, [child], 1, params))

    def launch(self) -> None:
        """Enqueue the loop. The tape must be rewound, and no other loop under way that writes to it."""
        stream = torch.cuda.current_stream()
        self._made.zero_()
        (status,) = self._runtime.cudaGraphLaunch(self._exec, stream.cuda_stream)
        if int(status) != 0:  # it was possible before, so this is a device that has failed
            raise RuntimeError(f"cudaGraphLaunch failed with {status.name}")
        self._ended.record(stream)

    def ended(self) -> bool:
        """Whether the device is done with the last launch. If so, all of its output is on the tape."""
        return self._ended.query()

    def wait(self) -> None:
        """Wait until it is."""
        self._ended.synchronize()

    def close(self) -> None:
        """Give the graphs back. No launch may be under way. A device that has failed cannot be told."""
        if self._exec is not None:
            self._runtime.cudaGraphExecDestroy(self._exec)
        self._runtime.cudaGraphDestroy(self._parent)
        self._exec = None

"""Recordings pointed at other tensors, without a GPU: what is found, edited, refused and taken back, on fake graphs."""

import sys
import types
from enum import IntEnum
from typing import Any

import pytest
import torch
from fake_nodes import FakeDriver, FakeGraph, FakeMap, FakeNode
from small import CONFIG, FakeBackend, parts

from minillm.cache import KVCache
from minillm.engine import Engine
from minillm.errors import GraphError
from minillm.graph_nodes import COPIES, HARMLESS, CudaDriver, Kernel
from minillm.graphs import GraphRunner
from minillm.request import Request
from minillm.retarget import Editor
from minillm.sampling import Mode, SamplingParams
from minillm.step import step_of
from minillm.switch import Target, switch
from minillm.weights import allocate, randomise

OTHER = 0x7000_0000_0000  # an address that no move touches


def tensor(*shape: int) -> torch.Tensor:
    return torch.zeros(*(shape or (64,)))


def kernel(*arguments: Any) -> FakeNode:
    return FakeNode(list(arguments))


def editor(*recordings: list[FakeGraph], fail: set[int] | None = None) -> Editor:
    return Editor(recordings, FakeDriver(fail))  # type: ignore[arg-type]


def one(
    *nodes: FakeNode, fail: set[int] | None = None, fail_maps: set[int] | None = None
) -> tuple[FakeGraph, Editor, FakeDriver]:
    graph, driver = FakeGraph(list(nodes)), FakeDriver(fail, fail_maps)
    return graph, Editor([[graph]], driver), driver  # type: ignore[list-item]


def hides(address: int) -> bytes:
    """A structure of three words, the second of them an address."""
    return b"".join(word.to_bytes(8, "little") for word in (1, address, 2))


# ---------------------------------------------------------------------- what is edited


def test_every_address_inside_the_old_tensor_moves_with_its_offset_and_nothing_else() -> None:
    old, new = tensor(64), tensor(64)
    start, end = old.data_ptr(), old.data_ptr() + 256
    first, second = kernel(start, OTHER, (7).to_bytes(4, "little"), start + 128), kernel(end - 4, end, start - 8)
    third = kernel(OTHER)
    graph, edit, driver = one(first, second, third)
    edit.retarget([(old, new)])
    moved = new.data_ptr()
    assert graph.numbers() == [[moved, OTHER, moved + 128], [moved + 252, end, start - 8], [OTHER]]
    assert graph.runs[first][2] == (7).to_bytes(4, "little")
    assert driver.edits == 2  # and not the third kernel, which holds nothing
    assert all(node.unchanged() for node in graph.nodes)


def test_there_and_back_again_reads_the_nodes_once() -> None:
    old, new = tensor(), tensor()
    graph, edit, driver = one(kernel(old.data_ptr(), OTHER), kernel(OTHER), kernel(old.data_ptr() + 8))
    before = graph.numbers()
    for _ in range(3):
        edit.retarget([(old, new)])
        assert graph.numbers() == [[new.data_ptr(), OTHER], [OTHER], [new.data_ptr() + 8]]
        edit.retarget([(new, old)])
        assert graph.numbers() == before
    assert driver.read == 3


def test_two_tensors_may_change_places() -> None:
    a, b = tensor(), tensor()
    graph, edit, _ = one(kernel(a.data_ptr(), b.data_ptr() + 16))
    edit.retarget([(a, b), (b, a)])
    assert graph.numbers() == [[b.data_ptr(), a.data_ptr() + 16]]
    edit.retarget([(a, b), (b, a)])
    assert graph.numbers() == [[a.data_ptr(), b.data_ptr() + 16]]


def test_one_kernel_may_hold_several_moved_tensors_and_is_edited_once() -> None:
    old, new = [tensor(), tensor()], [tensor(), tensor()]
    graph, edit, driver = one(kernel(*(t.data_ptr() for t in old)))
    edit.retarget(list(zip(old, new, strict=True)))
    assert graph.numbers() == [[t.data_ptr() for t in new]]
    assert driver.edits == 1


def test_every_piece_of_every_recording_is_edited() -> None:
    old, new = tensor(), tensor()
    graphs = [FakeGraph([kernel(old.data_ptr())]) for _ in range(4)]
    editor(graphs[:2], graphs[2:]).retarget([(old, new)])
    assert [graph.numbers() for graph in graphs] == [[[new.data_ptr()]]] * 4


def test_a_tensor_that_no_recording_holds_is_left_out_and_one_that_stays_is_no_change() -> None:
    old, new, same = tensor(), tensor(), tensor()
    graph, edit, driver = one(kernel(old.data_ptr(), same.data_ptr()))
    edit.retarget([(tensor(), tensor()), (old, new), (same, same), (tensor(0), tensor(0))])
    assert graph.numbers() == [[new.data_ptr(), same.data_ptr()]]
    edit.retarget([(same, same)])
    assert driver.edits == 1


# ---------------------------------------------------------------------- what is refused


def refused(match: str, edit: Editor, *moves: tuple[torch.Tensor, torch.Tensor]) -> None:
    with pytest.raises(GraphError, match=match) as raised:
        edit.retarget(moves)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("new", "words"),
    [
        (tensor(4, 9), r"tensor 2 of the 2 .* \[4, 8\], has shape \[4, 8\], and .* \[4, 9\]"),
        (tensor(4, 8).double(), r"dtype torch.float32, and .* torch.float64"),
        (tensor(4, 8).to("meta"), r"device cpu, and .* meta"),
        (tensor(8, 4).t(), r"strides \(8, 1\), and .* \(1, 4\)"),
        (tensor(33)[1:].view(4, 8), r"steps of 16 bytes \(0 and 4\)"),
    ],
)  # fmt: skip
def test_tensors_that_differ_are_refused_with_numbers(new: torch.Tensor, words: str) -> None:
    old = tensor(4, 8)
    graph, edit, driver = one(kernel(old.data_ptr()))
    refused(words, edit, (tensor(), tensor()), (old, new))
    assert driver.edits == 0
    assert graph.numbers() == [[old.data_ptr()]]


def test_a_view_with_gaps_is_refused_and_whole_pieces_are_not() -> None:
    old, new = tensor(4, 8, 4), tensor(4, 8, 4)
    graph, edit, _ = one(kernel(old.data_ptr()), kernel(old[2].data_ptr()))
    refused("view with gaps", edit, (old[:, :2], new[:, :2]))
    edit.retarget([(old[i], new[i]) for i in range(4)])
    assert graph.numbers() == [[new.data_ptr()], [new[2].data_ptr()]]


def test_memory_given_twice_is_refused() -> None:
    old = tensor(8, 8)
    refused(r"\[8, 8\] and \[4, 8\], share memory", one(kernel(old.data_ptr()))[1], (old, tensor(8, 8)),
            (old[4:], tensor(4, 8)))  # fmt: skip


@pytest.mark.parametrize("node", ["structure", "MEMCPY", "MEMSET"])
def test_an_address_where_it_cannot_be_edited_is_refused_before_anything_is_changed(node: str) -> None:
    """As plain PyTorch operations and cuBLAS pass it."""
    old, new, other = tensor(), tensor(), tensor()
    address = old.data_ptr() + 16
    hidden = kernel(OTHER, hides(address)) if node == "structure" else FakeNode([OTHER, address], node)
    graph, edit, driver = one(kernel(old.data_ptr(), other.data_ptr()), hidden)
    words = "inside an argument of 24 bytes, as plain PyTorch" if node == "structure" else f"a {node} node holds it"
    refused(f"{words}.*fused kernels, or capture anew", edit, (other, tensor()), (old, new))
    assert driver.edits == 0
    edit.retarget([(other, new)])  # what nobody hides can still be moved
    assert graph.numbers()[0] == [old.data_ptr(), new.data_ptr()]


def test_a_tensor_that_only_some_recordings_show_is_refused() -> None:
    """A tensor map of cuBLAS may have an address in a form that nobody can find."""
    old = tensor()
    graphs = [FakeGraph([kernel(old.data_ptr())]), FakeGraph([kernel(OTHER)]), FakeGraph([kernel(old.data_ptr())])]
    refused("only 2 of the 3 recordings", editor(*([g] for g in graphs)), (old, tensor()))


def test_what_nobody_holds_is_refused() -> None:
    refused("no recording holds any of the 2 tensors", one(kernel(OTHER))[1], (tensor(), tensor()),
            (tensor(8), tensor(8)))  # fmt: skip


@pytest.mark.parametrize(
    ("node", "words"),
    [
        (FakeNode([], "CONDITIONAL"), "has a CONDITIONAL node"),
        (FakeNode([OTHER], shows=False), "does not show its arguments"),
    ],
)
def test_nodes_that_cannot_be_read_are_refused(node: FakeNode, words: str) -> None:
    with pytest.raises(GraphError, match=words):
        one(kernel(OTHER), node)


def test_nodes_without_addresses_are_no_hindrance() -> None:
    old, new = tensor(), tensor()
    graph, edit, _ = one(FakeNode([], "EMPTY"), FakeNode([]), kernel(old.data_ptr()), FakeNode([], "EVENT_RECORD"))
    edit.retarget([(old, new)])
    assert graph.numbers()[-1] == [new.data_ptr()]


# ---------------------------------------------------------------------- halves are taken back


@pytest.mark.parametrize("at", [0, 1, 4])
def test_a_refusal_of_the_driver_is_taken_back(at: int) -> None:
    old, new = tensor(), tensor()
    graphs = [FakeGraph([kernel(old.data_ptr(), OTHER) for _ in range(5)])]
    before, edit = graphs[0].numbers(), editor(graphs, fail={at})
    refused(f"edit kernel {at + 1} of 5 .CUDA_ERROR_INVALID_VALUE.; the recordings are as they were", edit, (old, new))
    assert graphs[0].numbers() == before
    edit.retarget([(old, new)])
    assert graphs[0].numbers() == [[new.data_ptr(), OTHER]] * 5


def test_what_cannot_be_taken_back_is_no_graph_error() -> None:
    old = tensor()
    edit = editor([FakeGraph([kernel(old.data_ptr()) for _ in range(5)])], fail={3, 4})
    with pytest.raises(RuntimeError, match="CUDA_ERROR"):
        edit.retarget([(old, tensor())])


# ---------------------------------------------------------------------- tensor maps


def test_a_tensor_map_is_followed_there_and_back_by_the_driver_alone() -> None:
    old, new = tensor(), tensor()
    node, inside = kernel(FakeMap(old.data_ptr())), kernel(FakeMap(old.data_ptr() + 32))
    graph, edit, driver = one(node, inside, kernel(FakeMap(OTHER)))
    before = dict(graph.runs)
    for _ in range(2):
        edit.retarget([(old, new)])
        assert graph.runs == before | {
            node: [FakeMap(new.data_ptr())], inside: [FakeMap(new.data_ptr() + 32)]
        }  # fmt: skip
        edit.retarget([(new, old)])
        assert graph.runs == before
    there, back = ([t.data_ptr(), t.data_ptr() + 32] for t in (new, old))
    assert [address for _, address in driver.pointed] == (there + back) * 2
    assert all(n.unchanged() for n in graph.nodes)


def test_a_kernel_may_take_one_tensor_plainly_and_another_by_a_map() -> None:
    plain, mapped, new = tensor(), tensor(), [tensor(), tensor()]
    node = kernel(plain.data_ptr(), FakeMap(mapped.data_ptr()), mapped.data_ptr() + 16, FakeMap(plain.data_ptr()))
    graph, edit, driver = one(node)
    edit.retarget(list(zip((plain, mapped), new, strict=True)))
    a, b = (t.data_ptr() for t in new)
    assert graph.runs[node] == [a.to_bytes(8, "little"), FakeMap(b), (b + 16).to_bytes(8, "little"), FakeMap(a)]
    assert sorted(address for _, address in driver.pointed) == sorted([a, b])
    assert driver.edits == 1


def test_the_driver_gets_maps_where_it_takes_them() -> None:
    """Plain memory begins at multiples of 16: that all of these were right by chance is out of the question."""
    old = tensor()
    _, edit, driver = one(*(kernel(OTHER, FakeMap(old.data_ptr())) for _ in range(32)))
    edit.retarget([(old, tensor())])
    assert {at % 64 for at, _ in driver.pointed} == {0}
    assert len({at for at, _ in driver.pointed}) == 32


def test_what_is_as_large_as_a_map_and_is_none_is_refused() -> None:
    """As cuBLAS passes its own."""
    old = tensor()
    _, edit, driver = one(kernel(FakeMap(old.data_ptr())), kernel(bytes(FakeMap(old.data_ptr()))))
    refused("inside an argument of 128 bytes", edit, (old, tensor()))
    assert (driver.edits, driver.pointed) == (0, [])


def test_an_address_in_the_rest_of_a_map_is_refused() -> None:
    """Where the driver keeps something else than was thought."""
    old = tensor()
    _, edit, _ = one(kernel(old.data_ptr()), kernel(FakeMap(OTHER, second=old.data_ptr())))
    refused("inside an argument of 128 bytes", edit, (old, tensor()))


def test_a_map_that_only_some_recordings_have_is_refused() -> None:
    old = tensor()
    graphs = [FakeGraph([kernel(FakeMap(old.data_ptr()))]), FakeGraph([kernel(FakeMap(OTHER))])]
    refused("only 1 of the 2 recordings", editor(*([g] for g in graphs)), (old, tensor()))


@pytest.mark.parametrize("at", [0, 1, 4])
def test_a_map_that_the_driver_refuses_to_change_leaves_all_as_it_was(at: int) -> None:
    old, new = tensor(), tensor()
    graph, edit, driver = one(
        *(kernel(old.data_ptr(), FakeMap(old.data_ptr() + 16)) for _ in range(5)), fail_maps={at}
    )  # fmt: skip
    before = dict(graph.runs)
    refused(f"edit kernel {at + 1} of 5 .CUDA_ERROR_INVALID_VALUE.; the recordings are as they were", edit, (old, new))
    assert graph.runs == before
    assert driver.edits == 0
    maps = [address for _, address in driver.pointed]
    assert maps == [new.data_ptr() + 16] * (at + 1) + [old.data_ptr() + 16] * at
    edit.retarget([(old, new)])
    after = [new.data_ptr().to_bytes(8, "little"), FakeMap(new.data_ptr() + 16)]
    assert list(graph.runs.values()) == [after] * 5


def test_plain_arguments_written_before_a_refused_map_are_not_sent_later() -> None:
    """The next change sends the whole kernel: what was refused must not come along."""
    first, second, new = tensor(), tensor(), tensor()
    low, high = sorted((first, second), key=torch.Tensor.data_ptr)
    node = kernel(low.data_ptr(), FakeMap(high.data_ptr()), OTHER)
    graph, edit, _ = one(node, fail_maps={0})
    refused("edit kernel 1 of 1", edit, (low, tensor()), (high, tensor()))
    edit.retarget([(high, new)])
    assert graph.runs[node] == [
        low.data_ptr().to_bytes(8, "little"), FakeMap(new.data_ptr()), OTHER.to_bytes(8, "little")
    ]  # fmt: skip


def test_a_refused_edit_puts_maps_back_by_the_driver() -> None:
    old, new = tensor(), tensor()
    graph, edit, driver = one(*(kernel(FakeMap(old.data_ptr())) for _ in range(3)), fail={1})
    before = dict(graph.runs)
    refused("edit kernel 2 of 3", edit, (old, new))
    assert graph.runs == before
    assert [address for _, address in driver.pointed] == [new.data_ptr()] * 3 + [old.data_ptr()] * 3
    edit.retarget([(old, new)])
    assert list(graph.runs.values()) == [[FakeMap(new.data_ptr())]] * 3


def test_a_map_that_cannot_be_put_back_is_no_graph_error() -> None:
    old = tensor()
    _, edit, _ = one(*(kernel(FakeMap(old.data_ptr())) for _ in range(3)), fail_maps={2, 3})
    with pytest.raises(RuntimeError, match="CUDA_ERROR"):
        edit.retarget([(old, tensor())])


# ---------------------------------------------------------------------- the runner


class EditableBackend(FakeBackend):
    """Recordings whose fake graphs hold the address of the cache they were captured on, and how often they replayed."""

    def __init__(self, cache: KVCache, fail: set[int] | None = None) -> None:
        super().__init__()
        self.driver, self.graphs, self.editors = FakeDriver(fail), list[FakeGraph](), 0
        self._address = cache.kv.data_ptr()

    def editor(self, recordings: list) -> Editor:
        self.editors += 1
        self.graphs = [FakeGraph([kernel(self._address)]) for _ in recordings]
        return Editor([[g] for g in self.graphs], self.driver)  # type: ignore[list-item]


def runner_of(fail: set[int] | None = None) -> tuple[GraphRunner, EditableBackend, KVCache, Any]:
    model, cache, state = parts(2, 300)
    backend = EditableBackend(cache, fail)
    runner = GraphRunner(step_of(model, cache), state, cache, backend)
    runner.capture()
    return runner, backend, cache, model


def test_a_runner_edits_all_its_recordings_and_says_how_often() -> None:
    runner, backend, cache, model = runner_of()
    other = cache.another()
    for target in (other, cache, other):
        runner.retarget(step_of(model, target), target)
        assert {n for g in backend.graphs for (n,) in g.numbers()} == {target.kv.data_ptr()}
    assert len(backend.graphs) == runner.report.graphs == 12
    assert runner.report.retargets == 3
    assert runner.report.retarget_seconds > 0
    assert backend.editors == 1
    assert runner.find(1, 1, Mode.GREEDY) is not None
    runner.capture()  # new recordings have nodes of their own
    with pytest.raises(GraphError, match="no recording holds"):
        runner.retarget(step_of(model, cache), cache)
    assert backend.editors == 2


def test_a_refused_change_of_a_runner_changes_nothing() -> None:
    runner, backend, cache, model = runner_of(fail={5})
    before, step = runner.report.replays, runner._step
    with pytest.raises(GraphError, match="as they were"):
        runner.retarget(step_of(model, cache.another()), cache.another())
    assert (runner._step, runner._cache, runner.report.retargets) == (step, cache, 0)
    assert {n for g in backend.graphs for (n,) in g.numbers()} == {cache.kv.data_ptr()}
    runner.step(1, 10, Mode.GREEDY)
    assert runner.report.replays == before + 1


def test_recordings_left_half_edited_are_never_replayed() -> None:
    runner, _, cache, model = runner_of(fail={5, 6})
    with pytest.raises(GraphError, match="graphs were dropped"):
        runner.retarget(step_of(model, cache.another()), cache.another())
    runner.step(1, 10, Mode.GREEDY)
    assert not runner.report.enabled
    assert runner.report.eager_reasons == {"retarget failed": 1}


def test_without_cuda_bindings_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(GraphError, match="pip install cuda-bindings, or capture anew"):
        CudaDriver()


# ---------------------------------------------------------------------- the adapter


class Result(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_INVALID_HANDLE = 400


def test_the_adapter_speaks_to_the_driver_as_cuda_bindings_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call answers (error, values...), and counts its answers by asking for none first."""

    class Launch(types.SimpleNamespace):
        def __init__(self, **given: int) -> None:
            names = ("func", "kern", "ctx", "gridDimX", "gridDimY", "gridDimZ", "blockDimX", "blockDimY", "blockDimZ",
                     "sharedMemBytes", "kernelParams")  # fmt: skip
            super().__init__(**(dict.fromkeys(names, 0) | given))

    sizes, asked, sent = [(0, 8), (8, 4), (16, 24)], [], []

    def info(kernel: int, index: int) -> tuple:
        asked.append((kernel, index))
        if kernel == 13:
            return Result.CUDA_ERROR_INVALID_HANDLE, None, None
        return (Result.CUDA_SUCCESS, *sizes[index]) if index < 3 else (Result.CUDA_ERROR_INVALID_VALUE, None, None)

    kinds = {1: "KERNEL", 2: "MEMSET", 3: "MEMCPY"}
    launches = {
        1: Launch(func=7, gridDimX=5, sharedMemBytes=99, kernelParams=1234),
        4: Launch(kern=9),
        5: Launch(func=13),
    }
    copy = types.SimpleNamespace(srcDevice=1, dstDevice=2, srcHost=3, dstHost=4)
    cuda = types.SimpleNamespace(
        CUresult=Result, CUDA_KERNEL_NODE_PARAMS=Launch, CUgraph=lambda raw: raw, CUgraphExec=lambda raw: raw,
        cuGraphGetNodes=lambda graph, count: (Result.CUDA_SUCCESS, list(range(count)), 3),
        cuGraphNodeGetType=lambda node: (
            Result.CUDA_SUCCESS, types.SimpleNamespace(name=f"CU_GRAPH_NODE_TYPE_{kinds[node]}")
        ),
        cuGraphKernelNodeGetParams=lambda node: (Result.CUDA_SUCCESS, launches[node]),
        cuFuncGetParamInfo=info, cuKernelGetParamInfo=info,
        cuGraphMemsetNodeGetParams=lambda node: (Result.CUDA_SUCCESS, types.SimpleNamespace(dst=8)),
        cuGraphMemcpyNodeGetParams=lambda node: (Result.CUDA_SUCCESS, copy),
        cuGraphExecKernelNodeSetParams=lambda *given: (sent.append(given), (Result(given[1]),))[1],
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", cuda)
    driver = CudaDriver()
    graph = types.SimpleNamespace(raw_cuda_graph=lambda: 50, raw_cuda_graph_exec=lambda: 60)
    assert driver.open(graph) == (60, [0, 1, 2])  # type: ignore[arg-type]
    assert driver.kind(2) == "MEMSET"
    assert (driver.touched(2), driver.touched(3)) == ([8], [1, 2, 3, 4])
    recorded = driver.kernel(1)
    assert (recorded.layout, recorded.arguments) == (tuple(sizes), 1234)
    assert driver.kernel(1).layout == recorded.layout
    assert asked == [(7, 0), (7, 1), (7, 2), (7, 3)]  # once for each kernel, however many nodes launch it
    assert driver.kernel(4).layout == tuple(sizes)  # a kernel that goes by its other name
    assert asked[-1] == (9, 3)
    with pytest.raises(RuntimeError, match="cuFuncGetParamInfo: CUDA_ERROR_INVALID_HANDLE"):
        driver.kernel(5)
    launch = driver.launch(recorded, 4321)
    assert launch == Launch(func=7, gridDimX=5, sharedMemBytes=99, kernelParams=4321)
    assert launches[1].kernelParams == 1234
    driver.edit(60, 0, launch)
    with pytest.raises(RuntimeError, match="cuGraphExecKernelNodeSetParams: CUDA_ERROR_INVALID_VALUE"):
        driver.edit(60, 1, launch)
    assert sent == [(60, 0, launch), (60, 1, launch)]


def test_the_adapter_knows_tensor_maps_by_size_and_name_and_has_the_driver_change_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = [(0, 8), (64, 128), (192, 4), (256, 128)]
    names = {1: b"linear_kernel", 2: b"cutlass_kernel", 3: b"not_linear_kernel", 4: None, 5: b"best_logits_kernel"}
    asked, pointed = [], []

    def info(handle: int, index: int) -> tuple:
        known = sizes[:1] if handle == 6 else sizes
        if index == len(known):
            return Result.CUDA_ERROR_INVALID_VALUE, None, None
        return (Result.CUDA_SUCCESS, *known[index])

    def name(kind: str, handle: int) -> tuple:
        asked.append((kind, handle))
        return (Result.CUDA_SUCCESS, names[handle]) if handle in names else (Result.CUDA_ERROR_INVALID_HANDLE, None)

    def replace(tensor_map: tuple, address: int) -> tuple:
        pointed.append((tensor_map, address))
        return (Result(address % 2),)

    cuda = types.SimpleNamespace(
        CUresult=Result, cuFuncGetParamInfo=info, cuKernelGetParamInfo=info,
        cuFuncGetName=lambda handle: name("func", handle), cuKernelGetName=lambda handle: name("kern", handle),
        cuGraphKernelNodeGetParams=lambda launch: (Result.CUDA_SUCCESS, launch),
        CUtensorMap=lambda _ptr: ("map", _ptr), cuTensorMapReplaceAddress=replace,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", cuda)
    driver = CudaDriver()

    def maps(func: int = 0, kern: int = 0) -> tuple[int, ...]:
        return driver.kernel(types.SimpleNamespace(func=func, kern=kern, kernelParams=1)).maps

    assert [maps(1), maps(2), maps(3), maps(4), maps(1)] == [(1, 3), (), (), (), (1, 3)]
    assert (maps(kern=5), maps(6)) == ((1, 3), ())
    assert asked == [("func", 1), ("func", 2), ("func", 3), ("func", 4), ("kern", 5)]  # once each, and if it matters
    with pytest.raises(RuntimeError, match="cuFuncGetName: CUDA_ERROR_INVALID_HANDLE"):
        maps(7)
    driver.point(4096, 512)
    with pytest.raises(RuntimeError, match="cuTensorMapReplaceAddress: CUDA_ERROR_INVALID_VALUE"):
        driver.point(4096, 513)
    assert pointed == [(("map", 4096), 512), (("map", 4096), 513)]


def test_the_real_cuda_bindings_have_what_is_used() -> None:
    cuda = pytest.importorskip("cuda.bindings.driver")
    for name in (
        "cuGraphGetNodes", "cuGraphNodeGetType", "cuGraphKernelNodeGetParams", "cuFuncGetParamInfo",
        "cuKernelGetParamInfo", "cuGraphMemsetNodeGetParams", "cuGraphMemcpyNodeGetParams",
        "cuGraphExecKernelNodeSetParams", "cuFuncGetName", "cuKernelGetName", "cuTensorMapReplaceAddress",
    ):  # fmt: skip
        assert callable(getattr(cuda, name))
    kinds = {kind.name.removeprefix("CU_GRAPH_NODE_TYPE_") for kind in cuda.CUgraphNodeType}
    assert {*COPIES, *HARMLESS, "KERNEL"} <= kinds
    was = cuda.CUDA_KERNEL_NODE_PARAMS()
    was.gridDimX, was.blockDimZ, was.sharedMemBytes, was.func = 3, 2, 77, cuda.CUfunction(1 << 40)
    launch = CudaDriver().launch(Kernel((), 0, was), 1 << 41)
    assert (launch.gridDimX, launch.blockDimZ, launch.sharedMemBytes) == (3, 2, 77)
    assert (int(launch.func), int(launch.kernelParams), int(launch.kern)) == (1 << 40, 1 << 41, 0)
    assert all(int(getattr(cuda.CUDA_MEMCPY3D(), n)) == 0 for n in ("srcDevice", "dstDevice", "srcHost", "dstHost"))
    assert int(cuda.CUDA_MEMSET_NODE_PARAMS().dst) == 0
    assert cuda.CUtensorMap(_ptr=1 << 41).getPtr() == 1 << 41  # memory of ours, and no copy of it


# ---------------------------------------------------------------------- the engine


def engine_of() -> Engine:
    model, cache, state = parts(2, 300)
    return Engine(model, cache, state, GraphRunner(step_of(model, cache), state, cache, None))


def answer(engine: Engine, prompt: list[int]) -> Request:
    request = Request(prompt, SamplingParams(temperature=0), len(prompt) + 12, [], 0, on_token=lambda *_: False)
    engine.submit(request)
    while not request.done:
        engine.step()
    while engine.busy:
        engine.step()
    return request


PROMPT = list(range(3, 60))


def test_two_conversations_of_one_engine_do_not_see_each_other() -> None:
    engine = engine_of()
    mine = Target.of(engine)
    yours = mine.beside()
    first = answer(engine, PROMPT)
    kept = mine.cache.kv.clone()
    switch(engine, yours)
    assert not yours.cache.kv.any()
    again = answer(engine, PROMPT)
    assert again.cached == 0  # the other cache knows nothing of it
    assert again.token_ids == first.token_ids
    assert torch.equal(mine.cache.kv, kept)
    switch(engine, mine)
    turn = answer(engine, PROMPT + first.token_ids + [9])
    assert turn.cached == len(PROMPT) + len(first.token_ids) - 1  # and this one still does
    assert turn.token_ids == answer(engine_of(), PROMPT + first.token_ids + [9]).token_ids


def test_two_fine_tunes_share_an_engine() -> None:
    torch.manual_seed(7)
    tuned = allocate(CONFIG, torch.device("cpu"), torch.float32)
    randomise(tuned, 0.3)
    engine, alone = engine_of(), engine_of()
    plain = Target.of(engine)
    other = plain.beside(tuned)
    expected = answer(engine, PROMPT).token_ids
    switch(engine, other)
    assert engine.model.weights is tuned
    assert engine.model.rope is plain.model.rope
    got = answer(engine, PROMPT)
    for mine, theirs in zip(alone.model.weights.tensors(), tuned.tensors(), strict=True):
        mine.copy_(theirs)
    assert got.token_ids == answer(alone, PROMPT).token_ids != expected
    switch(engine, plain)
    assert answer(engine, PROMPT).cached == len(PROMPT) - 1
    assert answer(engine, PROMPT).token_ids == expected


def test_a_switch_under_open_requests_or_to_other_shapes_is_refused() -> None:
    engine = engine_of()
    target = Target.of(engine)
    engine.submit(Request(PROMPT, SamplingParams(), 100, [], 0, on_token=lambda *_: False))
    engine.step()
    with pytest.raises(GraphError, match="are open: 1"):
        switch(engine, target.beside())
    engine.cancel(engine.rows[0] or engine.waiting[0])
    while engine.busy:
        engine.step()
    _, cache, _ = parts(2, 400)
    with pytest.raises(GraphError, match=r"shape \[2, 2, 2, 2, 301, 8\], and .* \[2, 2, 2, 2, 401, 8\]"):
        switch(engine, Target(engine.model, cache, target.memory, target.prefills))
    switch(engine, target.beside())
    assert engine.cache is not target.cache


def test_a_target_of_another_engine_is_refused() -> None:
    """Once it was taken, and the recordings went on using the rotary table of a model that nobody held any more."""
    engine = engine_of()
    with pytest.raises(GraphError, match="of another engine"):
        switch(engine, Target.of(engine_of()))
    assert answer(engine, PROMPT).token_ids == answer(engine_of(), PROMPT).token_ids


def test_the_state_is_the_same_for_every_target() -> None:
    """A row admitted before a switch of the runner alone goes on in the other cache."""
    model, cache, state = parts(2, 300)
    runner = GraphRunner(step_of(model, cache), state, cache, None)
    other = cache.another()
    runner.retarget(step_of(model, other), other)
    state.admit(0, [5, 6], 50, [], SamplingParams(temperature=0), 0)
    runner.step(1, 2, Mode.GREEDY)
    assert other.kv[:, :, 0, :, 1].any()
    assert not cache.kv.any()

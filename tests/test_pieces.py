"""A step in several graphs, without a GPU: where it is cut, in which order it is replayed, and what is refused."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from small import CPU, FakeBackend, parts

from minillm.assembly import Options, build_engine
from minillm.capture import CudaBackend, Pieces, Recording
from minillm.config import ModelConfig
from minillm.errors import ConfigError
from minillm.graphs import GraphRunner
from minillm.pieces import Cuts
from minillm.sampling import Mode, SamplingParams
from minillm.step import step_of

CONFIG = ModelConfig.from_dict(
    dict(
        model_type="llama", vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=7,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024,
    )
)  # fmt: skip


@pytest.mark.parametrize("layers", [1, 2, 7, 16, 30])
def test_pieces_are_as_equal_as_they_can_be(layers: int) -> None:
    for pieces in range(1, layers + 1):
        ends = [0, *Cuts(layers, pieces).after, layers]
        sizes = [high - low for low, high in pairwise(ends)]
        assert len(sizes) == pieces
        assert max(sizes) - min(sizes) <= 1
        assert min(sizes) >= 1


def test_more_pieces_than_layers_are_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"graph_pieces=8 .* at most 7"):
        Cuts(7, 8)
    model, *_ = parts(1, 64, config=CONFIG)
    options = Options(1, "auto", 1, None, True, None, 1, graph_pieces=8)
    with pytest.raises(ConfigError, match="at most 7"):
        build_engine(model, 64, options, progress=False)


class FakeGraph:
    """A graph as PyTorch's, of numbers that a step notes while it is captured."""

    open: "FakeGraph | None" = None
    log: list[str] = []  # noqa: RUF012  # of each test anew

    def __init__(self, keep_graph: bool = False) -> None:
        assert keep_graph
        self.noted: list[object] = []
        self.instantiated = False

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        assert FakeGraph.open is None
        FakeGraph.open = self
        FakeGraph.log.append(f"begin {pool}")

    def capture_end(self) -> None:
        if FakeGraph.open is not self:
            raise RuntimeError("not capturing")
        FakeGraph.open = None
        FakeGraph.log.append("end")

    def instantiate(self) -> None:
        assert FakeGraph.open is None
        self.instantiated = True

    def replay(self) -> None:
        FakeGraph.log.append(f"replay {self.noted}")


@pytest.fixture
def backend_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[Cuts | None], CudaBackend]:
    """Makes a CudaBackend that captures FakeGraphs."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    monkeypatch.setattr(CudaBackend, "on_stream", FakeBackend.on_stream)
    monkeypatch.setattr(FakeGraph, "log", [])
    monkeypatch.setattr(FakeGraph, "open", None)
    return lambda cuts: CudaBackend(CPU, cuts=cuts)


def layers_of(cuts: Cuts, layers: int, fail_after: int | None = None) -> Callable[[], None]:
    """A step that notes its layers in the graph that is being captured."""

    def step() -> None:
        for layer in range(layers):
            assert FakeGraph.open is not None
            FakeGraph.open.noted.append(layer)
            if layer == fail_after:
                raise torch.OutOfMemoryError("injected")
            cuts(layer + 1)

    return step


def test_a_step_is_captured_in_one_pool_piece_by_piece_and_replayed_in_order(
    backend_of: Callable[[Cuts | None], CudaBackend],
) -> None:
    cuts = Cuts(7, 3)
    recording = backend_of(cuts).capture(layers_of(cuts, 7))
    assert isinstance(recording, Pieces)
    assert FakeGraph.log == ["begin pool", "end"] * 3
    assert all(graph.instantiated for graph in recording.graphs)  # type: ignore[attr-defined]
    FakeGraph.log.clear()
    recording.replay()
    assert FakeGraph.log == ["replay [0, 1]", "replay [2, 3]", "replay [4, 5, 6]"]
    FakeGraph.open = FakeGraph(keep_graph=True)
    layers_of(cuts, 7)()  # out of a capture, nothing is cut
    assert len(FakeGraph.open.noted) == 7


def test_one_piece_is_a_graph_of_pytorch_as_ever(backend_of: Callable[[Cuts | None], CudaBackend]) -> None:
    recording: Recording = backend_of(None).capture(layers_of(Cuts(7, 1), 7))
    assert isinstance(recording, FakeGraph)
    assert recording.instantiated


@pytest.mark.parametrize("fail_after", [0, 3, 6])
def test_an_error_in_any_piece_leaves_no_capture_behind(
    backend_of: Callable[[Cuts | None], CudaBackend], fail_after: int
) -> None:
    cuts = Cuts(7, 3)
    backend = backend_of(cuts)
    with pytest.raises(torch.OutOfMemoryError, match="injected"):
        backend.capture(layers_of(cuts, 7, fail_after))
    assert FakeGraph.open is None
    assert isinstance(backend.capture(layers_of(cuts, 7)), Pieces)  # and the next capture works


def test_an_error_of_a_cut_itself_leaves_no_capture_behind(
    backend_of: Callable[[Cuts | None], CudaBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    cuts = Cuts(7, 3)
    backend, begin = backend_of(cuts), backend_of(cuts)._begin
    started: list[object] = []

    def refuse(graph: torch.cuda.CUDAGraph) -> None:
        started.append(graph)
        if len(started) == 2:
            raise RuntimeError("no memory for a capture")
        begin(graph)

    monkeypatch.setattr(backend, "_begin", refuse)
    with pytest.raises(RuntimeError, match="no memory for a capture"):
        backend.capture(layers_of(cuts, 7))
    assert FakeGraph.open is None


@pytest.mark.parametrize("mode", list(Mode))
def test_the_model_calls_the_cuts_between_layers_and_computes_the_same(mode: Mode) -> None:
    results = []
    for pieces in (1, 3, 7):
        model, cache, state = parts(2, 64, config=CONFIG)
        cuts, seen = Cuts(7, pieces), list[int]()
        backend = FakeBackend(pieces=pieces)
        runner = GraphRunner(step_of(model, cache, seen.append), state, cache, backend)
        runner.capture()
        assert seen == [1, 2, 3, 4, 5, 6, 7] * (len(seen) // 7)  # but for one row, which a CPU runs in another way
        assert len(seen) == 7 * 3
        assert runner.report.pieces == pieces
        for row in range(2):
            state.admit(row, [5, 6 + row], 60, [], SamplingParams(seed=3), 3)
        runner._step = step_of(model, cache, cuts)
        for kv_len in range(2, 12):
            runner.step(2, kv_len, mode)
        results.append(state.output.clone())
    assert all(torch.equal(results[0], other) for other in results)

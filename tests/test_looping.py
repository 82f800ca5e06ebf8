"""Loops, as far as they need no GPU: when they are halted, what is delivered, and that none is left running."""

import sys
import threading
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small import FakeBackend, FakeLoop, parts, until
from test_engine import engine_of, prompt_of, request, run, solo
from test_graphs import step_of_nothing

from minillm import LLM, SamplingParams, looping, while_node
from minillm.assembly import Options, build_engine
from minillm.capture import CudaBackend
from minillm.engine import Engine
from minillm.errors import ConfigError, EngineError, GraphError, MinillmError
from minillm.graphs import make_runner
from minillm.looping import LoopEngine, Loops, make_loops
from minillm.readback import Tape
from minillm.request import Request
from minillm.service import Service
from minillm.state import DecodeState
from minillm.switch import Target, switch


def looping_engine(rows: int = 2, pace: int = 2, max_seq_len: int = 64, chunk: int = 16) -> LoopEngine:
    engine = engine_of(rows, max_seq_len, graphs=True, chunk=chunk, steps="until_done", pace=pace)
    assert isinstance(engine, LoopEngine)
    return engine


def fakes(engine: LoopEngine) -> list[FakeLoop]:
    return list(engine.loops._loops.values())  # type: ignore[arg-type]


def launches(engine: LoopEngine) -> int:
    return sum(loop.launches for loop in fakes(engine))


@pytest.mark.parametrize("pace", [1, 4, 100])
def test_one_launch_writes_the_whole_answers(pace: int) -> None:
    engine = looping_engine(pace=pace)
    requests = [request(prompt_of(5, 1), new=30), request(prompt_of(9, 2), new=12)]
    assert run(engine, *requests) == [solo(prompt_of(5, 1), new=30), solo(prompt_of(9, 2), new=12)]
    assert launches(engine) == engine.runner.report.replays == 1
    assert engine.runner.report.eager_steps == 0


def test_tokens_are_delivered_while_the_loop_runs() -> None:
    engine = looping_engine(pace=2)
    r = request(prompt_of(5, 1), new=30)
    engine.submit(r)
    seen = []
    while engine.busy:
        engine.step()
        seen.append(len(r.token_ids))
    assert seen == [1, *range(3, 30, 2), 30]


def test_an_arrival_halts_the_loop_if_there_is_a_row_for_it() -> None:
    engine = looping_engine(rows=2, pace=1)
    first, second, third = (request(prompt_of(5 + i, i), new=new) for i, new in enumerate((40, 20, 10)))
    engine.submit(first)
    for _ in range(4):
        engine.step()
    assert (launches(engine), engine.loops.running) == (1, True)
    engine.submit(second)
    for _ in range(4):
        engine.step()
    assert launches(engine) == 2
    assert second.token_ids
    engine.submit(third)  # there is no row, so nothing is halted before there is one
    while len(second.token_ids) < 20:
        engine.step()
        assert launches(engine) == 2
    run(engine)
    assert launches(engine) == 3
    for i, r in enumerate((first, second, third)):
        assert r.token_ids == solo(prompt_of(5 + i, i), new=(40, 20, 10)[i])


def test_a_long_prompt_is_read_in_chunks_with_one_step_between_them() -> None:
    engine = looping_engine(rows=2, max_seq_len=120, pace=1000, chunk=8)
    log: list[object] = []
    prefill, launch = engine.model.prefill, engine.loops.launch
    engine.model.prefill = lambda ids, *a, **k: (log.append(len(ids)), prefill(ids, *a, **k))[1]  # type: ignore[method-assign]

    def launching(decoding: Any, once: bool) -> None:
        log.append("once" if once else "loop")
        launch(decoding, once)

    engine.loops.launch = launching  # type: ignore[method-assign]
    first, long = request(prompt_of(5, 1), new=40), request(prompt_of(30, 2), new=3)
    engine.submit(first)
    engine.submit(long)
    run(engine)
    assert log == [5, "once", 8, "once", 8, "once", 8, "once", 6, "loop"]
    assert first.token_ids == run(engine_of(1, 120), request(prompt_of(5, 1), new=40))[0]
    assert long.token_ids == run(engine_of(1, 120), request(prompt_of(30, 2), new=3))[0]


def test_a_cancelled_request_halts_the_loop() -> None:
    engine = looping_engine(pace=1)
    r, other = request(prompt_of(5, 1), new=30), request(prompt_of(6, 2), new=30)
    for x in (r, other):
        engine.submit(x)
    for _ in range(5):
        engine.step()
    engine.cancel(r)
    assert engine.loops.tape.halt.item() == 1
    assert run(engine) == []
    assert launches(engine) == 2
    assert r.token_ids == solo(prompt_of(5, 1), new=30)[: len(r.token_ids)]
    assert other.token_ids == solo(prompt_of(6, 2), new=30)


def test_the_last_cancellation_leaves_no_loop_running() -> None:
    engine = looping_engine(pace=1)
    r = request(prompt_of(5, 1), new=30)
    engine.submit(r)
    engine.step()
    engine.cancel(r)
    assert engine.busy  # until the end of the loop was seen
    run(engine)
    assert not engine.loops.running
    assert all(loop.over for loop in fakes(engine))


def test_a_full_tape_is_another_launch() -> None:
    engine = looping_engine()
    engine.loops.close()
    engine.loops = Loops(engine.runner, engine.cache, depth=7)
    r = request(prompt_of(5, 1), new=30)
    assert run(engine, r) == [solo(prompt_of(5, 1), new=30)]
    assert launches(engine) == 5  # of 29 steps, the first token is the prompt's


def test_a_loop_that_fails_ends_the_open_requests_and_the_next_works(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = looping_engine(pace=1)
    r = request(prompt_of(5, 1), new=30)
    engine.submit(r)
    for _ in range(4):
        engine.step()

    def fail(self: FakeLoop) -> bool:
        raise RuntimeError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr(FakeLoop, "ended", fail)
        engine.step()
    assert isinstance(r.error, EngineError)
    assert not engine.busy
    assert run(engine, request(prompt_of(6, 2))) == [solo(prompt_of(6, 2))]


def test_an_interrupt_leaves_no_loop_running(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = looping_engine(pace=0)  # a device that takes its time

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    r = request(prompt_of(5, 1), new=30)
    engine.submit(r)
    engine.step()
    assert engine.loops.running
    with monkeypatch.context() as patch:
        patch.setattr(looping.time, "sleep", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert isinstance(r.error, EngineError)
    assert not engine.busy
    assert all(loop.over for loop in fakes(engine))
    assert not engine.state.active.any()
    assert engine.cache.kv[..., :-1, :].count_nonzero() == 0  # and nothing of it is believed


def test_shutting_down_halts_the_loop_and_gives_it_back() -> None:
    engine = looping_engine(pace=1)
    r = request(prompt_of(5, 1), new=50)
    engine.submit(r)
    for _ in range(3):
        engine.step()
    loops = fakes(engine)
    engine.shut_down(MinillmError("closed"))
    assert isinstance(r.error, MinillmError)
    assert len(r.token_ids) < 50
    assert all(loop.over and loop.closed for loop in loops)


def test_threads_ask_and_cancel_while_loops_run() -> None:
    engine = looping_engine(rows=3, pace=1, max_seq_len=200)
    service, loops = Service(engine, 100), fakes(engine)
    ended = [threading.Event() for _ in range(12)]
    asked = [request(prompt_of(4 + i, i), new=100, on_done=ended[i].set) for i in range(12)]
    for r in asked:
        service.submit(r)
    for r in asked[1::3]:
        until(lambda r=r: len(r.token_ids) > 3 or r.done)  # type: ignore[misc]
        service.cancel(r)
    assert all(event.wait(60) for event in ended)
    late = request(prompt_of(3, 1), new=190)
    service.submit(late)
    until(lambda: late.token_ids)
    service.close()
    for r in (*asked, late):
        text = run(engine_of(1, 200), request(r.prompt_token_ids, new=r.limit - len(r.prompt_token_ids)))[0]
        assert r.token_ids == text[: len(r.token_ids)]
        assert r.finish_reason != "length" or r.token_ids == text
    assert all(loop.over and loop.closed for loop in loops)


def test_scoring_between_two_loops() -> None:
    engine = looping_engine(rows=2, pace=1)
    running = request(prompt_of(5, 1), new=40)
    engine.submit(running)
    for _ in range(3):
        engine.step()
    scored = Request.scoring(prompt_of(20, 2))
    engine.submit(scored)
    run(engine)
    assert torch.cat(scored.scores or []).shape[0] == 20
    assert running.token_ids == solo(prompt_of(5, 1), new=40)


# ---------------------------------------------------------------------- where there are none


def test_loops_that_cannot_be_made() -> None:
    """One warning and a step at a time, or an error, as `graphs` says; nothing where there are no graphs anyway."""
    for graphs, backend in (("auto", FakeBackend()), ("on", FakeBackend()), ("off", FakeBackend()), ("auto", None)):
        _, cache, state = parts()
        runner = make_runner(step_of_nothing, state, cache, graphs, backend)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if graphs == "on":
                with pytest.raises(GraphError, match="no loops here"):
                    make_loops(runner, cache, graphs)
            else:
                assert make_loops(runner, cache, graphs) is None
                assert not runner.looping  # else a switch would be refused for good
        assert len(caught) == (graphs == "auto" and backend is not None)
        assert all("step by step: no loops here" in str(warning.message) for warning in caught)


@pytest.mark.parametrize(
    "error", [AttributeError("no cudaGraphAddNode"), TypeError("7 arguments"), RuntimeError("old")]
)
def test_other_bindings_than_those_that_were_tried_are_no_reason_to_fail(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, graphs="auto" fell back after a GraphError only, and an LLM could not be made at all."""

    def turn(device: torch.device) -> None:
        raise error

    monkeypatch.setattr(while_node, "Turn", turn)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", SimpleNamespace)
    backend = SimpleNamespace(on_stream=nullcontext, _turn=None, device=None)
    with pytest.raises(GraphError, match=f"not possible with these cuda-bindings .*{error}"):
        CudaBackend.loop(backend, SimpleNamespace(), None, None)  # type: ignore[arg-type]


def test_a_request_without_room_for_a_token_does_not_wait_for_a_loop() -> None:
    """Once it waited for a row, which it does not need, as long as others had them all."""
    engine = looping_engine(rows=1, pace=1)
    engine.submit(request(prompt_of(5, 1), new=40))
    for _ in range(4):
        engine.step()
    hopeless = request(prompt_of(9, 2), new=0)
    engine.submit(hopeless)
    engine.step()
    assert (hopeless.finish_reason, engine.loops.running) == ("length", True)
    run(engine)


def test_half_of_the_loops_are_given_back_when_the_next_cannot_be_made() -> None:
    class Failing(FakeBackend):
        def loop(self, *args: Any) -> FakeLoop:
            if len(self.loops) == 3:
                raise GraphError("no more")
            return super().loop(*args)

    _, cache, state = parts()
    backend = Failing(pace=1)
    runner = make_runner(step_of_nothing, state, cache, "on", backend)
    with pytest.raises(GraphError, match="no more"):
        Loops(runner, cache)
    assert [loop.closed for loop in backend.loops] == [True] * 3


def test_a_package_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda", None)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(GraphError, match="needs the package cuda-bindings") as raised:
        while_node.bindings()
    assert "\n" not in str(raised.value)


class Library:
    """Stands for a module of cuda.bindings: every call succeeds, except one."""

    def __init__(self, failing: str, log: list[str], old: bool = False) -> None:
        self._failing, self._log, self._old = failing, log, old

    def __getattr__(self, name: str) -> Any:
        if not name.startswith(("cudaGraph", "cu", "nvrtc")) or name.endswith(("Params", "PARAMS")):
            return lambda *_: SimpleNamespace(conditional=SimpleNamespace(phGraph_out=[7]))
        if name in ("cudaGraphNodeType", "cudaGraphConditionalNodeType"):
            return SimpleNamespace(cudaGraphNodeTypeConditional=1, cudaGraphCondTypeWhile=2)
        if name in ("cudaGraph_t", "CUgraph", "CUgraphNode"):
            return int

        def call(*args: Any) -> tuple[Any, ...]:
            if name == "cudaGraphAddNode" and len(args) == 5 and self._old:
                raise TypeError("takes exactly 4 positional arguments (5 given)")
            self._log.append(name)
            return Status(name == self._failing), 5

        return call


class Status(int):
    name = "cudaErrorInvalidValue"


CALLS = [
    "cudaGraphCreate", "cudaGraphConditionalHandleCreate", "cudaGraphAddNode", "cudaGraphAddChildGraphNode",
    "cuGraphAddKernelNode", "cudaGraphInstantiate",
]  # fmt: skip


def build(monkeypatch: pytest.MonkeyPatch, library: Library) -> while_node.WhileNode:
    monkeypatch.setattr(while_node, "bindings", lambda: (library, library, library))
    monkeypatch.setattr(torch.cuda, "Event", lambda: None)
    state = DecodeState.allocate(2, 97, torch.device("cpu"))
    turn, step = SimpleNamespace(function=1), SimpleNamespace(raw_cuda_graph=lambda: 3)
    return while_node.WhileNode(turn, step, state, Tape(2, 9, pinned=False))  # type: ignore[arg-type]


@pytest.mark.parametrize("failing", CALLS)
def test_a_call_that_fails_is_one_error_and_the_graph_is_given_back(
    failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    with pytest.raises(GraphError, match=f"{failing} failed with cudaErrorInvalidValue"):
        build(monkeypatch, Library(failing, log))
    assert log == CALLS[: CALLS.index(failing) + 1] + ["cudaGraphDestroy"] * (failing != CALLS[0])


@pytest.mark.parametrize("old", [False, True])
def test_both_forms_of_adding_a_node_are_known(old: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    build(monkeypatch, Library("", log, old)).close()
    assert log == [*CALLS, "cudaGraphExecDestroy", "cudaGraphDestroy"]


def test_nvrtc_that_cannot_be_loaded_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Missing(Library):
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError('Failure finding "libnvrtc.so.13"\nand more')

    monkeypatch.setattr(while_node, "bindings", lambda: (Library("", []), Missing("", []), Library("", [])))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(GraphError, match=r"nvidia-cuda-nvrtc.*libnvrtc.so.13\"$"):
        while_node.Turn(torch.device("cpu"))


def test_more_steps_than_a_row_has_tokens_are_refused() -> None:
    with pytest.raises(ConfigError, match="steps_per_graph=65 is more than the 64 tokens"):
        build_engine(parts(1, 64)[0], 64, Options(steps_per_graph=65), progress=False)


def test_what_does_not_go_together_is_refused() -> None:
    """A loop holds copies of the recordings, which would go on with the old tensors; pieces are no one graph."""
    engine = looping_engine()
    with pytest.raises(GraphError, match="until_done"):
        switch(engine, Target.of(engine))
    assert run(engine, request(prompt_of(5, 1))) == [solo(prompt_of(5, 1))]
    for steps in (2, "until_done"):
        with pytest.raises(ConfigError, match=r"graph_pieces=3.*steps_per_graph"):
            Options(1, "auto", 1, None, True, None, steps, 3)


@pytest.mark.parametrize("steps", [4, "until_done"])
@pytest.mark.filterwarnings("error")
def test_without_a_gpu_an_llm_makes_steps_one_by_one(steps: int | str, tiny: Path) -> None:
    params = SamplingParams(max_tokens=15, seed=3, ignore_eos=True)
    with LLM(tiny, device="cpu") as one, LLM(tiny, device="cpu", steps_per_graph=steps) as many:
        assert many.generate("the king", params).token_ids == one.generate("the king", params).token_ids
        assert many.graph_report().eager_steps == 14


def test_an_engine_without_loops_is_the_plain_one() -> None:
    assert type(engine_of(graphs=True, steps=3)) is Engine

"""Many tokens in one launch on a GPU: the same tokens as a step at a time, whatever ends or comes in the middle."""

import gc
import random
import threading
import warnings
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch
from small import parts, until
from test_graphs_gpu import CONFIG, PROMPTS, llm_of

from minillm import SamplingParams, while_node
from minillm.assembly import Options, build_engine
from minillm.config import ModelConfig
from minillm.engine import Engine
from minillm.errors import GraphError, MinillmError
from minillm.kernels.fused import FusedOps
from minillm.looping import LoopEngine, Loops
from minillm.model import Llama
from minillm.request import Request

CUDA = torch.device("cuda", 0)
FUSED = ModelConfig.from_dict(
    dict(
        model_type="llama", vocab_size=1003, hidden_size=256, intermediate_size=704, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096,
    )
)  # fmt: skip
MANY = [2, 5, "until_done"]
each = pytest.mark.parametrize("steps", MANY)
GREEDY = SamplingParams(max_tokens=80, temperature=0.0)


@pytest.fixture(autouse=True)
def _loops_can_be_made() -> None:
    pytest.importorskip("cuda.bindings", reason="loops need cuda.bindings")


def engine_of(steps: int | str, fused: bool, rows: int = 4, max_seq_len: int = 600, graphs: str = "on") -> Engine:
    """The product's own engine: with fused kernels in bfloat16, or of plain operations in float32."""
    config, dtype = (FUSED, torch.bfloat16) if fused else (CONFIG, torch.float32)
    model, _, _ = parts(1, max_seq_len, CUDA, dtype, config)
    if fused:
        assert FusedOps.supports(config, CUDA, dtype) is None
        model = Llama(config, model.weights, max_seq_len, FusedOps(config, rows, max_seq_len, CUDA))
    options = Options(rows, graphs, 100, None, False, (), steps, 1)
    return build_engine(model, max_seq_len, options, progress=False)


@pytest.fixture
def closed() -> Iterator[list[Engine]]:
    """Engines to be shut down, also after a failure."""
    engines: list[Engine] = []
    yield engines
    for engine in engines:
        engine.shut_down(MinillmError("the test is over"))


def requests_of(stops: list[list[int]]) -> list[Request]:
    """Greedy and drawn ones with limits of their own, the longest in the last row: all steps are of the same bucket."""
    params = [
        SamplingParams(temperature=0.0), SamplingParams(seed=5, temperature=1.2),
        SamplingParams(seed=6, top_k=20, top_p=0.9, repetition_penalty=1.2), SamplingParams(seed=7, logprobs=True),
    ]  # fmt: skip
    prompts = [[5, 6, 7], [8, 9], list(range(20, 60)), [17]]
    return [
        Request(prompt, p, len(prompt) + new, stop, p.seed or 0)
        for prompt, p, new, stop in zip(prompts, params, (37, 3, 64, 150), stops, strict=True)
    ]


def answers(engine: Engine, requests: list[Request]) -> list[tuple[list[int], str | None]]:
    for request in requests:
        engine.submit(request)
    until(lambda: engine.step() or not engine.busy)
    assert all(request.error is None for request in requests), [request.error for request in requests]
    return [(request.token_ids, request.finish_reason) for request in requests]


@each
@pytest.mark.parametrize("fused", [True, False])
def test_the_tokens_are_those_of_a_step_at_a_time(steps: int | str, fused: bool, closed: list[Engine]) -> None:
    """Bit for bit with fused kernels, whose attention reads each row's length on the device; limits, drawn tokens,
    logprobs, and end tokens in the middle."""
    one, many = engine_of(1, fused), engine_of(steps, fused)
    closed += [one, many]
    assert isinstance(many, LoopEngine) == (steps == "until_done")
    free = answers(one, requests_of([[]] * 4))
    assert [len(tokens) for tokens, _ in free] == [37, 3, 64, 150]
    assert answers(many, requests_of([[]] * 4)) == free
    assert many.runner.report.replays < one.runner.report.replays
    ends = [[tokens[len(tokens) // 2]] for tokens, _ in free]
    ends[3] = []  # the last row keeps the others' bucket
    stopped = answers(one, requests_of(ends))
    assert [reason for _, reason in stopped[:3]] == ["stop"] * 3
    for _ in range(3):
        assert answers(many, requests_of(ends)) == stopped
    assert answers(many, requests_of([[]] * 4)) == free  # after rows that stopped
    assert not many.state.active.any()
    assert many.cache.kv.isfinite().all()
    assert many.runner.report.eager_steps == 0


def test_logprobs_come_through_the_tape(closed: list[Engine]) -> None:
    told: list[list[float]] = []
    for steps in (1, "until_done"):
        engine = engine_of(steps, fused=True, rows=1)
        closed.append(engine)
        got: list[float] = []
        request = Request(
            [5, 6], SamplingParams(logprobs=True), 60, [], 3, on_token=lambda _, p, __, got=got: bool(got.append(p))
        )  # type: ignore[misc]
        answers(engine, [request])
        told.append(got)
    assert told[0] == told[1]
    assert len(set(told[0])) > 20


def test_a_whole_answer_is_one_launch_and_a_full_tape_another(closed: list[Engine]) -> None:
    engine = engine_of("until_done", fused=True, rows=1)
    closed.append(engine)
    assert isinstance(engine, LoopEngine)
    answer = answers(engine, [Request([5, 6], GREEDY, 502, [], 0)])
    assert engine.runner.report.replays == 1
    engine.loops.close()
    engine.loops = Loops(engine.runner, engine.cache, depth=100)
    assert answers(engine, [Request([5, 6], GREEDY, 502, [], 0)]) == answer
    assert engine.runner.report.replays == 1 + 5


@pytest.mark.parametrize("rows", [70])
def test_more_rows_than_the_kernel_has_threads(rows: int, closed: list[Engine]) -> None:
    engine = engine_of("until_done", fused=False, rows=rows, max_seq_len=64)
    closed.append(engine)
    requests = [Request([5 + i], GREEDY, 20 if i < rows - 1 else 50, [], 0) for i in range(rows)]
    got = answers(engine, requests)
    assert [len(tokens) for tokens, _ in got] == [19] * (rows - 1) + [49]


@each
def test_arrivals_and_cancellations_in_the_middle(steps: int | str) -> None:
    draw = random.Random(0)
    with llm_of(dtype=torch.float32, rows=3, steps_per_graph=steps) as llm:
        params = [SamplingParams(max_tokens=60 + 20 * i, seed=i, temperature=0.8 * (i % 2)) for i in range(6)]
        with llm_of(dtype=torch.float32, rows=3) as reference:
            alone = [reference.generate(PROMPTS[i], params[i]).token_ids for i in range(6)]
        for _ in range(10):
            handles = []
            for i in draw.sample(range(6), 6):
                handles.append((i, llm.submit(PROMPTS[i], params[i])))
                if draw.random() < 0.5:
                    next(iter(handles[-1][1]))
                if draw.random() < 0.3:
                    draw.choice(handles)[1].cancel()
            for i, handle in handles:
                if not handle.cancelled():
                    assert handle.result(60).token_ids == alone[i]
        assert llm.graph_report().eager_steps == 0


@each
def test_stop_strings_and_what_the_row_holds_afterwards(steps: int | str) -> None:
    """The host ends a row that the device takes for active; the next turn reads what was kept of it, and no more."""
    with (
        llm_of(dtype=torch.float32, steps_per_graph=steps) as llm,
        llm_of(dtype=torch.float32, prefix_reuse=False) as plain,
    ):
        prompt = torch.randint(1003, (100,), generator=torch.Generator().manual_seed(1)).tolist()
        free = plain.generate(prompt, GREEDY)
        word = f" {free.token_ids[40]} "
        stopping = SamplingParams(max_tokens=400, temperature=0.0, stop=[word])
        for _ in range(5):
            first, expected = llm.generate(prompt, stopping), plain.generate(prompt, stopping)
            assert (first.text, first.token_ids) == (expected.text, expected.token_ids)
            turn = first.prompt_token_ids + first.token_ids + [5, 6, 7]
            second = llm.generate(turn, GREEDY)
            assert second.token_ids == plain.generate(turn, GREEDY).token_ids
            assert second.stats.cached_tokens >= 100
        assert llm._service.engine.cache.kv.isfinite().all()


@each
def test_two_runtimes_at_once(steps: int | str) -> None:
    with llm_of(dtype=torch.float32) as one:
        expected = one.generate(PROMPTS[0], GREEDY).token_ids
    with (
        llm_of(dtype=torch.float32, steps_per_graph=steps) as a,
        llm_of(dtype=torch.float32, rows=2, steps_per_graph="until_done") as b,
    ):
        for _ in range(10):
            handles = [llm.submit(PROMPTS[0], GREEDY) for llm in (a, b)]
            assert [handle.result(60).token_ids for handle in handles] == [expected] * 2


@each
def test_closing_in_the_middle_ends_the_requests_and_gives_the_memory_back(steps: int | str) -> None:
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # of tests that ran before, which `close` would drop too
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        llm = llm_of(max_seq_len=4000, steps_per_graph=steps)
        handle = llm.submit(PROMPTS[0], SamplingParams(max_tokens=3900, ignore_eos=True))
        next(iter(handle))
        llm.close()
        assert isinstance(handle.exception(1), MinillmError)
        del llm, handle
        gc.collect()
        torch.cuda.empty_cache()
        assert torch.cuda.memory_allocated() == before
    torch.cuda.synchronize()


def test_the_first_tokens_are_there_long_before_the_loop_has_ended() -> None:
    with llm_of(max_seq_len=4000, steps_per_graph="until_done") as llm:
        with closing(llm.stream(PROMPTS[0], SamplingParams(max_tokens=3900, ignore_eos=True))) as stream:
            for _, chunk in zip(range(5), stream, strict=False):
                assert chunk.token_ids
            engine = llm._service.engine
            assert isinstance(engine, LoopEngine)
            assert engine.loops.running
            assert int(engine.loops.tape.done) < 3800
        until(lambda: not engine.loops.running)  # closing the stream cancels, which halts
        assert int(engine.loops.tape.done) < 3899


def test_loops_beside_a_thread_that_uses_cuda() -> None:
    stop, errors = threading.Event(), list[Exception]()

    def other() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream(CUDA)):
                while not stop.is_set():
                    device = torch.empty(1 << 16).pin_memory().to(CUDA, non_blocking=True).view(256, 256)
                    (device @ device).sum().item()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    try:
        with llm_of(dtype=torch.float32, steps_per_graph="until_done") as llm:
            texts = {tuple(llm.generate(PROMPTS[0], GREEDY).token_ids) for _ in range(10)}
    finally:
        stop.set()
        thread.join()
    assert errors == []
    assert len(texts) == 1


def test_without_the_package_it_is_an_error_or_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise GraphError("needs the package cuda-bindings")

    monkeypatch.setattr(while_node, "bindings", missing)
    with pytest.raises(GraphError, match="cuda-bindings"):
        llm_of("on", steps_per_graph="until_done")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with llm_of("auto", steps_per_graph="until_done") as llm:
            assert len(llm.generate(PROMPTS[0], GREEDY).token_ids) == 80
            assert llm.graph_report().replays >= 79
    assert [str(w.message) for w in caught] == ["decoding step by step: needs the package cuda-bindings"]

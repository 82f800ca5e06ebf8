"""Graphs pointed at other caches and weights, and steps in pieces, on a real GPU: as the eager step, bit for bit."""

import gc
from typing import Any

import pytest
import torch
from small import parts
from test_graphs_gpu import CUDA, PROMPTS, FailingBackend, Parts, admit, cuda_parts, everything, llm_of, params_of

from minillm.assembly import Options, build_engine
from minillm.cache import KVCache
from minillm.capture import CudaBackend
from minillm.config import ModelConfig
from minillm.engine import Engine
from minillm.errors import GraphError
from minillm.graphs import GraphRunner
from minillm.kernels.fused import FusedOps
from minillm.model import Llama
from minillm.pieces import Cuts
from minillm.request import Request
from minillm.sampling import Mode, SamplingParams
from minillm.step import decode_step, step_of
from minillm.switch import Target, switch, weight_moves
from minillm.weights import Weights, allocate, randomise

CONFIG = ModelConfig.from_dict(
    dict(
        model_type="llama", vocab_size=1003, hidden_size=256, intermediate_size=352, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096,
    )
)  # fmt: skip
LENGTH = 600
ROWS = (1, 2, 3, 4, 7, 16, 20)
Side = tuple[Llama, KVCache]


@pytest.fixture
def bindings() -> None:
    pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")


def other_weights(seed: int, dtype: torch.dtype = torch.bfloat16) -> Weights:
    weights = allocate(CONFIG, CUDA, dtype)
    torch.manual_seed(seed)
    randomise(weights, 0.1)
    return weights


def fused_parts(rows: int = 20) -> Parts:
    reason = FusedOps.supports(CONFIG, CUDA, torch.bfloat16)
    if reason is not None:
        pytest.skip(reason)
    _, cache, state = parts(rows, LENGTH, CUDA, torch.bfloat16, CONFIG)
    return Llama(CONFIG, other_weights(1), LENGTH, FusedOps(CONFIG, rows, LENGTH, CUDA)), cache, state


def runner_of(built: Parts, pieces: int = 1, backend: CudaBackend | None = None) -> GraphRunner:
    model, cache, state = built
    cuts = Cuts(CONFIG.num_hidden_layers, pieces)
    backend = backend or CudaBackend(CUDA, cuts=cuts)
    torch.cuda.synchronize()
    runner = GraphRunner(
        step_of(model, cache, cuts),
        state,
        cache,
        backend,
        kv_lengths=None if model.fused is None else model.fused.kv_lengths(cache.max_seq_len),
    )
    runner.capture()
    return runner


def point(runner: GraphRunner, now: Side, then: Side) -> None:
    runner.retarget(step_of(*then), then[1], weight_moves(now[0].weights, then[0].weights))


def check(runner: GraphRunner, built: Parts, side: Side, mode: Mode, untouched: list[torch.Tensor]) -> None:
    """Replays of all sizes are the eager step on `side`, and write to none of the others' tensors."""
    model, cache = side
    state, used = built[2], (model, cache, built[2])
    torch.manual_seed(9)
    cache.kv.normal_()
    kept = [tensor.clone() for tensor in untouched]
    replays = runner.report.replays
    for rows in ROWS:
        key = runner.find(rows, 300, mode)
        assert key is not None
        state.active.fill_(False)
        for row in range(rows):
            admit(used, row, 299 - 13 * row, params_of(mode))
        before = everything(used)
        with runner.on_stream():
            runner.step(rows, 300, mode)
        replayed = everything(used)
        state.restore(before[:-1])
        cache.kv.copy_(before[-1])
        decode_step(model, cache, state.narrow(0, key[0]), key[1], mode)
        for eager, replay in zip(everything(used), replayed, strict=True):
            assert torch.equal(eager, replay), (rows, mode)
        assert not torch.equal(replayed[-1], before[-1])
    assert runner.report.replays == replays + len(ROWS)
    assert all(torch.equal(a, b) for a, b in zip(kept, untouched, strict=True))


@pytest.mark.parametrize("pieces", [1, 2])
def test_another_cache_and_back(bindings: None, pieces: int) -> None:
    built = fused_parts()
    model, cache, _ = built
    runner = runner_of(built, pieces)
    sides = [(model, cache), (model, cache.another()), (model, cache.another())]
    for mode in Mode:
        for now, then in ((0, 1), (1, 0), (0, 2), (2, 1), (1, 0)):
            point(runner, sides[now], sides[then])
            check(runner, built, sides[then], mode, [s[1].kv for i, s in enumerate(sides) if i != then])
    assert runner.report.retargets == 5 * len(Mode)
    assert runner.report.eager_steps == 0


def test_other_weights_and_back_and_both_at_once(bindings: None) -> None:
    built = fused_parts()
    model, cache, _ = built
    runner = runner_of(built)
    tuned = model.with_weights(other_weights(2))
    sides = [(model, cache), (tuned, cache), (tuned, cache.another()), (model, cache.another())]
    outputs = []
    for now, then in ((0, 1), (1, 0), (0, 2), (2, 3), (3, 0)):
        point(runner, sides[now], sides[then])
        untouched = [s[1].kv for s in sides if s[1] is not sides[then][1]]
        check(
            runner, built, sides[then], Mode.SAMPLED, [*untouched, *model.weights.tensors(), *tuned.weights.tensors()]
        )
        outputs.append(sides[then][1].kv[0, :, 0, :, 299].clone())
    assert torch.equal(outputs[0], outputs[2])  # of the tuned weights, in two caches
    assert torch.equal(outputs[1], outputs[3])
    assert not torch.equal(outputs[0], outputs[1])


def test_the_first_model_may_go_after_a_change_of_weights(bindings: None) -> None:
    """The rotary table and the scratch memory of the kernels, which the graphs still use, belong to both."""
    built = fused_parts(rows=2)
    model, cache, state = built
    runner = runner_of(built)
    tuned = (model.with_weights(other_weights(2)), cache.another())
    point(runner, (model, cache), tuned)
    del model, cache, built
    gc.collect()
    torch.cuda.empty_cache()
    junk = [torch.full((1 << 20,), float("nan"), device=CUDA) for _ in range(64)]  # takes what was freed
    used = (*tuned, state)
    admit(used, 0, 299, SamplingParams(temperature=0))
    before = everything(used)
    with runner.on_stream():
        runner.step(1, 300, Mode.GREEDY)
    replayed = everything(used)
    state.restore(before[:-1])
    tuned[1].kv.copy_(before[-1])
    decode_step(*tuned, state.narrow(0, 1), LENGTH, Mode.GREEDY)
    assert all(torch.equal(a, b) for a, b in zip(everything(used), replayed, strict=True))
    assert len(junk) == 64


@pytest.mark.parametrize("what", ["cache of plain operations", "weights of 40 rows", "cache of 40 rows"])
def test_plain_operations_are_refused_and_the_graphs_go_on(bindings: None, what: str) -> None:
    """Above 32 rows products are those of cuBLAS, and the cache is written by PyTorch."""
    if what == "cache of plain operations":
        _, cache, state = parts(20, LENGTH, CUDA, torch.bfloat16, CONFIG)
        built: Parts = (Llama(CONFIG, other_weights(1), LENGTH), cache, state)
    else:
        built = fused_parts(rows=40)
    model, cache, _ = built
    runner = runner_of(built)
    here = (model, cache)
    there = (model.with_weights(other_weights(2)), cache) if "weights" in what else (model, cache.another())
    for _ in range(2):
        with pytest.raises(GraphError, match="use the fused kernels, or capture anew") as raised:
            point(runner, here, there)
        assert "\n" not in str(raised.value)
        check(runner, built, here, Mode.SAMPLED, [])
    assert (runner.report.retargets, runner.report.eager_steps) == (0, 0)


def test_a_change_that_fails_half_way_is_taken_back(bindings: None, monkeypatch: pytest.MonkeyPatch) -> None:
    built = fused_parts()
    model, cache, _ = built
    runner = runner_of(built)
    here, there = (model, cache), (model, cache.another())
    point(runner, here, there)
    point(runner, there, here)
    assert runner._editor is not None
    driver, edits = runner._editor._driver, 0
    edit = driver.edit

    def fail(*given: Any) -> None:
        nonlocal edits
        edits += 1
        if edits == 20:
            raise RuntimeError("injected")
        edit(*given)

    monkeypatch.setattr(driver, "edit", fail)
    with pytest.raises(GraphError, match=r"injected.*as they were"):
        point(runner, here, there)
    assert edits == 20 + 19
    check(runner, built, here, Mode.GREEDY, [there[1].kv])
    point(runner, here, there)
    check(runner, built, there, Mode.GREEDY, [cache.kv])


def test_a_change_while_steps_are_under_way_leaves_them_alone(bindings: None) -> None:
    built = fused_parts(rows=1)
    model, cache, state = built
    runner = runner_of(built)
    other = cache.another()
    admit(built, 0, 4, SamplingParams(temperature=0))
    with runner.on_stream():
        for kv_len in range(5, 205):
            runner.step(1, kv_len, Mode.GREEDY)
        point(runner, (model, cache), (model, other))
        for kv_len in range(205, 305):
            runner.step(1, kv_len, Mode.GREEDY)
    torch.cuda.synchronize()
    written = [kv[0, 0, 0, :, :LENGTH].ne(0).any(-1).any(0).nonzero().flatten().tolist() for kv in (cache.kv, other.kv)]
    assert written == [list(range(4, 204)), list(range(204, 304))]
    assert state.positions.item() == 304


# ---------------------------------------------------------------------- an engine


def engine_of(graphs: str) -> Engine:
    model = fused_parts(rows=2)[0]
    options = Options(2, graphs, 8, None, True, (), 1, 1)
    return build_engine(model, LENGTH, options, progress=False)


def answer(engine: Engine, prompt: list[int]) -> tuple[list[int], int]:
    """Token ids, and how many of the prompt were known."""
    request = Request(prompt, SamplingParams(temperature=0), len(prompt) + 50, [], 0, on_token=lambda *_: False)
    engine.submit(request)
    while engine.busy:
        engine.step()
    assert request.error is None
    return request.token_ids, request.cached


def test_one_engine_serves_two_conversations_and_two_fine_tunes(bindings: None) -> None:
    prompt, answers = [int(x) for x in torch.arange(40) * 7 % 1003], []
    for graphs in ("on", "off"):
        engine = engine_of(graphs)
        mine = Target.of(engine)
        targets = [mine, mine.beside(), mine.beside(other_weights(2))]
        got = []
        for index in (0, 1, 2, 0, 1, 2):
            switch(engine, targets[index])
            got.append(answer(engine, prompt))
        assert [cached for _, cached in got] == [0, 0, 0, 39, 39, 39]
        assert (engine.runner.report.eager_steps == 0) == (graphs == "on")
        answers.append([ids for ids, _ in got])
        engine.shut_down(GraphError("done"))
    assert answers[0] == answers[1]
    assert answers[0][0] == answers[0][1] != answers[0][2]


# ---------------------------------------------------------------------- pieces


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("mode", list(Mode))
def test_pieces_equal_one_graph_bit_for_bit(mode: Mode, fused: bool) -> None:
    results = []
    for pieces in (1, 2, 3):
        if fused:
            built = fused_parts(rows=4)
        else:
            _, cache, state = parts(4, LENGTH, CUDA, torch.bfloat16, CONFIG)
            built = (Llama(CONFIG, other_weights(1), LENGTH), cache, state)
        runner = runner_of(built, pieces)
        assert runner.report.pieces == pieces
        torch.manual_seed(4)
        built[1].kv.normal_()
        for row in range(3):
            admit(built, row, 240 + row, params_of(mode))
        with runner.on_stream():
            for kv_len in range(243, 283):
                runner.step(3, kv_len, mode)
        results.append(everything(built))
        assert runner.report.replays == 40
        runner.close()
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("pieces", [2, 3])
def test_every_size_in_pieces_is_the_eager_step(pieces: int) -> None:
    """All recordings share a pool, and what one leaves between its pieces no other may touch."""
    built = fused_parts()
    runner = runner_of(built, pieces)
    for mode in Mode:
        check(runner, built, (built[0], built[1]), mode, [])


def test_text_of_pieces_equals_that_of_one_graph() -> None:
    params = [SamplingParams(max_tokens=40, seed=i, temperature=0.7 * (i % 2)) for i in range(len(PROMPTS))]
    texts = []
    for pieces in (1, 3):
        with llm_of("on", dtype=torch.float32, graph_pieces=pieces) as llm:
            texts.append([c.token_ids for c in llm.generate(PROMPTS, params)])
            assert llm.graph_report().pieces == pieces
            assert llm.graph_report().replays > 0
    assert texts[0] == texts[1]


def test_a_capture_that_fails_in_a_later_piece_can_be_made_again() -> None:
    built = fused_parts(rows=2)
    cuts = Cuts(CONFIG.num_hidden_layers, 3)
    with pytest.raises(GraphError, match="injected"):
        GraphRunner(step_of(*built[:2], cuts), built[2], built[1], FailingBackend(CUDA, cuts=cuts)).capture()
    runner = runner_of(built, pieces=3)
    admit(built, 0, 3, SamplingParams())
    with runner.on_stream():
        runner.step(1, 10, Mode.FILTERED)
    torch.cuda.synchronize()
    assert runner.report.replays == 1


def test_pieces_and_changes_give_their_memory_back(bindings: None) -> None:
    reserved = []
    for _ in range(3):
        built = fused_parts(rows=4)
        runner = runner_of(built, pieces=3)
        there = (built[0], built[1].another())
        point(runner, (built[0], built[1]), there)
        with runner.on_stream():
            runner.step(1, 10, Mode.GREEDY)
        runner.close()
        del built, runner, there
        gc.collect()
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[1] == reserved[2]


def test_plain_parts_are_left_as_they_were() -> None:
    """`keep_graph` is no change to whoever only replays."""
    built = cuda_parts(rows=2)
    cuts = Cuts(layers=3, pieces=1)
    runner = GraphRunner(step_of(*built[:2], cuts), built[2], built[1], CudaBackend(CUDA, cuts=cuts))
    runner.capture()
    assert all(isinstance(r, torch.cuda.CUDAGraph) for r in runner._recordings.values())

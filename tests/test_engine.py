"""The engine on a small random model: rows, limits, ends, cancellation and faults, on token ids alone."""

import random
from collections.abc import Callable

import pytest
import torch
from small import CONFIG, FakeBackend, parts

from minillm.engine import Engine
from minillm.errors import EngineError, MinillmError
from minillm.graphs import GraphRunner
from minillm.looping import LoopEngine, Loops
from minillm.request import Request
from minillm.sampling import Mode, SamplingParams
from minillm.state import DecodeState
from minillm.step import decode_step

GREEDY = SamplingParams(temperature=0.0)


def engine_of(
    rows: int = 4,
    max_seq_len: int = 64,
    graphs: bool = False,
    chunk: int = 16,
    reuse: bool = True,
    steps: int | str = 1,
    pace: int = 2,
) -> Engine:
    """Args: steps: of a recording, or "until_done", with loops of which the host sees `pace` steps at each look."""
    model, cache, state = parts(rows, max_seq_len)

    def step(part: DecodeState, kv_len: int, mode: Mode) -> None:
        decode_step(model, cache, part, kv_len, mode)

    backend = FakeBackend(pace=pace) if graphs else None
    runner = GraphRunner(step, state, cache, backend, steps=1 if steps == "until_done" else int(steps))
    runner.capture()
    if steps != "until_done":
        return Engine(model, cache, state, runner, prefill_chunk=chunk, prefix_reuse=reuse)
    loops = Loops(runner, cache)
    return LoopEngine(model, cache, state, runner, prefill_chunk=chunk, prefix_reuse=reuse, loops=loops)


def request(prompt: list[int], params: SamplingParams = GREEDY, new: int = 10, stops: list[int] | None = None, **kw):
    kw.setdefault("on_token", lambda *_: False)
    return Request(prompt, params, len(prompt) + new, stops or [], params.seed or 0, **kw)


def run(engine: Engine, *requests: Request) -> list[list[int]]:
    for r in requests:
        engine.submit(r)
    for _ in range(10_000):
        if not engine.busy:
            return [r.token_ids for r in requests]
        engine.step()
    raise AssertionError("the engine does not come to an end")


def prompt_of(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(CONFIG.vocab_size), k=length)


def solo(prompt: list[int], params: SamplingParams = GREEDY, new: int = 10, **kw) -> list[int]:
    return run(engine_of(), request(prompt, params, new, **kw))[0]


@pytest.mark.parametrize("graphs", [False, True])
def test_ragged_batch_equals_single_runs(graphs: bool) -> None:
    """Also with more requests than rows, prompts longer than a chunk, and lengths that make rows end at any time."""
    cases = [(prompt_of(n, n), new) for n, new in ((3, 20), (17, 4), (9, 12), (33, 7), (1, 1), (16, 15), (5, 25))]
    texts = run(engine_of(graphs=graphs), *(request(p, new=new) for p, new in cases))
    for (prompt, new), text in zip(cases, texts, strict=True):
        assert len(text) == new
        assert text == solo(prompt, new=new)


def test_sampled_text_does_not_depend_on_row_or_neighbours() -> None:
    params = SamplingParams(seed=7, temperature=1.3)
    alone = solo(prompt_of(6, 1), params, new=20)
    others = [
        SamplingParams(seed=1, top_p=0.4), GREEDY, SamplingParams(seed=2, repetition_penalty=1.5, top_k=4),
    ]  # fmt: skip
    for row in range(4):
        requests = [request(prompt_of(6 + i, i), p, new=9 + 5 * i) for i, p in enumerate(others)]
        requests.insert(row, request(prompt_of(6, 1), params, new=20))
        assert run(engine_of(), *requests)[row] == alone


def test_total_never_exceeds_the_context() -> None:
    """The rule: prompt and answer together have at most max_seq_len tokens; elsewhere, one more crashed the cache."""
    engine = engine_of(max_seq_len=32)
    ids = prompt_of(30, 0)
    r = Request(ids, GREEDY, 32, [], 0, on_token=lambda *_: False)
    assert len(run(engine, r)[0]) == 2
    assert r.finish_reason == "length"
    full = Request(prompt_of(32, 0), GREEDY, 32, [], 0, on_token=lambda *_: False)
    assert run(engine, full) == [[]]
    assert full.finish_reason == "length"
    assert run(engine, request(ids[:5]))[0] == solo(ids[:5])


def test_an_end_token_ends_the_row_and_is_the_last() -> None:
    """Elsewhere, a finished row of a batch went on producing junk."""
    prompt = prompt_of(5, 3)
    free = solo(prompt, new=30)
    end = free[6]
    first = free.index(end)
    stopping, other = request(prompt, new=30, stops=[end]), request(prompt_of(9, 4), new=30)
    texts = run(engine_of(), stopping, other)
    assert texts[0] == free[: first + 1]
    assert (stopping.finish_reason, other.finish_reason) == ("stop", "length")
    assert texts[1] == solo(prompt_of(9, 4), new=30)


def test_an_end_token_as_the_first_token() -> None:
    prompt = prompt_of(5, 3)
    end = solo(prompt)[0]
    r = request(prompt, stops=[end])
    assert run(engine_of(), r) == [[end]]
    assert r.finish_reason == "stop"


def test_a_reused_row_forgets_its_former_request() -> None:
    """Elsewhere, the second request saw the cache of the first, or its end tokens and penalties."""
    engine = engine_of(rows=1)
    long, short = prompt_of(40, 1), prompt_of(3, 2)
    penalised = SamplingParams(seed=1, repetition_penalty=1.4)
    expected = solo(short, penalised, new=15)
    run(engine, request(long, SamplingParams(seed=9, repetition_penalty=2.0), new=20, stops=expected[:1]))
    assert run(engine, request(short, penalised, new=15))[0] == expected
    cancelled = request(long, new=20)
    engine.submit(cancelled)
    for _ in range(4):
        engine.step()
    engine.cancel(cancelled)
    assert not engine.busy
    assert run(engine, request(short, penalised, new=15))[0] == expected


def test_cancelling_one_leaves_the_others() -> None:
    engine = engine_of(rows=2)
    requests = [request(prompt_of(5 + i, i), new=20) for i in range(4)]
    for r in requests:
        engine.submit(r)
    engine.step()
    engine.cancel(requests[0])  # has a row
    engine.cancel(requests[3])  # waits
    while engine.busy:
        engine.step()
    assert requests[0].finish_reason is None
    assert requests[3].token_ids == []
    for i in (1, 2):
        assert requests[i].token_ids == solo(prompt_of(5 + i, i), new=20)


def test_a_callback_may_end_its_request() -> None:
    r = request(prompt_of(5, 1), new=20)
    r.on_token = lambda *_: len(r.token_ids) == 4
    run(engine_of(), r)
    assert len(r.token_ids) == 4
    assert r.finish_reason == "stop"


def test_a_fault_in_one_callback_ends_that_request_alone() -> None:
    def broken(*_: object) -> bool:
        raise RuntimeError("boom")

    bad, good = request(prompt_of(5, 1), on_token=broken), request(prompt_of(6, 2))
    run(engine_of(), bad, good)
    assert isinstance(bad.error, RuntimeError)
    assert good.token_ids == solo(prompt_of(6, 2))


def test_nan_logits_are_an_error_and_no_token() -> None:
    """Elsewhere, a NaN logit gave a random token."""
    engine = engine_of()
    engine.model.weights.norm[0] = torch.nan
    for params in (GREEDY, SamplingParams(), SamplingParams(top_k=3)):
        r = request(prompt_of(5, 1), params)
        assert run(engine, r) == [[]]
        assert isinstance(r.error, MinillmError)
        assert "NaN or infinite" in str(r.error)
    engine.model.weights.norm[0] = 1.0
    assert len(run(engine, request(prompt_of(5, 1)))[0]) == 10


def test_a_row_that_held_nan_serves_the_next() -> None:
    """Masked attention reads a bucket: what a broken request had left there made NaN of 0 x NaN."""
    engine = engine_of(rows=2, graphs=True)
    good = engine.model.weights.embed[7].clone()
    engine.model.weights.embed[7] = torch.nan
    broken = request([5] * 30 + [7] * 10)
    run(engine, broken)
    assert isinstance(broken.error, MinillmError)
    engine.model.weights.embed[7] = good
    prompts = [prompt_of(4, 1), prompt_of(5, 2)]
    assert run(engine, *(request(p) for p in prompts)) == [solo(p) for p in prompts]


BAD = 7
"""A token whose embedding is NaN, for the tests that follow."""


def steps(engine: Engine, *parts: Callable[[], object]) -> None:
    """Parts of a step, up to where a request is met in the middle."""
    with torch.inference_mode():
        for part in parts:
            part()


def end_score(engine: Engine) -> None:
    run(engine, Request.scoring([5] * 30 + [BAD] * 10))


def end_half_read(engine: Engine) -> None:
    r = request([5] * 30 + [BAD] * 100)
    engine.submit(r)
    steps(engine, engine._read_prompts)
    assert 0 < r.prefilled < 130
    engine.cancel(r)


def end_scoring_half_read(engine: Engine) -> None:
    r = Request.scoring([5] * 30 + [BAD] * 100)
    engine.submit(r)
    steps(engine, engine._read_prompts)
    engine.cancel(r)


def end_before_its_first_token(engine: Engine) -> None:
    r = request([5] * 30 + [BAD])
    engine.submit(r)
    steps(engine, engine._read_prompts, engine._decode)
    engine.cancel(r)


def end_copied(engine: Engine) -> None:
    """The second prompt has its beginning from the first, whose logits are still under way, and no token of its own."""
    first, second = request([5] * 30 + [BAD, 5]), request([5] * 30 + [BAD, 6])
    for r in (first, second):
        engine.submit(r)
    steps(engine, engine._read_prompts)
    assert second.cached == 31
    engine.cancel(second)
    engine.cancel(first)


def end_while_a_step_is_under_way(engine: Engine) -> None:
    """As on a GPU: a step that feeds the token is enqueued before the request is cancelled."""
    r = request([5] * 30)
    engine.submit(r)
    steps(engine, engine._read_prompts, lambda: engine._deliver(0))
    assert len(r.token_ids) == 1
    engine.state.tokens.fill_(BAD)
    steps(engine, engine._decode)
    engine.cancel(r)


def end_with_a_failed_step(engine: Engine) -> None:
    engine.submit(request([5] * 30 + [BAD]))
    steps(engine, engine._read_prompts)
    step = engine.runner.step

    def fail(*args: object) -> None:
        step(*args)  # type: ignore[arg-type]
        raise RuntimeError("device lost")

    engine.runner.step = fail  # type: ignore[method-assign]
    engine.step()
    engine.runner.step = step  # type: ignore[method-assign]


def end_with_a_prompt_that_cannot_be_read(engine: Engine) -> None:
    prefill = engine.model.prefill

    def fail(*args: object, **more: object) -> None:
        prefill(*args, **more)  # type: ignore[arg-type]
        raise torch.OutOfMemoryError("CUDA out of memory")

    engine.model.prefill = fail  # type: ignore[method-assign, assignment]
    run(engine, request([5] * 30 + [BAD]))
    engine.model.prefill = prefill  # type: ignore[method-assign]


def end_at_a_stop_string(engine: Engine) -> None:
    r = request([5] * 30)
    r.on_token = lambda *_: len(r.token_ids) == 2
    engine.submit(r)
    steps(engine, engine._read_prompts, engine._decode)
    engine.state.tokens.fill_(BAD)
    steps(engine, engine._decode, lambda: engine._deliver(0))
    assert len(r.token_ids) == 2


@pytest.mark.parametrize(
    "end",
    [
        end_score, end_half_read, end_scoring_half_read, end_before_its_first_token, end_copied,
        end_while_a_step_is_under_way, end_with_a_failed_step, end_with_a_prompt_that_cannot_be_read,
        end_at_a_stop_string,
    ],
)  # fmt: skip
def test_no_end_leaves_nan_in_a_row(end: Callable[[Engine], None]) -> None:
    """Only answers whose logits were seen to be NaN had their row cleared: what ended in another way left its NaN
    there, and a short request failed later on, in the shadow of a longer one beside it."""
    engine = engine_of(rows=2, max_seq_len=200)
    good = engine.model.weights.embed[BAD].clone()
    engine.model.weights.embed[BAD] = torch.nan
    end(engine)
    assert engine.open == 0
    engine.model.weights.embed[BAD] = good
    for row in range(2):
        prompts = [prompt_of(4, 1), prompt_of(60, 2)]
        if row:
            prompts.reverse()
        assert run(engine, *(request(p) for p in prompts)) == [
            run(engine_of(max_seq_len=200), request(p))[0] for p in prompts
        ]
    assert engine.cache.kv[..., :-1, :].isfinite().all()


def test_an_error_of_the_device_ends_all_open_requests_and_the_next_works() -> None:
    engine = engine_of(rows=1)
    requests = [request(prompt_of(5, i)) for i in range(2)]
    for r in requests:
        engine.submit(r)
    engine.step()
    original, engine.model.decode = engine.model.decode, None  # type: ignore[assignment]
    engine.step()
    engine.model.decode = original  # type: ignore[method-assign]
    assert all(isinstance(r.error, EngineError) for r in requests)
    assert requests[0].error is not requests[1].error  # each is raised in a thread of its own
    assert not engine.busy
    assert run(engine, request(prompt_of(5, 7)))[0] == solo(prompt_of(5, 7))


def score(engine: Engine, ids: list[int]) -> torch.Tensor:
    r = Request.scoring(ids)
    run(engine, r)
    assert r.error is None
    return torch.cat(r.scores)


def test_scoring_waits_for_a_row_and_leaves_the_others_alone() -> None:
    engine = engine_of(rows=1)
    running = request(prompt_of(5, 1), new=20)
    engine.submit(running)
    engine.step()
    ids = prompt_of(40, 2)
    logits = score(engine, ids)
    assert logits.shape == (40, CONFIG.vocab_size)
    assert running.token_ids == solo(prompt_of(5, 1), new=20)
    whole = engine.model.prefill(torch.tensor(ids), 0, 0, engine.cache, all_logits=True)
    torch.testing.assert_close(logits, whole, atol=1e-4, rtol=0)


def test_logprobs_are_those_of_scoring() -> None:
    engine, prompt = engine_of(), prompt_of(6, 5)
    got: list[float] = []
    r = request(prompt, SamplingParams(seed=4, logprobs=True, top_p=0.9))
    r.on_token = lambda token, logprob, reason: bool(got.append(logprob))
    run(engine, r)
    scored = score(engine, prompt + r.token_ids).log_softmax(-1)
    expected = [scored[len(prompt) - 1 + i, token].item() for i, token in enumerate(r.token_ids)]
    assert got == pytest.approx(expected, abs=1e-4)

"""Many tokens in one launch change no text: not where rows end, not for who arrives, not after who leaves."""

import functools
import random
from typing import Any

import pytest
import torch
from small import FakeBackend, parts
from test_engine import GREEDY, engine_of, prompt_of, request, run
from test_engine import solo as slow_solo
from test_graphs import step_of_nothing

from minillm.cache import KVCache
from minillm.decoding import Decoding
from minillm.engine import Engine
from minillm.errors import MinillmError
from minillm.graphs import GraphRunner, make_runner
from minillm.sampling import Mode, SamplingParams
from minillm.state import DecodeState

each = pytest.mark.parametrize(
    ("steps", "pace"), [(2, 0), (3, 0), (16, 0), ("until_done", 1), ("until_done", 3), ("until_done", 1000)]
)


@functools.cache
def alone(prompt: tuple[int, ...], params: SamplingParams, new: int) -> tuple[int, ...]:
    return tuple(slow_solo(list(prompt), params, new))


def solo(prompt: list[int], params: SamplingParams = GREEDY, new: int = 10) -> list[int]:
    """What one request gets that has an engine to itself, and a launch for every token."""
    return list(alone(tuple(prompt), params, new))


def many(steps: int | str, pace: int, rows: int = 4, max_seq_len: int = 64) -> Engine:
    return engine_of(rows, max_seq_len, graphs=True, steps=steps, pace=pace)


@each
def test_ragged_batch_equals_single_runs(steps: int | str, pace: int) -> None:
    """With limits that are no multiple of the steps, and one that the first token reaches."""
    cases = [(prompt_of(n, n), new) for n, new in ((3, 20), (17, 4), (9, 12), (33, 7), (1, 1), (16, 15), (5, 25))]
    engine = many(steps, pace)
    texts = run(engine, *(request(p, new=new) for p, new in cases))
    for (prompt, new), text in zip(cases, texts, strict=True):
        assert len(text) == new
        assert text == solo(prompt, new=new)
    assert not engine.state.active.any()


@each
def test_sampled_rows_beside_greedy_ones(steps: int | str, pace: int) -> None:
    params = [GREEDY, SamplingParams(seed=1, top_p=0.4), SamplingParams(seed=2, repetition_penalty=1.5, top_k=4)]
    texts = run(many(steps, pace), *(request(prompt_of(6, i), p, new=11 + 5 * i) for i, p in enumerate(params)))
    assert texts == [solo(prompt_of(6, i), p, new=11 + 5 * i) for i, p in enumerate(params)]


@each
def test_what_comes_after_an_end_token_is_discarded(steps: int | str, pace: int) -> None:
    prompt = prompt_of(5, 3)
    free = solo(prompt, new=30)
    for end in dict.fromkeys(free):
        r, other = request(prompt, new=30, stops=[end]), request(prompt_of(9, 4), new=20)
        engine = many(steps, pace)
        assert run(engine, r, other) == [free[: free.index(end) + 1], solo(prompt_of(9, 4), new=20)]
        assert r.finish_reason == "stop"
        held = engine.memory.held(0)
        assert list(held) == (prompt + r.token_ids)[: len(held)]  # nothing of what was discarded


@each
@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 8])
def test_a_callback_ends_its_request_in_the_middle(steps: int | str, pace: int, tokens: int) -> None:
    """By a stop string, or by a fault: the row goes on for a while, and the next request in it sees nothing of that."""

    def stop(*_: object) -> bool:
        if len(first.token_ids) == tokens and fault:
            raise RuntimeError("boom")
        return len(first.token_ids) == tokens

    for fault in (False, True):
        first = request(prompt_of(5, 1), new=30)
        first.on_token = stop
        engine = many(steps, pace, rows=2)
        requests = [first, request(prompt_of(7, 3), new=25), request(prompt_of(6, 2), new=20)]
        texts = run(engine, *requests)
        assert texts == [solo(prompt_of(5, 1), new=30)[:tokens], *(solo(r.prompt_token_ids, new=n) for r, n in zip(
            requests[1:], (25, 20), strict=True
        ))]  # fmt: skip
        assert (first.finish_reason, type(first.error)) == ((None, RuntimeError) if fault else ("stop", type(None)))


@each
def test_arrivals_and_cancellations_at_any_time(steps: int | str, pace: int) -> None:
    for seed in range(6):
        draw = random.Random(seed)
        engine = many(steps, pace, rows=3)
        asked = [request(prompt_of(draw.randint(1, 30), i), new=draw.randint(1, 30)) for i in range(12)]
        cancelled = set(draw.sample(range(12), 4))
        for i, r in enumerate(asked):
            engine.submit(r)
            for _ in range(draw.randint(0, 4)):
                engine.step()
            if i in cancelled:
                engine.cancel(draw.choice(asked[: i + 1]))
        run(engine)
        assert not engine.busy
        assert not engine.state.active.any()
        for r in asked:
            text = solo(r.prompt_token_ids, new=r.limit - len(r.prompt_token_ids))
            assert r.token_ids == (text[: len(r.token_ids)] if r.cancelled else text)


@each
def test_the_context_is_never_exceeded(steps: int | str, pace: int) -> None:
    engine = many(steps, pace, 2, 32)
    r, other = request(prompt_of(30, 0), new=2), request(prompt_of(3, 1), new=29)
    texts = run(engine, r, other)
    assert texts == [run(engine_of(1, 32), request(x.prompt_token_ids, new=n))[0] for x, n in ((r, 2), (other, 29))]
    assert engine.cache.kv.isfinite().all()
    assert engine.runner.report.eager_steps == 0


@each
def test_attention_sees_all_that_the_last_step_of_a_launch_needs(steps: int | str, pace: int) -> None:
    """Plain attention reads a bucket of the cache, which the steps may leave in the middle of a launch."""
    engine = many(steps, pace, 2, 300)
    decode, lengths = engine.model.decode, set()

    def checked(state: DecodeState, cache: KVCache, kv_len: int, *rest: Any) -> torch.Tensor:
        lengths.add(kv_len)
        assert (state.positions * state.active < kv_len).all()
        return decode(state, cache, kv_len, *rest)

    engine.model.decode = checked  # type: ignore[method-assign]
    long, short = request(prompt_of(235, 1), new=40), request([5], new=3)
    assert [len(text) for text in run(engine, long, short)] == [40, 3]
    assert (long.error, short.error) == (None, None)
    assert lengths == ({300} if steps == "until_done" else {256, 300})


def test_a_row_that_has_been_asked_for_all_its_tokens_takes_part_no_longer() -> None:
    """On a GPU the host is a launch ahead, and would go on to ask for tokens that nobody gets."""
    short, long = request([5, 6], new=6), request([7], new=20)
    short.enqueued = long.enqueued = 1
    decoding = Decoding([(0, short), (1, long)])
    assert (decoding.position, decoding.end) == (2, 20)
    assert [decoding.advance(2) for _ in range(3)] == [False, False, True]
    assert (short.enqueued, long.enqueued, decoding.position) == (6, 7, 8)
    assert short.fully_enqueued


@each
def test_nan_in_the_middle_of_a_launch_is_an_error_and_no_token(steps: int | str, pace: int) -> None:
    engine = many(steps, pace, rows=2)
    prompt = prompt_of(5, 1)
    text = solo(prompt, new=20)
    bad = text[4]
    good = engine.model.weights.embed[bad].clone()
    engine.model.weights.embed[bad] = torch.nan
    broken = request(prompt, new=20)
    run(engine, broken)
    assert broken.token_ids == text[: text.index(bad) + 1]
    assert isinstance(broken.error, MinillmError)
    engine.model.weights.embed[bad] = good
    assert run(engine, request(prompt, new=20), request(prompt_of(9, 9))) == [text, solo(prompt_of(9, 9))]
    assert engine.cache.kv[..., :-1, :].isfinite().all()


def test_a_launch_of_several_steps_is_as_many_single_ones() -> None:
    outputs, states = [], []
    for steps in (1, 5):
        engine = engine_of(steps=steps, graphs=True)
        engine.state.admit(1, [5, 6, 7], 60, [], SamplingParams(seed=3), 3)
        made = []
        for kv_len in range(10, 10 + 20 // steps):
            engine.runner.step(2, kv_len, Mode.SAMPLED)
            made += engine.runner.outputs[:, 1].tolist()
        outputs.append(made)
        states.append([tensor for name, tensor in vars(engine.state).items() if name != "output"])
        assert engine.runner.report.replays == 20 // steps
    assert outputs[0] == outputs[1]
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


def test_without_graphs_steps_are_made_one_by_one() -> None:
    _, cache, state = parts()
    assert GraphRunner(step_of_nothing, state, cache, None, steps=4).steps == 1
    assert make_runner(step_of_nothing, state, cache, "off", FakeBackend(), steps=4).steps == 1
    with pytest.warns(RuntimeWarning, match="without CUDA graphs"):
        runner = make_runner(step_of_nothing, state, cache, "auto", FakeBackend(fail_at=3), steps=4)
    assert (runner.steps, runner.outputs.shape) == (1, (1, 4, 3))
    seen: list[DecodeState] = []
    runner = GraphRunner(lambda rows, *_: seen.append(rows), state, cache, FakeBackend(), steps=4)
    runner.capture()
    seen.clear()
    runner.step(1, 10, Mode.GREEDY)
    assert [s.output.data_ptr() for s in seen] == [runner.outputs[i].data_ptr() for i in range(4)]

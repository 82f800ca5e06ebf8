"""Reuse of prefixes: what rows hold, where a prompt goes, and that its text is the same as without."""

import random

import pytest
import torch
from small import CONFIG, parts
from test_engine import engine_of, prompt_of, request, run, solo

from minillm.engine import Engine
from minillm.errors import MinillmError
from minillm.prefix import WORTH, RowMemory, _common
from minillm.request import Request


def check(engine: Engine) -> None:
    """What the memory says of a row is what a fresh prefill of it would leave there."""
    model, fresh, _ = parts(1, engine.cache.max_seq_len)
    for row in range(len(engine.rows)):
        held = list(engine.memory.held(row))
        if held:
            model.prefill(torch.tensor(held), 0, 0, fresh)
            kept, expected = engine.cache.kv[:, :, row, :, : len(held)], fresh.kv[:, :, 0, :, : len(held)]
            torch.testing.assert_close(kept, expected, atol=1e-3, rtol=1e-3)


def read_by(engine: Engine) -> list[tuple[int, int, int]]:
    """From now on, (row, start, length) of every chunk that the model reads."""
    calls: list[tuple[int, int, int]] = []
    prefill = engine.model.prefill

    def noted(ids: torch.Tensor, row: int, start: int, *rest: object, **more: object) -> torch.Tensor:
        calls.append((row, start, len(ids)))
        return prefill(ids, row, start, *rest, **more)  # type: ignore[arg-type]

    engine.model.prefill = noted  # type: ignore[method-assign]
    return calls


@pytest.mark.parametrize("seed", range(200))
def test_common_prefix(seed: int) -> None:
    rng = random.Random(seed)
    a, b = ([rng.randrange(2) for _ in range(rng.randrange(12))] for _ in range(2))
    if seed % 2:
        b = a[: rng.randrange(12)] + b
    expected = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert _common(a, b) == _common(tuple(a), b) == expected


def test_the_second_turn_reads_only_what_is_new() -> None:
    engine = engine_of(max_seq_len=200)
    first = request(prompt_of(30, 1), new=20)
    run(engine, first)
    assert list(engine.memory.held(0)) == first.prompt_token_ids + first.token_ids[:-1]
    check(engine)
    turn = first.prompt_token_ids + first.token_ids + prompt_of(12, 2)
    calls, second = read_by(engine), request(turn, new=20)
    run(engine, second)
    assert calls == [(0, 49, 13)]  # the last token of an answer was never fed
    assert second.cached == 49
    assert second.token_ids == run(engine_of(max_seq_len=200, reuse=False), request(turn, new=20))[0]
    check(engine)


def test_the_same_prompt_again_reads_its_last_token() -> None:
    engine, prompt = engine_of(), prompt_of(30, 1)
    expected = solo(prompt)
    for cached in (0, 29, 29):
        r = request(prompt)
        assert run(engine, r) == [expected]
        assert r.cached == cached
    check(engine)


def test_prompts_that_come_together_share_their_beginning() -> None:
    """The second of them finds the first, which has a row and makes its answer."""
    engine, common = engine_of(max_seq_len=100), prompt_of(40, 1)
    requests = [request(common + prompt_of(5 + i, i), new=10 + i) for i in range(6)]
    texts = run(engine, *requests)
    assert [r.cached for r in requests] == [0] + [40] * 5
    for r, text in zip(requests, texts, strict=True):
        assert text == run(engine_of(max_seq_len=100), request(r.prompt_token_ids, new=len(text)))[0]
    check(engine)


def test_two_conversations_in_turn_keep_each_other() -> None:
    """Both want the lowest row, where a step costs least: what stands there changes places, and is not lost."""
    engine = engine_of(rows=3, max_seq_len=200)
    talks = [prompt_of(20, 1), prompt_of(24, 2), prompt_of(28, 3)]
    for turn in range(3):
        for index, said in enumerate(talks):
            r = request(said, new=5)
            run(engine, r)
            assert r.cached == (0 if turn == 0 else len(said) - 4), (turn, index)
            talks[index] = said + r.token_ids + prompt_of(3, 10 * turn + index)
            check(engine)


def test_the_oldest_goes_first() -> None:
    engine = engine_of(rows=2)
    a, b, c = (prompt_of(30, seed) for seed in (1, 2, 3))
    for prompt in (a, b, a, c):  # c takes the place of b
        run(engine, request(prompt))
    again = [request(prompt, new=1) for prompt in (a, c)]
    run(engine, *again)
    assert [r.cached for r in again] == [29, 29]
    r = request(b, new=1)
    run(engine, r)
    assert r.cached == 0


def test_a_tail_that_others_may_want_is_kept() -> None:
    """Two talks with one beginning: the second copies it, and leaves the first as it was."""
    engine, common = engine_of(rows=3, max_seq_len=100), prompt_of(40, 1)
    first, second = common + prompt_of(20, 2), common + prompt_of(20, 3)
    for prompt, cached in ((first, 0), (second, 40), (first, 59), (second, 59)):
        r = request(prompt, new=3)
        run(engine, r)
        assert r.cached == cached
    check(engine)


def test_a_cancelled_answer_leaves_only_what_is_sure() -> None:
    engine = engine_of(rows=1, max_seq_len=100)
    r = request(prompt_of(30, 1), new=40)
    engine.submit(r)
    for _ in range(9):
        engine.step()
    engine.cancel(r)
    assert list(engine.memory.held(0)) == r.prompt_token_ids + r.token_ids[:-1]
    check(engine)
    follow = r.prompt_token_ids + r.token_ids + prompt_of(5, 2)
    assert run(engine, request(follow))[0] == run(engine_of(rows=1, max_seq_len=100), request(follow))[0]


def test_a_prompt_cancelled_when_half_read_leaves_what_was_there_before() -> None:
    """No logits were seen of the part that was read: it might be NaN. What a former answer was made of is not."""
    engine, first = engine_of(rows=2, max_seq_len=200, chunk=8), prompt_of(30, 3)
    run(engine, request(first, new=1))
    other, r = request(prompt_of(5, 1), new=60), request(first + prompt_of(70, 2), new=5)
    engine.submit(other)
    engine.step()
    engine.submit(r)
    for _ in range(3):
        engine.step()
    engine.cancel(r)
    assert (r.cached, r.prefilled) == (30, 54)
    assert list(engine.memory.held(1)) == first
    assert not engine.cache.kv[:, :, 1, :, 30:].any()
    check(engine)
    again = request(r.prompt_token_ids, new=5)
    run(engine, again)
    assert again.cached == 30
    assert again.token_ids == run(engine_of(max_seq_len=200), request(r.prompt_token_ids, new=5))[0]
    assert other.token_ids == run(engine_of(max_seq_len=200), request(prompt_of(5, 1), new=60))[0]


@pytest.mark.parametrize("fail_at", range(5))
def test_a_copy_that_fails_is_done_without(fail_at: int) -> None:
    """A copy of K and V is optional: that it failed ended all open requests, and half a copy was believed."""
    engine = engine_of(rows=3, max_seq_len=200)
    talks = [prompt_of(20, 1), prompt_of(24, 2)]
    for said in talks:
        said += run(engine, request(list(said), new=5))[0]
    running = request(prompt_of(20, 3), new=60)
    engine.submit(running)
    engine.step()

    class Failing(torch.overrides.TorchFunctionMode):
        left = fail_at

        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func.__name__ in ("copy_", "clone"):
                if self.left == 0:
                    raise torch.OutOfMemoryError("CUDA out of memory")
                self.left -= 1
            return func(*args, **(kwargs or {}))

    place = engine.memory.place

    def failing_place(prompt: list[int], free: list[int]) -> tuple[int, int]:
        with Failing():
            return place(prompt, free)

    engine.memory.place = failing_place  # type: ignore[method-assign]
    turns = [request(said + prompt_of(6, 4), new=5) for said in (talks[1], talks[0], running.prompt_token_ids)]
    run(engine, *turns)
    check(engine)
    for r in (running, *turns):
        new = r.limit - len(r.prompt_token_ids)
        assert r.token_ids == run(engine_of(max_seq_len=200), request(r.prompt_token_ids, new=new))[0]


def test_nothing_is_reused_after_a_failed_step_or_broken_logits() -> None:
    engine, prompt = engine_of(), prompt_of(30, 1)
    run(engine, request(prompt))
    engine.submit(request(prompt_of(5, 2)))
    decode, engine.model.decode = engine.model.decode, None  # type: ignore[assignment]
    engine.step()
    engine.model.decode = decode  # type: ignore[method-assign]
    r = request(prompt)
    run(engine, r)
    assert r.cached == 0
    engine.model.weights.norm[0] = torch.nan
    broken = request(prompt_of(6, 2))
    run(engine, broken)
    assert isinstance(broken.error, MinillmError)
    engine.model.weights.norm[0] = 1.0
    r = request(prompt)
    run(engine, r)
    assert r.cached == 0


def test_a_prompt_that_cannot_be_read_is_not_remembered() -> None:
    engine, prompt = engine_of(chunk=8), prompt_of(60, 1)
    prefill = engine.model.prefill

    def fail(ids: torch.Tensor, row: int, start: int, *rest: object, **more: object) -> torch.Tensor:
        if start:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return prefill(ids, row, start, *rest, **more)  # type: ignore[arg-type]

    engine.model.prefill = fail  # type: ignore[method-assign]
    r = request(prompt, new=3)
    run(engine, r)
    assert r.error is not None
    engine.model.prefill = prefill  # type: ignore[method-assign]
    r = request(prompt, new=3)
    assert run(engine, r) == [run(engine_of(), request(prompt, new=3))[0]]
    assert r.cached == 0


def test_scoring_takes_the_oldest_row_and_leaves_nothing() -> None:
    engine = engine_of(rows=2)
    a, b = prompt_of(30, 1), prompt_of(30, 2)
    for prompt in (b, a):
        run(engine, request(prompt))
    scored = Request.scoring(b)
    run(engine, scored)
    assert scored.cached == 0
    assert len(scored.scores) == 1
    assert scored.scores[0].shape == (30, CONFIG.vocab_size)
    cached = []
    for prompt in (a, b):
        r = request(prompt)
        run(engine, r)
        cached.append(r.cached)
    assert cached == [29, 0]
    check(engine)


def test_switched_off_nothing_is_remembered() -> None:
    engine, prompt = engine_of(reuse=False), prompt_of(30, 1)
    for _ in range(2):
        r = request(prompt)
        run(engine, r)
        assert r.cached == 0


def test_short_prefixes_are_read_again() -> None:
    engine, common = engine_of(), prompt_of(WORTH - 1, 1)
    run(engine, request([*common, 5]))
    r = request([*common, 6])
    run(engine, r)
    assert r.cached == 0


def test_a_row_is_forgotten_when_the_memory_is_told_to() -> None:
    _, cache, _ = parts(2, 64)
    memory = RowMemory(cache)
    memory.note(0, prompt_of(20, 1))
    memory.forget_all()
    assert memory.place(prompt_of(20, 1), [0, 1]) == (0, 0)

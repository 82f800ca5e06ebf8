"""Whatever comes in whatever order: first come first served, rows of one's own, chunks, and a memory that is true."""

import functools
import os
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from small import parts
from test_engine import engine_of, prompt_of, request, run

from minillm.errors import EngineError
from minillm.looping import LoopEngine
from minillm.request import Request

ROWS, CHUNK, CONTEXT = 3, 8, 120
SHARED = prompt_of(40, 99)


@functools.cache
def alone(prompt: tuple[int, ...], new: int) -> list[int]:
    return run(engine_of(1, CONTEXT, reuse=False), request(list(prompt), new=new))[0]


class Schedule(RuleBasedStateMachine):
    """Drives an engine, beside a list of what was asked for."""

    many: ClassVar[dict[str, Any]] = {}  # how it makes several steps in one launch

    def __init__(self) -> None:
        super().__init__()
        self.engine = engine_of(ROWS, CONTEXT, chunk=CHUNK, **self.many)
        self.asked: list[Request] = []
        self.ended: list[Request] = []  # each as often as it was told its end
        self.started: list[Request] = []
        self.read = 0  # tokens of prompts since the last decode step, while rows decode
        self.failing: Exception | None = None
        self._spy()

    def _spy(self) -> None:
        engine, prefill = self.engine, self.engine.model.prefill
        step = engine.loops.launch if isinstance(engine, LoopEngine) else engine.runner.step

        def reading(ids: torch.Tensor, row: int, *rest: object, **more: object) -> torch.Tensor:
            assert not (isinstance(engine, LoopEngine) and engine.loops.running)  # it would wait behind the loop
            r = engine.rows[row]
            assert r is not None
            if r not in self.started:
                self.started.append(r)
            if engine._decoding.rows:
                self.read += len(ids)
                assert self.read <= CHUNK
            return prefill(ids, row, *rest, **more)  # type: ignore[arg-type]

        def stepping(*args: object, **more: object) -> None:
            self.read = 0
            if self.failing is not None:
                failing, self.failing = self.failing, None
                raise failing
            step(*args, **more)  # type: ignore[arg-type]

        engine.model.prefill = reading  # type: ignore[method-assign, assignment]
        if isinstance(engine, LoopEngine):
            engine.loops.launch = stepping  # type: ignore[method-assign]
        else:
            engine.runner.step = stepping  # type: ignore[method-assign]

    def _ask(self, make: Callable[[Callable[[], None]], Request]) -> None:
        r = make(lambda: self.ended.append(r))
        self.asked.append(r)
        self.engine.submit(r)

    @rule(shared=st.integers(0, 40), own=st.integers(1, 30), seed=st.integers(0, 3), new=st.integers(1, 30))
    def submit(self, shared: int, own: int, seed: int, new: int) -> None:
        prompt = SHARED[:shared] + prompt_of(own, seed)
        self._ask(lambda end: request(prompt, new=new, on_done=end))

    @precondition(lambda self: any(r.token_ids for r in self.asked))
    @rule(data=st.data(), new=st.integers(1, 8))
    def go_on(self, data: st.DataObject, new: int) -> None:
        """The next turn of a conversation."""
        before = data.draw(st.sampled_from([r for r in self.asked if r.token_ids]))
        prompt = [*(before.prompt_token_ids + before.token_ids)[: CONTEXT - 20], 5]
        self._ask(lambda end: request(prompt, new=new, on_done=end))

    @rule(length=st.integers(1, 30))
    def score(self, length: int) -> None:
        self._ask(lambda end: Request.scoring(SHARED[:length], end))

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.engine.step()

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.engine.cancel(data.draw(st.sampled_from(self.asked)))

    @precondition(lambda self: any(self.engine.rows))
    @rule(data=st.data(), seen=st.booleans())
    def cancel_one_that_runs(self, data: st.DataObject, seen: bool) -> None:
        if seen:
            self.engine.step()
        self.engine.cancel(data.draw(st.sampled_from([r for r in [*self.engine.rows, *self.asked[-1:]] if r])))

    @precondition(lambda self: self.engine._decoding.rows)
    @rule(error=st.sampled_from([RuntimeError("device lost"), torch.OutOfMemoryError("CUDA out of memory")]))
    def fail(self, error: Exception) -> None:
        """Every open request ends with an error of its own, and nothing that the rows held is believed again."""
        self.failing = error
        lost = [r for r in self.asked if not r.done]
        self.engine.step()
        if self.failing is None:
            assert all(r.done for r in lost)
            assert not self.engine.busy
            assert not any(self.engine.memory.held(row) for row in range(ROWS))
        self.failing = None

    @rule()
    def memory_is_true(self) -> None:
        model, fresh, _ = parts(1, CONTEXT)
        for row in range(ROWS):
            held = list(self.engine.memory.held(row))
            if held:
                model.prefill(torch.tensor(held), 0, 0, fresh)
                kept = self.engine.cache.kv[:, :, row, :, : len(held)]
                torch.testing.assert_close(kept, fresh.kv[:, :, 0, :, : len(held)], atol=2e-3, rtol=2e-3)

    @invariant()
    def every_open_request_is_in_one_place(self) -> None:
        held = [r for r in self.engine.rows if r is not None]
        assert sorted(map(id, [*held, *self.engine.waiting])) == sorted(id(r) for r in self.asked if not r.done)

    @invariant()
    def who_has_no_request_is_padding(self) -> None:
        """A row that went on after its request was cancelled would write over the prompt of the next."""
        on = self.engine.state.active.tolist()
        assert not any(on[row] and (r is None or not r.enqueued) for row, r in enumerate(self.engine.rows))

    @invariant()
    def every_end_is_told_once(self) -> None:
        assert sorted(map(id, self.ended)) == sorted(id(r) for r in self.asked if r.done)

    @invariant()
    def first_come_first_served(self) -> None:
        order = {id(r): index for index, r in enumerate(self.asked)}
        places = [order[id(r)] for r in self.started]
        assert places == sorted(places)

    @invariant()
    def answers_are_those_of_single_runs(self) -> None:
        for r in self.asked:
            if r.scores is None:
                text = alone(tuple(r.prompt_token_ids), r.limit - len(r.prompt_token_ids))
                assert r.token_ids == text[: len(r.token_ids)]
                assert r.finish_reason is None or r.token_ids == text
                assert r.cached < len(r.prompt_token_ids)
            assert r.error is None or isinstance(r.error, EngineError)

    def teardown(self) -> None:
        self.memory_is_true()
        for _ in range(2000):
            if not self.engine.busy:
                break
            self.engine.step()
        assert self.engine.rows == [None] * ROWS
        assert all(r.done for r in self.asked)
        self.memory_is_true()
        self.answers_are_those_of_single_runs()
        assert not self.engine.state.active.any()


class ScheduleOfThreeSteps(Schedule):
    many: ClassVar[dict[str, Any]] = dict(graphs=True, steps=3)


class ScheduleOfLoops(Schedule):
    many: ClassVar[dict[str, Any]] = dict(graphs=True, steps="until_done", pace=2)


for machine in (Schedule, ScheduleOfThreeSteps, ScheduleOfLoops):
    machine.TestCase.settings = settings(
        max_examples=int(os.environ.get("MINILLM_EXAMPLES", "25")),
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
TestSchedule = Schedule.TestCase
TestScheduleOfThreeSteps = ScheduleOfThreeSteps.TestCase
TestScheduleOfLoops = ScheduleOfLoops.TestCase


def test_a_long_prompt_holds_nobody_up_for_longer_than_a_chunk() -> None:
    """It was read whole between two steps of the others."""
    engine = engine_of(2, CONTEXT, chunk=CHUNK)
    log: list[int | str] = []
    prefill, step = engine.model.prefill, engine.runner.step
    engine.model.prefill = lambda ids, *a, **k: (log.append(len(ids)), prefill(ids, *a, **k))[1]  # type: ignore[method-assign]
    engine.runner.step = lambda *a: (log.append("step"), step(*a))[1]  # type: ignore[method-assign]
    first, long = request(prompt_of(40, 1), new=30), request(prompt_of(50, 2), new=3)
    engine.submit(first)
    engine.step()
    engine.step()
    engine.submit(long)
    run(engine)
    assert log[:3] == [32, 8, "step"]  # with nobody to hold up, a chunk is longer
    assert log[3:17] == [8, "step"] * 6 + [2, "step"]
    assert first.token_ids == alone(tuple(first.prompt_token_ids), 30)
    assert long.token_ids == alone(tuple(long.prompt_token_ids), 3)


def test_short_prompts_share_the_time_of_a_chunk() -> None:
    engine = engine_of(8, CONTEXT, chunk=CHUNK)
    runner = request(prompt_of(4, 1), new=30)
    engine.submit(runner)
    engine.step()
    short = [request(prompt_of(3, i), new=3) for i in range(6)]
    for r in short:
        engine.submit(r)
    read = []
    for _ in range(3):
        engine.step()
        read.append(sum(r.prefilled for r in short))
    assert read == [6, 12, 18]

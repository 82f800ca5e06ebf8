"""Padded prefills without a GPU: which length a chunk gets, what it writes, and that the logits are those of eager."""

import gc
import random
import warnings
from typing import Any

import pytest
import torch
from small import CPU, FakeBackend, parts

from minillm.assembly import Options, build_engine
from minillm.cache import KVCache
from minillm.errors import ConfigError, GraphError
from minillm.graph_report import GraphReport
from minillm.graphs import make_runner
from minillm.llm import LLM
from minillm.prefill_graphs import DEPTH, LENGTHS, PrefillRunner, Slot
from minillm.state import DecodeState


def runner_of(lengths: tuple[int, ...], backend: FakeBackend | None = None) -> tuple[PrefillRunner, Any, KVCache]:
    model, cache, _ = parts(3, 200)
    runner = PrefillRunner(model, cache, lengths, FakeBackend() if backend is None else backend)
    runner.capture()
    return runner, model, cache


def tokens(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(97), k=count)


def test_the_smallest_length_that_is_at_most_twice_the_tokens() -> None:
    runner, *_ = runner_of((16, 64, 128))
    for count in range(1, 140):
        want = min((length for length in (16, 64, 128) if count <= length <= 2 * count), default=None)
        assert runner.find(count) == want
    assert [runner.find(count) for count in (7, 8, 16, 17, 31, 32, 64, 65, 128, 129)] == [
        None, 16, 16, None, None, 64, 64, 128, 128, None,
    ]  # fmt: skip


def test_lengths_beyond_the_cache_are_left_out_and_the_largest_is_first() -> None:
    backend = FakeBackend()
    runner, *_ = runner_of((64, 256, 16), backend)
    assert list(runner._recordings) == [64, 16]
    assert backend.log == ["warm-up", "capture"] * 2


@pytest.mark.parametrize("count", [1, 5, 8, 9, 16, 17, 33, 64])
def test_logits_and_cache_of_eager(count: int) -> None:
    """Elsewhere, the logits were those of the last padded token, or padding was written behind the prompt."""
    runner, model, cache = runner_of((8, 16, 64))
    exact = KVCache(model.config, 3, 200, CPU, torch.float32)
    for start, row in ((0, 1), (37, 2), (200 - count, 0)):
        past, ids = tokens(start, 1), tokens(count, 2)
        for target in (cache, exact):
            target.kv.fill_(7.0)  # of a former request: nobody may see it
            if start:
                model.prefill(torch.tensor(past), row, 0, target)
        want = model.prefill(torch.tensor(ids), row, start, exact)
        got = runner.read(ids, row, start)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(cache.kv[..., :-1, :], exact.kv[..., :-1, :], rtol=1e-4, atol=1e-4)
        assert cache.kv.isfinite().all()


def test_a_prompt_of_another_length_does_not_see_the_tokens_of_the_one_before() -> None:
    runner, *_ = runner_of((64,))
    first = runner.read(tokens(40, 3), 0, 0).clone()
    runner.read(tokens(64, 4), 1, 0)
    assert torch.equal(runner.read(tokens(40, 3), 0, 0), first)


class SlowEvent:
    """A CUDA event on a device that does nothing until somebody waits for it."""

    def __init__(self, log: list[str]) -> None:
        self.log, self.over = log, True

    def record(self) -> None:
        self.over = False
        self.log.append("recorded")

    def query(self) -> bool:
        return self.over

    def synchronize(self) -> None:
        self.over = True
        self.log.append("waited for")


def test_a_buffer_is_not_filled_again_before_the_device_has_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    log = list[str]()
    runner, *_ = runner_of((16,))
    for slot in runner._slots:
        slot._used = SlowEvent(log)  # type: ignore[assignment]
    fill = Slot.fill
    monkeypatch.setattr(Slot, "fill", lambda slot, numbers: (fill(slot, numbers), log.append("filled")))
    runner._recordings[16].replay = lambda: log.append("launched")  # type: ignore[method-assign]
    for count in range(DEPTH + 1):
        runner.read(tokens(12, seed=count), 0, 0)
    assert log == ["filled", "launched", "recorded"] * DEPTH + ["waited for", "filled", "launched", "recorded"]
    assert runner._inputs.tolist()[:15] == [0, 0, 12, *tokens(12, seed=DEPTH)]


def test_capturing_leaves_the_cache_alone() -> None:
    model, cache, _ = parts(3, 200)
    cache.kv.normal_()
    before = cache.kv.clone()
    PrefillRunner(model, cache, (16, 64), FakeBackend()).capture()
    assert torch.equal(cache.kv[..., :-1, :], before[..., :-1, :])
    assert cache.kv.isfinite().all()
    assert gc.isenabled()


def test_what_runs_how_is_counted() -> None:
    model, cache, _ = parts(3, 200)
    runner = PrefillRunner(model, cache, (16,), FakeBackend())
    runner.report = report = GraphReport(enabled=False)
    runner.capture()
    runner.read(tokens(10), 0, 0)
    runner.read(tokens(3), 0, 0)  # 16 is more than twice 3
    runner.read(tokens(17), 0, 0)
    assert runner.read(tokens(10), 0, 0, all_logits=True).shape == (10, 97)
    assert (report.prefill_lengths, report.prefill_replays, report.eager_prefills) == ([16], 1, 3)
    assert 0 < report.capture_seconds < 60


def step_of_nothing(state: DecodeState, kv_len: int, mode: object) -> None: ...


def test_a_failed_capture_is_one_error_or_one_warning() -> None:
    """And then that part runs eagerly, and the other does not: once, decoding lost its graphs with the prefills."""
    model, cache, state = parts(3, 200)
    runner = PrefillRunner(model, cache, (16, 64), FakeBackend(fail_at=1))
    with pytest.raises(GraphError, match=r"the prefill of 16 tokens failed with 5 MiB free.*Lower prefill_graphs"):
        make_runner(step_of_nothing, state, cache, "on", FakeBackend(), prefills=runner)
    for prefills, backend in (
        (PrefillRunner(model, cache, (16, 64), FakeBackend(fail_at=0)), FakeBackend()),
        (PrefillRunner(model, cache, (16, 64), FakeBackend()), FakeBackend(fail_at=0)),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            steps = make_runner(step_of_nothing, state, cache, "auto", backend, prefills=prefills, steps=4)
        assert len(caught) == 1
        recorded = backend.fail_at is None  # the steps
        assert steps.report.enabled == recorded
        assert (prefills.find(16) is None) == recorded
        assert steps.report.prefill_lengths == ([] if recorded else [16, 64])
        assert steps.steps == (4 if recorded else 1)
        prefills.read(tokens(16), 0, 0)
        assert gc.isenabled()


def test_without_a_gpu_prompts_are_read_eagerly() -> None:
    model, _, _ = parts(3, 200)
    for lengths in (None, (), LENGTHS):
        engine = build_engine(model, 200, Options(prefill_graphs=lengths), progress=False)
        assert engine.prefills.find(16) is None


def test_eager_prefills_are_counted_with_graphs_off_too() -> None:
    """Once, the report was handed over in the capture, which "off" does not get to."""
    engine = build_engine(parts(3, 200)[0], 200, Options(graphs="off"), progress=False)
    engine.prefills.read(tokens(16), 0, 0)
    assert engine.runner.report.eager_prefills == 1


@pytest.mark.parametrize("lengths", [(0,), (64, -1), (True,), (64.0,), ("64",), 64, "64", range(8)])
def test_impossible_lengths_are_refused_before_anything_is_loaded(lengths: Any) -> None:
    with pytest.raises(ConfigError, match="prefill_graphs"):
        LLM("/nowhere", device="cpu", prefill_graphs=lengths)

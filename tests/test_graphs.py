"""The graph runner without a GPU: buckets, order, padding, fallbacks and errors, on a backend that only pretends."""

import gc
import warnings

import pytest
import torch
from small import FakeBackend, parts

from minillm.errors import GraphError
from minillm.graphs import GraphRunner, batch_buckets, kv_buckets, make_runner
from minillm.sampling import Mode, SamplingParams
from minillm.state import DecodeState
from minillm.step import decode_step


def runner_of(backend: FakeBackend | None, max_batch_size: int = 4, max_seq_len: int = 600) -> tuple:
    model, cache, state = parts(max_batch_size, max_seq_len)

    def step(rows: DecodeState, kv_len: int, mode: Mode) -> None:
        decode_step(model, cache, rows, kv_len, mode)

    return GraphRunner(step, state, cache, backend), model, cache, state


@pytest.mark.parametrize("largest", range(1, 71))
def test_every_batch_size_has_a_bucket(largest: int) -> None:
    """Elsewhere, sizes between the last bucket and the maximum found none, or buckets went beyond the maximum."""
    sizes = batch_buckets(largest)
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] == largest
    runner = GraphRunner(lambda *_: None, *parts(largest, 16)[:0:-1], FakeBackend())
    runner.capture()
    for n in range(1, largest + 4):
        key = runner.find(n, 1, Mode.GREEDY)
        assert (key is None) == (n > largest)
        assert key is None or key[0] == min(size for size in sizes if size >= n)


def test_buckets_of_small_and_round_maxima() -> None:
    assert batch_buckets(3) == [1, 2, 3]
    assert batch_buckets(32) == [1, 2, 4, 8, 16, 24, 32]
    assert kv_buckets(100) == [100]
    assert kv_buckets(256) == [256]
    assert kv_buckets(600) == [256, 512, 600]
    assert kv_buckets(1024) == [256, 512, 1024]


def test_capture_is_largest_first_and_warmed_up() -> None:
    """Elsewhere, captured small to large, a shared pool grew to the sum of all sizes."""
    backend = FakeBackend()
    runner, *_ = runner_of(backend)
    runner.capture()
    keys = runner.keys()
    assert keys == sorted(keys, reverse=True)
    assert backend.log == ["warm-up", "capture"] * len(keys)
    assert {key[0] for key in keys} == {1, 2, 4}
    assert {key[1] for key in keys} == {256, 512, 600}
    assert runner.report.graphs == len(keys)
    assert runner.report.pool_bytes == 1000 * len(keys)


def test_capture_puts_cache_and_state_back() -> None:
    """Warm-ups execute real writes: to nothing but what is put back."""
    runner, _, cache, state = runner_of(FakeBackend())
    cache.kv.normal_()
    state.admit(1, [5, 6, 7], 50, [3], SamplingParams(seed=1), 1)
    kept, saved = cache.kv.clone(), state.snapshot()
    runner.capture()
    assert torch.equal(cache.kv, kept)
    assert all(torch.equal(a, b) for a, b in zip(saved, state.snapshot(), strict=True))
    assert gc.isenabled()


@pytest.mark.parametrize("mode", list(Mode))
def test_padding_touches_scratch_slots_only(mode: Mode) -> None:
    """Elsewhere, a padded row's slot of -1 wrapped around to the last position of another sequence."""
    runner, _, cache, state = runner_of(FakeBackend())
    runner.capture()
    cache.kv.normal_()
    for row, position in ((0, 4), (1, 255), (2, 0)):
        state.admit(row, [5] * (position + 1), 400, [], SamplingParams(seed=row), row)
    before = cache.kv.clone()
    runner.step(3, 256, mode)
    changed = (cache.kv != before).any(-1).any(3).any(1).any(0)  # [rows, slots], over layers, K and V, heads
    expected = torch.zeros_like(changed)
    expected[0, 4] = expected[1, 255] = expected[2, 0] = True
    expected[3, cache.scratch_slot] = True
    assert torch.equal(changed, expected)
    assert runner.report.padded_rows == 1


def test_padded_rows_are_finite() -> None:
    """Elsewhere, a padded row attended to no key at all: softmax over nothing is NaN."""
    runner, model, cache, state = runner_of(FakeBackend(), max_batch_size=8)
    runner.capture()
    state.admit(0, [5], 400, [], SamplingParams(), 0)
    seen = []
    model_logits = model._logits
    model._logits = lambda ops, x: seen.append(model_logits(ops, x)) or seen[-1]  # type: ignore[method-assign]
    runner.step(5, 1, Mode.SAMPLED)
    assert seen[0].shape == (8, 97)
    assert seen[0].isfinite().all()
    assert cache.kv.isfinite().all()


def test_addresses_never_change() -> None:
    """Elsewhere, an attribute was bound to a new tensor, and replays went on reading the old one."""
    runner, _, cache, state = runner_of(FakeBackend())
    addresses = [t.data_ptr() for t in vars(state).values()] + [cache.kv.data_ptr()]
    runner.capture()
    state.admit(0, [5, 6], 50, [3, 4], SamplingParams(top_k=3), 9)
    runner.step(1, 10, Mode.FILTERED)
    state.retire(0)
    assert [t.data_ptr() for t in vars(state).values()] + [cache.kv.data_ptr()] == addresses


@pytest.mark.parametrize("penalty", [1.0, 1.2])
def test_junk_in_inactive_rows_changes_nothing(penalty: float) -> None:
    """A step reads fresh values only: what a former request left in a row is overwritten or masked."""
    tokens = []
    for junk in (False, True):
        runner, _, cache, state = runner_of(FakeBackend())
        runner.capture()
        if junk:
            for tensor in (state.tokens, state.positions, state.top_k, state.limits):
                tensor.fill_(77)
            for tensor in (state.temperature, state.top_p, state.min_p, state.repetition_penalty):
                tensor.fill_(0.3)
            state.seen.fill_(True)
            state.stops.fill_(True)
            cache.kv.fill_(3.0)
        state.admit(1, [5, 6, 7], 60, [], SamplingParams(seed=5, repetition_penalty=penalty), 5)
        cache.kv[:, :, 1, :, :2] = 0.5
        for length in range(3, 20):
            runner.step(2, length, Mode.SAMPLED)
            tokens.append(state.output[1, 0].item())
    assert tokens[: len(tokens) // 2] == tokens[len(tokens) // 2 :]


def test_above_the_buckets_runs_eagerly_and_says_so() -> None:
    runner, *_ = runner_of(None)
    runner.capture()
    runner.step(1, 10, Mode.GREEDY)
    assert (runner.report.eager_steps, runner.report.replays, runner.report.enabled) == (1, 0, False)
    assert dict(runner.report.eager_reasons) == {"graphs are off": 1}


def step_of_nothing(state: DecodeState, kv_len: int, mode: Mode) -> None: ...


def test_failed_capture_is_one_error_with_numbers_and_remedies() -> None:
    """Elsewhere, running out of memory in a capture ended in a trace that named neither the size nor a remedy."""
    _, cache, state = parts()
    with pytest.raises(
        GraphError, match=r"2 rows, 512 KV positions, mode SAMPLED.* 5 MiB free.*out of memory"
    ) as raised:
        make_runner(step_of_nothing, state, cache, "on", FakeBackend(fail_at=13))
    for remedy in ("max_batch_size", "max_seq_len", "graphs='off'"):
        assert remedy in str(raised.value)
    assert gc.isenabled()


def test_auto_goes_on_in_eager_after_one_warning() -> None:
    _, cache, state = parts()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runner = make_runner(step_of_nothing, state, cache, "auto", FakeBackend(fail_at=3))
        runner.step(1, 10, Mode.GREEDY)
        runner.step(1, 10, Mode.GREEDY)
    assert len(caught) == 1
    assert runner.report.eager_reasons == {"capture failed": 2}
    assert not runner.report.enabled


def test_on_without_a_gpu_is_an_error_and_auto_is_eager() -> None:
    _, cache, state = parts()
    with pytest.raises(GraphError, match="needs a CUDA device"):
        make_runner(step_of_nothing, state, cache, "on", None)
    runner = make_runner(step_of_nothing, state, cache, "auto", None)
    runner.step(1, 10, Mode.GREEDY)
    assert runner.report.eager_reasons == {"no CUDA device": 1}


def test_off_captures_nothing() -> None:
    _, cache, state = parts()
    backend = FakeBackend()
    make_runner(step_of_nothing, state, cache, "off", backend).step(1, 10, Mode.GREEDY)
    assert backend.log == []


def test_nothing_in_a_step_waits_for_the_device() -> None:
    """A static scan of what is captured: no .item(), .cpu(), .tolist(), no tensor made from a list."""
    import inspect

    import minillm.kernels.reference as reference
    import minillm.model as model
    import minillm.sampling as sampling
    import minillm.step as step

    for function in (
        step.decode_step, step.sample_and_advance, model.Llama.decode, model.Llama._layers, reference.begin,
        reference.row_attention, reference.qkv_rope_append, reference.gate_up_silu, reference.norm_logits,
        sampling.sample, sampling.penalise, sampling.scale, sampling.keep_top, sampling.gumbel,
    ):  # fmt: skip
        source = inspect.getsource(function)
        for call in (".item(", ".cpu(", ".tolist(", "torch.tensor(", ".nonzero(", "bool(", "float(state", "int(state"):
            assert call not in source, (function.__name__, call)

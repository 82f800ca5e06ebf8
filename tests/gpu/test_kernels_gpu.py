"""The fused kernels on a GPU, at real sizes: each against its definition in float64, and the same bits every time."""

from typing import Any

import kernel_cases as cases
import pytest
import torch
from torch import Tensor

from minillm.cache import KVCache
from minillm.config import ModelConfig
from minillm.kernels import launch, reference
from minillm.kernels.fused import FusedOps
from minillm.model import Llama
from minillm.sampling import Mode, SamplingParams
from minillm.state import BROKEN, RUNNING, DecodeState
from minillm.step import sample_and_advance
from minillm.weights import Weights, allocate, randomise

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CUDA, BF16, FP16, EPS = torch.device("cuda"), torch.bfloat16, torch.float16, 1e-5

SHAPES = {
    "SmolLM2-135M": (576, 1536, 9, 3, 64, {}),
    "Llama-3.2-1B": (2048, 8192, 32, 8, 64, {}),
    "Llama-2-7B": (4096, 11008, 32, 32, 128, {}),
    "Llama-3.1-8B": (4096, 14336, 32, 8, 128, {}),
    "Phi-like-96": (3072, 8192, 32, 32, 96, {}),
    "head-dim-80": (2560, 6912, 32, 8, 80, {}),
    "head-dim-256": (2048, 16384, 8, 1, 256, {}),
    "Qwen2.5-0.5B": (896, 4864, 14, 2, 64, {"model_type": "qwen2"}),
    "Qwen3-0.6B": (1024, 3072, 16, 8, 128, {"model_type": "qwen3"}),
}


def config(name: str, **changes: object) -> ModelConfig:
    hidden, inter, heads, kv_heads, head_dim, more = SHAPES[name]
    sizes = {"hidden_size": hidden, "intermediate_size": inter, "head_dim": head_dim, "vocab_size": 2003}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return cases.config(**{**sizes, **more, **changes})


def angles_of(n: int, head_dim: int) -> tuple[Tensor, Tensor]:
    angles = torch.rand(n, head_dim // 2, device=CUDA) * 6
    return angles, torch.polar(torch.ones_like(angles), angles)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(
    ("n", "dtype"), [(1, BF16), (2, FP16), (3, BF16), (4, BF16), (5, BF16), (16, FP16), (32, BF16)]
)
def test_projections(name: str, n: int, dtype: torch.dtype) -> None:
    """Operations 1, 3, 4, 5 and the logits, with poisoned outputs and cache."""
    cfg = config(name)
    ops, layer = FusedOps(cfg, 32, 300, CUDA), cases.random_layer(cfg, 1, CUDA, dtype)
    x = cases.random(2, CUDA, dtype, n, cfg.hidden_size)
    y = cases.random(3, CUDA, dtype, n, layer.o.shape[1])
    head = cases.random(4, CUDA, dtype, cfg.vocab_size, cfg.hidden_size, scale=cfg.hidden_size**-0.5)
    angles, rope = angles_of(n, cfg.head_dim)
    kv = torch.full((2, 32, cfg.num_key_value_heads, 301, cfg.head_dim), torch.nan, device=CUDA, dtype=dtype)
    rows, slots = torch.arange(n, device=CUDA), torch.tensor([299, 0, 7, 300] * 8, device=CUDA)[:n]
    with cases.poisoned_outputs():
        q = ops.qkv_rope_append(x, layer, rope, EPS, kv, rows, slots, cfg.head_dim)
        residual = ops.linear_residual(y, layer.o, layer.o_bias, x, layer.post_norm)
        after = ops.gate_up_silu(residual, layer, EPS)  # of a stream that was prepared for its norm, if n is not small
        hidden = ops.gate_up_silu(x, layer, EPS)
        down = ops.linear_residual(hidden, layer.down, layer.down_bias, x)
        logits = ops.norm_logits(x, layer.post_norm, head, EPS)
    cases.assert_close(residual, cases.linear_residual(y, layer.o, layer.o_bias, x))
    cases.assert_close(down, cases.linear_residual(hidden, layer.down, layer.down_bias, x))
    heads = cfg.num_attention_heads, cfg.num_key_value_heads
    normalised = [
        (hidden, cases.gate_up_silu(x, layer, EPS)),
        (after, cases.gate_up_silu(residual, layer, EPS)),
        (logits, cases.linear(cases.rms_norm(x, layer.post_norm, EPS), head, None)),
        *zip((q, *kv[:, rows, :, slots].unbind(1)), cases.qkv(x, layer, angles, EPS, *heads), strict=True),
    ]
    for got, want in normalised:
        if n > launch.PLAIN_ROWS or (
            cfg.qk_norm and got.dim() == 3
        ):  # what is multiplied or normalised was rounded once more before
            error = (got.double() - want).abs().amax(-1)
            assert (error <= 3 * torch.finfo(dtype).eps * want.abs().amax(-1)).all()
        else:
            cases.assert_close(got, want)
    kv[:, rows, :, slots] = torch.nan
    assert kv.isnan().all()


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(("rows", "long_from"), [(6, launch.NEVER), (7, 1), (7, launch.LONG_FROM), (8, 0)])
def test_attention(name: str, dtype: torch.dtype, rows: int, long_from: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of the short way, of the long one, and of both; from one token to all; unread places of the cache and the
    scratch memory are NaN. The long way has its probabilities in the dtype of the model, hence the wider bound."""
    monkeypatch.setattr(launch, "LONG_FROM", long_from)
    cfg, size = config(name), 5000
    ops = FusedOps(cfg, rows, size, CUDA)
    for scratch in (ops.scratch.parts, ops.scratch.maxima, ops.scratch.sums):
        scratch.fill_(torch.nan)
    positions = [size - 1, 4095, 0, 1, 511, 64, 1024, 63][:rows]
    q = cases.random(1, CUDA, dtype, len(positions), cfg.num_attention_heads, cfg.head_dim)
    kv = cases.poisoned_cache(2, CUDA, dtype, rows, cfg.num_key_value_heads, size + 1, cfg.head_dim, positions)
    with cases.poisoned_outputs():
        got = ops.row_attention(cases.state_at(positions, cfg.vocab_size, CUDA), size)(q, kv)
    want = cases.attention(q, kv, positions)
    for row, position in enumerate(positions):
        bound = (2 if position + 1 >= long_from else 1) * torch.finfo(dtype).eps * want.abs().max()
        assert (got[row].double() - want[row]).abs().max() < bound
    assert not ops.scratch.head_counters.any()


@pytest.mark.parametrize(
    "name", [name for name, (_, _, heads, kv, _, _) in SHAPES.items() if heads > kv and name != "Qwen3-0.6B"]
)
@pytest.mark.parametrize(("n", "dtype"), [(8, BF16), (8, FP16), (20, BF16), (32, BF16), (32, FP16)])
def test_attention_that_finishes_the_projection(name: str, n: int, dtype: torch.dtype) -> None:
    """Of 8 rows and more: from one token to all, padding rows, biases, heads of all sizes, the borders of splits. Norms
    on q and k (Qwen3) have a kernel of their own instead."""
    cfg, size = config(name), 3000
    state = cases.state_at(([size - 1, 0, 1, 511, 64, 2047, 1024, 63, 31, 32] * 4)[:n], cfg.vocab_size, CUDA)
    state.active[2::5] = False
    kv = cases.poisoned_cache(
        2, CUDA, dtype, n, cfg.num_key_value_heads, size + 1, cfg.head_dim,
        torch.where(state.active, state.positions, 0).sub(1).tolist(),
    )  # fmt: skip
    layer = cases.random_layer(cfg, 1, CUDA, dtype)
    embed = cases.random(3, CUDA, dtype, cfg.vocab_size, cfg.hidden_size)
    ops = FusedOps(cfg, n, size, CUDA)
    cases.check_attention_that_finishes(ops, cfg, layer, embed, kv, state, angles_of(size, cfg.head_dim)[0])


@pytest.mark.parametrize("vocab", [97, 2003, 128256])
@pytest.mark.parametrize("n", [3, 8, 20, 32])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_a_greedy_step_without_logits(vocab: int, n: int, dtype: torch.dtype) -> None:
    """Equal logits all over the vocabulary, of which the first counts; a row that is broken; rows that end."""
    cfg = config("Llama-3.2-1B", vocab_size=vocab)
    ops = FusedOps(cfg, n, 100, CUDA)
    weight = cases.random(1, CUDA, dtype, 61, cfg.hidden_size)[torch.arange(vocab, device=CUDA) * 7 % 61].contiguous()
    x = cases.random(2, CUDA, dtype, n, cfg.hidden_size)
    x[n // 2] = torch.nan
    norm = torch.ones(cfg.hidden_size, device=CUDA, dtype=dtype)
    state = cases.sampled_state(n, vocab, CUDA, 3)
    for _ in range(3):
        cases.check_best(ops, x, norm, weight, EPS, state)
        ops.advance_to_best(x, norm, weight, EPS, state)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("n", [1, 3, 40])
def test_begin(name: str, n: int) -> None:
    cfg = config(name)
    embed, (_, rope_table) = cases.random(1, CUDA, BF16, cfg.vocab_size, cfg.hidden_size), angles_of(300, cfg.head_dim)
    state = cases.state_at([7 * row + 3 for row in range(n)], cfg.vocab_size, CUDA)
    state.active[1::3] = False
    with cases.poisoned_outputs():
        got = FusedOps(cfg, n, 300, CUDA).begin(state, embed, rope_table, 300)
    for mine, plain in zip(got, reference.begin(state, embed, rope_table, 300), strict=True):
        assert torch.equal(mine, plain)


@pytest.mark.parametrize("vocab", [97, 32000, 128256, 151936])
@pytest.mark.parametrize("n", [1, 3, 32])
def test_greedy_finish(vocab: int, n: int) -> None:
    torch.manual_seed(vocab + n)
    ops = FusedOps(cases.config(vocab_size=vocab), n, 100, CUDA)
    want = DecodeState.allocate(n, vocab, CUDA)
    for row in range(n):
        want.admit(row, [1] * (row + 1), 3 + row % 3 * 40, [7, 9], SamplingParams(), row)
    want.active[2::3] = False
    logits = torch.randint(-9, 9, (n, vocab), device=CUDA).float()
    logits[n // 2, vocab // 2] = torch.nan
    got = cases.copy_of(want)
    for _ in range(3):
        ops.sample_and_advance(logits, got, Mode.GREEDY)
        sample_and_advance(logits, want, Mode.GREEDY)
        cases.assert_same_state(got, want)


@pytest.mark.parametrize("mode", [Mode.SAMPLED, Mode.FILTERED])
@pytest.mark.parametrize("vocab", [97, 32000, 128256, 151936])
@pytest.mark.parametrize("n", [1, 8, 33])
def test_sampled_finish(mode: Mode, vocab: int, n: int) -> None:
    """The same tokens as the plain sampler, for all kinds of parameters, seeds and positions.

    Tokens could differ where the two best scores are a rounding of the noise apart, 1e-6, as random numbers are once in
    some 500,000 draws. Here are 21,000, and always the same.
    """
    torch.manual_seed(vocab + n)
    ops = FusedOps(cases.config(vocab_size=vocab), n, 100, CUDA)
    for seed in range(8):
        want = cases.sampled_state(n, vocab, CUDA, seed)
        got = cases.copy_of(want)
        for _ in range(8):
            logits = torch.randn(n, vocab, device=CUDA) * 3
            ops.sample_and_advance(logits, got, mode)
            sample_and_advance(logits, want, mode)
            cases.assert_same_state(got, want)
    assert not ops.scratch.row_counters.any()


def test_sampled_tokens_are_many_and_those_of_the_plain_sampler() -> None:
    """2,000 draws from one wide distribution, at as many positions."""
    vocab = 128256
    torch.manual_seed(0)
    ops, want = FusedOps(cases.config(vocab_size=vocab), 1, 100, CUDA), DecodeState.allocate(1, vocab, CUDA)
    want.admit(0, [5], 10**6, [], SamplingParams(temperature=1.5), 2**63 + 12345)
    got, logits, tokens = cases.copy_of(want), torch.randn(1, vocab, device=CUDA), []
    for _ in range(2000):
        ops.sample_and_advance(logits, got, Mode.SAMPLED)
        sample_and_advance(logits, want, Mode.SAMPLED)
        tokens.append(torch.stack((got.output[0, 0], want.output[0, 0])))
    mine, plain = torch.stack(tokens).T
    assert torch.equal(mine, plain)
    assert mine.unique().numel() > 1500


@pytest.mark.parametrize("mode", list(Mode))
def test_broken_rows_are_marked(mode: Mode) -> None:
    vocab = 32000
    for value in (torch.nan, torch.inf, -torch.inf):
        ops, state = FusedOps(cases.config(vocab_size=vocab), 3, 100, CUDA), cases.sampled_state(3, vocab, CUDA, 2)
        logits = torch.randn(3, vocab, device=CUDA)
        logits[1, 0 if value < 0 else 20000 : None if value < 0 else 20001] = value
        ops.sample_and_advance(logits, state, mode)
        assert state.output[:, 1].tolist() == [RUNNING, BROKEN, RUNNING]
        assert 0 <= state.output[1, 0].item() < vocab


@pytest.mark.parametrize("mode", list(Mode))
def test_a_finish_gives_the_same_bits_every_time(mode: Mode) -> None:
    """100 times from the same state, all queued at once, with a fence before each as in a step."""
    vocab, n = 128256, 4
    torch.manual_seed(0)
    ops, first = FusedOps(cases.config(vocab_size=vocab), n, 100, CUDA), cases.sampled_state(n, vocab, CUDA, 3)
    logits, state, saved, outputs = torch.randn(n, vocab, device=CUDA), cases.copy_of(first), first.snapshot(), []
    for _ in range(100):
        state.restore(saved)
        ops.sample_and_advance(logits, state, mode)
        outputs.append(torch.cat((state.output.flatten(), state.positions.int(), state.seen.sum(1).int())))
    for output in outputs[1:]:
        assert torch.equal(output, outputs[0])


class Step:
    """Layers with everything that surrounds them in a decode step, on n rows at growing positions."""

    def __init__(self, cfg: ModelConfig, n: int, start: int, mode: Mode = Mode.GREEDY) -> None:
        torch.manual_seed(0)
        self.cfg, self.n, self.mode = cfg, n, mode
        self.weights = allocate(cfg, CUDA, BF16)
        randomise(self.weights, cfg.hidden_size**-0.5)
        self.ops = FusedOps(cfg, n, 2048, CUDA)
        shape = (cfg.num_hidden_layers, 2, n, cfg.num_key_value_heads, 2049, cfg.head_dim)
        self.kv = torch.randn(shape, device=CUDA, dtype=BF16)
        self.first_kv = self.kv.clone()
        self.state = DecodeState.allocate(n, cfg.vocab_size, CUDA)
        for row in range(n):
            params = SamplingParams(**cases.SAMPLING[(3 + row) % len(cases.SAMPLING)])
            self.state.admit(row, [5 + row] * (start + row), 2000, [], params, row)
        if n > 1:
            self.state.active[n - 1] = False
        self.first_state = self.state.snapshot()
        self.rope = torch.polar(torch.ones(2048, cfg.head_dim // 2), torch.rand(2048, cfg.head_dim // 2)).to(CUDA)
        self.logits = torch.empty(n, cfg.vocab_size, device=CUDA)

    def reset(self) -> None:
        self.kv.copy_(self.first_kv)
        self.state.restore(self.first_state)

    @torch.inference_mode()
    def __call__(self) -> None:
        state, ops, eps = self.state, self.ops, self.cfg.rms_norm_eps
        x, rope, slots = ops.begin(state, self.weights.embed, self.rope, 2048, self.weights.layers[0].input_norm)
        following = [w.input_norm for w in self.weights.layers[1:]] + [self.weights.norm]
        attend = ops.row_attention(state, 2048)
        for index, w in enumerate(self.weights.layers):
            kv = self.kv[index]
            q = ops.qkv_rope_append(x, w, rope, eps, kv, state.rows, slots, self.cfg.head_dim)
            x = ops.linear_residual(attend(q, kv), w.o, w.o_bias, x, w.post_norm)
            x = ops.linear_residual(ops.gate_up_silu(x, w, eps), w.down, w.down_bias, x, following[index])
        logits = ops.norm_logits(x, self.weights.norm, self.weights.lm_head, eps)
        ops.sample_and_advance(logits, state, self.mode)
        self.logits.copy_(logits)


def eager_with_waits(step: Step, steps: int) -> list[Tensor]:
    """Every kernel ends before the next is launched: no order is left to chance."""
    run = step.ops._run

    def run_and_wait(*args: object, **constants: int) -> None:
        run(*args, **constants)  # type: ignore[arg-type]
        torch.cuda.synchronize()

    step.ops._run = run_and_wait  # type: ignore[method-assign]
    step.reset()
    seen = []
    for _ in range(steps):
        step()
        seen.append(step.logits.clone())
    step.ops._run = run  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("name", ["SmolLM2-135M", "Llama-3.2-1B", "Qwen3-0.6B", "head-dim-80"])
@pytest.mark.parametrize(
    ("n", "mode"),
    [(1, Mode.GREEDY), (4, Mode.GREEDY), (8, Mode.GREEDY), (32, Mode.GREEDY), (1, Mode.SAMPLED), (4, Mode.SAMPLED)],
)
def test_replays_equal_one_kernel_at_a_time(name: str, n: int, mode: Mode) -> None:
    """100 replays of a recorded step, all queued at once: the same bits as when every kernel is waited for.

    Guards the order of kernels that overlap: reading before the wait what an earlier kernel of the same step writes, or
    a program that ends without waiting, shows as bits that differ. Lengths cross the borders of tiles and splits.
    """
    compare_replays(Step(config(name, num_hidden_layers=6, vocab_size=32000), n, 30, mode))


@pytest.mark.parametrize("n", [1, 4, 8, 32])
def test_replays_of_late_kernels_equal_one_kernel_at_a_time(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same where each product allows the next kernel late that does so early by the table, and the reverse."""
    choose = launch.tile

    def other_way(*args: Any) -> launch.Tile:
        tile = choose(*args)
        return tile._replace(late=1 - tile.late)

    monkeypatch.setattr(launch, "tile", other_way)
    compare_replays(Step(config("Llama-3.2-1B", num_hidden_layers=6, vocab_size=32000), n, 30))


def compare_replays(step: Step) -> None:
    wanted = eager_with_waits(step, 100)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        step()
    for _ in range(3):
        step.reset()
        seen = []
        for _ in range(100):
            graph.replay()
            seen.append(step.logits.clone())
        torch.cuda.synchronize()
        for index, (got, want) in enumerate(zip(seen, wanted, strict=True)):
            assert torch.isfinite(want).all()
            assert torch.equal(got, want), f"step {index} differs"


def test_other_rows_change_nothing() -> None:
    """The bits of a row do not depend on what the other rows of the step hold."""
    step = Step(config("Llama-3.2-1B", num_hidden_layers=2), 4, start=100)
    step()
    alone = step.logits[1].clone()
    step.reset()
    step.state.tokens[torch.tensor([0, 2, 3], device=CUDA)] = 50
    step.kv[:, :, [0, 2, 3]] *= 3
    step()
    assert torch.equal(step.logits[1], alone)
    assert not torch.equal(step.logits[0], step.logits[1])


@pytest.mark.parametrize("name", ["SmolLM2-135M", "Llama-3.2-1B", "Qwen3-0.6B"])
@pytest.mark.parametrize("n", [1, 4, 8, 32, 33, 64])
def test_every_row_of_a_step_gets_its_own_logits(name: str, n: int) -> None:
    """Beside float32, each row for itself, at most a little further away than plain operations of the same dtype.

    From 33 rows on, attention once read q as if it were not a part of q, k and v: all rows but the first were nonsense.
    """
    cfg, length = config(name, num_hidden_layers=2), 300
    weights = cases.random_weights(cfg, CUDA, BF16)
    state = DecodeState.allocate(n, cfg.vocab_size, CUDA)
    state.tokens.copy_(torch.arange(n) * 31 % cfg.vocab_size)
    state.positions.copy_(torch.arange(n) * 7 % (length - 1))
    state.active.fill_(True)
    past = torch.randn(KVCache(cfg, n, length, CUDA, torch.float32).kv.shape, device=CUDA).to(BF16)

    def logits(weights: Weights, fused: FusedOps | None) -> Tensor:
        cache = KVCache(cfg, n, length, CUDA, weights.embed.dtype)
        cache.kv.copy_(past)
        return Llama(cfg, weights, length, fused).decode(state, cache, length)

    exact = logits(cases.as_float32(weights), None)
    mine, plain = (
        (got - exact).norm(dim=1) / exact.norm(dim=1)
        for got in (logits(weights, FusedOps(cfg, n, length, CUDA)), logits(weights, None))
    )
    assert mine.max() < 1.2 * plain.max() + 1e-4

"""The kernels of a prefill against their definitions in float64, through Triton's interpreter: no GPU needed.

Run by test_prompt.py in a process of its own, as interpreted_kernels.py is by test_kernels.py. By hand:

    TRITON_INTERPRET=1 pytest tests/interpreted_prompt.py
"""

import math

import kernel_cases as cases
import pytest
import torch
from torch import Tensor

from minillm.cache import KVCache
from minillm.config import ModelConfig
from minillm.kernels import fused_prompt
from minillm.kernels.fused import FusedOps
from minillm.kernels.fused_prompt import FusedPrompt
from minillm.model import Llama
from minillm.weights import Weights, allocate, randomise

CPU, EPS, LENGTH = torch.device("cpu"), 1e-5, 90
BF16, FP16 = torch.bfloat16, torch.float16


def fused(cfg) -> FusedPrompt:
    return FusedPrompt(FusedOps(cfg, 1, LENGTH, CPU))


def assert_close_rows(got: Tensor, want: Tensor, roundings: float) -> None:
    """Relative to the largest of a row. What goes into a product was rounded before; the interpreter, which casts to
    bfloat16 by cutting bits off, errs by twice as much as rounding."""
    error = (got.double() - want).abs().amax(-1)
    bound = roundings * torch.finfo(got.dtype).eps * want.abs().amax(-1)
    assert (error <= bound).all(), (error / bound).max()


@pytest.mark.parametrize("hidden", [16, 64, 576, 1024, 2064, 5120])
@pytest.mark.parametrize(("dtype", "length"), [(BF16, 1), (FP16, 3)])
def test_norm(hidden: int, dtype: torch.dtype, length: int) -> None:
    """One rounding, whatever the size of x: in float16 the square of a number above 256 is infinite."""
    for scale in (1, 10000):
        x, gain = cases.random(1, CPU, dtype, length, hidden, scale=scale), cases.random(2, CPU, dtype, hidden)
        with cases.poisoned_outputs():
            got = fused(cases.config())._norm(x, gain, EPS)
        cases.assert_close(got, cases.rms_norm(x, gain, EPS), 2 if dtype == BF16 else 1)


def test_norm_of_small_numbers_sees_eps() -> None:
    x, gain = cases.random(1, CPU, FP16, 2, 64, scale=1e-3), cases.random(2, CPU, FP16, 64)
    cases.assert_close(fused(cases.config())._norm(x, gain, 1e-3), cases.rms_norm(x, gain, 1e-3))


@pytest.mark.parametrize(("hidden", "inter"), [(64, 16), (48, 48), (64, 1024), (16, 1040)])
@pytest.mark.parametrize(("dtype", "length", "biased"), [(BF16, 1, True), (FP16, 3, False), (FP16, 2, True)])
def test_gate_up_silu(hidden: int, inter: int, dtype: torch.dtype, length: int, biased: bool) -> None:
    """Units that fill no block, one and several; large gates, where the exponential overflows and SiLU does not."""
    cfg = cases.config(hidden_size=hidden, intermediate_size=inter, mlp_bias=biased)
    layer, x = cases.random_layer(cfg, 1, CPU, dtype), cases.random(2, CPU, dtype, length, hidden)
    layer.gate_up[:4] *= 40
    with cases.poisoned_outputs():
        got = fused(cfg).gate_up_silu(x, layer, EPS)
    assert_close_rows(got, cases.gate_up_silu(x, layer, EPS), 4)


@pytest.mark.parametrize("biased", [False, True])
def test_linear_residual_adds_in_place(biased: bool) -> None:
    """And touches nothing beside x, which lies between NaN."""
    weight, bias = cases.random(1, CPU, FP16, 48, 64, scale=0.1), cases.random(2, CPU, FP16, 48)
    y, x = cases.random(3, CPU, FP16, 5, 64), cases.random(4, CPU, FP16, 5, 48)
    want = cases.linear_residual(y, weight, bias if biased else None, x)
    got = fused(cases.config()).linear_residual(y, weight, bias if biased else None, x)
    assert got.data_ptr() == x.data_ptr()
    assert_close_rows(got, want, 2)
    buffer = x._base
    assert buffer is not None
    assert buffer.isnan().sum() == 2 * cases.PAD


FAMILIES = {"llama": {}, "qwen2": {"model_type": "qwen2"}, "qwen3": {"model_type": "qwen3"}}


@pytest.mark.parametrize(
    ("family", "head_dim", "heads", "kv_heads", "block"),
    [
        ("llama", 64, 9, 3, 16),  # one block that they do not fill
        ("llama", 64, 4, 1, 2),  # blocks that hold heads of q and k, and of v and nothing
        ("llama", 80, 2, 2, 8),
        ("qwen2", 96, 3, 1, 4),
        ("llama", 128, 6, 2, 8),
        ("qwen2", 256, 1, 1, 1),
        ("qwen3", 64, 3, 1, 4),
        ("qwen3", 80, 4, 2, 2),
        ("qwen3", 128, 2, 1, 4),
    ],
)
@pytest.mark.parametrize(("length", "start", "dtype"), [(1, 0, FP16), (5, 0, BF16), (3, LENGTH - 3, FP16)])
def test_qkv_rope_append(
    family: str, head_dim: int, heads: int, kv_heads: int, block: int, length: int, start: int, dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """q is right, K and V stand in their slots, and every other bit of the cache is as it was."""
    monkeypatch.setattr(fused_prompt, "HEAD_BLOCK", block * (1 << (head_dim - 1).bit_length()))
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    cfg = cases.config(**sizes, **FAMILIES[family])
    layer, x = cases.random_layer(cfg, 1, CPU, dtype), cases.random(2, CPU, dtype, length, 64)
    if layer.q_norm is not None:
        layer.qkv[-kv_heads * head_dim :] *= 3  # heads of v, which would show it if they were normalised
    angles = torch.rand(length, head_dim // 2, generator=torch.Generator().manual_seed(3)) * 6
    rope = cases.guarded(torch.view_as_real(torch.polar(torch.ones_like(angles), angles)))
    kv = torch.full((2, 3, kv_heads, LENGTH + 1, head_dim), math.nan, dtype=dtype)
    slots = torch.arange(start, start + length)
    rows = torch.full_like(slots, 1)
    with cases.poisoned_outputs():
        q = fused(cfg).qkv_rope_append(x, layer, torch.view_as_complex(rope), EPS, kv, rows, slots, head_dim)
    assert q.shape == (length, heads, head_dim)
    written = kv[:, 1, :, start : start + length].transpose(1, 2)  # [2, T, kv_heads, head_dim]
    for got, want in zip((q, *written), cases.qkv(x, layer, angles, EPS, heads, kv_heads), strict=True):
        assert_close_rows(got, want, 4)
    kv[:, 1, :, start : start + length] = math.nan
    assert kv.isnan().all()


def test_the_tokens_of_a_prompt_do_not_see_each_other_before_attention() -> None:
    """A chunk gives the same bits as its tokens one by one: no program reads or writes the place of another."""
    cfg = cases.config(num_attention_heads=5, num_key_value_heads=1)
    ops, y = fused(cfg), cases.random(1, CPU, BF16, 6, 7 * 64)
    layer = cases.random_layer(cfg, 1, CPU, BF16)
    layer.qkv = torch.eye(7 * 64, dtype=BF16)  # the product changes nothing
    layer.input_norm = torch.ones(7 * 64, dtype=BF16)
    angles = torch.rand(6, 32) * 6
    rope, slots, rows = torch.polar(torch.ones_like(angles), angles), torch.arange(6), torch.zeros(6, dtype=torch.int64)
    results = []
    for size in (6, 1):
        kv = torch.zeros(2, 1, 1, 7, 64, dtype=BF16)
        parts = [
            ops.qkv_rope_append(
                y[i : i + size], layer, rope[i : i + size], EPS, kv, rows[:size], slots[i : i + size], 64
            )
            for i in range(0, 6, size)
        ]
        results.append((torch.cat(parts), kv))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def model_and_prompt(family: str) -> tuple[ModelConfig, Weights, Tensor]:
    """Random weights in float16, and 40 token ids."""
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
    cfg = cases.config(**sizes, num_key_value_heads=2, **FAMILIES[family])
    weights = allocate(cfg, CPU, FP16)
    torch.manual_seed(0)
    randomise(weights, 0.15)
    return cfg, weights, torch.randint(0, cfg.vocab_size, (40,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_prefills_with_them(family: str) -> None:
    """Whole and in chunks: the logits and the cache of the plain operations in float32, up to float16."""
    cfg, weights, ids = model_and_prompt(family)
    cache = KVCache(cfg, 2, LENGTH, CPU, FP16)
    mine = Llama(cfg, weights, LENGTH, FusedOps(cfg, 2, LENGTH, CPU))
    whole = mine.prefill(ids, 1, 0, cache, all_logits=True)
    whole_kv = cache.kv.clone()
    cache.kv.zero_()
    cuts = ((0, 1), (1, 17), (17, 39), (39, 40))
    chunks = torch.cat([mine.prefill(ids[a:b], 1, a, cache)[-1:] for a, b in cuts])

    for tensor in weights.tensors():
        tensor.data = tensor.data.float()
    exact = KVCache(cfg, 2, LENGTH, CPU, torch.float32)
    want = Llama(cfg, weights, LENGTH).prefill(ids, 1, 0, exact, all_logits=True)
    assert whole.dtype == chunks.dtype == torch.float32
    limit = 8 * torch.finfo(FP16).eps
    assert (whole - want).norm() < limit * want.norm()
    assert (chunks - want[[b - 1 for _, b in cuts]]).norm() < limit * want.norm()
    for kv in (whole_kv, cache.kv):
        assert (kv.float() - exact.kv).norm() < limit * exact.kv.norm()
        assert not kv[:, :, 0].any()
        assert not kv[:, :, 1, :, 40:].any()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(4, 1, 64), (3, 1, 64), (2, 2, 80), (3, 1, 96), (2, 1, 128), (1, 1, 256)]
)
@pytest.mark.parametrize(
    ("size", "count", "start"),
    [(1, 1, 0), (16, 16, 0), (20, 17, 3), (70, 64, 0), (70, 65, 25), (70, 3, 80), (64, 64, 26)],
)
def test_placed_attention(heads: int, kv_heads: int, head_dim: int, size: int, count: int, start: int) -> None:
    """A chunk in the middle of a row, filled up with NaN, in a cache of NaN: real tokens are right, others are zero."""
    cfg = cases.config(num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim)
    wide = torch.full((size, heads + 2 * kv_heads, head_dim), math.nan, dtype=FP16)
    q = wide[:, :heads]  # as `qkv_rope_append` returns it
    q[:count] = cases.random(1, CPU, FP16, count, heads, head_dim, scale=2)
    kv = torch.full((2, 3, kv_heads, LENGTH + 1, head_dim), math.nan, dtype=FP16)
    kv[:, 1, :, : start + count] = cases.random(2, CPU, FP16, 2, kv_heads, start + count, head_dim)
    with cases.poisoned_outputs():
        got = fused(cfg).placed_attention(torch.tensor([1, start, count]))(q, kv)
    assert not got[count:].any()
    for index in range(count):
        want = cases.attention(q[index, None], kv[:, 1, None], [start + index])
        assert (got[index].double() - want[0]).abs().max() < 3 * torch.finfo(FP16).eps * want.abs().max()


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 1, 64), (2, 2, 80)])
@pytest.mark.parametrize(("size", "count", "start"), [(8, 8, 256), (20, 17, 600), (40, 39, 1000), (40, 3, 240)])
def test_placed_attention_in_splits(
    heads: int, kv_heads: int, head_dim: int, size: int, count: int, start: int
) -> None:
    """Far into a row several programs share the past; tokens that see nothing of the last part of it, too. Twice,
    because the first leaves the counters for the second.
    """
    cfg = cases.config(num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim)
    q = cases.random(1, CPU, FP16, count, heads, head_dim, scale=2)
    padded = torch.full((size, heads, head_dim), math.nan, dtype=FP16)
    padded[:count] = q
    kv = torch.full((2, 3, kv_heads, 1100, head_dim), math.nan, dtype=FP16)
    kv[:, 1, :, : start + count] = cases.random(2, CPU, FP16, 2, kv_heads, start + count, head_dim)
    ops = FusedOps(cfg, 1, LENGTH, CPU)
    for _ in range(2):
        with cases.poisoned_outputs():
            got = ops.prompt.placed_attention(torch.tensor([1, start, count]))(padded, kv)
        assert not got[count:].any()
        assert not ops.scratch.chunk_counters.any()
        for index in range(0, count, 4):
            want = cases.attention(q[index, None], kv[:, 1, None], [start + index])
            assert (got[index].double() - want[0]).abs().max() < 3 * torch.finfo(FP16).eps * want.abs().max()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_padded_prefill(family: str) -> None:
    """At two places, between NaN: the logits and the cache of the plain operations in float32, up to float16."""
    cfg, weights, ids = model_and_prompt(family)
    cache = KVCache(cfg, 2, LENGTH, CPU, FP16)
    cache.kv.fill_(math.nan)
    mine, got = Llama(cfg, weights, LENGTH, FusedOps(cfg, 2, LENGTH, CPU)), []
    for start, end in ((0, 17), (17, 40)):
        chunk = torch.cat((ids[start:end], torch.arange(32 - (end - start))))
        got.append(mine.prefill_padded(chunk, torch.tensor([1, start, end - start]), cache))
    for tensor in weights.tensors():
        tensor.data = tensor.data.float()
    exact = KVCache(cfg, 2, LENGTH, CPU, torch.float32)
    want = Llama(cfg, weights, LENGTH).prefill(ids, 1, 0, exact, all_logits=True)[[16, 39]]
    limit = 8 * torch.finfo(FP16).eps
    assert (torch.cat(got) - want).norm() < limit * want.norm()
    written = cache.kv[:, :, 1, :, :40]
    assert (written.float() - exact.kv[:, :, 1, :, :40]).norm() < limit * exact.kv.norm()
    written.fill_(math.nan)
    cache.kv[:, :, 1, :, cache.scratch_slot] = math.nan
    assert cache.kv.isnan().all()

"""The short way of one row on a CPU equals the general way, and is taken only where it may be."""

import pytest
import torch
from small import CONFIG, parts

from minillm.config import ModelConfig
from minillm.kernels.one_row import OneRow
from minillm.sampling import SamplingParams

CPU = torch.device("cpu")
SHAPE = dict(
    vocab_size=97, hidden_size=36, intermediate_size=52, num_hidden_layers=3, max_position_embeddings=64
)  # fmt: skip


def config(heads: int = 6, kv_heads: int = 2, head_dim: int = 8, kind: str = "llama", **more: object) -> ModelConfig:
    sizes = dict(num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim)
    return ModelConfig.from_dict({"model_type": kind, **SHAPE, **sizes, **more})


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 2, 8), (4, 4, 6), (9, 3, 4), (5, 1, 10)])
def test_one_row_equals_the_general_way(heads: int, kv_heads: int, head_dim: int) -> None:
    model, cache, state = parts(1, 40, config=config(heads, kv_heads, head_dim))
    other, other_cache, _ = parts(1, 40, config=config(heads, kv_heads, head_dim))
    assert model.one_row is not None
    other.one_row = None
    prompt = [5, 6, 7, 8]
    for m, c in ((model, cache), (other, other_cache)):
        m.prefill(torch.tensor(prompt), 0, 0, c)
    for buffer in (model.one_row._x, model.one_row._y, model.one_row._qkv, model.one_row._gate_up):
        buffer.fill_(torch.nan)  # nothing may be left of what was there before
    for position in (4, 5, 6, 39, 0, 20):
        state.admit(0, [position + 1] * (position + 1), 60, [], SamplingParams(), 0)
        got, expected = model.decode(state, cache, 40), other.decode(state, other_cache, 40)
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(cache.kv, other_cache.kv, atol=1e-5, rtol=1e-5)


def test_an_inactive_row_writes_to_the_scratch_slot_only() -> None:
    model, cache, state = parts(1, 40)
    cache.kv.normal_()
    state.positions.fill_(7)
    before = cache.kv.clone()
    assert model.decode(state, cache, 8).isfinite().all()
    changed = (cache.kv != before).any(-1).any(3).any(2).any(1).any(0)
    assert changed.nonzero()[:, 0].tolist() == [cache.scratch_slot]


def test_another_cache_is_another_cache() -> None:
    model, cache, state = parts(1, 40)
    _, second, _ = parts(1, 40)
    state.admit(0, [5], 60, [], SamplingParams(), 0)
    model.decode(state, cache, 1)
    model.decode(state, second, 1)
    assert torch.equal(cache.kv, second.kv)
    assert second.kv[..., 0, :].any()


def test_only_plain_float32_on_a_cpu() -> None:
    assert OneRow.supports(CONFIG, CPU, torch.float32)
    assert not OneRow.supports(CONFIG, CPU, torch.bfloat16)
    assert not OneRow.supports(CONFIG, torch.device("cuda", 0), torch.float32)
    for other in (config(attention_bias=True), config(mlp_bias=True), config(kind="qwen2"), config(kind="qwen3")):
        assert not OneRow.supports(other, CPU, torch.float32)

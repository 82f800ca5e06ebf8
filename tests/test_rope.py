"""Rotary tables against transformers' initialisers and against the published formulas."""

import math
from typing import Any

import pytest
import torch
from transformers.models.llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from minillm.config import ModelConfig
from minillm.errors import ConfigError
from minillm.rope import inverse_frequencies, rope_tables

LLAMA31 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}


def values(rope: dict[str, Any] | None, theta: float = 500000.0, head_dim: int = 128) -> dict[str, Any]:
    sizes = {"hidden_size": 4 * head_dim, "num_attention_heads": 4, "max_position_embeddings": 16384}
    return {"model_type": "llama", **sizes, "rope_parameters": {"rope_theta": theta, **(rope or {})}}


def build(rope: dict[str, Any] | None, theta: float = 500000.0, head_dim: int = 128) -> ModelConfig:
    return ModelConfig.from_dict(values(rope, theta, head_dim))


@pytest.mark.parametrize("theta", [10000.0, 1000000.0])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 2.5},
        {"rope_type": "dynamic", "factor": 2.0},
        LLAMA31,
        LLAMA31 | {"factor": 32.0, "high_freq_factor": 16.0},
        YARN,
        YARN | {"truncate": False},
        YARN | {"beta_fast": 8, "beta_slow": 2},
        YARN | {"beta_fast": 4, "beta_slow": 4, "truncate": False},  # the borders meet
        YARN | {"original_max_position_embeddings": 64, "factor": 40.0},  # the borders leave the head below
        YARN | {"original_max_position_embeddings": 10**9, "beta_fast": 10**6},  # and above
        YARN | {"original_max_position_embeddings": 5},  # both borders fall on the first pair
        YARN | {"mscale": 0.707, "mscale_all_dim": 1.0},
        YARN | {"mscale": 0.707},  # one alone is passed over
        YARN | {"mscale": 1.0, "mscale_all_dim": 0.0},
        YARN | {"attention_factor": 1.25, "mscale": 0.707, "mscale_all_dim": 1.0},
        YARN | {"factor": 0.5},
        YARN | {"factor": None},
    ],
)
def test_frequencies_equal_those_of_transformers(rope: dict[str, Any], head_dim: int, theta: float) -> None:
    reference = LlamaRotaryEmbedding(LlamaConfig.from_dict(values(rope, theta, head_dim)))
    frequencies, factor = inverse_frequencies(build(rope, theta, head_dim))
    assert frequencies.dtype == torch.float64
    assert frequencies.shape == (head_dim // 2,)
    torch.testing.assert_close(frequencies, reference.inv_freq.double(), rtol=2e-6, atol=0)
    assert factor == pytest.approx(reference.attention_scaling, rel=1e-12)


def test_llama3_frequencies_are_those_of_the_published_formula() -> None:
    """Guards: with llama3 scaling ignored, short prompts look right and long ones degenerate."""
    frequencies, factor = inverse_frequencies(build(LLAMA31))
    plain = [500000.0 ** (-2 * i / 128) for i in range(64)]
    expected = []
    for frequency in plain:
        wavelength = 2 * math.pi / frequency
        if wavelength < 8192 / 4:
            expected.append(frequency)
        elif wavelength > 8192 / 1:
            expected.append(frequency / 8)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            expected.append((1 - smooth) * frequency / 8 + smooth * frequency)
    ratios = [f.item() / p for f, p in zip(frequencies, plain, strict=True)]
    assert ratios[:29] == pytest.approx([1.0] * 29, abs=1e-12)  # fast pairs are untouched
    assert ratios[35:] == pytest.approx([1 / 8] * 29, abs=1e-12)  # slow pairs are divided by 8
    assert ratios[28:36] == sorted(ratios[28:36], reverse=True)
    assert all(1 / 8 < ratio < 1 for ratio in ratios[29:35])
    assert frequencies.tolist() == pytest.approx(expected, rel=1e-12)
    assert factor == 1.0


def test_yarn_frequencies_are_those_of_the_paper() -> None:
    """Pairs with more than 32 turns in the old context stay, those with less than one are divided by the factor."""
    frequencies, factor = inverse_frequencies(build(YARN, theta=10000.0))
    plain = torch.tensor([10000.0 ** (-2 * i / 128) for i in range(64)], dtype=torch.float64)
    turns = 4096 * plain / (2 * math.pi)
    ratios = frequencies / plain
    assert (turns > 32).sum() > 10
    assert (turns < 0.8).sum() > 10  # 0.8: truncation moves the border outwards by less than a pair
    torch.testing.assert_close(ratios[turns > 32], torch.ones_like(ratios[turns > 32]), rtol=0, atol=0.03)
    torch.testing.assert_close(ratios[turns < 0.8], torch.full_like(ratios[turns < 0.8], 0.25))
    assert (ratios.diff() <= 1e-12).all()
    assert factor == pytest.approx(0.1 * math.log(4) + 1)
    cos, sin = rope_tables(build(YARN, theta=10000.0), 8, "cpu")
    torch.testing.assert_close(cos.square() + sin.square(), torch.full_like(cos, factor**2))


@pytest.mark.parametrize("rope", [None, LLAMA31])
def test_tables_are_exact_at_long_positions(rope: dict[str, Any] | None) -> None:
    """Guards: angles computed in bfloat16 or float32 drift with the position (integers above 256 are not exact)."""
    config = build(rope)
    frequencies = inverse_frequencies(config)[0].tolist()
    cos, sin = rope_tables(config, 8192, "cpu")
    assert cos.dtype == sin.dtype == torch.float32
    assert cos.shape == sin.shape == (8192, 64)
    positions = [*range(0, 300), *range(300, 8192, 61), 8190, 8191]
    for table, function in ((cos, math.cos), (sin, math.sin)):
        expected = [[function(position * frequency) for frequency in frequencies] for position in positions]
        exact = torch.tensor(expected, dtype=torch.float64)
        assert (table[positions].double() - exact).abs().max() <= 2**-25  # half a unit in the last place of 0.5 to 1
        assert torch.equal(table[positions].bfloat16(), exact.float().bfloat16())


def test_rotation_by_the_tables_equals_that_of_transformers() -> None:
    config = build(YARN, head_dim=16)
    cos, sin = rope_tables(config, 32, "cpu")
    reference = LlamaRotaryEmbedding(LlamaConfig.from_dict(values(YARN, head_dim=16)))
    expected_cos, expected_sin = reference(torch.zeros(1), torch.arange(32)[None])
    torch.testing.assert_close(torch.cat([cos, cos], dim=-1), expected_cos[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(torch.cat([sin, sin], dim=-1), expected_sin[0], rtol=0, atol=1e-5)


def test_dynamic_is_plain_within_its_context_and_refused_beyond() -> None:
    config = build({"rope_type": "dynamic", "factor": 4.0})
    for table, plain in zip(rope_tables(config, 16384, "cpu"), rope_tables(build(None), 16384, "cpu"), strict=True):
        assert torch.equal(table, plain)
    with pytest.raises(ConfigError, match="16384 tokens, not 16385"):
        rope_tables(config, 16385, "cpu")

"""Rotary positions: the angle by which each pair of coordinates of q and k is turned, and the ways to stretch them.

RoPE (Su et al. 2021, arXiv:2104.09864, section 3.2.2) turns the i-th pair of coordinates of a head at position p by
the angle p * f_i, with f_i = theta ** (-2i / head_dim). A score q . k then depends only on the distance between the two
tokens. The first pairs turn fast and tell neighbours apart; the last ones turn once in many thousands of tokens.

Beyond the context of its training a model meets angles that it has never seen. Every `rope_type` answers by lowering
frequencies f_i, and those of YaRN also scale cos and sin:

    default   as above
    linear    all f_i / factor: positions squeezed into the old range (Chen et al. 2023, arXiv:2306.15595, section 2.3)
    dynamic   a theta that grows with the text (arXiv:2309.00071, section 3.3); equal to default within the old context
    llama3    slow pairs / factor, fast ones as they are, a blend between (`apply_scaling` in meta-llama/llama-models)
    yarn      the same idea with borders counted in turns, and a temperature (Peng et al. 2023, arXiv:2309.00071)

Angles are computed in float64: at position 100,000 a float32 angle is off by up to 0.01, and a bfloat16 one is noise.
"""

import math

import torch
from torch import Tensor

from .config import ModelConfig, RopeConfig
from .errors import ConfigError


def inverse_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """f_i in radians a token, float64 [head_dim / 2] on the CPU; and the factor for cos and sin, 1.0 but in yarn."""
    rope = config.rope
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    frequencies = rope.theta**-exponents  # [head_dim / 2]
    if rope.rope_type == "linear":
        return frequencies / rope.factor, 1.0
    if rope.rope_type == "llama3":
        return _llama3(frequencies, rope), 1.0
    if rope.rope_type == "yarn":
        return _yarn(frequencies, rope), _yarn_attention_factor(rope)
    return frequencies, 1.0  # default, and dynamic within its context


def rope_tables(config: ModelConfig, max_seq_len: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """cos and sin of every angle, float32 [max_seq_len, head_dim / 2] on `device`; row p is for position p.

    Raises `ConfigError` for `dynamic` beyond its original context: there each longer text would need other tables, and
    keys in the cache would have been turned by the old ones.
    """
    rope = config.rope
    if rope.rope_type == "dynamic" and max_seq_len > rope.original_max_position_embeddings:
        raise ConfigError(
            f"rope type dynamic is supported up to its original context of {rope.original_max_position_embeddings} "
            f"tokens, not {max_seq_len}; lower max_seq_len"
        )
    frequencies, attention_factor = inverse_frequencies(config)
    positions = torch.arange(max_seq_len, dtype=torch.float64)
    angles = torch.outer(positions, frequencies)  # [max_seq_len, head_dim / 2]
    cos, sin = angles.cos() * attention_factor, angles.sin() * attention_factor
    # Cast before the copy: some devices have no float64.
    return cos.float().to(device), sin.float().to(device)


def _llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Llama 3.1 counts the turns that a pair makes in the original context: up to `low_freq_factor` turns its frequency
    is divided by `factor`, from `high_freq_factor` on it is kept, and between the two borders the share that is kept
    rises in a straight line."""
    turns = frequencies * rope.original_max_position_embeddings / (2 * math.pi)
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return _blend(frequencies, rope.factor, kept.clamp(0, 1))


def _yarn(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """YaRN, "NTK-by-parts" (arXiv:2309.00071, section 3.2): pairs with more than `beta_fast` turns in the original
    context are kept, those with fewer than `beta_slow` divided by `factor`. The blend between is a straight line in the
    index of the pair, as in the authors' code, and with `truncate` its ends are rounded outwards."""
    half = len(frequencies)

    def index_of(turns: float) -> float:
        """The (fractional) index of the pair that makes so many turns in the original context."""
        return half * math.log(rope.original_max_position_embeddings / (turns * 2 * math.pi)) / math.log(rope.theta)

    low, high = index_of(rope.beta_fast), index_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    # The upper limit is head_dim - 1, not the last index head_dim / 2 - 1: so it was published, and models trained.
    low, high = max(low, 0), min(high, 2 * half - 1)
    width = high - low or 0.001  # a step instead of a division by zero
    divided = (torch.arange(half, dtype=torch.float64) - low) / width
    return _blend(frequencies, rope.factor, 1 - divided.clamp(0, 1))


def _blend(frequencies: Tensor, factor: float, kept: Tensor) -> Tensor:
    """kept = 1: the frequency as it is; kept = 0: divided by factor."""
    return frequencies * kept + frequencies / factor * (1 - kept)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    """YaRN's temperature (section 3.4), spread over q and k: 0.1 ln(factor) + 1. DeepSeek-V2's `mscale` and
    `mscale_all_dim`, if both are given, make it a quotient of two such terms; a stated `attention_factor` wins."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    log_factor = math.log(max(rope.factor, 1.0))
    if rope.mscale and rope.mscale_all_dim:
        return (0.1 * rope.mscale * log_factor + 1) / (0.1 * rope.mscale_all_dim * log_factor + 1)
    return 0.1 * log_factor + 1

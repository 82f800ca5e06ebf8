"""What a GGUF file says about a Llama, in the words of Hugging Face's config.json.

A GGUF file (the format of llama.cpp) is one file with three parts: key/value metadata, a table of tensors, and the
tensors' bytes. The metadata holds what config.json, generation_config.json and the tokenizer files hold elsewhere. This
module opens the file and translates its `llama.*` keys. A key that it does not know is an error, not something to skip:
it could change the arithmetic, and a model that runs slightly wrong is worse than one that does not run.

One thing has no key. The rope scaling of Llama 3.1 is baked into a tensor, `rope_freqs.weight`: a divisor for each
frequency. `recover_llama3` finds the four numbers that produced it.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .errors import CheckpointError, ConfigError

ROPE_FREQS = "rope_freqs.weight"
# Keys below `llama.` that are translated, checked, or carry nothing that config.json needs.
KNOWN_KEYS = frozenset(
    {
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "vocab_size",
        "tensor_data_layout",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.causal",
        "attention.layer_norm_rms_epsilon",
        "attention.sliding_window",
        "expert_count",
        "expert_used_count",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scale_linear",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.finetuned",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
    }
)


def open_gguf(path: Path) -> tuple[Any, dict[str, Any]]:
    """The `gguf.GGUFReader` of a file, whose tensors are memory-mapped, and its metadata as a plain dict.

    Raises ConfigError without the `gguf` package, CheckpointError for a file that is not a whole GGUF file.
    """
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ConfigError("reading a GGUF file needs the gguf package: pip install 'minillm[gguf]'") from error
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot read it ({error.strerror or error})") from error
    if magic != b"GGUF":
        raise CheckpointError(f"{path}: not a GGUF file, it begins with {magic!r} instead of b'GGUF'")
    try:
        reader = GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        # The reader checks no lengths: a file that ends early shows up as any of these.
        raise CheckpointError(f"{path}: truncated, damaged, or of an unknown GGUF version ({error})") from error
    if reader.byte_order == "S":
        raise CheckpointError(f"{path}: written for the other byte order, which is not supported")
    parts = metadata.get("split.count", 1)
    if parts > 1:
        raise CheckpointError(f"{path}: one of {parts} parts: merge them first with `llama-gguf-split --merge`")
    return reader, metadata


def llama_config(metadata: dict[str, Any], tensors: dict[str, tuple[int, ...]], rope_freqs: Sequence[float]) -> Any:
    """config.json as a dict, without the ids of special tokens.

    metadata: from `open_gguf`. tensors: name -> shape, the slowest dimension first, of every tensor in the file.
    rope_freqs: the values of `rope_freqs.weight`, empty when there is none.
    The rope keys are the older ones (`rope_theta`, `rope_scaling`), which every version of transformers reads.
    Raises ConfigError for another architecture, a missing key, or a key or value that cannot be carried over.
    """
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise ConfigError(f"the architecture of this GGUF file is {architecture!r}; only 'llama' can be converted")
    keys = {name.removeprefix("llama."): value for name, value in metadata.items() if name.startswith("llama.")}
    if keys.get("expert_count"):
        raise ConfigError(f"a mixture of {keys['expert_count']} experts cannot be converted, only a dense Llama")
    if unknown := sorted(set(keys) - KNOWN_KEYS):
        raise ConfigError(
            f"unknown setting llama.{unknown[0]} = {keys[unknown[0]]!r}: dropping it could change results"
        )

    hidden, heads = _positive(keys, "embedding_length"), _positive(keys, "attention.head_count")
    kv_heads = _positive(keys, "attention.head_count_kv", heads)
    head_dim = _positive(keys, "attention.key_length", hidden // heads)
    context = _positive(keys, "context_length")
    for name in ("attention.value_length", "rope.dimension_count"):
        if keys.get(name, head_dim) != head_dim:
            raise ConfigError(f"llama.{name} is {keys[name]}, but the head size is {head_dim}: they must be equal")
    if heads % kv_heads or head_dim % 2:
        raise ConfigError(f"{heads} heads cannot share {kv_heads} kv heads, or the head size {head_dim} is odd")
    if not keys.get("attention.causal", True):
        raise ConfigError("llama.attention.causal is false: this is an encoder, not a language model")
    if 0 < keys.get("attention.sliding_window", 0) < context:
        window = keys["attention.sliding_window"]
        raise ConfigError(f"a sliding window of {window} below the context of {context} cannot be converted")
    layers = _positive(keys, "block_count")
    for name in ("token_embd.weight", f"blk.{layers - 1}.attn_norm.weight"):
        if name not in tensors:  # every other tensor is looked for by the converter, once the sizes make sense
            raise CheckpointError(f"the GGUF file has no tensor {name}")

    theta = float32_decimal(keys.get("rope.freq_base", 10000.0))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": tensors["token_embd.weight"][0],  # rows, padding included; llama.vocab_size may be absent
        "hidden_size": hidden,
        "intermediate_size": _positive(keys, "feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": context,
        "rms_norm_eps": float32_decimal(keys.get("attention.layer_norm_rms_epsilon", 1e-5)),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(keys, context, rope_freqs, theta, head_dim),
        "attention_bias": any(".attn_" in name and name.endswith(".bias") for name in tensors),
        "mlp_bias": any(".ffn_" in name and name.endswith(".bias") for name in tensors),
        "tie_word_embeddings": "output.weight" not in tensors,
    }


def float32_decimal(value: float) -> float:
    """The shortest decimal that is the same float32: GGUF stores 1e-5 as float32, and 9.999999747378752e-06 is no help.

    Nine significant digits identify every float32; fewer usually do.
    """
    for digits in range(1, 9):
        decimal = float(f"{value:.{digits}g}")
        if ctypes.c_float(decimal).value == value:
            return decimal
    return float(f"{value:.9g}")


def _positive(keys: dict[str, Any], name: str, default: int | None = None) -> int:
    value = keys.get(name, default)
    if value is None:
        raise ConfigError(f"the GGUF file does not say llama.{name}")
    if isinstance(value, list):  # a value for each layer
        if len(set(value)) != 1:
            raise ConfigError(f"llama.{name} differs from layer to layer, which cannot be converted")
        value = value[0]
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"llama.{name} is {value!r}, but it must be a positive whole number")
    return value


def _rope_scaling(
    keys: dict[str, Any], context: int, rope_freqs: Sequence[float], theta: float, head_dim: int
) -> dict[str, Any] | None:
    """`rope_scaling` of config.json, or None when rotary positions are used as they are."""
    factor = float32_decimal(keys.get("rope.scaling.factor", keys.get("rope.scale_linear", 0.0)))
    kind = keys.get("rope.scaling.type", "linear")  # llama.cpp's default when only a factor is given
    if kind not in ("none", "linear", "yarn"):
        raise ConfigError(f"unknown rope scaling {kind!r} in the GGUF file: none, linear and yarn are known")
    scaled = kind != "none" and factor not in (0.0, 1.0)
    if not all(abs(value - 1.0) <= 1e-6 for value in rope_freqs):  # so written, a NaN counts
        if scaled:
            raise ConfigError(f"the GGUF file has both {ROPE_FREQS} and {kind} rope scaling by {factor}")
        return recover_llama3(rope_freqs, theta, head_dim)
    if not scaled:
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": keys.get("rope.scaling.original_context_length", context),
        "beta_fast": float32_decimal(keys.get("rope.scaling.yarn_beta_fast", 32.0)),
        "beta_slow": float32_decimal(keys.get("rope.scaling.yarn_beta_slow", 1.0)),
    }


def llama3_divisors(inv_freq: Sequence[float], factor: float, low: float, high: float, original: float) -> list[float]:
    """By what Llama 3.1 divides each rotary frequency: 1 for short waves, `factor` for long ones, smooth between.

    A wave of `original / high` positions or shorter counts as short, of `original / low` or longer as long.
    Source: the reference code of Llama 3.1 (`apply_scaling`).
    """
    divisors = []
    for frequency in inv_freq:
        turns = original * frequency / (2 * math.pi)  # how often the wave fits into the original context
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        divisors.append(1.0 / ((1.0 - smooth) / factor + smooth))
    return divisors


def recover_llama3(rope_freqs: Sequence[float], theta: float, head_dim: int) -> dict[str, Any]:
    """The `llama3` rope scaling that gives these divisors, `head_dim / 2` of them.

    The longest wave is divided by `factor`. Between the two borders the blend `(1/divisor - 1/factor) / (1 - 1/factor)`
    is a straight line in the frequency, and two points give the line. Scaling (low, high, original) together changes
    nothing, so low is taken to be 1, as in every published model.
    Raises ConfigError when no such numbers reproduce the tensor to 1e-3.
    """
    refusal = ConfigError(f"{ROPE_FREQS} is not a rope scaling of the llama3 kind, and no other kind can be converted")
    half = head_dim // 2
    if len(rope_freqs) != half:
        raise ConfigError(f"{ROPE_FREQS} has {len(rope_freqs)} values, but half a head is {half}")
    inv_freq = [theta ** (-i / half) for i in range(half)]
    factor = float32_decimal(max(rope_freqs))
    if not (math.isfinite(factor) and factor > 1.0 and min(rope_freqs) > 0.0):
        raise refusal
    candidates = [(4.0, 8192.0)]  # Llama 3.1, 3.2 and 3.3; also right where no wave lies between the borders
    blends = [(f, (1.0 / d - 1.0 / factor) / (1.0 - 1.0 / factor)) for f, d in zip(inv_freq, rope_freqs, strict=True)]
    between = [(f, blend) for f, blend in blends if 1e-3 < blend < 1.0 - 1e-3]
    if len(between) >= 2:
        (f0, blend0), (f1, blend1) = between[0], between[-1]
        slope = (blend0 - blend1) / (f0 - f1)
        offset = blend0 - slope * f0  # = -low / (high - low)
        if offset < 0.0 < slope:
            candidates.append((round(1.0 - 1.0 / offset, 3), float(round(-slope / offset * 2 * math.pi))))
    for high, original in candidates:
        divisors = llama3_divisors(inv_freq, factor, 1.0, high, original)
        if all(abs(a - b) <= 1e-3 * b for a, b in zip(rope_freqs, divisors, strict=True)):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": high,
                "original_max_position_embeddings": int(original),
            }
    raise refusal

"""What `config.json` and `generation_config.json` say about a model, validated.

A checkpoint in the Hugging Face format is a folder: `config.json` holds the sizes and switches of the architecture,
`generation_config.json` (optional) the tokens that end a text, and safetensors files the weights. Everything that
minillm must know before it touches a weight is read here, once, into two frozen dataclasses. A value that would change
the results and that minillm does not implement is refused with a sentence: a wrong model that runs is worse than none.

Four architectures share the Llama block and differ in a few switches:

    model_type   biases on                                   norms on q, k   window
    llama        q, k, v, o (attention_bias), MLP (mlp_bias)       -           -
    mistral      none                                              -         all layers
    qwen2        q, k, v always                                    -         some layers
    qwen3        q, k, v, o (attention_bias)                      yes        some layers

Keys that a file lacks get the defaults of that model_type in transformers 5; a null is the same as a missing key
unless said otherwise. This module does not import torch, so a command line can report a bad folder at once.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from .errors import ConfigError
from .json_file import Fields, is_integer, read_json

DTYPES = ("float32", "float16", "bfloat16")
MOST_LAYERS = 10_000
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


class _Defaults(NamedTuple):
    """What a missing key means for one model_type. None: num_attention_heads, or hidden_size / num_attention_heads."""

    vocab_size: int
    intermediate_size: int
    num_key_value_heads: int | None
    head_dim: int | None
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_id: int | None


_DEFAULTS = {
    "llama": _Defaults(32000, 11008, None, None, 2048, 1, 2),
    "mistral": _Defaults(32000, 14336, 8, None, 131072, 1, 2),
    "qwen2": _Defaults(151936, 22016, 32, None, 32768, None, None),
    "qwen3": _Defaults(151936, 22016, 32, 128, 32768, None, None),
}


@dataclass(frozen=True)
class RopeConfig:
    """How positions become rotation angles; `rope.py` holds the formulas. Lengths are in tokens.

    Only the fields of the `rope_type` at hand are read: `factor` by all but default, `low_freq_factor` and
    `high_freq_factor` by llama3, the rest by yarn. `original_max_position_embeddings` is the context before scaling
    (llama3, yarn), and `max_position_embeddings` for the other types. `mscale` and `mscale_all_dim` of 0 and an
    `attention_factor` of None mean "not given".
    """

    rope_type: str
    theta: float
    original_max_position_embeddings: int
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            raise ConfigError(f"rope type {self.rope_type!r} is not supported; known are {', '.join(ROPE_TYPES)}")
        if self.theta <= 1:
            raise ConfigError(f"rope_theta must be greater than 1, not {self.theta}")
        if self.rope_type == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            low, high = self.low_freq_factor, self.high_freq_factor
            raise ConfigError(f"rope type llama3 needs low_freq_factor ({low}) below high_freq_factor ({high})")


@dataclass(frozen=True)
class ModelConfig:
    """The architecture of one model, under the names of Hugging Face's `config.json`; sizes count elements.

    `eos_token_ids` follows one rule: the ids of `config.json` united with those of `generation_config.json` (instruct
    models list the end of a turn only in the latter), in that order; if neither file has the key, the default of the
    model_type (2 for llama and mistral). A null adds no id, so null in both files gives (): such a model runs until
    its limit. `dtype` is the type the weights were saved in, float32 if the file does not say.

    Raises `ConfigError` if values contradict each other.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if heads % kv_heads:
            raise ConfigError(f"num_attention_heads ({heads}) is not a multiple of num_key_value_heads ({kv_heads})")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even for rotary positions, not {self.head_dim}")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype {self.dtype!r} is not supported; known are {', '.join(DTYPES)}")
        bos = () if self.bos_token_id is None else (self.bos_token_id,)
        for key, ids in (("bos_token_id", bos), ("eos_token_id", self.eos_token_ids)):
            for token in ids:
                if not 0 <= token < self.vocab_size:
                    raise ConfigError(f"{key} {token} lies outside the vocabulary of {self.vocab_size} tokens")

    @property
    def parameter_count(self) -> int:
        """Number of weights, each shared one counted once."""
        hidden, inner = self.hidden_size, self.intermediate_size
        q, kv = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        attention = (q + 2 * kv) * (hidden + self.qkv_bias) + hidden * (q + self.o_bias)
        mlp = 2 * inner * (hidden + self.mlp_bias) + hidden * (inner + self.mlp_bias)
        norms = 2 * hidden + 2 * self.head_dim * self.qk_norm
        embeddings = self.vocab_size * hidden * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.num_hidden_layers * (attention + mlp + norms) + hidden

    @classmethod
    def from_dir(cls, path: str | os.PathLike[str]) -> ModelConfig:
        """Read `config.json` and, if present, `generation_config.json` of a folder.

        Raises `ConfigError` if the folder or a file is missing, unreadable, or says something that cannot be run.
        """
        folder = Path(path)
        if not os.path.isdir(folder):
            raise ConfigError(f"there is no model folder {folder}")
        if not os.access(folder, os.R_OK | os.X_OK):
            raise ConfigError(f"the model folder {folder} cannot be read: check its permissions")
        if not os.path.lexists(folder / "config.json"):
            raise ConfigError(_why_no_config(folder))
        config = read_json(folder / "config.json", ConfigError)
        generation_file = folder / "generation_config.json"
        generation = read_json(generation_file, ConfigError) if os.path.lexists(generation_file) else None
        try:
            return cls.from_dict(config, generation)
        except ConfigError as error:
            raise ConfigError(f"{folder}: {error}") from None

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> ModelConfig:
        """The parsed `config.json` and `generation_config.json`, old and new keys alike.

        Raises `ConfigError` naming the key, its value and what is expected.
        """
        fields, generation = Fields(config, "config.json"), Fields(generation_config or {}, "generation_config.json")
        model_type = fields.get("model_type")
        if not isinstance(model_type, str) or model_type not in _DEFAULTS:
            raise ConfigError(f"model_type {model_type!r} is not supported; minillm runs {', '.join(_DEFAULTS)}")
        _refuse_what_is_not_implemented(fields)
        defaults = _DEFAULTS[model_type]
        hidden, heads = fields.integer("hidden_size", 4096), fields.integer("num_attention_heads", 32)
        layers = fields.integer("num_hidden_layers", 32)
        if layers > MOST_LAYERS:
            raise ConfigError(f"num_hidden_layers ({layers}) is beyond the {MOST_LAYERS} that any model could have")
        context = fields.integer("max_position_embeddings", defaults.max_position_embeddings)
        _refuse_short_window(fields, model_type, context, layers)
        # A null here is not a missing key: it asks for one key head per query head, whatever the default.
        kv_default = heads if "num_key_value_heads" in config else defaults.num_key_value_heads or heads
        attention_bias = model_type in ("llama", "qwen3") and fields.flag("attention_bias", False)
        return cls(
            model_type=model_type,
            vocab_size=fields.integer("vocab_size", defaults.vocab_size),
            hidden_size=hidden,
            intermediate_size=fields.integer("intermediate_size", defaults.intermediate_size),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=fields.integer("num_key_value_heads", kv_default),
            head_dim=_head_dim(fields, defaults.head_dim, hidden, heads),
            max_position_embeddings=context,
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope=_rope_config(config, context),
            tie_word_embeddings=fields.flag("tie_word_embeddings", False),
            qkv_bias=model_type == "qwen2" or attention_bias,
            o_bias=attention_bias,
            mlp_bias=model_type == "llama" and fields.flag("mlp_bias", False),
            qk_norm=model_type == "qwen3",
            bos_token_id=next(iter(_token_ids(fields, "bos_token_id", defaults.bos_token_id)), None),
            eos_token_ids=_eos_token_ids(fields, generation, defaults.eos_token_id),
            dtype=_merge([{key: config.get(key)} for key in ("dtype", "torch_dtype")]).get("dtype", "float32"),
        )


def _refuse_what_is_not_implemented(fields: Fields) -> None:
    """Keys that transformers obeys and that would silently change the results if they were passed over here."""
    if fields.get("quantization_config") is not None:
        raise ConfigError("the weights are quantised (quantization_config); use the unquantised checkpoint")
    if fields.get("hidden_act", "silu") not in ("silu", "swish"):  # two names of one function
        raise ConfigError(f"hidden_act {fields.get('hidden_act')!r} is not supported; the Llama block uses silu")
    if fields.get("per_layer_config") is not None:
        raise ConfigError("per_layer_config is not supported: all layers must have the same sizes")
    if not fields.flag("is_causal", True):
        raise ConfigError("is_causal is false: an encoder, which cannot generate text")


def _refuse_short_window(fields: Fields, model_type: str, context: int, layers: int) -> None:
    """Refuse attention over a sliding window, unless it holds the whole context and so changes nothing.

    mistral slides in every layer. qwen2 and qwen3 do in the layers that `layer_types` names, or in older files, if
    `use_sliding_window`, in those from `max_window_layers` on. For mistral a null window means none.
    """
    if model_type == "llama" or fields.values.get("sliding_window", 4096) is None:
        return
    layer_types = fields.get("layer_types")
    if model_type == "mistral":
        slides = True
    elif layer_types is None:
        slides = fields.flag("use_sliding_window", False) and layers > fields.integer("max_window_layers", 28, 0)
    elif isinstance(layer_types, list):
        slides = any(kind != "full_attention" for kind in layer_types)
    else:
        raise ConfigError(f"config.json: layer_types must be a list, not {layer_types!r}")
    window = fields.integer("sliding_window", 4096)
    if slides and window < context:
        raise ConfigError(
            f"sliding_window ({window}) is shorter than max_position_embeddings ({context}): attention over a window "
            f"is not supported; set max_position_embeddings to {window} in config.json to use the model up to there"
        )


def _head_dim(fields: Fields, default: int | None, hidden: int, heads: int) -> int:
    """The size of a head: what the file says, or its share of the hidden size."""
    if fields.get("head_dim") is None and default is None and hidden % heads:
        raise ConfigError(f"hidden_size ({hidden}) is not a multiple of num_attention_heads ({heads})")
    return fields.integer("head_dim", default or hidden // heads)


def _merge(sources: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One dict of what several places of the file say; a key that they say differently is an error, never a choice."""
    merged: dict[str, Any] = {}
    for source in sources:
        for name, value in source.items():
            key = "rope_type" if name == "type" else "dtype" if name == "torch_dtype" else name  # old names
            if value is not None and merged.setdefault(key, value) != value:
                raise ConfigError(f"config.json gives {key} twice, as {merged[key]!r} and as {value!r}; remove one")
    return merged


def _rope_config(config: Mapping[str, Any], context: int) -> RopeConfig:
    """Rotary parameters from `rope_parameters` (new files) or from `rope_theta` and `rope_scaling` (older ones)."""
    keys = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
    sources: list[Mapping[str, Any]] = [{key: config.get(key) for key in keys}]
    for place in ("rope_parameters", "rope_scaling"):
        value = {} if config.get(place) is None else config[place]
        if not isinstance(value, Mapping) or any(isinstance(entry, Mapping) for entry in value.values()):
            raise ConfigError(f"config.json: {place} must be one object for all layers, not {value!r}")
        sources.append(value)
    fields = Fields(_merge(sources), "config.json, rope parameters")
    if fields.get("partial_rotary_factor", 1) != 1:
        raise ConfigError(f"partial_rotary_factor {fields.get('partial_rotary_factor')!r} is not supported, only 1")
    rope_type = fields.get("rope_type", "default")
    needs_original = rope_type in ("llama3", "yarn")  # the others go by max_position_embeddings, whatever is written
    original = fields.integer("original_max_position_embeddings", context) if needs_original else context
    numbers: dict[str, Any] = {}
    if rope_type in ("linear", "dynamic", "llama3"):
        numbers["factor"] = fields.number("factor")
    if rope_type == "llama3":
        numbers |= {key: fields.number(key) for key in ("low_freq_factor", "high_freq_factor")}
    if rope_type == "yarn":
        numbers["factor"] = fields.number("factor", context / original)
        numbers |= {"beta_fast": fields.number("beta_fast", 32.0), "beta_slow": fields.number("beta_slow", 1.0)}
        numbers |= {key: fields.number(key, 0.0, zero_allowed=True) for key in ("mscale", "mscale_all_dim")}
        given = fields.get("attention_factor") is not None
        numbers["attention_factor"] = fields.number("attention_factor") if given else None
        numbers["truncate"] = fields.flag("truncate", True)
    return RopeConfig(rope_type, fields.number("rope_theta", 10000.0), original, **numbers)


def _token_ids(fields: Fields, key: str, default: int | None) -> list[int]:
    """One id or a list of them. A null that is written down means "none"; only a missing key takes the default."""
    value = fields.values.get(key, default)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(is_integer(token) for token in ids):
        raise ConfigError(f"{fields.where}: {key} must be a token id or a list of token ids, not {value!r}")
    return ids


def _eos_token_ids(fields: Fields, generation: Fields, default: int | None) -> tuple[int, ...]:
    """The union that `ModelConfig` describes, without repeats."""
    stated = [source for source in (fields, generation) if "eos_token_id" in source.values]
    ids = [token for source in stated or [fields] for token in _token_ids(source, "eos_token_id", default)]
    return tuple(dict.fromkeys(ids))


def _why_no_config(folder: Path) -> str:
    """The folder has no `config.json`: name the format that it is in, if it is a known one."""
    names = os.listdir(folder)
    if any(name == "params.json" or name.startswith("consolidated.") for name in names):
        return (
            f"{folder} holds weights in Meta's format (params.json, consolidated.*.pth), which orders rotary rows "
            "differently: convert them to the Hugging Face format with transformers' convert_llama_weights_to_hf.py"
        )
    if any(name.endswith(".gguf") for name in names):
        return f"{folder} has no config.json but a GGUF file: name the .gguf file itself"
    return f"{folder} has no config.json, so it is not a model folder in the Hugging Face format"

"""config.json -> ModelConfig: every key, old and new style, against transformers; everything wrong is one sentence."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.llama import LlamaConfig, LlamaForCausalLM
from transformers.models.mistral import MistralConfig, MistralForCausalLM
from transformers.models.qwen2 import Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen3 import Qwen3Config, Qwen3ForCausalLM

from minillm.config import ModelConfig
from minillm.errors import ConfigError

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
SMALL: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def small(model_type: str = "llama", **changes: Any) -> dict[str, Any]:
    return {"model_type": model_type, **SMALL, **changes}


def refused(config: dict[str, Any], *words: str, generation: dict[str, Any] | None = None) -> None:
    """The error is one line that contains every word."""
    with pytest.raises(ConfigError) as error:
        ModelConfig.from_dict(config, generation)
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize("model_type", FAMILIES)
def test_missing_keys_get_the_defaults_of_transformers(model_type: str) -> None:
    reference = FAMILIES[model_type][0]()
    # mistral's default window is shorter than its default context, which is refused; a null window lifts that
    config = ModelConfig.from_dict({"model_type": model_type, "sliding_window": None})
    for key in (*SMALL, "rms_norm_eps", "tie_word_embeddings", "bos_token_id"):
        assert getattr(config, key) == getattr(reference, key), key
    assert config.head_dim == getattr(reference, "head_dim", 4096 // 32)
    assert config.eos_token_ids == (() if reference.eos_token_id is None else (reference.eos_token_id,))
    assert config.rope.theta == reference.rope_parameters["rope_theta"] == 10000
    assert config.dtype == "float32"


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
        ("mistral", {"attention_bias": True, "sliding_window": None}),  # mistral has no such switch
        ("qwen2", {"attention_bias": False}),  # always biases on q, k, v
        ("qwen3", {}),
        ("qwen3", {"attention_bias": True, "head_dim": 6}),
    ],
)
def test_flags_describe_the_modules_that_transformers_builds(
    model_type: str, changes: dict[str, Any], tied: bool
) -> None:
    values = small(model_type, tie_word_embeddings=tied, **changes)
    config = ModelConfig.from_dict(values)
    config_class, model_class = FAMILIES[model_type]
    with torch.device("meta"):
        model = model_class(config_class.from_dict(values))
    model.tie_weights()
    names = {name for name, _ in model.named_parameters()}
    layer = "model.layers.0."
    for projection in "qkv":
        assert (f"{layer}self_attn.{projection}_proj.bias" in names) == config.qkv_bias
    assert (f"{layer}self_attn.o_proj.bias" in names) == config.o_bias
    assert (f"{layer}mlp.down_proj.bias" in names) == config.mlp_bias
    assert (f"{layer}self_attn.q_norm.weight" in names) == config.qk_norm
    assert model.model.layers[0].self_attn.head_dim == config.head_dim
    assert config.parameter_count == sum(p.numel() for p in model.parameters())


def test_a_saved_config_of_transformers_and_its_older_style_read_the_same(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"original_max_position_embeddings": 32, "rope_theta": 500000.0}
    LlamaConfig(
        **SMALL, rope_parameters=rope, dtype="bfloat16", rms_norm_eps=1e-5, eos_token_id=[5, 9]
    ).save_pretrained(tmp_path)
    new = json.loads((tmp_path / "config.json").read_text())
    assert "rope_parameters" in new
    assert "dtype" in new
    old = {key: value for key, value in new.items() if key not in ("rope_parameters", "dtype", "head_dim")}
    scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "rope_type")} | {"type": "llama3"}
    old |= {"rope_theta": 500000, "rope_scaling": scaling, "torch_dtype": "bfloat16", "pretraining_tp": 2}
    config = ModelConfig.from_dir(tmp_path)
    assert config == ModelConfig.from_dict(old)
    assert (config.rope.rope_type, config.rope.theta, config.rope.factor) == ("llama3", 500000.0, 8.0)
    assert config.rope.original_max_position_embeddings == 32
    assert (config.dtype, config.rms_norm_eps, config.eos_token_ids) == ("bfloat16", 1e-5, (5, 9))


def test_rope_theta_in_either_place() -> None:
    """Guards: newer files moved rope_theta into rope_parameters, and a reader of the old key silently used 10000."""
    old, new = {"rope_theta": 500000}, {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
    for stated in (old, new, old | new):
        assert ModelConfig.from_dict(small(**stated)).rope.theta == 500000
    assert ModelConfig.from_dict(small()).rope.theta == 10000
    refused(small(**new, rope_theta=10000), "rope_theta", "500000", "10000")
    refused(small(**new, rope_scaling={"type": "linear", "factor": 2.0}), "rope_type", "'default'", "'linear'")


def test_null_key_value_heads_and_head_dim() -> None:
    assert (
        ModelConfig.from_dict(small("mistral", num_key_value_heads=None, sliding_window=None)).num_key_value_heads == 4
    )
    without = {key: value for key, value in small().items() if key != "num_key_value_heads"}
    assert ModelConfig.from_dict(without).num_key_value_heads == 4
    assert ModelConfig.from_dict(small(head_dim=None)).head_dim == 8
    assert ModelConfig.from_dict(small(head_dim=10)).head_dim == 10


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({}, None, (2,)),  # llama's default
        ({"eos_token_id": None}, None, ()),
        ({"eos_token_id": 5}, None, (5,)),
        ({"eos_token_id": 5}, {}, (5,)),
        ({"eos_token_id": 5}, {"eos_token_id": [9, 5, 7]}, (5, 9, 7)),
        ({}, {"eos_token_id": [5, 9]}, (5, 9)),  # the default does not join what a file says
        ({"eos_token_id": None}, {"eos_token_id": 9}, (9,)),
        ({"eos_token_id": [5]}, {"eos_token_id": None}, (5,)),
    ],
)
def test_end_tokens_are_the_union_of_both_files(
    config: dict[str, Any], generation: dict[str, Any] | None, expected: tuple[int, ...]
) -> None:
    """Guards: Llama 3 instruct never stopped, because the end of a turn is only in generation_config's list."""
    assert ModelConfig.from_dict(small(**config), generation).eos_token_ids == expected


def test_sliding_windows() -> None:
    """A window that is shorter than the context would change the results; one that holds it does not."""
    refused(small("mistral", sliding_window=63), "sliding_window", "63", "64")
    refused({"model_type": "mistral"}, "sliding_window", "4096", "131072")
    for window in (64, None):
        ModelConfig.from_dict(small("mistral", sliding_window=window))
    for model_type in ("qwen2", "qwen3"):
        ModelConfig.from_dict(small(model_type, sliding_window=16))  # use_sliding_window is off
        ModelConfig.from_dict(small(model_type, sliding_window=16, use_sliding_window=True, max_window_layers=2))
        refused(small(model_type, sliding_window=16, use_sliding_window=True, max_window_layers=1), "sliding_window")
        refused(small(model_type, sliding_window=16, layer_types=["full_attention", "sliding_attention"]), "16", "64")
        ModelConfig.from_dict(small(model_type, sliding_window=16, layer_types=["full_attention"] * 2))
    ModelConfig.from_dict(small("llama", sliding_window=16))  # llama has no window


def test_yarn_and_the_context_before_scaling() -> None:
    yarn = {"rope_type": "yarn", "original_max_position_embeddings": 16}
    rope = ModelConfig.from_dict(small(rope_scaling=yarn)).rope
    assert (rope.factor, rope.beta_fast, rope.beta_slow, rope.attention_factor, rope.truncate) == (4, 32, 1, None, True)
    full = yarn | {"factor": 2, "beta_fast": 16, "beta_slow": 2, "attention_factor": 1.5, "truncate": False}
    rope = ModelConfig.from_dict(small(rope_scaling=full | {"mscale": 0.7, "mscale_all_dim": 0})).rope
    assert (rope.factor, rope.beta_fast, rope.beta_slow, rope.attention_factor, rope.truncate) == (2, 16, 2, 1.5, False)
    assert (rope.mscale, rope.mscale_all_dim) == (0.7, 0)
    # dynamic scales from max_position_embeddings, as in transformers, and llama3 without the key does too
    dynamic = {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 16}
    assert ModelConfig.from_dict(small(rope_scaling=dynamic)).rope.original_max_position_embeddings == 64


@pytest.mark.parametrize("model_type", ["gpt2", "mixtral", "gemma2", None, 7, ["llama"]])
def test_other_architectures_are_refused_by_name(model_type: object) -> None:
    refused(small() | {"model_type": model_type}, repr(model_type), "llama, mistral, qwen2, qwen3")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": "32"}, ("config.json", "hidden_size", "'32'")),
        ({"hidden_size": [32]}, ("hidden_size", "[32]")),
        ({"hidden_size": 32.0}, ("hidden_size", "32.0")),
        ({"num_hidden_layers": True}, ("num_hidden_layers", "True")),
        ({"vocab_size": 0}, ("vocab_size", "0")),
        ({"num_hidden_layers": -1}, ("num_hidden_layers", "-1")),
        ({"max_position_embeddings": 10**30}, ("max_position_embeddings",)),
        ({"hidden_size": 30}, ("hidden_size (30)", "num_attention_heads (4)")),
        ({"num_key_value_heads": 3}, ("num_attention_heads (4)", "num_key_value_heads (3)")),
        ({"head_dim": 7}, ("head_dim", "even", "7")),
        ({"rms_norm_eps": float("nan")}, ("rms_norm_eps", "nan")),
        ({"rms_norm_eps": float("inf")}, ("rms_norm_eps", "inf")),
        ({"rms_norm_eps": 10**400}, ("rms_norm_eps",)),
        ({"rms_norm_eps": "1e-5"}, ("rms_norm_eps", "'1e-5'")),
        ({"rms_norm_eps": -1e-5}, ("rms_norm_eps", "-1e-05")),
        ({"tie_word_embeddings": "yes"}, ("tie_word_embeddings", "'yes'")),
        ({"attention_bias": 1}, ("attention_bias", "1")),
        ({"bos_token_id": 100}, ("bos_token_id", "100")),
        ({"bos_token_id": -1}, ("bos_token_id", "-1")),
        ({"eos_token_id": [5, 100]}, ("eos_token_id 100", "100 tokens")),
        ({"eos_token_id": "</s>"}, ("eos_token_id", "'</s>'")),
        ({"eos_token_id": [5, None]}, ("eos_token_id", "[5, None]")),
        ({"hidden_act": "gelu"}, ("hidden_act", "'gelu'")),
        ({"quantization_config": {"quant_method": "gptq"}}, ("quantization_config", "unquantised")),
        ({"partial_rotary_factor": 0.5}, ("partial_rotary_factor", "0.5")),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, ("partial_rotary_factor", "0.5")),
        ({"per_layer_config": {"0": {}}}, ("per_layer_config",)),
        ({"is_causal": False}, ("is_causal",)),
        ({"dtype": "float64"}, ("dtype", "'float64'")),
        ({"dtype": "float16", "torch_dtype": "bfloat16"}, ("dtype", "'float16'", "'bfloat16'")),
        ({"rope_theta": 0}, ("rope_theta", "0")),
        ({"rope_theta": 1}, ("rope_theta", "1")),
        ({"rope_theta": "10000"}, ("rope_theta", "'10000'")),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, ("'longrope'", "llama3")),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, ("['yarn']",)),
        ({"rope_scaling": {"type": "linear"}}, ("factor", "missing")),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, ("factor", "0")),
        ({"rope_scaling": "linear"}, ("rope_scaling", "'linear'")),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, ("rope_parameters", "full_attention")),
        ({"rope_scaling": {"rope_type": "yarn", "type": "linear", "factor": 2.0}}, ("'yarn'", "'linear'")),
        ({"rope_scaling": {"type": "llama3", "factor": 8, "high_freq_factor": 4}}, ("low_freq_factor", "missing")),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
            ("low_freq_factor (4.0)", "high_freq_factor (4.0)"),
        ),
    ],
)
def test_a_bad_value_is_one_sentence_with_key_and_value(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    refused(small(**changes), *words)


def test_an_end_token_out_of_range_in_generation_config() -> None:
    refused(small(), "eos_token_id", "100", generation={"eos_token_id": [2, 100]})
    refused(small(), "generation_config.json", "eos_token_id", generation={"eos_token_id": "x"})


def refused_dir(path: Path, *words: str) -> None:
    with pytest.raises(ConfigError) as error:
        ModelConfig.from_dir(path)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_bad_folders(tmp_path: Path) -> None:
    refused_dir(tmp_path / "absent", "absent")
    file = tmp_path / "file"
    file.write_text("{}")
    refused_dir(file, str(file))
    refused_dir(tmp_path, "config.json")
    (tmp_path / "model.gguf").touch()
    refused_dir(tmp_path, "GGUF")


@pytest.mark.parametrize("name", ["params.json", "consolidated.00.pth"])
def test_a_meta_folder_is_refused(tmp_path: Path, name: str) -> None:
    """Guards: Meta's files hold q and k rows in interleaved rotary order; loaded as they are they give gibberish."""
    (tmp_path / name).write_text("{}")
    refused_dir(tmp_path, "Meta", "convert", "Hugging Face")


def test_a_hugging_face_folder_may_hold_metas_files_besides(tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text("{}")
    (tmp_path / "config.json").write_text(json.dumps(small()))
    assert ModelConfig.from_dir(tmp_path) == ModelConfig.from_dict(small())


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe{}", b"[" * 200000, b"[]", b"null", b'"llama"'])
@pytest.mark.parametrize("broken", ["config.json", "generation_config.json"])
def test_broken_files_are_named(tmp_path: Path, content: bytes, broken: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(small()))
    (tmp_path / broken).write_bytes(content)
    refused_dir(tmp_path, str(tmp_path / broken))


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()  # as unreadable as a file without permission, also for root
    refused_dir(tmp_path, "config.json", "cannot be read")


def test_errors_name_the_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(small(head_dim=7)))
    refused_dir(tmp_path, str(tmp_path), "head_dim")


def test_the_module_does_not_import_torch() -> None:
    """`--help` and an error about a bad folder must not wait for torch."""
    code = "import sys, minillm.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1]).returncode == 0


def test_a_head_dim_of_its_own_needs_no_share_of_the_hidden_size() -> None:
    """A head_dim that the file gives was refused where the heads do not divide hidden_size."""
    config = ModelConfig.from_dict(
        {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 80}
    )
    assert config.head_dim == 80


def test_an_absurd_number_of_layers_is_refused_at_once() -> None:
    """Counting the weights of two thousand million layers took for ever."""
    with pytest.raises(ConfigError, match="num_hidden_layers"):
        ModelConfig.from_dict({"model_type": "llama", "num_hidden_layers": 2**31 - 1})

"""GGUF files made here from small transformers models, converted back, and compared with the models they came from."""

import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from minillm import convert
from minillm.convert import convert_gguf
from minillm.errors import CheckpointError, ConfigError, MinillmError
from minillm.gguf_config import float32_decimal, recover_llama3
from minillm.gguf_tokenizer import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED

gguf = pytest.importorskip("gguf")
QType = gguf.GGMLQuantizationType

TRAINING_TEXT = [
    "the cat sat on the mat, 12 34 567",
    "the dog's bone isn't here",
    "größe straße été",
    "猫が好き です",
] * 3
STRINGS = [
    "",
    " ",
    "the cat",
    " the  cat   sat\n\n on\tthe mat ",
    "I'LL we're IT'S isn't",
    "1 12 123 1234567 3.14159 ²½ ٣٤",
    "größe Straße été façade naïve",
    "猫が好きです。 日本語 中文 한국어",
    "Привет, мир! שלום عالم नमस्ते",
    "emoji 🙂👩‍👩‍👧🇫🇷 done",
    "def f(x):\r\n    return x**2  # ok\n",
    "<s> a </s> [INST] <|end|> b<|end|>",
    "a\u0301 e\u0301 \u00a0\u200b x",
]
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def train_bpe(pre_tokenizer=None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<pad>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TRAINING_TEXT, trainers.BpeTrainer(vocab_size=330, special_tokens=special, initial_alphabet=alphabet)
    )
    tokenizer.add_tokens(["<|end|>"])
    return tokenizer


def bpe_metadata(tokenizer: Tokenizer, pre: str = "gpt-2", **extra) -> dict:
    """The tokenizer.ggml keys of a byte-level BPE tokenizer with <s>, </s>, <pad> and the user-defined <|end|>."""
    size = tokenizer.get_vocab_size()
    tokens = [tokenizer.id_to_token(i) for i in range(size)]
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    types = [CONTROL] * 3 + [NORMAL] * (size - 4) + [USER_DEFINED]
    ids = {"bos_token_id": 0, "eos_token_id": 1, "padding_token_id": 2}
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in merges]
    base = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": types, "merges": merges, **ids}
    return {f"tokenizer.ggml.{name}": value for name, value in {**base, **extra}.items() if value is not None}


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Half-split rows to llama.cpp's order, row by row: the reverse of what the converter must do."""
    half = len(weight) // heads // 2
    order = [h * 2 * half + j * half + i for h in range(heads) for i in range(half) for j in range(2)]
    return weight[order]


def add(writer, name: str, value) -> None:
    match value:
        case bool():
            writer.add_bool(name, value)
        case int():
            writer.add_uint32(name, value)
        case float():
            writer.add_float32(name, value)
        case str():
            writer.add_string(name, value)
        case _:
            writer.add_array(name, value)


def write_gguf(path: Path, model: LlamaForCausalLM, qtype=QType.F32, architecture="llama", tensors=None, **changes):
    """Write a model as llama.cpp's converter would. changes: metadata keys ("__" for "."), None removes one.

    tensors: name -> array to add, or None to leave a tensor out.
    """
    c = model.config
    metadata = {
        "llama.block_count": c.num_hidden_layers,
        "llama.context_length": c.max_position_embeddings,
        "llama.embedding_length": c.hidden_size,
        "llama.feed_forward_length": c.intermediate_size,
        "llama.attention.head_count": c.num_attention_heads,
        "llama.attention.head_count_kv": c.num_key_value_heads,
        "llama.attention.key_length": c.head_dim,
        "llama.attention.value_length": c.head_dim,
        "llama.attention.layer_norm_rms_epsilon": c.rms_norm_eps,
        "llama.rope.freq_base": float(c.rope_parameters["rope_theta"]),
        "llama.rope.dimension_count": c.head_dim,
        **bpe_metadata(TOKENIZER),
        **{name.replace("__", "."): value for name, value in changes.items()},
    }
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in metadata.items():
        if value is not None:
            add(writer, name, value)
    tensors = dict(tensors or {})
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and c.tie_word_embeddings:
            continue
        prefix, kind = name.rsplit(".", 1)
        if prefix.startswith("model.layers."):
            layer, prefix = prefix.removeprefix("model.layers.").split(".", 1)
            name = f"blk.{layer}.{NAMES[prefix]}.{kind}"
        else:
            name = f"{NAMES[prefix]}.{kind}"
        value = parameter.numpy()
        if ".attn_q." in name:
            value = interleave(value, c.num_attention_heads)
        if ".attn_k." in name:
            value = interleave(value, c.num_key_value_heads)
        value = tensors.pop(name, value)
        if value is not None and value.dtype == np.int16:
            writer.add_tensor(name, value)  # a kind that is no weight
        elif value is not None:
            kind = qtype if value.ndim == 2 else QType.F32
            writer.add_tensor(name, gguf.quantize(value, kind), raw_dtype=kind)
    for name, value in tensors.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def small_llama(**changes) -> LlamaForCausalLM:
    """Random weights, 2 layers, grouped-query attention; norms and biases are random too, not the trivial ones."""
    torch.manual_seed(0)
    values = {
        "vocab_size": 352,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    }
    model = LlamaForCausalLM(LlamaConfig(**{**values, **changes})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + ("norm" in name))
    return model


def logits(model) -> torch.Tensor:
    ids = torch.randint(352, (2, 48), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(ids).logits


def load(directory: Path):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


TOKENIZER = train_bpe()


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 1},
        {"num_key_value_heads": 4},
        {"head_dim": 32},  # not hidden_size / heads
        {"attention_bias": True},
        {"mlp_bias": True},
        {"rope_theta": 500000.0, "rms_norm_eps": 1e-6},
    ],
    ids=str,
)
def test_logits_equal_the_original_model(tmp_path, changes):
    """Guards the row order of q and k: with k reordered by the number of query heads only some of these fail."""
    model = small_llama(**changes)
    source = write_gguf(tmp_path / "m.gguf", model)
    directory = convert_gguf(source, tmp_path / "out", "float32")
    assert directory == tmp_path / "out"
    torch.testing.assert_close(logits(load(directory)), logits(model), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("qtype", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantised_weights(tmp_path, qtype, monkeypatch):
    """The reference gets the values that the blocks stand for; small chunks, so that a tensor is several of them."""
    monkeypatch.setattr(convert, "CHUNK_ELEMENTS", 1000)
    model = small_llama()
    kind = QType[qtype]
    directory = convert_gguf(write_gguf(tmp_path / "m.gguf", model, kind), tmp_path / "out", "float32")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                values = gguf.dequantize(gguf.quantize(parameter.numpy(), kind), kind)
                parameter.copy_(torch.from_numpy(values.astype(np.float32)))
    torch.testing.assert_close(logits(load(directory)), logits(model), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtype_of_the_written_weights(tmp_path, dtype):
    model = small_llama()
    directory = convert_gguf(write_gguf(tmp_path / "m.gguf", model), tmp_path / "out", dtype)
    written = AutoModelForCausalLM.from_pretrained(directory)
    for name, parameter in written.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name).to(getattr(torch, dtype))), name


def test_float16_overflow_is_refused(tmp_path):
    model = small_llama()
    with torch.no_grad():
        model.model.embed_tokens.weight[3, 3] = 1e5
    source = write_gguf(tmp_path / "m.gguf", model)
    with pytest.raises(CheckpointError, match=r"token_embd.weight .*bfloat16"):
        convert_gguf(source, tmp_path / "out", "float16")
    convert_gguf(source, tmp_path / "out", "bfloat16")


def test_shards_and_index(tmp_path):
    model = small_llama()
    directory = convert_gguf(write_gguf(tmp_path / "m.gguf", model), tmp_path / "out", "float32", shard_bytes=100_000)
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in directory.glob("*.safetensors"))
    assert len(files) > 2
    assert sorted(set(index["weight_map"].values())) == files
    assert index["metadata"]["total_size"] == sum(p.nbytes for p in model.parameters())
    assert all((directory / name).stat().st_size < 110_000 for name in files)
    assert torch.equal(logits(load(directory)), logits(model))


def test_only_some_biases_in_the_file(tmp_path):
    """A bias that is left out is zero: q, k, v with biases and o without is the layout of Qwen's attention."""
    model = small_llama(attention_bias=True)
    missing = {f"blk.{i}.attn_output.bias": None for i in range(2)}
    directory = convert_gguf(write_gguf(tmp_path / "m.gguf", model, tensors=missing), tmp_path / "out", "float32")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.bias.zero_()
    torch.testing.assert_close(logits(load(directory)), logits(model), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("rope", "keys"),
    [
        ({"rope_type": "linear", "factor": 4.0}, {"type": "linear", "factor": 4.0}),
        ({"rope_type": "linear", "factor": 4.0}, {"factor": 4.0}),  # linear is what a factor alone means
        ({"rope_type": "default"}, {"type": "none", "factor": 4.0}),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
            {"type": "yarn", "factor": 4.0, "original_context_length": 16},
        ),
    ],
    ids=str,
)
def test_rope_scaling_keys(tmp_path, rope, keys):
    model = small_llama(rope_parameters={"rope_theta": 10000.0, **rope})
    keys = {f"llama.rope.scaling.{name}": value for name, value in keys.items()}
    directory = convert_gguf(write_gguf(tmp_path / "m.gguf", model, **keys), tmp_path / "out", "float32")
    torch.testing.assert_close(logits(load(directory)), logits(model), atol=2e-5, rtol=1e-5)


def rope_freqs(theta: float, head_dim: int, scaling: dict) -> np.ndarray:
    """What llama.cpp stores: plain frequencies over scaled ones, both by transformers."""
    rope = {"rope_type": "llama3", "rope_theta": theta, **scaling}
    config = LlamaConfig(head_dim=head_dim, max_position_embeddings=131072, rope_parameters=rope)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    return (plain / scaled).float().numpy()


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("theta", "factor", "high", "original"),
    [(500000.0, 8.0, 4.0, 8192), (500000.0, 32.0, 4.0, 8192), (10000.0, 2.5, 8.0, 1000), (1e6, 4.0, 3.0, 32768)],
)
def test_llama3_parameters_are_recovered(theta, factor, high, original, head_dim):
    scaling = {
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
    found = recover_llama3(rope_freqs(theta, head_dim, scaling).tolist(), theta, head_dim)
    assert found.pop("rope_type") == "llama3"
    assert found == pytest.approx(scaling, rel=2e-3)


def test_llama3_logits(tmp_path):
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 2.0,  # recovered as 1, with the other two halved: the same frequencies
        "high_freq_factor": 8.0,
        "original_max_position_embeddings": 2048,
    }
    model = small_llama(head_dim=32, rope_parameters={"rope_type": "llama3", "rope_theta": 10000.0, **scaling})
    freqs = {"rope_freqs.weight": rope_freqs(10000.0, 32, scaling)}
    directory = convert_gguf(write_gguf(tmp_path / "m.gguf", model, tensors=freqs), tmp_path / "out", "float32")
    assert json.loads((directory / "config.json").read_text())["rope_scaling"]["rope_type"] == "llama3"
    torch.testing.assert_close(logits(load(directory)), logits(model), atol=1e-4, rtol=1e-4)


def test_other_rope_freqs_are_refused(tmp_path):
    """Rope factors of another kind, read as llama3 or dropped, would give a model that is slightly wrong."""
    for values in (np.linspace(1, 8, 8), np.full(8, np.nan), np.linspace(1, 8, 4)):
        freqs = {"rope_freqs.weight": values.astype(np.float32)}
        source = write_gguf(tmp_path / "m.gguf", small_llama(), tensors=freqs)
        with pytest.raises(ConfigError, match=r"rope_freqs\.weight"):
            convert_gguf(source, tmp_path / "out")


def test_configuration_files(tmp_path):
    directory = convert_gguf(write_gguf(tmp_path / "m.gguf", small_llama(rms_norm_eps=1e-5)), tmp_path / "out")
    config = json.loads((directory / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5  # not the 9.99...e-06 of float32
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (0, 1, 2)
    generation = json.loads((directory / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    assert not (directory / "chat_template.jinja").exists()


def test_every_end_token_is_listed(tmp_path):
    """Instruct models that end a turn with another token than the text never stop if only eos is written."""
    tokenizer = bpe_metadata(TOKENIZER)
    tokenizer["tokenizer.ggml.tokens"][2] = "<|eot_id|>"
    tokenizer["tokenizer.ggml.eom_token_id"] = 0
    directory = convert_gguf(write_gguf(tmp_path / "m.gguf", small_llama(), **tokenizer), tmp_path / "out")
    assert json.loads((directory / "generation_config.json").read_text())["eos_token_id"] == [1, 0, 2]


@pytest.mark.parametrize("value", [1e-5, 1e-6, 10000.0, 500000.0, 0.1, 1.0, 3.4028234663852886e38, 1 / 3])
def test_float32_decimal(value):
    stored = float(np.float32(value))
    assert np.float32(float32_decimal(stored)) == np.float32(value)
    assert len(repr(float32_decimal(stored))) <= len(repr(stored))


# Tokenizers.


def test_byte_level_tokenizer(tmp_path):
    template = "{% for m in messages %}{{ bos_token + m['content'] }}{% endfor %}"
    changes = {"tokenizer.chat_template": template}
    directory = convert_gguf(write_gguf(tmp_path / "m.gguf", small_llama(), **changes), tmp_path / "out")
    converted = Tokenizer.from_file(str(directory / "tokenizer.json"))
    for text in STRINGS:
        ids = converted.encode(text).ids
        assert ids == TOKENIZER.encode(text).ids, text
        assert converted.decode(ids, skip_special_tokens=False) == text
    assert converted.token_to_id("<|end|>") in converted.encode("a<|end|>b").ids
    assert converted.decode(converted.encode("a</s><|end|>b").ids) == "a<|end|>b"  # user-defined is not special
    hf = AutoTokenizer.from_pretrained(directory)
    assert hf.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "<s>hi"
    assert (hf.bos_token, hf.eos_token, hf.pad_token) == ("<s>", "</s>", "<pad>")
    assert hf("the cat").input_ids == TOKENIZER.encode("the cat").ids


@pytest.mark.parametrize(("add_bos", "add_eos"), [(True, False), (True, True), (False, True), (False, False)])
def test_bos_and_eos_are_added_once(tmp_path, add_bos, add_eos):
    changes = {"tokenizer.ggml.add_bos_token": add_bos, "tokenizer.ggml.add_eos_token": add_eos}
    directory = convert_gguf(write_gguf(tmp_path / "m.gguf", small_llama(), **changes), tmp_path / "out")
    expected = [0] * add_bos + TOKENIZER.encode("the cat").ids + [1] * add_eos
    assert Tokenizer.from_file(str(directory / "tokenizer.json")).encode("the cat").ids == expected
    assert AutoTokenizer.from_pretrained(directory)("the cat").input_ids == expected


def test_a_vocabulary_without_bos(tmp_path):
    """Some files name no BOS but still ask for one; there is nothing to add then."""
    changes = {"tokenizer.ggml.bos_token_id": None, "tokenizer.ggml.add_bos_token": True}
    directory = convert_gguf(write_gguf(tmp_path / "m.gguf", small_llama(), **changes), tmp_path / "out")
    assert json.loads((directory / "config.json").read_text())["bos_token_id"] is None
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert tokenizer.encode("the cat").ids == TOKENIZER.encode("the cat").ids


def split(tokenizer_file: Path, text: str) -> list[str]:
    """The words of a text before merging, readable again."""
    words = Tokenizer.from_file(str(tokenizer_file)).pre_tokenizer.pre_tokenize_str(text)
    return [decoders.ByteLevel().decode([word]) for word, _ in words]


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["I", "'LL", " we", "'re", " 1234", ".", "\n\n ", " x", "!?", " ", " y"]),
        ("smollm", ["I", "'LL", " we", "'re", " ", "1", "2", "3", "4", ".", "\n\n ", " x", "!?", " ", " y"]),
        ("llama-bpe", ["I", "'LL", " we", "'re", " ", "123", "4", ".\n\n", " ", " x", "!?", " ", " y"]),
        ("qwen2", ["I", "'LL", " we", "'re", " ", "1", "2", "3", "4", ".\n\n", " ", " x", "!?", " ", " y"]),
    ],
)
def test_pre_tokenizer_names(tmp_path, pre, words):
    """The four rules differ in digits, upper-case contractions and line ends; one taken for another goes unnoticed."""
    text = "I'LL we're 1234.\n\n  x!?  y"
    if pre in ("gpt-2", "smollm"):  # lower-case contractions only
        words = ["I", "'", "LL", *words[2:]]
    changes = {"tokenizer.ggml.pre": pre}
    directory = convert_gguf(write_gguf(tmp_path / "m.gguf", small_llama(), **changes), tmp_path / "out")
    assert split(directory / "tokenizer.json", text) == words
    assert "".join(words) == text


def test_llama3_takes_whole_words_first(tmp_path):
    """Llama 3's vocabulary has words that its merges do not lead to; it also begins with BOS without being told."""
    tokenizer = bpe_metadata(TOKENIZER, pre="llama-bpe")
    tokenizer["tokenizer.ggml.tokens"][-2] = "unmergeable"
    tokenizer["tokenizer.ggml.merges"] = tokenizer["tokenizer.ggml.merges"][:10]
    directory = convert_gguf(write_gguf(tmp_path / "m.gguf", small_llama(), **tokenizer), tmp_path / "out")
    ids = Tokenizer.from_file(str(directory / "tokenizer.json")).encode("unmergeable").ids
    assert ids == [0, TOKENIZER.get_vocab_size() - 2]


def train_sentencepiece(**options) -> sentencepiece.SentencePieceProcessor:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TRAINING_TEXT),
        model_writer=model,
        model_type="bpe",
        vocab_size=330,
        byte_fallback=True,
        character_coverage=1.0,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=["[INST]"],
        minloglevel=2,
        **options,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def sentencepiece_metadata(processor, **extra) -> dict:
    size = processor.get_piece_size()
    kinds = {"is_unknown": UNKNOWN, "is_control": CONTROL, "is_byte": BYTE}
    types = [next((kind for name, kind in kinds.items() if getattr(processor, name)(i)), NORMAL) for i in range(size)]
    tokens = [processor.id_to_piece(i) for i in range(size)]
    types[tokens.index("[INST]")] = USER_DEFINED
    base = {
        "model": "llama",
        "pre": None,
        "merges": None,
        "padding_token_id": None,
        "tokens": tokens,
        "scores": [float(processor.get_score(i)) for i in range(size)],
        "token_type": types,
        "unknown_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in {**base, **extra}.items()}


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_tokenizer(tmp_path, prefix):
    original = train_sentencepiece(add_dummy_prefix=prefix)
    metadata = sentencepiece_metadata(original, add_space_prefix=prefix)
    directory = convert_gguf(write_gguf(tmp_path / "m.gguf", small_llama(), **metadata), tmp_path / "out")
    converted = sentencepiece.SentencePieceProcessor(model_file=str(directory / "tokenizer.model"))
    for text in STRINGS:
        assert converted.encode(text) == original.encode(text), text
        assert converted.decode(converted.encode(text)) == original.decode(original.encode(text)), text
    assert (converted.unk_id(), converted.bos_id(), converted.eos_id(), converted.pad_id()) == (0, 1, 2, -1)
    assert "🙂" not in original.encode("🙂", out_type=str)  # so the byte tokens were in use above
    assert converted.decode(converted.encode("🙂")) == "🙂"
    config = json.loads((directory / "tokenizer_config.json").read_text())
    assert (config["bos_token"], config["eos_token"], config["unk_token"]) == ("<s>", "</s>", "<unk>")
    assert (config["add_bos_token"], config["add_eos_token"]) == (True, False)  # llama.cpp's default for this kind
    special = {entry["content"]: entry["special"] for entry in config["added_tokens_decoder"].values()}
    assert special == {"<unk>": True, "<s>": True, "</s>": True, "[INST]": False}


def test_user_defined_pieces_with_spaces(tmp_path):
    """GGUF keeps the spaces of a user-defined token plain; SentencePiece would never match them so."""
    original = train_sentencepiece(add_dummy_prefix=False)
    metadata = sentencepiece_metadata(original)
    metadata["tokenizer.ggml.tokens"][metadata["tokenizer.ggml.tokens"].index("[INST]")] = "    "
    metadata["tokenizer.ggml.add_space_prefix"] = False
    directory = convert_gguf(write_gguf(tmp_path / "m.gguf", small_llama(), **metadata), tmp_path / "out")
    converted = sentencepiece.SentencePieceProcessor(model_file=str(directory / "tokenizer.model"))
    ids = converted.encode("the    cat")
    assert converted.decode(ids) == "the    cat"
    assert original.piece_to_id("[INST]") in ids


def test_files_without_an_unknown_piece(tmp_path):
    metadata = sentencepiece_metadata(train_sentencepiece())
    metadata["tokenizer.ggml.token_type"][0] = CONTROL
    directory = convert_gguf(write_gguf(tmp_path / "m.gguf", small_llama(), **metadata), tmp_path / "out")
    assert sentencepiece.SentencePieceProcessor(model_file=str(directory / "tokenizer.model")).unk_id() == 0


# What is refused, and what is left behind.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "qwen2"}, "'qwen2'"),
        ({"llama.expert_count": 8}, "8 experts"),
        ({"llama.logit_scale": 0.5}, "unknown setting llama.logit_scale = 0.5"),
        ({"llama.block_count": None}, "llama.block_count"),
        ({"llama.block_count": 2**32 - 1}, "no tensor blk.4294967294.attn_norm"),  # no list of that length is made
        ({"llama.block_count": 1}, "unexpected tensor blk.1"),
        ({"llama.attention.head_count_kv": 3}, "4 heads cannot share 3"),
        ({"llama.attention.head_count_kv": [2, 4]}, "head_count_kv differs"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count is 8"),
        ({"llama.attention.sliding_window": 32}, "sliding window of 32"),
        ({"llama.attention.causal": False}, "encoder"),
        ({"llama.rope.scaling.type": "longrope"}, "'longrope'"),
        ({"llama.embedding_length": 32}, r"token_embd.weight has shape \(352, 64\)"),
        ({"tensors": {"token_embd.weight": None}}, "no tensor token_embd.weight"),
        ({"tensors": {"blk.1.ffn_up.weight": None}}, "no tensor blk.1.ffn_up.weight"),
        ({"tensors": {"blk.0.attn_q_norm.weight": np.ones(16, np.float32)}}, "unexpected tensor blk.0.attn_q_norm"),
        ({"tensors": {"blk.0.ffn_gate.weight": np.ones((96, 64), np.int16)}}, "cannot dequantise I16"),
        ({"split.count": 3}, "one of 3 parts"),
        ({"tokenizer.ggml.model": "bert"}, "'bert'"),
        ({"tokenizer.ggml.pre": "tekken"}, "'tekken'"),
        ({"tokenizer.ggml.pre": None}, "unknown pre-tokenizer"),
        ({"tokenizer.ggml.merges": ["a nosuchtoken"]}, "merges"),
        ({"tokenizer.ggml.merges": None}, "no tokenizer.ggml.merges"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "2 token types"),
        ({"tokenizer.ggml.tokens": ["a", "b", "c", "b"]}, "repeated token"),
        ({"tokenizer.ggml.bos_token_id": 9999}, "bos_token_id is 9999"),
    ],
    ids=str,
)
def test_refused_in_one_sentence(tmp_path, changes, message):
    source = write_gguf(tmp_path / "m.gguf", small_llama(), **changes)
    with pytest.raises(MinillmError, match=message) as caught:
        convert_gguf(source, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.gguf"]


def test_what_is_no_whole_gguf_file(tmp_path, capsys):
    """One line and exit status 2, whatever is wrong: the reader checks no lengths, and a cut file ends anywhere."""
    whole = write_gguf(tmp_path / "whole.gguf", small_llama()).read_bytes()
    (tmp_path / "whole.gguf").unlink()
    contents = {
        "empty": b"",
        "text": b"once upon a time",
        "version 1": whole[:4] + (1).to_bytes(4, "little") + whole[8:],
        **{f"cut at {n}": whole[:n] for n in (6, 20, 100, 5000, 20000, len(whole) // 2, len(whole) - 100)},
    }
    for name, content in contents.items():
        source = tmp_path / "bad.gguf"
        source.write_bytes(content)
        assert convert.main([str(source), str(tmp_path / "out")]) == 2, name
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("error: "), name
        assert err.count("\n") == 1, name
    for source in (tmp_path / "absent.gguf", tmp_path):
        assert convert.main([str(source), str(tmp_path / "out")]) == 2
        assert str(source) in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["bad.gguf"]


def test_target_that_cannot_be_used(tmp_path, capsys):
    source = write_gguf(tmp_path / "m.gguf", small_llama())
    full = tmp_path / "full"
    full.mkdir()
    (full / "precious.txt").write_text("keep me")
    for target in (full, source, source / "below-a-file"):
        assert convert.main([str(source), str(target)]) == 2
        assert str(target) in capsys.readouterr().err
    assert (full / "precious.txt").read_text() == "keep me"

    (tmp_path / "empty").mkdir()
    assert convert.main([str(source), str(tmp_path / "empty"), "--dtype", "float32"]) == 0
    assert (tmp_path / "empty" / "config.json").is_file()
    convert_gguf(source, tmp_path / "new" / "and" / "deep")
    with pytest.raises(ConfigError, match="float8"):
        convert_gguf(source, tmp_path / "out", "float8")


@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_an_interrupted_run_leaves_nothing(tmp_path, monkeypatch, capsys, failure):
    source = write_gguf(tmp_path / "m.gguf", small_llama())
    dequantize = convert._dequantize

    def fail(tensor, *arguments):
        if tensor.name.startswith("blk.1"):
            raise failure
        return dequantize(tensor, *arguments)

    monkeypatch.setattr(convert, "_dequantize", fail)
    status = convert.main([str(source), str(tmp_path / "out")])
    assert status == (130 if failure is KeyboardInterrupt else 2)
    assert ("No space left" in capsys.readouterr().err) == (status == 2)
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_a_disk_that_is_too_small(tmp_path, monkeypatch):
    source = write_gguf(tmp_path / "m.gguf", small_llama())
    monkeypatch.setattr(convert.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(CheckpointError, match=r"need .* GB"):
        convert_gguf(source, tmp_path / "out")


def test_without_the_gguf_package(tmp_path, monkeypatch):
    source = write_gguf(tmp_path / "m.gguf", small_llama())
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"pip install 'minillm\[gguf\]'"):
        convert_gguf(source, tmp_path / "out")


@pytest.mark.parametrize("module", ["convert", "download", "hub"])
def test_nothing_heavy_is_imported_before_it_is_needed(module):
    """`--help` must answer at once, so torch, gguf and the hub's client wait until there is work."""
    code = f"""
import sys
import minillm.{module} as module
if hasattr(module, "main"):
    try:
        module.main(["--help"])
    except SystemExit as exit:
        assert exit.code == 0
heavy = {{"torch", "gguf", "numpy", "huggingface_hub", "tokenizers", "sentencepiece"}} & set(sys.modules)
assert not heavy, heavy
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr

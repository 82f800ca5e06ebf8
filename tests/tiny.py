"""A tiny random model in a directory, made in milliseconds without a network: what end-to-end tests run on."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # ids 0, 1, 2
EOS = 2
MERGES = "Ġ t,h e,Ġt he,i n,Ġ a,o n,e r,Ġ o,a n,r e,n d,Ġa nd,Ġ s,o r,Ġ w,a t,in g,e n,i t,o u,Ġo n,l l,Ġ u,p on"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "torch_dtype": "float32",
}


def make_tiny_model(
    path: str | Path,
    *,
    seed: int = 0,
    bos: bool = False,
    chat_template: str | None = CHAT_TEMPLATE,
    tokenizer: bool = True,
    **config_overrides: Any,
) -> Path:
    """Write a random checkpoint of about 300 tokens, 2 layers and a context of 128; return its directory.

    Args:
        bos: whether the tokenizer puts `<|im_start|>` in front of a plain text.
        chat_template: None for a model that has none. tokenizer: False leaves its files out.
        config_overrides: keys of config.json; the tensors follow them (biases, q and k norms, untied embeddings).
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    tokens = _tokenizer()
    config = CONFIG | {"vocab_size": tokens.get_vocab_size()} | config_overrides
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": config["eos_token_id"]})
    if tokenizer:
        tokens.save(str(folder / "tokenizer.json"))
        named = {"bos_token": SPECIAL[1], "eos_token": SPECIAL[EOS], "unk_token": SPECIAL[0]}
        template = {} if chat_template is None else {"chat_template": chat_template}
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": bos}
        _write_json(folder / "tokenizer_config.json", settings | named | template)
    save_file(_tensors(config, seed), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def _tokenizer() -> Tokenizer:
    """Byte-level BPE: every byte, a few merges, three special tokens."""
    merges = [(left, right) for left, right in (pair.split() for pair in MERGES.split(","))]
    pieces = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return tokenizer


def _tensors(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Random tensors under Hugging Face's names. Norms are near one; matrices keep the size of what they multiply."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, config.get("dtype") or config["torch_dtype"])
    hidden, inter, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    q, kv = heads * head_dim, config["num_key_value_heads"] * head_dim
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    attention = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, q)}
    mlp = {"gate_proj": (inter, hidden), "up_proj": (inter, hidden), "down_proj": (hidden, inter)}
    biased = set(attention) if config.get("attention_bias") else set()
    if config["model_type"] == "qwen2":
        biased = {"q_proj", "k_proj", "v_proj"}
    biased |= set(mlp) if config.get("mlp_bias") else set()
    for index in range(config["num_hidden_layers"]):
        at = f"model.layers.{index}."
        shapes |= {f"{at}{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")}
        if config["model_type"] == "qwen3":
            shapes |= {f"{at}self_attn.{norm}_norm.weight": (head_dim,) for norm in ("q", "k")}
        for block, matrices in (("self_attn", attention), ("mlp", mlp)):
            shapes |= {f"{at}{block}.{name}.weight": shape for name, shape in matrices.items()}
            shapes |= {f"{at}{block}.{name}.bias": shape[:1] for name, shape in matrices.items() if name in biased}
    tensors = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            noise = 1 + 0.1 * noise
        elif len(shape) == 2:
            noise = noise / shape[1] ** 0.5
        tensors[name] = noise.to(dtype)
    return tensors

"""The Llama transformer in plain PyTorch, made to be trained: whole blocks at a time, no cache, gradients.

The modules have the names of Hugging Face's checkpoints, so `state_dict()` *is* the checkpoint that minillm reads, and
minillm's `ModelConfig` says the sizes. The rotary pairs of a head are half a head apart, as in those checkpoints.
A test holds the two implementations against each other: the same weights give the same logits here and in minillm.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from minillm.config import ModelConfig
from minillm.rope import rope_tables

from .packing import PAD


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, self.head_dim = config.hidden_size, config.head_dim
        self.groups = config.num_attention_heads // config.num_key_value_heads
        self.q_proj = nn.Linear(hidden, config.num_attention_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, config.num_key_value_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, config.num_key_value_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, T, hidden] -> [B, T, hidden]."""
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)  # [B, T, heads, head_dim]
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # [B, heads, T, head_dim]
        k, v = (t.repeat_interleave(self.groups, 1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, dropout: float) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), cos, sin))
        return x + self.dropout(self.mlp(self.post_attention_layernorm(x)))


class Decoder(nn.Module):
    """What checkpoints keep under `model.`; its forward pass is that of `Llama`, which knows the output matrix."""

    def __init__(self, config: ModelConfig, dropout: float) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([Layer(config, dropout) for _ in range(config.num_hidden_layers)])
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)


class Llama(nn.Module):
    """Token ids [B, T] -> logits [B, T, vocab].

    Args:
        block: how many positions the rotary table covers.
        dropout: share of what attention and MLP add to the residual stream that is dropped in training.
    Raises: ValueError for a config with biases, q and k norms or scaled positions, which no model here has.
    """

    def __init__(self, config: ModelConfig, block: int, dropout: float = 0.0) -> None:
        super().__init__()
        if config.qkv_bias or config.mlp_bias or config.qk_norm or config.rope.rope_type != "default":
            raise ValueError(f"only the plain Llama block is trained here, not {config}")
        self.config = config
        self.model = Decoder(config, dropout)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        cos, sin = rope_tables(config, block, "cpu")  # each [block, head_dim / 2]
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        length = token_ids.shape[1]
        cos, sin = self.cos[:length, None], self.sin[:length, None]  # [T, 1, head_dim / 2]
        x = self.model.embed_tokens(token_ids)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        x = self.model.norm(x)
        head = self.model.embed_tokens if self.config.tie_word_embeddings else self.lm_head
        return F.linear(x, head.weight)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE (arXiv:2104.09864): turn the pairs (i, i + head_dim / 2) of x [B, T, heads, head_dim], in float32."""
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def summed_nll(model: nn.Module, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Negative log-likelihood of the blocks [B, T + 1] (`packing.py`), in nats, and how many tokens were predicted."""
    inputs, targets = blocks[:, :-1].clamp(min=0), blocks[:, 1:]
    logits = model(inputs).flatten(0, 1).float()
    nll = F.cross_entropy(logits, targets.flatten(), ignore_index=PAD, reduction="sum")
    return nll, (targets != PAD).sum()


def initialise(model: Llama, std: float = 0.02) -> None:
    """Normal weights; what writes to the residual stream is smaller, so that depth does not make it louder (GPT-2)."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            writes = name.endswith(("o_proj.weight", "down_proj.weight"))
            depth = 2 * model.config.num_hidden_layers
            nn.init.normal_(parameter, std=std / depth**0.5 if writes else std)


def load(directory: Path, block: int) -> Llama:
    """A checkpoint in the Hugging Face format, in float32."""
    model = Llama(ModelConfig.from_dir(directory), block)
    tensors: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(file)
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return model


def save(model: Llama, directory: Path, config: dict[str, Any]) -> None:
    """model.safetensors in the dtype that `config` names, and config.json, which says that the folder is whole."""
    dtype = getattr(torch, config.get("dtype") or config["torch_dtype"])
    tensors = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in model.state_dict().items()}
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")

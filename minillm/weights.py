"""The weights: a few large matrices a layer, and the table that says where each tensor of a checkpoint goes in them.

A checkpoint stores q, k, v, gate and up as matrices of their own. Here q, k and v are one matrix, and gate and up are
one, because one long read of memory is faster than several short ones. The rows are ordered for the kernels:

- The rows of a head of q and k are stored so that the two halves of a rotary pair are neighbours (0, D/2, 1, D/2 + 1,
  ...), where Hugging Face keeps them half a head apart. Attention does not notice: q and k share the permutation.
- The rows of gate and up alternate, so that whoever computes two neighbours can finish SiLU(gate) * up at once.

Nothing is loaded and then copied: the matrices are allocated empty, and each tensor of a checkpoint is given a view
into them (`destinations`) which it is read into.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from .checkpoint import Destination
from .config import ModelConfig
from .host_memory import HostMemory


@dataclass
class LayerWeights:
    """One decoder layer. Biases and q/k norms are None where the model has none."""

    input_norm: Tensor  # [hidden]
    qkv: Tensor  # [(heads + 2 * kv_heads) * head_dim, hidden]
    qkv_bias: Tensor | None  # [(heads + 2 * kv_heads) * head_dim]
    q_norm: Tensor | None  # [head_dim], in the order of rotary pairs
    k_norm: Tensor | None  # [head_dim], in the order of rotary pairs
    o: Tensor  # [hidden, heads * head_dim]
    o_bias: Tensor | None  # [hidden]
    post_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 * intermediate, hidden], rows alternate
    gate_up_bias: Tensor | None  # [2 * intermediate]
    down: Tensor  # [hidden, intermediate]
    down_bias: Tensor | None  # [hidden]


@dataclass
class Weights:
    """All weights of a model. Tied embeddings are one tensor under two names."""

    embed: Tensor  # [vocab, hidden]
    layers: list[LayerWeights]
    norm: Tensor  # [hidden]
    lm_head: Tensor  # [vocab, hidden]

    def tensors(self) -> list[Tensor]:
        """Every distinct tensor, once."""
        layers = [getattr(layer, f.name) for layer in self.layers for f in fields(layer)]
        unique = {id(t): t for t in (self.embed, *layers, self.norm, self.lm_head) if t is not None}
        return list(unique.values())

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors())

    @property
    def bytes_per_step(self) -> int:
        """Bytes that one decode step must read, whatever the batch: all weights but the untied embedding table."""
        table = 0 if self.embed is self.lm_head else self.embed.numel() * self.embed.element_size()
        return self.num_bytes - table


Empty = Callable[[tuple[int, ...]], Tensor]


def allocate(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Weights:
    """Empty weights of the right shapes. On a CPU they lie in one block of large pages, see `host_memory.py`."""
    if device.type == "cpu":
        return _allocate(config, HostMemory(weight_bytes(config, dtype), dtype).empty)
    return _allocate(config, lambda shape: torch.empty(shape, device=device, dtype=dtype))


def weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes that `allocate` takes: the same code, run on PyTorch's shape-only device."""
    return _allocate(config, lambda shape: torch.empty(shape, device="meta", dtype=dtype)).num_bytes


def _allocate(config: ModelConfig, make: Empty) -> Weights:
    hidden, inter, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_size = config.num_attention_heads * head_dim
    qkv_size = q_size + 2 * config.num_key_value_heads * head_dim

    def empty(*shape: int) -> Tensor:
        return make(shape)

    def maybe(wanted: bool, *shape: int) -> Tensor | None:
        return empty(*shape) if wanted else None

    layers = [
        LayerWeights(
            input_norm=empty(hidden),
            qkv=empty(qkv_size, hidden),
            qkv_bias=maybe(config.qkv_bias, qkv_size),
            q_norm=maybe(config.qk_norm, head_dim),
            k_norm=maybe(config.qk_norm, head_dim),
            o=empty(hidden, q_size),
            o_bias=maybe(config.o_bias, hidden),
            post_norm=empty(hidden),
            gate_up=empty(2 * inter, hidden),
            gate_up_bias=maybe(config.mlp_bias, 2 * inter),
            down=empty(hidden, inter),
            down_bias=maybe(config.mlp_bias, hidden),
        )
        for _ in range(config.num_hidden_layers)
    ]
    embed = empty(config.vocab_size, hidden)
    lm_head = embed if config.tie_word_embeddings else empty(config.vocab_size, hidden)
    return Weights(embed, layers, empty(hidden), lm_head)


def randomise(weights: Weights, std: float = 0.02) -> None:
    """Fill with random values in place, for benchmarks and tests: matrices normal, norms one, biases zero."""
    for tensor in weights.tensors():
        tensor.normal_(0.0, std) if tensor.dim() == 2 else tensor.fill_(1.0)
    for layer in weights.layers:
        for bias in (layer.qkv_bias, layer.o_bias, layer.gate_up_bias, layer.down_bias):
            if bias is not None:
                bias.zero_()


def destinations(config: ModelConfig, weights: Weights) -> dict[str, Destination]:
    """Checkpoint name -> the view that it is read into, and the shape that it must have in the file."""
    table: dict[str, Destination] = {}

    def add(name: str, view: Tensor | None, *shape: int) -> None:
        if view is not None:
            table[name] = Destination(view, shape or tuple(view.shape))

    add("model.embed_tokens.weight", weights.embed)
    add("model.norm.weight", weights.norm)
    if not config.tie_word_embeddings:
        add("lm_head.weight", weights.lm_head)
    for index, layer in enumerate(weights.layers):
        at = f"model.layers.{index}."
        add(at + "input_layernorm.weight", layer.input_norm)
        add(at + "post_attention_layernorm.weight", layer.post_norm)
        add(at + "self_attn.o_proj.weight", layer.o)
        add(at + "self_attn.o_proj.bias", layer.o_bias)
        add(at + "mlp.down_proj.weight", layer.down)
        add(at + "mlp.down_proj.bias", layer.down_bias)
        add(at + "self_attn.q_norm.weight", _halves(layer.q_norm, 1, config.head_dim), config.head_dim)
        add(at + "self_attn.k_norm.weight", _halves(layer.k_norm, 1, config.head_dim), config.head_dim)
        for kind, fused in (("weight", layer.qkv), ("bias", layer.qkv_bias)):
            _add_qkv(add, at, kind, fused, config)
        for kind, fused in (("weight", layer.gate_up), ("bias", layer.gate_up_bias)):
            if fused is not None:
                pairs = fused.unflatten(0, (-1, 2))  # [intermediate, 2, ...]
                add(f"{at}mlp.gate_proj.{kind}", pairs[:, 0])
                add(f"{at}mlp.up_proj.{kind}", pairs[:, 1])
    return table


def _halves(rows: Tensor | None, heads: int, head_dim: int) -> Tensor | None:
    """A view of pair-ordered rows [heads * head_dim, ...] in the half-split order: [heads, 2, head_dim / 2, ...]."""
    return None if rows is None else rows.unflatten(0, (heads, head_dim // 2, 2)).transpose(1, 2)


def _add_qkv(add: Callable[..., None], at: str, kind: str, fused: Tensor | None, config: ModelConfig) -> None:
    if fused is None:
        return
    heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    q, k, v = fused.split((heads * head_dim, kv_heads * head_dim, kv_heads * head_dim))
    add(f"{at}self_attn.q_proj.{kind}", _halves(q, heads, head_dim), *q.shape)
    add(f"{at}self_attn.k_proj.{kind}", _halves(k, kv_heads, head_dim), *k.shape)
    add(f"{at}self_attn.v_proj.{kind}", v)

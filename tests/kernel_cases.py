"""Definitions of the fused operations in float64, and inputs with NaN wherever nothing may be read.

Used on the CPU through Triton's interpreter (interpreted_kernels.py) and on a GPU (gpu/test_kernels_gpu.py).
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from minillm.config import ModelConfig
from minillm.kernels.fused import FusedOps
from minillm.sampling import SamplingParams
from minillm.state import DecodeState
from minillm.weights import LayerWeights, Weights, allocate

PAD = 4096  # elements of NaN before and after a tensor


def config(**changes: Any) -> ModelConfig:
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 1024}
    return ModelConfig.from_dict({"model_type": "llama", **sizes, **heads, **changes})


def guarded(tensor: Tensor) -> Tensor:
    """The same values in the middle of a buffer of NaN."""
    buffer = torch.full((tensor.numel() + 2 * PAD,), math.nan, dtype=tensor.dtype, device=tensor.device)
    view = buffer[PAD : PAD + tensor.numel()].view(tensor.shape)
    view.copy_(tensor)
    return view


@contextmanager
def poisoned_outputs() -> Iterator[None]:
    """What the operations allocate is full of NaN, and so is what lies around it; at the end it still must be."""
    buffers: list[tuple[Tensor, int]] = []
    original = torch.Tensor.new_empty

    def new_empty(self: Tensor, *shape: int, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
        if options:  # Triton's interpreter, for itself
            return original(self, *shape, **options)
        size = math.prod(shape)
        buffer = torch.full((size + 2 * PAD,), math.nan, dtype=dtype or self.dtype, device=self.device)
        buffers.append((buffer, size))
        return buffer[PAD : PAD + size].view(shape)

    with patch.object(torch.Tensor, "new_empty", new_empty):
        yield
    assert buffers, "nothing was allocated, so nothing was checked"
    for buffer, size in buffers:
        assert buffer[:PAD].isnan().all(), "written before an output"
        assert buffer[PAD + size :].isnan().all(), "written beyond an output"


def random(seed: int, device: torch.device, dtype: torch.dtype, *shape: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed * 1000 + len(shape) + sum(shape))
    return guarded((torch.randn(*shape, generator=generator) * scale).to(device, dtype))


def random_layer(cfg: ModelConfig, seed: int, device: torch.device, dtype: torch.dtype) -> LayerWeights:
    """Weights of size 1 / sqrt(columns), so that results are of size 1; norms about 1; biases of size 1."""
    layer = allocate(cfg, device, dtype).layers[0]
    for index, (name, tensor) in enumerate(vars(layer).items()):
        if tensor is not None:
            scale = tensor.shape[-1] ** -0.5 if tensor.dim() == 2 else 0.3 if "norm" in name else 1.0
            value = random(seed + 31 * index, device, dtype, *tensor.shape, scale=scale)
            setattr(layer, name, value.add_(1.0) if "norm" in name else value)
    return layer


def random_weights(cfg: ModelConfig, device: torch.device, dtype: torch.dtype) -> Weights:
    """A whole model of such layers, whose logits are of size 1 where embeddings are not tied."""
    weights = allocate(cfg, device, dtype)
    weights.layers = [random_layer(cfg, 7 * index, device, dtype) for index in range(cfg.num_hidden_layers)]
    weights.embed.copy_(random(1, device, dtype, *weights.embed.shape))
    if weights.lm_head is not weights.embed:
        weights.lm_head.copy_(random(2, device, dtype, *weights.lm_head.shape, scale=cfg.hidden_size**-0.5))
    weights.norm.copy_(1 + random(3, device, dtype, cfg.hidden_size, scale=0.3))
    return weights


def as_float32(weights: Weights) -> Weights:
    """The same numbers in float32. What was tied is two tensors."""
    layers = [
        LayerWeights(**{name: None if t is None else t.float() for name, t in vars(w).items()}) for w in weights.layers
    ]
    return Weights(weights.embed.float(), layers, weights.norm.float(), weights.lm_head.float())


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * gain.double()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = x.double() @ weight.double().T
    return y if bias is None else y + bias.double()


def linear_residual(y: Tensor, weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    return x.double() + linear(y, weight, bias)


def gate_up_silu(x: Tensor, w: LayerWeights, eps: float) -> Tensor:
    y = linear(rms_norm(x, w.post_norm, eps), w.gate_up, w.gate_up_bias)
    gate, up = y[:, 0::2], y[:, 1::2]
    return gate * torch.sigmoid(gate) * up


def qkv(x: Tensor, w: LayerWeights, angles: Tensor, eps: float, heads: int, kv_heads: int) -> list[Tensor]:
    """Rotated q [n, heads, D] and k, and v [n, kv_heads, D]. angles: [n, D / 2], in radians."""
    y = linear(rms_norm(x, w.input_norm, eps), w.qkv, w.qkv_bias)
    y = y.view(x.shape[0], heads + 2 * kv_heads, -1)
    q, k, v = y.split((heads, kv_heads, kv_heads), 1)
    if w.q_norm is not None and w.k_norm is not None:
        q, k = rms_norm(q, w.q_norm, eps), rms_norm(k, w.k_norm, eps)
    cos, sin = angles.double().cos()[:, None], angles.double().sin()[:, None]

    def rotate(t: Tensor) -> Tensor:
        a, b = t[..., 0::2], t[..., 1::2]
        return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)

    return [rotate(q), rotate(k), v]


def attention(q: Tensor, kv: Tensor, positions: list[int]) -> Tensor:
    """q [n, heads, D] over kv [2, rows, kv_heads, slots, D], row by row and head by head."""
    n, heads, head_dim = q.shape
    group = heads // kv.shape[2]
    out = torch.empty(n, heads, head_dim, dtype=torch.float64, device=q.device)
    for row, position in enumerate(positions):
        for head in range(heads):
            k, v = kv[:, row, head // group, : position + 1].double()
            scores = k @ q[row, head].double() / math.sqrt(head_dim)
            out[row, head] = scores.softmax(0) @ v
    return out.flatten(1)


def state_at(positions: list[int], vocab: int, device: torch.device) -> DecodeState:
    """Active rows at these positions, with tokens that differ."""
    state = DecodeState.allocate(len(positions), vocab, device)
    state.tokens.copy_(torch.arange(len(positions)) * 7 % vocab + 1)
    state.positions.copy_(torch.tensor(positions))
    state.active.fill_(True)
    return state


def poisoned_cache(
    seed: int, device: torch.device, dtype: torch.dtype, rows: int, kv_heads: int, slots: int, head_dim: int,
    positions: list[int],
) -> Tensor:  # fmt: skip
    """A cache whose row i is random at positions 0 .. positions[i], and NaN in all other places."""
    kv = random(seed, device, dtype, 2, rows, kv_heads, slots, head_dim)
    for row in range(rows):
        kv[:, row, :, (positions[row] + 1 if row < len(positions) else 0) :] = math.nan
    return kv


def check_attention_that_finishes(
    ops: FusedOps, cfg: ModelConfig, layer: LayerWeights, embed: Tensor, kv: Tensor, state: DecodeState, angles: Tensor
) -> None:
    """The start of a step as the model runs it: rows of `begin`, a projection left in summands, and attention of it.

    k and v must stand in their slots, and every other bit of the cache be as it was. Of rows that are not active only
    the cache counts. angles: [slots - 1, D / 2]. The bounds: q, k, v and the probabilities are each rounded once.
    """
    heads, kv_heads, scratch_slot = cfg.num_attention_heads, cfg.num_key_value_heads, kv.shape[3] - 1
    eps = torch.finfo(kv.dtype).eps
    rope_table = torch.polar(torch.ones_like(angles), angles)
    active, positions = state.active.clone(), torch.where(state.active, state.positions, 0)
    before, rows = kv.clone(), torch.arange(len(positions), device=kv.device)
    with poisoned_outputs():
        x, rope, slots = ops.begin(state, embed, rope_table, scratch_slot, layer.input_norm)
        attend = ops.row_attention(state, scratch_slot)
        q = ops.qkv_rope_append(x, layer, rope, cfg.rms_norm_eps, kv, state.rows, slots, cfg.head_dim)
        assert q.dtype == torch.float32, "the projection was finished by its own kernel"
        got = attend(q, kv).double()
    q, k, v = qkv(x, layer, angles[positions], cfg.rms_norm_eps, heads, kv_heads)
    for mine, want in zip(kv[:, rows, :, slots].unbind(1), (k, v), strict=True):
        assert ((mine.double() - want).abs().amax(-1) <= 3 * eps * want.abs().amax(-1)).all()
    want = attention(q.to(kv.dtype), kv, positions.tolist())
    assert ((got - want)[active].abs() <= 6 * eps * want[active].abs().max()).all()
    kv[:, rows, :, slots] = before[:, rows, :, slots]
    assert torch.equal(kv.view(torch.int16), before.view(torch.int16))
    assert not ops.scratch.head_counters.any()


def check_best(ops: FusedOps, x: Tensor, norm: Tensor, weight: Tensor, eps: float, state: DecodeState) -> None:
    """A greedy step that ends without logits is one that ends with them: the same product, so every bit is the same."""
    got, want = copy_of(state), copy_of(state)
    ops.scratch.best.fill_(math.nan)
    with poisoned_outputs():
        ops.greedy_finish(ops.norm_logits(x, norm, weight, eps), want)
    ops.scratch.best.fill_(math.nan)
    ops.advance_to_best(x, norm, weight, eps, got)
    for name, value in vars(want).items():
        assert torch.equal(getattr(got, name), value), name


def assert_close(got: Tensor, want: Tensor, roundings: float = 1.0) -> None:
    """Equal up to some roundings to the dtype of `got` at the size of the value, and float32 sums of terms of size 1.

    One rounding is half an ulp: eps / 2 of the value. Beside it stands what float32 sums of up to 16,384 products of
    size 1 / sqrt(terms) err by. Plain additions in a tree stay well below 2e-5; but tensor cores add one tile after the
    other to the same sum, and cut off what does not fit it instead of rounding, so their errors all go one way: 2.5e-5
    was seen for 11,008 terms. A wrong or missing term would be off by 1 / sqrt(terms), 8e-3 and more.
    """
    assert got.shape == want.shape
    error = (got.double() - want).abs()
    bound = want.abs() * torch.finfo(got.dtype).eps * 0.5 * roundings * 1.01 + 5e-5
    worst = (error / bound).nan_to_num(nan=math.inf).argmax()
    assert bool((error <= bound).all()), f"{got.flatten()[worst]} and not {want.flatten()[worst]} at {int(worst)}"


SAMPLING = [  # what the rows of `sampled_state` ask for, in turn; the first two are greedy in company
    dict(temperature=0, repetition_penalty=1.3),
    dict(temperature=0, logprobs=True),
    dict(),
    dict(temperature=0.7, min_p=0.05, repetition_penalty=1.2),
    dict(temperature=1.8, repetition_penalty=0.8),
    dict(temperature=0.4, min_p=1.0),
    dict(temperature=1.1, top_k=40, top_p=0.95),
    dict(temperature=1e-45, repetition_penalty=3.0),
]


def sampled_state(rows: int, vocab: int, device: torch.device, seed: int) -> DecodeState:
    """Rows that sample differently, at different positions; some go on, some are about to end, some are padding."""
    state = DecodeState.allocate(rows, vocab, device)
    for row in range(rows):
        prompt = [(row + 5 * seed + 7 * i) % vocab for i in range(4 + row)]
        limit, stops = (6 + row if row % 5 == 1 else 1000), [7, vocab - 1]
        params = SamplingParams(**SAMPLING[(row + seed) % len(SAMPLING)])
        state.admit(row, prompt, limit, stops, params, seed * 0x9E3779B97F4A7C15 + row)
    state.active[4::5] = False
    return state


def copy_of(state: DecodeState) -> DecodeState:
    return DecodeState(*(tensor.clone() for tensor in vars(state).values()))


def assert_same_state(got: DecodeState, want: DecodeState) -> None:
    """Every bit, but of log-probabilities a float32 sum of a vocabulary's exponentials: rounded, then a logarithm."""
    for name, value in vars(want).items():
        if name == "output":
            assert torch.equal(got.output[:, :2], value[:, :2])
            logprobs = (state.output[:, 2].view(torch.float32) for state in (got, want))
            torch.testing.assert_close(*logprobs, atol=1e-5, rtol=2e-6, equal_nan=True)
        else:
            assert torch.equal(getattr(got, name), value), name

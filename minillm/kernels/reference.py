"""The operations of a Llama layer in plain PyTorch: what every faster kernel must equal, and what runs where none does.

A layer of the decoder is five operations, and each is one function below:

    1. qkv_rope_append   normalise, project to q, k, v, rotate q and k, write k and v into the cache
    2. row_attention     attention of each token over its own row of the cache (chunk_attention in a prefill)
    3. linear_residual   output projection, added to the residual stream
    4. gate_up_silu      normalise, gate and up projections, SiLU(gate) * up
    5. linear_residual   down projection, added to the residual stream

and once a step `begin`, before the layers, and `norm_logits`, after them. They are functions of tensors alone. N is the
number of tokens: one a row when decoding, a chunk of one row when prefilling. The weights are packed as `weights.py`
says: the two halves of a rotary pair are neighbours, and so are the gate and the up row of one unit.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..state import DecodeState
from ..weights import LayerWeights

Attend = Callable[[Tensor, Tensor], Tensor]
"""From q [N, heads, head_dim] and a layer of the cache [2, rows, kv_heads, slots, head_dim] to [N, heads * head_dim]"""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [N, in], weight [out, in] -> [N, out].

    One token on a CPU is a matrix times a vector, and is called by that name: PyTorch's matrix-vector routine reads
    the weights up to 1.5 times (float32) and 2 times (bfloat16) faster there than its matrix-matrix routine.
    """
    if x.shape[0] == 1 and x.device.type == "cpu":
        y = torch.mv(weight, x[0])
        return (y if bias is None else y + bias).unsqueeze(0)
    return F.linear(x, weight, bias)


def begin(
    state: DecodeState, embed: Tensor, rope_table: Tensor, scratch_slot: int, gain: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """What each row of a decode step feeds: its token at its position, or, if it is padding, token 0 at position 0.

    Args:
        embed: [vocab, hidden]. rope_table: complex64 [max_seq_len, head_dim / 2], e^{i m theta}.
        gain: of the norm that reads x next, for kernels that prepare it; not used here.
    Returns: x [n, hidden]; rope [n, head_dim / 2]; slots int64 [n], where K and V are written: the position, or the
        scratch slot for padding.
    """
    slots = torch.where(state.active, state.positions, scratch_slot)
    return embed[state.tokens * state.active], rope_table[state.positions * state.active], slots


def qkv_rope_append(
    x: Tensor, w: LayerWeights, rope: Tensor, eps: float, kv: Tensor, rows: Tensor, slots: Tensor, head_dim: int
) -> Tensor:
    """Project x to q, k and v; rotate q and k; write k and v into the cache; return q.

    The rotation of RoPE (Su et al. 2021, arXiv:2104.09864, section 3.2) is a product of complex numbers: the pair
    (a, b) is a + ib, and position m turns it by e^{i m theta}.

    Args:
        x: [N, hidden]. rope: complex64 [N, head_dim / 2], e^{i m theta} of each token's position.
        kv: one layer of the cache, [2, rows, kv_heads, slots, head_dim], written at (rows[n], slots[n]).
        rows, slots: int64 [N].
    Returns: q, [N, heads, head_dim].
    """
    kv_heads = kv.shape[2]
    y = linear(F.rms_norm(x, (x.shape[-1],), w.input_norm, eps), w.qkv, w.qkv_bias)
    y = y.view(x.shape[0], -1, head_dim)  # [N, heads + 2 * kv_heads, head_dim]
    heads = y.shape[1] - 2 * kv_heads
    qk = y[:, : heads + kv_heads]
    if w.q_norm is not None and w.k_norm is not None:
        q, k = qk.split((heads, kv_heads), 1)
        qk = torch.cat(
            (F.rms_norm(q, (head_dim,), w.q_norm, eps), F.rms_norm(k, (head_dim,), w.k_norm, eps)), 1
        )  # [N, heads + kv_heads, head_dim]
    pairs = torch.view_as_complex(qk.float().unflatten(-1, (-1, 2)))  # [N, heads + kv_heads, head_dim / 2]
    y[:, : heads + kv_heads] = torch.view_as_real(pairs * rope[:, None]).flatten(-2)
    kv[:, rows, :, slots] = y[:, heads:].unflatten(1, (2, kv_heads))  # [N, 2, kv_heads, head_dim]
    return y[:, :heads]


def row_attention(state: DecodeState, kv_len: int) -> Attend:
    """Attention of one new token a row over that row of the cache.

    The query heads that share a kv head are the rows of one product with it, so K and V are read in place: nothing is
    repeated for grouped heads (GQA, Ainslie et al. 2023, arXiv:2305.13245).

    Args:
        state: row i sees positions 0 .. positions[i] if it is active, else position 0.
        kv_len: what is read of the cache, more than every active row's position.
    Returns: the function of (q [n, heads, head_dim], one layer of the cache) that gives [n, heads * head_dim].
    """
    last = state.positions * state.active
    hidden = torch.arange(kv_len, device=last.device) > last[:, None]  # [n, kv_len]
    mask = torch.zeros(hidden.shape, device=last.device).masked_fill_(hidden, -math.inf)[:, None, None]

    def attend(q: Tensor, kv: Tensor) -> Tensor:
        n, kv_heads = q.shape[0], kv.shape[2]
        k, v = kv[:, :n, :, :kv_len]  # each [n, kv_heads, kv_len, head_dim]
        grouped = q.unflatten(1, (kv_heads, -1)) * q.shape[-1] ** -0.5  # [n, kv_heads, heads / kv_heads, head_dim]
        scores = grouped @ k.mT + mask  # float32 [n, kv_heads, heads / kv_heads, kv_len]
        return (scores.softmax(-1).to(v.dtype) @ v).reshape(n, -1)

    return attend


def chunk_attention(row: int, start: int) -> Attend:
    """Causal attention of a chunk of one row, whose token i stands at position start + i.

    Returns: the function of (q [T, heads, head_dim], one layer of the cache, where the chunk's own K and V already
        are) that gives [T, heads * head_dim].
    """

    def attend(q: Tensor, kv: Tensor) -> Tensor:
        length, kv_len = q.shape[0], start + q.shape[0]
        k, v = kv[:, row, None, :, :kv_len]  # each [1, kv_heads, kv_len, head_dim]
        query = q.transpose(0, 1)[None]  # [1, heads, T, head_dim]
        if q.is_cuda and q.dtype != torch.float32:
            # Called by its name, because `scaled_dot_product_attention` may pick cuDNN, which builds a plan for every
            # new length of prompt, in half a second. Its triangle is aligned bottom-right, and it groups heads.
            out = torch.ops.aten._scaled_dot_product_flash_attention(query, k, v, is_causal=True)[0]
        else:  # here is_causal would align the triangle top-left, and hide what stands before the chunk
            mask = torch.ones(length, kv_len, dtype=torch.bool, device=q.device).tril_(start) if start else None
            out = F.scaled_dot_product_attention(query, k, v, attn_mask=mask, is_causal=start == 0, enable_gqa=True)
        return out[0].transpose(0, 1).reshape(length, -1)

    return attend


def placed_attention(place: Tensor) -> Attend:
    """`chunk_attention` of a chunk whose place is in memory, so that it can be captured. Reads the whole row.

    Args:
        place: int64 [3]: the row, the position of the first token, and how many of the tokens are real.
    Returns: the function of (q [size, heads, head_dim], one layer of the cache) that gives [size, heads * head_dim];
        what it gives for a token that is not real means nothing, but is finite.
    """
    row, start, count = place.split(1)  # each [1]

    def attend(q: Tensor, kv: Tensor) -> Tensor:
        positions = start + torch.arange(q.shape[0], device=q.device).minimum((count - 1).clamp(min=0))
        k, v = kv.index_select(1, row)[:, :, :, :-1]  # each [1, kv_heads, max_seq_len, head_dim]
        mask = torch.arange(k.shape[2], device=q.device) <= positions[:, None]  # [size, max_seq_len]
        out = F.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, attn_mask=mask, enable_gqa=True)
        return out[0].transpose(0, 1).reshape(q.shape[0], -1)

    return attend


def linear_residual(y: Tensor, weight: Tensor, bias: Tensor | None, x: Tensor, gain: Tensor | None = None) -> Tensor:
    """x + y @ weight.T + bias: y [N, in], weight [out, in], x [N, out] -> [N, out].

    gain: of the norm that reads the result next, for kernels that prepare it; not used here.
    """
    return x + linear(y, weight, bias)


def gate_up_silu(x: Tensor, w: LayerWeights, eps: float) -> Tensor:
    """SwiGLU (Shazeer 2020, arXiv:2002.05202): SiLU(gate) * up of the normalised x [N, hidden] -> [N, intermediate]."""
    y = linear(F.rms_norm(x, (x.shape[-1],), w.post_norm, eps), w.gate_up, w.gate_up_bias)
    gate, up = y.unflatten(-1, (-1, 2)).unbind(-1)  # each [N, intermediate]
    return F.silu(gate) * up


def norm_logits(x: Tensor, norm: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Final norm and output projection: x [N, hidden], weight [vocab, hidden] -> float32 [N, vocab]."""
    return linear(F.rms_norm(x, (x.shape[-1],), norm, eps), weight).float()

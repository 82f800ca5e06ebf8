"""FusedOps: the operations of `reference.py` as fused Triton kernels, for decode steps of few rows on NVIDIA GPUs.

The methods have the names, arguments and meaning of the functions there, so the model does not know which it calls.
Whether they can be used is decided once, by `FusedOps.supports`, when a model is built. Here is what surrounds the
kernels: shapes and launch grids. Programs of one kernel leave parts for each other in scratch memory (`scratch.py`),
which belongs to one FusedOps, so two streams must not share one.

Products run fused for 1 to 32 rows; for more they are those of a prompt, `fused_prompt.py`. Attention and the two ends
of a step are fused for any number of rows. Models with norms on q and k (qwen3) need one kernel more a layer, and top-k
and top-p stay plain operations: they sort the vocabulary.
"""

import importlib.util
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..config import ModelConfig
from ..state import DecodeState
from ..weights import LayerWeights
from . import launch, reference
from .fused_finish import FusedFinish
from .fused_prompt import FusedPrompt
from .launch import MAX_ROWS
from .tensor_map import tensor_map

PREPARED = (torch.bfloat16,)
"""Dtypes in which gain * x cannot overflow, so that it may be multiplied before the scale of the norm is known."""

HEAD_DIMS = (64, 80, 96, 128, 256)
BLOCK = 1024  # elements of an embedding that one program copies
ONLY_SHORT, ONLY_LONG, BOTH = range(3)  # the ways that `attention.py` is compiled for


class Prepared(NamedTuple):
    """What the kernel that wrote a residual stream x left beside it for the norm that follows (`gemm.write_stream`).

    gain: of that norm. scaled: [n, hidden], gain * x. squares: float32 [blocks, M], sums of x * x; M is the
    `row_bucket` of n.
    """

    x: Tensor
    gain: Tensor
    scaled: Tensor
    squares: Tensor
    blocks: int


class Unfinished(NamedTuple):
    """q, k and v of a step as summands, which attention is to finish (`group.py`).

    qkv: float32 [summands, n, (heads + 2 kv_heads) * head_dim]. rope: float32 [n, head_dim / 2, 2].
    """

    qkv: Tensor
    bias: Tensor | None
    rope: Tensor
    slots: Tensor


class FusedOps(FusedFinish):
    """The fused operations for one model on one device.

    Args:
        max_rows, max_seq_len: of the cache that the operations will work on.
    """

    def __init__(self, config: ModelConfig, max_rows: int, max_seq_len: int, device: torch.device) -> None:
        # here, because triton is only there with CUDA builds of PyTorch
        from . import attention, begin, gemv

        self._begin, self._gemv, self._attention = begin, gemv, attention
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        self.attention_shapes = [self._attention_shape(n, max_seq_len) for n in range(1, max_rows + 1)]  # of n rows
        super().__init__(config, max_rows, max(splits for _, splits, _ in self.attention_shapes), device)
        self._prepared: Prepared | None = None  # of the newest residual stream
        self._attention_finishes = False  # in the step that is under way
        self._unfinished: Unfinished | None = None  # of the newest layer

    @property
    def prompt(self) -> FusedPrompt:
        """The operations for many tokens. Made anew each time: kept, it would hold this object, which would hold it."""
        return FusedPrompt(self)

    @staticmethod
    def supports(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> str | None:
        """None if FusedOps runs this model, else one sentence that says why not."""
        if device.type != "cuda" or torch.version.hip is not None:
            return f"fused kernels need an NVIDIA GPU, and the device is {device}"
        if importlib.util.find_spec("triton") is None:
            return "fused kernels need triton, which is not installed; it comes with PyTorch's CUDA wheels on Linux"
        if torch.cuda.get_device_capability(device) < (8, 0):
            major, minor = torch.cuda.get_device_capability(device)
            return f"fused kernels need compute capability 8.0 (Ampere) or later, and {device} has {major}.{minor}"
        if dtype not in (torch.bfloat16, torch.float16):
            return f"fused kernels work in bfloat16 and float16, not in {dtype}"
        if config.head_dim not in HEAD_DIMS:
            return f"fused kernels are made for a head_dim of {', '.join(map(str, HEAD_DIMS))}, not {config.head_dim}"
        sizes = {"hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size}
        for name, size in sizes.items():
            if size % 16:
                return f"fused kernels need a {name} that is a multiple of 16, not {size}"
        return None

    def begin(
        self, state: DecodeState, embed: Tensor, rope_table: Tensor, scratch_slot: int, gain: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `reference.begin`: x [n, hidden], rope [n, head_dim / 2], slots [n]. The fence of a step: `begin.py`."""
        n, hidden = state.tokens.shape[0], embed.shape[1]
        x, rope = embed.new_empty(n, hidden), rope_table.new_empty(n, rope_table.shape[1])
        slots, blocks = torch.empty_like(state.positions), -(-hidden // BLOCK)
        gain, scaled, squares = self._prepare(x, gain, blocks)
        self._run(
            self._begin.begin_kernel, (blocks, n), 4,
            state.tokens, state.positions, state.active.view(torch.uint8), embed, torch.view_as_real(rope_table),
            x, torch.view_as_real(rope), slots, gain, scaled, squares, scratch_slot, hidden,
            D=self.head_dim, DP=launch.power_of_two(self.head_dim), BLOCK=BLOCK, M=launch.row_bucket(n), fence=True,
        )  # fmt: skip
        return x, rope, slots

    def qkv_rope_append(
        self, x: Tensor, w: LayerWeights, rope: Tensor, eps: float, kv: Tensor, rows: Tensor, slots: Tensor,
        head_dim: int,
    ) -> Tensor:  # fmt: skip
        """See `reference.qkv_rope_append`: x [n, hidden] -> q [n, heads, head_dim]; k and v go into the cache.

        In a step whose attention finishes q, k and v, the result is for that alone, and nothing is in the cache before.
        """
        n = x.shape[0]
        if n > MAX_ROWS:
            return self.prompt.qkv_rope_append(x, w, rope, eps, kv, rows, slots, head_dim)
        turns = torch.view_as_real(rope)  # [n, head_dim / 2, 2]
        if self._attention_finishes and w.q_norm is None:
            return self._qkv_parts(x, w, turns, slots, eps)
        q = x.new_empty(n, self.heads, head_dim)
        heads, slots_a_head = self.heads + 2 * self.kv_heads, kv.shape[3]
        if w.q_norm is not None:
            y = self._linear(x, w.qkv, w.input_norm, w.qkv_bias, None, eps, x.dtype)
            self._run(
                self._gemv.norm_rope_append_kernel, (heads, n), 4,
                y, w.q_norm, w.k_norm, turns, rows, slots, q, kv[0], kv[1],
                self.heads, self.kv_heads, slots_a_head, eps,
                D=head_dim, HALF=launch.power_of_two(head_dim // 2),
            )  # fmt: skip
            return q
        x, gain, squares, blocks = self._normed(x, w.input_norm)
        size = w.qkv.shape[0]
        tile, matrix, constants = self._cut(w.qkv, n, gain, blocks, unit=head_dim)
        self._run(
            self._gemv.qkv_rope_append_kernel, (size // tile.rows, tile.parts), tile.warps,
            x, matrix, gain, squares, w.qkv_bias, turns, rows, slots, q, kv[0], kv[1],
            self.scratch.product_parts, self.scratch.block_counters, n, size, blocks, self.heads, self.kv_heads,
            slots_a_head, eps, D=head_dim, PARTS=tile.parts, **constants,
        )  # fmt: skip
        return q

    def _qkv_parts(self, x: Tensor, w: LayerWeights, turns: Tensor, slots: Tensor, eps: float) -> Tensor:
        """The product alone, [summands, n, (heads + 2 kv_heads) * head_dim]: attention does the rest."""
        n, size = x.shape[0], w.qkv.shape[0]
        x, gain, squares, blocks = self._normed(x, w.input_norm)
        tile, matrix, constants = self._cut(w.qkv, n, gain, blocks)
        qkv = self.scratch.product_parts[: tile.parts * n * size].view(tile.parts, n, size)
        self._run(
            self._gemv.qkv_parts_kernel, (-(-size // tile.rows), tile.parts), tile.warps,
            x, matrix, gain, squares, qkv, n, size, blocks, eps, PARTS=tile.parts, **constants,
        )  # fmt: skip
        self._unfinished = Unfinished(qkv, w.qkv_bias, turns, slots)
        return qkv

    def _cut(
        self, weight: Tensor, n: int, gain: Tensor | None, blocks: int, unit: int = 0, whole: bool = False
    ) -> tuple[launch.Tile, Any, dict[str, Any]]:
        """How a product of weight [out, in] with n rows is cut; the matrix or its tensor map; constants of the kernel.

        Args:
            gain: of a norm that the product computes, for which all columns must be read in turn.
            unit, whole: as in `launch.tile`.
        """
        m, (size, columns) = launch.row_bucket(n), weight.shape
        whole = whole or gain is not None
        tile = launch.tile(columns, size, m, unit, whole, gain is None, self.memory, self.widest)
        mapped = tensor_map(weight, tile) if self.tma and m > 4 else None  # plain products read by pointers
        constants = {
            "K": columns, "M": m, "BN": tile.rows, "BK": tile.columns, "BLOCKS": launch.power_of_two(blocks),
            "GROUPS": tile.groups, "AHEAD": launch.ahead(tile), "TMA": mapped is not None,
            "LATE": tile.late,
        }  # fmt: skip
        return tile, weight if mapped is None else mapped, constants

    def row_attention(self, state: DecodeState, kv_len: int) -> Callable[[Tensor, Tensor], Tensor]:
        """Attention of one new token a row over positions 0 .. positions[row] of that row of the cache.

        Args:
            state: positions and active are read on the device, and before the kernel that precedes attention has
                ended: an ordinary kernel, `begin`, must stand between what writes them and the first layer.
            kv_len: as in `reference.row_attention`. It only says whether a row may be long: see `kv_lengths`. It also
                decides whether attention finishes q, k and v in this step: so this comes before `qkv_rope_append`.
        Returns: a function of q [n, heads, head_dim], whose rows may lie further apart, and one layer of the cache,
            to [n, heads * head_dim].
        """
        active = state.active.view(torch.uint8)
        n, group, scratch = state.positions.shape[0], self.heads // self.kv_heads, self.scratch
        shape, long_splits, long_from = self.attention_shapes[n - 1]
        way = ONLY_LONG if long_from == 0 else ONLY_SHORT if kv_len < long_from else BOTH
        self._attention_finishes = way == ONLY_LONG and n <= MAX_ROWS

        def attend(q: Tensor, kv: Tensor) -> Tensor:
            todo = self._unfinished if self._unfinished is not None and self._unfinished.qkv is q else None
            out = kv.new_empty(n, self.heads * self.head_dim)
            self._run(
                self._attention.attention_kernel, (self.heads, shape.number, n), shape.warps,
                q if todo is None else None, *(todo or (None, None, None, None)), kv[0], kv[1], state.positions, active,
                scratch.parts, scratch.maxima, scratch.sums, scratch.head_counters, out, n, self.heads, self.kv_heads,
                kv.shape[3], q.stride(0), 1 / math.sqrt(self.head_dim), long_from,
                D=self.head_dim, DP=launch.power_of_two(self.head_dim), GROUP=group,
                GP=max(8, launch.power_of_two(group)), SPLITS=shape.number, LONG=long_splits, BT=shape.tokens, WAY=way,
                SUMMANDS=0 if todo is None else q.shape[0],
            )  # fmt: skip
            return out

        return attend

    def kv_lengths(self, max_seq_len: int) -> list[int]:
        """The KV lengths that steps are recorded for: while all rows are short, attention is a smaller kernel."""
        some_long = any(0 < long_from < max_seq_len for *_, long_from in self.attention_shapes)
        return [launch.LONG_FROM - 1, max_seq_len] if some_long else [max_seq_len]

    def _attention_shape(self, n: int, max_seq_len: int) -> tuple[launch.Splits, int, int]:
        """Of n rows: how attention is split, in how many splits the long way, and from which length on."""
        shape = launch.splits(self.heads, self.kv_heads, self.head_dim, n)
        return shape, *launch.long_way(shape.number, self.heads // self.kv_heads, n, max_seq_len)

    def linear_residual(
        self, y: Tensor, weight: Tensor, bias: Tensor | None, x: Tensor, gain: Tensor | None = None
    ) -> Tensor:
        """See `reference.linear_residual`: y [n, in], weight [out, in], x [n, out] -> [n, out]; many rows: into x."""
        if y.shape[0] > MAX_ROWS:
            return self.prompt.linear_residual(y, weight, bias, x)
        return self._linear(y, weight, None, bias, x, 0.0, x.dtype, gain)

    def _prepare(self, x: Tensor, gain: Tensor | None, blocks: int) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """(gain, scaled, squares) for a kernel that writes x, if there is a norm to prepare for; gain None if not."""
        n = x.shape[0]
        if gain is None or x.dtype not in PREPARED or not launch.on_tensor_cores(n):
            return None, None, self.scratch.squares
        self._prepared = Prepared(x, gain, x.new_empty(n, x.shape[1]), self.scratch.squares, blocks)
        return gain, self._prepared.scaled, self.scratch.squares

    def _normed(self, x: Tensor, gain: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, int]:
        """What a kernel multiplies in place of x to get norm(x), and its arguments gain, squares and blocks."""
        prepared = self._prepared
        if prepared is None or prepared.x is not x or prepared.gain is not gain:
            return x, gain, None, 1
        return prepared.scaled, None, prepared.squares, prepared.blocks

    def gate_up_silu(self, x: Tensor, w: LayerWeights, eps: float) -> Tensor:
        """See `reference.gate_up_silu`: x [n, hidden] -> [n, intermediate]."""
        n = x.shape[0]
        if n > MAX_ROWS:
            return self.prompt.gate_up_silu(x, w, eps)
        size = w.gate_up.shape[0]
        out = x.new_empty(n, size // 2)
        x, gain, squares, blocks = self._normed(x, w.post_norm)
        tile, matrix, constants = self._cut(w.gate_up, n, gain, blocks, whole=True)
        self._run(
            self._gemv.gate_up_kernel, (-(-size // tile.rows),), tile.warps,
            x, matrix, gain, squares, w.gate_up_bias, out, n, size, blocks, eps, **constants,
        )  # fmt: skip
        return out

    def norm_logits(self, x: Tensor, norm: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Final norm and output projection: x [n, hidden], weight [vocab, hidden] -> float32 [n, vocab]."""
        if x.shape[0] > MAX_ROWS:
            return reference.norm_logits(x, norm, weight, eps)
        return self._linear(x, weight, norm, None, None, eps, torch.float32)

    def advance_to_best(self, x: Tensor, norm: Tensor, weight: Tensor, eps: float, state: DecodeState) -> None:
        """`norm_logits` and `greedy_finish` of x [n, hidden] and weight [vocab, hidden], without logits in between."""
        n, vocab = x.shape[0], weight.shape[0]
        x, gain, squares, blocks = self._normed(x, norm)
        tile, matrix, constants = self._cut(weight, n, gain, blocks, whole=True)
        programs = -(-vocab // tile.rows)
        self._run(
            self._best.best_logits_kernel, (programs,), tile.warps,
            x, matrix, gain, squares, self.scratch.best, self.scratch.index, n, vocab, blocks, eps, **constants,
        )  # fmt: skip
        self.best_finish(programs, state)

    def _linear(
        self, x: Tensor, weight: Tensor, gain: Tensor | None, bias: Tensor | None, residual: Tensor | None, eps: float,
        dtype: torch.dtype, next_gain: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """norm(x) @ weight.T + bias + residual in `dtype`: x [n, in] -> [n, out]."""
        n, size, squares, blocks = x.shape[0], weight.shape[0], None, 1
        if gain is not None:
            x, gain, squares, blocks = self._normed(x, gain)
        tile, matrix, constants = self._cut(weight, n, gain, blocks, whole=residual is None)
        out, height = x.new_empty(n, size, dtype=dtype), -(-size // tile.rows)
        next_gain, scaled, next_squares = self._prepare(out, next_gain, height)
        self._run(
            self._gemv.linear_kernel, (height, tile.parts), tile.warps,
            x, matrix, gain, squares, bias, residual, out, next_gain, scaled, next_squares,
            self.scratch.product_parts, self.scratch.block_counters, n, size, blocks, eps,
            PARTS=tile.parts, **constants,
        )  # fmt: skip
        return out

"""FusedOps: the operations of `reference.py` as fused Triton kernels, for decode steps of few rows on NVIDIA GPUs.

The methods have the names, arguments and meaning of the functions there, so the model does not know which it calls.
Whether they can be used is decided once, by `FusedOps.supports`, when a model is built. Here is what surrounds the
kernels: shapes, launch grids, and the scratch memory in which programs of one kernel leave parts for each other. That
memory belongs to one FusedOps, so two streams must not share one.

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
from ..sampling import Mode, keep_top, penalise, scale
from ..state import DecodeState
from ..weights import LayerWeights
from . import launch, reference
from .fused_prompt import FusedPrompt

MAX_ROWS = 32
"""Products of more rows than this are left to cuBLAS, as those of a prompt are."""

PREPARED = (torch.bfloat16,)
"""Dtypes in which gain * x cannot overflow, so that it may be multiplied before the scale of the norm is known."""

HEAD_DIMS = (64, 80, 96, 128, 256)
BLOCK = 1024  # elements of an embedding that one program copies
CHUNK = 2048  # logits that one program looks through at the end of a step
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


class FusedOps:
    """The fused operations for one model on one device.

    Args:
        max_rows, max_seq_len: of the cache that the operations will work on.
    """

    def __init__(self, config: ModelConfig, max_rows: int, max_seq_len: int, device: torch.device) -> None:
        # here, because triton is only there with CUDA builds of PyTorch
        from . import attention, begin, draw, finish, gemv

        self._begin, self._gemv, self._attention, self._finish, self._draw = begin, gemv, attention, finish, draw
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        self.pdl = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
        self.attention_shapes = [self._attention_shape(n, max_seq_len) for n in range(1, max_rows + 1)]  # of n rows
        parts = (max_rows, self.heads, max(splits for _, splits, _ in self.attention_shapes))
        chunks = (max_rows, launch.power_of_two(-(-config.vocab_size // CHUNK)))
        self.parts = torch.empty(*parts, self.head_dim, device=device)  # float32, as are the next six
        self.maxima = torch.empty(parts, device=device)
        self.sums = torch.empty(parts, device=device)
        self.peaks = torch.empty(chunks, device=device)
        self.exponentials = torch.empty(chunks, device=device)
        self.tops = torch.empty(chunks, device=device)
        self.best = torch.empty(chunks, device=device)
        self.index = torch.empty(chunks, device=device, dtype=torch.int32)
        # parts of a product that is cut along its columns: of up to MAX_PARTS programs, one number each for every
        # row of activations and every row of the matrix, which writes the residual stream or q, k and v
        height = max(config.hidden_size, (self.heads + 2 * self.kv_heads) * self.head_dim)
        blocks = -(-height // 16) if max_rows > launch.PLAIN_ROWS else 0
        numbers = launch.MAX_PARTS * (16 * blocks + 128) * launch.row_bucket(min(max_rows, MAX_ROWS))
        self.product_parts = torch.empty(numbers, device=device)
        # sums of squares by blocks of a residual stream, of 16 columns and more
        self.squares = torch.empty(blocks * launch.row_bucket(min(max_rows, MAX_ROWS)), device=device)
        self._prepared: Prepared | None = None  # of the newest residual stream
        # counters of arrivals: every kernel leaves them at zero
        self.block_counters = torch.zeros(blocks, device=device, dtype=torch.int32)
        self.head_counters = torch.zeros(max_rows, self.heads, device=device, dtype=torch.int32)
        self.row_counters = torch.zeros(max_rows, device=device, dtype=torch.int32)
        # one for each program of a chunk of a prompt, if it is split: then they are half of what they may be, or fewer
        self.chunk_counters = torch.zeros(launch.CHUNK_PROGRAMS // 2, device=device, dtype=torch.int32)

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
        """See `reference.qkv_rope_append`: x [n, hidden] -> q [n, heads, head_dim]; k and v go into the cache."""
        n, hidden = x.shape
        if n > MAX_ROWS:
            return self.prompt.qkv_rope_append(x, w, rope, eps, kv, rows, slots, head_dim)
        q = x.new_empty(n, self.heads, head_dim)
        turns = torch.view_as_real(rope)  # [n, head_dim / 2, 2]
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
        m, size = launch.row_bucket(n), w.qkv.shape[0]
        x, gain, squares, blocks = self._normed(x, w.input_norm)
        tile = launch.tile(hidden, size, m, unit=head_dim, whole=gain is not None)
        self._run(
            self._gemv.qkv_rope_append_kernel, (size // tile.rows, tile.parts), tile.warps,
            x, w.qkv, gain, squares, w.qkv_bias, turns, rows, slots, q, kv[0], kv[1],
            self.product_parts, self.block_counters, n, size, blocks, self.heads, self.kv_heads, slots_a_head, eps,
            K=hidden, D=head_dim, M=m, BN=tile.rows, BK=tile.columns, BLOCKS=launch.power_of_two(blocks),
            PARTS=tile.parts, GROUPS=tile.groups,
        )  # fmt: skip
        return q

    def row_attention(self, state: DecodeState, kv_len: int) -> Callable[[Tensor, Tensor], Tensor]:
        """Attention of one new token a row over positions 0 .. positions[row] of that row of the cache.

        Args:
            state: positions and active are read on the device, and before the kernel that precedes attention has
                ended: an ordinary kernel, `begin`, must stand between what writes them and the first layer.
            kv_len: as in `reference.row_attention`. It only says whether a row may be long: see `kv_lengths`.
        Returns: a function of q [n, heads, head_dim], whose rows may lie further apart, and one layer of the cache,
            to [n, heads * head_dim].
        """
        active = state.active.view(torch.uint8)
        group = self.heads // self.kv_heads

        def attend(q: Tensor, kv: Tensor) -> Tensor:
            n = q.shape[0]
            out = q.new_empty(n, self.heads * self.head_dim)
            shape, long_splits, long_from = self.attention_shapes[n - 1]
            way = ONLY_LONG if long_from == 0 else ONLY_SHORT if kv_len < long_from else BOTH
            self._run(
                self._attention.attention_kernel, (self.heads, shape.number, n), shape.warps,
                q, kv[0], kv[1], state.positions, active, self.parts, self.maxima, self.sums, self.head_counters,
                out, self.heads, self.kv_heads, kv.shape[3], q.stride(0), 1 / math.sqrt(self.head_dim), long_from,
                D=self.head_dim, DP=launch.power_of_two(self.head_dim), GROUP=group,
                GP=max(16, launch.power_of_two(group)), SPLITS=shape.number, LONG=long_splits, BT=shape.tokens, WAY=way,
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
        if gain is None or x.dtype not in PREPARED or not launch.PLAIN_ROWS < n <= MAX_ROWS:
            return None, None, self.squares
        self._prepared = Prepared(x, gain, x.new_empty(n, x.shape[1]), self.squares, blocks)
        return gain, self._prepared.scaled, self.squares

    def _normed(self, x: Tensor, gain: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, int]:
        """What a kernel multiplies in place of x to get norm(x), and its arguments gain, squares and blocks."""
        prepared = self._prepared
        if prepared is None or prepared.x is not x or prepared.gain is not gain:
            return x, gain, None, 1
        return prepared.scaled, None, prepared.squares, prepared.blocks

    def gate_up_silu(self, x: Tensor, w: LayerWeights, eps: float) -> Tensor:
        """See `reference.gate_up_silu`: x [n, hidden] -> [n, intermediate]."""
        n, hidden = x.shape
        if n > MAX_ROWS:
            return self.prompt.gate_up_silu(x, w, eps)
        m, size = launch.row_bucket(n), w.gate_up.shape[0]
        tile = launch.tile(hidden, size, m)
        out = x.new_empty(n, size // 2)
        x, gain, squares, blocks = self._normed(x, w.post_norm)
        self._run(
            self._gemv.gate_up_kernel, (-(-size // tile.rows),), tile.warps,
            x, w.gate_up, gain, squares, w.gate_up_bias, out, n, size, blocks, eps,
            K=hidden, M=m, BN=tile.rows, BK=tile.columns, BLOCKS=launch.power_of_two(blocks),
            GROUPS=tile.groups,
        )  # fmt: skip
        return out

    def norm_logits(self, x: Tensor, norm: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Final norm and output projection: x [n, hidden], weight [vocab, hidden] -> float32 [n, vocab]."""
        if x.shape[0] > MAX_ROWS:
            return reference.norm_logits(x, norm, weight, eps)
        return self._linear(x, weight, norm, None, None, eps, torch.float32)

    def sample_and_advance(self, logits: Tensor, state: DecodeState, mode: Mode) -> None:
        """See `step.sample_and_advance`: logits float32 [n, vocab], the state of the n rows."""
        if mode == Mode.GREEDY:
            self.greedy_finish(logits, state)
        else:
            self._sampled_finish(logits, state, mode)

    def greedy_finish(self, logits: Tensor, state: DecodeState) -> None:
        """`sample_and_advance` in `Mode.GREEDY`."""
        n, vocab = logits.shape
        chunks = -(-vocab // CHUNK)
        self._run(
            self._finish.greedy_finish_kernel, (chunks, n), 8,
            logits, self.best, self.index, self.row_counters, state.tokens, state.positions,
            state.active.view(torch.uint8), state.limits, state.stops.view(torch.uint8), state.output, vocab,
            BLOCK=CHUNK, CHUNKS=launch.power_of_two(chunks),
        )  # fmt: skip

    def _sampled_finish(self, logits: Tensor, state: DecodeState, mode: Mode) -> None:
        """`sample_and_advance` in the other modes. Reads the state early: see `draw.py` for what must stand between."""
        n, vocab = logits.shape
        chunks, seen = -(-vocab // CHUNK), state.seen.view(torch.uint8)
        self._run(
            self._draw.measure_kernel, (chunks, n), 8,
            logits, seen, state.repetition_penalty, self.peaks, self.exponentials, self.tops, vocab,
            BLOCK=CHUNK, CHUNKS=launch.power_of_two(chunks),
        )  # fmt: skip
        scores = keep_top(scale(penalise(logits, state), state), state) if mode == Mode.FILTERED else None
        self._run(
            self._draw.draw_kernel, (chunks, n), 8,
            logits, scores, seen, state.temperature, state.repetition_penalty, state.min_p, state.seeds,
            self.peaks, self.exponentials, self.tops, self.best, self.index, self.row_counters,
            state.tokens, state.positions, state.active.view(torch.uint8), state.limits,
            state.stops.view(torch.uint8), state.output, vocab,
            BLOCK=CHUNK, CHUNKS=launch.power_of_two(chunks),
        )  # fmt: skip

    def _linear(
        self, x: Tensor, weight: Tensor, gain: Tensor | None, bias: Tensor | None, residual: Tensor | None, eps: float,
        dtype: torch.dtype, next_gain: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """norm(x) @ weight.T + bias + residual in `dtype`: x [n, in] -> [n, out]."""
        (n, columns), size = x.shape, weight.shape[0]
        m, squares, blocks = launch.row_bucket(n), None, 1
        if gain is not None:
            x, gain, squares, blocks = self._normed(x, gain)
        tile = launch.tile(columns, size, m, whole=residual is None)
        out, height = x.new_empty(n, size, dtype=dtype), -(-size // tile.rows)
        next_gain, scaled, next_squares = self._prepare(out, next_gain, height)
        self._run(
            self._gemv.linear_kernel, (height, tile.parts), tile.warps,
            x, weight, gain, squares, bias, residual, out, next_gain, scaled, next_squares,
            self.product_parts, self.block_counters, n, size, blocks, eps,
            K=columns, M=m, BN=tile.rows, BK=tile.columns, BLOCKS=launch.power_of_two(blocks), PARTS=tile.parts,
            GROUPS=tile.groups,
        )  # fmt: skip
        return out

    def _run(
        self, kernel: Any, grid: tuple[int, ...], warps: int, *args: object, fence: bool = False, **constants: int
    ) -> None:
        """Launch a kernel; on Hopper and later it may start before the one ahead of it has ended (`sync.py`).

        fence: launch it in the ordinary way: it starts when all before it has ended. Such a kernel has no PDL argument.
        """
        if not fence:
            constants["PDL"] = self.pdl
        options = {"launch_pdl": True} if self.pdl and not fence else {}
        kernel[grid](*args, **constants, num_warps=warps, enable_fp_fusion=True, **options)

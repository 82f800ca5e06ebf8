"""FusedOps: the operations of `reference.py` as fused Triton kernels, for decode steps of few rows on NVIDIA GPUs.

The methods have the names, arguments and meaning of the functions there, so the model does not know which it calls.
Whether they can be used is decided once, by `FusedOps.supports`, when a model is built. Here is what surrounds the
kernels: shapes, launch grids, and the scratch memory in which programs of one kernel leave parts for each other. That
memory belongs to one FusedOps, so two streams must not share one.

Products run fused for 1 to 32 rows; for more they are those of `reference.py`. Attention and the two ends of a step are
fused for any number of rows. Models with norms on q and k (qwen3) need one kernel more a layer, and top-k and top-p
stay plain operations: they sort the vocabulary.
"""

import importlib.util
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..config import ModelConfig
from ..sampling import Mode, keep_top, penalise, scale
from ..state import DecodeState
from ..weights import LayerWeights
from . import launch, reference

MAX_ROWS = 32
"""Products of more rows than this are left to `reference.py`."""

NEVER = 2**31 - 1
"""A length that no row has."""

HEAD_DIMS = (64, 80, 96, 128, 256)
BLOCK = 1024  # elements of an embedding that one program copies
CHUNK = 2048  # logits that one program looks through at the end of a step


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
        self.splits = launch.splits(self.heads, self.kv_heads, self.head_dim)
        self.long_splits, self.long_from = self.splits.number, NEVER
        if self.heads > self.kv_heads and (max_seq_len > launch.LONG_FROM or max_rows >= launch.LONG_ROWS):
            self.long_splits = launch.long_splits(self.splits.number, self.heads // self.kv_heads)
            self.long_from = launch.LONG_FROM
        parts = (max_rows, self.heads, self.long_splits)
        chunks = (max_rows, launch.power_of_two(-(-config.vocab_size // CHUNK)))
        self.parts = torch.empty(*parts, self.head_dim, device=device)  # float32, as are the next six
        self.maxima = torch.empty(parts, device=device)
        self.sums = torch.empty(parts, device=device)
        self.peaks = torch.empty(chunks, device=device)
        self.exponentials = torch.empty(chunks, device=device)
        self.tops = torch.empty(chunks, device=device)
        self.best = torch.empty(chunks, device=device)
        self.index = torch.empty(chunks, device=device, dtype=torch.int32)
        # counters of arrivals: every kernel leaves them at zero
        self.head_counters = torch.zeros(max_rows, self.heads, device=device, dtype=torch.int32)
        self.row_counters = torch.zeros(max_rows, device=device, dtype=torch.int32)

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
        self, state: DecodeState, embed: Tensor, rope_table: Tensor, scratch_slot: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `reference.begin`: x [n, hidden], rope [n, head_dim / 2], slots [n]. The fence of a step: `begin.py`."""
        n, hidden = state.tokens.shape[0], embed.shape[1]
        x, rope = embed.new_empty(n, hidden), rope_table.new_empty(n, rope_table.shape[1])
        slots = torch.empty_like(state.positions)
        self._run(
            self._begin.begin_kernel, (-(-hidden // BLOCK), n), 4,
            state.tokens, state.positions, state.active.view(torch.uint8), embed, torch.view_as_real(rope_table),
            x, torch.view_as_real(rope), slots, scratch_slot, hidden,
            D=self.head_dim, DP=launch.power_of_two(self.head_dim), BLOCK=BLOCK, fence=True,
        )  # fmt: skip
        return x, rope, slots

    def qkv_rope_append(
        self, x: Tensor, w: LayerWeights, rope: Tensor, eps: float, kv: Tensor, rows: Tensor, slots: Tensor,
        head_dim: int,
    ) -> Tensor:  # fmt: skip
        """See `reference.qkv_rope_append`: x [n, hidden] -> q [n, heads, head_dim]; k and v go into the cache."""
        n, hidden = x.shape
        if n > MAX_ROWS:
            return reference.qkv_rope_append(x, w, rope, eps, kv, rows, slots, head_dim)
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
        tile = launch.tile(hidden, size, m, unit=head_dim)
        self._run(
            self._gemv.qkv_rope_append_kernel, (size // tile.rows,), tile.warps,
            x, w.qkv, w.input_norm, w.qkv_bias, turns, rows, slots, q, kv[0], kv[1],
            n, size, self.heads, self.kv_heads, slots_a_head, eps,
            K=hidden, D=head_dim, M=m, BN=tile.rows, BK=tile.columns,
        )  # fmt: skip
        return q

    def row_attention(self, state: DecodeState, kv_len: int) -> Callable[[Tensor, Tensor], Tensor]:
        """Attention of one new token a row over positions 0 .. positions[row] of that row of the cache.

        Args:
            state: positions and active are read on the device, and before the kernel that precedes attention has
                ended: an ordinary kernel, `begin`, must stand between what writes them and the first layer.
            kv_len: not used: the length is positions + 1.
        Returns: a function of q [n, heads, head_dim] and one layer of the cache, to [n, heads * head_dim].
        """
        active = state.active.view(torch.uint8)
        group = self.heads // self.kv_heads

        def attend(q: Tensor, kv: Tensor) -> Tensor:
            n = q.shape[0]
            out = q.new_empty(n, self.heads * self.head_dim)
            long_from = 0 if n >= launch.LONG_ROWS and self.long_from != NEVER else self.long_from
            self._run(
                self._attention.attention_kernel, (self.heads, self.splits.number, n), self.splits.warps,
                q, kv[0], kv[1], state.positions, active, self.parts, self.maxima, self.sums, self.head_counters,
                out, self.heads, self.kv_heads, kv.shape[3], 1 / math.sqrt(self.head_dim), long_from,
                D=self.head_dim, DP=launch.power_of_two(self.head_dim), GROUP=group,
                GP=max(16, launch.power_of_two(group)), SPLITS=self.splits.number, LONG=self.long_splits,
                BT=self.splits.tokens,
            )  # fmt: skip
            return out

        return attend

    def linear_residual(self, y: Tensor, weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
        """x + y @ weight.T + bias: y [n, in], weight [out, in], x [n, out] -> [n, out]."""
        if y.shape[0] > MAX_ROWS:
            return reference.linear_residual(y, weight, bias, x)
        return self._linear(y, weight, None, bias, x, 0.0, x.dtype)

    def gate_up_silu(self, x: Tensor, w: LayerWeights, eps: float) -> Tensor:
        """See `reference.gate_up_silu`: x [n, hidden] -> [n, intermediate]."""
        n, hidden = x.shape
        if n > MAX_ROWS:
            return reference.gate_up_silu(x, w, eps)
        m, size = launch.row_bucket(n), w.gate_up.shape[0]
        tile = launch.tile(hidden, size, m)
        out = x.new_empty(n, size // 2)
        self._run(
            self._gemv.gate_up_kernel, (-(-size // tile.rows),), tile.warps,
            x, w.gate_up, w.post_norm, w.gate_up_bias, out, n, size, eps,
            K=hidden, M=m, BN=tile.rows, BK=tile.columns,
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
        dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        """norm(x) @ weight.T + bias + residual in `dtype`: x [n, in] -> [n, out]."""
        (n, columns), size = x.shape, weight.shape[0]
        m = launch.row_bucket(n)
        tile = launch.tile(columns, size, m)
        out = x.new_empty(n, size, dtype=dtype)
        self._run(
            self._gemv.linear_kernel, (-(-size // tile.rows),), tile.warps,
            x, weight, gain, bias, residual, out, n, size, eps,
            K=columns, M=m, BN=tile.rows, BK=tile.columns,
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

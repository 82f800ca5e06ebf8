"""FusedFinish: the kernels that end a step, and how any kernel is launched. What `fused.py` builds on."""

from typing import Any

import torch
from torch import Tensor

from ..config import ModelConfig
from ..sampling import Mode, keep_top, penalise, scale
from ..state import DecodeState
from . import launch
from .scratch import CHUNK, Scratch


def limits(device: torch.device) -> tuple[tuple[int, int], int]:
    """(compute capability of a GPU, bytes of shared memory that a program may have there)."""
    import triton

    index = torch.cuda.current_device() if device.index is None else device.index
    properties = triton.runtime.driver.active.utils.get_device_properties(index)
    return torch.cuda.get_device_capability(index), properties["max_shared_mem"]


class FusedFinish:
    """Scratch memory, and the end of a step in kernels that share it.

    Args:
        max_rows: of the cache. max_splits: of attention.
    """

    def __init__(self, config: ModelConfig, max_rows: int, max_splits: int, device: torch.device) -> None:
        # here, because triton is only there with CUDA builds of PyTorch
        from . import best, draw, finish

        self._best, self._draw, self._finish = best, draw, finish
        self.scratch = Scratch(config, max_rows, max_splits, device)
        self.pdl = self.tma = False  # see `sync.py` and `gemm.py`
        self.memory = self.widest = 2**20  # bytes of shared memory, and columns of a tile, that a program may have
        if device.type == "cuda":
            self.fit(*limits(device))

    def fit(self, capability: tuple[int, int], memory: int) -> None:
        """Choose what kernels may do on a GPU whose `limits` these are."""
        self.pdl = self.tma = capability >= (9, 0)
        self.memory, self.widest = memory, launch.widest(capability)

    @staticmethod
    def finds_best(n: int) -> bool:
        """Whether a greedy step of n rows may end with `FusedOps.advance_to_best`.

        For fewer rows the logits are few bytes; for more, the output projection is not a kernel of this project.
        """
        return launch.on_tensor_cores(n)

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
            logits, self.scratch.best, self.scratch.index, self.scratch.row_counters, state.tokens, state.positions,
            state.active.view(torch.uint8), state.limits, state.stops.view(torch.uint8), state.output, vocab,
            BLOCK=CHUNK, CHUNKS=launch.power_of_two(chunks),
        )  # fmt: skip

    def best_finish(self, programs: int, state: DecodeState) -> None:
        """`greedy_finish` of what so many programs of `best_logits_kernel` left in the scratch memory."""
        self._run(
            self._best.best_finish_kernel, (state.tokens.shape[0],), 8,
            self.scratch.best, self.scratch.index, state.tokens, state.positions, state.active.view(torch.uint8),
            state.limits, state.stops.view(torch.uint8), state.output, programs, state.stops.shape[1],
            BLOCKS=launch.power_of_two(programs),
        )  # fmt: skip

    def _sampled_finish(self, logits: Tensor, state: DecodeState, mode: Mode) -> None:
        """`sample_and_advance` in the other modes. Reads the state early: see `draw.py` for what must stand between."""
        n, vocab = logits.shape
        chunks, seen, scratch = -(-vocab // CHUNK), state.seen.view(torch.uint8), self.scratch
        self._run(
            self._draw.measure_kernel, (chunks, n), 8,
            logits, seen, state.repetition_penalty, scratch.peaks, scratch.exponentials, scratch.tops, vocab,
            BLOCK=CHUNK, CHUNKS=launch.power_of_two(chunks),
        )  # fmt: skip
        scores = keep_top(scale(penalise(logits, state), state), state) if mode == Mode.FILTERED else None
        self._run(
            self._draw.draw_kernel, (chunks, n), 8,
            logits, scores, seen, state.temperature, state.repetition_penalty, state.min_p, state.seeds,
            scratch.peaks, scratch.exponentials, scratch.tops, scratch.best, scratch.index, scratch.row_counters,
            state.tokens, state.positions, state.active.view(torch.uint8), state.limits,
            state.stops.view(torch.uint8), state.output, vocab,
            BLOCK=CHUNK, CHUNKS=launch.power_of_two(chunks),
        )  # fmt: skip

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

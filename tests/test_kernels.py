"""Runs interpreted_kernels.py in a process in which Triton interprets kernels, and tests what needs no kernel."""

import itertools
from typing import Any

import kernel_cases as cases
import pytest
import torch
from interpreter import run_interpreted

from minillm.cache import KVCache
from minillm.config import ModelConfig
from minillm.kernels import fused_finish, launch, table
from minillm.kernels.fused import FusedOps
from minillm.kernels.fused_finish import FusedFinish
from minillm.kernels.scratch import MIN_ROWS
from minillm.model import Llama
from minillm.sampling import Mode
from minillm.state import DecodeState
from minillm.step import decode_step
from minillm.weights import allocate

CPU = torch.device("cpu")


def test_kernels_equal_their_definitions() -> None:
    run_interpreted("interpreted_kernels.py")


@pytest.mark.parametrize("columns", [16, 64, 576, 896, 1536, 2048, 3072, 4096, 5120, 8192, 11008, 14336, 28672])
@pytest.mark.parametrize("m", [1, 2, 4, 16, 32])
def test_tiles_are_powers_of_two_that_fit_a_thread(columns: int, m: int) -> None:
    """Shapes that a kernel can take: at most 128 weights a thread, and at most half of the lanes beyond the end."""
    for unit in (0, 64, 80, 96, 128, 256):
        tile = launch.tile(columns, 1000, m, unit)
        for number in (tile.rows, tile.columns, tile.warps):
            assert number == launch.power_of_two(number)
        assert tile.rows >= 2
        assert unit % tile.rows == 0
        assert tile.rows * tile.columns <= 128 * 32 * tile.warps
        assert -(-columns // tile.columns) * tile.columns < 2 * columns


def test_the_table_holds_only_what_kernels_can_take() -> None:
    for (columns, _, m), shape in table.TILES.items():
        assert m in {launch.row_bucket(n) for n in range(1, 33)}
        tile = launch.Tile(*shape)
        assert tile.parts <= launch.MAX_PARTS
        assert m <= launch.PLAIN_ROWS or MIN_ROWS <= tile.rows <= 128 or tile.parts == 1
        assert tile.groups in (1, tile.warps)  # Triton gives each group a warp
        assert all(number == launch.power_of_two(number) for number in tile[:5])
        assert tile.late in (0, 1)
        weights = tile.rows * tile.columns * tile.groups // (32 * tile.warps)  # a thread
        assert weights <= (128 if m <= launch.PLAIN_ROWS else 256)  # in registers; or on their way to shared memory
        assert tile.columns < 2 * columns
    for splits, tokens, warps in table.ATTENTION.values():
        assert all(number == launch.power_of_two(number) for number in (splits, tokens, warps))
        assert splits <= 32


def test_a_launch_takes_what_the_table_says() -> None:
    for (columns, rows, m), shape in table.TILES.items():
        assert launch.tile(columns, rows, m) == launch.Tile(*shape)


def test_the_limits_of_the_gpu_decide_what_kernels_may_do(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="triton, which comes with PyTorch's CUDA wheels, is not installed")
    monkeypatch.setattr(fused_finish, "Scratch", lambda *_: None)
    for capability, hopper, widest in (((8, 6), False, 2**20), ((9, 0), True, 2**20), ((10, 0), True, 512)):
        monkeypatch.setattr(fused_finish, "limits", lambda _, capability=capability: (capability, 99 << 10))
        ops = FusedFinish(cases.config(), 1, 1, torch.device("cuda"))
        assert (ops.pdl, ops.tma, ops.memory, ops.widest) == (hopper, hopper, 99 << 10, widest)


def test_long_splits_are_a_power_of_two_that_the_programs_can_fill() -> None:
    for count, group, rows in itertools.product((1, 4, 8, 16, 32), (1, 2, 3, 4, 7, 8, 16), (1, 7, 8, 32)):
        number, start = launch.long_way(count, group, rows, 2**17)
        assert count <= number <= count * group
        assert number > count or group == 1
        assert number == launch.power_of_two(number)
        assert start == (launch.NEVER if group == 1 else 0 if rows >= launch.LONG_ROWS else launch.LONG_FROM)
    assert launch.long_way(8, 4, 1, launch.LONG_FROM) == (8, launch.NEVER)  # a cache that holds no long context


def test_supports_says_why_not() -> None:
    reason = FusedOps.supports(cases.config(), torch.device("cpu"), torch.bfloat16)
    assert reason is not None
    assert "NVIDIA GPU" in reason


@pytest.mark.parametrize(
    ("changes", "dtype", "capability", "words"),
    [
        ({}, torch.bfloat16, (7, 5), "8.0"),
        ({}, torch.float32, (9, 0), "float32"),
        ({"head_dim": 72}, torch.bfloat16, (9, 0), "head_dim"),
        ({"hidden_size": 72}, torch.bfloat16, (9, 0), "hidden_size"),
        ({"intermediate_size": 90}, torch.bfloat16, (9, 0), "intermediate_size"),
        ({}, torch.bfloat16, (8, 0), None),
        ({"head_dim": 96}, torch.float16, (12, 0), None),
    ],
)
def test_supports_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, changes: dict, dtype: torch.dtype, capability: tuple[int, int], words: str | None
) -> None:
    pytest.importorskip("triton", reason="triton, which comes with PyTorch's CUDA wheels, is not installed")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    reason = FusedOps.supports(cases.config(**changes), torch.device("cuda"), dtype)
    assert (reason is None) if words is None else (reason is not None and words in reason)


class Noted(FusedOps):
    """Launches nothing: `launches` are the kernels that would run, by name, with their constants."""

    def __init__(self, config: ModelConfig, max_rows: int) -> None:
        super().__init__(config, max_rows, 100, CPU)
        self.launches: list[tuple[str, dict[str, int]]] = []

    def _run(
        self, kernel: Any, grid: tuple[int, ...], warps: int, *args: object, fence: bool = False, **constants: int
    ) -> None:
        self.launches.append((kernel.__name__, constants))


def noted_step(family: str, rows: int) -> tuple[Noted, Llama, KVCache, DecodeState]:
    """What a step of a model of two layers needs."""
    pytest.importorskip("triton", reason="triton, which comes with PyTorch's CUDA wheels, is not installed")
    cfg = cases.config(num_hidden_layers=2, model_type=family)
    ops, weights = Noted(cfg, rows), allocate(cfg, CPU, torch.bfloat16)
    cache, state = KVCache(cfg, rows, 100, CPU, torch.bfloat16), DecodeState.allocate(rows, cfg.vocab_size, CPU)
    return ops, Llama(cfg, weights, 100, ops), cache, state


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("n", [1, 2, 3, 8, 32, 33])
def test_greedy_steps_of_3_to_32_rows_and_no_others_end_without_logits(n: int, mode: Mode) -> None:
    """And they are made once, and say how many layers are done. With logits, results would be the same."""
    ops, model, cache, state = noted_step("llama", n)
    layers: list[int] = []
    decode_step(model, cache, state, 100, mode, layers.append)
    names = [name for name, _ in ops.launches]
    without = mode == Mode.GREEDY and 3 <= n <= 32
    ends = ["greedy_finish_kernel"] if mode == Mode.GREEDY else ["measure_kernel", "draw_kernel"]
    ends = ["best_logits_kernel", "best_finish_kernel"] if without else ends
    assert names[-len(ends) :] == ends
    assert ("best_logits_kernel" in names) == without
    assert names.count("begin_kernel") == 1
    assert layers == [1, 2]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_attention_finishes_the_projection_in_steps_of_8_to_32_rows_alone(family: str) -> None:
    """The steps of all sizes share one FusedOps: a step of many rows must leave nothing that the next would finish.

    Where q and k are normalised, the projection is finished by the kernel that does so.
    """
    ops, model, cache, state = noted_step(family, 33)
    for n in (8, 7, 32, 33, 9, 1):
        ops.launches.clear()
        decode_step(model, cache, state.narrow(0, n), 100, Mode.GREEDY)
        finishes = family == "llama" and 8 <= n <= 32
        summands = [constants["SUMMANDS"] for name, constants in ops.launches if name == "attention_kernel"]
        assert [number > 0 for number in summands] == [finishes] * 2, n
        assert sum(name == "qkv_parts_kernel" for name, _ in ops.launches) == 2 * finishes, n

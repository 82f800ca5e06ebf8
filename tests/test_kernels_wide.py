"""The products for 3 to 32 rows compile for Hopper to the instructions that their speed depends on."""

import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton, which comes with PyTorch's CUDA wheels, is not installed")

from test_kernels_compile import LLAMA_1B, PROJECTIONS, compile_step, disassemble

from minillm.kernels import table


def loops(code: list[str]) -> list[list[str]]:
    """What stands between a label and a branch back to it."""
    labels = {line.strip().rstrip(":"): i for i, line in enumerate(code) if line.strip().startswith(".L_x")}
    found = []
    for i, line in enumerate(code):
        target = re.search(r"BRA\S* `\((\.L_x_\d+)\)", line)
        if target and labels[target[1]] < i:
            found.append(code[labels[target[1]] : i])
    return found


@pytest.mark.parametrize("maps", [True, False])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("n", [8, 32])
def test_everything_streams(n: int, groups: int, maps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights travel in tiles, or 16 bytes a copy, ahead of their use; tensor cores multiply; nothing spills.

    Guards two faults that gave right results. Pointers that had been reshaped were loaded in small pieces by an older
    Triton: ten times slower. Activations that were handed on for several turns went to shared memory two bytes at a
    time: twice as slow.
    """
    # the rule promises it, and groups do; what else was measured to be faster may do as it likes
    shapes = {(2048, rows, n): (16, 128, groups, 1, groups) for rows in (2048, 3072)} if groups > 1 else {}
    monkeypatch.setattr(table, "TILES", shapes)
    found = set()
    for name, kernel in compile_step(LLAMA_1B, n, 90, torch.bfloat16, maps):
        if name not in PROJECTIONS:
            continue
        found.add(name)
        code = disassemble(kernel.asm["cubin"], tmp_path)
        products = [i for i, line in enumerate(code) if re.search("HG?MMA", line)]
        unrolled = code[products[0] : products[-1]]  # what short loops become
        loop = next((loop for loop in loops(code) if any(re.search("HG?MMA", line) for line in loop)), unrolled)
        if maps:  # few tiles are all requested before the loop
            assert any("UTMALDG" in line for line in code), f"{name} does not copy tiles"
        else:
            assert any("LDGSTS" in line and ".128" in line for line in loop), f"{name} copies less than 16 bytes"
        assert not any("STS.U16" in line for line in loop), f"{name} stores activations two bytes at a time"
        if groups == 1:  # else it may spill a few: groups are used where they were measured to be faster
            assert not any("STL" in line or "LDL" in line for line in code), f"{name} spills registers"
    assert found == PROJECTIONS

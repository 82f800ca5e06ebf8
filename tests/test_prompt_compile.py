"""The kernels of a prefill compile for GPUs that are not here, without a word about the length of the prompt."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton, which comes with PyTorch's CUDA wheels, is not installed")

import kernel_cases as cases
from test_kernels_compile import LLAMA_1B, META, SMALL_QWEN3, Compiled, disassemble

from minillm.kernels.fused_prompt import FusedPrompt
from minillm.weights import allocate

KERNELS = ["rms_norm_kernel", "rope_append_kernel", "rms_norm_kernel", "silu_kernel"]
LARGE_256 = LLAMA_1B | {"hidden_size": 16384, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256}


def compile_layer(sizes: dict[str, Any], length: int, arch: int, dtype: torch.dtype) -> list[tuple[str, Any]]:
    """The kernels of one layer, attention aside, in their order."""
    cfg = cases.config(**sizes)
    compiled = Compiled(cfg, arch, dtype)
    ops, layer, head_dim = FusedPrompt(compiled), allocate(cfg, META, dtype).layers[0], cfg.head_dim
    kv = torch.empty(2, 4, cfg.num_key_value_heads, 8193, head_dim, device=META, dtype=dtype)
    x = torch.empty(length, cfg.hidden_size, device=META, dtype=dtype)
    rope = torch.empty(length, head_dim // 2, device=META, dtype=torch.complex64)
    slots = torch.empty(length, device=META, dtype=torch.int64)
    q = ops.qkv_rope_append(x, layer, rope, 1e-5, kv, slots, slots, head_dim)
    x = ops.linear_residual(q.flatten(1), layer.o, layer.o_bias, x)
    ops.linear_residual(ops.gate_up_silu(x, layer, 1e-5), layer.down, layer.down_bias, x)
    assert [name for name, _ in compiled.kernels] == KERNELS
    return compiled.kernels


@pytest.mark.parametrize(
    ("sizes", "arch", "dtype"),
    [
        (SMALL_QWEN3, 80, torch.float16),
        (SMALL_QWEN3, 100, torch.bfloat16),
        (LLAMA_1B, 80, torch.bfloat16),
        (LLAMA_1B, 100, torch.float16),
        (LARGE_256, 90, torch.bfloat16),
    ],
)
def test_compiles(sizes: dict[str, Any], arch: int, dtype: torch.dtype) -> None:
    """For Ampere, Hopper and Blackwell; never with the early start of PDL, whose rules these kernels do not keep."""
    for name, kernel in compile_layer(sizes, 100, arch, dtype):
        assert "griddepcontrol" not in kernel.asm["ptx"], name


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (32, 8, 80), (32, 8, 128), (8, 1, 256)])
def test_attention_of_a_padded_prefill_compiles(arch: int, heads: int, kv_heads: int, head_dim: int) -> None:
    """And fits the shared memory of the smallest of its generation: 99 KiB a program on the consumer GPUs."""
    cfg = cases.config(num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim)
    compiled = Compiled(cfg, arch, torch.bfloat16)
    kv = torch.empty(2, 4, kv_heads, 8193, head_dim, device=META, dtype=torch.bfloat16)
    for size in (8, 32, 512):
        q = torch.empty(size, heads + 2 * kv_heads, head_dim, device=META, dtype=torch.bfloat16)[:, :heads]
        FusedPrompt(compiled).placed_attention(torch.empty(3, device=META, dtype=torch.int64))(q, kv)
    for name, kernel in compiled.kernels:
        assert name == "chunk_attention_kernel"
        assert kernel.metadata.shared <= 99 * 1024
        assert "griddepcontrol" not in kernel.asm["ptx"]


@pytest.mark.parametrize("length", [1, 16, 17, 4096])
def test_one_compilation_serves_every_length(length: int) -> None:
    """Elsewhere, a length that happened to be 1 or a multiple of 16 was compiled anew, in the middle of a request."""
    made = [kernel.hash for _, kernel in compile_layer(LLAMA_1B, length, 90, torch.bfloat16)]
    assert made == [kernel.hash for _, kernel in compile_layer(LLAMA_1B, 100, 90, torch.bfloat16)]


def test_hopper_moves_16_bytes_at_a_time(tmp_path: Path) -> None:
    """These kernels do little but read and write, so that is what their speed depends on; and nothing spills."""
    for name, kernel in compile_layer(LLAMA_1B, 100, 90, torch.bfloat16):
        code = disassemble(kernel.asm["cubin"], tmp_path)
        wide = [line for line in code if re.search(r"(LDG|STG)\.E\S*\.128", line)]
        assert any("LDG" in line for line in wide), f"{name} reads less than 16 bytes at a time"
        assert any("STG" in line for line in wide), f"{name} writes less than 16 bytes at a time"
        assert not any("STL" in line or "LDL" in line for line in code), f"{name} spills registers"

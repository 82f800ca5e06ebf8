"""The kernels compile for GPUs that are not here, and to the instructions that their speed depends on.

Triton needs no GPU to compile for one. `FusedOps` is run on shapes alone (meta tensors) with a launcher that compiles
what it is given instead: so these are the very specialisations that a model would run.
"""

import re
import subprocess
from collections import deque
from pathlib import Path
from typing import Any

import kernel_cases as cases
import pytest
import torch

from minillm.config import ModelConfig
from minillm.kernels import launch
from minillm.kernels.fused import FusedOps
from minillm.sampling import Mode
from minillm.state import DecodeState
from minillm.weights import allocate

triton = pytest.importorskip("triton", reason="triton, which comes with PyTorch's CUDA wheels, is not installed")
TensorDescriptor = pytest.importorskip("triton.tools.tensor_descriptor").TensorDescriptor

META, CPU = torch.device("meta"), torch.device("cpu")
POINTERS = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32",
    torch.int64: "*i64", torch.int32: "*i32", torch.uint8: "*u8",
}  # fmt: skip
SHARED_MEMORY = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}  # a program
LLAMA_1B = {
    "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
}  # fmt: skip
SMALL_QWEN3 = {
    "model_type": "qwen3", "vocab_size": 1000, "hidden_size": 576, "intermediate_size": 1536,
    "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 80,
}  # fmt: skip


PROJECTIONS = {"linear_kernel", "gate_up_kernel", "qkv_parts_kernel", "best_logits_kernel"}  # on tensor cores
FINISHES = ("greedy_finish_kernel", "best_finish_kernel", "measure_kernel", "draw_kernel")


def value_is_one(value: object) -> bool:
    return isinstance(value, int) and value == 1


class Compiled(FusedOps):
    """Compiles instead of launching; `kernels` are (name, what was compiled)."""

    def __init__(self, config: ModelConfig, arch: int, dtype: torch.dtype) -> None:
        super().__init__(config, 32, 8192, CPU)
        self.arch, self.kernels = arch, []
        self.fit(divmod(arch, 10), SHARED_MEMORY[arch])

    def _run(
        self, kernel: Any, grid: tuple[int, ...], warps: int, *args: object, fence: bool = False, **constants: int
    ) -> None:
        """Describe the arguments as Triton's launcher would: 1 is a constant, multiples of 16 are known to be such."""
        signature: dict[str, str] = {}
        constexprs: dict[tuple[int], object] = {}
        attributes: dict[tuple[int], list[list[object]]] = {}
        values = {**dict(zip(kernel.arg_names, args, strict=False)), **constants, "PDL": self.pdl and not fence}
        for index, parameter in enumerate(kernel.params):
            value, aligned = values[parameter.name], False
            if parameter.is_constexpr or value is None or (value_is_one(value) and not parameter.do_not_specialize):
                kind, constexprs[(index,)] = "constexpr", value
            elif isinstance(value, TensorDescriptor):
                kind = f"tensordesc<{POINTERS[value.base.dtype][1:]}{list(value.block_shape)}>"
            elif isinstance(value, torch.Tensor):
                kind, aligned = POINTERS[value.dtype], True
            else:
                kind, aligned = (
                    ("fp32", False)
                    if isinstance(value, float)
                    else ("i32", value % 16 == 0 and not parameter.do_not_specialize)
                )
            signature[parameter.name] = kind
            if aligned:
                attributes[(index,)] = [["tt.divisibility", 16]]
        source = triton.compiler.ASTSource(kernel, signature, constexprs, attributes)
        target = triton.backends.compiler.GPUTarget("cuda", self.arch, 32)
        options = {"num_warps": warps, "enable_fp_fusion": True, "launch_pdl": self.pdl and not fence}
        self.kernels.append((kernel.__name__, triton.compile(source, target=target, options=options)))


def compile_step(
    sizes: dict[str, Any], n: int, arch: int, dtype: torch.dtype, maps: bool = True
) -> list[tuple[str, Any]]:
    """All kernels of a decode step of n rows, each once. maps: whether tensor maps are used where there can be any."""
    cfg = cases.config(**sizes)
    ops, weights = Compiled(cfg, arch, dtype), allocate(cfg, META, dtype)
    ops.tma = ops.tma and maps
    layer, eps, head_dim = weights.layers[0], cfg.rms_norm_eps, cfg.head_dim
    kv = torch.empty(2, 4, cfg.num_key_value_heads, 8193, head_dim, device=META, dtype=dtype)
    rope_table = torch.empty(8192, head_dim // 2, device=META, dtype=torch.complex64)
    state = DecodeState.allocate(n, cfg.vocab_size, META)
    x, rope, slots = ops.begin(state, weights.embed, rope_table, 8192, layer.input_norm)
    attend = ops.row_attention(state, 0)
    q = ops.qkv_rope_append(x, layer, rope, eps, kv, state.rows, slots, head_dim)
    x = ops.linear_residual(attend(q, kv), layer.o, layer.o_bias, x, layer.post_norm)
    x = ops.linear_residual(ops.gate_up_silu(x, layer, eps), layer.down, layer.down_bias, x, weights.norm)
    if ops.finds_best(n):
        ops.advance_to_best(x, weights.norm, weights.lm_head, eps, state)
    logits = ops.norm_logits(x, weights.norm, weights.lm_head, eps)
    for mode in (Mode.GREEDY, Mode.SAMPLED, Mode.FILTERED):
        ops.sample_and_advance(logits, state, mode)
    return ops.kernels


@pytest.mark.parametrize(
    ("sizes", "n", "arch", "dtype"),
    [
        (SMALL_QWEN3, 1, 80, torch.float16),
        (SMALL_QWEN3, 4, 100, torch.bfloat16),
        (LLAMA_1B, 8, 80, torch.bfloat16),
        (LLAMA_1B, 32, 100, torch.bfloat16),  # whose tensor memory is 512 columns wide
    ],
)
def test_compiles(sizes: dict[str, Any], n: int, arch: int, dtype: torch.dtype) -> None:
    """Ampere without the features of Hopper, and Blackwell."""
    for name, kernel in compile_step(sizes, n, arch, dtype):
        assert ("griddepcontrol" in kernel.asm["ptx"]) == (arch >= 90 and name != "begin_kernel"), name


@pytest.mark.parametrize("n", [1, 8])
def test_hopper_overlaps_every_kernel_and_none_reads_too_early(n: int) -> None:
    """Each allows the next and waits for the one before; what ends a greedy step loads nothing before its wait.

    Guards a fault that no result need show: a kernel without a wait, which reads what is still being written.
    """
    for name, kernel in compile_step(LLAMA_1B, n, 90, torch.bfloat16):
        ptx = kernel.asm["ptx"]
        for word in ("griddepcontrol.launch_dependents", "griddepcontrol.wait"):
            assert (word in ptx) == (name != "begin_kernel"), f"{name}: {word}"
        if name in ("greedy_finish_kernel", "best_finish_kernel"):
            assert not any("ld.global" in line for line in executed_before_the_wait(ptx)), name


@pytest.mark.parametrize(("arch", "n"), [(86, 8), (89, 32), (90, 32), (120, 8)])
def test_kernels_find_the_shared_memory_that_they_need(arch: int, n: int) -> None:
    """Shapes measured on an H200 want twice of what other GPUs have, where a launch of them fails."""
    needed = {name: kernel.metadata.shared for name, kernel in compile_step(LLAMA_1B, n, arch, torch.bfloat16)}
    assert max(needed.values()) > 40 << 10
    assert all(size <= SHARED_MEMORY[arch] for size in needed.values()), needed


def disassemble(cubin: bytes, folder: Path) -> list[str]:
    """The instructions that the GPU runs, in order; nvdisasm comes with Triton."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    if not tool.exists():
        pytest.skip("this build of triton brings no nvdisasm")
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    return subprocess.run([tool, "-c", file], capture_output=True, text=True, check=True).stdout.splitlines()


def test_hopper_reads_ahead_of_the_wait(tmp_path: Path) -> None:
    """In every kernel of a layer the first tile is requested with 16-byte loads before the wait, and nothing spills.

    The wait is ACQBULK in SASS. A compiler that moved the loads behind it, or made them narrower, would give right
    results at three quarters of the speed.
    """
    for name, kernel in compile_step(LLAMA_1B, 1, 90, torch.bfloat16):
        if name == "begin_kernel":
            continue
        code = disassemble(kernel.asm["cubin"], tmp_path)
        allow, wait = (min(i for i, line in enumerate(code) if word in line) for word in ("PREEXIT", "ACQBULK"))
        early = [line for line in code[:wait] if "LDG.E" in line and ".128" in line]
        assert allow < wait, f"{name} must allow the next kernel before it waits"
        assert not any("STL" in line or "LDL" in line for line in code), f"{name} spills registers"
        if name == "draw_kernel":  # the noise of 2048 tokens, 8 a thread, needs no logits: a logarithm, a reciprocal
            assert sum("MUFU.RCP" in line for line in code[:wait]) >= 8, "draw_kernel waits before it makes its noise"
        if name not in FINISHES:  # all that is large there was just written
            assert len(early) >= 4, f"{name} requests {len(early)} x 16 bytes a thread before it waits"
        if name not in (*FINISHES, "attention_kernel"):
            assert any(".EF." in line for line in early), f"{name} keeps weights in the cache"


def executed_before_the_wait(ptx: str) -> list[str]:
    """The lines from the entry to the first wait, along unconditional branches; no conditional one is taken."""
    lines = [line.strip() for line in ptx[ptx.index(".entry") :].splitlines()]
    at, found = 0, []
    while "griddepcontrol.wait" not in lines[at]:
        found.append(lines[at])
        at = lines.index(lines[at].split()[1].rstrip(";") + ":") if lines[at].startswith("bra.uni") else at + 1
    return found


def waits(ptx: str) -> list[list[str]]:
    """For each wait in the code, what is executed before it: along the shortest way of branches from the entry."""
    lines = [re.sub(r"\s*//.*", "", line).strip() for line in ptx[ptx.index(".entry") :].splitlines()]
    labels = {line.rstrip(":"): at for at, line in enumerate(lines) if line.startswith("$L__BB")}
    came_from, todo = {0: -1}, deque([0])
    while todo:
        at = todo.popleft()
        target = re.search(r"\bbra(\.uni)?\s+(\$L__BB\w+)", lines[at])
        following = [labels[target[2]]] if target else []
        if not (target and not lines[at].startswith("@")) and at + 1 < len(lines):
            following.append(at + 1)
        for place in following:
            if place not in came_from:
                came_from[place] = at
                todo.append(place)
    found = []
    for at, line in enumerate(lines):
        if "griddepcontrol.wait" in line and at in came_from:
            way = [at]
            while came_from[way[-1]] >= 0:
                way.append(came_from[way[-1]])
            found.append([lines[place] for place in reversed(way)])
    return found


@pytest.mark.parametrize(("n", "late"), [(1, 0), (1, 1), (3, 1), (8, 0), (8, 1)])
def test_a_late_kernel_allows_the_next_once_its_weights_are_requested(
    n: int, late: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And before its wait; any other allows it first. In the instructions that run, which the compiler has ordered."""
    choose = launch.tile
    monkeypatch.setattr(launch, "tile", lambda *args: choose(*args)._replace(late=late))
    seen = 0
    for name, kernel in compile_step(LLAMA_1B, n, 90, torch.bfloat16):
        if name in (*FINISHES, "begin_kernel", "attention_kernel"):
            continue
        code = disassemble(kernel.asm["cubin"], tmp_path)
        weights = "UTMALDG" if n > launch.PLAIN_ROWS else ".EF."
        allow, wait, read = (
            min(i for i, line in enumerate(code) if word in line) for word in ("PREEXIT", "ACQBULK", weights)
        )
        assert allow < wait, name
        assert (read < allow) == bool(late), name
        seen += 1
    assert seen >= 5


@pytest.mark.parametrize(("n", "dtype"), [(8, torch.bfloat16), (32, torch.bfloat16), (8, torch.float16)])
def test_the_past_is_requested_before_a_wait_in_a_loop_and_nothing_else(n: int, dtype: torch.dtype) -> None:
    """Such a wait stands in the first turn of a pipelined loop, and only weights and the cache may be moved above it.

    Guards a fault of compilers: it does not hold back the copies of the turns ahead. That is wanted for what nobody
    writes, and would be a race for activations, which are ordinary loads. Before the wait there are 8 KB and more, and
    of ordinary loads only those of what no step writes, by name.
    """
    early = {"attention_kernel": 2, "linear_kernel": 1}  # lengths; the next gain
    found = set()
    for name, kernel in compile_step(LLAMA_1B, n, 90, dtype):
        if name not in (*PROJECTIONS, "attention_kernel"):
            continue
        found.add(name)
        copy = "cp.async.cg" if name == "attention_kernel" else "cp.async.bulk.tensor"
        copied = [way for way in waits(kernel.asm["ptx"]) if any(copy in line for line in way)]
        assert len(copied) == 1, f"{name} has {len(copied)} waits with copies ahead of them"
        threads = 16 * 32 * kernel.metadata.num_warps * sum("cp.async.cg" in line for line in copied[0])
        maps = sum(int(line.split(",")[-1].strip(" ;")) for line in copied[0] if "expect_tx" in line)
        loads = [line for line in copied[0] if "ld.global" in line]
        assert threads + maps >= 2 * 4096, f"{name} copies too little ahead"
        assert len(loads) <= early.get(name, 0), f"{name} loads ahead: {loads}"
    assert len(found) == 5

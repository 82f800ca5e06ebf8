"""How the programs of a GPU wait for each other: between two kernels, and within one.

**Between kernels: programmatic dependent launch** (PDL, from compute capability 9.0 on). Normally a kernel starts when
the one before has ended and its memory is flushed, and the GPU idles for microseconds at every boundary. With PDL a
kernel may start as soon as every program of the one before has *allowed* it (`allow_next`), and then waits at a point
of its own choice for the one before to end (`wait_for_previous`). What it loads before that point crosses the boundary
for free, and in a decode step almost all bytes are weights, which nobody writes. The rules that keep it right:

1. `allow_next` gives no permission to read anything: only the wait does. So it may come first, and mostly does. But the
   programs of a next kernel that find room at once request their weights at once, and those of this kernel, which are
   needed sooner, share the memory with them. Where that costs time, this kernel requests its first weights before it
   allows the next (`launch.Tile.late`): 1.5 % of a step at 1B with 32 rows, by one kernel. Which do is measured.
2. Before the wait, read only what no earlier kernel of this step writes. A kernel writes nothing before its wait.
3. *Every* program waits, also one that has nothing to do. Only then does "the kernel before has ended" imply the same
   of all kernels before that one.
4. The wait stands outside loops: the compiler moves loads of a pipelined loop above a wait inside it. Two places
   make use of that, with `wait_in_a_loop`: `gemm.py` and `group.py`.

**Within a kernel: last arrival.** Programs that share a result write their parts to memory, then count themselves in;
the one that finds all others there combines the parts, in a fixed order, so the result does not depend on who it was.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# mypy: ignore-errors


@triton.jit
def allow_next(PDL: tl.constexpr):
    """Let the next kernel start, as soon as all programs of this one have said so and there is room on the GPU."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Wait until all kernels before this one have ended and their writes can be read."""
    if PDL:
        gdc_wait()


@triton.jit
def wait_in_a_loop(PDL: tl.constexpr):
    """The same instruction as text: around what the compiler knows as a wait, newer versions pipeline no loop.

    "memory" tells it that ordinary loads and stores may not cross.
    """
    if PDL:
        tl.inline_asm_elementwise(
            "griddepcontrol.wait; // $0", "=r,~{memory}", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def last_to_arrive(counter, programs):
    """Count this program in; true for the last of `programs`, which then sees what the others wrote before.

    The barrier orders the stores of all threads of this program before the one thread that counts; `acq_rel` orders
    them for the other programs. Read their parts with cache_modifier=".cg": the L1 cache of this core knows no others.
    The counter is back at zero for the next launch.
    """
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel") == programs - 1
    if last:
        tl.store(counter, 0)
    return last

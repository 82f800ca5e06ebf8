"""The start of a decode step in one kernel: what each row feeds, and where it stands.

It does what `reference.begin` does with three selects and two gathers: an active row feeds its token at its position,
a padding row feeds token 0 at position 0 and writes to the scratch slot.

**It is the fence of the step.** It is launched in the ordinary way, so it starts when every kernel before it has ended
and all that they wrote can be read. And it never allows the next kernel (`sync.py`), which therefore starts when its
last program has *exited*. The CUDA Programming Guide ("Programmatic Dependent Launch and Synchronization") says that
this is all: "the secondary thread blocks might launch before data written by the primary kernel is visible". So a later
kernel of the step may read, before its own wait,

- what was written before this kernel: the state, and the cache up to the positions;
- never what this kernel writes: neither x nor rope nor slots. The first projection reads them after its wait, and
  attention, which may start before that wait is over, takes its lengths from the state and not from here.
"""

import triton
import triton.language as tl

# mypy: ignore-errors


@triton.jit
def begin_kernel(
    tokens, positions, active, embed, rope_table, x, rope, slots, gain, scaled, squares, scratch_slot, hidden,
    D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of a row of the embedding, rows); DP: D rounded up to a power of two.

    tokens, positions int64 [n], active bytes [n]; embed [vocab, hidden]; rope_table float32 [max_seq_len, D], cos and
    sin in turn. Results: x [n, hidden], rope float32 [n, D], slots int64 [n]; with a gain [hidden], also scaled
    [n, hidden] and squares float32 [blocks, M], as `gemm.write_stream` leaves them.
    """
    block, row = tl.program_id(0), tl.program_id(1)
    is_active = tl.load(active + row) != 0
    token = tl.where(is_active, tl.load(tokens + row), 0)
    i = block * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(embed + token * hidden + i, mask=i < hidden)
    tl.store(x + row * hidden + i, value, mask=i < hidden)
    if gain is not None:
        wide = value.to(tl.float32)
        g = tl.load(gain + i, mask=i < hidden, other=0.0).to(tl.float32)
        tl.store(scaled + row * hidden + i, (wide * g).to(scaled.dtype.element_ty), mask=i < hidden)
        tl.store(squares + block * M + row, tl.sum(tl.where(i < hidden, wide * wide, 0.0), 0))
    if block == 0:
        position = tl.load(positions + row)
        tl.store(slots + row, tl.where(is_active, position, scratch_slot))
        d = tl.arange(0, DP)
        turn = tl.load(rope_table + tl.where(is_active, position, 0) * D + d, mask=d < D)
        tl.store(rope + row * D + d, turn, mask=d < D)

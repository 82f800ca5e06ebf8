"""Each fused kernel against its definition in float64, through Triton's interpreter: no GPU needed.

The interpreter must be on before triton is imported, in all of the process. So these tests are not collected with the
others: test_kernels.py runs them in a process of their own. By hand:

    TRITON_INTERPRET=1 pytest tests/interpreted_kernels.py
"""

import math

import kernel_cases as cases
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from minillm import sampling
from minillm.cache import KVCache
from minillm.kernels import draw, launch, reference, table
from minillm.kernels import fused as fused_module
from minillm.kernels.fused import BLOCK, FusedOps
from minillm.kernels.scratch import CHUNK
from minillm.model import Llama
from minillm.sampling import Mode, SamplingParams
from minillm.state import BROKEN, DecodeState
from minillm.step import sample_and_advance
from minillm.weights import allocate, randomise

CPU, EPS, LENGTH = torch.device("cpu"), 1e-5, 150
BF16, FP16 = torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def plain_products_up_to_four_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The most that they are made for; and the interpreter has no bfloat16 matrix product."""
    monkeypatch.setattr(launch, "PLAIN_ROWS", 4)


def assert_close(got: Tensor, want: Tensor, roundings: float = 1.0) -> None:
    """The interpreter casts to bfloat16 by cutting bits off, which errs by twice as much as rounding."""
    cases.assert_close(got, want, roundings * (2 if got.dtype == BF16 else 1))


def fused(cfg, splits=launch.Splits(4, 16, 4), max_rows: int = 8) -> FusedOps:  # noqa: B008
    """With few and small splits: the interpreter needs milliseconds for a program. Scratch is poisoned."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "splits", lambda *_: splits)
        ops = FusedOps(cfg, max_rows, LENGTH, CPU)
    for scratch in vars(ops.scratch).values():
        if scratch.dtype == torch.float32:
            scratch.fill_(math.nan)
    return ops


def assert_counters_reset(ops: FusedOps) -> None:
    assert not ops.scratch.head_counters.any()
    assert not ops.scratch.block_counters.any()
    assert not ops.scratch.row_counters.any()


@pytest.mark.parametrize(("hidden", "head_dim"), [(64, 64), (BLOCK, 80), (2 * BLOCK + 16, 128)])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_begin(hidden: int, head_dim: int, dtype: torch.dtype) -> None:
    """Every bit is that of the plain operation. Two rows are padding: their token and position do not count."""
    embed = cases.random(1, CPU, dtype, 97, hidden)
    angles = torch.rand(LENGTH, head_dim // 2, generator=torch.Generator().manual_seed(2)) * 6
    rope_table = torch.polar(torch.ones_like(angles), angles)
    state = cases.state_at([0, 33, LENGTH - 1, LENGTH], 97, CPU)
    state.active[1::2] = False
    with cases.poisoned_outputs():
        got = fused(cases.config(hidden_size=hidden, head_dim=head_dim)).begin(state, embed, rope_table, LENGTH)
    x, rope, slots = got
    assert torch.equal(x, embed[[1, 0, 15, 0]])
    assert torch.equal(rope, rope_table[[0, 0, LENGTH - 1, 0]])
    assert slots.tolist() == [0, LENGTH, LENGTH - 1, LENGTH]
    for mine, plain in zip(got, reference.begin(state, embed, rope_table, LENGTH), strict=True):
        assert torch.equal(mine, plain)
        assert mine.dtype == plain.dtype


# one tile; one masked tile; several tiles; several and the last masked; rows that fill no whole program
@pytest.mark.parametrize("columns", [64, 576, 1536, 4096, 11008])
@pytest.mark.parametrize(
    ("n", "dtype", "biased"), [(1, BF16, False), (2, FP16, True), (3, BF16, True), (4, FP16, False)]
)
def test_linear_residual(columns: int, n: int, dtype: torch.dtype, biased: bool) -> None:
    weight = cases.random(1, CPU, dtype, 22, columns, scale=columns**-0.5)
    bias = cases.random(2, CPU, dtype, 22) if biased else None
    y, x = cases.random(3, CPU, dtype, n, columns), cases.random(4, CPU, dtype, n, 22)
    with cases.poisoned_outputs():
        got = fused(cases.config()).linear_residual(y, weight, bias, x)
    assert_close(got, cases.linear_residual(y, weight, bias, x))


@pytest.mark.parametrize(
    ("columns", "n", "maps"), [(64, 5, False), (576, 17, False), (1536, 32, False), (64, 5, True), (576, 17, True)]
)
def test_tensor_cores(columns: int, n: int, maps: bool) -> None:
    """From 5 rows on; float16, because the interpreter has no bfloat16 matrix product."""
    weight = cases.random(1, CPU, FP16, 40, columns, scale=columns**-0.5)
    y, x = cases.random(3, CPU, FP16, n, columns), cases.random(4, CPU, FP16, n, 40)
    ops = fused(cases.config())
    ops.tma = maps
    with cases.poisoned_outputs():
        got = ops.linear_residual(y, weight, None, x)
    assert_close(got, cases.linear_residual(y, weight, None, x))


# parts that divide the columns; a masked last part; parts that have no column at all
@pytest.mark.parametrize(("columns", "parts"), [(256, 2), (576, 4), (576, 8)])
@pytest.mark.parametrize(("biased", "maps"), [(False, False), (True, True)])
def test_columns_in_parts(columns: int, parts: int, biased: bool, maps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice, because the first leaves the counters for the second; the parts of the first are poison by then."""
    monkeypatch.setitem(table.TILES, (columns, 64, 8), (32, 128, 4, parts))
    weight = cases.random(1, CPU, FP16, 64, columns, scale=columns**-0.5)
    bias = cases.random(2, CPU, FP16, 64) if biased else None
    y, x = cases.random(3, CPU, FP16, 6, columns), cases.random(4, CPU, FP16, 6, 64)
    ops = fused(cases.config(hidden_size=64))
    ops.tma = maps
    for _ in range(2):
        ops.scratch.product_parts.fill_(math.nan)
        with cases.poisoned_outputs():
            got = ops.linear_residual(y, weight, bias, x)
        assert_close(got, cases.linear_residual(y, weight, bias, x))
        assert not ops.scratch.block_counters.any()


# groups that divide the columns; a masked last group; groups that have no column at all; in parts besides, of which
# the last end early; in parts that divide the columns; a few columns more than groups of whole tiles have
@pytest.mark.parametrize(
    ("columns", "parts", "groups"),
    [(512, 1, 4), (576, 1, 8), (192, 1, 8), (1152, 2, 4), (1024, 2, 4), (2064, 8, 4)],
)
@pytest.mark.parametrize(("n", "maps"), [(6, False), (17, False), (6, True)])
def test_columns_in_groups(
    columns: int, parts: int, groups: int, n: int, maps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows that end in the middle of a program."""
    monkeypatch.setitem(table.TILES, (columns, 40, launch.row_bucket(n)), (16, 64, groups, parts, groups))
    weight = cases.random(1, CPU, FP16, 40, columns, scale=columns**-0.5)
    bias = cases.random(2, CPU, FP16, 40)
    y, x = cases.random(3, CPU, FP16, n, columns), cases.random(4, CPU, FP16, n, 40)
    ops = fused(cases.config(hidden_size=40), max_rows=32)
    ops.tma = maps
    with cases.poisoned_outputs():
        got = ops.linear_residual(y, weight, bias, x)
    assert_close(got, cases.linear_residual(y, weight, bias, x))


@pytest.mark.parametrize("n", [3, 4])
@pytest.mark.parametrize("columns", [64, 1152])
def test_tensor_cores_from_three_rows_on(n: int, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU runs them, with the shapes of the rule.

    Guards a fault: 1,152 columns are nine tiles, which the rule cuts into parts of three, three, three and none; the
    last read what lies behind the matrix, and zero times that is NaN where that is.
    """
    monkeypatch.setattr(launch, "PLAIN_ROWS", 2)
    memory = torch.full((64 * columns + 8192,), math.nan, dtype=FP16)
    weight = memory[: 64 * columns].view(64, columns)
    weight.copy_(cases.random(1, CPU, FP16, 64, columns, scale=columns**-0.5))
    y, x = cases.random(3, CPU, FP16, n, columns), cases.random(4, CPU, FP16, n, 64)
    with cases.poisoned_outputs():
        got = fused(cases.config(hidden_size=64)).linear_residual(y, weight, None, x)
    assert_close(got, cases.linear_residual(y, weight, None, x))


@pytest.mark.parametrize("n", [6, 17])
@pytest.mark.parametrize(("parts", "groups"), [(1, 1), (2, 1), (1, 4)])
def test_a_stream_that_is_prepared_for_its_norm(
    n: int, parts: int, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What writes a residual stream leaves gain * x and the sums of squares; what reads another stream ignores them.

    In bfloat16 on a GPU; here float16, because the interpreter has no bfloat16 matrix product.
    """
    monkeypatch.setattr(fused_module, "PREPARED", (FP16,))
    cfg = cases.config(hidden_size=576, num_attention_heads=3, num_key_value_heads=1)
    for columns in (576, cfg.num_attention_heads * cfg.head_dim):
        monkeypatch.setitem(table.TILES, (columns, 576, launch.row_bucket(n)), (32, 64, 4, parts, groups))
    layer, ops = cases.random_layer(cfg, 1, CPU, FP16), fused(cfg, max_rows=32)
    embed, y = cases.random(2, CPU, FP16, 97, 576), cases.random(3, CPU, FP16, n, layer.o.shape[1])
    rope_table = torch.ones(LENGTH, cfg.head_dim // 2, dtype=torch.complex64)
    state, bound = cases.state_at([0] * n, 97, CPU), 2 * torch.finfo(FP16).eps
    kv = torch.zeros(2, n, 1, 8, cfg.head_dim, dtype=FP16)

    def check(got: Tensor, want: Tensor) -> None:
        assert (got.double() - want).abs().max() < bound * want.abs().max()

    with cases.poisoned_outputs():
        x, rope, slots = ops.begin(state, embed, rope_table, 7, layer.input_norm)
        q = ops.qkv_rope_append(x, layer, rope, EPS, kv, state.rows, slots, cfg.head_dim)
        check(q.flatten(1), cases.linear(cases.rms_norm(x, layer.input_norm, EPS), layer.qkv, None)[:, : q[0].numel()])
        x = ops.linear_residual(y, layer.o, None, x, layer.post_norm)
        check(ops.gate_up_silu(x, layer, EPS), cases.gate_up_silu(x, layer, EPS))
        check(
            ops.norm_logits(x, layer.post_norm, embed, EPS),
            cases.linear(cases.rms_norm(x, layer.post_norm, EPS), embed, None),
        )
        cases.check_best(ops, x, layer.post_norm, cases.random(4, CPU, FP16, 97, 576), EPS, state)
        other = x + 1
        check(ops.gate_up_silu(other, layer, EPS), cases.gate_up_silu(other, layer, EPS))
        x = ops.linear_residual(y, layer.o, None, x, layer.input_norm)  # prepared, but for another norm
        check(ops.gate_up_silu(x, layer, EPS), cases.gate_up_silu(x, layer, EPS))


@pytest.mark.parametrize(("hidden", "n"), [(64, 16), (576, 6)])
def test_tensor_cores_with_a_norm(hidden: int, n: int) -> None:
    """The normalised activations are rounded to float16 before the product, hence the bound. They are large before."""
    cfg = cases.config(hidden_size=hidden)
    layer, x = cases.random_layer(cfg, 1, CPU, FP16), cases.random(2, CPU, FP16, n, hidden, scale=10000)
    with cases.poisoned_outputs():
        got = fused(cfg).gate_up_silu(x, layer, EPS)
    want = cases.gate_up_silu(x, layer, EPS)
    assert (got.double() - want).abs().max() < 2 * torch.finfo(FP16).eps * want.abs().max()


@pytest.mark.parametrize(("parts", "groups"), [(4, 1), (1, 4)])
def test_a_norm_needs_all_columns(parts: int, groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shape that was measured in bfloat16 shares them out, which a product that computes a norm, as in float16,
    must not."""
    cfg = cases.config(hidden_size=576)
    layer, x = cases.random_layer(cfg, 1, CPU, FP16), cases.random(2, CPU, FP16, 6, 576)
    for weight in (layer.qkv, layer.gate_up):
        monkeypatch.setitem(table.TILES, (576, weight.shape[0], 8), (32, 64, 4, parts, groups))
    kv, slots = torch.zeros(2, 6, 1, 8, 64, dtype=FP16), torch.zeros(6, dtype=torch.int64)
    rope = torch.ones(6, 32, dtype=torch.complex64)
    with cases.poisoned_outputs():
        q = fused(cfg).qkv_rope_append(x, layer, rope, EPS, kv, torch.arange(6), slots, 64)
        hidden = fused(cfg).gate_up_silu(x, layer, EPS)
    for got, want in (
        (q, cases.qkv(x, layer, torch.zeros(6, 32), EPS, 2, 1)[0]),
        (hidden, cases.gate_up_silu(x, layer, EPS)),
    ):
        assert (got.double() - want).abs().max() < 2 * torch.finfo(FP16).eps * want.abs().max()


@pytest.mark.parametrize(
    ("family", "n"),
    [("llama", 1), ("llama", 6), ("llama", 9), ("llama", 33), ("qwen3", 1), ("qwen3", 6), ("qwen3", 33)],
)
def test_every_row_of_a_step_gets_its_own_logits(family: str, n: int) -> None:
    """With 33 rows and more, q is a part of q, k and v, and its rows are not neighbours: attention once read them as if
    they were, and all rows but the first wrote nonsense. Float16: the interpreter has no bfloat16 matrix product."""
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 4, "num_key_value_heads": 2}
    cfg = cases.config(**sizes, num_hidden_layers=2 if 1 < n < 10 else 1, model_type=family)  # the others take long
    weights = allocate(cfg, CPU, FP16)
    torch.manual_seed(0)
    randomise(weights, 0.15)
    cache, state = KVCache(cfg, n, LENGTH, CPU, FP16), DecodeState.allocate(n, cfg.vocab_size, CPU)
    cache.kv.normal_(generator=torch.Generator().manual_seed(1))
    exact = KVCache(cfg, n, LENGTH, CPU, torch.float32)
    exact.kv.copy_(cache.kv)
    state.tokens.copy_(torch.arange(n) * 7 % cfg.vocab_size)
    state.positions.copy_(torch.arange(n) % (LENGTH - 1))
    state.active.fill_(True)
    splits = launch.Splits(1, 64, 4) if n > 8 else launch.Splits(4, 16, 4)
    got = Llama(cfg, weights, LENGTH, fused(cfg, splits, max_rows=n)).decode(state, cache, LENGTH)
    for tensor in weights.tensors():
        tensor.data = tensor.data.float()
    want = Llama(cfg, weights, LENGTH).decode(state, exact, LENGTH)
    error = (got - want).norm(dim=1) / want.norm(dim=1)
    assert error.max() < 8 * torch.finfo(FP16).eps
    assert (cache.kv.float() - exact.kv).norm() < 8 * torch.finfo(FP16).eps * exact.kv.norm()


@pytest.mark.parametrize(("hidden", "inter"), [(64, 48), (576, 33), (2560, 5)])
@pytest.mark.parametrize(
    ("n", "dtype", "biased"), [(1, FP16, True), (2, BF16, False), (3, FP16, False), (4, BF16, True)]
)
def test_gate_up_silu(hidden: int, inter: int, n: int, dtype: torch.dtype, biased: bool) -> None:
    cfg = cases.config(hidden_size=hidden, intermediate_size=inter, mlp_bias=biased)
    layer, x = cases.random_layer(cfg, 1, CPU, dtype), cases.random(2, CPU, dtype, n, hidden, scale=3)
    with cases.poisoned_outputs():
        got = fused(cfg).gate_up_silu(x, layer, EPS)
    assert_close(got, cases.gate_up_silu(x, layer, EPS))


def test_a_norm_of_large_numbers_does_not_overflow() -> None:
    """In float16 the square of a number above 256 is infinite, and residual streams do reach that."""
    cfg = cases.config()
    layer, x = cases.random_layer(cfg, 1, CPU, FP16), cases.random(2, CPU, FP16, 1, 64, scale=10000)
    assert_close(fused(cfg).gate_up_silu(x, layer, EPS), cases.gate_up_silu(x, layer, EPS))


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("hidden", [64, 2560])
def test_norm_logits(n: int, hidden: int) -> None:
    weight, gain = cases.random(1, CPU, BF16, 37, hidden, scale=hidden**-0.5), cases.random(2, CPU, BF16, hidden)
    x = cases.random(3, CPU, BF16, n, hidden)
    with cases.poisoned_outputs():
        got = fused(cases.config()).norm_logits(x, gain, weight, EPS)
    assert got.dtype == torch.float32
    assert_close(got, cases.linear(cases.rms_norm(x, gain, EPS), weight, None))


FAMILIES = {"llama": {}, "qwen2": {"model_type": "qwen2"}, "qwen3": {"model_type": "qwen3"}}


@pytest.mark.parametrize(
    ("family", "head_dim", "heads", "kv_heads", "hidden", "n", "dtype"),
    [
        ("llama", 64, 3, 1, 576, 1, BF16),
        ("llama", 80, 2, 2, 64, 2, FP16),
        ("qwen2", 96, 2, 1, 64, 3, BF16),
        ("llama", 128, 2, 1, 64, 4, BF16),
        ("qwen2", 256, 1, 1, 64, 1, FP16),
        ("qwen3", 80, 2, 1, 64, 1, BF16),
        ("qwen3", 128, 3, 1, 64, 4, FP16),
    ],
)
def test_qkv_rope_append(
    family: str, head_dim: int, heads: int, kv_heads: int, hidden: int, n: int, dtype: torch.dtype
) -> None:
    """q is right, K and V stand in their slots, and every other bit of the cache is as it was.

    The last of several rows is padding: it writes to the scratch slot. Rows of the cache are not those of the batch.
    """
    sizes = {"hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    cfg = cases.config(**sizes, **FAMILIES[family])
    layer, x = cases.random_layer(cfg, 1, CPU, dtype), cases.random(2, CPU, dtype, n, hidden)
    angles = torch.rand(n, head_dim // 2, generator=torch.Generator().manual_seed(3)) * 6
    rope = torch.polar(torch.ones_like(angles), angles)
    kv = torch.full((2, 4, kv_heads, LENGTH + 1, head_dim), math.nan, dtype=dtype)
    rows, slots = torch.tensor([2, 0, 3, 1])[:n], torch.tensor([5, 0, LENGTH - 1, LENGTH])[:n]
    if n > 1:
        slots[-1] = LENGTH
    with cases.poisoned_outputs():
        q = fused(cfg).qkv_rope_append(x, layer, rope, EPS, kv, rows, slots, head_dim)
    written = kv[:, rows, :, slots]  # [n, 2, kv_heads, head_dim]
    for got, want in zip((q, *written.unbind(1)), cases.qkv(x, layer, angles, EPS, heads, kv_heads), strict=True):
        if family == "qwen3":  # the projection is rounded once more, before its norm: an error relative to the head
            error = (got.double() - want).abs().amax(-1)
            assert (error <= 3 * torch.finfo(dtype).eps * want.abs().amax(-1)).all()
        else:
            assert_close(got, want)
    kv[:, rows, :, slots] = math.nan
    assert kv.isnan().all()


ATTENTION = [  # heads, kv heads, head_dim
    (2, 1, 64), (3, 1, 80), (2, 2, 96), (9, 3, 64), (2, 1, 128), (1, 1, 256),
]  # fmt: skip
BORDERS = [[0], [1, 0], [15, 16, 17], [63, 64, 65, LENGTH - 1]]  # tiles of 16 tokens, 4 splits


def attend(ops: FusedOps, q: Tensor, kv: Tensor, positions: list[int]) -> Tensor:
    with cases.poisoned_outputs():
        return ops.row_attention(cases.state_at(positions, 97, CPU), kv.shape[3] - 1)(q, kv)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), ATTENTION)
@pytest.mark.parametrize(("positions", "dtype"), [(BORDERS[0], BF16), (BORDERS[1], FP16), (BORDERS[2], BF16)])
def test_attention(heads: int, kv_heads: int, head_dim: int, positions: list[int], dtype: torch.dtype) -> None:
    cfg = cases.config(hidden_size=36, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim)
    ops, q = fused(cfg), cases.random(1, CPU, dtype, len(positions), heads, head_dim)
    kv = cases.poisoned_cache(2, CPU, dtype, 4, kv_heads, LENGTH + 1, head_dim, positions)
    assert_close(attend(ops, q, kv, positions), cases.attention(q, kv, positions))
    assert_counters_reset(ops)


def test_attention_of_padding() -> None:
    """A row that is not active sees position 0, wherever it stood when it was: the rest of its cache is NaN here."""
    ops, q = fused(cases.config()), cases.random(1, CPU, BF16, 3, 2, 64)
    kv = cases.poisoned_cache(2, CPU, BF16, 4, 1, LENGTH + 1, 64, [20, 0, 40])
    state = cases.state_at([20, 99, 40], 97, CPU)
    state.active[1] = False
    with cases.poisoned_outputs():
        got = ops.row_attention(state, 0)(q, kv)
    assert_close(got, cases.attention(q, kv, [20, 0, 40]))
    assert_counters_reset(ops)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_attention_at_the_borders_of_splits(seed: int) -> None:
    """One tile a split, all splits, and two tiles a split, in one batch; large scores, so that maxima differ."""
    ops, positions = fused(cases.config()), BORDERS[3]
    q = cases.random(seed, CPU, BF16, 4, 2, 64, scale=4)
    kv = cases.poisoned_cache(seed, CPU, BF16, 4, 1, LENGTH + 1, 64, positions)
    first = attend(ops, q, kv, positions)
    assert_close(first, cases.attention(q, kv, positions))
    assert_counters_reset(ops)
    assert torch.equal(first, attend(ops, q, kv, positions))


# the last has more heads than are merged at once
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 1, 64), (6, 2, 80), (5, 1, 256)])
@pytest.mark.parametrize("positions", [[17, 63], [127, 128], [LENGTH - 1, 0], [16, 3]])
def test_long_attention(heads: int, kv_heads: int, head_dim: int, positions: list[int]) -> None:
    """The way of long contexts, from 18 tokens on; float16, because the interpreter has no bfloat16 matrix product.
    Two roundings: the probabilities are float16 in the second product."""
    cfg = cases.config(hidden_size=36, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim)
    q = cases.random(1, CPU, FP16, len(positions), heads, head_dim)
    kv = cases.poisoned_cache(2, CPU, FP16, 4, kv_heads, LENGTH + 1, head_dim, positions)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "LONG_FROM", 18)
        ops = fused(cfg, launch.Splits(2, 16, 4))
        assert ops.kv_lengths(LENGTH) == [17, LENGTH]
    for kv_len in (LENGTH, 17) if max(positions) < 17 else (LENGTH,):  # 17: where no row is long, a kernel for that
        with cases.poisoned_outputs():
            got = ops.row_attention(cases.state_at(positions, 97, CPU), kv_len)(q, kv)
        want = cases.attention(q, kv, positions)
        assert (got.double() - want).abs().max() < 2 * torch.finfo(FP16).eps * want.abs().max()
        assert_counters_reset(ops)


@pytest.mark.parametrize(
    ("family", "heads", "kv_heads", "head_dim", "parts", "maps"),
    [
        ("llama", 4, 2, 64, 1, False),
        ("llama", 3, 1, 80, 2, False),
        ("qwen2", 4, 2, 64, 4, True),
        ("qwen2", 9, 1, 64, 1, False),
    ],
)
def test_attention_that_finishes_the_projection(
    family: str, heads: int, kv_heads: int, head_dim: int, parts: int, maps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 8 rows: one token, the borders of tiles and splits, and two padding rows. In parts as in bfloat16 on a GPU."""
    monkeypatch.setattr(fused_module, "PREPARED", (FP16,))
    sizes = {"hidden_size": 144, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    cfg, size = cases.config(**sizes, **FAMILIES[family]), (heads + 2 * kv_heads) * head_dim
    monkeypatch.setitem(table.TILES, (144, size, 8), (64, 32, 4, parts))
    ops = fused(cfg, launch.Splits(1, 16, 4))
    ops.tma = maps
    state = cases.state_at([0, 1, 15, 16, 31, 32, 70, LENGTH - 1], 97, CPU)
    state.active[[3, 6]] = False
    past = torch.where(state.active, state.positions, 0).sub(1).tolist()
    kv = cases.poisoned_cache(2, CPU, FP16, 8, kv_heads, LENGTH + 1, head_dim, past)
    angles = torch.rand(LENGTH, head_dim // 2, generator=torch.Generator().manual_seed(3)) * 6
    layer, embed = cases.random_layer(cfg, 1, CPU, FP16), cases.random(3, CPU, FP16, 97, 144)
    cases.check_attention_that_finishes(ops, cfg, layer, embed, kv, state, angles)


@pytest.mark.parametrize("n", [6, 17])
@pytest.mark.parametrize("maps", [False, True])
def test_a_greedy_step_without_logits(n: int, maps: bool) -> None:
    """Equal logits all over the vocabulary, of which the first counts; rows that end. Vocabularies end in a program."""
    cfg = cases.config(vocab_size=97)
    ops, weight = fused(cfg, max_rows=n), cases.random(1, CPU, FP16, 31, 64)[torch.arange(97) * 7 % 31].contiguous()
    ops.tma = maps
    x, state = cases.random(2, CPU, FP16, n, 64), cases.sampled_state(n, 97, CPU, 3)
    cases.check_best(ops, x, torch.ones(64, dtype=FP16), weight, EPS, state)


@pytest.mark.parametrize("maps", [False, True])
def test_a_greedy_step_without_logits_counts_what_there_is(maps: bool) -> None:
    """Guards three faults: of equal neighbours the last was taken; the zeros that a tensor map reads beyond the
    vocabulary won where all logits are negative; and one NaN among the logits of a row was passed over."""
    ops = fused(cases.config(vocab_size=97), max_rows=6)
    ops.tma = maps
    weight = -cases.random(1, CPU, FP16, 49, 64).abs()[torch.arange(97) // 2]
    x, norm, state = cases.random(2, CPU, FP16, 6, 64).abs(), torch.ones(64, dtype=FP16), decode_state(6, 97)
    cases.check_best(ops, x, norm, weight, EPS, state)
    weight[40] = math.nan
    cases.check_best(ops, x, norm, weight, EPS, state)
    ops.advance_to_best(x, norm, weight, EPS, state)
    assert state.output[:, :2].tolist() == [[40, BROKEN]] * 6


@pytest.mark.parametrize(("heads", "kv_heads", "number"), [(2, 1, 1), (3, 1, 2), (7, 1, 1), (4, 2, 4)])
def test_attention_of_many_rows(heads: int, kv_heads: int, number: int) -> None:
    """From 8 rows on, groups are read together at every length: one token, the borders of tiles and splits, all."""
    cfg = cases.config(num_attention_heads=heads, num_key_value_heads=kv_heads)
    positions = [0, 1, 15, 16, 17, 32, 63, 64, LENGTH - 1]
    q = cases.random(1, CPU, FP16, len(positions), heads, cfg.head_dim)
    kv = cases.poisoned_cache(2, CPU, FP16, len(positions), kv_heads, LENGTH + 1, cfg.head_dim, positions)
    ops = fused(cfg, launch.Splits(number, 16, 4), max_rows=9)
    got, want = attend(ops, q, kv, positions), cases.attention(q, kv, positions)
    assert (got.double() - want).abs().max() < 2 * torch.finfo(FP16).eps * want.abs().max()
    assert_counters_reset(ops)


def decode_state(rows: int, vocab: int) -> DecodeState:
    """Rows that go on, end by limit, end by a token, and do not take part."""
    state = DecodeState.allocate(rows, vocab, CPU)
    for row in range(rows):
        limit = 12 if row % 4 == 1 else 100
        state.admit(row, [3] * (11 if row % 4 == 1 else 5 + row), limit, [7, vocab - 1], SamplingParams(), row)
    state.active[3::4] = False
    return state


@pytest.mark.parametrize("vocab", [97, CHUNK, 2 * CHUNK + 5])
@pytest.mark.parametrize("seed", [1, 2])
def test_greedy_finish(vocab: int, seed: int) -> None:
    """Everything in the state is as after `sample_and_advance`; ties are everywhere, and go to the lowest index."""
    torch.manual_seed(seed)
    cfg, want = cases.config(vocab_size=vocab), decode_state(4, vocab)
    logits = cases.guarded(torch.randint(-5, 5, (4, vocab)).float())
    if seed == 2:
        logits[:, 7] = 9  # an end token, tied with the last one
        logits[2, -1] = 9
    ops, got = fused(cfg), cases.copy_of(want)
    for _ in range(2):
        ops.sample_and_advance(logits, got, Mode.GREEDY)
        sample_and_advance(logits, want, Mode.GREEDY)
        cases.assert_same_state(got, want)
    assert_counters_reset(ops)


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_broken_rows_are_marked(value: float, mode: Mode) -> None:
    """One row is broken, which changes nothing for the other. Its token is of no use, but within the vocabulary."""
    vocab = CHUNK + 100
    cfg, want = cases.config(vocab_size=vocab), decode_state(2, vocab)
    logits = torch.zeros(2, vocab)
    if value < 0:
        logits[0] = value
    else:
        logits[0, CHUNK + 50] = value
    ops, got = fused(cfg), cases.copy_of(want)
    ops.sample_and_advance(logits, got, mode)
    sample_and_advance(logits, want, mode)
    assert got.output[0, 1] == BROKEN
    assert 0 <= got.output[0, 0] < vocab
    assert not got.active[0]
    cases.assert_same_state(got.narrow(1, 1), want.narrow(1, 1))
    assert_counters_reset(ops)


@triton.jit
def noise_kernel(seeds, positions, bits, noise, vocab, BLOCK: tl.constexpr):
    """The noise of draw.py by itself."""
    row, token = tl.program_id(0), tl.arange(0, BLOCK)
    at, inside = row * vocab + token, token < vocab
    drawn = draw.noise_bits(tl.load(seeds + 2 * row), tl.load(seeds + 2 * row + 1), tl.load(positions + row), token)
    tl.store(bits + at, drawn, mask=inside)
    tl.store(noise + at, draw.gumbel(drawn), mask=inside)


@triton.jit
def gumbel_kernel(bits, noise, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(noise + i, draw.gumbel(tl.load(bits + i)))


def exact_gumbel(bits: Tensor) -> Tensor:
    """In float64, of what float32 makes of the bits."""
    uniform = ((bits.float() + 0.5) * 2.0**-31).clamp(max=1 - 2.0**-24)
    return -(-(-uniform.double()).log1p()).log()


def test_noise_is_that_of_the_plain_sampler() -> None:
    """The same 31 bits for each (seed, position, token), hence the same noise up to a few roundings."""
    torch.manual_seed(0)
    vocab, rows = 1000, 64
    state = DecodeState.allocate(rows, vocab, CPU)
    state.seeds.copy_(torch.randint(-(2**31), 2**31, (rows, 2)))
    state.seeds[:4] = torch.tensor([[0, 0], [1, 0], [-1, -1], [-(2**31), 2**31 - 1]])
    state.positions.copy_(torch.randint(0, 131072, (rows,)))
    bits, noise = torch.empty(rows, vocab, dtype=torch.int32), torch.empty(rows, vocab)
    noise_kernel[(rows,)](state.seeds, state.positions, bits, noise, vocab, BLOCK=1024)
    assert bits.min() >= 0
    assert bits.unique().numel() > 0.99 * bits.numel()
    want = exact_gumbel(bits)
    torch.testing.assert_close(sampling.gumbel(state, vocab).double(), want, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(noise.double(), want, atol=1e-6, rtol=1e-6)


def test_noise_is_exact_where_it_is_large() -> None:
    """Elsewhere, 1 - u was rounded to 1 for the smallest u: an infinite noise, and a token out of nowhere."""
    few = [0, 1, 2, 3, 7, 63, 64, 65, 100, 127, 128, 200, 1000, 2**20, 2**25 + 3, 2**30, 2**31 - 129, 2**31 - 1]
    bits = torch.tensor((few * 4)[:64], dtype=torch.int32)
    noise = torch.empty(64)
    gumbel_kernel[(1,)](bits, noise, BLOCK=64)
    torch.testing.assert_close(noise.double(), exact_gumbel(bits), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("mode", [Mode.SAMPLED, Mode.FILTERED])
@pytest.mark.parametrize("vocab", [97, CHUNK, 2 * CHUNK + 5])
@pytest.mark.parametrize("seed", range(4))
def test_sampled_finish(mode: Mode, vocab: int, seed: int) -> None:
    """Everything in the state is as after `sample_and_advance`, over three steps."""
    torch.manual_seed(seed)
    want = cases.sampled_state(4, vocab, CPU, seed)
    ops, got = fused(cases.config(vocab_size=vocab)), cases.copy_of(want)
    for _ in range(3):
        logits = cases.guarded(torch.randn(4, vocab) * 3)
        ops.sample_and_advance(logits, got, mode)
        sample_and_advance(logits, want, mode)
        cases.assert_same_state(got, want)
    assert_counters_reset(ops)


def test_sampled_finish_takes_the_first_of_equals() -> None:
    """At temperature 0, with ties everywhere, and one that the penalty makes: 4 / 2 is 2 to the last bit."""
    vocab = 2 * CHUNK + 5
    want = DecodeState.allocate(4, vocab, CPU)
    for row in range(4):
        params = SamplingParams(temperature=0, repetition_penalty=2.0, logprobs=True)
        want.admit(row, [CHUNK + row, 3], 100, [], params, row)
    logits = torch.randint(-5, 3, (4, vocab)).float()
    logits[:, 3] = 4.0
    logits[2, 100] = 3.0
    ops, got = fused(cases.config(vocab_size=vocab)), cases.copy_of(want)
    ops.sample_and_advance(logits, got, Mode.SAMPLED)
    sample_and_advance(logits, want, Mode.SAMPLED)
    cases.assert_same_state(got, want)
    first = [(row == 2.0).nonzero()[0].item() for row in logits]
    assert got.output[:, 0].tolist() == [min(first[0], 3), min(first[1], 3), 100, min(first[3], 3)]

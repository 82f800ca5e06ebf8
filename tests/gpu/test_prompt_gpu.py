"""The operations of a prefill on a GPU, at real sizes: each against its definition; whole prefills beside float32."""

import itertools

import kernel_cases as cases
import pytest
import torch
from torch import Tensor

from minillm.cache import KVCache
from minillm.config import ModelConfig
from minillm.kernels import reference
from minillm.kernels.fused import FusedOps
from minillm.kernels.fused_prompt import FusedPrompt
from minillm.model import Llama

CUDA, BF16, FP16, EPS = torch.device("cuda", 0), torch.bfloat16, torch.float16, 1e-5
LENGTHS = (1, 5, 63, 64, 65, 512, 1000)

SHAPES = {
    "SmolLM2-135M": (576, 1536, 9, 3, 64, {}),
    "Llama-3.2-1B": (2048, 8192, 32, 8, 64, {}),
    "Llama-3.1-8B": (4096, 14336, 32, 8, 128, {}),
    "Phi-like-96": (3072, 8192, 32, 32, 96, {}),
    "head-dim-80": (2560, 6912, 32, 8, 80, {}),
    "head-dim-256": (2048, 16384, 8, 1, 256, {}),
    "biases": (1024, 2816, 16, 4, 64, {"attention_bias": True, "mlp_bias": True}),
    "Qwen2.5-0.5B": (896, 4864, 14, 2, 64, {"model_type": "qwen2"}),
    "Qwen3-0.6B": (1024, 3072, 16, 8, 128, {"model_type": "qwen3"}),
}


def config(name: str, **changes: object) -> ModelConfig:
    hidden, inter, heads, kv_heads, head_dim, more = SHAPES[name]
    sizes = {"hidden_size": hidden, "intermediate_size": inter, "head_dim": head_dim, "vocab_size": 2003}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "max_position_embeddings": 4096}
    return cases.config(**{**sizes, **more, **changes})


def prompt_ops(cfg: ModelConfig) -> FusedPrompt:
    return FusedPrompt(FusedOps(cfg, 2, 300, CUDA))


def assert_close_rows(got: Tensor, want: Tensor, roundings: float) -> None:
    """Relative to the largest of a row: what goes into a product was rounded before, and what comes out again."""
    error = (got.double() - want).abs().amax(-1)
    bound = roundings * torch.finfo(got.dtype).eps * want.abs().amax(-1)
    assert (error <= bound).all(), f"{(error / bound).max():.2f} times the bound"


# ---------------------------------------------------------------------- operations


@pytest.mark.parametrize("hidden", [64, 576, 896, 2048, 2560, 4096, 5120, 8192, 16384])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_norm(hidden: int, dtype: torch.dtype) -> None:
    for seed, length in enumerate(LENGTHS):
        x = cases.random(seed, CUDA, dtype, length, hidden, scale=1000 if seed % 2 else 1)
        gain = cases.random(seed + 50, CUDA, dtype, hidden)
        with cases.poisoned_outputs():
            got = prompt_ops(cases.config())._norm(x, gain, EPS)
        cases.assert_close(got, cases.rms_norm(x, gain, EPS))


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_operations(name: str, dtype: torch.dtype) -> None:
    """Operations 1, 3, 4 and 5, with poisoned outputs and cache, at several places of the cache."""
    cfg = config(name)
    ops, layer, size = prompt_ops(cfg), cases.random_layer(cfg, 1, CUDA, dtype), 1100
    heads = cfg.num_attention_heads, cfg.num_key_value_heads
    for seed, length in enumerate(LENGTHS):
        start = (0, 7, size - length)[seed % 3]
        x = cases.random(seed + 100, CUDA, dtype, length, cfg.hidden_size)
        y = cases.random(seed + 200, CUDA, dtype, length, layer.o.shape[1])
        angles = torch.rand(length, cfg.head_dim // 2, device=CUDA) * 6
        rope = torch.polar(torch.ones_like(angles), angles)
        kv = torch.full((2, 2, heads[1], size + 1, cfg.head_dim), torch.nan, device=CUDA, dtype=dtype)
        slots = torch.arange(start, start + length, device=CUDA)
        want_o = cases.linear_residual(y, layer.o, layer.o_bias, x)
        want_hidden = cases.gate_up_silu(x, layer, EPS)
        want_qkv = cases.qkv(x, layer, angles, EPS, *heads)
        with cases.poisoned_outputs():
            q = ops.qkv_rope_append(x, layer, rope, EPS, kv, torch.ones_like(slots), slots, cfg.head_dim)
            hidden = ops.gate_up_silu(x, layer, EPS)
        want_down = cases.linear_residual(hidden, layer.down, layer.down_bias, x)
        down = ops.linear_residual(hidden, layer.down, layer.down_bias, x.clone())
        assert_close_rows(down, want_down, 3)
        assert_close_rows(hidden, want_hidden, 4)
        written = kv[:, 1, :, start : start + length].transpose(1, 2)  # [2, T, kv_heads, head_dim]
        for got, want in zip((q, *written), want_qkv, strict=True):
            assert_close_rows(got, want, 4)
        kv[:, 1, :, start : start + length] = torch.nan
        assert kv.isnan().all()
        result = ops.linear_residual(y, layer.o, layer.o_bias, x)  # over x, which lies between NaN
        assert result.data_ptr() == x.data_ptr()
        assert_close_rows(result, want_o, 3)
        assert x._base is not None
        assert x._base.isnan().sum() == 2 * cases.PAD


def test_offsets_beyond_32_bits() -> None:
    """The last token of a prompt whose gate and up projections are 2^31 numbers and more."""
    inter, dtype = 14336, BF16
    length = 2**31 // (2 * inter) + 3
    if torch.cuda.mem_get_info(CUDA)[0] < 10 * 2**30:
        pytest.skip("needs 10 GiB of free memory")
    cfg = cases.config(hidden_size=64, intermediate_size=inter)
    layer = cases.random_layer(cfg, 1, CUDA, dtype)
    x = torch.randn(length, 64, device=CUDA, dtype=dtype)
    got = prompt_ops(cfg).gate_up_silu(x, layer, EPS)
    for part in (slice(0, 3), slice(length // 2, length // 2 + 3), slice(length - 3, length)):
        assert_close_rows(got[part], cases.gate_up_silu(x[part], layer, EPS), 4)


# ---------------------------------------------------------------------- whole prefills


class Trio:
    """One model three times, each with a cache full of NaN: with kernels, plain in the same dtype, and in float32."""

    SIZE, ROWS = 1100, 3

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.cfg = config(name, num_hidden_layers=2)
        weights = cases.random_weights(self.cfg, CUDA, dtype)
        kernels = FusedOps(self.cfg, self.ROWS, self.SIZE, CUDA)
        self.fused = Llama(self.cfg, weights, self.SIZE, kernels)
        self.plain = Llama(self.cfg, weights, self.SIZE)
        self.exact = Llama(self.cfg, cases.as_float32(weights), self.SIZE)
        assert isinstance(self.fused._prompt_ops, FusedPrompt)
        assert self.plain._prompt_ops is reference

    def cache(self, model: Llama) -> KVCache:
        cache = KVCache(self.cfg, self.ROWS, self.SIZE, CUDA, model.weights.embed.dtype)
        cache.kv.fill_(torch.nan)
        return cache

    def prefill(self, model: Llama, ids: Tensor, cuts: list[int]) -> tuple[Tensor, Tensor]:
        """Logits of all tokens, and K and V, of a prompt cut in pieces. No other place of the cache is written."""
        cache, edges = self.cache(model), [0, *cuts, len(ids)]
        parts = [model.prefill(ids[a:b], 1, a, cache, all_logits=True) for a, b in itertools.pairwise(edges)]
        kept = cache.kv[:, :, 1, :, : len(ids)].clone()
        cache.kv[:, :, 1, :, : len(ids)] = torch.nan
        assert cache.kv.isnan().all()
        return torch.cat(parts), kept


def error(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_a_prefill_is_as_near_to_float32_as_a_plain_one(name: str, dtype: torch.dtype) -> None:
    """Logits and cache, whole and in pieces. The kernels round less often, so they are nearer, if anything."""
    trio = Trio(name, dtype)
    for seed, length in enumerate(LENGTHS):
        ids = torch.randint(0, trio.cfg.vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).to(CUDA)
        cuts = sorted({cut for cut in (1, 17, 64, length - 1) if 0 < cut < length})
        exact_logits, exact_kv = trio.prefill(trio.exact, ids, [])
        for where in ([], cuts):
            logits, kv = trio.prefill(trio.fused, ids, where)
            plain_logits, plain_kv = trio.prefill(trio.plain, ids, where)
            assert logits.dtype == torch.float32
            assert error(logits, exact_logits) < 1.2 * error(plain_logits, exact_logits) + 1e-4, (length, where)
            assert error(kv, exact_kv) < 1.2 * error(plain_kv, exact_kv) + 1e-4, (length, where)


@pytest.mark.parametrize("name", ["SmolLM2-135M", "Llama-3.2-1B", "Qwen3-0.6B"])
def test_the_last_token_gets_the_logits_that_it_has_among_all(name: str) -> None:
    trio = Trio(name, BF16)
    for length in LENGTHS:
        ids = torch.arange(length, device=CUDA) * 31 % trio.cfg.vocab_size
        every, _ = trio.prefill(trio.fused, ids, [])
        last = trio.fused.prefill(ids, 1, 0, trio.cache(trio.fused))
        assert last.shape == (1, trio.cfg.vocab_size)
        assert error(last, every[-1:]) < torch.finfo(BF16).eps  # one product rounds its results to bfloat16


@pytest.mark.parametrize("name", ["SmolLM2-135M", "Llama-3.2-1B"])
def test_prefills_in_a_row_give_the_same_bits(name: str) -> None:
    """Queued without a wait, of different lengths in between: no kernel reads what an earlier one still writes."""
    trio = Trio(name, BF16)
    ids = torch.arange(700, device=CUDA) * 31 % trio.cfg.vocab_size
    cache = trio.cache(trio.fused)
    seen: dict[int, list[Tensor]] = {1: [], 64: [], 700: []}
    for _ in range(20):
        for length, logits in seen.items():
            logits.append(trio.fused.prefill(ids[:length], 1, 0, cache))
    for logits in seen.values():
        assert logits[0].isfinite().all()
        assert all(torch.equal(other, logits[0]) for other in logits[1:])


def test_no_synchronisation_inside_a_prefill() -> None:
    """Elsewhere, one .item() made the host wait for the device at every chunk."""
    trio = Trio("SmolLM2-135M", BF16)
    ids, cache = torch.arange(100, device=CUDA), trio.cache(trio.fused)
    trio.fused.prefill(ids, 0, 0, cache)  # loads the kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for start, end in ((0, 1), (1, 50), (50, 100)):
            trio.fused.prefill(ids[start:end], 0, start, cache)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_no_length_compiles_anything_after_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere, the first prompt of another length waited half a second for a compiler."""
    triton = pytest.importorskip("triton")
    trio, compiled = Trio("Qwen2.5-0.5B", BF16), []
    ids, cache = torch.arange(1100, device=CUDA), trio.cache(trio.fused)
    trio.fused.prefill(ids[:16], 0, 0, cache)  # as `Engine.warm_up` does
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda **about: compiled.append(about["repr"]))
    for start, end in ((0, 1), (1, 18), (18, 82), (82, 1082), (0, 1100), (1099, 1100)):
        trio.fused.prefill(ids[start:end], 1, start, cache)
    assert compiled == []
    prompt_ops(cases.config())._norm(torch.ones(2, 1072, device=CUDA), torch.ones(1072, device=CUDA), EPS)
    assert len(compiled) == 1, "the hook sees nothing"

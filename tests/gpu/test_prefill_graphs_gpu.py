"""Padded prefills on a GPU: their attention against its definition, replays against eager, and whole answers."""

import kernel_cases as cases
import pytest
import torch
from test_prompt_gpu import SHAPES, config, error

from minillm.cache import KVCache
from minillm.capture import CudaBackend
from minillm.graph_report import GraphReport
from minillm.kernels.fused import FusedOps
from minillm.kernels.fused_prompt import FusedPrompt
from minillm.model import Llama
from minillm.prefill_graphs import LENGTHS, PrefillRunner

CUDA, BF16, FP16, SIZE = torch.device("cuda", 0), torch.bfloat16, torch.float16, 1100
CHUNKS = [(1, 0), (5, 0), (8, 3), (33, 0), (64, 700), (65, 1), (200, 64), (300, 800), (512, 0), (512, SIZE - 512)]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_attention(name: str, dtype: torch.dtype) -> None:
    """Every real token, in a row between NaN; what fills a chunk up gets zeros."""
    cfg = config(name)
    heads, kv_heads, head_dim = cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim
    ops = FusedPrompt(FusedOps(cfg, 2, 300, CUDA))
    for seed, (count, start) in enumerate(CHUNKS):
        size = min(length for length in LENGTHS if length >= count)
        wide = torch.full((size, heads + 2 * kv_heads, head_dim), torch.nan, device=CUDA, dtype=dtype)
        q = wide[:, :heads]
        q[:count] = cases.random(seed, CUDA, dtype, count, heads, head_dim, scale=2)
        kv = torch.full((2, 3, kv_heads, SIZE + 1, head_dim), torch.nan, device=CUDA, dtype=dtype)
        kv[:, 1, :, : start + count] = cases.random(seed + 50, CUDA, dtype, 2, kv_heads, start + count, head_dim)
        with cases.poisoned_outputs():
            got = ops.placed_attention(torch.tensor([1, start, count], device=CUDA))(q, kv)
        assert not got[count:].any()
        k, v = (t.double().repeat_interleave(heads // kv_heads, 0) for t in kv[:, 1, :, : start + count])
        scores = q[:count].double().transpose(0, 1) @ k.mT * head_dim**-0.5  # [heads, count, start + count]
        hidden = torch.ones(count, start + count, dtype=torch.bool, device=CUDA).triu(start + 1)
        want = (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(0, 1).flatten(1)
        bound = 3 * torch.finfo(dtype).eps * want.abs().amax(-1)
        assert ((got[:count].double() - want).abs().amax(-1) <= bound).all(), (count, start)


class Pair:
    """One model with kernels, and in float32; a runner that has captured all lengths."""

    def __init__(self, name: str, dtype: torch.dtype = BF16, fused: bool = True) -> None:
        self.cfg = config(name, num_hidden_layers=2)
        weights = cases.random_weights(self.cfg, CUDA, dtype)
        self.model = Llama(self.cfg, weights, SIZE, FusedOps(self.cfg, 3, SIZE, CUDA) if fused else None)
        self.plain = Llama(self.cfg, weights, SIZE)
        self.exact = Llama(self.cfg, cases.as_float32(weights), SIZE)
        self.cache = KVCache(self.cfg, 3, SIZE, CUDA, dtype)
        self.backend, self.report = CudaBackend(CUDA), GraphReport(enabled=False)
        self.runner = PrefillRunner(self.model, self.cache, LENGTHS, self.backend)
        self.runner.report = self.report
        self.runner.capture()

    def ids(self, count: int, seed: int) -> list[int]:
        return torch.randint(0, self.cfg.vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", ["SmolLM2-135M", "Llama-3.2-1B", "Qwen3-0.6B", "head-dim-80"])
def test_replay_equals_eager_of_the_same_padded_inputs(name: str, fused: bool) -> None:
    """Logits and the whole cache, bit for bit, for every length, full and not."""
    pair = Pair(name, fused=fused)
    other = KVCache(pair.cfg, 3, SIZE, CUDA, BF16)
    for seed, length in enumerate(LENGTHS):
        for count in (length, length // 2 + 1):
            ids, place = pair.ids(count, seed), [seed % 3, (seed * 97) % (SIZE - length), count]
            with pair.backend.on_stream():
                pair.cache.kv.normal_(generator=torch.Generator(CUDA).manual_seed(seed))
                other.kv.copy_(pair.cache.kv)
                got = pair.runner.read(ids, *place[:2]).clone()
                padded = torch.tensor([*ids, *[0] * (length - count)], device=CUDA)
                padded[count:] = pair.runner._inputs[3 + count : 3 + length]  # what is left of the chunk before
                want = pair.model.prefill_padded(padded, torch.tensor(place, device=CUDA), other)
            torch.cuda.synchronize()
            assert torch.equal(got, want), (length, count)
            # which of the padding tokens writes last to the scratch slot is open
            assert torch.equal(pair.cache.kv[..., :-1, :], other.kv[..., :-1, :]), (length, count)
    assert pair.report.prefill_replays == 2 * len(LENGTHS)


@pytest.mark.parametrize("name", ["SmolLM2-135M", "Llama-3.2-1B", "Qwen3-0.6B", "head-dim-256"])
def test_as_near_to_float32_as_a_plain_prefill(name: str) -> None:
    """In one chunk, and as the rest of a prompt of which the cache has the beginning."""
    pair = Pair(name)
    caches = {m: KVCache(pair.cfg, 3, SIZE, CUDA, m.weights.embed.dtype) for m in (pair.plain, pair.exact)}
    for seed, (count, start) in enumerate(CHUNKS[1:]):
        ids = torch.tensor(pair.ids(start + count, seed), device=CUDA)
        with pair.backend.on_stream():
            if start:
                pair.model.prefill(ids[:start], 1, 0, pair.cache)
            got = pair.runner.read(ids[start:].tolist(), 1, start).clone()
            plain, exact = (
                torch.stack([m.prefill(ids[a:b], 1, a, cache)[0] for a, b in ((0, start), (start, len(ids))) if b > a])
                for m, cache in caches.items()
            )
        torch.cuda.synchronize()
        assert error(got[0], exact[-1]) < 1.2 * error(plain[-1], exact[-1]) + 2e-3, (count, start)


def test_no_synchronisation_inside_a_read() -> None:
    pair = Pair("SmolLM2-135M")
    with pair.backend.on_stream():
        pair.runner.read(pair.ids(60, 1), 0, 0)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            pair.runner.read(pair.ids(60, 1), 0, 0)
            pair.runner.read(pair.ids(50, 2), 1, 60)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_reads_in_a_row_do_not_meet() -> None:
    """Many chunks without a wait: the inputs of the next may not overwrite those of one that still runs."""
    pair = Pair("SmolLM2-135M")
    prompts = [pair.ids(40 + 3 * index, index) for index in range(8)]
    with pair.backend.on_stream():
        alone = []
        for prompt in prompts:
            alone.append(pair.runner.read(prompt, 0, 0).clone())
            torch.cuda.synchronize()
        together = [pair.runner.read(prompt, 0, 0).clone() for prompt in prompts * 4]
    torch.cuda.synchronize()
    assert all(torch.equal(got, alone[index % 8]) for index, got in enumerate(together))

"""The transformer against transformers in float32, over every flag of the Llama block and its relatives."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from minillm.cache import KVCache
from minillm.config import ModelConfig
from minillm.loading import load_model, make_plan
from minillm.model import Llama
from minillm.state import DecodeState

BASE = dict(
    vocab_size=131, hidden_size=64, intermediate_size=112, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32,
    rope_theta=500000.0,
)  # fmt: skip
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32, rope_theta=10000.0)
LINEAR = dict(rope_type="linear", factor=2.0, rope_theta=10000.0)
DYNAMIC = dict(rope_type="dynamic", factor=2.0, rope_theta=10000.0)

MODELS = {
    "llama": ("Llama", {}),
    "untied": ("Llama", dict(tie_word_embeddings=False)),
    "tied": ("Llama", dict(tie_word_embeddings=True)),
    "one kv head a head": ("Llama", dict(num_key_value_heads=4)),
    "one kv head": ("Llama", dict(num_key_value_heads=1)),
    "nine heads over three": ("Llama", dict(hidden_size=72, num_attention_heads=9, num_key_value_heads=3)),
    "head_dim": ("Llama", dict(head_dim=24)),
    "attention_bias": ("Llama", dict(attention_bias=True)),
    "mlp_bias": ("Llama", dict(mlp_bias=True)),
    "padded vocabulary": ("Llama", dict(vocab_size=192, tie_word_embeddings=True)),
    "theta": ("Llama", dict(rope_parameters=dict(rope_type="default", rope_theta=500000.0))),
    "llama3": ("Llama", dict(rope_parameters=LLAMA3)),
    "linear": ("Llama", dict(rope_parameters=LINEAR)),
    "yarn": ("Llama", dict(rope_parameters=YARN)),
    "dynamic": ("Llama", dict(rope_parameters=DYNAMIC)),
    "eps": ("Llama", dict(rms_norm_eps=1e-3)),
    "mistral": ("Mistral", dict(sliding_window=None)),
    "qwen2": ("Qwen2", {}),
    "qwen2 tied": ("Qwen2", dict(tie_word_embeddings=True)),
    "qwen3": ("Qwen3", dict(head_dim=32)),
    "qwen3 bias": ("Qwen3", dict(head_dim=16, attention_bias=True)),
}


def build(kind: str, overrides: dict, path: Path, seed: int = 0) -> transformers.PreTrainedModel:
    """A random model of the kind, every tensor (norms and biases too) far from its neutral value, saved to path."""
    config = getattr(transformers, kind + "Config")(**{**BASE, **overrides})
    config._attn_implementation = "eager"
    model = getattr(transformers, kind + "ForCausalLM")(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.parameters():
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(noise * 0.08 if tensor.dim() == 2 else 1 + noise * 0.2)
    model.tie_weights()
    model.save_pretrained(path)
    return model


def in_old_style(path: Path) -> None:
    """Rewrite config.json as older versions of transformers wrote it."""
    config = json.loads((path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    config["torch_dtype"] = config.pop("dtype", "float32")
    (path / "config.json").write_text(json.dumps(config))


def load(path: Path, rows: int = 1, max_seq_len: int = 64) -> tuple[Llama, KVCache]:
    config, device = ModelConfig.from_dir(path), torch.device("cpu")
    plan = make_plan(config, device, torch.float32, rows, max_seq_len)
    return load_model(path, config, plan), KVCache(config, rows, max_seq_len, device, torch.float32)


def tokens(count: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 131, (count,), generator=torch.Generator().manual_seed(seed))


def step(model: Llama, cache: KVCache, ids: list[int], positions: list[int]) -> torch.Tensor:
    state = DecodeState.allocate(len(ids), model.config.vocab_size, torch.device("cpu"))
    state.tokens.copy_(torch.tensor(ids))
    state.positions.copy_(torch.tensor(positions))
    state.active.fill_(True)
    return model.decode(state, cache, max(positions) + 1)


@pytest.mark.parametrize("style", ["new", "old"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(name: str, style: str, tmp_path: Path) -> None:
    reference = build(*MODELS[name], tmp_path)
    if style == "old":
        in_old_style(tmp_path)
    model, cache = load(tmp_path)
    ids = tokens(48)
    with torch.no_grad():
        expected = reference(ids[None]).logits[0]
    got = model.prefill(ids, 0, 0, cache, all_logits=True)
    assert expected.std() > 0.1  # a model that says nothing would pass any test
    assert (got - expected).abs().max() < 2e-4


@pytest.mark.parametrize("name", ["nine heads over three", "llama3", "qwen3 bias"])
def test_prefill_whole_in_chunks_and_token_by_token_agree(name: str, tmp_path: Path) -> None:
    """Elsewhere, is_causal hid the prefix from a second chunk, because its mask is aligned top-left."""
    build(*MODELS[name], tmp_path)
    model, cache = load(tmp_path)
    ids = tokens(40)
    whole = model.prefill(ids, 0, 0, cache)
    kept = cache.kv[..., :40, :].clone()
    cache.kv.zero_()
    for start, end in ((0, 16), (16, 32), (32, 40)):
        chunked = model.prefill(ids[start:end], 0, start, cache)
    torch.testing.assert_close(chunked, whole, atol=1e-4, rtol=0)
    torch.testing.assert_close(cache.kv[..., :40, :], kept, atol=1e-4, rtol=0)
    cache.kv.zero_()
    for position, token in enumerate(ids.tolist()):
        single = step(model, cache, [token], [position])
    torch.testing.assert_close(single, whole, atol=1e-4, rtol=0)


def test_rows_have_their_own_positions(tmp_path: Path) -> None:
    """Elsewhere, one shared cache position gave short rows of a padded batch the rotary phase of the longest."""
    build("Llama", {}, tmp_path)
    model, cache = load(tmp_path, rows=3)
    lengths = (3, 17, 9)
    prompts = [tokens(n, seed=n) for n in lengths]
    for row, prompt in enumerate(prompts):
        model.prefill(prompt, row, 0, cache)
    feed = [40, 50, 60]
    together = step(model, cache, feed, list(lengths))
    for row, prompt in enumerate(prompts):
        alone_model, alone_cache = load(tmp_path)
        alone_model.prefill(prompt, 0, 0, alone_cache)
        alone = step(alone_model, alone_cache, [feed[row]], [lengths[row]])
        torch.testing.assert_close(together[row : row + 1], alone, atol=1e-5, rtol=0)


def test_other_rows_change_nothing_in_mine(tmp_path: Path) -> None:
    """At a fixed batch size, a row's logits are the same bits whatever its neighbours hold."""
    build("Llama", {}, tmp_path)
    model, cache = load(tmp_path, rows=4)
    for row in range(4):
        model.prefill(tokens(10, seed=row), row, 0, cache)
    first = step(model, cache, [5, 6, 7, 8], [10, 10, 10, 20])[1].clone()
    for row in (0, 2, 3):
        model.prefill(tokens(20, seed=90 + row), row, 0, cache)
    again = step(model, cache, [50, 6, 70, 80], [15, 10, 3, 20])[1]
    assert torch.equal(again, first)


def test_prefill_projects_the_last_position_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of every position of a 4,000-token prompt would take 2 GB at a vocabulary of 128,000."""
    from minillm.kernels import reference

    build("Llama", {}, tmp_path)
    model, cache = load(tmp_path)
    seen = []
    original = reference.norm_logits
    monkeypatch.setattr(reference, "norm_logits", lambda x, *a: seen.append(tuple(x.shape)) or original(x, *a))
    model.prefill(tokens(30), 0, 0, cache)
    assert seen == [(1, 64)]


def test_biases_of_the_file_are_used(tmp_path: Path) -> None:
    """Elsewhere, a bias in the file was silently dropped."""
    build("Llama", dict(attention_bias=True, mlp_bias=True), tmp_path)
    model, cache = load(tmp_path)
    before = model.prefill(tokens(12), 0, 0, cache)
    for suffix in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"):
        file = tmp_path / "model.safetensors"
        weights = load_file(file)
        (name,) = (n for n in weights if n.startswith("model.layers.0.") and n.endswith(suffix + ".bias"))
        weights[name] = weights[name].flip(0) + 0.5
        save_file(weights, file)
        model, cache = load(tmp_path)
        after = model.prefill(tokens(12), 0, 0, cache)
        assert (after - before).abs().max() > 1e-3, suffix
        before = after


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    build("Llama", {}, tmp_path)
    exact_model, exact_cache = load(tmp_path)
    config, device = ModelConfig.from_dir(tmp_path), torch.device("cpu")
    half = load_model(tmp_path, config, make_plan(config, device, dtype, 1, 64))
    cache = KVCache(config, 1, 64, device, dtype)
    ids = tokens(30)
    exact = exact_model.prefill(ids, 0, 0, exact_cache, all_logits=True)
    got = half.prefill(ids, 0, 0, cache, all_logits=True)
    assert got.dtype == torch.float32
    assert (got - exact).norm() / exact.norm() < 8 * torch.finfo(dtype).eps

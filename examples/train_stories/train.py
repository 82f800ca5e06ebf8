"""Stage 4: a Llama of 4.95 million parameters learns from nothing, on real and sampled stories.

Its sizes: 6 layers of 256 numbers, 4 query heads over 2 kv heads of 64, an MLP of 704, 2,048 tokens with tied
embeddings, a context of 512. Heads of 64 and widths that are multiples of 16 are what minillm's fused kernels want.

Real stories come several times in an epoch beside the sampled ones, because they are what the model is to be like, and
are cleaner; the sampled ones are what keeps it from learning the real ones by heart.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import tokenizers
import torch

from minillm.config import ModelConfig

from . import llama
from .fit import Log, Recipe, fit
from .packing import Tokens
from .stories import SEPARATOR, read_stories

RECIPE = Recipe(block=512, batch=128, learning_rate=3e-3, epochs=24, warm_up=100, compile=True)
REAL_COPIES = 4
DROPOUT = 0.1
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "torch_dtype": "bfloat16",
}


def encode(work: Path, stories: list[str]) -> Tokens:
    """Stories in the tokens of stage 1."""
    tokenizer = tokenizers.Tokenizer.from_file(str(work / "tokenizer" / "tokenizer.json"))
    rows = tokenizer.encode_batch(stories, add_special_tokens=False)
    ids = {story: row.ids for story, row in zip(stories, rows, strict=True)}
    return Tokens.encode(stories, ids.__getitem__, tokenizer.get_vocab()[SEPARATOR])


def run(
    work: Path,
    seconds: float,
    device: torch.device,
    log: Log,
    recipe: Recipe = RECIPE,
    config: dict[str, Any] = CONFIG,
) -> float:
    """Train on `train.jsonl` and `sampled.jsonl`; write the checkpoint to `work/stories`.

    Returns: its validation loss, in nats per byte.
    """
    started = time.perf_counter()
    torch.manual_seed(0)
    real, sampled = read_stories(work / "train.jsonl"), read_stories(work / "sampled.jsonl")
    tokens, validation = encode(work, real + sampled), encode(work, read_stories(work / "validation.jsonl"))
    copies = [REAL_COPIES] * len(real) + [1] * len(sampled)
    model = llama.Llama(ModelConfig.from_dict(config), recipe.block, DROPOUT)
    llama.initialise(model)
    left = seconds - (time.perf_counter() - started)
    loss = fit(model.to(device), tokens, copies, validation, recipe, left, log)
    save(model, work, config)
    return loss


def save(model: llama.Llama, work: Path, config: dict[str, Any]) -> None:
    """The whole model directory: tokenizer, weights, config."""
    target = work / "stories"
    target.mkdir(exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (target / name).write_bytes((work / "tokenizer" / name).read_bytes())
    generation = {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]}
    (target / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", "utf-8")
    llama.save(model, target, config)

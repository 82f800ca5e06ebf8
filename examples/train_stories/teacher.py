"""Stage 2: SmolLM2-135M reads the real stories, so that it can write more of them.

All weights are trained, a pass or two over a million tokens at a small rate: the model knows English already, and has
to learn only what these stories are like and that one ends with the end token. More passes would make it recite
(`sample.py` throws away what is recited, which is no reason to make it).
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import torch

from minillm.config import ModelConfig
from minillm.tokenizer import Tokenizer

from . import llama
from .fit import Log, Recipe, fit
from .packing import Tokens
from .stories import read_stories

RECIPE = Recipe(block=1024, batch=16, learning_rate=3e-4, epochs=2, warm_up=10)


def encode(directory: Path, stories: list[str]) -> Tokens:
    """Stories in the tokens of the model in `directory`, each ended by the first of its end tokens."""
    config = ModelConfig.from_dir(directory)
    tokenizer = Tokenizer.from_dir(directory, config.vocab_size)
    return Tokens.encode(stories, lambda text: tokenizer.encode(text, False), config.eos_token_ids[0])


def run(source: Path, work: Path, seconds: float, device: torch.device, log: Log, recipe: Recipe = RECIPE) -> float:
    """Fine-tune the model in `source` on `train.jsonl`; write it to `work/teacher`, ready for minillm.

    Returns: its validation loss, in nats per byte.
    """
    started = time.perf_counter()
    torch.manual_seed(0)
    train, validation = (encode(source, read_stories(work / f"{part}.jsonl")) for part in ("train", "validation"))
    model = llama.load(source, recipe.block).to(device)
    left = seconds - (time.perf_counter() - started)
    loss = fit(model, train, [1] * len(train.lengths), validation, recipe, left, log)
    target = work / "teacher"
    target.mkdir(exist_ok=True)
    for file in source.iterdir():
        if file.suffix in (".json", ".jinja", ".model") and file.name != "config.json" and "index" not in file.name:
            shutil.copy(file, target)
    llama.save(model, target, json.loads((source / "config.json").read_text("utf-8")))
    return loss

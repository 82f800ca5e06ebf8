"""The training loop of both models: AdamW, a rate that falls to zero exactly when the time is over.

A run here has a number of seconds and a number of epochs, and ends with whichever is over first. The learning rate
follows the larger of the two shares, rises over a few steps and then falls in a straight line to zero (Bergsma et al.
2025, arXiv:2502.15938: straight to zero beats a cosine that stops at a tenth). So a faster machine trains longer, never
differently at the end.

Few data are seen many times. Up to some 16 epochs, old text is worth nearly as much as new, and past 40 nothing at all
(Muennighoff et al. 2023, arXiv:2305.16264); hence the limit. The weights that do best on the validation stories are
kept, so a run that learned its text by heart towards the end costs time and no quality.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .llama import Llama, summed_nll
from .packing import Tokens, epoch_order, pack

Log = Callable[[dict[str, object]], None]

VALIDATIONS = 20  # in a run
LOG_EVERY = 20  # steps; reading a loss waits for the device


@dataclass(frozen=True)
class Recipe:
    """How a model is trained. `batch` is blocks a step, `block` tokens a block, `warm_up` steps of a rising rate."""

    block: int
    batch: int
    learning_rate: float
    epochs: float
    warm_up: int
    weight_decay: float = 0.1
    compile: bool = False


def rate(progress: float, step: int, recipe: Recipe) -> float:
    """The learning rate of a step, after `progress` in [0, 1] of the run."""
    return recipe.learning_rate * min(1.0, (step + 1) / recipe.warm_up) * max(0.0, 1.0 - progress)


def fit(
    model: Llama,
    stories: Tokens,
    copies: Sequence[int],
    validation: Tokens,
    recipe: Recipe,
    seconds: float,
    log: Log,
) -> float:
    """Train `model` in place, and leave the weights in it that were best on the validation stories.

    Args:
        copies: how often each story comes in an epoch.
        seconds: wall clock for all of it, compiling and validation included; at least one step is made.
    Returns: their validation loss, in nats per byte of text.
    """
    deadline = time.perf_counter() + seconds
    device = next(model.parameters()).device
    held = pack(validation.to(device), range(len(validation.lengths)), recipe.block)
    optimizer = _optimizer(model, recipe)
    step_loss = _compiled_step() if recipe.compile and device.type == "cuda" else summed_nll
    best, best_loss = dict[str, Tensor](), float("inf")
    progress = next_validation = began = 0.0
    for step, (epochs, rows) in enumerate(_batches(stories.to(device), copies, recipe)):
        for group in optimizer.param_groups:
            group["lr"] = rate(progress, step, recipe)
        loss = _train_step(model, step_loss, rows, optimizer)
        if step == 0:
            loss.item()  # waits for the device: what was until now is compiling, and no progress
            began = time.perf_counter()
        now = time.perf_counter()
        progress = 1.0 if now >= deadline else max(epochs / recipe.epochs, (now - began) / (deadline - began))
        entry: dict[str, object] = {"step": step, "epoch": round(epochs, 3), "progress": round(progress, 4)}
        if progress >= min(next_validation, 1.0):
            next_validation = progress + 1 / VALIDATIONS
            entry["validation"] = loss_now = validate(model, held, validation.num_bytes, recipe.batch)
            if loss_now < best_loss:
                best_loss = loss_now
                best = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        if step % LOG_EVERY == 0 or "validation" in entry:
            log(entry | {"left": round(deadline - time.perf_counter(), 2), "loss": loss.item()})
        if progress >= 1:
            break
    if not best:
        raise RuntimeError("the loss on the validation stories was never finite: lower the learning rate")
    model.load_state_dict(best)
    model.eval()
    return best_loss


def _batches(stories: Tokens, copies: Sequence[int], recipe: Recipe) -> Iterator[tuple[float, Tensor]]:
    """Batches without end, all of one shape, and the epochs that are over with each. Every epoch has a new order."""
    for epoch in itertools.count():
        blocks = pack(stories, epoch_order(copies, seed=epoch), recipe.block)
        size = min(recipe.batch, len(blocks))
        batches = blocks[: len(blocks) // size * size].split(size)
        for index, rows in enumerate(batches):
            yield epoch + (index + 1) / len(batches), rows


@torch.no_grad()
def validate(model: Llama, blocks: Tensor, num_bytes: int, batch: int) -> float:
    """Nats per byte of the text that the blocks hold. (Their other tokens, the ends of the stories, count as well.)"""
    model.eval()
    total = 0.0
    for rows in blocks.split(batch):
        with _autocast(rows.device):
            total += summed_nll(model, rows)[0].item()
    model.train()
    return total / num_bytes


def _train_step(
    model: Llama, step_loss: Callable[..., tuple[Tensor, Tensor]], rows: Tensor, optimizer: torch.optim.Optimizer
) -> Tensor:
    """One step; returns the mean loss of a token, still on the device."""
    with _autocast(rows.device):
        nll, count = step_loss(model, rows)
    loss = nll / count
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def _autocast(device: torch.device) -> AbstractContextManager[object]:
    """bfloat16 products on a GPU. Weights, norms and the residual stream stay float32."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


def _optimizer(model: Llama, recipe: Recipe) -> torch.optim.Optimizer:
    """AdamW; the gains of the norms do not decay."""
    model.train()
    matrices = [p for p in model.parameters() if p.dim() == 2]
    gains = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": gains, "weight_decay": 0.0}]
    fused = matrices[0].device.type == "cuda"
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95), fused=fused)


def _compiled_step() -> Callable[..., tuple[Tensor, Tensor]]:
    """`summed_nll` through torch.compile, which here is about twice as fast; plain, if that fails at the first call."""
    compiled = torch.compile(summed_nll, dynamic=False)
    chosen: list[Callable[..., tuple[Tensor, Tensor]]] = [compiled]

    def step_loss(model: Llama, rows: Tensor) -> tuple[Tensor, Tensor]:
        if chosen[0] is compiled:
            try:
                return compiled(model, rows)
            except Exception as error:  # a machine without a C compiler, a version that cannot: all sorts
                print(f"torch.compile failed, going on without it: {str(error).splitlines()[:1]}", flush=True)
                chosen[0] = summed_nll
        return summed_nll(model, rows)

    return step_loss

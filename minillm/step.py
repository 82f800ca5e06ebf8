"""One decode step of n rows, from the tokens to the next tokens, as one function of tensors that never move.

This is what a CUDA Graph records: it feeds its own output back (`state.tokens`), advances the positions and ends rows,
so replaying it again and again generates text with nothing from the host in between. Every argument that is not a
tensor (n, kv_len, mode) is frozen by a capture; `graphs.py` keeps one recording for each combination that it needs.
"""

from collections.abc import Callable

import torch

from .cache import KVCache
from .model import Llama
from .sampling import Mode, sample
from .state import BROKEN, LENGTH, RUNNING, STOP, DecodeState


def step_of(
    model: Llama, cache: KVCache, after_layer: Callable[[int], None] | None = None
) -> Callable[[DecodeState, int, Mode], None]:
    """`decode_step` of this model and cache, which it holds: what `graphs.py` captures and runs."""

    def step(state: DecodeState, kv_len: int, mode: Mode) -> None:
        decode_step(model, cache, state, kv_len, mode, after_layer)

    return step


@torch.inference_mode()
def decode_step(
    model: Llama,
    cache: KVCache,
    state: DecodeState,
    kv_len: int,
    mode: Mode,
    after_layer: Callable[[int], None] | None = None,
) -> None:
    """Every active row of `state` (which may be narrowed to the first n) makes its next token.

    Args:
        kv_len: how much of the cache attention reads; more than every active row's position.
        after_layer: called after each layer with the number of layers done.
    """
    if mode != Mode.GREEDY or not model.decode_to_best(state, cache, kv_len, after_layer):
        finish_step(model, model.decode(state, cache, kv_len, after_layer), state, mode)


def finish_step(model: Llama, logits: torch.Tensor, state: DecodeState, mode: Mode) -> None:
    """`sample_and_advance`, in the kernels that the model decodes with. Also used after a prefill, with n = 1."""
    finish = sample_and_advance if model.fused is None else model.fused.sample_and_advance
    finish(logits, state, mode)


@torch.inference_mode()
def sample_and_advance(logits: torch.Tensor, state: DecodeState, mode: Mode) -> None:
    """Choose each row's next token, put it where the next step reads it, and end the rows that are done.

    Args:
        logits: float32 [n, vocab], of the token that each row fed last.
    """
    tokens, logprobs = sample(logits, state, mode)
    chosen = logits.gather(1, tokens[:, None])[:, 0]  # a NaN or an infinite logit always wins, and is found here
    total = state.positions + 2  # tokens of prompt and answer, the new one included
    finished = torch.where(total >= state.limits, LENGTH, RUNNING)
    finished = torch.where(state.stops.gather(1, tokens[:, None])[:, 0], STOP, finished)
    finished = torch.where(chosen.isfinite(), finished, BROKEN)
    if mode != Mode.GREEDY:
        state.seen.scatter_(1, tokens[:, None], True)
    state.output[:, 0] = tokens
    state.output[:, 1] = finished
    state.output[:, 2] = logprobs.view(torch.int32)
    state.tokens.copy_(tokens.where(state.active, state.tokens))
    state.positions.add_(state.active)
    state.active.logical_and_(finished == RUNNING)

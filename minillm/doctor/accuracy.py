"""Are the logits right? Decode steps and prefill, held against the same weights in float32 and plain operations.

The reference reads the text in one prefill of plain PyTorch operations in float32, whatever the model's dtype and
kernels are. Measured is the relative error of a row's logits, |logits - reference| / |reference| over all tokens that
are compared, and the worst row counts. Two bounds must hold:

- against a prefill of plain operations *in the same dtype*: at most FACTOR times its error, and MARGIN. So a kernel may
  round, but not more than PyTorch rounds. What a dtype costs a model differs from model to model, and this bound moves
  with it. It is a prefill in both checks, because plain decode steps share code with those that are examined.
- LIMITS, whatever plain operations do: a fault that both have in common, a wrong token, angle or head, changes logits
  by a share near 1. Rounding alone changes those of 30 random layers (the shape of SmolLM2-135M) by 0.012 in bfloat16
  and by 0.0015 in float16.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..cache import KVCache
from ..loading import free_bytes
from ..model import Llama
from ..state import DecodeState
from ..weights import allocate, weight_bytes
from .checks import Check
from .patient import Patient

TOKENS = 32  # compared, at the end of the cache; what stands before them is prefilled
FACTOR = 1.5
MARGIN = {torch.bfloat16: 1e-3, torch.float16: 1e-3, torch.float32: 1e-4}
LIMITS = {torch.bfloat16: 0.2, torch.float16: 0.05, torch.float32: 1e-3}

DECODE, PREFILL = "decode = float32", "prefill = float32"


@dataclass(frozen=True)
class Text:
    """Random token ids, int64 [rows, length] on the device, of which the logits from `start` on are compared."""

    ids: Tensor
    start: int


def make_text(patient: Patient) -> Text:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(patient.config.vocab_size, (patient.rows, patient.length), generator=draw)
    return Text(ids.to(patient.device), patient.length - min(TOKENS, patient.length // 2))


def accuracy(patient: Patient) -> list[Check]:
    """Both checks. They are not made if there is no room for a float32 copy of the weights and what goes with it."""
    needed, free = room(patient), free_bytes(patient.device)
    if needed > free:
        why = f"a float32 copy of the model needs {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} are free"
        return [Check(name, None, why) for name in (DECODE, PREFILL)]
    text, length = make_text(patient), patient.length
    exact = by_prefill(in_float32(patient), text)
    plain = by_prefill(Llama(patient.config, patient.model.weights, length), text)
    usual, dtype = relative_error(exact, plain), patient.subject.dtype
    found = {DECODE: by_steps(patient.model, text, patient.cache), PREFILL: by_prefill(patient.model, text)}
    return [judge(name, dtype, usual, relative_error(exact, logits)) for name, logits in found.items()]


def room(patient: Patient) -> int:
    """Bytes of the float32 copy, a cache of one row beside it, and the logits of all four ways to read the text."""
    config, rows, length = patient.config, patient.rows, patient.length
    copy = 0 if patient.subject.dtype == torch.float32 else weight_bytes(config, torch.float32)
    cache = KVCache.bytes_per_token(config, torch.float32) * (length + 1)
    # one set of logits is there twice while it is put together, and a row of two of them in float64
    return copy + cache + (5 * rows + 4) * TOKENS * config.vocab_size * 4


def in_float32(patient: Patient) -> Llama:
    """The same weights, in float32 and plain operations."""
    weights = patient.model.weights
    if patient.subject.dtype != torch.float32:
        weights = allocate(patient.config, patient.device, torch.float32)
        for copy, original in zip(weights.tensors(), patient.model.weights.tensors(), strict=True):
            copy.copy_(original)
    return Llama(patient.config, weights, patient.length)


# ---------------------------------------------------------------------- two ways to read a text


@torch.inference_mode()
def by_prefill(model: Llama, text: Text) -> Tensor:
    """Logits [rows, tokens, vocab] of the end of each row's text, read as a chunk after all that stands before it."""
    length, weights = text.ids.shape[1], model.weights
    cache = KVCache(model.config, 1, length, weights.embed.device, weights.embed.dtype)
    found = []
    for ids in text.ids:
        model.prefill(ids[: text.start], 0, 0, cache)
        found.append(model.prefill(ids[text.start :], 0, text.start, cache, all_logits=True))
    return torch.stack(found)


@torch.inference_mode()
def by_steps(model: Llama, text: Text, cache: KVCache) -> Tensor:
    """The same, of decode steps of all rows: each is fed the text's next token, whatever it would have said."""
    rows, length = text.ids.shape
    for row, ids in enumerate(text.ids):
        model.prefill(ids[: text.start], row, 0, cache)
    state = DecodeState.allocate(rows, model.config.vocab_size, text.ids.device)
    state.active.fill_(True)
    found = []
    for position in range(text.start, length):
        state.tokens.copy_(text.ids[:, position])
        state.positions.fill_(position)
        found.append(model.decode(state, cache, position + 1))
    return torch.stack(found, 1)


# ---------------------------------------------------------------------- the judgement


def relative_error(exact: Tensor, logits: Tensor) -> float:
    """|logits - exact| / |exact| of the worst row: both [rows, tokens, vocab]. NaN if any logit is."""
    errors = []
    for one, other in zip(exact, logits, strict=True):  # a row at a time: float64 of all would take gigabytes
        errors.append(((other.double() - one.double()).norm() / one.double().norm()).item())
    return max(errors, key=lambda error: error if error == error else float("inf"))


def judge(name: str, dtype: torch.dtype, plain: float, ours: float) -> Check:
    """Whether an error passes, beside that of plain operations in the same dtype."""
    kind, limit = str(dtype).removeprefix("torch."), LIMITS[dtype]
    bound = min(FACTOR * plain + MARGIN[dtype], limit) if plain == plain else limit
    seen = (
        f"relative error {ours:.2g}, at most {bound:.2g} ({FACTOR} x {plain:.2g} of plain {kind} operations + "
        f"{MARGIN[dtype]:g}, and never above {limit:g})"
    )
    remedy = f"if plain operations err as much, the model does not bear {kind}: try another --dtype; else report it"
    return Check(name, ours <= bound, seen, remedy)

"""From logits to the next token, as tensor code that a CUDA Graph can record: every parameter is one value a row.

The order of the filters is fixed: repetition penalty, temperature, top-k, top-p (over what top-k left, renormalised),
min-p. The most likely token always survives. Everything is float32.

A draw is not taken from a generator with a hidden state but computed: the noise of a candidate token is a hash of
(seed, position, token id), and the winner is the largest of logit / temperature + Gumbel noise, which is an exact draw
from the softmax (the Gumbel-max trick: Gumbel 1954; Maddison et al. 2014, arXiv:1411.0030, section 2). So a replay
needs nothing from the host, and a row draws the same tokens alone, in a batch, captured or eager.
"""

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .errors import RequestError

if TYPE_CHECKING:
    from .state import DecodeState


LARGEST = 1e30
"""Bound of what becomes a float32: far from its limits, also as a factor of a logit, and beyond any use."""


@dataclass(frozen=True)
class SamplingParams:
    """How one request is answered. Checked when it is made; `RequestError` says what is wrong.

    Attributes:
        max_tokens: tokens to make at most, at least 1.
        temperature: 0 takes the most likely token; 1 is the model's own distribution.
        top_k: keep the k most likely tokens; 0 keeps all. Among equals the lower id is the more likely.
        top_p: keep the most likely tokens until their probability reaches p, in (0, 1]; 1 keeps all
            (nucleus sampling, Holtzman et al. 2019, arXiv:1904.09751).
        min_p: keep tokens at least min_p times as likely as the most likely one, in [0, 1]; 0 keeps all
            (Nguyen et al. 2024, arXiv:2407.01082).
        repetition_penalty: above 1 makes tokens of prompt and answer less likely (Keskar et al. 2019,
            arXiv:1909.05858, section 4.1); 1 is off.
        seed: makes the draws repeatable; None draws a new one for each request.
        stop: strings that end the answer; the text ends before them.
        stop_token_ids: token ids that end the answer, beside the model's own end tokens.
        ignore_eos: go on after the model's own end tokens (not after `stop_token_ids`).
        logprobs: also give the natural log-probability of each token under the model's unchanged distribution.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | tuple[str, ...] | list[str] = ()
    stop_token_ids: tuple[int, ...] | list[int] = ()
    ignore_eos: bool = False
    logprobs: bool = False

    def __post_init__(self) -> None:
        _check_int("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_number("temperature", self.temperature, 0.0, LARGEST)
        _check_int("top_k", self.top_k, 0, 2**31 - 1)
        _check_number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0:
            raise RequestError("top_p must be above 0: it is the probability to keep; temperature=0 is greedy")
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number("repetition_penalty", self.repetition_penalty, 1 / LARGEST, LARGEST)
        if self.seed is not None:
            _check_int("seed", self.seed, 0, 2**64 - 1)
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        if not isinstance(stop, (tuple, list)) or not all(isinstance(s, str) and s for s in stop):
            raise RequestError(f"stop must be a string or a list of non-empty strings, not {self.stop!r}")
        if any("\ud800" <= character <= "\udfff" for text in stop for character in text):
            raise RequestError("stop holds half of a surrogate pair, which no text can contain")
        object.__setattr__(self, "stop", tuple(stop))
        ids = self.stop_token_ids or ()
        if not isinstance(ids, (tuple, list)):
            raise RequestError(f"stop_token_ids must be a list of token ids, not {self.stop_token_ids!r}")
        for token_id in ids:
            _check_int("stop_token_ids", token_id, 0, 2**31 - 1)
        object.__setattr__(self, "stop_token_ids", tuple(ids))
        for name in ("ignore_eos", "logprobs"):
            if getattr(self, name) not in (True, False):
                raise RequestError(f"{name} must be True or False, not {getattr(self, name)!r}")


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RequestError(f"{name} must be a whole number from {low} to {high}, not {value!r}")


def _check_number(name: str, value: object, low: float, high: float) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # a NaN fails every comparison, so the test is written as what must hold
    if not (is_number and low <= value <= high):  # type: ignore[operator]
        raise RequestError(f"{name} must be a number from {low:g} to {high:g}, not {value!r}")


class Mode(IntEnum):
    """How much of the sampler a step needs. Each is recorded as a step of its own; a row's token is the same in any."""

    GREEDY = 0  # the most likely token, nothing else
    SAMPLED = 1  # penalty, temperature, min-p, the draw, log-probabilities: a few passes over the logits
    FILTERED = 2  # top-k and top-p too: a sort of the vocabulary

    @staticmethod
    def of(params: SamplingParams) -> "Mode":
        """The least that these parameters need. At temperature 0 no filter can change the most likely token."""
        if params.temperature == 0:
            plain = params.repetition_penalty == 1 and not params.logprobs
            return Mode.GREEDY if plain else Mode.SAMPLED
        return Mode.FILTERED if params.top_k or params.top_p < 1 else Mode.SAMPLED


def sample(logits: Tensor, state: "DecodeState", mode: Mode) -> tuple[Tensor, Tensor]:
    """Choose the next token of every row.

    Args:
        logits: float32 [n, vocab]. state: the n rows' parameters; each row's new token stands at position + 1.
    Returns: token ids, int64 [n]; natural log-probabilities before any parameter, float32 [n] (0 in GREEDY mode).
    """
    if mode == Mode.GREEDY:
        return logits.argmax(-1), logits.new_zeros(logits.shape[0])
    scores = scale(penalise(logits, state), state)
    if mode == Mode.FILTERED:
        scores = keep_top(scores, state)
    # min-p: p >= min_p * p_max is score >= log(min_p), because the largest score is 0; log(0) keeps everything
    scores = scores.masked_fill(scores < state.min_p.log()[:, None], -math.inf)
    drawn = state.temperature[:, None] > 0
    tokens = (scores + gumbel(state, logits.shape[1]).where(drawn, scores.new_zeros(()))).argmax(-1)
    logprobs = logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(-1)
    return tokens, logprobs


def penalise(logits: Tensor, state: "DecodeState") -> Tensor:
    """Repetition penalty: [n, vocab]. A seen token's logit is divided by it if positive, else multiplied."""
    penalty = state.repetition_penalty[:, None]
    return logits.where(~state.seen, (logits / penalty).where(logits > 0, logits * penalty))


def scale(logits: Tensor, state: "DecodeState") -> Tensor:
    """(logits - max) / temperature: [n, vocab], the largest is 0.

    Subtracting first keeps a tiny temperature finite where it matters: the best stays 0, the rest go towards -inf.
    """
    temperature = state.temperature[:, None]
    return (logits - logits.amax(-1, keepdim=True)) / temperature.where(temperature > 0, temperature.new_ones(()))


def keep_top(scores: Tensor, state: "DecodeState") -> Tensor:
    """Top-k, then top-p: [n, vocab] with -inf for what is cut.

    A token is kept while the probability of all before it is below p, so the one that crosses p is the last kept.
    The sort is stable: among equal scores the lower id comes first. Sums are float64 (where the device has it), so
    their order of addition, which a GPU does not promise, cannot decide.
    """
    vocab, wide = scores.shape[1], torch.float32 if scores.device.type == "mps" else torch.float64
    ordered, index = scores.sort(dim=-1, descending=True, stable=True)
    top_k = state.top_k.where(state.top_k > 0, vocab)[:, None]
    ranks = torch.arange(vocab, device=scores.device)
    ordered = ordered.masked_fill(ranks >= top_k, -math.inf)
    probs = ordered.to(wide).softmax(-1)
    before = probs.cumsum(-1) - probs
    top_p = state.top_p.to(wide)[:, None]
    cut = (before >= top_p) & (top_p < 1) & (ranks > 0)
    return scores.scatter(1, index, ordered.masked_fill(cut, -math.inf))


def gumbel(state: "DecodeState", vocab: int) -> Tensor:
    """Standard Gumbel noise, float32 [n, vocab], a function of (seed, position of the new token, token id) alone."""
    # the seed is mixed before the position is added: users count both from 0, and (1, 2) must not meet (2, 1)
    key = _mix(_mix(state.seeds[:, 0] ^ -1640531527) + (state.positions + 1).int())  # 0x9E3779B9, as 0 mixes to 0
    other = _mix(state.seeds[:, 1] + key)
    token = torch.arange(vocab, device=state.seeds.device, dtype=torch.int32)
    bits = _mix(_mix(token ^ key[:, None]) + other[:, None]) & 0x7FFFFFFF
    # u in (0, 1), exact to 2^-31 near 0, where -log(-log(1 - u)) is large and decides; kept off 1, where it is -inf
    uniform = ((bits.float() + 0.5) * 2.0**-31).clamp(max=1 - 2.0**-24)
    return -(-(-uniform).log1p()).log()


def _mix(x: Tensor) -> Tensor:
    """A bijection of int32 that scatters its input: the finaliser of MurmurHash3 (Appleby 2011), wrapping."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * -2048144789  # 0x85EBCA6B
    x = (x ^ ((x >> 13) & 0x7FFFF)) * -1028477387  # 0xC2B2AE35
    return x ^ ((x >> 16) & 0xFFFF)

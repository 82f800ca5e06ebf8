"""Request: one prompt of token ids on its way through the engine, and what became of it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from .errors import EngineError, MinillmError
from .sampling import Mode, SamplingParams


def _go_on(token_id: int, logprob: float, finish_reason: str | None) -> bool:
    return False


def _ignore() -> None: ...


@dataclass(eq=False)
class Request:
    """One prompt and what became of it.

    Attributes:
        limit: number of tokens, prompt included, at which the answer ends. stops: token ids that end it.
        on_token: called for each token with (token id, logprob, finish reason or None); may end the request by
            returning True.
        on_done: called once, when the request has ended in whatever way.
        finish_reason: "stop", "length", or None while it runs, or if it did not come to its own end.
        error: why it failed, if it did. cancelled: whether it was ended from outside.
        enqueued: tokens of the answer that the device was asked for, of which some may not be delivered yet.
        prefilled: tokens of the prompt whose K and V the device was asked for. cached: how many of them were there
            already. sound: how many of those have given finite logits to a request before.
        scores: for a request that asks for the logits of its prompt and no answer: float32 [T, vocab] of each chunk,
            on the CPU.
    """

    prompt_token_ids: list[int]
    params: SamplingParams
    limit: int
    stops: list[int]
    seed: int
    on_token: Callable[[int, float, str | None], bool] = _go_on
    on_done: Callable[[], None] = _ignore
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: BaseException | None = None
    cancelled: bool = False
    enqueued: int = 0
    prefilled: int = 0
    cached: int = 0
    sound: int = 0
    scores: list[Tensor] | None = None

    @classmethod
    def scoring(cls, token_ids: list[int], on_done: Callable[[], None] = _ignore) -> "Request":
        """A request for the logits after every token of `token_ids`."""
        nothing = SamplingParams(max_tokens=1)
        return cls(token_ids, nothing, len(token_ids) + 1, [], 0, on_done=on_done, scores=[])

    @cached_property
    def mode(self) -> Mode:
        """How much of the sampler its steps need; the same for all of them."""
        return Mode.of(self.params)

    @property
    def done(self) -> bool:
        return self.finish_reason is not None or self.error is not None or self.cancelled

    @property
    def fully_enqueued(self) -> bool:
        """Whether the token that reaches the limit is already on its way."""
        return len(self.prompt_token_ids) + self.enqueued >= self.limit

    @property
    def sound_tokens(self) -> int:
        """How many tokens of prompt and answer have K and V that are known to be finite: logits were made of them."""
        return len(self.prompt_token_ids) + len(self.token_ids) - 1 if self.token_ids else self.sound

    @property
    def written_tokens(self) -> int:
        """How many tokens of prompt and answer have K and V, or will have when the device has done what is enqueued."""
        return len(self.prompt_token_ids) + self.enqueued - 1 if self.enqueued else self.prefilled


def own_fault(fault: BaseException) -> MinillmError:
    """What whoever waits may catch, of a fault that would end his thread."""
    plain = MinillmError(f"the request's own code ended with {type(fault).__name__}: {fault}")
    plain.__cause__ = fault
    return plain


def lost(error: BaseException) -> MinillmError:
    """What a request is told of an error that is not its own. A new object for each: each is raised somewhere."""
    if isinstance(error, MinillmError):
        return type(error)(*error.args)
    if isinstance(error, torch.OutOfMemoryError):
        told = EngineError(f"out of memory while generating, lower max_batch_size or max_seq_len: {error}")
    elif isinstance(error, Exception):
        told = EngineError(f"a step failed, and all open requests with it: {type(error).__name__}: {error}")
    else:
        told = EngineError("a step was interrupted, and its requests are lost")
    told.__cause__ = error
    return told

"""From what an app hands in to what the engine may run: every prompt and parameter is checked here, on the host.

On the device a bad token id would be an assert that poisons the whole process of the app.
"""

import operator
import secrets
from collections.abc import Sequence
from typing import Any

from .answer import Answer
from .config import ModelConfig
from .errors import RequestError
from .pending import Pending
from .request import Request
from .sampling import SamplingParams
from .tokenizer import Tokenizer

Prompt = str | Sequence[int]  # text, or token ids


class Desk:
    """Takes the prompts of one model, whose answers have up to `max_seq_len` tokens, prompt included."""

    def __init__(self, config: ModelConfig, tokenizer: Tokenizer, max_seq_len: int) -> None:
        self._config, self._tokenizer, self._max_seq_len = config, tokenizer, max_seq_len

    def prepare(self, prompt: Prompt, params: SamplingParams | None) -> Pending:
        """One prompt, checked and ready to be submitted. Raises: RequestError, TokenizerError."""
        ids = self.check_ids(self._tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
        params = SamplingParams() if params is None else params
        if not ids:
            raise RequestError(
                "the prompt is empty, and this model has no begin token to start from: give it some text"
            )
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params must be SamplingParams, not {type(params).__name__}")
        for token_id in params.stop_token_ids:
            if token_id >= self._config.vocab_size:
                raise RequestError(
                    f"stop token id {token_id} is not below the vocabulary size {self._config.vocab_size}"
                )
        ends = () if params.ignore_eos else self._config.eos_token_ids
        stops = sorted({*ends, *params.stop_token_ids})
        answer = Answer(self._tokenizer.detokenizer(ids), params.stop, frozenset(stops), params.logprobs)
        limit = min(len(ids) + params.max_tokens, self._max_seq_len)
        seed = secrets.randbits(64) if params.seed is None else params.seed
        return Pending(Request(ids, params, limit, stops, seed), answer)

    def prepare_all(self, prompts: Any, params: Any) -> list[Pending]:
        """A list of prompts, with one SamplingParams or None for all, or a list of them with one for each."""
        if not is_list(prompts):
            raise RequestError(f"prompts must be a text, token ids, or a list of them, not {type(prompts).__name__}")
        each = list(params) if is_list(params) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise RequestError(
                f"{len(prompts)} prompts came with {len(each)} SamplingParams: give one, or one for each"
            )
        prepared = []
        for index, (prompt, p) in enumerate(zip(prompts, each, strict=True)):
            try:
                prepared.append(self.prepare(prompt, p))
            except RequestError as error:
                raise RequestError(f"prompt {index} of the list: {error}") from None
        return prepared

    def check_ids(self, token_ids: Sequence[int]) -> list[int]:
        """Token ids as a list of ints of the vocabulary, not longer than the context. Raises: RequestError."""
        token_ids, vocab_size = unpacked(token_ids), self._config.vocab_size
        if not is_list(token_ids):
            raise RequestError(f"a prompt must be a text or a list of token ids, not {type(token_ids).__name__}")
        ids = list(token_ids)
        # plain ints, as most are, are looked at all at once: one by one, those of a long prompt take half a millisecond
        if not (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab_size):
            ids = [_checked(token_id, index, vocab_size) for index, token_id in enumerate(ids)]
        if len(ids) > self._max_seq_len:
            longer = " or raise max_seq_len" if self._max_seq_len < self._config.max_position_embeddings else ""
            raise RequestError(
                f"the prompt has {len(ids)} tokens and the context {self._max_seq_len}: shorten the prompt{longer}"
            )
        return ids


def _checked(token_id: object, index: int, vocab_size: int) -> int:
    number = as_int(token_id)
    if number is None or not 0 <= number < vocab_size:
        raise RequestError(f"token id {token_id!r} at index {index} is no whole number from 0 to {vocab_size - 1}")
    return number


def is_one(prompts: Any) -> bool:
    """Whether it is one prompt, a text or token ids, and no list of prompts."""
    return isinstance(prompts, str) or (is_list(prompts) and len(prompts) > 0 and as_int(prompts[0]) is not None)


def unpacked(value: Any) -> Any:
    """An array or a tensor as the list of its numbers; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def is_list(value: object) -> bool:
    """Whether it is a list, a tuple or the like; texts and bytes are sequences to Python only."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


def as_int(value: object) -> int | None:
    """A whole number of Python, NumPy or PyTorch as an int; None if it is none (True and False are none)."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return None
    try:
        return operator.index(value)
    except TypeError:  # a tensor of floats has the method, and refuses
        return None

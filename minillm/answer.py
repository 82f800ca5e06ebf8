"""From the token ids of an answer to its text: detokenise, hold back what may become a stop string, end at one.

A stop string may be split over tokens, and a token may hold the end of one and the beginning of other text. So text is
given out only when it can no longer be part of a stop string: the longest tail that is a beginning of one is held back.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from .tokenizer import Detokenizer


@dataclass(frozen=True)
class Chunk:
    """A piece of a streamed answer.

    Attributes:
        text: new text, final; never half a character, never part of a stop string.
        token_ids: the tokens made since the chunk before (some may have given no text yet).
        finish_reason: None until the last chunk: "stop" (end token, stop token or stop string) or "length".
        logprobs: natural log-probability of each of token_ids, if asked for.
    """

    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    logprobs: list[float] | None = None


@dataclass(frozen=True)
class Stats:
    """Figures of one answer. Times are seconds of wall clock, from the submission of the request.

    Attributes:
        time_to_first_token: waiting for a row, prefill and first sample.
        tokens_per_second: of decoding, the first token not counted (0 if there is no second one).
        cached_tokens: tokens of the prompt that were not read again, because a former request had begun with them.
    """

    prompt_tokens: int
    completion_tokens: int
    time_to_first_token: float
    total_time: float
    tokens_per_second: float
    cached_tokens: int = 0


@dataclass(frozen=True)
class Completion:
    """A whole answer.

    Attributes:
        text: without end tokens and without the stop string.
        token_ids: every token made, an end token included.
        finish_reason: "stop" (end token, stop token or stop string) or "length" (max_tokens, or the context is full).
        logprobs: natural log-probability of each token under the model's unchanged distribution, if asked for.
    """

    text: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: str
    logprobs: list[float] | None
    stats: Stats


class Answer:
    """Collects one answer token by token, and cuts it into chunks.

    Args:
        detokenizer: decodes the tokens of this answer. stop: strings that end it.
        end_ids: tokens that end it; they belong to the answer's token ids, and their text does not belong to its text.
    """

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str], end_ids: frozenset[int], logprobs: bool) -> None:
        self._detokenizer, self._stop, self._end_ids, self._logprobs = detokenizer, tuple(stop), end_ids, logprobs
        self._held = ""
        self._new_ids: list[int] = []
        self._new_logprobs: list[float] = []
        self.chunks: list[Chunk] = []

    def add(self, token_id: int, logprob: float, finish_reason: str | None) -> bool:
        """Take the next token; returns whether it completed a stop string, which ends the answer.

        Args:
            finish_reason: what ends the answer with this token, None if nothing does.
        """
        self._new_ids.append(token_id)
        self._new_logprobs.append(logprob)
        if token_id not in self._end_ids or finish_reason != "stop":
            self._held += self._detokenizer.add(token_id)
        if finish_reason is not None:
            self._held += self._detokenizer.flush()
        found = [at for at in (self._held.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self._emit(self._held[: min(found)], "stop")
            return True
        ready = len(self._held) if finish_reason is not None else len(self._held) - self._may_stop()
        text, self._held = self._held[:ready], self._held[ready:]
        if text or finish_reason is not None:
            self._emit(text, finish_reason)
        return False

    def _may_stop(self) -> int:
        """Length of the longest tail of the held text that a stop string begins with."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop):
                return length
        return 0

    def _emit(self, text: str, finish_reason: str | None) -> None:
        logprobs = self._new_logprobs if self._logprobs else None
        self.chunks.append(Chunk(text, self._new_ids, finish_reason, logprobs))
        self._new_ids, self._new_logprobs = [], []

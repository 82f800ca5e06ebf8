"""Requests that come and go: what they ask for and when, and the figures of those that were served."""

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from .report import Row, percentile

Span = tuple[int, int]  # shortest and longest


@dataclass(frozen=True)
class Visit:
    """A request: token ids, how many tokens to make, and when it comes, in seconds from the beginning."""

    prompt: list[int]
    answer: int
    at: float


def draw_visits(
    count: int, prompts: Span, answers: Span, rate: float | None, vocab_size: int, seed: int
) -> list[Visit]:
    """The same for the same arguments: lengths are drawn evenly, both ends included.

    Args:
        rate: requests a second, whose distances are exponential (a Poisson process); None: all come at once.
    """
    draw, at, visits = random.Random(seed), 0.0, []
    for _ in range(count):
        prompt = [draw.randrange(vocab_size) for _ in range(draw.randint(*prompts))]
        visits.append(Visit(prompt, draw.randint(*answers), at))
        at += 0.0 if rate is None else draw.expovariate(rate)
    return visits


@dataclass(frozen=True)
class Served:
    """Times of requests that were served, one for each: seconds from handing it in to its first token and to its end.

    Attributes:
        seconds: from the first request to the end of the last.
    """

    seconds: float
    tokens: int
    first_token_s: list[float]
    latency_s: list[float]

    def row(self, mode: str, rows: int | str) -> Row:
        """The figures of the table that follow from the requests alone."""
        return {
            "mode": mode,
            "rows": rows,
            "requests": len(self.latency_s),
            "requests_per_s": len(self.latency_s) / self.seconds,
            "tokens_per_s": self.tokens / self.seconds,
            "latency_s_mean": statistics.fmean(self.latency_s),
            "latency_s_p50": percentile(self.latency_s, 50),
            "latency_s_p99": percentile(self.latency_s, 99),
            "first_token_s_mean": statistics.fmean(self.first_token_s),
            "first_token_s_p99": percentile(self.first_token_s, 99),
            "full_tokens_per_s": None,
            "replay_tokens_per_s": None,
            "share_of_replay": None,
            "latency_s": self.latency_s,
        }


def mean_length(visits: Sequence[Visit]) -> int:
    """How many tokens a request has on average in the middle of its answer."""
    return round(statistics.fmean(len(visit.prompt) + visit.answer / 2 for visit in visits))

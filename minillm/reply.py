"""One answer on its way to a person: collected as it streams, timed, and put into a line of figures.

What was made must survive whatever ends it, Ctrl-C above all, so it is kept outside of the stream that brings it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING, cast

from .errors import MemoryLimitError

if TYPE_CHECKING:
    from .answer import Stats
    from .graph_report import GraphReport
    from .llm import LLM
    from .sampling import SamplingParams


class Reply:
    """One answer as it grows. After an interrupt it holds what was made until then.

    Attributes:
        text, token_ids: so far. finish_reason: None until the answer has ended by itself.
    """

    def __init__(self, prompt_token_ids: list[int]) -> None:
        self.prompt_token_ids = prompt_token_ids
        self.text, self.token_ids, self.finish_reason = "", list[int](), cast("str | None", None)
        self._started = self._first = self._last = 0.0
        self._in_first = 0  # tokens that came with the first chunk, whose making is not timed

    def stream(self, llm: LLM, params: SamplingParams, show: Callable[[str], None]) -> None:
        """Have the answer made, and show each piece of its text as it comes."""
        self._started = time.perf_counter()
        with closing(llm.stream(self.prompt_token_ids, params)) as chunks:
            for chunk in chunks:
                self._last = time.perf_counter()
                if not self.token_ids:
                    self._first, self._in_first = self._last, len(chunk.token_ids)
                self.text += chunk.text
                self.token_ids += chunk.token_ids
                self.finish_reason = chunk.finish_reason
                show(chunk.text)

    def stats(self) -> Stats:
        """Figures as the reader saw them: time to the first text, speed from there on."""
        from .answer import Stats

        timed, decoding = len(self.token_ids) - self._in_first, self._last - self._first
        return Stats(
            prompt_tokens=len(self.prompt_token_ids),
            completion_tokens=len(self.token_ids),
            time_to_first_token=self._first - self._started,
            total_time=self._last - self._started,
            tokens_per_second=timed / decoding if decoding > 0 else 0.0,
        )


class StatsLine:
    """Writes the line of `--stats`. The machine's bandwidth is measured at the first one."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._bandwidth: float | None = None

    def __call__(self, stats: Stats) -> str:
        """For example "4 prompt tokens, 64 made; first token 0.22 s; 18.0 tokens/s; reads 0.54 GB a token, ..."."""
        parts = [
            f"{stats.prompt_tokens} prompt tokens, {stats.completion_tokens} made",
            f"first token {stats.time_to_first_token:.3f} s",
            f"{stats.tokens_per_second:.1f} tokens/s",
        ]
        if stats.tokens_per_second > 0:
            parts.append(self._share(stats))
        if self._llm.device.type == "cuda":
            parts.append(_graphs(self._llm.graph_report()))
        return "; ".join(parts)

    def _share(self, stats: Stats) -> str:
        from .bandwidth import measure_read_bandwidth
        from .cache import KVCache
        from .cpu_threads import in_passing_thread

        # every step reads the weights and the cache up to its position: on average, half of the answer
        positions = stats.prompt_tokens + stats.completion_tokens / 2
        needed = self._llm.bytes_per_step + positions * KVCache.bytes_per_token(self._llm.config, self._llm.dtype)
        try:
            # in a thread that ends, for the next answers' sake: see `cpu_threads.py`
            device = self._llm.device
            self._bandwidth = self._bandwidth or in_passing_thread(lambda: measure_read_bandwidth(device))
        except MemoryLimitError as error:
            return f"memory bandwidth not measured ({error})"
        rate = needed * stats.tokens_per_second
        return (
            f"reads {needed / 1e9:.3g} GB a token, {rate / 1e9:.3g} GB/s: "
            f"{rate / self._bandwidth:.0%} of the {self._bandwidth / 1e9:.3g} GB/s measured here"
        )


def _graphs(report: GraphReport) -> str:
    eager = f"{report.eager_steps} eager steps"
    if report.eager_reasons:
        eager += f" ({', '.join(report.eager_reasons)})"
    if not report.enabled:
        return f"no graphs, {eager}"
    made = f"{report.graphs} graphs in {report.capture_seconds:.1f} s and {report.pool_bytes / 2**20:.0f} MiB"
    read = report.prefill_replays + report.eager_prefills
    prefills = f", {report.prefill_replays} of {read} prefills replayed" if report.prefill_lengths else ""
    return f"{made}, {report.replays} replays, {eager}{prefills}"

"""Decoding: who takes part in the decode steps, worked out when that changes and not in every step."""

from .request import Request
from .sampling import Mode


class Decoding:
    """The rows that take part in decode steps, and what a step of them needs; made anew only when they change."""

    def __init__(self, rows: list[tuple[int, Request]]) -> None:
        self.rows = rows
        self.highest = rows[-1][0] if rows else -1
        self.position = max((len(r.prompt_token_ids) + r.enqueued - 1 for _, r in rows), default=0)
        self.mode = max((r.mode for _, r in rows), default=Mode.GREEDY)
        self._left = min((r.limit - len(r.prompt_token_ids) - r.enqueued for _, r in rows), default=0)

    def advance(self) -> bool:
        """Count a step that was enqueued; returns whether it was the last of a row."""
        for _, request in self.rows:
            request.enqueued += 1
        self.position += 1
        self._left -= 1
        return self._left == 0

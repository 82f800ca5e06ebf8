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
        self.end = max((r.limit - 1 for _, r in rows), default=0)
        """The tokens that the last step of all sees: the token that reaches a limit is fed to none."""
        self._left = min((r.limit - len(r.prompt_token_ids) - r.enqueued for _, r in rows), default=0)

    def advance(self, steps: int) -> bool:
        """Count steps that were enqueued; returns whether the last of a row was among them."""
        for _, request in self.rows:
            request.enqueued = min(request.enqueued + steps, request.limit - len(request.prompt_token_ids))
        self.position += steps
        self._left -= steps
        return self._left <= 0

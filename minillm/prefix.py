"""RowMemory: what each row of the cache holds, so that a prompt that begins like a former one is not read again.

K and V of a token depend on the tokens before it and on nothing else. So when the next turn of a conversation repeats
all that was said, or many prompts begin with the same instructions, the rows have the K and V of those tokens already.
What counts is the token ids, one by one; nothing is hashed.

Which row a prompt gets: the lowest that is free, because a decode step costs as much as its highest row. What is known
of the prompt is brought there, and what the row held is moved to a row that was not used for longer, if there is one.
To copy K and V costs next to nothing beside computing them.
"""

from collections.abc import Sequence

from .cache import KVCache

WORTH = 16
"""Shorter prefixes (a begin token, a few words by chance) are not worth a copy."""


class RowMemory:
    """The token ids whose K and V stand at the first positions of each row.

    Args:
        enabled: False remembers nothing.
    """

    def __init__(self, cache: KVCache, enabled: bool = True) -> None:
        self._kv, self.enabled = cache.kv, enabled
        self._held: list[Sequence[int]] = [()] * cache.max_batch_size
        self._used = [0] * cache.max_batch_size  # when, counted in uses; 0 is never
        self._uses = 0

    def held(self, row: int) -> Sequence[int]:
        """Token ids whose K and V stand at positions 0, 1, ... of a row."""
        return self._held[row]

    def note(self, row: int, token_ids: Sequence[int]) -> None:
        """A row holds K and V of these tokens from now on."""
        if self.enabled:
            self._uses += 1
            self._held[row], self._used[row] = token_ids, self._uses if token_ids else 0

    def forget(self, row: int) -> None:
        self._held[row], self._used[row] = (), 0

    def forget_all(self) -> None:
        for row in range(len(self._held)):
            self.forget(row)

    def take_oldest(self, free: list[int]) -> int:
        """The free row whose loss costs least, for one who needs a row and leaves nothing of use in it."""
        row = min(free, key=lambda r: self._used[r])
        self.forget(row)
        return row

    def place(self, prompt: list[int], free: list[int]) -> tuple[int, int]:
        """Choose a row for a prompt, and bring there what is known of it.

        Args:
            free: rows without a request, ascending, at least one. The others are read at most.
        Returns: the row, and how many tokens of the prompt it holds. Never all: the last one's logits are wanted.
        Raises: what a copy raises. The rows that it would have written are forgotten then.
        """
        row = free[0]
        shared = [_common(held, prompt) for held in self._held]
        source = max(range(len(shared)), key=lambda r: (shared[r], r == row))
        length = min(shared[source], len(prompt) - 1)
        if length < WORTH:
            source, length = row, 0
        others = [r for r in free if r != row]
        spent = length > 0 and shared[source] == len(self._held[source])  # all that it holds goes into this prompt
        oldest = min(others, key=lambda r: self._used[r], default=row)
        if source in others and spent:
            oldest = source
        elif shared[row] == len(self._held[row]) or self._used[oldest] > self._used[row]:
            oldest = row  # nothing would be lost, or there is nothing older to lose instead
        if oldest == source:
            self._exchange(row, source)
        else:
            self._move(row, oldest)
            self._copy(source, row, length)
        self.note(row, prompt[:length])
        return row, length

    def _move(self, source: int, target: int) -> None:
        held, used = self._held[source], self._used[source]
        self._copy(source, target, len(held))
        self._held[target], self._used[target] = held, used

    def _copy(self, source: int, target: int, length: int) -> None:
        if source != target and length:
            self.forget(target)  # first: a copy that fails may have begun
            self._kv[:, :, target, :, :length].copy_(self._kv[:, :, source, :, :length])

    def _exchange(self, a: int, b: int) -> None:
        if a == b:
            return
        held, used = (self._held[a], self._held[b]), (self._used[a], self._used[b])
        self.forget(a)
        self.forget(b)
        length = max(map(len, held))
        for layer in self._kv:  # [2, rows, kv_heads, slots, head_dim], so that what is put aside is small
            of_a, of_b = layer[:, a, :, :length], layer[:, b, :, :length]
            aside = of_a.clone()
            of_a.copy_(of_b)
            of_b.copy_(aside)
        (self._held[b], self._held[a]), (self._used[b], self._used[a]) = held, used


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix, by halving: comparing slices is fast, and a loop over tokens is not."""
    low, high = 0, min(len(a), len(b))
    if not high or a[0] != b[0]:
        return 0
    a, b = list(a[:high]), b[:high]
    if a == b:
        return high
    while high - low > 1:  # a and b agree up to low, and do not up to high
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low

"""DecodeState: all that a decode step reads or writes besides weights and cache, at addresses that never change.

A captured step is a list of kernels with the addresses of their arguments frozen in. So what changes from step to step
(tokens, positions, who is active, how each row samples) lives in these tensors and is written in place: by the step
itself, which feeds its own token back, and by the host when a request gets a row or loses it.

A row that is not active takes part in a step only as padding, with four decided values: it feeds token 0 at position 0,
reads position 0 of its own row (always finite), and writes to the scratch slot. Its outputs are never read.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from .sampling import SamplingParams

RUNNING, STOP, LENGTH, BROKEN = 0, 1, 2, 3
"""What `DecodeState.finished` holds: goes on; an end token; the limit of tokens; logits that are NaN or infinite."""


@dataclass
class DecodeState:
    """All tensors have one entry a row. `narrow` gives the same state, as views, for some of the rows."""

    rows: Tensor  # int64 [n], 0 .. n - 1
    tokens: Tensor  # int64 [n], the token that the next step feeds
    positions: Tensor  # int64 [n], where that token stands
    active: Tensor  # bool [n]
    limits: Tensor  # int64 [n], the row ends when prompt and answer have this many tokens
    stops: Tensor  # bool [n, vocab], the tokens that end the row
    temperature: Tensor  # float32 [n], 0 is the most likely token
    top_k: Tensor  # int64 [n], 0 is off
    top_p: Tensor  # float32 [n], 1 is off
    min_p: Tensor  # float32 [n], 0 is off
    repetition_penalty: Tensor  # float32 [n], 1 is off
    seeds: Tensor  # int32 [n, 2], the two halves of a 64-bit seed
    seen: Tensor  # bool [n, vocab], the tokens of prompt and answer so far; any where there is no penalty
    output: Tensor  # int32 [n, 3]: token, finished, bits of the float32 logprob: what the host reads, in one copy

    @classmethod
    def allocate(cls, rows: int, vocab_size: int, device: torch.device) -> "DecodeState":
        """State of `rows` inactive rows."""

        def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(rows, *shape, device=device, dtype=dtype)

        return cls(
            rows=torch.arange(rows, device=device),
            tokens=zeros(torch.int64),
            positions=zeros(torch.int64),
            active=zeros(torch.bool),
            limits=zeros(torch.int64),
            stops=zeros(torch.bool, vocab_size),
            temperature=zeros(torch.float32),
            top_k=zeros(torch.int64),
            top_p=zeros(torch.float32),
            min_p=zeros(torch.float32),
            repetition_penalty=zeros(torch.float32) + 1,
            seeds=zeros(torch.int32, 2),
            seen=zeros(torch.bool, vocab_size),
            output=zeros(torch.int32, 3),
        )

    def narrow(self, start: int, count: int) -> "DecodeState":
        """The same state of rows start .. start + count - 1: views, so a write to one is a write to the other."""
        return DecodeState(*(getattr(self, f.name)[start : start + count] for f in fields(self)))

    def snapshot(self) -> list[Tensor]:
        """A copy of every tensor, for `restore`."""
        return [getattr(self, f.name).clone() for f in fields(self)]

    def restore(self, snapshot: list[Tensor]) -> None:
        """Write a snapshot back in place."""
        for field, saved in zip(fields(self), snapshot, strict=True):
            getattr(self, field.name).copy_(saved)

    def admit(
        self, row: int, token_ids: list[int], limit: int, stops: list[int], params: SamplingParams, seed: int
    ) -> None:
        """Give a row to a request whose prompt is in the cache: the next `sample` on this row makes its first token.

        The last write, to `active`, is an ordinary kernel after all the others. The fused kernels that sample after a
        prefill read some of this state before they wait for the kernel in front of them (`kernels/draw.py`), and rely
        on that one as their fence: nothing may be written after it.

        Args:
            token_ids: the prompt. limit: at how many tokens, prompt included, the row ends.
            stops: the token ids that end it. seed: 64 bits.
        """
        # one copy to the device, and few kernels: a launch costs more than all that these write
        numbers = [token_ids[-1], len(token_ids) - 1, limit, params.top_k, seed]
        floats = (params.temperature, params.top_p, params.min_p, params.repetition_penalty)
        packed = struct.unpack("=2q", struct.pack("=4f", *floats))
        # without a penalty it makes no difference which tokens were seen, and to send those of a long prompt would cost
        # more than all the rest
        seen = token_ids if params.repetition_penalty != 1 else ()
        staged = to_device([*map(_signed64, numbers), *packed, *stops, *seen], self.tokens.device)
        one, ints, rest = self.narrow(row, 1), len(numbers), len(numbers) + len(packed)
        whole = [one.tokens, one.positions, one.limits, one.top_k, one.seeds.view(-1).view(torch.int64)]
        torch._foreach_copy_(whole, list(staged[:ints].split(1)))
        parts = [one.temperature, one.top_p, one.min_p, one.repetition_penalty]
        torch._foreach_copy_(parts, list(staged[ints:rest].view(torch.float32).split(1)))
        torch._foreach_zero_([one.stops, one.seen])
        one.stops.view(-1).index_fill_(0, staged[rest : rest + len(stops)], True)
        one.seen.view(-1).index_fill_(0, staged[rest + len(stops) :], True)
        one.active.fill_(True)

    def retire(self, row: int) -> None:
        """Make a row padding."""
        self.active[row].fill_(False)


def to_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """int64 numbers of the host, on the device; on an NVIDIA GPU without waiting for it."""
    pinned = device.type == "cuda"  # memory which PyTorch does not use again before the copy has run
    return torch.tensor(numbers, dtype=torch.int64, pin_memory=pinned).to(device, non_blocking=pinned)


def _signed64(value: int) -> int:
    """The low 64 bits of a number, read as a signed integer."""
    return ((value & 0xFFFFFFFFFFFFFFFF) ^ 0x8000000000000000) - 0x8000000000000000

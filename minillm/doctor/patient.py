"""The patient: a model with its cache, its state and its kernels, as `LLM` has them, and ways to put it somewhere."""

import random
from dataclasses import fields

import torch
from torch import Tensor

from ..bench.runtime import Runtime, Subject, chosen_ops
from ..sampling import Mode, SamplingParams
from ..state import DecodeState
from ..step import decode_step

PARAMS = {
    Mode.GREEDY: SamplingParams(temperature=0.0),
    Mode.SAMPLED: SamplingParams(temperature=0.9, repetition_penalty=1.1),
    Mode.FILTERED: SamplingParams(temperature=0.9, repetition_penalty=1.1, top_k=50, top_p=0.9),
}
"""What requests ask for that need each mode."""


class Patient:
    """What is examined. Its cache starts full of random values.

    Args:
        rows, length: of the cache.
    """

    def __init__(self, subject: Subject, rows: int, length: int) -> None:
        self.subject, self.rows, self.length = subject, rows, length
        self.ops = chosen_ops("auto", subject)[-1]  # what `LLM` takes
        self.runtime = Runtime(subject, rows, length, [self.ops])
        self.model = self.runtime.models[self.ops]
        self.cache, self.state = self.runtime.cache, self.runtime.state
        self.device, self.config = subject.device, subject.config

    def step(self, rows: int, kv_len: int, mode: Mode) -> None:
        """One eager step of the first rows."""
        decode_step(self.model, self.cache, self.state.narrow(0, rows), kv_len, mode)

    def place(self, rows: int, position: int, mode: Mode) -> None:
        """Admit the first `rows` rows, whose next tokens stand at position, position - 1, ... The others are padding.

        None of them ends, by a token or a limit.
        """
        self.state.active.fill_(False)
        draw = random.Random(0)
        for row in range(rows):
            ids = [draw.randrange(self.config.vocab_size) for _ in range(max(position - row, 0) + 1)]
            self.state.admit(row, ids, 2 * self.length + 2, [], PARAMS[mode], seed=row)

    def snapshot(self) -> dict[str, Tensor]:
        """Copies of all that a step writes, by name."""
        names = [f.name for f in fields(DecodeState)]
        return dict(zip(names, self.state.snapshot(), strict=True)) | {"cache": self.cache.kv.clone()}

    def restore(self, snapshot: dict[str, Tensor]) -> None:
        *state, kv = snapshot.values()
        self.state.restore(state)
        self.cache.kv.copy_(kv)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor whose address a recording holds: of state, cache, weights, and the kernels' scratch memory."""
        weights = self.model.weights
        found = {f"state.{f.name}": getattr(self.state, f.name) for f in fields(DecodeState)}
        found |= {"cache.kv": self.cache.kv, "model.rope": self.model.rope}
        found |= {f"weights.{name}": getattr(weights, name) for name in ("embed", "norm", "lm_head")}
        for index, layer in enumerate(weights.layers):
            found |= {f"weights.layers[{index}].{name}": value for name, value in vars(layer).items()}
        if self.model.fused is not None:
            found |= {f"kernels.{name}": value for name, value in vars(self.model.fused).items()}
        return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}

    def addresses(self) -> dict[str, int]:
        return {name: tensor.data_ptr() for name, tensor in self.tensors().items()}

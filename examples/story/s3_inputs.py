"""3. Dynamic inputs: a graph that writes a text.

    python -m examples.story.s3_inputs

A recording is only of use if each replay can do something else. All that changes must be in tensors that stay where
they are: the token, its position, who is active (`minillm/state.py`). The position chooses the rotation, the slot of
the cache and the mask by tensor operations, so no Python number depends on it. The next step needs this step's token:
so the step itself puts it where it reads it (`minillm/step.py`). Then nothing comes from the host any more, and a text
is a row of replays.

What can go wrong, and both are made here:

- an input is bound anew instead of written in place. Eagerly that is the same; a recording goes on reading the tensor
  that it saw, and repeats itself;
- a number that grows is passed as a number. Here it is how much of the cache attention reads: recorded at the first
  token, it hides all later ones, and the text goes wrong later, in a way that looks like a text. So it must be a
  tensor, or a number large enough for all (a bucket), with a mask made from the positions.
"""

import sys
from collections.abc import Callable
from dataclasses import replace

import torch

from minillm.sampling import Mode
from minillm.step import decode_step

from .common import CACHE, PROMPT, Parts, build, capture, milliseconds, start
from .tell import Gain, Options, main

NAME = "examples.story.s3_inputs"
Forward = Callable[[], torch.Tensor]  # the next token of the state as it is now, int64 [1]


def bound_anew(parts: Parts, forward: Forward, steps: int) -> list[int]:
    """The mistake: what the next step reads gets a new tensor. Eagerly this is right."""
    start(parts)
    state, made = parts.state, []
    original = replace(state)  # keeps the tensors alive: a graph that reads freed memory would be worse than wrong
    for _ in range(steps):
        state.tokens = forward().clone()
        state.positions = state.positions + 1
        made.append(state.tokens)
    state.tokens, state.positions = original.tokens, original.positions
    return torch.cat(made).tolist()


def in_place(parts: Parts, forward: Forward, steps: int) -> list[int]:
    """The remedy: the same tensors get new values."""
    start(parts)
    state, made = parts.state, []
    for _ in range(steps):
        state.tokens.copy_(forward())
        state.positions.add_(1)
        made.append(state.tokens.clone())
    return torch.cat(made).tolist()


def feeding_itself(parts: Parts, step: Callable[[], object], steps: int) -> list[int]:
    """The trick: the step writes its own inputs, and the host only keeps a copy of each token."""
    start(parts)
    made = torch.zeros(steps, dtype=torch.int64, device=parts.state.tokens.device)
    for index in range(steps):
        step()
        made[index : index + 1].copy_(parts.state.tokens)
    return made.tolist()


def next_token(parts: Parts, kv_len: int) -> torch.Tensor:
    """Changes nothing but the cache."""
    return parts.model.decode(parts.state, parts.cache, kv_len).argmax(-1)


def agree(text: list[int], other: list[int]) -> int:
    """How many tokens at the beginning are the same."""
    return next((i for i, (a, b) in enumerate(zip(text, other, strict=True)) if a != b), len(text))


def measure(options: Options) -> list[Gain]:
    parts, steps, stream = build(options.shape), options.steps, torch.cuda.Stream()
    out = torch.zeros_like(parts.state.tokens)

    def recorded(kv_len: int) -> Forward:
        start(parts)
        graph = capture(lambda: out.copy_(next_token(parts, kv_len)), stream)

        def forward() -> torch.Tensor:
            graph.replay()
            return out

        return forward

    text = bound_anew(parts, lambda: next_token(parts, CACHE), steps)
    enough, frozen = recorded(CACHE), recorded(PROMPT)
    wrong, late = bound_anew(parts, enough, steps), in_place(parts, frozen, steps)
    assert in_place(parts, enough, steps) == text
    notes = [
        f"eager: {text[:6]} ...; the same loop around a graph, inputs bound anew: {wrong[:6]} ...",
        f"kv_len recorded as the {PROMPT} of the first token: {agree(text, late)} of {steps} tokens are right",
    ]

    def step() -> None:
        decode_step(parts.model, parts.cache, parts.state, CACHE, Mode.GREEDY)

    start(parts)
    graph = capture(step, stream)
    assert feeding_itself(parts, step, steps) == feeding_itself(parts, graph.replay, steps) == text
    checked = f"{steps} token ids: eager, inputs written in place, and a graph that feeds itself"
    bars = {
        "eager": milliseconds(lambda: feeding_itself(parts, step, steps), steps),
        "a graph that feeds itself": milliseconds(lambda: feeding_itself(parts, graph.replay, steps), steps),
    }
    return [Gain(3, "dynamic inputs by in-place updates", options.shape, bars, "a token of a text", checked, notes)]


if __name__ == "__main__":
    sys.exit(main(NAME, __doc__, [measure]))

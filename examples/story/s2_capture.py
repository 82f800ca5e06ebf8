"""2. The first captured step.

    python -m examples.story.s2_capture

A CUDA Graph is a recording of launches, which one call replays. The step of chapter 1 is recorded as it stands, at one
position. First it runs once on the stream that will record, because libraries make their handles, workspaces and
modules at their first use, which must not fall into a recording. Then the same call under `torch.cuda.graph` runs no
kernel: it notes each launch, its arguments, and the memory it uses. `replay` launches all of them at once.

The gain is large, and the recording is useless so far: it makes one and the same step for ever. What is frozen:

- addresses: it reads the token where the tensor lay. A new value *in* that tensor is seen, a new tensor is not;
- numbers: the position was a Python number, and is a constant now, as is every shape that followed from it;
- Python itself: nothing of it runs in a replay, no `if`, no `print`, no counter.

What can go wrong, then, makes no error. Asked for another position, a replay writes to the old one and says nothing.
"""

import sys
from collections.abc import Callable

import torch

from .common import PROMPT, Parts, build, milliseconds, start, warm_up
from .tell import Gain, Options, main

NAME = "examples.story.s2_capture"


class FixedStep:
    """One step of row 0: reads `token`, writes `following`, and stands at a position that is a Python number."""

    def __init__(self, parts: Parts) -> None:
        self.parts, self.position = parts, PROMPT
        self.token = torch.tensor(parts.prompt[-1:], device=parts.cache.kv.device)
        self.following = torch.zeros_like(self.token)

    def __call__(self) -> None:
        logits = self.parts.model.prefill(self.token, 0, self.position, self.parts.cache)
        self.following.copy_(logits.argmax(-1))

    def answer(self, run: Callable[[], object], token_id: int) -> int:
        """What a run makes of a token that is put where the step reads it."""
        self.token.fill_(token_id)
        run()
        return int(self.following)


def written(parts: Parts, run: Callable[[], object]) -> list[int]:
    """The positions of row 0 that a run writes."""
    keys = parts.cache.kv[0, 0, 0]  # of the first layer: [kv_heads, positions, head_dim]
    before = keys.clone()
    keys.zero_()
    run()
    found = keys.ne(0).any(-1).any(0).nonzero()[:, 0].tolist()
    keys.copy_(before)
    return found


def measure(options: Options) -> list[Gain]:
    parts = build(options.shape)
    start(parts)
    step = FixedStep(parts)

    stream = torch.cuda.Stream()
    warm_up(step, stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()

    tokens = parts.prompt[:8]
    assert [step.answer(step, token) for token in tokens] == [step.answer(graph.replay, token) for token in tokens]
    checked = f"the answers to {len(tokens)} tokens, each put into the same tensor"

    def repeat(run: Callable[[], object]) -> Callable[[], None]:
        def work() -> None:
            for _ in range(options.steps):
                run()

        return work

    bars = {
        "eager": milliseconds(repeat(step), options.steps),
        "replayed": milliseconds(repeat(graph.replay), options.steps),
    }
    step.position += 1
    notes = [
        f"asked for position {step.position}: an eager step writes {written(parts, step)}, "
        f"a replay writes {written(parts, graph.replay)} and says nothing"
    ]
    return [Gain(2, "the first captured step", options.shape, bars, "a step", checked, notes)]


if __name__ == "__main__":
    sys.exit(main(NAME, __doc__, [measure]))

"""7. Many steps in one launch.

    python -m examples.story.s7_many_steps

A replay is one call, and still one call a token; and whoever reads each token before the next replay makes the GPU wait
for the way there and back. The step feeds itself (chapter 3), so nothing speaks against recording it several times in
a row: one launch then makes k tokens. Each step copies its output to a place of its own in a ring, and the host reads
the whole ring once.

What it costs: tokens come in handfuls, so the first of them waits for the last; and a text that ends in the middle of
a launch leaves steps over, whose tokens mean nothing. They do no harm, because the step itself makes a row that has
ended padding, which writes to the scratch slot, and the host throws away what comes after the end. What can go wrong
is a ring without the note of who had ended when, or a row that runs on behind the end of its cache.

The smaller the model, the more it gains: the step gets shorter, the way to the host and back does not.
"""

import sys
from collections.abc import Callable, Sequence

import torch

from minillm.sampling import Mode
from minillm.state import RUNNING
from minillm.step import decode_step

from .common import CACHE, PROMPT, Parts, build, capture, milliseconds, start
from .tell import Gain, Options, main

NAME = "examples.story.s7_many_steps"
COUNTS = (1, 4, 16, 64)  # steps in a launch; `MOST_STEPS` leaves room for the last launch


class ManySteps:
    """k steps as one function of tensors. ring: int32 [k, rows, 3], the output of each step (`DecodeState.output`)."""

    def __init__(self, parts: Parts, count: int) -> None:
        self.parts = parts
        self.ring = parts.state.output.new_zeros(count, *parts.state.output.shape)

    def __call__(self) -> None:
        for output in self.ring:
            decode_step(self.parts.model, self.parts.cache, self.parts.state, CACHE, Mode.GREEDY)
            output.copy_(self.parts.state.output)


def read(ring: torch.Tensor, wanted: int) -> tuple[list[int], bool]:
    """The token ids of row 0, at most so many, and whether the text has ended. What comes after its end is dropped."""
    made: list[int] = []
    for token_id, finished, _ in ring[:, 0].tolist():  # waits for the GPU
        made.append(token_id)
        if finished != RUNNING or len(made) == wanted:
            return made, True
    return made, False


def text_of(
    many: ManySteps, launch: Callable[[], object], steps: int, stops: Sequence[int] = ()
) -> tuple[list[int], int]:
    """A text of at most so many tokens, and how many tokens were made and dropped."""
    start(many.parts, stops)
    made: list[int] = []
    launches, ended = 0, False
    while not ended:
        launch()
        launches += 1
        found, ended = read(many.ring, steps - len(made))
        made += found
    return made, launches * len(many.ring) - len(made)


def an_end(text: list[int]) -> int:
    """A token of the text to take as its end: one that is new where it stands, at about three fifths."""
    return text[min((text.index(token_id) for token_id in text), key=lambda at: abs(at - 3 * len(text) // 5))]


def one_shape(shape: str, steps: int) -> Gain:
    parts, stream, pool = build(shape), torch.cuda.Stream(), torch.cuda.graph_pool_handle()
    single = ManySteps(parts, 1)
    text, _ = text_of(single, single, steps)
    stop = an_end(text)
    expected = text[: text.index(stop) + 1]

    bars, dropped = {}, []
    for count in (count for count in COUNTS if count <= steps):
        many = ManySteps(parts, count)
        start(parts)
        graph = capture(many, stream, pool)
        assert text_of(many, graph.replay, steps)[0] == text
        found, rest = text_of(many, graph.replay, steps, [stop])
        assert found == expected
        dropped.append(f"{rest} of {count} a launch")
        launches = range(steps // count)

        def work(graph: torch.cuda.CUDAGraph = graph, many: ManySteps = many, launches: range = launches) -> None:
            parts.state.positions.fill_(PROMPT)  # so that the row never reaches its limit
            for _ in launches:
                graph.replay()
                read(many.ring, len(many.ring))

        start(parts)
        bars[f"{count} a launch"] = milliseconds(work, len(launches) * count)
    checked = f"{steps} token ids, eager and each number of steps; a text that ends after {len(expected)} too"
    notes = [f"tokens dropped behind that end: {', '.join(dropped)}"]
    return Gain(7, "many steps in one launch", shape, bars, "a token", checked, notes)


def measure(options: Options) -> list[Gain]:
    return [one_shape(shape, options.steps) for shape in dict.fromkeys(("stories", options.shape))]


if __name__ == "__main__":
    sys.exit(main(NAME, __doc__, [measure]))

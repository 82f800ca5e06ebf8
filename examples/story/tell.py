"""How the programs of the story tell what they measured: options, figures, the line of a gain, and a JSON file."""

import gc
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from minillm.bench.machine import describe
from minillm.bench.report import check_outputs, write_file
from minillm.bench.shapes import SHAPES
from minillm.command import Parser, run, write
from minillm.errors import ConfigError

from .common import MOST_STEPS


@dataclass(frozen=True)
class Options:
    """shape: a name of `minillm/bench/shapes.py`. steps: tokens a text, from 2 on."""

    shape: str = "smollm2-135m"
    steps: int = 128


@dataclass(frozen=True)
class Gain:
    """What one program measured, the same work without its trick and with it.

    Attributes:
        bars: milliseconds of each way, without the trick first, with all of it last. unit: what they are of.
        checked: what was found equal before anything was timed. notes: other figures, a sentence each.
    """

    chapter: int
    title: str
    shape: str
    bars: dict[str, float]
    unit: str
    checked: str
    notes: list[str] = field(default_factory=list)

    def text(self) -> str:
        figures = ", ".join(f"{name} {value:#.3g} ms" for name, value in self.bars.items())
        return "\n".join((f"checked: {self.checked}", *self.notes, f"{figures} {self.unit}: {times(self.bars):.1f}x"))


def times(bars: dict[str, float]) -> float:
    """How many times faster the last is than the first."""
    first, *_, last = bars.values()
    return first / last


class Missing(Exception):
    """What a program needs and does not find: it says so, and that is no failure."""


Program = Callable[[Options], list[Gain]]


def main(name: str, about: str, programs: Sequence[Program], arguments: Sequence[str] | None = None) -> int:
    """Run programs in order and print what each gained; the exit status. `about` is a docstring."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    return run(lambda: _tell(name, about, programs, given))


def _tell(name: str, about: str, programs: Sequence[Program], given: list[str]) -> int:
    parser = Parser(name, about.partition("\n")[0])
    add = parser.add_argument
    add("--shape", choices=SHAPES, default=Options.shape, metavar="NAME", help=f"of {', '.join(SHAPES)}")
    add("--steps", type=int, default=Options.steps, metavar="N", help="tokens of a text (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="also write the figures there")
    options = parser.parse_args(given)
    if not 2 <= options.steps <= MOST_STEPS:
        raise ConfigError(f"--steps must be from 2 to {MOST_STEPS}, not {options.steps}")
    check_outputs(options.json, None)
    if not torch.cuda.is_available():
        write(f"{name} needs a CUDA device, because it records CUDA Graphs; PyTorch {torch.__version__} sees none.\n")
        return 0
    facts = describe(torch.device("cuda"), []) | {"command": " ".join(["python", "-m", name, *given])}
    write(f"{facts['machine']}, {facts['versions']}; {options.shape}, bfloat16, random weights\n")
    gains = [gain for program in programs for gain in _gains(program, Options(options.shape, options.steps))]
    if options.json is not None:
        content = json.dumps({"bench": "story", **facts, "rows": [asdict(gain) for gain in gains]}, indent=1)
        write_file(options.json, lambda: options.json.write_text(content + "\n", encoding="utf-8"))
    return 0


def _gains(program: Program, options: Options) -> list[Gain]:
    try:
        with torch.inference_mode():
            gains = program(options)
    except Missing as what:
        write(f"\n{what}\n")
        return []
    for gain in gains:
        write(f"\n{gain.chapter}. {gain.title} ({gain.shape})\n{gain.text()}\n")
    gc.collect()
    torch.cuda.empty_cache()  # the next program finds the memory as this one did
    return gains

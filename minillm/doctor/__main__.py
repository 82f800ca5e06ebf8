"""The command line, `python -m minillm.doctor`; the package says what it looks at."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ..bench.arguments import positive
from ..bench.report import check_file, write_file
from ..bench.shapes import SHAPES
from ..command import Parser, leave, run, write
from ..errors import ConfigError, MemoryLimitError

CHECK_FAILED = 1
CONTEXT, SHORTEST = 512, 16


def build_parser() -> Parser:
    parser = Parser(
        "minillm.doctor",
        "Check that a model runs right here, and what CUDA graphs gain. The exit status is 1 if a check fails.",
    )
    add, model = parser.add_argument, parser.add_mutually_exclusive_group()
    model.add_argument("--model", metavar="MODEL", help="directory, .gguf file, or hub id (default: the small model)")
    model.add_argument("--shape", choices=SHAPES, metavar="NAME", help=f"random weights of: {', '.join(SHAPES)}")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps (default: auto, the GPU if there is one)")
    add("--dtype", default="auto", help="auto, float32, float16 or bfloat16 (default: auto: float32 on a CPU)")
    add("--rows", type=positive, default=1, metavar="N", help="requests at once (default: %(default)s)")
    about = f"tokens of the cache; steps run at its end (default: {CONTEXT}, or the model's context if it is shorter)"
    add("--context", type=positive, metavar="N", help=about)
    about = "write a Chrome trace of some steps to this file (open it in Perfetto or chrome://tracing)"
    add("--trace", type=Path, metavar="FILE", help=about)
    add("--json", type=Path, metavar="FILE", help="also write the findings to this file")
    return parser


def doctor(arguments: Sequence[str]) -> int:
    options = build_parser().parse_args(arguments)
    for path in (options.trace, options.json):
        if path is not None:
            check_file(path)
    length = _context(options)

    import torch

    from ..bench.machine import describe
    from ..bench.runtime import make_subject
    from .examination import examine
    from .text import as_json, report

    try:
        subject = make_subject(options, options.rows, length)
        findings = examine(subject, options.rows, length, traced=options.trace is not None)
    except torch.OutOfMemoryError as error:
        raise MemoryLimitError(
            f"out of memory: lower --rows or --context, or take a smaller model ({error})"
        ) from error
    about = describe(subject.device, arguments, "minillm.doctor") | {"model": str(subject)}
    about["cache"] = f"{options.rows} x {length} tokens"
    write(report(about, findings))
    if options.json is not None:
        text = json.dumps(as_json(about, findings), indent=1) + "\n"
        write_file(options.json, lambda: options.json.write_text(text, encoding="utf-8"))
    if options.trace is not None and findings.trace is not None:
        text = json.dumps(findings.trace)
        write_file(options.trace, lambda: options.trace.write_text(text, encoding="utf-8"))
    return CHECK_FAILED if findings.failed else 0


def _context(options: argparse.Namespace) -> int:
    """How long the cache will be. Settles `options.model` on the way. Raises: ConfigError, CheckpointError."""
    from ..config import ModelConfig
    from ..hub import resolve_model

    if options.shape is not None:
        config = ModelConfig.from_dict(SHAPES[options.shape])
    else:
        options.model = resolve_model(options.model)
        config = ModelConfig.from_dir(options.model)
    longest = config.max_position_embeddings
    length: int = min(CONTEXT, longest) if options.context is None else options.context
    if not SHORTEST <= length <= longest:
        raise ConfigError(f"--context must be from {SHORTEST} to the model's context of {longest}, not {length}")
    return length


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status that `command.py` lists."""
    given = sys.argv[1:] if arguments is None else arguments
    return run(lambda: doctor(given))


if __name__ == "__main__":
    leave(main())

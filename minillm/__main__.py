"""`minillm COMMAND ...`, or `python -m minillm COMMAND ...`: one name for all commands.

Each command is a module with a `main` of its own, which also runs as `python -m minillm.COMMAND`.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from .command import Parser, leave, run

COMMANDS = {  # module, what it does
    "generate": (".generate", "continue a prompt; the text streams to stdout"),
    "chat": (".chat", "talk with a model"),
    "convert": (".convert", "turn a GGUF file into a model directory"),
    "download": (".download", "fetch a small real model"),
    "doctor": (".doctor.__main__", "check that a model runs right here, and what graphs gain"),
    "bench": (".bench.__main__", "measure decode steps, serving, and the memory of the graphs"),
}


def build_parser() -> Parser:
    parser = Parser("minillm", "A minimal Llama runtime: static KV cache, CUDA Graph decoding.")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    listing = "\n".join(f"  {name:10}{about}" for name, (_, about) in COMMANDS.items())
    parser.epilog = f"commands (minillm COMMAND --help lists the options of one):\n{listing}"
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=f"one of {', '.join(COMMANDS)}")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="its options")
    return parser


def dispatch(arguments: Sequence[str]) -> int:
    options = build_parser().parse_args(arguments)
    module = import_module(COMMANDS[options.command][0], __package__)
    status: int = module.main(options.rest)
    return status


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status that `command.py` lists."""
    return run(lambda: dispatch(sys.argv[1:] if arguments is None else arguments))


def script() -> NoReturn:
    """What the installed `minillm` runs."""
    leave(main())


if __name__ == "__main__":
    script()

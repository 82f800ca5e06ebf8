"""The command line, `python -m minillm.bench decode|...|picture`; the package says what each command does."""

import argparse
import json
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from ..command import Parser, leave, run, write
from ..errors import ConfigError, MemoryLimitError
from .arguments import launch_sizes, positive, positives, rate, some_of, span, whole
from .shapes import SHAPES

if TYPE_CHECKING:
    from .report import Report

PEERS = ("eager", "compile")


def build_parser() -> Parser:
    parser = Parser("minillm.bench", "Measure decode steps, prefills, serving, traffic, or graphs.")
    names = "decode|prefill|serve|traffic|launches|pool|retarget|pieces|picture"
    benches = parser.add_subparsers(dest="bench", required=True, metavar=names, prog="minillm.bench")
    about = {
        "decode": "the time of one decode step, its share of the memory bandwidth, and transformers beside it",
        "prefill": "the time to read a prompt, its share of the arithmetic ceiling, and transformers beside it",
        "serve": "latency and requests/s of batches of mixed sizes: eager, graphs, graphs with one memory pool",
        "traffic": "requests that come and go: requests/s, latency, time to first token, and what the engine costs",
        "launches": "many tokens in one launch: a recording of several steps, and a loop on the device",
        "pool": "memory of the graphs: one pool largest first, smallest first, a pool for each graph",
        "retarget": "the time to point all graphs at another KV cache or other weights, beside capturing them anew",
        "pieces": "the time of one decode step captured as one graph, or as several",
    }
    for name, text in about.items():
        bench = benches.add_parser(name, description=text[0].upper() + text[1:] + ".", help=text)
        _add_common(bench)
        add_options = {
            "decode": _add_decode, "prefill": _add_prefill, "serve": _add_serve, "traffic": _add_traffic,
            "launches": _add_launches, "pool": _add_pool, "retarget": _add_retarget, "pieces": _add_pieces,
        }[name]  # fmt: skip
        add_options(bench)
    _add_picture(benches)
    return parser


def _add_common(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--shape", choices=SHAPES, metavar="NAME", help=f"random weights of: {', '.join(SHAPES)}")
    model.add_argument("--model", metavar="MODEL", help="directory, .gguf file, or hub id org/name")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps (default: auto, the GPU if there is one)")
    add("--dtype", default="auto", help="auto, float32, float16 or bfloat16 (default: auto: float32 on a CPU)")
    add("--threads", type=positive, metavar="N", help="CPU threads of PyTorch (default: its own choice)")
    add(
        "--ops",
        choices=("auto", "plain", "fused"),
        default="auto",
        help="operations: plain PyTorch or fused kernels (default: auto: decode and prefill take both where they run, "
        "the others what LLM takes)",
    )
    add("--json", type=Path, metavar="FILE", help="also write everything, raw samples included, to this file")
    add("--plot", type=Path, metavar="FILE.png", help="also draw it (needs matplotlib, the extra `plot`)")


def _add_decode(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--batch", type=positives, default=[1], metavar="N,...", help="rows, one or several (default: 1)")
    add("--prompt", type=positives, default=[512], metavar="N,...", help="tokens of the prompts (default: 512)")
    add("--cache", type=positives, default=[1024], metavar="N,...", help="tokens of the cache (default: 1024)")
    add("--steps", type=positive, default=200, metavar="N", help="decode steps of a run (default: %(default)s)")
    add("--rounds", type=positive, default=3, metavar="N", help="runs of each mode, in turns (default: %(default)s)")
    _add_temperature(parser)
    about = "transformers beside it, of eager,compile (default: auto: what is installed and runs here)"
    _add_peers(parser, PEERS, about)


def _add_prefill(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--prompt", type=positives, default=[512], metavar="N,...", help="tokens of the prompts (default: 512)")
    add("--chunk", type=positive, metavar="N", help="tokens that minillm reads at once (default: the whole prompt)")
    add("--rounds", type=positive, default=20, metavar="N", help="prefills of each mode (default: %(default)s)")
    _add_peers(parser, PEERS[:1], "transformers beside it: eager (default: auto: if it is installed)")


def _add_peers(parser: argparse.ArgumentParser, known: Sequence[str], about: str) -> None:
    add = parser.add_argument
    add("--peers", type=some_of(*known, "auto"), default=["auto"], metavar="LIST", help=about)
    add("--no-peers", dest="peers", action="store_const", const=[], help="minillm alone")


def _add_serve(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    _add_sizes(parser)
    add("--requests", type=positive, default=512, metavar="N", help="batches to serve (default: %(default)s)")
    add("--prompt", type=positive, default=512, metavar="N", help="positions are below this (default: %(default)s)")
    add("--steps", type=positive, default=8, metavar="N", help="decode steps of a request (default: %(default)s)")
    add("--seed", type=int, default=0, metavar="S", help="of the sizes and positions (default: %(default)s)")
    _add_temperature(parser)


def _add_traffic(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--requests", type=positive, default=512, metavar="N", help="(default: %(default)s)")
    add("--rows", type=positives, default=[32], metavar="N,...", help="requests at once, more wait (default: 32)")
    add(
        "--prompt-lengths",
        type=span,
        default=(16, 1024),
        metavar="A:B",
        help="tokens of the prompts, drawn evenly (default: 16:1024)",
    )
    add(
        "--answer-lengths",
        type=span,
        default=(16, 512),
        metavar="A:B",
        help="tokens of the answers, drawn evenly (default: 16:512)",
    )
    add("--arrival", choices=("all", "poisson"), default="all", help="all at once, or at random (default: all)")
    add("--rate", type=rate, metavar="R", help="requests a second of --arrival poisson")
    add("--seed", type=int, default=0, metavar="S", help="of lengths, token ids and arrival (default: %(default)s)")
    add(
        "--modes",
        type=some_of("graphs", "eager"),
        metavar="LIST",
        help="of graphs,eager (default: both where there is a GPU, else eager)",
    )
    add(
        "--eager-requests",
        type=positive,
        default=64,
        metavar="N",
        help="eager launches serve the first N of the requests alone (default: %(default)s)",
    )
    add(
        "--conversation",
        type=whole,
        default=2000,
        metavar="N",
        help="tokens of the conversation whose second turn is timed, 0 leaves it out (default: %(default)s)",
    )
    add(
        "--peers",
        type=some_of("transformers"),
        default=[],
        metavar="transformers",
        help="also the continuous batching of transformers (default: minillm alone)",
    )


def _add_launches(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--steps-per-graph",
        type=launch_sizes,
        default=[1, 4, 16, "until_done"],
        metavar="LIST",
        help="steps of a launch, numbers or until_done (default: 1,4,16,until_done)",
    )
    add("--prompt", type=positive, default=16, metavar="N", help="tokens of the prompt (default: %(default)s)")
    add("--tokens", type=positive, default=200, metavar="N", help="tokens of an answer (default: %(default)s)")
    add("--cache", type=positive, default=512, metavar="N", help="tokens of the cache (default: %(default)s)")
    add("--rounds", type=positive, default=20, metavar="N", help="answers of each, in turns (default: %(default)s)")
    _add_temperature(parser)


def _add_pool(parser: argparse.ArgumentParser) -> None:
    _add_sizes(parser)
    parser.add_argument("--layout", help=argparse.SUPPRESS)  # measure this one alone, in this process


def _add_retarget(parser: argparse.ArgumentParser) -> None:
    _add_sizes(parser)
    help_text = "captures, each with six changes after it (default: %(default)s)"
    parser.add_argument("--rounds", type=positive, default=5, metavar="N", help=help_text)


def _add_pieces(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--pieces", type=positives, metavar="K,...", help="graphs in a step (default: 1,2,4,8, up to the layers)")
    add("--batch", type=positive, default=1, metavar="N", help="rows (default: %(default)s)")
    add("--prompt", type=positive, default=512, metavar="N", help="tokens before the steps (default: %(default)s)")
    add("--cache", type=positive, default=1024, metavar="N", help="tokens of the cache (default: %(default)s)")
    add("--steps", type=positive, default=200, metavar="N", help="decode steps of a run (default: %(default)s)")
    add("--rounds", type=positive, default=3, metavar="N", help="runs of each, in turns (default: %(default)s)")


def _add_picture(benches: "argparse._SubParsersAction[Parser]") -> None:
    text = "decode results as one picture: eager, one graph, fused kernels, and the floor, for each model"
    add = benches.add_parser("picture", description=text[0].upper() + text[1:] + ".", help=text).add_argument
    add("results", nargs="+", type=Path, metavar="RESULT.json", help="what `decode --json` wrote, a panel each")
    add("--output", type=Path, required=True, metavar="FILE.png", help="the picture (needs matplotlib, extra `plot`)")


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--max-batch", type=positive, default=32, metavar="N", help="largest batch (default: %(default)s)")
    add("--cache", type=positive, default=1024, metavar="N", help="tokens of the cache (default: %(default)s)")


def _add_temperature(parser: argparse.ArgumentParser) -> None:
    help_text = "0 takes the most likely token, above 0 draws (default: 0)"
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help=help_text)


def bench(arguments: Sequence[str]) -> int:
    options = build_parser().parse_args(arguments)
    if options.bench == "picture":
        from .picture import picture

        picture(options.results, options.output)
        return 0

    import torch

    from .report import check_outputs

    check_outputs(options.json, options.plot)
    on_gpu = torch.cuda.is_available() and options.device.startswith(("auto", "cuda"))
    if options.bench in ("serve", "launches", "pool", "retarget", "pieces") and not on_gpu:
        raise ConfigError(f"{options.bench} measures CUDA graphs and needs a GPU: run it on one, or run decode")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    try:
        report = _measure(options, arguments)
    except torch.OutOfMemoryError as error:
        remedy = "use smaller batches, prompts or caches, or --no-peers"
        raise MemoryLimitError(f"out of memory: {remedy} ({error})") from error
    if report is None:
        return 0
    write(report.text())
    if options.json is not None:
        report.write_json(options.json)
    if options.plot is not None:
        report.plot(options.plot)
    return 0


def _measure(options: argparse.Namespace, arguments: Sequence[str]) -> "Report | None":
    """Run the benchmark, a function of the module of its name. None: there is no table, what was found is written."""
    if options.bench == "pool" and options.layout is not None:
        from .pool import measure_layout

        write(json.dumps(measure_layout(options)) + "\n")
        return None
    measure = getattr(import_module(f".{options.bench}", __package__), options.bench)
    report: Report = measure(options, arguments)
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status that `command.py` lists."""
    given = sys.argv[1:] if arguments is None else arguments
    return run(lambda: bench(given))


if __name__ == "__main__":
    leave(main())

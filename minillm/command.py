"""What the commands share: options, loading, what goes to which stream, and how a command ends.

A command line is a contract with the shell, and most of it is about the ends:

    0    done
    1    `doctor` alone: a check failed
    2    bad input: one line on stderr that says what and what to do, no traceback
    130  Ctrl-C (128 + SIGINT): what was made stays on stdout
    141  the reader of stdout went away, as in `| head -c 5` (128 + SIGPIPE): quiet, as with any other tool

stdout carries the model's text and nothing else; progress bars, notes, warnings and figures go to stderr. PyTorch
takes seconds to import, so this file does it only when a model is wanted: `--help` and a wrong option answer at once.
"""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, NoReturn, TextIO

from . import __version__
from .errors import MinillmError, RequestError

if TYPE_CHECKING:
    from .llm import LLM
    from .sampling import SamplingParams

BAD_INPUT, INTERRUPTED, PIPE_CLOSED = 2, 130, 141

# ---------------------------------------------------------------------- options


class Parser(argparse.ArgumentParser):
    """Says what is wrong with the options in one line, without the usage in front."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=f"python -m {prog}", description=description, allow_abbrev=False)
        self.add_argument("--version", action="version", version=f"minillm {__version__}")

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"error: {message} (--help lists the options)\n")


def add_options(parser: Parser, max_tokens: int, default_model: str) -> None:
    """The options of the model, of sampling, and of what is shown. default_model: which one `load_llm` will take."""

    model = parser.add_argument_group("model")
    add = model.add_argument
    add(
        "--model",
        metavar="MODEL",
        help=f"directory in the Hugging Face layout, .gguf file, or hub id org/name (default: {default_model})",
    )
    add("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps (default: auto, the GPU if there is one)")
    add(
        "--dtype",
        default="auto",
        help="auto, float32, float16 or bfloat16 (default: auto: float32 on a CPU, else what the checkpoint says)",
    )
    add(
        "--max-seq-len",
        type=int,
        metavar="N",
        help="tokens of prompt and answer together (default: the model's context, or what the memory affords)",
    )
    add(
        "--graphs",
        choices=("auto", "on", "off"),
        default="auto",
        help="CUDA graphs: auto captures where there is a GPU, on insists, off runs eagerly (default: auto)",
    )
    _add_sampling_options(parser, max_tokens)
    parser.add_argument(
        "--stats",
        action="store_true",
        help="after an answer, one line of figures on stderr: time to first token, tokens/s, share of the measured "
        "memory bandwidth (default: off)",
    )


def _add_sampling_options(parser: Parser, max_tokens: int) -> None:
    add = parser.add_argument_group("sampling").add_argument
    add("--max-tokens", type=int, default=max_tokens, metavar="N", help="tokens to make at most (default: %(default)s)")
    add(
        "--temperature",
        type=float,
        default=0.8,
        metavar="T",
        help="0 always takes the most likely token, 1 is the model's own distribution (default: %(default)s)",
    )
    add("--top-k", type=int, default=0, metavar="K", help="keep the K most likely tokens (default: 0, all)")
    add(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="keep the most likely tokens that have probability P together (default: 1, all)",
    )
    add(
        "--min-p",
        type=float,
        default=0.0,
        metavar="P",
        help="keep tokens at least P times as likely as the most likely one (default: 0, all)",
    )
    add(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="R",
        help="above 1 makes tokens that were there already less likely (default: 1, off)",
    )
    add("--seed", type=int, metavar="S", help="makes the draws repeatable (default: a new one each time)")
    add(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end the answer before this text; may be given several times (default: none)",
    )
    add("--ignore-eos", action="store_true", help="go on after the model's end tokens (default: off)")


# ---------------------------------------------------------------------- from options to a model


def sampling_params(options: argparse.Namespace) -> SamplingParams:
    """The sampling options, checked. Raises: RequestError."""
    with on_interrupt(_end_now):
        from .sampling import SamplingParams
    return SamplingParams(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        seed=options.seed,
        stop=options.stop,
        ignore_eos=options.ignore_eos,
    )


def load_llm(options: argparse.Namespace, chat: bool = False) -> LLM:
    """The model of the options, for one request at a time. What a library prints meanwhile goes to stderr.

    chat: without `--model`, take one that has learned to chat.
    """
    from .hub import INSTRUCT_MODEL

    with redirect_stdout(sys.stderr):
        with on_interrupt(_end_now):
            from .llm import LLM
        return LLM(
            INSTRUCT_MODEL if chat and options.model is None else options.model,
            device=options.device,
            dtype=options.dtype,
            max_batch_size=1,
            max_seq_len=options.max_seq_len,
            graphs=options.graphs,
            progress=is_terminal(sys.stderr),
        )


# ---------------------------------------------------------------------- streams


def write(text: str) -> None:
    """Text on stdout, at once. BrokenPipeError if nobody reads it; MinillmError if it cannot be written."""
    if sys.stdout is None:
        raise MinillmError("standard output is closed; give the text somewhere to go")
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        _discard(sys.stdout)
        if _is_closed_pipe(error):
            raise BrokenPipeError(errno.EPIPE, "the reader of stdout is gone") from error
        raise MinillmError(
            f"standard output cannot be written: {error.strerror}; make room or choose another"
        ) from error


def note(text: str) -> None:
    """A line for the person, on stderr. If nobody reads it, that is no reason to stop."""
    if sys.stderr is None:
        return
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        _discard(sys.stderr)


def decode_input(data: bytes) -> str:
    """What came in on stdin, as text. Raises: RequestError if it is not UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"standard input is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}; convert it first"
        ) from error


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a person is there. A stream that was closed before the start is None."""
    return stream is not None and stream.isatty()


def _is_closed_pipe(error: OSError) -> bool:
    return isinstance(error, BrokenPipeError) or (os.name == "nt" and error.errno == errno.EINVAL)


def _discard(stream: TextIO) -> None:
    """Send what is still buffered nowhere: the interpreter flushes at its exit, and would complain once more."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


# ---------------------------------------------------------------------- beginning and end


def run(body: Callable[[], int]) -> int:
    """Run a command, and turn every way in which it may end into an exit status."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character gets "?", not a traceback
    try:
        with _short_warnings():
            try:
                status = body()
            except SystemExit as stop:  # how argparse ends --help, --version and a wrong option
                status = stop.code if isinstance(stop.code, int) else 0
        write("")  # argparse ignores a closed pipe, and leaves its text in the buffer
        return status
    except MinillmError as error:
        note(f"error: {error}")
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        return PIPE_CLOSED


@contextmanager
def on_interrupt(action: Callable[[], object]) -> Iterator[None]:
    """What Ctrl-C does meanwhile, in place of KeyboardInterrupt. Where it is ignored, as under nohup, it stays so."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: action())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end_now() -> NoReturn:
    """Ctrl-C while PyTorch is imported. An exception would be lost there: imports of optional parts catch them all."""
    os._exit(INTERRUPTED)  # nothing was made yet, and there is nothing to tidy up


def leave(status: int) -> NoReturn:
    """End the process. One more Ctrl-C could now only disturb the interpreter's tidying up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(status)


@contextmanager
def _short_warnings() -> Iterator[None]:
    """Warnings of Python libraries as one line, without the file that gave them."""

    def show(message: Warning | str, *_: object, **__: object) -> None:
        note(f"warning: {str(message).splitlines()[0]}")

    with warnings.catch_warnings():
        # PyTorch says at its import that it found no NumPy, which minillm does not need
        warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
        warnings.showwarning = show
        yield

"""What an option of the benchmarks may be: numbers, lists and ranges of them, names."""

import argparse
from collections.abc import Callable


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(text)


def positives(text: str) -> list[int]:
    """Whole numbers of at least 1, as in 1,2,4; each once."""
    return list(dict.fromkeys(positive(part) for part in text.split(",")))


def whole(text: str) -> int:
    """A whole number of at least 0."""
    return 0 if text.strip() == "0" else positive(text)


def rate(text: str) -> float:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {text!r}")
    return value


def span(text: str) -> tuple[int, int]:
    """The shortest and the longest of lengths, as in 16:1024; a single number is both."""
    low, _, high = text.partition(":")
    shortest, longest = positive(low), positive(high or low)
    if shortest > longest:
        raise argparse.ArgumentTypeError(f"must go from the shortest to the longest, not {text!r}")
    return shortest, longest


def launch_sizes(text: str) -> list[int | str]:
    """Numbers of steps of at least 1, or until_done, as in 1,4,until_done; each once."""
    parts = (part.strip() for part in text.split(","))
    return list(dict.fromkeys(part if part == "until_done" else positive(part) for part in parts))


def some_of(*names: str) -> Callable[[str], list[str]]:
    """A list of some of the names, each once, as in a,b."""

    def parse(text: str) -> list[str]:
        given = list(dict.fromkeys(text.split(",")))
        if unknown := [name for name in given if name not in names]:
            raise argparse.ArgumentTypeError(f"must be of {', '.join(names)}, not {unknown[0]!r}")
        return given

    return parse

"""What the programs of the story share: a model of random weights, the recorder of chapter 2, and a stopwatch.

The programs use the plain PyTorch operations of the library and not its fused kernels, so that what a graph gives is
seen by itself. Weights are random: the time of a step depends on how many bytes are read, not on their values.
"""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch

from minillm.bench.shapes import SHAPES
from minillm.cache import KVCache
from minillm.capture import no_garbage_collection
from minillm.config import ModelConfig
from minillm.model import Llama
from minillm.sampling import SamplingParams
from minillm.state import DecodeState
from minillm.weights import allocate, randomise

PROMPT = 64  # tokens
CACHE = 512  # positions a row
MOST_STEPS = CACHE - PROMPT - 64  # launches of many steps may go on behind the last one that is wanted


class Parts(NamedTuple):
    """A model, a cache of CACHE positions a row, the state of its rows, and a prompt of PROMPT token ids."""

    model: Llama
    cache: KVCache
    state: DecodeState
    prompt: list[int]


def build(shape: str, rows: int = 1, device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> Parts:
    """Matrices make what they multiply a little larger, so that a text goes on changing, and with its whole past. With
    the usual deviation of 0.02, small models say one token again and again, which would prove nothing."""
    config, place = ModelConfig.from_dict(SHAPES[shape]), torch.device(device)
    torch.manual_seed(0)
    weights = allocate(config, place, dtype)
    randomise(weights, 1.2 / config.hidden_size**0.5)
    cache = KVCache(config, rows, CACHE, place, dtype)
    prompt = torch.randint(config.vocab_size, (PROMPT,)).tolist()
    return Parts(Llama(config, weights, CACHE), cache, DecodeState.allocate(rows, config.vocab_size, place), prompt)


def start(parts: Parts, stops: Sequence[int] = ()) -> None:
    """Read the prompt into row 0 and admit it: the next step feeds the last token of the prompt at its position."""
    model, cache, state, prompt = parts
    model.prefill(torch.tensor(prompt[:-1], device=state.tokens.device), 0, 0, cache)
    state.admit(0, prompt, CACHE, list(stops), SamplingParams(temperature=0.0), seed=0)


def capture(step: Callable[[], object], stream: torch.cuda.Stream, pool: Any = None) -> torch.cuda.CUDAGraph:
    """Chapter 2 as a function: run the step once on the stream, then record it there."""
    graph = torch.cuda.CUDAGraph()
    warm_up(step, stream)
    with no_garbage_collection(), torch.cuda.graph(graph, stream=stream, pool=pool):
        step()
    return graph


def warm_up(step: Callable[[], object], stream: torch.cuda.Stream) -> None:
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    stream.synchronize()


def milliseconds(work: Callable[[], object], count: int = 1, rounds: int = 5) -> float:
    """Median wall time of `work`, until the GPU has done it, divided by the `count` of what it does."""

    def once() -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - started) / count

    once()
    return median(once() for _ in range(rounds))

"""1. The imperative loop, and where its time goes.

    python -m examples.story.s1_loop

This is how generation is written first: run the model on the last token, take the most likely next one, append it, and
again. It is right, and on a fast GPU it is slow: a step is hundreds of small kernels, Python launches them one by one,
and the launches take longer than the kernels. The GPU waits for the host most of the time. A faster GPU would not
help, and neither would a faster kernel.

Three clocks show it. The *wall* is what a token takes. The *host* is what the launches take, without waiting for what
they launched: near to the wall, the launches are the loop. The *kernels* are what the GPU is really at work: PyTorch's
profiler adds up the time of each. What is left between kernels and wall is idle, and it is what the next six programs
go after.

What can go wrong is the measurement: a launch returns before its kernel has run, so a clock without a
`synchronize` measures the host and looks like a very fast GPU.
"""

import sys
import time
from collections.abc import Callable
from statistics import median

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from minillm.cache import KVCache
from minillm.model import Llama

from .common import PROMPT, Parts, build, milliseconds
from .tell import Gain, Missing, Options, main

NAME = "examples.story.s1_loop"


def loop(parts: Parts, steps: int) -> list[int]:
    """The token ids of a text, as everybody writes it first."""
    model, cache, _, prompt = parts
    token_ids = torch.tensor(prompt, device=cache.kv.device)
    logits = model.prefill(token_ids, 0, 0, cache)
    made = [int(logits.argmax())]
    for position in range(PROMPT, PROMPT + steps - 1):
        logits = step(model, cache, torch.tensor(made[-1:], device=cache.kv.device), position)
        made.append(int(logits.argmax()))  # the host needs the number, and waits for the GPU
    return made


def step(model: Llama, cache: KVCache, token: torch.Tensor, position: int) -> torch.Tensor:
    """Logits after one more token, which is a prompt of length 1 behind what is in the cache."""
    return model.prefill(token, 0, position, cache)


def host_milliseconds(work: Callable[[], object], rounds: int = 20) -> float:
    """Median time until a call returns, the GPU being idle when it begins."""
    spent = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        spent.append(1e3 * (time.perf_counter() - started))
    torch.cuda.synchronize()
    return median(spent)


def kernel_milliseconds(work: Callable[[], object], calls: int = 10) -> tuple[float, int]:
    """The time that the kernels of a call run, and how many they are. Raises: Missing."""
    for _ in range(2):  # the first time sets the profiler up
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(calls):
                work()
            torch.cuda.synchronize()
    kernels = [event for event in seen.key_averages() if event.device_type == DeviceType.CUDA]
    count = sum(event.count for event in kernels)
    if count == 0:
        raise Missing(f"{NAME} needs PyTorch's profiler to see kernels (CUPTI), and it saw none")
    return sum(event.self_device_time_total for event in kernels) / 1e3 / calls, round(count / calls)


def measure(options: Options) -> list[Gain]:
    parts = build(options.shape)
    text = loop(parts, options.steps)
    assert text == loop(parts, options.steps)
    wall = milliseconds(lambda: loop(parts, options.steps), options.steps)

    token = torch.tensor(text[:1], device=parts.cache.kv.device)

    def one() -> None:
        step(parts.model, parts.cache, token, PROMPT).argmax()

    one()
    host = host_milliseconds(one)
    kernels, count = kernel_milliseconds(one)
    notes = [
        f"a token takes {wall:.3g} ms; the host needs {host:.3g} ms to launch its {count} kernels, which run for "
        f"{kernels:.3g} ms: the GPU waits {1 - kernels / wall:.0%} of the time"
    ]
    bars = {"the loop": wall, "its kernels alone": kernels}
    checked = f"{options.steps} token ids, the same in two runs"
    return [Gain(1, "the imperative loop: what there is to win", options.shape, bars, "a token", checked, notes)]


if __name__ == "__main__":
    sys.exit(main(NAME, __doc__, [measure]))

"""How a CPU is shared: work in a thread that ends, and no more of PyTorch's threads than a model is worth.

Both are about OpenMP, by which PyTorch cuts an operation into parts, one for each core, and waits for the last of them.
"""

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")

BYTES_A_THREAD = 16 * 2**20
"""Of the weights that a step reads. A model with fewer is through its operations as fast as they can be shared out."""


def in_passing_thread(work: Callable[[], T]) -> T:
    """Run `work` in a thread of its own and wait for it. Returns what it returns, raises what it raises.

    A thread that runs PyTorch's operations on a CPU gets helpers from OpenMP, and keeps them for as long as it lives.
    Helpers wait for the next operation without going to sleep, but only while all of them together are no more than
    there are cores. So a model that is loaded in one thread and runs in another has the helpers of the first in its
    way: on two cores, SmolLM2-135M then makes 24 tokens a second and not 43, and the story model 240 and not 700.
    """
    result: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            result.append(work())
        except BaseException as error:  # whoever waits is to have it
            raised.append(error)

    thread = threading.Thread(target=run, name="minillm-loading", daemon=True)  # Ctrl-C does not wait for it
    thread.start()
    thread.join()
    if raised:
        raise raised.pop()  # not kept here: its traceback holds all that the work had made
    return result[0]


def use_few_threads(bytes_per_step: int) -> None:
    """Have PyTorch use as many threads in the calling thread as these bytes are worth, at most as many as it would.

    The story model, with one thread instead of two, is slower by a quarter where the machine is its own, and many times
    faster where another program wants a core: else every operation waits for a part whose core is taken.
    """
    usual = torch.get_num_threads()
    few = max(1, min(usual, bytes_per_step // BYTES_A_THREAD))
    if few < usual:
        torch.set_num_threads(few)
        # the number is the calling thread's, and that of threads to come: the app's find what they would have found
        in_passing_thread(lambda: torch.set_num_threads(usual))

"""Work in a thread that ends, because of what OpenMP leaves behind in one that lives on."""

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


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

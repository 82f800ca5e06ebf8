"""Work in a thread that ends, of which nothing is kept; and how many threads PyTorch uses where."""

import gc
import threading
import weakref

import pytest
import torch

from minillm.cpu_threads import BYTES_A_THREAD, in_passing_thread, use_few_threads


def test_it_is_another_thread_and_gone_when_the_result_is_there() -> None:
    before = threading.active_count()
    name = in_passing_thread(lambda: threading.current_thread().name)
    assert name != threading.current_thread().name
    assert threading.active_count() == before


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_errors_come_through_and_keep_nothing(error: type[BaseException]) -> None:
    class Large:
        """Stands for weights."""

    kept: list[weakref.ref[Large]] = []

    def work() -> None:
        large = Large()
        kept.append(weakref.ref(large))
        raise error("too bad")

    gc.disable()
    try:
        with pytest.raises(error, match="too bad") as caught:
            in_passing_thread(work)
        del caught
        assert kept[0]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(("parts", "usual", "expected"), [(0.5, 3, 1), (2.5, 3, 2), (9.0, 3, 3), (9.0, 1, 1)])
def test_a_model_gets_the_threads_that_it_is_worth_and_nobody_else_does(
    parts: float, usual: int, expected: int
) -> None:
    """The caller's threads, and those of threads to come, are what they were."""
    before = torch.get_num_threads()

    def engine() -> tuple[int, int]:
        use_few_threads(int(parts * BYTES_A_THREAD))
        (torch.ones(1000, 1000) @ torch.ones(1000, 1000)).sum()
        return torch.get_num_threads(), in_passing_thread(torch.get_num_threads)

    try:
        torch.set_num_threads(usual)
        assert in_passing_thread(engine) == (expected, usual)
        assert torch.get_num_threads() == usual
    finally:
        torch.set_num_threads(before)

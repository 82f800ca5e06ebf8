"""Work in a thread that ends: results, errors, and that nothing of it is kept."""

import gc
import threading
import weakref

import pytest

from minillm.passing_thread import in_passing_thread


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

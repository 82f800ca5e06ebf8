"""Handles: waiting, reading, cancelling, callbacks, and a queue that is full."""

import asyncio
import concurrent.futures
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from small import Brake, until

from minillm import LLM, Handle, MinillmError, QueueFullError, SamplingParams
from minillm.engine import Engine
from minillm.errors import RequestError
from minillm.request import Request

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
LONG = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)


@pytest.fixture
def llm(tiny: Path) -> Iterator[LLM]:
    with LLM(tiny, device="cpu", max_batch_size=2, max_waiting=3) as model:
        yield model


def brake(llm: LLM) -> Brake:
    return Brake(llm._service.engine)


def settled(llm: LLM) -> bool:
    engine = llm._service.engine
    return engine.open == 0 and not engine.busy and not llm._service._new and not llm._service._cancelled


def asleep(thread: threading.Thread) -> bool:
    """Whether a thread waits in `threading`, for a lock or a condition."""
    frame = sys._current_frames().get(thread.ident or 0)
    return frame is not None and frame.f_code.co_filename == threading.__file__ and frame.f_code.co_name == "wait"


def raising(error: BaseException) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise error

    return fail


def test_a_handle_gives_what_generate_gives(llm: LLM) -> None:
    expected = llm.generate("the king", GREEDY)
    handle = llm.submit("the king", GREEDY)
    assert isinstance(handle, Handle)
    assert handle.result(60).text == expected.text
    assert handle.result() is handle.result()
    assert handle.exception() is None
    assert (handle.done(), handle.cancelled(), handle.cancel()) == (True, False, False)
    messages = [{"role": "user", "content": "the king"}]
    assert llm.submit_chat(messages, GREEDY).result().text == llm.chat(messages, GREEDY).text


def test_every_reader_of_a_handle_gets_all_of_it(llm: LLM) -> None:
    expected = llm.generate("the king", LONG).text
    handle = llm.submit("the king", LONG)
    got: dict[int, str] = {}

    def read(index: int) -> None:
        got[index] = "".join(chunk.text for chunk in handle)

    readers = [threading.Thread(target=read, args=(i,)) for i in range(4)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(60)
    assert got == dict.fromkeys(range(4), expected)
    assert "".join(chunk.text for chunk in handle) == expected


def test_to_stop_reading_does_not_cancel(llm: LLM) -> None:
    handle = llm.submit("the king", LONG)
    for _ in handle:
        break
    assert len(handle.result(60).token_ids) == 100


def test_cancel_ends_it_and_frees_the_row(llm: LLM) -> None:
    brake(llm)
    handle = llm.submit("the king", LONG)
    next(iter(handle))
    assert not handle.done()
    with pytest.raises(TimeoutError, match="not done within"):
        handle.result(timeout=0.01)
    with pytest.raises(TimeoutError):
        handle.exception(timeout=0)
    assert handle.cancel()
    assert handle.cancel()  # as for a Future, it stays true
    assert handle.cancelled()
    assert handle.done()
    for ask in (handle.result, handle.exception, lambda: list(handle)):
        with pytest.raises(concurrent.futures.CancelledError):
            ask()
    until(lambda: settled(llm))


def test_a_reader_of_a_cancelled_handle_wakes_up(llm: LLM) -> None:
    brake(llm)
    handle, ended = llm.submit("the king", LONG), threading.Event()

    def read() -> None:
        with pytest.raises(concurrent.futures.CancelledError):
            list(handle)
        ended.set()

    threading.Thread(target=read).start()
    handle.cancel()
    assert ended.wait(60)


@pytest.mark.parametrize("ask", [lambda h: h.result(), lambda h: h.exception(), lambda h: h.result(60)])
def test_who_waits_for_the_end_wakes_up_when_another_cancels(llm: LLM, ask: Callable[[Handle], object]) -> None:
    """`concurrent.futures.wait` slept on, for ever or until its timeout."""
    brake(llm)
    handle, ended = llm.submit("the king", LONG), threading.Event()

    def wait() -> None:
        with pytest.raises(concurrent.futures.CancelledError):
            ask(handle)
        ended.set()

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    until(lambda: asleep(waiter))
    assert handle.cancel()
    assert ended.wait(20)


@pytest.mark.parametrize("timeout", [float("nan"), "5", True, [1]])
def test_a_timeout_that_is_no_number(llm: LLM, timeout: object) -> None:
    """Threads said of it what they say of each: an OverflowError, a TypeError, or no wait at all."""
    handle = llm.submit("the king", GREEDY)
    for ask in (handle.result, handle.exception):
        with pytest.raises(RequestError, match="timeout must be a number of seconds"):
            ask(timeout)  # type: ignore[arg-type]
    handle.result(60)


@pytest.mark.parametrize("timeout", [1e10, float("inf"), 10**400])
def test_a_timeout_may_be_longer_than_threads_can_wait(llm: LLM, timeout: float) -> None:
    """It was an OverflowError."""
    assert llm.submit("the king", LONG).result(timeout).finish_reason == "length"


def test_timeouts_below_zero_do_not_wait(llm: LLM) -> None:
    brake(llm)
    handle = llm.submit("the king", LONG)
    for timeout in (-1, float("-inf"), -(10**400)):
        with pytest.raises(TimeoutError, match="not done within 0 s"):
            handle.result(timeout)


def test_callbacks_come_once_also_late_and_may_submit(llm: LLM) -> None:
    seen: list[Handle] = []
    second: list[Handle] = []

    def more(handle: Handle) -> None:
        seen.append(handle)
        second.append(llm.submit("a", GREEDY))

    handle = llm.submit("the king", GREEDY)
    handle.add_done_callback(more)
    handle.result()
    until(lambda: second)
    second[0].result(60)
    handle.add_done_callback(seen.append)
    assert seen == [handle, handle]


def test_a_callback_that_fails_or_waits_harms_nobody(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    """A wait in the thread that makes the tokens would be a wait for ever."""
    said: list[BaseException] = []

    def wait(_: Handle) -> None:
        for ask in (
            lambda: llm.generate("a", GREEDY),
            lambda: list(llm.stream("a", GREEDY)),
            lambda: llm.logits([1]),
            lambda: llm.submit("a", LONG).result(),
        ):
            with pytest.raises(MinillmError, match="callback") as caught:
                ask()
            said.append(caught.value)
        raise RuntimeError("boom")

    held = brake(llm)  # a request that has ended calls its callback in this thread
    handle = llm.submit("the king", LONG)
    handle.add_done_callback(wait)
    held.release()
    until(lambda: len(said) == 4)
    assert llm.generate("a", GREEDY).text
    assert "boom" in caplog.text
    until(lambda: settled(llm))


@pytest.mark.parametrize("fault", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()])
def test_a_callback_that_would_end_its_thread_harms_nobody(
    llm: LLM, fault: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    """It ended all open requests; in `close`, those that were to be told after it waited for ever."""
    called: list[Handle] = []

    def leave(handle: Handle) -> None:
        called.append(handle)
        raise fault

    held = brake(llm)  # a request that has ended calls its callback in this thread, and an interrupt ended all tests
    ends, goes_on = llm.submit("the king", GREEDY), llm.submit("the king", LONG)
    ends.add_done_callback(leave)
    ends.add_done_callback(called.append)
    held.release()
    assert ends.result(60).text
    assert len(goes_on.result(60).token_ids) == 100
    assert called == [ends, ends]
    assert "a callback of a request failed" in caplog.text
    brake(llm)
    open_ones = [llm.submit("the king", LONG) for _ in range(5)]
    for handle in open_ones:
        handle.add_done_callback(leave)
    until(lambda: None not in llm._service.engine.rows)
    llm.close()
    for handle in open_ones:
        with pytest.raises(MinillmError, match="this LLM was closed"):
            handle.result(60)


def test_a_callback_that_raises_does_not_keep_a_cancelled_request(llm: LLM) -> None:
    """`cancel` raised before it had told the engine. Only an interrupt in the main thread still comes through."""
    brake(llm)
    for fault in (SystemExit(3), KeyboardInterrupt()):
        handle = llm.submit("the king", LONG)
        handle.add_done_callback(raising(fault))
        until(lambda: llm._service.engine.open == 1)
        with pytest.raises(KeyboardInterrupt) if isinstance(fault, KeyboardInterrupt) else nullcontext():
            handle.cancel()
        until(lambda: settled(llm))


def test_a_stop_string_that_would_end_the_thread_ends_its_request_alone(llm: LLM) -> None:
    class Odd(str):
        def __len__(self) -> int:
            raise SystemExit(3)

    params = SamplingParams(max_tokens=50, stop=["never"], seed=1, ignore_eos=True)
    object.__setattr__(params, "stop", (Odd("never"),))
    other, handle = llm.submit("the king", LONG), llm.submit("the king", params)
    with pytest.raises(MinillmError, match="own code ended with SystemExit: 3"):
        handle.result(60)
    assert len(other.result(60).token_ids) == 100


def test_a_stop_string_that_a_reader_completes_ends_the_answer(llm: LLM) -> None:
    """What a reader found, while it turned tokens into text, was not told to the engine: it went on to max_tokens."""
    text = llm.generate("the king", LONG).text
    params = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True, stop=[text[20:30]])
    expected = llm.generate("the king", params)
    handle = llm._handle(llm._desk.prepare("the king", params))
    pending = handle._pending

    class Overtaken:
        """Lets a reader in just before the engine's thread, each time."""

        def __init__(self, lock: threading.Lock) -> None:
            self._lock = lock

        def __enter__(self) -> None:
            if threading.current_thread() is llm._service._thread:
                reader = threading.Thread(target=pending.chunk, args=(0,))
                reader.start()
                reader.join()
            self._lock.acquire()

        def __exit__(self, *exc: object) -> None:
            self._lock.release()

    pending._reading = Overtaken(pending._reading)  # type: ignore[assignment]
    handle.submit()
    got = handle.result(60)
    assert (got.text, got.finish_reason, len(got.token_ids)) == (expected.text, "stop", len(expected.token_ids))


def test_one_who_waits_for_room_hears_of_cancellations_at_that_moment(llm: LLM) -> None:
    """He had looked for room, and not yet said that he waits: nobody woke him, and the engine had no more to do."""
    hold = brake(llm)
    handles = [llm.submit("the king", LONG) for _ in range(5)]
    until(lambda: None not in llm._service.engine.rows)
    service = llm._service
    has_room = service._has_room

    def slow(engine: Engine, waits: bool) -> bool:
        found = has_room(engine, waits)
        if threading.current_thread() is feeder and not found:
            service._has_room = has_room  # type: ignore[method-assign]
            until(lambda: engine.open == 0)  # all cancellations are carried out while he holds the lock
            time.sleep(0.1)
        return found

    service._has_room = slow  # type: ignore[method-assign]
    cancel, held = service.engine.cancel, threading.Event()

    def cancel_late(request: Request) -> None:
        held.wait(60)
        cancel(request)

    service.engine.cancel = cancel_late  # type: ignore[method-assign]
    feeder = threading.Thread(target=lambda: llm.generate("a", GREEDY), daemon=True)
    for handle in handles:
        handle.cancel()
    until(lambda: not service._cancelled)  # the engine's thread has them, and has left the lock
    feeder.start()
    until(lambda: service._has_room is not slow)
    held.set()
    until(lambda: service.engine.open == 0)
    hold.release()
    feeder.join(20)
    assert not feeder.is_alive()


@pytest.mark.parametrize("name", ["_take", "_tell_of_room"])
def test_a_thread_that_dies_tells_those_who_wait(llm: LLM, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They waited for ever."""
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    brake(llm)
    handles = [llm.submit("the king", LONG) for _ in range(5)]
    fed: list[BaseException] = []

    def feed() -> None:
        try:
            llm.generate("a", GREEDY)
        except MinillmError as error:
            fed.append(error)

    feeder = threading.Thread(target=feed, daemon=True)
    feeder.start()
    until(lambda: llm._service._feeders == 1)
    monkeypatch.setattr(llm._service, name, raising(RuntimeError("a bug")))
    for handle in handles:
        with pytest.raises(MinillmError, match="closed"):
            handle.result(20)
    feeder.join(20)
    assert len(fed) == 1
    with pytest.raises(MinillmError, match="closed"):
        llm.submit("a")


def test_a_full_queue_refuses_and_lists_are_fed(llm: LLM) -> None:
    hold = brake(llm)
    handles = [llm.submit(f"the {i}", LONG) for i in range(5)]  # two rows and three that wait
    for ask in (
        lambda: llm.submit("a"),
        lambda: next(llm.stream("a")),
        lambda: llm.submit_chat([dict(role="user", content="a")]),
    ):
        with pytest.raises(QueueFullError, match="3 requests wait already, for 2 rows"):
            ask()
    got: list[list[str]] = []
    prompts = [f"the {i} and" for i in range(20)]
    feeder = threading.Thread(target=lambda: got.append([c.text for c in llm.generate(prompts, GREEDY)]))
    feeder.start()
    handles[4].cancel()
    hold.release()
    feeder.join(60)
    assert got == [[llm.generate(prompt, GREEDY).text for prompt in prompts]]
    assert [len(h.result().token_ids) for h in handles[:4]] == [100] * 4


def test_close_ends_those_who_wait_for_room_and_for_answers(llm: LLM) -> None:
    brake(llm)
    handles = [llm.submit("the king", LONG) for _ in range(5)]
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            llm.generate(["a"] * 9, GREEDY)
        except MinillmError as error:
            errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    until(lambda: llm._service._feeders == 4)
    llm.close()
    for thread in threads:
        thread.join(60)
    assert len(errors) == 4
    for handle in handles:
        with pytest.raises(MinillmError, match="this LLM was closed"):
            handle.result(60)
    with pytest.raises(MinillmError, match="closed"):
        llm.submit("a")


def test_a_callback_may_close(tiny: Path) -> None:
    llm = LLM(tiny, device="cpu")
    handle = llm.submit("the king", GREEDY)
    handle.add_done_callback(lambda _: llm.close())
    handle.result(60)
    thread = llm._service._thread
    assert thread is not None
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    "options", [dict(max_waiting=0), dict(prefill_chunk=0), dict(max_waiting=1.5), dict(prefill_chunk=True)]
)
def test_sizes_that_make_no_sense(tiny: Path, options: dict) -> None:
    with pytest.raises(MinillmError, match="whole number of at least 1"):
        LLM(tiny, device="cpu", **options)


@pytest.mark.parametrize("value", ["no", None, 0, []])
def test_prefix_reuse_is_true_or_false(tiny: Path, value: object) -> None:
    """The text "no" switched it on."""
    with pytest.raises(MinillmError, match="prefix_reuse must be True or False, not"):
        LLM(tiny, device="cpu", prefix_reuse=value)  # type: ignore[arg-type]

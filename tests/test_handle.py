"""Handles: waiting, reading, cancelling, callbacks, and a queue that is full."""

import concurrent.futures
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from small import Brake, until

from minillm import LLM, Handle, MinillmError, QueueFullError, SamplingParams

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

    handle = llm.submit("the king", LONG)
    handle.add_done_callback(wait)
    until(lambda: len(said) == 4)
    assert llm.generate("a", GREEDY).text
    assert "boom" in caplog.text
    until(lambda: settled(llm))


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

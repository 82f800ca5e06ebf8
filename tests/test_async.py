"""asyncio: answers and streams that never block a loop, and end with the task that wants them."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import pytest
from small import Brake, until

from minillm import LLM, MinillmError, QueueFullError, SamplingParams

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
LONG = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
MESSAGES = [{"role": "user", "content": "the king"}]


@pytest.fixture
def llm(tiny: Path) -> Iterator[LLM]:
    with LLM(tiny, device="cpu", max_batch_size=2, max_waiting=3) as model:
        yield model


def free(llm: LLM) -> bool:
    engine = llm._service.engine
    return engine.open == 0 and not llm._service._new and not llm._service._cancelled


async def text_of(stream) -> str:  # type: ignore[no-untyped-def]
    return "".join([chunk.text async for chunk in stream])


def test_the_same_answers_as_without(llm: LLM) -> None:
    async def ask() -> None:
        assert (await llm.agenerate("the king", GREEDY)).text == llm.generate("the king", GREEDY).text
        assert (await llm.agenerate([5, 6], GREEDY)).text == llm.generate([5, 6], GREEDY).text
        prompts = [f"the {i}" for i in range(12)]  # more than the queue holds
        many = await llm.agenerate(prompts, GREEDY)
        assert [c.text for c in many] == [c.text for c in llm.generate(prompts, GREEDY)]
        assert await llm.agenerate([], GREEDY) == []
        assert await text_of(llm.astream("the king", LONG)) == llm.generate("the king", LONG).text
        assert (await llm.achat(MESSAGES, GREEDY)).text == llm.chat(MESSAGES, GREEDY).text
        assert await text_of(llm.astream_chat(MESSAGES, GREEDY)) == llm.chat(MESSAGES, GREEDY).text
        assert await text_of(llm.submit("the king", GREEDY)) == llm.generate("the king", GREEDY).text

    asyncio.run(ask())


def test_many_tasks_in_several_loops(llm: LLM) -> None:
    expected = [llm.generate(f"the {i}", GREEDY).text for i in range(10)]
    got: list[list[str]] = []

    async def one(i: int) -> str:
        while True:
            try:
                return await text_of(llm.astream(f"the {i}", GREEDY))
            except QueueFullError:
                await asyncio.sleep(0.001)

    async def ask() -> list[str]:
        return await asyncio.gather(*(one(i) for i in range(10)))

    loops = [threading.Thread(target=lambda: got.append(asyncio.run(ask()))) for _ in range(3)]
    for loop in loops:
        loop.start()
    for loop in loops:
        loop.join(60)
    assert got == [expected] * 3


def test_the_loop_is_free_while_nothing_comes(llm: LLM) -> None:
    hold = Brake(llm._service.engine)

    async def ask() -> int:
        piece = asyncio.create_task(text_of(llm.astream("the king", LONG)))
        whole = asyncio.create_task(llm.agenerate(["the king"] * 9, LONG))
        turns = 0
        while llm._service.engine.open < 3:  # both rows are taken, and one waits
            await asyncio.sleep(0)
            turns += 1
        for _ in range(100):
            await asyncio.sleep(0)
        assert not whole.done()
        assert not piece.done()
        hold.release()
        assert {c.text for c in await whole} == {await piece}
        return turns

    assert asyncio.run(ask()) > 0


def test_cancelling_a_task_cancels_its_requests(llm: LLM) -> None:
    hold = Brake(llm._service.engine)

    async def ask() -> None:
        for make in (
            lambda: llm.agenerate("the king", LONG),
            lambda: llm.agenerate(["the king"] * 9, LONG),  # waits for room
            lambda: text_of(llm.astream("the king", LONG)),
            lambda: llm.achat(MESSAGES, LONG),
            lambda: llm.submit("the king", LONG).completion(),
        ):
            task = asyncio.create_task(make())
            while llm._service.engine.open == 0:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while not free(llm):
                await asyncio.sleep(0.001)

    asyncio.run(ask())
    assert all(not p._on_room for p in [llm._service])
    hold.release()
    assert llm.generate("a", GREEDY).text


def test_closing_a_stream_ends_its_request(llm: LLM) -> None:
    Brake(llm._service.engine)

    async def ask() -> None:
        async with aclosing(llm.astream("the king", LONG)) as stream:
            async for _ in stream:
                break
        while not free(llm):
            await asyncio.sleep(0.001)
        async for _ in llm.astream("the king", LONG):  # left open: asyncio.run closes it
            break

    asyncio.run(ask())
    until(lambda: free(llm))


def test_checks_come_at_once_and_a_full_queue_at_the_first_piece(llm: LLM) -> None:
    Brake(llm._service.engine)

    async def ask() -> None:
        with pytest.raises(MinillmError, match="token id 10000 at index 0 is no whole number from 0 to"):
            llm.astream([10_000])
        with pytest.raises(MinillmError, match="prompt 1 of the list: token id 10000 at index 0"):
            await llm.agenerate([[5], [10_000]])
        handles = [llm.submit("the king", LONG) for _ in range(5)]
        with pytest.raises(QueueFullError):
            await anext(llm.astream("a", GREEDY))
        for handle in handles:
            handle.cancel()

    asyncio.run(ask())


def test_a_handle_can_be_awaited(llm: LLM) -> None:
    async def ask() -> tuple[str, str]:
        handle = llm.submit("the king", GREEDY)
        return (await handle).text, (await handle.completion()).text

    first, second = asyncio.run(ask())
    assert first == second == llm.generate("the king", GREEDY).text


def test_closing_the_llm_ends_what_tasks_wait_for(llm: LLM) -> None:
    Brake(llm._service.engine)

    async def ask() -> None:
        tasks = [asyncio.create_task(text_of(llm.astream("the king", LONG)))]
        tasks += [asyncio.create_task(llm.agenerate(["the king"] * 9, LONG)) for _ in range(2)]
        while llm._service.engine.open < 3:
            await asyncio.sleep(0.001)
        await asyncio.to_thread(llm.close)
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(error, MinillmError)

    asyncio.run(ask())


def test_a_loop_that_died_harms_nobody(llm: LLM) -> None:
    hold = Brake(llm._service.engine)
    loop = asyncio.new_event_loop()
    stream = llm.astream("the king", LONG)
    loop.run_until_complete(anext(stream))
    task = loop.create_task(anext(stream))
    waiting = loop.create_task(llm.agenerate("a", GREEDY))
    loop.run_until_complete(asyncio.sleep(0.01))
    loop.close()
    hold.release()
    assert llm.generate("a", GREEDY).text
    until(lambda: free(llm))
    del task, waiting

"""An app that is left running: many threads, requests of every length, cancellations and nonsense, all at once."""

import asyncio
import concurrent.futures
import functools
import os
import random
import threading
from pathlib import Path

import pytest
from small import until

from minillm import LLM, MinillmError, SamplingParams

THREADS = 64
REQUESTS = int(os.environ.get("MINILLM_REQUESTS", "640"))  # in all
BEGINNINGS = [[5 + i] * 20 for i in range(3)]


def case(seed: int) -> tuple[list[int], int]:
    """A prompt and a number of tokens: of few kinds, so that each can be run alone too."""
    rng = random.Random(seed)
    prompt = rng.choice([*BEGINNINGS, []]) + [rng.randrange(3, 280) for _ in range(rng.randint(1, 60))]
    return prompt, rng.randint(1, 40)


def params(new: int) -> SamplingParams:
    return SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def expected(tiny: Path) -> "functools._lru_cache_wrapper[list[int]]":
    llm = LLM(tiny, device="cpu", max_batch_size=1, prefix_reuse=False)
    lock = threading.Lock()

    @functools.cache
    def alone(seed: int) -> list[int]:
        prompt, new = case(seed)
        with lock:
            return llm.generate(prompt, params(new)).token_ids

    return alone


def one(llm: LLM, kind: int, seed: int, expected: "functools._lru_cache_wrapper[list[int]]") -> str:
    """One request of some kind. Returns what it was; raises if it was not served as it must be."""
    prompt, new = case(seed)
    if kind == 0:
        with pytest.raises(MinillmError):
            llm.generate([*prompt, 10_000], params(new))
        return "bad"
    if kind == 1:
        handle = llm.submit(prompt, params(new))
        for _, chunk in zip(range(seed % 4), handle, strict=False):
            assert chunk.token_ids
        if handle.cancel():
            with pytest.raises(concurrent.futures.CancelledError):
                handle.result(60)
            return "cancelled"
        assert handle.result().token_ids == expected(seed)
    elif kind == 2:
        stream = llm.stream(prompt, params(new))
        got: list[int] = []
        for chunk in stream:
            got += chunk.token_ids
            if len(got) > 8 + seed:
                break
        stream.close()
        assert got == expected(seed)[: len(got)]
    elif kind == 3:
        assert asyncio.run(llm.agenerate(prompt, params(new))).token_ids == expected(seed)
    elif kind == 4:
        several = llm.generate([prompt, prompt[:3]], params(new))
        assert several[0].token_ids == expected(seed)
        assert several[0].stats.cached_tokens < len(prompt)
    elif kind == 5:
        logits = llm.logits(prompt)
        assert logits[-1].argmax() == expected(seed)[0]
    else:
        assert llm.submit(prompt, params(new)).result(120).token_ids == expected(seed)
    return "good"


def test_many_threads_with_requests_of_every_kind(tiny: Path, expected) -> None:  # type: ignore[no-untyped-def]
    expected(0)  # has its own LLM, and the thread of that
    before = threading.active_count()
    with LLM(tiny, device="cpu", max_batch_size=6, prefill_chunk=16) as llm:
        done: list[str] = []
        failed: list[BaseException] = []

        def work(index: int) -> None:
            rng = random.Random(index)
            try:
                for _ in range(REQUESTS // THREADS):
                    done.append(one(llm, rng.randrange(9), rng.randrange(40), expected))
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
        assert not failed
        assert not any(thread.is_alive() for thread in threads)
        assert len(done) == REQUESTS // THREADS * THREADS
        assert set(done) == {"good", "bad", "cancelled"}
        engine, service = llm._service.engine, llm._service
        until(lambda: not engine.busy and not service._new and not service._cancelled)
        assert engine.rows == [None] * 6
        assert (engine.open, service._feeders, service._on_room) == (0, 0, [])
        assert not engine.state.active.any()
    until(lambda: threading.active_count() <= before)

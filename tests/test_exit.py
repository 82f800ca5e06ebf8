"""Ends that nobody planned: an interpreter that exits, an LLM that nobody holds, Ctrl-C, a device that fails."""

import gc
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
from small import Brake, until

from minillm import LLM, MinillmError, SamplingParams
from minillm.errors import EngineError

ROOT = Path(__file__).parents[1]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
LONG = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
START = """
import asyncio, contextlib, os, signal, sys, threading, time
import torch
torch.set_num_threads(1)
from minillm import LLM, SamplingParams
long = SamplingParams(max_tokens=100, ignore_eos=True)
llm = LLM(sys.argv[1], device="cpu", max_batch_size=4)

def ask():
    with contextlib.suppress(ValueError):
        llm.generate(['the king'] * 9, long)

"""


def finish(tiny: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run a script to its end, which must come by itself."""
    # an abort then says in which thread it was
    command = [sys.executable, "-X", "faulthandler", "-c", START + code, str(tiny)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)


@pytest.mark.parametrize(
    "code",
    [
        "handles = [llm.submit('the king', long) for _ in range(40)]",
        "handles = [llm.submit('the king', long) for _ in range(40)]; next(iter(handles[0]))",
        "stream = llm.stream('the king', long); next(stream)",
        "threading.Thread(target=llm.generate, args=(['the king'] * 9, long)).start()",
        "threading.Thread(target=ask, daemon=True).start(); time.sleep(0.1)",
        "threading.Thread(target=ask, daemon=True).start()",
        "asyncio.run(llm.agenerate('the king', long)); llm.submit('the king', long)",
        "import atexit; llm.generate('a', long); atexit.register(lambda: llm.submit('a', long).result())",
        "llm.submit('a', long).add_done_callback(lambda handle: time.sleep(0.2)); time.sleep(0.1)",
    ],
)
def test_the_interpreter_exits_in_the_middle_of_requests(tiny: Path, code: str) -> None:
    ended = finish(tiny, code + "\nprint('bye')")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "bye\n", ""), ended.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing is forked here")
def test_a_forked_child_is_told_so(tiny: Path) -> None:
    """The thread stays in the parent: every call in the child waited for ever, and so did its end."""
    code = """
expected = llm.generate('a', SamplingParams(max_tokens=5, temperature=0)).text
handle, stream = llm.submit('the king', long), llm.stream('the king', long)
next(stream)
child = os.fork()
if child == 0:
    def ask_async():
        asyncio.run(llm.agenerate('a', long))
    for ask in (
        lambda: llm.generate('a', long), lambda: llm.submit('a'), lambda: next(llm.stream('a')), ask_async,
        lambda: llm.logits([5]), lambda: list(llm.submit('a')),
        handle.result if not handle.done() else lambda: llm.submit('a'),
    ):
        try:
            ask()
        except ValueError as error:
            print(error)
    stream.close()
    handle.cancel()
    llm.close()
    with LLM(sys.argv[1], device="cpu") as own:
        assert own.generate('a', SamplingParams(max_tokens=5, temperature=0)).text == expected
else:
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), len(handle.result().token_ids))
"""
    ended = finish(tiny, code)
    said = (
        "this process was forked after the LLM's thread had started, and has no such thread: make the LLM in the child"
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines() == [said] * 7 + ["0 100"]


def test_an_exception_leaves_the_with_block(tiny: Path) -> None:
    ended = finish(tiny, "with llm:\n    handle = llm.submit('the king', long)\n    sys.exit(3)")
    assert (ended.returncode, ended.stderr) == (3, "")


def test_ctrl_c_ends_what_the_main_thread_waits_for_and_nothing_else(tiny: Path) -> None:
    code = """
more = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
expected = llm.generate('a', more).text
other = []
for wait in (
    lambda: llm.generate(['the king'] * 3000, long),
    lambda: [None for _ in range(100) for _ in llm.stream('the king', long)],
    lambda: [llm.logits([5] * 100) for _ in range(10000)],
):
    thread = threading.Thread(target=lambda: other.append(llm.generate('a', more).text))
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    thread.start()
    try:
        wait()
        print('it was over before')
    except KeyboardInterrupt:
        print('interrupted')
    thread.join()
    assert llm.generate('a', more).text == expected
    engine = llm._service.engine
    while engine.busy:
        time.sleep(0.001)
assert other == [expected] * 3
"""
    ended = finish(tiny, code)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "interrupted\n" * 3, "")


def test_an_llm_that_nobody_holds_ends_its_thread(tiny: Path) -> None:
    """Also in the middle of requests: the thread holds the engine, not the LLM."""
    for use in (lambda llm: llm.generate("a", GREEDY), lambda llm: llm.submit("the king", LONG), lambda llm: None):
        llm = LLM(tiny, device="cpu", max_batch_size=1)
        use(llm)
        engine, gone, thread = weakref.ref(llm._service.engine), weakref.ref(llm), llm._service._thread
        del llm
        gc.collect()
        assert gone() is None
        if thread is not None:
            thread.join(60)
            assert not thread.is_alive()
        gc.collect()
        assert engine() is None


def test_a_handle_keeps_its_llm(tiny: Path) -> None:
    handle = LLM(tiny, device="cpu").submit("the king", LONG)
    gc.collect()
    assert len(handle.result(60).token_ids) == 100
    assert "".join(chunk.text for chunk in LLM(tiny, device="cpu").stream("the king", LONG)) == handle.result().text


def test_the_thread_starts_with_the_first_request_and_ends_with_close(tiny: Path) -> None:
    with LLM(tiny, device="cpu") as llm:
        assert llm._service._thread is None
        llm.generate("a", GREEDY)
        thread = llm._service._thread
        assert thread in threading.enumerate()
        assert thread.name == "minillm-engine"
        llm.generate("a", GREEDY)
        assert llm._service._thread is thread
    assert not thread.is_alive()
    LLM(tiny, device="cpu").close()


def test_a_device_that_fails_ends_all_requests_and_serves_the_next(tiny: Path) -> None:
    with LLM(tiny, device="cpu", max_batch_size=2) as llm:
        engine = llm._service.engine
        expected = llm.generate("the king", GREEDY).text
        brake = Brake(engine)
        handles = [llm.submit("the king", LONG) for _ in range(5)]
        until(lambda: None not in engine.rows)
        step = engine.runner.step

        def fail(*_: object) -> None:
            engine.runner.step = step  # type: ignore[method-assign]
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        engine.runner.step = fail  # type: ignore[method-assign]
        brake.release()
        for handle in handles:
            with pytest.raises(EngineError, match="all open requests with it: RuntimeError: CUDA error"):
                handle.result(60)
        assert llm.generate("the king", GREEDY).text == expected


def test_a_device_that_is_lost_for_ever_is_an_error_for_each(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(tiny, device="cpu", max_batch_size=2) as llm:
        engine = llm._service.engine

        def lost(*_: object, **__: object) -> None:
            raise RuntimeError("CUDA error: device lost")

        for name in ("admit", "retire"):
            monkeypatch.setattr(engine.state, name, lost)
        monkeypatch.setattr(engine.runner, "step", lost)
        for _ in range(3):
            for ask in (lambda: llm.generate("a", GREEDY), lambda: list(llm.stream("a", GREEDY))):
                with pytest.raises((MinillmError, RuntimeError), match="device lost"):
                    ask()
        assert engine.rows == [None, None]

"""How a command ends: Ctrl-C, a reader that goes away, a full disk, an error in mid-answer.

Signals and pipes are tested on real processes, the rest in this one.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny import make_tiny_model

from minillm import LLM, Chunk, MinillmError, generate


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def start(*arguments: str, stdout: Any = subprocess.PIPE, **environment: str) -> subprocess.Popen[bytes]:
    """A real process with its stdout buffered and Ctrl-C alive, whatever the test runner was started under."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.Popen(
        [sys.executable, "-m", "minillm.generate", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        env=inherited | {"OMP_NUM_THREADS": "1"} | environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def chunks(items: list[Chunk | BaseException]) -> Iterator[Chunk]:
    """A stream of these chunks, in which an exception is raised when its turn comes."""
    for item in items:
        if isinstance(item, BaseException):
            raise item
        yield item


def test_an_interrupt_keeps_what_was_made(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C after the third token lost the text that was still buffered, and showed a traceback."""
    made: list[Chunk | BaseException] = [Chunk("one ", [5]), Chunk("two ", [6]), Chunk("three", [7])]
    made.append(KeyboardInterrupt())
    monkeypatch.setattr(LLM, "stream", lambda *_: chunks(made))
    assert generate.main(["--model", str(tiny), "hi"]) == 130
    assert capsys.readouterr() == ("one two three\n", "")
    assert generate.main(["--model", str(tiny), "hi", "--json"]) == 130
    answer = json.loads(capsys.readouterr().out)
    assert (answer["text"], answer["token_ids"], answer["finish_reason"]) == ("one two three", [5, 6, 7], None)


def test_an_error_in_mid_answer_keeps_what_was_made(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(LLM, "stream", lambda *_: chunks([Chunk("one", [5]), MinillmError("logits are NaN")]))
    assert generate.main(["--model", str(tiny), "hi"]) == 2
    assert capsys.readouterr() == ("one\n", "error: logits are NaN\n")


def test_a_bug_is_not_dressed_up_as_bad_input(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LLM, "stream", lambda *_: chunks([RuntimeError("a bug")]))
    with pytest.raises(RuntimeError, match="a bug"):
        generate.main(["--model", str(tiny), "hi"])


def test_an_interrupt_and_a_closed_pipe_of_real_processes(tmp_path: Path) -> None:
    """Closed pipes gave a traceback, or "Exception ignored ... BrokenPipeError" from the interpreter's exit.

    Text that arrives here while the process still runs also shows that every piece is flushed.
    """
    model = make_tiny_model(tmp_path / "m", max_position_embeddings=50000)
    arguments = ["--model", str(model), "hi", "--ignore-eos", "--max-tokens", "40000", "--device", "cpu"]
    interrupted, closed = start(*arguments), start(*arguments)
    assert interrupted.stdout is not None
    first = interrupted.stdout.read(8)
    interrupted.send_signal(signal.SIGINT)
    rest, err = interrupted.communicate(timeout=60)
    assert (interrupted.returncode, err) == (130, b"")
    assert (first + rest).endswith(b"\n")
    assert closed.stdout is not None
    assert closed.stderr is not None
    closed.stdout.read(5)
    closed.stdout.close()
    assert (closed.stderr.read(), closed.wait(60)) == (b"", 141)


def test_an_interrupt_during_the_import_of_torch_is_not_lost(tmp_path: Path) -> None:
    """Somewhere in `import torch` the KeyboardInterrupt was caught, and the command loaded and wrote on regardless."""
    (tmp_path / "torch.py").write_text(
        "import os, signal\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    os.getpid()\n"
        "except BaseException:\n"
        "    pass\n"
    )
    process = start("hi", PYTHONPATH=os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    assert (process.communicate(timeout=60), process.returncode) == ((b"", b""), 130)


def test_streams_that_nobody_reads() -> None:
    """argparse ignores a closed pipe, and its text came up again at the exit; a lost note changed the status."""
    helped, refused = start("--help"), start()
    assert helped.stdout is not None
    assert refused.stderr is not None
    helped.stdout.close()  # long before Python has started
    refused.stderr.close()
    assert helped.stderr is not None
    assert (helped.stderr.read(), helped.wait(60)) == (b"", 141)
    assert refused.stdout is not None
    assert (refused.stdout.read(), refused.wait(60)) == (b"", 2)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_full_disk_is_one_line() -> None:
    """The text that could not be written came up again at the interpreter's exit, as a second error and status 120."""
    with open("/dev/full", "wb") as full:
        process = start("--version", stdout=full)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert err.count(b"\n") == 1
    assert b"No space left" in err

"""`python -m minillm.chat`: the history, the commands, and Ctrl-C in the middle of an answer."""

import io
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny import make_tiny_model

from minillm import LLM, Chunk, MinillmError, SamplingParams
from minillm import chat as chat_module
from minillm.chat import Chat, Conversation, converse

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
OPTIONS = ["--temperature", "0", "--max-tokens", "6", "--ignore-eos", "--device", "cpu"]


def role(name: str, content: str) -> dict[str, str]:
    return {"role": name, "content": content}


def say(monkeypatch: pytest.MonkeyPatch, *lines: str | BaseException) -> None:
    """What the person types at the prompt, one line a call."""
    typed = iter(lines)

    def type_in(prompt: str) -> str:
        line = next(typed, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", type_in)


# ---------------------------------------------------------------------- the conversation


def test_messages_alternate_behind_the_system_message() -> None:
    conversation = Conversation("be brief", [("a", "b"), ("c", "d")])
    roles = ["system", "user", "assistant", "user", "assistant", "user"]
    contents = ["be brief", "a", "b", "c", "d", "e"]
    assert conversation.messages("e") == [role(r, c) for r, c in zip(roles, contents, strict=True)]
    assert Conversation().messages("e") == [role("user", "e")]


def test_each_answer_is_made_from_all_that_was_said(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    chat = Chat(llm, PARAMS, "be brief")
    history, expected = [role("system", "be brief")], ""
    for message in ("hi", "why", "so"):
        assert chat.take(message + "\n")
        history.append(role("user", message))
        answer = llm.chat(history, PARAMS).text
        history.append(role("assistant", answer))
        expected += answer + "\n"
    assert capsys.readouterr().out == expected
    assert chat.conversation.exchanges[0] == ("hi", history[2]["content"])


def test_commands_change_the_conversation_and_write_nothing_to_stdout(
    llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = Chat(llm, PARAMS, None)
    chat.conversation.exchanges = [("a", "b"), ("c", "d"), ("e", "f")]
    assert chat.take("/drop\n")
    assert chat.conversation.exchanges == [("c", "d"), ("e", "f")]
    assert "forgotten: a (2 exchanges stay)" in capsys.readouterr().err  # it says what it dropped
    assert chat.take("/system  Speak like a pirate. \n")
    assert chat.take("/reset\n")
    assert chat.conversation == Conversation("Speak like a pirate.", [])
    assert chat.take("/drop")
    assert chat.take("/system")
    assert chat.take("/help")
    assert chat.take("  \n")
    out, err = capsys.readouterr()
    assert out == ""
    for words in ("nothing to forget", "Speak like a pirate.", "/reset ", "/exit "):
        assert words in err
    assert chat.conversation.exchanges == []
    assert not chat.take("/exit\n")
    assert not chat.take("/quit")


def test_a_message_may_begin_with_a_slash_behind_a_space(llm: LLM) -> None:
    chat = Chat(llm, PARAMS, None)
    with pytest.raises(MinillmError, match=r"/usr/bin is no command: /help .* space in front"):
        chat.take("/usr/bin what\n")
    chat.take(" /usr/bin what\n")
    assert chat.conversation.exchanges[0][0] == "/usr/bin what"


def test_a_history_longer_than_the_context_is_said_with_both_numbers(llm: LLM) -> None:
    """Nothing is dropped behind the person's back, and after /drop the same message is answered."""
    chat = Chat(llm, PARAMS, None)
    before = [("x" * 40, "y" * 40), ("a", "b")]
    chat.conversation.exchanges = list(before)
    message = "z" * 30
    tokens = len(llm.tokenizer.apply_chat_template(chat.conversation.messages(message)))
    assert tokens > 128
    with pytest.raises(MinillmError, match=rf"{tokens} tokens, and the context 128.*/drop.*/reset"):
        chat.take(message)
    assert chat.conversation.exchanges == before
    chat.take("/drop")
    chat.take(message)
    assert [user for user, _ in chat.conversation.exchanges] == ["a", message]
    chat.take("/reset")
    with pytest.raises(MinillmError, match=r"this message has \d+ tokens, and the context 128.*shorten it"):
        chat.take("z" * 128)


def test_a_prompt_that_leaves_no_room_for_an_answer_is_refused(llm: LLM) -> None:
    chat = Chat(llm, PARAMS, None)
    frame = len(llm.tokenizer.apply_chat_template([role("user", "")]))
    with pytest.raises(MinillmError, match="128 tokens, and the context 128"):
        chat.take("z" * (128 - frame))
    chat.take("z" * (127 - frame))  # room for one token
    assert len(chat.conversation.exchanges) == 1


def test_an_answer_that_was_cut_off_says_why(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    Chat(llm, PARAMS, None).take("hi")
    assert capsys.readouterr().err == "cut off after 6 tokens: --max-tokens allows more\n"
    Chat(llm, SamplingParams(temperature=0, max_tokens=500, ignore_eos=True), None).take("hi")
    assert "the context of 128 tokens is full" in capsys.readouterr().err


# ---------------------------------------------------------------------- Ctrl-C


class Interrupted:
    """A stream in which Ctrl-C comes after some chunks, and again while the stream is closed."""

    def __init__(self, *texts: str) -> None:
        self._chunks = [Chunk(text, [5]) for text in texts]
        self.closed = False

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        if self._chunks:
            return self._chunks.pop(0)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("the interrupt did not arrive")

    def close(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        self.closed = True


def interrupt(monkeypatch: pytest.MonkeyPatch, *texts: str) -> Interrupted:
    stream = Interrupted(*texts)
    monkeypatch.setattr(LLM, "stream", lambda *_: stream)
    return stream


def test_an_interrupt_stops_the_answer_only_and_keeps_it(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C ended the whole conversation; a second, impatient one left the request in its row."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        chat = Chat(llm, PARAMS, None)
        with monkeypatch.context() as patch:
            stream = interrupt(patch, "one ", "two")
            assert chat.take("count")
        assert stream.closed
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert chat.conversation.exchanges == [("count", "one two")]
    assert capsys.readouterr().out == "one two\n"
    chat.take("go on")
    said = [role("user", "count"), role("assistant", "one two"), role("user", "go on")]
    assert chat.conversation.exchanges[1][1] == llm.chat(said, PARAMS).text


def test_an_interrupt_before_the_first_word_takes_the_message_back(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An empty answer would teach the model to say nothing, and two user messages running break templates."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        chat = Chat(llm, PARAMS, None)
        interrupt(monkeypatch)
        assert chat.take("count")
    finally:
        signal.signal(signal.SIGINT, before)
    assert chat.conversation.exchanges == []
    assert "taken back" in capsys.readouterr().err


def test_an_error_in_mid_answer_leaves_the_history_as_it_was(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stream(*_: Any) -> Iterator[Chunk]:
        yield Chunk("one", [5])
        raise MinillmError("logits are NaN")

    chat = Chat(llm, PARAMS, None)
    monkeypatch.setattr(LLM, "stream", stream)
    with pytest.raises(MinillmError, match="NaN"):
        chat.take("hi")
    assert chat.conversation.exchanges == []
    assert capsys.readouterr().out == "one\n"


# ---------------------------------------------------------------------- at a terminal, and in a pipe


@pytest.mark.parametrize("end", [EOFError(), KeyboardInterrupt(), "/exit"])
def test_a_terminal_goes_on_after_bad_lines_and_leaves_politely(
    end: str | BaseException, llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = Chat(llm, PARAMS, None)
    not_utf8 = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
    say(monkeypatch, "/nonsense", "z" * 200, not_utf8, "hi", end, "never said")
    converse(chat, interactive=True)
    assert [user for user, _ in chat.conversation.exchanges] == ["hi"]
    err = capsys.readouterr().err.splitlines()
    assert [line.startswith("error: ") for line in err] == [True, True, True, False]
    assert "not UTF-8" in err[2]


def pipe(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))


def test_a_pipe_of_lines_gives_the_answers_alone(
    tiny: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe(monkeypatch, "hi\n\n/system be brief\nwhy ☃".encode())
    assert chat_module.main(["--model", str(tiny), *OPTIONS]) == 0
    first = llm.chat([role("user", "hi")], PARAMS).text
    history = [role("system", "be brief"), role("user", "hi"), role("assistant", first), role("user", "why ☃")]
    out, err = capsys.readouterr()
    assert out == first + "\n" + llm.chat(history, PARAMS).text + "\n"
    assert err.splitlines()[1] == "system message: be brief"


def test_system_and_stats_options(
    tiny: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("minillm.bandwidth.measure_read_bandwidth", lambda device: 1e10)
    pipe(monkeypatch, b"hi\n")
    assert chat_module.main(["--model", str(tiny), "--system", "be brief", "--stats", *OPTIONS]) == 0
    out, err = capsys.readouterr()
    assert out == llm.chat([role("system", "be brief"), role("user", "hi")], PARAMS).text + "\n"
    assert "6 made" in err.splitlines()[-1]
    assert "GB/s measured here" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("data", "words"),
    [(b"\xff\n", "not UTF-8"), (b"/nonsense\nhi\n", "is no command"), (b"z" * 200 + b"\nhi\n", "the context 128")],
)
def test_a_bad_line_of_a_pipe_is_one_line_and_status_2(
    data: bytes, words: str, tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe(monkeypatch, data)
    assert chat_module.main(["--model", str(tiny), *OPTIONS]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("error: ")
    assert words in err


def test_a_model_without_a_template_cannot_chat(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_tiny_model(tmp_path / "m", chat_template=None)
    assert chat_module.main(["--model", str(model), *OPTIONS]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "no chat template" in err


def test_a_real_process_survives_ctrl_c_and_answers_the_next_line(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "m", max_position_embeddings=50000)
    options = ["--model", str(model), "--device", "cpu", "--max-tokens", "40000", "--ignore-eos"]
    process = subprocess.Popen(
        [sys.executable, "-m", "minillm.chat", *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        env={k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"} | {"OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    for message in (b"count\n", b"go on\n"):
        while select.select([process.stdout], [], [], 0.3)[0]:  # what is left of the answer before
            assert process.stdout.read(65536)
        process.stdin.write(message)
        process.stdin.flush()
        assert process.stdout.read(8)
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline() == b"stopped; the conversation keeps what was said\n"
    _, err = process.communicate(b"/exit\n", timeout=60)
    assert (process.returncode, err) == (0, b"")

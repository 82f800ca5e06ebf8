"""examples/web_app.py: the page, its answers, and what happens when it is closed."""

import json
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from example_programs import load, run, serving
from tiny import make_tiny_model

from minillm import LLM, SamplingParams

JSON = {"Content-Type": "application/json"}
ASK = [{"role": "user", "content": "the king"}]
PARAMS = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def web_app() -> Any:
    return load("web_app")


@pytest.fixture
def model(tmp_path: Path) -> Iterator[LLM]:
    with LLM(make_tiny_model(tmp_path, max_position_embeddings=8192), device="cpu", max_batch_size=1) as llm:
        yield llm


@pytest.fixture
def port(web_app: Any, model: LLM) -> Iterator[int]:
    with serving(web_app.WebApp(("127.0.0.1", 0), model, PARAMS)) as number:
        yield number


def post(port: int, body: bytes, path: str = "/chat", headers: dict[str, str] = JSON) -> tuple[int, bytes]:
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", path, body, headers)
    reply = connection.getresponse()
    return reply.status, reply.read()


def ask(port: int, messages: object) -> tuple[int, bytes]:
    return post(port, json.dumps({"messages": messages}).encode())


def events(body: bytes) -> list[dict[str, str]]:
    """As the page reads them."""
    parts = body.decode().split("\n\n")
    assert parts.pop() == ""
    assert all(part.startswith("data: ") for part in parts)
    return [json.loads(part[len("data: ") :]) for part in parts]


def test_the_page_is_there_and_needs_nothing_from_elsewhere(port: int) -> None:
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/")
    reply = connection.getresponse()
    page = reply.read().decode()
    assert (reply.status, reply.headers.get_content_type()) == (200, "text/html")
    assert "http" not in page.replace("http-equiv", "")  # no address of another host
    assert 'split("\\n\\n")' in page  # JavaScript's escapes, not Python's


def test_the_events_joined_are_the_answer(port: int, model: LLM) -> None:
    status, body = ask(port, ASK)
    assert status == 200
    assert len(events(body)) > 3
    assert "".join(event["text"] for event in events(body)) == model.chat(ASK, PARAMS).text


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "messages is empty"),
        (7, "must be a list"),
        ([{"role": "user"}], 'needs a string as its "content"'),
        ([{"role": "user", "content": "\ud800"}], "surrogate"),
        ([{"role": "user", "content": "the " * 9000}], "context 8192"),
    ],
)
def test_bad_messages_get_400_and_one_line(port: int, messages: object, words: str) -> None:
    status, body = ask(port, messages)
    assert status == 400
    error = json.loads(body)["error"]
    assert words in error
    assert "\n" not in error
    assert ask(port, ASK)[0] == 200


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"7", b"{}", b"\xff", b"[" * 100_000])
def test_what_is_no_question_gets_400(port: int, body: bytes) -> None:
    status, answer = post(port, body)
    assert status == 400
    assert "messages" in json.loads(answer)["error"]


def test_other_sites_and_other_routes_get_nothing(port: int) -> None:
    body = json.dumps({"messages": ASK}).encode()
    assert post(port, body, headers={"Content-Type": "text/plain"})[0] == 404
    assert post(port, body, path="/")[0] == 404
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/etc/passwd")
    assert connection.getresponse().status == 404


def test_a_bug_is_500_with_a_traceback_in_the_log_and_not_on_the_page(
    port: int, model: LLM, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It was a 503, with the text of the error for the client and nothing in the log."""

    def fail(*_: object) -> None:
        raise RuntimeError("/secret/path")

    with monkeypatch.context() as patch:
        patch.setattr(model, "submit_chat", fail)
        status, body = ask(port, ASK)
    assert status == 500
    assert b"secret" not in body
    assert "its log tells how" in json.loads(body)["error"]
    assert "RuntimeError: /secret/path" in capfd.readouterr().err
    assert ask(port, ASK)[0] == 200


def test_closing_the_page_frees_the_row(web_app: Any, model: LLM) -> None:
    """The only row is busy with 8,000 tokens; when that page goes away, the next question is answered at once."""
    long = SamplingParams(max_tokens=8000, temperature=0.0, ignore_eos=True)
    app = web_app.WebApp(("127.0.0.1", 0), model, long)
    with serving(app) as port:
        body = json.dumps({"messages": ASK}).encode()
        page = HTTPConnection("127.0.0.1", port, timeout=60)
        page.request("POST", "/chat", body, JSON)
        reply = page.getresponse()
        assert reply.readline().startswith(b"data: ")
        waiting = HTTPConnection("127.0.0.1", port, timeout=60)
        waiting.request("POST", "/chat", body, JSON)  # its page is closed before it has a row
        for closed in (waiting, page):
            closed.close()
        reply.close()
        app.params = PARAMS
        assert ask(port, ASK)[0] == 200
        assert model.graph_report().eager_steps < 4000


def test_help_tells_how_to_run_it() -> None:
    done = run("web_app", "--help")
    assert done.returncode == 0
    assert all(option in done.stdout for option in ("--model", "--host", "--port", "127.0.0.1"))


def test_a_missing_model_is_one_line() -> None:
    done = run("web_app", "--model", "/no/such/folder")
    assert done.returncode == 2
    assert "/no/such/folder" in done.stderr
    assert done.stderr.count("\n") == 1

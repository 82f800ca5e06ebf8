"""examples/openai_server.py, asked by OpenAI's own client, and by hand where a client would not go wrong."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import pytest
from example_programs import ENVIRONMENT, FOLDER, load, run, serving
from tiny import make_tiny_model

from minillm import LLM, SamplingParams

openai = pytest.importorskip("openai")

ASK = [{"role": "user", "content": "the king"}]
GREEDY = {"temperature": 0, "extra_body": {"min_p": 0}}
CONTEXT = 4096


@pytest.fixture(scope="module")
def program() -> Any:
    return load("openai_server")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = make_tiny_model(tmp_path_factory.mktemp("model"), max_position_embeddings=CONTEXT)
    with LLM(folder, device="cpu", max_batch_size=4, max_waiting=64) as llm:
        yield llm


@pytest.fixture(scope="module")
def server(program: Any, model: LLM) -> Iterator[Any]:
    api = program.ApiServer(("127.0.0.1", 0), model, "tiny", "secret")
    with serving(api):
        yield api


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[Any]:
    with openai.OpenAI(base_url=url(server), api_key="secret", max_retries=0, timeout=60) as client:
        yield client


def url(server: Any) -> str:
    return f"http://127.0.0.1:{server.server_port}/v1"


def send(server: Any, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, dict, str]:
    """Status, content and error message of a call by hand."""
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.request(method, path, body, {"Authorization": "Bearer secret", **headers})
    reply: HTTPResponse = connection.getresponse()
    content = json.loads(reply.read())
    error = content.get("error", {})
    assert not error or set(error) == {"message", "type", "param", "code"}
    connection.close()
    return reply.status, content, error.get("message", "")


def chat(server: Any, **fields: object) -> tuple[int, dict, str]:
    return send(
        server, "POST", "/v1/chat/completions", json.dumps({"messages": ASK, "max_tokens": 4} | fields).encode()
    )


def complete(server: Any, **fields: object) -> tuple[int, dict, str]:
    return send(server, "POST", "/v1/completions", json.dumps({"prompt": "the", "max_tokens": 4} | fields).encode())


# ---------------------------------------------------------------------- answers


def test_chat_is_the_models_answer(client: Any, model: LLM) -> None:
    started = time.time()
    reply = client.chat.completions.create(model="tiny", messages=ASK, max_completion_tokens=12, **GREEDY)
    whole = model.chat(ASK, SamplingParams(max_tokens=12, temperature=0))
    (choice,) = reply.choices
    assert (choice.message.role, choice.message.content) == ("assistant", whole.text)
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, whole.finish_reason, None)
    assert (reply.object, reply.model) == ("chat.completion", "tiny")
    assert started - 2 < reply.created < time.time() + 2
    assert reply.usage.prompt_tokens == len(whole.prompt_token_ids)
    assert reply.usage.completion_tokens == len(whole.token_ids)
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    again = client.chat.completions.create(model="tiny", messages=ASK, max_tokens=12, **GREEDY)
    assert again.choices[0].message.content == whole.text
    assert again.id != reply.id


def test_the_second_turn_of_a_conversation_is_partly_cached(client: Any) -> None:
    messages = [{"role": "user", "content": "on the sand there was a house " * 8}]
    first = client.chat.completions.create(model="tiny", messages=messages, max_tokens=8, **GREEDY)
    messages += [{"role": "assistant", "content": first.choices[0].message.content}, ASK[0]]
    second = client.chat.completions.create(model="tiny", messages=messages, max_tokens=8, **GREEDY)
    assert second.usage.prompt_tokens_details.cached_tokens > first.usage.prompt_tokens - 8
    assert second.usage.prompt_tokens_details.cached_tokens < second.usage.prompt_tokens


def test_chat_takes_parts_of_text_and_the_role_developer(client: Any, model: LLM) -> None:
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "king"}]
    messages: list[Any] = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
    reply = client.chat.completions.create(model="tiny", messages=messages, max_tokens=6, **GREEDY)
    plain = [{"role": "system", "content": "be brief"}, *ASK]
    assert reply.choices[0].message.content == model.chat(plain, SamplingParams(max_tokens=6, temperature=0)).text


def test_a_chat_stream_joined_is_the_answer(client: Any) -> None:
    fields: dict[str, Any] = dict(model="tiny", messages=ASK, max_tokens=20, seed=5, temperature=1.5)
    whole = client.chat.completions.create(**fields)
    chunks = list(client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    *pieces, last = chunks
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert [piece.choices[0].delta.role for piece in pieces] == ["assistant"] + [None] * (len(pieces) - 1)
    assert "".join(piece.choices[0].delta.content for piece in pieces) == whole.choices[0].message.content
    reasons = [piece.choices[0].finish_reason for piece in pieces]
    assert reasons == [None] * (len(pieces) - 1) + [whole.choices[0].finish_reason]
    assert all(piece.usage is None for piece in pieces)
    assert last.choices == []
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (
        whole.usage.prompt_tokens, whole.usage.completion_tokens,
    )  # fmt: skip


def test_the_clients_own_stream_helper_is_content(client: Any) -> None:
    """It joins the deltas by itself: a role that is said twice becomes "assistantassistant"."""
    fields: dict[str, Any] = dict(model="tiny", messages=ASK, max_tokens=20, **GREEDY)
    text = client.chat.completions.create(**fields).choices[0].message.content
    with client.chat.completions.stream(**fields, stop=text[9:11]) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.role == "assistant"
    assert final.choices[0].message.content == text[: text.index(text[9:11])]


def test_completions_of_texts_and_of_token_ids(client: Any, model: LLM) -> None:
    greedy = SamplingParams(max_tokens=16, temperature=0)  # 16 is what OpenAI takes if nothing is said
    ids = [model.tokenizer.encode(text) for text in ("the king", "on the sand")]
    one = client.completions.create(model="tiny", prompt="the king", **GREEDY)
    assert one.object == "text_completion"
    assert [choice.text for choice in one.choices] == [model.generate("the king", greedy).text]
    for prompts in (["the king", "on the sand"], ids):
        reply = client.completions.create(model="tiny", prompt=prompts, **GREEDY)
        assert [choice.text for choice in reply.choices] == [answer.text for answer in model.generate(ids, greedy)]
        assert [choice.index for choice in reply.choices] == [0, 1]
        assert reply.usage.prompt_tokens == len(ids[0]) + len(ids[1])
    by_ids = client.completions.create(model="tiny", prompt=ids[0], **GREEDY)
    assert by_ids.choices[0].text == one.choices[0].text


def test_a_completion_stream_with_several_answers(client: Any) -> None:
    """More answers than rows: some wait, and every chunk finds its own answer."""
    fields: dict[str, Any] = dict(model="tiny", prompt=["the", "a king"], n=3, max_tokens=12, seed=3, temperature=1.3)
    whole = client.completions.create(**fields)
    assert len({choice.text for choice in whole.choices[:3]}) > 1  # each has a seed of its own
    texts, usage = [""] * 6, None
    for chunk in client.completions.create(**fields, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens == whole.usage.prompt_tokens  # each prompt once
    assert client.completions.create(**fields).choices[4].text == texts[4]


def test_sampling_fields_reach_the_sampler(client: Any, model: LLM) -> None:
    extra = {"top_k": 20, "min_p": 0.01, "repetition_penalty": 1.2}
    fields: dict[str, Any] = dict(temperature=1.4, top_p=0.9, seed=9, max_tokens=15)
    reply = client.completions.create(model="tiny", prompt="the", **fields, extra_body=extra)
    assert reply.choices[0].text == model.generate("the", SamplingParams(**fields, **extra)).text
    free = client.completions.create(model="tiny", prompt="the", max_tokens=40, seed=1).choices[0].text
    assert free == model.generate("the", SamplingParams(max_tokens=40, seed=1, temperature=1)).text
    stop = free[len(free) // 2 :][:3]
    stopped = client.completions.create(model="tiny", prompt="the", max_tokens=40, seed=1, stop=["\ufffe", stop])
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == (free[: free.index(stop)], "stop")


def test_logprobs_of_the_chosen_tokens(client: Any, model: LLM) -> None:
    fields: dict[str, Any] = dict(model="tiny", max_tokens=10, seed=4)
    whole = model.chat(ASK, SamplingParams(max_tokens=10, seed=4, logprobs=True))
    near = pytest.approx(whole.logprobs, abs=1e-5)  # what is cached was computed in another batch
    (choice,) = client.chat.completions.create(**fields, messages=ASK, logprobs=True).choices
    assert [token.logprob for token in choice.logprobs.content] == near
    assert "".join(token.token for token in choice.logprobs.content).startswith(choice.message.content)
    assert all(bytes(token.bytes).decode() == token.token for token in choice.logprobs.content)
    streamed = client.chat.completions.create(**fields, messages=ASK, logprobs=True, stream=True)
    parts = [chunk.choices[0].logprobs for chunk in streamed]
    assert [token.logprob for part in parts if part for token in part.content] == near
    (choice,) = client.completions.create(**fields, prompt=whole.prompt_token_ids, logprobs=0).choices
    assert choice.logprobs.token_logprobs == near
    assert len(choice.logprobs.tokens) == len(whole.token_ids)


def test_async_client_and_stream(server: Any, client: Any) -> None:
    async def ask() -> tuple[str, str]:
        async with openai.AsyncOpenAI(base_url=url(server), api_key="secret", max_retries=0) as asking:
            fields: dict[str, Any] = dict(model="tiny", messages=ASK, max_tokens=12, **GREEDY)
            whole = asking.chat.completions.create(**fields)
            stream = await asking.chat.completions.create(**fields, stream=True)
            pieces = [chunk.choices[0].delta.content async for chunk in stream]
            return (await whole).choices[0].message.content, "".join(pieces)

    whole, joined = asyncio.run(ask())
    assert whole == joined
    assert whole == client.chat.completions.create(
        model="tiny", messages=ASK, max_tokens=12, **GREEDY
    ).choices[0].message.content  # fmt: skip


def test_sixteen_clients_at_once_get_what_each_would_get_alone(server: Any, client: Any) -> None:
    def ask(seed: int, stream: bool) -> str:
        with openai.OpenAI(base_url=url(server), api_key="secret", max_retries=0) as own:
            fields: dict[str, Any] = dict(model="tiny", messages=ASK, max_tokens=10 + seed, seed=seed)
            if stream:
                return "".join(c.choices[0].delta.content for c in own.chat.completions.create(**fields, stream=True))
            return own.chat.completions.create(**fields).choices[0].message.content

    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(ask, range(16), [bool(i % 2) for i in range(16)]))
    assert together == [ask(seed, False) for seed in range(16)]


def test_models_and_health(server: Any, client: Any) -> None:
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "minillm"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    assert send(server, "GET", "/health", Authorization="")[:2] == (200, {"status": "ok"})


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": None}, "messages must be a list"),
        ({"messages": []}, "messages is empty"),
        ({"messages": "hi"}, "must be a list"),
        ({"messages": [7]}, "must be a dict"),
        ({"messages": [{"role": "user"}]}, "content must be a text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "parts"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [1]}]}, "tools"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "surrogate"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 10**30}, "max_tokens"),
        ({"stop": [""]}, "stop"),
        ({"n": 0}, "n must be"),
        ({"n": True}, "n must be"),
        ({"seed": 1.5}, "seed must be"),
        ({"stream": 1}, "stream must be"),
        ({"stream_options": []}, "stream_options must be"),
        ({"logprobs": 1}, "logprobs must be true or false"),
        ({"top_logprobs": 2, "logprobs": True}, "top_logprobs is not supported"),
        ({"tools": [{"type": "function"}]}, "tools is not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format is not supported"),
        ({"logit_bias": {"5": 10}}, "logit_bias is not supported"),
        ({"presence_penalty": 0.5}, "presence_penalty is not supported"),
        ({"temprature": 0.5}, "temprature is not supported"),
        ({"prompt": "the"}, "prompt is not supported"),
    ],
)
def test_bad_chats_get_400_and_one_line(server: Any, fields: dict[str, Any], words: str) -> None:
    status, content, message = chat(server, **fields)
    assert status == 400
    assert words in message
    assert "\n" not in message
    assert content["error"]["type"] == "invalid_request_error"
    assert chat(server)[0] == 200


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": None}, "prompt must be"),
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": 7}, "prompt must be"),
        ({"prompt": ["a", 7]}, "prompt must be"),
        ({"prompt": [[]]}, "prompt is empty"),
        ({"prompt": [5, 10**9]}, "token id 1000000000"),
        ({"prompt": [[5], [True]]}, "token id True"),
        ({"logprobs": 3}, "logprobs must be 0"),
        ({"echo": True}, "echo is not supported"),
        ({"best_of": 2}, "best_of is not supported"),
        ({"messages": ASK}, "messages is not supported"),
    ],
)
def test_bad_completions_get_400_and_one_line(server: Any, fields: dict[str, Any], words: str) -> None:
    status, _, message = complete(server, **fields)
    assert status == 400
    assert words in message
    assert complete(server)[0] == 200


def test_harmless_and_neutral_fields_are_ignored(server: Any) -> None:
    neutral = {"tools": [], "response_format": {"type": "text"}, "presence_penalty": 0.0, "logit_bias": {}, "n": None}
    assert chat(server, user="u", metadata={"a": "b"}, store=True, **neutral)[0] == 200


def test_errors_are_the_ones_that_the_client_knows(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="context 4096") as caught:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "the " * CONTEXT}])
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
    with pytest.raises(openai.NotFoundError, match="'gpt-9' is not here") as caught:
        client.chat.completions.create(model="gpt-9", messages=ASK)
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="tiny", input="x", encoding_format="float")


@pytest.mark.parametrize(
    "body", [b"", b"{", b"7", b"null", b'"ab"', b'[["prompt", "the"]]', b"\xff\xfe", b"[" * 100_000]
)
def test_what_is_no_json_object_gets_400(server: Any, body: bytes) -> None:
    status, _, message = send(server, "POST", "/v1/completions", body)
    assert (status, message) == (400, "the body must be a JSON object")


def test_a_body_needs_a_length_within_bounds(server: Any) -> None:
    """A length of 5,000 digits was a status of 500, for Python reads no number of so many."""
    assert send(server, "POST", "/v1/completions", b"", **{"Content-Length": str(2**40)})[0] == 413
    for length, status in (("9" * 5000, 413), ("-1", 411), ("x", 411), ("", 411), ("0" * 5000, 400)):
        assert send(server, "POST", "/v1/completions", b"", **{"Content-Length": length})[0] == status
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert raw.makefile("rb").read().startswith(b"HTTP/1.1 411 ")  # and the connection ends
    assert send(server, "BREW", "/v1/completions")[0] == 501


def test_a_connection_serves_several_calls(server: Any) -> None:
    """Errors and streams leave it at the beginning of the next call."""
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    head = {"Authorization": "Bearer secret"}
    connection.connect()
    used = connection.sock
    for fields, status in (({}, 200), ({"stream": True}, 200), ({"n": 0}, 400), ({"stream": True}, 200), ({}, 200)):
        body = json.dumps({"prompt": "the", "max_tokens": 3} | fields)
        connection.request("POST", "/v1/completions", body, head)
        reply = connection.getresponse()
        content = reply.read()
        assert reply.status == status
        assert content.endswith(b"data: [DONE]\n\n") == ("stream" in fields)
        assert connection.sock is used
    connection.close()


def test_an_old_client_gets_its_stream_without_chunks(server: Any) -> None:
    body = json.dumps({"prompt": "the", "max_tokens": 3, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.0\r\nAuthorization: Bearer secret\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.server_port)) as raw:
        raw.sendall(head.encode() + body)
        _, _, content = raw.makefile("rb").read().partition(b"\r\n\r\n")
    assert content.startswith(b"data: {")
    assert content.endswith(b"data: [DONE]\n\n")


# ---------------------------------------------------------------------- full, closing, gone


@pytest.fixture
def small(program: Any, tmp_path: Path) -> Iterator[Any]:
    """A server with one row, and room for one more request; `handles` are those that the model gave it."""
    folder = make_tiny_model(tmp_path, max_position_embeddings=32768, eos_token_id=None)
    with LLM(folder, device="cpu", max_batch_size=1, max_waiting=1) as llm:
        api = program.ApiServer(("127.0.0.1", 0), llm, "tiny")
        submit, api.handles = llm.submit, []
        llm.submit = lambda *given: (api.handles.append(submit(*given)), api.handles[-1])[1]
        with serving(api):
            yield api


LONG: dict[str, Any] = {"prompt": "the", "max_tokens": 30000}


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def ask_long(server: Any, **fields: object) -> HTTPConnection:
    """Ask for an answer of 30,000 tokens, and wait only until the model has been told."""
    before = len(server.handles)
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.request("POST", "/v1/completions", json.dumps(LONG | fields))
    until(lambda: len(server.handles) > before)
    return connection


def test_a_full_queue_is_429_and_clients_that_hang_up_make_room(small: Any) -> None:
    """Whoever waits writes nothing, so only listening tells that a client in the queue is gone."""
    running, waiting = ask_long(small), ask_long(small, stream=True)
    status, content, message = complete(small, n=2)
    assert (status, content["error"]["type"]) == (429, "rate_limit_error")
    assert "wait already" in message
    waiting.close()
    until(small.handles[1].cancelled)
    assert not small.handles[0].done()
    running.close()
    until(small.handles[0].cancelled)
    until(lambda: complete(small)[0] == 200)  # the row is free after the step that is under way


def test_a_call_whose_client_hung_up_leaves_no_thread(small: Any) -> None:
    """Its thread slept on in `handle.result()`, with its connection, and the server's drain waited for it in vain."""
    before = threading.active_count()
    for _ in range(2):
        running = ask_long(small)
        running.close()
        until(small.handles[-1].cancelled)
    until(lambda: not small.calls and threading.active_count() <= before)
    started = time.monotonic()
    small.drain(60)
    assert time.monotonic() - started < 30


def test_a_stream_that_nobody_reads_any_more_is_cancelled(small: Any) -> None:
    running = ask_long(small, stream=True, n=1)
    reply = running.getresponse()
    assert reply.readline().startswith(b"data: {")
    running.close()
    reply.close()
    until(small.handles[0].cancelled)
    assert small.llm.graph_report().eager_steps < 20000


def test_a_call_that_does_not_fit_the_queue_leaves_nothing_there(small: Any) -> None:
    status, _, _ = complete(small, n=5, max_tokens=30000)
    assert status == 429
    assert [handle.cancelled() for handle in small.handles] == [True, True]


def test_calls_on_their_way_when_the_server_closes_get_503(small: Any) -> None:
    streaming, waiting = ask_long(small, stream=True), ask_long(small)
    small.closing = True
    small.llm.close()
    reply = waiting.getresponse()
    assert reply.status == 503
    assert json.loads(reply.read())["error"]["type"] == "server_error"
    *_, last, nothing = streaming.getresponse().read().decode().split("\n\n")
    assert "this LLM was closed" in json.loads(last.removeprefix("data: "))["error"]["message"]
    assert nothing == ""
    assert complete(small)[0] == 503


def test_sigterm_lets_answers_end_and_takes_no_more(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, max_position_embeddings=8192, eos_token_id=None)
    command = [sys.executable, FOLDER / "openai_server.py", "--model", folder, "--port", "0", "--rows", "2"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=ENVIRONMENT)
    assert server.stdout is not None
    *_, port = server.stdout.readline().removesuffix("/v1\n").split(":")
    idle, streaming = (HTTPConnection("127.0.0.1", int(port), timeout=60) for _ in range(2))
    idle.request("GET", "/health")
    assert idle.getresponse().read() == b'{"status": "ok"}'
    streaming.request("POST", "/v1/completions", json.dumps(LONG | {"max_tokens": 3000, "stream": True}))
    reply = streaming.getresponse()
    assert reply.readline().startswith(b"data: {")
    server.send_signal(signal.SIGTERM)
    assert server.stdout.readline().startswith("closing")
    until(lambda: (idle.request("GET", "/health"), idle.getresponse().read())[1] != b'{"status": "ok"}')
    assert reply.read().endswith(b"data: [DONE]\n\n")
    assert server.wait(60) == 0


def test_an_error_of_the_server_is_500_and_tells_no_secrets(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("/secret/path")

    with monkeypatch.context() as patch:
        patch.setattr(small.llm, "submit", fail)
        status, _, message = complete(small)
    assert status == 500
    assert "secret" not in message
    assert complete(small)[0] == 200


def test_the_client_raises_what_ends_a_stream(small: Any) -> None:
    with openai.OpenAI(base_url=url(small), api_key="any", max_retries=0, timeout=60) as client:
        stream = client.completions.create(model="tiny", **LONG, stream=True)
        next(iter(stream))
        threading.Timer(0.1, small.llm.close).start()
        with pytest.raises(openai.APIError, match="this LLM was closed"):
            list(stream)


def test_help_and_a_missing_model() -> None:
    done = run("openai_server", "--help")
    assert done.returncode == 0
    assert all(option in done.stdout for option in ("--model", "--host", "--port", "--api-key", "--rows"))
    done = run("openai_server", "--model", "/no/such/folder")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "/no/such/folder" in done.stderr

"""A server that speaks OpenAI's protocol, so that programs made for that API run on a model of your own.

    python examples/openai_server.py --model MODEL --port 8000 --api-key secret
    curl http://127.0.0.1:8000/v1/chat/completions -H "Authorization: Bearer secret" \\
        -d '{"messages": [{"role": "user", "content": "Hi"}], "stream": true}'

Routes: /v1/chat/completions, /v1/completions, /v1/models, /health. Beside OpenAI's fields, top_k, min_p and
repetition_penalty are taken. A field that would change the answer and that is not known here is refused, not ignored.

What it teaches: `llm.submit` gives a handle at once, and any thread may wait for its answer, iterate over its chunks,
or cancel it. Each connection has a thread here, which submits all answers of a call, `n` for each prompt, so that they
run side by side with everybody else's. This file is the protocol; `http_events.py` is the server beneath it.
"""

import argparse
import hmac
import itertools
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from json import loads
from pathlib import Path
from typing import Any

from http_events import Handler, Json, Refused, Server, merged

from minillm import LLM, Chunk, Completion, MinillmError, SamplingParams
from minillm.errors import QueueFullError, RequestError, TokenizerError
from minillm.handle import Handle
from minillm.hub import default_model
from minillm.tokenizer import Detokenizer

CHAT, COMPLETIONS, MODELS = "/v1/chat/completions", "/v1/completions", "/v1/models"
SAMPLING = ("temperature", "top_p", "stop", "top_k", "min_p", "repetition_penalty")  # the names of SamplingParams too
KNOWN = {*SAMPLING, "model", "max_tokens", "seed", "n", "logprobs", "stream", "stream_options"}
OF_ROUTE = {CHAT: {"messages", "max_completion_tokens"}, COMPLETIONS: {"prompt"}}
HARMLESS = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"}
NEUTRAL: Json = {  # other fields of the protocol, at the value that asks for nothing
    "tools": [], "functions": [], "tool_choice": "none", "function_call": "none", "response_format": {"type": "text"},
    "modalities": ["text"], "logit_bias": {}, "presence_penalty": 0, "frequency_penalty": 0, "top_logprobs": 0,
    "echo": False, "best_of": 1, "suffix": "",
}  # fmt: skip
GRACE = 30  # seconds


def read_fields(body: bytes, route: str, model: str) -> Json:
    """The fields of a call that ask for something. Raises: Refused."""
    try:
        fields = loads(body)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise Refused(400, "the body must be a JSON object")
    fields = {name: value for name, value in fields.items() if value is not None}
    for name in fields.keys() - KNOWN - OF_ROUTE[route] - HARMLESS:
        if name not in NEUTRAL or fields[name] != NEUTRAL[name]:
            raise Refused(400, f"{name} is not supported here: leave it out", "unsupported_parameter", name)
    if fields.get("model", model) != model:
        raise Refused(404, f"the model {fields['model']!r} is not here, {model!r} is", "model_not_found", "model")
    for name, kind in {"stream": bool, "stream_options": dict, "n": int, "seed": int}.items():
        if name in fields and type(fields[name]) is not kind:
            raise Refused(400, f"{name} must be of type {kind.__name__}, not {fields[name]!r}", param=name)
    return fields


def read_prompts(fields: Json, chat: bool, llm: LLM) -> list[list[int]]:
    """Token ids of the conversation, or of each prompt: a text, or token ids, which `submit` looks at."""
    if chat:
        prompts = [llm.tokenizer.apply_chat_template(read_messages(fields.get("messages")))]
    else:
        prompt: Any = fields.get("prompt")
        texts = (
            prompt if isinstance(prompt, list) and any(isinstance(part, (str, list)) for part in prompt) else [prompt]
        )
        if not all(isinstance(text, (str, list)) for text in texts):
            raise Refused(400, "prompt must be a text, a list of token ids, or a list of these", param="prompt")
        prompts = [llm.tokenizer.encode(text) if isinstance(text, str) else text for text in texts]
    if (longest := max(map(len, prompts))) >= llm.max_seq_len:
        message = f"the prompt has {longest} tokens, and the context {llm.max_seq_len}, the answer included: shorten it"
        raise Refused(400, message, "context_length_exceeded", "messages" if chat else "prompt")
    return prompts


def read_messages(messages: Any) -> Any:
    """Role and text of each. Newer clients say "developer" for "system". Other faults are for the tokenizer to find."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return messages
    plain = []
    for message in messages:
        role, content = message.get("role"), message.get("content")
        parts = content if isinstance(content, list) else [{"text": content}]
        if role in ("tool", "function") or message.get("tool_calls"):
            raise Refused(400, "messages of tools are not supported here: leave them out", param="messages")
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
            raise Refused(400, 'a content must be a text, or parts {"type": "text", "text": "..."}', param="messages")
        text = "".join(part["text"] for part in parts)
        plain.append({"role": "system" if role == "developer" else role, "content": text})
    return plain


def read_params(fields: Json, chat: bool, llm: LLM) -> list[SamplingParams]:
    """One for each of `n` answers: each has a seed of its own. SamplingParams looks at the other values."""
    n, seed, logprobs = fields.get("n", 1), fields.get("seed"), fields.get("logprobs")
    if not 1 <= n <= 128:
        raise Refused(400, f"n must be from 1 to 128, not {n}", param="n")
    if logprobs is not None and (type(logprobs) is not bool if chat else logprobs != 0):
        wanted = "true or false" if chat else "0: it gives those of the chosen tokens, and no others"
        raise Refused(400, f"logprobs must be {wanted}", param="logprobs")
    chosen = {name: fields[name] for name in SAMPLING if name in fields}
    chosen["max_tokens"] = fields.get(
        "max_completion_tokens", fields.get("max_tokens", llm.max_seq_len if chat else 16)
    )
    chosen["logprobs"] = logprobs is True or (logprobs is not None and not chat)
    return [SamplingParams(**chosen, seed=None if seed is None else (seed + i) % 2**64) for i in range(n)]


@dataclass
class Choice:
    """One of the answers of a call, and how it is written, whole or chunk by chunk."""

    index: int
    chat: bool
    handle: Handle
    detokenizer: Detokenizer

    def write(self, part: Completion | Chunk) -> Json:
        content: Json = {"text": part.text}
        if self.chat:
            speaker = {} if isinstance(part, Chunk) and part.token_ids else {"role": "assistant"}
            content = {"delta" if isinstance(part, Chunk) else "message": speaker | {"content": part.text}}
        logprobs = None if part.logprobs is None else self._logprobs(part.token_ids, part.logprobs)
        return {"index": self.index, **content, "logprobs": logprobs, "finish_reason": part.finish_reason}

    def _logprobs(self, token_ids: list[int], logprobs: list[float]) -> Json:
        texts = [self.detokenizer.add(token_id) for token_id in token_ids]  # "" until a character is complete
        if not self.chat:
            return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": None}
        pairs = zip(texts, logprobs, strict=True)
        return {"content": [{"token": t, "logprob": x, "bytes": [*t.encode()], "top_logprobs": []} for t, x in pairs]}


def usage(choices: list[Choice], n: int) -> Json:
    """Tokens of a call; a prompt counts once, however many answers it has."""
    answers = [choice.handle.result().stats for choice in choices]
    asked, made = sum(a.prompt_tokens for a in answers[::n]), sum(a.completion_tokens for a in answers)
    total = {"prompt_tokens": asked, "completion_tokens": made, "total_tokens": asked + made}
    return total | {"prompt_tokens_details": {"cached_tokens": sum(a.cached_tokens for a in answers[::n])}}


def events(head: Json, choices: list[Choice], n: int) -> Iterator[Json | str]:
    """The answers, chunk by chunk as they come; with `n` answers a prompt also their usage, if it is not 0."""
    head = head | {"usage": None} if n else head
    if choices[0].chat:
        yield from (head | {"choices": [choice.write(Chunk("", []))]} for choice in choices)  # who speaks
    for index, chunk in merged([choice.handle for choice in choices]):
        yield head | {"choices": [choices[index].write(chunk)]}
    if n:
        yield head | {"choices": [], "usage": usage(choices, n)}
    yield "[DONE]"


class Api(Handler):
    """The routes."""

    server: "ApiServer"

    def answer(self, method: str, path: str, body: bytes) -> None:
        server, key = self.server, self.headers.get("Authorization", "").removeprefix("Bearer ")
        model = {"id": server.model, "object": "model", "created": server.started, "owned_by": "minillm"}
        if path == "/health":
            return self.reply(200, {"status": "ok"})
        if server.api_key is not None and not hmac.compare_digest(key.encode(), server.api_key.encode()):
            raise Refused(401, "the API key is missing or wrong", "invalid_api_key")
        if path in (MODELS, f"{MODELS}/{server.model}"):
            return self.reply(200, {"object": "list", "data": [model]} if path == MODELS else model)
        if path not in OF_ROUTE or method != "POST":
            raise Refused(404, f"there is nothing to {method} at {path}")
        fields, chat = read_fields(body, path, server.model), path == CHAT
        prompts, params = read_prompts(fields, chat, server.llm), read_params(fields, chat, server.llm)
        kind = "text_completion" if not chat else "chat.completion.chunk" if fields.get("stream") else "chat.completion"
        name = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        head = {"id": name, "object": kind, "created": int(time.time()), "model": server.model}
        with self.cancelling() as handles:
            choices = []
            for index, (prompt, each) in enumerate(itertools.product(prompts, params)):
                handles.append(server.llm.submit(prompt, each))
                detokenizer = server.llm.tokenizer.detokenizer(prompt, skip_special_tokens=False)
                choices.append(Choice(index, chat, handles[-1], detokenizer))
            if fields.get("stream"):
                with_usage = fields.get("stream_options", {}).get("include_usage") is True
                return self.send_events(events(head, choices, len(params) if with_usage else 0))
            written = [choice.write(choice.handle.result()) for choice in choices]
            self.reply(200, head | {"choices": written, "usage": usage(choices, len(params))})

    def refusal(self, error: Exception) -> tuple[int, Json]:
        status, code, param = 503 if self.server.closing else 500, None, None
        if isinstance(error, Refused):
            status, code, param = error.status, error.code, error.param
        elif isinstance(error, (RequestError, TokenizerError, QueueFullError)):
            status = 429 if isinstance(error, QueueFullError) else 400
        message = str(error) if isinstance(error, (Refused, MinillmError)) else "the server failed: its log tells how"
        kind = "invalid_request_error" if status < 429 else "rate_limit_error" if status == 429 else "server_error"
        return status, {"error": {"message": message, "type": kind, "param": param, "code": code}}


class ApiServer(Server):
    """The server, with what its threads share."""

    def __init__(self, address: tuple[str, int], llm: LLM, model: str, api_key: str | None = None) -> None:
        self.llm, self.model, self.api_key, self.started = llm, model, api_key, int(time.time())
        super().__init__(address, Api)


def main() -> None:
    parser = argparse.ArgumentParser(description="An OpenAI-compatible server. Ctrl-C ends it.")
    add = parser.add_argument
    add("--model", help="directory, .gguf file, or hub id org/name (default: SmolLM2-135M-Instruct, fetched once)")
    add("--host", default="127.0.0.1", help="0.0.0.0 lets other machines in (default: %(default)s, this one alone)")
    add("--port", type=int, default=8000, help="(default: %(default)s)")
    add("--api-key", metavar="KEY", help="what clients must send (default: anybody may ask)")
    add("--rows", type=int, default=32, metavar="N", help="answers at the same time, more wait (default: %(default)s)")
    options = parser.parse_args()
    model = options.model or default_model(chat=True)
    name = Path(model).name
    try:
        with (
            LLM(model, max_batch_size=options.rows, progress=sys.stderr.isatty()) as llm,
            ApiServer((options.host, options.port), llm, name, options.api_key) as server,
        ):
            print(f"{name} at http://{options.host}:{server.server_port}/v1", flush=True)
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            try:
                server.serve_forever()
            except KeyboardInterrupt:
                print(f"closing: calls on their way have {GRACE} seconds (Ctrl-C again ends at once)", flush=True)
                server.drain(GRACE)
    except (MinillmError, OSError) as error:
        parser.exit(2, f"error: {error}\n")
    except KeyboardInterrupt:
        print()


if __name__ == "__main__":
    main()

"""LLM: the class that apps embed. Text in, text out; several threads may use one at once.

It checks every request on the host before anything is launched, turns text into token ids, hands requests to the
engine, and turns tokens back into text. Whoever waits for text drives the engine, one step at a time, under one lock.
"""

import operator
import secrets
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import torch
from tqdm import tqdm

from .answer import Answer, Chunk, Completion, Pending
from .cache import KVCache
from .config import ModelConfig
from .engine import Engine, Request
from .errors import MinillmError, RequestError
from .graphs import CudaBackend, GraphReport, GraphRunner, check_graphs, make_runner
from .hub import resolve_model
from .loading import load_model, make_plan, pick_device, pick_dtype
from .model import Llama
from .sampling import Mode, SamplingParams
from .state import DecodeState
from .step import decode_step
from .tokenizer import Tokenizer

Prompt = str | Sequence[int]  # text, or token ids
Messages = Sequence[Mapping[str, str]]  # [{"role": "user", "content": "..."}, ...]


class LLM:
    """A model, its cache and its captured decode steps, ready to answer.

    Args:
        model: a directory in the Hugging Face layout, a .gguf file, or a hub id; None takes the default model.
        device: "auto" (the GPU if there is one), "cpu", "cuda", "cuda:N", "mps".
        dtype: "auto" (float32 on a CPU, else the checkpoint's own), "float32", "float16", "bfloat16".
        max_batch_size: how many requests run at once; more wait.
        max_seq_len: tokens of prompt and answer together that a request may have; None is the model's context, or as
            much of it as the memory affords.
        graphs: "auto" captures the decode steps where there is a GPU and runs eagerly where not, or if that fails;
            "on" insists; "off" runs eagerly.
        progress: show progress bars on stderr.
    Raises: subclasses of MinillmError, a ValueError: ConfigError, CheckpointError, TokenizerError, MemoryLimitError,
        GraphError. Nothing stays allocated then.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        device: str = "auto",
        dtype: str = "auto",
        max_batch_size: int = 8,
        max_seq_len: int | None = None,
        graphs: str = "auto",
        progress: bool = False,
    ) -> None:
        target = pick_device(device)
        check_graphs(graphs, has_gpu=target.type == "cuda")
        path = resolve_model(model)
        config = ModelConfig.from_dir(path)
        self.tokenizer = Tokenizer.from_dir(path, config.vocab_size)
        plan = make_plan(config, target, pick_dtype(dtype, config, target), max_batch_size, max_seq_len)
        self._start(load_model(path, config, plan, progress), max_batch_size, plan.max_seq_len, graphs, progress)

    @classmethod
    def from_model(
        cls, model: Llama, tokenizer: Tokenizer, max_batch_size: int, max_seq_len: int, graphs: str = "auto"
    ) -> "LLM":
        """An LLM of a model that is in memory already (a benchmark's random weights), and this LLM's from here on."""
        llm = cls.__new__(cls)
        llm.tokenizer = tokenizer
        llm._start(model, max_batch_size, max_seq_len, graphs, progress=False)
        return llm

    def _start(self, model: Llama, max_batch_size: int, max_seq_len: int, graphs: str, progress: bool) -> None:
        self.config, self.max_seq_len = model.config, max_seq_len
        self.device, self.dtype = model.weights.embed.device, model.weights.embed.dtype
        self._lock = threading.RLock()
        cache = KVCache(model.config, max_batch_size, max_seq_len, self.device, self.dtype)
        state = DecodeState.allocate(max_batch_size, model.config.vocab_size, self.device)
        runner = _capture(model, cache, state, graphs, progress)
        self._report = runner.report
        self._engine: Engine | None = Engine(model, cache, state, runner)
        if self.device.type == "cuda":
            self._engine.warm_up()

    # ------------------------------------------------------------------ answers

    @overload
    def generate(self, prompts: str, params: SamplingParams | None = None) -> Completion: ...

    @overload
    def generate(self, prompts: list[int], params: SamplingParams | None = None) -> Completion: ...

    @overload
    def generate(
        self, prompts: list[str] | list[list[int]], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]: ...

    def generate(self, prompts, params=None):  # type: ignore[no-untyped-def]
        """Answer one prompt (text, or a list of token ids) or a list of prompts, in their order.

        Args:
            params: one for all, or a list with one for each prompt.
        Raises: RequestError before anything runs, if any of the prompts or parameters cannot be served.
        """
        prompts = _unpacked(prompts)
        if isinstance(prompts, str) or (_is_list(prompts) and len(prompts) and _as_int(prompts[0]) is not None):
            return self.generate([prompts], params)[0]
        if not _is_list(prompts):
            raise RequestError(f"prompts must be a text, token ids, or a list of them, not {type(prompts).__name__}")
        each = list(params) if _is_list(params) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise RequestError(
                f"{len(prompts)} prompts came with {len(each)} SamplingParams: give one, or one for each"
            )
        pending = [self._prepare(self._encode(prompt), p) for prompt, p in zip(prompts, each, strict=True)]
        return self._complete(pending)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[Chunk, None, None]:
        """Answer one prompt piece by piece. It is checked at once, and starts at the first `next`; closing ends it."""
        return self._stream(self._prepare(self._encode(prompt), params))

    def chat(self, messages: Messages, params: SamplingParams | None = None) -> Completion:
        """Answer a conversation, [{"role": "user", "content": "..."}, ...], through the model's chat template."""
        return self._complete([self._prepare(self.tokenizer.apply_chat_template(messages), params)])[0]

    def stream_chat(self, messages: Messages, params: SamplingParams | None = None) -> Generator[Chunk, None, None]:
        """`chat`, piece by piece."""
        return self._stream(self._prepare(self.tokenizer.apply_chat_template(messages), params))

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Teacher-forced logits, float32 [T, vocab] on the CPU: row t is the model's view of token t + 1."""
        ids = self._check_ids(token_ids)
        if not ids:
            raise RequestError("logits of no token ids were asked for: give at least one")
        with self._lock:
            return self._open().score(ids)

    # ------------------------------------------------------------------ the runtime

    def graph_report(self) -> GraphReport:
        """What was captured, how long it took, the bytes it holds, and how often it was replayed."""
        return self._report

    @property
    def bytes_per_step(self) -> int:
        """Bytes of weights that every decode step reads."""
        return self._open().model.weights.bytes_per_step

    def close(self) -> None:
        """Give all memory back. Open requests end with an error; so does every later call."""
        with self._lock:
            if self._engine is None:
                return
            engine, self._engine = self._engine, None
            engine.shut_down(MinillmError("this LLM was closed"))
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _open(self) -> Engine:
        if self._engine is None:
            raise MinillmError("this LLM was closed: make a new one")
        return self._engine

    # ------------------------------------------------------------------ requests

    def _encode(self, prompt: Prompt) -> Sequence[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt

    def _check_ids(self, token_ids: Sequence[int]) -> list[int]:
        """Ids on their way to the device, where a bad one would be an assert that poisons the whole process."""
        token_ids = _unpacked(token_ids)
        if not _is_list(token_ids):
            raise RequestError(f"token ids must be a list of whole numbers, not {type(token_ids).__name__}")
        ids = [_as_int(token_id) for token_id in token_ids]
        for index, token_id in enumerate(ids):
            if token_id is None or not 0 <= token_id < self.config.vocab_size:
                raise RequestError(
                    f"token id {token_ids[index]!r} at index {index} is no whole number below {self.config.vocab_size}"
                )
        if len(ids) > self.max_seq_len:
            longer = " or raise max_seq_len" if self.max_seq_len < self.config.max_position_embeddings else ""
            raise RequestError(
                f"the prompt has {len(ids)} tokens and the context {self.max_seq_len}: shorten the prompt{longer}"
            )
        return [token_id for token_id in ids if token_id is not None]

    def _prepare(self, token_ids: Sequence[int], params: SamplingParams | None) -> Pending:
        ids, params = self._check_ids(token_ids), SamplingParams() if params is None else params
        if not ids:
            raise RequestError(
                "the prompt is empty, and this model has no begin token to start from: give it some text"
            )
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params must be SamplingParams, not {type(params).__name__}")
        for token_id in params.stop_token_ids:
            if token_id >= self.config.vocab_size:
                raise RequestError(
                    f"stop token id {token_id} is not below the vocabulary size {self.config.vocab_size}"
                )
        ends = () if params.ignore_eos else self.config.eos_token_ids
        stops = sorted({*ends, *params.stop_token_ids})
        answer = Answer(self.tokenizer.detokenizer(ids), params.stop, frozenset(stops), params.logprobs)
        limit = min(len(ids) + params.max_tokens, self.max_seq_len)
        seed = secrets.randbits(64) if params.seed is None else params.seed
        request = Request(ids, params, limit, stops, seed, on_token=lambda *_: False)
        pending = Pending(request, answer)
        request.on_token = pending.on_token
        return pending

    def _submit(self, pending: list[Pending]) -> None:
        with self._lock:
            for p in pending:
                p.submitted = time.perf_counter()
                self._open().submit(p.request)

    def _complete(self, pending: list[Pending]) -> list[Completion]:
        try:
            self._submit(pending)
            for p in pending:
                while not p.request.done:
                    self._advance(p)
                if p.request.error is not None:
                    raise p.request.error
            return [p.completion() for p in pending]
        finally:  # after an error or Ctrl-C, none of them keeps a row
            self._cancel(pending)

    def _stream(self, pending: Pending) -> Generator[Chunk, None, None]:
        # queued in here and not by the caller: closing a generator that never started does not run its `finally`
        sent = 0
        try:
            self._submit([pending])
            while True:
                while sent == len(pending.answer.chunks) and not pending.request.done:
                    self._advance(pending)
                if sent < len(pending.answer.chunks):
                    sent += 1
                    yield pending.answer.chunks[sent - 1]
                elif pending.request.error is not None:
                    raise pending.request.error
                else:
                    if sent == 0:  # the prompt fills the context: an answer of no tokens still says why it ended
                        yield Chunk("", [], pending.request.finish_reason)
                    return
        finally:
            self._cancel([pending])

    def _advance(self, pending: Pending) -> None:
        """One step of the engine, unless another thread's step has brought what this one waits for."""
        before = len(pending.request.token_ids)
        with self._lock:
            if not pending.request.done and len(pending.request.token_ids) == before:
                self._open().step()

    def _cancel(self, pending: list[Pending]) -> None:
        with self._lock:
            if self._engine is not None:
                for p in pending:
                    self._engine.cancel(p.request)


def _capture(model: Llama, cache: KVCache, state: DecodeState, graphs: str, progress: bool) -> GraphRunner:
    def step(rows: DecodeState, kv_len: int, mode: Mode) -> None:
        decode_step(model, cache, rows, kv_len, mode)

    device = state.tokens.device
    backend = CudaBackend(device) if device.type == "cuda" else None
    with tqdm(desc="capturing CUDA graphs", unit="graph", disable=not (progress and backend), leave=False) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        # the fused attention reads each row's length on the device, so one recording serves every length
        return make_runner(step, state, cache, graphs, backend, show, by_kv_length=model.fused is None)


def _unpacked(value: Any) -> Any:
    """An array or a tensor as the list of its numbers; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def _is_list(value: object) -> bool:
    """Whether it is a list, a tuple or the like; texts and bytes are sequences to Python only."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


def _as_int(value: object) -> int | None:
    """A whole number of Python, NumPy or PyTorch as an int; None if it is none (True and False are none)."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return None
    try:
        return operator.index(value)
    except TypeError:  # a tensor of floats has the method, and refuses
        return None

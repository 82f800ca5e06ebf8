"""LLM: the class that apps embed. Text in, text out; threads and asyncio tasks may use one at once, any number of them.

It checks every request on the host, turns text into token ids, and hands the request to the one thread that owns the
device (`service.py`). Whoever wants the answer waits for that thread, and turns tokens back into text.
"""

import threading
import weakref
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import overload

import torch

from .answer import Chunk, Completion
from .assembly import Options, build_engine
from .config import ModelConfig
from .cpu_threads import in_passing_thread
from .errors import RequestError
from .graph_report import GraphReport
from .graphs import check_graphs
from .handle import Handle
from .hub import resolve_model
from .loading import load_model, make_plan, pick_device, pick_dtype
from .model import Llama
from .pending import Pending
from .prefix import WORTH
from .prompts import Desk, Prompt, is_one, unpacked
from .request import Request
from .sampling import SamplingParams
from .service import Service
from .tokenizer import Tokenizer

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
        max_waiting: how many requests may wait for one of the `max_batch_size` rows; more are a QueueFullError.
        prefill_chunk: tokens of prompts that are read between two decode steps of others, who wait that long; None is
            512 on a GPU and 64 elsewhere.
        prefix_reuse: whether a prompt that begins like one before is read from where they part.
        prefill_graphs: the lengths that prompts are padded to, each captured; () reads all prompts eagerly; None is
            what measures best: some lengths up to 512 where there are fused kernels, else ().
        steps_per_graph: decode steps in one launch. Their tokens come together, no prompt is read in between, and what
            was made after the end of an answer is discarded. "until_done" launches a loop that ends with the answers,
            or when a request comes or goes; tokens come as they are made. It needs CUDA 12.4 and cuda.bindings.
            Without graphs, steps are made one by one all the same.
        graph_pieces: in how many graphs a step is cut, for a model whose whole step does not fit in one.
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
        max_waiting: int = 1024,
        prefill_chunk: int | None = None,
        prefix_reuse: bool = True,
        prefill_graphs: Sequence[int] | None = None,
        steps_per_graph: int | str = 1,
        graph_pieces: int = 1,
    ) -> None:
        target = pick_device(device)
        check_graphs(graphs, has_gpu=target.type == "cuda")
        options = Options(
            max_batch_size, graphs, max_waiting, prefill_chunk, prefix_reuse, prefill_graphs, steps_per_graph,
            graph_pieces,
        )  # fmt: skip
        path = resolve_model(model)
        config = ModelConfig.from_dir(path)
        self.tokenizer = Tokenizer.from_dir(path, config.vocab_size)
        plan = make_plan(config, target, pick_dtype(dtype, config, target), max_batch_size, max_seq_len)

        def load() -> None:
            self._start(load_model(path, config, plan, progress), plan.max_seq_len, options, progress)

        in_passing_thread(load) if target.type == "cpu" else load()

    @classmethod
    def from_model(cls, model: Llama, tokenizer: Tokenizer, max_seq_len: int, options: Options) -> "LLM":
        """An LLM of a model that is in memory already (a benchmark's random weights), and this LLM's from here on."""
        llm = cls.__new__(cls)
        llm.tokenizer = tokenizer
        llm._start(model, max_seq_len, options, progress=False)
        return llm

    def _start(self, model: Llama, max_seq_len: int, options: Options, progress: bool) -> None:
        self.config, self.max_seq_len = model.config, max_seq_len
        self.device, self.dtype = model.weights.embed.device, model.weights.embed.dtype
        self._desk = Desk(self.config, self.tokenizer, max_seq_len)
        engine = build_engine(model, max_seq_len, options, progress)
        self._report = engine.runner.report
        self._service = Service(engine, options.max_waiting)
        # for an LLM that nobody closes; at the exit of the interpreter the service ends itself
        weakref.finalize(self, self._service.stop).atexit = False
        if self.device.type == "cuda":
            self._warm_up()

    def _warm_up(self) -> None:
        """Have the thread read a prompt that is recorded and one that is not, so that a GPU loads its kernels now."""
        torch.cuda.synchronize(self.device)  # the weights may have been made on another stream than the thread's
        try:
            self.generate([0] * min(WORTH - 1, self.max_seq_len), SamplingParams(max_tokens=1, temperature=0.0))
            self.logits([0])
            self._report.prefill_replays = self._report.eager_prefills = 0
        except BaseException:
            self.close()
            raise

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

        A list may be longer than the queue: it is fed as room appears.

        Args:
            params: one for all, or a list with one for each prompt.
        Raises: RequestError before anything runs, if any of the prompts or parameters cannot be served.
        """
        prompts = unpacked(prompts)
        if is_one(prompts):
            return self.generate([prompts], params)[0]
        return self._complete(self._desk.prepare_all(prompts, params))

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[Chunk, None, None]:
        """Answer one prompt piece by piece. It is checked at once, and starts at the first `next`; closing ends it."""
        return self._stream(self._desk.prepare(prompt, params))

    def chat(self, messages: Messages, params: SamplingParams | None = None) -> Completion:
        """Answer a conversation, [{"role": "user", "content": "..."}, ...], through the model's chat template."""
        return self._complete([self._prepare_chat(messages, params)])[0]

    def stream_chat(self, messages: Messages, params: SamplingParams | None = None) -> Generator[Chunk, None, None]:
        """`chat`, piece by piece."""
        return self._stream(self._prepare_chat(messages, params))

    def submit(self, prompt: Prompt, params: SamplingParams | None = None) -> Handle:
        """Start to answer one prompt, and return at once.

        Raises: RequestError, and QueueFullError if `max_waiting` requests wait already.
        """
        return self._submit(self._desk.prepare(prompt, params))

    def submit_chat(self, messages: Messages, params: SamplingParams | None = None) -> Handle:
        """`submit` of a conversation."""
        return self._submit(self._prepare_chat(messages, params))

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Teacher-forced logits, float32 [T, vocab] on the CPU: row t is the model's view of token t + 1."""
        ids = self._desk.check_ids(token_ids)
        if not ids:
            raise RequestError("logits of no token ids were asked for: give at least one")
        ended = threading.Event()
        request = Request.scoring(ids, ended.set)
        try:
            self._service.submit(request, wait=True)
            self._service.refuse_vain_wait()
            ended.wait()
        finally:  # after Ctrl-C, it does not keep a row
            self._service.cancel(request)
        if request.error is not None:
            raise request.error
        parts = request.scores or []
        return parts[0] if len(parts) == 1 else in_passing_thread(lambda: torch.cat(parts))  # see `cpu_threads.py`

    # ------------------------------------------------------------------ answers for asyncio

    @overload
    async def agenerate(self, prompts: str, params: SamplingParams | None = None) -> Completion: ...

    @overload
    async def agenerate(self, prompts: list[int], params: SamplingParams | None = None) -> Completion: ...

    @overload
    async def agenerate(
        self, prompts: list[str] | list[list[int]], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]: ...

    async def agenerate(self, prompts, params=None):  # type: ignore[no-untyped-def]
        """`generate` for asyncio: the loop is free meanwhile, and cancelling the task cancels the requests."""
        prompts = unpacked(prompts)
        if is_one(prompts):
            return (await self.agenerate([prompts], params))[0]
        return await self._acomplete(self._desk.prepare_all(prompts, params))

    def astream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncGenerator[Chunk, None]:
        """`stream` for asyncio: `async for chunk in llm.astream(prompt)`. Closing it, or its task's end, ends it."""
        return self._astream(self._desk.prepare(prompt, params))

    async def achat(self, messages: Messages, params: SamplingParams | None = None) -> Completion:
        """`chat` for asyncio."""
        return (await self._acomplete([self._prepare_chat(messages, params)]))[0]

    def astream_chat(self, messages: Messages, params: SamplingParams | None = None) -> AsyncGenerator[Chunk, None]:
        """`stream_chat` for asyncio."""
        return self._astream(self._prepare_chat(messages, params))

    # ------------------------------------------------------------------ the runtime

    def graph_report(self) -> GraphReport:
        """What was captured, how long it took, the bytes it holds, and how often it was replayed."""
        return self._report

    @property
    def bytes_per_step(self) -> int:
        """Bytes of weights that every decode step reads."""
        return self._service.engine.model.weights.bytes_per_step

    def close(self) -> None:
        """Give all memory back. Open requests end with an error; so does every later call. From any thread."""
        self._service.close()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ------------------------------------------------------------------ requests

    def _prepare_chat(self, messages: Messages, params: SamplingParams | None) -> Pending:
        return self._desk.prepare(self.tokenizer.apply_chat_template(messages), params)

    def _handle(self, pending: Pending) -> Handle:
        return Handle(pending, self._service, self)

    def _submit(self, pending: Pending) -> Handle:
        handle = self._handle(pending)
        handle.submit()
        return handle

    def _complete(self, pending: list[Pending]) -> list[Completion]:
        handles = [self._handle(p) for p in pending]
        try:
            for handle in handles:
                handle.submit(wait=True)
            return [handle.result() for handle in handles]
        finally:  # after an error or Ctrl-C, none of them keeps a row
            _cancel(handles)

    def _stream(self, pending: Pending) -> Generator[Chunk, None, None]:
        # submitted in here and not by the caller: closing a generator that never started does not run its `finally`
        handle = self._handle(pending)
        try:
            handle.submit()
            yield from handle
        finally:
            handle.cancel()

    async def _acomplete(self, pending: list[Pending]) -> list[Completion]:
        handles = [self._handle(p) for p in pending]
        try:
            for handle in handles:
                await handle.asubmit()
            return [await handle.completion() for handle in handles]
        finally:
            _cancel(handles)

    async def _astream(self, pending: Pending) -> AsyncGenerator[Chunk, None]:
        handle = self._handle(pending)
        try:
            handle.submit()
            async with aclosing(aiter(handle)) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            handle.cancel()


def _cancel(handles: list[Handle]) -> None:
    for handle in handles:
        handle.cancel()

"""`traffic`: requests that come and go, as a server sees them: each has its own length and its own end.

Random prompts of random lengths, each with a fixed number of tokens to make, are handed to an `LLM` by one client, all
at once or at random moments (`--arrival poisson`). A request that ends makes room for one that waits, in the middle of
the others. Every mode, every number of rows and the peer get the same requests, so their times can be compared; eager
launches get the first few of them alone (`--eager-requests`), for they are slow.

There is no text here: the tokenizer of `NoText` says nothing, as nobody reads the answers.

The columns:

    requests/s, tok/s   requests, and tokens of answers, from the first request to the end of the last
    mean, p50, p99 s    from handing in a request to its end, the time in the queue included
    first, first p99 s  the same to its first token: mean and 99th percentile
    full tok/s          with all rows busy around the mean length, as the engine drives them
    replay tok/s        the same steps with nothing around them: no request, no token read by the host
    share               the former divided by the latter: what the engine leaves of what the device can do
"""

import itertools
import statistics
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

import torch

from ..assembly import Options
from ..bandwidth import measure_read_bandwidth
from ..errors import ConfigError
from ..graphs import check_graphs
from ..handle import Handle
from ..llm import LLM
from ..loading import pick_device, pick_kernels
from ..model import Llama
from ..sampling import Mode, SamplingParams
from ..tokenizer import Tokenizer
from .contest import Failed
from .continuous import PEER, check_peers, serve_continuous
from .machine import describe
from .report import Bars, Column, Report, Row, fixed
from .runtime import Subject, chosen_ops, make_subject, release, synchronize
from .visits import Served, Visit, draw_visits, mean_length

COLUMNS = [
    Column("mode", "mode"),
    Column("rows", "rows"),
    Column("requests", "requests"),
    Column("requests/s", "requests_per_s", fixed(2)),
    Column("tok/s", "tokens_per_s", fixed(0)),
    Column("mean s", "latency_s_mean", fixed(3)),
    Column("p50 s", "latency_s_p50", fixed(3)),
    Column("p99 s", "latency_s_p99", fixed(3)),
    Column("first s", "first_token_s_mean", fixed(3)),
    Column("first p99 s", "first_token_s_p99", fixed(3)),
    Column("full tok/s", "full_tokens_per_s", fixed(0)),
    Column("replay tok/s", "replay_tokens_per_s", fixed(0)),
    Column("share", "share_of_replay", lambda value: f"{value:.1%}"),
]
BARS = Bars(("mode", "rows"), "tokens_per_s", "tokens a second")
GRAPHS = {"graphs": "on", "eager": "off"}  # modes, and the option of LLM
STEPS, WARM_UP = 200, 4  # of a measurement with all rows busy
ANSWER, QUESTION, ROUNDS = 16, 50, 5  # tokens of the first turn's answer and of the second question; conversations


class NoText:
    """A tokenizer for requests that are token ids, and answers that nobody reads."""

    def detokenizer(self, token_ids: Sequence[int]) -> "NoText":
        return self

    def add(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


def traffic(options: Namespace, arguments: Sequence[str]) -> Report:
    """Run the benchmark. Raises: MinillmError if it cannot be run as asked."""
    device, seq_len = pick_device(options.device), _check(options)
    modes = options.modes or (["graphs", "eager"] if device.type == "cuda" else ["eager"])
    for mode in modes:
        check_graphs(GRAPHS[mode], has_gpu=device.type == "cuda")
    subject = make_subject(options, max(options.rows), seq_len)
    ops = chosen_ops(options.ops, subject)[-1]
    ceiling = measure_read_bandwidth(subject.device)
    about = describe(subject.device, arguments) | {"model": str(subject), "ops": ops}
    report = Report("traffic", about, ceiling, COLUMNS, BARS, rows=[], samples="latency_s")
    visits = draw_visits(
        options.requests,
        options.prompt_lengths,
        options.answer_lengths,
        options.rate,
        subject.config.vocab_size,
        options.seed,
    )
    for rows, mode in itertools.product(options.rows, modes):
        some = visits[: options.eager_requests] if mode == "eager" else visits
        with open_llm(subject, rows, seq_len, ops, mode, len(some)) as llm:
            report.rows.append(serve(llm, some).row(mode, rows) | busy(llm, rows, mean_length(visits)))
            if mode == modes[0] and options.conversation:
                report.notes.append(f"{mode}, {rows} rows: {second_turn(llm, options.conversation)}")
    if PEER in options.peers:
        try:
            report.rows.append(serve_continuous(subject, visits).row("transformers continuous", "its own choice"))
        except Failed as failure:
            report.notes.append(f"transformers continuous failed: {failure}")
    report.notes += ratios(report.rows, modes[0])
    return report


def _check(options: Namespace) -> int:
    """The tokens that a row of the cache needs."""
    if (options.arrival == "poisson") != (options.rate is not None):
        raise ConfigError("--arrival poisson needs a --rate of requests a second, and --arrival all has none")
    check_peers(options.peers)
    turns = options.conversation + ANSWER + QUESTION + 2 if options.conversation else 0
    return max(options.prompt_lengths[1] + options.answer_lengths[1], turns)


@contextmanager
def open_llm(subject: Subject, rows: int, seq_len: int, ops: str, mode: str, requests: int) -> Iterator[LLM]:
    """An LLM of the subject's weights, warm, for as many requests as that at once."""
    plan = replace(subject.plan, max_batch_size=rows, max_seq_len=seq_len)
    kernels = pick_kernels(subject.config, plan) if ops == "fused" else None
    model = Llama(subject.config, subject.weights, seq_len, kernels)
    # it needs of a tokenizer what NoText has
    tokenizer = cast(Tokenizer, NoText())
    llm = LLM.from_model(model, tokenizer, seq_len, Options(rows, GRAPHS[mode], max_waiting=requests))
    try:
        llm.generate(prompts(llm, rows, 8), SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
        yield llm
    finally:
        llm.close()
        del llm, model, kernels
        release(subject.device)


def prompts(llm: LLM, count: int, length: int) -> list[list[int]]:
    """Random token ids, new ones each time: nothing of them is in the cache yet."""
    return torch.randint(llm.config.vocab_size, (count, length)).tolist()


def serve(llm: LLM, visits: Sequence[Visit]) -> Served:
    """Hand in each request when its time comes, and wait for them all. Raises: MinillmError."""
    handles, started = list[Handle](), time.perf_counter()
    for visit in visits:
        time.sleep(max(0.0, started + visit.at - time.perf_counter()))
        params = SamplingParams(max_tokens=visit.answer, temperature=0.0, ignore_eos=True)
        handles.append(llm.submit(visit.prompt, params))
    answers = [handle.result() for handle in handles]
    seconds = time.perf_counter() - started
    return Served(
        seconds,
        tokens=sum(answer.stats.completion_tokens for answer in answers),
        first_token_s=[answer.stats.time_to_first_token for answer in answers],
        latency_s=[answer.stats.total_time for answer in answers],
    )


def busy(llm: LLM, rows: int, length: int) -> Row:
    """Tokens a second with all rows at work around `length` tokens: as the engine drives them, and steps alone."""
    # the first row makes about a token for each prompt that is read after its own
    steps = min(STEPS, llm.max_seq_len - length - rows)
    start = max(1, length - steps // 2)
    if steps < 8:
        return {}  # the cache has no room for it
    params = SamplingParams(max_tokens=llm.max_seq_len, temperature=0.0, ignore_eos=True)
    *others, last = prompts(llm, rows, start)
    handles = [llm.submit(prompt, params) for prompt in others]
    rate = llm.submit(last, replace(params, max_tokens=steps)).result().stats.tokens_per_second
    if any(handle.done() for handle in handles):
        return {}
    for handle in handles:
        handle.cancel()
    full, alone = rows * rate, replay(llm, rows, start, steps)
    return {"full_tokens_per_s": full, "replay_tokens_per_s": alone, "share_of_replay": full / alone}


def replay(llm: LLM, rows: int, start: int, steps: int) -> float:
    """Tokens a second of the same steps with nothing around them."""
    engine = llm._service.engine
    while engine.busy:  # with what was cancelled; from then on its thread sleeps
        time.sleep(0.001)
    state, runner = engine.state, engine.runner
    with runner.on_stream(), torch.inference_mode():
        state.positions.fill_(start)
        state.limits.fill_(2**31)
        state.active.fill_(True)
        for step in range(steps + WARM_UP):
            if step == WARM_UP:
                synchronize(llm.device)
                began = time.perf_counter()
            runner.step(rows, start + step + 1, Mode.GREEDY)
        synchronize(llm.device)
        seconds = time.perf_counter() - began
        state.active.fill_(False)
    engine.memory.forget_all()  # the rows hold something else now
    return rows * steps / seconds


def second_turn(llm: LLM, length: int) -> str:
    """How long the first token of a conversation takes, and that of its next turn, which repeats all before it."""
    first_s, second_s, cached = [], [], 0
    params = SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True)
    for conversation in prompts(llm, 1 + ROUNDS, length):
        first = llm.generate(conversation, params)
        second = llm.generate([*conversation, *first.token_ids, *prompts(llm, 1, QUESTION)[0]], params)
        first_s.append(first.stats.time_to_first_token)
        second_s.append(second.stats.time_to_first_token)
        cached = second.stats.cached_tokens
    first_ms, second_ms = (1000 * statistics.median(times[1:]) for times in (first_s, second_s))  # [0] warmed up
    return (
        f"the first token of a prompt of {length} tokens takes {first_ms:.2f} ms; that of the second turn, with "
        f"{ANSWER} tokens of answer and {QUESTION} of question more, {second_ms:.2f} ms ({cached} tokens were cached)"
    )


def ratios(rows: Sequence[Row], mode: str) -> list[str]:
    """The first mode beside the others, at the same number of rows, and beside the peer."""
    notes = []
    for ours, other in itertools.product([row for row in rows if row["mode"] == mode], rows):
        if other["mode"] != mode and other["rows"] in (ours["rows"], "its own choice"):
            sample = "" if other["requests"] == ours["requests"] else f" (on {other['requests']} of the requests)"
            times = ours["tokens_per_s"] / other["tokens_per_s"]
            notes.append(f"{mode}, {ours['rows']} rows: {times:.2f} times the tokens/s of {other['mode']}{sample}")
    return notes

"""LLM as an app uses it: one prompt, lists, streams, conversations, threads, bad input, closing."""

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from small import Brake, until
from tiny import EOS, make_tiny_model

from minillm import LLM, Completion, MinillmError, SamplingParams

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), bos=True)


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, device="cpu", max_batch_size=3) as model:
        yield model


def test_a_prompt_gives_a_completion_and_a_list_a_list(llm: LLM) -> None:
    one = llm.generate("the king and", GREEDY)
    assert isinstance(one, Completion)
    assert one.prompt_token_ids == llm.tokenizer.encode("the king and")
    assert 1 <= len(one.token_ids) <= 12
    assert one.text == llm.tokenizer.decode(one.token_ids)
    assert one.logprobs is None
    several = llm.generate(["the king and", "a", "on the sand there was", "x y z", "the"], GREEDY)
    assert [c.text for c in several] == [
        llm.generate(p, GREEDY).text for p in ("the king and", "a", "on the sand there was", "x y z", "the")
    ]
    assert llm.generate([], GREEDY) == []
    ids = llm.generate(one.prompt_token_ids, GREEDY)
    assert ids.token_ids == one.token_ids
    assert [c.token_ids for c in llm.generate([[5, 6], [7]], GREEDY)] == [
        llm.generate([5, 6], GREEDY).token_ids,
        llm.generate([7], GREEDY).token_ids,
    ]


def test_params_one_for_all_or_one_each(llm: LLM) -> None:
    each = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in (3, 5)]
    assert [len(c.token_ids) for c in llm.generate(["a", "b"], each)] == [3, 5]
    with pytest.raises(ValueError, match="2 prompts came with 1 SamplingParams"):
        llm.generate(["a", "b"], each[:1])
    with pytest.raises(ValueError, match="params must be SamplingParams"):
        llm.generate("a", {"max_tokens": 3})  # type: ignore[call-overload]


def test_the_joined_stream_is_the_completion(llm: LLM) -> None:
    params = SamplingParams(max_tokens=40, seed=3, temperature=1.5, logprobs=True)
    whole = llm.generate("the", params)
    chunks = list(llm.stream("the", params))
    assert "".join(c.text for c in chunks) == whole.text
    assert [i for c in chunks for i in c.token_ids] == whole.token_ids
    assert [x for c in chunks for x in c.logprobs or []] == whole.logprobs
    assert [c.finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == whole.finish_reason


def test_same_seed_same_text_alone_or_in_company(llm: LLM) -> None:
    params = SamplingParams(max_tokens=30, seed=11, temperature=1.2)
    alone = llm.generate("the king", params).text
    other = SamplingParams(max_tokens=20, temperature=2.0, top_p=0.9)
    for row in range(3):
        prompts, each = ["a", "b"], [other, other]
        prompts.insert(row, "the king")
        each.insert(row, params)
        assert llm.generate(prompts, each)[row].text == alone
    assert llm.generate("the king", SamplingParams(max_tokens=30, seed=12, temperature=1.2)).text != alone
    unseeded = [llm.generate("the", SamplingParams(max_tokens=30)).text for _ in range(3)]
    assert len(set(unseeded)) > 1


def test_stop_string_and_stop_token(llm: LLM) -> None:
    params = SamplingParams(max_tokens=40, seed=5, temperature=1.5, ignore_eos=True)
    free = llm.generate("the", params)
    middle = free.text[len(free.text) // 2 :][:3]
    stopped = llm.generate("the", SamplingParams(max_tokens=40, seed=5, temperature=1.5, ignore_eos=True, stop=middle))
    assert stopped.text == free.text[: free.text.index(middle)]
    assert stopped.finish_reason == "stop"
    end = free.token_ids[7]
    by_id = SamplingParams(max_tokens=40, seed=5, temperature=1.5, ignore_eos=True, stop_token_ids=[end])
    stopped = llm.generate("the", by_id)
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(end) + 1]
    assert stopped.text == llm.tokenizer.decode(stopped.token_ids[:-1])


def test_end_tokens_of_both_files_stop_and_null_runs_on(tmp_path: Path) -> None:
    """Elsewhere, an instruct model never stopped: its end-of-turn token stood only in generation_config.json."""
    free = SamplingParams(max_tokens=60, seed=2, temperature=2.0, ignore_eos=True)
    for ends in ([EOS, 40], 40, None):
        with LLM(make_tiny_model(tmp_path / str(ends), eos_token_id=ends), device="cpu") as llm:
            ids = llm.generate("the", free).token_ids
            assert len(ids) == 60
            for end in ends if isinstance(ends, list) else [ends]:
                text = llm.generate([5] * 5, SamplingParams(max_tokens=80, seed=3, temperature=3.0))
                if end is None:
                    assert text.finish_reason == "length"
                elif text.finish_reason == "stop":
                    assert text.token_ids[-1] in (ends if isinstance(ends, list) else [ends])


def test_chat_applies_the_template_once(llm: LLM) -> None:
    """Elsewhere, the template wrote a begin token and encoding added a second."""
    messages = [{"role": "user", "content": "the king"}]
    answer = llm.chat(messages, GREEDY)
    assert answer.prompt_token_ids == llm.tokenizer.apply_chat_template(messages)
    assert answer.prompt_token_ids[:2].count(1) == 1
    assert "".join(c.text for c in llm.stream_chat(messages, GREEDY)) == answer.text


def test_the_second_turn_of_a_chat_reads_what_is_new_and_says_the_same(folder: Path) -> None:
    """The whole conversation was read again in every turn."""
    turns = [{"role": "user", "content": "the king"}]
    with (
        LLM(folder, device="cpu", max_batch_size=2, max_seq_len=128) as llm,
        LLM(folder, device="cpu", max_batch_size=2, max_seq_len=128, prefix_reuse=False) as without,
    ):
        first = llm.chat(turns, GREEDY)
        assert first.stats.cached_tokens == 0
        other = llm.generate("the sand and the king on it", GREEDY)
        turns += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "on"}]
        second, alone = llm.chat(turns, GREEDY), without.chat(turns, GREEDY)
        assert (second.text, second.token_ids) == (alone.text, alone.token_ids)
        assert len(first.prompt_token_ids) <= second.stats.cached_tokens < len(second.prompt_token_ids)
        assert (without.chat(turns, GREEDY).stats.cached_tokens, other.stats.cached_tokens) == (0, 0)
        llm.logits(first.prompt_token_ids)
        assert llm.chat(turns, GREEDY).text == alone.text


def test_logits_are_those_of_the_model(llm: LLM) -> None:
    ids = llm.tokenizer.encode("the king and the sand")
    logits = llm.logits(ids)
    assert logits.shape == (len(ids), llm.config.vocab_size)
    assert logits.dtype == torch.float32
    greedy = llm.generate(ids, SamplingParams(max_tokens=1, temperature=0.0, logprobs=True))
    assert greedy.token_ids == [logits[-1].argmax().item()]
    assert greedy.logprobs == pytest.approx([logits[-1].log_softmax(-1).max().item()], abs=1e-4)


def test_closing_a_stream_frees_its_row(llm: LLM) -> None:
    params = SamplingParams(max_tokens=100, ignore_eos=True, seed=1)
    expected = llm.generate("a", GREEDY).text
    engine = llm._service.engine
    brake = Brake(engine)
    streams = [llm.stream("the king", params) for _ in range(3)]
    for stream in streams:
        next(stream)
    assert None not in engine.rows
    streams[1].close()
    until(lambda: engine.rows.count(None) == 1)
    del streams, stream
    gc.collect()
    until(lambda: engine.rows == [None] * 3)
    brake.release()
    assert llm.generate("a", GREEDY).text == expected


def test_a_stream_never_started_holds_nothing_back(llm: LLM) -> None:
    stream = llm.stream("the king", SamplingParams(max_tokens=5))
    stream.close()
    assert llm._service.engine.open == 0


def test_more_streams_than_rows_in_one_thread_do_not_wait_for_ever(llm: LLM) -> None:
    params = SamplingParams(max_tokens=10, seed=4, ignore_eos=True)
    streams = [llm.stream(f"the {i}", params) for i in range(7)]
    texts = ["".join(c.text for c in s) for s in reversed(streams)][::-1]
    assert texts == [llm.generate(f"the {i}", params).text for i in range(7)]


def test_threads_share_one_runtime(llm: LLM) -> None:
    prompts = [f"the king {i} and" for i in range(12)]
    expected = [llm.generate(p, GREEDY).text for p in prompts]
    got: dict[int, str] = {}

    def ask(i: int) -> None:
        got[i] = "".join(c.text for c in llm.stream(prompts[i], GREEDY))

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [got[i] for i in range(12)] == expected


def test_two_runtimes_do_not_see_each_other(folder: Path, llm: LLM) -> None:
    with LLM(folder, device="cpu", max_batch_size=1, max_seq_len=64) as second:
        first_stream, second_stream = llm.stream("the king", GREEDY), second.stream("the king", GREEDY)
        assert [c.text for c in first_stream] == [c.text for c in second_stream]
    assert llm.generate("a", GREEDY).text


def test_context_is_a_limit_of_prompt_and_answer_together(folder: Path) -> None:
    """The rule: at most max_seq_len tokens in all. Elsewhere, one more was an index assert, or silently cut."""
    with LLM(folder, device="cpu", max_seq_len=32, max_batch_size=1) as llm:
        out = llm.generate([5] * 30, SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True))
        assert len(out.token_ids) == 2
        assert out.finish_reason == "length"
        full = llm.generate([5] * 32, GREEDY)
        assert (full.token_ids, full.text, full.finish_reason) == ([], "", "length")
        assert [c.finish_reason for c in llm.stream([5] * 32, GREEDY)] == ["length"]
        with pytest.raises(ValueError, match="33 tokens and the context 32"):
            llm.generate([5] * 33, GREEDY)
        assert llm.generate("a", GREEDY).token_ids


@pytest.mark.parametrize("bad", [[-1], [10_000], [2**31], [1.5], [True], [], [5, "a"], 7, None, [None]])
def test_bad_prompts_are_errors_and_the_next_call_works(llm: LLM, bad: object) -> None:
    """Elsewhere, one bad token id killed the process, or wrote to a neighbour."""
    if bad == []:
        assert llm.generate([]) == []  # no prompts, no answers
        bad = [[]]
    with pytest.raises(MinillmError):
        llm.generate(bad, GREEDY)  # type: ignore[call-overload]
    with pytest.raises(MinillmError):
        llm.logits([] if bad == [[]] else bad)  # type: ignore[arg-type]
    assert llm.generate("a", GREEDY).token_ids
    assert llm._service.engine.open == 0


def test_one_bad_prompt_of_a_list_refuses_the_list_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(
        MinillmError, match="prompt 1 of the list: token id 10000 at index 0 is no whole number from 0 to"
    ):
        llm.generate([[5], [10_000]], GREEDY)
    assert llm._service.engine.open == 0


def test_bad_stop_ids_and_messages(llm: LLM) -> None:
    with pytest.raises(MinillmError, match="stop token id 5000"):
        llm.generate("a", SamplingParams(stop_token_ids=[5000]))
    for messages in ([], [{"role": "user"}], "hello", [{"content": "x"}]):
        with pytest.raises(MinillmError):
            llm.chat(messages)  # type: ignore[arg-type]


def test_empty_prompt_starts_from_the_begin_token_or_is_an_error(tmp_path: Path, llm: LLM) -> None:
    assert llm.generate("", GREEDY).prompt_token_ids == [1]
    with (
        LLM(make_tiny_model(tmp_path, bos=False), device="cpu") as without,
        pytest.raises(MinillmError, match="empty"),
    ):
        without.generate("")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(device="abacus"), "abacus"),
        (dict(device="cuda:99"), "CUDA devices"),
        (dict(device="cuda:999"), "CUDA devices"),
        (dict(device="cpu:5"), "not supported"),
        (dict(dtype="int3"), "int3"),
        (dict(graphs="maybe"), "maybe"),
        (dict(max_batch_size=0), "max_batch_size"),
        (dict(max_seq_len=0), "max_seq_len"),
        (dict(max_seq_len=10**9), "context of 128"),
        (dict(max_batch_size=10**9, max_seq_len=128), "GiB"),
    ],
)
def test_options_that_cannot_be_served(folder: Path, options: dict, says: str) -> None:
    with pytest.raises(MinillmError, match=says):
        LLM(folder, **{"device": "cpu", **options})


def test_graphs_on_without_a_gpu_is_an_error(folder: Path) -> None:
    with pytest.raises(MinillmError, match="needs a CUDA device"):
        LLM(folder, device="cpu", graphs="on")


def test_report_counts_steps(llm: LLM) -> None:
    llm.generate("the", SamplingParams(max_tokens=5, ignore_eos=True, temperature=0.0))
    report = llm.graph_report()
    assert not report.enabled
    assert report.eager_steps == 4
    assert dict(report.eager_reasons) == {"no CUDA device": 4}


def test_closed_is_closed(folder: Path) -> None:
    llm = LLM(folder, device="cpu")
    stream = llm.stream("the king", SamplingParams(max_tokens=50, ignore_eos=True))
    Brake(llm._service.engine)
    next(stream)
    llm.close()
    llm.close()
    with pytest.raises(MinillmError, match="closed"):
        list(stream)
    with pytest.raises(MinillmError, match="closed"):
        llm.generate("a")


def test_close_lets_go_of_weights_and_cache(folder: Path) -> None:
    """Closing kept everything alive through the graph runner, so a second model was loaded beside the first."""
    llm = LLM(folder, device="cpu", max_batch_size=1)
    llm.generate("the king", GREEDY)
    engine = llm._service.engine
    parts = [weakref.ref(part) for part in (engine, engine.cache, engine.model, engine.state)]
    del engine
    llm.close()
    gc.collect()
    assert [part() for part in parts] == [None] * len(parts)
    assert llm.graph_report().eager_steps > 0


def test_a_request_that_cannot_start_ends_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that fitted no tensor ended every other open request with a bare RuntimeError."""
    params = SamplingParams(max_tokens=20, seed=1, ignore_eos=True)
    neighbour = llm.stream("the king", params)
    text = next(neighbour).text
    admit = llm._service.engine.state.admit

    def refuse(row: int, ids: list[int], *rest: object) -> None:
        if ids == [7, 7]:
            raise RuntimeError("value cannot be converted")
        admit(row, ids, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(llm._service.engine.state, "admit", refuse)
    with pytest.raises(RuntimeError, match="converted"):
        llm.generate([7, 7])
    text += "".join(chunk.text for chunk in neighbour)
    assert text == llm.generate("the king", params).text
    until(lambda: llm._service.engine.open == 0)


def test_token_ids_of_numpy_and_torch(llm: LLM) -> None:
    expected = llm.generate([5, 6, 7], GREEDY).token_ids
    for ids in (np.array([5, 6, 7]), torch.tensor([5, 6, 7]), (5, 6, 7), [np.int64(5), 6, torch.tensor(7)]):
        assert llm.generate(ids, GREEDY).token_ids == expected  # type: ignore[call-overload]
        assert llm.logits(ids).shape[0] == 3  # type: ignore[arg-type]
    for bad in (b"hello", np.array([1.5]), torch.tensor([[1.5]]), 5):
        with pytest.raises(MinillmError):
            llm.generate(bad, GREEDY)  # type: ignore[call-overload]
    for params in (5, 0, {}, "x"):
        with pytest.raises(MinillmError):
            llm.generate("a", params)  # type: ignore[call-overload]
        with pytest.raises(MinillmError):
            llm.stream("a", params)  # type: ignore[arg-type]


@pytest.mark.parametrize("model", [5, b"x", ["a"], "x" * 300, "~nobody-of-this-name/x/y", ""])
def test_what_is_no_model_is_one_error(model: object) -> None:
    with pytest.raises(MinillmError):
        LLM(model)  # type: ignore[arg-type]


def test_import_is_light() -> None:
    """`import minillm` does not wait for torch."""
    code = "import sys, minillm; assert 'torch' not in sys.modules; minillm.SamplingParams; print(minillm.__version__)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)

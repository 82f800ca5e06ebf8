"""`bench traffic`: the same requests for everybody, and figures that follow from their times."""

import itertools
import json
import math
import statistics
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minillm import LLM, SamplingParams
from minillm.bench import continuous, traffic
from minillm.bench.__main__ import main
from minillm.bench.contest import Failed
from minillm.bench.runtime import Subject, make_subject
from minillm.bench.visits import Served, Visit, draw_visits, mean_length

SMALL = ["traffic", "--shape", "tiny", "--device", "cpu", "--rows", "2,3", "--requests", "7"]
SMALL += ["--prompt-lengths", "4:40", "--answer-lengths", "2:9", "--conversation", "90"]
VISITS = draw_visits(7, (4, 40), (2, 9), None, 256, seed=0)


@pytest.fixture(scope="module")
def subject() -> Subject:
    return make_subject(Namespace(shape="tiny", model=None, device="cpu", dtype="float32"), rows=3, seq_len=300)


@pytest.fixture
def llm(subject: Subject) -> Iterator[LLM]:
    with traffic.open_llm(subject, 3, 300, "plain", "eager", 20) as llm:
        yield llm


def test_requests_are_seeded_and_within_bounds() -> None:
    visits = draw_visits(500, (3, 9), (1, 4), None, 50, seed=1)
    assert visits == draw_visits(500, (3, 9), (1, 4), None, 50, seed=1)
    assert visits != draw_visits(500, (3, 9), (1, 4), None, 50, seed=2)
    assert {len(visit.prompt) for visit in visits} == set(range(3, 10))
    assert {visit.answer for visit in visits} == {1, 2, 3, 4}
    assert {token for visit in visits for token in visit.prompt} == set(range(50))
    assert {visit.at for visit in visits} == {0.0}
    assert mean_length([Visit([1] * 10, 4, 0), Visit([1] * 20, 8, 0)]) == 18


def test_arrivals_at_a_rate_have_exponential_distances() -> None:
    at = [visit.at for visit in draw_visits(4000, (1, 1), (1, 1), 20.0, 9, seed=1)]
    gaps = [after - before for before, after in itertools.pairwise(at)]
    assert at[0] == 0
    assert min(gaps) > 0
    assert statistics.fmean(gaps) == pytest.approx(1 / 20, rel=0.1)
    assert statistics.pstdev(gaps) == pytest.approx(1 / 20, rel=0.1)  # as long as their mean: the mark of Poisson


def test_a_row_is_the_arithmetic_of_the_times() -> None:
    row = Served(4.0, tokens=100, first_token_s=[1.0, 2.0], latency_s=[2.0, 4.0]).row("graphs", 8)
    assert (row["requests_per_s"], row["tokens_per_s"]) == (0.5, 25)
    assert (row["latency_s_mean"], row["latency_s_p50"], row["latency_s_p99"]) == (3, 3, pytest.approx(3.98))
    assert (row["first_token_s_mean"], row["first_token_s_p99"]) == (1.5, pytest.approx(1.99))


def test_every_request_is_served_to_its_end(llm: LLM) -> None:
    served = traffic.serve(llm, VISITS)
    assert served.tokens == sum(visit.answer for visit in VISITS)
    assert len(served.latency_s) == len(served.first_token_s) == 7
    assert all(
        0 < first <= last <= served.seconds for first, last in zip(served.first_token_s, served.latency_s, strict=True)
    )


def test_requests_are_handed_in_when_their_time_comes(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(traffic.time, "sleep", slept.append)
    traffic.serve(llm, [Visit([1, 2], 2, at) for at in (0.0, 1000.0, 3000.0)])
    assert slept[:3] == [0.0, pytest.approx(1000, abs=60), pytest.approx(3000, abs=60)]


def test_full_rows_are_measured_beside_the_same_bare_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bare steps see the lengths of those that the engine drove, and leave the LLM as it was."""
    greedy = SamplingParams(temperature=0.0, max_tokens=20)
    before = llm.generate([1, 2, 3], greedy).token_ids
    engine, seen = llm._service.engine, []
    step = engine.runner.step
    monkeypatch.setattr(engine.runner, "step", lambda *given: (seen.append(given), step(*given))[1])
    figures = traffic.busy(llm, rows=3, length=150)
    assert figures["share_of_replay"] == figures["full_tokens_per_s"] / figures["replay_tokens_per_s"] > 0
    bare = seen[-(147 + traffic.WARM_UP) :]  # 300 - 150 - 3 steps, with 76 tokens before them
    assert [(given[0], given[1]) for given in bare] == [(3, 78 + i) for i in range(len(bare))]
    driven = [given[1] for given in seen[: -len(bare)] if given[3] == 3]
    assert abs(driven[0] - bare[0][1]) < 10
    assert not engine.state.active.any()
    assert not any(engine.memory.held(row) for row in range(3))
    assert llm.generate([1, 2, 3], greedy).token_ids == before


def test_without_room_in_the_cache_there_is_no_share(llm: LLM) -> None:
    assert traffic.busy(llm, rows=3, length=290) == {}


def test_the_second_turn_is_cached(llm: LLM) -> None:
    note = traffic.second_turn(llm, 100)
    assert "100 tokens" in note
    assert "(115 tokens were cached)" in note  # all but the last token of the answer, which was not fed


# ---------------------------------------------------------------------- transformers


def test_the_peer_serves_the_same_requests(subject: Subject) -> None:
    pytest.importorskip("transformers", minversion="5.24")  # older ones want psutil on a CPU
    served = continuous.serve_continuous(subject, VISITS)
    assert served.tokens == sum(visit.answer for visit in VISITS)
    for first, last in zip(served.first_token_s, served.latency_s, strict=True):
        assert 0 < first <= last <= served.seconds


class Broken:
    """A manager whose answers are not what was asked for."""

    def __init__(self, stamps: int, error: str | None = None, running: bool = True) -> None:
        self._names: list[str] = []
        self._output = Namespace(error=error, timestamps=[1.0] * stamps, is_finished=lambda: True)
        self._running = running

    def add_request(self, prompt: list[int], name: str, **_: object) -> None:
        self._names.append(name)

    def get_result(self, timeout: float) -> Namespace | None:
        if not self._running:
            return None
        return Namespace(**vars(self._output), request_id=self._names.pop())

    def is_running(self) -> bool:
        return self._running


@pytest.mark.parametrize(
    ("manager", "words"),
    [
        (Broken(3), "3 tokens, and 5 were asked for"),
        (Broken(5, error="out of blocks"), "out of blocks"),
        (Broken(5, running=False), "ended after 0 of 2"),
    ],
)
def test_a_peer_that_does_not_do_the_work_has_failed(manager: Broken, words: str) -> None:
    with pytest.raises(Failed, match=words):
        continuous.run(manager, [Visit([1], 5, 0.0)] * 2)


# ---------------------------------------------------------------------- the command


def test_the_command_measures_every_number_of_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", minversion="5.24")  # older ones want psutil on a CPU
    out = tmp_path / "t.json"
    assert main([*SMALL, "--eager-requests", "5", "--peers", "transformers", "--json", str(out)]) == 0
    text, data = capsys.readouterr().out, json.loads(out.read_text())
    rows: list[dict[str, Any]] = data["rows"]
    assert [(row["mode"], row["rows"], row["requests"]) for row in rows] == [
        ("eager", 2, 5), ("eager", 3, 5), ("transformers continuous", "its own choice", 7),
    ]  # fmt: skip
    for row in rows:
        assert all(math.isfinite(row[key]) and row[key] > 0 for key in ("requests_per_s", "tokens_per_s"))
        assert row["first_token_s_mean"] <= row["latency_s_mean"] <= row["latency_s_p99"]
        assert len(row["latency_s"]) == row["requests"]
    assert rows[0]["share_of_replay"] == pytest.approx(
        rows[0]["full_tokens_per_s"] / rows[0]["replay_tokens_per_s"], rel=1e-3
    )
    for words in (
        "requests/s",
        "first p99 s",
        "share",
        "second turn",
        "ops",
        "read ceiling",
        "transformers continuous",
    ):
        assert words in text
    times = rows[0]["tokens_per_s"] / rows[2]["tokens_per_s"]
    assert f"eager, 2 rows: {times:.2f} times" in text
    assert "(on 7 of the requests)" in text


def test_a_failing_peer_is_a_note(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", minversion="5.24")  # older ones want psutil on a CPU
    monkeypatch.setattr(continuous, "make_manager", lambda *_: 1 / 0)
    assert main([*SMALL, "--rows", "2", "--conversation", "0", "--peers", "transformers"]) == 0
    out = capsys.readouterr().out
    assert "transformers continuous failed: ZeroDivisionError" in out
    assert "\neager " in out
    assert "second turn" not in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--arrival", "poisson"], ("poisson", "--rate")),
        (["--rate", "5"], ("--rate", "all")),
        (["--rate", "-1"], ("--rate", "'-1'")),
        (["--rate", "inf"], ("--rate", "'inf'")),
        (["--prompt-lengths", "9:3"], ("--prompt-lengths", "'9:3'")),
        (["--prompt-lengths", "x"], ("--prompt-lengths", "'x'")),
        (["--answer-lengths", "0:3"], ("--answer-lengths", "'0'")),
        (["--conversation", "-1"], ("--conversation", "'-1'")),
        (["--conversation", "2000"], ("2068", "1024")),
        (["--modes", "fast"], ("--modes", "'fast'")),
        (["--modes", "graphs"], ("graphs", "CUDA")),
        (["--peers", "vllm"], ("--peers", "'vllm'")),
    ],
)
def test_bad_input_gets_one_line(
    arguments: list[str], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert all(word in err for word in words), err


def test_a_peer_that_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(continuous, "find_spec", lambda name: None)
    assert main([*SMALL, "--peers", "transformers"]) == 2
    assert "pip install transformers" in capsys.readouterr().err


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["traffic", "--help"]) == 0
    out = capsys.readouterr().out
    for option in ("requests", "rows", "prompt-lengths", "answer-lengths", "arrival", "rate", "seed", "modes", "peers"):
        assert f"--{option}" in out
    assert "default: 16:1024" in out

"""`bench launches`: who takes turns, what is counted, its command line; on graphs that only pretend."""

import json
import math
from argparse import Namespace
from pathlib import Path

import pytest
from small import FakeBackend

from minillm.assembly import UNTIL_DONE, Options
from minillm.bench import launches as bench
from minillm.bench.__main__ import build_parser, main
from minillm.bench.launches import Contestant, Run, launches, make_row, notes
from minillm.bench.report import Report
from minillm.bench.runtime import make_subject
from minillm.cache import KVCache
from minillm.engine import Engine
from minillm.errors import MinillmError
from minillm.graphs import GraphRunner
from minillm.looping import LoopEngine, Loops
from minillm.model import Llama
from minillm.sampling import Mode
from minillm.state import DecodeState
from minillm.step import decode_step

SMALL = ["launches", "--shape", "tiny", "--device", "cpu", "--prompt", "5", "--tokens", "20", "--cache", "64"]
SMALL += ["--rounds", "3", "--steps-per-graph", "1,4,until_done"]


def pretended(model: Llama, max_seq_len: int, options: Options, progress: bool) -> Engine:
    """An engine as on a GPU: `replay` runs the steps again, and a loop makes three at each look."""
    cache = KVCache(model.config, 1, max_seq_len, model.weights.embed.device, model.weights.embed.dtype)
    state = DecodeState.allocate(1, model.config.vocab_size, model.weights.embed.device)

    def step(rows: DecodeState, kv_len: int, mode: Mode) -> None:
        decode_step(model, cache, rows, kv_len, mode)

    runner = GraphRunner(step, state, cache, FakeBackend(pace=3), steps=options.steps)
    runner.capture()
    if options.steps_per_graph == UNTIL_DONE:
        return LoopEngine(model, cache, state, runner, prefix_reuse=False, loops=Loops(runner, cache))
    return Engine(model, cache, state, runner, prefix_reuse=False)


def measure(*arguments: str) -> Report:
    return launches(build_parser().parse_args([*SMALL, *arguments]), [*SMALL, *arguments])


@pytest.fixture(autouse=True)
def _pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "build_engine", pretended)


def test_every_kind_of_launch_is_measured(tmp_path: Path) -> None:
    report = measure()
    assert [(row["steps_per_graph"], row["launches"]) for row in report.rows] == [
        ("1", 19),
        ("4", 5),
        ("until_done", 1),
    ]
    for row in report.rows:
        assert len(row["ms_per_token"]) == 3
        assert min(row["ms_per_token"]) <= row["ms_per_token_p50"] <= max(row["ms_per_token"])
        assert row["tokens_per_s"] == pytest.approx(1000 / row["ms_per_token_p50"])
        assert row["answer_ms_p50"] > 0
        assert all(math.isfinite(row[name]) for name in ("gap_ms_p99", "cpu_us_per_token", "floor_ms"))
        assert row["share_of_ceiling"] == pytest.approx(row["floor_ms"] / row["ms_per_token_p50"])
    assert report.notes[-1] == "all made the same tokens in every run"
    assert len(report.notes) == 3
    for note, steps in zip(report.notes, ("4", "until_done"), strict=False):
        assert note.startswith(f"steps_per_graph {steps} makes ")
    report.write_json(tmp_path / "b.json")
    assert [row["launches"] for row in json.loads((tmp_path / "b.json").read_text())["rows"]] == [19, 5, 1]
    for title in ("steps", "launches", "ms/token", "gap p99", "answer ms", "cpu us", "ceiling", "floor ms"):
        assert title in report.text()


def test_they_take_turns_after_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[int | str] = []
    answer = Contestant.answer

    def noted(self: Contestant, *args: object) -> Run:
        log.append(self.steps)
        return answer(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Contestant, "answer", noted)
    measure()
    assert log == [1, 4, "until_done"] * (bench.WARM_UP + 3)


def test_the_engines_are_shut_down_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards also: a benchmark that times NaN."""
    ended: list[Engine] = []
    shut_down = Engine.shut_down
    monkeypatch.setattr(Engine, "shut_down", lambda self, error: (ended.append(self), shut_down(self, error))[1])

    def broken(model: Llama, max_seq_len: int, options: Options, progress: bool) -> Engine:
        model.weights.norm.fill_(math.nan)
        return pretended(model, max_seq_len, options, progress)

    monkeypatch.setattr(bench, "build_engine", broken)
    with pytest.raises(MinillmError, match="NaN"):
        measure("--steps-per-graph", "1,4")
    assert len(ended) == 2


def test_a_row_is_arithmetic_on_the_runs() -> None:
    subject = make_subject(Namespace(shape="tiny", model=None, device="cpu", dtype="float32"), 1, 64)
    runs = [Run([7, 8, 9], 3e-3, 1.0, [1.5, 1.5 + a, 1.5 + 2 * a]) for a in (0.010, 0.030, 0.020)]
    contestant = Contestant(4, None, runs, launches=2)  # type: ignore[arg-type]
    row = make_row(contestant, subject, Namespace(prompt=10, tokens=3), ceiling=1e9)
    assert row["ms_per_token_p50"] == pytest.approx(20)
    assert row["answer_ms_p50"] == pytest.approx(540)
    assert row["cpu_us_per_token"] == pytest.approx(1000)
    # the two steps see 11 and 12 tokens
    kv = KVCache.bytes_per_token(subject.config, subject.dtype)
    assert row["bytes_per_step"] == subject.weights.bytes_per_step + round(11.5 * kv)
    other = Contestant("until_done", None, [Run([7, 8, 1], 1e-3, 1.0, [1.5, 1.6, 1.7])])  # type: ignore[arg-type]
    half = row | {"tokens_per_s": row["tokens_per_s"] / 2, "cpu_us_per_token": 250.0, "steps_per_graph": "until_done"}
    assert notes([contestant, other], [row, half]) == [
        "steps_per_graph until_done makes 0.500 times the tokens/s of 4, with 0.25 times the processor time",
        "other tokens were made by until_done",
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompt", "50"], ("50", "20", "70", "64", "--cache")),
        (["--tokens", "1"], ("at least 2", "--tokens")),
        (["--cache", "4096"], ("4096", "1024")),
        (["--ops", "fused"], ("fused", "GPU", "cpu")),
    ],
)
def test_what_cannot_be_measured_is_said(arguments: list[str], words: tuple[str, ...]) -> None:
    with pytest.raises(MinillmError) as raised:
        measure(*arguments)
    assert all(word in str(raised.value) for word in words), raised.value


@pytest.mark.parametrize("sizes", ["1,0", "sometimes", "until_done,"])
def test_sizes_that_are_none_get_one_line(sizes: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--steps-per-graph", sizes]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "--steps-per-graph" in err
    assert repr(sizes.split(",")[-1]) in err

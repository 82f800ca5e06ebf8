"""The benchmark's arithmetic and its command line. Nothing here depends on how fast this machine is."""

import itertools
import json
import math
import random
import subprocess
import sys
import time
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path

import numpy
import pytest
import torch
from small import FakeBackend

from minillm.bench.__main__ import build_parser, main
from minillm.bench.contest import SETTLE, Entry, Run, contest
from minillm.bench.decode import Minillm, cache_ratios, compare, engines, make_row, ratios
from minillm.bench.peers import Transformers
from minillm.bench.pool import LAYOUTS, measure_layout, pool
from minillm.bench.report import MAX_SAMPLES, Bars, Column, Report, percentile, table
from minillm.bench.runtime import BenchRunner, DeviceClock, Runtime, Subject, TimedEngine, make_subject, needed_bytes
from minillm.bench.serve import BatchRequest, Server, draw_requests, jitter_at_a_size, serve
from minillm.bench.shapes import SHAPES
from minillm.config import ModelConfig
from minillm.errors import MinillmError
from minillm.request import Request
from minillm.sampling import Mode, SamplingParams
from minillm.state import DecodeState

SMALL = ["decode", "--shape", "tiny", "--device", "cpu", "--prompt", "5", "--cache", "64,128", "--steps", "12"]
NUMBERS = (
    "first_token_ms", "step_ms_p50", "step_ms_p99", "p99_over_p50", "tokens_per_s", "bytes_per_step",
    "share_of_ceiling", "floor_ms", "warm_up_s",
)  # fmt: skip


def tiny(dtype: str = "float32") -> Subject:
    return make_subject(Namespace(shape="tiny", model=None, device="cpu", dtype=dtype), rows=4, seq_len=64)


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a command leaves on stderr when it ends with status 2 and prints nothing else."""
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1, err
    return err


# ---------------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def decoded(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict, Path]:
    """What one decode run prints, its JSON file, and its plot."""
    folder = tmp_path_factory.mktemp("bench")
    plot = ["--plot", str(folder / "b.png")] if find_spec("matplotlib") else []
    arguments = [*SMALL, "--batch", "1,3", "--rounds", "2", "--json", str(folder / "b.json"), *plot]
    with pytest.MonkeyPatch.context() as patch:
        printed: list[str] = []
        patch.setattr("minillm.bench.__main__.write", printed.append)
        assert main(arguments) == 0
    return "".join(printed), json.loads((folder / "b.json").read_text()), folder / "b.png"


def test_decode_measures_every_mode_batch_and_cache(decoded: tuple[str, dict, Path]) -> None:
    _, data, _ = decoded
    seen = {(row["mode"], row["batch"], row["prompt"], row["cache"]) for row in data["rows"]}
    ours = {("eager", batch, 5, cache) for batch in (1, 3) for cache in (64, 128)}
    assert seen == ours | {("transformers eager", batch, 5, None) for batch in (1, 3)}
    assert len(seen) == len(data["rows"])


def test_decode_gives_finite_sane_numbers(decoded: tuple[str, dict, Path]) -> None:
    _, data, _ = decoded
    for row in data["rows"]:
        assert all(math.isfinite(row[name]) and row[name] > 0 for name in NUMBERS)
        assert len(row["step_ms"]) == 2 * (12 - SETTLE)
        assert len(row["tokens_per_s_of_rounds"]) == 2
        assert row["floor_ms"] <= row["step_ms_p50"] <= row["step_ms_p99"]
        assert row["p99_over_p50"] == pytest.approx(row["step_ms_p99"] / row["step_ms_p50"], rel=1e-3)
        assert row["share_of_ceiling"] == pytest.approx(row["floor_ms"] / row["step_ms_p50"], rel=1e-3)
        assert row["floor_ms"] == pytest.approx(1000 * row["bytes_per_step"] / data["ceiling_bytes_per_s"], rel=1e-3)
        assert row["host_us"] is None  # on a CPU the host has no time of its own
        mean_ms = sum(row["step_ms"]) / len(row["step_ms"])
        low, high = min(row["tokens_per_s_of_rounds"]), max(row["tokens_per_s_of_rounds"])
        assert low * 0.99 <= row["batch"] * 1000 / mean_ms <= high * 1.01


def test_table_and_file_give_the_same_ceiling(tmp_path: Path) -> None:
    """The file rounded 15.0649 up to 15.065, whose four digits are 15.07, while the table gave 15.06."""
    for ceiling in (15.0649e9, 15.0651e9, 4.04449e12):
        report = Report("decode", {}, ceiling, [], Bars("", "", ""), rows=[])
        report.write_json(tmp_path / "x.json")
        kept = json.loads((tmp_path / "x.json").read_text())["ceiling_bytes_per_s"]
        assert f"{kept / 1e9:.4g} GB/s" in report.text()


def test_decode_prints_the_circumstances_and_the_table(decoded: tuple[str, dict, Path]) -> None:
    text, data, _ = decoded
    for name in ("machine", "versions", "date", "command", "model"):
        assert data[name] in text
    for name in ("python", "torch", "triton", "transformers"):
        assert f"{name} " in data["versions"]
    assert data["command"].startswith("python -m minillm.bench decode --shape tiny ")
    assert f"read ceiling  {data['ceiling_bytes_per_s'] / 1e9:.4g} GB/s" in text
    for title in ("mode", "batch", "prompt", "cache", "first ms", "p50 ms", "p99 ms", "p99/p50", "host us", "tok/s",
                  "MB/step", "ceiling", "floor ms"):  # fmt: skip
        assert title in text
    assert "batch 3, prompt 5, cache 64: eager makes" in text
    assert "times the tokens/s of transformers eager" in text
    assert "eager, batch 1, prompt 5: a step with a cache of 128 takes" in text


def test_decode_draws_a_png(decoded: tuple[str, dict, Path]) -> None:
    pytest.importorskip("matplotlib")
    assert decoded[2].read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_decode_can_sample_and_leave_the_peers_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--rounds", "1", "--no-peers", "--temperature", "0.8"]) == 0
    out = capsys.readouterr().out
    assert "\neager " in out
    assert "\ntransformers" not in out  # as a row; the versions name it


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["decode", "--shape", "llama-9"], ("llama-9", "llama-3.2-1b")),
        (["decode", "--shape", "tiny", "--model", "x"], ("--shape", "--model")),
        (["decode"], ("--shape", "--model")),
        ([], ("decode|prefill|serve|traffic|launches|pool|retarget|pieces|picture",)),
        (["decode", "--model", "/no/such/folder"], ("/no/such/folder",)),
        ([*SMALL, "--batch", "1,0"], ("--batch", "'0'")),
        ([*SMALL, "--steps", "7"], ("--steps", "7")),
        ([*SMALL, "--prompt", "52"], ("52", "12", "65", "64")),
        ([*SMALL, "--cache", "4096"], ("4096", "1024")),
        ([*SMALL, "--temperature", "-1"], ("temperature", "-1")),
        ([*SMALL, "--peers", "vllm"], ("--peers", "vllm")),
        ([*SMALL, "--peers", "compile"], ("compile", "GPU")),
        ([*SMALL, "--dtype", "int8"], ("int8",)),
        ([*SMALL, "--ops", "fused"], ("fused", "GPU", "cpu")),
        ([*SMALL, "--json", "/no/such/folder/b.json"], ("/no/such/folder",)),
        ([*SMALL, "--plot", "b.pdf"], ("b.pdf", "PNG")),
    ],
)  # fmt: skip
def test_bad_input_gets_one_line(
    arguments: list[str], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    line = fails(capsys, *arguments)
    assert all(word in line for word in words), line


@pytest.mark.parametrize("bench", ["serve", "launches", "pool", "retarget", "pieces"])
def test_what_measures_graphs_says_that_it_needs_a_gpu(
    bench: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "needs a GPU" in fails(capsys, bench, "--shape", "tiny")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "needs a GPU" in fails(capsys, bench, "--shape", "tiny", "--device", "cpu")


def test_missing_extras_are_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "minillm[plot]" in fails(capsys, *SMALL, "--plot", "b.png")
    monkeypatch.setattr("minillm.bench.peers.find_spec", lambda name: None)
    assert "pip install transformers" in fails(capsys, *SMALL, "--peers", "eager")


@pytest.mark.parametrize("bench", [[], ["decode"], ["serve"], ["launches"], ["pool"], ["retarget"], ["pieces"]])
def test_help_names_every_option_and_its_default(bench: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*bench, "--help"]) == 0
    out = capsys.readouterr().out
    assert "python -m minillm.bench" in out
    assert "--layout" not in out
    if bench:
        assert all(option in out for option in ("--shape", "--model", "--json", "--plot", "--cache"))


def test_help_does_not_wait_for_torch() -> None:
    code = (
        "import sys; from minillm.bench.__main__ import build_parser, main;"
        "main(['decode', '--help']); main(['decode', '--shape', 'x']);"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


# ---------------------------------------------------------------------- what a step must read


def test_needed_bytes_equals_an_independent_count() -> None:
    """From transformers' own tensors: all but the embedding table, which is untied here, and the cache so far."""
    subject = tiny("bfloat16")
    model = Transformers(subject, SamplingParams(temperature=0)).model
    names = {name: p.numel() for name, p in model.named_parameters()}
    weights = sum(count for name, count in names.items() if "embed_tokens" not in name)
    key_values = 3 * 17 * 2 * 2 * (2 * 16)  # rows, tokens, layers, K and V, kv heads * head_dim
    assert "lm_head.weight" in names
    assert needed_bytes(subject, batch=3, positions=17) == 2 * (weights + key_values)


def test_modes_are_named_by_what_a_step_is_made_of() -> None:
    subject, options = tiny(), Namespace(batch=[2], steps=9)
    with engines(subject, 64, ["plain", "fused"], options, SamplingParams(temperature=0), []) as ours:
        assert [contestant.mode for contestant in ours] == ["eager", "fused eager"]
        assert [contestant.cache for contestant in ours] == [64, 64]
        assert ours[0]._engine.model is not ours[1]._engine.model  # each prefills with its own operations


def test_a_row_counts_the_tokens_that_its_steps_see() -> None:
    """Of 12 steps after a prompt of 5, the steps 4 to 11 count: they see 10 to 17 tokens."""
    subject = tiny()
    options = Namespace(batch=[1], steps=12, rounds=1)
    with engines(subject, 64, ["plain"], options, SamplingParams(temperature=0), []) as ours:
        seen: list[int] = []
        runner = ours[0]._engine.runner
        step = runner.step
        runner.step = lambda rows, kv_len, *rest: (seen.append(kv_len), step(rows, kv_len, *rest))[1]  # type: ignore[method-assign, assignment]
        (row,), _ = compare(subject, ours, 1, 5, options, ceiling=1e9)
    counted = seen[-12:][SETTLE:]
    assert counted == list(range(10, 18))
    assert row["bytes_per_step"] == round(needed_bytes(subject, 1, sum(counted) / len(counted)))


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_valid_and_have_the_size_that_they_are_known_for(name: str) -> None:
    known = {
        "tiny": 0.000107, "stories": 0.00495, "smollm2-135m": 0.1345, "smollm2-360m": 0.3618, "llama-3.2-1b": 1.2358,
        "llama-3.1-8b": 8.0303, "llama-2-7b": 6.7384,
    }  # fmt: skip
    assert ModelConfig.from_dict(SHAPES[name]).parameter_count / 1e9 == pytest.approx(known[name], rel=0.01)


# ---------------------------------------------------------------------- arithmetic


@pytest.mark.parametrize("count", [1, 2, 3, 100, 199])
@pytest.mark.parametrize("percent", [0, 1, 50, 99, 100])
def test_percentile_equals_numpy(count: int, percent: float) -> None:
    draw = random.Random(count)
    samples = [draw.gauss(3, 1) for _ in range(count)]
    assert percentile(samples, percent) == pytest.approx(numpy.percentile(samples, percent), rel=1e-12)


def test_a_run_leaves_out_the_first_steps() -> None:
    """Tokens at 1.0 s (the first), then four slow steps, then three of 10 ms."""
    stamps = [1.0, 2.0, 3.0, 4.0, 5.0, 5.01, 5.02, 5.03]
    run = Run.of(batch=2, started=0.5, stamps=stamps, host_us=[9, 9, 9, 9, 1, 2, 3])
    assert run.first_token_ms == pytest.approx(500)
    assert run.step_ms == pytest.approx([10, 10, 10])
    assert run.tokens_per_s == pytest.approx(2 / 0.01)
    assert run.host_us == [1, 2, 3]
    assert Run.of(2, 0.5, stamps, device_ms=[9, 9, 9, 9, 7, 7, 8]).step_ms == [7, 7, 8]


class Recorded:
    """A contestant that does nothing but say that it was its turn."""

    def __init__(self, mode: str, log: list[tuple[str, int]], step_ms: float = 1.0) -> None:
        self.mode, self.cache, self._log, self._step_ms = mode, 64, log, step_ms

    def run(self, prompts: list[list[int]], steps: int) -> Run:
        self._log.append((self.mode, steps))
        return Run(1.0, 1000 / self._step_ms, [self._step_ms] * steps, [])


def test_contestants_take_turns_after_a_warm_up() -> None:
    log: list[tuple[str, int]] = []
    entries = contest([Recorded("A", log), Recorded("B", log)], [[1]], steps=20, rounds=2)
    assert [mode for mode, _ in log] == ["A", "B", "A", "B", "A", "B"]
    assert [steps for _, steps in log] == [2 * SETTLE] * 2 + [20] * 4
    assert [len(entry.runs) for entry in entries] == [2, 2]


def test_a_peer_that_fails_does_not_end_the_contest() -> None:
    """Guards: a version of transformers that cannot do one thing, and takes all results with it."""
    model = Transformers(tiny(), SamplingParams(temperature=0))
    model.model.generate = lambda *_, **__: 1 / 0
    contestants = [Recorded("eager", []), model.contestant("eager", 64)]
    rows, failures = compare(tiny(), contestants, 1, 5, Namespace(steps=9, rounds=1), ceiling=1e9)
    assert [row["mode"] for row in rows] == ["eager"]
    assert failures == ["batch 1, prompt 5: transformers eager failed: ZeroDivisionError: division by zero"]


def test_ratios_compare_the_graph_with_everybody_else() -> None:
    contestants = [("eager", 8.0), ("graph", 2.0), ("transformers eager", 16.0), ("transformers static+compile", 3.0)]
    rows = [
        {"batch": 1, "prompt": 9} | make_row(Entry(c, 1.5, [c.run([], 5)]), needed=1e6, floor_ms=1.0)
        for c in (Recorded(mode, [], ms) for mode, ms in contestants)
    ]
    assert [row["share_of_ceiling"] for row in rows] == [1 / 8, 1 / 2, 1 / 16, 1 / 3]
    assert ratios(rows) == [
        "batch 1, prompt 9, cache 64: graph makes 4.00 times the tokens/s of eager",
        "batch 1, prompt 9, cache 64: graph makes 8.00 times the tokens/s of transformers eager",
        "batch 1, prompt 9, cache 64: graph makes 1.50 times the tokens/s of transformers static+compile",
        "batch 1, prompt 9, cache 64: the first call of transformers static+compile, which compiles, took 1.5 s",
    ]
    fused = [{"mode": "fused graph", "tokens_per_s": 2000.0, "batch": 1, "prompt": 9, "cache": 64}]
    assert ratios(rows[:2] + fused) == [
        "batch 1, prompt 9, cache 64: graph makes 4.00 times the tokens/s of eager",
        "batch 1, prompt 9, cache 64: fused graph makes 16.00 times the tokens/s of eager",
        "batch 1, prompt 9, cache 64: fused graph makes 4.00 times the tokens/s of graph",
    ]
    longer = rows[1] | {"cache": 128, "step_ms_p50": 2.06}
    assert cache_ratios([*rows, longer]) == [
        "graph, batch 1, prompt 9: a step with a cache of 128 takes 1.030 times that with 64"
    ]


def test_jitter_at_a_size_does_not_see_the_sizes() -> None:
    assert jitter_at_a_size([1, 2, 1, 2], [1.0, 5.0, 1.0, 5.0]) == 0
    latencies = {1: [0.9, 1.1], 2: [4.5, 5.5], 3: [7.0]}
    sizes = [size for size, group in latencies.items() for _ in group]
    relative = [latency / numpy.mean(group) for group in latencies.values() for latency in group]
    flat = [latency for group in latencies.values() for latency in group]
    assert jitter_at_a_size(sizes, flat) == pytest.approx(numpy.std(relative))


def test_requests_are_seeded_and_within_bounds() -> None:
    requests = draw_requests(2000, 32, 100, seed=1)
    assert requests == draw_requests(2000, 32, 100, seed=1) != draw_requests(2000, 32, 100, seed=2)
    assert {request.rows for request in requests} == set(range(1, 33))
    assert {request.position for request in requests} == set(range(100))


def test_a_table_lines_up_and_shows_what_is_missing() -> None:
    columns = [Column("mode", "mode"), Column("ms", "ms", lambda value: f"{value:.1f}")]
    assert table(columns, [{"mode": "a", "ms": 1234.56}, {"mode": "longer", "ms": None}]).splitlines() == [
        "mode        ms",
        "a       1234.6",
        "longer       -",
    ]


def test_a_json_file_stays_small(tmp_path: Path) -> None:
    """Guards: 48 rows of 600 steps each are a file that nobody wants in a repository."""
    draw = random.Random(0)
    rows = [{"mode": str(i), "bytes": 10**12 + 1, "ms": [draw.random() * 20 for _ in range(600)]} for i in range(48)]
    Report("decode", {}, 1e12, [], Bars((), "ms", "ms"), rows, samples="ms").write_json(tmp_path / "b.json")
    data = json.loads((tmp_path / "b.json").read_text())
    assert (tmp_path / "b.json").stat().st_size < 200_000
    assert sum(len(row["ms"]) for row in data["rows"]) <= MAX_SAMPLES
    assert data["rows"][3]["ms"][1] == pytest.approx(rows[3]["ms"][data["sample_stride"]], rel=1e-4)
    assert data["rows"][3]["bytes"] == 10**12 + 1
    assert len(rows[3]["ms"]) == 600  # the report itself is whole


# ---------------------------------------------------------------------- the runtime


def test_the_cache_starts_full_of_random_values() -> None:
    """Guards: measuring on zeros, which multiply with less power and so with a higher clock."""
    kv = Runtime(tiny(), rows=2, seq_len=32).cache.kv
    assert (kv != 0).float().mean() > 0.99
    assert kv.isfinite().all()


def test_graphs_of_a_bench_runner_are_replayed_in_either_order() -> None:
    runtime = Runtime(tiny(), rows=4, seq_len=300)
    forward = runtime.runner(FakeBackend())
    backward = runtime.runner(FakeBackend(), largest_first=False)
    assert forward.keys()[0][:2] == (4, 300)
    assert backward.keys() == forward.keys()[::-1]
    assert forward.report.graphs == backward.report.graphs == len(forward.keys())


class FakeEvent:
    """A CUDA event on a clock that goes on by one millisecond at each look."""

    now = 0

    def __init__(self, enable_timing: bool = False) -> None:
        self.at = -1

    def record(self) -> None:
        FakeEvent.now += 1
        self.at = FakeEvent.now

    def synchronize(self) -> None:
        assert self.at > 0

    def elapsed_time(self, end: "FakeEvent") -> int:
        assert end.at >= self.at > 0
        return end.at - self.at


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> list[FakeBackend]:
    """Enough of a GPU for serve and pool: graphs that step eagerly, and memory in use that grows by 1 MiB a look."""
    made: list[FakeBackend] = []

    class Backend(FakeBackend):
        def __init__(self, device: torch.device, share_pool: bool = True) -> None:
            super().__init__()
            self.share_pool = share_pool
            made.append(self)

    looks = itertools.count()
    for module in ("serve", "pool"):
        monkeypatch.setattr(f"minillm.bench.{module}.CudaBackend", Backend)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: next(looks) * 2**20)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**40 - next(looks) * 2**20, 2**40))
    return made


def test_serve_lets_every_mode_serve_every_request(fake_gpu: list[FakeBackend]) -> None:
    arguments = ["serve", "--shape", "tiny", "--device", "cpu", "--max-batch", "3", "--requests", "9"]
    arguments += ["--prompt", "20", "--cache", "32", "--steps", "3"]
    report = serve(build_parser().parse_args(arguments), arguments)
    assert [row["mode"] for row in report.rows] == ["eager", "graphs, a pool each", "graphs, one pool"]
    assert [backend.share_pool for backend in fake_gpu] == [False, True]
    for row in report.rows:
        assert len(row["latency_ms"]) == row["requests"] == 9
        assert row["latency_ms_p50"] <= row["latency_ms_p99"] <= max(row["latency_ms"])
        assert row["requests_per_s"] == pytest.approx(1000 / row["latency_ms_mean"])
        assert row["tokens_per_s"] >= 3 * row["requests_per_s"]
        assert row["reserved_bytes"] > 0
    assert [row["capture_s"] is None for row in report.rows] == [True, False, False]
    assert report.notes[1].startswith("graphs, one pool: ")
    assert "requests/s" in report.text()


def test_a_request_runs_its_rows_from_its_position(fake_gpu: list[FakeBackend]) -> None:
    runtime = Runtime(tiny(), rows=4, seq_len=64)
    runtime.state.limits.fill_(64)
    runner = runtime.runner(None)
    steps: list[tuple[int, int, list[bool], list[int]]] = []
    step = runner.step

    def noted(rows: int, kv_len: int, mode: Mode) -> None:
        steps.append((rows, kv_len, runtime.state.active.tolist(), runtime.state.positions.tolist()))
        step(rows, kv_len, mode)

    runner.step = noted  # type: ignore[method-assign, assignment]
    server = Server(runtime, runner, SamplingParams(temperature=0))
    assert server.serve(BatchRequest(rows=3, position=7), steps=2) > 0
    server.serve(BatchRequest(rows=1, position=5), steps=1)
    assert steps == [
        (3, 8, [True, True, True, False], [7, 7, 7, 7]),
        (3, 9, [True, True, True, False], [8, 8, 8, 7]),
        (1, 6, [True, False, False, False], [5, 5, 5, 5]),
    ]
    runtime.models["plain"].weights.norm.fill_(math.nan)
    with pytest.raises(MinillmError, match="NaN"):
        server.serve(BatchRequest(1, 5), 1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_is_measured_as_it_is_named(layout: str, fake_gpu: list[FakeBackend]) -> None:
    arguments = ["pool", "--shape", "tiny", "--device", "cpu", "--max-batch", "2", "--cache", "32", "--layout", layout]
    row = measure_layout(build_parser().parse_args(arguments))
    assert json.loads(json.dumps(row)) == row
    assert (row["layout"], row["max_rows"], row["cache"], row["graphs"]) == (layout, 2, 32, 6)
    assert row["pool_bytes"] == 6 * 1000  # what the fake backend says
    assert row["reserved_bytes"] > 0
    assert row["driver_bytes"] > 0
    assert fake_gpu[0].share_pool == (layout != "a pool each")
    assert fake_gpu[0].log.count("warm-up") == 6 + len(Mode)  # one of each mode before the first look at the memory


def test_pool_asks_a_process_of_its_own_for_each_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        pool_bytes = 10 * 2**20 if command[-1] == "a pool each" else 6 * 2**20
        row = dict(layout=command[-1], ops="plain", max_rows=32, cache=64, graphs=9, pool_bytes=pool_bytes)
        row |= dict(reserved_bytes=1, driver_bytes=2**20, capture_s=1.0, model="tiny")
        return subprocess.CompletedProcess(command, 0, "noise\n" + json.dumps(row) + "\n", "")

    monkeypatch.setattr("minillm.bench.pool.subprocess.run", run)
    monkeypatch.setattr("minillm.bench.pool.describe", lambda device, arguments: {"machine": "none"})
    arguments = ["pool", "--shape", "tiny", "--device", "cpu"]
    report = pool(build_parser().parse_args(arguments), arguments)
    assert [command[1:] for command in commands] == [
        ["-m", "minillm.bench", *arguments, "--layout", layout] for layout in LAYOUTS
    ]
    assert report.notes[0] == "largest first: 60.0% of the pool bytes of a pool each, 100.0% of the driver's"
    assert "pool MiB" in report.text()
    failed = subprocess.CompletedProcess([], 2, "", "warning: x\nerror: out of memory\n")
    monkeypatch.setattr("minillm.bench.pool.subprocess.run", lambda *_, **__: failed)
    with pytest.raises(MinillmError, match="'largest first' failed: out of memory"):
        pool(build_parser().parse_args(arguments), arguments)


def test_a_clock_stands_around_every_step_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    runtime = Runtime(tiny(), rows=1, seq_len=64)

    def step(*_: object) -> None:
        FakeEvent.now += 10

    runner = BenchRunner(step, runtime.state, runtime.cache, None)
    runner.clock = DeviceClock(steps=3)
    for _ in range(2):  # it can be read and used again
        for kv_len in (10, 11, 12):
            runner.step(1, kv_len, Mode.GREEDY)
            FakeEvent.now += 100
        assert runner.clock.read() == [11, 11, 11]
    assert runner.clock.read() == []
    assert runner.report.eager_steps == 6


def test_the_engine_notes_one_host_time_for_each_step() -> None:
    runtime = Runtime(tiny(), rows=2, seq_len=64)
    engine = TimedEngine(runtime, runtime.runner(None))
    Minillm("eager", engine, SamplingParams(temperature=0), None).run([[1, 2], [3, 4]], steps=9)
    assert len(engine.host_us) == 9
    assert all(us > 0 for us in engine.host_us)


def test_host_time_leaves_out_what_recording_the_events_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that goes on while events are recorded, by a millisecond each, and in a step, by ten."""
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(time, "perf_counter", lambda: FakeEvent.now / 1000)
    runtime = Runtime(tiny(), rows=1, seq_len=64)
    real = runtime.step("plain")

    def step(state: DecodeState, kv_len: int, mode: Mode) -> None:
        FakeEvent.now += 10
        real(state, kv_len, mode)

    runner = BenchRunner(step, runtime.state, runtime.cache, None)
    runner.clock = DeviceClock(steps=3)
    engine = TimedEngine(runtime, runner)
    engine.submit(Request([5, 6], SamplingParams(temperature=0), 6, [], 0))
    while engine.busy:
        engine.step()
    assert runner.clock.read() == [11, 11, 11]
    assert engine.host_us == pytest.approx([10_000] * 3)


def test_a_failed_request_ends_the_benchmark() -> None:
    """Guards: a benchmark that times NaN."""
    subject = tiny()
    subject.weights.norm.fill_(math.nan)
    runtime = Runtime(subject, rows=1, seq_len=64)
    contestant = Minillm("eager", TimedEngine(runtime, runtime.runner(None)), SamplingParams(temperature=0), None)
    with pytest.raises(MinillmError, match="NaN"):
        contestant.run([[1, 2]], steps=9)


def test_transformers_is_given_the_same_prompts_and_makes_as_many_tokens() -> None:
    subject = tiny()
    model, calls = Transformers(subject, SamplingParams(temperature=0)), []
    generate = model.model.generate
    model.model.generate = lambda ids, **options: (calls.append((ids.tolist(), options)), generate(ids, **options))[1]
    before = time.perf_counter()
    run = model.contestant("eager", 64).run([[1, 2, 3], [4, 5, 6]], steps=10)
    ids, options = calls[0]
    assert ids == [[1, 2, 3], [4, 5, 6]]
    assert options["max_new_tokens"] == options["min_new_tokens"] == 11
    assert len(run.step_ms) == 10 - SETTLE
    assert 0 < run.first_token_ms < (time.perf_counter() - before) * 1000


def test_a_static_cache_is_as_long_as_asked_for_and_the_run_as_short() -> None:
    model = Transformers(tiny(), SamplingParams(temperature=0))
    contestant = model.contestant("compile", 64)  # on a CPU the cache is static, and nothing is compiled
    assert (contestant.mode, contestant.cache) == ("transformers static+compile", 64)
    assert len(contestant.run([[1, 2, 3]], steps=10).step_ms) == 10 - SETTLE

"""`bench prefill`: what it computes, whom it lets take turns, its command line. Nothing depends on the speed here."""

import json
import math
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from minillm.bench import prefill as bench
from minillm.bench.__main__ import main
from minillm.bench.peers import Transformers
from minillm.bench.prefill import Contestant, Times, compare, in_chunks, make_row, needed_flops, timed
from minillm.bench.runtime import Runtime, Subject, make_subject
from minillm.errors import MinillmError
from minillm.sampling import SamplingParams

CPU = torch.device("cpu")
SMALL = ["prefill", "--shape", "tiny", "--device", "cpu", "--prompt", "5,70", "--rounds", "3"]
NUMBERS = ("wall_ms_p50", "wall_ms_p99", "tokens_per_s", "flops", "share_of_ceiling", "floor_ms")


def tiny(dtype: str = "float32") -> Subject:
    return make_subject(Namespace(shape="tiny", model=None, device="cpu", dtype=dtype), rows=1, seq_len=100)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict, Path]:
    """What one run prints, its JSON file, and its plot."""
    folder = tmp_path_factory.mktemp("bench")
    plot = ["--plot", str(folder / "b.png")] if find_spec("matplotlib") else []
    with pytest.MonkeyPatch.context() as patch:
        printed: list[str] = []
        patch.setattr("minillm.bench.__main__.write", printed.append)
        assert main([*SMALL, "--chunk", "32", "--json", str(folder / "b.json"), *plot]) == 0
    return "".join(printed), json.loads((folder / "b.json").read_text()), folder / "b.png"


def test_every_mode_and_prompt_is_measured(measured: tuple[str, dict, Path]) -> None:
    _, data, _ = measured
    seen = [(row["mode"], row["prompt"], row["chunk"]) for row in data["rows"]]
    assert seen == [
        ("plain", 5, 5), ("transformers eager", 5, 5), ("plain", 70, 32), ("transformers eager", 70, 70),
    ]  # fmt: skip


def test_the_numbers_are_finite_and_fit_each_other(measured: tuple[str, dict, Path]) -> None:
    _, data, _ = measured
    for row in data["rows"]:
        assert all(math.isfinite(row[name]) and row[name] > 0 for name in NUMBERS)
        assert len(row["wall_ms"]) == 3
        assert row["wall_ms_p50"] <= row["wall_ms_p99"]
        assert row["tokens_per_s"] == pytest.approx(1000 * row["prompt"] / row["wall_ms_p50"], rel=1e-3)
        assert row["floor_ms"] == pytest.approx(1000 * row["flops"] / data["ceiling_flops_per_s"], rel=1e-3)
        assert row["share_of_ceiling"] == pytest.approx(row["floor_ms"] / row["wall_ms_p50"], rel=1e-3)
        assert row["device_ms_p50"] is None  # a CPU has no clock of its own
        assert row["host_ms_p50"] is None


def test_the_circumstances_and_the_table_are_printed(measured: tuple[str, dict, Path]) -> None:
    text, data, _ = measured
    for name in ("machine", "versions", "date", "command", "model"):
        assert data[name] in text
    assert f"arithmetic ceiling  {data['ceiling_flops_per_s'] / 1e12:.4g} TFLOP/s" in text
    assert "read ceiling" not in text
    for title in ("mode", "prompt", "chunk", "wall ms", "p99 ms", "gpu ms", "host ms", "tok/s", "GFLOP", "ceiling"):
        assert title in text
    assert "prompt 70: plain reads" in text
    assert "times the tokens/s of transformers eager" in text


def test_a_png_is_drawn(measured: tuple[str, dict, Path]) -> None:
    pytest.importorskip("matplotlib")
    assert measured[2].read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_the_peers_can_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--no-peers"]) == 0
    assert "\ntransformers" not in capsys.readouterr().out  # as a row; the versions name it


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*SMALL, "--prompt", "0"], ("--prompt", "'0'")),
        ([*SMALL, "--prompt", "1025"], ("1025", "1024")),
        ([*SMALL, "--chunk", "0"], ("--chunk", "'0'")),
        ([*SMALL, "--peers", "compile"], ("--peers", "eager", "compile")),
        ([*SMALL, "--ops", "fused"], ("fused", "GPU", "cpu")),
        ([*SMALL, "--plot", "b.pdf"], ("b.pdf", "PNG")),
        (["prefill"], ("--shape", "--model")),
    ],
)
def test_bad_input_gets_one_line(
    arguments: list[str], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert all(word in err for word in words), err


@pytest.mark.parametrize("prompt", [1, 40])
def test_needed_flops_equal_what_pytorch_counts_in_transformers(prompt: int) -> None:
    """Its own counter, on its own attention, which computes the hidden half of the scores too: that is taken off."""
    subject = tiny()
    model = Transformers(subject, SamplingParams(temperature=0))
    model.model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        model.prefill(torch.arange(prompt))
    config = subject.config
    hidden = prompt * prompt - prompt * (prompt + 1) / 2  # pairs of tokens of which one is behind the other
    hidden_flops = 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * hidden
    # some versions of transformers make the angles of the rotation by a product, hence not to the last one
    assert needed_flops(subject, prompt) == pytest.approx(counter.get_total_flops() - hidden_flops, rel=5e-4)


def test_chunks_give_the_logits_of_the_whole() -> None:
    """And every token of the prompt goes through the model once."""
    runtime = Runtime(tiny(), 1, 100)
    model, lengths = runtime.models["plain"], []
    ids = torch.arange(100)
    whole = in_chunks(model, runtime.cache, 100, ids)
    prefill = model.prefill
    model.prefill = lambda ids, *rest: (lengths.append(len(ids)), prefill(ids, *rest))[1]  # type: ignore[method-assign, assignment]
    torch.testing.assert_close(in_chunks(model, runtime.cache, 48, ids), whole, atol=1e-4, rtol=0)
    assert lengths == [48, 48, 4]


def test_transformers_fills_a_cache_and_projects_the_last_token_only() -> None:
    model = Transformers(tiny(), SamplingParams(temperature=0))
    seen: list[tuple[dict, object]] = []
    model.model.register_forward_hook(lambda _, args, kwargs, out: seen.append((kwargs, out)), with_kwargs=True)
    logits = model.prefill(torch.arange(7))
    assert logits.shape == (1, 256)
    assert seen[0][1].logits.shape == (1, 1, 256)  # type: ignore[attr-defined]
    assert seen[0][1].past_key_values.get_seq_length() == 7  # type: ignore[attr-defined]


def counted(mode: str, log: list[str], result: Tensor | Exception) -> Contestant:
    def prefill(ids: Tensor) -> Tensor:
        log.append(mode)
        if isinstance(result, Exception):
            raise result
        return result

    return Contestant(mode, len(log), prefill)


def test_contestants_take_turns_after_a_warm_up() -> None:
    log: list[str] = []
    contestants = [counted("plain", log, torch.zeros(1)), counted("fused", log, torch.zeros(1))]
    rows, notes = compare(tiny(), contestants, 9, rounds=4, ceiling=1e9)
    assert log == ["plain", "fused"] * (bench.WARM_UP + 4)
    assert [len(row["wall_ms"]) for row in rows] == [4, 4]
    assert len(notes) == 1
    assert notes[0].startswith("prompt 9: fused reads ")
    assert notes[0].endswith("of plain")


def test_a_peer_that_fails_does_not_end_the_benchmark() -> None:
    log: list[str] = []
    contestants = [counted("plain", log, torch.zeros(1)), counted("transformers eager", log, RuntimeError("no\nmore"))]
    rows, notes = compare(tiny(), contestants, 9, rounds=2, ceiling=1e9)
    assert [row["mode"] for row in rows] == ["plain"]
    assert notes == ["prompt 9: transformers eager failed: RuntimeError: no"]
    assert log.count("transformers eager") == 1
    with pytest.raises(RuntimeError, match="no"):
        compare(tiny(), [counted("plain", log, RuntimeError("no"))], 9, rounds=2, ceiling=1e9)


def test_logits_that_are_not_finite_end_the_benchmark() -> None:
    """Guards: a benchmark that times NaN."""
    with pytest.raises(MinillmError, match="plain are NaN"):
        compare(tiny(), [counted("plain", [], torch.tensor([math.nan]))], 9, rounds=2, ceiling=1e9)


class FakeEvent:
    """A CUDA event on a clock that goes on by one millisecond at each look."""

    now = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        FakeEvent.now += 1
        self.at = FakeEvent.now

    def elapsed_time(self, end: "FakeEvent") -> int:
        return end.at - self.at


def test_a_gpu_is_waited_for_and_its_own_clock_read(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append("wait"))

    def work() -> Tensor:
        log.append("work")
        FakeEvent.now += 6
        return torch.zeros(1)

    times, _ = timed(work, torch.device("cuda"))
    assert log == ["wait", "work", "wait"]
    assert times.device == 0.007
    assert 0 < times.host <= times.wall
    assert timed(work, CPU)[0].device is None


def test_a_row_takes_medians_and_the_share_of_the_wall_clock() -> None:
    times = [Times(wall=ms / 1000, host=1e-3, device=(ms - 1) / 1000) for ms in (9, 4, 5)]
    row = make_row(Contestant("fused", 8, lambda ids: ids, times), 8, flops=2e9, ceiling=1e12)
    assert (row["wall_ms_p50"], row["device_ms_p50"], row["host_ms_p50"]) == pytest.approx((5, 4, 1))
    assert row["floor_ms"] == pytest.approx(2)
    assert row["share_of_ceiling"] == pytest.approx(0.4)
    assert row["tokens_per_s"] == pytest.approx(1600)

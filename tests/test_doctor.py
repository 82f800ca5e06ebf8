"""The doctor's command and checks where there is no GPU; with a backend that only pretends, those of graphs too."""

import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small import FakeBackend, FakeRecording
from tiny import make_tiny_model

from minillm import hub
from minillm import step as steps
from minillm.bench import runtime
from minillm.bench.runtime import BenchRunner, Subject, make_subject
from minillm.capture import Backend
from minillm.doctor import accuracy, checks, examination, timing
from minillm.doctor.__main__ import main
from minillm.doctor.checks import replays
from minillm.doctor.examination import Findings, examine
from minillm.doctor.patient import PARAMS, Patient
from minillm.errors import MemoryLimitError
from minillm.model import Llama
from minillm.sampling import Mode
from minillm.state import DecodeState

ROOT = Path(__file__).resolve().parents[1]
SHORT = ["--device", "cpu", "--context", "24"]
NEEDS_GPU = ["capture", "replay = eager", "no synchronisation", "memory comes back"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "ROUNDS", 1)
    monkeypatch.setattr(examination, "measure_read_bandwidth", lambda device: 1e10)


def subject(dtype: str = "float32") -> Subject:
    options = Namespace(shape="tiny", model=None, device="cpu", dtype=dtype)
    return make_subject(options, rows=4, seq_len=64)


def ask(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main([*SHORT, *arguments])
    return status, *capsys.readouterr()


def lines_of(out: str, word: str) -> list[str]:
    return [line for line in out.splitlines() if line.startswith(word)]


# ---------------------------------------------------------------------- the command


def test_a_sound_model_passes_and_what_needs_a_gpu_is_named(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = ask(capsys, "--model", str(tiny), "--rows", "3")
    assert (status, err) == (0, "")
    assert lines_of(out, "FAILED") == []
    assert [name for name in NEEDS_GPU if any(name in line for line in lines_of(out, "not checked"))] == NEEDS_GPU
    assert all("needs a CUDA device, and this is cpu" in line for line in lines_of(out, "not checked"))
    passed = lines_of(out, "ok")
    assert ["decode = float32" in passed[0], "prefill = float32" in passed[1], "addresses" in passed[2]] == [True] * 3
    assert "cache         3 x 24 tokens" in out
    assert "python -m minillm.doctor --device cpu --context 24" in out
    assert out.splitlines()[-1].startswith("verdict: a step takes")
    assert "graphs" not in out.splitlines()[-1]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_dtype_passes(dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = ask(capsys, "--shape", "tiny", "--dtype", dtype)
    assert status == 0
    errors = [float(line.split("relative error ")[1].split(",")[0]) for line in lines_of(out, "ok")[:2]]
    assert max(errors) < {"float32": 1e-5, "float16": 5e-3, "bfloat16": 5e-2}[dtype]


def test_without_a_name_it_is_the_small_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_tiny_model(tmp_path / "stories", max_position_embeddings=40)
    monkeypatch.setattr(hub, "bundled_model", lambda: model)
    assert main(["--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "model         stories, its own weights" in out
    assert "cache         1 x 40 tokens" in out  # its whole context


def test_files_hold_the_findings_and_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: tmp_path / f"{name}.json" for name in ("json", "trace")}
    options = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    assert ask(capsys, "--shape", "tiny", *options)[0] == 0
    data, trace = (json.loads(path.read_text()) for path in files.values())
    assert data["passed"] is True
    assert {check["name"] for check in data["checks"]} == {
        *NEEDS_GPU, "decode = float32", "prefill = float32", "addresses"
    }  # fmt: skip
    assert data["steps"][0]["step_ms"] > 0
    names = [event["name"] for event in trace["traceEvents"]]
    assert timing.label("eager") in names
    assert any(str(name).startswith("aten::") for name in names)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--shape", "huge"], "invalid choice: 'huge'"),
        (["--shape", "tiny", "--model", "x"], "not allowed with"),
        (["--shape", "tiny", "--rows", "0"], "--rows: must be a whole number of at least 1, not '0'"),
        (["--shape", "tiny", "--context", "15"], "--context must be from 16 to the model's context of 1024, not 15"),
        (["--shape", "tiny", "--context", "1025"], "--context must be from 16 to the model's context of 1024, not"),
        (["--shape", "tiny", "--dtype", "int8"], "unknown dtype 'int8'"),
        (["--shape", "tiny", "--device", "tpu"], "unknown device 'tpu'"),
        (["--model", "no/such/dir"], "no such directory"),
        (["--shape", "tiny", "--json", "/no/such/dir/x.json"], "/no/such/dir/x.json cannot be written: there is no"),
        (["--shape", "tiny", "--trace", "/no/such/dir/x.json"], "/no/such/dir/x.json cannot be written: there is no"),
        (["--shape", "tiny", "--trace", str(ROOT)], "cannot be written: it is a directory"),
    ],
)
def test_bad_options_are_one_line_and_no_work(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runtime, "randomise", lambda weights: pytest.fail("it began to work"))
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert words in err
    assert err.count("\n") == 1


def test_a_file_that_may_not_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The system is asked, because tests may run as root, who may write everywhere."""
    file, asked = tmp_path / "x.json", []
    file.touch()
    monkeypatch.setattr(os, "access", lambda path, mode: asked.append((Path(path), mode)))
    for path in (file, tmp_path / "new.json"):
        assert main(["--shape", "tiny", "--json", str(path)]) == 2
        assert "permission denied" in capsys.readouterr().err
    assert asked == [(file, os.W_OK), (tmp_path, os.W_OK)]


def test_out_of_memory_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(examination, "Patient", full)
    status, out, err = ask(capsys, "--shape", "tiny")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "lower --rows or --context" in err


def test_the_shell_gets_the_exit_status(tiny: Path) -> None:
    """In a process of its own, in which nothing is patched: once as it is, once with a decode step that errs."""
    command = ["--model", str(tiny), *SHORT]
    sound = [sys.executable, "-m", "minillm", "doctor", *command]
    done = subprocess.run(sound, capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "read ceiling" in done.stdout
    code = (
        "from minillm.model import Llama\n"
        "right = Llama.decode\n"
        "Llama.decode = lambda *arguments: right(*arguments).roll(1, -1)\n"
        "from minillm.command import leave\n"
        "from minillm.doctor.__main__ import main\n"
        f"leave(main({command!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    (failed,) = lines_of(done.stdout, "FAILED")
    assert "decode = float32" in failed


# ---------------------------------------------------------------------- faults are found


Decode = Callable[..., torch.Tensor]


def one_row_errs(right: Decode) -> Decode:
    def decode(model: Llama, state: DecodeState, *rest: Any) -> torch.Tensor:
        logits = right(model, state, *rest)
        logits[-1, 0] += 1.0  # one number of one row
        return logits

    return decode


def positions_stay(right: Decode) -> Decode:
    def decode(model: Llama, state: DecodeState, *rest: Any) -> torch.Tensor:
        state.positions.sub_(1)
        try:
            return right(model, state, *rest)
        finally:
            state.positions.add_(1)

    return decode


@pytest.mark.parametrize("fault", [one_row_errs, positions_stay])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decode_steps_that_err_fail(
    fault: Callable[[Decode], Decode], dtype: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with torch.inference_mode():
        monkeypatch.setattr(Llama, "decode", torch.inference_mode()(fault(Llama.decode)))
    status, out, _ = ask(capsys, "--shape", "tiny", "--rows", "2", "--dtype", dtype)
    assert status == 1
    (failed,) = lines_of(out, "FAILED")
    assert "decode = float32" in failed
    assert "1 of 7 checks failed." in out
    assert "what to do:" in out


def test_a_prefill_that_errs_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the product alone: plain operations and the reference read the text with models of their own."""
    patient = Patient(subject("bfloat16"), 2, 24)
    right = patient.model._prompt_ops

    class Errs:
        def __getattr__(self, name: str) -> Any:
            return getattr(right, name)

        def gate_up_silu(self, x: torch.Tensor, w: Any, eps: float) -> torch.Tensor:
            return right.gate_up_silu(x, w, eps) * 1.5

    patient.model._prompt_ops = Errs()  # type: ignore[assignment]
    found = {check.name: check.passed for check in accuracy.accuracy(patient)}
    assert found[accuracy.PREFILL] is False


def test_a_tensor_that_moves_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right, kept = steps.decode_step, []

    def step(model: Llama, cache: Any, *rest: Any) -> None:
        right(model, cache, *rest)
        kept.append(cache.kv)
        cache.kv = cache.kv.clone()

    monkeypatch.setattr(steps, "decode_step", step)
    status, out, _ = ask(capsys, "--shape", "tiny")
    assert status == 1
    (failed,) = lines_of(out, "FAILED")
    assert "addresses" in failed
    assert "cache.kv" in failed


def test_a_step_that_raises_fails_and_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def step(*_: object) -> None:
        raise RuntimeError("the kernel is broken\nand more")

    monkeypatch.setattr(steps, "decode_step", step)
    status, out, _ = ask(capsys, "--shape", "tiny")
    assert status == 1
    (failed,) = lines_of(out, "FAILED")
    assert "everything else" in failed
    assert failed.endswith("it stopped with RuntimeError: the kernel is broken")
    assert len(lines_of(out, "ok")) == 2  # what was found before it


def test_no_room_for_a_float32_copy_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(accuracy, "free_bytes", lambda device: 1000)
    status, out, _ = ask(capsys, "--shape", "tiny", "--dtype", "bfloat16")
    assert status == 0
    said = [line for line in lines_of(out, "not checked") if "float32 copy" in line]
    assert len(said) == 2
    assert all("0.0 are free" in line for line in said)


def test_an_unknown_ceiling_and_a_profiler_that_fails_are_notes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_memory(device: torch.device) -> float:
        raise MemoryLimitError("too little memory")

    def no_profiler(*_: object, **__: object) -> None:
        raise RuntimeError("CUPTI_ERROR_NOT_INITIALIZED\nmore")

    monkeypatch.setattr(examination, "measure_read_bandwidth", no_memory)
    monkeypatch.setattr(timing, "profile", no_profiler)
    status, out, _ = ask(capsys, "--shape", "tiny", "--trace", str(tmp_path / "t.json"))
    assert status == 0
    assert "note: the read ceiling is not known: too little memory" in out
    assert "note: no trace: CUPTI_ERROR_NOT_INITIALIZED" in out
    assert "ceiling  " not in out
    assert not (tmp_path / "t.json").exists()


@pytest.mark.parametrize("asked", [None, "0"])
def test_the_environment_is_left_as_it_was(
    asked: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)
    if asked is not None:
        monkeypatch.setenv("KINETO_LOG_LEVEL", asked)
    assert ask(capsys, "--shape", "tiny", "--trace", str(tmp_path / "t.json"))[0] == 0
    assert os.environ.get("KINETO_LOG_LEVEL") == asked


# ---------------------------------------------------------------------- graphs, with a backend that pretends


@pytest.mark.parametrize("mode", list(Mode))
def test_what_rows_ask_for_needs_its_mode(mode: Mode) -> None:
    assert Mode.of(PARAMS[mode]) == mode


def test_rows_stand_where_they_are_put_and_nothing_ends_them() -> None:
    patient = Patient(subject(), 4, 64)
    patient.place(3, 1, Mode.GREEDY)
    assert patient.state.active.tolist() == [True, True, True, False]
    assert patient.state.positions[:3].tolist() == [1, 0, 0]
    patient.place(2, 0, Mode.GREEDY)
    for kv_len in range(1, 65):
        patient.step(2, kv_len, Mode.GREEDY)
    assert patient.state.active.tolist() == [True, True, False, False]
    assert patient.state.positions[0] == 64


def test_true_replays_pass_in_every_bucket() -> None:
    patient = Patient(subject("bfloat16"), 4, 64)
    runner = patient.runtime.runner(FakeBackend())
    check = replays(patient, runner)
    assert check.passed is True
    assert "all 9 recordings (rows: 1 to 4)" in check.seen
    assert (runner.report.replays, runner.report.eager_steps) == (9, 0)


class Other(BenchRunner):
    """A runner that replays another recording than the one for these rows."""

    def find(self, rows: int, kv_len: int, mode: Mode) -> Any:
        found = super().find(rows, kv_len, mode)
        return (1, *found[1:]) if found and found[0] == 4 else found


class Missing(BenchRunner):
    def find(self, rows: int, kv_len: int, mode: Mode) -> Any:
        return None if mode == Mode.FILTERED else super().find(rows, kv_len, mode)


@pytest.mark.parametrize(
    ("kind", "words"),
    [(Other, "3 of 9 recordings differ; of 4 rows, 64 KV positions"), (Missing, "there is no recording")],
)
def test_a_replay_of_another_step_is_found(kind: type[BenchRunner], words: str) -> None:
    patient = Patient(subject("bfloat16"), 4, 64)
    runner = kind(patient.runtime.step("plain"), patient.state, patient.cache, FakeBackend())
    runner.capture()
    check = replays(patient, runner)
    assert check.passed is False
    assert words in check.seen


class OneBit(FakeBackend):
    """Replays change one number of the cache, which no step may write."""

    patient: Patient

    def capture(self, step: Callable[[], None]) -> FakeRecording:
        def replay() -> None:
            step()
            self.patient.cache.kv[0, 0, 0, 0, 3, 0] += 1.0

        return FakeRecording(replay)


def test_a_stray_write_is_found() -> None:
    patient = Patient(subject("bfloat16"), 2, 64)
    backend = OneBit()
    backend.patient = patient
    check = replays(patient, patient.runtime.runner(backend))
    assert check.passed is False
    assert check.seen.endswith(": cache")


def pretend(monkeypatch: pytest.MonkeyPatch, backend: Backend) -> tuple[Findings, list[object]]:
    """The examination of a GPU, all of it, with a backend that runs on the CPU; and the sync modes that it set."""
    modes: list[object] = ["default"]
    used = iter([checks.Bytes(2**30, 2**30), checks.Bytes(2**30, 2**30 + 2**25), checks.Bytes(2**30, 2**30)])
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    for module in (checks, examination):
        monkeypatch.setattr(module, "in_use", lambda device: next(used))
    patient, findings = Patient(subject("bfloat16"), 2, 64), Findings(ceiling=1e10)
    examination._with_graphs(patient, backend, findings, traced=True)
    return findings, modes


def test_the_whole_examination_of_a_gpu_holds_together(monkeypatch: pytest.MonkeyPatch) -> None:
    findings, modes = pretend(monkeypatch, FakeBackend())
    assert [(check.name, check.passed) for check in findings.checks] == [
        ("capture", True),
        ("replay = eager", True),
        ("no synchronisation", True),
        ("decode = float32", True),
        ("prefill = float32", True),
        ("addresses", True),
        ("memory comes back", True),
    ]
    assert modes == ["default", *(["error", "default"] * 3)]
    assert list(findings.memory) == ["before capture", "after capture", "after close"]
    assert [timing.mode for timing in findings.timings] == ["eager", "graph"]
    assert findings.verdict.startswith(("graphs gain", "this model"))
    assert findings.trace is not None
    names = {event["name"] for event in findings.trace["traceEvents"]}
    assert names >= {timing.label("eager"), timing.label("graph")}


class Waits(FakeBackend):
    """Replays that wait for the device, as PyTorch would refuse it."""

    def capture(self, step: Callable[[], None]) -> FakeRecording:
        def replay() -> None:
            if torch.cuda.get_sync_debug_mode() == "error":
                raise RuntimeError("called a synchronizing CUDA operation")
            step()

        return FakeRecording(replay)


def test_a_step_that_waits_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    findings, modes = pretend(monkeypatch, Waits())
    (failed,) = [check for check in findings.checks if check.passed is False]
    assert failed.name == "no synchronisation"
    assert "mode GREEDY: called a synchronizing CUDA operation" in failed.seen
    assert modes[-1] == "default"


def test_a_failed_capture_is_a_finding_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    findings, _ = pretend(monkeypatch, FakeBackend(fail_at=1))
    by_name = {check.name: check for check in findings.checks}
    assert by_name["capture"].passed is False
    assert "5 MiB free" in by_name["capture"].seen
    assert [by_name[name].passed for name in NEEDS_GPU[1:]] == [None] * 3
    assert by_name["decode = float32"].passed is True
    assert findings.verdict.startswith("a step takes")


def test_examine_needs_no_more_than_a_subject() -> None:
    findings = examine(subject(), 2, 32)
    assert not findings.failed
    assert findings.trace is None

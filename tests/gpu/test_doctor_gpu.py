"""The doctor on a real GPU: a sound model passes every check, and faults of real recordings are found."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from minillm.bench.runtime import BenchRunner, make_subject
from minillm.capture import CudaBackend
from minillm.doctor import timing
from minillm.doctor.__main__ import main
from minillm.doctor.busy import gpu_work
from minillm.doctor.checks import at_rest, in_use, memory, no_sync, replays
from minillm.doctor.patient import Patient
from minillm.sampling import Mode

CUDA = torch.device("cuda", 0)
CHECKS = [
    "capture",
    "replay = eager",
    "no synchronisation",
    "decode = float32",
    "prefill = float32",
    "addresses",
    "memory comes back",
]


def tiny_patient(rows: int = 4) -> Patient:
    """Plain operations: its heads are too small for the fused kernels."""
    options = Namespace(shape="tiny", model=None, device="cuda", dtype="bfloat16")
    return Patient(make_subject(options, rows, 64), rows, 64)


@pytest.mark.parametrize(
    ("shape", "dtype", "rows"),
    [
        ("tiny", "float32", 3),
        ("smollm2-135m", "bfloat16", 1),
        ("smollm2-135m", "bfloat16", 9),
        ("smollm2-135m", "float16", 4),
        ("smollm2-135m", "float32", 2),
    ],
)
def test_a_sound_model_passes_every_check(
    shape: str, dtype: str, rows: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {name: tmp_path / f"{name}.json" for name in ("json", "trace")}
    options = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    what = ["--shape", shape, "--dtype", dtype, "--rows", str(rows), "--context", "300"]
    status = main([*what, "--device", "cuda", *options])
    out = capsys.readouterr().out
    assert status == 0, out
    data, trace = (json.loads(path.read_text()) for path in files.values())
    assert [(check["name"], check["passed"]) for check in data["checks"]] == [(name, True) for name in CHECKS], out
    assert list(data["memory"]) == ["before capture", "after capture", "after close"]
    assert [row["mode"] for row in data["steps"]] == ["eager", "graph"]
    assert out.splitlines()[-1].startswith("verdict: ")
    if any("saw no kernels" in note for note in data["notes"]):
        pytest.skip(f"the profiler gives no kernels here: {data['notes']}")
    layers = 30 if shape == "smollm2-135m" else 2
    for row in data["steps"]:
        assert row["launches"] >= 5 * layers
        assert row["busy_ms"] > 0
        assert 0 <= row["idle"] < 1
        assert len(data["kernels"][row["mode"]]) == 5
    names = {event["name"] for event in trace["traceEvents"]}
    assert names >= {timing.label("eager"), timing.label("graph")}
    assert len(gpu_work(trace["traceEvents"])) >= 2 * timing.TRACED * 5 * layers


class Other(BenchRunner):
    """Replays the recording of one row for four."""

    def find(self, rows: int, kv_len: int, mode: Mode) -> Any:
        found = super().find(rows, kv_len, mode)
        return (1, *found[1:]) if found and found[0] == 4 else found


@pytest.mark.parametrize(("kind", "passed"), [(BenchRunner, True), (Other, False)])
def test_a_replay_of_another_recording_is_found(kind: type[BenchRunner], passed: bool) -> None:
    patient, backend = tiny_patient(), CudaBackend(CUDA)
    runner = kind(patient.runtime.step(patient.ops), patient.state, patient.cache, backend)
    with backend.on_stream():
        runner.capture()
        check = replays(patient, runner)
    runner.close()
    assert check.passed is passed, check
    assert passed or "of 4 rows, 64 KV positions" in check.seen


def test_a_step_that_waits_for_the_device_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    patient, backend = tiny_patient(), CudaBackend(CUDA)
    runner, right = patient.runtime.runner(backend, patient.ops), patient.step

    def waits(rows: int, kv_len: int, mode: Mode) -> None:
        right(rows, kv_len, mode)
        if mode == Mode.SAMPLED:
            patient.state.tokens[0].item()

    with backend.on_stream():
        assert no_sync(patient, runner).passed is True
        monkeypatch.setattr(patient, "step", waits)
        check = no_sync(patient, runner)
    runner.close()
    assert check.passed is False
    assert "mode SAMPLED" in check.seen
    assert torch.cuda.get_sync_debug_mode() == 0


def test_a_recording_that_somebody_keeps_is_found() -> None:
    patient, backend = tiny_patient(), CudaBackend(CUDA)
    with backend.on_stream():
        before = at_rest(patient, backend)
        runner = patient.runtime.runner(backend, patient.ops)
        captured, kept = in_use(CUDA), list(runner._recordings.values())
        runner.close()
        held = memory(before, captured, at_rest(patient, backend))
        kept.clear()
        freed = memory(before, captured, at_rest(patient, backend))
    assert held.passed is False, held
    assert freed.passed is True, freed

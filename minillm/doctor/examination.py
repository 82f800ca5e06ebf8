"""The examination: everything that can be checked and measured on this device, in order.

On a GPU all of it runs on the stream that the steps are recorded on, so that nothing overtakes anything. Addresses are
compared last, after all the steps of the other checks; memory when the recordings are gone.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from ..bandwidth import measure_read_bandwidth
from ..bench.runtime import BenchRunner, Subject, needed_bytes, release
from ..capture import Backend, CudaBackend
from ..errors import GraphError, MemoryLimitError, MinillmError
from .accuracy import DECODE, PREFILL, accuracy
from .checks import Bytes, Check, addresses, at_rest, attempt, in_use, memory, mib, no_sync, replays, stopped
from .patient import Patient
from .timing import STEPS, Timing, timings
from .verdict import verdict, without_graphs

GRAPH_CHECKS = ("replay = eager", "no synchronisation", "memory comes back")


@dataclass
class Findings:
    """What the examination found.

    Attributes:
        memory: of PyTorch on the GPU, by when.
        ceiling: bytes per second that the device reads, None if that could not be measured.
        needed: bytes that a step of the timed ones cannot avoid reading.
        trace: a Chrome trace, None if the profiler gave none. notes: what is not known, and why.
    """

    checks: list[Check] = field(default_factory=list)
    memory: dict[str, Bytes] = field(default_factory=dict)
    timings: list[Timing] = field(default_factory=list)
    ceiling: float | None = None
    needed: float = 0.0
    trace: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)
    verdict: str = ""

    @property
    def failed(self) -> bool:
        return any(check.passed is False for check in self.checks)

    def share(self, timing: Timing) -> float | None:
        """Of the read ceiling that a step reaches."""
        return None if self.ceiling is None else self.needed / self.ceiling * 1000 / timing.step_ms


def examine(subject: Subject, rows: int, length: int, traced: bool = False) -> Findings:
    """Examine a model with a cache of `rows` x `length` tokens. What breaks on the way is a check that failed.

    traced: whether a trace is wanted on a CPU too. Raises: MinillmError, torch.OutOfMemoryError.
    """
    findings = Findings()
    try:
        _examine(Patient(subject, rows, length), findings, traced)
    except (torch.OutOfMemoryError, MinillmError):
        raise
    except Exception as error:  # a kernel that does not compile, a device that has failed
        findings.checks.append(stopped("everything else", error))
    return findings


def _examine(patient: Patient, findings: Findings, traced: bool) -> None:
    subject, length = patient.subject, patient.length
    try:
        findings.ceiling = measure_read_bandwidth(subject.device)
    except MemoryLimitError as error:
        findings.notes.append(f"the read ceiling is not known: {error}")
    release(subject.device)
    findings.needed = needed_bytes(subject, patient.rows, length - min(STEPS, length // 2) / 2)
    if subject.device.type == "cuda":
        backend = CudaBackend(subject.device)
        with backend.on_stream():
            _with_graphs(patient, backend, findings, traced)
    else:
        _without_graphs(patient, findings, traced)


def _with_graphs(patient: Patient, backend: Backend, findings: Findings, traced: bool) -> None:
    before, where = at_rest(patient, backend), patient.addresses()
    runners = {"eager": patient.runtime.runner(None, patient.ops)}
    graph, made = _capture(patient, backend)
    findings.checks.append(made)
    captured = in_use(patient.device)
    if graph is None:
        findings.checks += [Check(name, None, "there are no recordings") for name in GRAPH_CHECKS]
    else:
        runners["graph"] = graph
        findings.checks += attempt(GRAPH_CHECKS[:1], lambda: [replays(patient, graph)])
        findings.checks += attempt(GRAPH_CHECKS[1:2], lambda: [no_sync(patient, graph)])
    _everywhere(patient, runners, where, findings, traced)
    if graph is not None:
        graph.close()
        closed = at_rest(patient, backend)
        findings.memory = {"before capture": before, "after capture": captured, "after close": closed}
        findings.checks.append(memory(before, captured, closed))


def _capture(patient: Patient, backend: Backend) -> tuple[BenchRunner | None, Check]:
    try:
        runner = patient.runtime.runner(backend, patient.ops)
    except GraphError as error:
        return None, Check("capture", False, str(error), "without recordings LLM runs eagerly, after a warning")
    made = runner.report
    seen = f"{made.graphs} graphs in {made.capture_seconds:.2f} s, {mib(made.pool_bytes)} of pool"
    return runner, Check("capture", True, seen)


def _without_graphs(patient: Patient, findings: Findings, traced: bool) -> None:
    why = f"needs a CUDA device, and this is {patient.device}"
    findings.checks += [Check(name, None, why) for name in ("capture", *GRAPH_CHECKS)]
    _everywhere(patient, {"eager": patient.runtime.runner(None, patient.ops)}, patient.addresses(), findings, traced)


def _everywhere(
    patient: Patient, runners: dict[str, BenchRunner], where: dict[str, int], findings: Findings, traced: bool
) -> None:
    """What a CPU can be asked too: logits, times, and addresses after all these steps."""
    findings.checks += attempt([DECODE, PREFILL], lambda: accuracy(patient))
    release(patient.device)
    findings.timings, findings.trace, notes = timings(patient, runners, traced)
    findings.notes += notes
    findings.checks.append(addresses(where, patient.addresses()))
    by_mode = {timing.mode: timing for timing in findings.timings}
    last = findings.timings[-1]
    if "graph" in by_mode:
        eager = by_mode["eager"].step_ms
        findings.verdict = verdict(eager, by_mode["graph"].step_ms, findings.share(last))
    else:
        findings.verdict = without_graphs(last.step_ms, findings.share(last))

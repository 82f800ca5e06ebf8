"""The report: what the examination found, for a person and for a program."""

from collections.abc import Mapping
from typing import Any

from ..bench.report import Column, fixed, table
from .busy import short
from .checks import Check, mib
from .examination import Findings
from .timing import Timing

DEAREST = 5
WORDS = {True: "ok", False: "FAILED", None: "not checked"}


def report(about: Mapping[str, str], findings: Findings) -> str:
    """Everything, in the order in which a person asks: what was examined, is it right, what does it cost, so what."""
    parts = [_about(about, findings), *map(_check, findings.checks), ""]
    if findings.memory:
        rows = [{"when": when, **used._asdict()} for when, used in findings.memory.items()]
        columns = [Column("memory", "when"), Column("allocated", "allocated", mib), Column("reserved", "reserved", mib)]
        parts += [table(columns, rows), ""]
    if findings.timings:
        parts += [_timings(findings), ""]
    dearest = findings.timings[-1] if findings.timings else None
    if dearest is not None and dearest.kernels:
        parts += [_kernels(dearest), ""]
    parts += [*(f"note: {note}" for note in findings.notes), *([""] if findings.notes else [])]
    failed = sum(check.passed is False for check in findings.checks)
    if failed:
        parts.append(f"{failed} of {len(findings.checks)} checks failed.")
    if findings.verdict:
        parts.append(f"verdict: {findings.verdict}")
    return "\n".join(parts).rstrip() + "\n"


def _about(about: Mapping[str, str], findings: Findings) -> str:
    known = dict(about)
    if findings.ceiling is not None:
        known["read ceiling"] = f"{findings.ceiling / 1e9:.4g} GB/s, measured in this run"
    width = max(map(len, known))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in known.items()) + "\n"


def _check(check: Check) -> str:
    line = f"{WORDS[check.passed]:<11}  {check.name:<18}  {check.seen}"
    return f"{line}\n{'':<13}what to do: {check.remedy}" if check.passed is False and check.remedy else line


def _timings(findings: Findings) -> str:
    rows = [timing_row(findings, timing) for timing in findings.timings]
    columns = [
        Column("a step", "mode"),
        Column("ms", "step_ms", fixed(3)),
        Column("ceiling", "share_of_ceiling", percent),
        Column("kernels", "launches", fixed(0)),
        Column("kernel ms", "busy_ms", fixed(3)),
        Column("gaps ms", "gaps_ms", fixed(3)),
        Column("GPU idle", "idle", percent),
    ]
    known = [column for column in columns if any(row[column.key] is not None for row in rows)]
    return table(known, rows)


def timing_row(findings: Findings, timing: Timing) -> dict[str, Any]:
    return {
        "mode": timing.mode,
        "step_ms": timing.step_ms,
        "share_of_ceiling": findings.share(timing),
        "launches": timing.launches,
        "busy_ms": timing.busy_ms,
        "gaps_ms": timing.gaps_ms,
        "idle": timing.idle,
    }


def _kernels(timing: Timing) -> str:
    total = sum(kernel.ms for kernel in timing.kernels)
    rows = [
        {"name": short(kernel.name), "runs": kernel.runs, "ms": kernel.ms, "share": kernel.ms / total if total else 0.0}
        for kernel in timing.kernels[:DEAREST]
    ]
    columns = [
        Column(f"dearest kernels of a step, {timing.mode}", "name"),
        Column("runs", "runs", fixed(0)),
        Column("ms", "ms", fixed(3)),
        Column("share", "share", percent),
    ]
    return table(columns, rows)


def percent(share: float) -> str:
    return f"{share:.1%}"


def as_json(about: Mapping[str, str], findings: Findings) -> dict[str, Any]:
    """The same for a program: times in milliseconds, memory in bytes; None is what is not known."""
    return {
        **about,
        "steps": [timing_row(findings, timing) for timing in findings.timings],
        "checks": [vars(check) for check in findings.checks],
        "memory": {when: used._asdict() for when, used in findings.memory.items()},
        "kernels": {t.mode: [kernel._asdict() for kernel in t.kernels[:DEAREST]] for t in findings.timings},
        "ceiling_bytes_per_s": findings.ceiling,
        "bytes_per_step": round(findings.needed),
        "notes": findings.notes,
        "verdict": findings.verdict,
        "passed": not findings.failed,
    }

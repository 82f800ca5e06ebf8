"""The doctor's arithmetic and words, on made-up numbers: what the GPU did, the verdict, the report."""

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minillm.doctor.accuracy import DECODE, judge, relative_error
from minillm.doctor.busy import Interval, Kernel, busy_us, costs, gpu_work, idle_share, kernels, short, within
from minillm.doctor.checks import Bytes, Check, addresses, attempt, memory
from minillm.doctor.examination import Findings
from minillm.doctor.text import as_json, report
from minillm.doctor.timing import Timing, label
from minillm.doctor.verdict import verdict, without_graphs

# ---------------------------------------------------------------------- what the GPU did


def event(name: str, ts: float, dur: float, cat: str = "kernel", ph: str = "X") -> dict[str, Any]:
    return {"ph": ph, "cat": cat, "name": name, "ts": ts, "dur": dur}


def test_work_of_a_trace_is_its_kernels_and_copies_by_start() -> None:
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "ts": 0.0},
        event("late", 30.0, 5.0),
        event("aten::mm", 0.0, 90.0, "cpu_op"),
        event("cudaLaunchKernel", 1.0, 4.0, "cuda_runtime"),
        event("early", 10.5, 2.25),
        event("Memcpy DtoH", 20.0, 1.0, "gpu_memcpy"),
        event("range", 0.0, 90.0, "gpu_user_annotation"),
        event("flow", 1.0, 1.0, ph="s"),
    ]
    expected = [Interval("early", 10.5, 12.75), Interval("Memcpy DtoH", 20.0, 21.0), Interval("late", 30.0, 35.0)]
    assert gpu_work(events) == expected
    assert gpu_work([]) == []


def test_work_belongs_to_the_range_that_it_began_in() -> None:
    """The ranges lie 4 ms apart, so a millisecond between the clocks of host and GPU moves nothing to another one."""
    eager, graph = label("eager"), label("graph")
    events = [event(eager, 10_000, 5_000, "user_annotation"), event(graph, 19_000, 3_000, "user_annotation")]
    work = [Interval(str(at), at, at + 10.0) for at in (7_900.0, 9_500.0, 12_000.0, 15_900.0, 18_100.0, 22_500.0)]
    assert [one.start for one in within(work, events, eager)] == [9_500, 12_000, 15_900]
    assert [one.start for one in within(work, events, graph)] == [18_100, 22_500]
    assert within(work, events, "another") == []


def test_kernels_that_overlap_are_counted_once() -> None:
    """With programmatic dependent launch a kernel starts early and waits: it costs what it runs on alone."""
    work = [Interval("a", 0, 10), Interval("b", 4, 16), Interval("a", 5, 12), Interval("c", 20, 21)]
    assert costs(work) == [10, 6, 0, 1]
    assert busy_us(work) == 17
    assert kernels(work, steps=2) == [Kernel("a", 1.0, 0.005), Kernel("b", 0.5, 0.003), Kernel("c", 0.5, 0.0005)]


SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=12)


@given(SPANS)
def test_busy_time_is_the_union(spans: list[tuple[int, int]]) -> None:
    work = sorted((Interval("k", start, start + length) for start, length in spans), key=lambda one: one[1:])
    covered = {tick for _, start, end in work for tick in range(int(start), int(end))}
    assert busy_us(work) == len(covered)
    assert sum(kernel.ms for kernel in kernels(work, 1)) == pytest.approx(len(covered) / 1000)


def test_idle_share() -> None:
    assert idle_share(2.0, 8.0) == 0.75
    assert idle_share(8.1, 8.0) == 0.0  # a traced kernel takes a little longer
    timing = Timing("eager", 8.0, busy_ms=2.0)
    assert (timing.gaps_ms, timing.idle) == (6.0, 0.75)
    assert (Timing("eager", 8.0).gaps_ms, Timing("eager", 8.0).idle) == (None, None)


def test_names_of_kernels_become_short() -> None:
    assert short("gate_up_kernel") == "gate_up_kernel"
    assert short("void at::native::reduce<1>(int)") == "at::native::reduce<1>(int)"
    assert short(f"void cutlass::gemm<{'x' * 90}>(P)") == "cutlass::gemm<...>"
    assert short("y" * 90) == "y" * 57 + "..."


# ---------------------------------------------------------------------- the verdict


@pytest.mark.parametrize(
    ("eager", "graph", "share", "words"),
    [
        (4.6, 1.0, 0.3, ["graphs gain 4.6x here; a replay reaches 30 % of the read ceiling: its operations"]),
        (4.6, 1.0, 0.6, ["graphs gain 4.6x here; a replay reaches 60 %", "fewer bytes"]),
        (1.5, 1.0, 0.2, ["graphs gain 1.5x here"]),
        (1.49, 1.0, 0.2, ["graphs gain 49 % here"]),
        (1.1, 1.0, 0.9, ["graphs gain 10 % here; a replay reaches 90 %", "fewer bytes"]),
        (1.06, 1.0, 0.6, ["this model is bandwidth-bound: graphs gain 6 % here; fewer bytes"]),
        (1.06, 1.0, 0.59, ["graphs gain 6 % here; a replay reaches 59 % of the read ceiling: its operations"]),
        (1.02, 1.0, 0.1, ["graphs gain 2 % here"]),
        (1.01, 1.0, 0.1, ["graphs gain nothing here"]),
        (0.9, 1.0, 0.8, ["this model is bandwidth-bound: graphs gain nothing here; fewer bytes"]),
        (4.6, 1.0, None, ["graphs gain 4.6x here."]),
    ],
)
def test_the_verdict(eager: float, graph: float, share: float | None, words: list[str]) -> None:
    said = verdict(eager, graph, share)
    assert all(word in said for word in words), said
    assert said.startswith(words[0])
    assert ("fewer bytes" in said) == (share is not None and share >= 0.6)


def test_without_graphs_nothing_is_said_of_a_gain() -> None:
    assert without_graphs(12.34, None) == "a step takes 12.3 ms."
    assert without_graphs(12.34, 0.59).startswith("a step takes 12.3 ms; it reaches 59 % of the read ceiling: its op")
    assert "fewer bytes" in without_graphs(12.34, 0.61)
    assert "gain" not in without_graphs(12.34, 0.61)


# ---------------------------------------------------------------------- judgements


@pytest.mark.parametrize(
    ("dtype", "plain", "ours", "passed"),
    [
        (torch.bfloat16, 0.01, 0.0159, True),
        (torch.bfloat16, 0.01, 0.0161, False),  # worse than plain operations
        (torch.bfloat16, 0.3, 0.21, False),  # plain operations are as wrong
        (torch.bfloat16, float("nan"), 0.01, True),  # plain operations overflow, the kernels do not
        (torch.bfloat16, 0.01, float("nan"), False),
        (torch.float16, 0.001, 0.0024, True),
        (torch.float16, 0.001, 0.0026, False),
        (torch.float32, 0.0, 9e-5, True),
        (torch.float32, 0.0, 2e-4, False),
        (torch.float32, 1.0, 2e-3, False),
    ],
)
def test_an_error_is_judged_beside_that_of_plain_operations(
    dtype: torch.dtype, plain: float, ours: float, passed: bool
) -> None:
    check = judge(DECODE, dtype, plain, ours)
    assert check.passed is passed
    assert f"{ours:.2g}" in check.seen


def test_the_error_is_that_of_the_worst_row() -> None:
    exact = torch.ones(3, 2, 8)
    logits = exact.clone()
    assert relative_error(exact, logits) == 0
    logits[1, 0, 0] += 2.0
    assert relative_error(exact, logits) == pytest.approx(2 / 4)
    logits[0] = float("nan")
    assert not relative_error(exact, logits) <= 1e9


def test_an_address_that_moved_is_named() -> None:
    before = {"cache.kv": 4096, "state.tokens": 512}
    assert addresses(before, dict(before)).passed is True
    check = addresses(before, before | {"state.tokens": 640})
    assert check.passed is False
    assert "1 of 2 tensors have moved: state.tokens" in check.seen
    assert addresses(before, {"cache.kv": 4096}).passed is False


MIB = 2**20


@pytest.mark.parametrize(
    ("closed", "passed"),
    [
        (Bytes(100 * MIB, 120 * MIB), True),
        (Bytes(99 * MIB, 100 * MIB), True),
        (Bytes(101 * MIB, 122 * MIB), True),
        (Bytes(101 * MIB + 512, 120 * MIB), False),
        (Bytes(100 * MIB, 124 * MIB), False),
    ],
)
def test_memory_must_come_back(closed: Bytes, passed: bool) -> None:
    check = memory(Bytes(100 * MIB, 120 * MIB), Bytes(100 * MIB, 152 * MIB), closed)
    assert check.passed is passed
    assert "recordings took 32.0 MiB" in check.seen


def test_a_check_that_stops_is_a_finding() -> None:
    def stops(error: Exception) -> list[Check]:
        raise error

    (failed,) = attempt(["replay = eager"], lambda: stops(RuntimeError("CUDA error: 700\nmore")))
    assert (failed.name, failed.passed) == ("replay = eager", False)
    assert failed.seen == "it stopped with RuntimeError: CUDA error: 700"
    both = attempt(["a", "b"], lambda: stops(torch.OutOfMemoryError("CUDA out of memory. Tried\n8 GiB")))
    assert [(check.name, check.passed, check.seen) for check in both] == [
        (name, None, "too little memory: CUDA out of memory. Tried") for name in "ab"
    ]


# ---------------------------------------------------------------------- the report


def findings() -> Findings:
    dearest = tuple(Kernel(f"kernel_{i}", 16.0, 0.5 / 2**i) for i in range(7))
    return Findings(
        checks=[
            Check("capture", True, "9 graphs"),
            Check("replay = eager", False, "1 of 9 recordings differ", "report it"),
            Check("no synchronisation", None, "no time"),
        ],
        memory={"before capture": Bytes(3 * MIB, 4 * MIB), "after capture": Bytes(3 * MIB, 36 * MIB)},
        timings=[Timing("eager", 7.5, 1.5, 400.0, dearest), Timing("graph", 1.6, 1.5, 401.0, dearest)],
        ceiling=4e12,
        needed=3.2e9,
        notes=["something is not known"],
        verdict="graphs gain 4.7x here.",
    )


def test_the_report_says_everything() -> None:
    lines = report({"machine": "a GPU", "model": "a model"}, findings()).splitlines()
    text = "\n".join(lines)
    assert lines[0].split() == ["machine", "a", "GPU"]
    assert "read ceiling  4000 GB/s" in text
    words = [line.split() for line in lines]
    assert ["ok", "capture", "9", "graphs"] in words
    failed = next(i for i, line in enumerate(lines) if line.startswith("FAILED"))
    assert "replay = eager" in lines[failed]
    assert lines[failed + 1].strip() == "what to do: report it"
    assert any(line.startswith("not checked") and line.endswith("no time") for line in lines)
    assert ["after", "capture", "3.0", "MiB", "36.0", "MiB"] in words
    assert ["eager", "7.500", "10.7%", "400", "1.500", "6.000", "80.0%"] in words
    assert ["graph", "1.600", "50.0%", "401", "1.500", "0.100", "6.2%"] in words
    assert [line.split()[0] for line in lines if line.startswith("kernel_")] == [f"kernel_{i}" for i in range(5)]
    assert ["kernel_0", "16", "0.500", "50.4%"] in words
    assert "note: something is not known" in lines
    assert "1 of 3 checks failed." in lines
    assert lines[-1] == "verdict: graphs gain 4.7x here."


def test_what_is_not_known_has_no_column() -> None:
    only = Findings(checks=[], timings=[Timing("eager", 7.5)])
    text = report({"machine": "a CPU"}, only)
    assert "a step     ms" in text
    for word in ("ceiling", "kernel", "gaps", "idle", "dearest", "memory", "verdict"):
        assert word not in text


def test_the_json_holds_the_same() -> None:
    data = json.loads(json.dumps(as_json({"machine": "a GPU"}, findings())))
    assert data["machine"] == "a GPU"
    assert data["passed"] is False
    assert data["checks"][1] == {
        "name": "replay = eager", "passed": False, "seen": "1 of 9 recordings differ", "remedy": "report it"
    }  # fmt: skip
    assert data["steps"][1]["share_of_ceiling"] == pytest.approx(0.5)
    assert data["steps"][0]["idle"] == pytest.approx(0.8)
    assert data["memory"]["after capture"] == {"allocated": 3 * MIB, "reserved": 36 * MIB}
    assert len(data["kernels"]["graph"]) == 5
    assert data["verdict"] == "graphs gain 4.7x here."

"""The benchmarks `retarget` and `pieces` on a GPU that only pretends: what is measured, in which order, and sums."""

import itertools
import json
from collections.abc import Sequence

import pytest
import torch
from fake_nodes import FakeDriver, FakeGraph, FakeNode
from small import FakeBackend
from test_bench import FakeEvent, fails, tiny

from minillm.bench.__main__ import build_parser
from minillm.bench.pieces import SETTLE, pieces
from minillm.bench.retarget import CHANGES, measure, retarget
from minillm.bench.runtime import Runtime
from minillm.errors import ConfigError
from minillm.pieces import Cuts
from minillm.retarget import Editor, Move

ARGUMENTS = ["pieces", "--shape", "tiny", "--device", "cpu", "--cache", "64", "--prompt", "20", "--steps", "6"]


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Graphs that step eagerly, and memory in use that grows by 1 MiB a look. Returns the pieces of each backend."""
    made: list[int] = []

    class Backend(FakeBackend):
        def __init__(self, device: torch.device, cuts: Cuts | None = None) -> None:
            super().__init__(pieces=cuts.pieces if cuts else 1)
            made.append(self.pieces)

        def editor(self, recordings: Sequence[object]) -> Editor:
            graphs = [FakeGraph([FakeNode([address])]) for address in addresses]
            return Editor([graphs] * len(recordings), FakeDriver())  # type: ignore[list-item]

    addresses: list[int] = []
    init = Runtime.__init__

    def noted(self: Runtime, *args: object) -> None:
        init(self, *args)  # type: ignore[arg-type]
        (model,) = self.models.values()
        addresses[:] = [t.data_ptr() for t in (self.cache.kv, *model.weights.tensors())]

    looks = itertools.count()
    for module in ("pieces", "retarget"):
        monkeypatch.setattr(f"minillm.bench.{module}.CudaBackend", Backend)
    monkeypatch.setattr(Runtime, "__init__", noted)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**40 - next(looks) * 2**20, 2**40))
    return made


def test_pieces_run_in_turns_after_a_warm_up(fake_gpu: list[int]) -> None:
    arguments = [*ARGUMENTS, "--batch", "2", "--rounds", "3"]
    report = pieces(build_parser().parse_args(arguments), arguments)
    assert fake_gpu == [1, 1, 2]  # what loads the kernels, and the pieces that two layers allow
    assert [row["pieces"] for row in report.rows] == [1, 2]
    for row in report.rows:
        assert len(row["step_ms"]) == 3 * 6
        assert row["step_ms_p50"] <= row["step_ms_p99"]
        assert row["graphs"] == 6 * row["pieces"]  # two batch sizes, three modes
        assert row["driver_bytes"] > 0
        assert row["pool_bytes"] == 6 * 1000
        assert row["host_us_p50"] > 0
        assert row["capture_ms"] > 0
    assert report.notes[0].startswith("2 pieces: ")
    assert json.loads(json.dumps(report.rows)) == report.rows
    assert "p50 ms" in report.text()


def test_every_step_of_pieces_reads_the_prompt_and_what_came_after(
    fake_gpu: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int, list[int], list[bool]]] = []
    step = Runtime.step

    def noted(self: Runtime, ops: str, cuts: Cuts | None = None):  # type: ignore[no-untyped-def]
        run = step(self, ops, cuts)

        def look(rows, kv_len, mode) -> None:  # type: ignore[no-untyped-def]
            seen.append((rows.rows.shape[0], kv_len, rows.positions.tolist(), rows.active.tolist()))
            run(rows, kv_len, mode)

        return look

    monkeypatch.setattr(Runtime, "step", noted)
    arguments = [*ARGUMENTS, "--rounds", "1", "--pieces", "2"]
    pieces(build_parser().parse_args(arguments), arguments)
    assert seen[-6 - SETTLE :] == [(1, 64, [20 + i], [True]) for i in range(6 + SETTLE)]


@pytest.mark.parametrize(
    ("more", "words"), [(["--pieces", "3"], "at most 2"), (["--steps", "60"], "a cache of 84, not 64")]
)
def test_pieces_that_cannot_be_measured_are_refused(fake_gpu: list[int], more: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        pieces(build_parser().parse_args([*ARGUMENTS, *more]), [])


def test_retarget_measures_a_capture_and_changes_in_each_round(
    fake_gpu: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    changed: list[int] = []
    edit = Editor.retarget

    def noted(self: Editor, moves: Sequence[Move]) -> None:
        edit(self, moves)
        changed.append(sum(old.data_ptr() != new.data_ptr() for old, new in moves))

    monkeypatch.setattr(Editor, "retarget", noted)
    subject = tiny()
    cache, weights = measure(subject, max_rows=2, cache=32, rounds=3, ops="plain")
    assert len(fake_gpu) == 1 + 2 * 3
    tensors = len(subject.weights.tensors())
    assert changed == [1] * 3 * CHANGES + [tensors] * 3 * CHANGES
    assert (cache["what"], weights["what"]) == ("cache", "weights")
    for row in (cache, weights):
        assert row["graphs"] == 6
        assert len(row["captures_ms"]) == 3
        assert len(row["changes_ms"]) == 3 * CHANGES
        assert row["capture_over_first"] == pytest.approx(row["capture_ms"] / row["first_ms"])
        assert row["capture_over_again"] == pytest.approx(row["capture_ms"] / row["again_ms"])
    assert sorted(cache["captures_ms"])[1] == cache["capture_ms"]


def test_retarget_needs_fused_kernels(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["retarget", "--shape", "tiny", "--device", "cpu"]
    with pytest.raises(ConfigError, match="only graphs of fused kernels"):
        retarget(build_parser().parse_args(arguments), arguments)
    assert "needs a GPU" in fails(capsys, *arguments)

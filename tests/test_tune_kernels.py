"""The tuner of launch shapes: what it tries, keeps and writes. The times are made up, so no GPU is needed."""

import importlib.util
import math
import sys
from pathlib import Path

import pytest
import torch

from examples import launch_trials, tune_kernels
from minillm.kernels import launch, table

KEY = (2048, 2048, 32)
SLOW, FAST, WRONG = (64, 256, 4), (64, 512, 4, 4), (128, 512, 8, 4)
Times = dict[tuple[int, ...] | None, float | list[float]]


@pytest.fixture(autouse=True)
def own_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "TILES", {KEY: SLOW})
    monkeypatch.setattr(launch, "PLAIN_ROWS", launch.PLAIN_ROWS)
    monkeypatch.setattr(tune_kernels, "limits", lambda device: ((9, 0), 2**20))


class MadeUp:
    """A step that takes `times[shape]` with that shape in the table, and long with any other.

    None is the rule's. Of a list, each measurement takes the next.
    """

    def __init__(self, times: Times) -> None:
        self.times = times

    def milliseconds(self, stop_at: float = math.inf) -> float:
        found = self.times.get(table.TILES.get(KEY), 2.0)
        return found.pop(0) if isinstance(found, list) else found


def improve(times: Times) -> tuple[int, ...]:
    found = [("o", KEY, shape) for shape in (SLOW, FAST, WRONG)]
    tune_kernels.improve(MadeUp(times), "o", found, deadline=math.inf)  # type: ignore[arg-type]
    return table.TILES[KEY]


def test_the_fastest_shape_is_kept() -> None:
    assert improve({SLOW: 1.0, FAST: 0.9, (*FAST, 1, 1): 0.95}) == FAST


def test_the_best_shape_is_also_tried_late() -> None:
    assert improve({SLOW: 1.0, FAST: 0.9, (*FAST, 1, 1): 0.8}) == (*FAST, 1, 1)


def test_the_shape_before_is_tried_late_too() -> None:
    assert improve({SLOW: 1.0, FAST: 0.9, (*SLOW, 1, 1, 1): 0.8}) == (*SLOW, 1, 1, 1)


def test_the_shape_of_the_rule_is_tried_late_too() -> None:
    """Guards a fault: where the rule's shape was the best, that of the last trial was tried late."""
    del table.TILES[KEY]
    late = tuple(launch.tile(*KEY)._replace(late=1))
    assert improve({None: 1.0, late: 0.8}) == late


def test_a_late_shape_is_tried_early() -> None:
    table.TILES[KEY] = (*SLOW, 1, 1, 1)
    assert improve({(*SLOW, 1, 1, 1): 1.0, (*SLOW, 1, 1, 0): 0.8}) == (*SLOW, 1, 1, 0)


def test_late_is_what_a_launch_really_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a fault: of a shape that does not fit the GPU, the late twin was timed while the rule's was launched."""
    monkeypatch.setattr(tune_kernels, "limits", lambda device: ((9, 0), 99 << 10))
    table.TILES[KEY] = large = (64, 1024, 8, 2)
    rule = launch.tile(*KEY, memory=99 << 10)
    assert rule != launch.Tile(*large)
    assert improve({large: 1.0, tuple(rule._replace(late=1)): 0.8}) == tuple(rule._replace(late=1))


def test_a_change_that_saves_next_to_nothing_is_not_made() -> None:
    assert improve({SLOW: 1.0, FAST: 0.9985}) == SLOW


def test_a_change_that_saves_only_once_is_not_made() -> None:
    assert improve({SLOW: 1.0, FAST: [0.9, 1.0]}) == SLOW


@pytest.mark.parametrize(("stop_at", "wanted", "counts"), [(1.0, 0.5, [4, 8, 30, 30, 30]), (0.4, 0.5, [4, 8])])
def test_the_first_launch_of_a_graph_does_not_count(stop_at: float, wanted: float, counts: list[int]) -> None:
    """Guards a fault: it takes as long as several short steps, and no trial of a small model went on after it."""
    seen = []

    def run(count: int) -> float:
        seen.append(count)
        return 9.0 if count == 4 else 0.5

    assert tune_kernels.steady(run, stop_at, steps=30, repeats=3) == wanted
    assert seen == counts


def test_what_is_written_is_a_table_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a fault: a shape that won late was written as Tile(...), and the package could not be imported."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    improve({SLOW: 1.0, FAST: 0.9, (*FAST, 1, 1): 0.8})
    tune_kernels.write_table(tmp_path / "written.py")
    spec = importlib.util.spec_from_file_location("written", tmp_path / "written.py")
    assert spec is not None
    assert spec.loader is not None
    written = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(written)
    assert written.TILES == table.TILES
    assert written.ATTENTION == table.ATTENTION
    assert [path.name for path in tmp_path.glob("*.py*")] == ["written.py"]


@pytest.mark.parametrize(
    ("capability", "memory", "shape"),
    [((8, 6), 99 << 10, (64, 1024, 8, 2)), ((10, 0), 227 << 10, (64, 1024, 8, 2)), ((9, 0), 99 << 10, (128, 256, 8))],
)
def test_a_shape_that_the_gpu_cannot_run_is_not_tried(
    capability: tuple[int, int], memory: int, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards a fault: a launch takes the rule's shape in its place, which was timed and written under its name."""
    pytest.importorskip("triton", reason="triton, which comes with PyTorch's CUDA wheels, is not installed")
    monkeypatch.setattr(tune_kernels, "limits", lambda device: (capability, memory))
    config = tune_kernels.model_config("llama-3.2-1b")
    with pytest.raises(ValueError, match="does not fit"):
        tune_kernels.compile_trial(config, 32, launch.PLAIN_ROWS, ("o", KEY, shape))


def test_few_rows_of_qkv_stay_within_a_head() -> None:
    config = tune_kernels.model_config("llama-3.2-1b")  # a head_dim of 64
    heights = {rows: {shape[0] for *_, shape in launch_trials.trials(config, rows)["qkv"]} for rows in (1, 4, 8)}
    assert max(heights[1]) <= max(heights[4]) <= 64 < max(heights[8])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--seconds -5", "--seconds must be above 0, not -5"),
        ("--seconds nan", "--seconds must be above 0, not nan"),
        ("--output no/such/folder/table.py", "--output must be a file in a folder that exists"),
        ("--rows 2 --only attention", "nothing to tune: attention has shapes for 1 row and for 8 and more"),
    ],
)
def test_bad_arguments_get_one_line_before_anything_is_done(
    words: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tune_kernels", *words.split()])
    monkeypatch.setattr(tune_kernels, "ProcessPoolExecutor", None)
    with pytest.raises(SystemExit) as ended:
        tune_kernels.main()
    assert says in f"{ended.value} {capsys.readouterr().err}"

"""The tuner of launch shapes: what it tries, keeps and writes. The times are made up, so no GPU is needed."""

import importlib.util
import math
from pathlib import Path

import pytest
import torch

from examples import tune_kernels
from minillm.kernels import launch, table

KEY = (2048, 2048, 32)
SLOW, FAST, WRONG = (64, 256, 4), (64, 512, 4, 4), (128, 512, 8, 4)


@pytest.fixture(autouse=True)
def own_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "TILES", {KEY: SLOW})
    monkeypatch.setattr(launch, "PLAIN_ROWS", launch.PLAIN_ROWS)


class MadeUp:
    """A step that takes `times[shape]` with that shape in the table, and long with any other; None is the rule's."""

    def __init__(self, times: dict[tuple[int, ...] | None, float]) -> None:
        self.times = times

    def milliseconds(self, stop_at: float = math.inf) -> float:
        return self.times.get(table.TILES.get(KEY), 2.0)


def improve(times: dict[tuple[int, ...] | None, float]) -> tuple[int, ...]:
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


def test_a_change_that_saves_next_to_nothing_is_not_made() -> None:
    assert improve({SLOW: 1.0, FAST: 0.9985}) == SLOW


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


def test_a_shape_that_the_gpu_cannot_run_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a fault: a launch takes the rule's shape in its place, which was timed and written under its name."""
    pytest.importorskip("triton", reason="triton, which comes with PyTorch's CUDA wheels, is not installed")
    monkeypatch.setattr(tune_kernels, "limits", lambda device: ((8, 6), 99 << 10))
    config = tune_kernels.model_config("llama-3.2-1b")
    with pytest.raises(ValueError, match="does not fit"):
        tune_kernels.compile_trial(config, 32, launch.PLAIN_ROWS, ("o", KEY, (64, 1024, 8, 2)))

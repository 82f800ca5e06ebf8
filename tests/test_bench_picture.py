"""The picture of decode results: what it shows is what the files say, and a file that is no result gets one line."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from minillm.bench.__main__ import main
from minillm.bench.picture import read_panel

RESULTS = Path(__file__).resolve().parents[1] / "examples" / "results"
DECODE = [RESULTS / f"h200-decode-{shape}.json" for shape in ("135m", "1b", "8b")]


def fails(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line of a command that ends with status 2."""
    assert main(["picture", *map(str, arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1, err
    return err


def test_the_committed_results_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    output = tmp_path / "speed.png"
    assert main(["picture", *map(str, DECODE), "--output", str(output)]) == 0
    assert output.read_bytes().startswith(b"\x89PNG")
    assert output.stat().st_size > 10_000


def test_every_bar_has_its_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The texts of the drawn figure: each model, each bar, each time, the machine and the date."""
    figure = pytest.importorskip("matplotlib.figure")
    texts: list[str] = []

    def look(self: Any, *_: object, **__: object) -> None:
        texts.extend(text.get_text() for text in self.findobj(lambda artist: hasattr(artist, "get_text")))

    monkeypatch.setattr(figure.Figure, "savefig", look)
    assert main(["picture", *map(str, DECODE), "--output", str(tmp_path / "speed.png")]) == 0
    shown = "\n".join(texts)
    for path in DECODE:
        panel = read_panel(path)
        assert panel.title in texts
        assert panel.circumstances in shown
        assert all(name in texts and f"{value:#.3g} ms" in texts for name, _, value in panel.bars)


@pytest.mark.parametrize("path", DECODE, ids=lambda path: path.stem)
def test_a_panel_says_what_the_file_says(path: Path) -> None:
    data, panel = json.loads(path.read_text()), read_panel(path)
    rows = {row["mode"]: row for row in data["rows"] if (row["batch"], row["cache"]) == (1, 1024)}
    times = [rows[mode]["step_ms_p50"] for mode in ("eager", "graph", "fused graph")]
    assert [value for _, _, value in panel.bars] == [*times, rows["eager"]["floor_ms"]]
    assert data["model"].split(",")[0] in panel.title
    assert panel.title.endswith("batch 1, prompt 512, cache 1024")
    assert data["machine"] in panel.circumstances
    assert data["date"][:10] in panel.circumstances


def test_a_result_of_a_cpu_has_the_bars_that_it_has() -> None:
    panel = read_panel(RESULTS / "xeon-decode-135m.json")
    assert [name for name, _, _ in panel.bars] == ["eager", "floor: bytes / bandwidth"]
    assert "Xeon" in panel.circumstances


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ("cannot be read",)),
        ("no JSON", ("not valid JSON",)),
        ("[]", ("list",)),
        ("{}", ("no result", "decode --json")),
        ('{"bench": "serve", "rows": []}', ("no result", "decode --json")),
        ('{"bench": "decode"}', ("broken", "rows")),
        ('{"bench": "decode", "rows": []}', ("broken",)),
        ('{"bench": "decode", "rows": [3]}', ("broken",)),
    ],
)
def test_what_is_no_result_gets_one_line(
    content: str | None, words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "given.json"
    if content is not None:
        path.write_text(content)
    said = fails(capsys, DECODE[0], path, "--output", tmp_path / "speed.png")
    assert all(word in said for word in ("given.json", *words)), said
    assert not (tmp_path / "speed.png").exists()


@pytest.mark.parametrize("value", [None, "fast", 0, -1.0, float("nan"), True])
def test_a_time_that_is_none_is_refused(value: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    data = json.loads(DECODE[0].read_text())
    data["rows"][0]["step_ms_p50"] = value
    path = tmp_path / "given.json"
    path.write_text(json.dumps(data))
    assert "is no time" in fails(capsys, path, "--output", tmp_path / "speed.png")


@pytest.mark.parametrize(("output", "words"), [("/no/such/folder/a.png", "/no/such/folder"), ("a.pdf", "PNG")])
def test_an_impossible_output_gets_one_line(output: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = fails(capsys, DECODE[0], "--output", output)
    assert words in said


def test_without_matplotlib_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "--output needs matplotlib: pip install 'minillm[plot]'" in fails(capsys, DECODE[0], "--output", "speed.png")

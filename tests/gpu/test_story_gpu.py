"""The story as programs, on a GPU: each runs to its end, finds its results equal, and prints a gain."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--shape", "stories", "--steps", "16")
PROGRAMS = sorted(path.stem for path in (ROOT / "examples" / "story").glob("s[0-9]_*.py"))


def told(module: str, *arguments: str) -> str:
    """What a program prints."""
    command = [sys.executable, "-m", module, *SMALL, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_checks_and_prints_its_gain(name: str) -> None:
    text = told(f"examples.story.{name}")
    if "\nchecked: " not in text and " needs " in text.splitlines()[-1]:
        pytest.skip(text.splitlines()[-1])
    assert f"\n{name[1]}. " in text
    assert "\nchecked: " in text
    assert re.search(r" ms .*: \d+\.\dx\n", text), text


def test_the_mistakes_show_and_raise_no_error() -> None:
    text = told("examples.story.s2_capture") + told("examples.story.s3_inputs")
    assert "an eager step writes [65], a replay writes [64] and says nothing" in text
    repeated = re.search(r"bound anew: \[(\d+), (\d+), (\d+)", text)
    assert repeated is not None, text
    assert len(set(repeated.groups())) == 1, text


def test_the_whole_story_writes_its_figures(tmp_path: Path) -> None:
    told("examples.story", "--json", str(tmp_path / "story.json"))
    data = json.loads((tmp_path / "story.json").read_text())
    chapters = {row["chapter"]: row["bars"] for row in data["rows"]}
    assert set(chapters) >= {1, 2, 3, 4, 5, 7}
    assert all(value > 0 for bars in chapters.values() for value in bars.values())

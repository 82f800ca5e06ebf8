"""The README keeps its word: files, line counts, modules."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def test_line_counts_are_true() -> None:
    rows = re.findall(r"^\| \[`([^`]+)`\]\(([^)]+)\) \| (\d+) \|", README, re.M)
    assert len(rows) > 15
    for name, target, count in rows:
        assert target == f"minillm/{name}"
        assert len((ROOT / target).read_text().splitlines()) == int(count), name


def test_every_module_is_mentioned() -> None:
    for file in [*(ROOT / "minillm").glob("*.py"), *(ROOT / "minillm" / "kernels").glob("*.py")]:
        name = file.relative_to(ROOT / "minillm").as_posix()
        assert file.stem == "__init__" or f"`{name}`" in README, name


def test_every_command_exists() -> None:
    modules = set(re.findall(r"python -m (minillm\.\w+)", README))
    assert modules >= {"minillm.generate", "minillm.chat", "minillm.convert", "minillm.bench"}
    for module in modules:
        assert importlib.util.find_spec(module) is not None


@pytest.mark.parametrize("module", ["generate", "chat", "convert", "download", "bench", "doctor"])
def test_help_does_not_wait_for_torch(module: str) -> None:
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['{module}', '--help']\n"
        f"try: runpy.run_module('minillm.{module}', run_name='__main__')\n"
        "except SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage:")


def test_options_of_the_readme_exist() -> None:
    done = subprocess.run([sys.executable, "-m", "minillm.generate", "--help"], capture_output=True, text=True)
    text = README.split("## At the shell")[1].split("## In a program")[0]
    for option in set(re.findall(r"--[a-z][a-z-]+", text)) - {"--help", "--shape"}:
        assert option in done.stdout, option

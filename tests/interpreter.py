"""Runs a file of tests in a process of its own, in which Triton interprets kernels: that is set before the import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def run_interpreted(name: str) -> None:
    """Run the tests of the file of that name beside this one; fails with what they print."""
    pytest.importorskip("triton", reason="triton, which comes with PyTorch's CUDA wheels, is not installed")
    file = Path(__file__).with_name(name)
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(file)]
    run = subprocess.run(command, env=env, capture_output=True, text=True, cwd=file.parent.parent)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]

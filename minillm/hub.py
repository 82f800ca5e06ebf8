"""What a person calls a model -> a directory with config.json, safetensors and a tokenizer.

`--model` and `LLM(...)` take a directory, a GGUF file, a name that download.py knows, an id on the Hugging Face hub, or
nothing, which is the small model that comes with minillm. A directory is used as it is. Everything else is turned into
a directory once, with a line on stderr that says so, and found again the next time.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from .command import note
from .convert import convert_gguf
from .download import DOWNLOADS, download, weights_dir
from .errors import CheckpointError, MinillmError

BUNDLED_MODEL = "stories"
INSTRUCT_MODEL = "smollm2-135m-instruct"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*")
# Never *.bin or *.pth: they are pickles, which run code when they are read, and minillm does not read them.
HUB_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "*.safetensors",
    "model.safetensors.index.json",
]


def bundled_model() -> Path | None:
    """The directory of the model that comes with minillm, None if it was left out.

    A source checkout has it in `weights/stories`, whatever `$MINILLM_WEIGHTS` says; a wheel has it beside this file.
    """
    package = Path(__file__).resolve().parent
    for directory in (package / BUNDLED_MODEL, package.parent / "weights" / BUNDLED_MODEL):
        if (directory / "config.json").is_file():
            return directory
    return None


def default_model(chat: bool = False) -> str:
    """The name of the model that is taken where none is given. The bundled one has not learned to chat."""
    return INSTRUCT_MODEL if chat or bundled_model() is None else BUNDLED_MODEL


def resolve_model(model: str | os.PathLike[str] | None) -> Path:
    """The directory of `model`, made first where that is needed.

    model: an existing directory; a `.gguf` file; "stories"; a name in `DOWNLOADS`; a hub id `org/name`; None: the
    bundled model, or SmolLM2 where that was left out. A directory of that name wins over every other meaning. Raises
    CheckpointError in one sentence for everything that is none of these or cannot be fetched, and what `convert_gguf`
    raises for a GGUF file.
    """
    bundled = bundled_model()
    if model is None:
        return bundled or _known(INSTRUCT_MODEL)
    if not isinstance(model, (str, os.PathLike)):
        raise CheckpointError(f"a model is named by a path or a hub id, not by {type(model).__name__}")
    name = os.path.expanduser(os.fspath(model))  # leaves the ~ of an unknown user as it is
    path = Path(name)
    if name and os.path.isdir(name):  # Path("") would be the current directory
        return path
    if os.path.isfile(name):  # these two say False, where Path's methods raise, for names that cannot be
        if path.suffix.lower() == ".gguf":
            return _converted(path)
        raise CheckpointError(f"{path}: a file; give the directory that holds config.json, or a .gguf file")
    if name.lower() == BUNDLED_MODEL and bundled is not None:
        return bundled
    if name.lower() in DOWNLOADS:
        return _known(name.lower())
    if HUB_ID.fullmatch(name) and path.suffix.lower() != ".gguf":
        return _from_hub(name)
    names = ", ".join([*([] if bundled is None else [BUNDLED_MODEL]), *DOWNLOADS])
    raise CheckpointError(
        f"{name!r}: no such directory or file; a model can also be a hub id (org/name) or one of {names}"
    )


def _known(name: str) -> Path:
    """A model of `DOWNLOADS`, fetched only if it is not there; silent if it is."""
    target = weights_dir() / DOWNLOADS[name].directory
    return target if (target / "config.json").is_file() else download(name)


def _converted(path: Path) -> Path:
    """The converted form of a GGUF file, named after path, size and time, so that a changed file is converted anew."""
    stat = path.stat()
    identity = f"{path.resolve()}\n{stat.st_size}\n{stat.st_mtime_ns}"
    short_hash = hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()[:10]
    target = weights_dir() / "converted" / f"{path.stem}-{short_hash}"
    if (target / "config.json").is_file():
        return target
    note(f"minillm: converting {path} once, into {target}")
    try:
        return convert_gguf(path, target, progress=True)
    except MinillmError:
        if (target / "config.json").is_file():  # another process was faster
            return target
        raise


def _from_hub(repo_id: str) -> Path:
    """Fetch a repository's configuration, tokenizer and safetensors into the hub library's own cache."""
    import huggingface_hub
    from huggingface_hub import errors

    note(f"minillm: {repo_id} is no local directory; looking on the Hugging Face hub")
    try:
        directory = Path(huggingface_hub.snapshot_download(repo_id, allow_patterns=HUB_FILES))
    except errors.GatedRepoError as error:
        url = f"https://huggingface.co/{repo_id}"
        raise CheckpointError(f"{repo_id}: gated; accept its terms at {url}, then run `hf auth login`") from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(f"{repo_id}: no such directory here, and no such public model on the hub") from error
    except Exception as error:  # the network library below, and so its exceptions, differ between versions
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        raise CheckpointError(
            f"{repo_id}: no such directory here, and it cannot be fetched from the hub ({first_line})"
        ) from error
    if not any(directory.glob("*.safetensors")):
        raise CheckpointError(f"{repo_id}: has no safetensors files, and minillm reads no others from the hub")
    return directory

"""Safetensors files to tensors in place: which files, which names, which shapes, and never two copies in memory.

A safetensors file is a JSON header (name -> dtype, shape, byte range) followed by raw numbers. A large model is cut
into several files, the shards, and `model.safetensors.index.json` maps each tensor name to its shard.

Usually a loader reads all tensors into a dict and a model copies what it wants: two copies, and a key that nobody asks
for is lost in silence. Here the caller first allocates its final matrices, says for each name which view of them is to
be filled, and `load` streams one tensor at a time from the file into that view, converting dtype, device and layout on
the way. Before the first byte is copied all names, shapes and dtypes are checked against each other, both ways.

This module knows nothing of any model: names are strings.
"""

import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .errors import CheckpointError
from .json_file import read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")  # names of the safetensors format


@dataclass(frozen=True)
class Destination:
    """Where one tensor goes: `view` is a view of a preallocated tensor, of any strides, dtype and device.

    `shape` is the shape that the file must have. The view may have another one with as many elements: a projection
    [heads * head_dim, hidden] may land in a view [heads, 2, head_dim / 2, hidden] that reorders its rows.
    """

    view: Tensor
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if math.prod(self.shape) != self.view.numel():
            raise ValueError(f"a view of shape {list(self.view.shape)} cannot hold a tensor of {list(self.shape)}")


@dataclass(frozen=True)
class _Stored:
    """One tensor as the header of its file describes it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # a name of the safetensors format, such as BF16


class Checkpoint:
    """The tensors of one folder, headers only until `load`.

    As in transformers, `model.safetensors` wins over `model.safetensors.index.json` if a folder has both. Shards are
    found through the index, never by listing files; a tensor in a shard that the index forgot counts as well, so that
    `load` can complain of it.

    Raises `CheckpointError` if there are no safetensors weights, a shard is missing, the index points outside the
    folder or at a tensor that its shard lacks, or a file is broken or cut short.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if os.path.isfile(self.path / SINGLE_FILE):
            self._stored = _read_header(self.path / SINGLE_FILE)
        elif os.path.isfile(self.path / INDEX_FILE):
            self._stored = _read_shards(self.path)
        else:
            raise CheckpointError(_why_no_weights(self.path))

    @property
    def names(self) -> list[str]:
        """The names of all tensors, in the order in which `load` copies them."""
        return list(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one tensor in the file. Raises `CheckpointError` for an unknown name."""
        if name not in self._stored:
            raise CheckpointError(f"{self.path} has no tensor {name}")
        return self._stored[name].shape

    @torch.no_grad()
    def load(
        self,
        destinations: Mapping[str, Destination],
        progress: Callable[[int], None] | None = None,
        optional: Collection[str] = (),
    ) -> None:
        """Copy every tensor to its destination; host memory grows by one tensor at a time.

        The names must be exactly those of the checkpoint, but for two kinds: `optional` names may be absent from it,
        and are passed over if present without a destination (the output matrix of a model with tied embeddings); and
        rotary frequencies, which old files store although they follow from the config, are passed over.
        `progress` is called after each tensor with the number of bytes written to its view.

        Raises `CheckpointError`, before anything is copied, naming all tensors that are missing, unexpected, of another
        shape, or not of a floating-point dtype.
        """
        faults = self._faults(destinations, optional)
        if faults:
            raise CheckpointError(
                f"the weights in {self.path} do not fit the model: {'; '.join(faults)} (do config.json and the weights "
                "belong together, and is the download complete?)"
            )
        for name, stored in self._stored.items():
            if name in destinations:
                view = destinations[name].view
                _copy(stored, name, view)
                if progress is not None:
                    progress(view.numel() * view.element_size())

    def _faults(self, destinations: Mapping[str, Destination], optional: Collection[str]) -> list[str]:
        """One phrase for each kind of disagreement between the files and the destinations."""
        missing = [name for name in destinations if name not in self._stored and name not in optional]
        unexpected = [
            name
            for name in self._stored
            if name not in destinations and name not in optional and not _is_rotary_buffer(name)
        ]
        shapes, dtypes = [], []
        for name in destinations.keys() & self._stored.keys():
            stored, wanted = self._stored[name], tuple(destinations[name].shape)
            if stored.shape != wanted:
                shapes.append(f"{name} is {list(stored.shape)} and should be {list(wanted)}")
            if stored.dtype not in FLOAT_DTYPES:
                dtypes.append(f"{name} is {stored.dtype}")
        kinds = {
            "missing": missing,
            "unexpected": unexpected,
            "wrong shape": sorted(shapes),
            f"unsupported dtype (only {', '.join(FLOAT_DTYPES)})": sorted(dtypes),
        }
        return [f"{kind}: {_listing(entries)}" for kind, entries in kinds.items() if entries]


def _copy(stored: _Stored, name: str, view: Tensor) -> None:
    """Open, copy, close. The tensor is a piece of the mapped file, and its pages stay in memory until the file is
    unmapped; one mapping for all tensors would grow to the size of the shard. Opening again takes under 1 ms."""
    with _opened(stored.file) as file:
        view.copy_(file.get_tensor(name).view(view.shape))


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (SafetensorError, OSError) as fault:
        raise CheckpointError(
            f"{file} is not a complete safetensors file ({fault}): fetch it again, or check its permissions"
        ) from None


def _read_header(file: Path) -> dict[str, _Stored]:
    with _opened(file) as opened:
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)
        return {name: _Stored(file, tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}


def _read_shards(folder: Path) -> dict[str, _Stored]:
    """All tensors of all shards; the index decides where a name that occurs twice is taken from."""
    index = read_json(folder / INDEX_FILE, CheckpointError).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise CheckpointError(f"{folder / INDEX_FILE} has no weight_map, which says what each shard holds")
    for file in index.values():
        if not isinstance(file, str) or not _is_plain_name(file):
            raise CheckpointError(f"{folder / INDEX_FILE} names the shard {file!r}, which is not a file in its folder")
    files = sorted(set(index.values()))
    missing = [file for file in files if not os.path.isfile(folder / file)]
    if missing:
        raise CheckpointError(f"{folder} lacks {_listing(missing)}, named in {INDEX_FILE}: fetch the folder again")
    stored: dict[str, _Stored] = {}
    for file in files:
        header = _read_header(folder / file)
        lacking = [name for name, home in index.items() if home == file and name not in header]
        if lacking:
            raise CheckpointError(f"{folder / file} lacks {_listing(lacking)}, which {INDEX_FILE} says it holds")
        stored |= {name: entry for name, entry in header.items() if index.get(name, file) == file}
    return stored


def _is_plain_name(file: str) -> bool:
    """True for a name without any directory, drive or step upwards, on every system."""
    return file not in ("", ".", "..") and PurePosixPath(file).name == file == PureWindowsPath(file).name


def _is_rotary_buffer(name: str) -> bool:
    """Rotary frequencies, as old versions of transformers (one for each layer) and Meta's code saved them."""
    return name.endswith(".rotary_emb.inv_freq") or name == "rope.freqs"


def _listing(entries: Iterable[str], limit: int = 8) -> str:
    entries = list(entries)
    rest = f" and {len(entries) - limit} more" if len(entries) > limit else ""
    return ", ".join(entries[:limit]) + rest


def _why_no_weights(folder: Path) -> str:
    """The folder has no safetensors weights: say what it has instead, and what to do."""
    try:
        names = os.listdir(folder)
    except OSError as fault:
        return f"the model folder {folder} cannot be read: {fault.strerror}"
    if any(name.startswith("consolidated.") for name in names):
        return f"{folder} holds weights in Meta's format: convert them to the Hugging Face format"
    if any(name.startswith("pytorch_model") for name in names):
        return f"{folder} holds weights only as pytorch_model*.bin (pickle): convert them to safetensors"
    return f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}"

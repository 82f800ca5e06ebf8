"""What must hold of captured steps: each check looks, and says what it saw.

A check is never an exception: one that stops on the way has failed, or, for want of memory, was not made.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from ..bench.runtime import release, synchronize
from ..capture import Backend
from ..graphs import GraphRunner, Key
from ..sampling import Mode
from .patient import Patient

SEGMENT = 2 * 2**20
"""Bytes that PyTorch's allocator takes at once for small tensors: what a close may leave reserved, partly in use."""
UNSPLIT = 2**20
"""Bytes that it may count beyond a tensor's own, when a larger block is not worth splitting."""


@dataclass(frozen=True)
class Check:
    """What one check found.

    Attributes:
        passed: None if it was not made, for the reason in `seen`.
        seen: the figures, and the tolerance that they were held against.
        remedy: what to do, if it failed.
    """

    name: str
    passed: bool | None
    seen: str
    remedy: str = ""


class Bytes(NamedTuple):
    """Memory of PyTorch on the device. allocated: in tensors. reserved: taken from the driver."""

    allocated: int
    reserved: int


def attempt(names: Sequence[str], checks: Callable[[], list[Check]]) -> list[Check]:
    """The checks of these names, whatever becomes of them."""
    try:
        return checks()
    except torch.OutOfMemoryError as error:
        return [Check(name, None, f"too little memory: {first_line(error)}") for name in names]
    except Exception as error:  # whatever a kernel, its compiler or the driver raises is a finding
        return [stopped(name, error) for name in names]


def stopped(name: str, error: Exception) -> Check:
    return Check(name, False, f"it stopped with {type(error).__name__}: {first_line(error)}", "report this line")


def first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "no reason given")


# ---------------------------------------------------------------------- a replay is the eager step


def replays(patient: Patient, runner: GraphRunner) -> Check:
    """Replay every recording, run the same padded rows eagerly, and compare all that either wrote, bit for bit."""
    keys = runner.keys()
    wrong = {key: names for key in keys if (names := _difference(patient, runner, key))}
    if not wrong:
        sizes = sorted({n for n, _, _ in keys})
        rows = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
        return Check("replay = eager", True, f"all {len(keys)} recordings (rows: {rows}), bit for bit")
    (n, kv_len, mode), names = next(iter(wrong.items()))
    seen = (
        f"{len(wrong)} of {len(keys)} recordings differ; of {n} rows, {kv_len} KV positions, mode {mode.name}: "
        f"{', '.join(names)}"
    )
    return Check("replay = eager", False, seen, "run with graphs='off', and report this line")


def _difference(patient: Patient, runner: GraphRunner, key: Key) -> list[str]:
    """The names of what a replay leaves otherwise than the eager step. Of several rows the last is padding."""
    n, kv_len, mode = key
    if runner.find(n, kv_len, mode) is None:
        return ["there is no recording"]
    patient.place(max(1, n - 1), kv_len - 1, mode)
    before = patient.snapshot()
    runner.step(n, kv_len, mode)
    replayed = patient.snapshot()
    patient.restore(before)
    patient.step(n, kv_len, mode)
    eager = patient.snapshot()
    return [name for name in eager if not torch.equal(eager[name], replayed[name])]


# ---------------------------------------------------------------------- addresses


def addresses(before: Mapping[str, int], after: Mapping[str, int]) -> Check:
    """Whether the tensors that a recording points at are where they were."""
    moved = [name for name in before if after.get(name) != before[name]]
    if not moved:
        return Check("addresses", True, f"{len(before)} tensors, none has moved")
    shown = ", ".join(moved[:3]) + (", ..." if len(moved) > 3 else "")
    remedy = "write to tensors in place (copy_, fill_); a new tensor under an old name is not what a replay reads"
    return Check("addresses", False, f"{len(moved)} of {len(before)} tensors have moved: {shown}", remedy)


# ---------------------------------------------------------------------- synchronisation


def no_sync(patient: Patient, runner: GraphRunner) -> Check:
    """Run a replay and an eager step of every mode while PyTorch refuses to wait for the device."""
    name, rows, length = "no synchronisation", patient.rows, patient.length
    for mode in Mode:
        patient.place(rows, length - 2, mode)
        synchronize(patient.device)
        allowed = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Synchronization debug mode")  # a prototype, says PyTorch
            torch.cuda.set_sync_debug_mode("error")
            try:
                runner.step(rows, length - 1, mode)
                patient.step(rows, length, mode)
            except RuntimeError as error:
                remedy = "find the .item(), .cpu() or boolean of a tensor in the step, and keep it on the device"
                return Check(name, False, f"mode {mode.name}: {first_line(error)}", remedy)
            finally:
                torch.cuda.set_sync_debug_mode(allowed)
    return Check(name, True, f"{2 * len(Mode)} steps, replayed and eager, waited for nothing")


# ---------------------------------------------------------------------- memory


def at_rest(patient: Patient, backend: Backend) -> Bytes:
    """Memory in use with no step under way.

    Steps of every mode run first, so that what they leave behind for the next one (an activation or two) is there
    each time; twice, so that it lies where it also lies the next time.
    """
    patient.state.active.fill_(False)
    for mode in (*Mode, *Mode):
        backend.warm_up(partial(patient.step, patient.rows, patient.length, mode))
    backend.close()  # drops the workspaces of cuBLAS, as a capture does
    return in_use(patient.device)


def in_use(device: torch.device) -> Bytes:
    release(device)
    return Bytes(torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device))


def memory(before: Bytes, captured: Bytes, closed: Bytes) -> Check:
    """Whether closing gives back what the recordings took.

    Tolerance: SEGMENT reserved and UNSPLIT allocated, which is how coarsely PyTorch's allocator works.
    """
    left = Bytes(closed.allocated - before.allocated, closed.reserved - before.reserved)
    seen = (
        f"recordings took {mib(captured.reserved - before.reserved)}; after close {mib(left.allocated)} allocated and "
        f"{mib(left.reserved)} reserved are left of it (at most {mib(UNSPLIT)} and {mib(SEGMENT)})"
    )
    passed = left.allocated <= UNSPLIT and left.reserved <= SEGMENT
    return Check("memory comes back", passed, seen, "something still refers to a recording or to what it made")


def mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"

"""GraphRunner: record each decode step once as a CUDA Graph, then replay it for ever.

A decode step is hundreds of small kernels. Launched one by one, the CPU needs longer to launch them than the GPU to run
them. A CUDA Graph is a recording of all of them, which one call replays. What it costs is that everything is frozen:
addresses, shapes, and every Python number. So

- what changes lives in tensors that are written in place (`state.py`), and a step is a function of those (`step.py`);
- what cannot be a tensor is bucketed: there is one recording for each of a few batch sizes, KV lengths and sampling
  modes, and a step runs in the smallest that fits, its spare rows being padding;
- what fits no bucket runs eagerly, the same function, and is counted.

A recording may hold several steps, each of which writes its tokens to a place of its own: one launch makes them all,
and the rows that end in the middle are padding for the rest of it.

All recordings share one memory pool, because only one runs at a time, and the largest is recorded first, so that the
smaller ones find its memory and add none.
"""

import time
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from .cache import KVCache
from .capture import Backend, Loop, Recording, no_garbage_collection, record
from .errors import ConfigError, GraphError
from .graph_report import GraphReport
from .readback import Tape
from .retarget import Editor, Move, check_moves
from .sampling import Mode
from .state import DecodeState

if TYPE_CHECKING:
    from .prefill_graphs import PrefillRunner

Step = Callable[[DecodeState, int, Mode], None]  # (state of n rows, kv_len, mode): one decode step
Key = tuple[int, int, Mode]  # rows, kv_len, mode


def batch_buckets(max_batch_size: int) -> list[int]:
    """1, 2, 4, 8, then by 8, and always the maximum itself."""
    sizes = {1, 2, 4, *range(8, max_batch_size, 8), max_batch_size}
    return sorted(size for size in sizes if size <= max_batch_size)


def kv_buckets(max_seq_len: int) -> list[int]:
    """256, 512, 1024, ... and always the maximum itself: plain attention reads a bucket, not the whole cache."""
    lengths = [256]
    while lengths[-1] < max_seq_len:
        lengths.append(2 * lengths[-1])
    return [*lengths[:-1], max_seq_len]


class GraphRunner:
    """Runs decode steps: replays where a recording fits, eagerly where none does.

    Args:
        step: the function to record. state, cache: what it works on; they are put back after a capture.
        backend: None runs everything eagerly, for the reason `eager_reason`.
        kv_lengths: of the kv_len argument, recorded each, the longest last: that of the cache. None: `kv_buckets`.
        steps: how many steps a recording has. What runs eagerly has one: there is nothing to gain.
    Attributes:
        outputs: int32 [steps, rows, 3], what each of the steps of the last call has put out.
    """

    def __init__(
        self,
        step: Step,
        state: DecodeState,
        cache: KVCache,
        backend: Backend | None,
        eager_reason: str = "graphs are off",
        kv_lengths: list[int] | None = None,
        steps: int = 1,
    ) -> None:
        self._step, self._state, self._cache, self._backend = step, state, cache, backend
        self._set_steps(1 if backend is None else steps)
        self._eager_reason = eager_reason
        self._batch_sizes = batch_buckets(cache.max_batch_size)
        self._kv_lengths = kv_lengths or kv_buckets(cache.max_seq_len)
        self._recordings: dict[Key, Recording] = {}
        self._editor: Editor | None = None  # of the recordings, once it is needed
        self.looping = False  # whether there are copies of the recordings
        self.report = GraphReport(enabled=False)

    def _set_steps(self, steps: int) -> None:
        """The first step's output is that of the state if there is one step; else, all have places of their own."""
        self.steps, output = steps, self._state.output
        self.outputs = output[None] if steps == 1 else output.new_empty((steps, *output.shape))

    def on_stream(self) -> AbstractContextManager[object]:
        """The stream that every step runs on, or the current one without a GPU."""
        return self._backend.on_stream() if self._backend is not None else ExitStack()

    def keys(self) -> list[Key]:
        """Everything to record, in the order of recording: largest first."""
        modes = sorted(Mode, reverse=True)
        return [(n, kv, m) for n in self._batch_sizes[::-1] for kv in self._kv_lengths[::-1] for m in modes]

    def capture(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Record every key. All or nothing: a failure drops what was recorded and raises `GraphError`.

        Args:
            progress: called with (recorded so far, how many in all).
        """
        if self._backend is None:
            return
        keys, started = self.keys(), time.perf_counter()
        self._editor = None
        with self._undisturbed():
            for index, key in enumerate(keys):
                what = f"the decode step of {key[0]} rows, {key[1]} KV positions, mode {key[2].name}"
                remedy = "Lower max_batch_size or max_seq_len"
                try:
                    self._recordings[key] = record(self._backend, partial(self._run, *key), self.report, what, remedy)
                except GraphError:
                    self._recordings.clear()
                    self._set_steps(1)
                    raise
                if progress is not None:
                    progress(index + 1, len(keys))
        self.report.enabled, self.report.graphs, self.report.pieces = True, len(keys), self._backend.pieces
        self.report.batch_sizes, self.report.kv_lengths = self._batch_sizes, self._kv_lengths
        self.report.capture_seconds += time.perf_counter() - started

    def _run(self, rows: int, kv_len: int, mode: Mode) -> None:
        """The steps of one recording."""
        state = self._state.narrow(0, rows)
        for output in self.outputs:
            self._step(replace(state, output=output[:rows]), kv_len, mode)

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """What warm-ups write to the state and to the scratch slots is put back."""
        scratch = self._cache.kv[..., self._cache.scratch_slot, :]
        with self.on_stream():
            saved, saved_scratch, active = self._state.snapshot(), scratch.clone(), self._state.active
            active.fill_(False)  # so that the warm-up writes to the scratch slots only
        try:
            with no_garbage_collection():
                yield
        finally:
            with self.on_stream():
                self._state.restore(saved)
                scratch.copy_(saved_scratch)

    def find(self, rows: int, kv_len: int, mode: Mode) -> Key | None:
        """The smallest recording that rows and kv_len fit in, or None."""
        row_index = bisect_left(self._batch_sizes, rows)
        kv_index = bisect_left(self._kv_lengths, kv_len)
        if row_index == len(self._batch_sizes) or kv_index == len(self._kv_lengths):
            return None
        key = (self._batch_sizes[row_index], self._kv_lengths[kv_index], mode)
        return key if key in self._recordings else None

    def step(self, rows: int, kv_len: int, mode: Mode, live: int | None = None) -> None:
        """`steps` decode steps of the first `rows` rows, of which `live` (default: all) are active.

        Args:
            kv_len: more than every active row's position, in the last of the steps too.
        """
        key = self.find(rows, kv_len, mode)
        if key is None:
            self.report.eager_steps += 1
            self.report.eager_reasons[self._eager_reason if not self._recordings else "no bucket fits"] += 1
            self._run(rows, kv_len, mode)
        else:
            self.report.replays += 1
            self.report.padded_rows += key[0] - (rows if live is None else live)
            self._recordings[key].replay()

    def make_loop(self, key: Key, tape: Tape) -> Loop:
        """A recording as a loop on the device. Raises: GraphError."""
        assert self._backend is not None
        self.looping = True
        return self._backend.loop(self._recordings[key], self._state.narrow(0, key[0]), tape)

    def retarget(self, step: Step, cache: KVCache, moves: Sequence[Move] = ()) -> None:
        """Point every recording at another cache of the same sizes, or at other tensors, without capturing again.

        Steps launched already are not changed. Only kernels that show their arguments can be edited: `retarget.py`.
        `switch.py` does this for an engine.

        Args:
            step: the same step on the new tensors, for what runs eagerly. It must hold all that the recordings use
                then, and what they go on using.
            cache: the new cache, or the same.
            moves: (old, new) of other tensors, such as weights, of equal shape and dtype.
        Raises: GraphError. Everything is as before then, unless it says that the graphs were dropped.
        """
        if self.looping:
            raise GraphError(
                "the graphs of steps_per_graph='until_done' cannot be pointed at other tensors: give a number"
            )
        started = time.perf_counter()
        moves = [(self._cache.kv, cache.kv), *moves]
        if self._recordings and self._backend is not None:
            self._edit(self._backend, moves)
        else:
            check_moves(moves)
        self._step, self._cache = step, cache
        self.report.retargets += 1
        self.report.retarget_seconds += time.perf_counter() - started

    def _edit(self, backend: Backend, moves: list[Move]) -> None:
        try:
            with backend.on_stream():
                self._editor = self._editor or backend.editor(list(self._recordings.values()))
                self._editor.retarget(moves)
        except GraphError:
            raise
        except BaseException as error:  # some kernels may be edited and others not: no replay would be right
            self._drop()
            self.report.enabled, self._eager_reason = False, "retarget failed"
            if not isinstance(error, Exception):
                raise
            raise GraphError(
                f"half of a change of the graphs could not be taken back ({error}), so the graphs were dropped: steps "
                "run eagerly from here on; make the engine anew"
            ) from error

    def _drop(self) -> None:
        self._editor = None
        self._recordings.clear()

    def close(self) -> None:
        """Drop the recordings, before the memory that they point at."""
        self._drop()
        if self._backend is not None:
            self._backend.close()
        self._backend = None


def check_graphs(graphs: str, has_gpu: bool) -> None:
    """Refuse an impossible `graphs` option, before anything is loaded. Raises ConfigError or GraphError."""
    if graphs not in ("auto", "on", "off"):
        raise ConfigError(f"graphs must be 'auto', 'on' or 'off', not {graphs!r}")
    if graphs == "on" and not has_gpu:
        raise GraphError("graphs='on' needs a CUDA device: use graphs='auto', or device='cuda' on a machine with a GPU")


def make_runner(
    step: Step,
    state: DecodeState,
    cache: KVCache,
    graphs: str,
    backend: Backend | None,
    progress: Callable[[int, int], None] | None = None,
    kv_lengths: list[int] | None = None,
    prefills: "PrefillRunner | None" = None,
    steps: int = 1,
) -> GraphRunner:
    """A runner that has captured what `graphs` ("auto", "on" or "off") asks for.

    Without a backend there is nothing to capture on: "auto" runs eagerly, "on" raises. If a capture fails, "auto" warns
    and runs that part eagerly, "on" raises `GraphError`.

    Args:
        prefills: captured too, before the steps, which are smaller.
    """
    check_graphs(graphs, has_gpu=backend is not None)
    reason = "graphs are off" if graphs == "off" else "no CUDA device"
    runner = GraphRunner(step, state, cache, backend, reason, kv_lengths, 1 if graphs == "off" else steps)
    if prefills is not None:
        prefills.report = runner.report
    if graphs == "off":
        return runner
    try:
        if prefills is not None:
            prefills.capture(progress)
    except GraphError as error:
        if graphs == "on":
            raise
        warnings.warn(f"reading prompts without CUDA graphs: {error}", RuntimeWarning, stacklevel=2)
    try:
        runner.capture(progress)
    except GraphError as error:
        if graphs == "on":
            if prefills is not None:
                prefills.close()
            raise
        warnings.warn(f"decoding without CUDA graphs: {error}", RuntimeWarning, stacklevel=2)
        runner._eager_reason = "capture failed"
    return runner

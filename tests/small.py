"""A small random model and a graph backend that only pretends: the runtime in milliseconds, without a GPU."""

import gc
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from minillm.cache import KVCache
from minillm.config import ModelConfig
from minillm.engine import Engine
from minillm.errors import GraphError
from minillm.model import Llama
from minillm.readback import Tape
from minillm.state import DecodeState
from minillm.weights import allocate, randomise

CONFIG = ModelConfig.from_dict(
    dict(
        model_type="llama", vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024,
    )
)  # fmt: skip
CPU = torch.device("cpu")


class FakeRecording:
    def __init__(self, step: Callable[[], None]) -> None:
        self.replay = step


class FakeLoop:
    """Makes `pace` steps whenever the host looks whether it has ended."""

    def __init__(self, step: Callable[[], None], state: DecodeState, tape: Tape, pace: int) -> None:
        self.step, self.state, self.tape, self.pace = step, state, tape, pace
        self.over, self.launches, self.closed = True, 0, False

    def launch(self) -> None:
        assert self.over
        assert not self.closed
        assert self.tape.done == 0
        self.over, self.launches = False, self.launches + 1

    def ended(self) -> bool:
        for _ in range(self.pace):
            if self.over:
                break
            self._turn()
        return self.over

    def _turn(self) -> None:
        self.step()
        line, tape = int(self.tape.done), self.tape
        tape.ring[line, : self.state.output.numel()] = self.state.output.view(-1)
        tape.done += 1
        self.over = bool(tape.halt) or not self.state.active.any() or line + 1 == len(tape.ring)

    def wait(self) -> None:
        while not self.over:
            self._turn()

    def close(self) -> None:
        assert self.over
        self.closed = True


class FakeBackend:
    """Replays by running the step again. Keeps a log, and can fail at the k-th capture.

    Args:
        pace: steps that a loop makes between two looks of the host; None: there are no loops here.
    """

    def __init__(self, fail_at: int | None = None, pieces: int = 1, pace: int | None = None) -> None:
        self.pieces, self.pace, self.loops = pieces, pace, list[FakeLoop]()
        self.log: list[str] = []
        self.captures = 0
        self.fail_at = fail_at

    def warm_up(self, step: Callable[[], None]) -> None:
        self.log.append("warm-up")
        step()

    def capture(self, step: Callable[[], None]) -> FakeRecording:
        assert not gc.isenabled()
        if self.captures == self.fail_at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        self.captures += 1
        self.log.append("capture")
        return FakeRecording(step)

    def loop(self, recording: FakeRecording, state: DecodeState, tape: Tape) -> FakeLoop:
        if self.pace is None:
            raise GraphError("no loops here")
        self.loops.append(FakeLoop(recording.replay, state, tape, self.pace))
        return self.loops[-1]

    def free_bytes(self) -> int:
        return 5 * 2**20

    def reserved_bytes(self) -> int:
        return 1000 * self.captures

    def on_stream(self) -> AbstractContextManager[object]:
        return nullcontext()

    def close(self) -> None: ...


def parts(
    max_batch_size: int = 4,
    max_seq_len: int = 600,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    config: ModelConfig = CONFIG,
) -> tuple[Llama, KVCache, DecodeState]:
    weights = allocate(config, device, dtype)
    torch.manual_seed(0)
    randomise(weights, 0.3)
    cache = KVCache(config, max_batch_size, max_seq_len, device, dtype)
    return Llama(config, weights, max_seq_len), cache, DecodeState.allocate(max_batch_size, config.vocab_size, device)


class Brake:
    """Holds an engine's decode steps once a row has made `tokens` tokens, while its inbox goes on being served.

    An answer of a small model is done in milliseconds: with this a test can meet it in the middle, at no race.
    """

    def __init__(self, engine: Engine, tokens: int = 3) -> None:
        self._decode, self.held = engine._decode, True

        def decode() -> bool:
            if self.held and any(r is not None and r.enqueued >= tokens for r in engine.rows):
                time.sleep(0.001)
                return False
            return self._decode()

        engine._decode = decode  # type: ignore[method-assign]

    def release(self) -> None:
        self.held = False


def until(condition: Callable[[], object], seconds: float = 60) -> None:
    """Wait for what another thread is about to do."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.001)

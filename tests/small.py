"""A small random model and a graph backend that only pretends: the runtime in milliseconds, without a GPU."""

import gc
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from minillm.cache import KVCache
from minillm.config import ModelConfig
from minillm.engine import Engine
from minillm.model import Llama
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


class FakeBackend:
    """Replays by running the step again. Keeps a log, and can fail at the k-th capture."""

    def __init__(self, fail_at: int | None = None, pieces: int = 1) -> None:
        self.pieces = pieces
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

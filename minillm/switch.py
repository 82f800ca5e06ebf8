"""Target and switch: one engine and one set of graphs, for several caches, or for several fine-tunes of one shape.

    engine = build_engine(model, max_seq_len, options, progress=False)
    mine = Target.of(engine)
    yours = mine.beside()                   # a cache of its own: another conversation, another tenant
    tuned = mine.beside(tuned_weights)      # and other weights
    switch(engine, tuned)                   # what runs from here on runs on them
    switch(engine, mine)                    # and back, where the cache holds what it held

The graphs are edited, not captured again (`retarget.py`), so a switch takes far less time than a capture, and the
memory of one set of graphs. It needs the fused kernels, and the package cuda-bindings. Without graphs nothing of that
is needed.
"""

from dataclasses import dataclass

import torch

from .cache import KVCache
from .engine import Engine
from .errors import GraphError
from .model import Llama
from .prefill_graphs import PrefillRunner
from .prefix import RowMemory
from .retarget import Move
from .step import step_of
from .weights import Weights


@dataclass(frozen=True)
class Target:
    """What an engine works with and on. A cache belongs to the weights that computed what is in it.

    Attributes:
        memory: what each row of the cache holds. prefills: what reads prompts into it, with recordings of its own if
            the engine has such: most of their kernels are cuBLAS's, which cannot be edited.
    """

    model: Llama
    cache: KVCache
    memory: RowMemory
    prefills: PrefillRunner

    @classmethod
    def of(cls, engine: Engine) -> "Target":
        """What the engine works with now."""
        return cls(engine.model, engine.cache, engine.memory, engine.prefills)

    def beside(self, weights: Weights | None = None) -> "Target":
        """A target of the same shapes with a new, empty cache. It records prefills: while no request is open.

        Args:
            weights: None is the same weights; others are of the same config, device and dtype.
        """
        cache = self.cache.another()
        model = self.model if weights is None else self.model.with_weights(weights)
        return Target(model, cache, RowMemory(cache, self.memory.enabled), self.prefills.beside(model, cache))


def switch(engine: Engine, target: Target) -> None:
    """Have an engine without open requests work with another target, in the thread that owns the engine.

    Raises: GraphError if requests are open, if the target is of another engine, or if the graphs cannot be pointed
        there; the engine goes on as before.
    """
    if engine.busy:
        raise GraphError(f"requests are open: {engine.open}; let them end, or cancel them, before a switch")
    if target.model.rope is not engine.model.rope or target.model.fused is not engine.model.fused:
        raise GraphError(
            "the target is of another engine: the graphs go on using the rotary table and the scratch memory of this "
            "one, so give a target that `beside` has made of its own"
        )
    if engine.device.type == "cuda":
        # the target may have been made on another stream; and what is left behind may be freed when this returns
        torch.cuda.synchronize(engine.device)
    engine.runner.retarget(
        step_of(target.model, target.cache), target.cache, weight_moves(engine.model.weights, target.model.weights)
    )
    engine.model, engine.cache, engine.memory = target.model, target.cache, target.memory
    engine.prefills = target.prefills


def weight_moves(now: Weights, then: Weights) -> list[Move]:
    """What to move for other weights of the same config. Raises: GraphError if they are not."""
    old, new = now.tensors(), then.tensors()
    if len(old) != len(new):
        raise GraphError(f"the weights are {len(new)} tensors, and those in use {len(old)}: give weights of one config")
    return list(zip(old, new, strict=True))

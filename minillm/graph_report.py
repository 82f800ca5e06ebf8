"""GraphReport: what was recorded, what that took, and what ran how since. `llm.graph_report()` gives it."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class GraphReport:
    """What the runner did. Bytes are those of the pool, capture seconds those of warm-up and capture.

    A replay is one launch: of a step, of several, or of a loop.

    Attributes:
        pieces: CUDA graphs in each of the `graphs` recordings.
        retargets, retarget_seconds: how often they were pointed at other tensors, and for how long in all.
    """

    enabled: bool
    batch_sizes: list[int] = field(default_factory=list)
    kv_lengths: list[int] = field(default_factory=list)
    graphs: int = 0
    pieces: int = 1
    capture_seconds: float = 0.0
    pool_bytes: int = 0
    retargets: int = 0
    retarget_seconds: float = 0.0
    replays: int = 0
    padded_rows: int = 0
    eager_steps: int = 0
    eager_reasons: Counter[str] = field(default_factory=Counter)
    prefill_lengths: list[int] = field(default_factory=list)
    prefill_replays: int = 0
    eager_prefills: int = 0

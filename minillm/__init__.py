"""minillm: a minimal Llama runtime. A static KV cache, and every decode step one CUDA Graph replay.

from minillm import LLM, SamplingParams

with LLM("path/or/hub-id") as llm:
    print(llm.generate("Once upon a time", SamplingParams(max_tokens=64)).text)
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .answer import Chunk as Chunk
    from .answer import Completion as Completion
    from .answer import Stats as Stats
    from .errors import MinillmError as MinillmError
    from .errors import QueueFullError as QueueFullError
    from .handle import Handle as Handle
    from .llm import LLM as LLM
    from .sampling import SamplingParams as SamplingParams

__version__ = "0.1.0"

_HOME = {
    "LLM": "llm",
    "Completion": "answer",
    "Stats": "answer",
    "Chunk": "answer",
    "Handle": "handle",
    "SamplingParams": "sampling",
    "MinillmError": "errors",
    "QueueFullError": "errors",
}
__all__ = [
    "LLM", "Chunk", "Completion", "Handle", "MinillmError", "QueueFullError", "SamplingParams", "Stats", "__version__",
]  # fmt: skip


def __getattr__(name: str) -> object:
    """Import on first use, so that `import minillm` and `--help` do not wait for torch."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)

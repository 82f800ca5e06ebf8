"""Every error that minillm raises on purpose: one sentence that says what, which numbers, and what to do.

All are `ValueError`s, so an app that guards against bad input needs to know nothing else. The command line prints the
sentence and exits with status 2. A fault that is not one of these is a bug.
"""


class MinillmError(ValueError):
    """The base of all errors below."""


class ConfigError(MinillmError):
    """config.json, generation_config.json or an option says something that cannot be run."""


class CheckpointError(MinillmError):
    """The weights on disk are missing, broken, incomplete or unexpected."""


class TokenizerError(MinillmError):
    """There is no usable tokenizer or chat template, or a text or token id that it cannot take."""


class RequestError(MinillmError):
    """One request asks for the impossible: an empty or too long prompt, ids out of range, sampling values."""


class MemoryLimitError(MinillmError):
    """Weights, cache or graphs need more memory than is free."""


class GraphError(MinillmError):
    """A CUDA Graph was asked for and cannot be captured, or cannot be pointed at other tensors."""


class QueueFullError(MinillmError):
    """As many requests wait as `max_waiting` allows. The same request may be given again later."""


class EngineError(MinillmError):
    """A step of all requests failed (the device, its memory, a kernel), and the open ones are lost through no fault
    of theirs."""

"""From a model directory to a model on a device: which device, which dtype, how long a cache, and does it all fit.

Everything is settled before anything large is allocated, so an answer of "it does not fit" costs nothing and names the
numbers: an out-of-memory error halfway would say neither.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from .cache import KVCache
from .checkpoint import Checkpoint
from .config import ModelConfig
from .errors import ConfigError, MemoryLimitError
from .kernels.fused import FusedOps
from .model import Llama
from .weights import allocate, destinations, weight_bytes

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Plan:
    """What will be loaded where, and the bytes that it takes."""

    device: torch.device
    dtype: torch.dtype
    max_batch_size: int
    max_seq_len: int
    weight_bytes: int
    cache_bytes: int
    free_bytes: int


def pick_device(name: str | torch.device) -> torch.device:
    """ "auto" is the GPU if there is one, else the CPU. `ConfigError` if the device is unknown or absent."""
    if str(name) == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"unknown device {name!r}: use 'auto', 'cpu', 'cuda', 'cuda:N' or 'mps'") from error
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not 0 <= (device.index or 0) < count:  # PyTorch wraps large numbers around to negative ones
            raise ConfigError(f"device {name!r} was asked for, and PyTorch sees {count} CUDA devices: use device='cpu'")
        return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("device 'mps' was asked for, and PyTorch has none here: use device='cpu'")
    if device.type not in ("cpu", "mps") or device.index:
        raise ConfigError(f"device {name!r} is not supported: use 'auto', 'cpu', 'cuda', 'cuda:N' or 'mps'")
    return device


def pick_dtype(name: str | torch.dtype, config: ModelConfig, device: torch.device) -> torch.dtype:
    """ "auto" is float32 on a CPU, where it is the exact and usually the faster one, else what the checkpoint says."""
    if str(name) == "auto":
        return torch.float32 if device.type == "cpu" else DTYPES[config.dtype]
    dtype = DTYPES.get(str(name).removeprefix("torch."))
    if dtype is None:
        raise ConfigError(f"unknown dtype {name!r}: use 'auto', 'float32', 'float16' or 'bfloat16'")
    return dtype


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on the device, as far as the system tells."""
    if device.type == "cuda":
        # what PyTorch keeps for itself without using it can be used again
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 1 << 62


def make_plan(
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    max_batch_size: int,
    max_seq_len: int | None,
    free: int | None = None,
) -> Plan:
    """Settle the length of the cache, and check that weights and cache fit. Nothing is allocated.

    Args:
        max_seq_len: None takes the model's whole context, or the largest multiple of 256 whose cache leaves half
            of what the weights leave free.
        free: bytes free on the device; None asks it.
    Raises: ConfigError for impossible sizes, MemoryLimitError if it does not fit.
    """
    if isinstance(max_batch_size, bool) or not isinstance(max_batch_size, int) or max_batch_size < 1:
        raise ConfigError(f"max_batch_size must be a whole number of at least 1, not {max_batch_size!r}")
    context = config.max_position_embeddings
    free = free_bytes(device) if free is None else free
    weights = weight_bytes(config, dtype)
    per_token = KVCache.bytes_per_token(config, dtype) * max_batch_size
    if max_seq_len is None:
        affordable = max((free - weights) // 2 // per_token, 0) // 256 * 256
        max_seq_len = min(context, max(affordable, 256))
    elif isinstance(max_seq_len, bool) or not isinstance(max_seq_len, int) or not 1 <= max_seq_len <= context:
        raise ConfigError(f"max_seq_len must be from 1 to the model's context of {context}, not {max_seq_len!r}")
    cache = per_token * (max_seq_len + 1)
    if weights + cache > free:
        raise MemoryLimitError(
            f"the weights take {_gib(weights)} and a cache of {max_batch_size} x {max_seq_len} tokens {_gib(cache)}, "
            f"but {device} has {_gib(free)} free: lower max_batch_size or max_seq_len, or use a smaller dtype"
        )
    return Plan(device, dtype, max_batch_size, max_seq_len, weights, cache, free)


def load_model(path: Path, config: ModelConfig, plan: Plan, progress: bool = False) -> Llama:
    """Allocate the weights and stream the checkpoint into them, tensor by tensor."""
    checkpoint = Checkpoint(path)
    weights = allocate(config, plan.device, plan.dtype)
    optional = ("lm_head.weight",) if config.tie_word_embeddings else ()
    with tqdm(
        total=plan.weight_bytes,
        desc=f"loading {path.name}",
        unit="B",
        unit_scale=True,
        disable=not progress,
        leave=False,
    ) as bar:
        checkpoint.load(destinations(config, weights), progress=bar.update, optional=optional)
    return Llama(config, weights, plan.max_seq_len, pick_kernels(config, plan))


def pick_kernels(config: ModelConfig, plan: Plan) -> FusedOps | None:
    """The fused kernels where they cover this model on this device, else None: the plain operations."""
    if FusedOps.supports(config, plan.device, plan.dtype) is not None:
        return None
    return FusedOps(config, plan.max_batch_size, plan.max_seq_len, plan.device)


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"

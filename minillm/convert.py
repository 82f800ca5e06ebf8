"""From one GGUF file to a Hugging Face directory: `python -m minillm.convert FILE.gguf DIR`.

GGUF is the format of llama.cpp: weights in blocks of a few bits, one file for everything. minillm runs safetensors, so
a file is converted once. Three things happen to a weight:

1. It is dequantised to the numbers that its blocks stand for. Nothing is requantised.
2. The rows of q and k are put back into half-split order. Rotary embedding turns pairs of coordinates. llama.cpp pairs
   (0, 1), (2, 3), ... of a head; Hugging Face pairs (0, d/2), (1, d/2 + 1), ... The angles are the same, so a model
   moves from one to the other by reordering rows. Forget it, or use the wrong number of heads for k, and the text is
   gibberish.
3. It gets its Hugging Face name and is written out before the next one is read: memory stays at one tensor, however big
   the model. safetensors is simple enough to be streamed: 8 bytes of length, a JSON header, the raw bytes.

Everything is written into a scratch directory beside the target and renamed at the end: the target is whole or absent.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .command import Parser, leave, run, write
from .errors import CheckpointError, ConfigError
from .gguf_config import ROPE_FREQS, llama_config, open_gguf
from .gguf_tokenizer import end_token_ids, special_token_ids, write_tokenizer

if TYPE_CHECKING:
    import torch

DTYPES = {"bfloat16": ("BF16", 2), "float16": ("F16", 2), "float32": ("F32", 4)}  # safetensors name, bytes
SHARD_BYTES = 4 * 1000**3
CHUNK_ELEMENTS = 1 << 24  # dequantised at a time: 64 MiB in float32


@dataclass(frozen=True)
class Weight:
    """One tensor to write: its Hugging Face name and shape, and where it comes from."""

    name: str
    shape: tuple[int, ...]
    source: str  # the tensor's name in the GGUF file
    heads: int = 0  # whose rows go back to half-split order; 0: rows stay
    zeros: bool = False  # a bias that the file leaves out although its neighbours have one

    def nbytes(self, dtype: str) -> int:
        return prod(self.shape) * DTYPES[dtype][1]


def convert_gguf(
    source: Path, target: Path, dtype: str = "bfloat16", progress: bool = False, shard_bytes: int = SHARD_BYTES
) -> Path:
    """Write the llama-architecture model in the GGUF file `source` as a Hugging Face directory `target`; return it.

    dtype: of the written weights: bfloat16, float16 or float32. progress: draw a bar on stderr if that is a terminal.
    shard_bytes: a model larger than this is split into several safetensors files with an index.
    Raises ConfigError, CheckpointError or TokenizerError for what cannot be read, represented or written; then nothing
    is left behind.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"unknown dtype {dtype!r}: use one of {', '.join(DTYPES)}")
    reader, metadata = open_gguf(Path(source))
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    shapes = {name: tuple(int(n) for n in reversed(tensor.shape)) for name, tensor in tensors.items()}
    rope_freqs = tensors[ROPE_FREQS].data.tolist() if ROPE_FREQS in tensors else []
    config = llama_config(metadata, shapes, rope_freqs)
    weights = list(_weights(config, shapes))
    _check(weights, shapes)
    with new_directory(Path(target)) as directory:
        _write_configs(config, metadata, dtype, directory)
        write_tokenizer(metadata, directory, config["max_position_embeddings"])
        _write_weights(weights, tensors, dtype, shard_bytes, directory, progress)
    return Path(target)


@contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """A directory to fill, which becomes `target` if the block ends well and vanishes if it does not.

    Raises CheckpointError when `target` is there and not empty, or cannot be written.
    """
    try:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise CheckpointError(f"{target}: exists and is not an empty directory; choose another, or remove it")
        parent = target.absolute().parent
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".minillm-", dir=parent) as scratch:
            directory = Path(scratch) / "model"
            directory.mkdir()
            yield directory
            if target.exists():
                target.rmdir()  # empty, or this fails; Windows does not rename onto a directory
            directory.rename(target)
    except OSError as error:
        raise CheckpointError(f"{target}: cannot write it ({error.strerror or error})") from error


def _weights(config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> Iterator[Weight]:
    """Every tensor that a Llama of this config has, in the order of a forward pass."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    q_rows, kv_rows = heads * config["head_dim"], kv_heads * config["head_dim"]
    projections = (  # name in Hugging Face, in GGUF, [out, in], heads to reorder, has a bias
        ("self_attn.q_proj", "attn_q", (q_rows, hidden), heads, config["attention_bias"]),
        ("self_attn.k_proj", "attn_k", (kv_rows, hidden), kv_heads, config["attention_bias"]),
        ("self_attn.v_proj", "attn_v", (kv_rows, hidden), 0, config["attention_bias"]),
        ("self_attn.o_proj", "attn_output", (hidden, q_rows), 0, config["attention_bias"]),
        ("mlp.gate_proj", "ffn_gate", (inner, hidden), 0, config["mlp_bias"]),
        ("mlp.up_proj", "ffn_up", (inner, hidden), 0, config["mlp_bias"]),
        ("mlp.down_proj", "ffn_down", (hidden, inner), 0, config["mlp_bias"]),
    )
    yield Weight("model.embed_tokens.weight", (config["vocab_size"], hidden), "token_embd.weight")
    for i in range(config["num_hidden_layers"]):
        yield Weight(f"model.layers.{i}.input_layernorm.weight", (hidden,), f"blk.{i}.attn_norm.weight")
        yield Weight(f"model.layers.{i}.post_attention_layernorm.weight", (hidden,), f"blk.{i}.ffn_norm.weight")
        for name, source, shape, reordered, bias in projections:
            yield Weight(f"model.layers.{i}.{name}.weight", shape, f"blk.{i}.{source}.weight", reordered)
            if bias:
                source_bias = f"blk.{i}.{source}.bias"
                zeros = source_bias not in shapes
                yield Weight(f"model.layers.{i}.{name}.bias", shape[:1], source_bias, reordered, zeros)
    yield Weight("model.norm.weight", (hidden,), "output_norm.weight")
    if not config["tie_word_embeddings"]:
        yield Weight("lm_head.weight", (config["vocab_size"], hidden), "output.weight")


def _check(weights: list[Weight], shapes: dict[str, tuple[int, ...]]) -> None:
    """Everything is there in the right shape, and nothing else is.

    `rope_freqs` is in the config by now, and the rotary buffers of old files hold what the config says anyway.
    """
    for weight in weights:
        if weight.zeros:
            continue
        if weight.source not in shapes:
            raise CheckpointError(f"the GGUF file has no tensor {weight.source}")
        if shapes[weight.source] != weight.shape:
            found = shapes[weight.source]
            raise CheckpointError(
                f"tensor {weight.source} has shape {found}, but the metadata calls for {weight.shape}"
            )
    extra = set(shapes) - {weight.source for weight in weights} - {ROPE_FREQS}
    extra = {name for name in extra if not re.fullmatch(r"blk\.\d+\.attn_rot_embd(\.weight)?", name)}
    if extra:
        raise CheckpointError(f"the GGUF file has the unexpected tensor {min(extra)} ({len(extra)} in all)")


def _write_configs(config: dict[str, Any], metadata: dict[str, Any], dtype: str, directory: Path) -> None:
    ids, ends = special_token_ids(metadata), end_token_ids(metadata)
    if len(metadata.get("tokenizer.ggml.tokens", [])) > config["vocab_size"]:
        raise CheckpointError(f"the vocabulary has more tokens than the {config['vocab_size']} rows of the embedding")
    special = {
        "bos_token_id": ids.get("bos"),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": ids.get("pad"),
    }
    texts = {"config.json": {**config, **special, "torch_dtype": dtype}, "generation_config.json": special}
    for name, values in texts.items():
        (directory / name).write_text(json.dumps(values, indent=2) + "\n", "utf-8")


def _write_weights(
    weights: list[Weight], tensors: dict[str, Any], dtype: str, shard_bytes: int, directory: Path, progress: bool
) -> None:
    """Stream every weight into one safetensors file, or into several and an index that says which holds what."""
    from tqdm import tqdm

    shards: list[list[Weight]] = [[]]
    filled = 0
    for weight in weights:
        if shards[-1] and filled + weight.nbytes(dtype) > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(weight)
        filled += weight.nbytes(dtype)
    total = sum(weight.nbytes(dtype) for weight in weights)
    free = shutil.disk_usage(directory).free
    if total > free:
        raise CheckpointError(
            f"the converted weights need {total / 1e9:.1f} GB, but the disk has {free / 1e9:.1f} GB free"
        )

    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        names = ["model.safetensors"]
    else:
        weight_map = {weight.name: name for name, shard in zip(names, shards, strict=True) for weight in shard}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", "utf-8")
    # disable=None: tqdm draws only on a terminal
    with tqdm(total=total, unit="B", unit_scale=True, desc="converting", disable=None if progress else True) as bar:
        for name, shard in zip(names, shards, strict=True):
            for nbytes in _write_shard(shard, tensors, dtype, directory / name):
                bar.update(nbytes)


def _write_shard(weights: list[Weight], tensors: dict[str, Any], dtype: str, path: Path) -> Iterator[int]:
    """One safetensors file, tensor by tensor; yields the bytes of each as it is written."""
    import torch

    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for weight in weights:
        end = offset + weight.nbytes(dtype)
        header[weight.name] = {"dtype": DTYPES[dtype][0], "shape": weight.shape, "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header).encode("utf-8")
    encoded += b" " * (-len(encoded) % 8)  # so that the data begins aligned
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for weight in weights:
            if weight.zeros:
                tensor = torch.zeros(weight.shape, dtype=getattr(torch, dtype))
            else:
                tensor = _dequantize(tensors[weight.source], weight.shape, getattr(torch, dtype))
            if weight.heads:
                tensor = half_split_rows(tensor, weight.heads)
            file.write(tensor.flatten().view(torch.uint8).numpy().data)
            yield weight.nbytes(dtype)


def _dequantize(source: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The values of a GGUF tensor in `shape` [out, in] (or [out]). Only a chunk of rows exists in float32 at a time."""
    import numpy as np
    import torch
    from gguf import dequantize

    packed = source.data.reshape(-1, source.data.shape[-1])  # [rows, bytes or values of one row]
    tensor = torch.empty(len(packed), shape[-1], dtype=dtype)
    step = max(1, CHUNK_ELEMENTS // shape[-1])
    for start in range(0, len(packed), step):
        try:
            values = dequantize(packed[start : start + step], source.tensor_type)
        except NotImplementedError as error:
            kind = source.tensor_type.name
            raise CheckpointError(f"tensor {source.name}: the gguf package cannot dequantise {kind}") from error
        tensor[start : start + step] = torch.from_numpy(np.array(values, dtype=np.float32))
        if not tensor[start : start + step].isfinite().all():
            hint = "; use --dtype bfloat16" if dtype == torch.float16 else ""
            raise CheckpointError(f"tensor {source.name} has values that are not finite in {dtype}{hint}")
    return tensor.reshape(shape)


def half_split_rows(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a q or k projection from interleaved rotary order (llama.cpp) to half-split order (Hugging Face).

    tensor: [heads * head_dim, in] or [heads * head_dim]. In a head, row 2 i + j goes to row j * head_dim / 2 + i.
    """
    paired = tensor.reshape(heads, -1, 2, *tensor.shape[1:])  # [heads, head_dim / 2, 2, in]
    return paired.transpose(1, 2).reshape(tensor.shape)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: 0 when converted, 2 with one line on stderr when not, 130 when interrupted."""
    parser = Parser("minillm.convert", "Convert a llama-architecture GGUF file to a Hugging Face directory.")
    parser.add_argument("source", type=Path, metavar="FILE.gguf", help="the file to read")
    parser.add_argument(
        "target", type=Path, metavar="DIR", help="the directory to make; it must not exist, or be empty"
    )
    parser.add_argument(
        "--dtype", default="bfloat16", choices=list(DTYPES), help="of the weights (default: %(default)s)"
    )

    def convert() -> int:
        options = parser.parse_args(arguments)
        write(f"{convert_gguf(options.source, options.target, options.dtype, progress=True)}\n")
        return 0

    return run(convert)


if __name__ == "__main__":
    leave(main())

"""Find the fastest launch shapes of the fused kernels on this GPU, and write them to minillm/kernels/table.py.

    python examples/tune_kernels.py --model llama-3.2-1b --rows 1 2 4          # about three minutes
    python examples/tune_kernels.py --dry-run                                  # all models; print, write nothing

A shape is judged by the time of whole decode steps in a CUDA Graph, never by a kernel alone: repeated alone, a small
matrix stays in the L2 cache, which it never does in a model, and what overlaps its neighbours is not seen. One kernel
is varied at a time, and a change is kept if it saves at least 0.2 % of the step. Weights are random;
layers are as many as the model has, so that nothing but the cache hierarchy of a real step is measured.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from minillm.cache import KVCache
from minillm.config import ModelConfig
from minillm.kernels import launch, table
from minillm.kernels.fused import FusedOps
from minillm.state import DecodeState
from minillm.weights import allocate, randomise

MODELS = {  # layers, heads, kv heads, head_dim, hidden, intermediate, vocabulary
    "smollm2-135m": (30, 9, 3, 64, 576, 1536, 49152),
    "llama-3.2-1b": (16, 32, 8, 64, 2048, 8192, 128256),
    "llama-2-7b": (32, 32, 32, 128, 4096, 11008, 32000),
    "llama-3.1-8b": (32, 32, 8, 128, 4096, 14336, 128256),
}
CONTEXT = 512  # positions at which steps are timed: CONTEXT to CONTEXT + the number of steps
GAIN = 0.998  # a new shape must take less than this share of the time


def model_config(name: str) -> ModelConfig:
    layers, heads, kv_heads, head_dim, hidden, inter, vocab = MODELS[name]
    return ModelConfig.from_dict(
        {
            "model_type": "llama", "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "head_dim": head_dim, "hidden_size": hidden, "intermediate_size": inter,
            "vocab_size": vocab, "max_position_embeddings": 8192, "tie_word_embeddings": True,
        }
    )  # fmt: skip


class DecodeBench:
    """A decode step of `rows` rows with all that surrounds it, recorded anew for each set of shapes."""

    def __init__(self, config: ModelConfig, rows: int) -> None:
        self.config, self.rows, self.device = config, rows, torch.device("cuda")
        torch.manual_seed(0)
        self.weights = allocate(config, self.device, torch.bfloat16)
        randomise(self.weights)
        self.cache = KVCache(config, rows, 1024, self.device, torch.bfloat16)
        self.cache.kv.normal_()
        self.state = DecodeState.allocate(rows, config.vocab_size, self.device)
        angles = torch.rand(1024, config.head_dim // 2, device=self.device) * 6
        self.rope = torch.polar(torch.ones_like(angles), angles)

    def reset(self) -> None:
        self.state.positions.fill_(CONTEXT)
        self.state.limits.fill_(10**9)
        self.state.active.fill_(True)

    @torch.inference_mode()
    def step(self, ops: FusedOps) -> None:
        state, eps = self.state, self.config.rms_norm_eps
        positions = state.positions + 0  # a copy: the end of the step advances the original
        x, rope = self.weights.embed[state.tokens], self.rope[positions]
        attend = ops.row_attention(positions, self.cache.max_seq_len)
        for index, w in enumerate(self.weights.layers):
            kv = self.cache.layer(index)
            q = ops.qkv_rope_append(x, w, rope, eps, kv, state.rows, positions, self.config.head_dim)
            x = ops.linear_residual(attend(q, kv), w.o, None, x)
            x = ops.linear_residual(ops.gate_up_silu(x, w, eps), w.down, None, x)
        ops.greedy_finish(ops.norm_logits(x, self.weights.norm, self.weights.lm_head, eps), state)

    def milliseconds(self, steps: int = 100, repeats: int = 5) -> float:
        """Median time of a step with the shapes that are in the table now; infinite if a kernel cannot be launched."""
        ops = FusedOps(self.config, self.rows, self.cache.max_seq_len, self.device, torch.bfloat16)
        graph = torch.cuda.CUDAGraph()
        try:
            self.reset()
            self.step(ops)
            with torch.cuda.graph(graph):
                self.step(ops)
        except Exception as error:  # too many registers or too much shared memory for this shape
            print(f"    refused: {str(error).splitlines()[0][:90]}")
            return float("inf")
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        times = []
        for _ in range(repeats + 1):
            self.reset()
            begin.record()
            for _ in range(steps):
                graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / steps)
        return statistics.median(times[1:])  # the first warms up


def matrices(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """(columns, rows) of each matrix of a step."""
    hidden, inter, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q = config.num_attention_heads * head_dim
    return {
        "gate_up": (hidden, 2 * inter),
        "down": (inter, hidden),
        "qkv": (hidden, q + 2 * config.num_key_value_heads * head_dim),
        "o": (q, hidden),
        "logits": (hidden, config.vocab_size),
    }


def tiles(columns: int, m: int) -> Iterator[tuple[int, int, int]]:
    """Shapes worth a trial for a matrix of so many columns."""
    if m > 4:  # tensor cores
        yield from ((rows, width, warps) for rows in (16, 32, 64) for width in (64, 128, 256) for warps in (2, 4, 8))
        return
    for width in (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384):
        padded = -(-columns // width) * width
        if padded > 1.8 * columns or padded // width > 16:
            continue
        for rows in (2, 4, 8, 16):
            for warps in (2, 4, 8):
                if 16 <= rows * width // (32 * warps) <= 128 and rows * width >= 2048:  # weights a thread
                    yield rows, width, warps


def improve(name: str, entries: dict, key: tuple, choices: Iterable[tuple], time_it: Callable[[], float]) -> None:
    """Put the fastest of the choices into the table."""
    best, fastest = entries.get(key), time_it()
    before = fastest
    for choice in choices:
        entries[key] = choice
        now = time_it()
        if now < fastest * GAIN:
            best, fastest = choice, now
    if best is None:
        entries.pop(key, None)  # the rule of launch.py does as well
    else:
        entries[key] = best
    print(f"  {name:9} {key}: {best or 'by rule'}, step {before:.4f} -> {fastest:.4f} ms", flush=True)


def tune(model: str, rows: int, rounds: int) -> None:
    config = model_config(model)
    bench = DecodeBench(config, rows)
    print(f"{model}, {rows} rows: {bench.milliseconds():.4f} ms a step before", flush=True)
    key = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    for _ in range(rounds):
        for name, (columns, size) in matrices(config).items():
            m = launch.row_bucket(rows)
            improve(name, table.TILES, (columns, size, m), tiles(columns, m), bench.milliseconds)
        if rows == 1:
            choices = ((s, t, w) for s in (4, 8, 16, 32) for t in (32, 64, 128) for w in (2, 4, 8) if t * w >= 128)
            improve("attention", table.ATTENTION, key, choices, bench.milliseconds)


def write_table(path: Path) -> None:
    where = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    text = f'"""{table.__doc__}"""\n\nMEASURED_ON = "{where}"\n\n'
    text += "TILES: dict[tuple[int, int, int], tuple[int, int, int]] = {\n"
    text += "    # (columns K, rows N of the matrix, rows of activations): (rows a program, columns a tile, warps)\n"
    text += "".join(f"    {key}: {value},\n" for key, value in sorted(table.TILES.items()))
    text += "}\n\nATTENTION: dict[tuple[int, int, int], tuple[int, int, int]] = {\n"
    text += "    # (query heads, kv heads, head_dim): (splits, tokens a tile, warps)\n"
    text += "".join(f"    {key}: {value},\n" for key, value in sorted(table.ATTENTION.items())) + "}\n"
    path.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description="Tune the launch shapes of minillm's fused kernels on this GPU.")
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rows", nargs="+", type=int, choices=(1, 2, 4, 8, 16, 32), default=[1, 2, 4, 8, 32])
    parser.add_argument("--rounds", type=int, default=1, help="how often all kernels are gone through (default 1)")
    parser.add_argument("--output", type=Path, default=Path(table.__file__), help="the file to write")
    parser.add_argument("--dry-run", action="store_true", help="print what would be written")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("tuning needs a CUDA device")
    started = time.perf_counter()
    for model in args.model:
        for rows in args.rows:
            tune(model, rows, args.rounds)
            torch.cuda.empty_cache()
            if not args.dry_run:
                write_table(args.output)  # after each, so that an interrupted run is not lost
    print(f"{time.perf_counter() - started:.0f} s")
    if args.dry_run:
        print(table.TILES, table.ATTENTION, sep="\n")


if __name__ == "__main__":
    main()

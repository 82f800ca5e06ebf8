"""Find the fastest launch shapes of the fused kernels on this GPU, and write them to minillm/kernels/table.py.

    python -m examples.tune_kernels --model llama-3.2-1b --rows 1 8     # under a minute
    python -m examples.tune_kernels --seconds 600 --dry-run             # all models; print, write nothing

What is tried is in `launch_trials.py`. A shape is judged by the time of whole decode steps in a CUDA Graph, never by a
kernel alone: repeated alone, a small matrix stays in the L2 cache, which it never does in a model, and what overlaps
its neighbours is not seen. One kernel is varied at a time, last when its programs allow the next kernel (`Tile.late`),
and a change is kept if it saves at least 0.2 % of the step, twice. Weights are random; layers are as many as the model
has, so that nothing but the cache hierarchy of a real step is measured.

Compiling takes longer than measuring. So worker processes compile the shapes ahead, in parallel, into the cache that
Triton keeps on disk (but for the late ones, which follow from what is found): they call the operations on tensors that
have shapes and no memory.
"""

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from examples.launch_trials import Shape, Trial, trials
from minillm.cache import KVCache
from minillm.config import ModelConfig
from minillm.kernels import launch, table
from minillm.kernels.fused import FusedOps
from minillm.kernels.fused_finish import limits
from minillm.model import Llama
from minillm.sampling import Mode
from minillm.state import DecodeState
from minillm.step import decode_step
from minillm.weights import allocate, randomise

MODELS = {  # layers, heads, kv heads, head_dim, hidden, intermediate, vocabulary
    "smollm2-135m": (30, 9, 3, 64, 576, 1536, 49152),
    "llama-3.2-1b": (16, 32, 8, 64, 2048, 8192, 128256),
    "llama-2-7b": (32, 32, 32, 128, 4096, 11008, 32000),
    "llama-3.1-8b": (32, 32, 8, 128, 4096, 14336, 128256),
}
SLOTS = 1024  # of the cache
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
        self.cache = KVCache(config, rows, SLOTS, self.device, torch.bfloat16)
        self.cache.kv.normal_()
        self.state = DecodeState.allocate(rows, config.vocab_size, self.device)

    def reset(self) -> None:
        self.state.positions.fill_(CONTEXT)
        self.state.limits.fill_(10**9)
        self.state.active.fill_(True)

    def milliseconds(self, stop_at: float = float("inf"), steps: int = 30, repeats: int = 3) -> float:
        """Median time of a step with the shapes that are in the table now; infinite if a kernel cannot be launched.

        Args:
            stop_at: a time above this is measured once, roughly.
        """
        ops = FusedOps(self.config, self.rows, SLOTS, self.device)
        model = Llama(self.config, self.weights, SLOTS, ops)
        graph = torch.cuda.CUDAGraph()
        try:
            self.reset()
            decode_step(model, self.cache, self.state, SLOTS, Mode.GREEDY)
            with torch.cuda.graph(graph):
                decode_step(model, self.cache, self.state, SLOTS, Mode.GREEDY)
        except Exception as error:  # too many registers or too much shared memory for this shape
            print(f"    refused: {str(error).splitlines()[0][:90]}")
            return float("inf")
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

        def run(count: int) -> float:
            self.reset()
            begin.record()
            for _ in range(count):
                graph.replay()
            end.record()
            end.synchronize()
            return begin.elapsed_time(end) / count

        return steady(run, stop_at, steps, repeats)


def steady(run: Callable[[int], float], stop_at: float, steps: int, repeats: int) -> float:
    """Median time of a step; of a few steps, once, if that is above stop_at. run(n): the mean time of n steps."""
    run(4)  # warms up, and pays for the first launch of a graph, which is as long as many short steps
    rough = run(8)
    return rough if rough > stop_at else statistics.median(run(steps) for _ in range(repeats))


def table_of(name: str) -> dict[Shape, Shape]:
    return table.ATTENTION if name == "attention" else table.TILES


def taken(key: Shape) -> launch.Tile:
    """What a launch takes for a matrix now: by the table, or by rule where it has nothing that fits this GPU."""
    capability, memory = limits(torch.device("cuda"))
    return launch.tile(*key, memory=memory, widest=launch.widest(capability))


class CompileOnly(FusedOps):
    """Compiles what it would launch, if the trial is about it."""

    trial: Trial

    def _run(
        self, kernel: Any, grid: tuple[int, ...], warps: int, *args: object, fence: bool = False, **constants: int
    ) -> None:
        name, key, _ = self.trial
        sizes = {value for value in args if isinstance(value, int)}
        if "SPLITS" in constants if name == "attention" else constants.get("K") == key[0] and key[1] in sizes:
            options = {"launch_pdl": True} if self.pdl and not fence else {}
            constants = {**constants, "PDL": self.pdl, "num_warps": warps, "enable_fp_fusion": True}
            kernel.warmup(*args, **constants, **options, grid=grid)


def compile_trial(config: ModelConfig, rows: int, plain_rows: int, trial: Trial) -> None:
    """In a worker process: leave the kernel of one trial in Triton's cache on disk.

    Raises: ValueError if this GPU cannot run the shape, in place of which a launch would take that of the rule.
    """
    launch.PLAIN_ROWS = plain_rows
    name, key, shape = trial
    table_of(name)[key] = shape
    one_layer = replace(config, num_hidden_layers=1)
    meta, dtype = torch.device("meta"), torch.bfloat16
    ops = CompileOnly(one_layer, rows, SLOTS, meta)
    ops.fit(*limits(torch.device("cuda")))
    if name != "attention" and taken(key) != launch.Tile(*shape):
        raise ValueError(f"{shape} does not fit")
    ops.trial = trial
    model = Llama(one_layer, allocate(one_layer, meta, dtype), SLOTS, ops)
    state = DecodeState.allocate(rows, config.vocab_size, meta)
    decode_step(model, KVCache(one_layer, rows, SLOTS, meta, dtype), state, SLOTS, Mode.GREEDY)


def improve(bench: DecodeBench, name: str, found: list[Trial], deadline: float) -> None:
    """Put the fastest of the shapes into the table."""
    key = found[0][1]
    entries = table_of(name)
    before, first, tried = entries.get(key), bench.milliseconds(), 0

    def put(shape: Shape | None) -> None:
        entries.pop(key, None)  # None: the rule of launch.py decides
        if shape is not None:
            entries[key] = shape

    best, fastest = before, first

    def judge(shape: Shape) -> None:
        nonlocal best, fastest, tried
        put(shape)
        tried += 1
        now = bench.milliseconds(stop_at=fastest * 1.03)
        if now < fastest * GAIN:
            best, fastest = shape, now

    for _, _, shape in found:
        if time.perf_counter() < deadline:
            judge(shape)
    for shape in dict.fromkeys((before, best)):  # each once
        if name != "attention" and time.perf_counter() < deadline:
            put(shape)
            tile = taken(key)
            judge(tuple(tile._replace(late=1 - tile.late)))
    if best != before:  # once more, one after the other: a GPU does not run at one speed all the time
        put(before)
        first = bench.milliseconds()
        put(best)
        fastest = bench.milliseconds()
        if fastest >= first * GAIN:
            best, fastest = before, first
    put(best)
    change = f"{before or 'by rule'} -> {best or 'by rule'}"
    print(f"  {name:9} {key}: {change}, step {first:.4f} -> {fastest:.4f} ms, {tried} tried", flush=True)


def tune(model: str, rows: int, compiled: dict[str, list[tuple[Trial, "Future[None]"]]], deadline: float) -> None:
    bench = DecodeBench(model_config(model), rows)
    start, begun = bench.milliseconds(), time.perf_counter()
    for name, found in compiled.items():
        good = [trial for trial, future in found if future.exception() is None]
        if good and time.perf_counter() < deadline:
            improve(bench, name, good, deadline)
    spent = time.perf_counter() - begun
    print(f"{model}, {rows} rows: {start:.4f} -> {bench.milliseconds():.4f} ms a step, {spent:.0f} s", flush=True)


def write_table(path: Path) -> None:
    """All at once, so that the package can always be imported."""
    where = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    text = f'"""{table.__doc__}"""\n\nMEASURED_ON = "{where}"\n\n'
    text += "TILES: dict[tuple[int, ...], tuple[int, ...]] = {\n"
    text += "    # (columns K, rows N of the matrix, rows of activations):\n"
    text += "    #     (rows a program, columns a tile, warps, parts, groups, late)\n"
    text += "".join(f"    {key}: {value},\n" for key, value in sorted(table.TILES.items()))
    text += "}\n\nATTENTION: dict[tuple[int, ...], tuple[int, ...]] = {\n"
    text += "    # (query heads, kv heads, head_dim, rows): (splits, tokens a tile, warps)\n"
    text += "".join(f"    {key}: {value},\n" for key, value in sorted(table.ATTENTION.items())) + "}\n"
    staged = path.with_name(path.name + ".new")
    staged.write_text(text)
    staged.replace(path)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Tune the launch shapes of minillm's fused kernels on this GPU.")
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rows", nargs="+", type=int, choices=range(1, 33), default=[1, 2, 4, 8, 32], metavar="N")
    parser.add_argument("--only", nargs="+", default=[], metavar="KERNEL",
                        choices=("gate_up", "down", "qkv", "o", "attention", "logits"),
                        help="which to tune (default: all)")  # fmt: skip
    parser.add_argument("--plain-rows", type=int, choices=(1, 2, 4), default=launch.PLAIN_ROWS,
                        help="launch.PLAIN_ROWS for this run: tensor cores for more rows")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long, with what was found")
    parser.add_argument("--output", type=Path, default=Path(table.__file__), help="the file to write")
    parser.add_argument("--dry-run", action="store_true", help="print what would be written")
    args = parser.parse_args()
    if not args.seconds > 0:
        parser.error(f"--seconds must be above 0, not {args.seconds:g}")
    if args.output.is_dir() or not args.output.parent.is_dir():
        parser.error(f"--output must be a file in a folder that exists, not {args.output}")
    return args


def main() -> None:
    args = parse()
    started = time.perf_counter()
    launch.PLAIN_ROWS = args.plain_rows
    runs = [(model, rows) for model in args.model for rows in args.rows]
    wanted = [
        {name: found for name, found in trials(model_config(model), rows).items() if name in args.only or not args.only}
        for model, rows in runs
    ]
    if not any(wanted):
        raise SystemExit(f"nothing to tune: attention has shapes for 1 row and for {launch.LONG_ROWS} and more")
    # forked before this process touches the GPU, because a fork after that could not use it
    pool = ProcessPoolExecutor(min(16, os.cpu_count() or 1), multiprocessing.get_context("fork"))
    compiled = [
        {
            name: [
                (trial, pool.submit(compile_trial, model_config(model), rows, args.plain_rows, trial))
                for trial in found
            ]
            for name, found in kernels.items()
        }
        for (model, rows), kernels in zip(runs, wanted, strict=True)
    ]
    if not torch.cuda.is_available():
        pool.shutdown(cancel_futures=True)
        raise SystemExit("tuning needs a CUDA device")
    for (model, rows), kernels in zip(runs, compiled, strict=True):
        if time.perf_counter() - started < args.seconds:
            tune(model, rows, kernels, started + args.seconds)
            torch.cuda.empty_cache()
            if not args.dry_run:
                write_table(args.output)  # after each, so that an interrupted run is not lost
    pool.shutdown(cancel_futures=True)
    print(f"{time.perf_counter() - started:.0f} s")
    if args.dry_run:
        print(table.TILES, table.ATTENTION, sep="\n")


if __name__ == "__main__":
    main()

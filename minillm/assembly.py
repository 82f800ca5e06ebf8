"""From a model to an engine: the cache, the state, the captured decode steps, and the options that shape them."""

from collections.abc import Sequence
from dataclasses import dataclass

from tqdm import tqdm

from .cache import KVCache
from .capture import CudaBackend
from .engine import Engine
from .errors import ConfigError, GraphError
from .graphs import GraphRunner, make_runner
from .looping import LoopEngine, make_loops
from .model import Llama
from .pieces import Cuts
from .prefill_graphs import LENGTHS, PrefillRunner
from .state import DecodeState
from .step import step_of

UNTIL_DONE = "until_done"
"""`steps_per_graph`: a launch makes steps until every row has ended."""


@dataclass(frozen=True)
class Options:
    """The options of an LLM that say how requests run; `llm.py` describes them. Raises: ConfigError."""

    max_batch_size: int = 8
    graphs: str = "auto"
    max_waiting: int = 1024
    prefill_chunk: int | None = None
    prefix_reuse: bool = True
    prefill_graphs: Sequence[int] | None = None
    steps_per_graph: int | str = 1
    graph_pieces: int = 1

    @property
    def steps(self) -> int:
        """Decode steps in one recording."""
        return self.steps_per_graph if isinstance(self.steps_per_graph, int) else 1

    def __post_init__(self) -> None:
        _check_count("max_waiting", self.max_waiting)
        _check_count("graph_pieces", self.graph_pieces)
        if self.prefill_chunk is not None:
            _check_count("prefill_chunk", self.prefill_chunk)
        if self.steps_per_graph != UNTIL_DONE:
            _check_count("steps_per_graph", self.steps_per_graph, f", or {UNTIL_DONE!r}")
        if self.graph_pieces > 1 and self.steps_per_graph != 1:
            raise ConfigError(
                f"graph_pieces={self.graph_pieces} cuts a step in several launches, and steps_per_graph="
                f"{self.steps_per_graph!r} makes several steps in one: give one of the two"
            )
        if self.prefill_graphs is not None:
            _check_lengths(self.prefill_graphs)
        if not isinstance(self.prefix_reuse, bool):  # a text from a config file, "no", would switch it on
            raise ConfigError(f"prefix_reuse must be True or False, not {self.prefix_reuse!r}")


def _check_lengths(lengths: object) -> None:
    if not isinstance(lengths, (list, tuple)):  # a text is a sequence too, and a generator can be read once only
        raise ConfigError(f"prefill_graphs must be a list or tuple of lengths, not {lengths!r}")
    for length in lengths:
        _check_count("a length in prefill_graphs", length)


def _check_count(name: str, value: object, otherwise: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} must be a whole number of at least 1{otherwise}, not {value!r}")


def build_engine(model: Llama, max_seq_len: int, options: Options, progress: bool) -> Engine:
    """Allocate cache and state, and capture. Raises: GraphError; ConfigError for more pieces or steps than can be."""
    cuts = Cuts(model.config.num_hidden_layers, options.graph_pieces)
    if options.steps > max_seq_len:
        raise ConfigError(f"steps_per_graph={options.steps} is more than the {max_seq_len} tokens of a row: give fewer")
    device, dtype = model.weights.embed.device, model.weights.embed.dtype
    cache = KVCache(model.config, options.max_batch_size, max_seq_len, device, dtype)
    state = DecodeState.allocate(options.max_batch_size, model.config.vocab_size, device)
    prefills, runner = _capture(model, cache, state, cuts, options, progress)
    # a chunk holds the others up: on a GPU for some milliseconds, on a CPU for a few of its slower steps
    chunk = options.prefill_chunk or (512 if device.type == "cuda" else 64)
    try:
        loops = make_loops(runner, cache, options.graphs) if options.steps_per_graph == UNTIL_DONE else None
    except GraphError:
        prefills.close()
        runner.close()
        raise
    if loops is None:
        return Engine(model, cache, state, runner, chunk, options.prefix_reuse, prefills)
    return LoopEngine(model, cache, state, runner, chunk, options.prefix_reuse, prefills, loops=loops)


def _capture(
    model: Llama, cache: KVCache, state: DecodeState, cuts: Cuts, options: Options, progress: bool
) -> tuple[PrefillRunner, GraphRunner]:
    """What runs prefills and decode steps, captured as the options say: the prefills first, which are larger."""
    step, device = step_of(model, cache, cuts), state.tokens.device
    backend = CudaBackend(device, cuts=cuts) if device.type == "cuda" else None
    lengths = options.prefill_graphs
    if lengths is None:  # plain attention of a padded chunk reads the whole row
        lengths = () if model.fused is None else LENGTHS
    prefills = PrefillRunner(model, cache, lengths, backend)
    with tqdm(desc="capturing CUDA graphs", unit="graph", disable=not (progress and backend), leave=False) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        kv_lengths = None if model.fused is None else model.fused.kv_lengths(cache.max_seq_len)
        runner = make_runner(step, state, cache, options.graphs, backend, show, kv_lengths, prefills, options.steps)
    return prefills, runner

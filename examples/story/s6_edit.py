"""6. Editing a captured graph.

    python -m examples.story.s6_edit

A recording has the addresses of its cache frozen in. When the cache moves (a larger one, that of another session), the
step is still the same list of kernels, with other arguments. Recording it again runs all of its Python again, and then
the driver *instantiates* it: checks it and lays it out for the GPU.

A graph has two halves, and PyTorch gives both away (`keep_graph=True`). The graph is the list of kernels; the
executable is what the driver made of it, and what a replay launches. `cudaGraphExecUpdate` takes an executable and
another graph of the same shape (the same kernels in the same order), and writes the arguments of the second into the
first. So one executable can serve as many caches as there are recordings, and going from one to the other costs no
Python and no new executable.

What can go wrong: a graph of another shape is refused, which is an answer and no accident: the executable stays as it
was, and one records anew. And memory: the edited executable points to what the second recording used, so that one must
live on, and so must its pool.
"""

import sys
from collections.abc import Callable
from itertools import cycle

import torch

from minillm.cache import KVCache
from minillm.sampling import Mode
from minillm.step import decode_step

from .common import CACHE, Parts, build, milliseconds, start, warm_up
from .s3_inputs import feeding_itself
from .tell import Gain, Missing, Options, main

NAME = "examples.story.s6_edit"


class Recorder:
    """Records without making an executable. All share a stream and a pool, since one is replayed at a time."""

    def __init__(self) -> None:
        self.stream, self.pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()

    def __call__(self, step: Callable[[], object]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph, stream=self.stream, pool=self.pool):
            step()
        return graph


def update(target: torch.cuda.CUDAGraph, source: torch.cuda.CUDAGraph) -> bool:
    """Write the arguments of the source into the executable of the target; False if their shapes differ."""
    from cuda.bindings import runtime

    executable = runtime.cudaGraphExec_t(init_value=target.raw_cuda_graph_exec())
    error = runtime.cudaGraphExecUpdate(executable, runtime.cudaGraph_t(init_value=source.raw_cuda_graph()))[0]
    if error == runtime.cudaError_t.cudaSuccess:
        return True
    runtime.cudaGetLastError()  # or the next launch finds the refusal, and takes it for its own
    return False


def step_over(parts: Parts) -> Callable[[], None]:
    return lambda: decode_step(parts.model, parts.cache, parts.state, CACHE, Mode.GREEDY)


def measure(options: Options) -> list[Gain]:
    try:
        import cuda.bindings  # noqa: F401
    except ImportError:
        raise Missing(f"{NAME} needs cuda.bindings, to reach the driver's graphs: pip install cuda-bindings") from None
    here = build(options.shape)
    device, dtype = here.cache.kv.device, here.cache.kv.dtype
    there = here._replace(cache=KVCache(here.model.config, 1, CACHE, device, dtype), prompt=here.prompt[::-1])
    steps, record = options.steps, Recorder()
    expected = [feeding_itself(parts, step_over(parts), steps) for parts in (here, there)]

    start(here)
    warm_up(step_over(here), record.stream)
    graph, other = record(step_over(here)), record(step_over(there))
    graph.instantiate()
    found = [feeding_itself(here, graph.replay, steps)]
    before = here.cache.kv.clone()
    assert update(graph, other)
    found.append(feeding_itself(there, graph.replay, steps))
    assert found == expected
    assert torch.equal(here.cache.kv, before)

    two_steps = record(lambda: (step_over(here)(), step_over(here)()))
    assert not update(graph, two_steps)
    assert feeding_itself(there, graph.replay, steps) == expected[1]
    checked = f"{steps} token ids in each of two caches; a graph of two steps was refused, and the text still right"

    def record_anew() -> None:
        new = record(step_over(there))
        new.instantiate()
        new.replay()
        torch.cuda.synchronize()  # before what was recorded goes

    def record_and_update() -> None:
        new = record(step_over(there))
        update(graph, new)
        graph.replay()
        torch.cuda.synchronize()

    sources = cycle((graph, other))  # there and back

    def update_alone() -> None:
        update(graph, next(sources))
        graph.replay()

    ways = {"recorded anew": record_anew, "recorded and updated": record_and_update, "updated alone": update_alone}
    bars, unit = {name: milliseconds(way) for name, way in ways.items()}, "until a step over another cache has run"
    return [Gain(6, "editing a captured graph", options.shape, bars, unit, checked)]


if __name__ == "__main__":
    sys.exit(main(NAME, __doc__, [measure]))

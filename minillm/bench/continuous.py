"""transformers' continuous batching on the same requests: what most people would serve from otherwise.

Its manager is used as its own `generate_batch` uses it: told beforehand how long the requests are and how many, warmed
up before the clock starts, with its own choice of cache, of requests a batch, and of CUDA graphs. Attention is the
fastest that it finds here: flash attention if that is installed, else paged SDPA. It notes itself when tokens are made.
"""

import logging
import time
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from ..errors import ConfigError
from ..sampling import SamplingParams
from .contest import Failed
from .peers import Transformers
from .runtime import Subject
from .visits import Served, Visit

PEER = "transformers"
NOT_A_TOKEN = -1  # as its end token: answers have the length that was asked for


def check_peers(wanted: Sequence[str]) -> None:
    """Raises: ConfigError if a peer was asked for that is not installed."""
    if wanted and find_spec("transformers") is None:
        raise ConfigError("--peers needs transformers: pip install transformers, or leave it out")


def serve_continuous(subject: Subject, visits: Sequence[Visit]) -> Served:
    """Serve them all, on random weights if the subject's are random. Raises: Failed."""
    try:
        manager = make_manager(subject, visits)
        manager.warmup()
        manager.start()
        try:
            run(manager, [Visit(visits[0].prompt[:4], 4, 0.0)])  # its first steps
            return run(manager, visits)
        finally:
            manager.stop(block=True, timeout=60)
    except Failed:
        raise
    except Exception as error:  # whatever it is, minillm was measured
        raise Failed(f"{type(error).__name__}: {error}".splitlines()[0]) from error


def make_manager(subject: Subject, visits: Sequence[Visit]) -> Any:
    from transformers import ContinuousBatchingConfig, GenerationConfig
    from transformers.generation.continuous_batching.utils import WorkloadHints

    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)  # what goes wrong is raised here
    # it sizes its cache by the memory of a GPU; without one it would take far more than it needs
    sizes = {} if subject.device.type == "cuda" else {"num_blocks": 2 * len(visits) + 8, "max_batch_tokens": 512}
    longest = max(len(visit.prompt) for visit in visits), max(visit.answer for visit in visits)
    return Transformers(subject, SamplingParams(temperature=0.0)).model.init_continuous_batching(
        generation_config=GenerationConfig(do_sample=False, eos_token_id=NOT_A_TOKEN, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(**sizes),
        workload_hints=WorkloadHints(*longest, len(visits)),
    )


def run(manager: Any, visits: Sequence[Visit]) -> Served:
    """Hand in each request when its time comes, and wait for them all."""
    started = time.perf_counter()
    submitted: dict[str, float] = {}
    for index, visit in enumerate(visits):
        time.sleep(max(0.0, started + visit.at - time.perf_counter()))
        name = f"{index} of {started}"
        submitted[name] = time.perf_counter()
        manager.add_request(
            visit.prompt, name, max_new_tokens=visit.answer, record_timestamps=True, eos_token_id=NOT_A_TOKEN
        )
    stamps: dict[str, list[float]] = {}
    while len(stamps) < len(visits):
        output = manager.get_result(timeout=1)
        if output is None:
            if not manager.is_running():
                raise Failed(f"its thread ended after {len(stamps)} of {len(visits)} requests")
        elif output.error is not None:
            raise Failed(f"a request failed: {output.error}")
        elif output.is_finished():
            stamps[output.request_id] = output.timestamps
    for visit, name in zip(visits, submitted, strict=True):
        if len(stamps[name]) != visit.answer:
            raise Failed(f"an answer has {len(stamps[name])} tokens, and {visit.answer} were asked for")
    return Served(
        seconds=max(made[-1] for made in stamps.values()) - started,
        tokens=sum(visit.answer for visit in visits),
        first_token_s=[stamps[name][0] - at for name, at in submitted.items()],
        latency_s=[stamps[name][-1] - at for name, at in submitted.items()],
    )

"""transformers, doing the same work on the same machine: what most people would run otherwise.

    eager     `generate` as it is: a cache that grows by concatenation
    compile   `generate` with a static cache as long as ours, for which it compiles the decode step by itself

Both are driven through the public `generate`, and each token is timed as it comes to the host. `generate` looks at
every token before it starts the next step, so this asks nothing of it that it would not do anyway. Beside a prefill
stands one forward pass, as `generate` makes first.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from ..sampling import SamplingParams
from .contest import Failed, Prompts, Run
from .runtime import Subject

PEERS = ("eager", "compile")
MODES = {"eager": "transformers eager", "compile": "transformers static+compile"}


def chosen_peers(wanted: Sequence[str], device: torch.device) -> Sequence[str]:
    """Which of `PEERS` to measure. "auto" means all that this machine can run.

    Raises: ConfigError if one was asked for by name that cannot run here.
    """
    installed = find_spec("transformers") is not None
    possible = [p for p in PEERS if installed and (p == "eager" or device.type == "cuda")]
    if "auto" in wanted:
        return possible
    if wanted and not installed:
        raise ConfigError("--peers needs transformers: pip install transformers, or use --no-peers")
    if "compile" in wanted and device.type != "cuda":
        raise ConfigError("--peers compile needs a GPU: transformers compiles by itself only there")
    return wanted


class Transformers:
    """The subject's model in transformers, with its weights, or random ones where those are random."""

    def __init__(self, subject: Subject, params: SamplingParams) -> None:
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        if isinstance(subject.source, dict):
            config = transformers.AutoConfig.for_model(**subject.source)
            with subject.device:
                model = transformers.AutoModelForCausalLM.from_config(config, dtype=subject.dtype)
        else:
            model = transformers.AutoModelForCausalLM.from_pretrained(subject.source, dtype=subject.dtype)
        self.model = model.to(subject.device).eval()
        self._device, self._temperature = subject.device, params.temperature

    def contestant(self, kind: str, cache: int) -> "Generate":
        """One of `PEERS`. What transformers remembers of another size (a longer cache, compiled code) is forgotten."""
        if kind == "compile":
            torch.compiler.reset()
            for name in ("_cache", "_previous_max_cache_length", "_compiled_call"):
                vars(self.model).pop(name, None)
        return Generate(self, MODES[kind], cache if kind == "compile" else None)

    @torch.inference_mode()
    def prefill(self, ids: Tensor) -> Tensor:
        """A forward pass over ids int64 [T] that fills a cache of its own: logits of the last token, [1, vocab]."""
        return self.model(input_ids=ids[None], use_cache=True, logits_to_keep=1).logits[0]

    def generate(self, prompts: Prompts, new_tokens: int, streamer: "TokenClock", **options: Any) -> None:
        ids = torch.tensor(prompts, device=self._device)
        if self._temperature > 0:
            options |= dict(do_sample=True, temperature=self._temperature, top_k=0, top_p=1.0)
        else:
            options |= dict(do_sample=False)
        self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            streamer=streamer,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,  # an end token is never chosen
            pad_token_id=0,
            **options,
        )


@dataclass(frozen=True)
class Generate:
    """`generate` as a contestant. cache: the length of a static cache, or None for the usual one."""

    model: Transformers
    mode: str
    cache: int | None

    def run(self, prompts: Prompts, steps: int) -> Run:
        clock = TokenClock(steps + 1)
        started = time.perf_counter()
        try:
            if self.cache is None:
                self.model.generate(prompts, steps + 1, clock)
            else:  # the length of a static cache follows from the tokens asked for, of which the clock lets fewer pass
                self.model.generate(prompts, self.cache - len(prompts[0]), clock, cache_implementation="static")
        except EnoughTokens:
            pass
        except Exception as error:  # whatever it is, minillm can still be measured
            raise Failed(f"{type(error).__name__}: {error}".splitlines()[0]) from error
        return Run.of(len(prompts), started, clock.stamps)


class EnoughTokens(Exception):
    """Ends a `generate` at the last token that is timed."""


class TokenClock:
    """What `generate` calls a streamer: it is handed the prompt, then each token. Notes when."""

    def __init__(self, tokens: int) -> None:
        self.stamps: list[float] = []
        self._tokens, self._prompt_came = tokens, False

    def put(self, value: Tensor) -> None:
        if self._prompt_came:
            self.stamps.append(time.perf_counter())
        self._prompt_came = True
        if len(self.stamps) == self._tokens:
            raise EnoughTokens

    def end(self) -> None:
        """The text is complete."""

"""What the kernels do to the predictions of a whole model: no more than plain PyTorch does in the same dtype.

A text is fed token by token to `Llama.decode`, and window by window to `Llama.prefill`, once with the kernels and once
with the plain operations, both in bfloat16 and with the same weights. The same model in float32 says what is right.
Three measures, over all positions:

    KL    mean divergence of the next-token distribution from that of float32, in nats
    NLL   mean negative log-likelihood of the token that does follow, in nats
    top   the most likely token
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import kernel_cases as cases
import pytest
import torch
from torch import Tensor

from minillm.cache import KVCache
from minillm.config import ModelConfig
from minillm.download import weights_dir
from minillm.kernels import reference
from minillm.kernels.fused import FusedOps
from minillm.kernels.fused_prompt import FusedPrompt
from minillm.loading import load_model, make_plan
from minillm.model import Llama
from minillm.state import DecodeState
from minillm.tokenizer import Tokenizer

CUDA, BF16 = torch.device("cuda", 0), torch.bfloat16
LENGTH, ROWS = 256, 8  # tokens of a window, and windows
KL_FACTOR, KL_MARGIN, NLL_MARGIN = 1.25, 2e-5, 2e-3  # nats

TEXT = """The lighthouse keeper had kept the same notebook for thirty-one years. Every evening, after the lamp was lit
and the oil was measured, he wrote down three things: the direction of the wind, the height of the tide, and the number
of ships that had passed since noon. On most days the last number was zero. He did not mind. A lighthouse, he told the
boy who brought his bread, is not there for the ships that pass; it is there for the one that must not come any closer.

In the spring of 1904 a survey ship anchored off the point for nine days. Its officers came ashore with brass
instruments and a box of charts, and asked him how deep the water was between the two black rocks. He answered without
looking up: four fathoms at low tide, seven at high tide, and in a north-east gale nobody had ever been able to measure
it. The youngest of them laughed, but the captain wrote it down. When the new chart was printed two years later, there
was a small note beside the rocks, in italics, which said that the depth was uncertain.

Measuring is harder than it looks. To say how long a thing is, you need a ruler, and to trust the ruler you need another
ruler, and so on, until somebody in Paris opens a vault and shows you a bar of metal. Today the metre is defined by the
speed of light, which is exactly 299,792,458 metres per second, and the second by the vibrations of an atom of caesium.
Nobody has to travel to a vault any more. Yet every measurement still has an error, and a number without its error is
like a chart without a scale: it may be pretty, but you should not sail by it.

A short recipe for honest figures, then. First, write down what you measured and with which instrument. Second, repeat
it: once is an anecdote, three times is a habit, ten times is a distribution. Third, change one thing at a time. Fourth,
report the median as well as the best case, because the best case is what you hoped for and the median is what you will
get. Finally, publish the failures too. For example, the function

    def mean(values):
        total = 0.0
        for value in values:
            total += value
        return total / len(values)

looks correct, and it is, until somebody calls it with an empty list, or with ten million small numbers and one large
one. Then the sum loses the small ones, one after the other, and no exception is raised. The keeper would have
understood. He never wrote that the sea was calm; he wrote that he had seen no waves from where he stood.
"""


@dataclass(frozen=True)
class Subject:
    """One model three times, and a text. margin: a preference of float32 that no rounding may turn round, in logits."""

    exact: Llama
    plain: Llama
    fused: Llama
    ids: Tensor  # int64, at least LENGTH + ROWS - 1
    margin: float


FOLDER = weights_dir() / "SmolLM2-135M-Instruct"
REAL = pytest.param(
    "real",
    marks=pytest.mark.skipif(
        not FOLDER.is_dir(), reason="needs the model: python -m minillm.download smollm2-135m-instruct"
    ),
)


@pytest.fixture(scope="module", params=[REAL, "random", "random qwen3"])
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    if request.param == "real":
        yield real_subject(FOLDER)
    else:
        yield random_subject("qwen3" if "qwen3" in request.param else "llama")
    torch.cuda.empty_cache()


def real_subject(folder: Path) -> Subject:
    config = ModelConfig.from_dir(folder)
    fused = load_model(folder, config, make_plan(config, CUDA, BF16, ROWS, LENGTH))
    exact = load_model(folder, config, make_plan(config, CUDA, torch.float32, ROWS, LENGTH))
    ids = torch.tensor(Tokenizer.from_dir(folder, config.vocab_size).encode(TEXT), device=CUDA)
    return Subject(exact, Llama(config, fused.weights, LENGTH), fused, ids, margin=0.5)


def random_subject(model_type: str) -> Subject:
    """Logits of a standard deviation of about 1, for random tokens."""
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4, "num_hidden_layers": 6, "vocab_size": 4001}
    cfg = cases.config(model_type=model_type, hidden_size=1024, intermediate_size=2816, head_dim=64, **heads)
    weights = cases.random_weights(cfg, CUDA, BF16)
    ids = torch.randint(0, cfg.vocab_size, (2 * LENGTH,), generator=torch.Generator().manual_seed(4)).to(CUDA)
    exact, plain = Llama(cfg, cases.as_float32(weights), LENGTH), Llama(cfg, weights, LENGTH)
    fused = Llama(cfg, weights, LENGTH, FusedOps(cfg, ROWS, LENGTH, CUDA))
    return Subject(exact, plain, fused, ids, margin=0.1)


# ---------------------------------------------------------------------- two ways to feed a text


def windows(ids: Tensor, rows: int) -> Tensor:
    """`rows` different pieces of the text, int64 [rows, LENGTH]."""
    stride = (len(ids) - LENGTH) // (ROWS - 1)
    assert stride > 0, f"the text has {len(ids)} tokens"
    return torch.stack([ids[row * stride : row * stride + LENGTH] for row in range(rows)])


def empty_cache(model: Llama) -> KVCache:
    return KVCache(model.config, ROWS, LENGTH, CUDA, model.weights.embed.dtype)


def by_steps(model: Llama, tokens: Tensor) -> Tensor:
    """Logits [rows, LENGTH, vocab] of decode steps, all rows at the same position."""
    rows, cache, steps = len(tokens), empty_cache(model), []
    state = DecodeState.allocate(rows, model.config.vocab_size, CUDA)
    state.active.fill_(True)
    for position in range(LENGTH):
        state.tokens.copy_(tokens[:, position])
        state.positions.fill_(position)
        steps.append(model.decode(state, cache, position + 1))
    return torch.stack(steps, 1)


def by_prefill(model: Llama, tokens: Tensor) -> Tensor:
    """The same of one prefill a row."""
    cache = empty_cache(model)
    return torch.stack([model.prefill(ids, row, 0, cache, all_logits=True) for row, ids in enumerate(tokens)])


# ---------------------------------------------------------------------- measures


def divergence(exact: Tensor, logits: Tensor) -> float:
    """Mean KL(exact || logits) in nats, both [rows, LENGTH, vocab]."""
    total = 0.0
    for one, other in zip(exact, logits, strict=True):  # a row at a time: float64 of all would take gigabytes
        p, q = one.double().log_softmax(-1), other.double().log_softmax(-1)
        total += (p.exp() * (p - q)).sum(-1).mean().item()
    return total / len(exact)


def likelihood(logits: Tensor, tokens: Tensor) -> float:
    """Mean negative log-likelihood of the tokens that follow, in nats."""
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).item()


@pytest.mark.parametrize(("feed", "rows"), [(by_steps, 1), (by_steps, ROWS), (by_prefill, ROWS)])
def test_kernels_predict_as_well_as_plain_operations(
    subject: Subject, feed: Callable[[Llama, Tensor], Tensor], rows: int
) -> None:
    assert isinstance(subject.fused._decode_ops, FusedOps)
    assert isinstance(subject.fused._prompt_ops, FusedPrompt)
    assert subject.plain._decode_ops is subject.plain._prompt_ops is reference
    tokens = windows(subject.ids, rows)
    exact = by_prefill(subject.exact, tokens)
    plain, fused = feed(subject.plain, tokens), feed(subject.fused, tokens)
    assert fused.isfinite().all()

    plain_kl, fused_kl = divergence(exact, plain), divergence(exact, fused)
    assert 0 < fused_kl < KL_FACTOR * plain_kl + KL_MARGIN

    right = likelihood(exact, tokens)
    plain_change, fused_change = (abs(likelihood(logits, tokens) - right) for logits in (plain, fused))
    assert fused_change < plain_change + NLL_MARGIN

    best = exact.topk(2, -1)
    gap = best.values[..., 0] - best.values[..., 1]
    differs = {name: logits.argmax(-1) != best.indices[..., 0] for name, logits in (("plain", plain), ("fused", fused))}
    assert (gap > subject.margin).float().mean() > 0.2, "a margin that forgives everything says nothing"
    assert not (differs["fused"] & (gap > subject.margin)).any()
    assert differs["fused"].float().mean() < differs["plain"].float().mean() + 0.02

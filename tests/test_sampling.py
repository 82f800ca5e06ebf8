"""Sampling against exact distributions, computed in float64 from the definition of each filter."""

import math

import pytest
import torch

from minillm.errors import RequestError
from minillm.sampling import Mode, SamplingParams, keep_top, sample
from minillm.state import DecodeState

DRAWS = 20_000


def state_of(params: SamplingParams, rows: int, vocab: int, seen: list[int] | None = None) -> DecodeState:
    """A state whose rows all have these parameters, seeds 0, 1, 2, ..., and stand at position 7."""
    state = DecodeState.allocate(rows, vocab, torch.device("cpu"))
    for row in range(rows):
        state.admit(row, seen or [0], 100, [], params, params.seed if params.seed is not None else row)
    state.positions.fill_(7)
    return state


def exact(logits: list[float], params: SamplingParams, seen: list[int] | None = None) -> torch.Tensor:
    """The filtered distribution, one token at a time, in float64."""
    x = torch.tensor(logits, dtype=torch.float64)
    for token in seen or []:
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    x = x / params.temperature
    order = sorted(range(len(logits)), key=lambda i: (-x[i].item(), i))
    kept = order[: params.top_k or None]
    kept_mask = torch.zeros(len(logits), dtype=torch.bool).index_fill(0, torch.tensor(kept), True)
    probs = x.masked_fill(~kept_mask, -math.inf).softmax(0)
    if params.top_p < 1:
        total, nucleus = 0.0, []
        for token in kept:
            nucleus.append(token)
            total += probs[token].item()
            if total >= params.top_p:
                break
        kept = nucleus
    best = probs.max()
    kept = [t for t in kept if probs[t] >= params.min_p * best]
    out = torch.zeros(len(logits), dtype=torch.float64)
    out[kept] = probs[kept] / probs[kept].sum()
    return out


def draw(logits: list[float], params: SamplingParams, seen: list[int] | None = None) -> torch.Tensor:
    """How often each token came in DRAWS draws with different seeds."""
    state = state_of(params, 1, len(logits), seen)
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "positions"):
        setattr(state, name, getattr(state, name).expand(DRAWS))
    state.seen = state.seen.expand(DRAWS, -1)
    state.seeds = torch.stack((torch.arange(DRAWS), torch.zeros(DRAWS)), 1).int()
    tokens, _ = sample(torch.tensor(logits).expand(DRAWS, -1), state, Mode.of(params))
    return tokens.bincount(minlength=len(logits))


def chi_square_is_plausible(counts: torch.Tensor, probs: torch.Tensor) -> bool:
    """Chi-square of the counts, below its mean by five standard deviations at most; nothing outside the support."""
    support = probs > 0
    assert counts[~support].sum() == 0
    expected = probs[support] * counts.sum()
    chi2 = ((counts[support] - expected) ** 2 / expected).sum().item()
    freedom = int(support.sum()) - 1
    return freedom == 0 or abs(chi2 - freedom) < 5 * math.sqrt(2 * freedom)


LOGITS = [1.0, 2.0, 0.5, 3.0, -1.0, 2.5, 0.0, 1.5, 2.0, -0.5]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=1.7),
        SamplingParams(top_k=3),
        SamplingParams(top_p=0.7),
        SamplingParams(min_p=0.3),
        SamplingParams(repetition_penalty=1.8),
        SamplingParams(temperature=0.8, top_k=6, top_p=0.9, min_p=0.1, repetition_penalty=1.3),
    ],
    ids=str,
)
def test_frequencies_match_the_filtered_distribution(params: SamplingParams) -> None:
    seen = [3, 4, 6]
    counts, probs = draw(LOGITS, params, seen), exact(LOGITS, params, seen)
    assert chi_square_is_plausible(counts, probs)
    tilted = probs * torch.linspace(1, 1.5, len(LOGITS))
    assert not chi_square_is_plausible(counts, tilted / tilted.sum())  # the check itself can fail


def test_draws_of_neighbouring_seeds_and_positions_are_independent() -> None:
    """Elsewhere, a seed taken as a number at capture repeated one draw; here, (seed, position) pairs must not alias."""
    vocab, count = 64, 128
    state = state_of(SamplingParams(), 1, vocab)
    grid = torch.cartesian_prod(torch.arange(count), torch.arange(count))  # every (seed, position)
    n = len(grid)
    for name in ("temperature", "min_p", "repetition_penalty"):
        setattr(state, name, getattr(state, name).expand(n))
    state.seen = state.seen.expand(n, -1)
    state.seeds = torch.stack((grid[:, 0], torch.zeros(n)), 1).int()
    state.positions = grid[:, 1]
    tokens = sample(torch.zeros(n, vocab), state, Mode.SAMPLED)[0].view(count, count)
    for shift in ((1, 0), (0, 1), (1, 1), (1, -1), (2, 1)):
        same = (tokens == tokens.roll(shift, (0, 1))).float().mean().item()
        assert abs(same - 1 / vocab) < 0.005
    assert (tokens == tokens.T).float().mean().item() < 1 / vocab + 1 / count + 0.005


def test_a_draw_depends_on_seed_position_and_token_only() -> None:
    """Elsewhere, a seeded request changed its text when it was batched with unseeded ones."""
    logits = torch.randn(1, 500, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(seed=7, temperature=0.9)
    alone = sample(logits, state_of(params, 1, 500), Mode.SAMPLED)[0].item()
    for rows, row in ((4, 0), (8, 3)):
        for neighbour, mode in ((SamplingParams(), Mode.SAMPLED), (SamplingParams(top_p=0.5), Mode.FILTERED)):
            state = state_of(neighbour, rows, 500)
            state.admit(row, [0], 100, [], params, 7)
            state.positions.fill_(7)
            batch = torch.randn(rows, 500)
            batch[row] = logits[0]
            assert sample(batch, state, mode)[0][row].item() == alone


def test_uniform_logits_give_many_tokens_and_the_seed_repeats_them() -> None:
    state = state_of(SamplingParams(seed=3), 1, 1000)

    def text() -> list[int]:
        out = []
        for position in range(64):
            state.positions.fill_(position)
            out.append(sample(torch.zeros(1, 1000), state, Mode.SAMPLED)[0].item())
        return out

    first = text()
    assert len(set(first)) > 40
    assert text() == first
    state.seeds.fill_(4)
    assert text() != first


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.5, [0]), (0.6, [0, 1]), (0.75, [0, 1]), (0.76, [0, 1, 2]), (1.0, [0, 1, 2]), (1e-6, [0])]
)
def test_top_p_on_the_border(top_p: float, kept: list[int]) -> None:
    """Elsewhere, the token on the border was kept or dropped by how the sum was compared, and ties by the sort."""
    state = state_of(SamplingParams(top_p=top_p), 1, 3)
    scores = keep_top(torch.tensor([[0.5, 0.25, 0.25]]).log(), state)
    assert scores[0].isfinite().nonzero()[:, 0].tolist() == kept


def test_top_k_keeps_the_lowest_ids_of_equals() -> None:
    state = state_of(SamplingParams(top_k=2), 1, 5)
    scores = keep_top(torch.tensor([[0.0, 1.0, 1.0, 1.0, -1.0]]), state)
    assert scores[0].isfinite().nonzero()[:, 0].tolist() == [1, 2]


@pytest.mark.parametrize("temperature", [0.0, 1e-8, 1e-4, 1e-45])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    """Elsewhere, logits / temperature overflowed to inf - inf = NaN."""
    logits = torch.tensor([[-6e4, 6e4, 5.9e4, 0.0]], dtype=torch.float16).float()
    for mode in (Mode.SAMPLED, Mode.FILTERED):
        token, logprob = sample(logits, state_of(SamplingParams(temperature=temperature, seed=1), 1, 4), mode)
        assert token.item() == 1
        assert logprob.isfinite().all()


def test_temperature_zero_is_the_first_maximum_whatever_the_filters() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0]])
    state = state_of(SamplingParams(temperature=0, top_k=2, top_p=0.3, min_p=0.5), 1, 4)
    for mode in Mode:
        assert sample(logits, state, mode)[0].item() == 1


def test_logprobs_are_of_the_unchanged_distribution() -> None:
    logits = torch.randn(1, 50)
    token, logprob = sample(logits, state_of(SamplingParams(temperature=0.3, top_k=5), 1, 50), Mode.FILTERED)
    assert logprob.item() == pytest.approx(logits.log_softmax(-1)[0, token].item(), abs=1e-5)


@pytest.mark.parametrize(
    "bad",
    [
        dict(max_tokens=0), dict(max_tokens=1.5), dict(max_tokens=True), dict(max_tokens=2**63),
        dict(temperature=-1), dict(temperature=math.nan), dict(temperature=math.inf), dict(temperature="hot"),
        dict(temperature=1e300), dict(temperature=10**400), dict(top_k=-1), dict(top_k=1.5), dict(top_k=2**63),
        dict(top_p=0), dict(top_p=1.1), dict(top_p=math.nan), dict(min_p=-0.1), dict(min_p=2),
        dict(repetition_penalty=0), dict(repetition_penalty=-1), dict(repetition_penalty=1e39),
        dict(repetition_penalty=1e-46), dict(seed=-1), dict(seed=2**64), dict(seed=1.0), dict(stop=[""]),
        dict(stop=[1]), dict(stop=5), dict(stop=["\ud800"]), dict(stop_token_ids=[-1]), dict(stop_token_ids=7),
        dict(stop_token_ids=["a"]), dict(ignore_eos="no"), dict(logprobs=5),
    ],
    ids=str,
)  # fmt: skip
def test_impossible_values_are_refused_by_name(bad: dict) -> None:
    (name,) = bad
    with pytest.raises(RequestError, match=name):
        SamplingParams(**bad)


def test_params_are_frozen_and_take_lists() -> None:
    params = SamplingParams(stop="END", stop_token_ids=[3, 4])
    assert params.stop == ("END",)
    assert params.stop_token_ids == (3, 4)
    with pytest.raises(AttributeError):
        params.seed = 3  # type: ignore[misc]

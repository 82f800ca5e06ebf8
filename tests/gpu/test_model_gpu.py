"""The transformer on a GPU: against itself in float32 on the CPU, and prefill in every cut."""

import pytest
import torch
from small import CONFIG, parts

from minillm.model import Llama
from minillm.state import DecodeState

CUDA = torch.device("cuda", 0)


def tokens(count: int) -> torch.Tensor:
    return torch.randint(0, CONFIG.vocab_size, (count,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_prefill_whole_in_chunks_and_token_by_token_agree(dtype: torch.dtype) -> None:
    """Elsewhere, is_causal hid the prefix from a second chunk, because its mask is aligned top-left."""
    model, _, _ = parts(1, 128)
    _, cache, _ = parts(1, 128)
    ids = tokens(100)
    exact = model.prefill(ids, 0, 0, cache, all_logits=True)
    for tensor in model.weights.tensors():
        tensor.data = tensor.data.to(CUDA, dtype)
    model = Llama(CONFIG, model.weights, 128)
    _, cache, _ = parts(1, 128, CUDA, dtype)
    limit = (2e-5 if dtype == torch.float32 else 12 * torch.finfo(dtype).eps) * exact.norm()
    ids = ids.to(CUDA)
    got = {"whole": model.prefill(ids, 0, 0, cache, all_logits=True)}
    cache.kv.zero_()
    cuts = ((0, 16), (16, 17), (17, 80), (80, 100))
    got["chunks"] = torch.cat([model.prefill(ids[a:b], 0, a, cache, all_logits=True) for a, b in cuts])
    cache.kv.zero_()
    state, steps = DecodeState.allocate(1, CONFIG.vocab_size, CUDA), []
    state.active.fill_(True)
    for position, token in enumerate(ids):
        state.tokens.copy_(token)
        state.positions.fill_(position)
        steps.append(model.decode(state, cache, 128))
    got["steps"] = torch.cat(steps)
    for name, logits in got.items():
        assert (logits.cpu() - exact).norm() < limit, name

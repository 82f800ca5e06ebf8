"""Runs interpreted_prompt.py in a process in which Triton interprets kernels; and what a model prefills with."""

import pytest
import torch
from interpreter import run_interpreted
from small import CONFIG, parts

from minillm.kernels import reference
from minillm.kernels.fused import FusedOps
from minillm.kernels.fused_prompt import FusedPrompt
from minillm.model import Llama

CPU = torch.device("cpu")


def test_kernels_equal_their_definitions() -> None:
    run_interpreted("interpreted_prompt.py")


def test_a_model_without_kernels_prefills_with_the_plain_operations() -> None:
    assert parts()[0]._prompt_ops is reference


def test_a_model_with_kernels_prefills_with_those_of_a_prompt() -> None:
    pytest.importorskip("triton", reason="triton, which comes with PyTorch's CUDA wheels, is not installed")
    model = Llama(CONFIG, parts()[0].weights, 64, FusedOps(CONFIG, 1, 64, CPU))
    assert isinstance(model._prompt_ops, FusedPrompt)
    assert isinstance(model._decode_ops, FusedOps)


def test_a_plain_prefill_writes_into_no_weight() -> None:
    """The residual stream of a prefill may be overwritten, so it must not be the embedding table itself."""
    model, cache, _ = parts()
    before = [tensor.clone() for tensor in model.weights.tensors()]
    model.prefill(torch.tensor([3, 3, 5]), 0, 0, cache)
    model.prefill(torch.tensor([3]), 0, 3, cache)
    assert all(torch.equal(a, b) for a, b in zip(before, model.weights.tensors(), strict=True))

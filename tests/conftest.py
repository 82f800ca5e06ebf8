"""What several test files stand on: one thread, a tiny model, small tokenizers of every kind."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny import make_tiny_model
from tokenizer_files import KINDS

from minillm import LLM
from minillm.tokenizer import Tokenizer


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Small models are slower with more, and much slower when tests run side by side."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny model."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def llm(tiny: Path) -> Iterator[LLM]:
    """The tiny model, ready, for one request at a time."""
    with LLM(tiny, device="cpu", max_batch_size=1) as llm:
        yield llm


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A directory for each kind of tokenizer."""
    root = tmp_path_factory.mktemp("tokenizers")
    return {kind: make(root / kind) for kind, make in KINDS.items()}


@pytest.fixture(params=KINDS)
def folder(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Path:
    return folders[request.param]


@pytest.fixture
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_dir(folder)

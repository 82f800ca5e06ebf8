"""Cuts and Pieces: a step that is captured as several graphs, one after another, cut between layers.

One graph of a deep model on a small GPU may take more memory, or more time to load, than there is. Its pieces are
captured on one stream into one pool, so what a piece leaves for the next stays where it is; and they are replayed in
order on one stream, where a graph starts when the one before has ended.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from .errors import ConfigError


class Cuts:
    """Where a step is cut: the model calls this after each layer, and during a capture it calls whoever captures.

    Args:
        layers: of the model. pieces: how many graphs a step shall be, of equal numbers of layers, or one more or less.
    Raises: ConfigError if there are more pieces than layers.
    """

    def __init__(self, layers: int, pieces: int) -> None:
        if pieces > layers:
            raise ConfigError(
                f"graph_pieces={pieces} asks for more pieces than the model has layers, between which a step is cut: "
                f"give at most {layers}"
            )
        self.pieces = pieces
        self.after = [layers * piece // pieces for piece in range(1, pieces)]
        """After so many layers there is a cut."""
        self._cut: Callable[[], None] | None = None

    def __call__(self, done: int) -> None:
        """The model has run `done` layers of a step."""
        if self._cut is not None and done in self.after:
            self._cut()

    @contextmanager
    def call(self, cut: Callable[[], None]) -> Iterator[None]:
        """Call `cut` at each cut of the step that is run meanwhile."""
        self._cut = cut
        try:
            yield
        finally:
            self._cut = None


class Pieces:
    """The graphs of one step, in order."""

    def __init__(self, graphs: Sequence[torch.cuda.CUDAGraph]) -> None:
        self.graphs = graphs

    def replay(self) -> None:
        for graph in self.graphs:
            graph.replay()

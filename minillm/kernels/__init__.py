"""The operations of a layer: `reference.py` defines them in plain PyTorch, and faster ones replace them where they run.

`fused.py` decodes with few Triton kernels; `fused_prompt.py` prefills with matrix products of cuBLAS, flash attention,
and Triton kernels between them. Which of them a model runs is settled once, when it is built.
"""

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from .reference import Attend

if TYPE_CHECKING:
    from ..state import DecodeState
    from ..weights import LayerWeights


class LayerOps(Protocol):
    """What the layers call; `reference.py` says what each means. Both modules and objects can be one.

    `linear_residual` may write its result over x.
    """

    def qkv_rope_append(
        self, x: Tensor, w: "LayerWeights", rope: Tensor, eps: float, kv: Tensor, rows: Tensor, slots: Tensor,
        head_dim: int,
    ) -> Tensor: ...  # fmt: skip

    def linear_residual(
        self, y: Tensor, weight: Tensor, bias: Tensor | None, x: Tensor, gain: Tensor | None
    ) -> Tensor: ...

    def gate_up_silu(self, x: Tensor, w: "LayerWeights", eps: float) -> Tensor: ...

    def norm_logits(self, x: Tensor, norm: Tensor, weight: Tensor, eps: float) -> Tensor: ...


class PromptOps(LayerOps, Protocol):
    """What a prefill calls."""

    def chunk_attention(self, row: int, start: int) -> Attend: ...

    def placed_attention(self, place: Tensor) -> Attend: ...


class DecodeOps(LayerOps, Protocol):
    """What a decode step calls."""

    def begin(
        self, state: "DecodeState", embed: Tensor, rope_table: Tensor, scratch_slot: int, gain: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def row_attention(self, state: "DecodeState", kv_len: int) -> Attend: ...

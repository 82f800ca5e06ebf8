"""The operations of a decode layer: `reference.py` defines them, `fused.py` runs the same as few Triton kernels.

Which of the two a model decodes with is settled once, when the model is built. Prefill always uses the reference:
a prompt is large matrix products, which cuBLAS and flash attention do best.
"""

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from .reference import Attend

if TYPE_CHECKING:
    from ..state import DecodeState
    from ..weights import LayerWeights


class DecodeOps(Protocol):
    """What a decode step calls; `reference.py` says what each means. Both modules and objects can be one."""

    def begin(
        self, state: "DecodeState", embed: Tensor, rope_table: Tensor, scratch_slot: int, gain: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def qkv_rope_append(
        self, x: Tensor, w: "LayerWeights", rope: Tensor, eps: float, kv: Tensor, rows: Tensor, slots: Tensor,
        head_dim: int,
    ) -> Tensor: ...  # fmt: skip

    def row_attention(self, state: "DecodeState", kv_len: int) -> Attend: ...

    def linear_residual(
        self, y: Tensor, weight: Tensor, bias: Tensor | None, x: Tensor, gain: Tensor | None
    ) -> Tensor: ...

    def gate_up_silu(self, x: Tensor, w: "LayerWeights", eps: float) -> Tensor: ...

    def norm_logits(self, x: Tensor, norm: Tensor, weight: Tensor, eps: float) -> Tensor: ...

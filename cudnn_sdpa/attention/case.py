"""One computation on one kind of GPU, as far as it decides whether cuDNN has a kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cudnn_sdpa.attention.options import Band

FORWARD = "forward"
BACKWARD = "backward"


@dataclass(frozen=True, slots=True)
class Case:
    """One computation on one kind of GPU, as far as it decides whether there is a plan.

    Attributes:
        operation: "forward" or "backward".
        dtype: Of queries, keys and values.
        head_dim: Of queries and keys.
        head_dim_v: Of values.
        sq: Queries.
        skv: Keys.
        sm: Compute capability as one number, 90 for 9.0.
        cudnn: Version as a number, 91900 for 9.19.0.
        gpu: The GPU's name, for messages.
        packed: Whether sequences lie end to end.
        band: The normalized mask.
        lengths: Whether true lengths are given.
        bias: Whether there is a mask that is added.
        bias_gradient: Whether its gradient is wanted.
        sinks: Whether there are attention sinks.
        dropout: Whether there is dropout.
        softcap: Whether there is a soft cap.
        alibi: Whether there are linear biases.
        deterministic: Whether the gradients must be bit-exact.
        half_output: Whether what is computed from FP8 is to be float16 or bfloat16.
    """

    operation: str
    dtype: torch.dtype
    head_dim: int
    head_dim_v: int
    sq: int
    skv: int
    sm: int
    cudnn: int
    gpu: str = "this GPU"
    packed: bool = False
    band: Band | None = None
    lengths: bool = False
    bias: bool = False
    bias_gradient: bool = False
    sinks: bool = False
    dropout: bool = False
    softcap: bool = False
    alibi: bool = False
    deterministic: bool = False
    half_output: bool = False

    @property
    def backward(self) -> bool:
        """Whether it is the backward pass."""
        return self.operation == BACKWARD

    @property
    def largest_head_dim(self) -> int:
        """The larger of the two head dims."""
        return max(self.head_dim, self.head_dim_v)

    @property
    def bottom_right(self) -> bool:
        """Whether cuDNN itself would have to align a causal mask to the last key."""
        return self.band is not None and self.band[2] and self.band[1] is not None

    @property
    def backward_head_dim(self) -> int:
        """The largest head dim of a backward pass on this GPU."""
        return 256 if self.sm // 10 == 9 else 128

    @property
    def is_hopper(self) -> bool:
        """Whether the GPU has engines of SM 90."""
        return self.sm // 10 == 9

    @property
    def is_consumer_blackwell(self) -> bool:
        """Whether the GPU is of the kind of an RTX 50, SM 12x."""
        return self.sm // 10 == 12

    @property
    def is_ampere_kind(self) -> bool:
        """Whether the GPU is served by the engines of SM 8x, as SM 12x is too."""
        return self.sm // 10 in (8, 12)

    @property
    def is_data_center_blackwell(self) -> bool:
        """Whether the GPU has engines of SM 10x."""
        return self.sm // 10 == 10

    @property
    def has_dropout_or_bias_gradient(self) -> bool:
        """Whether the backward pass has dropout, cuDNN's linear biases, or a gradient of attn_mask to give."""
        return self.bias_gradient or self.dropout or (self.alibi and not self.softcap)

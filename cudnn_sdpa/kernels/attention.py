"""Attention by kernels of the library's own: `kernels.attention`, and its module."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from cudnn_sdpa.engine import autograd_checks
from cudnn_sdpa.engine.native.calls import MISSED, NativeCalls
from cudnn_sdpa.engine.operation import NativeKey, Operation
from cudnn_sdpa.errors import check_choice
from cudnn_sdpa.graph.scalars import as_bool, as_float, is_compiling
from cudnn_sdpa.kernels.arguments import FUSED, MODES, Mode, without_causal_bias
from cudnn_sdpa.kernels.call import KernelAttentionBackwardCall, KernelAttentionCall


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mode: Mode = FUSED,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Scaled dot-product attention, softmax(scale · q kᵀ + mask) v, by CUDA kernels of this library's own.

    For what cuDNN lacks: float32, any head dim, float masks with gradients in every layout. Where `sdpa` runs, it is
    faster. The kernels are compiled with NVRTC at the first call and kept in the plan store. They need compute
    capability 8.0. CPU tensors run a PyTorch reference, also in float64. Differentiable with respect to q, k, v and a
    float mask. Results and gradients are the same from run to run.

    Sums are in float32, and so is all arithmetic on float32: TF32 is never used. Any strides are read as they are:
    16 bytes at a time if head vectors are dense and 16-byte aligned, otherwise element by element, which is slower. If
    only the gradient of the output is not, such as the expanded one of `out.sum()`, it is copied first.

    Args:
        q: Queries (B, Hq, Sq, D), float32, float16 or bfloat16.
        k: Keys (B, Hkv, Skv, D). Hq is a multiple of Hkv; query head h uses key head h · Hkv // Hq.
        v: Values (B, Hkv, Skv, D).
        mode: "fused": one pass with an online softmax, whose memory is that of its inputs and outputs; D is at most
            128. "tiled" and "naive": three kernels, for scores, softmax and output, which keep all scores in float32,
            with operands in shared memory and without any reuse; for comparison and study. All have the same gradients;
            where D is above 128, these take memory for two float32 numbers of each score.
        mask: Broadcastable to (B, Hq, Sq, Skv). Boolean, True for keys that take part, or float (additive), in q's
            dtype or float32, or PyTorch's `CausalBias`. Values below -2.36e38, such as finfo.min of bfloat16 and
            float32, mask a key as minus infinity does, as in `sdpa`. On a GPU finite values above 2e38 count as 2e38.
            Its gradient takes memory for all scores in float32.
        is_causal: Mask later keys: query i sees the keys up to key i, aligned top-left as in PyTorch's own attention,
            also if Sq and Skv differ.
        scale: Softmax scale, of magnitude at most 65,536; None is 1/sqrt(D).

    Returns:
        The output (B, Hq, Sq, D) in q's dtype, dense, in q's memory order. A fully masked row gets zeros.

    Raises:
        ArgumentError: An argument is wrong; the subclass and the message say which and how.
        UnsupportedError: The GPU is older than compute capability 8.0.
        PlanBuildError: A plan is missing under `no_plan_builds`.
        LibraryError: NVRTC cannot be loaded.

    Examples:
        >>> import torch
        >>> from cudnn_sdpa import kernels
        >>> q = torch.randn(2, 8, 16, 33, requires_grad=True)  # on a GPU: device="cuda"
        >>> k = v = torch.randn(2, 2, 20, 33)
        >>> kernels.attention(q, k, v, is_causal=True).sum().backward()
        >>> q.grad.shape
        torch.Size([2, 8, 16, 33])

    The fused form follows FlashAttention-2 (Dao, 2023).
    """
    if functional.scaled_dot_product_attention is not autograd_checks.PYTORCHS:
        autograd_checks.refuse_context_parallel("kernels.attention")
    given = (q, k, v, mode, mask, is_causal, scale)
    if _calls.find is not None and not is_compiling():
        known = _calls.find(*given)
        if known is not MISSED:
            return known  # type: ignore[no-any-return]
    call = KernelAttentionCall(
        q=q,
        k=k,
        v=v,
        mask=mask,
        mode=mode,
        is_causal=as_bool(is_causal),
        scale=None if scale is None else as_float(scale),
    )
    if mask is not None and type(mask) is not Tensor:
        call = without_causal_bias(call)
    result: Tensor = ATTENTION(call, NativeKey(_calls, given))
    return result


class CUDAAttention(torch.nn.Module):
    """`attention` as a module without parameters.

    Args:
        mode: "fused", "tiled" or "naive", as for `attention`.

    Raises:
        OptionError: The mode is another.

    Examples:
        >>> import torch
        >>> from cudnn_sdpa import kernels
        >>> attend = kernels.CUDAAttention()
        >>> q = torch.randn(2, 4, 16, 64)
        >>> attend(q, q, q, is_causal=True).shape
        torch.Size([2, 4, 16, 64])
    """

    def __init__(self, mode: Mode = FUSED) -> None:
        super().__init__()
        check_choice("mode", mode, MODES)
        self.mode = mode

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
    ) -> Tensor:
        """The output (B, Hq, Sq, D); the arguments are those of `attention`."""
        return attention(q, k, v, mode=self.mode, mask=mask, is_causal=is_causal, scale=scale)

    def extra_repr(self) -> str:
        """The module's form, as `print` shows it."""
        return f"mode={self.mode!r}"


_calls = NativeCalls()

ATTENTION = Operation(
    name="kernels_attention",
    function="kernels.attention",
    call=KernelAttentionCall,
    backward=KernelAttentionBackwardCall,
    differentiable=("q", "k", "v", "mask"),
    aux_outputs=("statistics",),
)

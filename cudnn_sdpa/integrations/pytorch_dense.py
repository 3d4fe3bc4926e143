"""`aten::_scaled_dot_product_cudnn_attention` and its backward."""

from __future__ import annotations

import torch
from torch import Tensor

from cudnn_sdpa.attention.arguments import softmax_of
from cudnn_sdpa.attention.dense.call import SdpaBackwardCall, SdpaCall
from cudnn_sdpa.attention.dense.sdpa import SDPA
from cudnn_sdpa.attention.mask import TOP_LEFT
from cudnn_sdpa.engine import value_checks
from cudnn_sdpa.engine.dispatch_state import needs_gradient
from cudnn_sdpa.engine.native.calls import MISSED, NativeCalls
from cudnn_sdpa.engine.torch_ops import new_seed
from cudnn_sdpa.errors import ArgumentError, UnsupportedError
from cudnn_sdpa.integrations.pytorch_kernels import launch, launch_backward

_calls = NativeCalls()

_NAMES = {"q": "query", "k": "key", "v": "value", "attn_mask": "attn_bias", "rng": "philox_seed", "lse": "logsumexp"}

#: PyTorch's operator returns the gradients of query, key and value.
_NEEDS = (True, True, True, False, False)

Results = tuple[Tensor, Tensor, None, None, int, int, Tensor, Tensor, None]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Results:
    """PyTorch's operator: the output, the LSE (B, Hq, Sq, 1), and arguments of its backward.

    The LSE is computed without `compute_log_sumexp`, too, except in inference mode, where it is memory that nothing has
    written to, as are without dropout the philox seed and offset. PyTorch sets the argument where an input requires
    grad, and sees none that does if `torch.vmap` is below the differentiation, or if the call was exported; autograd
    saves the LSE all the same. Compiled forward passes run under `torch.no_grad()`.
    """
    if return_debug_mask:
        raise UnsupportedError("return_debug_mask=True", ["cuDNN does not give the mask of dropout to the caller"])
    with_lse = compute_log_sumexp or not torch.is_inference_mode_enabled()
    try:
        results, rng = _attention((query, key, value, attn_bias, with_lse, is_causal, scale), dropout_p)
    except (ArgumentError, UnsupportedError) as error:
        raise error.renamed(_NAMES) from None
    out, lse = results if isinstance(results, tuple) else (results, query.new_empty(query.shape[:3], dtype=torch.float))
    if rng is None:
        seed, offset = (query.new_empty((), dtype=torch.int64) for _ in range(2))
    else:
        seed, offset = (number.clone() for number in rng.unbind())
    return out, lse.unsqueeze(-1), None, None, query.shape[2], key.shape[2], seed, offset, None


def _attention(
    signature: tuple[Tensor, Tensor, Tensor, Tensor | None, bool, bool, float | None], dropout_p: float
) -> tuple[Tensor | tuple[Tensor, Tensor], Tensor | None]:
    if _calls.find is not None and dropout_p == 0 and not value_checks.enabled:
        with torch.no_grad():
            known = _calls.find(*signature)
        if known is not MISSED:
            return known, None
    query, key, value, attn_bias, with_lse, is_causal, scale = signature
    call = _call(query, key, value, attn_bias, dropout_p=dropout_p, is_causal=is_causal, scale=scale)
    call = call._replace(with_lse=with_lse)
    if with_lse and needs_gradient(query, key, value):
        call._replace(softmax=call.softmax._replace(dropout_p=0.0)).check()  # no random numbers are drawn yet
        SDPA.check_gradient(call)  # so that the forward pass raises, and not the backward pass
    if not dropout_p:
        return launch(SDPA, call, _calls, signature), None
    with torch.no_grad():
        rng = new_seed(query)
        inputs = SDPA.inputs_of(call._replace(rng=rng))
        return SDPA.operator("forward_all" if with_lse else "forward")(*inputs), rng


def _call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    *,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    rng: Tensor | None = None,
) -> SdpaCall:
    softmax = softmax_of(is_causal, TOP_LEFT, None, scale, dropout_p=dropout_p)
    return SdpaCall(query, key, value, attn_bias, rng=rng, softmax=softmax, with_lse=True)


def gradients(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor | None,
    philox_offset: Tensor | None,
    attn_bias: Tensor | None,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,  # noqa: ARG001 - the lengths of query and key
    max_k: int,  # noqa: ARG001
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """PyTorch's operator: the gradients of query, key and value.

    `out` and `logsumexp` may be those of more keys than these, as in ring attention.
    """
    if cum_seq_q is not None or cum_seq_k is not None:
        raise UnsupportedError(
            "the gradient of nested tensors", ["cum_seq_q or cum_seq_k is given"], "torch.nn.attention.varlen"
        )
    rng = None
    if dropout_p and philox_seed is not None and philox_offset is not None:
        rng = torch.stack([philox_seed.reshape(()), philox_offset.reshape(())])
    call = _call(query, key, value, attn_bias, dropout_p=dropout_p, is_causal=is_causal, scale=scale, rng=rng)
    try:
        lse = logsumexp.squeeze(-1) if logsumexp.dim() == 4 else logsumexp
        backward = SdpaBackwardCall(grad_out=grad_out, out=out, lse=lse, call=call, needs=_NEEDS)
        grad_q, grad_k, grad_v = launch_backward(SDPA, backward)
    except (ArgumentError, UnsupportedError) as error:
        raise error.renamed(_NAMES) from None
    return grad_q, grad_k, grad_v

"""Attention over dense tensors: `sdpa` and the drop-in `scaled_dot_product_attention`."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from cudnn_sdpa.attention import arguments, lookup, operators  # noqa: F401 - registers the operators
from cudnn_sdpa.attention.arguments import ForwardArguments
from cudnn_sdpa.attention.calls import Result
from cudnn_sdpa.errors import ArgumentError, LayoutError, OptionError, ShapeError, UnsupportedError
from cudnn_sdpa.runtime.eager import is_compiling, is_profiling


@overload
def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = ...,
    causal_alignment: str = ...,
    scale: float | None = ...,
    seq_lens_q: Tensor | None = ...,
    seq_lens_kv: Tensor | None = ...,
    return_lse: Literal[False] = ...,
    out: Tensor | None = ...,
) -> Tensor: ...


@overload
def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = ...,
    causal_alignment: str = ...,
    scale: float | None = ...,
    seq_lens_q: Tensor | None = ...,
    seq_lens_kv: Tensor | None = ...,
    return_lse: Literal[True],
    out: Tensor | None = ...,
) -> tuple[Tensor, Tensor]: ...


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    causal_alignment: str = "top_left",
    scale: float | None = None,
    seq_lens_q: Tensor | None = None,
    seq_lens_kv: Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
) -> Result:
    """Scaled dot-product attention, softmax(scale · q kᵀ + mask) v, forward.

    The first call with given shapes, strides, dtype and options builds a cuDNN plan; every later one is a look-up
    and a launch. Nothing is read back from the GPU. CPU tensors run a plain PyTorch reference of the same
    mathematics, also in float32 and float64.

    Grouped-query attention needs no flag: Hq may be any multiple of Hkv, and query head h uses key head
    h · Hkv // Hq.

    Args:
        q: Queries (B, Hq, Sq, D), float16 or bfloat16. D is a multiple of 8. Any strides with a dense last
            dimension and steps of 16 bytes: BHSD, BSHD through `transpose(1, 2)`, slices of a packed QKV.
        k: Keys (B, Hkv, Skv, D).
        v: Values (B, Hkv, Skv, Dv).
        is_causal: Hide later keys from each query.
        causal_alignment: Where the causal diagonal lies. "top_left": query i sees keys 0 … i. "bottom_right": the
            last query sees the last key, by each sequence's true lengths, as decoding with a cache needs it.
        scale: Factor of the scores; None is 1/sqrt(D). Data, not part of the plan. A negative one costs a copy of q.
        seq_lens_q: True number of queries of each sequence, (B,) int32. Output rows past it are zeros.
        seq_lens_kv: True number of keys of each sequence, (B,) int32, from 0 to Skv. Data on the GPU: changing it
            neither builds nor waits, and nobody checks it: at Sq=1, a length over Skv reads past the tensor. Keys past
            the length are not seen, but v must hold finite numbers there, because its rows are multiplied by 0: make
            a cache with `torch.zeros`.
        return_lse: Also return the log-sum-exp of the scores.
        out: Where to write the result: (B, Hq, Sq, Dv), not overlapping an input.

    Returns:
        The output (B, Hq, Sq, Dv) in q's dtype, dense, its dimensions in memory in q's order. With `return_lse` also
        the natural logarithm of the sum of the exponentials of the scaled and masked scores, (B, Hq, Sq) float32. A
        query that sees no key gets zeros and minus infinity.

    Raises:
        ArgumentError: An argument is wrong; the subclass and the message say which and how.
        UnsupportedError: cuDNN or this GPU has no kernel for it, with every reason; or an input requires grad.
        PlanBuildError: A plan is missing under `no_plan_builds` or while a CUDA graph is captured.
        ExecutionError: The capturing thread has no cuDNN handle yet, or cuDNN refused the launch.
        LibraryError: cuDNN cannot be loaded.

    Examples:
        >>> import torch, cudnn_sdpa
        >>> q = torch.randn(2, 8, 16, 64)  # on a GPU: device="cuda", dtype=torch.bfloat16
        >>> k = v = torch.randn(2, 2, 16, 64)
        >>> cudnn_sdpa.sdpa(q, k, v, is_causal=True).shape
        torch.Size([2, 8, 16, 64])

    The formula is that of "Attention Is All You Need" (Vaswani et al., 2017), section 3.2.1.
    """
    if not is_compiling():
        # The call before this one again? Saves the signature and its look-up, 1.5 µs. Whoever adds a condition here
        # adds it to `lookup.find` too.
        last = lookup.calls.last
        try:
            again = (
                seq_lens_q is None
                and out is None
                and last.is_causal is is_causal
                and last.alignment == causal_alignment
                and last.scale_type is type(scale)
                and last.scale == scale
                and last.with_lse is return_lse
                and last.has_lengths is (seq_lens_kv is not None)
                and not (q.is_nested or k.is_nested or v.is_nested)  # a guard would end the process
                and (last.check(q, k, v) if seq_lens_kv is None else last.check(q, k, v, seq_lens_kv))
                and not is_profiling()
                and forward_ad._current_level < 0
            )
        except AttributeError:  # not tensors: the checks will say so
            again = False
        if again:
            result: Result = last.call(q, k, v, None, seq_lens_kv, None)
            return result
        if isinstance(scale, (int, float)) and type(scale) not in (float, bool):
            scale = _plain_float(scale)
        prepared = lookup.find(q, k, v, seq_lens_q, seq_lens_kv, is_causal, causal_alignment, scale, return_lse, out)
        if prepared is not None:
            return prepared(q, k, v, seq_lens_q, seq_lens_kv, out)
    return _dispatch(
        ForwardArguments(q, k, v, seq_lens_q, seq_lens_kv, is_causal, causal_alignment, scale, return_lse, out)
    )


def _plain_float(scale: float) -> float:
    """A scale of another kind, such as 1 or numpy's, as the float that the operators make of it."""
    try:
        return float(scale)
    except OverflowError:  # the checks will say so
        return scale


def _dispatch(call: ForwardArguments) -> Result:
    """Through PyTorch's dispatcher, which picks cuDNN, the reference or the fake implementation."""
    arguments.check_types(call)
    if not is_compiling():  # a compiled graph checks them when it is traced, and again when it runs
        arguments.check_options(call.is_causal, call.causal_alignment, call.scale)
    arguments.check_no_gradient(q=call.q, k=call.k, v=call.v, out=call.out)
    inputs, out = call[:-2], call.out
    operator = torch.ops.cudnn_sdpa
    if out is None:
        run = operator.sdpa_forward_lse if call.with_lse else operator.sdpa_forward
        result: Result = run(*inputs)
        return result
    if call.with_lse:
        return out, operator.sdpa_forward_lse_out(*inputs, out)
    operator.sdpa_forward_out(*inputs, out)
    return out


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, computed by cuDNN: same signature, same meaning.

    Args:
        query: (…, Hq, L, E), of rank 2 or more; what stands before the heads is batch. Head dims are multiples of 8.
        key: (…, H, S, E), of the query's rank. Batch and heads may be 1 where another's are not.
        value: (…, H, S, Ev).
        attn_mask: Must be None in this version.
        dropout_p: Must be 0 in this version.
        is_causal: Hide later keys, with the diagonal at the top left.
        scale: Factor of the scores; None is 1/sqrt(E).
        enable_gqa: Allow Hq to be a multiple of H.

    Returns:
        (…, Hq, L, Ev), its dimensions in memory in the query's order.

    Raises:
        ArgumentError: An argument is wrong.
        UnsupportedError: A mask, dropout or a gradient was asked for, or cuDNN has no kernel.

    Examples:
        >>> import torch
        >>> from cudnn_sdpa import scaled_dot_product_attention
        >>> q = k = v = torch.randn(4, 16, 64)  # (heads, sequence, head dim)
        >>> scaled_dot_product_attention(q, k, v, is_causal=True).shape
        torch.Size([4, 16, 64])
    """
    check_drop_in_options(attn_mask, dropout_p)
    try:
        if _is_plain_call(query, key, value, enable_gqa):
            return sdpa(query, key, value, is_causal=is_causal, scale=scale)
        q, k, v, options = drop_in_arguments(query, key, value, is_causal, scale, enable_gqa)
        arguments.check_no_gradient(query=query, key=key, value=value)
        out: Tensor = sdpa(q, k, v, **options)
    except ArgumentError as error:
        raise error.renamed({"q": "query", "k": "key", "v": "value"}) from None
    rank = query.dim()
    if rank > 4:
        return out.view(*_batch_of(query, key, value), *out.shape[1:])
    for _ in range(rank, 4):
        out = out.squeeze(0)
    return out


def _is_plain_call(query: Any, key: Any, value: Any, enable_gqa: Any) -> bool:
    """Whether a call needs nothing broadcast or reshaped, so that it can be passed on as it is: saves 8 µs."""
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor) and query.dim() == 4):
        return False
    if query.is_nested or key.is_nested or value.is_nested or forward_ad._current_level >= 0:
        return False
    of_query, of_key, of_value = query.shape, key.shape, value.shape
    return (
        type(enable_gqa) is bool
        and of_key[:2] == of_value[:2]
        and of_query[0] == of_key[0]
        and (enable_gqa is True or of_query[1] == of_key[1])
        and not (query.requires_grad or key.requires_grad or value.requires_grad)
    )


def drop_in_arguments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """The tensors and options of the `sdpa` call that a `scaled_dot_product_attention` call comes down to."""
    named = {"query": query, "key": key, "value": value}
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor):
            raise OptionError(name, type(tensor).__name__, "a torch.Tensor")
        if tensor.is_nested:
            raise LayoutError(name, "a nested tensor", "a dense tensor", "Pad it, and give its lengths.")
        if tensor.dim() < 2 or tensor.dim() != query.dim():
            got = f"shape {tuple(tensor.shape)}"
            got += "" if name == "query" else f" beside query's {tuple(query.shape)}"
            raise ShapeError(name, got, "rank 2 or more, the same for query, key and value")
    if not isinstance(enable_gqa, bool):
        raise OptionError("enable_gqa", repr(enable_gqa), "True or False")
    batch = _batch_of(query, key, value)
    heads = {name: tensor.shape[-3] if tensor.dim() > 2 else 1 for name, tensor in named.items()}
    most_q, most_kv = heads["query"], max(heads["key"], heads["value"])
    if not enable_gqa:
        most_q = most_kv = max(most_q, most_kv)
    for name, most in (("query", most_q), ("key", most_kv), ("value", most_kv)):
        if heads[name] not in (1, most):
            hint = "" if enable_gqa else "Or pass enable_gqa=True."
            raise ShapeError(name, f"{heads[name]} heads", f"1 or {most}, as another of the three has", hint)
    q = _to_four(query, batch, most_q)
    k, v = _to_four(key, batch, most_kv), _to_four(value, batch, most_kv)
    return q, k, v, {"is_causal": is_causal, "scale": scale}


def check_drop_in_options(attn_mask: Any, dropout_p: Any) -> None:
    """Refuses what this version does not have, with all reasons at once."""
    if attn_mask is None and dropout_p == 0.0 and type(dropout_p) is float:
        return
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, (int, float)):
        raise OptionError("dropout_p", type(dropout_p).__name__, "a number")
    reasons = []
    if attn_mask is not None:
        reasons.append("attn_mask: this version of cudnn_sdpa computes unmasked and causal attention")
    if dropout_p != 0.0:
        reasons.append(f"dropout_p={dropout_p}: this version of cudnn_sdpa is for inference")
    if reasons:
        what = " with ".join(["scaled_dot_product_attention", "attn_mask" if attn_mask is not None else "dropout_p"])
        raise UnsupportedError(what, reasons, "torch.nn.functional.scaled_dot_product_attention, which has both")


def _batch_of(query: Tensor, key: Tensor, value: Tensor) -> torch.Size:
    """What stands before the heads, broadcast."""
    try:
        shapes = [tensor.shape[:-3] for tensor in (query, key, value)]
        return torch.Size(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
    except RuntimeError:
        got = ", ".join(str(tuple(tensor.shape)) for tensor in (key, value))
        raise ShapeError("key", f"shapes {got}", f"batches like query's, shape {tuple(query.shape)}") from None


def _to_four(tensor: Tensor, batch: torch.Size, heads: int) -> Tensor:
    """A tensor of rank 4, repeated along batch and heads without a copy; only several batch dimensions may need one."""
    while tensor.dim() < 4:
        tensor = tensor.unsqueeze(0)
    if tensor.dim() == 4 and tensor.shape[1] == heads and tensor.shape[:1] == batch:
        return tensor
    expanded = tensor.expand(*(batch or (1,)), heads, -1, -1)
    return expanded.flatten(0, -4) if expanded.dim() > 4 else expanded

"""Attention of one sequence on many GPUs: `context_parallel` and `context_parallel_varlen`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch
from torch import Tensor

from cudnn_sdpa.attention import arguments
from cudnn_sdpa.attention.arguments import Softmax, softmax_of
from cudnn_sdpa.attention.dense.sdpa import SDPA
from cudnn_sdpa.attention.mask import BOTTOM_RIGHT, TOP_LEFT, Alignment
from cudnn_sdpa.attention.sink_scores import as_sinks
from cudnn_sdpa.attention.varlen.sdpa_varlen import VARLEN
from cudnn_sdpa.distributed import all_gather, collectives, gradient_checks, ring, ulysses
from cudnn_sdpa.distributed.agreement import in_agreement
from cudnn_sdpa.distributed.collectives import check_device, group_rank_of
from cudnn_sdpa.distributed.local_attention import Inputs, Options, Part, State, attend, check_layout
from cudnn_sdpa.engine import autograd_checks, cpu_target, fallback, value_checks
from cudnn_sdpa.engine.dispatch_state import cast_tensor, needs_gradient
from cudnn_sdpa.engine.tensor_checks import check_are_tensors, dtype_name, shape_of
from cudnn_sdpa.errors import ArgumentError, OptionError, ShapeError, UnsupportedError
from cudnn_sdpa.graph.scalars import as_bool, as_int
from cudnn_sdpa.plans import providers

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import Unpack


MethodName = Literal["all_gather", "ulysses", "ring"]
METHODS: dict[str, Callable[[Options, Inputs], State]] = {
    "all_gather": all_gather.run,
    "ulysses": ulysses.run,
    "ring": ring.run,
}


class ParallelOptions(TypedDict, total=False):
    group: ProcessGroup | DeviceMesh | None
    method: MethodName
    is_causal: bool
    window_size: tuple[int, int] | None
    scale: float | None
    softcap: float | None
    sinks: Tensor | None
    dropout_p: float
    deterministic: bool | None


@overload
def context_parallel(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = ..., **options: Unpack[ParallelOptions]
) -> Tensor: ...


@overload
def context_parallel(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[ParallelOptions]
) -> tuple[Tensor, Tensor]: ...


@overload
def context_parallel(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **options: Unpack[ParallelOptions]
) -> Tensor | tuple[Tensor, Tensor]: ...


def context_parallel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: ProcessGroup | DeviceMesh | None = None,
    method: MethodName = "all_gather",
    is_causal: bool = False,
    window_size: tuple[int, int] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    deterministic: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of a sequence whose tokens are spread over the GPUs of a group. Differentiable.

    Each rank calls it with its part of the sequence, as `shard` gives it, and gets its part of the output: the same
    numbers as one GPU would compute. Self-attention: queries, keys and values are of the same tokens.

    | method | each rank holds, besides its part | communicates, for each layer | limits |
    |---|---|---|---|
    | "all_gather" | k, v of all tokens, dense of some heads | k, v, again for gradients, and theirs | none |
    | "ulysses" | q, k, v, output of all tokens, 1/P of the heads | q, k, v, output | heads that P divides |
    | "ring" | k, v of one other rank, the output in float32 | as "all_gather", in P steps | no window, no dropout |

    All overlap communication with kernels, but "all_gather" of packed sequences and "ulysses" of dense ones.
    "all_gather" is the default, as it takes any number of heads. With dropout it keeps the gathered k and v for the
    backward pass.

    Gradients of `sinks` are those of this rank's part of the work, as those of all parameters under data parallelism:
    their sum over the group is the gradient. Every rank must run the backward pass if one does. What ranks must agree
    about (shapes, dtypes, options, which inputs require grad) is compared in the first call of each kind, apart from
    the collectives. Under `torch.compile` the call is a graph break.

    Args:
        q: This rank's queries (B, Hq, S / P, D), where S is the length of the whole sequence and P the number of ranks;
            S / P is even.
        k: Its keys (B, Hkv, S / P, D).
        v: Its values (B, Hkv, S / P, Dv).
        group: The process group, a device mesh of one dimension, or None for all processes.
        method: "all_gather", "ulysses" or "ring".
        is_causal: Mask later keys for each query, in the whole sequence.
        window_size: (left, right): a query sees the keys from `left` before to `right` after itself, in the whole
            sequence; -1 is unbounded.
        scale: Softmax scale; None is 1/sqrt(D).
        softcap: Logit soft-capping, c · tanh(score / c).
        sinks: Attention sinks (Hq,), the same on each rank.
        dropout_p: Dropout probability. Each rank draws its own random numbers: seed them differently.
        return_lse: Also return the LSE (log-sum-exp) of the scores. Not differentiable: a gradient into it raises.
        deterministic: Whether results are bit-exact from run to run; None follows
            `torch.use_deterministic_algorithms`.

    Returns:
        This rank's part of the output (B, Hq, S / P, Dv) in q's dtype. With `return_lse` also that of the LSE,
        (B, Hq, S / P) float32.

    Raises:
        ArgumentError: An argument is wrong, or ranks disagree; the subclass and the message say which and how.
        UnsupportedError: The method cannot do it, with one that can; or cuDNN or this GPU has no kernel for it.

    Examples:
        Run by `torchrun --nproc-per-node 8`, with tokens sharded before the model:

        >>> import torch, torch.distributed as dist
        >>> from cudnn_sdpa.distributed import context_parallel, shard
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> whole = (torch.randn(1, heads, 64, 16, dtype=torch.bfloat16) for heads in (8, 2, 2))
        >>> q, k, v = (shard(tensor, dim=2) for tensor in whole)
        >>> context_parallel(q, k, v, is_causal=True, window_size=(15, 0)).shape
        torch.Size([1, 8, 64, 16])
        >>> dist.destroy_process_group()
    """
    mask: tuple[bool, Alignment, tuple[int, int] | None] = is_causal, TOP_LEFT, window_size
    softmax = partial(softmax_of, *mask, scale, softcap=softcap, deterministic=deterministic, dropout_p=dropout_p)
    return _run("context_parallel", Inputs(q, k, v, sinks), group, method, softmax=softmax, return_lse=return_lse)


@overload
def context_parallel_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[ParallelOptions],
) -> Tensor: ...


@overload
def context_parallel_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    return_lse: Literal[True],
    **options: Unpack[ParallelOptions],
) -> tuple[Tensor, Tensor]: ...


@overload
def context_parallel_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    return_lse: bool,
    **options: Unpack[ParallelOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...


def context_parallel_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    group: ProcessGroup | DeviceMesh | None = None,
    method: MethodName = "all_gather",
    is_causal: bool = False,
    window_size: tuple[int, int] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    deterministic: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over packed sequences whose tokens are spread over the GPUs of a group. Differentiable.

    `context_parallel` for packed sequences, which may begin and end anywhere: only the number of all tokens is a
    multiple of 2·P, with padding behind the last sequence, if need be. Where sequences begin is data on the GPU, which
    no host reads. The table of methods in `context_parallel` applies, with two more limits of "all_gather": a window
    needs a causal mask, or a right bound of 0; and under either there is no dropout without softcap. "ring" launches
    up to four kernels for each rank's keys.

    Args:
        q: This rank's queries (T / P, Hq, D), as `shard(x, dim=0)` gives them, where T is the number of all tokens;
            T / P is even.
        k: Its keys (T / P, Hkv, D).
        v: Its values (T / P, Hkv, Dv).
        cu_seqlens: Offsets of the sequences in all tokens, the last one their end, (B + 1,) int32, the same on each
            rank. Lengths may be 0. Rows past the last offset get zeros, as their gradients do.
        max_seqlen: Length of the longest sequence, or more.
        group: As in `context_parallel`.
        method: "all_gather", "ulysses" or "ring".
        is_causal: Mask later keys of its sequence for each query.
        window_size: (left, right) bounds around each query; -1 is unbounded.
        scale: Softmax scale; None is 1/sqrt(D).
        softcap: Logit soft-capping.
        sinks: Attention sinks (Hq,), the same on each rank.
        dropout_p: Dropout probability.
        return_lse: Also return the LSE of the scores.
        deterministic: Whether results are bit-exact from run to run.

    Returns:
        This rank's part of the output (T / P, Hq, Dv) in q's dtype. With `return_lse` also that of the LSE,
        (T / P, Hq) float32.

    Raises:
        ArgumentError: An argument is wrong, or ranks disagree; the subclass and the message say which and how.
        UnsupportedError: The method cannot do it, with one that can; or cuDNN or this GPU has no kernel for it.

    Examples:
        >>> import torch, torch.distributed as dist
        >>> from cudnn_sdpa.distributed import context_parallel_varlen, shard
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> whole = (torch.randn(12, heads, 16, dtype=torch.bfloat16) for heads in (8, 2, 2))
        >>> q, k, v = (shard(tensor, dim=0) for tensor in whole)
        >>> offsets = torch.tensor([0, 3, 3, 10], dtype=torch.int32)  # 3, 0 and 7 tokens, and 2 of padding
        >>> context_parallel_varlen(q, k, v, offsets, 7, is_causal=True).shape
        torch.Size([12, 8, 16])
        >>> dist.destroy_process_group()
    """
    mask: tuple[bool, Alignment, tuple[int, int] | None] = is_causal, BOTTOM_RIGHT, window_size
    softmax = partial(softmax_of, *mask, scale, softcap=softcap, deterministic=deterministic, dropout_p=dropout_p)
    inputs = Inputs(q=q, k=k, v=v, sinks=sinks, cu_seqlens=cu_seqlens)
    options = {"softmax": softmax, "return_lse": return_lse, "max_seqlen": max_seqlen}
    return _run("context_parallel_varlen", inputs, group, method, **options)


def _run_eagerly(
    function: str,
    inputs: Inputs,
    group: ProcessGroup | DeviceMesh | None,
    method: MethodName,
    *,
    softmax: Callable[[], Softmax],
    return_lse: bool,
    **of_packed: int,
) -> Tensor | tuple[Tensor, Tensor]:
    group_rank = group_rank_of(group)
    return_lse = as_bool(return_lse)

    def summarize() -> tuple[str, tuple[Options, Inputs]]:
        check_method(method)
        arguments.check_flag("return_lse", return_lse)
        options = Options(group_rank, softmax(), **{name: as_int(size) for name, size in of_packed.items()})
        checked = _checked(function, options, inputs, is_packed=bool(of_packed))
        check_supported(function, method, options, checked)
        if method != "ulysses":  # the exchange copies queries, too
            check_layout("q", checked.q, options)
        summary = _summary(method, options, checked)
        if needs_gradient(*checked[:4]):
            _check_gradients(function, method, options, checked, summary=summary)
        return summary, (options, checked)

    options, checked = in_agreement(group_rank, function, summarize)
    if group_rank.ranks == 1:
        out, lse = attend(options, Part.whole(options, checked.q), checked)
    else:
        with collectives.settled():
            out, lse = METHODS[method](options, checked)
    return (out, lse) if return_lse else out


_disable: Any = torch.compiler.disable  # a graph break: stores and messages are no operators
_run: Callable[..., Tensor | tuple[Tensor, Tensor]] = _disable(_run_eagerly)


def check_method(method: object) -> None:
    if not isinstance(method, str) or method not in METHODS:
        raise OptionError("method", repr(method), " or ".join(map(repr, METHODS)))


def _checked(function: str, options: Options, inputs: Inputs, *, is_packed: bool) -> Inputs:
    """The checked tensors, cast by autocast, and the sinks in float32.

    Lengths and other values are checked on the CPU, and on the GPU under `CUDNN_SDPA_DEBUG`.
    """
    named = inputs._asdict()
    cu_seqlens = named.pop("cu_seqlens")
    for name, x in named.items():
        if type(x).__name__ == "DTensor":
            raise OptionError(name, "a DTensor", "this rank's part as a plain tensor", f"Use {name}.to_local().")
    scores = as_sinks(inputs.sinks)
    check_are_tensors(named, ("sinks",))
    autograd_checks.check(function, None, loops=False, **named)
    q, k, v = (cast_tensor(x, inputs.q) for x in inputs.qkv)
    softmax = options.softmax
    softmax.check()
    rng = torch.empty(2, dtype=torch.int64, device=q.device) if softmax.dropout_p else None
    operation: Any = VARLEN if is_packed else SDPA
    kind = operation.reference_call if fallback.is_in_force() else operation.call
    packed: dict[str, object] = {}
    if is_packed:
        packed = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": None}
        packed |= {"max_seqlen_q": options.max_seqlen, "max_seqlen_kv": options.max_seqlen}
    try:
        kind(q=q, k=k, v=v, sinks=scores, rng=rng, softmax=softmax, **packed).check()
    except ArgumentError as error:
        raise error.renamed({"cu_seqlens_q": "cu_seqlens", "max_seqlen_q": "max_seqlen"}) from None
    check_device("q", q, options.group_rank)
    tokens = q.shape[options.dim]
    if k.shape[options.dim] != tokens:
        expected = f"{tokens} tokens, as q has: keys and values are of the same tokens as queries"
        raise ShapeError("k", shape_of(k), expected)
    if tokens == 0 or tokens % 2:
        expected = (
            "an even, positive number of tokens: two chunks of the sequence, as cudnn_sdpa.distributed.shard gives"
        )
        hint = f"Pad the sequence to a multiple of {2 * options.group_rank.ranks}."
        raise ShapeError("q", shape_of(q), expected, hint)
    if options.max_seqlen is not None:
        value_checks.check_offsets("cu_seqlens", cu_seqlens, tokens * options.group_rank.ranks, options.max_seqlen)
    return Inputs(q=q, k=k, v=v, sinks=scores, cu_seqlens=cu_seqlens)


def check_supported(function: str, method: str, options: Options, inputs: Inputs) -> None:
    """Refuses calls that a method does not support, with every reason, and names a method that does."""
    q, k, ranks = inputs.q, inputs.k, options.group_rank.ranks
    if ranks == 1:
        return
    divides = ulysses.repeats(q.shape[1], k.shape[1], ranks) is not None
    reasons: list[str] = []
    if method == "ring" and options.has_window:
        reasons.append("a window ends between the keys of two steps, so that steps would need masks of their own")
    if method == "ring" and options.softmax.dropout_p:
        reasons.append("the backward pass of a step does not have the random numbers of its forward pass")
    if method == "ulysses" and not divides:
        reasons.append(
            f"{q.shape[1]} query heads and {k.shape[1]} key heads cannot be given to {ranks} ranks: query heads are "
            f"no multiple of the smallest common multiple of key heads and ranks"
        )
    gathering = _reasons_against_gathering(options, q)
    reasons += list(gathering) if method == "all_gather" else []
    if not reasons:
        return
    others = ["ulysses"] if divides else []
    others = others if gathering else ["all_gather", *others]
    least = " and ".join(dict.fromkeys(gathering.values()))
    suggestion = f'method="{others[0]}"' if others else f"a group with fewer ranks, or {least}"
    raise UnsupportedError(f'{function} by method="{method}"', reasons, suggestion)


def _check_gradients(function: str, method: str, options: Options, inputs: Inputs, *, summary: str) -> None:
    """Refuses a call whose gradients a rank would refuse in the backward pass, where the others would wait for it."""
    refused = gradient_checks.first_refusal(method, options, inputs, summary)
    if refused is None:
        return
    what, others = f"the gradient of {function}", []
    if options.group_rank.ranks > 1:
        what += f' by method="{method}"'
        others = [
            other
            for other in METHODS
            if UnsupportedError.of(check_supported, function, other, options, inputs=inputs) is None
            and gradient_checks.refusal(other, options, inputs) is None
        ]
    suggestion = f'method="{others[0]}"' if others else gradient_checks.what_works(refused)
    error = UnsupportedError(what, refused.reasons, suggestion)
    raise error if inputs.q.is_cuda else cpu_target.for_gpu(error)


def _reasons_against_gathering(options: Options, q: Tensor) -> dict[str, str]:
    if not options.is_packed or options.max_seqlen is None:
        return {}
    reasons = {}
    _, right = options.bounds
    if options.has_window and right != 0:
        reasons[
            "of packed sequences, a chunk's last query stands at the last key that it is given, which is right for a "
            "causal mask, or a window whose right bound is 0"
        ] = "window_size=(left, 0)"
    has_limits = (q.is_cuda or cpu_target.active() is not None) and not fallback.is_in_force()
    queries = min(q.shape[0] // 2, options.max_seqlen)
    if has_limits and right == 0 and queries > 1 and options.softmax.dropout_p and not options.softmax.is_capped:
        reasons[
            "of packed sequences, a chunk's last query stands at the last key that it is given, and cuDNN has no "
            "dropout for masks that are aligned there, unless there is softcap"
        ] = "no dropout"
    return reasons


def _summary(method: str, options: Options, inputs: Inputs) -> str:
    parts = [f"method={method}", f"device={inputs.q.device.type}"]
    for name, x in inputs._asdict().items():
        what = "None" if x is None else f"{dtype_name(x.dtype)}{list(x.shape)}"
        parts.append(f"{name}={what}" + (" with gradient" if x is not None and needs_gradient(x) else ""))
    parts += [f"{name}={value}" for name, value in options.softmax.keywords().items()]
    parts += [f"dropout_p={options.softmax.dropout_p}", f"max_seqlen={options.max_seqlen}"]
    return "; ".join([*parts, f"providers={','.join(providers.active())}", f"grad={torch.is_grad_enabled()}"])

"""Descriptions of attention calls for `explain`.

Nothing is computed for one: checked calls are described with tensors that have no memory, on their real way.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

from cudnn_sdpa.attention import arguments, memory, reference
from cudnn_sdpa.attention.arguments import MIN_SCALE, ForwardArguments, as_sinks, cast_for_autocast
from cudnn_sdpa.attention.bias import without_causal_bias
from cudnn_sdpa.attention.dense import graphs, large_backward, torch_ops
from cudnn_sdpa.attention.dense.buckets import Bucket
from cudnn_sdpa.attention.dense.drop_in import drop_in_arguments, scaled_dot_product_attention
from cudnn_sdpa.attention.dense.launch_backward import BackwardArguments, Needs
from cudnn_sdpa.attention.dense.plans import BackwardSpec, DenseSpec, ForwardSpec
from cudnn_sdpa.attention.dense.sdpa import run, sdpa
from cudnn_sdpa.attention.mask import TOP_LEFT
from cudnn_sdpa.attention.memory import like_in_memory, new_output
from cudnn_sdpa.attention.verify import DENSE, Results, compare, exact_inputs, run_anew
from cudnn_sdpa.engine import autograd_checks
from cudnn_sdpa.engine.autocast import is_deterministic
from cudnn_sdpa.engine.dispatch_state import needs_gradient
from cudnn_sdpa.engine.explain import Description, describes
from cudnn_sdpa.errors import ArgumentError, UnsupportedError
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.graph.layouts import TensorLayout
from cudnn_sdpa.graph.target import Target

#: The arguments of one call of any kind of attention: a NamedTuple with `q`.
Call = TypeVar("Call", bound=NamedTuple)

#: What autocast may cast.
TO_CAST = ("q", "k", "v", "attn_mask")


@describes(sdpa)
def describe_sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    causal_alignment: str = TOP_LEFT,
    window_size: tuple[int, int] | None = None,
    scale: float | None = None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    softcap: float | None = None,
    alibi: bool = False,
    sinks: Tensor | None = None,
    seq_lens_q: Tensor | None = None,
    seq_lens_kv: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    out: Tensor | None = None,
) -> Description:
    """What `sdpa` with these arguments runs on a GPU; tensors may also be on the CPU."""
    left, right = arguments.window_bounds(window_size)
    given = ForwardArguments(
        *(q, k, v, attn_mask, sinks, seq_lens_q, seq_lens_kv, None),
        *(is_causal, causal_alignment, left, right, scale, dropout_p, softcap, alibi),
        *(False, return_lse, out),
    )
    given = without_causal_bias(given._replace(sinks=as_sinks(sinks)))
    arguments.check_types(given)
    given = given._replace(deterministic=is_deterministic(deterministic))
    call = as_cast(given)
    arguments.check_options(call)
    rng = torch.empty(2, dtype=torch.int64, device=q.device) if dropout_p else None
    arguments.check(call._replace(rng=rng))
    memory.check_strides(call.q, call.k, call.v)
    memory.check_memory(call.q, call.k, call.v, out, attn_mask)
    refused = UnsupportedError.of(autograd_checks.check, "sdpa", out, q=q, k=k, v=v, attn_mask=attn_mask, sinks=sinks)
    if refused is not None:
        return Description(graphs.sdpa_forward, partial(refuse, refused), device_of(q))
    trains = needs_gradient(*given.tensors)
    given = given._replace(with_lse=return_lse or trains)
    call = without_data(call._replace(rng=rng, with_lse=given.with_lse))
    launched, of_scale = with_positive_scale(call)
    forward = ForwardSpec.of(launched)
    notes = [*notes_on_casts(given, call), *of_scale, *forward.extra_kernels()]
    return Description(
        operation=graphs.sdpa_forward,
        key=forward.key,
        device=device_of(q),
        is_empty=forward.is_empty or forward.problem.has_no_plan,
        extra_kernels=[] if forward.is_empty else notes,
        backward=_describe_backward(given, call, forward) if trains else None,
        bucket=partial(_key_of_bucket, forward),
        verify=lambda differentiate: errors_of(given, differentiate=differentiate),
    )


def _key_of_bucket(forward: ForwardSpec, target: Target, device: int | None) -> PlanKey | None:
    bucket = None if forward.is_empty else Bucket.of(forward)
    return None if bucket is None else bucket.key(target, device)


def with_positive_scale(call: ForwardArguments) -> tuple[ForwardArguments, list[str]]:
    """The forward call that is launched, as cuDNN computes no negative scale, and what that takes."""
    if call.scale_value >= MIN_SCALE:
        return call, []
    out = new_output(call.q, call.v) if call.out is None else call.out
    if call.scale_value > -MIN_SCALE:
        return call._replace(q=torch.zeros_like(call.q), out=out), ["q is replaced by zeros, for the scale of 0"]
    return call._replace(q=call.q.neg(), out=out), ["q is negated into a copy, for the negative scale"]


def _describe_backward(given: ForwardArguments, call: ForwardArguments, forward: ForwardSpec) -> Description:
    """The backward pass for a gradient that lies in memory as the output does."""
    device, needs = device_of(given.q), Needs(*(x is not None and x.requires_grad for x in given[:5]))
    out = torch.empty_strided(forward.out.shape, forward.out.stride, dtype=forward.out.dtype, device="meta")
    lse = torch.empty(out.shape[:3], dtype=torch.float32, device="meta")
    of = BackwardArguments(out, out, lse, call, call.deterministic, needs)
    without_plan = forward.is_empty or forward.problem.is_single or forward.problem.has_no_plan
    is_cut = not without_plan and large_backward.is_too_large(*call[:3], out)
    try:
        parts = pieces_of(of) if is_cut else [of]
    except UnsupportedError as error:
        return Description(graphs.sdpa_backward, partial(refuse, error), device)
    launched, of_scale = backward_with_positive_scale(parts[0].call)
    if needs.attn_mask and torch_ops.loses_mask_gradient(parts[0].call):
        launched = launched._replace(q=like_in_memory(launched.q))
        of_scale = [*of_scale, "q is multiplied by the small scale in a copy, and so is its gradient"]
    layouts = TensorLayout.of(parts[0].out), TensorLayout.of(parts[0].grad_out)
    backward = BackwardSpec(DenseSpec.of(launched), *layouts, call.deterministic, needs.attn_mask, needs.sinks)
    notes = [note_on_pieces(len(parts))] if is_cut else []
    notes += [*of_scale, *backward.extra_kernels(), *notes_on_casts(given, call, back=True)]
    return Description(
        operation=graphs.sdpa_backward,
        key=backward.key,
        device=device,
        is_empty=without_plan,
        extra_kernels=[] if forward.is_empty else notes,
    )


def pieces_of(of: BackwardArguments) -> list[BackwardArguments]:
    """The calls that compute, one after the other, the gradients of one that is too large for one plan.

    Raises:
        UnsupportedError: It cannot be cut.
    """
    large_backward.check(of.call, mask_gradient=of.needs.attn_mask)
    found: list[BackwardArguments] = []

    def run(part: BackwardArguments) -> list[Tensor]:
        found.append(part)
        return [torch.empty_like(x) for x in (*part.call[:3], part.call.sinks) if x is not None]

    large_backward.gradients(of, run)
    return found


def backward_with_positive_scale(call: ForwardArguments) -> tuple[ForwardArguments, list[str]]:
    """The call whose gradients are computed, likewise."""
    if call.scale_value >= MIN_SCALE:
        return call, []
    if call.scale_value > -MIN_SCALE:
        note = "q is replaced by zeros, and the gradients of q and k are filled with zeros, for the scale of 0"
        return call._replace(q=like_in_memory(call.q)), [note]
    note = "q is negated into a copy, and its gradient negated, for the negative scale"
    return call._replace(q=like_in_memory(call.q)), [note]


@describes(scaled_dot_product_attention)
def describe_drop_in(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Description:
    """The same for `scaled_dot_product_attention`."""
    q, k, v, options = drop_in_arguments(query, key, value, attn_mask, is_causal, scale, enable_gqa)
    try:
        return describe_sdpa(q, k, v, dropout_p=dropout_p, **options)
    except ArgumentError as error:
        raise error.renamed({"q": "query", "k": "key", "v": "value"}) from None


def device_of(q: Tensor) -> int | None:
    """Index of the GPU that `q` is on, None elsewhere."""
    return q.get_device() if q.is_cuda else None


def without_data(call: Call) -> Call:
    """The call with tensors that lie in memory in the same way, and have none."""
    tensors: dict[str, Any] = {name: _like(x, "meta") for name, x in call._asdict().items() if isinstance(x, Tensor)}
    return call._replace(**tensors)


def _like(tensor: Tensor, device: torch.device | str) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def as_cast(call: Call) -> Call:
    """The call as autocast casts it; the cast tensors have undefined values."""
    fields = call._asdict()
    tensors: dict[str, Any] = {name: x for name in TO_CAST if (x := fields.get(name)) is not None}
    probes = cast_for_autocast(ForwardArguments(**{name: x.new_empty(0) for name, x in tensors.items()}))
    dtypes = {name: getattr(probes, name).dtype for name in tensors}
    layouts = {name: _like(x, "meta").to(dtypes[name]) for name, x in tensors.items() if x.dtype != dtypes[name]}
    cast: dict[str, Any] = {name: _like(x, tensors["q"].device) for name, x in layouts.items()}
    return call._replace(**cast)


def notes_on_casts(original: Call, cast: Call, *, back: bool = False) -> list[str]:
    """The casts that autocast runs in the forward pass, or in the backward pass, to make `cast` of `original`."""
    tensors, cast_tensors = original._asdict(), cast._asdict()
    changed = [
        (name, x) for name in TO_CAST if (x := tensors.get(name)) is not None and x.dtype != cast_tensors[name].dtype
    ]
    if back:
        return [f"the gradient of {name} is cast back, under autocast" for name, x in changed if x.requires_grad]
    dtype = str(cast_tensors["q"].dtype).removeprefix("torch.")
    return [f"{name} is cast to {dtype}, under autocast" for name, _ in changed]


def note_on_pieces(number: int) -> str:
    """What a gradient takes that is too large for one plan."""
    how = f"piece by piece, {number} in all" if number > 1 else "in one piece"
    return (
        f"the gradient is computed {how}, as tensors reach too far in memory: this is the plan of the first; "
        "what still lies too far apart is copied, and the results are copied into place"
    )


def refuse(error: UnsupportedError, *_: object) -> NoReturn:
    """Raises what is known to speak against a plan, when its key is asked for."""
    raise error


def errors_of(call: ForwardArguments, *, differentiate: bool) -> dict[str, float]:
    """Relative errors of a dense call's output, of its log-sum-exp if it has one, and of its gradients.

    Args:
        call: The call as it was given.
        differentiate: Whether it is differentiated by the inputs that require grad.

    Raises:
        OptionError: There is dropout, for which the reference has other random numbers.
    """
    found, grad_out = run_anew(call, DENSE, run, differentiate=differentiate)
    exact_call = exact_inputs(cast_for_autocast(call), DENSE)
    out, lse = reference.attention(exact_call)
    if not found.gradients:
        return compare(found, Results(out, lse, {}))
    gradients = dict(zip(DENSE, reference.gradients(grad_out.double(), out, exact_call), strict=True))
    mask, by_mask = call.attn_mask, gradients["attn_mask"]
    if mask is not None and by_mask is not None:
        shape = (1,) * (4 - mask.dim()) + tuple(mask.shape)
        gradients["attn_mask"] = by_mask.sum_to_size(shape).reshape(mask.shape)
    return compare(found, Results(out, lse, {name: x for name, x in gradients.items() if x is not None}))

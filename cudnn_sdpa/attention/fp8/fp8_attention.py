"""`fp8_attention`: attention computed in FP8 on tensors in bfloat16 or float16, with gradients."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.nn import functional

from cudnn_sdpa.attention import arguments, sharding
from cudnn_sdpa.attention.arguments import (
    ForwardArguments,
    Softmax,
    cast_for_autocast,
    outputs_without_data,
    softmax_of,
)
from cudnn_sdpa.attention.fp8 import arguments as fp8_arguments
from cudnn_sdpa.attention.fp8.arguments import Fp8BackwardScales, Fp8Gradients, Fp8Scales
from cudnn_sdpa.attention.fp8.call import Fp8BackwardCall, Fp8Call
from cudnn_sdpa.attention.fp8.quantize import (
    Wanted,
    by_kernel,
    defect_of,
    dequantize,
    is_readable,
    new_like,
    quantize,
    record_all,
)
from cudnn_sdpa.attention.fp8.scaling import DTYPE, Fp8Scaling, check_grad_dtype, limits_of
from cudnn_sdpa.attention.fp8.scaling_state import (
    AMAX,
    DESCALE,
    DK,
    DO,
    DP,
    DQ,
    DV,
    K,
    O,
    Q,
    S,
    V,
    backward_scales,
    forward_scales,
    new_table,
    number,
    scale_for,
    set_scales,
)
from cudnn_sdpa.attention.fp8.sdpa_fp8 import sdpa_fp8, sdpa_fp8_backward
from cudnn_sdpa.attention.mask import Alignment
from cudnn_sdpa.attention.reference import without_autocast
from cudnn_sdpa.engine import autograd_checks, cpu_target, fallback, tensor_checks
from cudnn_sdpa.engine.autograd_checks import refuse_batch, refuse_second_gradient
from cudnn_sdpa.engine.dispatch_state import Function, is_plain_memory, needs_gradient
from cudnn_sdpa.engine.sharding import has_dtensor
from cudnn_sdpa.engine.sharding import run as run_on_dtensors
from cudnn_sdpa.engine.tensor_checks import dtype_name, without_data
from cudnn_sdpa.errors import DeviceError, OptionError, UnsupportedError
from cudnn_sdpa.graph.layouts import TensorLayout
from cudnn_sdpa.graph.scalars import as_bool, as_float, is_compiling
from cudnn_sdpa.graph.target import Target, live_target


class Call(NamedTuple):
    """A call without its queries, keys and values; `deterministic` is for its gradients."""

    options: dict[str, Any]
    scaling: Fp8Scaling | None
    grad_dtype: torch.dtype
    deterministic: bool

    @property
    def limits(self) -> tuple[float, float]:
        return limits_of(self.grad_dtype, 0 if self.scaling is None else self.scaling.margin)


class Rotation(Protocol):
    """The rotation of queries and keys before attention, which changes neither shapes nor dtypes."""

    @property
    def needs_gradient(self) -> bool:
        """Whether a weight of its norms requires grad, so that autograd follows it in any case."""

    def in_half(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys, rotated."""

    def in_fp8(self, q: Tensor, k: Tensor, q_scale: Tensor, k_scale: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries and keys, rotated, in E4M3 with given descales, and their amax values. For inference."""


class Forward(NamedTuple):
    out: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out_fp8: Tensor
    lse: Tensor | None
    table: Tensor


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: Call,
    *,
    half_output: bool = False,
    with_lse: bool = False,
    rotation: Rotation | None = None,
) -> Forward:
    """The forward pass; `half_output` is whether cuDNN writes 16 bits."""
    scaling, (limit, _) = call.scaling, call.limits
    record = given = None
    if scaling is not None:
        scaling.begin()
        record = scaling.recorder(backward=False)
        given = scaling.scales(backward=False, is_cuda=q.is_cuda)
    table = new_table(q.device)
    is_current, amaxes = scaling is not None and scaling.inputs == "current", {}
    if rotation is None or given is None or is_current:
        if rotation is not None:
            q, k = rotation.in_half(q, k)
        wanted = Wanted((Q, K, V), DTYPE, limit, is_current)
        q8, k8, v8 = quantize((q, k, v), wanted, table=table, given=given, record=record)
    else:
        (v8,) = quantize((v,), Wanted((V,), DTYPE, limit, False), table=table, given=given, record=record)
        descales = number(table, DESCALE, Q), number(table, DESCALE, K)
        q8, k8, amaxes[Q], amaxes[K] = rotation.in_fp8(q, k, *descales)
    scales = forward_scales(table)
    if half_output:  # a scale of 1, or NaN if an input is not finite
        scales = scales._replace(scale_o=1 + defect_of(table, amaxes))
    out_dtype = q.dtype if half_output else DTYPE
    found = sdpa_fp8(q8, k8, v8, scales, **call.options, out_dtype=out_dtype, return_lse=with_lse)
    amaxes |= {S: found.amax_s, O: found.amax_o}
    if half_output:
        record_all(amaxes, record)
        out = found.out
    else:
        (out,) = dequantize((found.out,), (O,), dtype=q.dtype, table=table, amaxes=amaxes, record=record)
    return Forward(out=out, q=q8, k=k8, v=v8, out_fp8=found.out, lse=found.lse, table=table)


class Attention(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        with without_autocast(q):
            result = forward(q, k, v, call, with_lse=True)
        lengths = call.options["seq_lens_q"], call.options["seq_lens_kv"]
        saved = (result.q, result.k, result.v, result.out_fp8, result.lse, result.table)
        ctx.save_for_backward(*saved, *lengths)
        ctx.call, ctx.dtype = call, q.dtype
        return result.out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        refuse_batch(grad_out)
        if torch.is_grad_enabled():  # the saved FP8 tensors are not part of the graph of q, k and v
            refuse_second_gradient("fp8_attention")
        *saved, _, _ = ctx.saved_tensors
        wanted = [index for index in range(3) if ctx.needs_input_grad[index]]
        with without_autocast(grad_out):
            results = backward(grad_out.to(ctx.dtype), Forward(grad_out, *saved), ctx.call, wanted)
        gradients = dict(zip(wanted, results, strict=True))
        return (*map(gradients.get, range(3)), None)


def backward(grad_out: Tensor, of: Forward, call: Call, wanted: list[int]) -> list[Tensor]:
    scaling, (_, limit) = call.scaling, call.limits
    record = None if scaling is None else scaling.recorder(backward=True)
    given = None if scaling is None else scaling.scales(backward=True, is_cuda=grad_out.is_cuda)
    table = new_table(grad_out.device)
    current = scaling is not None and scaling.inputs == "current"
    if by_kernel(grad_out) and not is_readable(grad_out):
        grad_out = new_like(grad_out, grad_out.dtype).copy_(grad_out)
    quantized = Wanted((DO,), call.grad_dtype, limit, current)
    (gradient,) = quantize((grad_out,), quantized, table=table, given=given, record=record)
    found = None
    for _ in range(0 if given is not None else 1 if call.grad_dtype == torch.float8_e5m2 else 2):
        set_scales(table, DP, scale_for(limit, _bounds(of, table, call, found)))
        found = _gradients(gradient, of, table, call)
    if found is not None:
        set_scales(table, DP, scale_for(limit, _bounds(of, table, call, found)))
    found = _gradients(gradient, of, table, call)
    amaxes = {DP: found.amax_dp, DQ: found.amax_dq, DK: found.amax_dk, DV: found.amax_dv}
    rows = [(DQ, DK, DV)[index] for index in wanted]
    gradients = [(found.dq, found.dk, found.dv)[index] for index in wanted]
    return dequantize(gradients, rows, dtype=grad_out.dtype, table=table, amaxes=amaxes, record=record)


def _gradients(gradient: Tensor, of: Forward, table: Tensor, call: Call) -> Fp8Gradients:
    assert of.lse is not None
    scales = backward_scales(of.table, table)
    tensors = (of.q, of.k, of.v, of.out_fp8, of.lse)
    return sdpa_fp8_backward(gradient, *tensors, scales, **call.options, deterministic=call.deterministic)


def _bounds(of: Forward, table: Tensor, call: Call, found: Fp8Gradients | None) -> Tensor:
    """The amax of dp, dq, dk and dv from a first pass; before it, an upper bound for dp, and 1 for the others.

    The gradient of a score is P (x - mean x) · scale, where |x|, a product of a row of dO and one of V, is at most
    Dv · max |dO| · max |V|, and P (1 - P) is at most 1/4. The values of dq, dk and dv do not matter yet.
    """
    if found is not None:
        return torch.cat([found.amax_dp, found.amax_dq, found.amax_dk, found.amax_dv])
    scale = call.options["scale"]
    factor = of.v.shape[3] * (of.q.shape[3] ** -0.5 if scale is None else scale)
    bound = factor * table[AMAX, DO, 0] * of.table[AMAX, V, 0]
    return torch.stack([bound, *(torch.ones_like(bound),) * 3])


IN_DTYPES = (torch.bfloat16, torch.float16)


def fp8_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scaling: Fp8Scaling | None = None,
    is_causal: bool = False,
    causal_alignment: Alignment = "top_left",
    window_size: tuple[int, int] | None = None,
    scale: float | None = None,
    seq_lens_q: Tensor | None = None,
    seq_lens_kv: Tensor | None = None,
    grad_dtype: torch.dtype | None = None,
) -> Tensor:
    """Attention in FP8 on tensors in bfloat16 or float16. Differentiable.

    Queries, keys and values are quantized to E4M3 with one scale per tensor; the output is converted back. The gradient
    of the output is quantized to `grad_dtype`, and the gradients are converted back. Autograd saves the FP8 tensors,
    half of what attention in bfloat16 saves. Nothing synchronizes with the GPU, and a CUDA graph can capture all of it.

    Without `scaling`, scales come from the tensors of the call ("current scaling"), which are read twice. The backward
    plan then runs two or three times, to find the amax of its results. Use this for inference and experiments; to
    train, give each layer an `Fp8Scaling`, or use `Fp8Attention`.

    cuDNN writes the output in FP8, because gradients read it in FP8. On data-center Blackwell, cuDNN writes `q.dtype`
    directly if no gradients are needed. A non-finite value in an input makes the whole output NaN and updates no scale.
    Rows past `seq_lens_*` count towards the scales: keep them small.

    On the CPU an emulation runs. torch.compile breaks the graph at this call.

    Args:
        q: Queries (B, Hq, Sq, D), bfloat16 or float16; D is a multiple of 16. Under `torch.autocast` tensors are cast
            as for PyTorch's own attention.
        k: Keys (B, Hkv, Skv, D); Hq is a multiple of Hkv.
        v: Values (B, Hkv, Skv, Dv).
        scaling: The scales of this layer and their history.
        is_causal: Mask later keys for each query.
        causal_alignment: "top_left" aligns the first query with the first key, "bottom_right" the last with the last.
        window_size: (left, right) bounds around the diagonal; -1 is unbounded.
        scale: Factor applied to the scores, positive; None is 1/sqrt(D).
        seq_lens_q: Actual sequence lengths of the queries, (B,) int32. Output rows past them are zeros.
        seq_lens_kv: Actual sequence lengths of the keys, (B,) int32.
        grad_dtype: float8_e5m2 or float8_e4m3fn; None is that of `scaling`, or float8_e5m2 without one.

    Returns:
        The output (B, Hq, Sq, Dv) in q's dtype and memory order.

    Raises:
        ArgumentError: An argument is wrong; the subclass and the message say which and how.
        UnsupportedError: cuDNN or this GPU has no kernel for it, or none for its gradients if they are needed.
        PlanBuildError: A plan is missing under `no_plan_builds` or while a CUDA graph is captured.

    Examples:
        >>> import torch
        >>> from cudnn_sdpa.attention.fp8.fp8_attention import fp8_attention
        >>> q, k, v = torch.randn(3, 1, 4, 64, 32, dtype=torch.bfloat16)
        >>> exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        >>> error = (fp8_attention(q, k, v, is_causal=True) - exact).norm() / exact.norm()
        >>> bool(error < 0.06)
        True
    """
    options: dict[str, Any] = {
        "is_causal": as_bool(is_causal),
        "causal_alignment": causal_alignment,
        "window_size": window_size,
        "scale": as_float(scale),
        "seq_lens_q": seq_lens_q,
        "seq_lens_kv": seq_lens_kv,
    }
    if is_compiling():
        return _eager(q, k, v, scaling=scaling, grad_dtype=grad_dtype, **options)
    return attend(q, k, v, options, scaling=scaling, grad_dtype=grad_dtype)


#: For torch.compile, which cannot trace our kernels and the histories.
_eager = _disable_dynamo(fp8_attention)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: dict[str, Any],
    *,
    scaling: Fp8Scaling | None,
    grad_dtype: torch.dtype | None = None,
    rotation: Rotation | None = None,
) -> Tensor:
    """`fp8_attention`, of queries and keys that are rotated before."""
    if functional.scaled_dot_product_attention is not autograd_checks.PYTORCHS:
        autograd_checks.refuse_context_parallel("fp8_attention")
    if rotation is not None and has_dtensor(q, k):
        (q, k), rotation = rotation.in_half(q, k), None
    seq_lens_q, seq_lens_kv = options["seq_lens_q"], options["seq_lens_kv"]
    tensors = {"q": q, "k": k, "v": v, "seq_lens_q": seq_lens_q, "seq_lens_kv": seq_lens_kv}
    fp8_arguments.check_tensors(tensors)
    if has_dtensor(*tensors.values()):
        given = {**tensors, **options}
        return run_on_dtensors(
            "fp8_attention",
            sharding.fp8_attention(given),
            given,
            lambda local, _: fp8_attention(**local, scaling=scaling, grad_dtype=grad_dtype),
        )
    cast = cast_for_autocast(ForwardArguments(q, k, v))
    q, k, v = cast.q, cast.k, cast.v
    masks = [options[name] for name in ("is_causal", "causal_alignment", "window_size", "scale")]
    softmax = softmax_of(*masks)
    of = ForwardArguments(q, k, v, seq_lens_q=seq_lens_q, seq_lens_kv=seq_lens_kv, softmax=softmax)
    check(of)
    call = Call(options, scaling, check_scaling(scaling, grad_dtype, q), softmax.deterministic)
    trains = needs_gradient(q, k, v) or (rotation is not None and rotation.needs_gradient)
    half_output = check_support(of, trains=trains)
    if trains:
        q, k = (q, k) if rotation is None else rotation.in_half(q, k)
        return Attention.apply(q, k, v, call)  # type: ignore[no-any-return]
    with torch.no_grad(), without_autocast(q):
        return forward(q, k, v, call, half_output=half_output, rotation=rotation).out


def check(of: ForwardArguments) -> None:
    q, k, v = of.qkv
    fp8_arguments.check_options(of)
    hint = "Convert it with .to(torch.bfloat16); sdpa_fp8 takes FP8 tensors."
    fp8_arguments.check_common(of, IN_DTYPES, hint)
    # Tensors inside a functorch transform have no address.
    autograd_checks.refuse_tangents({"q": q, "k": k, "v": v}, "attention in bfloat16")
    autograd_checks.refuse_transforms("fp8_attention", q, k, v, loops=False)
    if arguments.has_limits(of):
        tensor_checks.check_strides(q, k, v)
    if is_plain_memory(q, k, v):
        tensor_checks.check_addresses(q=q, k=k, v=v)
    arguments.check_values(of)  # here already, and not by sdpa_fp8: a refused call records nothing


def check_scaling(scaling: object, grad_dtype: torch.dtype | None, q: Tensor) -> torch.dtype:
    """Checks that the state fits the call; returns the dtype of gradients."""
    if scaling is not None and not isinstance(scaling, Fp8Scaling):
        raise OptionError("scaling", type(scaling).__name__, "cudnn_sdpa.Fp8Scaling or None")
    if scaling is not None and scaling.scale.device != q.device:
        hint = "Move it once with scaling.to(q.device)."
        raise DeviceError("scaling", str(scaling.scale.device), f"{q.device}, the device of q", hint)
    if scaling is not None:
        scaling.check()
    known: torch.dtype = torch.float8_e5m2 if scaling is None else scaling.grad_dtype
    if grad_dtype is None:
        return known
    check_grad_dtype(grad_dtype)
    if scaling is not None and grad_dtype != known:
        expected = f"{dtype_name(known)}, which its scales are for, or None"
        raise OptionError("grad_dtype", dtype_name(grad_dtype), expected)
    return grad_dtype


def check_support(of: ForwardArguments, *, trains: bool) -> bool:
    """Whether cuDNN writes the output in 16 bits directly. Refuses calls for which the GPU has no kernel."""
    q, k, v = of.qkv
    if not q.numel() or not k.numel():
        return False
    lengths = of.seq_lens_q is not None, of.seq_lens_kv is not None
    asked = ((q.shape, k.shape, v.shape), lengths, of.softmax, trains)
    if q.is_cuda:
        return _support(q.get_device(), *asked)
    name = cpu_target.active_name()
    if name is None or q.device.type != "cpu" or fallback.is_in_force() or not is_plain_memory(q, k, v):
        return False
    try:
        return _support(name, *asked)
    except UnsupportedError as error:
        raise cpu_target.for_gpu(error) from None


@functools.lru_cache(maxsize=1024)
def _support(
    device: int | str,
    shapes: Sequence[Sequence[int]],
    lengths: tuple[bool, bool],
    softmax: Softmax,
    trains: bool,
) -> bool:
    target = live_target(device) if isinstance(device, int) else cpu_target.target_of(device)
    q, k, v = (torch.empty(*shape, dtype=DTYPE, device="meta") for shape in shapes)
    of_q, of_kv = (q.new_empty(len(q), dtype=torch.int32) if is_given else None for is_given in lengths)
    call = in_fp8(ForwardArguments(q, k, v, seq_lens_q=of_q, seq_lens_kv=of_kv, softmax=softmax), with_lse=trains)
    if not trains and has_half_output(call, target):
        return True
    try:
        call.check_keys(target)
        if trains:
            gradient_in_fp8(call, DTYPE).check_keys(target)
    except UnsupportedError as error:
        raise error.renamed({"sdpa_fp8": "fp8_attention", "sdpa_fp8_backward": "fp8_attention"}) from None
    return False


def has_half_output(call: Fp8Call, target: Target) -> bool:
    """Whether cuDNN can write the output of a call in 16 bits."""
    return UnsupportedError.of(list, call._replace(out_dtype=torch.bfloat16).keys(target, None)) is None


def in_fp8(of: ForwardArguments, *, with_lse: bool) -> Fp8Call:
    """The call of `sdpa_fp8`, without data: quantized tensors are dense, in the memory order of the originals."""
    of = without_data(of)
    fields: dict[str, Any] = {name: new_like(x, DTYPE) for name, x in zip("qkv", of.qkv, strict=True)}
    fields |= {name: getattr(of, name) for name in ("seq_lens_q", "seq_lens_kv", "softmax")}
    fields |= dict.fromkeys(Fp8Scales._fields, torch.empty(1, device="meta"))
    return Fp8Call(**fields, with_lse=with_lse)


def gradient_in_fp8(call: Fp8Call, grad_dtype: torch.dtype) -> Fp8BackwardCall:
    """The call of `sdpa_fp8_backward` for a call without data."""
    fields: dict[str, Any] = outputs_without_data(TensorLayout(*call.outputs()[0]))
    fields["grad_out"] = fields["grad_out"].to(grad_dtype)
    fields |= {name: getattr(call, name) for name in ("q", "k", "v", "seq_lens_q", "seq_lens_kv", "softmax")}
    fields |= dict.fromkeys(Fp8BackwardScales._fields, call.scale_o)
    return Fp8BackwardCall(**fields)

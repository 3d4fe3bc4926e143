"""The arguments of a dense call, and checks of them: messages name the argument, what it got and what was expected."""

from __future__ import annotations

import inspect
import reprlib
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypedDict, TypeVar

import torch
from torch import Tensor

from cudnn_sdpa.attention.mask import ALIGNMENTS, TOP_LEFT, UNBOUNDED, Alignment
from cudnn_sdpa.attention.sink_scores import SinkUse, WithSinks
from cudnn_sdpa.engine import cpu_target, tensor_checks, value_checks
from cudnn_sdpa.engine.dispatch_state import cast_tensor, is_deterministic
from cudnn_sdpa.engine.launch import Layout
from cudnn_sdpa.engine.tensor_checks import (
    Fields,
    check_are_tensors,
    check_is_tensor,
    check_tensor,
    dtype_name,
    like_in_memory,
    shape_of,
)
from cudnn_sdpa.errors import DtypeError, LayoutError, LayoutWarning, OptionError, ShapeError
from cudnn_sdpa.graph.layouts import TensorLayout, contiguous_stride, dense_stride_like
from cudnn_sdpa.graph.scalars import LARGEST, as_bool, as_float, as_int, is_compiling, is_integer, is_true
from cudnn_sdpa.plans import providers


class SoftmaxOptions(TypedDict, total=False):
    """The options of the softmax as `sdpa`, `sdpa_varlen`, `sdpa_paged` and `sdpa_paged_varlen` document them."""

    is_causal: bool
    causal_alignment: Alignment
    window_size: tuple[int, int] | None
    scale: float | None
    softcap: float | None
    sinks: Tensor | None


#: The options of the softmax that change scores or weights other than by masks and the scale.
BEYOND_MASKS = ("dropout_p", "softcap", "alibi")


class Softmax(NamedTuple):
    """The options of the softmax of a call, for all kinds of attention: those that a kind lacks are at their defaults.

    Operators have them one by one, in this order.
    """

    is_causal: bool = False
    causal_alignment: str = TOP_LEFT
    window_left: int = UNBOUNDED
    window_right: int = UNBOUNDED
    scale: float | None = None
    dropout_p: float = 0.0
    softcap: float | None = None
    alibi: bool = False
    deterministic: bool = False

    @property
    def has_window(self) -> bool:
        return self.window_left != UNBOUNDED or self.window_right != UNBOUNDED

    @property
    def is_capped(self) -> bool:
        return self.softcap is not None

    def keywords(self) -> dict[str, Any]:
        """The options that all functions with gradients take, as their arguments."""
        window = self.window_left, self.window_right
        return {
            "is_causal": self.is_causal,
            "causal_alignment": self.causal_alignment,
            "window_size": None if window == (UNBOUNDED, UNBOUNDED) else window,
            "scale": self.scale,
            "softcap": self.softcap,
            "deterministic": self.deterministic,
        }

    def check(self) -> None:
        check_flag("is_causal", self.is_causal)
        if self.causal_alignment not in ALIGNMENTS:
            raise OptionError("causal_alignment", repr(self.causal_alignment), " or ".join(map(repr, ALIGNMENTS)))
        if not isinstance(self.alibi, bool):
            raise OptionError("alibi", repr(self.alibi), "True or False", "Pass slopes of your own through attn_mask.")
        for bound in (self.window_left, self.window_right):
            if not is_integer(bound) or is_true(bound < UNBOUNDED) or is_true(bound > LARGEST):
                raise OptionError("window_size", repr((self.window_left, self.window_right)), _WINDOW)
        check_scale(self.scale)
        _check_number("softcap", self.softcap, "no soft-capping", MAX_SOFTCAP)
        if self.softcap is not None and not self.softcap >= 1 / MAX_SOFTCAP:
            expected = f"a positive number of at least {1 / MAX_SOFTCAP:g}, or None for no soft-capping"
            raise OptionError("softcap", repr(self.softcap), expected)
        if isinstance(self.dropout_p, bool) or not isinstance(self.dropout_p, (int, float)):
            raise OptionError("dropout_p", type(self.dropout_p).__name__, "a number from 0 up to, not including, 1")
        if not 0 <= self.dropout_p < 1:
            raise OptionError("dropout_p", repr(self.dropout_p), "a number from 0 up to, not including, 1")


class _WithSoftmax(Protocol):
    @property
    def softmax(self) -> Softmax: ...


class _WithOptions(_WithSoftmax, WithSinks, Protocol): ...


def spec_options(call: _WithOptions, *, sinks_in_plan: bool) -> dict[str, Any]:
    """The options of a call's spec; its plan, if it has sinks, reads them or does not."""
    softmax, use = call.softmax, SinkUse.IN_PLAN if sinks_in_plan else SinkUse.AFTER_PLAN
    return {
        "sink_use": SinkUse.ABSENT if call.sinks is None else use,
        "dropout_p": float(softmax.dropout_p),
        "is_capped": softmax.is_capped,
        "alibi": softmax.alibi,
        "deterministic": softmax.deterministic,
    }


def check_options(call: _WithSoftmax) -> None:
    call.softmax.check()


def softmax_of(
    is_causal: bool,
    causal_alignment: Alignment,
    window_size: tuple[int, int] | None,
    scale: float | None,
    softcap: float | None = None,
    deterministic: object = None,
    dropout_p: float = 0.0,
    alibi: bool = False,
) -> Softmax:
    """The options as public functions take them; only `window_size` and `deterministic` are checked."""
    left, right = (UNBOUNDED, UNBOUNDED) if window_size is None else window_bounds(window_size)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    elif not isinstance(deterministic, bool):
        deterministic = is_deterministic(deterministic)
    # This is on the way of known calls in Python: what has its type already is not converted.
    if scale is not None and type(scale) is not float:
        scale = as_float(scale)
    if softcap is not None and type(softcap) is not float:
        softcap = as_float(softcap)
    if type(dropout_p) is not float:
        dropout_p = as_float(dropout_p)
    return Softmax(  # by position, which takes half the time
        is_causal if type(is_causal) is bool else as_bool(is_causal),
        causal_alignment,
        left,
        right,
        scale,
        dropout_p,
        softcap,
        alibi if type(alibi) is bool else as_bool(alibi),
        deterministic,
    )


_SOFTMAX = tuple(inspect.signature(softmax_of).parameters)


def grouped(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a public function with the options of its softmax as one."""
    options = {name: arguments[name] for name in _SOFTMAX if name in arguments}
    others = {name: value for name, value in arguments.items() if name not in options}
    return {**others, "softmax": softmax_of(**options)}


def check_lengths(name: str, lengths: Tensor | None, q: Tensor, of: str = "q") -> None:
    """Sequence lengths: dense, one int32 per batch entry, on the device of `q`, which the caller calls `of`."""
    if lengths is None:
        return
    check_is_tensor(name, lengths, optional=True)
    meaning = "one length per batch entry"
    check_tensor(name, lengths, q, of=of, dtype=torch.int32, shape=q.shape[:1], meaning=meaning, dense=True)


def check_mask(mask: Tensor | None, q: Tensor, k: Tensor) -> None:
    """`attn_mask`: boolean or float (additive), broadcastable to (B, Hq, Sq, Skv)."""
    if mask is None:
        return
    full = (*q.shape[:3], k.shape[2])
    dtypes = (torch.bool, q.dtype, torch.float32)
    check_tensor("attn_mask", mask, q, dtype=dtypes, hint="Convert it with attn_mask.to(q.dtype).")
    sizes = zip(reversed(mask.shape), reversed(full), strict=False)
    if mask.dim() > 4 or any(is_true(size != wanted) and not is_true(size == 1) for size, wanted in sizes):
        is_of_keys = mask.dim() == 2 and mask.shape == (q.shape[0], k.shape[2])
        hint = "Is it a padding mask (B, Skv)? Use attn_mask[:, None, None]." if is_of_keys else ""
        raise ShapeError("attn_mask", shape_of(mask), f"a shape that broadcasts to (B, Hq, Sq, Skv) = {full}", hint)


CUDA_DTYPES = (torch.float16, torch.bfloat16)
CPU_DTYPES = (*CUDA_DTYPES, torch.float32, torch.float64)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


class ForwardArguments(NamedTuple):
    """A forward call, in the order in which operators take its arguments."""

    q: Tensor
    k: Tensor
    v: Tensor
    attn_mask: Tensor | None = None
    sinks: Tensor | None = None
    seq_lens_q: Tensor | None = None
    seq_lens_kv: Tensor | None = None
    rng: Tensor | None = None
    softmax: Softmax = Softmax()
    with_lse: bool = False
    out: Tensor | None = None

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    @property
    def differentiable(self) -> tuple[Tensor | None, ...]:
        return self.q, self.k, self.v, self.attn_mask, self.sinks

    @property
    def scale_value(self) -> float:
        return scale_of(self)

    @property
    def is_for_cudnn(self) -> bool:
        """Whether cuDNN's limits of dtypes and head dims apply; they also do on the CPU unless lifted."""
        return True

    def has_only(self, known: Collection[str]) -> bool:
        """Whether every argument outside of `known` is at its default.

        Who serves calls in place of cuDNN asks this, so that an option added later is declined, not ignored.
        """
        values = self._asdict() | self.softmax._asdict()
        defaults = self._field_defaults | Softmax._field_defaults
        return all(
            name in known or value is defaults[name] or (not isinstance(value, Tensor) and value == defaults[name])
            for name, value in values.items()
            if name != "softmax"
        )


class Axes(NamedTuple):
    """The dimension of each tensor along which a call is divided; counted from behind where a tensor is broadcast."""

    entries: Mapping[str, int]
    heads: Mapping[str, int]
    heads_kv: Mapping[str, int]


DENSE_AXES = Axes(
    entries={"q": 0, "k": 0, "v": 0, "attn_mask": -4, "seq_lens_q": 0, "seq_lens_kv": 0},
    heads={"q": 1, "attn_mask": -3, "sinks": 0},
    heads_kv={"k": 1, "v": 1},
)

ForwardT = TypeVar("ForwardT", bound=ForwardArguments)

KindT = TypeVar("KindT")


def from_fields(kind: Callable[..., KindT], *values: object, **fields: Any) -> KindT:
    """A call of this class, given the options of its softmax by name among its fields."""
    softmax: Softmax = kind._field_defaults["softmax"]  # type: ignore[attr-defined]  # a NamedTuple
    options = {name: fields.pop(name) for name in Softmax._fields if name in fields}
    return kind(*values, **fields, softmax=softmax._replace(**options))


class Needs(NamedTuple):
    """Which gradients a backward call of dense attention needs."""

    q: bool
    k: bool
    v: bool
    attn_mask: bool
    sinks: bool


class GradientCall(NamedTuple):
    """A backward call of dense attention; see `BackwardCall`.

    Attributes:
        call: The forward call, with the tensors as they were saved.
        needs: Which of the differentiable inputs need a gradient.
    """

    grad_out: Tensor
    out: Tensor
    lse: Tensor
    call: ForwardArguments
    needs: tuple[bool, ...]


class _CallWithOut(Protocol):
    @property
    def q(self) -> Tensor: ...
    @property
    def v(self) -> Tensor: ...
    @property
    def out(self) -> Tensor | None: ...


def output_layout(call: _CallWithOut) -> TensorLayout:
    """The layout of a call's output: dense, its dimensions in the memory order of those of `q`."""
    if call.out is not None:
        return TensorLayout.of(call.out)
    q, shape = call.q, (*call.q.shape[:-1], call.v.shape[-1])
    return TensorLayout(shape, dense_stride_like(shape, q.shape, q.stride()), q.dtype)


def results(call: _CallWithOut) -> tuple[Layout, Layout]:
    """Shape, stride and dtype of the output (B, Hq, Sq, Dv) or (Tq, Hq, Dv), and of the LSE (B, Hq, Sq) or (Tq, Hq)."""
    out, rows = output_layout(call), tuple(call.q.shape[:-1])
    return (out.shape, out.stride, out.dtype), (rows, contiguous_stride(rows), torch.float32)


def outputs_without_data(layout: TensorLayout) -> dict[str, Tensor]:
    """The output, its gradient and its LSE as meta tensors, for a backward call that is only described."""
    out = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device="meta")
    return {"grad_out": out, "out": out, "lse": torch.empty(out.shape[:-1], dtype=torch.float32, device="meta")}


class ReferenceArguments(ForwardArguments):
    """A call that the PyTorch reference runs, on any device, without cuDNN's limits of dtypes and head dims."""

    __slots__ = ()

    is_for_cudnn = False


class _Limited(Protocol):
    @property
    def q(self) -> Tensor: ...
    @property
    def is_for_cudnn(self) -> bool: ...


def has_limits(call: _Limited) -> bool:
    """Whether cuDNN's limits apply to a call: on the CPU they are those of the GPU named by `cpu_checks`."""
    return call.is_for_cudnn and (call.q.device.type != "cpu" or cpu_target.active_name() is not None)


def check(call: ForwardArguments) -> None:
    """Checks of tensors that apply on every device. They read no address and no value, so fake tensors pass."""
    check_qkv(call.q, call.k, call.v, for_cudnn=has_limits(call))
    check_lengths("seq_lens_q", call.seq_lens_q, call.q)
    check_lengths("seq_lens_kv", call.seq_lens_kv, call.q)
    check_mask(call.attn_mask, call.q, call.k)
    check_sinks(call.sinks, call.q)
    if call.rng is None and call.softmax.dropout_p > 0:
        raise OptionError("rng", "None", "seed and offset as a tensor of two int64, for dropout")
    check_tensor("rng", call.rng, call.q, dtype=torch.int64, shape=(2,), dense=True)
    if call.out is not None:
        check_out(call.out, call.q, call.v, for_cudnn=has_limits(call))


def check_sinks(sinks: Tensor | None, q: Tensor) -> None:
    """Attention sinks: dense, one float32 per head of the queries, (B, Hq, Sq, D) or packed (T, Hq, D)."""
    meaning = "one score per head of q"
    check_tensor("sinks", sinks, q, dtype=torch.float32, shape=q.shape[1:2], meaning=meaning, dense=True)


def check_types(call: ForwardArguments) -> None:
    """Types that the operators' schemas would refuse as well, but without naming the argument."""
    optional = {name: getattr(call, name) for name in ("attn_mask", "sinks", "seq_lens_q", "seq_lens_kv", "out")}
    check_operands({"q": call.q, "k": call.k, "v": call.v}, optional, call.with_lse)


def check_operands(required: Mapping[str, object], optional: Mapping[str, object], with_lse: object) -> None:
    """The types of a call's tensors, by name; `out` must not have the sign of its elements apart from its memory."""
    check_are_tensors({**required, **optional}, optional)
    out = optional["out"]
    if isinstance(out, Tensor) and not is_compiling() and out.is_neg():
        raise LayoutError("out", "a negated view", "a tensor of its own", "Or pass what it is a view of.")
    check_flag("return_lse", with_lse)


def check_flag(name: str, flag: object) -> None:
    if not isinstance(flag, bool):
        raise OptionError(name, repr(flag), "True or False")


#: The dimensions of q, k and v.
DIMENSIONS = ("batch", "heads", "sequence", "head dim")


def check_qkv(q: Tensor, k: Tensor, v: Tensor, *, for_cudnn: bool = True) -> None:
    """Ranks, sizes, dtypes and devices of query, key and value, with or without cuDNN's limits."""
    check_dtype(q, for_cudnn=for_cudnn)
    check_alike(q, k, v)
    check_sizes(q, k, v, 8 if for_cudnn else 1)


def check_dtype(q: Tensor, *, for_cudnn: bool) -> None:
    """The dtype of the queries: one of a GPU's attention, or of the reference."""
    allowed = allowed_dtypes(q.device) if for_cudnn else CPU_DTYPES
    if q.dtype not in allowed:
        raise dtype_error("q", q.dtype, allowed, device=q.device, hint=_hint_on_dtype(q))


def check_alike(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Query, key and value have rank 4, one dtype and one device."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        hint = "Add the missing batch or head dimension with unsqueeze(0)." if x.dim() == 3 else ""
        check_tensor(name, x, q, shape=DIMENSIONS, hint=hint)


def allowed_dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    """The dtypes of attention on a device; on the CPU those of the reference, if `cpu_checks` allows any."""
    return CPU_DTYPES if device.type == "cpu" and not cpu_target.checks_dtypes() else CUDA_DTYPES


def dtype_error(
    name: str, dtype: torch.dtype, allowed: Sequence[torch.dtype], *, device: torch.device, hint: str
) -> DtypeError:
    """The error for a dtype that is not one of those allowed on a device."""
    where = device.type
    if device.type == "cpu" and dtype in CPU_DTYPES:  # which the reference takes
        where, hint = str(cpu_target.active_name()), f"{hint} {cpu_target.note_on_dtypes()}".lstrip()
    return DtypeError(name, dtype_name(dtype), " or ".join(map(dtype_name, allowed)) + f" on {where}", hint)


def _hint_on_dtype(q: Tensor) -> str:
    if not q.is_floating_point():
        return ""
    convert = "Convert with q.to(torch.bfloat16)"
    if q.dtype != torch.float32:
        return f"{convert}."
    return f"{convert}. sdpa takes float32 under providers('cudnn', 'own'), and kernels.attention always."


def check_sizes(q: Tensor, k: Tensor, v: Tensor, multiple: int) -> None:
    """Sizes of query, key and value that fit together, and head dims that are multiples of `multiple`."""
    batch, heads_q, _, head_dim = q.shape
    _, heads_kv, skv, _ = k.shape
    for name, tensor in (("k", k), ("v", v)):
        if is_true(tensor.shape[0] != batch):
            raise ShapeError(
                name,
                shape_of(tensor),
                f"batch {batch}, as q has ({shape_of(q)})",
                f"{name}.expand repeats a batch of 1 without a copy.",
            )
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.shape[1] == 0:
            raise ShapeError(name, "0 heads", "at least one head")
        if tensor.shape[3] == 0 or tensor.shape[3] % multiple != 0:
            expected = f"a positive multiple of {multiple}"
            note = f" {cpu_target.note()}" if multiple > 1 and tensor.device.type == "cpu" else ""
            hint = f"Pad it with torch.nn.functional.pad.{note}"
            raise ShapeError(name, f"head dim {tensor.shape[3]}", expected, hint)
    if k.shape[3] != head_dim:
        raise ShapeError("k", f"head dim {k.shape[3]}", f"{head_dim}, the head dim of q")
    if heads_q % heads_kv != 0:
        raise ShapeError("k", f"{heads_kv} heads", f"a divisor of q's {heads_q} heads (grouped-query attention)")
    if v.shape[1] != heads_kv:
        raise ShapeError("v", f"{v.shape[1]} heads", f"{heads_kv}, the number of heads of k")
    if is_true(v.shape[2] != skv):
        raise ShapeError("v", f"sequence length {v.shape[2]}", f"{skv}, the sequence length of k")


_WINDOW = "None or two integers (left, right): keys before and after the diagonal, -1 for no bound"


def window_bounds(window_size: Iterable[object] | None) -> tuple[int, int]:
    """The two bounds of `window_size`, as integers that the operators take."""
    if window_size is None:
        return UNBOUNDED, UNBOUNDED
    try:
        if isinstance(window_size, int) or (isinstance(window_size, (list, tuple)) and len(window_size) != 2):
            raise ValueError  # before PyTorch 2.11's compiler refuses to unpack it, in words of its own
        left, right = window_size
    except (TypeError, ValueError):
        raise OptionError("window_size", repr(window_size), _WINDOW) from None
    left, right = as_int(left), as_int(right)
    if not (is_integer(left) and is_integer(right)):
        raise OptionError("window_size", repr((left, right)), _WINDOW)
    return left, right


#: Scores above a few million leave float32 no digits for the softmax; with this bound, usual scores stay below.
MAX_SCALE = 65536.0

#: The kernels divide scores by `softcap` and multiply gradients by it. Beyond this, or below one over this, float32
#: flushes the one to 0 or overflows in the other.
MAX_SOFTCAP = 1e18


def check_scale(scale: object) -> None:
    """A softmax scale: a number within bounds, or None."""
    _check_number("scale", scale, "1/sqrt(head dim)", MAX_SCALE)


def _check_number(name: str, value: object, without: str, largest: float) -> None:
    if value is None or isinstance(value, torch.SymFloat):
        return
    expected = f"a float, or None for {without}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        hint = f"A tensor would need a device-to-host copy; use {name}.item()." if isinstance(value, Tensor) else ""
        raise OptionError(name, type(value).__name__, expected, hint)
    if not abs(value) <= largest:
        bound = f" of at most {largest:g} in size" if largest < torch.finfo(torch.float32).max else ""
        raise OptionError(name, reprlib.repr(value), f"a finite float32 number{bound}, or None for {without}")


def check_out(out: Tensor, q: Tensor, v: Tensor, *, for_cudnn: bool) -> None:
    """An output allocated by the caller, for dense or packed queries: shape, dtype, device and strides."""
    hint = "Allocate it with q.new_empty(...), or leave it out."
    check_tensor("out", out, q, shape=(*q.shape[:-1], v.shape[-1]), hint=hint)
    if out.numel() != 0:
        tensor_checks.check_strides_of_out(out, for_cudnn=for_cudnn)


def check_values(call: ForwardArguments) -> None:
    value_checks.check_lengths("seq_lens_q", call.seq_lens_q, call.q.shape[2])
    value_checks.check_lengths("seq_lens_kv", call.seq_lens_kv, call.k.shape[2])


def check_strides(call: ForwardArguments) -> None:
    tensor_checks.check_strides(*call.qkv)


# Of calls of `sdpa`, which own kernels may serve.


def is_for_cudnn(_call: ForwardArguments) -> bool:
    """Where own kernels may serve it, cuDNN's limits of dtypes, head dims and strides come later, with its key."""
    return providers.OWN not in (providers.Setting.names or providers.active())


def check_dense_strides(call: ForwardArguments) -> None:
    if call.is_for_cudnn:
        check_strides(call)


def check_dense_memory(call: ForwardArguments) -> None:
    _check_memory(call, tensor_checks.check_addresses if call.is_for_cudnn else tensor_checks.check_elements)


class AttentionCall(Fields, Protocol):
    @property
    def q(self) -> Tensor: ...
    @property
    def k(self) -> Tensor: ...
    @property
    def v(self) -> Tensor: ...
    def _asdict(self) -> dict[str, object]: ...


def check_memory(call: AttentionCall) -> None:
    """Addresses, and that `out` overlaps no other tensor. A mask may be misaligned."""
    _check_memory(call, tensor_checks.check_addresses)


def _check_memory(call: AttentionCall, check: Callable[..., None]) -> None:
    check(q=call.q, k=call.k, v=call.v)
    mask, out = getattr(call, "attn_mask", None), getattr(call, "out", None)
    if mask is not None and (not mask.is_cuda or mask.data_ptr() < tensor_checks.LOWEST):
        tensor_checks.check_present("attn_mask", mask)
    if out is not None:
        tensor_checks.check_out_apart(out, call)


AttentionT = TypeVar("AttentionT", bound=AttentionCall)


#: The most heads of a model, and the fewest tokens, that a call is warned of.
MAX_HEADS, MIN_TOKENS = 128, 32

#: Arguments whose sizes tell the order of the dimensions, and pages.
_TELLING = ("attn_mask", "mask", "sinks", "page_table")


def warn_of_order(call: AttentionCall) -> None:
    """Warns, before a new call is prepared, of tensors that look like (batch, sequence, heads, head dim)."""
    if all(getattr(call, name, None) is None for name in _TELLING):
        _warn_if_transposed(call.q, call.k)


def _warn_if_transposed(q: Tensor, k: Tensor) -> None:
    """Warns of grouped heads behind their tokens: they fit as more heads than queries, a multiple of the keys.

    Attention of tokens to themselves never is like this, nor are tokens behind a cache, which have at least as many
    keys. Views by `transpose(1, 2)`, as of a linear layer's output, have their heads closer together than their tokens.
    """
    (_, tokens, heads, _), (_, tokens_kv, heads_kv, _) = q.shape, k.shape
    if heads_kv >= heads or tokens != tokens_kv or tokens <= max(heads, MIN_TOKENS - 1) or heads > MAX_HEADS:
        return
    if heads_kv < 2 or heads % heads_kv or q.stride(1) < q.stride(2) or k.stride(1) < k.stride(2):
        return
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("cudnn_sdpa.", "torch.")):
        level, frame = level + 1, frame.f_back
    warnings.warn(
        f"q and k look like (batch, sequence, heads, head dim) with {heads} and {heads_kv} heads, but are taken as"
        f" (batch, heads, sequence, head dim): {heads} queries attend to {heads_kv} keys. If that is not meant, pass"
        " q.transpose(1, 2), k.transpose(1, 2) and v.transpose(1, 2), which are views; if it is, filter LayoutWarning.",
        LayoutWarning,
        stacklevel=level,
    )


class AttentionGradientCall(Fields, Protocol):
    @property
    def call(self) -> AttentionCall: ...
    @property
    def needs(self) -> tuple[bool, ...]: ...

    @property
    def grad_out(self) -> Tensor: ...
    @property
    def out(self) -> Tensor: ...
    @property
    def lse(self) -> Tensor: ...


GradientT = TypeVar("GradientT", bound=AttentionGradientCall)


#: Smallest scale passed to cuDNN; with a smaller one every float16 or bfloat16 score rounds to 0. cuDNN's kernels mask
#: keys with a score of -inf before they scale, so a scale of 0 or less turns a masked key into NaN or +inf (seen on
#: cuDNN 9.19: wrong results).
MIN_SCALE = 1e-30


class Scaled(_WithSoftmax, Protocol):
    @property
    def q(self) -> Tensor: ...


def scale_of(call: Scaled) -> float:
    scale = call.softmax.scale
    return call.q.shape[-1] ** -0.5 if scale is None else float(scale)


def numbers_of(call: _WithSoftmax, scale: float) -> dict[str, float | None]:
    """The host scalars of a call's plan, by operand."""
    return {"scale": scale, "softcap": call.softmax.softcap}


def query_factor(call: Scaled) -> float | None:
    """The factor of q that makes the scale positive, as cuDNN needs it; None if it is."""
    scale = scale_of(call)
    if scale >= MIN_SCALE:
        return None
    return 0.0 if scale > -MIN_SCALE else -1.0


class _ScaledCall(AttentionCall, Scaled, Protocol): ...


ScaledT = TypeVar("ScaledT", bound=_ScaledCall)


def as_launched(call: ScaledT) -> ScaledT:
    """The call that is launched: where `query_factor` says so, with the layout of a multiplied copy of q."""
    if query_factor(call) is None:
        return call
    q = like_in_memory(torch.empty_strided(call.q.shape, call.q.stride(), dtype=call.q.dtype, device="meta"))
    return call._replace(q=q, softmax=call.softmax._replace(scale=max(-scale_of(call), MIN_SCALE)))


def cast_for_autocast(call: ForwardT) -> ForwardT:
    """The call with its floating-point tensors cast as autocast casts them for PyTorch's own attention."""
    q, k, v = (cast_tensor(tensor, call.q) for tensor in call.qkv)
    return call._replace(q=q, k=k, v=v, attn_mask=cast_tensor(call.attn_mask, call.q))

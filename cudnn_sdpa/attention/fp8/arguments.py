"""Arguments and results of attention in FP8, and the checks of arguments."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from cudnn_sdpa.attention import arguments
from cudnn_sdpa.attention.arguments import ForwardArguments, check_is_dense, check_lengths, dtype_name, shape_of
from cudnn_sdpa.attention.mask import TOP_LEFT, UNBOUNDED
from cudnn_sdpa.attention.paged.arguments import check_table
from cudnn_sdpa.errors import DeviceError, DtypeError, LayoutError, OptionError, ShapeError
from cudnn_sdpa.graph.symbolic_shapes import is_compiling

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
OUT_DTYPES = (*FP8_DTYPES, torch.bfloat16, torch.float16)

#: Head dims of cuDNN's FP8 kernels are multiples of this: a row of a matrix instruction.
HEAD_DIM_MULTIPLE = 16

#: Smallest factor of the scores: kernels mask a key with a score of -inf, and scale it afterwards.
MIN_SCALE = 1e-30


class Fp8Scales(NamedTuple):
    """The scales of `sdpa_fp8`, each a float32 tensor of one element on the device of `q`.

    A tensor x is stored as fp8(x · scale) and read as its FP8 values times a descale, which is 1 / scale.

    Attributes:
        descale_q: Descale of q.
        descale_k: Descale of k.
        descale_v: Descale of v.
        descale_s: Descale of the softmax's exponentials, 1 / `scale_s`.
        scale_s: Scale of the softmax's exponentials, which are at most 1 and are rounded to the dtype of q. At most the
            largest number of this dtype: 448 for E4M3, 57344 for E5M2.
        scale_o: Scale of the output.
    """

    descale_q: Tensor
    descale_k: Tensor
    descale_v: Tensor
    descale_s: Tensor
    scale_s: Tensor
    scale_o: Tensor


class Fp8BackwardScales(NamedTuple):
    """The scales of `sdpa_fp8_backward`, each a float32 tensor of one element on the device of `q`.

    `Fp8Scales` explains scales and descales.

    Attributes:
        descale_q: Descale of q.
        descale_k: Descale of k.
        descale_v: Descale of v.
        descale_o: Descale of the output, 1 / `scale_o` of the forward pass.
        descale_do: Descale of the output's gradient.
        descale_s: Descale of the probabilities, 1 / `scale_s`.
        descale_dp: Descale of the gradient of the scores, 1 / `scale_dp`.
        scale_s: Scale of the probabilities, which are rounded to the dtype of q.
        scale_dq: Scale of the gradient of q.
        scale_dk: Scale of the gradient of k.
        scale_dv: Scale of the gradient of v.
        scale_dp: Scale of the gradient of the scores, which is rounded to the dtype of `grad_out`.
    """

    descale_q: Tensor
    descale_k: Tensor
    descale_v: Tensor
    descale_o: Tensor
    descale_do: Tensor
    descale_s: Tensor
    descale_dp: Tensor
    scale_s: Tensor
    scale_dq: Tensor
    scale_dk: Tensor
    scale_dv: Tensor
    scale_dp: Tensor


_SCALES, _BACKWARD_SCALES = attrgetter(*Fp8Scales._fields), attrgetter(*Fp8BackwardScales._fields)


class Fp8Output(NamedTuple):
    """The results of `sdpa_fp8`.

    Attributes:
        out: The output (B, Hq, Sq, Dv), multiplied by `scale_o`.
        amax_s: The amax of the probabilities, (1,) float32, before `scale_s`.
        amax_o: The amax of the output, (1,) float32, before `scale_o`. An amax is the largest absolute value.
        lse: The LSE (log-sum-exp) of the scores (B, Hq, Sq) float32; None without `return_lse`.
    """

    out: Tensor
    amax_s: Tensor
    amax_o: Tensor
    lse: Tensor | None


class Fp8Gradients(NamedTuple):
    """The results of `sdpa_fp8_backward`.

    Attributes:
        dq: The gradient of q, multiplied by `scale_dq`, in the dtype of `grad_out`.
        dk: The gradient of k, multiplied by `scale_dk`.
        dv: The gradient of v, multiplied by `scale_dv`.
        amax_dq: The amax of the gradient of q, (1,) float32, before `scale_dq`.
        amax_dk: The amax of the gradient of k.
        amax_dv: The amax of the gradient of v.
        amax_dp: The amax of the gradient of the scores, (1,) float32, before `scale_dp`.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    amax_dq: Tensor
    amax_dk: Tensor
    amax_dv: Tensor
    amax_dp: Tensor


class Fp8Arguments(NamedTuple):
    """A forward call, in the order in which the operator takes its arguments.

    Attributes:
        page_table: The pages of keys; k and v are then pages.
        page_table_v: The pages of values; None if they are those of the keys.
        out_dtype: The dtype of the output; None is that of q.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    descale_q: Tensor
    descale_k: Tensor
    descale_v: Tensor
    descale_s: Tensor
    scale_s: Tensor
    scale_o: Tensor
    seq_lens_q: Tensor | None = None
    seq_lens_kv: Tensor | None = None
    page_table: Tensor | None = None
    page_table_v: Tensor | None = None
    is_causal: bool = False
    causal_alignment: str = TOP_LEFT
    window_left: int = UNBOUNDED
    window_right: int = UNBOUNDED
    scale: float | None = None
    out_dtype: torch.dtype | None = None
    with_lse: bool = False

    @property
    def scales(self) -> tuple[Tensor, ...]:
        """The scales, in the order of `Fp8Scales`."""
        return _SCALES(self)

    @property
    def tables(self) -> tuple[Tensor, Tensor] | None:
        """The page tables of keys and values."""
        if self.page_table is None:
            return None
        return self.page_table, self.page_table if self.page_table_v is None else self.page_table_v

    @property
    def scale_value(self) -> float:
        """The factor of the scores."""
        return self.q.shape[3] ** -0.5 if self.scale is None else float(self.scale)


class Fp8BackwardArguments(NamedTuple):
    """A backward call, in the order in which the operator takes its arguments."""

    grad_out: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    descale_q: Tensor
    descale_k: Tensor
    descale_v: Tensor
    descale_o: Tensor
    descale_do: Tensor
    descale_s: Tensor
    descale_dp: Tensor
    scale_s: Tensor
    scale_dq: Tensor
    scale_dk: Tensor
    scale_dv: Tensor
    scale_dp: Tensor
    seq_lens_q: Tensor | None = None
    seq_lens_kv: Tensor | None = None
    is_causal: bool = False
    causal_alignment: str = TOP_LEFT
    window_left: int = UNBOUNDED
    window_right: int = UNBOUNDED
    scale: float | None = None
    deterministic: bool = False

    @property
    def scales(self) -> tuple[Tensor, ...]:
        """The scales, in the order of `Fp8BackwardScales`."""
        return _BACKWARD_SCALES(self)

    @property
    def scale_value(self) -> float:
        """The factor of the scores."""
        return self.q.shape[3] ** -0.5 if self.scale is None else float(self.scale)


#: The tensors of a call that are not scales, and the page tables.
TENSORS = ("q", "k", "v", "seq_lens_q", "seq_lens_kv")
TENSORS_OF_BACKWARD = ("grad_out", "q", "k", "v", "out", "lse", "seq_lens_q", "seq_lens_kv")
TABLES = ("page_table", "page_table_v")


#: What messages call the scales of a call.
SCALES = {name: f"scales.{name}" for name in (*Fp8Scales._fields, *Fp8BackwardScales._fields)}


def as_dense(call: Fp8Arguments | Fp8BackwardArguments) -> ForwardArguments:
    """The tensors and options that calls in other dtypes have, too; with pages, k and v are pages."""
    return ForwardArguments(
        q=call.q,
        k=call.k,
        v=call.v,
        seq_lens_q=call.seq_lens_q,
        seq_lens_kv=call.seq_lens_kv,
        is_causal=call.is_causal,
        causal_alignment=call.causal_alignment,
        window_left=call.window_left,
        window_right=call.window_right,
        scale=call.scale,
        deterministic=isinstance(call, Fp8BackwardArguments) and call.deterministic,
        with_lse=isinstance(call, Fp8BackwardArguments) or call.with_lse,
    )


def check_scales_type(scales: object, kind: type[tuple[Tensor, ...]]) -> None:
    """Checks that the scales are of their class."""
    if not isinstance(scales, kind):
        raise OptionError("scales", type(scales).__name__, f"cudnn_sdpa.{kind.__name__}")


def check_tensors(tensors: Mapping[str, object]) -> None:
    """Checks types, as the operators' schemas do, and names the argument. Lengths may be None."""
    for name, tensor in tensors.items():
        optional = name.startswith("seq_lens")
        if tensor is None and optional:
            continue
        if not isinstance(tensor, Tensor):
            raise OptionError(name, type(tensor).__name__, "a torch.Tensor" + (" or None" if optional else ""))
        if tensor.device.type not in ("cuda", "cpu", "meta"):
            raise DeviceError(name, str(tensor.device), "a CUDA device, or the CPU for the reference")
        check_is_dense(name, tensor)
        if not is_compiling() and tensor.is_neg() and tensor.dtype in FP8_DTYPES:  # no question that Dynamo can trace
            raise LayoutError(name, "a negated view", "a tensor of its own", "PyTorch negates no FP8: negate before.")


def check_types(call: Fp8Arguments) -> None:
    """Types that the operator's schema would refuse as well, but without naming the argument."""
    check_tensors({name: getattr(call, name) for name in TENSORS})
    _check_types_of_scales(call, Fp8Scales._fields)
    if not isinstance(call.with_lse, bool):
        raise OptionError("return_lse", repr(call.with_lse), "True or False")
    if call.page_table is not None or call.page_table_v is not None:
        for name in TABLES:
            table = getattr(call, name)
            if not isinstance(table, Tensor) and (table is not None or name == "page_table"):
                raise OptionError(name, type(table).__name__, "a torch.Tensor of int32")
            if table is not None:
                check_is_dense(name, table)
    _check_out_dtype(call)


def check_types_of_backward(call: Fp8BackwardArguments) -> None:
    """`check_types` for a backward call."""
    check_tensors({name: getattr(call, name) for name in TENSORS_OF_BACKWARD})
    _check_types_of_scales(call, Fp8BackwardScales._fields)


def _check_types_of_scales(call: Fp8Arguments | Fp8BackwardArguments, names: tuple[str, ...]) -> None:
    for name in names:
        scale = getattr(call, name)
        if not isinstance(scale, Tensor):
            hint = "Make one with torch.tensor([1.0], dtype=torch.float32, device=q.device)."
            raise OptionError(f"scales.{name}", type(scale).__name__, _A_SCALE, hint)
        check_is_dense(f"scales.{name}", scale)


_A_SCALE = "a float32 tensor of one element"


def _check_out_dtype(call: Fp8Arguments) -> None:
    if call.out_dtype is not None and call.out_dtype not in OUT_DTYPES:
        expected = ", ".join(map(dtype_name, OUT_DTYPES))
        raise OptionError("out_dtype", repr(call.out_dtype), f"one of {expected}, or None for the dtype of q")


def check_options(call: Fp8Arguments | Fp8BackwardArguments) -> None:
    """The options, which are not tensors."""
    arguments.check_options(as_dense(call))
    if call.scale is not None and not call.scale >= MIN_SCALE:
        raise OptionError("scale", repr(call.scale), "a positive number, or None for 1/sqrt(head dim)")


def check(call: Fp8Arguments) -> None:
    """The checks of tensors for every device. They read no address and no value, so that fake tensors pass."""
    if call.tables is None:
        _check_dense(call)
        return
    q, k, v = call.q, call.k, call.v
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            shape = "(batch, heads, sequence, head dim)" if name == "q" else "(pages, heads, page size, head dim)"
            raise ShapeError(name, shape_of(tensor), f"rank 4: {shape}")
    if k.shape[0] == 0:
        raise ShapeError("k", shape_of(k), "at least one page")
    present = min(1, q.shape[0])
    try:
        _check_dense(call._replace(q=q[:present], k=k[:present], v=v[:present], seq_lens_q=None, seq_lens_kv=None))
    except ShapeError as error:
        raise error.renamed({"sequence length": "page size"}) from None
    if v.shape[0] != k.shape[0]:
        raise ShapeError("v", f"{v.shape[0]} pages", f"{k.shape[0]}, the number of pages of k")
    if k.shape[2] < 1 or k.shape[2] & (k.shape[2] - 1):
        raise ShapeError("k", f"pages of {k.shape[2]} tokens", "a power of two, such as 16 or 64")
    if call.seq_lens_kv is None:
        raise OptionError(
            "seq_lens_kv", "None", "the actual sequence lengths of the keys, which a page table does not give"
        )
    for name, table in zip(TABLES, call.tables, strict=True):
        check_table(name, table, q)
    if call.tables[0].shape != call.tables[1].shape:
        raise ShapeError("page_table_v", shape_of(call.tables[1]), f"{tuple(call.tables[0].shape)}, as page_table has")
    check_lengths("seq_lens_q", call.seq_lens_q, q)
    check_lengths("seq_lens_kv", call.seq_lens_kv, q)


def _check_dense(call: Fp8Arguments) -> None:
    _check_common(call)
    _check_scales(call, Fp8Scales._fields)
    _check_out_dtype(call)


def check_backward(call: Fp8BackwardArguments) -> None:
    """`check` for a backward call."""
    q, v = call.q, call.v
    _check_common(call)
    shape = (*q.shape[:3], v.shape[3])
    for name, tensor in (("grad_out", call.grad_out), ("out", call.out)):
        if tensor.shape != shape:
            raise ShapeError(name, shape_of(tensor), f"shape {tuple(shape)}, that of the output")
        if tensor.dtype not in FP8_DTYPES:
            hint = f"Quantize it: ({name} * scale).to({q.dtype}), after a clamp to the range of that dtype."
            raise DtypeError(name, dtype_name(tensor.dtype), _FP8, hint)
    if call.lse.dtype != torch.float32:
        raise DtypeError("lse", dtype_name(call.lse.dtype), "float32, as sdpa_fp8 gives it with return_lse=True")
    if call.lse.shape != shape[:3]:
        raise ShapeError("lse", shape_of(call.lse), f"shape {tuple(shape[:3])}: (batch, heads, queries)")
    for name, tensor in (("grad_out", call.grad_out), ("out", call.out), ("lse", call.lse)):
        if tensor.device != q.device:
            raise DeviceError(name, str(tensor.device), f"{q.device}, the device of q")
    _check_scales(call, Fp8BackwardScales._fields)


_FP8 = "float8_e4m3fn or float8_e5m2"


def _check_common(call: Fp8Arguments | Fp8BackwardArguments) -> None:
    """The tensors that both passes have."""
    for name in ("q", "k", "v"):
        tensor = getattr(call, name)
        if tensor.dim() != 4:
            hint = "Add the missing batch or head dimension with unsqueeze(0)." if tensor.dim() == 3 else ""
            raise ShapeError(name, shape_of(tensor), "rank 4: (batch, heads, sequence, head dim)", hint)
    if call.q.dtype not in FP8_DTYPES:
        hint = "Quantize it to FP8; cudnn_sdpa.sdpa takes float16 and bfloat16."
        raise DtypeError("q", dtype_name(call.q.dtype), _FP8, hint)
    has_limits = arguments.has_limits(as_dense(call))
    arguments.check_sizes(call.q, call.k, call.v, HEAD_DIM_MULTIPLE if has_limits else 1)
    for name in ("k", "v"):
        tensor = getattr(call, name)
        if tensor.dtype != call.q.dtype:
            raise DtypeError(name, dtype_name(tensor.dtype), f"{dtype_name(call.q.dtype)}, the dtype of q")
        if tensor.device != call.q.device:
            hint = f"Move it with {name}.to(q.device)."
            raise DeviceError(name, str(tensor.device), f"{call.q.device}, the device of q", hint)
    check_lengths("seq_lens_q", call.seq_lens_q, call.q)
    check_lengths("seq_lens_kv", call.seq_lens_kv, call.q)


def _check_scales(call: Fp8Arguments | Fp8BackwardArguments, names: tuple[str, ...]) -> None:
    for field in names:
        name, scale = f"scales.{field}", getattr(call, field)
        if scale.dtype != torch.float32:
            hint = "Convert it with .float(): cuDNN reads the bits as float32."
            raise DtypeError(name, dtype_name(scale.dtype), _A_SCALE, hint)
        if scale.numel() != 1:
            hint = "cuDNN has one scale per tensor."
            raise ShapeError(name, shape_of(scale), _A_SCALE, hint)
        if scale.device != call.q.device:
            hint = "Move it once with .to(q.device): it is read on the GPU, never by the host."
            raise DeviceError(name, str(scale.device), f"{call.q.device}, the device of q", hint)


# The same calls without pages.


def without_pages(call: Fp8Arguments) -> ForwardArguments:
    """The dense call; if it has pages, on contiguous keys and values without data, which are meta tensors."""
    if call.tables is None:
        return as_dense(call)
    batch, width = call.tables[0].shape
    rows = []
    for pages in (call.k, call.v):
        _, heads, size, dim = pages.shape
        rows.append(torch.empty(batch, heads, width * size, dim, dtype=pages.dtype, device="meta"))
    return as_dense(call)._replace(k=rows[0], v=rows[1])


def gathered(call: Fp8Arguments) -> Fp8Arguments:
    """The same call on contiguous keys and values, on any device. Keys past the lengths are zeros."""
    if call.tables is None:
        return call
    lengths = call.seq_lens_kv
    assert lengths is not None
    keys = call.tables[0].shape[1] * call.k.shape[2]
    is_owned = torch.arange(keys, device=lengths.device) < lengths.unsqueeze(1)

    def gather(pages: Tensor, table: Tensor) -> Tensor:
        bits = pages.view(torch.uint8)
        rows = bits[table.clamp(0, pages.shape[0] - 1).long()].transpose(1, 2).flatten(2, 3)
        return rows.masked_fill(~is_owned[:, None, :, None], 0).view(pages.dtype)

    k, v = (gather(pages, table) for pages, table in zip((call.k, call.v), call.tables, strict=True))
    return call._replace(k=k, v=v, page_table=None, page_table_v=None)

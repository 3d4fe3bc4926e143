"""Arguments and results of attention in FP8, and the checks of arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cudnn_sdpa.attention import arguments
from cudnn_sdpa.attention.arguments import (
    DIMENSIONS,
    FP8_DTYPES,
    ForwardArguments,
    Softmax,
    check_alike,
    check_flag,
    check_lengths,
)
from cudnn_sdpa.attention.paged.arguments import (
    HND,
    PAGE_DIMENSIONS,
    check_number_of_pages,
    check_page_size,
    check_tables,
)
from cudnn_sdpa.engine import value_checks
from cudnn_sdpa.engine.tensor_checks import check_are_tensors, check_is_tensor, check_tensor, dtype_name, shape_of
from cudnn_sdpa.errors import LayoutError, OptionError, ShapeError
from cudnn_sdpa.graph.scalars import is_compiling

OUT_DTYPES = (*FP8_DTYPES, torch.bfloat16, torch.float16)

#: Head dims of cuDNN's FP8 kernels are multiples of this: a row of a matrix instruction.
HEAD_DIM_MULTIPLE = 16


class Fp8Scales(NamedTuple):
    """The scales of `sdpa_fp8`, each a float32 tensor of one element on the device of `q`.

    A tensor x is stored as fp8(x · scale) and read as its FP8 values times a descale, which is 1 / scale.

    Attributes:
        descale_q: Descale of q; `descale_k` and `descale_v` are those of k and v.
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
        descale_q: Descale of q; `descale_k` and `descale_v` are those of k and v.
        descale_o: Descale of the output, 1 / `scale_o` of the forward pass.
        descale_do: Descale of the output's gradient.
        descale_s: Descale of the probabilities, 1 / `scale_s`.
        descale_dp: Descale of the gradient of the scores, 1 / `scale_dp`.
        scale_s: Scale of the probabilities, which are rounded to the dtype of q.
        scale_dq: Scale of the gradient of q; `scale_dk` and `scale_dv` are those of the gradients of k and v.
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
        amax_dq: The amax of the gradient of q, (1,) float32, before `scale_dq`; `amax_dk` and `amax_dv` alike.
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
    out_dtype: torch.dtype | None = None
    softmax: Softmax = Softmax()
    with_lse: bool = False

    @property
    def tables(self) -> tuple[Tensor, Tensor] | None:
        if self.page_table is None:
            return None
        return self.page_table, self.page_table if self.page_table_v is None else self.page_table_v


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
    softmax: Softmax = Softmax()


TABLES = ("page_table", "page_table_v")


#: What messages call the scales of a call.
SCALES = {name: f"scales.{name}" for name in (*Fp8Scales._fields, *Fp8BackwardScales._fields)}


def as_dense(call: Fp8Arguments | Fp8BackwardArguments) -> ForwardArguments:
    """The tensors and options that calls in other dtypes have, too; with pages, k and v are pages."""
    lengths: dict[str, Any] = {"seq_lens_q": call.seq_lens_q, "seq_lens_kv": call.seq_lens_kv}
    return ForwardArguments(call.q, call.k, call.v, **lengths, softmax=call.softmax)


def check_scales_type(scales: object, kind: type[tuple[Tensor, ...]]) -> None:
    if not isinstance(scales, kind):
        raise OptionError("scales", type(scales).__name__, f"cudnn_sdpa.{kind.__name__}")


def check_tensors(tensors: Mapping[str, object]) -> None:
    """Checks types, as the operators' schemas do, and names the argument. Lengths may be None."""
    check_are_tensors(tensors, ("seq_lens_q", "seq_lens_kv"))
    for name, tensor in tensors.items():
        # Dynamo cannot trace `is_neg`.
        if isinstance(tensor, Tensor) and not is_compiling() and tensor.is_neg() and tensor.dtype in FP8_DTYPES:
            raise LayoutError(name, "a negated view", "a tensor of its own", "PyTorch negates no FP8: negate before.")


def check_types(call: Fp8Arguments | Fp8BackwardArguments) -> None:
    """Types that the operators' schemas would refuse as well, but without naming the argument."""
    count = 1 + call._fields.index("seq_lens_kv")
    named = dict(zip(call._fields[:count], call[:count], strict=True))
    check_tensors({name: x for name, x in named.items() if name not in SCALES})
    hint = "Make one with torch.tensor([1.0], dtype=torch.float32, device=q.device)."
    check_are_tensors({SCALES[name]: x for name, x in named.items() if name in SCALES}, hint=hint)
    if isinstance(call, Fp8Arguments):
        check_flag("return_lse", call.with_lse)
        check_is_tensor("page_table", call.page_table, optional=call.page_table_v is None)
        check_is_tensor("page_table_v", call.page_table_v, optional=True)
        _check_out_dtype(call)


def _check_out_dtype(call: Fp8Arguments) -> None:
    if call.out_dtype is not None and call.out_dtype not in OUT_DTYPES:
        expected = ", ".join(map(dtype_name, OUT_DTYPES))
        raise OptionError("out_dtype", repr(call.out_dtype), f"one of {expected}, or None for the dtype of q")


def check_options(call: Fp8Arguments | Fp8BackwardArguments | ForwardArguments) -> None:
    call.softmax.check()
    scale = call.softmax.scale
    if scale is not None and not scale >= arguments.MIN_SCALE:
        raise OptionError("scale", repr(scale), "a positive number, or None for 1/sqrt(head dim)")


def check(call: Fp8Arguments | Fp8BackwardArguments) -> None:
    """The checks of tensors for every device. They read no address and no value, so that fake tensors pass."""
    if isinstance(call, Fp8BackwardArguments) or call.tables is None:
        _check_dense(call)
        return
    q, k, v = call.q, call.k, call.v
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, tensor, q, shape=DIMENSIONS if name == "q" else PAGE_DIMENSIONS[HND])
    if k.shape[0] == 0:
        raise ShapeError("k", shape_of(k), "at least one page")
    present = min(1, q.shape[0])
    try:
        _check_dense(call._replace(q=q[:present], k=k[:present], v=v[:present], seq_lens_q=None, seq_lens_kv=None))
    except ShapeError as error:
        raise error.renamed({"sequence length": "page size"}) from None
    check_number_of_pages({"k": k, "v": v})
    check_page_size("k", k.shape[2])
    check_tables(q, q.shape[0], *call.tables)
    if call.seq_lens_kv is None:
        raise OptionError(
            "seq_lens_kv", "None", "the actual sequence lengths of the keys, which a page table does not give"
        )
    check_lengths("seq_lens_q", call.seq_lens_q, q)
    check_lengths("seq_lens_kv", call.seq_lens_kv, q)


def _check_dense(call: Fp8Arguments | Fp8BackwardArguments) -> None:
    check_common(as_dense(call), FP8_DTYPES, "Quantize it to FP8; cudnn_sdpa.sdpa takes float16 and bfloat16.")
    if isinstance(call, Fp8BackwardArguments):
        _check_results(call)
    for field in [name for name in call._fields if name in SCALES]:
        scale = getattr(call, field)
        check_tensor(SCALES[field], scale, call.q, dtype=torch.float32)
        if scale.numel() != 1:
            raise ShapeError(SCALES[field], shape_of(scale), "one element: cuDNN has one scale per tensor")
    if isinstance(call, Fp8Arguments):
        _check_out_dtype(call)


def _check_results(call: Fp8BackwardArguments) -> None:
    q, v = call.q, call.v
    shape = (*q.shape[:3], v.shape[3])
    for name, tensor in (("grad_out", call.grad_out), ("out", call.out)):
        hint = f"Quantize it: ({name} * scale).to({q.dtype}), after a clamp to the range of that dtype."
        check_tensor(name, tensor, q, dtype=FP8_DTYPES, shape=shape, meaning="that of the output", hint=hint)
    meaning = "(batch, heads, queries), as sdpa_fp8 gives it with return_lse=True"
    check_tensor("lse", call.lse, q, dtype=torch.float32, shape=shape[:3], meaning=meaning)


def check_common(call: ForwardArguments, dtypes: tuple[torch.dtype, ...], hint: str) -> None:
    """The checks of queries, keys, values and lengths, given the dtypes of a function and a hint to them."""
    q, k, v = call.qkv
    check_tensor("q", q, q, dtype=dtypes, hint=hint)
    check_alike(q, k, v)
    arguments.check_sizes(q, k, v, HEAD_DIM_MULTIPLE if arguments.has_limits(call) else 1)
    check_lengths("seq_lens_q", call.seq_lens_q, q)
    check_lengths("seq_lens_kv", call.seq_lens_kv, q)


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


def check_values(call: Fp8Arguments) -> None:
    arguments.check_values(without_pages(call))
    if call.tables is not None and call.seq_lens_kv is not None:
        pages, _, page_size, _ = call.k.shape
        for name, table in zip(TABLES, call.tables, strict=True):
            value_checks.check_pages(name=name, table=table, lengths=call.seq_lens_kv, page_size=page_size, pages=pages)

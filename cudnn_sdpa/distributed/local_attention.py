"""One rank's attention: some of its queries to some keys, dense or packed, as plain calls of the public functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cudnn_sdpa.attention.arguments import Softmax
from cudnn_sdpa.attention.cpu_checks import check_offsets
from cudnn_sdpa.attention.dense.sdpa import sdpa, sdpa_backward
from cudnn_sdpa.attention.mask import BOTTOM_RIGHT, TOP_LEFT, UNBOUNDED
from cudnn_sdpa.attention.sink_scores import SinkUse, complete, like_rows
from cudnn_sdpa.attention.varlen.sdpa_varlen import sdpa_varlen, sdpa_varlen_backward
from cudnn_sdpa.distributed import collectives
from cudnn_sdpa.distributed.collectives import GroupRank
from cudnn_sdpa.distributed.zigzag import chunks_of
from cudnn_sdpa.engine import autograd_checks, cpu_target, fallback, tensor_checks
from cudnn_sdpa.engine.dispatch_state import Function, materialized
from cudnn_sdpa.errors import LayoutError
from cudnn_sdpa.graph.layouts import dense_stride_like

State = tuple[Tensor, Tensor]  #: an output and its LSE
Outputs = tuple[Tensor, Tensor, Tensor]  #: the gradient of an output, the output, and its LSE
Gradients = tuple[Tensor, Tensor, Tensor]  #: of q, k and v


class Options(NamedTuple):
    """Options of a call, equal on all ranks except for the rank; `max_seqlen` is None for dense tensors."""

    group_rank: GroupRank
    softmax: Softmax
    max_seqlen: int | None = None

    def of_rank(self, rank: int) -> Options:
        return self._replace(group_rank=self.group_rank._replace(rank=rank))

    @property
    def is_packed(self) -> bool:
        return self.max_seqlen is not None

    @property
    def dim(self) -> int:
        return 0 if self.is_packed else 2

    @property
    def bounds(self) -> tuple[int, int]:
        """Keys before and after a query that it sees; a causal mask bounds those after it."""
        return self.softmax.window_left, 0 if self.softmax.is_causal else self.softmax.window_right

    @property
    def has_window(self) -> bool:
        return self.bounds != (UNBOUNDED, 0 if self.softmax.is_causal else UNBOUNDED)


class Span(NamedTuple):
    """Consecutive tokens of the whole sequence, from `begin` up to `end`, exclusive."""

    begin: int
    end: int


@dataclass(frozen=True)
class Part:
    """Attention of some of this rank's queries to some keys: rows and columns, and positions in the whole sequence.

    A causal mask has the last query at the last key; the window's bounds are around that diagonal.
    """

    rows: slice
    columns: slice
    queries: Span
    keys: Span
    is_causal: bool
    window: tuple[int, int] = (UNBOUNDED, UNBOUNDED)

    @classmethod
    def whole(cls, options: Options, mine: Tensor) -> Part:
        """All tokens, given a tensor of this rank's."""
        span = Span(0, mine.shape[options.dim] * options.group_rank.ranks)
        every, softmax = slice(*span), options.softmax
        window = softmax.window_left, softmax.window_right
        return cls(rows=every, columns=every, queries=span, keys=span, is_causal=softmax.is_causal, window=window)


class Inputs(NamedTuple):
    """Tensors of a call: those of this rank or of a part, the sinks in float32, the offsets of packed sequences."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None = None
    cu_seqlens: Tensor | None = None

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    @property
    def has_sinks(self) -> bool:
        return self.sinks is not None

    def without_sinks(self) -> Inputs:
        return self._replace(sinks=None)

    def of_heads(self, heads: slice) -> Inputs:
        """The queries and sinks of these heads, with all keys and values."""
        return self._replace(q=self.q[:, heads], sinks=None if self.sinks is None else self.sinks[heads])

    def add_sinks(self, out: Tensor, lse: Tensor) -> None:
        """Adds the sinks, if there are any, in place to an output and an LSE that were computed without them."""
        complete(self, out, lse, SinkUse.AFTER_PLAN)


def parts_of_gathered(options: Options, tokens: int) -> list[Part]:
    """Parts of this rank's attention to gathered keys: one call for each of its two chunks.

    The last query of a chunk stands at the last key of its part. Where a window reaches beyond it to the right, the
    diagonal moves by as much, and so do the window's bounds.
    """
    chunk = tokens // (2 * options.group_rank.ranks)
    left, right = options.bounds
    if left == right == UNBOUNDED and not options.is_packed:
        nowhere = Span(0, 0)
        return [Part(slice(0, 2 * chunk), slice(0, tokens), nowhere, nowhere, is_causal=False)]
    parts = []
    for number, index in enumerate(chunks_of(options.group_rank)):
        begin, end = index * chunk, (index + 1) * chunk
        last = tokens if right == UNBOUNDED else min(tokens, end + right)
        first = 0 if left == UNBOUNDED else max(0, begin - left)
        moved = last - end
        bounds = (left if left == UNBOUNDED else left + moved, right if right == UNBOUNDED else right - moved)
        is_causal = bounds[1] == 0
        window = (bounds[0], UNBOUNDED if is_causal else bounds[1])
        rows, keys = slice(number * chunk, (number + 1) * chunk), Span(first, last)
        queries = Span(begin, end)
        parts.append(
            Part(rows=rows, columns=slice(*keys), queries=queries, keys=keys, is_causal=is_causal, window=window)
        )
    return parts


def split_at_diagonal(part: Part) -> list[Part]:
    """Splits a part if that makes its backward pass faster: keys before all queries, and the square rest.

    cuDNN's backward kernels skip masked tiles of a causal mask only where a part is square. The gradient of the queries
    is then a sum of two rounded ones. A window with a right bound leaves few keys before the first chunk, which stays
    whole.
    """
    rows = part.rows.stop - part.rows.start
    before = part.columns.stop - part.columns.start - rows
    if not part.is_causal or before < rows or part.window[0] != UNBOUNDED:
        return [part]
    middle = part.columns.start + before
    begin = part.keys.begin + before
    return [
        replace(part, columns=slice(part.columns.start, middle), keys=Span(part.keys.begin, begin), is_causal=False),
        replace(part, columns=slice(middle, part.columns.stop), keys=Span(begin, part.keys.end)),
    ]


def parts_of_ring(options: Options, tokens: int, step: int) -> Iterator[Part]:
    """Parts of this rank's attention, of `tokens` queries, to the keys of the rank `step` before it."""
    group_rank, chunk, is_causal = options.group_rank, tokens // 2, options.softmax.is_causal
    halves = slice(0, chunk), slice(chunk, 2 * chunk)
    whole, nowhere = slice(0, 2 * chunk), Span(0, 0)
    if not options.is_packed:
        rows, columns = whole, whole
        if is_causal and 0 < step <= group_rank.rank:
            columns = halves[0]
        elif is_causal and step > group_rank.rank:
            rows = halves[1]
        yield Part(rows, columns, nowhere, nowhere, is_causal=is_causal and step == 0)
        return
    owner = group_rank._replace(rank=(group_rank.rank - step) % group_rank.ranks)
    for number_q, index_q in enumerate(chunks_of(group_rank)):
        for number_kv, index_kv in enumerate(chunks_of(owner)):
            if is_causal and index_kv > index_q:
                continue
            queries, keys = (Span(index * chunk, (index + 1) * chunk) for index in (index_q, index_kv))
            yield Part(halves[number_q], halves[number_kv], queries, keys, is_causal=is_causal and index_q == index_kv)


def narrowed(x: Tensor, dim: int, to: slice) -> Tensor:
    return x.narrow(dim, to.start, to.stop - to.start)


def without_data(x: Tensor) -> Tensor:
    """A tensor of equal layout without memory, in a dtype that GPUs take."""
    dtype = torch.bfloat16 if x.dtype in (torch.float32, torch.float64) else x.dtype
    return torch.empty(0, dtype=dtype, device="meta").as_strided(x.shape, x.stride(), x.storage_offset())


def check_layout(name: str, x: Tensor, options: Options) -> None:
    """Refuses a tensor that no kernel reads, on the CPU with the rules of the GPU."""
    if not (x.is_cuda or x.is_meta):
        if cpu_target.active() is not None:
            try:
                check_layout(name, without_data(x), options)
            except LayoutError as error:
                raise cpu_target.for_gpu(error) from None
        return
    tensor_checks.check_strides_of(name, x.transpose(0, 1).unsqueeze(0) if options.is_packed else x)
    if x.is_cuda:
        tensor_checks.check_addresses("", **{name: x})
    else:
        check_offsets(**{name: x})


def make_readable(x: Tensor, options: Options) -> Tensor:
    """The tensor, or a dense copy if no kernel reads it. Differentiable."""
    try:
        check_layout("x", x, options)
    except LayoutError:
        return materialized(x).clone(memory_format=torch.contiguous_format)
    return x


def groups_of_heads(heads: int, most: int) -> int:
    """The largest number of equal groups up to `most`, at least one."""
    return max(n for n in range(1, max(1, min(most, heads)) + 1) if heads % n == 0)


def split_kv(both: Tensor, size: int) -> tuple[Tensor, Tensor]:
    return both[..., :size], both[..., size:]


def offsets_within(cu_seqlens: Tensor, span: Span) -> Tensor:
    """Offsets of packed sequences, clipped to a span and relative to it: data on the device, read by no host."""
    return cu_seqlens.clamp(span.begin, span.end) - span.begin


def attend(options: Options, part: Part, inputs: Inputs) -> State:
    function: Callable[..., State] = sdpa_varlen if options.is_packed else sdpa
    softmax, tensors = softmax_of(options, part, inputs), tensors_of(options, part, inputs)
    out, lse = function(**tensors, **softmax.keywords(), dropout_p=softmax.dropout_p, return_lse=True)
    return out, lse


def attend_backward(options: Options, part: Part, outputs: Outputs, inputs: Inputs) -> Gradients:
    """Gradients of q, k and v of a part, given the gradient, output and LSE of its queries for all keys."""
    grad_out, out, lse = outputs
    function: Callable[..., Any] = sdpa_varlen_backward if options.is_packed else sdpa_backward
    keywords = softmax_of(options, part, inputs).keywords()
    tensors = tensors_of(options, part, inputs.without_sinks())
    dq, dk, dv, *_ = function(grad_out=grad_out, out=out, lse=lse, **tensors, **keywords)
    return dq, dk, dv


def softmax_of(options: Options, part: Part, inputs: Inputs) -> Softmax:
    is_square = not options.is_packed and inputs.q.shape[2] == inputs.k.shape[2]
    alignment, (left, right) = TOP_LEFT if is_square else BOTTOM_RIGHT, part.window
    if (part.is_causal, alignment, left, right) == options.softmax[:4]:
        return options.softmax
    return options.softmax._replace(
        is_causal=part.is_causal, causal_alignment=alignment, window_left=left, window_right=right
    )


def tensors_of(options: Options, part: Part, inputs: Inputs) -> dict[str, Any]:
    """The tensors of a part's call by the names of its arguments, with the lengths of packed sequences."""
    tensors: dict[str, Any] = inputs._asdict()
    cu_seqlens = tensors.pop("cu_seqlens")
    if cu_seqlens is not None and options.max_seqlen is not None:
        tensors["cu_seqlens_q"] = offsets = offsets_within(cu_seqlens, part.queries)
        tensors["cu_seqlens_kv"] = offsets if part.keys == part.queries else offsets_within(cu_seqlens, part.keys)
        tensors["max_seqlen_q"] = min(inputs.q.shape[0], options.max_seqlen)
        tensors["max_seqlen_kv"] = min(inputs.k.shape[0], options.max_seqlen)
    return tensors


def new_results(q: Tensor, v: Tensor) -> State:
    shape = (*q.shape[:-1], v.shape[-1])
    out = torch.empty_strided(shape, dense_stride_like(shape, q.shape, q.stride()), dtype=q.dtype, device=q.device)
    return out, torch.empty(shape[:-1], dtype=torch.float32, device=q.device)


def gradient_of_sinks(
    options: Options, outputs: Outputs, sinks: Tensor | None, cu_seqlens: Tensor | None
) -> Tensor | None:
    """The gradient of the sinks: minus the sum of the sink's weight times grad_out · out over this rank's queries."""
    if sinks is None:
        return None
    grad_out, out, lse = outputs
    exact = torch.float64 if out.dtype == torch.float64 else torch.float32
    weights = torch.exp(like_rows(sinks, lse).to(exact) - torch.where(torch.isneginf(lse), torch.inf, lse).to(exact))
    mean = (grad_out.to(exact) * out).sum(-1)
    if cu_seqlens is not None:  # rows past the last offset may have gradients of NaN
        chunk = out.shape[0] // 2
        within = torch.arange(chunk, device=out.device)
        positions = torch.cat([index * chunk + within for index in chunks_of(options.group_rank)])
        mean.masked_fill_((positions >= cu_seqlens[-1]).unsqueeze(1), 0.0)
    others = [dim for dim in range(lse.dim()) if dim != 1]
    return -(weights * mean).sum(others).to(sinks.dtype)


class Method(NamedTuple):
    """A way in which ranks share attention.

    Attributes:
        name: As the argument `method` has it.
        forward: The state, and tensors for the backward pass besides sinks and offsets.
        gradients: The gradients, given these tensors, sinks and offsets.
    """

    name: str
    forward: Callable[[Options, Inputs], tuple[State, Sequence[Tensor | None]]]
    gradients: Callable[[Options, Outputs, Sequence[Any]], Gradients]

    def apply(self, options: Options, inputs: Inputs) -> State:
        out, lse = _Differentiable.apply(self, options, *inputs)
        return out, lse


class _Differentiable(Function):
    @staticmethod
    def forward(ctx: Any, method: Method, options: Options, *tensors: Any) -> State:
        inputs = Inputs(*tensors)
        (out, lse), saved = method.forward(options, inputs)
        ctx.save_for_backward(*saved, inputs.sinks, inputs.cu_seqlens, out, lse)
        # Autograd's threads run the backward pass, where no fallback is in force.
        ctx.method, ctx.options, ctx.may_fall_back = method, options, fallback.is_in_force()
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        """Runs the whole pass, whatever gradients are needed: the other ranks wait for this one's part."""
        autograd_checks.refuse_gradient_of("lse", grad_lse)
        autograd_checks.refuse_batch(grad_out)
        *saved, out, lse = ctx.saved_tensors
        may_fall_back = fallback.fallback("torch" if ctx.may_fall_back else None)
        dtypes_stay = torch.autocast(out.device.type, enabled=False)  # as in a backward pass outside of autocast
        with torch.no_grad(), may_fall_back, dtypes_stay, collectives.settled():
            outputs = torch.zeros_like(out) if grad_out is None else grad_out, out, lse
            grads: tuple[Tensor | None, ...] = ctx.method.gradients(ctx.options, outputs, saved)
            grads = *grads, gradient_of_sinks(ctx.options, outputs, *saved[-2:])
        if torch.is_grad_enabled():  # create_graph: second gradients must raise, and not be zero
            present = [x for x in grads if x is not None]
            depended_on = [x for x in (grad_out, *saved, out, lse) if x is not None and x.requires_grad]
            tied = iter(_NoSecondGradient.apply(ctx.method.name, len(present), *present, *depended_on))
            grads = tuple(None if x is None else next(tied) for x in grads)
        return None, None, *grads, None


class _NoSecondGradient(Function):
    @staticmethod
    def forward(ctx: Any, method: str, number: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.method = method
        return tuple(x.view_as(x) for x in tensors[:number])

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> None:
        autograd_checks.refuse_second_gradient(f"context_parallel by {ctx.method}")


def refusing_gradients(lse: Tensor, out: Tensor) -> Tensor:
    """A copy of an LSE in the graph of the output; refuses its gradient."""
    return _NoGradientOfLSE.apply(lse, out)  # type: ignore[no-any-return]


class _NoGradientOfLSE(Function):
    @staticmethod
    def forward(ctx: Any, lse: Tensor, *_: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return lse.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(_: Any, grad_lse: Tensor | None) -> tuple[None, None]:
        autograd_checks.refuse_gradient_of("lse", grad_lse)
        return None, None

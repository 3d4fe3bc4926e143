"""An independent float64 implementation of every operation, differentiable by autograd, with error bounds.

It shares no formula with the library: visibility is decided position by position, the softmax is PyTorch's, over the
visible scores with the sink as an additional column, and gradients come from autograd.

The bound of an element is the sum of the absolute values of its terms, times the error of one rounding. So the error
may exceed the value only where terms cancel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

DIFFERENTIABLE = ("q", "k", "v", "attn_mask", "sinks")

#: Bounds count the dominant roundings; this factor covers the others, and other summation orders.
MARGIN = 2.0

#: An LSE beyond this must not explain an error: kernels keep it in float32.
LARGE_LSE = 1e4


@dataclass(frozen=True)
class Precision:
    """Rounding errors.

    Attributes:
        unit: Relative error of a value of the tensors' dtype.
        tiny: Absolute error of the smallest values of that dtype.
        inner: Relative error of intermediate values.
        weight: Absolute error of the smallest weights of attention, where they have another dtype.
    """

    unit: float
    tiny: float
    inner: float
    weight: float = 0.0

    @classmethod
    def of(cls, dtype: torch.dtype, *, tf32: bool = False) -> Precision:
        """The precision of results in a dtype."""
        info = torch.finfo(dtype)
        inner = 2**-53 if dtype == torch.float64 else 2**-24
        unit = max(info.eps / 2, 2**-24) if dtype != torch.float64 else 2**-50
        tiny = info.smallest_normal * (info.eps if dtype == torch.float16 else 1.0)
        return cls(2**-10 if tf32 and dtype == torch.float32 else unit, tiny, inner)


def sees(i: int, j: int, nq: int, nk: int, options: dict[str, Any]) -> bool:
    """Whether query i of nq sees key j of nk."""
    if i >= nq or j >= nk:
        return False
    diagonal = i + nk - nq if options.get("causal_alignment") == "bottom_right" else i
    left, right = options.get("window_size") or (-1, -1)
    if options.get("is_causal") and j > diagonal:
        return False
    return (left < 0 or j >= diagonal - left) and (right < 0 or j <= diagonal + right)


def lengths_of(batch: int, sq: int, skv: int, options: dict[str, Any]) -> list[tuple[int, int]]:
    """Numbers of queries and keys of each sequence."""
    given = [options.get(name) for name in ("seq_lens_q", "seq_lens_kv")]
    return [tuple(n if x is None else int(x[b]) for n, x in zip((sq, skv), given, strict=True)) for b in range(batch)]


def seen_keys(
    batch: int, sq: int, skv: int, options: dict[str, Any], device: torch.device | str | None = None
) -> Tensor:
    """Booleans (B, 1, Sq, Skv): `sees` for all at once."""
    i, j = torch.arange(sq, device=device)[:, None], torch.arange(skv, device=device)[None, :]
    left, right = options.get("window_size") or (-1, -1)
    right = 0 if options.get("is_causal") else right
    rows = []
    for nq, nk in lengths_of(batch, sq, skv, options):
        distance = j - i - (nk - nq if options.get("causal_alignment") == "bottom_right" else 0)
        ok = (i < nq) & (j < nk)
        ok = ok & (distance >= -left) if left >= 0 else ok
        rows.append(ok & (distance <= right) if right >= 0 else ok)
    return torch.stack(rows)[:, None] if rows else torch.ones(0, 1, sq, skv, dtype=torch.bool, device=device)


def slopes(heads: int) -> list[float]:
    """ALiBi slopes: a geometric series for a power of two, extended from the series of twice as many."""
    if heads & (heads - 1) == 0:
        return [2.0 ** (-8 * (n + 1) / heads) for n in range(heads)]
    below = 1 << (heads.bit_length() - 1)
    return slopes(below) + slopes(2 * below)[::2][: heads - below]


@dataclass
class Attended:
    """Attention and its intermediate results.

    Attributes:
        out: The output.
        lse: The log-sum-exp, detached.
        own_lse: The same, differentiable.
        weights: The softmax, before dropout.
        sink: The weight of the sink, or None.
        share: The dropout factor of the weights.
        seen: The keys that each query sees.
        slope: The derivative of the softcap.
    """

    out: Tensor
    lse: Tensor
    own_lse: Tensor
    weights: Tensor
    sink: Tensor | None
    share: Tensor | float
    seen: Tensor
    slope: Tensor | float


def masks(mask: Tensor) -> Tensor:
    """Where a float mask masks a key: −∞, and what is −∞ in float32 after the step to base 2."""
    return mask.double() * math.log2(math.e) < torch.finfo(torch.float32).min


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, kept: Tensor | None = None, rounds_scores: bool = False, **options: Any
) -> Attended:
    """Attention in float64.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        kept: Which weights dropout keeps.
        rounds_scores: Whether scores are rounded to float32 after a mask is added, as in kernels: under a mask of
            −1e9 nothing else is left of them.
        **options: Options of `sdpa`; they default to off.
    """
    group = q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scale = options.get("scale")
    scores = torch.einsum("bhid,bhjd->bhij", q.double(), keys) * (q.shape[3] ** -0.5 if scale is None else scale)
    slope: Tensor | float = 1.0
    if options.get("softcap") is not None:
        tanh = torch.tanh(scores / options["softcap"])
        scores, slope = options["softcap"] * tanh, 1 - tanh * tanh
    seen = seen_keys(q.shape[0], q.shape[2], k.shape[2], options, q.device)
    if options.get("alibi"):  # aligned top-left: the diagonal of query i is key i
        i, j = (torch.arange(n, device=q.device) for n in (q.shape[2], k.shape[2]))
        of_heads = torch.tensor(slopes(q.shape[1]), dtype=torch.float64, device=q.device)
        scores = scores - of_heads.view(-1, 1, 1) * (i[:, None] - j).abs()
    mask = options.get("attn_mask")
    if mask is not None:
        seen = seen & (mask if mask.dtype == torch.bool else ~masks(mask))
    if mask is not None and mask.dtype != torch.bool:
        scores = scores + mask.double().masked_fill(masks(mask), 0.0)
        if rounds_scores:
            scores = scores + (scores.float().double() - scores).detach()
    seen = seen.expand_as(scores)
    columns = [torch.where(seen, scores, -math.inf)]
    if options.get("sinks") is not None:
        columns.append(options["sinks"].double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1))
    else:  # a column for fully masked rows, which no other row sees
        columns.append(torch.where(seen.any(-1, keepdim=True), -math.inf, 0.0).double())
    everything = torch.cat(columns, dim=-1)
    softmax = torch.softmax(everything, dim=-1)
    weights, sink = softmax[..., :-1], softmax[..., -1]
    lse = torch.logsumexp(everything, dim=-1)
    if options.get("sinks") is None:
        lse, sink = torch.where(seen.any(-1), lse, -math.inf), None
    share = 1.0 if kept is None else kept.double() / (1 - options["dropout_p"])
    return Attended((weights * share) @ values, lse.detach(), lse, weights, sink, share, seen, slope)


def attend(q: Tensor, k: Tensor, v: Tensor, *, kept: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp in float64."""
    found = attention(q, k, v, kept=kept, **options)
    return found.out, found.lse


def attend_packed(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of packed sequences in float64; rows of no sequence see no key."""
    options = {"causal_alignment": "bottom_right", **options}
    nothing = torch.full(q.shape[:2], -math.inf, dtype=torch.float64, device=q.device)
    out, lse = q.new_zeros(*q.shape[:2], v.shape[2], dtype=torch.float64), nothing
    for (a, b), (c, d) in zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_kv.tolist()), strict=True):
        one = attend(*(x.transpose(0, 1).unsqueeze(0) for x in (q[a:b], k[c:d], v[c:d])), **options)
        out[a:b], lse[a:b] = (x[0].transpose(0, 1) for x in one)
    return out, lse


def attend_packed_on_pages(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of packed new tokens on pages in float64; see `packed_on_pages`."""
    out, lse, sequences = packed_on_pages(*tensors, **options)
    for rows, dense in sequences:
        out[rows], lse[rows] = (x[0].transpose(0, 1) for x in attend(**dense))
    return out, lse


def packed_on_pages(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    seq_lens_kv: Tensor,
    cu_seqlens_q: Tensor,
    *,
    page_layout: str,
    page_table_v: Tensor | None = None,
    tree_mask: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor, list[tuple[slice, dict[str, Any]]]]:
    """The results of tokens of no sequence, and for each sequence its rows and the dense call that it is.

    Keys that no token of a sequence sees are not read.
    """
    options = {"is_causal": True, "causal_alignment": "bottom_right", **options}
    tables = page_table, page_table if page_table_v is None else page_table_v
    pages = [x.double() if page_layout == "HND" else x.double().transpose(1, 2) for x in (k_pages, v_pages)]
    scales = [1.0 if x is None else x.double().reshape(-1, 1, 1) for x in (k_scale, v_scale)]
    size, dims = pages[0].shape[2], (*q.shape[:2], pages[1].shape[3])
    out, lse = (torch.full(x, y, dtype=torch.float64, device=q.device) for x, y in ((dims, 0.0), (dims[:2], -math.inf)))
    found = []
    for b, (begin, end) in enumerate(pairwise(cu_seqlens_q.tolist())):
        new, length = end - begin, int(seq_lens_kv[b])
        if new == 0:
            continue
        mine = dict(options)
        if tree_mask is None:
            seen = seen_keys(1, new, length, options, q.device)[0, 0]
        else:
            seen = torch.ones(new, length, dtype=torch.bool, device=q.device)
            for j in range(max(0, length - new), length):  # the keys of the new tokens
                seen[:, j] = tree_mask[begin:end, j - (length - new)]
            mine |= {"is_causal": False, "attn_mask": seen[None, None]}
        read, keys = seen.any(0).nonzero()[:, 0], []
        for x, table, scale in zip(pages, tables, scales, strict=True):
            whole = torch.zeros(x.shape[1], length, x.shape[3], dtype=torch.float64, device=q.device)
            whole[:, read] = x[table[b, read // size].long(), :, read % size].transpose(0, 1)
            keys.append((whole * scale).unsqueeze(0))
        found.append(
            (slice(begin, end), {"q": q[begin:end].transpose(0, 1).unsqueeze(0), "k": keys[0], "v": keys[1], **mine})
        )
    return out, lse, found


def gradients(
    tensors: dict[str, Tensor], grad_out: Tensor, *, kept: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Output, LSE, and the gradients for the differentiable ones of `tensors`."""
    leaves = {
        name: x.detach().double().requires_grad_() if name in DIFFERENTIABLE and x.is_floating_point() else x
        for name, x in tensors.items()
    }
    out, lse = attend(**leaves, kept=kept, **options)
    wanted = [name for name in DIFFERENTIABLE if name in leaves and leaves[name].requires_grad]
    found = torch.autograd.grad(out, [leaves[name] for name in wanted], grad_out.double(), allow_unused=True)
    zeros = (torch.zeros_like(leaves[name]) if g is None else g for name, g in zip(wanted, found, strict=True))
    return out.detach(), lse, dict(zip(wanted, zeros, strict=True))


def gradients_of_a_part(
    tensors: dict[str, Tensor], grad_out: Tensor, out: Tensor, lse: Tensor, **options: Any
) -> dict[str, Tensor]:
    """The gradients for some of the keys in float64, given output and LSE of all, by name.

    With the part's own output o and LSE l, they are those of Σ exp(l − lse) · (grad_out · o − grad_out · out).
    """
    leaves = {
        name: x.detach().double().requires_grad_() if name in DIFFERENTIABLE and x.is_floating_point() else x
        for name, x in tensors.items()
    }
    grad_out, out, lse = grad_out.detach().double(), out.detach().double(), lse.detach().double()
    with torch.enable_grad():
        made = attention(**leaves, **options)
        own_out, own_lse = made.out, made.own_lse
        is_empty = own_lse.isneginf()
        share = torch.exp(own_lse.masked_fill(is_empty, 0.0) - lse.masked_fill(is_empty, 0.0))
        of_rows = share * ((grad_out * own_out).sum(-1) - (grad_out * out).sum(-1))
        total = of_rows.masked_fill(is_empty, 0.0).sum()
    wanted = [name for name in DIFFERENTIABLE if name in leaves and leaves[name].requires_grad]
    found = torch.autograd.grad(total, [leaves[name] for name in wanted], allow_unused=True)
    return {n: torch.zeros_like(leaves[n]) if g is None else g for n, g in zip(wanted, found, strict=True)}


@torch.no_grad()
def attention_bounds(
    made: Attended, q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor | None, precision: Precision, **options: Any
) -> dict[str, Tensor]:
    """Error bounds of the output, the LSE and each gradient."""
    group = q.shape[1] // k.shape[1]
    q, (keys, values) = q.double().abs(), (x.double().abs().repeat_interleave(group, dim=1) for x in (k, v))
    scale = abs(q.shape[3] ** -0.5 if options.get("scale") is None else options["scale"])
    weights, mask = made.weights, options.get("attn_mask")
    scores = torch.einsum("bhid,bhjd->bhij", q, keys) * scale + 1.0  # one for the rounding of the exponential
    if mask is not None and mask.dtype != torch.bool:
        scores = scores + mask.double().masked_fill(masks(mask), 0.0).abs()
    if options.get("alibi"):
        scores = scores + max(q.shape[2], k.shape[2])
    off = (8 * precision.inner * scores).masked_fill(~made.seen, 0.0)
    of_slope: Tensor | float = 0.0
    if options.get("softcap") is not None:  # 1 - tanh² has the absolute errors of tanh and of the scores
        of_slope = 4 * precision.inner + 2 * made.slope * off / options["softcap"]
        off = off + 2 * precision.unit * made.slope * min(options["softcap"], 1.0)
    row = (weights * off).sum(-1, keepdim=True)
    of_weights = weights * (precision.unit + torch.expm1((off + row).clamp_max(80.0)))
    of_weights = (of_weights.clamp_max(1.0) + precision.tiny + precision.weight).masked_fill(~made.seen, 0.0)
    out = (of_weights * made.share) @ values + precision.unit * made.out.abs() + precision.tiny
    lse = row.squeeze(-1) + 2**-22 * made.lse.masked_fill(made.lse.isneginf(), 0.0).abs() + 2e-6
    bounds = {"out": out, "lse": lse}
    if grad_out is not None:
        grad = grad_out.double()
        parts = grad.abs() @ values.mT
        mean = (grad * made.out).abs().sum(-1, keepdim=True)
        size = parts * made.share + mean
        kept_lse = made.lse.masked_fill(made.lse.isneginf(), 0.0).abs().clamp_max(LARGE_LSE).unsqueeze(-1) * 2**-22
        of_mean = (grad.abs() * out).sum(-1, keepdim=True)
        of_scores = (of_weights + weights * (3 * precision.unit + kept_lse)) * size + weights * of_mean
        of_scores = of_scores + (precision.tiny * (1 + size)).masked_fill(~made.seen, 0.0)
        inner = of_scores * (made.slope if isinstance(made.slope, float) else made.slope + 2 * precision.unit)
        inner = (inner + weights * size * of_slope) * scale
        inner = inner + precision.tiny * made.seen  # rounded again with the scale
        per_head = {"k": inner.mT @ q, "v": ((of_weights + weights * kept_lse) * made.share).mT @ grad.abs()}
        bounds |= {n: b.unflatten(1, (k.shape[1], group)).sum(2) + precision.tiny for n, b in per_head.items()}
        bounds["q"] = inner @ keys + precision.tiny
        if mask is not None and mask.dtype != torch.bool:
            bounds["attn_mask"] = of_scores.sum_to_size((1,) * (4 - mask.dim()) + tuple(mask.shape)).view(mask.shape)
        if made.sink is not None:
            error = made.sink * (3 * precision.unit + row.squeeze(-1) + kept_lse.squeeze(-1)) * mean.squeeze(-1)
            bounds["sinks"] = (error + made.sink * of_mean.squeeze(-1)).sum((0, 2))
    return bounds


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def relu(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, 0.0)


def gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


ACTIVATIONS = {None: lambda x: x, "relu": relu, "silu": silu, "gelu": gelu, "gelu_tanh": gelu_tanh}


@torch.no_grad()
def activated_bounds(y: Tensor, off: Tensor, grad: Tensor | None, activation: str | None) -> tuple[Tensor, Tensor]:
    """Error bounds of activation(y) and of the gradient of y, given that of y."""
    grad = torch.zeros_like(y) if grad is None else grad.double().abs()
    if activation is None:
        return off, torch.zeros_like(y)
    flips = ((y.abs() <= off) if activation == "relu" else torch.zeros_like(y)).double()
    return 1.2 * off, grad * (0.9 * off.clamp_max(2.0) + flips if activation != "relu" else flips)


def convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, groups: int
) -> Tensor:
    """A convolution, as a sum of channel products over the positions of the filter."""
    rank = x.dim() - 2
    stride, padding, dilation = (
        (sizes,) * rank if isinstance(sizes, int) else tuple(sizes) for sizes in (stride, padding, dilation)
    )
    padded = F.pad(x, [zeros for size in reversed(padding) for zeros in (size, size)])
    places = [
        (length - (size - 1) * gap - 1) // step + 1
        for length, size, gap, step in zip(padded.shape[2:], weight.shape[2:], dilation, stride, strict=True)
    ]
    filters = weight.unflatten(0, (groups, weight.shape[0] // groups))
    out = 0.0
    for place in torch.cartesian_prod(*(torch.arange(size) for size in weight.shape[2:])).view(-1, rank).tolist():
        where = tuple(
            slice(i * gap, i * gap + (count - 1) * step + 1, step)
            for i, gap, count, step in zip(place, dilation, places, stride, strict=True)
        )
        part = padded[(slice(None), slice(None), *where)].unflatten(1, (groups, weight.shape[1]))
        out = out + torch.einsum("ngc...,gkc->ngk...", part, filters[(..., *place)])
    out = out.flatten(1, 2)
    return out if bias is None else out + bias.view(1, -1, *(1,) * rank)


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, residual: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """The result, and the sum with the residual."""
    total = x if residual is None else x + residual
    return _scaled(total, weight, None, eps, **options), total


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, residual: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    total = x if residual is None else x + residual
    return _scaled(total - total.mean(-1, keepdim=True), weight, bias, eps, **options), total


def _scaled(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    activation: str | None = None,
    zero_centered: bool = False,
) -> Tensor:
    y = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * (weight + 1 if zero_centered else weight)
    return ACTIVATIONS[activation](y if bias is None else y + bias)


@torch.no_grad()
def norm_bounds(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    grad: Tensor | None,
    precision: Precision,
    *,
    centered: bool,
    activation: str | None = None,
    sum_off: Tensor | None = None,
    grad_sum: Tensor | None = None,
) -> dict[str, Tensor]:
    """Error bounds of the output and of the gradients for x, weight and bias.

    Args:
        x: The normalized tensor, including the residual.
        weight: The weight, as multiplied.
        bias: The bias.
        eps: The eps.
        grad: The gradient of the output.
        precision: What roundings cost.
        centered: Whether it is a layer norm.
        activation: What follows.
        sum_off: How far x is off before.
        grad_sum: The gradient of the sum with the residual.
    """
    n = x.shape[-1]
    middle = x - x.mean(-1, keepdim=True) if centered else x
    r = torch.rsqrt((middle * middle).mean(-1, keepdim=True) + eps)
    hat = (middle * r).abs()
    w = torch.ones_like(x) if weight is None else weight.abs().expand_as(x)
    lost = 8 * precision.inner * x.abs().amax(-1, keepdim=True) if centered else torch.zeros_like(r)
    lost = lost if sum_off is None else lost + 2 * sum_off.amax(-1, keepdim=True)
    of_hat = hat * 8 * precision.inner + r * lost
    y = middle * r * (1.0 if weight is None else weight) + (0.0 if bias is None else bias)
    off = of_hat * w + precision.unit * (2 * hat * w + y.abs() + (0.0 if bias is None else bias.abs())) + precision.tiny
    out, of_grad = activated_bounds(y, off, grad, activation)
    bounds = {"out": out + precision.unit * out.abs()}
    if grad is not None:
        grad = grad.double().abs() * (1.0 if activation is None else 1.2)
        gw = grad * w
        size = gw + hat * (gw * hat).mean(-1, keepdim=True) + (gw.mean(-1, keepdim=True) if centered else 0.0)
        change = of_grad * w
        change = change + hat * (change * hat).mean(-1, keepdim=True) + change.mean(-1, keepdim=True)
        swing = of_hat * (gw * hat).mean(-1, keepdim=True) + hat * (gw * of_hat).mean(-1, keepdim=True)
        relative = (r * lost * hat).mean(-1, keepdim=True) + 8 * precision.inner * math.sqrt(n)
        whole = size * (2 * precision.unit + relative) + change + 2 * swing
        bounds["x"] = r * whole + precision.tiny
        if grad_sum is not None:
            bounds["x"] = bounds["x"] + precision.unit * (r * size + 2 * grad_sum.double().abs())
        rows = tuple(range(x.dim() - 1))
        added = 4 * precision.inner * math.sqrt(math.prod(x.shape[:-1]))  # the error of summing this many rows
        grad_weight = grad * hat * (2 * precision.unit + added) + grad * of_hat + of_grad * hat
        bounds["weight"] = grad_weight.sum(rows) + precision.tiny
        bounds["bias"] = ((2 * precision.unit + added) * grad + of_grad).sum(rows) + precision.tiny
    return bounds


# Modules, by the names of their parameters in `state_dict`.

Parameters = dict[str, Tensor]


def parameters_of(p: Parameters, name: str) -> Parameters:
    return {key.removeprefix(f"{name}."): x for key, x in p.items() if key.startswith(f"{name}.")}


def linear(x: Tensor, p: Parameters) -> Tensor:
    y = torch.einsum("...i,oi->...o", x, p["weight"])
    return y + p["bias"] if "bias" in p else y


def turned(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """The first features of heads rotated; pairs of features are complex numbers."""
    n = 2 * cos.shape[-1]
    pairs = x[..., :n].unflatten(-1, (n // 2, 2) if interleaved else (2, n // 2))
    real, imaginary = pairs.unbind(-1 if interleaved else -2)
    found = torch.stack((real * cos - imaginary * sin, real * sin + imaginary * cos), -1)
    found = (found if interleaved else found.transpose(-1, -2)).flatten(-2)
    return torch.cat([found, x[..., n:]], -1)


def rope(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    zero_centered: bool = False,
    interleaved: bool = False,
) -> list[Tensor]:
    """`cudnn_sdpa.rope`."""
    found = []
    for x, weight in ((q, q_weight), (k, k_weight)):
        if x is None:
            continue
        normed = x if weight is None else rms_norm(x, weight, eps=eps, zero_centered=zero_centered)[0]
        of_head = (angles.double().unsqueeze(-2 if x.dim() == 3 else -3) for angles in (cos, sin))
        found.append(turned(normed, *of_head, interleaved=interleaved))
    return found


def rotated(
    x: Tensor,
    positions: Tensor,
    *,
    base: float = 10000.0,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    frequencies: list[float] | None = None,
) -> Tensor:
    """Heads (B, S, H, D), rotated by positions (B or 1, S)."""
    n = x.shape[-1] if rotary_dim is None else rotary_dim
    given = [base ** (-2 * i / n) for i in range(n // 2)] if frequencies is None else frequencies
    angles = positions.double()[..., None, None] * torch.tensor(given, dtype=torch.float64, device=x.device)
    return turned(x, angles.cos(), angles.sin(), interleaved=interleaved)


def multi_head_attention(
    x: Tensor,
    p: Parameters,
    heads: tuple[int, int],
    *,
    context: Tensor | None = None,
    rope: dict[str, Any] | None = None,
    qk_norm: float | None = None,
    positions: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """`nn.Attention` with the given head counts; options are those of `attention`."""
    if "v_proj.weight" in p:
        inputs = {"q_proj": x, "k_proj": x if context is None else context, "v_proj": x if context is None else context}
        q, k, v = (linear(tokens, parameters_of(p, name)) for name, tokens in inputs.items())
    elif context is None:
        rows = linear(x, parameters_of(p, "qkv_proj"))
        dim = rows.shape[-1] // (heads[0] + 2 * heads[1])
        q, k, v = rows.split([heads[0] * dim, heads[1] * dim, heads[1] * dim], -1)
    else:
        q = linear(x, parameters_of(p, "q_proj"))
        k, v = linear(context, parameters_of(p, "kv_proj")).chunk(2, -1)
    dim = q.shape[-1] // heads[0]
    q, k, v = (y.unflatten(-1, (-1, dim)) for y in (q, k, v))
    if qk_norm is not None:
        q, k = (rms_norm(y, p[f"{name}.weight"], eps=qk_norm)[0] for y, name in ((q, "q_norm"), (k, "k_norm")))
    if rope is not None:
        q, k = (rotated(y, positions, **rope) for y in (q, k))
    given = {"sinks": p["sinks"]} if "sinks" in p else {}
    out = attention(*(y.transpose(1, 2) for y in (q, k, v)), **given, **options).out
    return linear(out.transpose(1, 2).flatten(2), parameters_of(p, "out_proj"))


def feed_forward(x: Tensor, p: Parameters, activation: str, share: Tensor | float = 1.0) -> Tensor:
    """`nn.SwiGLU`, or `nn.FeedForward` with a dropout factor for the hidden features."""
    if activation == "swiglu":
        if "up_proj.weight" in p:
            gate, up = (linear(x, parameters_of(p, name)) for name in ("gate_proj", "up_proj"))
        else:
            gate, up = linear(x, parameters_of(p, "gate_up_proj")).chunk(2, -1)
        return linear(silu(gate) * up, parameters_of(p, "down_proj"))
    return linear(ACTIVATIONS[activation](linear(x, parameters_of(p, "linear1"))) * share, parameters_of(p, "linear2"))


def norm_of(x: Tensor, p: Parameters, name: str, eps: float) -> Tensor:
    if name == "rms_norm":
        return rms_norm(x, p.get("weight"), eps)[0]
    return layer_norm(x, p.get("weight"), p.get("bias"), eps)[0]


def transformer_layer(
    x: Tensor,
    p: Parameters,
    heads: tuple[int, int],
    *,
    norm: str,
    norm_eps: float,
    norm_first: bool,
    activation: str,
    shares: tuple[Tensor | float, ...] = (1.0, 1.0, 1.0),
    **attention_options: Any,
) -> Tensor:
    """`nn.TransformerLayer`, with dropout factors for the attention output, the hidden features, and the MLP output."""

    def attend(x: Tensor) -> Tensor:
        return multi_head_attention(x, parameters_of(p, "self_attn"), heads, **attention_options) * shares[0]

    def mlp(x: Tensor) -> Tensor:
        return feed_forward(x, parameters_of(p, "mlp"), activation, shares[1]) * shares[2]

    first, second = (lambda x, at=at: norm_of(x, parameters_of(p, at), norm, norm_eps) for at in ("norm1", "norm2"))
    if norm_first:
        x = x + attend(first(x))
        return x + mlp(second(x))
    x = first(x + attend(x))
    return second(x + mlp(x))


def patches(images: Tensor, p: Parameters, size: tuple[int, int]) -> Tensor:
    """`nn.PatchEmbed`, as a matrix product of extracted patches."""
    batch, channels, height, width = images.shape
    cut = images.reshape(batch, channels, height // size[0], size[0], width // size[1], size[1])
    rows = cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
    return linear(rows, {**p, "weight": p["weight"].flatten(1)})


def vision_encoder(
    images: Tensor, p: Parameters, size: tuple[int, int], layers: int, heads: tuple[int, int], **options: Any
) -> Tensor:
    x = patches(images, parameters_of(p, "patch_embed"), size)
    if "class_token" in p:
        x = torch.cat([p["class_token"].expand(x.shape[0], -1, -1), x], 1)
    x = x + p["position_embedding"]
    for number in range(layers):
        x = transformer_layer(x, parameters_of(p, f"layers.{number}"), heads, norm_first=True, **options)
    return norm_of(x, parameters_of(p, "norm"), options["norm"], options["norm_eps"])

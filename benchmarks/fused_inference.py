"""`benchmarks fused`: norms in FP8, and rotations in place and into pages, beside separate steps and torch.compile.

All are calls of inference. Device times are interleaved, each call on data that no cache has, after each candidate's
results were compared with float64. Host times are those of warm calls, in rounds that alternate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor

from benchmarks import fused
from benchmarks.fused_peers import COMPILED, COPY, OURS
from benchmarks.tools import cases
from benchmarks.tools.candidates import NOTHING, Timed, ratio
from benchmarks.tools.output import Row
from benchmarks.tools.timing import host_times
from benchmarks.tools.ways import wait_for_native_calls
from cudnn_sdpa.attention.paged.append import append_paged_kv
from cudnn_sdpa.attention.paged.arguments import NHD
from cudnn_sdpa.fused.checks import widened
from cudnn_sdpa.fused.norm import layer_norm_fp8, rms_norm_fp8
from cudnn_sdpa.fused.rotary.rope import rope
from cudnn_sdpa.fused.rotary.rope_in_place import rope_
from cudnn_sdpa.nn.rotary import RotaryEmbedding
from cudnn_sdpa.serving.rope_append import rope_append_paged_kv

#: Rows and their length.
NORMS = ((16384, 8192), (16384, 4096), (4096, 4096), (64, 8192), (1, 4096))

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max

#: The largest relative error, in the norm, of results in E4M3: of those rounded from almost the same numbers, and of
#: those whose exact values are not rounded.
ROUNDED_TOLERANCE, FP8_TOLERANCE = 1e-2, 5e-2

SEPARATE, IN_PLACE = "rope, append_paged_kv", "rope_, append_paged_kv"
ROPE, COMPILED_IN_PLACE = "rope", f"{COMPILED}, in place"

Results = Sequence[Tensor]


class Sizes(NamedTuple):
    """Tokens whose heads are rotated, and the pages that some of them go to.

    Attributes:
        tokens: Those of decodes, each at a position of its own; the last of a chunk of a prompt.
        heads: Heads of queries, and of keys and values.
    """

    tokens: tuple[int, ...] = (1, 16, 256, 4096)
    heads: tuple[int, int] = (32, 8)
    dim: int = 128
    pages: int = 512
    page_size: int = 64


SIZES = Sizes()
LABEL = f"{SIZES.heads[0]}/{SIZES.heads[1]} heads of {SIZES.dim}, bfloat16, device and host"


# Norms.


def norms_fp8() -> list[Row]:
    """`rms_norm_fp8` and `layer_norm_fp8`, with a scale for each row and with a given one: reads x, writes half."""
    rows = []
    for shape in track(NORMS, "norms in FP8", transient=True):
        x, weight = fused.norm_inputs(*shape)
        for ours, given in ((rms_norm_fp8, (x, weight)), (layer_norm_fp8, (x, weight, cases.normal(shape[1])))):
            _, scales, _ = pytorch_norm_fp8(*(tensor.double() for tensor in given), scale=None)
            rows.append(_norm_fp8(ours, given, None))
            rows.append(_norm_fp8(ours, given, scales.amax().float().view(1)))
    return rows


def pytorch_norm_fp8(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`rms_norm_fp8` in PyTorch, or `layer_norm_fp8` with a bias: the norm, its scale, and its amax if one is given."""
    rows, size = widened(x), x.shape[-1:]
    if bias is None:
        normed = F.rms_norm(rows, size, widened(weight), fused.EPS)
    else:
        normed = F.layer_norm(rows, size, widened(weight), widened(bias), 1e-5)
    amax = normed.abs().amax(-1, keepdim=True)
    used = amax / LARGEST if scale is None else scale
    return _in_fp8(normed, used), used, None if scale is None else amax.amax()


def _in_fp8(x: Tensor, scale: Tensor) -> Tensor:
    return (x / scale).clamp(-LARGEST, LARGEST).to(FP8)


def _norm_fp8(ours: Callable[..., Any], given: tuple[Tensor, ...], scale: Tensor | None) -> Row:
    timed, x = Timed(), given[0]

    def values(found: Sequence[Any]) -> Results:
        out, used, amax = found[:3]
        return widened(used) * widened(out), used if amax is None else amax

    with torch.no_grad():
        exact = pytorch_norm_fp8(
            *(tensor.double() for tensor in given), scale=None if scale is None else scale.double()
        )
        expected = exact[0].double() * exact[1], exact[1] if exact[2] is None else exact[2]
        for name, function in ((OURS, ours), (COMPILED, fused.compiled(pytorch_norm_fp8))):
            call: Callable[[], Any] = partial(function, *given, scale=scale)
            timed.add(name, call, values, expected, ROUNDED_TOLERANCE)
        timed.calls[COPY] = cases.large_copy()
        times = timed.measure(cold=True)
    moved = x.numel() * (x.element_size() + FP8.itemsize)
    how = "a scale for each row" if scale is None else "a given scale"
    row: Row = {"call": f"{ours.__name__}, {how}, {' × '.join(f'{size:,}' for size in x.shape)}"}
    row["cudnn_sdpa µs"] = times.get(OURS, NOTHING)
    row["of a copy's bandwidth"] = NOTHING
    if OURS in times:
        row["of a copy's bandwidth"] = moved / times[OURS] / (2 * cases.COPIED / times[COPY])
    row |= {"compiled µs": times.get(COMPILED, NOTHING), "compiled / ours": ratio(times, COMPILED, OURS)}
    return {**row, "why not": timed.why_not}


# Rotations.


class Given:
    """Tokens of one projection, whose queries, keys and values each candidate gets as views of a copy of its own.

    Attributes:
        projected: Queries, keys and values, (T, Hq + 2 Hkv, D).
        angles: Cosines and sines of the positions, (T, D / 2).
        slots: Where keys and values go in the pages, in random order.
        weights: Those of the norms of queries and keys; none without norms.
        scales: Those of the pages of keys and of values, one for each head; of pages in FP8 alone.
    """

    def __init__(self, tokens: int, *, normed: bool = False, in_fp8: bool = False) -> None:
        (heads_q, heads_kv), device = SIZES.heads, cases.DEVICE
        self.projected = cases.normal(tokens, heads_q + 2 * heads_kv, SIZES.dim)
        positions = torch.arange(tokens, device=device)
        if tokens < max(SIZES.tokens):
            positions = torch.randint(0, max(SIZES.tokens), (tokens,), device=device)
        self.angles = RotaryEmbedding(SIZES.dim)(positions)
        self.slots = torch.randperm(SIZES.pages * SIZES.page_size, device=device)[:tokens]
        drawn = cases.normal(SIZES.dim) * 0.3 + 1, cases.normal(SIZES.dim) * 0.3 + 1
        self.weights: tuple[Tensor, ...] = drawn if normed else ()
        self.scales = tuple(0.02 + 0.02 * torch.rand(2, heads_kv, device=device)) if in_fp8 else ()
        options = [*(["norms"] if normed else []), *(["FP8 pages"] if in_fp8 else [])]
        self.label = ", ".join([f"{tokens:,} tokens", *options])

    @property
    def norms(self) -> dict[str, Any]:
        """The options of `rope` for its norms."""
        return {**dict(zip(("q_weight", "k_weight"), self.weights, strict=False)), "eps": fused.EPS}

    def heads(self) -> list[Tensor]:
        """Queries, keys and values in a new copy of the projection."""
        heads_q, heads_kv = SIZES.heads
        return list(torch.split(self.projected.clone(), [heads_q, heads_kv, heads_kv], 1))

    def pages(self) -> list[Tensor]:
        """New pages of keys and of values, (P, page size, Hkv, D)."""
        shape = SIZES.pages, SIZES.page_size, SIZES.heads[1], SIZES.dim
        dtype = FP8 if self.scales else self.projected.dtype
        return [torch.zeros(shape, dtype=dtype, device=cases.DEVICE) for _ in "kv"]

    def exact(self) -> list[Tensor]:
        """Rotated queries and keys, and values, in float64."""
        q, k, v = (x.double() for x in self.heads())
        return [*pytorch_rope(q, k, *self.angles, *(x.double() for x in self.weights)), v]

    def appended(self, pages: Tensor, scale: Tensor | None) -> Tensor:
        """What pages hold of the tokens."""
        if scale is None:
            return pages.flatten(0, 1)[self.slots]
        bits = pages.view(torch.uint8).flatten(0, 1)[self.slots]  # PyTorch indexes no FP8
        return bits.view(FP8).float() * scale.view(-1, 1)


def pytorch_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
    """`rope` of halves in PyTorch, of packed heads (T, H, D), in float32; of float64, in that."""
    cos, sin, found = cos.unsqueeze(1), sin.unsqueeze(1), []
    for x, weight in zip((q, k), weights or (None, None), strict=True):
        heads = widened(x)
        if weight is not None:
            heads = F.rms_norm(heads, heads.shape[-1:], widened(weight), fused.EPS)
        first, second = heads.chunk(2, -1)
        rotated = first * cos - second * sin, second * cos + first * sin
        found.append(torch.cat([half.to(x.dtype) for half in rotated], -1))
    return found[0], found[1]


def pytorch_rope_(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *weights: Tensor) -> None:
    """`rope_` in PyTorch."""
    for x, rotated in zip((q, k), pytorch_rope(q, k, cos, sin, *weights), strict=True):
        x.copy_(rotated)


def pytorch_rope_append(
    heads: Sequence[Tensor],
    angles: Sequence[Tensor],
    pages: Sequence[Tensor],
    slots: Tensor,
    weights: Sequence[Tensor],
    scales: Sequence[Tensor],
) -> Tensor:
    """`rope_append_paged_kv` in PyTorch; pages in FP8 are given as bytes, since PyTorch indexes no FP8."""
    q, k, v = heads
    out, rotated = pytorch_rope(q, k, *angles, *weights)
    page_size = pages[0].shape[1]
    page, offset = slots // page_size, slots % page_size
    for target, x, scale in zip(pages, (rotated, v), scales or (None, None), strict=True):
        target[page, offset] = x if scale is None else _in_fp8(x.float(), scale.view(-1, 1)).view(torch.uint8)
    return out


def rope_append() -> list[Row]:
    """Rotated queries, and rotated keys and values in pages: in one kernel, in two, and compiled."""
    wait_for_native_calls()
    options: tuple[dict[str, bool], ...] = ({}, {"normed": True}, {"in_fp8": True})
    numbers = track(SIZES.tokens, "rotations into pages", transient=True)
    return [_appended(Given(tokens, **chosen)) for tokens in numbers for chosen in options]


@torch.no_grad()
def _appended(given: Given) -> Row:
    k_scale, v_scale = given.scales or (None, None)
    cos, sin = given.angles
    to: dict[str, Any] = {"page_layout": NHD, "k_scale": k_scale, "v_scale": v_scale}
    compiled = fused.compiled(pytorch_rope_append)

    def ours(heads: list[Tensor], pages: list[Tensor]) -> Tensor:
        q, k, v = heads
        k_pages, v_pages = pages
        return rope_append_paged_kv(q, k, v, cos, sin, k_pages, v_pages, given.slots, **to, **given.norms)

    def append(k: Tensor, v: Tensor, pages: list[Tensor]) -> None:
        k_pages, v_pages = pages
        append_paged_kv(k, v, k_pages, v_pages, given.slots, **to)

    def separate(heads: list[Tensor], pages: list[Tensor]) -> Tensor:
        q, k, v = heads
        out, rotated = rope(q, k, cos, sin, **given.norms)
        append(rotated, v, pages)
        return out

    def in_place(heads: list[Tensor], pages: list[Tensor]) -> Tensor:
        q, k, v = heads
        rope_(q, k, cos, sin, **given.norms)
        append(k, v, pages)
        return q

    def by_compiler(heads: list[Tensor], pages: list[Tensor]) -> Tensor:
        return compiled(heads, given.angles, pages, given.slots, given.weights, given.scales)

    timed, exact = Timed(), given.exact()
    tolerance = FP8_TOLERANCE if given.scales else cases.TOLERANCE
    candidates = {OURS: ours, SEPARATE: separate, IN_PLACE: in_place, COMPILED: by_compiler}
    for name, function in candidates.items():
        pages = given.pages()
        written = [x.view(torch.uint8) for x in pages] if name == COMPILED and given.scales else pages
        call = partial(_results, partial(function, given.heads(), written))

        def values(found: Results, pages: list[Tensor] = pages) -> Results:
            return [*found, given.appended(pages[0], k_scale), given.appended(pages[1], v_scale)]

        timed.add(name, call, values, exact, tolerance)
    return _row(given, timed, candidates, given.projected)


def rope_in_place() -> list[Row]:
    """Queries and keys rotated in place, into new tensors, and compiled."""
    wait_for_native_calls()
    rows = []
    for tokens in track(SIZES.tokens, "rotations in place", transient=True):
        rows += [_rotated(Given(tokens)), _rotated(Given(tokens, normed=True))]
    return rows


@torch.no_grad()
def _rotated(given: Given) -> Row:
    cos, sin = given.angles

    def in_place(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        rope_(q, k, cos, sin, **given.norms)
        return q, k

    def new(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return rope(q, k, cos, sin, **given.norms)

    timed, exact = Timed(), given.exact()[:2]
    for name, function in ((OURS, in_place), (ROPE, new)):
        q, k, _ = given.heads()
        timed.add(name, partial(function, q, k), tuple, exact)
    compiled = fused.compiled(pytorch_rope), fused.compiled(pytorch_rope_)
    q, k, _ = given.heads()
    timed.add(COMPILED, partial(compiled[0], q, k, cos, sin, *given.weights), tuple, exact)
    # The compiler writes views of one tensor by way of a copy of all of it: here each is a tensor of its own.
    own = [x.clone() for x in given.heads()[:2]]

    def by_compiler() -> Results:
        compiled[1](own[0], own[1], cos, sin, *given.weights)
        return own

    timed.add(COMPILED_IN_PLACE, by_compiler, tuple, exact)
    return _row(given, timed, (OURS, ROPE, COMPILED, COMPILED_IN_PLACE), torch.cat((q, k), 1))


def _results(call: Callable[[], Tensor]) -> Results:
    return (call(),)


def _row(given: Given, timed: Timed, names: Sequence[str] | dict[str, Any], copied: Tensor) -> Row:
    """Device and host times, and the device time of a copy of `copied`."""
    target, measured = torch.empty_like(copied), dict(timed.calls)
    timed.calls[COPY] = partial(target.copy_, copied)
    on_device = timed.measure(cold=True)
    on_host = host_times(measured, per_round=100, rounds=30) if measured else {}  # fewer launches than a queue holds
    row: Row = {"call": given.label}
    row |= {f"{name} µs": on_device.get(name, NOTHING) for name in (*names, COPY)}
    others = [on_device[name] for name in names if name != OURS and name in on_device]
    row["best of others / ours"] = min(others) / on_device[OURS] if others and OURS in on_device else NOTHING
    row |= {f"{name}, host µs": on_host.get(name, NOTHING) for name in names}
    return {**row, "why not": timed.why_not}

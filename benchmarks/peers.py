"""`benchmarks peers`: attention here, in PyTorch's backends, and in FlashAttention-3 and -4 where they are installed.

All times are device times. The candidates of a row are interleaved, because the GPU's clock changes with its load, and
each is first compared with float64. All read the same tensors in FlashAttention's layout, (B, S, H, D), except that FP8
is measured on (B, H, S, D). A candidate that is missing, raises or is wrong has no time; the row says why.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from rich.progress import track
from torch import Tensor

from benchmarks import decode, fp8
from benchmarks.tools import cases, flash_attention, peers
from benchmarks.tools.candidates import NOTHING, Timed, ratio
from benchmarks.tools.cases import Shape
from benchmarks.tools.flash_attention import V3, V4
from benchmarks.tools.output import Row
from cudnn_sdpa.attention.dense.sdpa import sdpa
from cudnn_sdpa.attention.fp8.fp8_attention import fp8_attention
from cudnn_sdpa.attention.varlen.sdpa_varlen import sdpa_varlen
from cudnn_sdpa.nn.fp8 import Fp8Attention

OURS, CUDNN, FLASH = "ours", "pytorch cudnn", "pytorch flash"
CANDIDATES = (OURS, CUDNN, FLASH, V3, V4)

PREPARED, LAYER, FUNCTION = "sdpa_fp8", "Fp8Attention", "fp8_attention"

#: The largest relative error, in the norm, of results in FP8 against float64.
FP8_TOLERANCE = max(fp8.TOLERANCE.values())

ROWS = 256  #: of queries in float64 at a time

#: The problem of the overview, and its decode steps: sequences, tokens of each.
PROBLEM = Shape(batch=4, heads_q=32, heads_kv=8, length=4096, dim=128, causal=True)
DECODE = ((32, 4096), (8, 32768))


@dataclass(frozen=True)
class Configuration:
    """An attention call that is measured.

    Attributes:
        name: Its name in tables.
        heads: Heads of queries, and of keys and values.
        lengths: The number of queries of each sequence.
        keys: The number of keys of each sequence, if it is not that of the queries.
        dim: Head dim of queries and keys.
        dim_v: Head dim of values, if it is another one.
        causal: Whether there is a causal mask, aligned bottom-right.
        left: The number of earlier keys that a query sees; None is unbounded.
        softcap: Logit soft-capping.
        sinks: Whether there are attention sinks.
        packed: Whether the sequences are packed.
    """

    name: str
    heads: tuple[int, int]
    lengths: tuple[int, ...]
    keys: int | None = None
    dim: int = 128
    dim_v: int | None = None
    causal: bool = True
    left: int | None = None
    softcap: float | None = None
    sinks: bool = False
    packed: bool = False

    @property
    def candidates(self) -> list[str]:
        """What has all of its options, as far as is known before the call."""
        is_plain = self.left is None and self.softcap is None and not self.sinks
        pytorchs = [] if not is_plain else [FLASH] if self.packed else [CUDNN, FLASH]
        return [OURS, *pytorchs, V3, V4]


def _lengths(total: int, shortest: int, longest: int) -> tuple[int, ...]:
    """Random lengths of packed sequences, whose sum is `total`."""
    lengths: list[int] = []
    generator = torch.Generator().manual_seed(0)
    while (missing := total - sum(lengths)) > 0:
        lengths.append(min(missing, int(torch.randint(shortest, longest + 1, (), generator=generator))))
    return tuple(lengths)


GQA, MHA = (32, 8), (16, 16)
LONG = Configuration("32/8 heads, D=128, causal, 1 × 8,192", GQA, (8192,))
BATCH = Configuration("32/8 heads, D=128, causal, 4 × 4,096", GQA, (4096,) * 4)
BIG = Configuration("64/8 heads, D=128, causal, 1 × 8,192", (64, 8), (8192,))
FULL = Configuration("24 heads, D=128, full, 1 × 4,608", (24, 24), (4608,), causal=False)
SHORT = Configuration("32/8 heads, D=128, causal, 1 × 512", GQA, (512,))
WIDE = Configuration("38 heads, D=64, full, 2 × 4,429", (38, 38), (4429,) * 2, dim=64, causal=False)
WIDEST = Configuration("16/8 heads, D=256, causal, 1 × 8,192", (16, 8), (8192,), dim=256)
WIDEST_WINDOW = Configuration("16/8 heads, D=256, window 1,024, 1 × 8,192", (16, 8), (8192,), dim=256, left=1023)
CAPPED = Configuration("16/8 heads, D=256, softcap=50, causal, 1 × 8,192", (16, 8), (8192,), dim=256, softcap=50.0)
MLA = Configuration("128 heads, D=192, Dv=128, causal, 1 × 4,096", (128, 128), (4096,), dim=192, dim_v=128)
SINKS = Configuration("64/8 heads, D=64, sinks, causal, 1 × 8,192", (64, 8), (8192,), dim=64, sinks=True)
NARROW = Configuration("64/8 heads, D=64, sinks, window 128, 1 × 8,192", (64, 8), (8192,), dim=64, sinks=True, left=127)
WINDOW = Configuration("32/8 heads, D=128, window 4,096, 1 × 16,384", GQA, (16384,), left=4095)
MANY = Configuration("32/8 heads, D=128, causal, 16 × 1,024", GQA, (1024,) * 16)
IMAGES = Configuration("16 heads, D=64, full, 64 × 577", MHA, (577,) * 64, dim=64, causal=False)
OF_DOCUMENTS = _lengths(32768, 800, 8000)
DOCUMENTS = Configuration(
    "32/8 heads, D=128, causal, packed: 32,768 tokens of 800 to 8,000", GQA, OF_DOCUMENTS, packed=True
)
SENTENCES = Configuration(
    "32/8 heads, D=128, causal, packed: 16,384 tokens of 30 to 500", GQA, _lengths(16384, 30, 500), packed=True
)
NARROW_DOCUMENTS = Configuration(
    "64/8 heads, D=64, window 128, packed: 32,768 tokens of 800 to 8,000",
    (64, 8),
    OF_DOCUMENTS,
    dim=64,
    left=127,
    packed=True,
)

FORWARD = (
    LONG,
    BATCH,
    Configuration("32/8 heads, D=128, causal, 1 × 32,768", GQA, (32768,)),
    BIG,
    FULL,
    WIDE,
    Configuration("12 heads, D=128, full, 1 × 32,760", (12, 12), (32760,), causal=False),
    WIDEST,
    WIDEST_WINDOW,
    CAPPED,
    MLA,
    SINKS,
    NARROW,
    WINDOW,
    Configuration("32/8 heads, D=128, causal, 2,048 queries on 8,192 keys", GQA, (2048,), keys=8192),
    Configuration("32/8 heads, D=128, causal, 512 queries on 32,768 keys", GQA, (512,), keys=32768),
    MANY,
    Configuration("32/8 heads, D=128, causal, 8 × 256", GQA, (256,) * 8),
    SHORT,
    DOCUMENTS,
    SENTENCES,
)
TRAINING = (
    *(LONG, BATCH, BIG, FULL, WIDE, WIDEST, WIDEST_WINDOW, CAPPED, MLA, NARROW, WINDOW, MANY, IMAGES, SHORT),
    *(DOCUMENTS, SENTENCES, NARROW_DOCUMENTS),
)


class Inputs:
    """The tensors of a configuration.

    Attributes:
        qkv: Queries, keys and values, (B, S, H, D), or packed (T, H, D).
        sinks: Attention sinks.
        sinks_bfloat16: The same, rounded.
        grad_out: A gradient of the output.
        offsets: Where packed sequences begin.
    """

    def __init__(self, asked: Configuration, *, requires_grad: bool = False) -> None:
        self.asked = asked
        (heads_q, heads_kv), dim_v = asked.heads, asked.dim_v or asked.dim
        queries = asked.lengths[0]
        lead_q, lead_kv = (
            ((sum(asked.lengths),),) * 2
            if asked.packed
            else ((len(asked.lengths), length) for length in (queries, asked.keys or queries))
        )
        q, k = cases.normal(*lead_q, heads_q, asked.dim), cases.normal(*lead_kv, heads_kv, asked.dim)
        v = cases.normal(*lead_kv, heads_kv, dim_v)
        self.qkv = (q, k, v)
        self.sinks = cases.normal(heads_q, dtype=torch.float32) if asked.sinks else None
        self.sinks_bfloat16 = None if self.sinks is None else self.sinks.bfloat16()
        self.grad_out = cases.normal(*lead_q, heads_q, dim_v)
        offsets = torch.tensor([0, *asked.lengths], device=cases.DEVICE).cumsum(0, dtype=torch.int32)
        self.offsets = offsets if asked.packed else None
        for tensor in self.differentiable:
            tensor.requires_grad_(requires_grad)

    @property
    def differentiable(self) -> list[Tensor]:
        """What has a gradient: q, k, v and the sinks."""
        return [*self.qkv, *([] if self.sinks is None else [self.sinks])]

    def sample(self, tensor: Tensor) -> Tensor:
        """What belongs to the first sequence and the first head of keys, of a tensor with tokens: (S, heads, D)."""
        heads = tensor.shape[-2] // self.asked.heads[1]
        rows = tensor[: self.asked.lengths[0]] if self.asked.packed else tensor[0]
        return rows[:, :heads].detach()

    def sampled(self, results: Sequence[Tensor]) -> list[Tensor]:
        """The same of an output and gradients. Those of sinks are sums over all sequences."""
        return [self.sample(x) if x.dim() > 1 else x[: self.asked.heads[0] // self.asked.heads[1]] for x in results]


def ours(given: Inputs) -> Tensor:
    """`sdpa` or `sdpa_varlen`."""
    asked, longest = given.asked, max(given.asked.lengths)
    window = None if asked.left is None else (asked.left, 0)
    if given.offsets is not None:
        packed = sdpa_varlen(
            *given.qkv,
            cu_seqlens_q=given.offsets,
            cu_seqlens_kv=given.offsets,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            is_causal=asked.causal,
            window_size=window,
            softcap=asked.softcap,
            sinks=given.sinks,
        )
        assert isinstance(packed, Tensor)
        return packed
    q, k, v = (x.transpose(1, 2) for x in given.qkv)
    out = sdpa(
        q,
        k,
        v,
        is_causal=asked.causal,
        causal_alignment="top_left" if asked.keys is None else "bottom_right",
        window_size=window,
        softcap=asked.softcap,
        sinks=given.sinks,
    )
    assert isinstance(out, Tensor)
    return out.transpose(1, 2)


def pytorch(backend: str, given: Inputs) -> Tensor:
    """`scaled_dot_product_attention` on one backend; `varlen_attn`, which is FLASH, on packed sequences."""
    asked, longest = given.asked, max(given.asked.lengths)
    if given.offsets is not None:
        function = peers.pytorch_varlen()
        if function is None:
            raise ImportError("varlen_attn needs PyTorch 2.10")
        arguments = (*given.qkv, given.offsets, given.offsets, longest, longest)
        options: dict[str, object] = {"window_size": (-1, 0 if asked.causal else -1)}
        if "enable_gqa" in inspect.signature(function).parameters:  # older versions need no word for it
            options["enable_gqa"] = True
        out: Tensor = flash_attention.first(function, *arguments, **options)
        return out
    q, k, v = (x.transpose(1, 2) for x in given.qkv)
    with peers.only(backend):
        if asked.keys is not None:
            return peers.pytorch_of_last_queries(q, k, v)().transpose(1, 2)
        return peers.pytorch(q, k, v, is_causal=asked.causal)().transpose(1, 2)


def flash_attention_3(given: Inputs) -> Tensor:
    """FlashAttention-3, which takes sinks in bfloat16."""
    options: dict[str, object] = {}
    if given.sinks is not None:
        options["sinks"] = given.sinks.bfloat16() if given.sinks.requires_grad else given.sinks_bfloat16
    return _flash_attention(V3, given, unbounded=-1, **options)


def flash_attention_4(given: Inputs) -> Tensor:
    """FlashAttention-4, in which None is an unbounded side of a window."""
    options = {"learnable_sink": given.sinks} if given.asked.sinks else {}
    return _flash_attention(V4, given, unbounded=None, **options)


def _flash_attention(name: str, given: Inputs, *, unbounded: int | None, **options: object) -> Tensor:
    module, asked = flash_attention.module(name), given.asked
    function, longest = module.flash_attn_func, max(asked.lengths)
    if given.offsets is not None:
        function = module.flash_attn_varlen_func
        options |= {"cu_seqlens_q": given.offsets, "cu_seqlens_k": given.offsets}
        options |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
    if asked.softcap is not None:
        options["softcap"] = asked.softcap
    window = (unbounded, unbounded) if asked.left is None else (asked.left, 0)
    out: Tensor = flash_attention.first(function, *given.qkv, causal=asked.causal, window_size=window, **options)
    return out


ATTEND: dict[str, Callable[[Inputs], Tensor]] = {
    OURS: ours,
    CUDNN: partial(pytorch, CUDNN),
    FLASH: partial(pytorch, FLASH),
    V3: flash_attention_3,
    V4: flash_attention_4,
}


def in_float64(given: Inputs, *, gradients: bool) -> list[Tensor]:
    """The output of the first sequence and the first head of keys, (S, heads, Dv), and its gradients."""
    asked = given.asked
    q, k, v = (given.sample(x).double().requires_grad_(gradients) for x in given.qkv)
    grad_out = given.sample(given.grad_out).double()
    heads, shift = q.shape[1], k.shape[0] - q.shape[0]
    sinks = None if given.sinks is None else given.sinks[:heads].detach().double().requires_grad_(gradients)
    outputs, columns = [], torch.arange(k.shape[0], device=k.device)
    for start in range(0, q.shape[0], ROWS):
        part = q[start : start + ROWS]
        scores = torch.einsum("qhd,kd->hqk", part, k[:, 0]) * asked.dim**-0.5
        if asked.softcap is not None:
            scores = asked.softcap * torch.tanh(scores / asked.softcap)
        diagonal = torch.arange(start, start + part.shape[0], device=k.device)[:, None] + shift
        if asked.causal:
            scores = scores.masked_fill(columns > diagonal, -torch.inf)
        if asked.left is not None:
            scores = scores.masked_fill(columns < diagonal - asked.left, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, part.shape[0], 1)], -1)
        out = torch.einsum("hqk,kd->qhd", scores.softmax(-1)[..., : k.shape[0]], v[:, 0])
        if gradients:
            torch.autograd.backward(out, grad_out[start : start + ROWS])
        outputs.append(out.detach())
    inputs = (q, k, v) if sinks is None else (q, k, v, sinks)
    return [torch.cat(outputs), *(x.grad for x in inputs if x.grad is not None)]


def forward() -> list[Row]:
    """Device time of the forward pass without gradients."""
    with torch.no_grad():
        return [_row(asked, requires_grad=False) for asked in track(FORWARD, "forward", transient=True)]


def training() -> list[Row]:
    """Device time of a forward and a backward pass together."""
    return [_row(asked, requires_grad=True) for asked in track(TRAINING, "training", transient=True)]


def _row(asked: Configuration, *, requires_grad: bool) -> Row:
    torch.cuda.empty_cache()
    given = Inputs(asked, requires_grad=requires_grad)
    expected = in_float64(given, gradients=requires_grad)
    timed = Timed()
    for name in asked.candidates:
        call = partial(both_passes if requires_grad else only_forward, ATTEND[name], given)
        timed.add(name, call, given.sampled, expected)
    times = timed.measure()
    row: Row = {"call": asked.name}
    row |= {f"{name} µs": times.get(name, NOTHING) for name in CANDIDATES}
    row |= {f"{name} / {OURS}": ratio(times, name, OURS) for name in (V3, V4)}
    row["why not"] = timed.why_not
    return row


def only_forward(attend: Callable[[Inputs], Tensor], given: Inputs) -> tuple[Tensor, ...]:
    """The output alone."""
    return (attend(given),)


def both_passes(attend: Callable[[Inputs], Tensor], given: Inputs) -> tuple[Tensor, ...]:
    """The output and the gradients."""
    out = attend(given)
    return out, *torch.autograd.grad(out, given.differentiable, given.grad_out)


def overview() -> list[Row]:
    """One problem of a LLaMA-like layer, forward and training, in bfloat16 and FP8, and decode steps: the first chart.

    `sdpa_fp8` gets tensors that are quantized already, and leaves its results in FP8. `Fp8Attention` (scales of earlier
    steps) and `fp8_attention` (scales of this call) take and give bfloat16: their time includes quantization.
    """
    flops = {"forward": PROBLEM.flops(), "training": PROBLEM.flops() + PROBLEM.flops(backward=True)}
    rows: list[Row] = []
    for which, timed in _passes().items():
        rows += _candidates(which, timed, timed.measure(), (*CANDIDATES, PREPARED, LAYER, FUNCTION), work=flops[which])
    torch.cuda.empty_cache()
    copy_large = cases.large_copy()
    for batch, length in DECODE:
        step = decode.Step((1,) * batch, length)
        timed = decode.candidates(step)
        timed.calls[decode.COPY] = copy_large
        which, times = f"decode, {batch} × {length:,}", timed.measure(cold=True)
        names = (decode.PAGED, decode.VARLEN, V3, decode.CONTIGUOUS)
        rows += _candidates(which, timed, times, names, work=step.bytes, unit="TB/s")
        rows += _candidates(which, timed, times, (decode.COPY,), work=2 * cases.COPIED, unit="TB/s")
        del timed
        torch.cuda.empty_cache()
    return rows


def _candidates(
    which: str, timed: Timed, times: Mapping[str, float], names: Sequence[str], work: float, unit: str = "TFLOP/s"
) -> list[Row]:
    """A row for each candidate, with what it does in a second, or why it does not."""
    rows: list[Row] = []
    for name in names:
        measured: Row = {"why not": timed.reasons.get(name)}
        if name in times:
            measured = {"µs": times[name], unit: work / times[name] / 1e6}
        rows.append({"problem": which, "candidate": name, **measured})
    return rows


def _passes() -> dict[str, Timed]:
    """The candidates of both passes together, and of the forward pass."""
    heads = (PROBLEM.heads_q, PROBLEM.heads_kv)
    given = Inputs(Configuration("", heads, (PROBLEM.length,) * PROBLEM.batch, dim=PROBLEM.dim), requires_grad=True)
    q, k, v = (x.detach().transpose(1, 2).contiguous().requires_grad_() for x in given.qkv)
    grad_out = given.grad_out.transpose(1, 2).contiguous()
    prepared = fp8.Tensors(PROBLEM, qkv=(q, k, v), grad_out=grad_out)
    layer = Fp8Attention(is_causal=True).to(cases.DEVICE)
    current = partial(fp8_attention, is_causal=True)

    def in_fp8(attend: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        out = attend(q, k, v)
        return out, *torch.autograd.grad(out, (q, k, v), grad_out)

    def forward_in_fp8(attend: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (attend(q, k, v),)

    def frozen(attend: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return only_forward(attend, given)

    def sampled(results: Sequence[Tensor]) -> list[Tensor]:
        return given.sampled([x.transpose(1, 2) for x in results])

    def dequantized(results: Sequence[Tensor]) -> list[Tensor]:
        return sampled(prepared.dequantized(results))

    for _ in range(layer.scaling.calibration + 1):  # after these the scales follow the amax history
        in_fp8(layer)
    expected = in_float64(given, gradients=True)
    training, forward = Timed(), Timed()
    for name in CANDIDATES:
        training.add(name, partial(both_passes, ATTEND[name], given), given.sampled, expected)
        forward.add(name, partial(frozen, ATTEND[name]), given.sampled, expected[:1])
    training.add(PREPARED, prepared.both, dequantized, expected, tolerance=FP8_TOLERANCE)
    forward.add(PREPARED, lambda: (prepared.forward(),), dequantized, expected[:1], tolerance=FP8_TOLERANCE)
    training.add(LAYER, partial(in_fp8, layer), sampled, expected, tolerance=FP8_TOLERANCE)
    training.add(FUNCTION, partial(in_fp8, current), sampled, expected, tolerance=FP8_TOLERANCE)
    inference = copy.deepcopy(layer).eval()  # with the scales of those steps
    forward.add(LAYER, partial(forward_in_fp8, inference), sampled, expected[:1], tolerance=FP8_TOLERANCE)
    forward.add(FUNCTION, partial(forward_in_fp8, current), sampled, expected[:1], tolerance=FP8_TOLERANCE)
    return {"forward": forward, "training": training}

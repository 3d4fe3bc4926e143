"""`benchmarks attention`: kernels of both passes and PyTorch's, the cost of options, packed sequences, and memory.

All times are device times. The candidates of a row are interleaved, because the GPU's clock changes with its load.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from functools import partial

import torch
from rich.progress import track
from torch import Tensor

from benchmarks.tools import cases, hand_graphs, peers
from benchmarks.tools.cases import Shape, Sizes, check_agreement
from benchmarks.tools.output import Row
from benchmarks.tools.peers import Candidate
from benchmarks.tools.timing import Call, device_times, peak_memory
from cudnn_sdpa.attention.dense.sdpa import sdpa
from cudnn_sdpa.errors import CudnnSdpaError

OURS, CUDNN, FLASH = "sdpa", "pytorch cudnn", "pytorch flash"
GRADIENTS = ("grad_q", "grad_k", "grad_v")
NOTHING = "–"
HEADS_Q, HEADS_KV, DIM = 32, 8, 128  #: of packed sequences


def kernels(sizes: Sizes = cases.FULL) -> list[Row]:
    """Device time of `sdpa`, forward and backward, and of PyTorch's backends."""
    rows = []
    for shape in track(sizes.kernels, "kernels", transient=True):
        candidates = _candidates(shape)
        with torch.no_grad():
            forward = device_times({c.name: c.attend for c in candidates}, repeats=sizes.repeats)
        rows.append(_kernel_row(shape, "forward", candidates, forward))
        backward = device_times(_backward_calls(shape, candidates), repeats=sizes.repeats)
        rows.append(_kernel_row(shape, "backward", candidates, backward))
    return rows


def _candidates(shape: Shape) -> list[Candidate]:
    """`sdpa` first, then those of PyTorch's backends that can compute it."""
    q, k, v = shape.tensors(requires_grad=True)
    ours = Candidate(OURS, lambda: sdpa(q, k, v, is_causal=shape.causal), (q, k, v))
    others = [peers.candidate(name, q, k, v, is_causal=shape.causal) for name in (CUDNN, FLASH)]
    return [ours, *(other for other in others if other is not None)]


def _backward_calls(shape: Shape, candidates: list[Candidate]) -> dict[str, Call]:
    """The backward passes of retained graphs, after a check that all agree."""
    calls: dict[str, Call] = {}
    results: dict[str, list[Tensor]] = {}
    grad_out = torch.randn_like(candidates[0].inputs[0])
    for candidate in candidates:
        out = candidate.attend()
        calls[candidate.name] = partial(candidate.gradients, out, grad_out)
        gradients = candidate.gradients(out, grad_out)
        results[candidate.name] = [out.detach(), *candidate.fold(gradients, shape.heads_kv)]
    ours = results.pop(OURS)
    if not results:
        raise RuntimeError(f"none of PyTorch's backends computes {shape.label}: there is nothing to compare with")
    for name, theirs in results.items():
        check_agreement(("out", *GRADIENTS), ours, theirs, f"{name}'s on {shape.label}")
    return calls


def _kernel_row(shape: Shape, which: str, candidates: list[Candidate], times: dict[str, float]) -> Row:
    flops = shape.flops(backward=which == "backward")
    names = (OURS, CUDNN, FLASH)
    row: Row = {"B, Hq, Hkv, S, D": shape.label, "pass": which}
    row |= {f"{name} µs": times.get(name, NOTHING) for name in names}
    row |= {f"{name} TFLOP/s": flops / times[name] / 1e6 if name in times else NOTHING for name in names}
    row[f"{OURS} / {CUDNN}"] = times[OURS] / times[CUDNN] if CUDNN in times else NOTHING
    row["K/V heads repeated for"] = ", ".join(c.name for c in candidates if c.repeats_heads) or NOTHING
    return row


def options(sizes: Sizes = cases.FULL) -> list[Row]:
    """The cost of each option on top of the plain causal call, forward and both passes."""
    qkv = sizes.options.tensors(requires_grad=True)
    grad_out = torch.randn_like(qkv[0])
    calls: dict[str, dict[str, Call]] = {"forward": {}, "forward+backward": {}}
    refusals: dict[str, list[str]] = {}
    all_options = _options(sizes.options)
    for name, options in track(all_options.items(), "options", transient=True):
        attend = partial(_attend, qkv, options)
        inputs = [*qkv, *(x for x in options.values() if isinstance(x, Tensor) and x.requires_grad)]
        both = partial(_both_passes, attend, inputs, grad_out)
        for which, call in (("forward", partial(_without_graph, attend)), ("forward+backward", both)):
            refusal = _refusal(call)
            if refusal is None:
                calls[which][name] = call
            else:
                refusals.setdefault(name, []).append(f"{which}: {refusal}")
    times = {which: device_times(by_option, repeats=sizes.repeats) for which, by_option in calls.items()}
    return [_option_row(name, times, refusals.get(name, [])) for name in all_options]


def _options(shape: Shape) -> dict[str, dict[str, object]]:
    """Options by the name of their row; sinks get their gradient, a mask does not."""
    length = shape.length
    lengths = torch.full((shape.batch,), length, dtype=torch.int32, device=cases.DEVICE)
    return {
        "plain": {},
        "seq_lens_q, seq_lens_kv, all full": {"seq_lens_q": lengths, "seq_lens_kv": lengths},
        "sinks": {"sinks": cases.normal(shape.heads_q, dtype=torch.float32).requires_grad_()},
        "window_size=(1023, 0)": {"window_size": (1023, 0)},
        "attn_mask (1, 1, S, S), bfloat16": {"attn_mask": cases.normal(1, 1, length, length)},
        "softcap=50": {"softcap": 50.0},
        "dropout_p=0.1": {"dropout_p": 0.1},
        "deterministic=True": {"deterministic": True},
        "return_lse=True": {"return_lse": True},
    }


def _attend(qkv: tuple[Tensor, Tensor, Tensor], options: dict[str, object]) -> Tensor:
    function: Callable[..., Tensor | tuple[Tensor, Tensor]] = sdpa
    result = function(*qkv, is_causal=True, **options)
    return result[0] if isinstance(result, tuple) else result


def _without_graph(attend: Callable[[], Tensor]) -> None:
    with torch.no_grad():
        attend()


def _both_passes(attend: Callable[[], Tensor], inputs: Sequence[Tensor], grad_out: Tensor) -> None:
    torch.autograd.grad(attend(), inputs, grad_out)


def _refusal(call: Call) -> str | None:
    """Why a call is not supported, in one line; None if it is."""
    try:
        call()
    except CudnnSdpaError as error:
        reasons = "; ".join(getattr(error, "reasons", [])) or str(error)
        return textwrap.shorten(reasons, 200, placeholder=" …")
    return None


def _option_row(name: str, times: dict[str, dict[str, float]], refusals: list[str]) -> Row:
    row: Row = {"option": name}
    for which, by_option in times.items():
        row[f"{which} µs"] = by_option.get(name, NOTHING)
        row[f"{which} / plain"] = by_option[name] / by_option["plain"] if name in by_option else NOTHING
    row["why not"] = "; ".join(refusals) or NOTHING
    return row


def varlen(sizes: Sizes = cases.FULL) -> list[Row]:
    """Device time of `sdpa_varlen` on packed sequences, and of the frontend's graph with exact batch and lengths."""
    try:
        from cudnn_sdpa.attention.varlen.sdpa_varlen import sdpa_varlen
    except ImportError as error:
        print(f"varlen is skipped: this version has no sdpa_varlen ({error})")
        return []
    rows = []
    for max_seqlen in track(sizes.max_seqlens, "varlen", transient=True):
        rows += _varlen_rows(sdpa_varlen, cases.random_lengths(sizes.tokens, max_seqlen), sizes.repeats)
    return rows


def _varlen_rows(function: Callable[..., Tensor], lengths: list[int], repeats: int) -> list[Row]:
    tokens, max_seqlen = sum(lengths), max(lengths)
    cu_seqlens = torch.tensor([0, *lengths], device=cases.DEVICE).cumsum(0, dtype=torch.int32)
    q, k, v = (cases.normal(tokens, heads, DIM).requires_grad_() for heads in (HEADS_Q, HEADS_KV, HEADS_KV))
    detached = (q.detach(), k.detach(), v.detach())
    grad_out = torch.randn_like(detached[0])

    def attend() -> Tensor:
        out: Tensor = function(
            q,
            k,
            v,
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=max_seqlen,
            max_seqlen_kv=max_seqlen,
            is_causal=True,
        )
        return out

    inference = hand_graphs.PackedForward(detached, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, with_lse=False)
    training = hand_graphs.PackedForward(detached, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, with_lse=True)
    frontend = hand_graphs.PackedBackward(
        detached, forward=training, grad_out=grad_out, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen
    )
    for graph in (inference, training, frontend):
        graph.launch()
    out = attend()
    backward = partial(torch.autograd.grad, out, (q, k, v), grad_out, retain_graph=True)
    reference = f"the frontend's on {len(lengths)} sequences"
    check_agreement(("out", "out"), (out.detach(),) * 2, (inference.out, training.out), reference)
    check_agreement(GRADIENTS, backward(), frontend.gradients, reference)
    with torch.no_grad():
        times = {"forward": device_times({"ours": attend, "frontend": inference.launch}, repeats=repeats)}
    times["forward in training"] = device_times({"ours": attend, "frontend": training.launch}, repeats=repeats)
    times["backward"] = device_times({"ours": backward, "frontend": frontend.launch}, repeats=repeats)
    return [_varlen_row(lengths, which, time["ours"], time["frontend"]) for which, time in times.items()]


def _varlen_row(lengths: list[int], which: str, ours: float, frontend: float) -> Row:
    flops = sum(
        Shape(batch=1, heads_q=HEADS_Q, heads_kv=HEADS_KV, length=n, dim=DIM, causal=True).flops(
            backward=which == "backward"
        )
        for n in lengths
    )
    return {
        "sequences": f"{len(lengths)} of {min(lengths)} to {max(lengths)} tokens",
        "pass": which,
        "sdpa_varlen µs": ours,
        "frontend µs": frontend,
        "sdpa_varlen / frontend": ours / frontend,
        "sdpa_varlen TFLOP/s": flops / ours / 1e6,
    }


def memory(sizes: Sizes = cases.FULL) -> list[Row]:
    """Peak device memory of a forward and a backward pass beyond their inputs."""
    candidates = _candidates(sizes.training)
    q, k, v = candidates[0].inputs
    grad_out = torch.randn_like(q)
    peaks = {c.name: peak_memory(partial(c.step, grad_out)) for c in candidates}
    result = sum(tensor.numel() * tensor.element_size() for tensor in (q, q, k, v))
    peaks["output and gradients alone"] = result
    return [
        {"forward and backward": name, "MB": size / 1e6, "× output and gradients": size / result}
        for name, size in peaks.items()
    ]

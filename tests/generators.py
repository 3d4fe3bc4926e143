"""Random valid calls of every public operation, run and compared with float64.

    python tests/generators.py conv2d 1234 [--device cuda]          # repeats one call: draws, runs, compares, explains
    python tests/generators.py all --count 5000 --device cuda --workers 6 --seconds 300 --json report.json

A call depends only on its operation and its seed. It runs three times: cold, warm on other values of the same layout,
and in another grad mode. An outcome is "right", "declined" (an `UnsupportedError`, with its reasons), "wrong", or
"crashed" (any other exception).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
import os
import random
import re
import sys
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import torch
from float64_reference import (
    ACTIVATIONS,
    MARGIN,
    Precision,
    activated_bounds,
    attention,
    attention_bounds,
    convolution,
    feed_forward,
    layer_norm,
    multi_head_attention,
    norm_bounds,
    packed_on_pages,
    parameters_of,
    patches,
    rms_norm,
    rope,
    rotated,
    seen_keys,
    transformer_layer,
    vision_encoder,
)
from random_tensors import GRADIENTS, Spec, aligned, dense, drawn, gradient_like, is_dense, is_in_order_of, negated
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import cudnn_sdpa
from benchmarks.tools.ways import until_recorded
from cudnn_sdpa import ArgumentError, CudnnSdpaError, Fp8BackwardScales, Fp8Scales, UnsupportedError
from cudnn_sdpa.engine.native import loader

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
HALF_A_ULP = {E4M3: 2**-4, E5M2: 2**-3}

#: Steps after the first: on other values, and in another grad mode.
THIRD = ("create_graph", "create_graph", "no_grad", "inference", "backward", "options")


@dataclass(frozen=True)
class Case:
    """A call. Options default to off.

    Attributes:
        operation: The name of the operation.
        seed: The random seed.
        dtype: The dtype of the results.
        tensors: The tensor arguments.
        options: The other arguments.
        varied: Options that change in the third run.
        facts: Other data of the call, such as lengths.
        wanted: The tensors that require grad.
        grad: The kind of grad_out.
        mode: "eager", "aot_eager", "inductor", "autocast" or "checkpoint".
        third: The grad mode of the third run.
        policy: The shape policy.
        settings: Other settings: "cpu_checks", "fallback", "providers" or "deterministic" (PyTorch's setting).
        refusable: Why an `ArgumentError` would also be right.
    """

    operation: str
    seed: int
    dtype: torch.dtype
    tensors: dict[str, Spec]
    options: dict[str, Any] = field(default_factory=dict)
    varied: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    wanted: tuple[str, ...] = ()
    grad: str = "dense"
    mode: str = "eager"
    third: str = "no_grad"
    policy: str = "exact"
    settings: dict[str, Any] = field(default_factory=dict)
    refusable: str = ""

    def line(self, device: str = "cpu") -> str:
        more = "" if device == "cpu" else f" --device {device}"
        return f"python tests/generators.py {self.operation} {self.seed}{more}"

    def __str__(self) -> str:
        said = {**self.options, **self.facts, "wanted": ", ".join(self.wanted) or "nothing", "grad": self.grad}
        said |= {"mode": self.mode, "third": self.third, "varied": self.varied, "policy": self.policy}
        said |= self.settings
        rows = [f"  {name}: {spec}" for name, spec in self.tensors.items()]
        return "\n".join([*rows, "  " + " ".join(f"{name}={value!r}" for name, value in said.items() if value != {})])


@dataclass
class Outcome:
    """The outcome of a call.

    Attributes:
        kind: "right", "declined", "wrong" or "crashed".
        problems: What was wrong.
        reasons: Why it was declined, entirely or in part.
        by: The component that declined it, according to the error.
        served: Operations and providers of its plans.
        launched: Who launches its plans, if they may be launched as recorded.
    """

    kind: str
    problems: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    by: str = ""
    served: list[str] = field(default_factory=list)
    launched: list[str] = field(default_factory=list)


Tensors = dict[str, Tensor]


class Operation:
    """A public operation: how its calls are drawn, run, and computed in float64."""

    name = ""
    #: Options that may change between runs, because they are data.
    data: tuple[str, ...] = ()
    has_graph_break = False
    aligns = False
    modes = True
    has_graph_of_gradients = True
    #: Tensors that autocast casts.
    casts: tuple[str, ...] = ()

    def draw(self, r: random.Random, seed: int, device: str) -> Case:
        """The call of a seed, without its mode."""
        raise NotImplementedError

    def call(self, tensors: Tensors, options: dict[str, Any], facts: dict[str, Any]) -> Tensors:
        """Runs the call. Returns the results by name."""
        raise NotImplementedError

    def before(self, case: Case, tensors: Tensors, options: dict[str, Any]) -> dict[str, Any]:
        """Prepares data that must be known before the call runs."""
        return {}

    def exact(self, case: Case, options: dict[str, Any], leaves: Tensors, known: dict[str, Any]) -> Tensors:
        raise NotImplementedError

    def bounds(
        self,
        case: Case,
        options: dict[str, Any],
        leaves: Tensors,
        grads: Tensors,
        known: dict[str, Any],
        precision: Precision,
    ) -> Tensors:
        raise NotImplementedError

    def check_places(self, case: Case, tensors: Tensors, found: Tensors, gradients: Tensors) -> Iterator[str]:
        yield from ()

    def session(self, r: random.Random, seed: int, device: str) -> Outcome | None:
        """The outcome of a sequence of calls, for operations that are not a single call."""
        return None

    def explained(self, case: Case) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] | None:
        """The arguments for `explain`, on meta tensors; None if it does not support the operation."""
        return None


def meta(case: Case) -> Tensors:
    """The tensors of a call on no device; those that are wanted require grad."""
    made = {name: spec.make("meta").detach() for name, spec in case.tensors.items()}
    return {name: x.requires_grad_(name in case.wanted) for name, x in made.items()}


def meta_lengths(case: Case) -> Tensors:
    return {n: torch.empty(len(x), dtype=torch.int32, device="meta") for n, x in case.facts.items() if "lens" in n}


OPERATIONS: dict[str, Operation] = {}


def operation(kind: type[Operation]) -> type[Operation]:
    OPERATIONS[kind.name] = kind()
    return kind


# How attention is drawn


def size(r: random.Random, device: str, *, large: float = 0.12) -> int:
    """A length, mostly short, and often 1. CPU references are slow and have no tiles."""
    if r.random() < large:
        return r.choice([127, 128, 129, 192, 200, 256, 300, 513] if device != "cpu" else [33, 40, 65])
    short = [1, 1, 1, 2, 3, 5, 7, 8, 15, 16, 17]
    return r.choice(short if device == "cpu" else [*short, 31, 33, 40, 63, 64, 65, 77])


def number(r: random.Random, low: float, high: float) -> float:
    """A value that is no power of two."""
    return round(low * (high / low) ** r.random(), 4) * 1.0009765625


def half(r: random.Random, device: str) -> torch.dtype:
    dtype, wide = r.choice([BF16, BF16, F16]), r.choice([None, F32, F64, F64])
    return dtype if device != "cpu" or wide is None else wide


def later(name: str, seed: int) -> random.Random:
    """A random generator for options added later, so that earlier draws, and most calls, stay the same."""
    return random.Random(zlib.crc32(f"later {name} {seed}".encode()))


#: Head dims that the reference supports and no kernel has.
ODD = ((1, 1), (3, 5), (7, 7), (12, 4), (20, 33))


def is_unlimited(r: random.Random, device: str, share: float = 0.1) -> bool:
    """Whether a CPU call may be one that no GPU supports."""
    return device == "cpu" and r.random() < share


UNCHECKED = {"cpu_checks": None}


def scale_of(r: random.Random, dim: int) -> float | None:
    usual = number(r, 0.5, 2.0) * dim**-0.5
    return r.choice([None, None, usual, usual, usual, 4 * usual, -usual, 1e-6, 40 * usual, 0.0])


def window_of(r: random.Random) -> tuple[int, int] | None:
    return None if r.random() < 0.65 else (r.choice([-1, 0, 0, 1, 5, 64, 10**6]), r.choice([-1, 0, 0, 1, 3, 70, 10**6]))


def lengths_of(r: random.Random, batch: int, longest: int) -> list[int]:
    """A length for each sequence, often 0 or all."""
    return [r.choice([0, longest, r.randint(0, longest), r.randint(0, longest)]) for _ in range(batch)]


def sequence(values: list[int], device: str, lead: int = 0) -> Tensor:
    """Lengths or offsets as a slice of a larger tensor."""
    return torch.tensor([7] * lead + values, dtype=torch.int32, device=device)[lead:]


def mask_of(r: random.Random, full: tuple[int, ...], dtype: torch.dtype, *, other: bool = True) -> Spec:
    """A mask that broadcasts to the scores."""
    shape = tuple(n if r.random() < 0.6 else 1 for n in full)[r.choice([0, 0, 0, 1, 2, 2, 3, 4]) :]
    kind = r.choice(["bool", "bool", "float", "float", "float", "float", "-inf", "large", "large"])
    if kind == "bool":
        values = {"kind": "bool", "hidden": r.choice([0.0, 0.3, 0.9, 1.0]), "row": r.random() < 0.4}
        return drawn(r, shape, torch.bool, expands=0.3, **values)
    of = r.choice([dtype, dtype, F32]) if other else dtype
    values = {"scale": r.choice([0.5, 1.3, 5.0])}
    if kind != "float":
        filler = (
            -math.inf
            if kind == "-inf"
            else r.choice([-1e4, -1e9, -1e9, float(torch.finfo(F32 if of == F64 else of).min)])
        )
        values |= {"hidden": r.choice([0.3, 0.8, 1.0]), "filler": filler, "row": r.random() < 0.5}
    spec = drawn(r, shape, of, expands=0.3, **values)
    return negated(spec) if r.random() < 0.02 else spec


def memory_of(r: random.Random, shape: tuple[int, ...], dtype: torch.dtype, unit: int = 8, **values: Any) -> Spec:
    spec = drawn(r, shape, dtype, unit=unit, expands=0.08, **values)
    return negated(spec) if r.random() < 0.02 else spec


def chosen(r: random.Random, names: list[str]) -> tuple[str, ...]:
    """A random subset, often all, sometimes none."""
    how = r.random()
    if how < 0.15:
        return ()
    return tuple(name for name in names if how < 0.5 or r.random() < 0.6)


def head_dims(r: random.Random, device: str) -> tuple[int, int]:
    if device == "cpu":
        return r.choice([(8, 8), (8, 8), (16, 16), (64, 64), (24, 8), (8, 40)])
    odd = 8 * r.randint(1, 16)
    return r.choice([(64, 64)] * 4 + [(128, 128)] * 2 + [(8, 8), (odd, odd), (192, 128), (64, 32), (48, 80)])


def more_of_attention(r: random.Random, case: Case) -> Case:
    """Corner cases of options that all attention functions share."""
    options, tensors, wanted = dict(case.options), dict(case.tensors), case.wanted
    if "deterministic" in options and options["deterministic"] is None and r.random() < 0.3:
        options["deterministic"] = False
    if "sinks" in tensors and r.random() < 0.3:
        tensors["sinks"] = replace(tensors["sinks"], dtype=r.choice([BF16, F16]))
    if r.random() < 0.04:
        options["scale"] = r.choice([1, 2, -1, 65536.0, -65536])
        wanted = wanted if abs(options["scale"]) < 9 else ()  # beyond, a float32 LSE is too imprecise for gradients
    if options.get("softcap") and r.random() < 0.1:
        options["softcap"] = r.choice([1, 1e-3, 1e18])
    return replace(case, options=options, tensors=tensors, wanted=wanted)


def causal_bias(which: str, sq: int, skv: int) -> Any:
    from torch.nn.attention import bias

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fully masked rows, which are zeros here
        return {"top_left": bias.causal_upper_left, "bottom_right": bias.causal_lower_right}[which](sq, skv)


def of_bias(case: Case) -> dict[str, Any]:
    """The options equivalent to PyTorch's `CausalBias`."""
    bias = case.facts.get("bias")
    return {} if bias is None else {"is_causal": True, "causal_alignment": bias}


def keys_for(r: random.Random, device: str, sq: int) -> int:
    """The number of keys for a number of queries."""
    return r.choice([sq, sq, sq, 1, 1, 3, 5, 8, 17, 40, *([64, 77, 130] if device != "cpu" else [])])


def rounds_scores(case: Case) -> bool:
    """Whether scores are rounded to float32 before a mask is added."""
    return case.dtype != F64


class Attention(Operation):
    data = ("scale", "softcap")

    takes_out = False

    def into(self, tensors: Tensors, facts: dict[str, Any]) -> Tensors:
        """The `out` tensor, if given; for calls without gradients."""
        where = facts.get("into")
        if not where or torch.is_grad_enabled():
            return {}
        q, v = tensors["q"], tensors["v"]
        if isinstance(where, Spec):
            like = where.make("meta")
            count = like.untyped_storage().nbytes() // like.element_size()
            memory = torch.full((count,), math.nan, dtype=q.dtype, device=q.device)
            facts["given"] = memory, memory.as_strided(like.shape, like.stride(), like.storage_offset())
            return {"out": facts["given"][1]}
        shape = *q.shape[:-1], v.shape[-1]
        order = [*sorted(range(q.dim() - 1), key=lambda d: -q.stride(d)), q.dim() - 1]
        out = torch.full([shape[d] for d in order], math.nan, dtype=q.dtype, device=q.device)
        return {"out": out.permute([order.index(d) for d in range(q.dim())])}

    def anywhere(self, r: random.Random, case: Case) -> Spec:
        """An `out` tensor with its own memory order, surrounded by other values."""
        q, v = case.tensors["q"], case.tensors["v"]
        unit = 1 if "cpu_checks" in case.settings else 8
        return drawn(r, (*q.shape[:-1], v.shape[-1]), q.dtype, unit=unit, last_dense=True, expands=0.0)

    def known_options(self, case: Case, options: dict[str, Any], leaves: Tensors) -> dict[str, Any]:
        """The options and side tensors for the float64 reference."""
        side = {name: leaves[name] for name in ("attn_mask", "sinks", "seq_lens_q", "seq_lens_kv") if name in leaves}
        return {**{n: x for n, x in options.items() if n not in ("return_lse", "deterministic")}, **side}

    def exact(self, case: Case, options: dict[str, Any], leaves: Tensors, known: dict[str, Any]) -> Tensors:
        made = attention(
            *(leaves[name] for name in "qkv"),
            kept=known.get("kept"),
            rounds_scores=rounds_scores(case),
            **self.known_options(case, options, leaves),
        )
        known["made"] = made
        return {"out": made.out, "lse": made.lse}

    def bounds(self, case, options, leaves, grads, known, precision):
        more = self.known_options(case, options, leaves)
        return attention_bounds(known["made"], *(leaves[name] for name in "qkv"), grads.get("out"), precision, **more)

    def check_places(self, case, tensors, found, gradients):
        q, given = tensors["q"], case.facts.pop("given", None)
        if given is not None:
            memory, out = given
            if found["out"] is not out:
                yield "the result is not the tensor that was given for it"
            around = memory.clone()
            around.as_strided(out.shape, out.stride(), out.storage_offset()).fill_(math.nan)
            if not bool(around.isnan().all()):
                yield "memory around out was written to"
            return
        if found["out"].numel() and not is_dense(found["out"]):
            yield f"out has strides {found['out'].stride()}, which are not dense"
        if found["out"].numel() and not is_in_order_of(found["out"], q):
            yield f"out has strides {found['out'].stride()} where q has {q.stride()}"
        for name, gradient in gradients.items():
            if gradient.numel() and not is_in_order_of(gradient, tensors[name]):
                yield f"grad {name} has strides {gradient.stride()} where {name} has {tensors[name].stride()}"


@operation
class Sdpa(Attention):
    name = "sdpa"
    takes_out = True
    casts = ("q", "k", "v")

    def draw(self, r: random.Random, seed: int, device: str) -> Case:
        dtype, more = half(r, device), later(self.name, seed)
        unlimited = is_unlimited(more, device)
        batch, kv = r.choice([1, 1, 2, 3, 5]), r.choice([1, 1, 2, 3])
        heads, sq = kv * r.choice([1, 1, 2, 3, 5]), size(r, device)
        skv = keys_for(r, device, sq)
        if r.random() < 0.03:
            batch, sq, skv = r.choice([(0, sq, skv), (batch, 0, skv), (batch, sq, 0)])
        dims, full = more.choice(ODD) if unlimited else head_dims(r, device), (batch, heads, sq, skv)
        unit = 1 if unlimited else 8
        tensors = {
            "q": memory_of(r, (batch, heads, sq, dims[0]), dtype, unit),
            "k": memory_of(r, (batch, kv, skv, dims[0]), dtype, unit),
            "v": memory_of(r, (batch, kv, skv, dims[1]), dtype, unit),
        }
        options: dict[str, Any] = {"scale": scale_of(r, dims[0]), "window_size": window_of(r)}
        options["is_causal"] = r.random() < 0.4
        options["causal_alignment"] = r.choice(["top_left", "top_left", "bottom_right"])
        if r.random() < 0.06:
            options |= {"alibi": True, "is_causal": True, "causal_alignment": "top_left", "window_size": None}
        if r.random() < 0.45:
            tensors["attn_mask"] = mask_of(r, full, dtype)
        if r.random() < 0.2:
            shift = r.choice([0.5, 0.5, -60.0, 9.0])
            tensors["sinks"] = dense((heads,), F32, scale=2.0, shift=shift)
        facts = {}
        for name, longest in (("seq_lens_q", sq), ("seq_lens_kv", skv)):
            if r.random() < 0.15:
                facts[name] = lengths_of(r, batch, longest)
        options["softcap"] = r.choice([0.05, 1.7, 30.3, 1e4]) if r.random() < 0.12 else None
        if r.random() < 0.08:
            options["dropout_p"] = r.choice([0.1, 0.5, 0.9])
        options["deterministic"] = r.choice([None, None, None, True])
        options["return_lse"] = r.random() < 0.6
        names = [name for name, spec in tensors.items() if spec.dtype.is_floating_point]
        case = Case(self.name, seed, dtype, tensors, options, facts=facts, wanted=chosen(r, names))
        if r.random() < 0.02:
            return replace(case, options=options | {"scale": 2.0**63}, refusable="a scale beyond all use")
        case = replace(case, settings=UNCHECKED if unlimited else {})
        return self.more(more, more_of_attention(more, case))

    def more(self, r: random.Random, case: Case) -> Case:
        options, tensors, facts = dict(case.options), dict(case.tensors), dict(case.facts)
        if "dropout_p" in options and r.random() < 0.2:
            options["dropout_p"] = r.choice([0.0, 0, 0.999])
        if options.get("alibi") and r.random() < 0.3:
            options["window_size"] = r.choice([(5, -1), (0, 0), (3, 10**6)])
        plain = "attn_mask" not in tensors and not options["is_causal"] and options["window_size"] is None
        if plain and not options.get("alibi") and r.random() < 0.15:
            facts["bias"] = r.choice(["top_left", "bottom_right"])
        if r.random() < 0.1:
            facts["lead"] = 1
        return replace(case, options=options, facts=facts)

    def call(self, tensors: Tensors, options: dict[str, Any], facts: dict[str, Any]) -> Tensors:
        given = {**tensors, **options, **self.into(tensors, facts)}
        if "bias" in facts:
            given["attn_mask"] = causal_bias(facts["bias"], tensors["q"].shape[2], tensors["k"].shape[2])
        found = cudnn_sdpa.sdpa(**given)
        return dict(zip(("out", "lse"), found, strict=True)) if options["return_lse"] else {"out": found}

    def known_options(self, case: Case, options: dict[str, Any], leaves: Tensors) -> dict[str, Any]:
        return super().known_options(case, options, leaves) | of_bias(case)

    def before(self, case: Case, tensors: Tensors, options: dict[str, Any]) -> dict[str, Any]:
        if not options.get("dropout_p"):
            return {}
        q, k, on_gpu = tensors["q"].detach() * 0, tensors["k"].detach(), tensors["q"].is_cuda
        same: dict[str, Any] = {}
        if on_gpu:  # what decides which queries a plan has, and whether there is one, decides its random numbers
            same = {name: options[name] for name in ("is_causal", "causal_alignment", "window_size")} | of_bias(case)
            same |= {n: tensors[n] for n in ("seq_lens_q", "seq_lens_kv") if n in tensors}
            same |= {n: neutral(tensors[n]) for n in ("attn_mask", "sinks") if n in tensors}

        def attend(unit: Tensor) -> Tensor:
            with torch.no_grad():
                return cudnn_sdpa.sdpa(q, k, unit, dropout_p=options["dropout_p"], **same)

        return {"kept": kept(tensors["v"], torch.arange(k.shape[2], device=k.device), attend)}

    def explained(self, case):
        tensors, side = meta(case), meta_lengths(case)
        return cudnn_sdpa.sdpa, (), {**tensors, **side, **case.options, **of_bias(case)}


@torch.no_grad()
def kept(v: Tensor, places: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
    """Which weights dropout keeps, read from values that are unique to each key of a sequence.

    Args:
        v: The values; only their shape is used.
        places: The index of each key in its sequence.
        attend: Runs the call with scores of 0 on other values.
    """
    state = torch.cuda.get_rng_state() if v.is_cuda else torch.get_rng_state()
    parts, count = [], int(places.max()) + 1 if places.numel() else 0
    for first in range(0, max(count, 1), 128):
        (torch.cuda.set_rng_state if v.is_cuda else torch.set_rng_state)(state)
        unit = places.unsqueeze(-1) == torch.arange(first, first + 128, device=v.device)
        parts.append(attend(unit.to(v.dtype).expand(*v.shape[:-1], 128).contiguous()) > 0)
    (torch.cuda.set_rng_state if v.is_cuda else torch.set_rng_state)(state)
    return torch.cat(parts, -1)[..., :count]


def neutral(tensor: Tensor) -> Tensor:
    """A tensor laid out like this one that changes no score: zeros, or True; small weights would be read as dropped."""
    size = (
        1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
    )
    start = tensor.storage_offset() % (16 // tensor.element_size() or 1)
    memory = torch.zeros(start + size, dtype=tensor.dtype, device=tensor.device)
    memory = memory.fill_(True) if tensor.dtype == torch.bool else memory
    return memory.as_strided(tensor.shape, tensor.stride(), start)


class Backward:
    """A backward function as the gradient of its forward function: both are called, and autograd asks for gradients."""

    modes = False
    has_graph_of_gradients = False
    takes_out = False

    def draw(self, r: random.Random, seed: int, device: str) -> Case:
        case = super().draw(r, seed, device)
        without = {n: x for n, x in case.options.items() if n not in ("dropout_p", "return_lse")}
        facts = {n: x for n, x in case.facts.items() if n != "bias"}
        return replace(case, options={**without, "return_lse": False}, facts=facts)

    def split(self, tensors: Tensors, facts: dict[str, Any]) -> tuple[list[str], tuple[Tensor, ...], Tensors]:
        """The names of the inputs that can have a gradient, these inputs, and the other tensors."""
        names = [n for n in ("q", "k", "v", "attn_mask", "sinks") if n in tensors and tensors[n].is_floating_point()]
        return names, tuple(tensors[n] for n in names), {n: x for n, x in tensors.items() if n not in names}


class _ByFunctions(torch.autograd.Function):
    """Attention whose gradients are computed by a public backward function."""

    @staticmethod
    def forward(ctx, functions, names, others, positional, options, *inputs):
        forward, ctx.backward_function = functions
        given = {**dict(zip(names, inputs, strict=True)), **others}
        qkv = [given.pop(name) for name in "qkv"]
        out, lse = forward(*qkv, *positional, **given, **options, return_lse=True)
        ctx.save_for_backward(out, lse, *inputs)
        ctx.rest = names, others, positional, options
        return out

    @staticmethod
    def backward(ctx, grad_out):
        out, lse, *inputs = ctx.saved_tensors
        names, others, positional, options = ctx.rest
        needs = ctx.needs_input_grad[5:]
        wanted = tuple(name for name, need in zip(names, needs, strict=True) if need)
        given = {**dict(zip(names, (x.detach() for x in inputs), strict=True)), **others}
        qkv = [given.pop(name) for name in "qkv"]
        with torch.no_grad():
            rest = {**given, **options, **({} if len(wanted) == len(names) else {"wanted": wanted})}
            found = ctx.backward_function(grad_out.detach(), out, lse, *qkv, *positional, **rest)
        by_name = dict(zip(("q", "k", "v", "attn_mask", "sinks"), found, strict=True))
        return None, None, None, None, None, *(by_name[name] if name in wanted else None for name in names)


@operation
class SdpaBackward(Backward, Sdpa):
    name = "sdpa_backward"

    def call(self, tensors: Tensors, options: dict[str, Any], facts: dict[str, Any]) -> Tensors:
        names, inputs, others = self.split(tensors, facts)
        options = {n: x for n, x in options.items() if n != "return_lse"}
        functions = cudnn_sdpa.sdpa, cudnn_sdpa.sdpa_backward
        return {"out": _ByFunctions.apply(functions, names, others, (), options, *inputs)}

    def explained(self, case):
        tensors, side = meta(replace(case, wanted=())), meta_lengths(case)
        out = tensors["q"].new_empty(*tensors["q"].shape[:-1], tensors["v"].shape[-1])
        lse = out.new_empty(out.shape[:-1], dtype=torch.float32)
        options = {n: x for n, x in case.options.items() if n != "return_lse"}
        wanted = {"wanted": case.wanted} if case.wanted else {}
        return cudnn_sdpa.sdpa_backward, (out, out, lse), {**tensors, **side, **options, **wanted}


@operation
class DropIn(Attention):
    name = "scaled_dot_product_attention"
    data = ("scale",)
    casts = ("q", "k", "v")

    def draw(self, r: random.Random, seed: int, device: str) -> Case:
        dtype, rank = half(r, device), r.choice([4, 4, 4, 3, 3, 2, 5])
        more = later(self.name, seed)
        unlimited = is_unlimited(more, device)
        kv, sq = r.choice([1, 2, 3]), size(r, device)
        heads = kv * r.choice([1, 1, 2, 3])
        skv, dims = keys_for(r, device, sq), more.choice(ODD) if unlimited else head_dims(r, device)
        before = tuple(r.choice([1, 2, 3]) for _ in range(rank - 3))
        gqa = heads != kv or r.random() < 0.2

        def shape(heads: int, length: int, dim: int) -> tuple[int, ...]:
            front = tuple(1 if r.random() < 0.1 else n for n in before)
            if rank > 2:
                front = (*front, 1 if r.random() < 0.1 else heads)
            return (*front, length, dim)

        shapes = shape(heads, sq, dims[0]), shape(kv, skv, dims[0]), shape(kv, skv, dims[1])
        if gqa and rank > 2 and more.random() < 0.3:  # different head counts of keys and values
            of_k, of_v = more.choice([(2, 3), (3, 2), (2, 6), (6, 3), (2, 1)])
            shapes = tuple((*x[:-3], n, *x[-2:]) for x, n in zip(shapes, (6, of_k, of_v), strict=True))
        tensors = {name: memory_of(r, x, dtype, 1 if unlimited else 8) for name, x in zip("qkv", shapes, strict=True)}
        batch = torch.broadcast_shapes(*(x[:-3] for x in shapes))
        counts = [x[-3] if rank > 2 else 1 for x in shapes]
        most = counts[0] if gqa else max(counts)
        if any(most % n for n in counts[1:]):
            gqa, most = False, max(counts)
            if any(n not in (1, most) for n in counts):
                return self.draw(random.Random(r.random()), seed, device)
        has_one = gqa and min(counts[1:]) in (1, max(counts[1:]))
        facts: dict[str, Any] = {"batch": batch, "heads": (most, max(counts[1:]) if has_one else most)}
        options: dict[str, Any] = {"scale": scale_of(r, dims[0]), "enable_gqa": gqa, "is_causal": r.random() < 0.3}
        refusable = ""
        if not options["is_causal"] and r.random() < 0.5:
            full = (*batch, most, sq, skv) if rank > 2 else (sq, skv)
            tensors["attn_mask"] = mask_of(r, full[-4:], dtype, other=False)
        elif not options["is_causal"] and rank == 4 and r.random() < 0.12:
            facts["bias"], refusable = r.choice(["top_left", "bottom_right"]), "a mask that is no plain tensor"
        names = [name for name, spec in tensors.items() if spec.dtype.is_floating_point]
        if more.random() < 0.08:
            options["dropout_p"] = more.choice([0.1, 0.5, 0.9, 0.0])
        case = Case(self.name, seed, dtype, tensors, options, {}, facts, chosen(r, names), refusable=refusable)
        return more_of_attention(more, replace(case, settings=UNCHECKED if unlimited else {}))

    def before(self, case: Case, tensors: Tensors, options: dict[str, Any]) -> dict[str, Any]:
        if not options.get("dropout_p"):
            return {}
        q, k, v = (tensors[name].detach() for name in "qkv")
        same = {"enable_gqa": options["enable_gqa"], "is_causal": options["is_causal"] and q.is_cuda}
        mask = self.mask(tensors, case.facts) if q.is_cuda else None
        same |= {"attn_mask": neutral(mask) if type(mask) is Tensor else mask}

        def attend(unit: Tensor) -> Tensor:
            with torch.no_grad():
                return cudnn_sdpa.scaled_dot_product_attention(q * 0, k, unit, dropout_p=options["dropout_p"], **same)

        return {"kept": kept(v, torch.arange(k.shape[-2], device=k.device), attend)}

    def call(self, tensors: Tensors, options: dict[str, Any], facts: dict[str, Any]) -> Tensors:
        mask = self.mask(tensors, facts)
        return {
            "out": cudnn_sdpa.scaled_dot_product_attention(*(tensors[name] for name in "qkv"), mask, **options),
        }

    def mask(self, tensors: Tensors, facts: dict[str, Any]) -> Any:
        """The mask: a tensor, PyTorch's `CausalBias`, or None."""
        if "bias" in facts:
            return causal_bias(facts["bias"], tensors["q"].shape[-2], tensors["k"].shape[-2])
        return tensors.get("attn_mask")

    def _of_four(self, case: Case, leaves: Tensors) -> Tensors:
        batch, heads = case.facts["batch"], case.facts["heads"]
        made = {}
        for name, count in zip("qkv", (heads[0], heads[1], heads[1]), strict=True):
            x = leaves[name]
            x = x if x.dim() > 2 else x.unsqueeze(0)
            x = x if x.shape[-3] in (1, count) else x.repeat_interleave(count // x.shape[-3], -3)
            made[name] = x.expand(*batch, count, *x.shape[-2:]).reshape(-1, count, *x.shape[-2:])
        if "attn_mask" in leaves:
            mask = leaves["attn_mask"]
            if len(batch) > 1 and mask.dim() > 3:
                mask = mask.expand(*batch, *mask.shape[-3:]).reshape(-1, *mask.shape[-3:])
            made["attn_mask"] = mask
        return made

    def exact(self, case, options, leaves, known):
        given = {"scale": options["scale"], "is_causal": options["is_causal"] or "bias" in case.facts}
        given |= {"causal_alignment": case.facts.get("bias", "top_left"), "dropout_p": options.get("dropout_p", 0.0)}
        known["given"], known["four"] = given, self._of_four(case, leaves)
        keeps = known.get("kept")
        keeps = None if keeps is None else keeps.reshape(-1, case.facts["heads"][0], *keeps.shape[-2:])
        made = attention(**known["four"], kept=keeps, rounds_scores=rounds_scores(case), **given)
        known["made"] = made
        batch, x = case.facts["batch"], made.out
        return {"out": x.view(*batch, *x.shape[1:]) if leaves["q"].dim() > 2 else x[0, 0]}

    def bounds(self, case, options, leaves, grads, known, precision):
        four, made = known["four"], known["made"]
        grad = grads["out"].reshape(made.out.shape) if grads else None
        found = attention_bounds(
            made, four["q"], four["k"], four["v"], grad, precision, attn_mask=four.get("attn_mask"), **known["given"]
        )
        bounds = {"out": found["out"].reshape(leaves["q"].shape[:-1][:0] + self._out_shape(case, leaves, made))}
        for name in found.keys() - {"out", "lse"}:
            of, like = found[name], leaves[name]
            whole = (*case.facts["batch"], *of.shape[1:]) if name != "attn_mask" or like.dim() > 3 else of.shape
            of = of.view(whole) if math.prod(whole) == of.numel() else of
            while of.dim() > like.dim():
                of = of.sum(0)
            if name in ("k", "v") and like.dim() > 2 and like.shape[-3] not in (1, of.shape[-3]):
                of = of.unflatten(-3, (like.shape[-3], -1)).sum(-3)
            bounds[name] = of.sum_to_size(like.shape)
        return bounds

    def _out_shape(self, case: Case, leaves: Tensors, made: Any) -> tuple[int, ...]:
        batch = case.facts["batch"]
        return (*batch, *made.out.shape[1:]) if leaves["q"].dim() > 2 else tuple(made.out.shape[2:])

    def check_places(self, case, tensors, found, gradients):
        if found["out"].shape[:-1] == tensors["q"].shape[:-1] and found["out"].dim() <= 4:
            yield from super().check_places(case, tensors, found, {})

    def explained(self, case):
        if case.refusable:
            return None
        tensors = meta(case)
        call = tensors["q"], tensors["k"], tensors["v"], tensors.get("attn_mask")
        return cudnn_sdpa.scaled_dot_product_attention, call, case.options


@operation
class Kernels(Attention):
    name = "kernels.attention"
    data = ("scale",)
    casts = ("q", "k", "v")

    def draw(self, r: random.Random, seed: int, device: str) -> Case:
        dtype = r.choice([F32, F32, F16, BF16, *([F64] if device == "cpu" else [])])
        mode = r.choice(["fused", "fused", "fused", "tiled", "naive"])
        batch, kv, sq = r.choice([1, 1, 2, 3]), r.choice([1, 1, 2, 3]), size(r, device)
        heads, skv = kv * r.choice([1, 1, 2, 3, 5]), keys_for(r, device, sq)
        if r.random() < 0.03:
            batch, sq, skv = r.choice([(0, sq, skv), (batch, 0, skv), (batch, sq, 0)])
        dim = r.choice([1, 3, 7, 8, 12, 33, 64, 64, r.randint(1, 128), *([80, 127, 128] if device != "cpu" else [])])
        dim = r.choice([129, 136, 200]) if mode != "fused" and r.random() < 0.2 else dim
        unit = 8 if dim % 8 == 0 and r.random() < 0.6 else 1  # memory that is read 16 bytes at a time, or by element
        shapes = {"q": (batch, heads, sq, dim), "k": (batch, kv, skv, dim), "v": (batch, kv, skv, dim)}
        tensors = {name: memory_of(r, shape, dtype, unit) for name, shape in shapes.items()}
        options: dict[str, Any] = {"mode": mode, "is_causal": r.random() < 0.4, "scale": scale_of(r, dim)}
        if r.random() < 0.5:
            tensors["attn_mask"] = mask_of(r, (batch, heads, sq, skv), dtype)
        ways = ["function", "function", "function", "module", *(["reference"] if device == "cpu" else [])]
        facts, refusable = {"way": r.choice(ways)}, ""
        if r.random() < 0.02:
            options["scale"], refusable = 2.0**63, "a scale beyond all use"
        elif mode == "fused" and r.random() < 0.02:
            tensors |= {name: replace(tensors[name], shape=(*shapes[name][:3], 129)) for name in "qkv"}
            facts["way"], refusable = "function", "a head dim beyond the fused form"
        names = [name for name, spec in tensors.items() if spec.dtype.is_floating_point]
        case = Case(self.name, seed, dtype, tensors, options, {}, facts, chosen(r, names), refusable=refusable)
        more = later(self.name, seed)
        if "attn_mask" not in tensors and not options["is_causal"] and not refusable and more.random() < 0.3:
            facts["bias"] = more.choice(["top_left", "bottom_right"])
        return case if refusable else more_of_attention(r, case)

    def call(self, tensors: Tensors, options: dict[str, Any], facts: dict[str, Any]) -> Tensors:
        q, k, v, mask = (tensors.get(name) for name in ("q", "k", "v", "attn_mask"))
        mask = causal_bias(facts["bias"], q.shape[2], k.shape[2]) if "bias" in facts else mask
        given = {"mask": mask, **{name: options[name] for name in ("is_causal", "scale")}}
        if facts["way"] == "reference":
            return {"out": cudnn_sdpa.kernels.reference_attention(q, k, v, **given)}
        if facts["way"] == "module":
            return {"out": cudnn_sdpa.kernels.CUDAAttention(options["mode"])(q, k, v, **given)}
        return {"out": cudnn_sdpa.kernels.attention(q, k, v, options["mode"], **given)}

    def known_options(self, case, options, leaves):
        known = super().known_options(case, options, leaves) | of_bias(case)
        del known["mode"]
        return known

    def bounds(self, case, options, leaves, grads, known, precision):
        (_, heads, sq, dim), (_, kv, skv, _) = (case.tensors[name].shape for name in "qk")
        terms = max(dim, skv // 4, sq * heads // kv // 4)  # summed in turn: errors of equal terms do not cancel
        precision = replace(precision, inner=precision.inner * max(1.0, terms / 8))
        return super().bounds(case, options, leaves, grads, known, precision)

    def check_places(self, case, tensors, found, gradients):
        if case.facts["way"] != "reference":  # whose results are PyTorch's
            yield from super().check_places(case, tensors, found, gradients)

    def explained(self, case):
        if case.refusable:
            return None
        tensors = meta(case)
        mask = tensors.pop("attn_mask", None)
        if "bias" in case.facts:
            mask = causal_bias(case.facts["bias"], tensors["q"].shape[2], tensors["k"].shape[2])
        return cudnn_sdpa.kernels.attention, tuple(tensors.values()), {**case.options, "mask": mask}


@operation
class Varlen(Attention):
    name = "sdpa_varlen"
    takes_out = True
    casts = ("q", "k", "v")

    def draw(self, r: random.Random, seed: int, device: str) -> Case:
        dtype, more = half(r, device), later(self.name, seed)
        unlimited = is_unlimited(more, device)
        count = r.choice([1, 1, 2, 3, 5, 9])
        large = [[0, 40, 64, 100], [1, 128, 200], [0, 0, 77]] if device != "cpu" else [[0, 4, 12], [1, 20], [0, 0, 33]]
        sizes = r.choice([[0, 1, 2, 5, 17], [1], [0, 1], *large])
        of_q, of_kv = ([r.choice(sizes) for _ in range(count)] for _ in "qk")
        same = r.random() < 0.5
        of_kv = of_q if same else of_kv
        kv, dims = r.choice([1, 1, 2, 3]), more.choice(ODD) if unlimited else head_dims(r, device)
        heads, extra = kv * r.choice([1, 2, 3, 5]), r.choice([0, 0, 0, 0, 3])
        rows, columns = sum(of_q) + extra, sum(of_kv) + (extra if same else 0)
        unit = 1 if unlimited else 8
        tensors = {
            "q": memory_of(r, (rows, heads, dims[0]), dtype, unit),
            "k": memory_of(r, (columns, kv, dims[0]), dtype, unit),
            "v": memory_of(r, (columns, kv, dims[1]), dtype, unit),
        }
        if r.random() < 0.25:
            tensors["sinks"] = dense((heads,), F32, scale=2.0, shift=r.choice([0.5, -60.0, 9.0]))
        options: dict[str, Any] = {"scale": scale_of(r, dims[0]), "window_size": window_of(r)}
        options |= {"is_causal": r.random() < 0.5, "causal_alignment": r.choice(["top_left", "bottom_right"])}
        options |= {"softcap": r.choice([1.7, 30.3]) if r.random() < 0.12 else None, "return_lse": r.random() < 0.6}
        options["deterministic"] = r.choice([None, None, None, True])
        facts = {"of_q": of_q, "of_kv": of_kv, "same": same, "longest": r.choice([0, 0, 1, 13])}
        if more.random() < 0.12:
            options["dropout_p"] = more.choice([0.1, 0.5, 0.9, 0.999, 0.0, 0])
        if more.random() < 0.1:
            facts["lead"] = 1
        case = Case(self.name, seed, dtype, tensors, options, facts=facts, wanted=chosen(r, list(tensors)))
        return more_of_attention(more, replace(case, settings=UNCHECKED if unlimited else {}))

    def before(self, case: Case, tensors: Tensors, options: dict[str, Any]) -> dict[str, Any]:
        if not options.get("dropout_p"):
            return {}
        q, k, v = (tensors[name].detach() for name in "qkv")
        # What decides the plan's longest lengths decides the random numbers, too.
        names = ("is_causal", "causal_alignment", "window_size", "softcap", "deterministic")
        same = {name: options[name] for name in names} if q.is_cuda else {}
        places = [j for n in case.facts["of_kv"] for j in range(n)]
        places += [0] * (v.shape[0] - len(places))

        def attend(unit: Tensor) -> Tensor:
            at = case.facts["offsets"]
            return cudnn_sdpa.sdpa_varlen(q * 0, k, unit, *at, dropout_p=options["dropout_p"], **same)

        return {"kept": kept(v, torch.tensor(places, dtype=torch.int64, device=v.device).unsqueeze(-1), attend)}

    def _offsets(self, facts: dict[str, Any], device: Any) -> tuple[Any, ...]:
        offsets = []
        for lengths in (facts["of_q"], facts["of_kv"]):
            made = [0]
            for n in lengths:
                made.append(made[-1] + n)
            offsets.append(sequence(made, device, facts.get("lead", 0)))
        if facts["same"]:
            offsets[1] = offsets[0]
        longest = (max(1, max(facts[name]) + facts["longest"]) for name in ("of_q", "of_kv"))
        return (*offsets, *longest)

    def call(self, tensors: Tensors, options: dict[str, Any], facts: dict[str, Any]) -> Tensors:
        more = {"sinks": tensors["sinks"]} if "sinks" in tensors else {}
        at = facts["offsets"]
        more |= self.into(tensors, facts)
        found = cudnn_sdpa.sdpa_varlen(*(tensors[name] for name in "qkv"), *at, **more, **options)
        return dict(zip(("out", "lse"), found, strict=True)) if options["return_lse"] else {"out": found}

    def _parts(self, case: Case) -> Iterator[tuple[slice, slice]]:
        row = column = 0
        for nq, nk in zip(case.facts["of_q"], case.facts["of_kv"], strict=True):
            yield slice(row, row + nq), slice(column, column + nk)
            row, column = row + nq, column + nk

    def exact(self, case, options, leaves, known):
        q, k, v = (leaves[name] for name in "qkv")
        given = self.known_options(case, options, leaves)
        outs, lses, known["parts"] = [], [], []
        for rows, columns in self._parts(case):
            part = [x[at].transpose(0, 1).unsqueeze(0) for x, at in ((q, rows), (k, columns), (v, columns))]
            keeps = None
            if "kept" in known:
                keeps = known["kept"][rows, :, : columns.stop - columns.start].transpose(0, 1).unsqueeze(0)
            made = attention(*part, kept=keeps, rounds_scores=rounds_scores(case), **given)
            known["parts"].append((part, made))
            outs.append(made.out[0].transpose(0, 1))
            lses.append(made.lse[0].transpose(0, 1))
        missing = q.shape[0] - sum(case.facts["of_q"])
        outs.append(q.new_zeros(missing, q.shape[1], v.shape[2]))
        lses.append(q.new_full((missing, q.shape[1]), -math.inf))
        known["first_absent"] = sum(case.facts["of_q"])
        return {"out": torch.cat(outs), "lse": torch.cat(lses)}

    def bounds(self, case, options, leaves, grads, known, precision):
        given = self.known_options(case, options, leaves)
        q, v = leaves["q"], leaves["v"]
        whole = {name: torch.zeros_like(leaves[name]) for name in ("q", "k", "v", "sinks") if name in leaves}
        whole |= {"out": q.new_zeros(*q.shape[:2], v.shape[2]), "lse": q.new_zeros(q.shape[:2])}
        for (rows, columns), (part, made) in zip(self._parts(case), known["parts"], strict=True):
            grad = grads["out"][rows].transpose(0, 1).unsqueeze(0) if grads else None
            for name, of in attention_bounds(made, *part, grad, precision, **given).items():
                if name == "sinks":
                    whole[name] += of
                else:
                    whole[name][columns if name in ("k", "v") else rows] = of[0].transpose(0, 1)
        return whole

    def explained(self, case):
        tensors = meta(case)
        more = {"sinks": tensors["sinks"]} if "sinks" in tensors else {}
        at = self._offsets(case.facts, "meta")
        return cudnn_sdpa.sdpa_varlen, (tensors["q"], tensors["k"], tensors["v"], *at), {**more, **case.options}


@operation
class VarlenBackward(Backward, Varlen):
    name = "sdpa_varlen_backward"

    def call(self, tensors: Tensors, options: dict[str, Any], facts: dict[str, Any]) -> Tensors:
        names, inputs, others = self.split(tensors, facts)
        options = {n: x for n, x in options.items() if n != "return_lse"}
        functions = cudnn_sdpa.sdpa_varlen, cudnn_sdpa.sdpa_varlen_backward
        return {"out": _ByFunctions.apply(functions, names, others, facts["offsets"], options, *inputs)}

    def explained(self, case):
        tensors = {name: spec.make("meta") for name, spec in case.tensors.items()}
        more = {"sinks": tensors["sinks"]} if "sinks" in tensors else {}
        at = self._offsets(case.facts, "meta")
        q, k, v = (tensors[name] for name in "qkv")
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        lse = out.new_empty(out.shape[:-1], dtype=torch.float32)
        options = {n: x for n, x in case.options.items() if n != "return_lse"}
        wanted = {"wanted": case.wanted} if case.wanted else {}
        return cudnn_sdpa.sdpa_varlen_backward, (out, out, lse, q, k, v, *at), {**more, **options, **wanted}


@operation
class MergeStates(Operation):
    name = "merge_states"
    modes = False

    def draw(self, r: random.Random, seed: int, device: str) -> Case:
        dtype, parts = fused_dtype(r, device), r.choice([1, 2, 2, 3, 5])
        shape = tuple(r.choice([1, 2, 3, 5, 17]) for _ in range(r.choice([2, 3])))
        if r.random() < 0.05:
            shape = (*shape[:-1], 0)
        shape = (*shape, r.choice([1, 8, 16, 20]))
        tensors = {}
        for part in range(parts):
            values = {"scale": r.choice([0.5, 3.0, 40.0]), "shift": r.choice([0.0, 7.0, -300.0])}
            if r.random() < 0.5:
                values |= {"hidden": r.choice([0.2, 0.9, 1.0]), "filler": -math.inf}
            tensors[f"out{part}"] = drawn(r, shape, dtype)
            tensors[f"lse{part}"] = drawn(r, shape[:-1], F32, **values)
        facts = {"parts": parts, "into": later(self.name, seed).random() < 0.3}
        return Case(self.name, seed, dtype, tensors, facts=facts)

    def call(self, tensors, options, facts):
        outs, lses = ([tensors[f"{name}{part}"] for part in range(facts["parts"])] for name in ("out", "lse"))
        into = {"out": torch.full_like(outs[0], math.nan)} if facts["into"] else {}
        return dict(zip(("out", "lse"), cudnn_sdpa.merge_states(outs, lses, **into), strict=True))

    def exact(self, case, options, leaves, known):
        outs, lses = (torch.stack([leaves[f"{n}{i}"] for i in range(case.facts["parts"])]) for n in ("out", "lse"))
        is_empty = lses.isneginf().all(0)
        known["weights"] = torch.softmax(lses.masked_fill(is_empty, 0.0), 0).masked_fill(is_empty, 0.0).unsqueeze(-1)
        known["outs"], known["lse"] = outs, torch.logsumexp(lses, 0)
        return {"out": (known["weights"] * outs).sum(0), "lse": known["lse"]}

    def bounds(self, case, options, leaves, grads, known, precision):
        size = known["lse"].masked_fill(known["lse"].isneginf(), 0.0).abs() + 1.0
        inner = (known["weights"] * known["outs"].abs()).sum(0) * (precision.inner * 8 * size.unsqueeze(-1))
        return {"out": inner + precision.tiny, "lse": 2**-22 * size}

    def check_places(self, case, tensors, found, gradients):
        if found["out"].numel() and not is_dense(found["out"]):
            yield f"out has strides {found['out'].stride()}, which are not dense"


def page_tables(facts: dict[str, Any], count: int) -> list[list[list[int]]]:
    """Random page tables of keys and values, for a number of pages."""
    numbers, tables = random.Random(torch.randint(2**31, ()).item()), []
    for _ in range(2):
        pages = numbers.sample(range(count), count)
        rows = [[pages.pop() for _ in range(facts["columns"])] for _ in facts["kv"]]
        if facts.get("shared"):  # sequences with a shared prefix
            rows = [[*rows[0][: facts["columns"] // 2 + 1], *row[facts["columns"] // 2 + 1 :]] for row in rows]
        for row, length in zip(rows, facts["kv"], strict=True):
            used = -(-length // facts["page"])
            if facts["wild"]:  # ids past the last page are not read
                row[used:] = [numbers.choice([-7, 10**6]) for _ in row[used:]]
        tables.append(rows)
    return tables if facts["of_v"] else [tables[0]] * 2


def table_of(rows: list[list[int]], facts: dict[str, Any], device: Any) -> Tensor:
    """A page table, or one within a wider one."""
    table = torch.tensor(rows, dtype=torch.int32, device=device)
    return torch.nn.functional.pad(table, (1, 2), value=10**6)[:, 1:-2] if facts.get("wide") else table


def gathered(pages: Tensor, table: list[list[int]], facts: dict[str, Any]) -> Tensor:
    """Keys or values of all sequences, gathered from pages (pages, heads, page size, dim)."""
    whole = pages.new_zeros(len(table), pages.shape[1], facts["columns"] * facts["page"], pages.shape[3])
    for b, (row, length) in enumerate(zip(table, facts["kv"], strict=True)):
        keys = torch.arange(length)
        at = torch.tensor(row, dtype=torch.int64)[keys // facts["page"]], keys % facts["page"]
        page, slot = (x.to(pages.device) for x in at)
        whole[b, :, :length] = pages[page, :, slot].transpose(0, 1)
    return whole


@operation
class Paged(Attention):
    name = "sdpa_paged"
    takes_out = True
    casts = ("q",)

    def draw(self, r: random.Random, seed: int, device: str) -> Case:
        dtype, more = half(r, device), later(self.name, seed)
        unlimited = is_unlimited(more, device)
        batch, kv, dims = r.choice([1, 2, 3, 7]), r.choice([1, 1, 2, 3]), head_dims(r, device)
        dims = more.choice(ODD) if unlimited else dims
        heads, sq = kv * r.choice([1, 2, 5]), r.choice([1, 1, 1, 2, 5, 8, 9, 20])
        page, columns = r.choice([1, 2, 8, 16, 64]), r.choice([1, 1, 2, 5])
        pages = columns * batch + r.choice([0, 1, 4])
        nhd, unit, own = r.random() < 0.5, 1 if unlimited else 8, later("sdpa_paged, own kernel", seed)
        stored, page = own.choice([*[dtype] * 6, E4M3, E5M2]), own.choice([*[page] * 6, 3, 12])
        if stored != dtype and not unlimited:
            dims = own.choice([(16, 16), (32, 48), (64, 64), *([(128, 128)] if device != "cpu" else [])])

        def of(dim: int) -> Spec:
            shape = (pages, page, kv, dim) if nhd else (pages, kv, page, dim)
            values = {} if stored == dtype else {"last_dense": True}
            return drawn(r, shape, stored, unit=unit if stored == dtype or unlimited else 16, expands=0.0, **values)

        tensors = {"q": memory_of(r, (batch, heads, sq, dims[0]), dtype, unit), "k": of(dims[0]), "v": of(dims[1])}
        if r.random() < 0.25:
            tensors["sinks"] = dense((heads,), F32, scale=2.0, shift=r.choice([0.5, -60.0]))
        for name in ("k_scale", "v_scale"):
            if stored != dtype and own.random() < 0.7:
                tensors[name] = dense(own.choice([(), (1,), (kv,)]), F32, shift=1.5)
        options: dict[str, Any] = {"scale": scale_of(r, dims[0]), "window_size": window_of(r)}
        options |= {"is_causal": r.random() < 0.7, "causal_alignment": r.choice(["bottom_right"] * 3 + ["top_left"])}
        options |= {"softcap": r.choice([1.7, 30.3]) if r.random() < 0.12 else None, "return_lse": r.random() < 0.6}
        options["page_layout"] = "NHD" if nhd else "HND"
        facts: dict[str, Any] = {"kv": lengths_of(r, batch, columns * page), "page": page, "columns": columns}
        facts["q"] = [r.randint(0, sq) for _ in range(batch)] if r.random() < 0.3 else None
        facts["of_v"], facts["wild"] = r.random() < 0.2, r.random() < 0.5
        facts |= {"shared": more.random() < 0.2, "wide": more.random() < 0.15, "lead": more.choice([0, 0, 0, 0, 1])}
        if more.random() < 0.1:
            facts["q"] = more.choice([[0] * batch, [sq] * batch])
        facts["trusted"] = later("sdpa_paged, trusted", seed).random() < 0.2
        case = Case(self.name, seed, dtype, tensors, options, facts=facts)
        return more_of_attention(more, replace(case, settings=UNCHECKED if unlimited else {}))

    def before(self, case, tensors, options):
        facts, device = case.facts, tensors["q"].device
        tables = page_tables(facts, case.tensors["k"].shape[0])
        facts["made"] = {"table_k": table_of(tables[0], facts, device), "table_v": table_of(tables[1], facts, device)}
        for name in ("kv", "q"):
            if facts[name] is not None:
                facts["made"][name] = sequence(facts[name], device, facts["lead"])
        if facts["trusted"]:
            made = facts["made"]["table_k"], facts["made"]["kv"]
            cudnn_sdpa.trusted_pages(*made, pages=case.tensors["k"].shape[0], page_size=facts["page"])
        return {"tables": tables}

    def call(self, tensors, options, facts):
        made, more = facts["made"], {}
        if facts["of_v"]:
            more["page_table_v"] = made["table_v"]
        if "q" in made:
            more["seq_lens_q"] = made["q"]
        more |= {name: tensors[name] for name in ("sinks", "k_scale", "v_scale") if name in tensors}
        more |= self.into(tensors, facts)
        given = tensors["q"], tensors["k"], tensors["v"], made["table_k"], made["kv"]
        found = cudnn_sdpa.sdpa_paged(*given, **more, **options)
        return dict(zip(("out", "lse"), found, strict=True)) if options["return_lse"] else {"out": found}

    def _dense(self, case: Case, leaves: Tensors, known: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
        made = {"q": leaves["q"]}
        for name, table in zip("kv", known["tables"], strict=True):
            pages = leaves[name].transpose(1, 2) if options["page_layout"] == "NHD" else leaves[name]
            made[name] = gathered(pages, table, case.facts)
            if f"{name}_scale" in leaves:
                made[name] = made[name] * leaves[f"{name}_scale"].view(-1, 1, 1)
        given = {n: options[n] for n in ("scale", "window_size", "is_causal", "causal_alignment", "softcap")}
        given |= {"seq_lens_kv": case.facts["kv"]} | (
            {} if case.facts["q"] is None else {"seq_lens_q": case.facts["q"]}
        )
        return {**made, **given, **({"sinks": leaves["sinks"]} if "sinks" in leaves else {})}

    def exact(self, case, options, leaves, known):
        known["dense"] = self._dense(case, leaves, known, options)
        known["made"] = attention(**known["dense"], rounds_scores=rounds_scores(case))
        return {"out": known["made"].out, "lse": known["made"].lse}

    def bounds(self, case, options, leaves, grads, known, precision):
        return attention_bounds(known["made"], grad_out=None, precision=precision, **known["dense"])

    def explained(self, case):
        tensors = {name: spec.make("meta") for name, spec in case.tensors.items()}
        facts = case.facts

        def ints(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.int32, device="meta")

        table, batch = (len(facts["kv"]), facts["columns"]), len(facts["kv"])
        more = {"page_table_v": ints(*table)} if facts["of_v"] else {}
        more |= {"seq_lens_q": ints(batch)} if facts["q"] is not None else {}
        more |= {name: tensors[name] for name in ("sinks", "k_scale", "v_scale") if name in tensors}
        given = tensors["q"], tensors["k"], tensors["v"], ints(*table), ints(batch)
        return cudnn_sdpa.sdpa_paged, given, {**more, **case.options}


@operation
class PagedVarlen(Attention):
    name = "sdpa_paged_varlen"
    takes_out = True
    casts = ("q",)

    def draw(self, r: random.Random, seed: int, device: str) -> Case:
        dtype, unlimited = half(r, device), is_unlimited(r, device)
        cache = r.choice([dtype, dtype, dtype, E4M3, E5M2])
        kv, dims = r.choice([1, 1, 2, 3]), r.choice(ODD) if unlimited else head_dims(r, device)
        if cache != dtype and not unlimited:
            dims = r.choice([(16, 16), (32, 48), *([(64, 64), (128, 128)] if device != "cpu" else [])])
        latent = later("latent attention", seed)
        is_latent = cache == dtype and not unlimited and latent.random() < 0.1
        dims = (576, 512) if is_latent else dims
        heads, count = kv * r.choice([1, 2, 5, 8]), r.choice([0, 1, 1, 2, 3, 7])
        large = [[1, 64, 130], [16, 300]] if device != "cpu" else [[1, 20], [33]]
        sizes = r.choice([[1], [1], [0, 1], [1, 4], [2, 3, 5, 8], [0, 1, 17], *large])
        new = [r.choice(sizes) for _ in range(count)]
        page, columns = (
            r.choice([1, 2, 3, 8, 12, 16, 64, 100]),
            r.choice([0, 1, 1, 2, 5, *([70] if device != "cpu" else [])]),
        )
        pages, nhd = max(1, columns * count) + r.choice([0, 1, 4]), r.random() < 0.5
        facts: dict[str, Any] = {"new": new, "lengths": lengths_of(r, count, columns * page), "page": page}
        facts |= {"columns": columns, "before": r.choice([0, 0, 0, 2]), "behind": r.choice([0, 0, 0, 3])}
        facts |= {"of_v": r.random() < 0.2, "wide": r.random() < 0.15, "longest": r.choice([0, 0, 1, 13])}
        facts |= {"lead": r.choice([0, 0, 0, 1])}
        if is_latent and latent.random() < 0.7:
            facts |= {"of_v": False, "is_in_keys": True}
        tokens = facts["before"] + sum(new) + facts["behind"]

        def of(dim: int) -> Spec:
            shape = (pages, page, kv, dim) if nhd else (pages, kv, page, dim)
            unit = 1 if unlimited else 16 if cache.itemsize == 1 else 8
            return drawn(r, shape, cache, unit=unit, last_dense=True, expands=0.0)

        tensors = {"q": memory_of(r, (tokens, heads, dims[0]), dtype, 1 if unlimited else 8)}
        tensors |= {"k": of(dims[0]), "v": of(dims[1])}
        options: dict[str, Any] = {"scale": scale_of(r, dims[0]), "return_lse": r.random() < 0.6}
        options |= {"softcap": r.choice([1.7, 30.3]) if r.random() < 0.12 else None}
        options |= {"page_layout": "NHD" if nhd else "HND", "batch_invariant": r.random() < 0.2}
        if r.random() < 0.2:
            columns_of_tree = max([0, *new]) + facts["longest"] + r.choice([0, 5])
            values = {"kind": "bool", "hidden": r.choice([0.3, 0.9])}
            shape = (tokens, columns_of_tree)
            tensors["tree_mask"] = drawn(r, shape, torch.bool, last_dense=True, **values)
        else:
            window = r.choice([None, None, (r.choice([0, 1, 4, 40]), r.choice([-1, 0])), (-1, 2), (3, 5)])
            options |= {"window_size": window, "is_causal": r.random() < 0.7}
            options["causal_alignment"] = r.choice(["bottom_right"] * 3 + ["top_left"])
        if r.random() < 0.25:
            tensors["sinks"] = dense((heads,), F32, scale=2.0, shift=r.choice([0.5, -60.0]))
        for name in ("k_scale", "v_scale"):
            if cache != dtype and r.random() < 0.7:
                tensors[name] = dense(r.choice([(), (1,), (kv,)]), F32, shift=1.5)
        case = Case(self.name, seed, dtype, tensors, options, facts=facts)
        return more_of_attention(r, replace(case, settings=UNCHECKED if unlimited else {}))

    def before(self, case, tensors, options):
        """Puts NaN and wild page ids wherever no new token sees a key."""
        facts, device = case.facts, tensors["q"].device
        ends = [*itertools.accumulate(facts["new"], initial=facts["before"])]
        made = {"seq_lens_kv": sequence(facts["lengths"], device, facts["lead"])}
        made["cu_seqlens_q"] = sequence(ends, device, facts["lead"])
        for name, table in (("k", "page_table"), ("v", "page_table_v")):
            pages = tensors[name].transpose(1, 2) if options["page_layout"] == "NHD" else tensors[name]
            if name == "k" or facts["of_v"]:
                ids = torch.randperm(pages.shape[0]).tolist()
                rows = [[r] * facts["columns"] for r in facts["lengths"]]
                for row, used in zip(rows, self._used(facts, options), strict=True):
                    for column in range(facts["columns"]):
                        at = range(column * facts["page"], (column + 1) * facts["page"])
                        row[column] = ids.pop() if used and at.start < used.stop and used.start < at.stop else -7
                shape = (len(rows), facts["columns"])
                made[table] = (
                    table_of(rows, facts, device).view(shape)
                    if rows and facts["columns"]
                    else torch.empty(shape, dtype=torch.int32, device=device)
                )
            owned = torch.zeros(pages.shape[0], facts["page"], dtype=torch.bool)
            for row, used in zip(rows, self._used(facts, options), strict=True):
                keys = torch.arange(used.start, used.stop)
                owned[torch.tensor(row, dtype=torch.int64)[keys // facts["page"]], keys % facts["page"]] = True
            owned = owned.to(device)
            nothing = torch.full((), math.nan, device=device).to(pages.dtype)
            bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[pages.element_size()]
            pages.view(bits).masked_fill_(~owned[:, None, :, None], int(nothing.view(bits)))
        facts["made"] = made
        return {}

    @staticmethod
    def _used(facts: dict[str, Any], options: dict[str, Any]) -> list[range]:
        """The keys of each sequence from the first on that a new token sees."""
        left, aligned_right = (options.get("window_size") or (-1, -1))[0], options.get("causal_alignment") != "top_left"
        found = []
        for new, length in zip(facts["new"], facts["lengths"], strict=True):
            first = max(0, length - new - left) if left >= 0 and aligned_right else 0
            found.append(range(first, length) if new else range(0))
        return found

    @staticmethod
    def _arguments(tensors: Tensors, options: dict[str, Any], facts: dict[str, Any]) -> tuple[list[Any], Tensors]:
        made, more = (
            facts["made"],
            {n: tensors[n] for n in ("sinks", "tree_mask", "k_scale", "v_scale") if n in tensors},
        )
        if facts["of_v"]:
            more["page_table_v"] = made["page_table_v"]
        names = "page_table", "seq_lens_kv", "cu_seqlens_q"
        q, k, v = (tensors[name] for name in "qkv")
        if facts.get("is_in_keys"):  # as in multi-head latent attention
            v = k[..., : v.shape[-1]]
        return [q, k, v, *(made[name] for name in names)], {**more, **options}

    def call(self, tensors, options, facts):
        given, more = self._arguments(tensors, options, facts)
        longest = max([0, *facts["new"]]) + facts["longest"]
        found = cudnn_sdpa.sdpa_paged_varlen(*given, longest, **more, **self.into(tensors, facts))
        return dict(zip(("out", "lse"), found, strict=True)) if options["return_lse"] else {"out": found}

    def exact(self, case, options, leaves, known):
        given, more = self._arguments(leaves, options, case.facts)
        others = {n: x for n, x in more.items() if n not in ("return_lse", "batch_invariant")}
        out, lse, known["sequences"] = packed_on_pages(*given, **others)
        known["made"] = [attention(**one) for _, one in known["sequences"]]
        for (rows, _), made in zip(known["sequences"], known["made"], strict=True):
            out[rows], lse[rows] = (x[0].transpose(0, 1) for x in (made.out, made.lse))
        return {"out": out, "lse": lse}

    def bounds(self, case, options, leaves, grads, known, precision):
        shape, device = (*leaves["q"].shape[:2], leaves["v"].shape[-1]), leaves["q"].device
        bounds = {
            "out": torch.zeros(shape, dtype=F64, device=device),
            "lse": torch.zeros(shape[:2], dtype=F64, device=device),
        }
        if case.tensors["v"].dtype in (E4M3, E5M2):  # the kernel widens them to float16, and rounds weights to it
            precision = replace(precision, weight=Precision.of(F16).tiny)
        for (rows, one), made in zip(known["sequences"], known["made"], strict=True):
            of = attention_bounds(made, grad_out=None, precision=precision, **one)
            for name, bound in bounds.items():
                bound[rows] = of[name][0].transpose(0, 1)
        return bounds

    def explained(self, case):
        tensors = {name: spec.make("meta") for name, spec in case.tensors.items()}
        count = len(case.facts["new"])
        shapes = {"page_table": (count, case.facts["columns"]), "seq_lens_kv": (count,), "cu_seqlens_q": (count + 1,)}
        shapes["page_table_v"] = shapes["page_table"]
        made = {name: torch.empty(shape, dtype=torch.int32, device="meta") for name, shape in shapes.items()}
        given, more = self._arguments(tensors, case.options, {**case.facts, "made": made})
        return cudnn_sdpa.sdpa_paged_varlen, (*given, max([0, *case.facts["new"]]) + case.facts["longest"]), more


LIMITS = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def quantized(x: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """Values (…, Hkv, D) as pages in FP8 hold them."""
    values = x.float() if scale is None else x.float() / scale.view(-1, 1)
    return values.clamp(-LIMITS[dtype], LIMITS[dtype]).to(dtype)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


@operation
class Append(Operation):
    """Tokens appended by slot, several times: all memory is compared, also what must stay."""

    name = "append_paged_kv"

    def session(self, r: random.Random, seed: int, device: str) -> Outcome:
        generator = torch.Generator().manual_seed(seed)
        dtype, kv, dims = half(r, device), r.choice([1, 2, 5]), r.choice([(64, 64), (8, 16), (72, 40), (128, 128)])
        stored, page, layout = r.choice([dtype, *LIMITS]), r.choice([1, 3, 16]), r.choice(["HND", "NHD"])
        pages, apart = r.choice([1, 3, 20]), r.choice([0, 0, 1, 8])
        shape = (pages, kv, page) if layout == "HND" else (pages, page, kv)
        whole = torch.zeros((*shape, sum(dims) + apart), dtype=stored, device=device)
        options: dict[str, Any] = {"page_layout": layout}
        for name in ("k_scale", "v_scale") if stored != dtype else ():
            if r.random() < 0.7:
                of = torch.rand(r.choice([(), (1,), (kv,)]), generator=generator) * 2 + 0.1
                options[name] = of.to(device)
        problems = []
        for turn in range(5):
            tokens = r.choice([0, 1, 7, 30]) if r.random() < 0.3 else 11
            new = [(torch.randn(tokens, kv, dim, generator=generator) * 100).to(dtype).to(device) for dim in dims]
            slots = [r.choice([-1, slot]) for slot in r.sample(range(pages * page), min(tokens, pages * page))]
            slots += [-5] * (tokens - len(slots))
            mapping = torch.tensor(slots, dtype=r.choice([torch.int64, torch.int32]), device=device)
            wanted = whole.clone()
            for name, x, to in zip("kv", new, wanted.split([*dims, apart], -1), strict=False):
                rows = x if stored == dtype else quantized(x, stored, options.get(f"{name}_scale"))
                by_token = to.transpose(1, 2) if layout == "HND" else to
                for token, slot in enumerate(slots):
                    if slot >= 0:
                        by_token[slot // page, slot % page] = rows[token]
            cudnn_sdpa.append_paged_kv(*new, *whole.split([*dims, apart], -1)[:2], mapping, **options)
            if not torch.equal(bits(whole), bits(wanted)):
                problems.append(f"call {turn} of {tokens} tokens wrote other numbers")
        return Outcome("wrong" if problems else "right", problems)


@operation
class RopeAppend(Operation):
    name = "rope_append_paged_kv"

    def session(self, r: random.Random, seed: int, device: str) -> Outcome:
        generator = torch.Generator().manual_seed(seed)
        dtype, (heads, kv), dim = half(r, device), r.choice([(2, 1), (5, 5), (6, 2)]), r.choice([8, 24, 64, 128])
        stored, layout = r.choice([dtype, dtype, *LIMITS]), r.choice(["HND", "NHD"])
        pages, page, rotary_dim = r.choice([1, 3, 20]), r.choice([1, 3, 16]), r.choice([dim, dim, 2, dim // 4 * 2])
        dim_v = r.choice([dim, dim, dim, 16])
        shape = (pages, kv, page) if layout == "HND" else (pages, page, kv)
        whole = torch.zeros((*shape, dim + dim_v), dtype=stored, device=device)

        def new(*sizes: int, to: torch.dtype = dtype) -> Tensor:
            return torch.randn(sizes, generator=generator).clamp(-6, 6).to(to).to(device)

        options = {n: new(dim, to=r.choice([dtype, F32])) for n in ("q_weight", "k_weight") if r.random() < 0.5}
        if len(options) == 2:
            options["k_weight"] = options["k_weight"].to(options["q_weight"].dtype)
        settings = {
            "eps": r.choice([1e-6, 0.01, 1]),
            "zero_centered": r.random() < 0.4,
            "interleaved": r.random() < 0.4,
        }
        options |= {name: value for name, value in settings.items() if r.random() < 0.7}
        scales = {}
        for name in ("k_scale", "v_scale") if stored != dtype else ():
            if r.random() < 0.7:
                scales[name] = (torch.rand(r.choice([(1,), (kv,)]), generator=generator) + 0.2).to(device)
        problems = []
        for turn in range(4):
            tokens = r.choice([0, 1, 7, 30]) if r.random() < 0.3 else 11
            q, k = new(tokens, heads + kv, dim).split([heads, kv], 1)
            v = new(tokens, kv, dim_v)
            angles = new(tokens, rotary_dim // 2, to=F32)
            slots = [r.choice([-1, slot]) for slot in r.sample(range(pages * page), min(tokens, pages * page))]
            slots += [-5] * (tokens - len(slots))
            mapping = torch.tensor(slots, dtype=r.choice([torch.int64, torch.int32]), device=device)
            given = {"q": q, "k": k, "cos": angles.cos(), "sin": angles.sin(), **options}
            wide = {n: x.double() if isinstance(x, Tensor) else x for n, x in given.items()}
            exact_q, exact_k = rope(**wide)
            wanted = whole.double()
            of = (("k_scale", exact_k, wanted[..., :dim]), ("v_scale", v.double(), wanted[..., dim:]))
            for name, rows, to in of:
                by_token = to.transpose(1, 2) if layout == "HND" else to
                for token, slot in enumerate(slots):
                    if slot >= 0:
                        scale = scales[name].double().view(-1, 1) if name in scales else 1.0
                        by_token[slot // page, slot % page] = rows[token] / scale
            parts = whole.split([dim, dim_v], -1)
            out = cudnn_sdpa.rope_append_paged_kv(
                **given, v=v, k_pages=parts[0], v_pages=parts[1], slot_mapping=mapping, page_layout=layout, **scales
            )
            half_unit = {E4M3: 2**-4, E5M2: 2**-3}.get(stored, 2**-7)
            for what, found, right, unit in (("queries", out, exact_q, 2**-7), ("pages", whole, wanted, half_unit)):
                off, rounded = (found.double() - right).abs(), 2**-7 * right.abs().amax(-1, keepdim=True)
                if not (off <= 1.1 * unit * right.abs() + rounded + 2**-10).all():
                    problems.append(f"call {turn} of {tokens} tokens gave other {what}")
            exact_bits = whole[..., dim:] if stored == dtype else None
            if exact_bits is not None and not torch.equal(exact_bits.double(), wanted[..., dim:]):
                problems.append(f"call {turn} changed values")
        return Outcome("wrong" if problems else "right", problems)


@operation
class TableOfCsr(Operation):
    name = "page_table_of_csr"

    def session(self, r: random.Random, seed: int, device: str) -> Outcome:
        batch, columns, page = r.choice([1, 3, 20]), r.choice([1, 4, 9]), r.choice([1, 5, 16])
        counts = [r.randint(0, columns) for _ in range(batch)]
        ends = [0, *itertools.accumulate(counts)]
        ids = [r.randrange(1000) for _ in range(ends[-1] + r.choice([0, 5]))]
        last = [r.randint(1, page) for _ in range(batch)]
        table = torch.full((batch, columns + 2), -1, dtype=torch.int32, device=device)
        lengths = torch.full((batch,), -1, dtype=torch.int32, device=device)
        given = [torch.tensor(x, dtype=torch.int32, device=device) for x in (ends, ids, last)]
        cudnn_sdpa.page_table_of_csr(*given, page_size=page, out_table=table[:, 1:-1], out_lengths=lengths)
        rows = [ids[begin:end] for begin, end in itertools.pairwise(ends)]
        wanted = [[-1, *row, *[-1] * (columns - len(row)), -1] for row in rows]
        problems = [] if table.tolist() == wanted else ["another table"]
        if lengths.tolist() != [(n - 1) * page + x if n else 0 for n, x in zip(counts, last, strict=True)]:
            problems.append("other lengths")
        return Outcome("wrong" if problems else "right", problems)


# FP8


#: FP8 head dims that the emulation supports and no kernel has.
ODD_FP8 = ((16, 16), (32, 48), (8, 8), (5, 7))


def fp8_dims(r: random.Random, device: str) -> tuple[tuple[int, int], int, dict[str, Any]] | None:
    """Head dims, their unit, and settings of a CPU call; GPUs support few small ones."""
    if device != "cpu":
        return None
    if r.random() < 0.7:
        dims = r.choice(ODD_FP8)
        return dims, 16 if dims in ODD_FP8[:2] else 1, UNCHECKED
    return r.choice([(128, 128), (128, 128), (64, 64), (128, 64), (16, 16)]), 16, {}


def fp8_options(r: random.Random, dim: int) -> dict[str, Any]:
    options: dict[str, Any] = {"scale": r.choice([None, number(r, 0.5, 2.0) * dim**-0.5]), "window_size": window_of(r)}
    return options | {"is_causal": r.random() < 0.4, "causal_alignment": r.choice(["top_left"] * 3 + ["bottom_right"])}


class Fp8(Attention):
    data = ()

    def drawn(self, r: random.Random, seed: int, device: str) -> Case:
        """FP8 tensors whose scales are not 1."""
        dtype, more = r.choice([E4M3, E4M3, E5M2]), later(self.name, seed)
        batch, kv, sq = r.choice([1, 2, 3]), r.choice([1, 2]), size(r, device)
        heads, skv = kv * r.choice([1, 2, 3]), keys_for(r, device, sq)
        large = [(64, 64), *[(128, 128)] * 6, (128, 64), (192, 128)] if device != "cpu" else []
        dims, unit, settings = r.choice([(16, 16), (32, 48), *large]), 16, {}
        dims, unit, settings = fp8_dims(more, device) or (dims, unit, settings)
        scales = {"q": number(r, 15, 40), "k": number(r, 45, 80), "v": number(r, 6, 14)}
        shapes = {"q": (heads, sq, dims[0]), "k": (kv, skv, dims[0]), "v": (kv, skv, dims[1])}
        tensors = {
            name: drawn(r, (batch, *shapes[name]), dtype, unit=unit, expands=0.05, scale=scales[name]) for name in "qkv"
        }
        facts: dict[str, Any] = {"scales": scales}
        for name, longest in (("seq_lens_q", sq), ("seq_lens_kv", skv)):
            if r.random() < 0.15:
                facts[name] = lengths_of(r, batch, longest)
        options = fp8_options(r, dims[0])
        if more.random() < 0.05:
            options["scale"] = more.choice([1, 2])
        return Case(self.name, seed, dtype, tensors, options, facts=facts, settings=settings)

    def true(self, case: Case, leaves: Tensors) -> Tensors:
        facts = case.facts
        made = {name: leaves[name] / facts["scales"][name] for name in "qkv"}
        if "page" in facts:
            made |= {n: gathered(made[n], table, facts) for n, table in zip("kv", facts["tables"], strict=True)}
        return made

    def side(self, case: Case, device: Any) -> Tensors:
        facts, names = case.facts, ("seq_lens_q", "seq_lens_kv")
        made = {n: sequence(facts[n], device) for n in names if n in facts}
        if "page" in facts:
            facts["tables"] = page_tables(facts, case.tensors["k"].shape[0])
            made["page_table"] = table_of(facts["tables"][0], facts, device)
            made |= {"page_table_v": table_of(facts["tables"][1], facts, device)} if facts["of_v"] else {}
        return made

    def forward_scales(self, case: Case, device: Any) -> Fp8Scales:
        of, full = case.facts["scales"], torch.finfo(case.dtype).max / 1.75
        values = [1 / of["q"], 1 / of["k"], 1 / of["v"], 1 / full, full, 23.0]
        return Fp8Scales(*(torch.tensor([x], device=device) for x in values))


@operation
class Fp8Forward(Fp8):
    name = "sdpa_fp8"

    def draw(self, r: random.Random, seed: int, device: str) -> Case:
        case, more = self.drawn(r, seed, device), later(f"pages of {self.name}", seed)
        out_dtype = r.choice([None] * 9 + [BF16, F16, E5M2])
        if out_dtype == E5M2 and more.random() < 0.5:
            out_dtype = E4M3
        case = replace(case, options=case.options | {"out_dtype": out_dtype, "return_lse": r.random() < 0.7})
        return self.on_pages(more, case) if more.random() < 0.2 else case

    def on_pages(self, r: random.Random, case: Case) -> Case:
        """The call with keys and values in pages."""
        batch, kv, skv, _ = case.tensors["k"].shape
        page, tensors = r.choice([1, 2, 8, 16, 64]), dict(case.tensors)
        columns = -(-skv // page) + r.choice([0, 0, 1])
        pages = batch * columns + r.choice([0, 1, 4])
        for name in "kv":
            spec, unit = tensors[name], 1 if "cpu_checks" in case.settings else 16
            shape = (pages, kv, page, spec.shape[3])
            tensors[name] = drawn(r, shape, spec.dtype, unit=unit, expands=0.0, scale=spec.values.scale)
        lengths = lengths_of(r, batch, columns * page)
        facts = case.facts | {"page": page, "columns": columns, "kv": lengths, "seq_lens_kv": lengths}
        for name, share in (("of_v", 0.4), ("wild", 0.5), ("shared", 0.2), ("wide", 0.15)):
            facts[name] = r.random() < share
        return replace(case, tensors=tensors, facts=facts)

    def call(self, tensors, options, facts):
        found = cudnn_sdpa.sdpa_fp8(*(tensors[n] for n in "qkv"), facts["made"], **facts["side"], **options)
        named = {"out": found.out, "amax_s": found.amax_s, "amax_o": found.amax_o, "lse": found.lse}
        return {name: x for name, x in named.items() if x is not None}

    def before(self, case, tensors, options):
        case.facts["made"] = self.forward_scales(case, tensors["q"].device)
        case.facts["side"] = self.side(case, tensors["q"].device)
        return {}

    def exact(self, case, options, leaves, known):
        known["true"] = self.true(case, leaves)
        known["options"] = {n: options[n] for n in ("scale", "window_size", "is_causal", "causal_alignment")}
        known["options"] |= case.facts["side"]
        made = known["made"] = attention(**known["true"], **known["options"])
        amax_s = made.weights.amax().view(1) if made.weights.numel() else torch.zeros(1, dtype=F64)
        return {"out": made.out * 23.0, "lse": made.lse, "amax_s": amax_s, "amax_o": made.out.abs().amax().view(1)}

    def bounds(self, case, options, leaves, grads, known, precision):
        made, true = known["made"], known["true"]
        unit = HALF_A_ULP[case.dtype]
        out_dtype = options["out_dtype"] or case.dtype
        last = HALF_A_ULP.get(out_dtype, 2**-8)
        spread = (made.weights @ true["v"].abs().repeat_interleave(made.out.shape[1] // true["v"].shape[1], 1)) * unit
        on_gpu = made.out.is_cuda  # there FP8 products are summed with 13 bits: 2e-2 was seen where |q|·|k| was 163
        precision = replace(precision, inner=2**-16) if on_gpu else precision
        lse = attention_bounds(made, **true, grad_out=None, precision=precision, **known["options"])["lse"]
        largest = 1e-3 + 2 * float(lse.amax()) if on_gpu and lse.numel() else 1e-5
        largest = 1.0 if "seq_lens_q" in case.facts else largest
        amax_s = torch.full((1,), largest, dtype=F64, device=lse.device)
        off = spread + last * made.out.abs() + 2e-3
        return {"out": off * 23.0, "lse": lse, "amax_s": amax_s, "amax_o": off.amax().view(1)}

    def check_places(self, case, tensors, found, gradients):
        if found["out"].numel() and not is_in_order_of(found["out"], tensors["q"]):
            yield f"out has strides {found['out'].stride()} where q has {tensors['q'].stride()}"

    def explained(self, case):
        tensors = [case.tensors[name].make("meta") for name in "qkv"]
        side = meta_lengths(case)
        scales = Fp8Scales(*(torch.empty(1, device="meta") for _ in Fp8Scales._fields))
        if "page" in case.facts:
            size = len(case.facts["kv"]), case.facts["columns"]
            names = ("page_table", "page_table_v") if case.facts["of_v"] else ("page_table",)
            side |= {name: torch.empty(size, dtype=torch.int32, device="meta") for name in names}
        return cudnn_sdpa.sdpa_fp8, (*tensors, scales), {**case.options, **side}


@operation
class Fp8Backward(Fp8):
    name = "sdpa_fp8_backward"

    def draw(self, r: random.Random, seed: int, device: str) -> Case:
        case = self.drawn(r, seed, device)
        facts = case.facts | {"grad_dtype": r.choice([E5M2, E4M3])}
        scale = 600.0 if facts["grad_dtype"] == E5M2 else 30.0
        q, v = case.tensors["q"], case.tensors["v"]
        grad = drawn(r, (*q.shape[:3], v.shape[3]), facts["grad_dtype"], unit=16, expands=0.1, scale=scale)
        facts["scales"] = facts["scales"] | {"grad_out": scale}
        options = case.options | {"deterministic": r.choice([None, None, True])}
        if options["deterministic"] is None and later(f"more of {self.name}", seed).random() < 0.3:
            options["deterministic"] = False
        return replace(case, tensors={**case.tensors, "grad_out": grad}, facts=facts, options=options)

    def _exact_gradients(self, case: Case, options: dict[str, Any], leaves: Tensors) -> tuple[Any, Tensors, Any]:
        given = {n: options[n] for n in ("scale", "window_size", "is_causal", "causal_alignment")} | case.facts["side"]
        true = {name: x.detach().requires_grad_() for name, x in self.true(case, leaves).items()}
        with torch.enable_grad():
            made = attention(**true, **given)
        grad = leaves["grad_out"].double() / case.facts["scales"]["grad_out"]
        found = torch.autograd.grad(made.out, list(true.values()), grad)
        return made, {**dict(zip("qkv", found, strict=True)), "grad": grad}, (true, given)

    def before(self, case, tensors, options):
        device = tensors["q"].device
        case.facts["side"] = self.side(case, device)
        made, grads, (true, _) = self._exact_gradients(case, options, {n: x.double() for n, x in tensors.items()})
        group = made.out.shape[1] // true["v"].shape[1]
        of_scores = grads["grad"].abs() @ true["v"].abs().repeat_interleave(group, 1).mT
        most = max(1e-3, float(of_scores.detach().amax()) if of_scores.numel() else 0.0)
        of = case.facts["scales"]
        scale = torch.finfo(case.facts["grad_dtype"]).max / 4 / most
        forward = self.forward_scales(case, device)
        limit = torch.finfo(case.facts["grad_dtype"]).max
        outs = [limit / 2 / max(1e-3, float(grads[n].abs().amax()) if grads[n].numel() else 1.0) for n in "qkv"]
        full = float(forward.scale_s)
        values = [1 / of["q"], 1 / of["k"], 1 / of["v"], 1 / 23.0, 1 / of["grad_out"], 1 / full, 1 / scale, full, *outs]
        case.facts["outs"], case.facts["dp"] = outs, scale
        scales = Fp8BackwardScales(*(torch.tensor([x], device=device) for x in (*values, scale)))
        case.facts["made"] = forward, scales
        return {}

    def call(self, tensors, options, facts):
        q, k, v = (tensors[name] for name in "qkv")
        forward, scales = facts["made"]
        common = {**facts["side"], **{n: x for n, x in options.items() if n != "deterministic"}}
        made = cudnn_sdpa.sdpa_fp8(q, k, v, forward, return_lse=True, **common)
        more = {"deterministic": options["deterministic"]}
        found = cudnn_sdpa.sdpa_fp8_backward(tensors["grad_out"], q, k, v, made.out, made.lse, scales, **common, **more)
        amaxes = {"amax_dq": found.amax_dq, "amax_dk": found.amax_dk, "amax_dv": found.amax_dv}
        return {"q": found.dq, "k": found.dk, "v": found.dv, **amaxes, "amax_dp": found.amax_dp}

    def exact(self, case, options, leaves, known):
        made, grads, (true, given) = self._exact_gradients(case, options, leaves)
        known["made"], known["true"], known["given"], known["grad"] = made, true, given, grads["grad"]
        exact = {name: grads[name] * out for name, out in zip("qkv", case.facts["outs"], strict=True)}
        known["amaxes"] = {f"amax_d{name}": grads[name].abs().amax().view(1) for name in "qkv"}
        exact |= known["amaxes"]
        scale = true["q"].shape[3] ** -0.5 if options["scale"] is None else options["scale"]
        values = true["v"].repeat_interleave(made.out.shape[1] // true["v"].shape[1], 1)
        mean = (grads["grad"] * made.out).sum(-1, keepdim=True)
        of_scores = made.weights * (grads["grad"] @ values.mT - mean) * scale
        known["scale"] = scale
        return {n: x.detach() for n, x in exact.items()} | {"amax_dp": of_scores.detach().abs().amax().view(1)}

    def bounds(self, case, options, leaves, grads, known, precision):
        unit = max(HALF_A_ULP[case.dtype], HALF_A_ULP[case.facts["grad_dtype"]])
        coarse = Precision(unit, 2e-3, 2**-16 if leaves["q"].is_cuda else 2**-24)
        true = {name: x.detach() for name, x in known["true"].items()}
        made = replace(known["made"], out=known["made"].out.detach(), weights=known["made"].weights.detach())
        found = attention_bounds(made, **true, grad_out=known["grad"], precision=coarse, **known["given"])
        outs = zip("qkv", case.facts["outs"], strict=True)
        bounds = {name: (found[name] + 2e-3) * out for name, out in outs}
        for name, amax in known["amaxes"].items():  # the roundings of a sum do not all have one direction
            bounds[name] = 0.1 * amax + 0.1 * found[name[-1]].amax().view(1) + 1e-3
        mean = (known["grad"] * made.out).abs().sum(-1, keepdim=True)  # of a rounded output
        of_scores = made.weights * (HALF_A_ULP[case.dtype] * mean + 2e-3) * known["scale"]
        return bounds | {"amax_dp": of_scores.amax().view(1) + 2e-3}

    def check_places(self, case, tensors, found, gradients):
        for name in "qkv":
            if found[name].numel() and not is_in_order_of(found[name], tensors[name]):
                yield f"d{name} has strides {found[name].stride()} where {name} has {tensors[name].stride()}"

    def explained(self, case):
        q, k, v, grad_out = (case.tensors[name].make("meta") for name in ("q", "k", "v", "grad_out"))
        side = meta_lengths(case)
        scales = Fp8BackwardScales(*(torch.empty(1, device="meta") for _ in Fp8BackwardScales._fields))
        out = torch.empty(grad_out.shape, dtype=q.dtype, device="meta")
        lse = torch.empty(q.shape[:3], device="meta")
        return cudnn_sdpa.sdpa_fp8_backward, (grad_out, q, k, v, out, lse, scales), {**case.options, **side}


@operation
class Fp8Attention(Attention):
    name = "fp8_attention"
    data = ()
    has_graph_break = True
    casts = ("q", "k", "v")

    def draw(self, r: random.Random, seed: int, device: str) -> Case:
        dtype, kv, batch = r.choice([BF16, F16]), r.choice([1, 2]), r.choice([1, 2])
        heads, sq = kv * r.choice([1, 2]), size(r, device, large=0.05)
        skv = keys_for(r, device, sq)
        large = [(64, 64), *[(128, 128)] * 6] if device != "cpu" else []
        more, dims = later(self.name, seed), r.choice([(16, 16), (32, 48), *large])
        dims, unit, settings = fp8_dims(more, device) or (dims, 16, {})
        shapes = {"q": (heads, sq, dims[0]), "k": (kv, skv, dims[0]), "v": (kv, skv, dims[1])}
        scales = {"q": 1.7, "k": 0.6, "v": 23.0}
        tensors = {n: drawn(r, (batch, *shapes[n]), dtype, unit=unit, expands=0.05, scale=scales[n]) for n in "qkv"}
        facts = {"scaling": r.random() < 0.4}
        options = fp8_options(r, dims[0]) | {"grad_dtype": r.choice([None, E4M3, E5M2])}
        for name, longest in (("seq_lens_q", sq), ("seq_lens_kv", skv)):
            if more.random() < 0.15:
                facts[name] = lengths_of(more, batch, longest)
        case = Case(self.name, seed, dtype, tensors, options, facts=facts, wanted=chosen(r, list(tensors)))
        return replace(case, settings=settings, facts=facts | self.of_scaling(more, case))

    def of_scaling(self, r: random.Random, case: Case) -> dict[str, Any]:
        """The `Fp8Scaling` of a call. Its scales need enough values to fit, and a margin for new ones."""
        if r.random() < 0.5:
            return {"with": {}}
        given = {"inputs": r.choice(["delayed", "current"]), "algorithm": r.choice(["max", "most_recent"])}
        given |= {"history": r.choice([1, 2, 16]), "margin": r.choice([0, 1, 6])}
        given |= {"calibration": r.choice([1, 2]), "auto_update": r.random() < 0.6}
        many = (
            all(math.prod(spec.shape) > 300 for spec in case.tensors.values()) and case.options["window_size"] is None
        )
        lasts = many and not case.options["is_causal"] and not any("lens" in name for name in case.facts)
        return {"with": given | ({"margin": 3} if lasts else {}), "lasts": lasts, "trains": r.random() < 0.8}

    def before(self, case, tensors, options):
        facts, device = case.facts, tensors["q"].device
        facts["side"] = {n: sequence(facts[n], device) for n in ("seq_lens_q", "seq_lens_kv") if n in facts}
        scaling = facts.get("made")
        if not facts["scaling"]:
            facts["made"] = None
        elif scaling is None or not facts.get("lasts"):
            given = {"grad_dtype": options["grad_dtype"] or E5M2, "device": device, **facts["with"]}
            facts["made"] = cudnn_sdpa.Fp8Scaling(**given).train(facts.get("trains", True))
        elif not scaling.auto_update:
            scaling.update()
        return {}

    def call(self, tensors, options, facts):
        given = {**options, **facts["side"]}
        return {"out": cudnn_sdpa.fp8_attention(*(tensors[n] for n in "qkv"), scaling=facts["made"], **given)}

    def exact(self, case, options, leaves, known):
        known["options"] = {n: options[n] for n in ("scale", "window_size", "is_causal", "causal_alignment")}
        known["options"] |= case.facts["side"]
        made = known["made"] = attention(*(leaves[n] for n in "qkv"), **known["options"])
        return {"out": made.out}

    def bounds(self, case, options, leaves, grads, known, precision):
        coarse = Precision(2**-3, 1e-3, 2**-7)
        given = (*(leaves[n] for n in "qkv"), grads.get("out"), coarse)
        found = attention_bounds(known["made"], *given, **known["options"])
        return {name: x + 1e-3 * x.amax() if x.numel() else x for name, x in found.items()}

    def explained(self, case):
        tensors = meta(case)
        side = meta_lengths(case)
        return cudnn_sdpa.fp8_attention, tuple(tensors[n] for n in "qkv"), {**case.options, **side}


@operation
class Fp8Module(Fp8Attention):
    name = "nn.Fp8Attention"

    def draw(self, r: random.Random, seed: int, device: str) -> Case:
        case = super().draw(r, seed, device)
        case = replace(case, facts=case.facts | {"scaling": True})
        more = later("rotations of nn.Fp8Attention", seed)
        is_rotated = more.random() < 0.5 and case.tensors["q"].shape[3] % 16 == 0
        return self.with_rotations(more, case) if is_rotated else case

    def with_rotations(self, r: random.Random, case: Case) -> Case:
        """The call with as many keys as queries."""
        (batch, _, tokens, dim), tensors = case.tensors["q"].shape, dict(case.tensors)
        for name, scale in (("k", 0.6), ("v", 23.0)):
            _, heads, _, size_of_head = tensors[name].shape
            tensors[name] = drawn(
                r, (batch, heads, tokens, size_of_head), case.dtype, unit=16, expands=0.05, scale=scale
            )
        facts = case.facts | {"rope": rope_of(r, dim), "qk_norm": r.choice([None, 1e-5, 0.1])}
        facts |= {"first position": r.choice([None, 0, 7])}
        if "seq_lens_kv" in facts:
            facts["seq_lens_kv"] = lengths_of(r, batch, tokens)
        facts["lasts"] = facts.get("lasts", False) and all(math.prod(x.shape) > 300 for x in tensors.values())
        return replace(case, tensors=tensors, facts=facts, wanted=())

    def before(self, case, tensors, options):
        super().before(case, tensors, options)
        facts, device = case.facts, tensors["q"].device
        if facts.get("module") is None or not facts.get("lasts"):
            facts["module"] = self.made(facts, options).to(device)
        if facts.get("first position") is not None:
            begin, tokens = facts["first position"], tensors["q"].shape[2]
            positions = torch.arange(begin, begin + tokens, device=device)
            facts["side"]["rotations"] = facts["module"].rope(positions)
        return {}

    def made(self, facts: dict[str, Any], options: dict[str, Any]) -> cudnn_sdpa.Fp8Attention:
        made = {n: options[n] for n in ("scale", "window_size", "is_causal", "causal_alignment")}
        scaling = facts["made"] if facts["with"] or options["grad_dtype"] else None
        if "rope" in facts:
            made |= {"rope": cudnn_sdpa.nn.RotaryEmbedding(**facts["rope"]), "qk_norm": facts["qk_norm"]}
        module = cudnn_sdpa.Fp8Attention(scaling=scaling, **made)
        for norm, weight in zip((module.q_norm, module.k_norm), (1.3, 0.7), strict=True):
            if norm is not None:
                torch.nn.init.constant_(norm.weight.requires_grad_(False), weight)
        return module

    def exact(self, case, options, leaves, known):
        facts = case.facts
        if "rope" not in facts:
            return super().exact(case, options, leaves, known)
        positions = (facts["first position"] or 0) + torch.arange(leaves["q"].shape[2], device=leaves["q"].device)
        given = {n: x for n, x in facts["rope"].items() if n != "head_dim"}
        known["leaves"] = dict(leaves)
        for name, weight in (("q", 1.3), ("k", 0.7)):
            x = leaves[name].transpose(1, 2)
            if facts["qk_norm"] is not None:
                x = weight * x * (x.square().mean(-1, keepdim=True) + facts["qk_norm"]).rsqrt()
            known["leaves"][name] = rotated(x, positions[None], **given).transpose(1, 2)
        side = {n: x for n, x in facts["side"].items() if n != "rotations"}
        return super().exact(replace(case, facts=facts | {"side": side}), options, known["leaves"], known)

    def bounds(self, case, options, leaves, grads, known, precision):
        return super().bounds(case, options, known.get("leaves", leaves), grads, known, precision)

    def call(self, tensors, options, facts):
        return {"out": facts["module"](*(tensors[n] for n in "qkv"), **facts["side"])}

    def explained(self, case):
        return None


# Norms and gates


def fused_dtype(r: random.Random, device: str) -> torch.dtype:
    """A dtype of norms, gates and convolutions."""
    dtype, wide = r.choice([BF16, BF16, F16, F32]), r.choice([False, False, True])
    return F64 if wide and device == "cpu" else dtype


def rows_of(r: random.Random, device: str) -> tuple[int, ...]:
    n = r.choice([1, 2, 3, 8, 17, 32, 64, 64, 100, 128, *([256, 1000, 1024] if device != "cpu" else [])])
    shape = tuple(r.choice([1, 1, 2, 3, 5, 7]) for _ in range(r.choice([0, 1, 1, 2, 2, 3, 4])))
    shape = (*shape, n)
    return (0, *shape[1:]) if r.random() < 0.03 and len(shape) > 1 else shape


def end_of_eps(r: random.Random, x: Spec) -> dict[str, Any]:
    """An eps that is not a float, or 0 if no row is constant."""
    how, is_constant = r.random(), len(x.shape) - 1 in x.layout.expanded
    return {"eps": 1} if how < 0.05 else {"eps": 0.0} if how < 0.1 and x.shape[-1] > 7 and not is_constant else {}


@operation
class RmsNorm(Operation):
    aligns = True
    name = "rms_norm"
    data = ("eps",)
    weights: tuple[str, ...] = ("weight",)
    formula = staticmethod(rms_norm)

    def draw(self, r: random.Random, seed: int, device: str) -> Case:
        dtype, shape = fused_dtype(r, device), rows_of(r, device)
        n = shape[-1]
        tensors = {"x": drawn(r, shape, dtype, scale=r.choice([0.02, 1.3, 1.3, 50.0]))}
        if r.random() < 0.02:
            tensors["x"] = negated(tensors["x"])
        if r.random() < 0.75:
            tensors["weight"] = drawn(r, (n,), r.choice([dtype, F32]), expands=0.1, shift=0.7)
        options: dict[str, Any] = {"eps": r.choice([1e-6, 1e-5, 1e-5, 1e-12, 0.3, 100.0])}
        if r.random() < 0.3:
            tensors["residual"] = drawn(r, shape, dtype, scale=1.7)
        if r.random() < 0.2:
            options["activation"] = "silu"
        if "weight" in tensors and r.random() < 0.2:
            options["zero_centered"] = True
        options |= end_of_eps(later(self.name, seed), tensors["x"])
        options |= {"eps": None} if later("eps", seed).random() < 0.1 else {}
        return Case(self.name, seed, dtype, tensors, options, {"eps": 0.011}, {}, chosen(r, list(tensors)))

    def eps(self, case: Case, options: dict[str, Any]) -> float:
        """The eps that is added; None is PyTorch's default."""
        usual = torch.finfo(F64 if case.dtype == F64 else F32).eps
        return usual if options["eps"] is None else options["eps"]

    def call(self, tensors, options, facts):
        found = getattr(cudnn_sdpa, self.name)(**tensors, **options)
        return dict(zip(("out", "sum"), found, strict=True)) if "residual" in tensors else {"out": found}

    def exact(self, case, options, leaves, known):
        given = {**options, "eps": self.eps(case, options)}
        out, total = self.formula(**{**dict.fromkeys(self.weights), **leaves, **given})
        known["total"] = total
        return {"out": out, "sum": total} if "residual" in leaves else {"out": out}

    def bounds(self, case, options, leaves, grads, known, precision):
        total, weight = known["total"].detach(), leaves.get("weight")
        if weight is not None and options.get("zero_centered"):
            weight = weight + 1
        off = precision.unit * total.abs() if "residual" in leaves else None
        found = norm_bounds(
            *(total, weight, leaves.get("bias"), self.eps(case, options), grads.get("out"), precision),
            centered="bias" in self.weights,
            activation=options.get("activation"),
            sum_off=off,
            grad_sum=grads.get("sum"),
        )
        bounds = {"out": found["out"], "sum": precision.unit * total.abs() + precision.tiny}
        return bounds | ({**found, "residual": found["x"]} if grads else {})

    def check_places(self, case, tensors, found, gradients):
        for name, result in found.items():
            if result.numel() and not is_dense(result):
                yield f"{name} has strides {result.stride()}, which are not dense"

    def explained(self, case):
        return getattr(cudnn_sdpa, self.name), (), {**meta(case), **case.options}


class NormInFp8(Operation):
    """Mixed into norms: results are multiplied by their scales."""

    def draw(self, r: random.Random, seed: int, device: str) -> Case:
        drawn_norm = super().draw(r, seed, device)
        tensors, accepted = dict(drawn_norm.tensors), inspect.signature(getattr(cudnn_sdpa, self.name)).parameters
        options = {name: x for name, x in drawn_norm.options.items() if name in accepted}
        if r.random() < 0.5:
            tensors["scale"] = drawn(r, r.choice([(), (1,)]), F32, scale=0.0, shift=r.choice([0.001, 0.0137, 0.3]))
        return replace(drawn_norm, tensors=tensors, options=options, wanted=())

    def call(self, tensors, options, facts):
        found = getattr(cudnn_sdpa, self.name)(**tensors, **options)
        wide = F64 if tensors["x"].dtype == F64 else F32
        values = (found.out.to(wide) * found.scale.to(wide)).to(tensors["x"].dtype)
        results = {"out": values, "sum": found.total, "amax": found.amax}
        results["amax of rows"] = None if "scale" in tensors else found.scale * 448
        return {name: x for name, x in results.items() if x is not None}

    def exact(self, case, options, leaves, known):
        out = super().exact(case, options, {n: x for n, x in leaves.items() if n != "scale"}, known)
        rows = out["out"].abs().amax(-1, keepdim=True)
        known["scale"] = leaves["scale"] if "scale" in leaves else (rows / 448).clamp_min(2.0**-100)
        out["out"] = torch.clamp(out["out"], -448 * known["scale"], 448 * known["scale"])
        if "scale" not in leaves:
            return out | {"amax of rows": 448 * known["scale"]}
        return out | {"amax": rows.amax() if rows.numel() else rows.sum()}

    def bounds(self, case, options, leaves, grads, known, precision):
        leaves = {n: x for n, x in leaves.items() if n != "scale"}
        exact = self.exact(case, options, leaves, {})["out"].abs()
        inner = Precision.of(F32)
        found = super().bounds(case, options, leaves, grads, known, inner)["out"]
        by_row = found.amax(-1, keepdim=True)
        most = by_row.amax() if by_row.numel() else by_row.sum()
        more = {"sum": precision.unit * known["total"].abs() + precision.tiny}
        out = exact * (2**-4 + 2 * precision.unit) + known["scale"] * 2**-10 + found
        return {"out": out * 1.01 + precision.tiny, "amax": 4 * most, "amax of rows": 4 * by_row, **more}


@operation
class RmsNormFp8(NormInFp8, RmsNorm):
    name = "rms_norm_fp8"


@operation
class LayerNorm(RmsNorm):
    name = "layer_norm"
    weights = ("weight", "bias")
    formula = staticmethod(layer_norm)

    def draw(self, r: random.Random, seed: int, device: str) -> Case:
        dtype, shape = fused_dtype(r, device), rows_of(r, device)
        tensors = {"x": drawn(r, shape, dtype, scale=r.choice([0.05, 1.3, 1.3, 20.0]), shift=r.choice([0.0, 2.0]))}
        of = r.choice([dtype, F32])
        if r.random() < 0.8:
            tensors["weight"] = drawn(r, shape[-1:], of, expands=0.1, shift=0.7)
        if r.random() < 0.6:
            tensors["bias"] = drawn(r, shape[-1:], of, expands=0.1, scale=2.0)
        options: dict[str, Any] = {"eps": r.choice([1e-5, 1e-5, 1e-6, 0.3, 100.0])}
        if r.random() < 0.3:
            tensors["residual"] = drawn(r, shape, dtype, scale=1.7)
        if r.random() < 0.2:
            options["activation"] = "silu"
        if "weight" in tensors and r.random() < 0.2:
            options["zero_centered"] = True
        options |= end_of_eps(later(self.name, seed), tensors["x"])
        return Case(self.name, seed, dtype, tensors, options, {"eps": 0.011}, {}, chosen(r, list(tensors)))


@operation
class LayerNormFp8(NormInFp8, LayerNorm):
    name = "layer_norm_fp8"


def has_rows(spec: Spec) -> bool:
    """Whether a tensor is a view of rows with one common stride."""
    try:
        spec.make("meta").view(-1, spec.shape[-1])
    except RuntimeError:
        return False
    return True


class Gate(Operation):
    """Shared by the gated activations: results are products, and every rounding is relative."""

    activation = "silu"
    aligns = True

    def draw(self, r: random.Random, seed: int, device: str) -> Case:
        dtype, shape = fused_dtype(r, device), rows_of(r, device)
        facts = {"form": r.choice(["two"] if self.name == "relu_squared" else ["two", "two", "two", "halves", "both"])}
        names = ["gate"] if self.name == "relu_squared" else ["gate", "up"]
        if facts["form"] != "two":
            shape, names = (*shape[:-1], 2 * shape[-1]), ["both"]
        scale = r.choice([0.3, 1.3, 1.3, 6.0])
        tensors = {}
        for name in names:
            some = [drawn(r, shape, dtype, last_dense=True, scale=scale) for _ in range(4)]
            tensors[name] = next(filter(has_rows, some), some[0])  # mostly a valid one
        wanted = chosen(r, list(tensors))
        case = Case(self.name, seed, dtype, tensors, {}, {}, facts, wanted)
        if not all(has_rows(spec) for spec in tensors.values()):
            case = replace(case, refusable="rows that do not lie at one distance")
        return case

    def halves(self, tensors: Tensors, facts: dict[str, Any]) -> tuple[Tensor, ...]:
        return tensors["both"].chunk(2, -1) if "both" in tensors else tuple(tensors.values())

    def exact(self, case, options, leaves, known):
        parts = self.halves(leaves, case.facts)
        if self.name == "relu_squared":
            return {"out": ACTIVATIONS["relu"](parts[0]) ** 2}
        return {"out": ACTIVATIONS[self.activation](parts[0]) * parts[1]}

    def bounds(self, case, options, leaves, grads, known, precision):
        gate, *up = self.halves(leaves, case.facts)
        by = up[0].abs() if up else gate.abs()
        out = 3 * precision.unit * gate.abs() * by + precision.tiny
        bounds = {"out": out}
        if grads:
            grad = grads["out"].double().abs()
            grad_gate, grad_up = (
                3 * precision.unit * grad * (1 + gate.abs()) * by,
                3 * precision.unit * grad * gate.abs(),
            )
            grad_gate, grad_up = grad_gate + precision.tiny * (1 + grad), grad_up + precision.tiny * (1 + grad)
            bounds |= {"gate": grad_gate, "up": grad_up, "both": torch.cat([grad_gate, grad_up], -1)}
        return bounds

    def call(self, tensors, options, facts):
        given = tuple(tensors.values()) if facts["form"] != "halves" else self.halves(tensors, facts)
        return {"out": getattr(cudnn_sdpa, self.name)(*given)}

    check_places = RmsNorm.check_places

    def explained(self, case):
        if case.refusable:
            return None
        tensors = meta(case)
        given = tuple(tensors.values()) if case.facts["form"] != "halves" else self.halves(tensors, case.facts)
        return getattr(cudnn_sdpa, self.name), given, {}


@operation
class SiluMul(Gate):
    name = "silu_mul"


@operation
class GeluMul(Gate):
    name, activation = "gelu_mul", "gelu"


@operation
class ReluSquared(Gate):
    name = "relu_squared"


# Rotations


def sizes_of_pairs(x: Tensor, rotary_dim: int, *, interleaved: bool) -> Tensor:
    """The length of each feature's pair; of features that are not rotated, their own."""
    shape = (rotary_dim // 2, 2) if interleaved else (2, rotary_dim // 2)
    pairs, dim = x[..., :rotary_dim].unflatten(-1, shape), -1 if interleaved else -2
    lengths = pairs.square().sum(dim, keepdim=True).sqrt().expand(pairs.shape).flatten(-2)
    return torch.cat([lengths, x[..., rotary_dim:].abs()], -1)


@operation
class Rope(Operation):
    name = "rope"
    aligns = True
    data = ("eps",)

    def draw(self, r: random.Random, seed: int, device: str) -> Case:
        dtype, dim = fused_dtype(r, device), r.choice([2, 6, 8, 16, 24, 64, 80, 128])
        heads_q, heads_k, tokens = r.choice([1, 2, 4, 7]), r.choice([0, 1, 2]), size(r, device)
        batch = None if r.random() < 0.3 else r.choice([1, 2, 3])
        rotary_dim = r.choice([dim, dim, dim, 2, 2 * max(1, dim // 4)])
        rows = (tokens,) if batch is None else (r.choice([batch, 1]), tokens) if r.random() < 0.5 else (tokens,)
        tensors = {}
        for name, heads in (("q", heads_q), ("k", heads_k)):
            shape = (tokens, heads, dim) if batch is None else (batch, heads, tokens, dim)
            if heads:
                tensors[name] = drawn(r, shape, dtype, scale=r.choice([0.3, 1.3, 20.0]))
        angles = {name: drawn(r, (*rows, rotary_dim // 2), F32, scale=0.8) for name in ("cos", "sin")}
        weight = r.choice([dtype, F32])
        normed = [name for name in ("q", "k") if name in tensors and r.random() < 0.5]
        weights = {f"{name}_weight": drawn(r, (dim,), weight, expands=0.1, shift=0.7) for name in normed}
        options: dict[str, Any] = {"interleaved": True} if r.random() < 0.4 else {}
        if normed:
            options |= {"eps": r.choice([1e-6, 1e-5, 0.3, 1])}
            options |= {"zero_centered": True} if r.random() < 0.3 else {}
        wanted = chosen(r, [*tensors, *weights])
        varied = {"eps": 0.011} if normed else {}
        return Case(self.name, seed, dtype, {**tensors, **angles, **weights}, options, varied, {}, wanted)

    def call(self, tensors, options, facts):
        given = {"k": None, **tensors, **options}
        return {f"out_{name}": x for name, x in zip("qk", cudnn_sdpa.rope(**given), strict=True) if x is not None}

    def exact(self, case, options, leaves, known):
        found = rope(**{"k": None, **leaves, **options})
        return dict(zip([f"out_{name}" for name in "qk" if name in leaves], found, strict=True))

    def bounds(self, case, options, leaves, grads, known, precision):
        given = {"rotary_dim": 2 * leaves["cos"].shape[-1], "interleaved": options.get("interleaved", False)}
        bounds, unit = {}, precision.unit + 2**-20
        most = 2 * max(1.0, *(float(leaves[name].detach().abs().amax()) for name in ("cos", "sin")))
        for name in [name for name in "qk" if name in leaves]:
            x, weight = leaves[name].detach(), leaves.get(f"{name}_weight")
            scale, factor = torch.ones_like(x[..., :1]), torch.ones_like(x)
            if weight is not None:
                scale = (x.square().mean(-1, keepdim=True) + options["eps"]).rsqrt()
                factor = (weight.detach() + options.get("zero_centered", False)).expand(x.shape)
            bounds[f"out_{name}"] = 3 * most * unit * sizes_of_pairs(x * scale * factor, **given) + precision.tiny
            if f"out_{name}" not in grads:
                continue
            grad = most * sizes_of_pairs(grads[f"out_{name}"].double(), **given)
            along = (grad * factor * x * scale).abs().mean(-1, keepdim=True) if weight is not None else 0.0
            of_x = scale * ((grad * factor).abs() + (x * scale).abs() * along)
            bounds[name] = 3 * unit * of_x + precision.tiny * (1 + scale)
            if weight is not None:
                terms = (grad * x * scale).abs().flatten(0, -2)
                bounds[f"{name}_weight"] = 3 * unit * terms.sum(0) + precision.tiny
        return bounds

    check_places = RmsNorm.check_places

    def explained(self, case):
        return cudnn_sdpa.rope, (), {"k": None, **meta(case), **case.options}


@operation
class RopeInPlace(Rope):
    """Heads are views of one projection, with numbers behind them that stay."""

    name = "rope_"

    def draw(self, r: random.Random, seed: int, device: str) -> Case:
        return replace(super().draw(r, seed, device), wanted=())

    def call(self, tensors, options, facts):
        heads, at = [tensors[name] for name in "qk" if name in tensors], -2 if tensors["q"].dim() == 3 else 1
        rest = torch.ones_like(heads[0])
        if math.prod(heads[0].shape[at:]) * rest.element_size() % 16:  # behind these, keys would be misaligned
            written = [x.clone() for x in heads]
        else:
            *written, rest = torch.cat([*heads, rest], at).split([x.shape[at] for x in (*heads, rest)], at)
        angles = {name: x for name, x in tensors.items() if name not in ("q", "k")}
        cudnn_sdpa.rope_(*written, *[None] * (2 - len(written)), **angles, **options)
        return {f"out_{name}": x for name, x in zip("qk", written, strict=False)} | {"rest": rest}

    def exact(self, case, options, leaves, known):
        return super().exact(case, options, leaves, known) | {"rest": torch.ones_like(leaves["q"])}

    def bounds(self, case, options, leaves, grads, known, precision):
        return super().bounds(case, options, leaves, grads, known, precision) | {"rest": torch.zeros_like(leaves["q"])}

    def check_places(self, case, tensors, found, gradients):
        return ()


@operation
class RopeFp8(Rope):
    """Results are multiplied by their scales."""

    name = "rope_fp8"

    def draw(self, r: random.Random, seed: int, device: str) -> Case:
        case = super().draw(r, seed, device)
        scales = {
            f"{name}_scale": drawn(r, r.choice([(), (1,)]), F32, scale=0.0, shift=r.choice([0.001, 0.0137, 0.3]))
            for name in "qk"
            if name in case.tensors
        }
        return replace(case, tensors={**case.tensors, **scales}, wanted=())

    def call(self, tensors, options, facts):
        found = cudnn_sdpa.rope_fp8(**{"k": None, **tensors, **options})
        results, dtype = {}, tensors["q"].dtype
        wide = F64 if dtype == F64 else F32
        for name in [name for name in "qk" if name in tensors]:
            out, results[f"amax_{name}"] = getattr(found, name), getattr(found, f"{name}_amax")
            results[f"out_{name}"] = (out.to(wide) * tensors[f"{name}_scale"].to(wide)).to(dtype)
        return results

    def exact(self, case, options, leaves, known):
        known["scales"] = {f"out_{name}": leaves[f"{name}_scale"] for name in "qk" if name in leaves}
        known["leaves"] = {name: x for name, x in leaves.items() if not name.endswith("_scale")}
        out = super().exact(case, options, known["leaves"], known)
        amaxes = {name: x.abs().amax() if x.numel() else x.sum() for name, x in out.items()}
        found = {
            name: torch.clamp(x, -448 * known["scales"][name], 448 * known["scales"][name]) for name, x in out.items()
        }
        return found | {name.replace("out", "amax"): x.view(1) for name, x in amaxes.items()}

    def bounds(self, case, options, leaves, grads, known, precision):
        exact = super().exact(case, options, known["leaves"], {})
        found = super().bounds(case, options, known["leaves"], grads, known, Precision.of(F32))
        bounds = {name.replace("out", "amax"): x.amax() if x.numel() else x.sum() for name, x in found.items()}
        for name, x in found.items():
            coarse = exact[name].abs() * (2**-4 + 2 * precision.unit) + known["scales"][name] * 2**-10
            bounds[name] = 1.01 * (coarse + x) + precision.tiny
        return bounds

    def explained(self, case):
        return cudnn_sdpa.rope_fp8, (), {"k": None, **meta(case), **case.options}


# Convolutions


class Conv(Operation):
    rank = 2
    aligns = True
    casts = ("x", "weight", "bias")

    def draw(self, r: random.Random, seed: int, device: str) -> Case:
        dtype, rank = fused_dtype(r, device), self.rank
        groups = r.choice([1, 1, 1, 2, 4, 8])
        of_in = groups * r.choice([1, 1, 2, 3, 4, 8, 8, *([16] if device != "cpu" else [])])
        of_out = groups * r.choice([1, 1, 2, 3, 4, 8, 8, *([16] if device != "cpu" else [])])
        most = (1, 1, 2, 3, 5) if rank == 3 else (1, 1, 2, 3, 3, 4, 5)
        most = most if device != "cpu" or rank < 3 else (1, 1, 2, 3)
        kernel = tuple(r.choice(most) for _ in range(rank))
        stride, padding, dilation = (
            tuple(r.choice(choices) for _ in range(rank)) for choices in ((1, 1, 1, 2, 3), (0, 0, 1, 2), (1, 1, 1, 2))
        )
        if r.random() < 0.1:  # patches
            stride, padding, dilation, groups = kernel, (0,) * rank, (1,) * rank, 1
        least = [max(1, (k - 1) * d + 1 - 2 * p) for k, d, p in zip(kernel, dilation, padding, strict=True)]
        lengths = tuple(n + r.choice([0, 0, 1, 3, 6, 11 if rank < 3 else 4]) for n in least)
        batch = 0 if r.random() < 0.02 else r.choice([1, 1, 2, 3])
        of_in, of_out = -(-of_in // groups) * groups, -(-of_out // groups) * groups
        tensors = {
            "x": drawn(r, (batch, of_in, *lengths), dtype, scale=1.3),
            "weight": drawn(r, (of_out, of_in // groups, *kernel), dtype, expands=0.05, scale=0.4),
        }
        if r.random() < 0.5:
            tensors["bias"] = drawn(r, (of_out,), dtype, scale=0.9)
        if r.random() < 0.02:
            tensors["x"] = negated(tensors["x"])

        def short(sizes: tuple[int, ...]) -> Any:
            return sizes[0] if len(set(sizes)) == 1 and r.random() < 0.5 else sizes

        options: dict[str, Any] = {"stride": short(stride), "padding": short(padding), "dilation": short(dilation)}
        options |= {"groups": groups, "activation": r.choice([None, None, "relu", "silu", "gelu"])}
        return Case(self.name, seed, dtype, tensors, options, {}, {}, chosen(r, list(tensors)))

    def call(self, tensors, options, facts):
        function = getattr(cudnn_sdpa, self.name)
        return {"out": function(tensors["x"], tensors["weight"], tensors.get("bias"), **options)}

    def exact(self, case, options, leaves, known):
        plain = {name: value for name, value in options.items() if name != "activation"}
        known["plain"] = plain
        y = known["y"] = convolution(leaves["x"], leaves["weight"], leaves.get("bias"), **plain)
        return {"out": ACTIVATIONS[options["activation"]](y)}

    def bounds(self, case, options, leaves, grads, known, precision):
        inputs = {name: x.detach().abs().requires_grad_() for name, x in leaves.items()}
        with torch.enable_grad():
            size = convolution(inputs["x"], inputs["weight"], inputs.get("bias"), **known["plain"])
        y, many = known["y"].detach(), math.prod(leaves["weight"].shape[1:])
        off = (2 * precision.unit * size + precision.inner * 4 * many**0.5 * size + precision.tiny).detach()
        grad = grads["out"].double() if grads else None
        out, of_grad = activated_bounds(y, off, grad, options["activation"])
        bounds = {"out": out + precision.unit * out}
        if grads:
            weights = (
                3 * precision.unit * 1.2 * grad.abs() + of_grad + precision.inner * grad.abs() * 64 + precision.tiny
            )
            found = torch.autograd.grad(size, list(inputs.values()), weights)
            bounds |= {name: x + precision.tiny for name, x in zip(inputs, found, strict=True)}
        return bounds

    def check_places(self, case, tensors, found, gradients):
        out = found["out"]
        if (out.numel() and not is_dense(out.movedim(1, -1))) or not out.movedim(1, -1).is_contiguous():
            yield f"out has strides {out.stride()}, which are not channels last"

    def explained(self, case):
        tensors = meta(case)
        function = getattr(cudnn_sdpa, self.name)
        return function, (tensors["x"], tensors["weight"], tensors.get("bias")), case.options


@operation
class Conv1d(Conv):
    name, rank = "conv1d", 1


@operation
class Conv2d(Conv):
    name, rank = "conv2d", 2


@operation
class Conv3d(Conv):
    name, rank = "conv3d", 3


# Custom graphs


def scaled_reference(x: Tensor, bias: Tensor | None = None, scale: float = 1.0) -> Tensor:
    y = x.float() * scale if x.dtype != F64 else x * scale
    return (y if bias is None else y + bias).to(x.dtype).contiguous()


def scaled_backward(grads: Any, operands: Any, results: Any) -> Any:  # noqa: ARG001
    _, bias, scale = operands
    return grads[0] * scale, None if bias is None else grads[0].sum_to_size(bias.shape), None


@cudnn_sdpa.graph_op(reference=scaled_reference, backward=scaled_backward)
def scaled(g: Any, x: Any, bias: Any = None, scale: Any = None) -> Any:
    """x times a scalar, plus a bias."""
    y = g.mul(a=x, b=scale)
    return y if bias is None else g.add(a=y, b=bias)


def clipped_reference(x: Tensor, *, slope: float = 0.1) -> Tensor:
    return torch.where(x > 0, x, x * slope).contiguous()


@cudnn_sdpa.graph_op(reference=clipped_reference)
def clipped(g: Any, x: Any, *, slope: float = 0.1) -> Any:
    return g.relu(input=x, negative_slope=slope)


def pair_reference(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    wide = (x.float(), y.float()) if x.dtype != F64 else (x, y)
    return (wide[0] * wide[1]).to(x.dtype).contiguous(), (wide[0] - wide[1]).to(x.dtype).contiguous()


def pair_outputs(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return x.new_empty(x.shape), x.new_empty(x.shape)


def pair_backward(grads: Any, operands: Any, results: Any, *, needs: Any) -> Any:
    assert not results, "they are not kept"
    x, y = operands
    return grads[0] * y + grads[1] if needs[0] else None, grads[0] * x - grads[1] if needs[1] else None


@cudnn_sdpa.graph_op(reference=pair_reference, outputs=pair_outputs, backward=pair_backward, keeps_results=False)
def pair(g: Any, x: Any, y: Any) -> Any:
    return g.mul(a=x, b=y), g.sub(a=x, b=y)


@operation
class UserGraph(Operation):
    aligns = True
    name = "graph_op"

    def draw(self, r: random.Random, seed: int, device: str) -> Case:
        dtype = r.choice([BF16, F16, F32]) if device != "cpu" else r.choice([BF16, F16, F32, F64])
        shape = (r.choice([1, 1, 2, 3]), r.choice([1, 1, 5, 48]), 8 * r.choice([1, 1, 8, 16]))
        tensors = {"x": drawn(r, shape, dtype, last_dense=True, expands=0.0)}
        facts = {"graph": r.choice(["scaled", "scaled", "clipped"])}
        if facts["graph"] == "clipped":
            slopes = {"slope": round(r.uniform(0.05, 0.4), 3)}, {"slope": round(r.uniform(0.5, 0.9), 3)}
            return Case(self.name, seed, dtype, tensors, slopes[0], slopes[1], facts)
        if later(self.name, seed).random() < 0.3:
            tensors["y"] = drawn(r, shape, dtype, last_dense=True, expands=0.0)
            return Case(self.name, seed, dtype, tensors, {}, {}, {"graph": "pair"}, chosen(r, list(tensors)))
        options = {"scale": number(r, 0.3, 3.0)}
        if r.random() < 0.6:
            tensors["bias"] = drawn(
                r,
                tuple(n if r.random() < 0.5 else 1 for n in shape[:-1]) + shape[-1:],
                dtype,
                last_dense=True,
                expands=0.0,
            )
        return Case(self.name, seed, dtype, tensors, options, {"scale": 0.37}, facts, chosen(r, list(tensors)))

    def call(self, tensors, options, facts):
        if facts["graph"] == "clipped":
            return {"out": clipped(tensors["x"], **options)}
        if facts["graph"] == "pair":
            return dict(zip(("out", "difference"), pair(tensors["x"], tensors["y"]), strict=True))
        return {"out": scaled(tensors["x"], tensors.get("bias"), **options)}

    def exact(self, case, options, leaves, known):
        if case.facts["graph"] == "clipped":
            return {"out": torch.where(leaves["x"] > 0, leaves["x"], leaves["x"] * options["slope"])}
        if case.facts["graph"] == "pair":
            return {"out": leaves["x"] * leaves["y"], "difference": leaves["x"] - leaves["y"]}
        y = leaves["x"] * options["scale"]
        return {"out": y + leaves["bias"] if "bias" in leaves else y}

    def bounds_of_pair(self, leaves: Tensors, grads: Tensors, precision: Precision) -> Tensors:
        """Error bounds of product, difference and gradients."""
        x, y = leaves["x"].abs(), leaves["y"].abs()
        bounds = {"out": precision.unit * x * y + precision.tiny, "difference": precision.unit * (x + y)}
        if grads:
            product, difference = (grads[name].double().abs() for name in ("out", "difference"))
            for name, by in (("x", y), ("y", x)):
                bounds[name] = 3 * precision.unit * (product * by + difference) + precision.tiny
        return bounds

    def bounds(self, case, options, leaves, grads, known, precision):
        if case.facts["graph"] == "pair":
            return self.bounds_of_pair(leaves, grads, precision)
        x = leaves["x"].abs() * max(1.0, options.get("scale", 1.0))
        bounds = {"out": 3 * precision.unit * (x + (leaves["bias"].abs() if "bias" in leaves else 0.0)) + 1e-6}
        if grads:
            grad = grads["out"].double().abs()
            bounds["x"] = 3 * precision.unit * grad * options["scale"] + 1e-6
            if "bias" in leaves:
                bounds["bias"] = grad.sum_to_size(leaves["bias"].shape) * 3 * precision.unit + 1e-6
        return bounds


# Caches


@operation
class Cache(Operation):
    name = "PagedKVCache"

    def session(self, r: random.Random, seed: int, device: str) -> Outcome:
        actions = ["add", "step", "step", "step", "fork", "truncate", "evict", "free", "read", "stale"]
        return CacheSession(r, seed, device).run(actions, 14)


class Session:
    """A cache in use, and its expected contents."""

    def __init__(self, r: random.Random, seed: int, device: str) -> None:
        self.r, self.device, self.generator = r, device, torch.Generator().manual_seed(seed)
        self.problems: list[str] = []
        self.reasons: list[str] = []

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=F64).to(self.dtype).to(self.device)

    def run(self, actions: list[str], count: int) -> Outcome:
        for _ in range(count):
            self.act(self.r.choice(actions))
            if self.problems:
                break
        else:
            self.check("at the end")
        return Outcome("wrong" if self.problems else "right", self.problems, self.reasons)


class CacheSession(Session):
    """A paged cache, and a dictionary with its expected contents."""

    def __init__(self, r: random.Random, seed: int, device: str) -> None:
        super().__init__(r, seed, device)
        self.more, self.signs = later("PagedKVCache", seed), later("PagedKVCache, negated", seed)
        self.dtype, self.kv = half(r, device), r.choice([1, 2])
        self.dims = r.choice([(64, 64), (8, 16), (128, 128)])
        self.heads = self.kv * r.choice([1, 3])
        given = {"pages": r.choice([12, 40]), "page_size": r.choice([1, 2, 16])}
        given |= {"page_layout": r.choice(["HND", "NHD"]), "layers": r.choice([1, 2])}
        if self.dims[0] != self.dims[1] or self.more.random() < 0.5:
            given["head_dim_v"] = self.dims[1]
        if self.more.random() < 0.3:
            given["max_length"] = self.more.choice([1, 4, 9, 10**3])
        self.layers, self.layout = given["layers"], given["page_layout"]
        fp8, self.scales = later("PagedKVCache, FP8", seed), [None, None]
        self.stored = fp8.choice([*LIMITS, *[self.dtype] * 4])
        given["page_size"] = fp8.choice([*[given["page_size"]] * 5, 3, 12])
        if self.stored != self.dtype:
            self.dims = max(16, self.dims[0]), max(16, self.dims[1])
            given |= {"head_dim_v": self.dims[1]} if "head_dim_v" in given else {}
            shapes = fp8.choice([(), (1,), (self.kv,)]), fp8.choice([None, (), (self.kv,)])
            full = [None if shape is None else torch.full(shape, fp8.uniform(0.01, 2.0)) for shape in shapes]
            self.scales = [None if x is None else x.to(device) for x in full]
            given |= dict(zip(("k_scale", "v_scale"), self.scales, strict=True))
        self.cache = cudnn_sdpa.PagedKVCache(
            heads=self.kv, head_dim=self.dims[0], dtype=self.stored, device=device, **given
        )
        self.model: dict[int, tuple[Tensor, Tensor]] = {}
        self.steps: list[tuple[Any, list[int]]] = []

    def check(self, when: str) -> None:
        """Compares readable with written values; layer n has n times the values of the first."""
        for (one, written), layer in itertools.product(self.model.items(), range(self.layers)):
            wanted = [self.as_stored(x * (layer + 1), of) for x, of in zip(written, self.scales, strict=True)]
            if not all(map(torch.equal, map(bits, self.cache.read(one, layer)), map(bits, wanted))):
                self.problems.append(f"{when} sequence {one} has other tokens in layer {layer} than were written")
        lengths = [written[0].shape[1] for written in self.model.values()]
        if [self.cache.length(one) for one in self.model] != lengths:
            self.problems.append(f"{when} sequences are not of the lengths {lengths}")
        use = self.cache.use()
        if (use.sequences, use.tokens) != (len(lengths), sum(lengths)) or use.free + use.used != use.pages:
            self.problems.append(f"{when} {use} is said of {len(lengths)} sequences")

    def as_stored(self, x: Tensor, scale: Tensor | None) -> Tensor:
        if self.stored == self.dtype:
            return x
        return quantized(x.transpose(0, 1), self.stored, scale).transpose(0, 1)

    def shown(self, x: Tensor, scale: Tensor | None) -> Tensor:
        """What attention sees of keys or values (Hkv, tokens, D) that were written."""
        stored = self.as_stored(x, scale)
        return stored if self.stored == self.dtype else stored.double() * (1 if scale is None else scale.view(-1, 1, 1))

    def act(self, action: str) -> None:
        if action == "add" or not self.model:
            self.model[self.cache.add()] = (
                self.random(self.kv, 0, self.dims[0]),
                self.random(self.kv, 0, self.dims[1]),
            )
        elif action == "step":
            self.step()
        elif action == "stale":
            self.stale()
        elif action == "read":
            self.check("read later,")
        else:
            self.change(action, self.r.choice(list(self.model)))

    def change(self, action: str, one: int) -> None:
        k, v = self.model[one]
        if action == "fork":
            self.model[self.cache.fork(one)] = (k, v)
        elif action == "free":
            self.cache.free(one)
            del self.model[one]
        else:
            length = 0 if action == "evict" else self.r.randint(0, k.shape[1])
            self.cache.evict(one) if action == "evict" else self.cache.truncate(one, length)
            self.model[one] = (k[:, :length], v[:, :length])

    def step(self) -> None:
        """Appends tokens to some sequences, and attends."""
        r, model = self.r, self.model
        numbers = r.sample(list(model), r.randint(1, len(model)))
        counts = [1] * len(numbers) if r.random() < 0.5 else [r.choice([0, 1, 1, 1, 3, 5]) for _ in numbers]
        longest = max(model[one][0].shape[1] + count for one, count in zip(numbers, counts, strict=True))
        if not max(counts) or longest > self.cache.max_length:
            return
        same = len(set(counts)) == 1 and self.more.random() < 0.5
        try:
            step = self.cache.reserve(numbers, counts[0] if same else counts, **self.room(len(counts), max(counts)))
        except cudnn_sdpa.OutOfPagesError:
            return
        k, v = (self.random(step.batch, self.kv, step.tokens, dim) for dim in self.dims)
        for layer in range(self.layers):
            self.cache.append(step, *(self.negated(x * (layer + 1)) for x in (k, v)), layer)
        for row, (one, count) in enumerate(zip(numbers, counts, strict=True)):
            old = model[one]
            model[one] = torch.cat([old[0], k[row, :, :count]], 1), torch.cat([old[1], v[row, :, :count]], 1)
        self.steps = [old for old in self.steps if old[0] is not step]
        self.steps.append((step, [one for one, count in zip(numbers, counts, strict=True) if count]))
        self.attend(step, numbers, counts)

    def negated(self, x: Tensor) -> Tensor:
        """The same values, some of them with PyTorch's negative bit."""
        return torch._neg_view(-x) if self.signs.random() < 0.2 else x

    def room(self, batch: int, tokens: int) -> dict[str, Any]:
        """The step for `into=`, if any: a used one with enough room."""
        how = self.more.random()
        if how < 0.7:
            return {}
        used = [step for step, _ in self.steps if step.batch >= batch and step.tokens >= tokens]
        if used and how < 0.85:
            return {"into": used[-1]}
        return {"into": self.cache.new_step(batch + self.more.choice([0, 1]), tokens + self.more.choice([0, 0, 2]))}

    def options(self) -> dict[str, Any]:
        r, options = self.more, {}
        if r.random() < 0.5:
            return options
        options["scale"], options["window_size"] = scale_of(r, self.dims[0]), window_of(r)
        options["is_causal"], options["causal_alignment"] = r.random() < 0.7, r.choice(["bottom_right", "top_left"])
        options["softcap"] = r.choice([None, None, 1.7])
        if r.random() < 0.3:
            options["sinks"] = torch.randn(self.heads, generator=self.generator).to(self.device)
        return options

    def attend(self, step: Any, numbers: list[int], counts: list[int]) -> None:
        """Compares attention of a step's tokens with float64."""
        q, options = self.random(step.batch, self.heads, step.tokens, self.dims[0]), self.options()
        layer, with_lse, more = self.more.randrange(self.layers), self.more.random() < 0.3, {}
        if self.more.random() < 0.2:
            more["out"] = torch.full((*q.shape[:3], self.dims[1]), math.nan, dtype=q.dtype, device=q.device)
        try:
            found = self.cache.attend(step, q, layer, return_lse=with_lse, **more, **options)
        except UnsupportedError as error:
            self.reasons.extend(error.reasons)
            return
        out, lse = found if with_lse else (found, None)
        if "out" in more and out is not more["out"]:
            self.problems.append("attend: the result is not the tensor that was given for it")
        self.compare("attend", (q, out, lse), numbers, counts, (layer, options))
        if min(counts) == step.tokens == 1 and self.more.random() < 0.5:
            self.list_plans(q)

    def list_plans(self, q: Tensor) -> None:
        """Lists the plans of decode steps, which only a GPU has."""
        options: dict[str, Any] = {"scale": self.more.choice([None, 0.37])}
        try:
            self.cache.plans(q, range(1, 3), **self.more.choice([{}, {"tokens": (1, 2)}]), **options)
        except (UnsupportedError, cudnn_sdpa.DeviceError) as error:
            if isinstance(error, cudnn_sdpa.DeviceError) and self.device != "cpu":
                self.problems.append(f"plans: {error}")

    def compare(
        self,
        name: str,
        found: tuple[Tensor, Tensor, Tensor | None],
        numbers: list[int],
        counts: list[int],
        of: tuple[int, dict[str, Any]],
    ) -> None:
        (q, out, lse), (layer, options) = found, of
        given = {"is_causal": True, "causal_alignment": "bottom_right", **options}
        for row, (one, count) in enumerate(zip(numbers, counts, strict=True)):
            written = zip(self.model[one], self.scales, strict=True)
            shown = (self.shown(x * (layer + 1), scale).unsqueeze(0) for x, scale in written)
            part = q[row : row + 1, :, :count], *shown
            made = attention(*part, **given)
            bounds = attention_bounds(made, *part, None, Precision.of(q.dtype), **given)
            self.problems += compared(name, out[row : row + 1, :, :count], made.out, bounds["out"])
            if lse is not None:
                self.problems += compared("lse", lse[row : row + 1, :, :count], made.lse, bounds["lse"])
        present = [*counts, *[0] * (q.shape[0] - len(counts))]
        if any(bool(out[row, :, count:].abs().sum() != 0) for row, count in enumerate(present)):
            self.problems.append(f"{name}: the rows of absent tokens are no zeros")

    def stale(self) -> None:
        """A step of freed sequences must not write into sequences that now own their pages."""
        for step, numbers in self.steps:
            if not all(one in self.model for one in numbers):
                self.steps.clear()
                try:
                    self.cache.append(step, *(self.random(step.batch, self.kv, step.tokens, dim) for dim in self.dims))
                except CudnnSdpaError:
                    self.check(f"after a stale step of {numbers}, which was refused,")
                else:
                    self.problems.append(
                        f"a step of sequences {numbers} was taken when only {list(self.model)} were left"
                    )
                return


@operation
class StaticCache(Operation):
    name = "nn.KVCache"

    def session(self, r: random.Random, seed: int, device: str) -> Outcome:
        actions = ["step", "step", "step", "truncate", "cancel", "reset", "shorten", "read"]
        with torch.no_grad():
            return StaticSession(r, seed, device).run(actions, 10)


class StaticSession(Session):
    """A static cache, and lists of its expected contents."""

    def __init__(self, r: random.Random, seed: int, device: str) -> None:
        super().__init__(r, seed, device)
        self.dtype, self.kv, self.dim = half(r, device), r.choice([1, 2]), r.choice([8, 16, 64])
        self.heads, self.batch, self.layers = self.kv * r.choice([1, 3]), r.choice([1, 2, 3]), r.choice([1, 1, 2])
        sizes: dict[str, Any] = {"batch": self.batch, "heads": self.kv, "head_dim": self.dim}
        sizes |= {"layers": 2} if self.layers == 2 else {}
        self.most = r.choice([1, 5, 20, 40])
        self.cache = cudnn_sdpa.nn.KVCache(**sizes, max_length=self.most, dtype=self.dtype, device=device)
        self.lengths = [0] * self.batch
        self.k, self.v = (torch.zeros(self.batch, self.kv, self.most, self.dim, dtype=F64) for _ in "kv")

    def check(self, when: str) -> None:
        """Compares readable with written values; values past a length do not matter."""
        if self.cache.lengths.tolist() != self.lengths:
            self.problems.append(f"{when} lengths are {self.cache.lengths.tolist()}, not {self.lengths}")
        for layer in range(self.layers):
            for name, found, written in (("k", self.cache.k(layer), self.k), ("v", self.cache.v(layer), self.v)):
                for b, n in enumerate(self.lengths):
                    if not torch.equal(found[b, :, :n].double().cpu(), written[b, :, :n] * (layer + 1)):
                        self.problems.append(f"{when} sequence {b} has other {name} in layer {layer} than were written")

    def act(self, action: str) -> None:
        r = self.r
        if action == "step":
            self.step()
        elif action == "read":
            self.check("read later,")
        elif action == "reset":
            self.cache.reset()
            self.lengths = [0] * self.batch
        elif action == "cancel":
            if max(self.lengths) < self.most:
                self.cache.cancel(self.cache.reserve(1))
        elif action == "truncate":
            keep = [r.randint(0, self.most) for _ in self.lengths]
            self.cache.truncate(sequence(keep, self.device))
            self.lengths = [min(pair) for pair in zip(keep, self.lengths, strict=True)]
        else:
            self.lengths = [r.randint(0, n) for n in self.lengths]
            self.cache.lengths.copy_(sequence(self.lengths, self.device))

    def step(self) -> None:
        """Appends tokens to all sequences, and attends."""
        r, room = self.r, self.most - max(self.lengths)
        tokens = min(room, r.choice([1, 1, 1, 2, 5, 9]))
        if not tokens:
            return
        counts, given = [tokens] * self.batch, {}
        if r.random() < 0.3:
            counts = [r.randint(0, tokens) for _ in counts]
            given = {"seq_lens": sequence(counts, self.device)}
        step = self.cache.reserve(tokens, **given) if tokens > 1 or given or r.random() < 0.5 else self.cache.reserve()
        k, v = (self.random(self.batch, self.kv, tokens, self.dim) for _ in "kv")
        for layer in range(self.layers):
            self.cache.append(step, k * (layer + 1), v * (layer + 1), layer)
        for b, (n, more) in enumerate(zip(self.lengths, counts, strict=True)):
            for written, new in ((self.k, k), (self.v, v)):
                written[b, :, n : n + more] = new[b, :, :more].double().cpu()
        self.lengths = [n + more for n, more in zip(self.lengths, counts, strict=True)]
        self.attend(step, counts)

    def options(self, tokens: int) -> dict[str, Any]:
        r, options = self.r, {}
        if r.random() < 0.5:
            return options
        options["scale"], options["window_size"] = scale_of(r, self.dim), window_of(r)
        if r.random() < 0.3:
            options["softcap"] = 1.7
        if r.random() < 0.3:
            options["sinks"] = torch.randn(self.heads, generator=self.generator).to(self.device)
        if r.random() < 0.3:
            spec = mask_of(r, (self.batch, self.heads, tokens, self.most), self.dtype)
            options["attn_mask"] = spec.make(self.device, self.generator)
            options["is_causal"] = r.random() < 0.3
        return options

    def attend(self, step: Any, counts: list[int]) -> None:
        """Compares attention of a step's tokens with float64."""
        q, options = self.random(self.batch, self.heads, step.tokens, self.dim), self.options(step.tokens)
        layer = self.r.randrange(self.layers)
        try:
            out = self.cache.attend(step, q, layer, **options)
        except UnsupportedError as error:
            self.reasons.extend(error.reasons)
            return
        given = {"is_causal": True, "causal_alignment": "bottom_right", "seq_lens_kv": self.lengths, **options}
        given |= {"seq_lens_q": counts}
        tensors = q.double(), *(x.to(self.device) * (layer + 1) for x in (self.k, self.v))
        made = attention(*tensors, rounds_scores=self.dtype != F64, **given)
        bounds = attention_bounds(made, *tensors, None, Precision.of(self.dtype), **given)
        self.problems += compared("attend", out, made.out, bounds["out"])


# Modules


class Called(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module, how: Callable[..., Tensor]) -> None:
        super().__init__()
        self.inner, self.how = inner, how

    def forward(self, tensors: Tensors, facts: dict[str, Any]) -> Tensor:
        return self.how(self.inner, tensors, facts)


class Module(Operation):
    """A module. Its functions have their own bounds, so a few roundings of the largest value are tolerated here."""

    aligns = True
    #: Number of roundings.
    roundings = 16

    def make(self, options: dict[str, Any], **more: Any) -> torch.nn.Module:
        given = dict(options)
        if given.get("rope") is not None:
            given["rope"] = cudnn_sdpa.nn.RotaryEmbedding(**given["rope"], device=more["device"])
        return getattr(cudnn_sdpa.nn, self.name.removeprefix("nn."))(**given, **more)

    def with_parameters(self, case: Case, dtype: torch.dtype | None = None) -> Case:
        """The call with tensors for all parameters, some of which require grad."""
        tensors, r = dict(case.tensors), random.Random(case.seed)
        module = self.make(case.options, device="meta", dtype=dtype or case.dtype)
        for name, x in module.named_parameters():
            many = math.prod(x.shape[1:]) if x.dim() > 1 else 4
            is_norm = x.dim() == 1 and name.endswith("weight")
            tensors[f"inner.{name}"] = dense(x.shape, x.dtype, scale=1.2 * many**-0.5, shift=0.7 if is_norm else 0.0)
        names = [name for name, spec in tensors.items() if spec.dtype.is_floating_point]
        return replace(case, tensors=tensors, wanted=() if "split" in case.facts else chosen(r, names))

    def before(self, case: Case, tensors: Tensors, options: dict[str, Any]) -> dict[str, Any]:
        facts, x = case.facts, tensors["x"]
        if "module" not in facts:
            parameters = [spec.dtype for name, spec in case.tensors.items() if name.startswith("inner.")]
            dtype = parameters[0] if parameters else case.dtype
            module = self.make(options, device=x.device, dtype=dtype).train(facts.get("training", False))
            facts["module"] = Called(module, self.how)
        facts["made"] = {n: sequence(facts[n], x.device) for n in ("seq_lens", "context_lens") if n in facts}
        if facts.get("positions") is not None:
            facts["made"]["position_ids"] = torch.tensor(facts["positions"], dtype=facts["ints"], device=x.device)
        return {}

    def how(self, module: torch.nn.Module, tensors: Tensors, facts: dict[str, Any]) -> Tensor:
        return module(tensors["x"])

    def call(self, tensors, options, facts):
        parameters = {name: x for name, x in tensors.items() if name.startswith("inner.")}
        return {"out": torch.func.functional_call(facts["module"], parameters, (tensors, facts))}

    def compute(self, case: Case, options: dict[str, Any], leaves: Tensors, known: dict[str, Any]) -> Tensor:
        raise NotImplementedError

    def exact(self, case, options, leaves, known):
        return {"out": self.compute(case, options, leaves, known)}

    def bounds(self, case, options, leaves, grads, known, precision):
        r, most = torch.Generator().manual_seed(case.seed), dict.fromkeys(("out", *leaves), 0.0)
        for flips in (False, True, True):  # what cancels by chance does not where weights have other signs
            inputs = dict(leaves)
            for n, x in leaves.items():
                if x.is_floating_point():
                    signs = torch.randint(2, x.shape, generator=r).to(x.device) * 2 - 1
                    inputs[n] = (x * signs if flips and n.startswith("inner.") else x.clone()).requires_grad_()
            for n, size in self.sizes_of(case, options, inputs, grads, known).items():
                most[n] = max(most[n], size)
        off = self.roundings * precision.unit + 2e-5  # positions and sinks are used in float32
        floor = 0.2 * max((size for n, size in most.items() if n != "out"), default=0.0)
        bounds = {n: off * (size if n == "out" else size + floor) for n, size in most.items()}
        return {n: torch.tensor(size, dtype=F64, device=leaves["x"].device) for n, size in bounds.items()}

    def sizes_of(
        self, case: Case, options: dict[str, Any], inputs: Tensors, grads: Tensors, known: dict[str, Any]
    ) -> dict[str, float]:
        """The largest numbers of the result and of the gradients."""
        with torch.enable_grad():
            out = self.compute(case, options, inputs, known)
        names, found = [n for n, x in inputs.items() if x.requires_grad], ()
        if grads and out.requires_grad:
            given = [inputs[n] for n in names]
            found = torch.autograd.grad(out, given, grads["out"].double(), allow_unused=True)
        sizes = {"out": out, **{n: x for n, x in zip(names, found, strict=False) if x is not None}}
        return {n: float(x.detach().abs().amax()) for n, x in sizes.items() if x.numel()}


def tokens_of(r: random.Random, device: str, features: int, dtype: torch.dtype) -> Spec:
    return drawn(r, (r.choice([1, 1, 2, 3]), size(r, device, large=0.05), features), dtype, expands=0.05, fixed=(2,))


def rope_of(r: random.Random, head_dim: int) -> dict[str, Any]:
    rope: dict[str, Any] = {"head_dim": head_dim}
    if r.random() < 0.4:
        rope["rotary_dim"] = 2 * r.choice([1, max(1, head_dim // 4), max(1, head_dim // 2 - 1)])
    if r.random() < 0.3:
        rope["base"] = r.choice([500, 17.0])
    elif r.random() < 0.3:
        rope["frequencies"] = [round(r.uniform(0.01, 2.0), 3) for _ in range(rope.get("rotary_dim", head_dim) // 2)]
    return rope | ({"interleaved": True} if r.random() < 0.4 else {})


def positions_of(r: random.Random, batch: int, count: int) -> dict[str, Any]:
    how = r.random()
    if how < 0.4:
        return {"positions": None}
    rows = [[r.randint(0, 60) for _ in range(count)] for _ in range(r.choice([1, batch]))]
    facts = {"positions": rows[0] if how < 0.7 else rows, "ints": r.choice([torch.int64, torch.int32])}
    return facts | {"rotations": r.random() < 0.3}


@operation
class RotaryModule(Module):
    name = "nn.RotaryEmbedding"

    def make(self, options, **more):
        return cudnn_sdpa.nn.RotaryEmbedding(**options, device=more["device"])

    def draw(self, r: random.Random, seed: int, device: str) -> Case:
        dtype, dim = fused_dtype(r, device), r.choice([2, 8, 16, 64])
        options = rope_of(r, dim) if dim > 2 else {"head_dim": dim}
        x = drawn(r, (r.choice([1, 2, 3]), size(r, device), r.choice([1, 2, 5]), dim), dtype, expands=0.05)
        facts = {}
        while facts.get("positions") is None:
            facts = positions_of(r, x.shape[0], x.shape[1])
        return self.with_parameters(Case(self.name, seed, dtype, {"x": x}, options, facts=facts))

    def how(self, module, tensors, facts):
        return module.rotate(tensors["x"], module(facts["made"]["position_ids"]))

    def compute(self, case, options, leaves, known):
        given = {n: x for n, x in options.items() if n != "head_dim"}
        return rotated(leaves["x"], torch.tensor(case.facts["positions"], device=leaves["x"].device), **given)


@operation
class RmsNormModule(Module):
    name = "nn.RMSNorm"

    def draw(self, r: random.Random, seed: int, device: str) -> Case:
        dtype, shape = fused_dtype(r, device), rows_of(r, device)
        options: dict[str, Any] = {"normalized_shape": r.choice([shape[-1], (shape[-1],), [shape[-1]]])}
        if r.random() < 0.6:
            options["eps"] = r.choice([1e-5, 0.3, 1])
        if r.random() < 0.25:
            options["elementwise_affine"] = False
        options |= self.more(r)
        tensors = {"x": drawn(r, shape, dtype, scale=1.3)}
        return self.with_parameters(Case(self.name, seed, dtype, tensors, options), r.choice([dtype, F32]))

    def more(self, r: random.Random) -> dict[str, Any]:
        return {"zero_centered": True} if r.random() < 0.3 else {}

    def eps(self, case: Case, options: dict[str, Any]) -> float:
        return options.get("eps", torch.finfo(F64 if case.dtype == F64 else F32).eps)

    def compute(self, case, options, leaves, known):
        centered = {"zero_centered": options.get("zero_centered", False)}
        return rms_norm(leaves["x"], leaves.get("inner.weight"), self.eps(case, options), **centered)[0]

    def bounds(self, case, options, leaves, grads, known, precision):
        weight, centered = leaves.get("inner.weight"), self.name == "nn.LayerNorm"
        weight = weight + 1 if options.get("zero_centered") and weight is not None else weight
        given = leaves["x"], weight, leaves.get("inner.bias"), self.eps(case, options), grads.get("out"), precision
        found = norm_bounds(*given, centered=centered)
        return found | {f"inner.{name}": found[name] for name in ("weight", "bias") if name in found}


@operation
class LayerNormModule(RmsNormModule):
    name = "nn.LayerNorm"

    def more(self, r: random.Random) -> dict[str, Any]:
        return super().more(r) | ({"bias": False} if r.random() < 0.3 else {})

    def compute(self, case, options, leaves, known):
        weights = leaves.get("inner.weight"), leaves.get("inner.bias")
        centered = {"zero_centered": options.get("zero_centered", False)}
        return layer_norm(leaves["x"], *weights, self.eps(case, options), **centered)[0]

    def eps(self, case, options):
        return options.get("eps", 1e-5)


@operation
class PatchModule(Module):
    name = "nn.PatchEmbed"

    def draw(self, r: random.Random, seed: int, device: str) -> Case:
        dtype, size = fused_dtype(r, device), (r.choice([1, 2, 4, 7]), r.choice([1, 2, 4]))
        channels, features = r.choice([1, 3, 8]), r.choice([1, 8, 24])
        options: dict[str, Any] = {"patch_size": r.choice([size, size[:1] * 2, size[0]]), "embed_dim": features}
        size = size[:1] * 2 if options["patch_size"] != size else size
        if channels != 3 or r.random() < 0.3:
            options["in_channels"] = channels
        if r.random() < 0.4:
            options["bias"] = False
        counts = r.choice([1, 1, 2, 3]), r.choice([1, 2, 3])
        shape = r.choice([1, 2, 3]), channels, counts[0] * size[0], counts[1] * size[1]
        tensors = {"x": drawn(r, shape, dtype, scale=1.3)}
        return self.with_parameters(Case(self.name, seed, dtype, tensors, options, facts={"size": size}))

    def compute(self, case, options, leaves, known):
        return patches(leaves["x"], parameters_of(leaves, "inner"), case.facts["size"])


def dropped(shape: tuple[int, ...], p: float, dtype: torch.dtype, device: Any) -> Tensor:
    """The next factors of PyTorch's dropout; advances the generator."""
    return (torch.nn.functional.dropout(torch.ones(shape, dtype=dtype, device=device), p) > 0).double() / (1 - p)


@contextlib.contextmanager
def undrawn(device: torch.device) -> Iterator[None]:
    with torch.random.fork_rng([device.index or 0] if device.type == "cuda" else []):
        yield


@operation
class SwiGluModule(Module):
    name = "nn.SwiGLU"

    def draw(self, r: random.Random, seed: int, device: str) -> Case:
        dtype, unit = fused_dtype(r, device), 8 if device != "cpu" else 1
        options: dict[str, Any] = {"embed_dim": r.choice([1, 5, 8, 24]), "hidden_dim": unit * r.choice([1, 3, 16])}
        if r.random() < 0.5:
            options["bias"] = True
        tensors = {"x": tokens_of(r, device, options["embed_dim"], dtype)}
        return self.with_parameters(Case(self.name, seed, dtype, tensors, options | packed_of(self.name, seed)))

    def compute(self, case, options, leaves, known):
        return feed_forward(leaves["x"], parameters_of(leaves, "inner"), "swiglu")


def packed_of(name: str, seed: int) -> dict[str, Any]:
    """Whether projections that read the same tokens are one."""
    r = later(f"packed {name}", seed)
    return {"packed": r.random() < 0.2} if r.random() < 0.4 else {}


def activation_of(r: random.Random, dtype: torch.dtype) -> str:
    """An activation without a gate; the gradient of ReLU is discontinuous, which matters if roundings are large."""
    return r.choice(["gelu", "gelu_tanh", "silu", *(["relu"] if dtype in (F32, F64) else [])])


@operation
class FeedForwardModule(Module):
    name = "nn.FeedForward"

    def draw(self, r: random.Random, seed: int, device: str) -> Case:
        dtype = fused_dtype(r, device)
        options: dict[str, Any] = {"embed_dim": r.choice([1, 5, 8, 24]), "hidden_dim": r.choice([1, 3, 16, 40])}
        if r.random() < 0.7:
            options["activation"] = activation_of(r, dtype)
        if r.random() < 0.4:
            options["bias"] = False
        if r.random() < 0.5:
            options["dropout"] = r.choice([0.1, 0.6])
        tensors, facts = {"x": tokens_of(r, device, options["embed_dim"], dtype)}, {}
        facts["training"] = device == "cpu" and r.random() < 0.6
        return self.with_parameters(Case(self.name, seed, dtype, tensors, options, facts=facts))

    def before(self, case, tensors, options):
        super().before(case, tensors, options)
        x, p = tensors["x"], options.get("dropout", 0.0)
        if not (p and case.facts["training"]):
            return {}
        with undrawn(x.device):
            return {"share": dropped((*x.shape[:2], options["hidden_dim"]), p, x.dtype, x.device)}

    def compute(self, case, options, leaves, known):
        share, activation = known.get("share", 1.0), options.get("activation", "gelu")
        return feed_forward(leaves["x"], parameters_of(leaves, "inner"), activation, share)


@operation
class AttentionModule(Module):
    name = "nn.Attention"
    casts = ("x", "context")

    def sizes(self, r: random.Random, *, unlimited: bool) -> tuple[tuple[int, int], int, dict[str, Any]]:
        """Numbers of query and key heads, features, and the options for them."""
        kv, dim = r.choice([1, 1, 2, 3]), r.choice([2, 5, 12] if unlimited else [8, 8, 16, 24, 64])
        heads = kv * r.choice([1, 2, 3])
        features = r.choice([heads * dim] * 3 + [8, 40, 17])
        options: dict[str, Any] = {"num_heads": heads}
        options |= {"num_kv_heads": kv} if kv != heads or r.random() < 0.3 else {}
        options |= {"head_dim": dim} if features != heads * dim or r.random() < 0.3 else {}
        options |= {"qkv_bias": r.choice([True, False])} if r.random() < 0.4 else {}
        options |= {"scale": r.choice([0.3, -0.2, 0.125, 1])} if r.random() < 0.4 else {}
        options |= {"softcap": r.choice([1.7, 30.3])} if r.random() < 0.15 else {}
        options |= {"sinks": True} if r.random() < 0.3 else {}
        return (heads, kv), features, {**options, "dim": dim}

    def self_attention(self, r: random.Random, dim: int) -> dict[str, Any]:
        options: dict[str, Any] = {"is_causal": True} if r.random() < 0.6 else {}
        if r.random() < 0.4:
            options["window_size"] = window_of(r)
        if r.random() < 0.4 and dim % 2 == 0:
            options["rope"] = rope_of(r, dim)
        if r.random() < 0.25:
            options["qk_norm"] = r.choice([1e-6, 0.01])
        return options

    def arguments(self, r: random.Random, case: Case, skv: int, heads: int) -> Case:
        """The call with all arguments besides its tokens."""
        tensors, facts, (batch, sq, _) = dict(case.tensors), dict(case.facts), case.tensors["x"].shape
        options, single = case.options, "context" not in tensors
        if single and options.get("is_causal") and not case.facts["training"] and r.random() < 0.4:
            parts, left = [], sq
            while left:
                parts.append(r.randint(1, left))
                left -= parts[-1]
            facts |= {"split": parts, "paged": r.random() < 0.5 and facts["dim"] % 8 == 0, "layer": r.choice([0, 1])}
            return replace(case, facts=facts | {"positions": None})
        if r.random() < 0.4:
            mask = tensors["attn_mask"] = mask_of(r, (batch, heads, sq, skv), case.dtype)
            if mask.values.filler == -1e4:  # beside it, float32 rounds scores to thousandths
                tensors["attn_mask"] = replace(mask, values=replace(mask.values, filler=-1e9))
        facts |= {"seq_lens": lengths_of(r, batch, sq)} if r.random() < 0.3 else {}
        facts |= {"context_lens": lengths_of(r, batch, skv)} if not single and r.random() < 0.4 else {}
        facts |= positions_of(r, batch, sq) if options.get("rope") else {}
        return replace(case, tensors=tensors, facts=facts)

    def draw(self, r: random.Random, seed: int, device: str) -> Case:
        dtype, unlimited = half(r, device), is_unlimited(r, device)
        heads, features, options = self.sizes(r, unlimited=unlimited)
        facts: dict[str, Any] = {"heads": heads, "dim": options.pop("dim"), "training": r.random() < 0.4}
        options = {"embed_dim": features, **options, "bias": r.random() < 0.5}
        tensors = {"x": tokens_of(r, device, features, dtype)}
        batch, skv, _ = tensors["x"].shape
        if r.random() < 0.25:
            options["context_dim"], skv = r.choice([features, 5, 24]), keys_for(r, device, skv)
            tensors["context"] = drawn(r, (batch, skv, options["context_dim"]), dtype, expands=0.05)
            facts["projected"] = r.random() < 0.4
        else:
            options |= self.self_attention(r, facts["dim"])
        if r.random() < 0.3:
            options["dropout"] = r.choice([0.1, 0.6])
        options |= packed_of(self.name, seed)
        case = Case(self.name, seed, dtype, tensors, options, facts=facts, settings=UNCHECKED if unlimited else {})
        return self.with_parameters(self.arguments(r, case, skv, heads[0]))

    def before(self, case, tensors, options):
        super().before(case, tensors, options)
        return {"kept": self.kept(case, tensors, options)} if self.drops(case, options) else {}

    def drops(self, case: Case, options: dict[str, Any]) -> bool:
        return bool(options.get("dropout") and case.facts["training"])

    def kept(self, case: Case, tensors: Tensors, options: dict[str, Any]) -> Tensor:
        x, facts = tensors["x"], case.facts
        (heads, kv), dim, skv = facts["heads"], facts["dim"], tensors.get("context", x).shape[1]
        q, k = x.new_zeros(x.shape[0], heads, x.shape[1], dim), x.new_zeros(x.shape[0], kv, skv, dim)
        same = {n: options[n] for n in ("is_causal", "window_size") if n in options and x.is_cuda}
        same = {} if "seq_lens" in facts or "context_lens" in facts else same
        same |= {"attn_mask": neutral(tensors["attn_mask"])} if "attn_mask" in tensors and x.is_cuda else {}

        def attend(unit: Tensor) -> Tensor:
            with torch.no_grad():
                return cudnn_sdpa.sdpa(q, k, unit, dropout_p=options["dropout"], **same)

        return kept(k, torch.arange(skv, device=x.device), attend)

    def how(self, module, tensors, facts):
        given, context = dict(facts["made"]), tensors.get("context")
        if "split" in facts:
            return self.in_steps(module, tensors["x"], facts)
        if "attn_mask" in tensors:
            given["attn_mask"] = tensors["attn_mask"]
        if facts.get("rotations"):
            given["rotations"] = self.attention_of(module).rope(given["position_ids"])
        if context is None:
            return module(tensors["x"], **given)
        return module(tensors["x"], module.project_context(context) if facts["projected"] else context, **given)

    def attention_of(self, module: Any) -> Any:
        return module

    def in_steps(self, module: Any, x: Tensor, facts: dict[str, Any]) -> Tensor:
        """The results for tokens passed in several steps, with a KV cache."""
        sizes: dict[str, Any] = {"heads": facts["heads"][1], "head_dim": facts["dim"], "layers": 2}
        sizes |= {"dtype": x.dtype, "device": x.device}
        parts = []
        if facts["paged"]:
            pages = x.shape[0] * (-(-x.shape[1] // 4))
            paged = cudnn_sdpa.PagedKVCache(pages=pages, page_size=4, **sizes)
            sequences = [paged.add() for _ in range(x.shape[0])]
        else:
            cache = cudnn_sdpa.nn.KVCache(batch=x.shape[0], max_length=x.shape[1] + 1, **sizes)
        for tokens in x.split(facts["split"], 1):
            count = tokens.shape[1]
            step = paged.reserve(sequences, count) if facts["paged"] else cache.reserve(count)
            parts.append(module(tokens, step=step, layer=facts["layer"]))
            if not facts["paged"]:  # whose next step requires keys of all layers
                others = tokens.new_full((x.shape[0], sizes["heads"], count, sizes["head_dim"]), math.nan)
                cache.append(step, others, others, 1 - facts["layer"])
        return torch.cat(parts, 1)

    def given(self, case: Case, options: dict[str, Any], leaves: Tensors, known: dict[str, Any]) -> dict[str, Any]:
        names = ("is_causal", "window_size", "scale", "softcap")
        given, facts = {n: options[n] for n in names if n in options}, case.facts
        given["rounds_scores"] = rounds_scores(case)
        x, rope = leaves["x"], options.get("rope")
        lengths = {"seq_lens_q": facts.get("seq_lens")}
        lengths["seq_lens_kv"] = facts.get("context_lens") if "context" in leaves else facts.get("seq_lens")
        given |= {n: lens for n, lens in lengths.items() if lens is not None}
        given |= {"attn_mask": leaves["attn_mask"]} if "attn_mask" in leaves else {}
        given |= {"qk_norm": options["qk_norm"]} if "qk_norm" in options else {}
        if rope is not None:
            given["rope"] = {n: value for n, value in rope.items() if n != "head_dim"}
            positions = list(range(x.shape[1])) if facts["positions"] is None else facts["positions"]
            given["positions"] = torch.tensor(positions, device=x.device)
        if "kept" in known:
            given |= {"kept": known["kept"], "dropout_p": options["dropout"]}
        return given

    def bounds(self, case, options, leaves, grads, known, precision):
        bounds = super().bounds(case, options, leaves, grads, known, precision)
        is_lost = leaves["x"].is_cuda and self.hides_rows(case, options, leaves, known)
        return {n: torch.full_like(x, math.inf) if is_lost else x for n, x in bounds.items()}

    def hides_rows(self, case: Case, options: dict[str, Any], leaves: Tensors, known: dict[str, Any]) -> bool:
        """Whether a query sees only keys with a large negative mask: float32 scores and LSEs have no digits left."""
        if "attn_mask" not in leaves or not leaves["attn_mask"].is_floating_point():
            return False
        given, mask = self.given(case, options, leaves, known), leaves["attn_mask"].detach()
        batch, sq, _ = leaves["x"].shape
        skv = leaves.get("context", leaves["x"]).shape[1]
        seen = seen_keys(batch, sq, skv, given, mask.device) & ~mask.isneginf()
        return bool((seen.any(-1) & ~(seen & (mask > -1e4)).any(-1)).any())

    def compute(self, case, options, leaves, known):
        given = self.given(case, options, leaves, known)
        heads, p = case.facts["heads"], parameters_of(leaves, "inner")
        return multi_head_attention(leaves["x"], p, heads, context=leaves.get("context"), **given)


@operation
class LayerModule(AttentionModule):
    name = "nn.TransformerLayer"
    roundings = 48
    casts = ()

    def draw(self, r: random.Random, seed: int, device: str) -> Case:
        dtype, unlimited = half(r, device), is_unlimited(r, device)
        heads, features, options = self.sizes(r, unlimited=unlimited)
        facts: dict[str, Any] = {"heads": heads, "dim": options.pop("dim")}
        facts["training"] = device == "cpu" and r.random() < 0.4
        options = {"embed_dim": features, **options, "ffn_dim": r.choice([8, 24, 40])}
        options |= self.self_attention(r, facts["dim"]) | self.parts(r, dtype)
        if r.random() < 0.3:
            options["norm_first"] = False
        options |= packed_of(self.name, seed)
        tensors = {"x": tokens_of(r, device, features, dtype)}
        case = Case(self.name, seed, dtype, tensors, options, facts=facts, settings=UNCHECKED if unlimited else {})
        return self.with_parameters(self.arguments(r, case, tensors["x"].shape[1], heads[0]))

    def parts(self, r: random.Random, dtype: torch.dtype) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if r.random() < 0.5:
            options["norm"] = r.choice(["rms_norm", "layer_norm"])
        if r.random() < 0.5:
            options["activation"] = r.choice(["swiglu", activation_of(r, dtype)])
        if r.random() < 0.4:
            options["norm_eps"] = r.choice([1e-4, 0.3])
        if r.random() < 0.4:
            options["bias"] = r.choice([True, False])
        return options | ({"dropout": r.choice([0.1, 0.6])} if r.random() < 0.3 else {})

    def before(self, case, tensors, options):
        known = super().before(case, tensors, options)
        if not self.drops(case, options):
            return known
        x, p = tensors["x"], options["dropout"]
        with undrawn(x.device):
            torch.randint(2**62, (2,), device=x.device)  # as attention does
            shares = [dropped(tuple(x.shape), p, x.dtype, x.device), 1.0]
            if options.get("activation", "swiglu") != "swiglu":
                shares[1] = dropped((*x.shape[:2], options["ffn_dim"]), p, x.dtype, x.device)
            return {**known, "shares": (*shares, dropped(tuple(x.shape), p, x.dtype, x.device))}

    def attention_of(self, module):
        return module.self_attn

    def compute(self, case, options, leaves, known):
        norm = options.get("norm", "rms_norm")
        given = self.given(case, options, leaves, known) | {"norm": norm}
        given["norm_eps"] = options.get("norm_eps", 1e-6 if norm == "rms_norm" else 1e-5)
        given |= {n: options.get(n, usual) for n, usual in (("norm_first", True), ("activation", "swiglu"))}
        given |= {"shares": known["shares"]} if "shares" in known else {}
        return transformer_layer(leaves["x"], parameters_of(leaves, "inner"), case.facts["heads"], **given)


@operation
class VisionModule(LayerModule):
    name = "nn.VisionEncoder"
    roundings = 96

    def draw(self, r: random.Random, seed: int, device: str) -> Case:
        dtype, unlimited = half(r, device), is_unlimited(r, device)
        heads, _, options = self.sizes(r, unlimited=unlimited)
        dim, patch = options.pop("dim"), (r.choice([1, 2, 4]), r.choice([1, 2, 4]))
        options.pop("head_dim", None)
        image = patch[0] * r.choice([1, 2, 3]), patch[1] * r.choice([1, 2, 3])
        options = {"image_size": image, "patch_size": patch, "embed_dim": heads[0] * dim, **options}
        if r.random() < 0.3:
            options |= {"image_size": 4, "patch_size": r.choice([1, 2, 4])}
            image, patch = (4, 4), (options["patch_size"],) * 2
        options |= {"num_layers": r.choice([1, 2]), **self.parts(r, dtype)}
        for name, values, share in (
            ("ffn_dim", [8, 40], 0.5),
            ("in_channels", [1, 8], 0.5),
            ("class_token", [False], 0.3),
        ):
            options |= {name: r.choice(values)} if r.random() < share else {}
        facts = {"heads": heads, "dim": dim, "training": False, "patch": patch}
        tensors = {"x": drawn(r, (r.choice([1, 2]), options.get("in_channels", 3), *image), dtype, scale=1.3)}
        case = Case(self.name, seed, dtype, tensors, options, facts=facts, settings=UNCHECKED if unlimited else {})
        return self.with_parameters(case)

    def how(self, module, tensors, facts):
        return module(tensors["x"])

    def compute(self, case, options, leaves, known):
        given = self.given(case, options, leaves, known)
        usual = {"norm": "layer_norm", "norm_eps": 1e-6, "activation": "gelu"}
        given |= {name: options.get(name, value) for name, value in usual.items()}
        sizes = case.facts["patch"], options["num_layers"], case.facts["heads"]
        return vision_encoder(leaves["x"], parameters_of(leaves, "inner"), *sizes, **given)


# How a call is run, and compared


def compared(name: str, actual: Tensor, exact: Tensor, bound: Tensor) -> list[str]:
    if actual.shape != exact.shape:
        return [f"{name} has shape {tuple(actual.shape)} instead of {tuple(exact.shape)}"]
    info = torch.finfo(actual.dtype)
    rounding = info.eps if actual.dtype != F64 else 0.0
    tiny = info.smallest_normal * (info.eps if actual.dtype == F16 else 1.0)  # elsewhere GPUs flush smaller values
    actual, exact, bound = (x.detach().double() for x in (actual, exact, bound.expand(exact.shape)))
    if not actual.numel():
        return []
    limit = MARGIN * bound + rounding * exact.abs() + tiny
    ok = ((actual - exact).abs() <= limit) | (actual == exact)
    if bool(ok.all()):
        return []
    where = [int(i) for i in (~ok).nonzero()[0]]
    at = tuple(where)
    off = float(((actual - exact).norm() / exact.norm().clamp_min(1e-30)).nan_to_num(nan=math.inf))
    example = f"{float(actual[at]):.6g} instead of {float(exact[at]):.6g} ± {float(limit[at]):.1e}"
    return [f"{name}: {int((~ok).sum())} of {ok.numel()} off, first at {where}: {example}; in the norm {off:.1e}"]


def with_left_window(r: random.Random, case: Case) -> Case:
    """A call with lengths, in some cases with a bottom-right window without a right bound, which is rare otherwise."""
    has_lengths = {"seq_lens_q", "seq_lens_kv", "kv", "of_kv"} & case.facts.keys()
    has_masks = {"window_size", "causal_alignment", "is_causal"} <= case.options.keys()
    is_fixed = case.options.get("alibi") or "bias" in case.facts
    if not has_lengths or not has_masks or is_fixed or r.random() >= 0.15:
        return case
    window = {"window_size": (r.choice([0, 1, 3, 9, 40]), -1), "causal_alignment": "bottom_right", "is_causal": False}
    return replace(case, options=case.options | window)


def draw(name: str, seed: int, device: str = "cpu") -> Case:
    op = OPERATIONS[name]
    r = random.Random(zlib.crc32(f"{name} {seed}".encode()))
    case = with_left_window(later(f"left windows of {name}", seed), op.draw(r, seed, device))
    mode = r.choice(["eager"] * 30 + ["checkpoint", "autocast"])
    if seed % 25 == 13:
        mode = "inductor" if seed % 500 == 263 else "aot_eager"
    if mode == "inductor" and any(spec.layout.negative for spec in case.tensors.values()):
        mode = "aot_eager"  # Inductor ignores the negative bit of inputs and of gradients, whatever the function
    more = later(f"mode of {name}", seed)
    if not op.modes or {"bias", "split"} & case.facts.keys():
        mode = "eager"
    drops = case.options.get("dropout_p") or (case.options.get("dropout") and case.facts["training"])
    if drops and (
        mode in ("inductor", "autocast") or device == "cuda" or (isinstance(op, Module) and mode == "aot_eager")
    ):
        mode = "eager"  # compiled code draws other random numbers than the run that reads the mask
    if mode == "autocast" and not (op.casts and case.dtype in (BF16, F16)):
        mode = "eager"
    if mode == "autocast":
        given = {n: replace(s, dtype=F32) if n in op.casts and r.random() < 0.7 else s for n, s in case.tensors.items()}
        case = replace(case, tensors=given)
    if mode == "checkpoint" and not case.wanted:
        mode = "eager"
    if device == "cuda" and op.aligns:
        case = with_alignment(r, case)
    if isinstance(op, Attention) and op.takes_out and mode in ("eager", "aot_eager", "inductor") and seed % 2:
        elsewhere = mode == "eager" and more.random() < 0.4
        case = replace(case, facts=case.facts | {"into": op.anywhere(more, case) if elsewhere else True})
    third = r.choice(THIRD)
    third = "no_grad" if third == "create_graph" and not op.has_graph_of_gradients else third
    varied = case.varied or {n: case.options[n] * 1.37 for n in op.data if 0 < abs(case.options.get(n) or 0) < 47e3}
    policy = r.choice(["exact"] * 9 + ["bucketed"])
    grad = r.choice(GRADIENTS)
    grad = "dense" if mode == "inductor" and grad == "negative" else grad
    policy = "tiered" if policy == "exact" and more.random() < 0.1 else policy
    settings = case.settings or settings_of(more, case, device)
    if device == "cpu" and op.aligns and not is_aligned(case):
        if later(f"alignment of {name}", seed).random() < 0.2:
            case = replace(case, refusable=case.refusable or MISALIGNED)
        else:
            settings = {**settings, **UNCHECKED}
    return replace(case, mode=mode, third=third, varied=varied, policy=policy, grad=grad, settings=settings)


#: Operations for which there are kernels of several providers.
BY_PROVIDERS = (
    *("sdpa", "scaled_dot_product_attention", "sdpa_varlen", "sdpa_paged", "sdpa_paged_varlen"),
    *("sdpa_backward", "sdpa_varlen_backward"),
)


def settings_of(r: random.Random, case: Case, device: str) -> dict[str, Any]:
    """Settings besides the shape policy, mostly none."""
    how = r.random()
    if how < 0.1 and device == "cpu":
        return {"cpu_checks": r.choice([None, None, "a100,any-dtype", "b200,any-dtype", "none"])}
    if (
        0.1 <= how < 0.14 and not {"dropout_p", "dropout"} & case.options.keys()
    ):  # PyTorch's dropout draws other random numbers
        return {"fallback": "torch"}
    other = later("providers", case.seed)
    if case.operation in BY_PROVIDERS and other.random() < 0.08:
        return {
            "providers": other.choice(
                [("own", "cudnn"), ("cudnn", "own"), ("own", "fastest"), ("fa4", "cudnn"), ("fastest",)]
            )
        }
    is_attention = isinstance(OPERATIONS[case.operation], Attention)
    return {"deterministic": True} if how > 0.96 and (is_attention or device == "cpu") else {}


@contextlib.contextmanager
def in_force(settings: dict[str, Any]) -> Iterator[None]:
    """Applies the settings while a call runs three times."""
    with contextlib.ExitStack() as stack:
        if "cpu_checks" in settings:
            stack.enter_context(cudnn_sdpa.cpu_checks(settings["cpu_checks"]))
        if "fallback" in settings:
            stack.enter_context(cudnn_sdpa.fallback(settings["fallback"]))
        if "providers" in settings:
            stack.enter_context(cudnn_sdpa.providers(*settings["providers"]))
        yield


@contextlib.contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Sets PyTorch's setting while a call runs; float64 on GPUs would be refused."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def with_alignment(r: random.Random, case: Case) -> Case:
    """The call with mostly aligned tensors (16 bytes); with misaligned ones it may be refused."""
    tensors = dict(case.tensors)
    for name, spec in tensors.items():
        if r.random() < 0.9:
            tensors[name] = aligned(spec)
    case = replace(case, tensors=tensors)
    return replace(case, refusable=case.refusable or "" if is_aligned(case) else MISALIGNED)


MISALIGNED = "memory that is not aligned"


def is_aligned(case: Case) -> bool:
    """Whether all tensors, and their parts, begin at multiples of 16 bytes."""
    size = case.dtype.itemsize
    if case.operation == "nn.SwiGLU" and case.options.get("packed", True) and case.options["hidden_dim"] * size % 16:
        return False
    if case.facts.get("form", "two") != "two" and case.tensors["both"].shape[-1] // 2 * size % 16:
        return False
    if "split" in case.facts and case.tensors["x"].make("meta").stride(-2) * size % 16:  # where a part begins
        return False
    return all(spec == aligned(spec) for spec in case.tensors.values())


def poison(*shapes: tuple[tuple[int, ...], torch.dtype]) -> None:
    """Fills the allocator's next blocks with NaN."""
    blocks = [
        torch.full((math.prod(shape) * d.itemsize,), 0xFF, dtype=torch.uint8, device="cuda") for shape, d in shapes
    ]
    del blocks


class WrongError(Exception):
    """An error other than a wrong value."""


MODES: dict[str, Callable[[], Any]] = {"no_grad": torch.no_grad, "inference": torch.inference_mode}


class Run:
    def __init__(self, case: Case, device: str) -> None:
        self.case, self.device, self.op = case, device, OPERATIONS[case.operation]
        self.generator = torch.Generator().manual_seed(zlib.crc32(f"numbers {case.operation} {case.seed}".encode()))
        self.compiled: Any = None

    def tensors(self, wanted: tuple[str, ...]) -> Tensors:
        """Fresh tensors; those that require grad are leaves."""
        made = {}
        for name, spec in self.case.tensors.items():
            tensor = spec.make(self.device, self.generator).detach()
            made[name] = tensor.requires_grad_() if name in wanted else tensor
        if isinstance(self.op, Sdpa):
            facts, lead = self.case.facts, self.case.facts.get("lead", 0)
            made |= {n: sequence(x, self.device, lead) for n, x in facts.items() if n.startswith("seq_lens")}
        if isinstance(self.op, Varlen):
            self.case.facts["offsets"] = self.op._offsets(self.case.facts, self.device)
        return made

    def function(self, tensors: Tensors, options: dict[str, Any]) -> Tensors:
        """Runs the operation in the mode of the case."""
        mode, facts = self.case.mode, self.case.facts
        if mode in ("aot_eager", "inductor"):
            if self.compiled is None:
                torch._dynamo.reset()
                full = not self.op.has_graph_break
                self.compiled = torch.compile(self.op.call, backend=mode, fullgraph=full)
            return self.compiled(tensors, options, facts)
        if mode == "checkpoint":
            try:
                return checkpoint(lambda t: self.op.call(t, options, facts), tensors, use_reentrant=False)
            except Exception as error:
                # Its hooks stay active while its frame lives: later gradients would recompute this call.
                traceback.clear_frames(error.__traceback__)
                raise
        if mode == "autocast":
            with torch.autocast(self.device, dtype=self.case.dtype):
                return self.op.call(tensors, options, facts)
        return self.op.call(tensors, options, facts)

    def once(self, step: str, wanted: tuple[str, ...]) -> list[str]:
        """Errors of one run; raises what the operation raises."""
        case = self.case
        options = case.options | (case.varied if step == "options" else {})
        tensors = self.tensors(wanted)
        grads_on = step not in ("no_grad", "inference")
        torch.manual_seed(zlib.crc32(f"dropout {case.seed}".encode()))
        known = self.op.before(case, tensors, options)
        if self.device == "cuda":
            shapes = [(tuple(x.shape), x.dtype) for x in tensors.values()] * 2
            poison(*shapes, *((tuple(x.shape[:-1]), F32) for x in tensors.values() if x.dim() > 1))
        switch = deterministic_algorithms if "deterministic" in case.settings else contextlib.nullcontext
        with MODES.get(step, contextlib.nullcontext)(), switch():
            found = self.function(tensors, options)
        leaves = self.leaves(tensors, wanted)
        with torch.enable_grad():
            exact = self.op.exact(case, options, leaves, known)
        problems = list(self.shapes(found, exact))
        results = {n: x for n, x in found.items() if n in exact and exact[n].requires_grad and x.requires_grad}
        if grads_on and wanted and not results and any(x.requires_grad for x in exact.values()):
            problems.append("the results require no grad, though inputs do")
        gradients: Tensors = {}
        grads: Tensors = {}
        if grads_on and results:
            gradients, grads, more = self.gradients(step, wanted, tensors, leaves, results, exact)
            problems += more
        double = {name: x.detach() if x.is_floating_point() else x for name, x in leaves.items()}
        precision = Precision.of(
            case.dtype if case.dtype not in HALF_A_ULP else F32,
            tf32=self.device == "cuda" and isinstance(self.op, (Conv, PatchModule)),
        )
        with torch.no_grad():
            bounds = self.op.bounds(case, options, double, grads, known, precision)
        for name, actual in found.items():
            problems += compared(name, actual, exact[name], bounds[name])
        if gradients:
            problems += self.wrong_gradients(wanted, leaves, {n: exact[n] for n in results}, grads, gradients, bounds)
        problems += self.op.check_places(
            case, tensors, found, gradients if case.mode == "eager" and step != "backward" else {}
        )
        return [f"{step}: {problem}" for problem in problems]

    def wrong_gradients(
        self,
        wanted: tuple[str, ...],
        leaves: Tensors,
        exact: Tensors,
        grads: Tensors,
        gradients: Tensors,
        bounds: Tensors,
    ) -> list[str]:
        given, problems = [grads[name].double() for name in exact], []
        true = torch.autograd.grad(list(exact.values()), [leaves[n] for n in wanted], given, allow_unused=True)
        for name, found in zip(wanted, true, strict=True):
            expected = torch.zeros_like(leaves[name]) if found is None else found
            if name in gradients:
                bound = bounds[name]
                if self.case.mode == "autocast" and name in self.op.casts:  # rounded before its cast to float32
                    bound = bound + torch.finfo(self.case.dtype).eps * expected.abs()
                problems += compared(f"grad {name}", gradients[name], expected, bound)
            elif expected.abs().sum() != 0:
                problems.append(f"grad {name} is None")
        return problems

    def leaves(self, tensors: Tensors, wanted: tuple[str, ...]) -> Tensors:
        """The same values in float64, as separate leaves."""
        made = {}
        for name, tensor in tensors.items():
            made[name] = tensor.detach()
            if tensor.is_floating_point() or tensor.dtype in HALF_A_ULP:
                if self.case.mode == "autocast" and name in (*self.op.casts, "attn_mask"):
                    made[name] = made[name].to(self.case.dtype)
                made[name] = made[name].double().clone().requires_grad_(name in wanted)
        return made

    def shapes(self, found: Tensors, exact: Tensors) -> Iterator[str]:
        for name, x in found.items():
            wide = name == "lse" or name.startswith("amax")
            dtype = (
                F32
                if wide
                else self.case.options.get("out_dtype") or self.case.facts.get("grad_dtype") or self.case.dtype
            )
            if x.dtype != dtype:
                yield f"{name} is {x.dtype} instead of {dtype}"
            if x.device.type != self.device:
                yield f"{name} is on {x.device}"
            if name in exact and x.shape != exact[name].shape:
                raise WrongError(f"{name} has shape {tuple(x.shape)} instead of {tuple(exact[name].shape)}")

    def gradients(
        self, step: str, wanted: tuple[str, ...], tensors: Tensors, leaves: Tensors, results: Tensors, exact: Tensors
    ) -> tuple[Tensors, Tensors, list[str]]:
        kind = self.case.grad
        grads = {name: gradient_like(kind, x, self.generator) for name, x in results.items()}
        if self.device == "cuda":
            poison(*((tuple(tensors[n].shape), tensors[n].dtype) for n in wanted))
        inputs, problems = [tensors[name] for name in wanted], []
        create = step == "create_graph"
        if step == "backward":
            torch.autograd.backward(list(results.values()), list(grads.values()))
            made = [x.grad for x in inputs]
        else:
            made = torch.autograd.grad(
                list(results.values()), inputs, list(grads.values()), create_graph=create, allow_unused=True
            )
        gradients = {name: x for name, x in zip(wanted, made, strict=True) if x is not None}
        for name, x in gradients.items():
            if x.shape != tensors[name].shape or x.dtype != tensors[name].dtype or x.device != tensors[name].device:
                problems.append(f"grad {name} is {x.dtype}{list(x.shape)} on {x.device}")
        if create:
            problems += self.second(wanted, tensors, leaves, results, exact, grads, gradients)
        dense = {name: x.detach().clone() if kind == "zero tensor" else x for name, x in grads.items()}
        return {name: x.detach() for name, x in gradients.items()}, dense, problems

    def second(self, wanted, tensors, leaves, results, exact, grads, gradients) -> list[str]:
        """Errors of double backward, which must be right or raise."""
        targets, given = [exact[name] for name in results], [grads[name].double() for name in results]
        inputs = [leaves[name] for name in wanted]
        true = torch.autograd.grad(targets, inputs, given, create_graph=True, allow_unused=True)
        of = {name: x for name, x in zip(wanted, true, strict=True) if x is not None and x.requires_grad}
        lost = [name for name in of if name in gradients and not gradients[name].requires_grad]
        drops = self.case.mode in ("aot_eager", "inductor") and pytorch_drops_graphs()
        if lost:
            if all(not bool(of[name].abs().sum()) for name in lost):
                return []
            if drops:
                return []
            return [f"the gradient of {', '.join(lost)} has no graph, though one was asked for (create_graph=True)"]
        names = [name for name in of if name in gradients]
        if not names:
            return []
        weights = {
            name: torch.randn(of[name].shape, generator=self.generator, dtype=F64).to(self.device) for name in names
        }
        exact_sum = sum((of[name] * weights[name]).sum() for name in names)
        found_sum = sum((gradients[name].double() * weights[name]).sum() for name in names)
        found = torch.autograd.grad(found_sum, [tensors[name] for name in wanted], allow_unused=True, retain_graph=True)
        if drops and all(x is None for x in found):
            return []
        exact_of = torch.autograd.grad(exact_sum, inputs, allow_unused=True, retain_graph=True)
        pairs = {
            name: tuple(torch.zeros_like(leaves[name]) if x is None else x.double() for x in pair)
            for name, *pair in zip(wanted, found, exact_of, strict=True)
        }
        problems = []
        # Sums may cancel, and second derivatives of activations are rounded in units of the first ones.
        terms = sum(float(gradients[name].detach().norm() * weights[name].norm()) for name in names)
        lost = 4 * Precision.of(self.case.dtype).unit * (terms + sum(float(b.norm()) for _, b in pairs.values()))
        for name, (a, b) in pairs.items():
            if not float((a - b).norm()) <= 0.1 * float(b.norm()) + 1e-3 + lost:
                problems.append(f"the second gradient by {name} is off by {float((a - b).norm() / b.norm()):.1e}")
        return problems


@functools.cache
def pytorch_drops_graphs() -> bool:
    """Whether this PyTorch's own compiled functions return gradients that are disconnected from their inputs.

    Before pytorch#181606 they had no graph. Since then the graph raises, but does not reach these tensors, so
    `allow_unused=True` raises nothing.
    """
    x = torch.randn(2, 3, requires_grad=True)
    torch._dynamo.reset()
    out = torch.compile(lambda x: x.exp().sin(), backend="aot_eager")(x)
    (found,) = torch.autograd.grad(out, x, torch.ones_like(out), create_graph=True)
    return not found.requires_grad or torch.autograd.grad(found.sum(), x, allow_unused=True)[0] is None


def refused_while_compiling(case: Case, error: Exception) -> bool:
    """Whether Dynamo reports an `ArgumentError` that is allowed, or an `UnsupportedError`."""
    allowed = [*(ArgumentError.__subclasses__() if case.refusable else []), UnsupportedError]
    kinds = "|".join(kind.__name__ for kind in allowed)
    is_of_dynamo = isinstance(error, torch._dynamo.exc.TorchDynamoException)
    return is_of_dynamo and bool(re.search(rf"(Observed exception|fake tensor call)(.|\n)*\b({kinds})\(", str(error)))


#: PyTorch's own error messages for missing double backward.
OF_PYTORCH = ("does not currently support double backward", "donated buffer")


#: The native module learns from the first repetition, launches the second, and its backward pass in the third.
REPEATS_UNTIL_NATIVE = 3


def repeat(call: Callable[[], object]) -> list[str]:
    """Makes a call until all has happened that repetitions bring about; says who launches plans that are recorded."""
    repeats = 1 if loader.module() is None else REPEATS_UNTIL_NATIVE
    launched = []
    if loader.recorded_mode() != loader.OFF:
        launched, repeats = until_recorded(call, repeats), 1
    for _ in range(repeats):
        call()
    return launched


def run(case: Case, device: str = "cpu") -> Outcome:
    """Runs a call three times, with the native module five times or until it is recorded. Returns its outcome."""
    runs = Run(case, device)
    with cudnn_sdpa.shape_policy(case.policy), in_force(case.settings):
        wanted, outcome = case.wanted, Outcome("right")
        try:
            problems = runs.once("first", wanted)
        except UnsupportedError as error:
            outcome = Outcome("declined", [], list(error.reasons), error.what)
            if not wanted:
                return outcome
            mode = "autocast" if case.mode == "autocast" else "eager"
            wanted, runs = (), Run(replace(case, wanted=(), mode=mode), device)
            try:
                problems = runs.once("without gradients", ())
            except UnsupportedError:
                return outcome
        except (ArgumentError, torch._dynamo.exc.TorchDynamoException) as error:
            if not (case.refusable if isinstance(error, ArgumentError) else refused_while_compiling(case, error)):
                raise
            return Outcome(
                "declined", [], [f"{type(error).__name__} for {case.refusable or 'its gradients'}"], "refused"
            )
        outcome.launched = repeat(lambda: problems.extend(runs.once("again", wanted)))
        try:
            problems += runs.once(case.third, wanted)
        except CudnnSdpaError as error:
            has_plan_of_its_own = case.third in ("no_grad", "inference") and bool(wanted)
            if case.third != "create_graph" and not (has_plan_of_its_own and isinstance(error, UnsupportedError)):
                raise
            outcome.reasons += getattr(error, "reasons", []) if has_plan_of_its_own else []
        except RuntimeError as error:
            if case.third != "create_graph" or not any(text in str(error) for text in OF_PYTORCH):
                raise
        return Outcome("wrong", problems, launched=outcome.launched) if problems else outcome


def attempt(name: str, seed: int, device: str = "cpu") -> Outcome:
    """Draws and runs a call; unexpected exceptions become outcomes."""
    try:
        op = OPERATIONS[name]
        with cudnn_sdpa.plan_cache.watch_uses() as used:
            outcome = op.session(random.Random(zlib.crc32(f"{name} {seed}".encode())), seed, device)
            outcome = run(draw(name, seed, device), device) if outcome is None else outcome
    except WrongError as error:
        return Outcome("wrong", [str(error)])
    except Exception as error:  # noqa: BLE001 - reported with the command that repeats it
        at = traceback.extract_tb(error.__traceback__)
        where = next((f"{Path(x.filename).name}:{x.lineno}" for x in reversed(at) if "cudnn_sdpa" in x.filename), "")
        text = str(error)[:600].replace(f"{Path(__file__).parents[1]}/", "")  # a report does not tell where it was made
        return Outcome("crashed", [f"{type(error).__name__}: {text} ({where or at[-1].name})"])
    outcome.served = sorted({f"{key.name} by {key.provider or 'cudnn'}" for key in used})
    return outcome


def line(name: str, seed: int, device: str) -> str:
    return f"python tests/generators.py {name} {seed}" + ("" if device == "cpu" else f" --device {device}")


def main(arguments: list[str]) -> int:
    import argparse

    parser = argparse.ArgumentParser(description="Random right calls, held against mathematics in float64.")
    parser.add_argument("operation", choices=[*OPERATIONS, "all"])
    parser.add_argument("seed", type=int, nargs="?", default=0, help="of one call; the first of all")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0, help="processes; 0 runs here")
    parser.add_argument("--seconds", type=float, default=0.0, help="ends then at the latest; 0 never")
    parser.add_argument("--timeout", type=float, default=90.0, help="of one call, in a worker")
    parser.add_argument("--json", help="where to write the report")
    given = parser.parse_args(arguments)
    os.environ.setdefault("CUDNN_SDPA_PLAN_DIR", "off")  # these plans are useless later; providers' kernels may be kept
    if os.environ.setdefault("CUDNN_SDPA_CPU_CHECKS", "h200,any-dtype") == "h200,any-dtype":
        cudnn_sdpa.cpu_checks("h200,any-dtype")  # here, too
    if given.operation != "all" and given.count == 1:
        return one(given.operation, given.seed, given.device)
    import campaign

    names = list(OPERATIONS) if given.operation == "all" else [given.operation]
    return campaign.main(names, given)


def one(name: str, seed: int, device: str) -> int:
    """Repeats one call and prints everything about it."""
    special = OPERATIONS[name].session
    print(line(name, seed, device))
    if special.__func__ is Operation.session:  # type: ignore[attr-defined]
        case = draw(name, seed, device)
        print(
            f"{name} in {case.dtype}\n{case}"
            + (f"\n  an ArgumentError is right: {case.refusable}" if case.refusable else "")
        )
    outcome = attempt(name, seed, device)
    print(outcome.kind.upper())
    for text in (*outcome.problems, *(f"declined: {reason}" for reason in outcome.reasons)):
        print("  " + text)
    return int(outcome.kind in ("wrong", "crashed"))


if __name__ == "__main__":
    import generators  # workers import the same module, however it was started

    sys.exit(generators.main(sys.argv[1:]))

"""Random right calls of every public operation, run, and held against mathematics in float64.

    python tests/generators.py conv2d 1234 [--device cuda]          # repeats one call: draws, runs, compares, explains
    python tests/generators.py all --count 5000 --device cuda --workers 6 --seconds 300 --json report.json

A call is a function of its operation and its seed alone. It is run three times: when nothing of it is known, again on
other numbers that lie in the same way, and once more in another mode of gradients. An outcome is "right", "declined"
(an `UnsupportedError`, with its reasons), "wrong", or "crashed" (any other exception).
"""

from __future__ import annotations

import contextlib
import functools
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
    layer_norm,
    norm_bounds,
    rms_norm,
)
from random_tensors import GRADIENTS, Spec, aligned, dense, drawn, gradient_like, is_dense, is_in_order_of, negated
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import cudnn_sdpa
from cudnn_sdpa import ArgumentError, CudnnSdpaError, Fp8BackwardScales, Fp8Scales, UnsupportedError

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
HALF_A_ULP = {E4M3: 2**-4, E5M2: 2**-3}

#: Steps that are run after the first: on other numbers, and in another mode of gradients.
THIRD = ("create_graph", "create_graph", "no_grad", "inference", "backward", "options")


@dataclass(frozen=True)
class Case:
    """A call. What is not said is off.

    Attributes:
        operation: Its name.
        seed: What it is drawn from.
        dtype: Of the results.
        tensors: The tensors that are passed.
        options: What else is passed.
        varied: Options that are others when it is run for the third time.
        facts: What it is made from beside, such as lengths.
        wanted: By which tensors gradients are wanted.
        grad: What the gradient of the result is like.
        mode: "eager", "aot_eager", "inductor", "autocast" or "checkpoint".
        third: How it is run for the third time.
        policy: The shape policy.
        refusable: Why an `ArgumentError` would be right, too.
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
    refusable: str = ""

    def line(self, device: str = "cpu") -> str:
        """The command that repeats it."""
        more = "" if device == "cpu" else f" --device {device}"
        return f"python tests/generators.py {self.operation} {self.seed}{more}"

    def __str__(self) -> str:
        said = {**self.options, **self.facts, "wanted": ", ".join(self.wanted) or "nothing", "grad": self.grad}
        said |= {"mode": self.mode, "third": self.third, "varied": self.varied, "policy": self.policy}
        rows = [f"  {name}: {spec}" for name, spec in self.tensors.items()]
        return "\n".join([*rows, "  " + " ".join(f"{name}={value!r}" for name, value in said.items() if value != {})])


@dataclass
class Outcome:
    """What became of a call.

    Attributes:
        kind: "right", "declined", "wrong" or "crashed".
        problems: What was wrong.
        reasons: Why it was declined, as a whole or in part.
        by: What declined it, as the error says.
    """

    kind: str
    problems: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    by: str = ""


Tensors = dict[str, Tensor]


class Operation:
    """A public operation: how calls of it are drawn, run, and computed again."""

    name = ""
    #: Options that may be others when a call is run again: data to a plan.
    data: tuple[str, ...] = ()
    has_graph_break = False
    aligns = False
    modes = True

    def draw(self, r: random.Random, seed: int, device: str) -> Case:
        """The call of a seed, without its mode."""
        raise NotImplementedError

    def call(self, tensors: Tensors, options: dict[str, Any], facts: dict[str, Any]) -> Tensors:
        """Runs it; the results by name."""
        raise NotImplementedError

    def before(self, case: Case, tensors: Tensors, options: dict[str, Any]) -> dict[str, Any]:
        """What must be known of a call before it is run."""
        return {}

    def exact(self, case: Case, options: dict[str, Any], leaves: Tensors, known: dict[str, Any]) -> Tensors:
        """The results in float64."""
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
        """How far results and gradients may be off."""
        raise NotImplementedError

    def check_places(self, case: Case, tensors: Tensors, found: Tensors, gradients: Tensors) -> Iterator[str]:
        """What is wrong with where results lie."""
        yield from ()

    def session(self, r: random.Random, seed: int, device: str) -> Outcome | None:
        """What became of a sequence of calls, where the operation is none of a single call."""
        return None

    def explained(self, case: Case) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] | None:
        """The call as `explain` takes it, on tensors without numbers; None if it does not explain it."""
        return None


OPERATIONS: dict[str, Operation] = {}


def operation(kind: type[Operation]) -> type[Operation]:
    """Adds an operation."""
    OPERATIONS[kind.name] = kind()
    return kind


# How attention is drawn


def size(r: random.Random, device: str, *, large: float = 0.12) -> int:
    """A length, mostly short, and often 1. References on the CPU take long, and know nothing of tiles."""
    if r.random() < large:
        return r.choice([127, 128, 129, 192, 200, 256, 300, 513] if device != "cpu" else [33, 40, 65])
    short = [1, 1, 1, 2, 3, 5, 7, 8, 15, 16, 17]
    return r.choice(short if device == "cpu" else [*short, 31, 33, 40, 63, 64, 65, 77])


def number(r: random.Random, low: float, high: float) -> float:
    """A number that is no power of two."""
    return round(low * (high / low) ** r.random(), 4) * 1.0009765625


def half(r: random.Random, device: str) -> torch.dtype:
    """A dtype of attention."""
    dtype, wide = r.choice([BF16, BF16, F16]), r.choice([None, F32, F64, F64])
    return dtype if device != "cpu" or wide is None else wide


def scale_of(r: random.Random, dim: int) -> float | None:
    """The factor of the scores."""
    usual = number(r, 0.5, 2.0) * dim**-0.5
    return r.choice([None, None, usual, usual, usual, 4 * usual, -usual, 1e-6, 40 * usual, 0.0])


def window_of(r: random.Random) -> tuple[int, int] | None:
    """Bounds around the diagonal."""
    return None if r.random() < 0.65 else (r.choice([-1, 0, 0, 1, 5, 64, 10**6]), r.choice([-1, 0, 0, 1, 3, 70, 10**6]))


def lengths_of(r: random.Random, batch: int, longest: int) -> list[int]:
    """A length for each sequence, often 0 or all."""
    return [r.choice([0, longest, r.randint(0, longest), r.randint(0, longest)]) for _ in range(batch)]


def sequence(values: list[int], device: str) -> Tensor:
    """Lengths or offsets as a tensor."""
    return torch.tensor(values, dtype=torch.int32, device=device)


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
    """Queries, keys or values."""
    spec = drawn(r, shape, dtype, unit=unit, expands=0.08, **values)
    return negated(spec) if r.random() < 0.02 else spec


def chosen(r: random.Random, names: list[str]) -> tuple[str, ...]:
    """Any part of them, often all, sometimes none."""
    how = r.random()
    if how < 0.15:
        return ()
    return tuple(name for name in names if how < 0.5 or r.random() < 0.6)


def head_dims(r: random.Random, device: str) -> tuple[int, int]:
    """Of keys and values."""
    if device == "cpu":
        return r.choice([(8, 8), (8, 8), (16, 16), (64, 64), (24, 8), (8, 40)])
    odd = 8 * r.randint(1, 16)
    return r.choice([(64, 64)] * 4 + [(128, 128)] * 2 + [(8, 8), (odd, odd), (192, 128), (64, 32), (48, 80)])


def keys_for(r: random.Random, device: str, sq: int) -> int:
    """How many keys there are for so many queries."""
    return r.choice([sq, sq, sq, 1, 1, 3, 5, 8, 17, 40, *([64, 77, 130] if device != "cpu" else [])])


def rounds_scores(case: Case) -> bool:
    """Whether scores are rounded to float32 where a mask is added."""
    return case.dtype != F64


class Attention(Operation):
    """What operations of attention have in common."""

    data = ("scale", "softcap")

    takes_out = False

    def into(self, tensors: Tensors, facts: dict[str, Any]) -> Tensors:
        """Memory for the result, where it is given; outside of gradients."""
        if not facts.get("into") or torch.is_grad_enabled():
            return {}
        q, v = tensors["q"], tensors["v"]
        shape = *q.shape[:-1], v.shape[-1]
        order = [*sorted(range(q.dim() - 1), key=lambda d: -q.stride(d)), q.dim() - 1]
        out = torch.full([shape[d] for d in order], math.nan, dtype=q.dtype, device=q.device)
        return {"out": out.permute([order.index(d) for d in range(q.dim())])}

    def known_options(self, case: Case, options: dict[str, Any], leaves: Tensors) -> dict[str, Any]:
        """The options and side tensors as the mathematics takes them."""
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
        q = tensors["q"]
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

    def draw(self, r: random.Random, seed: int, device: str) -> Case:
        dtype = half(r, device)
        batch, kv = r.choice([1, 1, 2, 3, 5]), r.choice([1, 1, 2, 3])
        heads, sq = kv * r.choice([1, 1, 2, 3, 5]), size(r, device)
        skv = keys_for(r, device, sq)
        if r.random() < 0.03:
            batch, sq, skv = r.choice([(0, sq, skv), (batch, 0, skv), (batch, sq, 0)])
        dims, full = head_dims(r, device), (batch, heads, sq, skv)
        tensors = {
            "q": memory_of(r, (batch, heads, sq, dims[0]), dtype),
            "k": memory_of(r, (batch, kv, skv, dims[0]), dtype),
            "v": memory_of(r, (batch, kv, skv, dims[1]), dtype),
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
            case = replace(case, options=options | {"scale": 2.0**63}, refusable="a scale beyond all use")
        return case

    def call(self, tensors: Tensors, options: dict[str, Any], facts: dict[str, Any]) -> Tensors:
        found = cudnn_sdpa.sdpa(**tensors, **options, **self.into(tensors, facts))
        return dict(zip(("out", "lse"), found, strict=True)) if options["return_lse"] else {"out": found}

    def before(self, case: Case, tensors: Tensors, options: dict[str, Any]) -> dict[str, Any]:
        if not options.get("dropout_p"):
            return {}
        with torch.no_grad():
            return {"kept": kept(tensors, options)}

    def explained(self, case):
        tensors = {name: spec.make("meta") for name, spec in case.tensors.items()}
        side = {n: torch.empty(len(x), dtype=torch.int32, device="meta") for n, x in case.facts.items() if "len" in n}
        for name in case.wanted:
            tensors[name] = tensors[name].detach().requires_grad_()
        return cudnn_sdpa.sdpa, (), {**tensors, **side, **case.options}


def kept(tensors: Tensors, options: dict[str, Any]) -> Tensor:
    """Which weights dropout keeps: those that arrive at a value that no other key has."""
    q, k = tensors["q"], tensors["k"]
    skv, parts = k.shape[2], []
    on_gpu = q.is_cuda
    state = torch.cuda.get_rng_state() if on_gpu else torch.get_rng_state()
    same = {name: options[name] for name in ("is_causal", "causal_alignment", "window_size")}
    same = {} if "seq_lens_q" in tensors or "seq_lens_kv" in tensors or not on_gpu else same
    for first in range(0, max(skv, 1), 128):
        unit = torch.zeros(*k.shape[:3], 128, dtype=q.dtype, device=q.device)
        for column in range(first, min(first + 128, skv)):
            unit[:, :, column, column - first] = 1
        (torch.cuda.set_rng_state if on_gpu else torch.set_rng_state)(state)
        parts.append(cudnn_sdpa.sdpa(q.detach() * 0, k.detach(), unit, dropout_p=options["dropout_p"], **same) > 0)
    (torch.cuda.set_rng_state if on_gpu else torch.set_rng_state)(state)
    return torch.cat(parts, -1)[..., :skv]


@operation
class DropIn(Attention):
    name = "scaled_dot_product_attention"
    data = ("scale",)

    def draw(self, r: random.Random, seed: int, device: str) -> Case:
        dtype, rank = half(r, device), r.choice([4, 4, 4, 3, 3, 2, 5])
        kv, sq = r.choice([1, 2, 3]), size(r, device)
        heads = kv * r.choice([1, 1, 2, 3])
        skv, dims = keys_for(r, device, sq), head_dims(r, device)
        before = tuple(r.choice([1, 2, 3]) for _ in range(rank - 3))
        gqa = heads != kv or r.random() < 0.2

        def shape(heads: int, length: int, dim: int) -> tuple[int, ...]:
            front = tuple(1 if r.random() < 0.1 else n for n in before)
            if rank > 2:
                front = (*front, 1 if r.random() < 0.1 else heads)
            return (*front, length, dim)

        shapes = shape(heads, sq, dims[0]), shape(kv, skv, dims[0]), shape(kv, skv, dims[1])
        tensors = {name: memory_of(r, x, dtype) for name, x in zip("qkv", shapes, strict=True)}
        batch = torch.broadcast_shapes(*(x[:-3] for x in shapes))
        counts = [x[-3] if rank > 2 else 1 for x in shapes]
        most = counts[0] if gqa else max(counts)
        if most % max(counts[1:]):
            gqa, most = False, max(counts)
            if any(n not in (1, most) for n in counts):
                return self.draw(random.Random(r.random()), seed, device)
        facts: dict[str, Any] = {"batch": batch, "heads": (most, max(counts[1:]) if gqa else most)}
        options: dict[str, Any] = {"scale": scale_of(r, dims[0]), "enable_gqa": gqa, "is_causal": r.random() < 0.3}
        refusable = ""
        if not options["is_causal"] and r.random() < 0.5:
            full = (*batch, most, sq, skv) if rank > 2 else (sq, skv)
            tensors["attn_mask"] = mask_of(r, full[-4:], dtype, other=False)
        elif not options["is_causal"] and rank == 4 and r.random() < 0.12:
            facts["bias"], refusable = r.choice(["upper_left", "lower_right"]), "a mask that is no plain tensor"
        names = [name for name, spec in tensors.items() if spec.dtype.is_floating_point]
        return Case(self.name, seed, dtype, tensors, options, {}, facts, chosen(r, names), refusable=refusable)

    def call(self, tensors: Tensors, options: dict[str, Any], facts: dict[str, Any]) -> Tensors:
        mask = tensors.get("attn_mask")
        if "bias" in facts:
            from torch.nn.attention import bias

            make = {"upper_left": bias.causal_upper_left, "lower_right": bias.causal_lower_right}[facts["bias"]]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # rows that see nothing, which are zeros here
                mask = make(tensors["q"].shape[-2], tensors["k"].shape[-2])
        return {
            "out": cudnn_sdpa.scaled_dot_product_attention(*(tensors[name] for name in "qkv"), mask, **options),
        }

    def _of_four(self, case: Case, leaves: Tensors) -> Tensors:
        batch, heads = case.facts["batch"], case.facts["heads"]
        made = {}
        for name, count in zip("qkv", (heads[0], heads[1], heads[1]), strict=True):
            x = leaves[name]
            x = x if x.dim() > 2 else x.unsqueeze(0)
            made[name] = x.expand(*batch, count, *x.shape[-2:]).reshape(-1, count, *x.shape[-2:])
        if "attn_mask" in leaves:
            mask = leaves["attn_mask"]
            if len(batch) > 1 and mask.dim() > 3:
                mask = mask.expand(*batch, *mask.shape[-3:]).reshape(-1, *mask.shape[-3:])
            made["attn_mask"] = mask
        return made

    def exact(self, case, options, leaves, known):
        given = {"scale": options["scale"], "is_causal": options["is_causal"] or "bias" in case.facts}
        given["causal_alignment"] = "bottom_right" if case.facts.get("bias") == "lower_right" else "top_left"
        known["given"], known["four"] = given, self._of_four(case, leaves)
        made = attention(**known["four"], rounds_scores=rounds_scores(case), **given)
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
        tensors = {name: spec.make("meta") for name, spec in case.tensors.items()}
        for name in case.wanted:
            tensors[name] = tensors[name].detach().requires_grad_()
        call = tensors["q"], tensors["k"], tensors["v"], tensors.get("attn_mask")
        return cudnn_sdpa.scaled_dot_product_attention, call, case.options


@operation
class Varlen(Attention):
    name = "sdpa_varlen"
    takes_out = True

    def draw(self, r: random.Random, seed: int, device: str) -> Case:
        dtype = half(r, device)
        count = r.choice([1, 1, 2, 3, 5, 9])
        large = [[0, 40, 64, 100], [1, 128, 200], [0, 0, 77]] if device != "cpu" else [[0, 4, 12], [1, 20], [0, 0, 33]]
        sizes = r.choice([[0, 1, 2, 5, 17], [1], [0, 1], *large])
        of_q, of_kv = ([r.choice(sizes) for _ in range(count)] for _ in "qk")
        same = r.random() < 0.5
        of_kv = of_q if same else of_kv
        kv, dims = r.choice([1, 1, 2, 3]), head_dims(r, device)
        heads, extra = kv * r.choice([1, 2, 3, 5]), r.choice([0, 0, 0, 0, 3])
        rows, columns = sum(of_q) + extra, sum(of_kv) + (extra if same else 0)
        tensors = {
            "q": memory_of(r, (rows, heads, dims[0]), dtype),
            "k": memory_of(r, (columns, kv, dims[0]), dtype),
            "v": memory_of(r, (columns, kv, dims[1]), dtype),
        }
        if r.random() < 0.25:
            tensors["sinks"] = dense((heads,), F32, scale=2.0, shift=r.choice([0.5, -60.0, 9.0]))
        options: dict[str, Any] = {"scale": scale_of(r, dims[0]), "window_size": window_of(r)}
        options |= {"is_causal": r.random() < 0.5, "causal_alignment": r.choice(["top_left", "bottom_right"])}
        options |= {"softcap": r.choice([1.7, 30.3]) if r.random() < 0.12 else None, "return_lse": r.random() < 0.6}
        options["deterministic"] = r.choice([None, None, None, True])
        facts = {"of_q": of_q, "of_kv": of_kv, "same": same, "longest": r.choice([0, 0, 1, 13])}
        return Case(self.name, seed, dtype, tensors, options, facts=facts, wanted=chosen(r, list(tensors)))

    def _offsets(self, facts: dict[str, Any], device: Any) -> tuple[Any, ...]:
        offsets = []
        for lengths in (facts["of_q"], facts["of_kv"]):
            made = [0]
            for n in lengths:
                made.append(made[-1] + n)
            offsets.append(sequence(made, device))
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
            made = attention(*part, rounds_scores=rounds_scores(case), **given)
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
        tensors = {name: spec.make("meta") for name, spec in case.tensors.items()}
        for name in case.wanted:
            tensors[name] = tensors[name].detach().requires_grad_()
        more = {"sinks": tensors["sinks"]} if "sinks" in tensors else {}
        at = self._offsets(case.facts, "cpu")
        at = (*(torch.empty_like(x, device="meta") for x in at[:2]), *at[2:])
        return cudnn_sdpa.sdpa_varlen, (tensors["q"], tensors["k"], tensors["v"], *at), {**more, **case.options}


@operation
class Paged(Attention):
    name = "sdpa_paged"
    takes_out = True

    def draw(self, r: random.Random, seed: int, device: str) -> Case:
        dtype = half(r, device)
        batch, kv, dims = r.choice([1, 2, 3, 7]), r.choice([1, 1, 2, 3]), head_dims(r, device)
        heads, sq = kv * r.choice([1, 2, 5]), r.choice([1, 1, 1, 2, 5, 8, 9, 20])
        page, columns = r.choice([1, 2, 8, 16, 64]), r.choice([1, 1, 2, 5])
        pages = columns * batch + r.choice([0, 1, 4])
        nhd = r.random() < 0.5

        def of(dim: int) -> Spec:
            shape = (pages, page, kv, dim) if nhd else (pages, kv, page, dim)
            return drawn(r, shape, dtype, unit=8, expands=0.0)

        tensors = {"q": memory_of(r, (batch, heads, sq, dims[0]), dtype), "k": of(dims[0]), "v": of(dims[1])}
        if r.random() < 0.25:
            tensors["sinks"] = dense((heads,), F32, scale=2.0, shift=r.choice([0.5, -60.0]))
        options: dict[str, Any] = {"scale": scale_of(r, dims[0]), "window_size": window_of(r)}
        options |= {"is_causal": r.random() < 0.7, "causal_alignment": r.choice(["bottom_right"] * 3 + ["top_left"])}
        options |= {"softcap": r.choice([1.7, 30.3]) if r.random() < 0.12 else None, "return_lse": r.random() < 0.6}
        options["page_layout"] = "NHD" if nhd else "HND"
        facts: dict[str, Any] = {"kv": lengths_of(r, batch, columns * page), "page": page, "columns": columns}
        facts["q"] = [r.randint(0, sq) for _ in range(batch)] if r.random() < 0.3 else None
        facts["of_v"], facts["wild"] = r.random() < 0.2, r.random() < 0.5
        return Case(self.name, seed, dtype, tensors, options, facts=facts)

    def before(self, case, tensors, options):
        facts, device = case.facts, tensors["q"].device
        numbers = random.Random(torch.randint(2**31, ()).item())
        tables = []
        for _ in range(2):
            pages = numbers.sample(range(case.tensors["k"].shape[0]), case.tensors["k"].shape[0])
            rows = [[pages.pop() for _ in range(facts["columns"])] for _ in facts["kv"]]
            for row, length in zip(rows, facts["kv"], strict=True):
                used = -(-length // facts["page"])
                if facts["wild"]:  # what lies past the last page is not looked at
                    row[used:] = [numbers.choice([-7, 10**6]) for _ in row[used:]]
            tables.append(rows)
        tables = tables if facts["of_v"] else [tables[0]] * 2
        side = {"table_k": tables[0], "table_v": tables[1]}
        case.facts["made"] = {name: sequence(x, device) for name, x in (*side.items(), ("kv", facts["kv"]))}
        if facts["q"] is not None:
            case.facts["made"]["q"] = sequence(facts["q"], device)
        return side

    def call(self, tensors, options, facts):
        made, more = facts["made"], {}
        if facts["of_v"]:
            more["page_table_v"] = made["table_v"]
        if "q" in made:
            more["seq_lens_q"] = made["q"]
        if "sinks" in tensors:
            more["sinks"] = tensors["sinks"]
        more |= self.into(tensors, facts)
        given = tensors["q"], tensors["k"], tensors["v"], made["table_k"], made["kv"]
        found = cudnn_sdpa.sdpa_paged(*given, **more, **options)
        return dict(zip(("out", "lse"), found, strict=True)) if options["return_lse"] else {"out": found}

    def _dense(self, case: Case, leaves: Tensors, known: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
        page, longest = case.facts["page"], case.facts["columns"] * case.facts["page"]
        made = {"q": leaves["q"]}
        for name, tables in (("k", known["table_k"]), ("v", known["table_v"])):
            pages = leaves[name].transpose(1, 2) if options["page_layout"] == "NHD" else leaves[name]
            whole = pages.new_zeros(len(tables), pages.shape[1], longest, pages.shape[3])
            for b, (row, length) in enumerate(zip(tables, case.facts["kv"], strict=True)):
                for j in range(length):
                    whole[b, :, j] = pages[row[j // page], :, j % page]
            made[name] = whole
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
        more |= {"sinks": tensors["sinks"]} if "sinks" in tensors else {}
        given = tensors["q"], tensors["k"], tensors["v"], ints(*table), ints(batch)
        return cudnn_sdpa.sdpa_paged, given, {**more, **case.options}


# FP8


def fp8_options(r: random.Random, dim: int) -> dict[str, Any]:
    """Options of attention in FP8."""
    options: dict[str, Any] = {"scale": r.choice([None, number(r, 0.5, 2.0) * dim**-0.5]), "window_size": window_of(r)}
    return options | {"is_causal": r.random() < 0.4, "causal_alignment": r.choice(["top_left"] * 3 + ["bottom_right"])}


class Fp8(Attention):
    """What both passes in FP8 have in common."""

    data = ()

    def drawn(self, r: random.Random, seed: int, device: str) -> Case:
        """Tensors in FP8, of numbers whose scales are none of 1."""
        dtype = r.choice([E4M3, E4M3, E5M2])
        batch, kv, sq = r.choice([1, 2, 3]), r.choice([1, 2]), size(r, device)
        heads, skv = kv * r.choice([1, 2, 3]), keys_for(r, device, sq)
        large = [(64, 64), *[(128, 128)] * 6, (128, 64), (192, 128)] if device != "cpu" else []
        dims = r.choice([(16, 16), (32, 48), *large])
        scales = {"q": number(r, 15, 40), "k": number(r, 45, 80), "v": number(r, 6, 14)}
        shapes = {"q": (heads, sq, dims[0]), "k": (kv, skv, dims[0]), "v": (kv, skv, dims[1])}
        tensors = {
            name: drawn(r, (batch, *shapes[name]), dtype, unit=16, expands=0.05, scale=scales[name]) for name in "qkv"
        }
        facts: dict[str, Any] = {"scales": scales}
        for name, longest in (("seq_lens_q", sq), ("seq_lens_kv", skv)):
            if r.random() < 0.15:
                facts[name] = lengths_of(r, batch, longest)
        return Case(self.name, seed, dtype, tensors, fp8_options(r, dims[0]), facts=facts)

    def true(self, case: Case, leaves: Tensors) -> Tensors:
        """What the tensors stand for."""
        return {name: leaves[name] / case.facts["scales"][name] for name in "qkv"}

    def forward_scales(self, case: Case, device: Any) -> Fp8Scales:
        """The scales of a forward pass."""
        of, full = case.facts["scales"], torch.finfo(case.dtype).max / 1.75
        values = [1 / of["q"], 1 / of["k"], 1 / of["v"], 1 / full, full, 23.0]
        return Fp8Scales(*(torch.tensor([x], device=device) for x in values))


@operation
class Fp8Forward(Fp8):
    name = "sdpa_fp8"

    def draw(self, r: random.Random, seed: int, device: str) -> Case:
        case = self.drawn(r, seed, device)
        out_dtype = r.choice([None] * 9 + [BF16, F16, E5M2])
        return replace(case, options=case.options | {"out_dtype": out_dtype, "return_lse": r.random() < 0.7})

    def call(self, tensors, options, facts):
        found = cudnn_sdpa.sdpa_fp8(*(tensors[n] for n in "qkv"), facts["made"], **facts["side"], **options)
        named = {"out": found.out, "amax_s": found.amax_s, "amax_o": found.amax_o, "lse": found.lse}
        return {name: x for name, x in named.items() if x is not None}

    def before(self, case, tensors, options):
        case.facts["made"] = self.forward_scales(case, tensors["q"].device)
        names = ("seq_lens_q", "seq_lens_kv")
        case.facts["side"] = {n: sequence(case.facts[n], tensors["q"].device) for n in names if n in case.facts}
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
        lse = attention_bounds(made, **true, grad_out=None, precision=precision, **known["options"])["lse"]
        on_gpu = lse.is_cuda  # kernels in FP8 approximate exponentials: 2e-3 and 1e-3 were seen on an H200
        lse = lse + 1.5e-3 if on_gpu else lse
        largest = 1.0 if "seq_lens_q" in case.facts else 1e-3 if on_gpu else 1e-5
        amax_s = torch.full((1,), largest, dtype=F64, device=lse.device)
        off = spread + last * made.out.abs() + 2e-3
        return {"out": off * 23.0, "lse": lse, "amax_s": amax_s, "amax_o": off.amax().view(1)}

    def check_places(self, case, tensors, found, gradients):
        if found["out"].numel() and not is_in_order_of(found["out"], tensors["q"]):
            yield f"out has strides {found['out'].stride()} where q has {tensors['q'].stride()}"

    def explained(self, case):
        tensors = [case.tensors[name].make("meta") for name in "qkv"]
        side = {n: torch.empty(len(x), dtype=torch.int32, device="meta") for n, x in case.facts.items() if "len" in n}
        scales = Fp8Scales(*(torch.empty(1, device="meta") for _ in Fp8Scales._fields))
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
        device, names = tensors["q"].device, ("seq_lens_q", "seq_lens_kv")
        case.facts["side"] = {n: sequence(case.facts[n], device) for n in names if n in case.facts}
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
        return {"q": found.dq, "k": found.dk, "v": found.dv}

    def exact(self, case, options, leaves, known):
        made, grads, (true, given) = self._exact_gradients(case, options, leaves)
        known["made"], known["true"], known["given"], known["grad"] = made, true, given, grads["grad"]
        return {name: grads[name] * out for name, out in zip("qkv", case.facts["outs"], strict=True)}

    def bounds(self, case, options, leaves, grads, known, precision):
        unit = max(HALF_A_ULP[case.dtype], HALF_A_ULP[case.facts["grad_dtype"]])
        coarse = Precision(unit, 2e-3, 2**-24)
        true = {name: x.detach() for name, x in known["true"].items()}
        made = replace(known["made"], out=known["made"].out.detach(), weights=known["made"].weights.detach())
        found = attention_bounds(made, **true, grad_out=known["grad"], precision=coarse, **known["given"])
        outs = zip("qkv", case.facts["outs"], strict=True)
        return {name: (found[name] + 2e-3) * out for name, out in outs}

    def check_places(self, case, tensors, found, gradients):
        for name in "qkv":
            if found[name].numel() and not is_in_order_of(found[name], tensors[name]):
                yield f"d{name} has strides {found[name].stride()} where {name} has {tensors[name].stride()}"

    def explained(self, case):
        q, k, v, grad_out = (case.tensors[name].make("meta") for name in ("q", "k", "v", "grad_out"))
        side = {n: torch.empty(len(x), dtype=torch.int32, device="meta") for n, x in case.facts.items() if "len" in n}
        scales = Fp8BackwardScales(*(torch.empty(1, device="meta") for _ in Fp8BackwardScales._fields))
        out = torch.empty(grad_out.shape, dtype=q.dtype, device="meta")
        lse = torch.empty(q.shape[:3], device="meta")
        return cudnn_sdpa.sdpa_fp8_backward, (grad_out, q, k, v, out, lse, scales), {**case.options, **side}


@operation
class Fp8Attention(Attention):
    name = "fp8_attention"
    data = ()
    has_graph_break = True

    def draw(self, r: random.Random, seed: int, device: str) -> Case:
        dtype, kv, batch = r.choice([BF16, F16]), r.choice([1, 2]), r.choice([1, 2])
        heads, sq = kv * r.choice([1, 2]), size(r, device, large=0.05)
        skv = keys_for(r, device, sq)
        large = [(64, 64), *[(128, 128)] * 6] if device != "cpu" else []
        dims = r.choice([(16, 16), (32, 48), *large])
        shapes = {"q": (heads, sq, dims[0]), "k": (kv, skv, dims[0]), "v": (kv, skv, dims[1])}
        scales = {"q": 1.7, "k": 0.6, "v": 23.0}
        tensors = {n: drawn(r, (batch, *shapes[n]), dtype, unit=16, expands=0.05, scale=scales[n]) for n in "qkv"}
        facts = {"scaling": r.random() < 0.4}
        options = fp8_options(r, dims[0]) | {"grad_dtype": r.choice([None, E4M3, E5M2])}
        return Case(self.name, seed, dtype, tensors, options, facts=facts, wanted=chosen(r, list(tensors)))

    def before(self, case, tensors, options):
        case.facts["made"] = None
        if case.facts["scaling"]:
            case.facts["made"] = cudnn_sdpa.Fp8Scaling(
                grad_dtype=options["grad_dtype"] or E5M2, device=tensors["q"].device
            )
        return {}

    def call(self, tensors, options, facts):
        return {"out": cudnn_sdpa.fp8_attention(*(tensors[n] for n in "qkv"), scaling=facts["made"], **options)}

    def exact(self, case, options, leaves, known):
        known["options"] = {n: options[n] for n in ("scale", "window_size", "is_causal", "causal_alignment")}
        made = known["made"] = attention(*(leaves[n] for n in "qkv"), **known["options"])
        return {"out": made.out}

    def bounds(self, case, options, leaves, grads, known, precision):
        coarse = Precision(2**-3, 1e-3, 2**-7)
        given = (*(leaves[n] for n in "qkv"), grads.get("out"), coarse)
        found = attention_bounds(known["made"], *given, **known["options"])
        return {name: x + 1e-3 * x.amax() if x.numel() else x for name, x in found.items()}

    def explained(self, case):
        tensors = {name: spec.make("meta") for name, spec in case.tensors.items()}
        for name in case.wanted:
            tensors[name] = tensors[name].detach().requires_grad_()
        return cudnn_sdpa.fp8_attention, tuple(tensors[n] for n in "qkv"), case.options


# Norms and gates


def fused_dtype(r: random.Random, device: str) -> torch.dtype:
    """A dtype of norms, gates and convolutions."""
    dtype, wide = r.choice([BF16, BF16, F16, F32]), r.choice([False, False, True])
    return F64 if wide and device == "cpu" else dtype


def rows_of(r: random.Random, device: str) -> tuple[int, ...]:
    """A shape (..., n)."""
    n = r.choice([1, 2, 3, 8, 17, 32, 64, 64, 100, 128, *([256, 1000, 1024] if device != "cpu" else [])])
    shape = tuple(r.choice([1, 1, 2, 3, 5, 7]) for _ in range(r.choice([0, 1, 1, 2, 2, 3, 4])))
    shape = (*shape, n)
    return (0, *shape[1:]) if r.random() < 0.03 and len(shape) > 1 else shape


@operation
class RmsNorm(Operation):
    aligns = True
    name = "rms_norm"
    data = ("eps",)

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
        return Case(self.name, seed, dtype, tensors, options, {"eps": 0.011}, {}, chosen(r, list(tensors)))

    def call(self, tensors, options, facts):
        found = cudnn_sdpa.rms_norm(tensors["x"], tensors.get("weight"), residual=tensors.get("residual"), **options)
        return dict(zip(("out", "sum"), found, strict=True)) if "residual" in tensors else {"out": found}

    def exact(self, case, options, leaves, known):
        out, total = rms_norm(leaves["x"], leaves.get("weight"), residual=leaves.get("residual"), **options)
        known["total"] = total
        return {"out": out, "sum": total} if "residual" in leaves else {"out": out}

    def bounds(self, case, options, leaves, grads, known, precision):
        total, weight = known["total"].detach(), leaves.get("weight")
        if weight is not None and options.get("zero_centered"):
            weight = weight + 1
        off = precision.unit * total.abs() if "residual" in leaves else None
        found = norm_bounds(
            *(total, weight, None, options["eps"], grads.get("out"), precision),
            centered=False,
            activation=options.get("activation"),
            sum_off=off,
            grad_sum=grads.get("sum"),
        )
        bounds = {"out": found["out"], "sum": precision.unit * total.abs() + precision.tiny}
        if grads:
            bounds |= {"x": found["x"], "residual": found["x"], "weight": found["weight"]}
        return bounds

    def check_places(self, case, tensors, found, gradients):
        for name, result in found.items():
            if result.numel() and not is_dense(result):
                yield f"{name} has strides {result.stride()}, which are not dense"

    def explained(self, case):
        tensors = {name: spec.make("meta") for name, spec in case.tensors.items()}
        for name in case.wanted:
            tensors[name] = tensors[name].detach().requires_grad_()
        more = {"residual": tensors["residual"]} if "residual" in tensors else {}
        return cudnn_sdpa.rms_norm, (tensors["x"], tensors.get("weight")), {**more, **case.options}


@operation
class LayerNorm(Operation):
    aligns = True
    name = "layer_norm"
    data = ("eps",)

    def draw(self, r: random.Random, seed: int, device: str) -> Case:
        dtype, shape = fused_dtype(r, device), rows_of(r, device)
        tensors = {"x": drawn(r, shape, dtype, scale=r.choice([0.05, 1.3, 1.3, 20.0]), shift=r.choice([0.0, 2.0]))}
        of = r.choice([dtype, F32])
        if r.random() < 0.8:
            tensors["weight"] = drawn(r, shape[-1:], of, expands=0.1, shift=0.7)
        if r.random() < 0.6:
            tensors["bias"] = drawn(r, shape[-1:], of, expands=0.1, scale=2.0)
        options = {"eps": r.choice([1e-5, 1e-5, 1e-6, 0.3, 100.0])}
        return Case(self.name, seed, dtype, tensors, options, {"eps": 0.011}, {}, chosen(r, list(tensors)))

    def call(self, tensors, options, facts):
        return {"out": cudnn_sdpa.layer_norm(tensors["x"], tensors.get("weight"), tensors.get("bias"), **options)}

    def exact(self, case, options, leaves, known):
        return {"out": layer_norm(leaves["x"], leaves.get("weight"), leaves.get("bias"), **options)}

    def bounds(self, case, options, leaves, grads, known, precision):
        given = leaves["x"], leaves.get("weight"), leaves.get("bias"), options["eps"], grads.get("out"), precision
        return norm_bounds(*given, centered=True)

    check_places = RmsNorm.check_places

    def explained(self, case):
        tensors = {name: spec.make("meta") for name, spec in case.tensors.items()}
        for name in case.wanted:
            tensors[name] = tensors[name].detach().requires_grad_()
        return cudnn_sdpa.layer_norm, (tensors["x"], tensors.get("weight"), tensors.get("bias")), case.options


def has_rows(spec: Spec) -> bool:
    """Whether a tensor is a view of rows at one distance from each other."""
    try:
        spec.make("meta").view(-1, spec.shape[-1])
    except RuntimeError:
        return False
    return True


class Gate(Operation):
    """What gates have in common: their results are products, and every rounding is relative."""

    activation = "silu"
    aligns = True

    def draw(self, r: random.Random, seed: int, device: str) -> Case:
        dtype, shape = fused_dtype(r, device), rows_of(r, device)
        facts = {"form": r.choice(["two", "two", "two", "halves", "both"] if self.name == "silu_mul" else ["two"])}
        names = ["gate"] if self.name == "relu_squared" else ["gate", "up"]
        if facts["form"] != "two":
            shape, names = (*shape[:-1], 2 * shape[-1]), ["both"]
        scale = r.choice([0.3, 1.3, 1.3, 6.0])
        tensors = {}
        for name in names:
            some = [drawn(r, shape, dtype, last_dense=True, scale=scale) for _ in range(4)]
            tensors[name] = next(filter(has_rows, some), some[0])  # mostly one that need not be refused
        wanted = chosen(r, list(tensors)) if self.name == "silu_mul" else ()
        case = Case(self.name, seed, dtype, tensors, {}, {}, facts, wanted)
        if not all(has_rows(spec) for spec in tensors.values()):
            case = replace(case, refusable="rows that do not lie at one distance")
        return case

    def halves(self, tensors: Tensors, facts: dict[str, Any]) -> tuple[Tensor, ...]:
        """The gate, and what it is multiplied with."""
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
        tensors = {name: spec.make("meta") for name, spec in case.tensors.items()}
        for name in case.wanted:
            tensors[name] = tensors[name].detach().requires_grad_()
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


# Convolutions


class Conv(Operation):
    """A convolution of any rank."""

    rank = 2
    aligns = True

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
        tensors = {name: spec.make("meta") for name, spec in case.tensors.items()}
        for name in case.wanted:
            tensors[name] = tensors[name].detach().requires_grad_()
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


# Graphs of a user's own


def scaled_reference(x: Tensor, bias: Tensor | None = None, scale: float = 1.0) -> Tensor:
    y = x.float() * scale if x.dtype != F64 else x * scale
    return (y if bias is None else y + bias).to(x.dtype).contiguous()


def scaled_backward(grads: Any, operands: Any, results: Any) -> Any:  # noqa: ARG001
    _, bias, scale = operands
    return grads[0] * scale, None if bias is None else grads[0].sum_to_size(bias.shape), None


@cudnn_sdpa.graph_op(reference=scaled_reference, backward=scaled_backward)
def scaled(g: Any, x: Any, bias: Any = None, scale: Any = None) -> Any:
    """x times a number, plus a bias."""
    y = g.mul(a=x, b=scale)
    return y if bias is None else g.add(a=y, b=bias)


def clipped_reference(x: Tensor, *, slope: float = 0.1) -> Tensor:
    return torch.where(x > 0, x, x * slope).contiguous()


@cudnn_sdpa.graph_op(reference=clipped_reference)
def clipped(g: Any, x: Any, *, slope: float = 0.1) -> Any:
    """The positive part, and a share of the negative one."""
    return g.relu(input=x, negative_slope=slope)


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
        return {"out": scaled(tensors["x"], tensors.get("bias"), **options)}

    def exact(self, case, options, leaves, known):
        if case.facts["graph"] == "clipped":
            return {"out": torch.where(leaves["x"] > 0, leaves["x"], leaves["x"] * options["slope"])}
        y = leaves["x"] * options["scale"]
        return {"out": y + leaves["bias"] if "bias" in leaves else y}

    def bounds(self, case, options, leaves, grads, known, precision):
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
        session = CacheSession(r, seed, device)
        for _ in range(14):
            session.act(r.choice(["add", "step", "step", "step", "fork", "truncate", "evict", "free", "read", "stale"]))
            if session.problems:
                break
        else:
            session.check("at the end")
        return Outcome("wrong" if session.problems else "right", session.problems, session.reasons)


class CacheSession:
    """A paged cache beside a dictionary of what must be in it."""

    def __init__(self, r: random.Random, seed: int, device: str) -> None:
        self.r, self.device = r, device
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype, self.kv = half(r, device), r.choice([1, 2])
        self.dims = r.choice([(64, 64), (8, 16), (128, 128)])
        self.heads = self.kv * r.choice([1, 3])
        self.cache = cudnn_sdpa.PagedKVCache(
            pages=r.choice([12, 40]),
            page_size=r.choice([1, 2, 16]),
            heads=self.kv,
            head_dim=self.dims[0],
            head_dim_v=self.dims[1],
            dtype=self.dtype,
            device=device,
            page_layout=r.choice(["HND", "NHD"]),
            layers=r.choice([1, 2]),
        )
        self.model: dict[int, tuple[Tensor, Tensor]] = {}
        self.steps: list[tuple[Any, list[int]]] = []
        self.problems: list[str] = []
        self.reasons: list[str] = []

    def random(self, *shape: int) -> Tensor:
        """Fresh numbers."""
        return torch.randn(shape, generator=self.generator, dtype=F64).to(self.dtype).to(self.device)

    def check(self, when: str) -> None:
        """Compares what can be read with what was written."""
        for one, written in self.model.items():
            if not all(map(torch.equal, self.cache.read(one), written)):
                self.problems.append(f"{when} sequence {one} has other tokens than were written")

    def act(self, action: str) -> None:
        """Does one thing to both."""
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
        """Forks, shortens or forgets a sequence."""
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
        try:
            step = self.cache.reserve(numbers, counts)
        except cudnn_sdpa.OutOfPagesError:
            return
        k, v = (self.random(len(numbers), self.kv, step.tokens, dim) for dim in self.dims)
        self.cache.append(step, k, v)
        for row, (one, count) in enumerate(zip(numbers, counts, strict=True)):
            old = model[one]
            model[one] = torch.cat([old[0], k[row, :, :count]], 1), torch.cat([old[1], v[row, :, :count]], 1)
        self.steps.append((step, [one for one, count in zip(numbers, counts, strict=True) if count]))
        q = self.random(len(numbers), self.heads, step.tokens, self.dims[0])
        try:
            out = self.cache.attend(step, q)
        except UnsupportedError as error:
            self.reasons.extend(error.reasons)
            return
        for row, (one, count) in enumerate(zip(numbers, counts, strict=True)):
            given = {"is_causal": True, "causal_alignment": "bottom_right"}
            part = q[row : row + 1, :, :count], *(x.unsqueeze(0) for x in model[one])
            made = attention(*part, **given)
            bound = attention_bounds(made, *part, None, Precision.of(q.dtype), **given)["out"]
            self.problems += compared("attend", out[row : row + 1, :, :count], made.out, bound)
            if out[row, :, count:].abs().sum() != 0:
                self.problems.append("attend: the rows of absent tokens are no zeros")

    def stale(self) -> None:
        """A step that writes to freed sequences must not write into others that have their pages now."""
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


# How a call is run, and compared


def compared(name: str, actual: Tensor, exact: Tensor, bound: Tensor) -> list[str]:
    """What is wrong with a tensor."""
    if actual.shape != exact.shape:
        return [f"{name} has shape {tuple(actual.shape)} instead of {tuple(exact.shape)}"]
    info = torch.finfo(actual.dtype)
    rounding = info.eps if actual.dtype != F64 else 0.0
    tiny = info.smallest_normal * (info.eps if actual.dtype == F16 else 1.0)  # GPUs flush what is smaller, but there
    actual, exact, bound = (x.detach().double() for x in (actual, exact, bound.expand(exact.shape)))
    if not actual.numel():
        return []
    limit = MARGIN * bound + rounding * exact.abs() + tiny
    ok = ((actual - exact).abs() <= limit) | (actual == exact)
    if name == "lse":  # kernels count in base 2, which has no such number
        ok |= actual.isneginf() & (exact < torch.finfo(F32).min * math.log(2))
    if bool(ok.all()):
        return []
    where = [int(i) for i in (~ok).nonzero()[0]]
    at = tuple(where)
    off = float(((actual - exact).norm() / exact.norm().clamp_min(1e-30)).nan_to_num(nan=math.inf))
    example = f"{float(actual[at]):.6g} instead of {float(exact[at]):.6g} ± {float(limit[at]):.1e}"
    return [f"{name}: {int((~ok).sum())} of {ok.numel()} off, first at {where}: {example}; in the norm {off:.1e}"]


def draw(name: str, seed: int, device: str = "cpu") -> Case:
    """The call of a seed."""
    op = OPERATIONS[name]
    r = random.Random(zlib.crc32(f"{name} {seed}".encode()))
    case = op.draw(r, seed, device)
    mode = r.choice(["eager"] * 30 + ["checkpoint", "autocast"])
    if seed % 25 == 13:
        mode = "inductor" if seed % 500 == 263 else "aot_eager"
    if not op.modes or case.options.get("dropout_p") or "bias" in case.facts:
        mode = "eager"
    if mode == "autocast" and not (isinstance(op, (Sdpa, Varlen)) and case.dtype in (BF16, F16)):
        mode = "eager"
    if mode == "autocast":
        given = {n: replace(s, dtype=F32) if n in "qkv" and r.random() < 0.7 else s for n, s in case.tensors.items()}
        case = replace(case, tensors=given)
    if mode == "checkpoint" and not case.wanted:
        mode = "eager"
    if device == "cuda" and op.aligns:
        case = with_alignment(r, case)
    if getattr(op, "takes_out", False) and mode == "eager" and seed % 2:
        case = replace(case, facts=case.facts | {"into": True})
    third = r.choice(THIRD)
    varied = case.varied or {n: case.options[n] * 1.37 for n in op.data if case.options.get(n)}
    policy = r.choice(["exact"] * 9 + ["bucketed"])
    grad = r.choice(GRADIENTS)
    return replace(case, mode=mode, third=third, varied=varied, policy=policy, grad=grad)


def with_alignment(r: random.Random, case: Case) -> Case:
    """The call with tensors that begin at multiples of 16 bytes, mostly; where they do not, it may be refused."""
    tensors = dict(case.tensors)
    for name, spec in tensors.items():
        if r.random() < 0.9:
            tensors[name] = aligned(spec)
    halves = case.facts.get("form", "two") != "two" and tensors["both"].shape[-1] // 2 * case.dtype.itemsize % 16
    is_aligned = not halves and all(spec == aligned(spec) for spec in tensors.values())
    return replace(
        case, tensors=tensors, refusable=case.refusable or "" if is_aligned else "memory that is not aligned"
    )


def poison(*shapes: tuple[tuple[int, ...], torch.dtype]) -> None:
    """Fills what the allocator will hand out next with NaN."""
    blocks = [
        torch.full((math.prod(shape) * d.itemsize,), 0xFF, dtype=torch.uint8, device="cuda") for shape, d in shapes
    ]
    del blocks


class WrongError(Exception):
    """Something is wrong that is no number."""


MODES: dict[str, Callable[[], Any]] = {"no_grad": torch.no_grad, "inference": torch.inference_mode}


class Run:
    """One call, run several times."""

    def __init__(self, case: Case, device: str) -> None:
        self.case, self.device, self.op = case, device, OPERATIONS[case.operation]
        self.generator = torch.Generator().manual_seed(zlib.crc32(f"numbers {case.operation} {case.seed}".encode()))
        self.compiled: Any = None

    def tensors(self, wanted: tuple[str, ...]) -> Tensors:
        """Fresh tensors, with those that gradients are wanted by as leaves."""
        made = {}
        for name, spec in self.case.tensors.items():
            tensor = spec.make(self.device, self.generator).detach()
            made[name] = tensor.requires_grad_() if name in wanted else tensor
        if isinstance(self.op, Sdpa):
            made |= {
                name: sequence(x, self.device) for name, x in self.case.facts.items() if name.startswith("seq_lens")
            }
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
                # Its hooks stay in force as long as its frame lives: later gradients would compute this call again.
                traceback.clear_frames(error.__traceback__)
                raise
        if mode == "autocast":
            with torch.autocast(self.device, dtype=self.case.dtype):
                return self.op.call(tensors, options, facts)
        return self.op.call(tensors, options, facts)

    def once(self, step: str, wanted: tuple[str, ...]) -> list[str]:
        """What is wrong with one step; raises what the operation raises."""
        case = self.case
        options = case.options | (case.varied if step == "options" else {})
        tensors = self.tensors(wanted)
        grads_on = step not in ("no_grad", "inference")
        torch.manual_seed(zlib.crc32(f"dropout {case.seed}".encode()))
        known = self.op.before(case, tensors, options)
        if self.device == "cuda":
            shapes = [(tuple(x.shape), x.dtype) for x in tensors.values()] * 2
            poison(*shapes, *((tuple(x.shape[:-1]), F32) for x in tensors.values() if x.dim() > 1))
        with MODES.get(step, contextlib.nullcontext)():
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
            tf32=self.device == "cuda" and isinstance(self.op, Conv),
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
        """What is wrong with the values of gradients."""
        given, problems = [grads[name].double() for name in exact], []
        true = torch.autograd.grad(list(exact.values()), [leaves[n] for n in wanted], given, allow_unused=True)
        for name, found in zip(wanted, true, strict=True):
            expected = torch.zeros_like(leaves[name]) if found is None else found
            if name in gradients:
                problems += compared(f"grad {name}", gradients[name], expected, bounds[name])
            elif expected.abs().sum() != 0:
                problems.append(f"grad {name} is None")
        return problems

    def leaves(self, tensors: Tensors, wanted: tuple[str, ...]) -> Tensors:
        """The same numbers in float64, as leaves of their own."""
        made = {}
        for name, tensor in tensors.items():
            made[name] = tensor.detach()
            if tensor.is_floating_point() or tensor.dtype in HALF_A_ULP:
                if self.case.mode == "autocast" and name in ("q", "k", "v", "attn_mask"):
                    made[name] = made[name].to(self.case.dtype)
                made[name] = made[name].double().clone().requires_grad_(name in wanted)
        return made

    def shapes(self, found: Tensors, exact: Tensors) -> Iterator[str]:
        """What is wrong with shapes, dtypes and devices."""
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
        """The gradients, those of the results, and what is wrong with them."""
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
        """What is wrong with gradients of gradients: they are right, or they raise."""
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
        problems = []
        for name, *pair in zip(wanted, found, exact_of, strict=True):
            a, b = (torch.zeros_like(leaves[name]) if x is None else x.double() for x in pair)
            if not float((a - b).norm()) <= 0.1 * float(b.norm()) + 1e-3:
                problems.append(f"the second gradient by {name} is off by {float((a - b).norm() / b.norm()):.1e}")
        return problems


@functools.cache
def pytorch_drops_graphs() -> bool:
    """Whether gradients of this PyTorch's own compiled functions are not connected with what they were computed from.

    They had no graph before pytorch#181606, and have since one that ends in an error, but not in those tensors: nothing
    is raised where `allow_unused=True` asks for gradients by these.
    """
    x = torch.randn(2, 3, requires_grad=True)
    torch._dynamo.reset()
    out = torch.compile(lambda x: x.exp().sin(), backend="aot_eager")(x)
    (found,) = torch.autograd.grad(out, x, torch.ones_like(out), create_graph=True)
    return not found.requires_grad or torch.autograd.grad(found.sum(), x, allow_unused=True)[0] is None


def refused_while_compiling(case: Case, error: Exception) -> bool:
    """Whether Dynamo says that it has met an `ArgumentError` that would be right."""
    kinds = "|".join(kind.__name__ for kind in ArgumentError.__subclasses__())
    is_of_dynamo = isinstance(error, torch._dynamo.exc.Unsupported)
    return is_of_dynamo and bool(case.refusable and re.search(rf"Observed exception(.|\n)*\b({kinds})\(", str(error)))


#: What PyTorch itself says where it cannot differentiate twice.
OF_PYTORCH = ("does not currently support double backward", "donated buffer")


def run(case: Case, device: str = "cpu") -> Outcome:
    """Runs a call, three times, and says what became of it."""
    runs = Run(case, device)
    with cudnn_sdpa.shape_policy(case.policy):
        wanted, outcome = case.wanted, Outcome("right")
        try:
            problems = runs.once("first", wanted)
        except UnsupportedError as error:
            outcome = Outcome("declined", [], list(error.reasons), error.what)
            if not wanted:
                return outcome
            wanted, runs = (), Run(replace(case, wanted=(), mode="eager"), device)
            try:
                problems = runs.once("without gradients", ())
            except UnsupportedError:
                return outcome
        except (ArgumentError, torch._dynamo.exc.Unsupported) as error:
            if not (case.refusable if isinstance(error, ArgumentError) else refused_while_compiling(case, error)):
                raise
            return Outcome("declined", [], [f"{type(error).__name__} for {case.refusable}"], "refused")
        problems += runs.once("again", wanted)
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
        return Outcome("wrong", problems) if problems else outcome


def attempt(name: str, seed: int, device: str = "cpu") -> Outcome:
    """Draws and runs a call; an exception that is not right is an outcome."""
    try:
        op = OPERATIONS[name]
        special = op.session(random.Random(zlib.crc32(f"{name} {seed}".encode())), seed, device)
        return run(draw(name, seed, device), device) if special is None else special
    except WrongError as error:
        return Outcome("wrong", [str(error)])
    except Exception as error:  # noqa: BLE001 - reported with what repeats it
        at = traceback.extract_tb(error.__traceback__)
        where = next((f"{Path(x.filename).name}:{x.lineno}" for x in reversed(at) if "cudnn_sdpa" in x.filename), "")
        return Outcome("crashed", [f"{type(error).__name__}: {str(error)[:600]} ({where or at[-1].name})"])


def line(name: str, seed: int, device: str) -> str:
    """The command that repeats a call."""
    return f"python tests/generators.py {name} {seed}" + ("" if device == "cpu" else f" --device {device}")


def main(arguments: list[str]) -> int:
    """Repeats one call, or runs many."""
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
    os.environ.setdefault("CUDNN_SDPA_PLAN_DIR", "off")  # so many plans are of no use to anybody else
    if given.operation != "all" and given.count == 1:
        return one(given.operation, given.seed, given.device)
    import campaign

    names = list(OPERATIONS) if given.operation == "all" else [given.operation]
    return campaign.main(names, given)


def one(name: str, seed: int, device: str) -> int:
    """Repeats one call and says all about it."""
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
    import generators  # the same module for workers, whatever it was started as

    sys.exit(generators.main(sys.argv[1:]))

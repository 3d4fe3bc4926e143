"""Every option is in the key of a plan as it is without others, whatever options there are beside it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from cudnn_sdpa import UnsupportedError
from cudnn_sdpa.attention.arguments import ForwardArguments, Softmax, from_fields, output_layout
from cudnn_sdpa.attention.dense.specs import BackwardSpec, DenseSpec, ForwardSpec
from cudnn_sdpa.attention.varlen.arguments import VarlenArguments
from cudnn_sdpa.attention.varlen.specs import spec_of
from cudnn_sdpa.graph.key import PlanKey, Role
from cudnn_sdpa.graph.layouts import TensorLayout
from cudnn_sdpa.graph.target import Target

TARGETS = [
    Target((("deviceVer", 900), ("multiProcessorCount", 132)), cudnn, "1.32.0", "a GPU") for cudnn in (91900, 92800)
]
BATCH, SQ, SKV = 2, 24, 40


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


#: Values of each option other than its default.
COMMON: dict[str, dict[str, Any]] = {
    "is_causal": {"is_causal": True},
    "causal, bottom-right": {"is_causal": True, "causal_alignment": "bottom_right"},
    "causal, top-left": {"is_causal": True, "causal_alignment": "top_left"},
    "window": {"window_left": 5, "window_right": 1},
    "left bound": {"window_left": 7},
    "scale": {"scale": 0.3},
    "dropout_p": {"dropout_p": 0.25, "rng": meta(2, dtype=torch.int64)},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": meta(4, dtype=torch.float32)},
    "deterministic": {"deterministic": True},
    "with_lse": {"with_lse": True},
}
DENSE = {
    **COMMON,
    "attn_mask": {"attn_mask": meta(BATCH, 1, SQ, SKV)},
    "seq_lens_q": {"seq_lens_q": meta(BATCH, dtype=torch.int32)},
    "seq_lens_kv": {"seq_lens_kv": meta(BATCH, dtype=torch.int32)},
    "alibi": {"alibi": True, "is_causal": True},
}
#: The options of the mask that is given as a band.
BAND = {"is_causal", "causal_alignment", "window_left", "window_right"}
#: What is in no key: data, and the memory of results.
NOT_STATIC = {"q", "k", "v", "out", "cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv", "window_right"}


def dense(options: dict[str, Any]) -> ForwardArguments:
    return from_fields(
        ForwardArguments, meta(BATCH, 4, SQ, 64), meta(BATCH, 2, SKV, 64), meta(BATCH, 2, SKV, 64), **options
    )


def packed(options: dict[str, Any]) -> VarlenArguments:
    given = {"sinks": None, "rng": None, **options}
    rows, ends = (meta(SQ, 4, 64), meta(SKV, 2, 64), meta(SKV, 2, 64)), meta(4, dtype=torch.int32)
    return from_fields(
        VarlenArguments,
        *rows,
        cu_seqlens_q=ends,
        cu_seqlens_kv=meta(4, dtype=torch.int32),
        max_seqlen_q=SQ,
        max_seqlen_kv=SKV,
        **given,
    )


def forward_key(options: dict[str, Any], target: Target) -> PlanKey:
    return ForwardSpec.of(dense(options)).key(target, None)


def backward_key(options: dict[str, Any], target: Target) -> PlanKey:
    call = dense(options)
    out = TensorLayout.of(call.q)
    return BackwardSpec(DenseSpec.of(call), out, out, bias_gradient=False).key(target, None)


def packed_key(options: dict[str, Any], target: Target) -> PlanKey:
    call = packed(options)
    return spec_of(call).forward_key(output_layout(call), call.with_lse, target, None)


def packed_backward_key(options: dict[str, Any], target: Target) -> PlanKey:
    call = packed(options)
    layout = output_layout(call)
    return spec_of(call).backward_key(layout, layout, target, None)


KEYS = {
    "sdpa": (forward_key, DENSE),
    "the gradient of sdpa": (backward_key, DENSE),
    "sdpa_varlen": (packed_key, COMMON),
    "the gradient of sdpa_varlen": (packed_backward_key, COMMON),
}


def contents(key: PlanKey) -> set[tuple[Any, ...]]:
    """The static options with their values, and the operands with their roles."""
    operands = {("input", x.name, x.role) for x in key.inputs} | {("output", x.name, x.role) for x in key.outputs}
    options = {name: value for name, _, value in key.options if name != "band"}
    return {*options.items(), ("band", band(key.option_values["band"])), *operands}


def band(of: Any) -> Any:
    """Where queries and keys have one length each, a bottom-right band is a top-left one that is shifted."""
    if of is None or not of[2]:
        return of
    left, right, _ = of
    shift = SKV - SQ
    return None if left is None else left - shift, None if right is None else right + shift, False


#: With soft-capping, lengths and bands are nodes of the graph, which read the bounds of each row.
LENGTHS, BOUNDS = {"seq_len_q", "seq_len_kv"}, {"lowest", "highest"}


def lacking(alone: PlanKey, nothing: PlanKey, together: PlanKey) -> set[tuple[Any, ...]]:
    """What an option brings into a key, and does not bring in beside another one."""
    missing = contents(alone) - contents(nothing) - contents(together)
    names = {operand.name for operand in together.inputs}
    if names >= BOUNDS:
        missing = {item for item in missing if item[1] not in LENGTHS}
    return {item for item in missing if item[-1] is not Role.FILL}  # full lengths, where others are given


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: str(target.cudnn))
@pytest.mark.parametrize("name", KEYS)
def test_two_options_are_in_a_key_as_each_of_them_is(name, target):
    make, values = KEYS[name]
    nothing, compared = make({}, target), 0
    for one, other in itertools.permutations(values, 2):
        both = {**values[one], **values[other]}
        if any(both[field] != value for field, value in values[one].items() if not isinstance(value, torch.Tensor)):
            continue  # the same option with another value
        try:
            alone, together = make(values[one], target), make(both, target)
        except UnsupportedError:
            continue
        missing = lacking(alone, nothing, together)
        if BAND & values[one].keys() and BAND & values[other].keys():  # one band of both
            missing = {item for item in missing if item[0] != "band"}
            assert together.option_values["band"] is not None
        assert not missing, f"{one} beside {other}"
        compared += 1
    assert compared > len(values) ** 2 / 3


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: str(target.cudnn))
@pytest.mark.parametrize("name", KEYS)
def test_values_of_options_are_in_the_key_beside_every_other_one(name, target):
    make, values = KEYS[name]
    for other in values:
        for p in (0.1, 0.25):
            try:
                key = make({**values[other], **values["dropout_p"], "dropout_p": p}, target)
            except UnsupportedError:
                continue
            assert key.option_values["dropout_p"] == p, other
            assert {"seed", "offset"} <= {operand.name for operand in key.inputs}, other


def test_every_option_is_combined():
    for call, values, lacks in ((ForwardArguments, DENSE, set()), (VarlenArguments, COMMON, {"alibi"})):
        combined = {field for given in values.values() for field in given}
        fields = {*call._fields, *Softmax._fields} - {"softmax"} - lacks
        assert fields - combined == NOT_STATIC & fields - combined

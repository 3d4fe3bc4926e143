"""The signature of a call: everything that the plan depends on is in it."""

from __future__ import annotations

import pytest
import torch

from cudnn_sdpa.attention.arguments import Softmax, from_fields
from cudnn_sdpa.attention.dense.call import SdpaCall
from cudnn_sdpa.attention.dense.sdpa import SDPA
from cudnn_sdpa.attention.dense.specs import ForwardSpec
from cudnn_sdpa.planning.support import target_of

BASE = {"q": torch.randn(2, 4, 8, 16), "k": torch.randn(2, 2, 12, 16), "v": torch.randn(2, 2, 12, 24)}
LENGTHS = torch.tensor([3, 5], dtype=torch.int32)
OUT = torch.empty(2, 4, 8, 24)
MASK = torch.randn(2, 4, 8, 12)
SINKS = torch.randn(4)
RNG = torch.tensor([3, 5])


def other_tensors(tensor):
    """One variant for each tensor property that the plan depends on."""
    return [
        torch.cat([tensor, tensor], dim=0),
        tensor.transpose(0, -1).contiguous().transpose(0, -1),
        tensor.half(),
        tensor.to("meta"),
    ]


CHANGES = [
    *({name: other} for name in ("q", "k", "v") for other in other_tensors(BASE[name])),
    *({"seq_lens_q": other} for other in (LENGTHS, torch.cat([LENGTHS, LENGTHS]), LENGTHS.long(), LENGTHS.to("meta"))),
    {"seq_lens_kv": LENGTHS},
    {"seq_lens_q": LENGTHS, "seq_lens_kv": LENGTHS},
    {"out": OUT},
    *({"out": other} for other in other_tensors(OUT)),
    {"is_causal": True},
    {"causal_alignment": "bottom_right"},
    {"scale": 0.25},
    {"scale": 0.26},
    {"with_lse": True},
    {"attn_mask": MASK},
    *({"attn_mask": other} for other in (*other_tensors(MASK), MASK[0], MASK > 0)),
    {"sinks": SINKS},
    *({"sinks": other} for other in (torch.cat([SINKS, SINKS]), SINKS.half(), SINKS.to("meta"))),
    {"rng": RNG},
    {"rng": RNG.to("meta")},
    {"window_left": 3},
    {"window_left": 4},
    {"window_right": 3},
    {"window_left": 3, "window_right": 3},
    {"dropout_p": 0.25},
    {"dropout_p": 0.5},
    {"softcap": 20.0},
    {"softcap": 30.0},
    {"alibi": True},
    {"deterministic": True},
    {"attn_mask": MASK, "with_lse": True},
    {"attn_mask": MASK, "out": OUT},
    {"attn_mask": MASK, "seq_lens_q": LENGTHS},
    {"attn_mask": MASK, "seq_lens_kv": LENGTHS},
    {"attn_mask": MASK, "scale": 0.25},
]


def signature(**changes):
    return SDPA.signature(from_fields(SdpaCall, **{**BASE, **changes}))


def test_all_changes_lead_to_different_signatures():
    signatures = [signature(), *(signature(**change) for change in CHANGES)]
    assert len(set(signatures)) == len(CHANGES) + 1


def test_every_argument_is_covered():
    assert {name for change in CHANGES for name in change} == {*SdpaCall._fields, *Softmax._fields} - {"softmax"}


def test_other_data_of_the_same_kind_has_the_same_signature():
    copies = {name: value.clone() for name, value in BASE.items()}
    data = {"seq_lens_kv": LENGTHS, "out": OUT, "attn_mask": MASK, "sinks": SINKS, "rng": RNG, "dropout_p": 0.5}
    other = {name: value + 1 if name != "dropout_p" else value for name, value in data.items()}
    assert signature(**copies) == signature()
    assert hash(signature(**copies)) == hash(signature())
    assert signature(**copies, **other) == signature(**data)
    assert hash(signature(**copies, **other)) == hash(signature(**data))


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ({"is_causal": True}, {"is_causal": 1}),
        ({"with_lse": True}, {"with_lse": 1}),
        ({"scale": 1.0}, {"scale": True}),
        ({"window_left": 1}, {"window_left": True}),
        ({"window_right": 1}, {"window_right": 1.0}),
        ({"softcap": 1.0}, {"softcap": True}),
        ({"alibi": True}, {"alibi": 1}),
        ({"attn_mask": MASK, "is_causal": True}, {"attn_mask": MASK, "is_causal": 1}),
        ({"attn_mask": MASK, "with_lse": True}, {"attn_mask": MASK, "with_lse": 1}),
    ],
    ids=" ".join,
)
def test_options_of_a_wrong_type_are_another_call(right, wrong):
    assert signature(**wrong) != signature(**right)


@pytest.mark.parametrize(
    ("sm", "queries", "concerned"), [(90, 1, True), (90, 8, False), (80, 8, False), (100, 8, True)]
)
def test_determinism_is_in_the_key_of_single_queries(sm, queries, concerned):
    q, k, v = (torch.empty(2, 4, n, 64, dtype=torch.bfloat16, device="meta") for n in (queries, 100, 100))
    for deterministic in (False, True):
        forward = ForwardSpec.of(from_fields(SdpaCall, q, k, v, deterministic=deterministic))
        values = forward.key(target_of(sm, "9.28.0"), None).option_values
        assert values.get("deterministic", False) is (deterministic and concerned)

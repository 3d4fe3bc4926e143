"""The raw signature of a call: whatever decides the call is in it."""

from __future__ import annotations

import pytest
import torch

from cudnn_sdpa.attention import lookup

BASE = {
    "q": torch.randn(2, 4, 8, 16),
    "k": torch.randn(2, 2, 12, 16),
    "v": torch.randn(2, 2, 12, 24),
    "seq_lens_q": None,
    "seq_lens_kv": None,
    "is_causal": False,
    "causal_alignment": "top_left",
    "scale": None,
    "return_lse": False,
    "out": None,
}
LENGTHS = torch.tensor([3, 5], dtype=torch.int32)
OUT = torch.empty(2, 4, 8, 24)


def other_tensors(tensor):
    """One for each property of a tensor that decides a call."""
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
    {"return_lse": True},
]


def signature(**changes):
    return lookup.signature(**{**BASE, **changes})


def test_all_changes_lead_to_different_signatures():
    signatures = [signature(), *(signature(**change) for change in CHANGES)]
    assert len(set(signatures)) == len(CHANGES) + 1


def test_other_data_of_the_same_kind_has_the_same_signature():
    copies = {name: value.clone() for name, value in BASE.items() if isinstance(value, torch.Tensor)}
    lengths, out = {"seq_lens_kv": LENGTHS, "out": OUT}, {"seq_lens_kv": LENGTHS + 1, "out": OUT.clone()}
    assert signature(**copies) == signature()
    assert hash(signature(**copies)) == hash(signature())
    assert signature(**copies, **out) == signature(**lengths)


@pytest.mark.parametrize(
    "change", [{"q": None}, {"k": [1.5]}, {"seq_lens_q": [3, 5]}, {"causal_alignment": []}, {"scale": {}}], ids=str
)
def test_what_has_no_signature_finds_no_call(change):
    assert lookup.find(**{**BASE, **change}) is None


def test_tensors_of_the_cpu_find_no_call_however_often_they_come():
    assert [lookup.find(**BASE) for _ in range(3)] == [None] * 3


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ({"is_causal": True}, {"is_causal": 1}),
        ({"return_lse": True}, {"return_lse": 1}),
        ({"scale": 1.0}, {"scale": True}),
    ],
    ids=["is_causal", "return_lse", "scale"],
)
def test_values_of_a_wrong_type_do_not_pass_for_right_ones(right, wrong):
    assert signature(**wrong) != signature(**right)

"""The signature of a call: everything that the plan depends on is in it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from cudnn_sdpa import OptionError, sdpa
from cudnn_sdpa.attention.arguments import ForwardArguments
from cudnn_sdpa.attention.dense import fast_path, launch
from cudnn_sdpa.attention.dense.plans import ForwardSpec
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
    {"attn_mask": MASK, "with_lse": True},
    {"attn_mask": MASK, "out": OUT},
    {"attn_mask": MASK, "seq_lens_q": LENGTHS},
    {"attn_mask": MASK, "seq_lens_kv": LENGTHS},
    {"attn_mask": MASK, "scale": 0.25},
]


def signature(**changes):
    return launch.signature(ForwardArguments(**{**BASE, **changes}))


def find(q, k, v, seq_lens_kv=None, is_causal=False, causal_alignment="top_left", scale=None, return_lse=False):
    return fast_path.find(q, k, v, seq_lens_kv, is_causal, causal_alignment, scale, return_lse)


def test_all_changes_lead_to_different_signatures():
    signatures = [signature(), *(signature(**change) for change in CHANGES)]
    assert len(set(signatures)) == len(CHANGES) + 1


def test_every_argument_is_covered():
    """All but `deterministic`, which only concerns the forward pass of single queries: see below."""
    assert {name for change in CHANGES for name in change} == set(ForwardArguments._fields) - {"deterministic"}


def test_other_data_of_the_same_kind_has_the_same_signature():
    copies = {name: value.clone() for name, value in BASE.items()}
    data = {"seq_lens_kv": LENGTHS, "out": OUT, "attn_mask": MASK, "sinks": SINKS, "rng": RNG, "dropout_p": 0.5}
    other = {name: value + 1 if name != "dropout_p" else value for name, value in data.items()}
    assert signature(**copies) == signature()
    assert hash(signature(**copies)) == hash(signature())
    assert signature(**copies, **other) == signature(**data)
    assert hash(signature(**copies, **other)) == hash(signature(**data))


def test_a_plain_call_has_the_signature_of_the_fast_path():
    q, k, v = BASE.values()
    call = ForwardArguments(q, k, v, None, None, LENGTHS, LENGTHS, is_causal=True, scale=0.3, with_lse=True, out=OUT)
    assert call.is_plain
    plain = launch.plain_signature(q, k, v, LENGTHS, LENGTHS, True, "top_left", 0.3, True, OUT)
    assert launch.signature(call) == plain


@pytest.mark.parametrize(
    "change",
    [
        *({"attn_mask": MASK}, {"sinks": SINKS}, {"window_left": 3}, {"window_right": 0}),
        *({"rng": RNG, "dropout_p": 0.5}, {"softcap": 20.0}, {"alibi": True}),
        *({"window_left": -1.0}, {"window_right": -1.0}, {"alibi": 0}, {"alibi": 0.0}, {"dropout_p": 0}),
        *({"dropout_p": False}, {"softcap": 0}, {"alibi": None}),
    ],
    ids=lambda change: " ".join(
        f"{name}={'tensor' if name in ('attn_mask', 'sinks', 'rng') else value!r}" for name, value in change.items()
    ),
)
def test_a_call_with_any_of_the_rarer_options_is_not_plain(change):
    assert not ForwardArguments(**BASE, **change).is_plain


@pytest.mark.parametrize(
    "change",
    [{"q": None}, {"k": [1.5]}, {"seq_lens_kv": [3, 5]}, {"causal_alignment": []}, {"scale": {}}],
    ids="+".join,
)
def test_calls_without_a_signature_are_not_cached(change):
    assert find(**{**BASE, **change}) is None


@pytest.mark.parametrize(
    "change",
    [
        *({"seq_lens_q": LENGTHS, "causal_alignment": []}, {"attn_mask": MASK, "scale": {}}),
        *({"softcap": []}, {"window_left": [], "window_right": 3}),
    ],
    ids="+".join,
)
def test_calls_with_rarer_options_are_not_cached_by_invalid_values(change):
    assert fast_path.find_any(ForwardArguments(**{**BASE, **change}), None) is None


def test_cpu_tensors_are_never_cached():
    assert [find(**BASE) for _ in range(3)] == [None] * 3
    assert [fast_path.find_any(ForwardArguments(**BASE, attn_mask=MASK), None) for _ in range(3)] == [None] * 3


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


SINGLE = {**BASE, "q": torch.randn(2, 4, 1, 16)}


@pytest.mark.parametrize("more", [{}, {"window_left": 3}, {"sinks": SINKS}], ids="+".join)
def test_determinism_changes_the_signature_of_single_queries_only(more):
    assert signature(deterministic=True, **more) == signature(**more)
    one = [signature(**{**SINGLE, **more, "deterministic": deterministic}) for deterministic in (False, True)]
    assert one[0] != one[1]


@pytest.mark.parametrize(
    ("sm", "queries", "concerned"), [(90, 1, True), (90, 8, False), (80, 8, False), (100, 8, True)]
)
def test_determinism_is_in_the_key_of_single_queries(sm, queries, concerned):
    q, k, v = (torch.empty(2, 4, n, 64, dtype=torch.bfloat16, device="meta") for n in (queries, 100, 100))
    for deterministic in (False, True):
        forward = ForwardSpec.of(ForwardArguments(q, k, v, deterministic=deterministic))
        values = forward.key(target_of(sm, "9.28.0"), None).option_values
        assert values.get("deterministic", False) is (deterministic and concerned)


@pytest.fixture
def prepared(monkeypatch):
    """Adds the plain calls of `BASE` and `SINGLE` to the cache, as calls on a GPU would."""
    plan = SimpleNamespace(held=True)
    call = lambda *_: "prepared"  # noqa: E731 - it needs attributes
    call.run, call.last, call.plan, call.training = call, None, plan, None
    table = type(launch.calls)(launch.CachedCall(None, launch._matches_nothing, None, "", None, False, False))
    monkeypatch.setattr(launch, "calls", table)
    for with_lse in (False, True):
        table.add(signature(with_lse=with_lse), call)
        table.add(signature(with_lse=with_lse, q=SINGLE["q"]), call)


@pytest.mark.usefixtures("prepared")
def test_a_cached_call_is_found():
    assert sdpa(**BASE) == "prepared"
    assert sdpa(**BASE, window_size=(-1, -1), alibi=False, dropout_p=0.0, return_lse=False) == "prepared"
    assert sdpa(**BASE, return_lse=True) == "prepared"


@pytest.fixture
def deterministic_algorithms():
    """Sets and restores PyTorch's setting."""
    before = torch.are_deterministic_algorithms_enabled()
    yield torch.use_deterministic_algorithms
    torch.use_deterministic_algorithms(before)


@pytest.mark.usefixtures("prepared")
@pytest.mark.parametrize(
    "options", [{}, {"window_size": (-1, -1), "dropout_p": 0.0, "seq_lens_q": None}, {"scale": None}]
)
def test_a_cached_single_query_is_not_found_under_determinism(deterministic_algorithms, options):
    for _ in range(2):
        assert sdpa(**SINGLE, **options) == "prepared"
        deterministic_algorithms(True)
        assert isinstance(sdpa(**SINGLE, **options), torch.Tensor)
        assert sdpa(**BASE, **options) == "prepared"
        assert isinstance(sdpa(**SINGLE, **options), torch.Tensor)
        deterministic_algorithms(False)
        assert isinstance(sdpa(**SINGLE, **options, deterministic=True), torch.Tensor)


@pytest.mark.usefixtures("prepared")
@pytest.mark.parametrize("requires_grad", [False, True], ids=["", "with gradient"])
@pytest.mark.parametrize(
    "wrong",
    [
        *({"window_size": (-1.0, -1.0)}, {"window_size": (-1, -1.0)}, {"alibi": 0}, {"alibi": 0.0}, {"alibi": None}),
        *({"return_lse": 0}, {"return_lse": None}, {"return_lse": 1}, {"is_causal": 0}, {"is_causal": None}),
        *({"dropout_p": False}, {"dropout_p": None}, {"softcap": 0}, {"scale": False}, {"deterministic": 0}),
    ],
    ids=repr,
)
def test_a_cached_call_does_not_hide_wrong_options(wrong, requires_grad):
    call = {name: x.detach().requires_grad_(requires_grad) for name, x in BASE.items()}
    with pytest.raises(OptionError, match=next(iter(wrong))):
        sdpa(**call, **wrong)

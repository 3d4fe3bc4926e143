"""`fallback("torch")` without a GPU: what it runs, refuses and logs."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from gradient_checks import assert_right

from cudnn_sdpa import (
    DtypeError,
    LayoutError,
    OptionError,
    ShapeError,
    UnsupportedError,
    fallback,
    scaled_dot_product_attention,
    sdpa,
    sdpa_varlen,
)
from cudnn_sdpa.attention.dense.call import SdpaCall
from cudnn_sdpa.engine import fallback as module
from cudnn_sdpa.engine import operation
from cudnn_sdpa.engine.operation.pipeline import Tracked

OFFSETS = torch.tensor([0, 3, 10], dtype=torch.int32)
LENGTHS = torch.tensor([3, 5], dtype=torch.int32)


@pytest.fixture(autouse=True)
def nothing_said():
    module._said.clear()


@pytest.fixture
def declined(monkeypatch):
    def decline(*_):
        raise UnsupportedError("sdpa", ["no kernel"])

    monkeypatch.setattr(operation.Operation, "_run", decline)


@pytest.fixture
def ways(monkeypatch):
    """Records where calls run: on PyTorch's attention, or on the reference."""
    taken = []
    pytorch, reference = F.scaled_dot_product_attention, SdpaCall.reference

    def on(name, function):
        return lambda *args, **options: taken.append(name) or function(*args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", on("pytorch", pytorch))
    monkeypatch.setattr(SdpaCall, "reference", on("reference", reference))
    return taken


def qkv(dim=16, dim_v=24, dtype=torch.float32):
    return {
        "q": torch.randn(2, 4, 8, dim).to(dtype),
        "k": torch.randn(2, 2, 12, dim).to(dtype),
        "v": torch.randn(2, 2, 12, dim_v).to(dtype),
    }


PYTORCHS = [
    *({}, {"is_causal": True}, {"scale": 0.3}, {"attn_mask": torch.randn(8, 12)}, {"attn_mask": torch.randn(12)}),
    *(
        {"attn_mask": torch.tensor(0.5)},
        {"attn_mask": torch.rand(2, 1, 8, 12) < 0.9},
        {"attn_mask": torch.rand(12) < 0.9},
    ),
    *({"deterministic": True}, {"out": torch.empty(2, 4, 8, 24)}),
]
REFERENCES = [
    *(
        {"softcap": 5.0},
        {"sinks": torch.randn(4)},
        {"seq_lens_kv": LENGTHS},
        {"window_size": (3, 0)},
        {"return_lse": True},
    ),
    *({"is_causal": True, "causal_alignment": "bottom_right"}, {"is_causal": True, "attn_mask": torch.randn(8, 12)}),
    {"is_causal": True, "alibi": True},
]


def name_of(options):
    return "+".join(options)


@pytest.mark.parametrize(
    ("way", "options"), [(way, x) for way, xs in (("pytorch", PYTORCHS), ("reference", REFERENCES)) for x in xs]
)
def test_unsupported_calls_are_right_on_pytorch(way, options, ways, request):
    call = qkv() | options
    expected = sdpa(**call | {"out": None})
    ways.clear()
    request.getfixturevalue("declined")
    with pytest.raises(UnsupportedError):
        sdpa(**call)
    with fallback("torch"):
        found = sdpa(**call)
    assert ways == [way]
    torch.testing.assert_close(found, expected)
    if "out" in options:
        assert found is options["out"]


@pytest.mark.usefixtures("declined")
def test_a_float32_mask_with_half_precision_inputs_keeps_its_precision(ways):
    call = qkv(dtype=torch.bfloat16)
    mask = torch.linspace(100, 101, 12)  # bfloat16 has a spacing of 0.5 there
    with fallback("torch"):
        out = sdpa(**call, attn_mask=mask)
    assert ways == ["reference"]
    q, k, v = (x.float() for x in call.values())
    expected = F.scaled_dot_product_attention(q, k, v, mask.expand(8, 12), enable_gqa=True)
    torch.testing.assert_close(out.float(), expected, rtol=8e-3, atol=1e-3)


@pytest.mark.usefixtures("declined")
def test_deterministic_gradients_come_from_the_reference(ways):
    call = {name: x.requires_grad_() for name, x in qkv().items()}
    with fallback("torch"):
        sdpa(**call, deterministic=True).sum().backward()
        assert ways == ["reference"]
        sdpa(**call, deterministic=False)
        assert ways == ["reference", "pytorch"]
        with torch.no_grad():
            sdpa(**call, deterministic=True)
    assert ways == ["reference", "pytorch", "pytorch"]


@pytest.mark.usefixtures("declined")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [4, 2])
def test_output_has_the_memory_order_of_q(dtype, heads):
    q = torch.randn(2, 8, 4, 16).to(dtype).transpose(1, 2)
    k = torch.randn(2, heads, 12, 16).to(dtype)
    orders = (q, q.contiguous(), q.transpose(0, 1).contiguous().transpose(0, 1))
    with fallback("torch"):
        assert [sdpa(x, k, k).stride() for x in orders] == [x.stride() for x in orders]


LIMITED = [(20, 20), (16, 30), (7, 3), (1, 16)]


@pytest.mark.parametrize("dims", LIMITED, ids=str)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"softcap": 5.0}, {"window_size": (3, 1)}], ids=name_of)
def test_unsupported_head_dims_run_with_gradients(dims, options):
    call = qkv(*dims, dtype=torch.float64) | options
    with pytest.raises(ShapeError, match="multiple of 8"):
        sdpa(**call)
    with fallback("torch"):
        assert_right(qkv(*dims, dtype=torch.float64), **options)
        assert sdpa(**call).shape == (2, 4, 8, dims[1])


def test_without_an_lse_they_run_on_pytorchs_attention(ways):
    call = {name: x.requires_grad_() for name, x in qkv(20, 28).items()}
    expected = F.scaled_dot_product_attention(
        **dict(zip(("query", "key", "value"), call.values(), strict=True)), enable_gqa=True
    )
    ways.clear()
    with fallback("torch"):
        out = sdpa(**call)
        same = scaled_dot_product_attention(*call.values(), enable_gqa=True)
    assert ways == ["pytorch"] * 2
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(same, expected)
    grad_out = torch.randn_like(out)
    for a, b in zip(*(torch.autograd.grad(x, call.values(), grad_out) for x in (out, expected)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}], ids=["pytorch", "reference"])
def test_unsupported_dtypes_run_on_cuda_devices(dtype, options):
    """Fake tensors replace those of a GPU."""
    call = {name: x.to("meta", dtype) for name, x in qkv().items()}
    with pytest.raises(DtypeError, match="float16 or bfloat16 on meta"):
        sdpa(**call, **options)
    with fallback("torch"):
        assert sdpa(**call, **options).shape == (2, 4, 8, 24)


def test_the_fallback_of_packed_sequences_has_the_same_limits():
    q, k, v = (torch.randn(10, 2, dim, requires_grad=True) for dim in (20, 20, 30))
    with pytest.raises(ShapeError, match="multiple of 8"):
        sdpa_varlen(q, k, v, OFFSETS, OFFSETS, 7, 7)
    target = torch.empty(10, 2, 30)
    with fallback("torch"):
        out, lse = sdpa_varlen(q, k, v, OFFSETS, OFFSETS, 7, 7, is_causal=True, return_lse=True)
        with torch.no_grad():
            assert sdpa_varlen(q, k, v, OFFSETS, OFFSETS, 7, 7, is_causal=True, out=target) is target
    assert torch.equal(target, out)
    assert lse.shape == (10, 2)
    parts = [[x[a:b].transpose(0, 1) for x in (q, k, v)] for a, b in ((0, 3), (3, 10))]
    expected = torch.cat([F.scaled_dot_product_attention(*part, is_causal=True).transpose(0, 1) for part in parts])
    torch.testing.assert_close(out, expected)
    grad_out = torch.randn_like(out)
    for a, b in zip(*(torch.autograd.grad(x, (q, k, v), grad_out) for x in (out, expected)), strict=True):
        torch.testing.assert_close(a, b)


WRONG = {
    "keys of another head dim": ({"k": torch.randn(2, 2, 12, 24)}, ShapeError, "k: got head dim 24; expected 20"),
    "keys in half": ({"k": torch.randn(2, 2, 12, 20).half()}, DtypeError, "k: got float16"),
    "integers": ({"q": torch.ones(2, 4, 8, 20).int()}, DtypeError, "q: got int32"),
    "head dim 0": ({"v": torch.randn(2, 2, 12, 0)}, ShapeError, "v: got head dim 0; expected a positive"),
    "other heads": ({"k": torch.randn(2, 3, 12, 20)}, ShapeError, "k: got 3 heads"),
    "mask": ({"attn_mask": torch.randn(9, 12)}, ShapeError, "attn_mask: got shape"),
    "sinks": ({"sinks": torch.randn(5)}, ShapeError, "sinks: got shape"),
    "window_size": ({"window_size": 3}, OptionError, "window_size: got 3"),
    "out": ({"out": torch.empty(2, 4, 8, 16)}, ShapeError, "out: got shape"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_still_raise(case, caplog):
    changes, error, message = WRONG[case]
    with fallback("torch"), caplog.at_level(logging.WARNING, "cudnn_sdpa"), pytest.raises(error, match=message):
        sdpa(**qkv(20, 20) | changes)
    assert not caplog.records


@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}], ids=["pytorch", "reference"])
def test_out_may_have_strides_that_cudnn_cannot_write(options):
    call = qkv(20, 21) | options
    out = torch.full((2, 4, 8, 23), torch.nan)
    with fallback("torch"):
        assert torch.equal(sdpa(**call), sdpa(**call, out=out[..., :21]))
        assert out[..., 21:].isnan().all()
        with pytest.raises(LayoutError, match=r"out: got strides .* that overlap"):
            sdpa(**call, out=out[:, :1, :, :21].expand(-1, 4, -1, -1))


@pytest.mark.parametrize("dim", [16, 20])
def test_out_in_the_memory_of_an_input_still_raises(dim):
    call = qkv(dim, dim)
    with fallback("torch"), pytest.raises(LayoutError, match="out: got memory that overlaps q"):
        sdpa(**call, out=call["q"])


@pytest.mark.usefixtures("declined")
@pytest.mark.parametrize("to", ["torch", None])
def test_out_with_gradients_and_forward_mode_are_refused_with_and_without_fallback(to):
    call = {name: x.requires_grad_() for name, x in qkv().items()}
    q, k, v = (x.detach()[0].transpose(0, 1) for x in call.values())
    out = torch.full((2, 4, 8, 24), torch.nan)
    with fallback(to):
        with pytest.raises(UnsupportedError, match="out with a gradient"):
            sdpa(**call, out=out)
        with pytest.raises(UnsupportedError, match="forward-mode"):
            torch.func.jvp(lambda q: sdpa(q, call["k"], call["v"]), (call["q"],), (call["q"],))
        ends = torch.tensor([0, 8], dtype=torch.int32), torch.tensor([0, 12], dtype=torch.int32)
        with pytest.raises(UnsupportedError, match="forward-mode"):
            torch.func.jvp(lambda q: sdpa_varlen(q, k, v, *ends, 8, 12), (q,), (q,))
        with pytest.raises(UnsupportedError, match="out with a gradient"):
            sdpa_varlen(q.requires_grad_(), k, v, *ends, 8, 12, out=out[0].transpose(0, 1))
    assert out.isnan().all()


def warnings_of(caplog, run):
    caplog.clear()
    with fallback("torch"), caplog.at_level(logging.WARNING, "cudnn_sdpa"):
        run()
    return [record.getMessage() for record in caplog.records]


@pytest.mark.usefixtures("declined")
def test_calls_of_one_kind_are_logged_once_for_all_sizes(caplog):
    def run():
        for length in range(1, 20):
            x = torch.randn(length % 3 + 1, 2, length, 16)
            sdpa(x, x, x, window_size=(length, 0), scale=0.1 * length)

    assert warnings_of(caplog, run) == ["running on PyTorch instead: sdpa is not supported here:\n  - no kernel"]
    assert warnings_of(caplog, run) == []


@pytest.mark.usefixtures("declined")
def test_packed_calls_are_logged_once_for_all_sizes(caplog):
    def run():
        for length in range(7, 20):
            x = torch.randn(10, 2, 16)
            sdpa_varlen(x, x, x, OFFSETS, OFFSETS, length, length, is_causal=True)

    assert len(warnings_of(caplog, run)) == 1


@pytest.mark.usefixtures("declined")
def test_other_options_are_logged_again(caplog):
    x = torch.randn(2, 2, 7, 16)
    kinds = [
        *({}, {"is_causal": True}, {"window_size": (3, 3)}, {"softcap": 3.0}, {"dropout_p": 0.1}, {"return_lse": True}),
        *({"attn_mask": torch.randn(7, 7)}, {"sinks": torch.randn(2)}, {"deterministic": True}),
    ]

    def run():
        for options in kinds:
            sdpa(x, x, x, **options)
        sdpa(*(x.half(),) * 3)

    assert len(warnings_of(caplog, run)) == len(kinds) + 1
    assert warnings_of(caplog, run) == []


def test_limits_are_logged_with_their_values(caplog):
    call = qkv(20, 20)
    (message,) = warnings_of(caplog, lambda: sdpa(**call))
    assert "q: got head dim 20; expected a positive multiple of 8" in message


def test_the_memory_of_logged_calls_is_bounded(monkeypatch, caplog):
    monkeypatch.setattr(module, "MAX_SAID", 3)
    for dim in range(17, 24):
        assert len(warnings_of(caplog, lambda dim=dim: sdpa(**qkv(dim, 16)))) == 1
        assert len(module._said) <= 3


def test_packed_sequences_have_their_own_reference(monkeypatch, request):
    request.getfixturevalue("declined")
    seen = []
    forward = Tracked.forward
    monkeypatch.setattr(Tracked, "forward", lambda *args: seen.append(args[0].by_reference) or forward(*args))
    q = torch.randn(10, 2, 16)
    with fallback("torch"):
        sdpa_varlen(q, q, q, OFFSETS, OFFSETS, 7, 7)
    assert seen == [True]

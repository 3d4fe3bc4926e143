"""Gradients of attention in MXFP8, in PyTorch, against float64 mathematics; and the keys of their plans."""

from __future__ import annotations

import mathematics
import pytest
import torch

from cudnn_sdpa import DtypeError, ShapeError, UnsupportedError
from cudnn_sdpa.attention import mxfp8, mxfp8_backward
from cudnn_sdpa.attention.arguments import ForwardArguments
from cudnn_sdpa.attention.mxfp8_backward import BothWays, Operands
from cudnn_sdpa.runtime import known_issues
from cudnn_sdpa.runtime.target import Target

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def target(sm, cudnn=92800):
    return Target((("deviceVer", 10 * sm), ("multiProcessorCount", 148)), cudnn, "1.32.0", "a GPU")


def simple(*shape):
    """Random numbers that MXFP8 holds, whichever way its blocks lie."""
    return torch.randint(-8, 9, shape).double() / 8


def operands(q, k, v, grad_out, out, lse, do_dtype=E4M3):
    do = BothWays.of(grad_out, do_dtype)
    return Operands(BothWays.of(q), BothWays.of(k), mxfp8.quantized(v), out, grad_out, do, lse)


def made(make, sizes=(70, 100), dims=(64, 32), do_dtype=E4M3, **options):
    """Operands, their call, and the gradients in float64."""
    q, k, v = make(2, 4, sizes[0], dims[0]), make(2, 2, sizes[1], dims[0]), make(2, 2, sizes[1], dims[1])
    grad_out = make(2, 4, sizes[0], dims[1])
    options = {"scale": 0.2, **options}
    out, lse, wanted = mathematics.gradients({"q": q, "k": k, "v": v}, grad_out, **options)
    if "window" in options:
        options["window_left"], options["window_right"] = options.pop("window")
    call = ForwardArguments(q, k, v, **options)
    return operands(q, k, v, grad_out, out, lse, do_dtype), call, [wanted[name] for name in ("q", "k", "v")]


def error(found, wanted):
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True, "causal_alignment": "bottom_right"},
        {"window": (10, 3)},
        {"seq_lens_q": torch.tensor([70, 33]), "seq_lens_kv": torch.tensor([41, 100])},
    ],
    ids=["plain", "bottom-right", "window", "lengths"],
)
@pytest.mark.parametrize(("do_dtype", "bound"), [(E4M3, 0.04), (E5M2, 0.08)])
def test_gradients_of_exact_operands_have_the_error_of_rounded_weights(options, do_dtype, bound):
    of, call, wanted = made(simple, do_dtype=do_dtype, **options)
    found = mxfp8_backward.gradients(of, call)
    for gradient, true in zip(found[:3], wanted, strict=True):
        assert 1e-4 < error(gradient, true) < bound
    for gradient, amax in zip(found[:3], found[3:], strict=True):
        assert amax.dtype == torch.float32
        torch.testing.assert_close(amax, gradient.abs().amax().float().view(1))


def test_gradients_of_normal_operands_have_the_error_of_the_format():
    of, call, wanted = made(lambda *shape: torch.randn(shape).double(), is_causal=True)
    found = mxfp8_backward.gradients(of._replace(out=of.out.float()), call)
    assert found.dq.dtype == torch.float32
    for gradient, true in zip(found[:3], wanted, strict=True):
        assert error(gradient, true) < 0.13


def doubled(blocks):
    return blocks._replace(exponents=blocks.exponents + 1)


@pytest.mark.parametrize(("name", "changed"), [("q", "dk"), ("k", "dq"), ("do", "dv")])
def test_blocks_along_the_sequence_are_for_one_product_each(name, changed):
    of, call, _ = made(simple)
    ways = getattr(of, name)
    before = mxfp8_backward.gradients(of, call)
    after = mxfp8_backward.gradients(of._replace(**{name: ways._replace(along_rows=doubled(ways.along_rows))}), call)
    for result in ("dq", "dk", "dv"):
        factor = 2 if result == changed else 1
        torch.testing.assert_close(getattr(after, result), factor * getattr(before, result), rtol=0, atol=0)


def test_an_outlier_harms_its_own_block_alone():
    of, call, _ = made(simple)
    grad_out = of.grad_out.clone()
    grad_out[0, 0, 0, 0] = 1e4
    out, lse, wanted = mathematics.gradients({"q": call.q, "k": call.k, "v": call.v}, grad_out, scale=0.2)
    found = mxfp8_backward.gradients(operands(call.q, call.k, call.v, grad_out, out, lse), call)
    assert error(found.dv[..., 1:], wanted["v"][..., 1:]) < 0.04
    assert error(found.dq[0, 0, 1:], wanted["q"][0, 0, 1:]) < 0.04


def bare(*shape, dtype=E4M3):
    return torch.empty(shape, dtype=dtype, device="meta")


def key_of(where, *, dims=(192, 128), sizes=(500, 1001), dtype=E4M3, half=torch.bfloat16, do_dtype=E4M3, **options):
    q, k, v = bare(2, 8, sizes[0], dims[0]), bare(2, 2, sizes[1], dims[0]), bare(2, 2, sizes[1], dims[1])
    call = ForwardArguments(*(x.to(dtype) for x in (q, k, v)), **options)
    out = bare(2, 8, sizes[0], dims[1], dtype=half)
    return mxfp8_backward.backward_key(call, out, out, where, None, do_dtype)


def test_layouts_of_a_key():
    key = key_of(target(100), do_dtype=E5M2)
    layouts = {operand.name: operand.layout for operand in (*key.inputs, *key.outputs)}
    shapes = {name.removeprefix("descale_"): x.shape for name, x in layouts.items() if name.startswith("descale_")}
    assert shapes == {
        "q": (2, 8, 512, 8),
        "q_t": (2, 8, 16, 256),
        "k": (2, 2, 1024, 8),
        "k_t": (2, 2, 32, 256),
        "v": (2, 2, 1024, 4),
        "do": (2, 8, 512, 4),
        "do_t": (2, 8, 16, 128),
    }
    assert layouts["do"].dtype == layouts["do_t"].dtype == E5M2
    assert layouts["q_t"].dtype == E4M3
    assert layouts["grad_k"].shape == (2, 2, 1001, 192)
    assert {layouts[name].dtype for name in ("out", "grad_out", "grad_q", "grad_k", "grad_v")} == {torch.bfloat16}


def test_full_lengths_hide_the_last_tiles_where_cudnn_needs_it():
    def lengths(key):
        return {operand.name for operand in key.inputs} & {"seq_len_q", "seq_len_kv"}

    assert lengths(key_of(target(100, 92700))) == {"seq_len_q", "seq_len_kv"}
    assert not lengths(key_of(target(100)))
    assert not lengths(key_of(target(100, 92700), sizes=(512, 1024)))
    assert any("very negative" in issue.fault for issue in known_issues.concerning(key_of(target(100, 92700))))
    known_issues.check(key_of(target(100, 92700)))


@pytest.mark.parametrize(
    ("where", "options", "reason"),
    [
        (target(90), {}, "needs SM 100"),
        (target(120), {}, "needs SM 100"),
        (target(100, 91900), {}, r"needs cuDNN 9\.21"),
        (target(100), {"dims": (256, 256)}, "no kernel for head dims 256 and 256"),
        (target(100), {"dims": (192, 192)}, "no kernel for head dims 192 and 192"),
        (target(100), {"dtype": E5M2}, "no kernel for q, k and v in float8_e5m2"),
        (target(100), {"alibi": True}, "no attn_mask, sinks"),
        (target(100), {"sizes": (1, 1)}, "one query on one key"),
    ],
)
def test_it_is_refused_with_a_reason(where, options, reason):
    with pytest.raises(UnsupportedError, match=reason) as caught:
        key_of(where, **options)
    assert caught.value.suggestion


def test_wrong_tensors_are_refused():
    with pytest.raises(DtypeError, match="q"):
        key_of(target(100), dtype=torch.bfloat16)
    with pytest.raises(DtypeError, match="out"):
        key_of(target(100), half=torch.float32)
    with pytest.raises(DtypeError, match="do_dtype"):
        key_of(target(100), do_dtype=torch.float16)
    with pytest.raises(ShapeError, match="head dim 100"):
        key_of(target(100), dims=(100, 128))
    q = bare(2, 8, 64, 64)
    out = bare(2, 8, 64, 64, dtype=torch.bfloat16)
    with pytest.raises(DtypeError, match="k"):
        mxfp8_backward.backward_key(ForwardArguments(q, q.to(E5M2), q), out, out, target(100), None)
    with pytest.raises(ShapeError, match="grad_out"):
        mxfp8_backward.backward_key(ForwardArguments(q, q, q), out, out[:, :, 1:], target(100), None)

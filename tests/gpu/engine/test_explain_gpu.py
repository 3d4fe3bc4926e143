"""`explain` on a GPU: it builds exactly the plans that the call uses, and verifies their results."""

from __future__ import annotations

import pytest
import torch

from cudnn_sdpa import explain, plan_cache, sdpa, sdpa_varlen

#: Errors of out, LSE and gradients in bfloat16.
ROUNDING = {"out": 8e-3, "lse": 1e-4, "grad sinks": 5e-2}  # most of the sinks' gradient cancels
OF_GRADIENT = 2e-2


def random(*shape, dtype=torch.bfloat16, grad=True):
    return torch.randn(*shape, device="cuda", dtype=dtype).requires_grad_(grad)


def bshd(sq=200, skv=333, heads=(8, 2), grad=True):
    shapes = ((sq, heads[0]), (skv, heads[1]), (skv, heads[1]))
    return [random(2, length, h, 64, grad=False).transpose(1, 2).requires_grad_(grad) for length, h in shapes]


def offsets(*lengths):
    return torch.tensor([0, *lengths], device="cuda").cumsum(0).int()


def assert_verified(result, names):
    assert result.supported, result.reasons
    assert not result.offline
    assert result.native.startswith(("C++: ", "Python: "))
    assert list(result.errors) == names
    for name, error in result.errors.items():
        assert error < ROUNDING.get(name, OF_GRADIENT), (name, error)


DENSE = {
    "plain": {},
    "causal": {"is_causal": True, "return_lse": True},
    "fully masked rows": {"is_causal": True, "causal_alignment": "bottom_right"},
    "window, lengths": {"window_size": (64, 8), "seq_lens": True},
    "mask, sinks": {"attn_mask": (8, 200, 333), "sinks": True},
    "softcap": {"softcap": 5.0, "is_causal": True},
    "negative scale": {"scale": -0.1, "is_causal": True},
    "deterministic": {"deterministic": True},
}


@pytest.mark.usefixtures("default_providers")
@pytest.mark.parametrize("name", DENSE)
def test_verify_a_dense_call_with_gradients_on_its_own_plans(name):
    options = dict(DENSE[name])
    q, k, v = bshd(*((333, 200) if name == "fully masked rows" else (200, 333)))
    names = ["out", "lse", "grad q", "grad k", "grad v"]
    if "attn_mask" in options:
        options["attn_mask"] = random(*options["attn_mask"])
        names.append("grad attn_mask")
    if options.pop("sinks", False):
        options["sinks"] = random(8, dtype=torch.float32)
        names.append("grad sinks")
    if options.pop("seq_lens", False):
        options["seq_lens_kv"] = torch.tensor([333, 77], dtype=torch.int32, device="cuda")
    result = explain(sdpa, q, k, v, **options, verify=True)
    assert_verified(result, names)
    assert result.backward.supported, result.backward.reasons
    assert plan_cache.info().builds == 2  # the explained plans run
    again = explain(sdpa, q, k, v, **options)
    assert again.cached
    assert again.backward.cached
    assert (again.key, again.backward.key) == (result.key, result.backward.key)
    result = sdpa(q, k, v, **options)
    out = result[0] if options.get("return_lse") else result
    out.backward(torch.randn_like(out))
    assert plan_cache.info().builds == 2


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("sq", [1, 200])
def test_verify_a_dense_call_without_gradients(sq, return_lse):
    q, k, v = bshd(sq, grad=False)
    result = explain(sdpa, q, k, v, return_lse=return_lse, verify=True)
    assert_verified(result, ["out", "lse"] if return_lse else ["out"])
    sdpa(q, k, v, return_lse=return_lse)
    assert plan_cache.info().builds == 1


VARLEN = {
    "self": {"is_causal": True},
    "cross": {"is_causal": True, "return_lse": True},
    "sinks": {"sinks": True, "is_causal": True},
    "softcap": {"softcap": 5.0},
    "negative scale": {"scale": -0.1},
    "deterministic": {"deterministic": True},
}


@pytest.mark.parametrize("name", VARLEN)
@pytest.mark.parametrize("among_others", [False, True])
def test_verify_a_packed_call_with_gradients_on_its_own_plans(name, among_others):
    options, lengths = dict(VARLEN[name]), (100, 0, 256, 44)
    whole = random(400, 3, 4, 64)
    q, k, v = whole.unbind(1) if among_others else [x.detach().contiguous().requires_grad_() for x in whole.unbind(1)]
    ends = offsets(*lengths)
    ends_kv = offsets(120, 3, 0, 277) if name == "cross" else ends
    names = ["out", "lse", "grad q", "grad k", "grad v"]
    if options.pop("sinks", False):
        options["sinks"] = random(4, dtype=torch.float32)
        names.append("grad sinks")
    result = explain(sdpa_varlen, q, k, v, ends, ends_kv, 256, 277, **options, verify=True)
    assert_verified(result, names)
    assert result.backward.supported, result.backward.reasons
    assert any(note.startswith("q is copied") for note in result.backward.extra_kernels) == (
        among_others and name != "negative scale"  # it is copied anyway
    )
    assert plan_cache.info().builds == 2
    result = sdpa_varlen(q, k, v, ends, ends_kv, 256, 277, **options)
    out = result[0] if options.get("return_lse") else result
    out.backward(torch.randn_like(out))
    assert plan_cache.info().builds == 2


def test_explain_and_verify_a_call_under_autocast():
    q, k, v = (random(2, 4, 128, 64, dtype=torch.float32) for _ in range(3))
    ends = offsets(100, 156)
    packed = [x.detach().transpose(1, 2).reshape(256, 4, 64).requires_grad_() for x in (q, k, v)]
    with torch.autocast("cuda", dtype=torch.bfloat16):
        for function, args in ((sdpa, (q, k, v)), (sdpa_varlen, (*packed, ends, ends, 156, 156))):
            before = plan_cache.info().builds
            result = explain(function, *args, is_causal=True, verify=True)
            assert_verified(result, ["out", "lse", "grad q", "grad k", "grad v"])
            function(*args, is_causal=True).float().square().mean().backward()
            assert plan_cache.info().builds == before + 2


def test_verify_the_forward_pass_alone_without_a_backward_kernel():
    q, k, v = bshd()
    mask = random(200, 333)
    result = explain(sdpa, q, k, v, softcap=5.0, attn_mask=mask, verify=True)
    assert not result.backward.supported
    assert_verified(result, ["out", "lse"])

"""`explain` reports what the call does: its keys are compared with those that the GPU code requests."""

from __future__ import annotations

import inspect
import random
from contextlib import nullcontext
from fractions import Fraction

import numpy as np
import pytest
import torch
from fake_gpu import gpu_on_the_cpu

import cudnn_sdpa
import cudnn_sdpa.engine.explain
from cudnn_sdpa import UnsupportedError, scaled_dot_product_attention, sdpa, sdpa_varlen
from cudnn_sdpa.attention.arguments import Needs, from_fields, results
from cudnn_sdpa.attention.dense import forward
from cudnn_sdpa.attention.dense import launch as dense_launch
from cudnn_sdpa.attention.dense.call import SdpaBackwardCall, SdpaCall
from cudnn_sdpa.attention.dense.sdpa import SDPA
from cudnn_sdpa.attention.varlen import launch
from cudnn_sdpa.attention.varlen.call import VarlenBackwardCall, VarlenCall
from cudnn_sdpa.attention.varlen.sdpa_varlen import VARLEN
from cudnn_sdpa.engine.explain import describer_of
from cudnn_sdpa.graph import known_issues
from cudnn_sdpa.planning.support import target_of
from cudnn_sdpa.plans.cache import PlanCache

H200 = target_of(90, "9.19.0")
NO_GPU = torch.empty(0, device="meta").get_device()


class Asked(Exception):  # noqa: N818 - no error, but what is looked for
    """The key that a call requests from the plan cache."""


@pytest.fixture
def key_of(monkeypatch):
    """Runs the GPU code on meta tensors until it requests a plan, and returns the requested key."""

    def ask(_self, key, *_args, **_options):
        raise Asked(key)

    monkeypatch.setattr(PlanCache, "get", ask)
    monkeypatch.setattr(torch.cuda, "device", lambda _device: nullcontext())
    for module in (forward, dense_launch, launch):
        monkeypatch.setattr(module, "live_target", lambda _device: H200)

    def run(function, *arguments):
        with pytest.raises(Asked) as caught:
            function(*arguments)
        return caught.value.args[0]

    with cudnn_sdpa.shape_policy("exact"):
        yield run


def T(*shape, dtype=torch.bfloat16, grad=False, stride=None):  # noqa: N802 - short, as it stands in tables
    empty = torch.empty(shape, dtype=dtype, device="meta")
    return (empty if stride is None else empty.as_strided(shape, stride)).requires_grad_(grad)


def describe(function, *args, **kwargs):
    return describer_of(function)(*args, **kwargs)


def key(description):
    return description.key(H200, NO_GPU)


def qkv(sq=96, skv=160, heads=(8, 2), dims=(64, 64), grad=True):
    return (
        T(2, heads[0], sq, dims[0], grad=grad),
        T(2, heads[1], skv, dims[0], grad=grad),
        T(2, heads[1], skv, dims[1], grad=grad),
    )


def bshd(sq=96, skv=160):
    return [T(2, length, 4, 64).transpose(1, 2).requires_grad_() for length in (sq, skv, skv)]


def large(batch=64, heads=(32, 8), dim=192):
    """More than 2³¹ elements, expanded from one."""
    return [T(batch, h, 8192, dim, stride=(0, 0, 0, 1), grad=True) for h in (heads[0], heads[1], heads[1])]


def lengths():
    return T(2, dtype=torch.int32)


SINKS = T(140_000, dtype=torch.float32, grad=True)

DENSE = {
    "plain": (qkv, {}),
    "bshd": (bshd, {"is_causal": True}),
    "sliced q": (lambda: [T(2, 9, 99, 64)[:, 1:, 3:].requires_grad_(), *qkv()[1:]], {}),
    "expanded": (lambda: [T(1, 1, 96, 64, grad=True).expand(2, 8, -1, -1), *qkv()[1:]], {"scale": -1.0}),
    "expanded batch": (lambda: [T(1, 96, 8, 64).transpose(1, 2).expand(2, -1, -1, -1), *qkv()[1:]], {"scale": -1.0}),
    "fully masked rows": (lambda: qkv(sq=160, skv=96), {"is_causal": True, "causal_alignment": "bottom_right"}),
    "negative scale": (bshd, {"scale": -0.5}),
    "scale of 0": (bshd, {"scale": 0.0}),
    "mask": (qkv, {"attn_mask": T(96, 160, grad=True)}),
    "boolean mask": (qkv, {"attn_mask": T(2, 1, 1, 160, dtype=torch.bool)}),
    "sinks": (qkv, {"sinks": T(8, dtype=torch.float32, grad=True)}),
    "one query, sinks": (lambda: qkv(sq=1), {"sinks": T(8, dtype=torch.float32, grad=True)}),
    "softcap, lengths": (qkv, {"softcap": 20.0, "seq_lens_kv": lengths(), "window_size": (7, 3)}),
    "lengths": (qkv, {"seq_lens_q": lengths(), "seq_lens_kv": lengths(), "is_causal": True}),
    "decode, lengths": (lambda: qkv(sq=1), {"seq_lens_q": lengths(), "seq_lens_kv": lengths()}),
    "dropout": (qkv, {"dropout_p": 0.1}),
    "deterministic": (qkv, {"deterministic": True}),
    "large": (large, {"is_causal": True}),
    "large, one group of heads": (lambda: large(batch=2, heads=(1024, 4)), {}),
    "large, negative scale": (large, {"scale": -0.5}),
    "large, gradient of a mask": (large, {"attn_mask": T(8192, grad=True)}),
    "large, alibi": (large, {"alibi": True, "is_causal": True}),
    "many entries": (lambda: [T(70_000, 2, 16, 64, grad=True) for _ in range(3)], {"alibi": True, "is_causal": True}),
    # Of one entry: slices of several have no dense layout, and a meta tensor is always copied into one.
    "many heads": (lambda: [T(1, n, 16, 64, grad=True) for n in (140_000, 70_000, 70_000)], {}),
    "many heads of one key head": (lambda: [T(1, n, 16, 64, grad=True) for n in (140_000, 1, 1)], {"sinks": SINKS}),
    "many single queries": (
        lambda: [T(1, n, s, 64, grad=True) for n, s in ((140_000, 1), (70_000, 9), (70_000, 9))],
        {"seq_lens_kv": T(1, dtype=torch.int32), "sinks": SINKS},
    ),
    "far apart": (lambda: [T(2, 8, 96, 64, stride=(2**31, 2**13, 64, 1), grad=True), *qkv()[1:]], {}),
}


def dense_call(q, k, v, **options):
    left, right = options.pop("window_size", (-1, -1))
    options["rng"] = T(2, dtype=torch.int64) if options.get("dropout_p") else None
    return from_fields(SdpaCall, q, k, v, **options, window_left=left, window_right=right)


@pytest.mark.parametrize("name", DENSE)
def test_both_explained_keys_are_those_of_the_call(key_of, name):
    tensors, options = DENSE[name][0](), DENSE[name][1]
    call = dense_call(*tensors, **options)
    described = describe(sdpa, *tensors, **options)
    assert key(described) == key_of(SDPA.on_gpu, call._replace(with_lse=True))
    out = SDPA.fake_results(call._replace(with_lse=False))
    lse = T(*out.shape[:3], dtype=torch.float32)
    needs = Needs(*(x is not None and x.requires_grad for x in call[:5]))
    of = SdpaBackwardCall(out, out, lse, call, needs)
    assert key(described.backward) == key_of(dense_launch.gradients, of)
    assert not [
        issue for issue in known_issues.concerning(key(described.backward)) if not issue.avoids(key(described.backward))
    ]


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("name", ["plain", "fully masked rows", "one query, sinks", "negative scale"])
def test_the_explained_key_without_gradients_is_that_of_the_call(key_of, name, return_lse):
    tensors, options = [x.detach() for x in DENSE[name][0]()], dict(DENSE[name][1])
    options |= {n: x.detach() for n, x in options.items() if isinstance(x, torch.Tensor)}
    described = describe(sdpa, *tensors, **options, return_lse=return_lse)
    assert described.backward is None
    assert key(described) == key_of(SDPA.on_gpu, dense_call(*tensors, **options)._replace(with_lse=return_lse))


def test_kernels_of_the_gradient_of_sinks_are_named():
    note = "the gradient of the sinks is computed from the output and its gradient by kernels of this library"
    q, k, v = qkv()
    for sinks, count in ((T(8, dtype=torch.float32, grad=True), 1), (T(8, dtype=torch.float32), 0)):
        assert describe(sdpa, q, k, v, sinks=sinks).backward.extra_kernels.count(note) == count


def test_bugs_that_a_plan_avoids_are_named():
    """As on a GPU with a cuDNN that has them: they explain what the plan has beyond the call."""
    q, k, v = (torch.randn(2, heads, n, 64).half().requires_grad_() for heads, n in ((4, 100), (2, 120), (2, 120)))
    with gpu_on_the_cpu():
        partial = cudnn_sdpa.explain(sdpa, q, k, v)
        whole = cudnn_sdpa.explain(sdpa, *(torch.randn(1, 2, 128, 64).half().requires_grad_() for _ in range(3)))
    assert partial.backward.supported
    issue = next(issue for issue in partial.backward.known_issues if "very negative log-sum-exp" in issue)
    assert f"  avoids     {issue}" in str(partial).splitlines()
    assert not any("very negative log-sum-exp" in issue for issue in (*partial.known_issues, *whole.known_issues))
    assert "very negative log-sum-exp" not in str(whole.backward)


def packed_qkv(grad=True):
    return T(300, 3, 4, 64, grad=grad).unbind(1)


def head_major():
    return [T(heads, 300, 64).transpose(0, 1).requires_grad_() for heads in (8, 2, 2)]


def separate(tokens=300, heads=(8, 2)):
    return [T(tokens, h, 64, grad=True) for h in (heads[0], heads[1], heads[1])]


PACKED = {
    "plain": (separate, {}),
    "qkv in one tensor": (packed_qkv, {"is_causal": True}),
    "head-major": (head_major, {}),
    "negative scale": (packed_qkv, {"scale": -0.5}),
    "scale of 0": (separate, {"scale": 0.0}),
    "softcap": (packed_qkv, {"softcap": 20.0, "sinks": T(4, dtype=torch.float32, grad=True)}),
    "dropout": (separate, {"dropout_p": 0.1}),
    "deterministic": (packed_qkv, {"deterministic": True}),
    "large": (lambda: separate(2**22, (32, 8)), {"is_causal": True}),
    "large, negative scale": (lambda: T(2**21, 48, 128, grad=True).split([32, 8, 8], 1), {"scale": -0.5}),
}


@pytest.mark.parametrize("shared_cu_seqlens", [False, True])
@pytest.mark.parametrize("name", PACKED)
def test_both_explained_keys_are_those_of_the_packed_call(key_of, name, shared_cu_seqlens):
    tensors, options = PACKED[name][0](), PACKED[name][1]
    offsets = T(4, dtype=torch.int32)
    ends = (offsets, offsets if shared_cu_seqlens else T(4, dtype=torch.int32), 128, 100)
    described = describe(sdpa_varlen, *tensors, *ends, **options)
    sizes = {"max_seqlen_q": 128, "max_seqlen_kv": 100}
    rng = T(2, dtype=torch.int64) if "dropout_p" in options else None
    sizes["cu_seqlens_kv"] = None if shared_cu_seqlens else ends[1]
    options = {"sinks": None, "with_lse": True} | options
    call = from_fields(VarlenCall, *tensors, cu_seqlens_q=offsets, rng=rng, **sizes, **options)
    assert key(described) == key_of(VARLEN.on_gpu, call)
    (shape, stride, _), _ = results(call)
    out, lse = T(*shape, stride=stride), T(*call.q.shape[:2], dtype=torch.float32)
    backward = VarlenBackwardCall(out, out, lse, call, (True, True, True, call.sinks is not None))
    assert key(described.backward) == key_of(VARLEN.gradients_on_gpu, backward)
    known_issues.check(key(described.backward))


def notes(description):
    return "\n".join(description.extra_kernels)


def described_varlen(tensors, shared_cu_seqlens=False, **options):
    offsets = T(4, dtype=torch.int32)
    return describe(
        sdpa_varlen, *tensors, offsets, offsets if shared_cu_seqlens else T(4, dtype=torch.int32), 128, 100, **options
    )


def test_extra_kernels_of_a_packed_forward_pass():
    sinks = T(4, dtype=torch.float32)
    for shared_cu_seqlens in (False, True):
        plain = notes(described_varlen([x.detach() for x in packed_qkv()], shared_cu_seqlens=shared_cu_seqlens))
        assert "rows of the output that see no key become zeros, as" in plain
        assert "log-sum-exp" not in plain
    all_of_it = notes(described_varlen(packed_qkv(), sinks=sinks, softcap=3.0, scale=-1.0))
    for part in (
        "q is multiplied by -1",
        "of the log-sum-exp become minus infinity",
        "raised to the sinks",
        "the last key that each query sees are computed from them, for soft-capping (one kernel)",
    ):
        assert part in all_of_it, part


@pytest.mark.parametrize(
    ("tensors", "options", "part"),
    [
        (packed_qkv, {}, "a copy of grad_out, if"),
        (packed_qkv, {}, "q is copied"),
        (separate, {}, "rows of the gradients without queries or keys become zeros"),
        (head_major, {}, "the gradient of k is copied"),
        (head_major, {}, "the gradient of v is copied"),
        (separate, {"sinks": T(8, dtype=torch.float32, grad=True)}, "gradient of the sinks"),
        (separate, {"softcap": 3.0}, "log-sum-exp of fully masked rows is replaced"),
        (separate, {"softcap": 3.0}, "the first and the last key"),
        (separate, {"scale": -1.0}, "multiplied by -1 into a copy, as the scale is not positive, and so are the grad"),
    ],
)
def test_extra_kernels_of_a_packed_backward_pass(tensors, options, part):
    plain = separate() if (tensors, options) != (separate, {}) else packed_qkv()
    assert part in notes(described_varlen(tensors(), **options).backward)
    if part.startswith(("a copy of grad_out", "rows of the gradients")):
        return  # in all of them
    assert part not in notes(described_varlen(plain, shared_cu_seqlens=True).backward)


@pytest.mark.parametrize(
    ("name", "passes", "part"),
    [
        ("fully masked rows", "forward", "the log-sum-exp of the other queries is copied into place"),
        ("fully masked rows", "backward", "the log-sum-exp of the other queries is copied"),
        ("plain", "backward", "a copy of grad_out, if"),
        (
            "boolean mask",
            "backward",
            "attn_mask is converted to a bias if cuDNN cannot read its layout, a boolean mask always (one kernel)",
        ),
        (
            "lengths",
            "forward",
            "lengths are clamped to the tensors; those of queries become 0 where a sequence has no keys",
        ),
        ("lengths", "backward", "leaves its rows unwritten (one kernel)"),
        (
            "decode, lengths",
            "forward",
            "those of keys become 0 where a sequence has no queries, as cuDNN's decode engines need it (one",
        ),
        ("decode, lengths", "backward", "those of queries become 0 where a sequence has no keys"),
        ("softcap, lengths", "forward", "computed from the lengths, for soft-capping (one kernel)"),
        ("softcap, lengths", "backward", "the last key that each query sees"),
        ("negative scale", "forward", "q is multiplied by -1"),
        ("negative scale", "backward", "and its gradient as well"),
        ("scale of 0", "backward", "filled with zeros"),
        ("large", "backward", "in 2 parts"),
        ("far apart", "backward", "copies of tensors that span too much memory"),
        ("many entries", "backward", "in 2 parts"),
        ("many heads of one key head", "forward", "in 3 parts"),
        ("many single queries", "forward", "in 3 parts"),
    ],
)
def test_extra_kernels_of_a_dense_pass(name, passes, part):
    def found(which):
        described = describe(sdpa, *DENSE[which][0](), **DENSE[which][1])
        return notes(described if passes == "forward" else described.backward)

    assert part in found(name)
    if not part.startswith("a copy of grad_out"):
        assert part not in found("sinks")


def test_the_lse_of_fully_masked_rows_gets_the_sink():
    options = {"sinks": T(8, dtype=torch.float32)}
    assert "raised to the sinks" in notes(describe(sdpa, *qkv(), **options, seq_lens_kv=lengths()))
    assert "raised to the sinks" not in notes(describe(sdpa, *qkv(), **options))
    assert "raised" not in notes(describe(sdpa, *qkv(grad=False), **options, seq_lens_kv=lengths()))


def test_empty_calls_have_no_extra_kernels():
    described = describe(sdpa, *qkv(skv=0), seq_lens_kv=lengths())
    assert described.is_empty
    assert described.backward.is_empty
    assert described.extra_kernels == described.backward.extra_kernels == []
    packed = described_varlen([T(0, 4, 64, grad=True), *separate()[1:]])
    assert packed.extra_kernels == packed.backward.extra_kernels == []


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("large", {"dropout_p": 0.1}, "wrong addresses"),
        ("many entries", {"dropout_p": 0.1}, "70000 batch entries"),
        ("many heads", {"alibi": True, "is_causal": True}, "140000 heads"),
    ],
)
def test_a_call_that_cannot_be_split_has_no_gradient(name, options, reason):
    own = [T(2, 140_000, 16, 64, grad=True) for _ in range(3)]  # of grouped heads the forward pass has too many, too
    tensors = own if name == "many heads" else DENSE[name][0]()
    described = describe(sdpa, *tensors, **options)
    key(described)
    with pytest.raises(UnsupportedError, match=reason):
        key(described.backward)


def test_a_large_packed_call_that_cannot_be_split_has_no_gradient():
    described = described_varlen(separate(2**22, (32, 8)), dropout_p=0.1)
    key(described)
    with pytest.raises(UnsupportedError, match="wrong addresses"):
        key(described.backward)


def test_out_of_a_call_that_is_only_described_overlaps_nothing():
    """Tensors without data all have the address 0."""
    args = qkv(grad=False)
    assert key(describe(sdpa, *args, out=torch.empty_like(args[0]))) == key(describe(sdpa, *args))


def test_out_and_gradients_exclude_each_other_as_in_the_call():
    q = torch.randn(1, 2, 8, 16, requires_grad=True)
    out, offsets = torch.empty(1, 2, 8, 16), torch.tensor([0, 8], dtype=torch.int32)
    rows, rows_out = q.detach()[0].transpose(0, 1).contiguous().requires_grad_(), torch.empty(8, 2, 16)
    for function, args, given in (
        (sdpa, (q, q, q), out),
        (sdpa_varlen, (rows, rows, rows, offsets, offsets, 8, 8), rows_out),
    ):
        with pytest.raises(UnsupportedError) as of_call:
            function(*args, out=given)
        with pytest.raises(UnsupportedError) as of_description:
            key(describe(function, *args, out=given))
        assert str(of_call.value) == str(of_description.value)


@pytest.mark.parametrize("function", [sdpa, sdpa_varlen])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_explained_as_the_call_with_cast_tensors(function, dtype):
    numbers = torch.tensor([0, 5, 12], dtype=torch.int32)
    ends = (numbers, numbers, 7, 7)
    shapes, args = (((2, 4, 12, 16),) * 3, ()) if function is sdpa else (((12, 4, 16),) * 3, ends)
    tensors = [torch.randn(shape).requires_grad_() for shape in shapes]
    tensors[1] = torch.randn(*shapes[1][:-1], 48)[..., 16:32].requires_grad_()
    with torch.autocast("cpu", dtype=dtype):
        described = describe(function, *tensors, *args)
    expected = describe(function, *(x.detach().to(dtype).requires_grad_() for x in tensors), *args)
    assert key(described) == key(expected)
    assert key(described.backward) == key(expected.backward)
    name = str(dtype).removeprefix("torch.")
    assert described.extra_kernels[:3] == [f"{x} is cast to {name}, under autocast" for x in "qkv"]
    assert "the gradient of k is cast back" in notes(described.backward)
    with pytest.raises(UnsupportedError, match="not float32"):
        key(describe(function, *tensors, *args))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("function", [sdpa, sdpa_varlen])
def test_sinks_in_half_precision_are_explained_as_what_they_are_converted_to(function, dtype):
    ends = (T(4, dtype=torch.int32), T(4, dtype=torch.int32), 128, 100)
    args = qkv() if function is sdpa else (*separate(), *ends)
    described = describe(function, *args, sinks=T(8, dtype=dtype, grad=True))
    expected = describe(function, *args, sinks=T(8, dtype=torch.float32, grad=True))
    assert (key(described), key(described.backward)) == (key(expected), key(expected.backward))
    assert set(described.extra_kernels) - set(expected.extra_kernels) == {"sinks are converted to float32"}
    more = set(described.backward.extra_kernels) - set(expected.backward.extra_kernels)
    assert more == {"the gradient of sinks is converted back"}


def test_a_mask_is_cast_too():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        described = describe(sdpa, *(torch.randn(2, 4, 12, 16) for _ in range(3)), attn_mask=torch.zeros(12, 12))
    assert "attn_mask is cast to bfloat16, under autocast" in described.extra_kernels
    assert "bias: bfloat16" in str(key(described))


BAD = [
    (sdpa, (None, *qkv()[1:]), {"dropout_p": 0.1}),
    (sdpa, qkv(), {"foo": 1}),
    (sdpa, qkv()[:2], {}),
    (sdpa, (*qkv(), True), {}),
    (sdpa, qkv(), {"dropout_p": "much"}),
    (sdpa, qkv(), {"deterministic": "x"}),
    (sdpa, qkv(), {"out": T(1, 2, 3, 4), "return_lse": 1}),
    (sdpa_varlen, (None, None, None, None, None, 1, 1), {"dropout_p": 0.1}),
    (sdpa_varlen, (*separate(), *[torch.zeros(2, dtype=torch.int32)] * 2, 8), {}),
    (sdpa_varlen, (*separate(), *[torch.zeros(2, dtype=torch.int32)] * 2, 8, 8), {"attn_mask": None}),
    (scaled_dot_product_attention, (None, None, None), {}),
    (scaled_dot_product_attention, (*qkv(heads=(2, 2))[:2], T(2, 2, 5, 64)), {}),
    (scaled_dot_product_attention, qkv(heads=(2, 2)), {"window_size": 3}),
]


@pytest.mark.parametrize(("function", "args", "kwargs"), BAD)
def test_wrong_arguments_raise_the_error_of_the_call(function, args, kwargs):
    with pytest.raises(Exception) as of_call:  # noqa: PT011 - any error
        function(*args, **kwargs)
    with pytest.raises(type(of_call.value)) as of_description:
        describe(function, *args, **kwargs)
    assert str(of_description.value) == str(of_call.value)
    assert "describe" not in str(of_description.value)


@pytest.mark.parametrize("number", [np.float32(0.25), np.float16(0.25), Fraction(1, 4)], ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("option", ["scale", "softcap", "dropout_p"])
def test_numbers_that_calls_take_are_described(option, number):
    offsets = torch.zeros(3, dtype=torch.int32, device="meta")
    calls = [(sdpa, qkv()), (sdpa_varlen, (*separate(), offsets, offsets, 8, 8))]
    for function, args in calls:
        function(*args, **{option: number})
        described, written = (describe(function, *args, **{option: value}) for value in (number, 0.25))
        assert str(key(described)) == str(key(written))


def test_memory_is_checked_as_in_the_call():
    offsets = T(2, dtype=torch.int32)
    narrow = T(12, 4, 17)[..., :16]
    with pytest.raises(Exception, match=r"q: got stride 17 .*; expected a multiple of 8"):
        describe(sdpa_varlen, narrow, narrow, narrow, offsets, offsets, 12, 12)


@pytest.mark.parametrize("function", [sdpa, sdpa_varlen, scaled_dot_product_attention])
def test_explain_takes_the_parameters_of_the_functions(function):
    def parameters(of):
        return [(p.name, p.kind, p.default) for p in inspect.signature(of).parameters.values()]

    assert parameters(describer_of(function)) == parameters(function)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 16), (2, 0, 16), (1, 0, 4)], ids=str)
@pytest.mark.parametrize("name", ["silu_mul", "silu_mul of both", "gelu_mul", "relu_squared", "rms_norm", "layer_norm"])
def test_explain_agrees_with_empty_fused_calls(name, shape, requires_grad):
    """For any strides: there is nothing to read."""
    function = getattr(cudnn_sdpa, name.removesuffix(" of both"))
    strides = random.Random(f"{name}{shape}")
    for _ in range(10):
        tensors = [
            torch.empty(1)
            .as_strided(shape, [strides.choice((0, 1, 3, 64)) for _ in shape])
            .requires_grad_(requires_grad)
            for _ in range(2 if name in ("silu_mul", "gelu_mul") else 1)
        ]
        refused = UnsupportedError.of(function, *tensors)
        found = cudnn_sdpa.explain(function, *tensors)
        assert found.supported == (refused is None)
        assert found.reasons == ([] if refused is None else refused.reasons)
        assert found.engine == ""
        trains = requires_grad and refused is None
        assert (found.backward is not None and found.backward.supported) == trains

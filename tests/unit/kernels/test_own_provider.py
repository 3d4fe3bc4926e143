"""`providers("cudnn", "own")` of `sdpa`: what runs on the library's own kernels, and what still raises."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from fake_gpu import TARGET, FakePlan, gpu_on_the_cpu

from cudnn_sdpa import (
    CudnnSdpaError,
    DtypeError,
    LayoutError,
    UnsupportedError,
    cpu_checks,
    explain,
    fallback,
    kernels,
    no_plan_builds,
    plan_cache,
    providers,
    record_plans,
    scaled_dot_product_attention,
    sdpa,
)
from cudnn_sdpa.attention.arguments import from_fields
from cudnn_sdpa.attention.dense.call import SdpaCall
from cudnn_sdpa.attention.dense.sdpa import SDPA
from cudnn_sdpa.attention.dense.specs import DenseSpec, ForwardSpec
from cudnn_sdpa.graph import known_issues
from cudnn_sdpa.graph.known_issues import KnownIssue
from cudnn_sdpa.graph.layouts import TensorLayout
from cudnn_sdpa.graph.target import Target
from cudnn_sdpa.kernels import serving


def qkv(dim=17, dtype=torch.bfloat16):
    return [torch.randn(2, 2, 9, dim).to(dtype).requires_grad_() for _ in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize("function", [sdpa, scaled_dot_product_attention])
def test_odd_head_dims_run_on_kernels_with_gradients(function):
    q, k, v = qkv()
    mask = torch.randn(9, 9).to(q.dtype).requires_grad_()
    with gpu_on_the_cpu(), providers("cudnn", "own"):
        for _ in range(2):
            out = function(q, k, v, attn_mask=mask)
            found = torch.autograd.grad(out.sum(), (q, k, v, mask))
            assert FakePlan.launched[-1].operation.startswith("cudnn_sdpa.kernels.")
    exact = [x.detach().double().requires_grad_() for x in (q, k, v, mask)]
    right = kernels.reference_attention(*exact)
    torch.testing.assert_close(out.double(), right, rtol=2e-2, atol=2e-2)
    for x, y in zip(found, torch.autograd.grad(right.sum(), exact), strict=True):
        torch.testing.assert_close(x.double(), y, rtol=5e-2, atol=5e-2)


@pytest.mark.slow
@pytest.mark.parametrize("function", [sdpa, scaled_dot_product_attention])
def test_float32_runs_on_kernels_with_gradients(function):
    """On a GPU, where cuDNN has none; the CPU takes it without a fallback."""
    q, k, v = qkv(16, torch.float32)
    mask = torch.randn(9, 9, requires_grad=True)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v, mask)]
    wanted = torch.autograd.grad(kernels.reference_attention(*exact, is_causal=False).sum(), exact)
    with gpu_on_the_cpu(), providers("cudnn", "own"):
        found = torch.autograd.grad(function(q, k, v, attn_mask=mask).sum(), (q, k, v, mask))
        assert FakePlan.launched[-1].operation.startswith("cudnn_sdpa.kernels.")
        out = function(q, k, v, is_causal=True)
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y.float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(out, kernels.reference_attention(q, k, v, is_causal=True), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_gradients_of_masks_for_which_cudnn_has_no_kernel():
    """Deterministic ones on SM 100; head dims and strides are cuDNN's."""
    q, k, v = qkv(64)
    mask = torch.randn(9, 9).to(q.dtype).requires_grad_()
    blackwell = Target((("deviceVer", 1000), ("multiProcessorCount", 148)), 91900, "1", "a B200")
    with gpu_on_the_cpu(target=blackwell):
        with pytest.raises(UnsupportedError, match="no deterministic kernel for gradients of attn_mask"):
            sdpa(q, k, v, attn_mask=mask, deterministic=True)
        with providers("cudnn", "own"):
            out = sdpa(q, k, v, attn_mask=mask, deterministic=True)
            (found,) = torch.autograd.grad(out.sum(), mask)
            assert FakePlan.launched[-1].operation.startswith("cudnn_sdpa.kernels.")
    exact = [x.detach().double().requires_grad_() for x in (q, k, v, mask)]
    (right,) = torch.autograd.grad(kernels.reference_attention(*exact).sum(), exact[3])
    torch.testing.assert_close(found.double(), right, rtol=5e-2, atol=5e-2)


def test_calls_of_cudnn_stay_there():
    with gpu_on_the_cpu(), providers("cudnn", "own"):
        sdpa(*(x.detach() for x in qkv(16)))
        assert FakePlan.launched[-1].name == "sdpa_forward"


@pytest.mark.parametrize("names", [("cudnn", "own"), ("own",), ("cudnn",)])
def test_tensors_at_addresses_that_no_vector_has_are_copied(names):
    """Their strides are those of vectors; where own kernels are not named, such calls are refused."""
    q, k, v = (torch.randn(289).bfloat16()[1:].view(1, 2, 9, 16).requires_grad_() for _ in range(3))
    with gpu_on_the_cpu(), providers(*names):
        if names == ("cudnn",):
            with pytest.raises(LayoutError, match="2 bytes past a multiple of 16"):
                sdpa(q, k, v)
            return
        for _ in range(2):
            out = sdpa(q, k, v, is_causal=True)
            found = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        assert {key.provider or "cudnn" for key in FakePlan.launched[-2:]} == {names[0]}
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    right = torch.nn.functional.scaled_dot_product_attention(*exact, is_causal=True)
    torch.testing.assert_close(out.double(), right, rtol=3e-2, atol=3e-2)
    for one, other in zip(found, torch.autograd.grad(right, exact, torch.ones_like(right)), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize(
    "options", [{"window_size": (3, 0)}, {"sinks": torch.zeros(2)}, {"softcap": 2.0}, {"dropout_p": 0.5}]
)
def test_what_kernels_lack_still_raises(options):
    with (
        gpu_on_the_cpu(),
        providers("cudnn", "own"),
        pytest.raises(UnsupportedError, match="not 17 and 17"),
    ):
        sdpa(*qkv(), **options)


def reasons(q, **options):
    return serving.reasons_of(ForwardSpec.of(from_fields(SdpaCall, q, q, q, **options)), TARGET)


@pytest.mark.parametrize("name", sorted({x.name for x in fields(DenseSpec)} - {"q", "k", "v", "mask", "deterministic"}))
def test_every_option_that_kernels_lack_is_declined(name):
    """One added to `sdpa` later, too: what is not known here is not ignored."""
    q = qkv()[0].detach()
    spec = ForwardSpec.of(SdpaCall(q, q, q))
    assert not serving.reasons_of(spec, TARGET)
    is_served = name in ("bias", "attn_mask")
    value = TensorLayout.contiguous((9, 9), torch.bool) if is_served else object()
    changed = replace(spec, dense=replace(spec.dense, **{name: value}))
    assert bool(serving.reasons_of(changed, TARGET)) is not is_served


def test_masks_that_kernels_have():
    q = torch.empty(1, 2, 9, 17)
    longer = torch.empty(1, 2, 12, 17)
    assert not reasons(q, is_causal=True)
    assert not reasons(q, is_causal=True, causal_alignment="bottom_right")  # the same for as many keys
    assert not reasons(q, window_left=20, window_right=0)  # the left bound hides nothing
    assert reasons(q, window_left=3, window_right=0)
    assert reasons(q, window_left=3)
    assert reasons(q, window_right=1)
    for queries, keys in ((q, longer), (longer, q)):
        for alignment in ("top_left", "bottom_right"):
            call = from_fields(SdpaCall, queries, keys, keys, is_causal=True, causal_alignment=alignment)
            assert bool(serving.reasons_of(ForwardSpec.of(call), TARGET)) is (alignment != "top_left")


def test_negated_tensors_run_on_kernels():
    q, k, v = (torch.randn(1, 2, 16, 12) for _ in range(3))
    with providers("cudnn", "own"):
        torch.testing.assert_close(sdpa(torch._neg_view(q), k, v), sdpa(-q, k, v))


def test_wrong_calls_are_wrong():
    q, k, v = qkv()
    with gpu_on_the_cpu(), providers("cudnn", "own"), pytest.raises(DtypeError, match="k: got float32"):
        sdpa(q, k.float(), v)


def test_the_error_on_float32_names_what_takes_it():
    q = torch.empty(1, 1, 4, 8, device="meta")
    with pytest.raises(DtypeError, match=r"under providers\('cudnn', 'own'\), and kernels\.attention always"):
        sdpa(q, q, q)
    with providers("cudnn", "own"):
        sdpa(q, q, q)
    kernels.attention(q, q, q)


def test_causal_calls_aligned_otherwise_raise_and_large_head_dims_run():
    q, k, v = (x.detach() for x in qkv(131, torch.float32))
    with providers("cudnn", "own"):
        torch.testing.assert_close(sdpa(q, k, v), kernels.reference_attention(q, k, v))
        with pytest.raises(UnsupportedError):
            sdpa(q[:, :, :5], k, v, is_causal=True, causal_alignment="bottom_right")


def test_providers_serve_in_order():
    q, k, v = (x.detach() for x in qkv(16))
    served = {}
    with gpu_on_the_cpu():
        for names in (("own", "cudnn"), ("cudnn", "own"), ("fastest", "own"), ("own",), ("cudnn",)):
            with providers(*names):
                for _ in range(2):
                    sdpa(q, k, v)
                served[names] = FakePlan.launched[-1].provider
    assert list(served.values()) == ["own", None, None, "own", None]


def test_own_kernels_alone_refuse_what_they_lack():
    q, k, v = (x.detach() for x in qkv(16))
    with gpu_on_the_cpu(), providers("own"):
        with pytest.raises(UnsupportedError, match=r"own kernels: they have no lengths, sinks, soft cap") as refused:
            sdpa(q, k, v, softcap=3.0)
        assert "providers('own', 'cudnn')" in str(refused.value)
        with providers("own", "cudnn"):
            sdpa(q, k, v, softcap=3.0)
        assert FakePlan.launched[-1].provider is None


def test_calls_are_known_after_the_first(monkeypatch):
    """Whoever serves them, they are neither checked nor bound again."""
    q, k, v = (x.detach() for x in qkv(16, torch.float32))
    bound = []
    bind = SdpaCall.bind
    monkeypatch.setattr(SdpaCall, "bind", lambda call: bound.append(call) or bind(call))
    with gpu_on_the_cpu(), providers("cudnn", "own"):
        for _ in range(3):
            sdpa(q, k, v)
        assert len(bound) == 1
        assert [key.provider for key in FakePlan.launched[-3:]] == ["own"] * 3
        with pytest.raises(DtypeError, match="k: got bfloat16"):
            sdpa(q, k.bfloat16(), v)


def exact_attention(q, k, v, mask, scale):
    """The output and the log-sum-exp in float64, where every query sees a key."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * scale + mask
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


@pytest.mark.parametrize("dim", [33, 64, 160])
def test_values_of_both_passes_with_each_layout(dim):
    """The log-sum-exp, too, which either pass may have from another provider; odd strides and addresses are read."""
    scale = -0.3
    packed = torch.randn(2 * 4 * 9 * dim + 1)[1:].view(2, 9, 4, dim)
    tensors = [packed.transpose(1, 2), torch.randn(1, 1, 11, dim).expand(2, 2, 11, dim), torch.randn(2, 2, 11, dim)]
    mask = torch.randn(2, 1, 9, 11)
    given = [x.detach().requires_grad_() for x in (*tensors, mask)]
    exact = [x.detach().double().requires_grad_() for x in given]
    with gpu_on_the_cpu(), providers("own"):
        out, lse = sdpa(*given[:3], attn_mask=given[3], scale=scale, return_lse=True)
        grad_out = torch.randn_like(out)
        found = torch.autograd.grad(out, given, grad_out)
        assert [key.provider for key in FakePlan.launched[-2:]] == ["own", "own"]
    right, right_lse = exact_attention(*exact, scale)
    wanted = torch.autograd.grad(right, exact, grad_out.double())
    for one, other in zip((out, lse, *found), (right, right_lse, *wanted), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dim", [16, 160])
def test_gradients_of_rows_whose_sum_the_log_sum_exp_has_lost(dim):
    """Beside -1e9 it is a multiple of 64; the row's weights are those of equal scores, and its gradients, too."""
    q, k, v = (torch.randn(1, 1, 6, dim) for _ in range(3))
    v.requires_grad_()
    mask = torch.zeros(6, 6)
    mask[2], mask[3], mask[4] = -1e9, 500.0, -torch.inf
    with gpu_on_the_cpu(), providers("own"):
        out = sdpa(q, k, v, attn_mask=mask)
        grad_out = torch.randn_like(out)
        (found,) = torch.autograd.grad(out, v, grad_out)
    weights = (q @ k.mT * dim**-0.5 + mask).softmax(-1).nan_to_num()
    torch.testing.assert_close(found, weights.mT @ grad_out, rtol=1e-3, atol=2e-4)


def test_each_provider_takes_what_the_other_saved():
    q, k, v = (x.detach().requires_grad_() for x in qkv(16))
    found = []
    with gpu_on_the_cpu():
        for forward, backward in (("own", "cudnn"), ("cudnn", "own")):
            with providers(forward):
                out = sdpa(q, k, v, is_causal=True)
            with providers(backward):
                found.append(torch.autograd.grad(out, (q, k, v), torch.ones_like(out)))
            assert [key.provider or "cudnn" for key in FakePlan.launched[-2:]] == [forward, backward]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def test_compiled_code_takes_own_kernels():
    q, k, v = (x.detach().requires_grad_() for x in qkv(17, torch.float32))
    compiled = torch.compile(lambda q, k, v: sdpa(q, k, v, is_causal=True), backend="aot_eager", fullgraph=True)
    with cpu_checks("h200"), providers("cudnn", "own"):
        out = compiled(q, k, v)
        found = torch.autograd.grad(out.sum(), q)
        with providers("cudnn"), pytest.raises((CudnnSdpaError, RuntimeError), match="float32"):
            sdpa(q, k, v)
    right = kernels.reference_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out, right)
    torch.testing.assert_close(found, torch.autograd.grad(right.sum(), q))


def test_plans_are_recorded_and_found_where_none_may_be_built():
    q, k, v = (x.detach() for x in qkv(16, torch.float32))
    with gpu_on_the_cpu(), providers("own"):
        with record_plans() as plans:
            sdpa(q, k, v)
        (key,) = plans.keys(TARGET, 0)
        assert key.provider == "own"
        with no_plan_builds():
            sdpa(q, k, v)
        assert FakePlan.launched[-1] == key


def test_without_the_setting_float32_raises_again():
    q, k, v = (x.detach() for x in qkv(16, torch.float32))
    with gpu_on_the_cpu():
        with providers("cudnn", "own"):
            sdpa(q, k, v)
        with pytest.raises(UnsupportedError, match="float32"):
            sdpa(q, k, v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("names", [("own", "cudnn"), ("cudnn", "own")])
def test_explain_shows_the_provider(dtype, names):
    q, k, v = qkv(16, dtype)
    is_own = names[0] == "own" or dtype == torch.float32
    with providers(*names):
        report = explain(sdpa, q, k, v, is_causal=True)
    assert report.supported
    assert report.provider == ("own" if is_own else "cudnn")
    assert report.backward.provider == report.provider
    taken = "own kernels" if is_own else "cuDNN's engines"
    if names[0] == "cudnn" and is_own:
        assert report.choice.startswith("own kernels: cuDNN's engines do not serve it, as cuDNN's attention takes")
    else:
        assert report.choice == f"{taken}, by providers({', '.join(map(repr, names))})"
    with providers("default", "own"):
        assert ("cuDNN's attention takes" in explain(sdpa, q, k, v).choice) is (dtype == torch.float32)
    with providers(*names):
        report = explain(sdpa, q, k, v, window_size=(3, 0))
    if dtype == torch.float32:
        assert not report.supported
    elif names[0] == "own":
        assert report.choice.startswith("cuDNN's engines: own kernels do not serve it, as their causal masks")
    assert not explain(sdpa, q.bfloat16(), k.bfloat16(), v.bfloat16()).choice


def test_explain_describes_masks_as_own_kernels_read_them():
    q, k, v = qkv(16, torch.bfloat16)
    mask = torch.ones(9, 9, dtype=torch.bool)
    for names, is_converted in ((("own",), False), (("cudnn",), True)):
        with providers(*names):
            report = explain(sdpa, q, k, v, attn_mask=mask)
        for each in (report, report.backward):
            assert any("attn_mask is converted" in note for note in each.extra_kernels) is is_converted


@pytest.mark.parametrize("trains", [False, True])
def test_each_way_of_a_call_is_served_by_own_kernels(trains):
    """Also with its LSE, and as an operator, which compiled code runs."""
    q, k, v = (x.detach().requires_grad_(trains) for x in qkv(16))
    with gpu_on_the_cpu(), providers("own", "cudnn"):
        for _ in range(2):
            sdpa(q, k, v, return_lse=True)
            assert FakePlan.launched[-1].provider == "own"
            torch.ops.cudnn_sdpa.sdpa_forward(*SDPA.inputs_of(SdpaCall(q, k, v)))
            assert FakePlan.launched[-1].provider == "own"
            sdpa(q, k, v)
            assert FakePlan.launched[-1].provider == "own"


def test_each_pass_chooses_for_itself():
    """A deterministic gradient of a mask is declined on SM 100; the same call without that gradient is not."""
    q, k, v = qkv(64)
    mask = torch.randn(9, 9).to(q.dtype).requires_grad_()
    blackwell = Target((("deviceVer", 1000), ("multiProcessorCount", 148)), 91900, "1", "a B200")
    with gpu_on_the_cpu(target=blackwell), providers("cudnn", "own"):
        for given, provider in ((mask, "own"), (mask.detach(), None)):
            out = sdpa(q, k, v, attn_mask=given, deterministic=True)
            assert FakePlan.launched[-1].provider is None
            out.sum().backward()
            assert FakePlan.launched[-1].provider == provider


def test_calls_on_the_cpu_are_checked_for_own_kernels():
    q, k, v = (x.detach() for x in qkv(17))
    for target in ("h200", None, "h200"):
        with cpu_checks(target), providers("cudnn", "own"):
            sdpa(q, k, v)
            sdpa(q.float(), k.float(), v.float())
            if target is not None:
                with pytest.raises(UnsupportedError, match="float64"):
                    sdpa(q.double(), k.double(), v.double())
    with cpu_checks("h200,any-dtype"), providers("cudnn", "own"):
        sdpa(q.double(), k.double(), v.double())


def test_a_dtype_that_kernels_lack_falls_back_to_pytorch():
    q, k, v = (x.detach() for x in qkv(16, torch.float64))
    with gpu_on_the_cpu():
        for names in (("cudnn", "own"), ("own", "cudnn"), ("own",)):
            with providers(*names):
                with fallback("torch"):
                    torch.testing.assert_close(sdpa(q, k, v), kernels.reference_attention(q, k, v))
                with pytest.raises(UnsupportedError, match="float64"):
                    sdpa(q, k, v)


@pytest.mark.parametrize("names", [("own", "cudnn"), ("cudnn", "own"), ("own",)])
@pytest.mark.parametrize("wrong", ["a list", "three dimensions", "two dtypes", "an alignment"])
def test_explain_names_wrong_arguments_as_calls_do(names, wrong):
    q, k, v = (x.detach() for x in qkv(16))
    given = {"a list": ([1], k, v), "three dimensions": (q[0], k[0], v[0]), "two dtypes": (q, k.float(), v)}
    options = {"causal_alignment": "center"} if wrong == "an alignment" else {}
    messages = []
    for function in (sdpa, lambda *args, **options: explain(sdpa, *args, **options)):
        with gpu_on_the_cpu(), providers(*names), pytest.raises(CudnnSdpaError) as raised:
            function(*given.get(wrong, (q, k, v)), **options)
        messages.append((type(raised.value), str(raised.value)))
    assert messages[0] == messages[1]


def test_explain_says_what_own_kernels_alone_refuse():
    q, k, v = (x.detach() for x in qkv(16))
    with providers("own"):
        report = explain(sdpa, q, k, v, softcap=3.0)
        with gpu_on_the_cpu(), pytest.raises(UnsupportedError) as refused:
            sdpa(q, k, v, softcap=3.0)
    assert not report.supported
    assert report.reasons == refused.value.reasons
    assert report.suggestion == refused.value.suggestion


@pytest.mark.parametrize("names", [("own", "cudnn"), ("cudnn", "own"), ("cudnn",)])
def test_inference_tensors_are_named(names):
    q, *_ = qkv(16)
    with torch.inference_mode():
        k = torch.randn(2, 2, 9, 16).bfloat16()
    with gpu_on_the_cpu(), providers(*names), pytest.raises(CudnnSdpaError, match=r"k.*inference"):
        sdpa(q, k, k)


@pytest.mark.parametrize("trains", [False, True])
def test_a_binding_is_not_remembered_if_providers_change_meanwhile(monkeypatch, trains):
    """As when a kind is compiled in the background while a plan is built."""
    q, k, v = (x.requires_grad_(trains) for x in qkv(64))

    def call():
        with torch.set_grad_enabled(trains):
            out = sdpa(q, k, v)
        return torch.autograd.grad(out.sum(), (q, k, v)) if trains else out

    with gpu_on_the_cpu():
        call()
        held = len(SDPA.table)
        plan_cache.forget_calls()
        assert held == 1 + trains
        assert len(SDPA.table) == 0
        bind = SdpaCall.bind

        def bind_while_all_is_forgotten(of):
            found = bind(of)
            plan_cache.forget_calls()
            return found

        monkeypatch.setattr(SdpaCall, "bind", bind_while_all_is_forgotten)
        with torch.set_grad_enabled(trains):
            out = sdpa(q, k, v)
        assert len(SDPA.table) == 0
        monkeypatch.undo()
        assert out.shape == q.shape
        call()
        assert len(SDPA.table) == held


def test_differentiability_is_of_the_providers_in_force():
    q, k, v = (torch.randn(1, 2, 9, 512, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    with gpu_on_the_cpu():
        with providers("own"):
            torch.autograd.grad(sdpa(q, k, v).sum(), (q, k, v))
        with providers("cudnn"), pytest.raises(UnsupportedError, match="gradient"):
            sdpa(q, k, v)


def test_calls_that_meet_a_known_bug_are_another_providers(monkeypatch):
    bug = KnownIssue("it skips a tile", "seen on an H200", "refused", concerns=lambda _: True, provider="own")
    monkeypatch.setattr(known_issues, "ATTENTION_ISSUES", (*known_issues.ATTENTION_ISSUES, bug))
    q, k, v = (x.detach() for x in qkv(64))
    with providers("own", "cudnn"):
        found = explain(sdpa, q, k, v)
    assert (found.provider, found.supported) == ("cudnn", True)
    assert f"own kernels do not serve it, as {bug}" in found.choice
    with providers("own"):
        assert explain(sdpa, q, k, v).reasons == [f"own kernels: {bug}"]
    refused = explain(kernels.attention, q, k, v)
    assert not refused.supported
    assert refused.reasons == [str(bug)]

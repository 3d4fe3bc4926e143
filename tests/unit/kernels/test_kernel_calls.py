"""`kernels.attention` on the CPU and on the fake GPU: what it refuses, how it is explained, and its module."""

from __future__ import annotations

import pytest
import torch
from fake_gpu import FakePlan, gpu_on_the_cpu
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import cudnn_sdpa
from cudnn_sdpa import DtypeError, OptionError, ShapeError, UnsupportedError, kernels
from cudnn_sdpa.graph.target import Target
from cudnn_sdpa.kernels.arguments import KernelArguments
from cudnn_sdpa.kernels.plans import Spec, attention_forward


def qkv(dim=16, *, dtype=torch.float32, dim_v=None):
    return [torch.randn(2, 4, 9, n).to(dtype).requires_grad_() for n in (dim, dim, dim_v or dim)]


@pytest.mark.parametrize("mode", ["fused", "tiled", "naive"])
def test_the_cpu_runs_the_reference(mode):
    q, k, v = (torch.randn(1, 2, 3, 5, dtype=torch.float64, requires_grad=True) for _ in range(3))
    mask = torch.randn(3, dtype=torch.float64, requires_grad=True)

    def run(*tensors):
        return kernels.attention(*tensors[:3], mode, tensors[3], True, 0.3)

    torch.testing.assert_close(run(q, k, v, mask), kernels.reference_attention(q, k, v, mask, True, 0.3))
    assert torch.autograd.gradcheck(run, (q, k, v, mask))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"mode": "fast"}, OptionError, r"mode: got 'fast'; expected 'fused'"),
        ({"mode": None}, OptionError, "mode"),
        ({"is_causal": 1}, OptionError, "is_causal"),
        ({"scale": "1"}, OptionError, "scale"),
        ({"scale": float("nan")}, OptionError, "scale"),
        ({"mask": torch.ones(9, 8, dtype=torch.bool)}, ShapeError, r"^mask: got shape \(9, 8\)"),
        ({"mask": torch.ones(9, 9, dtype=torch.int32)}, DtypeError, "^mask: got int32"),
        ({"mask": [1]}, OptionError, "^mask: got list"),
        ({"q": torch.randn(2, 4, 9, 130)}, ShapeError, "^k: got head dim 16"),
        ({"v": torch.randn(2, 4, 9, 8)}, ShapeError, "^v: got head dim 8"),
        ({"k": torch.randn(2, 3, 9, 16)}, ShapeError, "^k: got 3 heads"),
        ({"k": torch.randn(4, 9, 16)}, ShapeError, "^k: got shape"),
        ({"q": None}, OptionError, "^q: got NoneType"),
    ],
)
def test_wrong_arguments_are_named(change, error, message):
    given = dict(zip("qkv", qkv(), strict=True)) | change
    for _ in range(2):
        with pytest.raises(error, match=message):
            kernels.attention(**given)
        with gpu_on_the_cpu(), pytest.raises(error, match=message):
            kernels.attention(**given)


def test_the_fused_form_says_what_takes_larger_head_dims():
    with pytest.raises(ShapeError, match="at most 128 in the fused form"):
        kernels.attention(*qkv(129))
    assert kernels.attention(*qkv(129), mode="naive").shape == (2, 4, 9, 129)


@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
def test_pytorchs_causal_bias_objects_are_causal_masks(make):
    """They are tensors whose memory was never written. tests/contract has them on the fake GPU, too."""
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 9, 8)
    mask = make(5, 9)
    exact = kernels.attention(q, k, k, mask=mask._materialize())
    for attend in (kernels.attention, kernels.reference_attention, kernels.CUDAAttention()):
        torch.testing.assert_close(attend(q, k, k, mask=mask), exact)
        with pytest.raises(OptionError, match=r"^is_causal: got one in addition to a CausalBias as mask"):
            attend(q, k, k, mask=mask, is_causal=True)
        with pytest.raises(ShapeError, match=r"^mask: got a CausalBias for lengths \(9, 9\)"):
            attend(q, k, k, mask=make(9, 9))
    compiled = torch.compile(lambda: kernels.attention(q, k, k, mask=mask), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(), exact)
    shown = cudnn_sdpa.explain(kernels.attention, q, k, k, mask=mask, verify=True)
    assert max(shown.errors.values()) < 1e-5
    with pytest.raises(OptionError, match=r"^q: got NoneType"):
        kernels.attention(None, k, k, mask=mask)


def test_float64_is_refused_on_a_gpu():
    q = torch.empty(1, 1, 4, 8, dtype=torch.float64, device="meta")
    with pytest.raises(DtypeError, match="float32 or float16 or bfloat16 on meta"):
        kernels.attention(q, q, q)
    assert kernels.reference_attention(q, q, q).dtype == torch.float64  # the reference is not


def test_the_reference_names_wrong_types():
    with pytest.raises(OptionError, match=r"^k: got list; expected a torch\.Tensor"):
        kernels.reference_attention(torch.randn(1, 1, 4, 8), [1.0], torch.randn(1, 1, 4, 8))


def test_older_gpus_are_refused():
    q = torch.empty(1, 1, 4, 8)
    turing = Target((("deviceVer", 750), ("multiProcessorCount", 68)), 91900, "1", "an older GPU")
    with pytest.raises(UnsupportedError, match="compute capability 8"):
        Spec.of(KernelArguments(q, q, q)).key(turing, None)


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0)])
def test_no_queries_or_no_keys(sizes):
    q, k = (torch.randn(2, 2, n, 8, requires_grad=True) for n in sizes)
    with gpu_on_the_cpu():
        out = kernels.attention(q, k, k)
        grads = torch.autograd.grad(out.sum(), (q, k))
    assert not out.any()
    assert [x.shape for x in grads] == [q.shape, k.shape]
    assert not any(x.any() for x in grads)


def test_only_the_needed_kernels_run():
    q, k, v = qkv()
    with gpu_on_the_cpu():
        kernels.attention(q.detach(), k.detach(), v.detach())
        assert [x.name for x in FakePlan.launched[-1].outputs] == ["out"]
        for leaf, made in ((q, ["grad_q"]), (v, ["grad_k", "grad_v"])):
            out = kernels.attention(*(x if x is leaf else x.detach() for x in (q, k, v)))
            torch.autograd.grad(out.sum(), leaf)
            assert [x.name for x in FakePlan.launched[-1].outputs] == made


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("dim", "vectors"), [(16, True), (17, False)])
def test_an_expanded_gradient_is_copied_if_all_else_is_read_as_vectors(dim, vectors, dtype):
    q, k, v = qkv(dim, dtype=dtype)
    with gpu_on_the_cpu():
        out = kernels.attention(q, k, v)
        for grad in (
            torch.ones((), dtype=dtype).expand(out.shape),
            torch.ones_like(out),
            torch.ones_like(out).mT.contiguous().mT,
        ):
            found = torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)
            key = FakePlan.launched[-1]
            assert key.option_values["vectors"] is vectors
            given = next(x.layout for x in key.inputs if x.name == "grad_out")
            assert (given.stride == grad.stride()) is (grad.is_contiguous() or not vectors)
            wanted = torch.autograd.grad(kernels.reference_attention(q, k, v), (q, k, v), torch.ones_like(out))
            for x, y in zip(found, wanted, strict=True):
                torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)
    shown = str(cudnn_sdpa.explain(kernels.attention, q, k, v).backward)
    assert ("the gradient of the output is copied" in shown) is vectors


def test_fused_memory_does_not_grow_with_the_scores():
    q = torch.empty(1, 1, 4096, 64)
    target = Target((("deviceVer", 900), ("multiProcessorCount", 132)), 91900, "1", "a GPU")
    programs = {
        mode: attention_forward.program(Spec.of(KernelArguments(q, q, q, mode=mode)).key(target, None))
        for mode in ("fused", "naive")
    }
    assert programs["fused"].workspace == 0
    assert programs["naive"].workspace == 4 * 4096 * 4096
    (_, _), (rows, _, _) = (None, None), cudnn_sdpa.kernels.plans.results(KernelArguments(q, q, q))[1]
    assert 4 * torch.Size(rows).numel() < 0.01 * 4 * 4 * q.numel()  # statistics, beside q, k, v and the output


def test_explain_names_kernels_tiles_and_scratch():
    q, k, v = qkv(33)
    shown = cudnn_sdpa.explain(kernels.attention, q, k, v)
    assert shown.engine == "own kernels"
    assert shown.knobs["rows"] > 0
    assert shown.workspace == 0
    assert shown.backward is not None
    assert shown.backward.workspace == 4 * 2 * 4 * 9
    assert "element by element" in str(shown)
    naive = cudnn_sdpa.explain(kernels.attention, q, k, v, mode="naive", verify=True)
    assert naive.workspace == 4 * 2 * 4 * 9 * 9
    assert set(naive.errors) == {"out", "grad q", "grad k", "grad v"}
    assert max(naive.errors.values()) < 1e-5
    with pytest.raises(ShapeError, match="head dim"):
        cudnn_sdpa.explain(kernels.attention, *qkv(130))


def test_plans_are_recorded_and_compiled_into_a_store(tmp_path, monkeypatch):
    q = torch.randn(1, 2, 8, 64, requires_grad=True)
    with cudnn_sdpa.record_plans(target="h200") as manifest:
        kernels.attention(q, q, q, is_causal=True).sum().backward()
    assert len(manifest) == 2
    compiled = []
    monkeypatch.setattr(
        "cudnn_sdpa.plans.nvrtc.Kernel.compile", lambda kernel, sm: compiled.append((kernel.name, sm)) or b"code"
    )
    (tmp_path / "plans").mkdir(mode=0o700)
    report = cudnn_sdpa.compile_plans(manifest, "h200", tmp_path / "plans")
    assert report.built == 2
    assert compiled == [(name, 90) for name in ("fused_forward", "grad_delta", "fused_grad_kv", "fused_grad_q")]
    cudnn_sdpa.compile_plans(manifest, "h200", tmp_path / "plans")
    assert len(compiled) == 4  # they are there


def test_the_module():
    q, k, v = qkv(33)
    attend = kernels.CUDAAttention("naive")
    assert "naive" in repr(attend)
    assert not list(attend.parameters())
    torch.testing.assert_close(
        attend(q, k, v, is_causal=True, scale=0.1), kernels.attention(q, k, v, "fused", None, True, 0.1)
    )
    with pytest.raises(OptionError, match="mode"):
        kernels.CUDAAttention("fast")

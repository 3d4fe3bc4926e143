"""`explain` on CPU tensors: real plans for a GPU that is not in the machine."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import cudnn_sdpa
from cudnn_sdpa import (
    CudnnSdpaError,
    OptionError,
    cpu_checks,
    explain,
    kernels,
    plan_cache,
    scaled_dot_product_attention,
    sdpa,
    sdpa_varlen,
)
from cudnn_sdpa.cli import app
from cudnn_sdpa.fused.conv_graphs import channels_last, conv_dgrad, convolution
from cudnn_sdpa.offline import driver

pytestmark = pytest.mark.usefixtures("can_plan")


def qkv(dtype=torch.bfloat16, sq=64, skv=96, heads=(8, 2), dims=(64, 64)):
    return (
        torch.randn(2, heads[0], sq, dims[0]).to(dtype),
        torch.randn(2, heads[1], skv, dims[0]).to(dtype),
        torch.randn(2, heads[1], skv, dims[1]).to(dtype),
    )


@pytest.fixture
def other_gpu(h200, tmp_path, monkeypatch):
    """Makes `explain` answer for a GPU like an H200 with these changes."""
    numbers = iter(range(100))

    def use(remove=(), **changes):
        properties = {name: value for name, value in {**h200, **changes}.items() if name not in remove}
        path = tmp_path / f"gpu_{next(numbers)}.json"
        path.write_text(json.dumps(properties))
        monkeypatch.setenv("CUDNN_SDPA_TARGET", str(path))
        return path

    return use


@pytest.fixture(autouse=True)
def answer_for_an_h200(monkeypatch):
    monkeypatch.delenv("CUDNN_SDPA_TARGET", raising=False)


def test_a_supported_call():
    result = explain(sdpa, *qkv(), is_causal=True, return_lse=True)
    assert result.call == "sdpa"
    assert result.target == "NVIDIA H200 (SM 90, 132 multiprocessors)"
    assert result.offline
    assert result.supported
    assert result.reasons == []
    assert result.engine.startswith("eng")
    assert result.knobs
    assert result.workspace >= 0
    assert 0 < result.build_seconds < 60
    assert not result.cached
    assert result.key.startswith("sdpa_forward(q: bfloat16[2×8×64×64;")
    assert "band=(None, 0, False)" in result.key
    assert "with_lse=True" in result.key
    assert set(result.versions) == {"cudnn_sdpa", "cuDNN", "nvidia-cudnn-frontend", "torch"}
    assert result.versions["torch"] == torch.__version__
    for name in ("torch", "cudnn", "libcudnn"):
        assert Path(result.libraries[name]).exists(), name


def test_printing():
    result = explain(sdpa, *qkv())
    lines = str(result).splitlines()
    assert lines[0] == "sdpa for NVIDIA H200 (SM 90, 132 multiprocessors), planned without the GPU"
    for start, part in {
        "  engine": result.engine,
        "  workspace": f"{result.workspace} bytes",
        "  plan": "built now in",
        "  versions": f"cuDNN {result.versions['cuDNN']}, ",
        "  loaded": f"libcudnn.so.9, libcudnn_graph.so.9 from {Path(result.libraries['libcudnn']).parent}",
    }.items():
        assert any(line.startswith(start) and part in line for line in lines), start
    assert result.key not in str(result)
    assert f"  key        {result.key}" in result.details.splitlines()
    assert max(map(len, (line for line in lines if not line.startswith("  loaded")))) < 200
    assert sum(result.versions["torch"] in line for line in lines) == 1


@pytest.mark.slow
def test_the_plan_that_serves_meanwhile_is_named():
    q, k, v = qkv()
    lengths = torch.tensor([5, 5], dtype=torch.int32)
    with cudnn_sdpa.shape_policy("tiered"):
        result = explain(sdpa, q, k, v, is_causal=True)
        assert "bfloat16[16×1×1024×64" in result.bucket
        assert "at offsets_q" in result.bucket
        until_then = '  until then the generic plan of its bucket, unless shape_policy("exact") is set'
        assert until_then in str(result).splitlines()
        assert str(result.bucket) not in str(result)
        assert f"{until_then}: {result.bucket}" in result.details
        assert f"  key        {result.key}" in result.details
        assert result.key not in str(result)
        assert explain(sdpa, q, k, v, seq_lens_kv=lengths).bucket == ""
    with cudnn_sdpa.shape_policy("exact"):
        assert explain(sdpa, q, k, v, is_causal=True).bucket == ""


def test_json():
    result = explain(sdpa, *qkv())
    again = json.loads(json.dumps(result.to_dict()))
    assert again == result.to_dict()
    assert set(again) == set(vars(result))


def test_explain_has_no_side_effects():
    tensors = qkv()
    copies = [tensor.clone() for tensor in tensors]
    before = plan_cache.info()
    explain(sdpa, *tensors, out=torch.empty_like(tensors[0]))
    assert plan_cache.info() == before
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, copies, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_unsupported_dtype(dtype):
    result = explain(sdpa, *qkv(dtype))
    assert not result.supported
    assert result.engine == ""
    assert len(result.reasons) == 1
    assert f"not {str(dtype).removeprefix('torch.')}" in result.reasons[0]
    text = str(result)
    assert "not supported:" in text
    assert result.reasons[0] in text


@pytest.mark.slow
def test_the_suggestion_for_a_bottom_right_mask_with_a_bias_works():
    q, k, v = qkv(sq=80, skv=48)
    lengths, bias = torch.tensor([48, 31], dtype=torch.int32), torch.randn(80, 48)
    options = {"is_causal": True, "causal_alignment": "bottom_right", "seq_lens_kv": lengths}
    result = explain(sdpa, q, k, v, **options, attn_mask=bias)
    assert not result.supported
    assert any("cannot be combined with attn_mask" in reason for reason in result.reasons)
    assert "drawn into attn_mask" in result.suggestion

    diagonal = torch.arange(80).view(1, 1, 80, 1) + lengths.view(2, 1, 1, 1) - 80
    drawn = bias.masked_fill(torch.arange(48) > diagonal, -torch.inf)
    assert explain(sdpa, q, k, v, seq_lens_kv=lengths, attn_mask=drawn).supported
    with cudnn_sdpa.cpu_checks(None):  # the original call, by the reference
        wanted = sdpa(q, k, v, **options, attn_mask=bias)
    torch.testing.assert_close(sdpa(q, k, v, seq_lens_kv=lengths, attn_mask=drawn), wanted)


def test_bottom_right_without_lengths_skips_fully_masked_rows():
    result = explain(sdpa, *qkv(sq=80, skv=48), is_causal=True, causal_alignment="bottom_right", return_lse=True)
    assert result.supported
    assert "q: bfloat16[2×8×48×64;" in result.key
    assert any("32 queries" in note for note in result.extra_kernels)
    assert all(note in str(result) for note in result.extra_kernels)


@pytest.mark.parametrize("sizes", [(0, 9), (9, 0)])
def test_an_empty_call_needs_no_plan(sizes):
    result = explain(sdpa, *qkv(sq=sizes[0], skv=sizes[1]))
    assert result.supported
    assert result.engine == result.key == ""
    assert "nothing to compute" in str(result)


def test_the_drop_in_is_explained_as_sdpa():
    q, k, v = qkv()
    result = explain(scaled_dot_product_attention, q, k, v, None, 0.0, True, enable_gqa=True)
    assert result.call == "scaled_dot_product_attention"
    assert result.key == explain(sdpa, q, k, v, is_causal=True).key


def test_all_reasons_are_listed_with_a_suggestion():
    q, k, v = qkv(torch.float32, dims=(1032, 64))
    result = explain(sdpa, q, k, v, softcap=20.0, alibi=True)
    assert not result.supported
    for part in ("not float32", "head dim 1032", "softcap and alibi cannot be combined"):
        assert sum(part in reason for reason in result.reasons) == 1, part
    for part in ("torch.bfloat16", "head dims of up to 1024", "biases passed as attn_mask"):
        assert part in result.suggestion
    dropped = explain(
        scaled_dot_product_attention, q, k, v, torch.ones(64, 96, dtype=torch.bool), 0.25, enable_gqa=True
    )
    assert any("not float32" in reason for reason in dropped.reasons)


@pytest.mark.parametrize("function", [torch.nn.functional.softmax, print, len, "attend", None])
def test_other_functions_are_refused(function):
    with pytest.raises(OptionError, match=r"expected one of .*scaled_dot_product_attention, sdpa"):
        explain(function, *qkv())


def test_another_gpu_by_the_path_of_its_file(other_gpu):
    other_gpu(
        deviceVer=800, multiProcessorCount=108, maxSharedMemoryPerBlockOptin=166912, deviceName="NVIDIA A100-SXM4-40GB"
    )
    result = explain(sdpa, *qkv(), is_causal=True)
    assert result.supported
    assert result.target == "NVIDIA A100-SXM4-40GB (SM 80, 108 multiprocessors)"
    assert "NVIDIA A100" in result.key


def test_an_old_gpu_is_not_supported(other_gpu):
    other_gpu(deviceVer=750, deviceName="Tesla T4")
    result = explain(sdpa, *qkv())
    assert not result.supported
    assert any("7.5" in reason for reason in result.reasons)
    assert "Tesla T4 (SM 75" in str(result)


def test_an_unknown_gpu_is_named(monkeypatch):
    monkeypatch.setenv("CUDNN_SDPA_TARGET", "h9000")
    with pytest.raises(
        OptionError, match=r"'h9000'.*expected one of 'a100', .*'h200', .*, or the path of a cuDNN device"
    ):
        explain(sdpa, *qkv())


@pytest.mark.parametrize(
    ("remove", "changes"),
    [
        pytest.param(["maxGridSize"], {}, id="key missing"),
        pytest.param([], {"regsPerBlock": "many"}, id="wrong type"),
        pytest.param([], {"maxBlockSize": 3}, id="no list"),
        pytest.param([], {"multiProcessorCount": None}, id="null"),
        pytest.param(["multiProcessorCount"], {}, id="no multiprocessors"),
        pytest.param([], {"deviceVer": "ninety"}, id="no version"),
    ],
)
def test_a_device_file_that_cudnn_cannot_read_raises_a_library_error(other_gpu, remove, changes):
    other_gpu(remove, **changes)
    with pytest.raises(CudnnSdpaError):
        explain(sdpa, *qkv())


def test_no_driver_or_stand_in_is_loaded_into_the_users_process():
    assert explain(sdpa, *qkv()).supported
    maps = Path("/proc/self/maps").read_text()
    assert "stand-in-driver" not in maps
    if not driver.has_real_driver():
        assert "libcuda.so" not in maps
    assert not torch.cuda.is_initialized()


def test_a_training_call_is_planned_with_its_lse():
    tensors = [x.requires_grad_() for x in qkv()]
    assert "with_lse=True" in explain(sdpa, *tensors).key
    with torch.no_grad():
        result = explain(sdpa, *tensors)
    assert "with_lse=False" in result.key
    assert result.backward is None


def packed():
    ends = torch.tensor([0, 100, 256], dtype=torch.int32)
    return torch.randn(256, 3, 8, 64).bfloat16().requires_grad_(), (ends, ends, 156, 156)


@pytest.mark.sample(1)
@pytest.mark.parametrize("function", [sdpa, sdpa_varlen])
def test_gradients_of_a_large_call_are_planned_for_a_part(function):
    if function is sdpa:
        shapes, ends = [(4, heads, 2**18, 64) for heads in (64, 8, 8)], ()
    else:
        offsets = torch.empty(3, dtype=torch.int32, device="meta")
        shapes, ends = [(2**20, heads, 64) for heads in (64, 8, 8)], (offsets, offsets, 2**18, 2**18)
    tensors = [torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True) for shape in shapes]
    result = explain(function, *tensors, *ends, is_causal=True)
    assert result.supported, result.reasons
    assert result.backward.supported, result.backward.reasons
    assert result.backward.engine.startswith("eng")
    assert "computed in " in result.backward.extra_kernels[0]


def test_verify():
    whole, ends = packed()
    tensors = [x.requires_grad_() for x in qkv()]
    for result in (explain(sdpa, *tensors, verify=True), explain(sdpa_varlen, *whole.unbind(1), *ends, verify=True)):
        assert list(result.errors) == ["out", "lse", "grad q", "grad k", "grad v"]
        assert all(0 < error < 2e-2 for error in result.errors.values())
        assert f"grad v: {result.errors['grad v']:.1e}" in str(result)
    assert list(explain(sdpa, *(x.detach() for x in tensors), verify=True).errors) == ["out"]


def test_verify_without_a_backward_kernel():
    q, k, v = (x.requires_grad_() for x in qkv())
    mask = torch.zeros(64, 96, dtype=torch.bfloat16, requires_grad=True)
    result = explain(sdpa, q, k, v, softcap=20.0, attn_mask=mask, verify=True)
    assert result.supported
    assert not result.backward.supported
    assert list(result.errors) == ["out", "lse"]
    assert all(error < 1e-2 for error in result.errors.values())


@pytest.mark.parametrize("requires_grad", [False, True], ids=["", "with gradient"])
def test_float64_is_cpu_only(requires_grad):
    x = torch.randn(2, 8, 6, 6, dtype=torch.float64, requires_grad=requires_grad)
    weight = torch.randn(8, 8, 3, 3, dtype=torch.float64)
    calls = [(cudnn_sdpa.rms_norm, (x,)), (cudnn_sdpa.silu_mul, (x, x)), (cudnn_sdpa.conv2d, (x, weight))]
    calls.append((cudnn_sdpa.layer_norm, (x,)))
    for function, tensors in calls:
        found = explain(function, *tensors)
        for part in (found, found.backward) if requires_grad else (found,):
            assert not part.supported
            assert part.reasons == [
                "cuDNN's kernels take float16, bfloat16 or float32, not float64: on the CPU it runs in PyTorch"
            ]
            assert "torch.bfloat16" in part.suggestion


@pytest.mark.parametrize(
    ("filters", "groups", "activation", "with_bias", "is_apart"),
    [
        *((1, 1, "silu", True, True), (1, 1, "relu", True, False), (1, 1, "relu", False, True)),
        *(
            (8, 8, "gelu", True, True),
            (8, 8, "relu", True, False),
            (8, 8, "relu", False, True),
            (8, 8, None, False, False),
        ),
        *((8, 4, "silu", True, True), (8, 4, "relu", True, False), (8, 4, "relu", False, True)),
        (8, 1, "silu", False, False),
    ],
)
def test_an_unfused_activation_is_an_extra_kernel(filters, groups, activation, with_bias, is_apart):
    x, weight = torch.randn(2, 8, 12, 12).bfloat16(), torch.randn(filters, 8 // groups, 3, 3).bfloat16()
    x = channels_last(x)
    bias = torch.randn(filters).bfloat16() if with_bias else None
    found = explain(cudnn_sdpa.conv2d, x, channels_last(weight), bias, groups=groups, activation=activation)
    assert found.supported, found.reasons
    assert found.extra_kernels == [f"{activation} of the result"] * is_apart
    assert f"activation={None if is_apart else activation!r}" in found.key


def test_a_rejection_by_every_configuration_takes_one_line():
    x, weight = (channels_last(torch.randn(*shape, dtype=torch.float64)) for shape in ((1, 8, 8, 8), (8, 8, 3, 3)))
    options = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1)}
    found = explain(convolution, x, weight, **options, groups=1, activation=None)
    assert_in_one_line(found)
    grad, grad_x = channels_last(torch.randn(1, 8, 6, 6, dtype=torch.float64)), {"shape": (8, 8, 8)}
    assert_in_one_line(explain(conv_dgrad, grad, weight, **grad_x, **options))


def assert_in_one_line(found):
    """The line has the number of configurations, and those of cuDNN's reasons that say more than function names."""
    reason = found.reasons[0]
    assert re.match(r"cuDNN proposes (\d+ engine conf|one engine conf).* this graph: \S", reason), reason
    assert "\n" not in reason
    assert not re.search(r"(: |; )[\w.:>-]+\([^()]*\)(;|$)", reason), reason
    assert len(reason) < 400


@pytest.mark.slow
def test_the_default_dtype_does_not_affect_gradients():
    x, weight = torch.randn(64, 1024).bfloat16().requires_grad_(), torch.randn(1024).bfloat16()
    torch.set_default_dtype(torch.float64)
    try:
        for function in (cudnn_sdpa.rms_norm, cudnn_sdpa.layer_norm):
            found = explain(function, x, weight)
            assert found.backward.supported, found.backward.reasons
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.slow
def test_the_command_prints_the_same(monkeypatch):
    words = ["q=1,8,128,64", "k=1,2,128,64", "v=1,2,128,64", "is_causal=true", "window_size=(32,0)", "scale=0.5"]
    result = CliRunner().invoke(app, ["explain", "sdpa", *words, "--target", "b200", "--training", "--details"])
    assert result.exit_code == 0, result.output
    q = torch.empty(1, 8, 128, 64, dtype=torch.bfloat16, requires_grad=True)
    k = v = torch.empty(1, 2, 128, 64, dtype=torch.bfloat16, requires_grad=True)
    monkeypatch.setenv("CUDNN_SDPA_TARGET", "b200")
    expected = explain(sdpa, q, k, v, is_causal=True, window_size=(32, 0), scale=0.5)
    lines = result.output.splitlines()
    for found in (expected, expected.backward):
        assert f"  key        {found.key}" in lines
        assert any(line.startswith(f"  engine     {found.engine} ") for line in lines)
    assert "NVIDIA B200" in lines[0]


def test_the_command_exits_with_1_without_a_plan():
    for command, reason in (
        (["sdpa", *(f"{name}=1,8,128,64:float32" for name in "qkv")], "not float32"),
        (["sdpa", *(f"{name}=1,8,128,512" for name in "qkv"), "--training"], "head dims 512 and 512"),
    ):
        result = CliRunner().invoke(app, ["explain", *command, "--target", "h200"])
        assert result.exit_code == 1
        assert reason in result.output


def test_functions_by_name_and_pytorchs_own():
    q, k, v = qkv()
    assert str(explain("sdpa", q, k, v, is_causal=True).key) == str(explain(sdpa, q, k, v, is_causal=True).key)
    given = {"is_causal": True, "enable_gqa": True}
    of_pytorch = explain(torch.nn.functional.scaled_dot_product_attention, q, k, v, **given)
    assert of_pytorch.call == "scaled_dot_product_attention"
    assert of_pytorch.key == explain(scaled_dot_product_attention, q, k, v, **given).key
    for wrong in ("nothing", "torch.nn.functional.softmax", 3, torch.add):
        with pytest.raises(OptionError, match=r"^function: got .*; expected one of"):
            explain(wrong, q, k, v)


def test_kernels_in_float64_run_on_the_cpu_alone():
    q, k, v = (x.double() for x in qkv())
    with cpu_checks("h200,any-dtype"):
        assert kernels.attention(q, k, v).dtype == torch.float64
        found = explain(kernels.attention, q.requires_grad_(), k, v)
    assert not found.supported
    assert found.reasons == ["the kernels take float32, float16 and bfloat16; float64 runs on the CPU only"]
    assert "float32" in found.suggestion

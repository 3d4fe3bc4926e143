"""CPU tensors are refused by the same rules as GPU tensors, for a named GPU or for none."""

from __future__ import annotations

import itertools

import pytest
import torch
from fake_gpu import gpu_on_the_cpu

import cudnn_sdpa
from cudnn_sdpa import (
    DtypeError,
    Fp8Scales,
    LayoutError,
    OptionError,
    ShapeError,
    UnsupportedError,
    cpu_checks,
    sdpa,
    sdpa_varlen,
)
from cudnn_sdpa.attention.support import rules
from cudnn_sdpa.engine import cpu_target
from cudnn_sdpa.settings import Overrides

NOTE = r"\(CPU tensors are checked for h200; CUDNN_SDPA_CPU_CHECKS=none lifts this\)"


def qkv(*lengths, dims=(16, 16), heads=(4, 2), dtype=torch.float32):
    sq, skv = lengths or (8, 8)
    return (
        torch.randn(2, heads[0], sq, dims[0]).to(dtype),
        torch.randn(2, heads[1], skv, dims[0]).to(dtype),
        torch.randn(2, heads[1], skv, dims[1]).to(dtype),
    )


def offsets(*ends):
    return torch.tensor([0, *ends], dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_unsupported_strides_are_refused(dtype):
    q, k, v = qkv(dtype=dtype)
    spread = torch.randn(2, 2, 8, 20).to(dtype)
    for wrong, message in (
        (k.mT.contiguous().mT, "stride 8 in the last dimension"),
        (spread[..., :16], "stride 20 from token to token"),
        (torch.randn(2, 2, 9, 16).to(dtype).view(-1)[4:516].view(2, 2, 8, 16), "an address 8 bytes past"),
    ):
        with pytest.raises(LayoutError, match=f"k: got {message}(?s:.*){NOTE}"):
            sdpa(q, wrong, v)
        with pytest.raises(LayoutError, match=f"k: got {message}"):
            sdpa_varlen(
                q[0].mT.mT.transpose(0, 1), wrong[0].transpose(0, 1), v[0].transpose(0, 1), *(offsets(8),) * 2, 8, 8
            )
        with cpu_checks(None):
            torch.testing.assert_close(
                sdpa(q, wrong, v), sdpa(q, wrong.clone(memory_format=torch.contiguous_format), v)
            )


ROWS = torch.randn(4, 128)
MISALIGNED = {
    "x": cudnn_sdpa.rms_norm,
    "weight": lambda shifted: cudnn_sdpa.rms_norm(ROWS[:, :64].to(shifted), shifted[0]),
    "bias": lambda shifted: cudnn_sdpa.layer_norm(ROWS[:, :64].to(shifted), None, shifted[0]),
    "residual": lambda shifted: cudnn_sdpa.rms_norm(ROWS[:, :64].to(shifted), residual=shifted),
    "gate": lambda shifted: cudnn_sdpa.silu_mul(shifted, ROWS[:, :64].to(shifted)),
    "up": lambda shifted: cudnn_sdpa.gelu_mul(*[ROWS.to(shifted)[:, at : at + 64] for at in (0, 3)]),
    "up, half": lambda shifted: cudnn_sdpa.silu_mul(ROWS[:, :6].to(shifted).contiguous()),
}


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", MISALIGNED)
def test_misaligned_operands_of_fused_operations_are_refused(name, dtype, trains):
    """As on a GPU, in the same words; what a GPU copies anyway passes."""
    shifted = torch.randn(4 * 64 + 1).to(dtype)[1:].view(4, 64).requires_grad_(trains)
    argument = name.partition(",")[0]
    with pytest.raises(LayoutError, match=f"^{argument}: got an address .* bytes past(?s:.*){NOTE}$") as on_the_cpu:
        MISALIGNED[name](shifted)
    with gpu_on_the_cpu(), pytest.raises(LayoutError) as on_a_gpu:
        MISALIGNED[name](shifted)
    assert str(on_the_cpu.value).startswith(str(on_a_gpu.value))
    with cpu_checks(None):
        MISALIGNED[name](shifted)
    cudnn_sdpa.rms_norm(ROWS[:, 3:67].to(dtype))  # rows that are not dense are copied


OPTIONS = {
    "is_causal": {"is_causal": True},
    "bottom_right": {"is_causal": True, "causal_alignment": "bottom_right"},
    "alibi": {"alibi": True},
    "softcap": {"softcap": 3.0},
    "lengths": {"seq_lens_kv": torch.tensor([3, 8], dtype=torch.int32)},
    "mask": {"attn_mask": torch.randn(8, 8)},
    "window_size": {"window_size": (3, 0)},
    "dropout": {"dropout_p": 0.5},
    "deterministic": {"deterministic": True},
    "sinks": {"sinks": torch.randn(4)},
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("target", ["a100", "h200", "b200"])
@pytest.mark.parametrize("backward", [False, True])
def test_the_cpu_refuses_what_support_refuses(target, backward):
    """Every pair of options, one query and many, several head dims: agrees with `support`."""
    refusals = 0
    sm = cpu_target.bundled_capabilities()[target]
    dims_of = [(16, 16), (192, 128), (256, 256)] if backward else [(16, 16)]
    for (one, other), sq, dims in itertools.product(
        itertools.combinations_with_replacement(OPTIONS, 2), (1, 8), dims_of
    ):
        options = {**OPTIONS[one], **OPTIONS[other]}
        if "attn_mask" in options:
            options["attn_mask"] = options["attn_mask"][:sq].clone()
        q, k, v = qkv(sq, 8, dims=dims, dtype=torch.bfloat16)
        q.requires_grad_(backward)
        asked = {name: True if isinstance(value, torch.Tensor) else value for name, value in options.items()}
        asked["direction"] = "backward" if backward else "forward"
        answer = cudnn_sdpa.support(
            head_dim=dims[0], head_dim_v=dims[1], sq=sq, skv=8, sm=sm, cudnn=cpu_target.installed_cudnn(), **asked
        )
        with cpu_checks(target):
            refused = UnsupportedError.of(sdpa, q, k, v, **options)
        assert (refused is None) == bool(answer), (asked, dims, sq, answer, refused)
        if refused is not None:
            assert set(refused.reasons) <= set(answer.reasons)
            refusals += 1
    assert refusals > 5


def test_every_support_rule_is_checked(monkeypatch):
    """New rules apply on the CPU automatically: they are the GPU's rules."""
    rule = rules.Rule(lambda case: case.head_dim == 24, "24 is out of fashion", "another number")
    monkeypatch.setattr(rules, "RULES", (rule,))
    monkeypatch.setattr(rules.refuse, "__defaults__", ((rule,),))
    q, k, v = qkv(dims=(24, 24))
    q_packed = torch.randn(8, 2, 24)
    table = torch.zeros(2, 1, dtype=torch.int32)
    pages, lengths = torch.randn(3, 2, 16, 24), torch.tensor([4, 4], dtype=torch.int32)
    for call in (
        lambda: sdpa(q, k, v),
        lambda: cudnn_sdpa.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        lambda: sdpa_varlen(q_packed, q_packed, q_packed, offsets(8), offsets(8), 8, 8),
        lambda: cudnn_sdpa.sdpa_paged(q[:, :, :1], pages, pages, table, lengths, page_layout="HND"),
        lambda: cudnn_sdpa.sdpa_paged(torch.cat([q, q], 2), pages, pages, table, lengths, page_layout="HND"),
    ):
        with pytest.raises(UnsupportedError, match=f"{NOTE}(?s:.*)24 is out of fashion(?s:.*)another number"):
            call()
        with cudnn_sdpa.fallback("torch"):
            assert call().isfinite().all()
        with cpu_checks("none"):
            assert call().isfinite().all()


def test_gradients_are_refused_before_the_loss_is_differentiated():
    q, k, v = (x.requires_grad_() for x in qkv())
    mask = torch.randn(8, 8, requires_grad=True)
    with pytest.raises(UnsupportedError, match="wrong gradients of attn_mask"):
        sdpa(q, k, v, softcap=2.0, attn_mask=mask)
    with torch.no_grad():
        assert sdpa(q, k, v, softcap=2.0, attn_mask=mask).isfinite().all()
    x = torch.randn(8, 2, 16, requires_grad=True)
    with cpu_checks("a100,any-dtype"), pytest.raises(UnsupportedError, match="no gradients of packed sequences"):
        sdpa_varlen(x, x, x, offsets(8), offsets(8), 8, 8)


def test_gradients_of_packed_queries_among_other_tensors_pass():
    qkv = torch.randn(8, 3, 2, 16, requires_grad=True)
    sdpa_varlen(*qkv.unbind(1), offsets(3, 8), offsets(3, 8), 5, 5).square().sum().backward()
    assert qkv.grad.abs().min() > 0


def fp8(dims=(32, 32), sq=8):
    q, k, v = (x.to(torch.float8_e4m3fn) for x in qkv(sq, 8, dims=dims))
    one = torch.ones(1)
    return cudnn_sdpa.sdpa_fp8(q, k, v, Fp8Scales(one, one, one, one, one, one))


def test_fp8_rules():
    assert fp8().out.dtype == torch.float8_e4m3fn
    with pytest.raises(UnsupportedError, match=f"sdpa_fp8 {NOTE}(?s:.*)no FP8 kernel for a single query"):
        fp8(sq=1)
    with pytest.raises(ShapeError, match=f"multiple of 16(?s:.*){NOTE}"):
        fp8(dims=(24, 24))
    with cpu_checks("a100,any-dtype"), pytest.raises(UnsupportedError, match=r"needs 9\.0"):
        fp8()
    with cpu_checks(None):
        assert fp8(dims=(24, 24), sq=1).out.shape == (2, 4, 1, 24)


def half(*lengths, dims=(128, 128)):
    return [x.requires_grad_() for x in qkv(*lengths, dims=dims, dtype=torch.bfloat16)]


def test_fp8_attention_is_checked_as_it_is_on_a_gpu():
    """Before the forward pass, also for what its gradients need."""
    assert cudnn_sdpa.fp8_attention(*half()).requires_grad
    with pytest.raises(UnsupportedError, match=f"fp8_attention {NOTE}(?s:.*)only head dim 128, not head dims 32"):
        cudnn_sdpa.fp8_attention(*half(dims=(32, 32)))
    with torch.no_grad():
        assert cudnn_sdpa.fp8_attention(*half(dims=(32, 32))).isfinite().all()
    with pytest.raises(UnsupportedError, match=f"fp8_attention {NOTE}(?s:.*)no FP8 kernel for a single query"):
        cudnn_sdpa.fp8_attention(*half(1, 8))
    with cpu_checks("a100,any-dtype"), pytest.raises(UnsupportedError, match=r"fp8_attention (?s:.*)needs 9\.0"):
        cudnn_sdpa.fp8_attention(*half())


@pytest.mark.parametrize("dims", [(32, 32), (24, 8), (5, 3)])
def test_fp8_attention_without_checks_takes_what_its_emulation_can_compute(dims):
    q, k, v = half(1, 8, dims=dims)
    strided = k.detach().mT.contiguous().mT.requires_grad_()
    with pytest.raises((ShapeError, LayoutError)):
        cudnn_sdpa.fp8_attention(q, strided, v)
    with cpu_checks(None):
        out = cudnn_sdpa.fp8_attention(q, strided, v)
        found = torch.autograd.grad(out.float().square().sum(), (q, strided, v))
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    expected = torch.autograd.grad(exact.float().square().sum(), (q, k, v))
    for a, b in ((out, exact), *zip(found, expected, strict=True)):
        assert (a - b).norm() < 0.25 * b.norm()


@pytest.mark.usefixtures("reference_alone")
def test_head_dims_of_any_size_without_checks():
    q, k, v = qkv(dims=(5, 3))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(sdpa(q, k, v), expected)


def test_checks_are_cached_per_gpu_and_options():
    x = torch.randn(1, 2, 8, 256, requires_grad=True)
    assert sdpa(x, x, x).shape == x.shape
    with cpu_checks("a100,any-dtype"), pytest.raises(UnsupportedError, match="head dims 256"):
        sdpa(x, x, x)
    assert sdpa(x, x, x).shape == x.shape
    with pytest.raises(UnsupportedError, match="causal mask"):
        sdpa(x.detach(), x.detach(), x.detach(), alibi=True)


def _paged(x):
    numbers = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([8], dtype=torch.int32)
    return cudnn_sdpa.sdpa_paged(x, x, x, *numbers, page_layout="HND")


def _packed_on_pages(x):
    numbers = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([8], dtype=torch.int32), offsets(8), 8
    return cudnn_sdpa.sdpa_paged_varlen(x[0].transpose(0, 1), x, x, *numbers, page_layout="HND")


def _cache(x):
    return cudnn_sdpa.PagedKVCache(pages=2, page_size=8, heads=1, head_dim=16, dtype=x.dtype, device="cpu").k_pages()


def _static_cache(x):
    return cudnn_sdpa.nn.KVCache(batch=1, heads=1, head_dim=16, max_length=8, dtype=x.dtype, device="cpu")


STRICT = {
    "sdpa": lambda x: sdpa(x, x, x),
    "drop-in": lambda x: cudnn_sdpa.scaled_dot_product_attention(x, x, x),
    "sdpa_varlen": lambda x: sdpa_varlen(x[0], x[0], x[0], offsets(1), offsets(1), 1, 1),
    "sdpa_paged": _paged,
    "sdpa_paged_varlen": _packed_on_pages,
    "PagedKVCache": _cache,
    "nn.KVCache": _static_cache,
    "kernels.attention": lambda x: cudnn_sdpa.kernels.attention(x, x, x),
    "rms_norm": cudnn_sdpa.rms_norm,
    "silu_mul": cudnn_sdpa.silu_mul,
    "conv2d": lambda x: cudnn_sdpa.conv2d(x, x),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", STRICT)
def test_dtypes_are_refused_unless_the_setting_accepts_any(name, dtype):
    """The dtypes that GPUs refuse, and no others."""
    x = torch.randn(1, 1, 8, 16).to(dtype)
    takes_float32 = name in ("kernels.attention", "rms_norm", "silu_mul", "conv2d")
    with cpu_checks("h200,any-dtype"):
        assert STRICT[name](x) is not None
    with cpu_checks("h200"):
        if dtype == torch.float64 or (dtype == torch.float32 and not takes_float32):
            got, lifts = str(dtype).removeprefix("torch."), "CUDNN_SDPA_CPU_CHECKS=h200,any-dtype lifts"
            with pytest.raises(DtypeError, match=f"got .*{got}; expected .*float16.*{lifts}"):
                STRICT[name](x)
        else:
            assert STRICT[name](x) is not None
        if name in ("sdpa", "sdpa_varlen", "sdpa_paged", "sdpa_paged_varlen"):
            with cudnn_sdpa.fallback("torch"):
                assert STRICT[name](x).dtype == dtype


def test_strict_dtypes_hold_in_both_passes_and_in_compiled_code():
    q, k, v = (x.requires_grad_() for x in qkv())
    compiled = torch.compile(sdpa, backend="aot_eager", fullgraph=True)
    assert compiled(q, k, v).requires_grad
    out, lse = (x.detach() for x in sdpa(q, k, v, return_lse=True))
    q, k, v = (x.detach() for x in (q, k, v))
    with cpu_checks("h200"):
        with pytest.raises(DtypeError, match="float16 or bfloat16 on h200"):
            cudnn_sdpa.sdpa_backward(out, out, lse, q, k, v)
        with pytest.raises((DtypeError, RuntimeError), match="float16 or bfloat16 on h200"):
            compiled(q, k, v)
        assert compiled(*(x.bfloat16() for x in (q, k, v))).dtype == torch.bfloat16
        with cudnn_sdpa.providers("cudnn", "own"):
            torch.testing.assert_close(sdpa(q, k, v), out)


def test_the_setting():
    before = cpu_target.active_name(), cpu_target.checks_dtypes()
    with cpu_checks("h200"):
        assert cpu_target.checks_dtypes()
        with cpu_checks(" H200, Any-dtype ") as text:
            assert (text, cpu_target.active_name(), cpu_target.checks_dtypes()) == ("h200,any-dtype", "h200", False)
        assert cpu_target.checks_dtypes()
        with cpu_checks(None):
            assert not cpu_target.checks_dtypes()
        assert cpu_target.checks_dtypes()
    assert (cpu_target.active_name(), cpu_target.checks_dtypes()) == before
    with cpu_checks("B200") as name:
        assert name == cpu_target.active_name() == "b200"
        with cpu_checks(None) as nothing:
            assert nothing is cpu_target.active_name() is None
        assert cpu_target.active_name() == "b200"
    cpu_checks("a100")
    assert cpu_target.active_name() == "a100"
    cpu_checks("h200,any-dtype")
    for wrong in ("h900", 90, "", True, "none,any-dtype", "h200,", "h200,values", "h200,any-dtype,", ",any-dtype"):
        with pytest.raises(OptionError, match=r"'a100', .*'h200', .*or none"):
            cpu_checks(wrong)
    assert cpu_target.active_name() == "h200"


@pytest.fixture
def read(monkeypatch):
    """Reads the environment as the import does."""
    monkeypatch.setattr(cpu_target._Setting, "value", cpu_target._Setting.value)
    monkeypatch.setattr(cpu_target, "_overrides", Overrides(lambda: cpu_target._Setting.value, cpu_target._put))
    return cpu_target._read_environment


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, "h200"), ("", None), ("none", None), ("OFF", None), ("A100", "a100"), ("b200,any-dtype", "b200")],
)
def test_the_environment_variable_names_the_gpu(value, expected, read, monkeypatch):
    monkeypatch.delenv("CUDNN_SDPA_CPU_CHECKS")
    if value is not None:
        monkeypatch.setenv("CUDNN_SDPA_CPU_CHECKS", value)
    read()
    assert cpu_target.checks_dtypes() == (expected is not None and "any-dtype" not in str(value))
    assert cpu_target.active_name() == expected


def test_a_wrong_variable_is_named_until_it_is_right(read, monkeypatch):
    monkeypatch.setenv("CUDNN_SDPA_CPU_CHECKS", "h900")
    read()
    for _ in range(2):
        with pytest.raises(OptionError, match="CUDNN_SDPA_CPU_CHECKS: got 'h900'; expected one of 'a100'"):
            sdpa(*qkv())
        with cpu_checks("b200"):  # it can be overridden
            assert cpu_target.active_name() == "b200"
    monkeypatch.setenv("CUDNN_SDPA_CPU_CHECKS", "a100")
    assert cpu_target.active_name() == "a100"


def test_compiled_calls_are_checked_when_they_run():
    q, k, v = qkv()
    compiled = torch.compile(lambda q, k, v: sdpa(q, k, v, alibi=True), backend="eager", fullgraph=True)
    with pytest.raises(UnsupportedError, match="causal mask"):
        compiled(q, k, v)
    with cpu_checks(None):
        torch.testing.assert_close(compiled(q, k, v), sdpa(q, k, v, alibi=True))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_and_fake_tensors_are_not_checked():
    """Under vmap and on fake tensors no values are read, and nothing is refused for its memory."""
    q, k, v = qkv()
    lengths = torch.tensor([[3, 8], [8, 1]], dtype=torch.int32)
    found = torch.vmap(lambda n: sdpa(q, k, v, seq_lens_kv=n))(lengths)
    for part, n in zip(found, lengths, strict=True):
        torch.testing.assert_close(part, sdpa(q, k, v, seq_lens_kv=n))
    with torch._subclasses.FakeTensorMode():
        x = torch.empty(2, 2, 8, 16)
        assert sdpa(x, x, x, alibi=True).shape == x.shape

"""Checks of the values of lengths, offsets and page ids, which are off by default on a GPU."""

from __future__ import annotations

import inspect

import forked_python
import pytest
import torch

import cudnn_sdpa
from cudnn_sdpa.engine import value_checks


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def dense(**options):
    q = torch.randn(2, 2, 5, 8)
    return cudnn_sdpa.sdpa(q, q, q, **options)


def packed(offsets_q, offsets_kv=None, longest=4):
    q = torch.randn(10, 2, 8)
    offsets_kv = offsets_q if offsets_kv is None else offsets_kv
    return cudnn_sdpa.sdpa_varlen(q, q, q, offsets_q, offsets_kv, longest, longest)


@pytest.mark.parametrize("name", ["seq_lens_q", "seq_lens_kv"])
@pytest.mark.parametrize("wrong", [(3, 6), (-1, 2)])
def test_lengths_outside_of_the_tensor_raise(name, wrong):
    with pytest.raises(cudnn_sdpa.ShapeError, match=rf"{name}: got {wrong[0] if wrong[0] < 0 else 6} .* from 0 to 5"):
        dense(**{name: int32(*wrong)})
    assert torch.isfinite(dense(**{name: int32(0, 5)})).all()


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ((1, 4, 8), "offsets from 1 to 8; expected from 0 to no more than 10"),
        ((0, 4, 8, 11), "offsets from 0 to 11; expected from 0 to no more than 10"),
        ((0, 4, 3, 7), "offsets that decrease, from 4 to 3"),
        ((0, 4, -5, -3), "offsets that decrease, from 4 to -5"),
        ((-2, 2, 4), "offsets from -2 to 4"),
        ((0, 4, 10), r"max_seqlen_q: got 4; expected at least 6"),
    ],
    ids=["start", "end", "order", "negative", "negative start", "longest"],
)
def test_invalid_offsets_raise(offsets, message):
    with pytest.raises(cudnn_sdpa.ShapeError, match=message):
        packed(int32(*offsets))


def test_both_offsets_are_checked():
    right = int32(0, 4, 8, 10)
    assert packed(right).shape == (10, 2, 8)
    with pytest.raises(cudnn_sdpa.ShapeError, match="cu_seqlens_kv"):
        packed(right, int32(0, 4, 8, 11))
    assert packed(right, int32(0, 4, 8, 9)).shape == (10, 2, 8), "rows past the last sequence belong to nobody"


def paged(table, lengths):
    pages = torch.randn(4, 2, 8, 16)
    numbers = torch.tensor(table, dtype=torch.int32), int32(*lengths)
    return cudnn_sdpa.sdpa_paged(torch.randn(2, 2, 1, 16), pages, pages, *numbers, page_layout="HND")


def test_page_ids_outside_of_the_cache_raise():
    with pytest.raises(cudnn_sdpa.ShapeError, match=r"page_table: got page 4 for batch entry 1; .* from 0 to 3"):
        paged([[0, 1], [2, 4]], (16, 9))
    with pytest.raises(cudnn_sdpa.ShapeError, match="page -100"):
        paged([[0, 1], [-100, 3]], (16, 9))
    with pytest.raises(cudnn_sdpa.ShapeError, match="seq_lens_kv: got 17"):
        paged([[0, 1], [2, 3]], (17, 9))
    assert paged([[0, 1], [2, -(2**31)]], (16, 8)).isfinite().all(), "what no sequence uses is not looked at"


def calls_with_values():
    """Calls of every function with lengths, offsets or page ids, and valid values of these."""
    q, rows, pages = torch.randn(2, 4, 5, 16), torch.randn(9, 4, 16), torch.randn(4, 4, 16, 16)
    fp8, fp8_pages, half = q.to(torch.float8_e4m3fn), pages.to(torch.float8_e4m3fn), q.bfloat16()
    lse, row_lse, one, mask = torch.zeros(2, 4, 5), torch.zeros(9, 4), torch.ones(1), torch.zeros(5, 5)
    scales, backward_scales = cudnn_sdpa.Fp8Scales(*[one] * 6), cudnn_sdpa.Fp8BackwardScales(*[one] * 12)
    lengths = {"seq_lens_q": int32(5, 0), "seq_lens_kv": int32(0, 5)}
    offsets = {"cu_seqlens_q": int32(0, 4, 9), "cu_seqlens_kv": int32(0, 5, 9)}
    table = torch.arange(4, dtype=torch.int32).view(2, 2)
    paged = {"page_table": table, "page_table_v": table.clone(), "seq_lens_kv": int32(32, 17)}
    leaf, row_leaf, half_leaf = (x.clone().requires_grad_() for x in (q, rows, half))
    module = cudnn_sdpa.nn.Attention(16, 2)
    return {
        "sdpa": (lambda **more: cudnn_sdpa.sdpa(q, q, q, **more), lengths),
        "sdpa, with a mask": (lambda **more: cudnn_sdpa.sdpa(q, q, q, attn_mask=mask, **more), lengths),
        "sdpa, differentiable": (lambda **more: cudnn_sdpa.sdpa(leaf, q, q, **more), lengths),
        "sdpa_varlen": (lambda **more: cudnn_sdpa.sdpa_varlen(rows, rows, rows, **more), offsets),
        "sdpa_varlen, differentiable": (lambda **more: cudnn_sdpa.sdpa_varlen(row_leaf, rows, rows, **more), offsets),
        "sdpa_backward": (lambda **more: cudnn_sdpa.sdpa_backward(q, q, lse, q, q, q, **more), lengths),
        "sdpa_varlen_backward": (
            lambda **more: cudnn_sdpa.sdpa_varlen_backward(rows, rows, row_lse, rows, rows, rows, **more),
            offsets,
        ),
        "sdpa_paged": (
            lambda **more: cudnn_sdpa.sdpa_paged(q, pages, pages, page_layout="HND", **more),
            {**paged, "seq_lens_q": int32(5, 1)},
        ),
        "sdpa_paged_varlen": (
            lambda **more: cudnn_sdpa.sdpa_paged_varlen(rows, pages, pages, page_layout="HND", **more),
            {**paged, "cu_seqlens_q": int32(0, 4, 9)},
        ),
        "trusted_pages": (
            lambda **more: cudnn_sdpa.trusted_pages(**more, pages=4, page_size=16),
            {"page_table": table.clone(), "seq_lens_kv": int32(32, 17)},
        ),
        "sdpa_fp8": (lambda **more: cudnn_sdpa.sdpa_fp8(fp8, fp8, fp8, scales, **more), lengths),
        "sdpa_fp8, on pages": (lambda **more: cudnn_sdpa.sdpa_fp8(fp8, fp8_pages, fp8_pages, scales, **more), paged),
        "sdpa_fp8_backward": (
            lambda **more: cudnn_sdpa.sdpa_fp8_backward(fp8, fp8, fp8, fp8, fp8, lse, backward_scales, **more),
            lengths,
        ),
        "fp8_attention": (lambda **more: cudnn_sdpa.fp8_attention(half, half, half, **more), lengths),
        "fp8_attention, differentiable": (
            lambda **more: cudnn_sdpa.fp8_attention(half_leaf, half, half, **more),
            lengths,
        ),
        "Fp8Attention": (lambda **more: cudnn_sdpa.Fp8Attention()(half, half, half, **more), lengths),
        "nn.Attention": (
            lambda seq_lens_q: module(torch.ones(2, 5, 16), seq_lens=seq_lens_q),
            {"seq_lens_q": int32(5, 0)},
        ),
    }


LONGEST = {"max_seqlen_q": 5, "max_seqlen_kv": 5}


def spoiled_values(name, right, *, from_zero):
    """Invalid values by what is wrong with them."""
    yield "negative", torch.where(torch.arange(right.numel()).view(right.shape) == right.numel() - 1, -1, right).int()
    if name.startswith("cu_"):
        yield "falling", right.flip(0)
        if from_zero:
            yield "starting late", right.clamp_min(1)
        yield "ending late", right + (right == 9).int()
    else:
        yield "too large", torch.where(right == right.max(), 100, right).int()


@pytest.mark.usefixtures("reference_alone")  # the FP8 functions have kernels for other head dims
@pytest.mark.parametrize("name", calls_with_values())
def test_every_function_checks_every_value_on_the_cpu(name):
    call, values = calls_with_values()[name]
    is_paged = "paged" in name
    options = {key: x for key, x in LONGEST.items() if "varlen" in name and not (is_paged and key == "max_seqlen_kv")}
    call(**values, **options)
    for argument, right in values.items():
        named = rf"^({argument}|{argument.replace('cu_seqlens', 'max_seqlen')}): got"
        for what, wrong in spoiled_values(argument, right, from_zero=not is_paged):
            with pytest.raises(cudnn_sdpa.ShapeError, match=named):
                pytest.fail(f"{argument}, {what}, was taken: {call(**{**values, argument: wrong}, **options)}")
    if options:
        for longest in options:
            with pytest.raises(cudnn_sdpa.ShapeError, match=f"^{longest}: got 0"):
                call(**values, **{**options, longest: 0})


def test_every_function_with_values_is_tested():
    tested = {name.split(",")[0] for name in calls_with_values()}
    for name in cudnn_sdpa.__all__:
        function = getattr(cudnn_sdpa, name)
        takes = inspect.signature(function).parameters if inspect.isfunction(function) else {}
        if "seq_lens_kv" in takes or "cu_seqlens_kv" in takes:
            assert name in tested or name == "support"


def test_gpu_values_are_read_only_on_request():
    """A tensor that cannot be read replaces one on a GPU: reading it would raise another error."""
    assert not value_checks.enabled
    value_checks.check_lengths("seq_lens_kv", torch.empty(2, dtype=torch.int32, device="meta"), 5)
    value_checks.check_offsets("cu_seqlens_q", torch.empty(3, dtype=torch.int32, device="meta"), 5, 5)
    value_checks.check_pages("page_table", *torch.empty(2, 2, dtype=torch.int32, device="meta").split(1), 8, 4)


def test_meta_tensors_are_not_checked():
    with torch._subclasses.FakeTensorMode():
        assert dense(seq_lens_kv=int32(3, 6)).shape == (2, 2, 5, 8)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("value", "expected"), [("1", "True"), ("0", "False"), ("off", "False"), ("False", "False"), ("", "False")]
)
def test_the_environment_variable_switches_it_on(value, expected, monkeypatch):
    monkeypatch.setenv("CUDNN_SDPA_DEBUG", value)
    program = "from cudnn_sdpa.engine import value_checks; print(value_checks.enabled)"
    done = forked_python.run(["-c", program], check=True)
    assert done.stdout.strip() == expected

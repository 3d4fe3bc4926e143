"""MXFP8 in PyTorch, against its definition."""

from __future__ import annotations

import pytest
import torch
from mathematics import attend

from cudnn_sdpa import DtypeError, ShapeError, UnsupportedError
from cudnn_sdpa.attention import mxfp8
from cudnn_sdpa.attention.arguments import ForwardArguments
from cudnn_sdpa.runtime.target import Target

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def target(sm, cudnn=92800):
    return Target((("deviceVer", 10 * sm), ("multiProcessorCount", 148)), cudnn, "1.32.0", "a GPU")


def outliers(*shape):
    """Numbers of which some are a thousand times as large as most."""
    return torch.randn(shape) * torch.where(torch.rand(shape) < 0.01, 1000.0, 1.0)


@pytest.mark.parametrize("along", [-1, -2])
@pytest.mark.parametrize(("dtype", "error"), [(E4M3, 2**-4), (E5M2, 2**-3)])
def test_each_block_has_the_scale_of_its_largest_number(dtype, error, along):
    x = outliers(2, 3, 70, 80)
    made = mxfp8.quantized(x, dtype, along=along)
    assert made.values.shape == x.shape
    assert made.exponents.shape == ((2, 3, 70, 3) if along == -1 else (2, 3, 3, 80))
    found = mxfp8.dequantized(made, torch.float64, along=along)
    rows, back = x.movedim(along, -1), found.movedim(along, -1)
    for block, of_block in zip(rows.split(32, -1), back.split(32, -1), strict=True):
        largest = block.abs().amax(-1, keepdim=True)
        # What is larger than the format's largest number times the scale is cut, by an eighth at most.
        assert ((block - of_block).abs() <= torch.maximum(error * 2 * block.abs(), largest * 2**-15)).all()
    powers = made.exponents.movedim(along, -1)[..., 0].int() - 127
    largest = rows[..., :32].abs().amax(-1)
    quotient = torch.ldexp(largest, -powers)
    top = {E4M3: 256, E5M2: 32768}[dtype]
    assert ((quotient >= top) & (quotient < 2 * top)).all()


def test_zeros_and_extreme_numbers():
    x = torch.zeros(1, 1, 3, 32)
    x[0, 0, 1], x[0, 0, 2] = 1e-38, 3e38
    made = mxfp8.quantized(x)
    assert made.exponents[0, 0, 0] == 0
    found = mxfp8.dequantized(made, torch.float64)
    assert (found[0, 0, 0] == 0).all()
    torch.testing.assert_close(found[0, 0, 1:], x[0, 0, 1:].double(), rtol=2**-3, atol=0)


@pytest.mark.parametrize("shape", [(128, 4), (256, 8), (1, 1), (200, 5), (129, 3)])
def test_tiles_are_in_cudnns_order(shape):
    exponents = torch.randint(1, 255, (2, *shape), dtype=torch.uint8)
    found = mxfp8.in_tiles(exponents)
    rows, columns = (-(-n // step) * step for n, step in zip(shape, mxfp8.TILE, strict=True))
    wanted = torch.zeros(2, rows * columns, dtype=torch.uint8)
    for r in range(shape[0]):
        for c in range(shape[1]):
            tile = (r // 128) * (columns // 4) + c // 4
            wanted[:, 512 * tile + 16 * (r % 32) + 4 * (r % 128 // 32) + c % 4] = exponents[:, r, c]
    assert torch.equal(found, wanted)


def test_attention_keeps_what_a_scale_for_each_tensor_loses():
    """Blocks with outliers do no harm to the others."""
    q, k, v = torch.randn(2, 4, 40, 64), torch.randn(2, 2, 72, 64), torch.randn(2, 2, 72, 64)
    v[0, 0, 0, 0] = 1e4
    blocks = mxfp8.quantized(q), mxfp8.quantized(k), mxfp8.quantized(v, along=-2)
    out, lse = mxfp8.attention(*blocks, ForwardArguments(q, k, v, is_causal=True, scale=0.2))
    wanted, wanted_lse = attend(q, k, v, is_causal=True, scale=0.2)
    others = torch.ones_like(wanted, dtype=torch.bool)
    others[0, :2, :, 0] = False
    assert (out - wanted)[others].norm() / wanted[others].norm() < 0.05
    torch.testing.assert_close(lse, wanted_lse, atol=0.3, rtol=0)


def bare(*shape, dtype=E4M3):
    return torch.empty(shape, dtype=dtype, device="meta")


def call(dims=(128, 128), sizes=(500, 1001), dtype=E4M3, **options):
    return ForwardArguments(
        bare(2, 8, sizes[0], dims[0], dtype=dtype),
        bare(2, 2, sizes[1], dims[0], dtype=dtype),
        bare(2, 2, sizes[1], dims[1], dtype=dtype),
        **options,
    )


def test_scales_are_filled_up_to_whole_tiles():
    key = mxfp8.forward_key(call(with_lse=True), target(100), None)
    layouts = {operand.name: operand.layout for operand in (*key.inputs, *key.outputs)}
    assert layouts["descale_q"].shape == (2, 8, 512, 4)
    assert layouts["descale_k"].shape == (2, 2, 1024, 4)
    assert layouts["descale_v"].shape == (2, 2, 32, 128)
    assert layouts["descale_q"].dtype == torch.float8_e8m0fnu
    assert layouts["out"].dtype == torch.bfloat16
    assert layouts["lse"].shape == (2, 8, 500, 1)


@pytest.mark.parametrize(
    ("sm", "cudnn", "dims", "reason"),
    [
        (90, 92800, (128, 128), "needs SM 100"),
        (120, 92800, (128, 128), "needs SM 100"),
        (100, 91900, (128, 128), "needs cuDNN 9.21"),
        (100, 92800, (256, 256), "cudnn-frontend#981"),
    ],
)
def test_it_is_refused_with_a_reason(sm, cudnn, dims, reason):
    with pytest.raises(UnsupportedError, match=reason) as caught:
        mxfp8.forward_key(call(dims), target(sm, cudnn), None)
    assert caught.value.suggestion


@pytest.mark.parametrize(
    "option",
    [{"softcap": 30.0}, {"alibi": True}, {"sinks": torch.empty(8, device="meta")}],
    ids=lambda x: next(iter(x)),
)
def test_options_that_it_lacks_are_refused(option):
    with pytest.raises(UnsupportedError, match="no attn_mask, sinks"):
        mxfp8.forward_key(call(**option), target(100), None)


def test_wrong_tensors_are_refused():
    with pytest.raises(DtypeError, match="q"):
        mxfp8.forward_key(call(dtype=torch.bfloat16), target(100), None)
    with pytest.raises(ShapeError, match="head dim 100"):
        mxfp8.forward_key(call((100, 128)), target(100), None)
    with pytest.raises(DtypeError, match="float16"):
        mxfp8.quantized(torch.ones(1, 1, 1, 32), torch.float16)

"""The torch operators: registration, fake implementations, tracing and function transforms."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode

from cudnn_sdpa import ArgumentError, ShapeError, UnsupportedError, sdpa
from cudnn_sdpa.attention.arguments import ForwardArguments, from_fields
from cudnn_sdpa.attention.dense.sdpa import SDPA

ops = torch.ops.cudnn_sdpa


def qkv(layout="bhsd", dims=(16, 24), dtype=torch.float32, lengths=(7, 9), device="cpu"):
    def tensor(heads, length, dim):
        if layout == "bshd":
            return torch.randn(2, length, heads, dim, dtype=dtype, device=device).transpose(1, 2)
        return torch.randn(2, heads, length, dim, dtype=dtype, device=device)

    return tensor(4, lengths[0], dims[0]), tensor(2, lengths[1], dims[0]), tensor(2, lengths[1], dims[1])


def lens(*values):
    return torch.tensor(values, dtype=torch.int32)


def operands(q, k, v, *, window_size=(-1, -1), **options):
    call = from_fields(ForwardArguments, q, k, v, window_left=window_size[0], window_right=window_size[1], **options)
    return SDPA.inputs_of(call)


BOTTOM_CAUSAL = {"is_causal": True, "causal_alignment": "bottom_right"}
CASES = {
    "dense": ((), {}),
    "causal and scale": ((), {"is_causal": True, "scale": 0.31}),
    "transposed": (("bshd",), BOTTOM_CAUSAL),
    "half": (("bshd", (16, 16), torch.float16), {}),
    "lengths": ((), {"seq_lens_q": lens(5, 0), "seq_lens_kv": lens(3, 9), **BOTTOM_CAUSAL, "scale": 0.5}),
    "lengths of keys": (("bhsd", (8, 8)), {"seq_lens_kv": lens(0, 4)}),
    "decode": (("bhsd", (16, 16), torch.bfloat16, (1, 9)), BOTTOM_CAUSAL),
    "no keys": (("bhsd", (16, 16), torch.float32, (5, 0)), {}),
    "no queries": (("bhsd", (16, 16), torch.float32, (0, 5)), {}),
    "float mask": ((), {"attn_mask": torch.randn(2, 1, 7, 9)}),
    "bool mask": ((), {"attn_mask": torch.randn(4, 1, 9) > -1}),
    "window_size": ((), {"window_size": (3, 1), "causal_alignment": "bottom_right"}),
    "softcap and sinks": (("bshd",), {"softcap": 1.5, "sinks": torch.randn(4)}),
    "linear biases": ((), {"is_causal": True, "alibi": True}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("with_lse", [False, True])
def test_fake_results_match_real_metadata(case, with_lse):
    layout, options = CASES[case]
    inputs = qkv(*layout)

    def call(convert):
        same = {name: convert(x) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        result = sdpa(*map(convert, inputs), return_lse=with_lse, **same)
        return result if with_lse else (result,)

    real = call(lambda tensor: tensor)
    with FakeTensorMode() as mode:
        fake = call(mode.from_tensor)
    assert [describe(tensor) for tensor in fake] == [describe(tensor) for tensor in real]


def describe(tensor):
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_meta_tensors_give_meta_tensors(layout, dtype):
    real = sdpa(*qkv(layout, dtype=dtype), return_lse=True)
    meta = sdpa(*qkv(layout, dtype=dtype, device="meta"), return_lse=True)
    for a, b in zip(real, meta, strict=True):
        assert b.is_meta
        assert describe(a)[:3] == describe(b)[:3]


def test_fake_tensors_of_a_gpu_need_no_gpu():
    with FakeTensorMode(allow_non_fake_inputs=False):
        q, k, v = qkv("bshd", dtype=torch.bfloat16, device="cuda")
        out, lse = sdpa(q, k, v, is_causal=True, return_lse=True)
        assert out.device == lse.device == q.device
        assert out.dtype == torch.bfloat16
        assert out.transpose(1, 2).is_contiguous()


def test_wrong_fake_tensors_raise_the_same_errors():
    with FakeTensorMode():
        q, k, _ = qkv(device="cuda", dtype=torch.float16)
        with pytest.raises(ShapeError, match="k: got head dim 24"):
            sdpa(q, torch.empty(2, 2, 9, 24, device="cuda", dtype=torch.float16), k)
        with pytest.raises(ArgumentError, match="q: got float32"):
            sdpa(q.float(), k.float(), k.float())


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit:DeprecationWarning")
def test_torchscript_traces_contain_the_operator_and_no_constants():
    q, k, v = qkv()
    traced = torch.jit.trace(lambda q, k, v: sdpa(q, k, v, is_causal=True), (q, k, v))
    assert "cudnn_sdpa::sdpa_forward" in str(traced.graph)
    again = [torch.randn_like(tensor) for tensor in (q, k, v)]
    torch.testing.assert_close(traced(*again), sdpa(*again, is_causal=True))


def test_out_operators_declare_their_mutations():
    q, k, v = qkv()
    out = torch.full((2, 4, 7, 24), torch.nan)
    version = out._version
    lse = ops.sdpa_forward_out(*operands(q, k, v), out)
    assert out._version > version
    assert torch.equal(lse, sdpa(q, k, v, return_lse=True)[1])
    assert torch.equal(out, sdpa(q, k, v))


def test_operators_called_directly_do_not_drop_gradients_silently():
    q, k, v = qkv()
    q.requires_grad_()
    with pytest.raises(UnsupportedError, match="does not return the LSE"):
        ops.sdpa_forward(*operands(q, k, v)).sum().backward()

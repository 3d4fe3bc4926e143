"""Attention with an operand whose storage was freed, cold and warm: refused, and the context lives on."""

from __future__ import annotations

import pytest
import torch

import cudnn_sdpa
from cudnn_sdpa import LayoutError, PagedKVCache


def rows(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, device="cuda").to(dtype)


def numbers(*values):
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def fp8(*shape):
    return rows(*shape, dtype=torch.float8_e4m3fn)


def dense(**others):
    return {"q": rows(2, 4, 64, 64), "k": rows(2, 2, 72, 64), "v": rows(2, 2, 72, 64), **others}


CALLS = {
    "sdpa": dense,
    "sdpa, lengths": lambda: dense(seq_lens_q=numbers(64, 4), seq_lens_kv=numbers(3, 72)),
    "sdpa, mask": lambda: dense(attn_mask=rows(64, 72)),
    "sdpa, sinks": lambda: dense(sinks=rows(4, dtype=torch.float32)),
    "sdpa_varlen": lambda: {
        "q": rows(96, 4, 64),
        "k": rows(96, 2, 64),
        "v": rows(96, 2, 64),
        "cu_seqlens_q": numbers(0, 40, 96),
        "cu_seqlens_kv": numbers(0, 40, 96),
    },
    "sdpa_varlen, sinks": lambda: {
        "q": rows(96, 4, 64),
        "k": rows(96, 2, 64),
        "v": rows(96, 2, 64),
        "sinks": rows(4, dtype=torch.float32),
        "cu_seqlens_q": numbers(0, 40, 96),
        "cu_seqlens_kv": numbers(0, 40, 96),
    },
    "sdpa_paged": lambda: {
        "q": rows(2, 4, 1, 64),
        "k_pages": rows(8, 2, 16, 64),
        "v_pages": rows(8, 2, 16, 64),
        "page_table": torch.arange(8, device="cuda", dtype=torch.int32).view(2, 4),
        "seq_lens_kv": numbers(9, 33),
    },
    "sdpa_paged of several": lambda: {
        "q": rows(2, 4, 5, 64),
        "k_pages": rows(8, 2, 16, 64),
        "v_pages": rows(8, 2, 16, 64),
        "page_table": torch.arange(8, device="cuda", dtype=torch.int32).view(2, 4),
        "seq_lens_kv": numbers(9, 33),
    },
    "sdpa_fp8": lambda: {"q": fp8(2, 4, 128, 128), "k": fp8(2, 2, 128, 128), "v": fp8(2, 2, 128, 128)},
}


def freed(x):
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


def options_of(name):
    if "varlen" in name:
        return {"max_seqlen_q": 56, "max_seqlen_kv": 56}
    if "paged" in name:
        return {"page_layout": "HND"}
    ones = (torch.ones(1, device="cuda") for _ in range(6))
    return {"scales": cudnn_sdpa.Fp8Scales(*ones)} if "fp8" in name else {}


@pytest.mark.parametrize(("name", "trains"), [(name, trains) for name in CALLS for trains in (False, True)])
def test_a_freed_operand_is_refused_cold_and_warm(name, trains):
    if trains and ("paged" in name or "fp8" in name):
        pytest.skip("for inference")
    function, options = getattr(cudnn_sdpa, name.replace(",", "").split()[0]), options_of(name)
    right = {n: x.requires_grad_(trains and x.is_floating_point()) for n, x in CALLS[name]().items()}
    for which, value in right.items():
        for _ in range(3):
            wrong = freed(value.detach()).requires_grad_(value.requires_grad)
            with pytest.raises(LayoutError, match="without memory"):
                function(**{**right, which: wrong}, **options)
            found = function(**right, **options)
            out = found.out if "fp8" in name else found
            assert out.float().isfinite().all()


@pytest.mark.parametrize("which", ["k", "v"])
def test_append_refuses_freed_operands(which):
    cache = PagedKVCache(pages=8, page_size=16, heads=2, head_dim=64, dtype=torch.bfloat16, device="cuda")
    step = cache.reserve([cache.add()], 3)
    right = {"k": rows(1, 2, 3, 64), "v": rows(1, 2, 3, 64)}
    for _ in range(3):
        with pytest.raises(LayoutError, match=f"{which}: got a tensor without memory"):
            cache.append(step, **{**right, which: freed(right[which])})
        cache.append(step, **right)
        torch.cuda.synchronize()


def test_sinks_of_packed_sequences_may_be_misaligned():
    tensors, options = CALLS["sdpa_varlen, sinks"](), options_of("sdpa_varlen")
    whole = torch.randn(8, device="cuda")
    for first in range(5):
        sinks = whole[first : first + 4]
        expected = cudnn_sdpa.sdpa_varlen(**{**tensors, "sinks": sinks.clone()}, **options)
        for _ in range(3):
            found = cudnn_sdpa.sdpa_varlen(**{**tensors, "sinks": sinks}, **options)
            assert torch.equal(found, expected)

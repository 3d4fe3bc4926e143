"""Warm attention calls with a freed operand: refused before a launch gets a null pointer.

The plans are fakes that check the addresses of their launches.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from fake_gpu import gpu_on_the_cpu

import cudnn_sdpa
from cudnn_sdpa import LayoutError, PagedKVCache


def freed(x):
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


def ends(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def rows(*shape, dtype=torch.bfloat16):
    return torch.randn(shape).to(dtype)


def fp8(*shape):
    return rows(*shape, dtype=torch.float8_e4m3fn)


def pages():
    return {"page_table": torch.arange(8, dtype=torch.int32).view(2, 4), "seq_lens_kv": ends(9, 33)}


#: Calls of every public attention function, with all its tensors.
CALLS = {
    "sdpa": lambda: {
        "q": rows(2, 4, 9, 16),
        "k": rows(2, 2, 7, 16),
        "v": rows(2, 2, 7, 16),
        "attn_mask": rows(9, 7),
        "sinks": rows(4, dtype=torch.float32),
        "seq_lens_q": ends(9, 4),
        "seq_lens_kv": ends(3, 7),
    },
    "scaled_dot_product_attention": lambda: {
        "query": rows(2, 4, 9, 16),
        "key": rows(2, 4, 7, 16),
        "value": rows(2, 4, 7, 16),
        "attn_mask": rows(9, 7),
    },
    "sdpa_varlen": lambda: {
        "q": rows(9, 4, 16),
        "k": rows(9, 2, 16),
        "v": rows(9, 2, 16),
        "sinks": rows(4, dtype=torch.float32),
        "cu_seqlens_q": ends(0, 4, 9),
        "cu_seqlens_kv": ends(0, 4, 9),
    },
    "sdpa_paged": lambda: {
        "q": rows(2, 4, 1, 16),
        "k_pages": rows(8, 2, 16, 16),
        "v_pages": rows(8, 2, 16, 16),
        "sinks": rows(4, dtype=torch.float32),
        "page_table_v": pages()["page_table"],
        "seq_lens_q": ends(1, 1),
        **pages(),
    },
    "sdpa_paged_varlen": lambda: {
        "q": rows(9, 4, 16),
        "k_pages": rows(8, 2, 16, 16),
        "v_pages": rows(8, 2, 16, 16),
        "sinks": rows(4, dtype=torch.float32),
        "tree_mask": torch.ones(9, 5, dtype=torch.bool),
        "page_table_v": pages()["page_table"],
        "cu_seqlens_q": ends(0, 4, 9),
        **pages(),
    },
    "sdpa_paged in FP8": lambda: {
        "q": rows(2, 4, 1, 16),
        "k_pages": fp8(8, 2, 16, 16),
        "v_pages": fp8(8, 2, 16, 16),
        "k_scale": torch.ones(2),
        "v_scale": torch.ones(()),
        **pages(),
    },
    "sdpa_paged_varlen in FP8": lambda: {
        "q": rows(9, 4, 16),
        "k_pages": fp8(8, 2, 16, 16),
        "v_pages": fp8(8, 2, 16, 16),
        "k_scale": torch.ones(2),
        "v_scale": torch.ones(()),
        "cu_seqlens_q": ends(0, 4, 9),
        **pages(),
    },
    "sdpa_fp8": lambda: {
        "q": fp8(2, 4, 9, 128),
        "k": fp8(2, 2, 7, 128),
        "v": fp8(2, 2, 7, 128),
        "seq_lens_q": ends(9, 4),
        "seq_lens_kv": ends(3, 7),
    },
    "sdpa_fp8 on pages": lambda: {
        "q": fp8(2, 4, 1, 128),
        "k": fp8(8, 2, 16, 128),
        "v": fp8(8, 2, 16, 128),
        "page_table_v": pages()["page_table"],
        **pages(),
    },
}
OPTIONS = {
    "sdpa_varlen": {"max_seqlen_q": 5, "max_seqlen_kv": 5},
    "sdpa_paged": {"page_layout": "HND"},
    "sdpa_paged_varlen": {"page_layout": "HND", "max_seqlen_q": 5},
}


def shrunk(x):
    x = x.clone()
    x.untyped_storage().resize_(x.untyped_storage().nbytes() - x.element_size())
    return x


@pytest.mark.usefixtures("reference_alone")
@pytest.mark.parametrize("lacking", [freed, shrunk])
@pytest.mark.parametrize(("name", "which"), [(name, which) for name, make in CALLS.items() for which in make()])
def test_every_function_refuses_freed_tensors_by_name(name, which, lacking):
    """On the CPU, where the process would crash, or other memory would be read."""
    torch.manual_seed(1)
    function, tensors = getattr(cudnn_sdpa, name.split()[0]), CALLS[name]()
    options = OPTIONS.get(name.split()[0], {})
    if "fp8" in name:
        options = {"scales": cudnn_sdpa.Fp8Scales(*(torch.ones(1) for _ in range(6)))}
    found = function(**tensors, **options)
    assert (found.out if "fp8" in name else found).float().isfinite().all()
    with pytest.raises(LayoutError, match=f"^{which}: got a tensor without memory"):
        function(**{**tensors, which: lacking(tensors[which])}, **options)


@pytest.mark.parametrize("which", ["k", "v"])
def test_a_cached_append_refuses_freed_tensors(monkeypatch, which):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: x)
    with gpu_on_the_cpu():
        cache = PagedKVCache(pages=4, page_size=16, heads=2, head_dim=16, dtype=torch.bfloat16, device="cpu")
        step = cache.reserve([cache.add()], 3)
        new = {name: rows(1, 2, 3, 16) for name in "kv"}
        for _ in range(2):
            cache.append(step, **new)
        with pytest.raises(LayoutError, match=f"{which}: got a tensor without memory"):
            cache.append(step, **{**new, which: freed(new[which])})
    assert torch.equal(cache.read(0)[0], new["k"][0])


@pytest.mark.parametrize("which", ["k", "v", "k_pages", "v_pages", "slot_mapping", "k_scale", "v_scale"])
@pytest.mark.parametrize("is_on_gpu", [False, True])
def test_append_paged_kv_refuses_freed_tensors(which, is_on_gpu):
    given = {"k": rows(3, 2, 16), "v": rows(3, 2, 8), "k_pages": fp8(4, 2, 5, 16), "v_pages": fp8(4, 2, 5, 8)}
    given |= {"slot_mapping": torch.tensor([3, 19, -1]), "k_scale": torch.ones(2), "v_scale": torch.ones(())}
    with gpu_on_the_cpu() if is_on_gpu else contextlib.nullcontext():
        for _ in range(2):
            cudnn_sdpa.append_paged_kv(**given, page_layout="HND")
        with pytest.raises(LayoutError, match=f"^{which}: got a tensor without memory"):
            cudnn_sdpa.append_paged_kv(**{**given, which: freed(given[which])}, page_layout="HND")

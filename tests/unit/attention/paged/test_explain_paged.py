"""`explain` of a call on pages reports what the call does."""

from __future__ import annotations

import inspect
from contextlib import nullcontext

import pytest
import torch

from cudnn_sdpa import PagedKVCache, explain, sdpa_paged, trusted_pages
from cudnn_sdpa.attention.arguments import from_fields
from cudnn_sdpa.attention.paged import launch as paged_launch
from cudnn_sdpa.attention.paged import paging
from cudnn_sdpa.attention.paged.call import PagedCall
from cudnn_sdpa.attention.paged.sdpa_paged import PAGED
from cudnn_sdpa.attention.paged.specs import Gathered
from cudnn_sdpa.attention.paged_varlen import launch as paged_varlen_launch
from cudnn_sdpa.attention.varlen import launch as varlen_launch
from cudnn_sdpa.engine.explain import describer_of
from cudnn_sdpa.planning.support import target_of
from cudnn_sdpa.plans.cache import PlanCache

H200 = target_of(90, "9.19.0")


class Asked(Exception):  # noqa: N818 - no error, but what is looked for
    """The key that a call requests from the plan cache."""


@pytest.fixture
def key_of(monkeypatch):
    """Runs the GPU code on meta tensors until it requests a plan, and returns the requested key."""

    def ask(_self, key, *_args, **_options):
        raise Asked(key)

    def gather(call):
        tokens, sequences = call.q.shape[0] * call.max_kv_len, call.q.shape[0] * (1 if call.seq_lens_q is None else 2)
        rows = (meta(tokens, x.shape[1], x.shape[3]) for x in (call.k, call.v))
        return Gathered(*rows, *(meta(sequences + 1, dtype=torch.int32) for _ in range(2)))

    monkeypatch.setattr(PlanCache, "get", ask)
    monkeypatch.setattr(torch.cuda, "device", lambda _device: nullcontext())
    monkeypatch.setattr(paging, "GatherKernel", lambda _call: gather)
    for module in (paged_launch, varlen_launch, paged_varlen_launch):
        monkeypatch.setattr(module, "live_target", lambda _device: H200)

    def run(*arguments, **options):
        layout = options.pop("page_layout", "HND")
        q, k, v, *rest = arguments
        left, right = options.pop("window_size", (-1, -1))
        sides = dict.fromkeys(("seq_lens_q", "sinks", "k_scale", "v_scale"))
        call = from_fields(
            PagedCall,
            *(q, k, v, rest[0], None, rest[1]),
            page_layout=layout,
            **sides | {{"return_lse": "with_lse"}.get(name, name): value for name, value in options.items()},
            window_left=left,
            window_right=right,
        )
        with pytest.raises(Asked) as caught:
            PAGED.on_gpu(call)
        return caught.value.args[0]

    return run


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def arguments(batch=4, queries=1, heads=(8, 2), page_size=16, layout="HND", columns=10, owned=False):
    shape = (100, heads[1], page_size, 64) if layout == "HND" else (100, page_size, heads[1], 64)
    table, lengths = meta(batch, columns, dtype=torch.int32), meta(batch, dtype=torch.int32)
    if owned:
        trusted_pages(table, lengths, pages=100, page_size=page_size)
    return meta(batch, heads[0], queries, 64), meta(*shape), meta(*shape), table, lengths


CALLS = {
    "decode": ({}, {}),
    "a batch that fits no plan": ({"batch": 5}, {}),
    "a cache's own tables": ({"owned": True}, {}),
    "pages token by token": ({"layout": "NHD", "owned": True}, {"page_layout": "NHD"}),
    "log-sum-exp": ({"owned": True}, {"return_lse": True}),
    "sinks": ({}, {"sinks": meta(8, dtype=torch.float32)}),
    "window_size": ({}, {"window_size": (7, 0)}),
    "aligned at the first key": ({"owned": True}, {"causal_alignment": "top_left"}),
    "a few queries": ({"queries": 4}, {}),
    "a few queries, window": ({"queries": 4}, {"window_size": (7, 0)}),
    "a few queries, two bounds": ({"queries": 4}, {"window_size": (7, 2), "is_causal": False}),
    "many queries": ({"queries": 40}, {}),
    "one prompt, its heads apart": ({"batch": 1, "queries": 128}, {}),
    "one prompt that is cut, and a negative scale": ({"batch": 1, "queries": 128}, {"scale": -0.5}),
    "a cache's own tables, negative scale": ({"owned": True}, {"scale": -0.5}),
    "many queries of some": ({"queries": 40}, {"seq_lens_q": meta(4, dtype=torch.int32)}),
    "softcap": ({}, {"softcap": 3.0}),
    "negative scale": ({}, {"scale": -1.0}),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_explained_key_is_that_of_the_call(key_of, name):
    sizes, options = CALLS[name]
    given = arguments(**sizes)
    described = describer_of(sdpa_paged)(*given, **{"page_layout": "HND", **options})
    assert described.for_target(H200).key(H200, torch.empty(0, device="meta").get_device()) == key_of(*given, **options)


def notes(*given, **options):
    return "\n".join(describer_of(sdpa_paged)(*given, page_layout="HND", **options).extra_kernels)


def test_extra_kernels():
    assert notes(*arguments(owned=True)) == ""
    assert "not those of a PagedKVCache, nor trusted_pages" in notes(*arguments())
    assert "5 sequences are served by a plan for 6" in notes(*arguments(batch=5, owned=True))
    assert "each sequence must have one query" in notes(*arguments(queries=4, owned=True))
    assert "sinks are applied" in notes(*arguments(), sinks=meta(8, dtype=torch.float32))
    assert "one kernel gathers keys and values into contiguous memory, up to 0 MiB (40 queries" in notes(
        *arguments(queries=40, columns=1)
    )
    assert "(logit soft-capping)" in notes(*arguments(), softcap=3.0)
    assert "q is multiplied by -1 into a copy" in notes(*arguments(), scale=-1.0)


def test_explain_without_a_gpu(can_explain):  # noqa: ARG001
    report = explain(sdpa_paged, *arguments(), page_layout="HND")
    assert report.supported
    assert "paged_decode" in report.key
    refused = explain(sdpa_paged, arguments()[0].requires_grad_(), *arguments()[1:], page_layout="HND")
    assert not refused.supported
    assert "inference only" in str(refused)


@pytest.fixture
def can_explain():
    from cudnn_sdpa.offline import driver

    if driver.compiler() is None and not driver.has_real_driver():
        pytest.skip("no C compiler to make the stand-in driver with, and no real driver")


def test_a_call_is_verified():
    cache = PagedKVCache(pages=4, page_size=16, heads=2, head_dim=64, dtype=torch.bfloat16, device="cpu")
    sequence = cache.add()
    step = cache.reserve([sequence], 5)
    cache.append(step, *(torch.randn(1, 2, 5, 64, dtype=torch.bfloat16) for _ in range(2)))
    q = torch.randn(1, 8, 5, 64, dtype=torch.bfloat16)
    given = (q, cache.k_pages(), cache.v_pages(), step.page_table, step.seq_lens_kv)
    errors = describer_of(sdpa_paged)(*given, page_layout="HND", return_lse=True).verify(False)
    assert set(errors) == {"out", "lse"}
    assert max(errors.values()) < 1e-2


def test_explain_takes_the_parameters_of_the_function():
    def parameters(of):
        return [(p.name, p.kind, p.default) for p in inspect.signature(of).parameters.values()]

    assert parameters(describer_of(sdpa_paged)) == parameters(sdpa_paged)
    assert describer_of(sdpa_paged) is not None

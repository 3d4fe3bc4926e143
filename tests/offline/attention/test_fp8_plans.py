"""FP8 attention: which calls have a cuDNN engine on H200, B200 and RTX 5090, and why others have none."""

from __future__ import annotations

import math

import pytest
import torch

from cudnn_sdpa import UnsupportedError
from cudnn_sdpa.attention.fp8.arguments import Fp8BackwardScales, Fp8Scales
from cudnn_sdpa.attention.fp8.explain import describe_sdpa_fp8, describe_sdpa_fp8_backward
from cudnn_sdpa.graph import backend
from cudnn_sdpa.graph.target import Target, load_properties
from cudnn_sdpa.offline.planner import engine_offline, plan_offline

pytestmark = pytest.mark.usefixtures("can_plan")

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
GPUS = ("h200", "b200", "rtx5090")


def bare(*shape, dtype=E4M3, layout="bshd"):
    batch, heads, length, dim = shape
    if layout == "bshd":
        return torch.empty(batch, length, heads, dim, dtype=dtype, device="meta").transpose(1, 2)
    return torch.empty(shape, dtype=dtype, device="meta")


LENGTHS = torch.empty(2, dtype=torch.int32, device="meta")
ONE = torch.empty(1, device="meta")


def tensors(sizes, dims, heads, dtype, layout):
    return [
        bare(2, heads[0], sizes[0], dims[0], dtype=dtype, layout=layout),
        bare(2, heads[1], sizes[1], dims[0], dtype=dtype, layout=layout),
        bare(2, heads[1], sizes[1], dims[1], dtype=dtype, layout=layout),
    ]


def describe_forward(
    *, sizes=(512, 512), dims=(128, 128), heads=(8, 8), dtype=E4M3, layout="bshd", lengths="", **options
):
    q, k, v = tensors(sizes, dims, heads, dtype, layout)
    options |= {f"seq_lens_{name}": LENGTHS for name in lengths.split()}
    return describe_sdpa_fp8(q, k, v, Fp8Scales(*[ONE] * 6), **options)


def describe_backward(
    *,
    sizes=(512, 512),
    dims=(128, 128),
    heads=(8, 8),
    dtype=E4M3,
    grad_dtype=E4M3,
    layout="bshd",
    lengths="",
    **options,
):
    q, k, v = tensors(sizes, dims, heads, dtype, layout)
    options |= {f"seq_lens_{name}": LENGTHS for name in lengths.split()}
    shape = (*q.shape[:3], dims[1])
    grad_out, out = bare(*shape, dtype=grad_dtype, layout=layout), bare(*shape, dtype=dtype, layout=layout)
    lse = torch.empty(shape[:3], device="meta")
    return describe_sdpa_fp8_backward(grad_out, q, k, v, out, lse, Fp8BackwardScales(*[ONE] * 12), **options)


def key_and_properties(gpu, describe, options):
    properties = load_properties(gpu)
    return describe(**options).key(Target.from_properties(properties), None), properties


CAUSAL = {"is_causal": True}
BOTTOM = {"is_causal": True, "causal_alignment": "bottom_right"}
LONGER = (512, 1024)

#: Others: for each GPU, in the order of `GPUS`, a part of the reason, or nothing where there is an engine.
SOMEWHERE = {
    "bottom-right with lengths": ({**BOTTOM, "lengths": "kv"}, ("bottom-right", "", "")),
    "bottom-right, narrow": ({**BOTTOM, "sizes": LONGER, "window_size": (100, -1)}, ("bottom-right", "", "")),
    "to bfloat16": ({"out_dtype": torch.bfloat16}, ("the output of FP8 attention is FP8", "", "is FP8")),
    "to float16": ({"out_dtype": torch.float16}, ("the output of FP8 attention is FP8", "", "is FP8")),
    "head dims 192 and 128": ({"dims": (192, 128)}, ("", "", "192 and 128 have no FP8 kernel")),
    "head dim 144": ({"dims": (144, 144)}, ("", "144 and 144 have no", "144 and 144 have no")),
    "head dim 192": ({"dims": (192, 192)}, ("", "192 and 192 have no", "192 and 192 have no")),
    "head dim 256": ({"dims": (256, 256)}, ("", "cudnn-frontend#981", "256 and 256 have no")),
    "head dim 272": ({"dims": (272, 272)}, ("272 and 272 have no", "272 and 272 have no", "272 and 272 have no")),
}

#: The same of gradients, of which an RTX 5090 has none.
GRADIENTS = {
    "plain": ({}, ("", "")),
    "bhsd": ({"layout": "bhsd"}, ("", "")),
    "causal": (CAUSAL, ("", "")),
    "deterministic": ({**CAUSAL, "deterministic": True}, ("", "")),
    "grouped": ({**CAUSAL, "heads": (8, 2)}, ("", "")),
    "gradients in e5m2": ({"grad_dtype": E5M2}, ("", "")),
    "e5m2": ({"dtype": E5M2, "grad_dtype": E5M2}, ("", "")),
    "lengths": ({**CAUSAL, "lengths": "q kv"}, ("", "")),
    "window_size": ({"window_size": (100, 3)}, ("", "")),
    "causal window, fewer keys": ({**CAUSAL, "window_size": (100, -1), "sizes": (1024, 512)}, ("", "")),
    "odd lengths": ({**CAUSAL, "sizes": (77, 1001)}, ("", "")),
    "one query": ({"sizes": (1, 100)}, ("", "")),
    "bottom-right without lengths": ({**BOTTOM, "sizes": (500, 1001)}, ("", "")),
    "bottom-right with lengths": ({**BOTTOM, "lengths": "kv"}, ("bottom-right", "")),
    "odd bottom-right": (
        {**BOTTOM, "lengths": "kv", "sizes": (500, 512)},
        ("bottom-right", "multiples of 64 queries and keys, not 500 and 512"),
    ),
    "bottom-right, fewer keys, with lengths": (
        {**BOTTOM, "lengths": "kv", "sizes": (512, 256)},
        ("bottom-right", "as many keys as queries, 512, and not 256"),
    ),
    "one query, one key": ({"sizes": (1, 1)}, ("", "one query on one key")),
    "head dim 64": ({"dims": (64, 64)}, ("only head dim 128, not head dims 64 and 64", "")),
    "head dims 128 and 64": ({"dims": (128, 64)}, ("only head dim 128", "")),
    "head dims 192 and 128": ({"dims": (192, 128)}, ("only head dim 128", "")),
    "head dim 256": ({"dims": (256, 256)}, ("only head dim 128", "256 and 256 have no")),
}


def assert_as_said(gpu, describe, options, reason):
    if not reason:
        assert engine_offline(*key_and_properties(gpu, describe, options)).startswith("eng")
        return
    with pytest.raises(UnsupportedError) as caught:
        key_and_properties(gpu, describe, options)
    assert reason in " ".join(caught.value.reasons)
    assert caught.value.suggestion


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("name", SOMEWHERE)
def test_it_has_an_engine_or_is_refused(gpu, name):
    options, reasons = SOMEWHERE[name]
    assert_as_said(gpu, describe_forward, options, reasons[GPUS.index(gpu)])


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("name", GRADIENTS)
def test_its_gradients_have_an_engine_or_are_refused(gpu, name):
    options, reasons = GRADIENTS[name]
    reason = "there are no gradients in FP8" if gpu == "rtx5090" else reasons[GPUS.index(gpu)]
    assert_as_said(gpu, describe_backward, options, reason)


def describe_pages(*, sq=512, dims=(128, 128), page_size=64, order="HND", table_v=False, **options):
    table = torch.empty(2, 1024 // page_size, dtype=torch.int32, device="meta")
    q = bare(2, 8, sq, dims[0], dtype=E4M3, layout="bshd")
    layout = "bhsd" if order == "HND" else "bshd"
    k, v = (bare(90, 2, page_size, dim, dtype=E4M3, layout=layout) for dim in dims)
    options |= {"page_table": table, "page_table_v": torch.empty_like(table) if table_v else None}
    return describe_sdpa_fp8(q, k, v, Fp8Scales(*[ONE] * 6), seq_lens_kv=LENGTHS, **options)


#: Calls on pages: for each GPU, in the order of `GPUS`, a part of the reason, or nothing where there is an engine.
PAGED = {
    "plain": ({}, ("", "", "")),
    "small pages": ({"page_size": 16, "order": "NHD"}, ("", "", "")),
    "pages of one": ({"page_size": 1}, ("", "", "")),
    "two tables": ({"table_v": True, "return_lse": True, **CAUSAL}, ("", "", "")),
    "two queries": ({"sq": 2}, ("", "", "")),
    "head dim 64": ({"dims": (64, 64)}, ("", "", "")),
    "head dims 192 and 128": ({"dims": (192, 128)}, ("", "", "192 and 128 have no")),
    "window_size": ({"window_size": (100, -1)}, ("", "", "")),
    "bottom-right": (BOTTOM, ("bottom-right", "", "")),
    "bfloat16": ({"out_dtype": torch.bfloat16}, ("is FP8", "", "is FP8")),
}


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("name", PAGED)
def test_pages_have_an_engine_or_are_refused(gpu, name):
    options, reasons = PAGED[name]
    assert_as_said(gpu, describe_pages, options, reasons[GPUS.index(gpu)])


def test_a_single_query_on_pages_needs_data_center_blackwell():
    for gpu in ("h200", "rtx5090"):
        assert_as_said(gpu, describe_pages, {"sq": 1}, "no FP8 kernel for a single query")


@pytest.mark.parametrize("gpu", ["a100", "l40s"])
@pytest.mark.parametrize("describe", [describe_forward, describe_backward])
def test_fp8_needs_hopper(gpu, describe):
    assert_as_said(gpu, describe, {}, "cuDNN's attention in FP8 needs 9.0")


def test_a_single_query_needs_data_center_blackwell_and_a_cudnn_that_decodes_there():
    options = {"sizes": (1, 512), "lengths": "kv"}
    for gpu in ("h200", "rtx5090"):
        assert_as_said(gpu, describe_forward, options, "no FP8 kernel for a single query")
    key, properties = key_and_properties("b200", describe_forward, options)
    if 91900 <= backend.cudnn_version() < 92600:
        with pytest.raises(UnsupportedError, match="pytorch#193893"):
            engine_offline(key, properties)
    else:
        assert engine_offline(key, properties).startswith("eng")


@pytest.mark.sample(1)
@pytest.mark.parametrize(("gpu", "gradients"), [("h200", True), ("b200", True), ("rtx5090", False)])
def test_it_compiles(gpu, gradients):
    made = plan_offline(*key_and_properties(gpu, describe_forward, {**CAUSAL, "return_lse": True, "lengths": "q kv"}))
    assert len(made.data) > 1000
    if gradients:
        options = {**CAUSAL, "grad_dtype": E5M2, "lengths": "q kv"}
        assert len(plan_offline(*key_and_properties(gpu, describe_backward, options)).data) > 1000


def test_the_key_holds_layouts_and_options_and_no_scale():
    key, _ = key_and_properties("h200", describe_forward, {**CAUSAL, "window_size": (9, -1), "return_lse": True})
    assert key.option_values == {"band": (9, 0, False), "with_lse": True}
    assert [operand.name for operand in key.inputs] == ["q", "k", "v", "scale", *Fp8Scales._fields]
    assert [operand.name for operand in key.outputs] == ["out", "amax_s", "amax_o", "lse"]
    assert all(math.prod(operand.layout.shape) == 1 for operand in key.inputs[3:])
    same, _ = key_and_properties(
        "h200", describe_forward, {**CAUSAL, "window_size": (9, 5), "return_lse": True, "scale": 3}
    )
    assert same == key


def test_explain_lists_extra_kernels():
    notes = describe_backward(lengths="kv", **BOTTOM, sizes=(512, 256)).extra_kernels
    assert any("amax outputs" in note for note in notes)
    assert any("clamped to" in note for note in notes)
    assert not any("multiple of 16" in note for note in notes)
    assert any("multiple of 16" in note for note in describe_backward(sizes=(500, 256)).extra_kernels)

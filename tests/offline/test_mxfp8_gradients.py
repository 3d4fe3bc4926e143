"""What cuDNN plans for gradients of attention in MXFP8 on a B200. None of it has been run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cudnn_sdpa import UnsupportedError
from cudnn_sdpa.attention import mxfp8, mxfp8_backward
from cudnn_sdpa.attention.arguments import ForwardArguments
from cudnn_sdpa.offline.planner import engine_offline, plan_offline
from cudnn_sdpa.runtime import backend
from cudnn_sdpa.runtime.target import Target, load_properties

E4M3 = torch.float8_e4m3fn
LENGTHS = torch.empty(2, dtype=torch.int32, device="meta")
BOTTOM_RIGHT = {
    "is_causal": True,
    "causal_alignment": "bottom_right",
    "seq_lens_q": LENGTHS,
    "seq_lens_kv": LENGTHS,
}
CASES = {
    "plain": ({}, {}),
    "causal": ({}, {"is_causal": True}),
    "window": ({}, {"window_left": 100, "window_right": 3}),
    "bottom-right": ({}, {"is_causal": True, "causal_alignment": "bottom_right"}),
    "lengths": ({}, {"seq_lens_q": LENGTHS, "seq_lens_kv": LENGTHS, "is_causal": True}),
    "head dim 64": ({"dims": (64, 64)}, {}),
    "head dims 192 and 128": ({"dims": (192, 128)}, {}),
    "e5m2": ({"do_dtype": torch.float8_e5m2}, {}),
    "odd sizes": ({"sizes": (77, 1001)}, {}),
    "more queries than keys": ({"sizes": (1024, 512)}, {"window_left": 100}),
    "float16": ({"half": torch.float16}, {}),
}


def key_of(*, dims=(128, 128), sizes=(512, 1024), do_dtype=E4M3, half=torch.bfloat16, **options):
    shapes = [(2, 8, sizes[0], dims[0]), (2, 2, sizes[1], dims[0]), (2, 2, sizes[1], dims[1])]
    q, k, v = (torch.empty(shape, dtype=E4M3, device="meta") for shape in shapes)
    out = torch.empty(2, 8, sizes[0], dims[1], dtype=half, device="meta")
    properties = load_properties("b200")
    target = Target.from_properties(properties)
    call = ForwardArguments(q, k, v, **options)
    return mxfp8_backward.backward_key(call, out, out, target, None, do_dtype), properties


@pytest.fixture(autouse=True)
def new_enough():
    if backend.cudnn_version() < mxfp8.FIRST_CUDNN:
        pytest.skip("this cuDNN has no attention in MXFP8")


@pytest.mark.parametrize("name", CASES)
def test_it_has_an_engine(name):
    sizes, options = CASES[name]
    assert engine_offline(*key_of(**sizes, **options)).startswith("eng")


@pytest.mark.parametrize("name", ["causal", "head dims 192 and 128", "e5m2", "odd sizes"])
def test_it_compiles(name):
    sizes, options = CASES[name]
    assert len(plan_offline(*key_of(**sizes, **options)).data) > 1000


REFUSED = {
    "one query on one key": {"sizes": (1, 1)},
    "head dim 192": {"dims": (192, 192)},
    "head dim 256": {"dims": (256, 256)},
    "bottom-right, odd sizes": {"sizes": (500, 1000), **BOTTOM_RIGHT},
    "bottom-right, more queries than keys": {"sizes": (1024, 512), **BOTTOM_RIGHT},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_rules_refuse_has_no_plan(name, monkeypatch):
    with pytest.raises(UnsupportedError):
        key_of(**REFUSED[name])
    monkeypatch.setattr(mxfp8_backward, "RULES", ())
    with pytest.raises(UnsupportedError):
        engine_offline(*key_of(**REFUSED[name]))


def test_queries_in_e5m2_have_no_plan():
    key, properties = key_of()
    inputs = tuple(
        replace(x, layout=replace(x.layout, dtype=torch.float8_e5m2)) if x.layout.dtype == E4M3 else x
        for x in key.inputs
    )
    with pytest.raises(UnsupportedError):
        engine_offline(replace(key, inputs=inputs), properties)

"""What cuDNN plans for attention in MXFP8 on a B200. None of it has been run."""

from __future__ import annotations

import pytest
import torch

from cudnn_sdpa.attention import mxfp8
from cudnn_sdpa.attention.arguments import ForwardArguments
from cudnn_sdpa.offline.planner import engine_offline, plan_offline
from cudnn_sdpa.runtime import backend
from cudnn_sdpa.runtime.target import Target, load_properties

LENGTHS = torch.empty(2, dtype=torch.int32, device="meta")
CASES = {
    "plain": ({}, {}),
    "causal, lse": ({}, {"is_causal": True, "with_lse": True}),
    "window": ({}, {"window_left": 100, "window_right": 3}),
    "bottom-right": ({}, {"is_causal": True, "causal_alignment": "bottom_right"}),
    "lengths": ({}, {"seq_lens_q": LENGTHS, "seq_lens_kv": LENGTHS, "is_causal": True}),
    "head dim 64": ({"dims": (64, 64)}, {}),
    "head dims 192 and 128": ({"dims": (192, 128)}, {}),
    "e5m2": ({"dtype": torch.float8_e5m2}, {}),
    "odd sizes": ({"sizes": (77, 1001)}, {}),
}


def key_of(*, dims=(128, 128), sizes=(512, 1024), dtype=torch.float8_e4m3fn, **options):
    shapes = [(2, 8, sizes[0], dims[0]), (2, 2, sizes[1], dims[0]), (2, 2, sizes[1], dims[1])]
    q, k, v = (torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)
    properties = load_properties("b200")
    return mxfp8.forward_key(ForwardArguments(q, k, v, **options), Target.from_properties(properties), None), properties


@pytest.fixture(autouse=True)
def new_enough():
    if backend.cudnn_version() < mxfp8.FIRST_CUDNN:
        pytest.skip("this cuDNN has no attention in MXFP8")


@pytest.mark.parametrize("name", CASES)
def test_it_has_an_engine(name):
    sizes, options = CASES[name]
    assert engine_offline(*key_of(**sizes, **options)).startswith("eng")


def test_it_compiles():
    assert len(plan_offline(*key_of(is_causal=True, with_lse=True)).data) > 1000

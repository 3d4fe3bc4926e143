"""Calls of more elements than one plan reaches, which are split: with a low limit, on a fake GPU."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from fake_gpu import TARGET, FakePlan, gpu_on_the_cpu
from fused_calls import in_float64, tuple_of
from torch.utils.flop_counter import FlopCounterMode

import cudnn_sdpa
from cudnn_sdpa import UnsupportedError, graph_op, providers
from cudnn_sdpa.engine import sharding
from cudnn_sdpa.fused import large
from cudnn_sdpa.fused.norm_graphs import rms_norm_rows
from cudnn_sdpa.graph import known_issues

LIMIT = 4096
HALF, FULL = torch.bfloat16, torch.float32


@pytest.fixture
def low_limit(monkeypatch):
    """Plans reach `LIMIT` elements; checks that none reaches further."""
    with monkeypatch.context() as patch:
        patch.setattr(known_issues, "MAX_OFFSET", LIMIT - 1)
        FakePlan.launched.clear()
        yield
        for key in FakePlan.launched:
            assert not [issue for issue in known_issues.concerning(key) if "beyond" in issue.bug], str(key)


def added_rms_norm(x, weight, residual, function=cudnn_sdpa.rms_norm):
    return function(x, weight, residual=residual, zero_centered=True)


def exact(function):
    of_norm = in_float64(cudnn_sdpa.rms_norm)
    return partial(added_rms_norm, function=of_norm) if function is added_rms_norm else in_float64(function)


def draw(*shape, dtype=FULL):
    return torch.randn(shape).to(dtype)


def images(*shape):
    x = draw(*shape)
    return x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)


def halves(*shape):
    return draw(*shape).chunk(2, -1)


#: Name: the function, its arguments, options, and the number of forward launches if it is known.
CALLS = {
    "silu_mul": (cudnn_sdpa.silu_mul, lambda: (draw(130, 64), draw(130, 64)), {}, 3),
    "silu_mul, 1-D": (cudnn_sdpa.silu_mul, lambda: (draw(9001), draw(9001)), {}, 3),
    "silu_mul of halves": (cudnn_sdpa.silu_mul, lambda: halves(1, 130, 128), {}, None),
    "silu_mul of both": (cudnn_sdpa.silu_mul, lambda: (draw(130, 128),), {}, None),
    "silu_mul of rows of 3": (cudnn_sdpa.silu_mul, lambda: (draw(5, 999, 3), draw(5, 999, 3)), {}, None),
    "gelu_mul": (cudnn_sdpa.gelu_mul, lambda: halves(130, 128), {}, None),
    "gelu_mul of both": (cudnn_sdpa.gelu_mul, lambda: (draw(130, 128),), {}, None),
    "relu_squared": (cudnn_sdpa.relu_squared, lambda: (draw(130, 64),), {}, 3),
    "rms_norm": (cudnn_sdpa.rms_norm, lambda: (draw(2, 130, 64), draw(64)), {}, None),
    "rms_norm, no weight": (cudnn_sdpa.rms_norm, lambda: (draw(130, 64), None), {}, 3),
    "rms_norm, residual": (added_rms_norm, lambda: (draw(130, 64), draw(64), draw(130, 64)), {}, 3),
    "rms_norm, SiLU": (cudnn_sdpa.rms_norm, lambda: (draw(130, 64), draw(64)), {"activation": "silu"}, None),
    "rms_norm of rows of 37": (cudnn_sdpa.rms_norm, lambda: (draw(3, 120, 37), draw(37)), {}, None),
    "layer_norm": (cudnn_sdpa.layer_norm, lambda: (draw(130, 64), draw(64), draw(64)), {}, 3),
    "layer_norm, no weight": (cudnn_sdpa.layer_norm, lambda: (draw(130, 64), None), {}, 3),
    "layer_norm, SiLU": (
        *(cudnn_sdpa.layer_norm, lambda: (draw(130, 64), draw(64), draw(64)), {"activation": "silu"}, None),
    ),
    "conv1d": (cudnn_sdpa.conv1d, lambda: (draw(9, 8, 100), draw(4, 8, 3), draw(4)), {}, None),
    "conv2d": (cudnn_sdpa.conv2d, lambda: (images(9, 8, 12, 12), images(4, 8, 3, 3)), {"padding": 1}, None),
    "conv2d, large result": (
        *(cudnn_sdpa.conv2d, lambda: (images(9, 2, 12, 12), images(16, 2, 3, 3)), {"padding": 1}, None),
    ),
    "conv2d, groups": (
        *(cudnn_sdpa.conv2d, lambda: (images(9, 8, 12, 12), images(4, 2, 3, 3)), {"groups": 4, "stride": 2}, None),
    ),
    "conv3d": (cudnn_sdpa.conv3d, lambda: (images(5, 4, 5, 9, 9), images(4, 4, 2, 3, 3)), {}, None),
}


def assert_close(found, expected):
    assert found.shape == expected.shape
    torch.testing.assert_close(found.double(), expected, rtol=2e-4, atol=2e-4)


@pytest.mark.usefixtures("low_limit")
@pytest.mark.parametrize("name", CALLS)
def test_large_calls_are_split_and_right(name):
    function, make, options, launches = CALLS[name]
    tensors = make()
    with gpu_on_the_cpu(), torch.no_grad():
        found = tuple_of(function(*tensors, **options))
        once = len(FakePlan.launched)
        again = tuple_of(function(*tensors, **options))
    assert once == launches or (launches is None and once > 1)
    for one, other, expected in zip(found, again, tuple_of(exact(function)(*tensors, **options)), strict=True):
        assert_close(one, expected)
        assert torch.equal(one, other)
        assert one.is_contiguous() or name.startswith("conv")


@pytest.mark.usefixtures("low_limit")
@pytest.mark.parametrize("through_operator", [False, True], ids=["", "operator"])
@pytest.mark.parametrize("name", [name for name in CALLS if not name.startswith(("gelu", "relu"))])
def test_gradients_of_large_calls_are_right(name, through_operator):
    function, make, options, _ = CALLS[name]
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in make()]
    if "halves" in name:
        both = torch.cat(leaves, -1).detach().requires_grad_()
        leaves = [both]
    tensors = both.chunk(2, -1) if "halves" in name else leaves
    doubles = [None if x is None else x.detach().double().requires_grad_() for x in leaves]
    given = doubles[0].chunk(2, -1) if "halves" in name else doubles
    expected = tuple_of(exact(function)(*given, **options))
    weights = [torch.randn_like(x) for x in expected]
    wanted = torch.autograd.grad(expected, [x for x in doubles if x is not None], weights)
    with gpu_on_the_cpu(), FlopCounterMode(display=False) if through_operator else nullcontext():
        found = tuple_of(function(*tensors, **options))
        gradients = torch.autograd.grad(found, [x for x in leaves if x is not None], [x.float() for x in weights])
    for one, other in zip(found, expected, strict=True):
        assert_close(one.detach(), other.detach())
    for one, other in zip(gradients, wanted, strict=True):
        assert_close(one / 20, other / 20)  # sums of weights are of the order of 20


@pytest.mark.usefixtures("low_limit")
def test_gradients_of_weights_are_summed_in_float32():
    """In bfloat16 a sum of parts would lose their last bits, part by part."""
    x, weight = torch.ones(64 * 40, 64, dtype=HALF), torch.ones(64, dtype=HALF, requires_grad=True)
    with gpu_on_the_cpu():
        cudnn_sdpa.rms_norm(x, weight, 0.0).backward(torch.ones_like(x) * 1.0078125)
    assert torch.equal(weight.grad, torch.full((64,), 64 * 40 * 1.0078125).to(HALF))


@pytest.mark.usefixtures("low_limit")
def test_parts_that_begin_at_no_aligned_address_are_copied():
    """Two matrices of 999 rows of 3: the second begins 5,994 bytes after the first."""
    x = draw(2, 999, 3, dtype=HALF)
    with gpu_on_the_cpu():
        found = cudnn_sdpa.rms_norm(x)
    assert len(FakePlan.launched) == 2
    torch.testing.assert_close(found, F.rms_norm(x.float(), (3,), eps=1e-6).to(HALF), rtol=1e-2, atol=1e-2)


@pytest.mark.usefixtures("low_limit")
def test_what_is_near_the_limit_is_one_launch():
    with gpu_on_the_cpu():
        cudnn_sdpa.rms_norm(draw(64, 64))
        assert len(FakePlan.launched) == 1
        cudnn_sdpa.rms_norm(draw(65, 64))
        assert [key.inputs[0].layout.shape[0] for key in FakePlan.launched[1:]] == [64, 1]


@pytest.mark.parametrize("device", ["cpu", "meta", "gpu"])
@pytest.mark.parametrize("name", ["custom", "conv2d", "rows"])
@pytest.mark.usefixtures("low_limit")
def test_what_cannot_be_split_is_refused_on_every_device(name, device):
    made = {
        "custom": (unshared, [draw(1, 5000)], "shard"),
        "conv2d": (cudnn_sdpa.conv2d, [images(1, 8, 30, 30), images(4, 8, 3, 3)], "smaller"),
        "rows": (cudnn_sdpa.rms_norm, [draw(2, 5000)], "smaller"),
    }
    function, tensors, suggestion = made[name]
    tensors = [x.to("meta") for x in tensors] if device == "meta" else tensors
    if device == "gpu":
        with gpu_on_the_cpu(), pytest.raises(UnsupportedError, match="one plan reaches") as error:
            function(*tensors)
    else:
        with pytest.raises(UnsupportedError, match="one plan reaches") as error:
            function(*tensors)
    assert suggestion in error.value.suggestion


def doubled(g, x):
    return g.add(a=x, b=x)


def twice(x):
    return (2 * x).contiguous()


unshared = graph_op(reference=twice)(doubled)
shared = graph_op(reference=twice, shard={"x": 0})(doubled)


@pytest.mark.usefixtures("low_limit")
def test_custom_graphs_that_declare_shard_are_split():
    x = draw(3, 40, 64)
    with gpu_on_the_cpu():
        assert torch.equal(shared(x), 2 * x)
    assert [key.inputs[0].layout.shape for key in FakePlan.launched] == [(1, 40, 64)] * 3


@pytest.mark.usefixtures("low_limit")
def test_descriptions_say_what_parts_run():
    x, weight = (torch.empty(shape, device="meta", requires_grad=True) for shape in ((2, 130, 64), (64,)))
    with providers("cudnn"):
        found = rms_norm_rows.describe(x, weight, 1e-5)
        key = found.key(TARGET, None)
    assert found.extra_kernels == [
        "the same in 1 other parts of dimension 0",
        "the same in 2 other parts of dimension 1",
    ]
    assert key.inputs[0].layout.shape == (64, 1, 1, 64)
    assert found.backward.extra_kernels == found.extra_kernels


def test_meta_tensors_of_the_real_limit():
    """Their layouts alone: gates of long prompts, and rows of more than 2³¹ elements."""
    h = torch.empty(1, 37450, 57344, dtype=HALF, device="meta")
    assert cudnn_sdpa.silu_mul(*h.chunk(2, -1)).shape == (1, 37450, 28672)
    rows = h.view(-1, 4096)
    split = large.split_of("rms_norm", rms_norm_rows.ways, {"x": rows, "eps": 0.1}, [rows])
    assert split is not None
    assert split.way == sharding.ShardingStrategy("dimension 0", {"x": 0}, 0)
    assert split.part_size == 2**31 // 4096
    few = rows[: 2**31 // 4096]
    assert large.split_of("rms_norm", rms_norm_rows.ways, {"x": few, "eps": 0.1}, [few]) is None

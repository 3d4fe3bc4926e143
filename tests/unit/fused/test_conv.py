"""`conv1d`, `conv2d` and `conv3d` on the CPU: values and gradients against PyTorch's in float64, and arguments."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from fake_gpu import gpu_on_the_cpu
from fused_calls import assert_gradients, in_float64, with_grad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from cudnn_sdpa import (
    DeviceError,
    DtypeError,
    LayoutError,
    OptionError,
    ShapeError,
    UnsupportedError,
    conv1d,
    conv2d,
    conv3d,
)
from cudnn_sdpa.fused import conv_graphs

OURS = {1: conv1d, 2: conv2d, 3: conv3d}
ACTIVATIONS = conv_graphs.ACTIVATIONS
SIZES = {1: (21,), 2: (9, 12), 3: (5, 6, 7)}
FILTERS = {1: (4,), 2: (3, 2), 3: (2, 3, 1)}

#: The first `rank` elements of a tuple are used.
GEOMETRY = [
    {},
    {"stride": 2},
    {"stride": (2, 1, 3)},
    {"padding": 1},
    {"padding": (2, 0, 1)},
    {"dilation": 2},
    {"dilation": (1, 2, 2)},
    {"stride": (3, 2, 1), "padding": (1, 2, 1), "dilation": (2, 1, 3)},
]


def operands(rank, groups=1, dtype=torch.float32, channels=6, filters=8):
    x = torch.randn(2, channels, *SIZES[rank]).to(dtype)
    weight = (torch.randn(filters, channels // groups, *FILTERS[rank]) / 4).to(dtype)
    return x, weight, torch.randn(filters).to(dtype)


def for_rank(rank, options):
    return {name: value[:rank] if isinstance(value, tuple) else value for name, value in options.items()}


def is_channels_last(y):
    return y.movedim(1, -1).is_contiguous()


@pytest.mark.parametrize("rank", OURS)
@pytest.mark.parametrize("options", GEOMETRY, ids=str)
@pytest.mark.parametrize("groups", [1, 2])
def test_values(rank, options, groups, assert_rounded):
    options = for_rank(rank, options)
    x, weight, bias = operands(rank, groups)
    for of_filters in (None, bias):
        out = OURS[rank](x, weight, of_filters, **options, groups=groups)
        assert out.dtype == x.dtype
        assert is_channels_last(out)
        assert_rounded(out, in_float64(OURS[rank])(x, weight, of_filters, **options, groups=groups))


@pytest.mark.sample(1)
@pytest.mark.parametrize(("rank", "compiled"), [*((rank, False) for rank in OURS), (2, True)], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("groups", "filters"), [(6, 6), (6, 12), (1, 1)], ids=str)
def test_an_unfused_activation(rank, activation, compiled, groups, filters, assert_rounded):
    """One filter per channel, or one for all; also with a copy by autocast, and with an empty batch."""
    x, weight, bias = operands(rank, groups, filters=filters)
    if compiled:
        torch._dynamo.reset()
    run = torch.compile(OURS[rank], fullgraph=True, backend="eager") if compiled else OURS[rank]
    for of_filters in (None, bias):
        options = {"groups": groups, "activation": activation}
        out = run(x, weight, of_filters, **options)
        assert_rounded(out, in_float64(OURS[rank])(x, weight, of_filters, **options))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half = run(x, weight, of_filters, **options)
        assert half.dtype is torch.bfloat16
        torch.testing.assert_close(half.float(), out, atol=5e-2, rtol=5e-2)
        assert run(x[:0], weight, of_filters, **options).shape == (0, *out.shape[1:])


def innermost(x):
    """The same values, channels last in memory."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def among_others(x):
    whole = torch.randn(*x.shape[:-1], x.shape[-1] + 3)
    whole[..., 1:-2] = x
    return whole[..., 1:-2]


LAYOUTS = {
    "dense": torch.Tensor.contiguous,
    "innermost": innermost,
    "turned": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "sliced": among_others,
    "expanded": lambda x: x[:1].expand_as(x),
}


@pytest.mark.parametrize("rank", OURS)
@pytest.mark.parametrize("options", [GEOMETRY[0], GEOMETRY[-1]], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients(rank, options, activation):
    options = {**for_rank(rank, options), "activation": activation}
    x, weight, bias = operands(rank, 2)
    ours, right = (lambda *t, f=f: f(*t, **options, groups=2) for f in (OURS[rank], in_float64(OURS[rank])))
    assert_gradients(ours, right, (x, weight, bias))
    assert_gradients(ours, right, (x, weight))


PATCHES = {
    "square": ((2, 3, 12, 8), (5, 3, 4, 4)),
    "oblong": ((2, 3, 12, 8), (5, 3, 3, 4)),
    "lines": ((2, 3, 6, 8), (5, 3, 1, 4)),
    "one channel": ((2, 1, 8, 8), (5, 1, 2, 4)),
    "one patch": ((2, 3, 4, 4), (5, 3, 4, 4)),
    "one filter": ((1, 3, 8, 8), (1, 3, 4, 4)),
}


@pytest.mark.parametrize("name", PATCHES)
@pytest.mark.parametrize("grad_x", LAYOUTS)
@pytest.mark.parametrize("grad_weight", ["dense", "innermost"])
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_patches(name, grad_x, grad_weight, activation, assert_rounded):
    shape, of_filters = PATCHES[name]
    x, weight = LAYOUTS[grad_x](torch.randn(shape)), LAYOUTS[grad_weight](torch.randn(of_filters))
    bias = torch.randn(of_filters[0])
    options = {"stride": of_filters[2:], "activation": activation}
    for given in (None, bias):
        out = conv2d(x, weight, given, **options)
        assert is_channels_last(out)
        assert_rounded(out, in_float64(conv2d)(x, weight, given, **options))
    ours, right = (lambda *t, f=f: f(*t, **options) for f in (conv2d, in_float64(conv2d)))
    if grad_x not in ("sliced", "expanded"):
        assert_gradients(ours, right, (x, weight, bias))


@pytest.mark.parametrize("options", [{"padding": 1}, {"dilation": 2}, {"groups": 3}, {"stride": (4, 2)}, {}], ids=str)
def test_convolutions_that_are_almost_patches(options, assert_rounded):
    x, weight = torch.randn(2, 3, 12, 12 if options else 11), torch.randn(6, 3 // options.get("groups", 1), 4, 4)
    options = {"stride": 4, **options}
    assert_rounded(conv2d(x, weight, **options), in_float64(conv2d)(x, weight, **options))


X, W, B = torch.ones(2, 6, 9, 9), torch.ones(8, 6, 3, 3), torch.ones(8)
WRONG = {
    "no tensor": ((None, W), {}, OptionError, "x: got NoneType; expected a torch.Tensor"),
    "dtype": ((X.cfloat(), W.cfloat()), {}, DtypeError, "x: got complex64"),
    "no weight": ((X, None), {}, OptionError, "weight: got NoneType; expected a torch.Tensor"),
    "weight's dtype": ((X, W.half()), {}, DtypeError, "weight: got float16; expected float32"),
    "bias no tensor": ((X, W, 0.0), {}, OptionError, "bias: got float; expected a torch.Tensor"),
    "bias' dtype": ((X.half(), W.half(), B), {}, DtypeError, "bias: got float32; expected float16"),
    "no batch": (
        (X[0], W),
        {},
        ShapeError,
        r"x: got shape \(6, 9, 9\); expected 4 dimensions: batch, ch",
    ),
    "another rank": ((X[..., None], W), {}, ShapeError, "x: got shape .* expected 4 dimensions"),
    "weight's rank": ((X, W[0]), {}, ShapeError, r"weight: got shape \(6, 3, 3\) with 1 groups"),
    "channels": (
        (X, W[:, :5]),
        {},
        ShapeError,
        r"weight: got shape \(8, 5, 3, 3\) with 1 groups; expected \(filters",
    ),
    "groups of channels": ((X, W), {"groups": 2}, ShapeError, r"weight: got shape \(8, 6, 3, 3\) with 2 groups"),
    "groups of filters": ((X, W[:, :2]), {"groups": 3}, ShapeError, r"weight: got shape \(8, 2, 3, 3\) with 3 groups"),
    "bias' shape": ((X, W, B[:7]), {}, ShapeError, r"bias: got shape \(7,\); expected shape \(8,\)"),
    "bias' rank": ((X, W, B[None]), {}, ShapeError, r"bias: got shape \(1, 8\)"),
    "empty": ((X[:, :, :0], W), {}, ShapeError, r"x: got shape \(2, 6, 0, 9\); expected sizes of at least 1"),
    "no channels": ((X[:, :0], W[:, :0]), {}, ShapeError, "expected sizes of at least 1"),
    "no filters": ((X, W[:0]), {}, ShapeError, r"weight: got shape \(0, 6, 3, 3\)"),
    "weight elsewhere": ((X, W.to("meta")), {}, DeviceError, "weight: got meta"),
    "bias elsewhere": ((X, W, B.to("meta")), {}, DeviceError, "bias: got meta"),
    "too small": (
        (X[..., :2], W),
        {},
        LayoutError,
        "x: got 2 with 0 padding on both sides; expected at least 3",
    ),
    "too small for it": ((X, W), {"dilation": 5, "padding": 0}, LayoutError, "x: got 9 .* expected at least 11"),
    "groups of 0": ((X, W), {"groups": 0}, OptionError, "groups: got 0; expected an int of at least 1"),
    "groups bool": ((X, W), {"groups": True}, OptionError, "groups: got True"),
    "groups float": ((X, W), {"groups": 1.0}, OptionError, "groups: got 1.0"),
    "stride 0": ((X, W), {"stride": 0}, OptionError, r"stride: got (0|\(0, 0\)); expected an int of at least 1, or 2"),
    "stride float": ((X, W), {"stride": 1.0}, OptionError, "stride: got 1.0"),
    "stride bool": ((X, W), {"stride": True}, OptionError, "stride: got True"),
    "three strides": ((X, W), {"stride": (1, 1, 1)}, OptionError, r"stride: got \(1, 1, 1\); .*or 2 of them"),
    "strides": ((X, W), {"stride": (1, 1.0)}, OptionError, r"stride: got \(1, 1.0\)"),
    "padding below 0": ((X, W), {"padding": -1}, OptionError, r"padding: got (-1|\(-1, -1\)); expected an int of at"),
    "padding by name": ((X, W), {"padding": "same"}, OptionError, "padding: got 'same'"),
    "padding None": ((X, W), {"padding": None}, OptionError, "padding: got None"),
    "dilation 0": ((X, W), {"dilation": (1, 0)}, OptionError, r"dilation: got \(1, 0\); expected an int of at least 1"),
    "activation": ((X, W), {"activation": "tanh"}, OptionError, "activation: got 'tanh'; expected None or 'relu' or"),
    "activations": ((X, W), {"activation": ["relu"]}, OptionError, r"activation: got \['relu'\]"),
}


@pytest.mark.parametrize("requires_grad", [False, True], ids=["", "with gradient"])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused(name, requires_grad):
    tensors, options, error, match = WRONG[name]
    with pytest.raises(error, match=match):
        conv2d(*with_grad(tensors, requires_grad), **options)


def test_each_function_has_its_rank():
    with pytest.raises(ShapeError, match="expected 3 dimensions: batch, channels, then 1 more"):
        conv1d(X, W)
    with pytest.raises(ShapeError, match="expected 5 dimensions: batch, channels, then 3 more"):
        conv3d(X, W)
    with pytest.raises(OptionError, match=r"stride: got \(1, 1\); expected an int of at least 1, or 1 of them"):
        conv1d(X[..., 0], W[..., 0], stride=(1, 1))
    with pytest.raises(OptionError, match=r"padding: got \(1, 1\); expected an int of at least 0, or 3 of them"):
        conv3d(X[..., None], W[..., None], padding=(1, 1))


class ConvolutionDtypes(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "convolution" in str(function):
            self.seen |= {x.dtype for x in args if isinstance(x, torch.Tensor)}
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(2, 4, 8, 9), (2, 4, 3, 8, 9)], ids=["2-D", "3-D"])
def test_gradients_on_the_cpu_do_not_run_onednn(shape, dtype):
    """oneDNN writes past its memory there, which is not always seen; it has no float64."""
    rank = len(shape) - 2
    sizes = {"stride": (1,) * (rank - 1) + (3,), "padding": (0,) * rank, "dilation": (1,) * rank}
    x, weight = torch.randn(shape, dtype=dtype), torch.randn(1, 4, *(1,) * rank, dtype=dtype)
    grad_out = torch.randn(2, 1, *shape[2:-1], 3, dtype=dtype)
    with ConvolutionDtypes() as dtypes:
        conv_graphs.conv_dgrad.reference(grad_out, weight, shape=shape[1:], **sizes)
        conv_graphs.conv_wgrad.reference(grad_out, x, shape=tuple(weight.shape), **sizes)
    assert dtypes.seen == {torch.float64}


def test_float32_that_autocast_casts_is_no_tf32(monkeypatch):
    x, weight = torch.randn(2, 8, 6, 6), torch.randn(16, 8, 3, 3)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    with gpu_on_the_cpu():
        with torch.autocast("cpu", torch.bfloat16):
            found = conv2d(x, weight)
        with pytest.raises(UnsupportedError, match="TF32"):
            conv2d(x, weight)
    assert found.dtype is torch.bfloat16
    exact = torch.nn.functional.conv2d(x.double(), weight.double())
    assert (found - exact).norm() < 1e-2 * exact.norm()


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("wanted", ["", "x", "weight", "x weight"])
@pytest.mark.parametrize("groups", [1, 2])
def test_flops_match_pytorch(rank, wanted, groups):
    ours, of_torch = ((conv1d, conv2d, conv3d)[rank - 1], (F.conv1d, F.conv2d, F.conv3d)[rank - 1])
    x, weight = torch.randn(2, 8, *(9, 8, 7)[:rank]), torch.randn(6, 8 // groups, *(3, 2, 2)[:rank])
    counts = []
    for function in (ours, of_torch):
        leaves = [leaf.clone().requires_grad_(name in wanted.split()) for name, leaf in (("x", x), ("weight", weight))]
        with FlopCounterMode(display=False) as counter:
            y = function(*leaves, None, 2, 1, 1, groups)
            forward = counter.get_total_flops()
            if wanted:
                y.sum().backward()
        counts.append((forward, counter.get_total_flops()))
    forward = 2 * y.numel() * weight[0].numel()
    assert counts[0] == (forward, forward * (1 + len(wanted.split())))
    if groups == 1:  # PyTorch counts groups of gradients several times
        assert counts[0] == counts[1]

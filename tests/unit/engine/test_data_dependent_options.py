"""Sizes, bounds and options that depend on data, as `.item()` gives them, in one compiled or exported graph."""

from __future__ import annotations

import pytest
import torch

from cudnn_sdpa import (
    CudnnSdpaError,
    OptionError,
    conv2d,
    gelu_mul,
    kernels,
    layer_norm,
    merge_states,
    relu_squared,
    rms_norm,
    scaled_dot_product_attention,
    sdpa,
    sdpa_paged,
    sdpa_paged_varlen,
    sdpa_varlen,
    silu_mul,
)

ENDS = torch.tensor([0, 3, 3, 10], dtype=torch.int32)
TABLE = torch.arange(8, dtype=torch.int32).view(2, 4)
LENGTHS = torch.tensor([50, 37], dtype=torch.int32)
PAGES = torch.randn(8, 2, 16, 16)


def packed(x, n=7, **options):
    return sdpa_varlen(x, x, x, ENDS, ENDS, n, n, **options)


def paged(q, **options):
    return sdpa_paged(q, PAGES, PAGES, TABLE, LENGTHS, page_layout="HND", **options)


def packed_on_pages(q, n=7, **options):
    return sdpa_paged_varlen(q, PAGES, PAGES, TABLE, LENGTHS, ENDS[[0, 1, 3]], n, page_layout="HND", **options)


def merged(x):
    out, lse = sdpa(x, x, x, return_lse=True)
    return merge_states([out, 2 * out], [lse, lse + 0.5])[0]


#: name: (a function of a tensor and an integer, or None for the chosen rows, the tensor's shape, integers)
LENGTHS_AND_BOUNDS = {
    "longest length": (packed, (10, 2, 8), (7, 9)),
    "window of packed sequences": (lambda x, n: packed(x, window_size=(n, 0)), (10, 2, 8), (1, 3)),
    "window": (lambda x, n: sdpa(x, x, x, window_size=(n, n)), (2, 2, 9, 8), (0, 2)),
    "window on pages": (lambda x, n: paged(x, window_size=(n, 0)), (2, 2, 1, 16), (3, 20)),
    "longest length on pages": (packed_on_pages, (10, 2, 16), (7, 9)),
    "window of packed tokens on pages": (lambda x, n: packed_on_pages(x, window_size=(n, 0)), (10, 2, 16), (3, 20)),
    "tokens on pages": (lambda x, n: packed_on_pages(x[:n]), (14, 2, 16), (10, 14)),
    "length": (lambda x, n: sdpa(x[:, :, :n], x, x, is_causal=True), (2, 2, 9, 8), (2, 7)),
    "tokens": (lambda x, n: packed(x[:n]), (12, 2, 8), (10, 12)),
    "batch": (lambda x, n: sdpa(x[:n], x[:n], x[:n]), (4, 2, 9, 8), (1, 3)),
    "batch of the drop-in": (lambda x, n: scaled_dot_product_attention(x[:n], x[:n], x[:n]), (4, 2, 9, 8), (1, 3)),
    "batch of kernels": (lambda x, n: kernels.attention(x[:n], x[:n], x[:n], is_causal=True), (4, 2, 9, 8), (1, 3)),
    "batch of merged states": (lambda x, n: merged(x[:n].detach()), (4, 2, 9, 8), (1, 3)),
    "rms_norm": (lambda x, n: rms_norm(x[:n], x[0] * 0 + 2), (5, 16), (3, 1, 5)),
    "rms_norm without weight": (lambda x, n: rms_norm(x[:n]), (5, 16), (3, 1, 5)),
    "rms_norm with a residual": (lambda x, n: torch.cat(rms_norm(x[:n], residual=x[:n])), (5, 16), (3, 1, 5)),
    "layer_norm": (lambda x, n: layer_norm(x[:n]), (5, 16), (3, 1, 5)),
    "silu_mul": (lambda x, n: silu_mul(x[:n], x[:n] + 1), (5, 16), (3, 1, 5)),
    "silu_mul of both": (lambda x, n: silu_mul(x[:n]), (5, 16), (3, 1, 5)),
    "gelu_mul": (lambda x, n: gelu_mul(x[:n], x[:n] + 1), (5, 16), (3, 1, 5)),
    "relu_squared": (lambda x, n: relu_squared(x[:n]), (5, 16), (3, 1, 5)),
}
#: What has no gradient.
INFERENCE = (
    *("window on pages", "longest length on pages", "window of packed tokens on pages", "tokens on pages"),
    *("batch of merged states", "gelu_mul", "relu_squared"),
)

#: name: (the wrong option, a function of a tensor, a whole number and a fraction of data)
OPTIONS = {
    "scale": ("scale", lambda x, _, part: sdpa(x, x, x, scale=part)),
    "scale of the drop-in": ("scale", lambda x, _, part: scaled_dot_product_attention(x, x, x, scale=part)),
    "scale of packed sequences": (
        "scale",
        lambda x, _, part: packed(x.flatten(0, 2)[:20].view(10, 2, 8), scale=part),
    ),
    "scale on pages": ("scale", lambda x, _, part: paged(x[:, :, :1].repeat(1, 1, 1, 2), scale=part)),
    "batch_invariant": (
        "batch_invariant",
        lambda x, n, _: packed_on_pages(x.flatten()[:160].view(10, 1, 16).repeat(1, 2, 1), batch_invariant=n > 2),
    ),
    "scale of kernels": ("scale", lambda x, _, part: kernels.attention(x, x, x, scale=part)),
    "softcap": ("softcap", lambda x, _, part: sdpa(x, x, x, softcap=part)),
    "dropout_p": ("dropout_p", lambda x, _, part: sdpa(x, x, x, dropout_p=part)),
    "is_causal": ("is_causal", lambda x, n, _: sdpa(x, x, x, is_causal=n > 2)),
    "return_lse": ("return_lse", lambda x, n, _: sdpa(x, x, x, return_lse=n > 2)),
    "eps": ("eps", lambda x, _, part: rms_norm(x, eps=part)),
    "eps of layer_norm": ("eps", lambda x, _, part: layer_norm(x, eps=part)),
    "zero_centered": ("zero_centered", lambda x, n, _: rms_norm(x, x[0, 0, 0], zero_centered=n > 2)),
    "padding": ("padding", lambda x, n, _: conv2d(x, x[:, :, :2, :2], padding=n)),
    "groups": ("groups", lambda x, n, _: conv2d(x, x[:, :, :2, :2], groups=n)),
}


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield
    torch._dynamo.reset()


def exported(function, *arguments):
    class Program(torch.nn.Module):
        def forward(self, *given):
            return function(*given)

    return torch.export.export(Program(), arguments).module()


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", LENGTHS_AND_BOUNDS)
def test_lengths_and_bounds_that_depend_on_data(name):
    function, shape, numbers = LENGTHS_AND_BOUNDS[name]

    def of_data(x, given):
        n = given.max().item()
        if "window" not in name and name != "longest length":
            torch._check(n >= 0)
            torch._check(n <= x.shape[0] if name != "length" else n <= x.shape[2])
        return function(x, n)

    x = torch.randn(shape, requires_grad=name not in INFERENCE)
    compiled = torch.compile(of_data, fullgraph=True, backend="aot_eager")
    program = exported(of_data, x.detach(), torch.tensor([numbers[0]]))
    for number in numbers:
        out, wanted = compiled(x, torch.tensor([number])), function(x, number)
        torch.testing.assert_close(out, wanted)
        torch.testing.assert_close(program(x.detach(), torch.tensor([number])), wanted.detach())
        if x.requires_grad:
            grad = torch.randn_like(wanted)
            torch.testing.assert_close(*(torch.autograd.grad(y, x, grad)[0] for y in (out, wanted)))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("number", [-2, 2**40])
@pytest.mark.parametrize("name", ["longest length", "window"])
def test_wrong_ones_raise_when_the_compiled_code_runs(name, number):
    function, shape, _ = LENGTHS_AND_BOUNDS[name]
    compiled = torch.compile(lambda x, n: function(x, n.max().item()), fullgraph=True, backend="aot_eager")
    with pytest.raises(OptionError, match=r"^(max_seqlen_q|window_size): got .*; expected"):
        compiled(torch.randn(shape), torch.tensor([number]))


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", OPTIONS)
def test_options_that_must_be_known_are_named(name):
    option, function = OPTIONS[name]

    def of_data(x, whole, part):
        return function(x, whole.max().item(), part.max().item())

    given = torch.randn(2, 2, 9, 8), torch.tensor([1]), torch.tensor([0.3])
    message = f"{option}.*a value that depends on data"
    with pytest.raises(OptionError, match=f"^{message}"):
        exported(of_data, *given)
    says_which = torch.__version__ >= torch.torch_version.TorchVersion("2.13")  # older: that there was an exception
    refused = torch._dynamo.exc.Unsupported if says_which else torch._dynamo.exc.TorchDynamoException
    with pytest.raises(refused, match=message if says_which else None):
        torch.compile(of_data, fullgraph=True, backend="eager")(*given)
    if name not in ("padding", "groups"):  # without fullgraph, PyTorch breaks the graph there
        torch._dynamo.reset()
        try:
            wanted = of_data(*given)
        except CudnnSdpaError as error:
            pytest.fail(str(error))
        if name != "dropout_p":
            torch.testing.assert_close(torch.compile(of_data, backend="eager")(*given), wanted)


@pytest.mark.parametrize("scale", [0.3, -1.5])
def test_what_the_message_suggests_for_a_scale_works(scale):
    def of_data(x, given):
        return sdpa(x * given.max().item(), x, x, scale=1.0)

    x, given = torch.randn(2, 2, 9, 8), torch.tensor([scale])
    wanted = sdpa(x, x, x, scale=scale)
    torch.testing.assert_close(torch.compile(of_data, fullgraph=True, backend="aot_eager")(x, given), wanted)
    torch.testing.assert_close(exported(of_data, x, given)(x, given), wanted)

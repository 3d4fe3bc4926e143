"""Norms and gated activations of data-dependent sizes, in one compiled graph."""

from __future__ import annotations

import pytest
import torch

from cudnn_sdpa import gelu_mul, layer_norm, relu_squared, rms_norm, silu_mul

FUNCTIONS = {
    "rms_norm": lambda x: rms_norm(x, x[0] * 0 + 2),
    "rms_norm without weight": rms_norm,
    "rms_norm with a residual": lambda x: torch.cat(rms_norm(x, residual=x)),
    "layer_norm": layer_norm,
    "silu_mul": lambda x: silu_mul(x, x + 1),
    "silu_mul of both": silu_mul,
    "gelu_mul": lambda x: gelu_mul(x, x + 1),
    "relu_squared": relu_squared,
}


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield
    torch._dynamo.reset()


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_data_dependent_number_of_rows(name):
    function = FUNCTIONS[name]
    compiled = torch.compile(lambda x, chosen: function(x[chosen]), fullgraph=True, backend="aot_eager")
    for count in (3, 1, 5):
        x = torch.randn(5, 16, requires_grad=name not in ("gelu_mul", "relu_squared"))
        chosen = torch.arange(5) < count
        out, wanted = compiled(x, chosen), function(x[chosen])
        torch.testing.assert_close(out, wanted)
        if x.requires_grad:
            grad = torch.randn_like(out)
            found, expected = (torch.autograd.grad(y, x, grad)[0] for y in (out, wanted))
            torch.testing.assert_close(found, expected)

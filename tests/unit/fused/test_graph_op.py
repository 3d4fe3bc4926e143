"""`graph_op` as a function: arguments, the reference, gradients, torch.compile; no GPU is needed."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from custom_graphs import halves, leaky, nowhere, scaled
from fake_gpu import TARGET, FakePlan, gpu_on_the_cpu
from native_way import native_way
from torch.utils.flop_counter import FlopCounterMode

import cudnn_sdpa
from cudnn_sdpa import DeviceError, DtypeError, ExecutionError, OptionError, UnsupportedError
from cudnn_sdpa.engine.explain import describer_of
from cudnn_sdpa.fused.encoding import checked_option
from cudnn_sdpa.fused.graph_op import graph_op
from cudnn_sdpa.graph import known_issues
from cudnn_sdpa.graph.key import Role
from cudnn_sdpa.planning.support import target_of

H200 = target_of(90, "9.19.0")


def x_and_bias(dtype=torch.float32, **more):
    return torch.randn(2, 3, 8, dtype=dtype, **more), torch.randn(1, 1, 8, dtype=dtype, **more)


def test_the_reference_computes_without_a_gpu():
    x, bias = x_and_bias()
    torch.testing.assert_close(scaled(x, bias, 0.5, power=2), x**2 * 0.5 + bias)
    torch.testing.assert_close(scaled(x, scale=3, bias=bias), x * 3 + bias)
    torch.testing.assert_close(scaled(x, None, 2.0), x * 2)
    one, two = halves(x)
    assert (one.dtype, two.dtype) == (torch.float32, torch.float16)


def test_results_have_the_strides_of_the_reference():
    x = x_and_bias()[0].transpose(1, 2)
    assert halves(x)[0].stride() == x.stride()


@pytest.mark.parametrize(
    ("arguments", "options", "error", "match"),
    [
        ((), {}, OptionError, "x: got no tensor"),
        ((1.0,), {}, OptionError, "x: got no tensor"),
        ((None, torch.ones(3)), {}, OptionError, "x: got None"),
        ((torch.ones(3), torch.ones(3, device="meta")), {}, DeviceError, "bias: got meta"),
        ((torch.ones(3, dtype=torch.complex64),), {}, DtypeError, "x: got torch.complex64"),
        ((torch.ones(3), None, True), {}, OptionError, "scale: got bool"),
        ((torch.ones(3), None, "2"), {}, OptionError, "scale: got str"),
        ((torch.ones(3), None, 1.0), {"power": torch.ones(1)}, OptionError, "power: got Tensor"),
        ((torch.ones(3), None, 1.0), {"power": [2]}, OptionError, "power: got list"),
        (
            (torch.ones(3), None, 1.0, 4),
            {},
            OptionError,
            "operands of scaled: got 4 of them; expected no more than x, bias, scale",
        ),
        ((torch.ones(3),), {"x": torch.ones(3)}, OptionError, "x: got a second value"),
        ((torch.ones(3),), {"other": 3}, OptionError, r"other: got .* does not exist; expected scaled\(x, bias"),
    ],
)
def test_wrong_arguments_are_refused(arguments, options, error, match):
    with pytest.raises(error, match=match):
        scaled(*arguments, **options)


def test_functions_without_a_reference_need_a_gpu():
    with pytest.raises(UnsupportedError, match=r"no reference=(?s:.*)a GPU"):
        nowhere(torch.ones(3))
    assert nowhere(torch.ones(3, 2, device="meta")).shape == (3, 2)


def test_gradients_are_those_of_backward():
    x, bias = (y.requires_grad_() for y in x_and_bias(torch.float64))
    for options in ({}, {"power": 3}):
        got = torch.autograd.grad(scaled(x.float(), bias.float(), 0.7, **options).square().sum(), (x, bias))
        power = options.get("power", 1)
        expected = torch.autograd.grad((x**power * 0.7 + bias).square().sum(), (x, bias))
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    with pytest.raises(UnsupportedError, match="no backward="):
        halves(x.float())
    with torch.no_grad():
        halves(x.float())


@pytest.mark.slow
def test_a_float_among_the_options_may_vary_in_a_compiled_function():
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, slope: leaky(x, slope=slope) * 2, fullgraph=True, backend="aot_eager")
    for slope in (0.1, 0.2, 0.3, -0.0, 1e-30):
        x = torch.randn(3, 8, requires_grad=True)
        grad = torch.randn(3, 8)
        torch.testing.assert_close(compiled(x, slope), torch.nn.functional.leaky_relu(x, slope) * 2)
        found, wanted = (
            torch.autograd.grad(f(x), x, grad)[0]
            for f in (lambda x: compiled(x, slope), lambda x: torch.nn.functional.leaky_relu(x, slope) * 2)  # noqa: B023
        )
        torch.testing.assert_close(found, wanted)


def test_the_key_has_shapes_and_options_and_no_data():
    x, bias = x_and_bias(torch.bfloat16, device="meta")
    keys = [
        describer_of(scaled)(x, bias, scale, power=power).key(H200, None)
        for scale, power in ((0.5, 1), (0.7, 1), (0.5, 2))
    ]
    assert keys[0] == keys[1] != keys[2]
    assert [operand.name for operand in keys[0].inputs] == ["x", "bias", "scale"]
    assert keys[0].inputs[2].role is Role.SCALAR
    assert keys[0].option_values == {"power": 1, "name": "plain"}
    alone = describer_of(scaled)(x, None, 0.5).key(H200, None)
    assert [operand.name for operand in alone.inputs] == ["x", "scale"]
    two = describer_of(halves)(x).key(H200, None)
    assert [str(operand.layout.dtype) for operand in two.outputs] == ["torch.bfloat16", "torch.float16"]


def test_a_graph_that_was_compiled_with_another_source_is_refused():
    with pytest.raises(OptionError, match=r"custom_graphs:scaled@00000000: got another .* Compile again"):
        torch.ops.cudnn_sdpa.graph_function(
            f"{scaled.name}@00000000", "t-n", [torch.ones(2, 3)], [1.0], None, '1,"plain",'
        )


@pytest.mark.parametrize(
    ("x", "shape", "stride", "is_refused"),
    [  # all of it seen on an H200 with cuDNN 9.19, by tests/gpu/graph/test_broadcast_operands.py
        ((2, 48, 64), (2, 1, 64), (64, 64, 1), False),
        ((2, 48, 64), (2, 1, 64), (256, 128, 1), True),
        ((2, 48, 64), (2, 48, 1), (48, 1, 1), False),
        ((2, 48, 64), (2, 48, 1), (98, 2, 1), True),
        ((2, 48, 64), (2, 48, 1), (384, 8, 1), True),
        ((3, 16, 64), (3, 16, 1), (1, 3, 1), True),  # dense, but not row-major
        ((2, 48, 64), (2, 48, 64), (0, 0, 1), True),
        ((2, 48, 64), (2, 48, 64), (48, 1, 0), True),
        ((2, 48, 64), (2, 48, 64), (6272, 128, 1), False),  # gaps alone are harmless
        ((2, 48, 64), (1, 1, 1), (4, 2, 1), False),
        ((2, 16, 6, 8), (1, 16, 1, 1), (16, 1, 16, 16), False),
        ((2, 16, 6, 8), (2, 1, 6, 8), (48, 1, 8, 1), False),
        ((2, 16, 6, 8), (2, 1, 6, 8), (126, 1, 18, 2), True),
        ((2, 16, 6, 8), (2, 1, 6, 8), (0, 1, 8, 1), True),
        ((2, 16, 3, 4, 8), (2, 1, 3, 4, 8), (1632, 1, 544, 136, 17), True),
        ((48, 64), (48, 64), (64, 1), True),  # two dimensions
        ((48, 64), (1, 64), (64, 1), True),
        ((2, 24, 64), (1, 1, 64), (64, 64, 1), True),
        ((2, 24, 64), (2, 1, 1), (1, 1, 1), True),
        ((2, 24, 64), (1, 24, 64), (1536, 64, 1), False),
        ((1, 48, 64), (1, 1, 64), (64, 64, 1), False),
        ((4, 1, 1), (4, 1, 1), (1, 1, 1), False),
        ((2, 24, 1), (1, 24, 1), (24, 1, 1), True),
    ],
)
def test_broadcast_operands_that_cudnn_misreads_are_refused(x, shape, stride, is_refused):
    given = torch.empty(x, dtype=torch.float16, device="meta")
    bias = torch.empty_strided(shape, stride, dtype=torch.float16, device="meta")
    key = describer_of(scaled)(given, bias, 0.5).key(H200, None)
    error = UnsupportedError.of(known_issues.check, key)
    assert (error is not None) is is_refused
    assert error is None or "seen on 9.19 with an H200" in str(error)


def test_functions_are_pickled_by_name():
    assert pickle.loads(pickle.dumps(leaky)) is leaky
    assert copy.deepcopy(leaky) is leaky
    assert (leaky.__name__, leaky.__module__) == ("leaky", "custom_graphs")
    assert scaled.__doc__ == "x to a power, times a number, plus a bias."


def test_options_of_numpy_are_plain_values():
    x = torch.randn(1, 4, 8)
    with gpu_on_the_cpu():
        with cudnn_sdpa.record_plans() as manifest:
            scaled(x, None, 2.0, power=np.float64(2.0))
        assert FakePlan.launched[-1] in manifest.keys(TARGET, 0)
        assert FakePlan.launched[-1].option_values["power"] == 2.0
        assert type(FakePlan.launched[-1].option_values["power"]) is float
    with FlopCounterMode(display=False):
        torch.testing.assert_close(scaled(x, None, 2.0, power=np.float64(2.0)), x**2 * 2)


@pytest.mark.parametrize("found", [lambda x: x[:1], lambda x: (x, x), lambda _: None, lambda _: 1.5])
def test_a_reference_that_does_not_return_what_outputs_says_is_named(found):
    def differs(g, x):
        return g.relu(input=x)

    operator = graph_op(reference=found, outputs=lambda x: x.new_empty(x.shape))(differs)
    with pytest.raises(OptionError, match=r"reference of differs: got results .*\(3, 4, 4\)"):
        operator(torch.randn(3, 4, 4))


def test_definitions_that_cannot_work_are_refused():
    def fine(g, x):
        return g.relu(input=x)

    wrong = (("auxiliary", -1), ("auxiliary", True), ("keeps_results", "no"), ("shard", {"y": 0}))
    for name, value in (*wrong, ("reads", lambda operands, needs, *, power: needs)):  # noqa: ARG005
        with pytest.raises(OptionError, match=f"{name}( of fine)?: got"):
            graph_op(reference=torch.relu, **{name: value})(fine)
    for builder in (lambda: None, lambda g: g):
        with pytest.raises(OptionError, match="got no operand"):
            graph_op(reference=torch.relu)(builder)
    with pytest.raises(OptionError, match="no \\* parameters"):
        graph_op(reference=torch.relu)(lambda g, *x: g.relu(input=x[0]))
    with pytest.raises(OptionError, match="graph_op fine: got neither reference= nor"):
        graph_op()(fine)
    with pytest.raises(OptionError, match=r"graph_op: got a builder as an argument; expected .*reference="):
        graph_op(fine)


def doubled(g, x):
    return g.add(a=x, b=x)


def summed_and_subtracted(g, a, b):
    return g.add(a=a, b=b), g.sub(a=a, b=b)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (None, "got a call of gradients with 2 results; expected a result for each operand named, of x"),
        (("x",), "2 results as the gradients of x"),
        (("x", "x"), "2 results as the gradients of x, x"),
        (("x", "y"), "2 results as the gradients of x, y"),
    ],
)
def test_a_call_with_other_results_than_backward_says_is_refused(names, message):
    gradients = graph_op(reference=lambda a, b: (a + b, a - b))(summed_and_subtracted)
    gradients.__name__ = "gradients"

    def backward(grads, operands, results):  # noqa: ARG001
        call = gradients.call(grads[0], operands[0])
        return call if names is None else call.of(*names)

    operator = graph_op(reference=lambda x: x + x, backward=backward)(doubled)
    x = torch.randn(3, 4, requires_grad=True)
    with pytest.raises(OptionError, match=f"backward: .*{message}"):
        operator(x).sum().backward()


def test_a_returned_call_may_be_differentiated_again_and_compiled():
    def backward(grads, operands, results):  # noqa: ARG001
        return product.call(grads[0], operands[1])

    def multiplied(g, a, b):
        return g.mul(a=a, b=b)

    plain = graph_op(reference=lambda a, b: a * b, backward=lambda grads, operands, _: (grads[0] * operands[1], None))
    product = plain(multiplied)
    operator = graph_op(reference=lambda a, b: a * b, backward=backward)(multiplied)
    for function in (operator, torch.compile(operator, fullgraph=True, backend="aot_eager")):
        a, b = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4)
        (found,) = torch.autograd.grad(function(a, b), a, torch.ones(3, 4))
        assert torch.equal(found, b)
    grad_out = torch.randn(3, 4, requires_grad=True)
    (found,) = torch.autograd.grad(operator(a, b), a, grad_out, create_graph=True)
    (again,) = torch.autograd.grad(found, grad_out, torch.ones(3, 4))
    assert torch.equal(again, b)


def test_plain_values_of_subclasses_are_those_that_they_hold():
    named = type("Named", (str,), {"__str__": lambda _: "another"})
    counted = type("Counted", (int,), {"__int__": lambda _: 99})
    found = checked_option("it", (named("real"), counted(5), True, np.float64(0.5), None))
    assert found == ("real", 5, True, 0.5, None)
    assert [type(x) for x in found] == [str, int, bool, float, type(None)]


def test_other_errors_of_a_batch_of_gradients_stay():
    def fails(error):
        def run(*_, **__):
            raise error

        return graph_op(reference=torch.relu, backward=run)(lambda g, x: g.relu(input=x))

    x = torch.randn(2, 4, requires_grad=True)
    for error, kind in ((ExecutionError("lost"), ExecutionError), (RuntimeError("NYI"), UnsupportedError)):
        out = fails(error)(x)
        with pytest.raises(kind) as raised:
            torch.autograd.grad(out, x, torch.ones(3, 2, 4), is_grads_batched=True)
        assert raised.value is error or raised.value.__cause__ is error


@graph_op(
    reference=lambda x, w=None: x * w,
    readable=lambda x, w=None: (x, torch.full_like(x, 2.0) if w is None else w),
)
def filled_in(g, x, w=None):
    return g.mul(a=x, b=w)


@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
def test_operands_that_readable_fills_in_are_no_part_of_the_signature(native):
    with native_way(on=native), gpu_on_the_cpu():
        for _ in range(3):
            x = torch.randn(1, 2, 8)
            assert filled_in(x).equal(2 * x)
            w = torch.randn(1, 2, 8)
            assert filled_in(x, w).equal(x * w)

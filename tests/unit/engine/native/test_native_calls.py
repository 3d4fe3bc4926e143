"""Calls that the native module launches: which they are, and what a backward pass that it repeats may not hide.

What may stand between any call and its plan is tested by `tests/contract`, which takes both ways.
"""

from __future__ import annotations

import ctypes
import dataclasses
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from contract.operations import OPERATIONS
from fake_gpu import gpu_on_the_cpu
from native_way import native_way
from torch._dynamo import compiled_autograd
from torch.multiprocessing.reductions import StorageWeakRef

import cudnn_sdpa
from cudnn_sdpa import (
    ArgumentError,
    DtypeError,
    LayoutError,
    conv2d,
    graph_op,
    layer_norm,
    plan_cache,
    rms_norm,
    sdpa_paged,
    silu_mul,
)
from cudnn_sdpa.engine.native import calls
from cudnn_sdpa.fused import graph_op as graph_functions

#: Examples whose forward calls take the Python way: with dropout, negative scales, pages that are gathered, sinks with
#: decoding, what FP8 makes or copies for a launch, and backward passes that are called as functions.
IN_PYTHON = {
    "sdpa, dropout",
    "sdpa, dropout, lengths",
    "sdpa_varlen, self-attention",
    "sdpa_paged, a chunk",
    "sdpa_paged, sinks, window",
    "sdpa_fp8, pages",
    "sdpa_fp8_backward, lengths",
    "sdpa_backward",
    "sdpa_backward, mask, some",
    "sdpa_varlen_backward",
}

#: Examples whose backward calls are more than a launch.
BACKWARD_IN_PYTHON = {
    "sdpa, dropout",
    "sdpa, dropout, lengths",
    "scaled_dot_product_attention, no batch, mask",
    "sdpa, sinks",
    "sdpa, mask",
    "sdpa, softcap",
    "sdpa_varlen, self-attention",
    "sdpa_varlen, sinks, window",
    "sdpa_varlen, softcap",
    "rms_norm, zero-centered, residual",
    "rms_norm, residual, several kernels",
    "layer_norm, zero-centered, residual, SiLU",
    "conv1d",
    "a user's graph_op",
    "kernels, mask, causal",
    "kernels, tiled",
}


@pytest.fixture
def folder() -> Path | None:
    """The user's folder of modules, in which the real one is."""
    return None


@pytest.fixture(autouse=True)
def native(folder: Path | None) -> Iterator[None]:  # noqa: ARG001
    with native_way():
        yield


@pytest.mark.sample(16)
@pytest.mark.parametrize("name", OPERATIONS)
def test_known_calls_are_launched_without_python(name, launches_in_python):
    call = OPERATIONS[name]
    with gpu_on_the_cpu(call.compute):
        call.warm_up()
        launches_in_python.clear()
        call(call.tensors())
        assert bool(launches_in_python) is (name in IN_PYTHON)
        if call.differentiable:
            launches_in_python.clear()
            call.gradients(call.tensors(grad=True))
            assert bool(launches_in_python) is (name in BACKWARD_IN_PYTHON)


#: Examples with `out`, but for `sdpa_paged`, which copies what its plan has written.
WITH_OUT = [
    name
    for name, call in OPERATIONS.items()
    if "out" in inspect.signature(call.function).parameters
    and name not in IN_PYTHON
    and call.function is not sdpa_paged
]


@pytest.mark.sample(8)
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("name", WITH_OUT)
def test_known_calls_write_their_result_without_python(name, return_lse, launches_in_python):
    """Where they are launched so without `out`: some are completed by another launch."""
    call = OPERATIONS[name]
    options = {"return_lse": True} if return_lse else {}
    with gpu_on_the_cpu(call.compute):
        for _ in range(3):
            launches_in_python.clear()
            shape = call(call.tensors(), **options)
        shape, is_native = shape[0] if return_lse else shape, not launches_in_python
        assert is_native or return_lse
        for number in range(4):
            launches_in_python.clear()
            tensors, out = call.tensors(), torch.full_like(shape, torch.nan)
            version, references = out._version, sys.getrefcount(out)
            found = call(tensors, out=out, **options)
            assert bool(launches_in_python) is (number < 2 or not is_native)
            assert (found[0] if return_lse else found) is out
            call.assert_out(out, tensors)
            if number > 1:
                assert out._version == version + 1
            if return_lse:
                assert torch.equal(found[1], call(tensors, return_lse=True)[1])
            del found
            assert sys.getrefcount(out) == references


def test_results_in_turn(launches_in_python):
    """New ones, given ones, some of which lie otherwise or count no changes, and those that must not be written."""
    call = OPERATIONS["sdpa, causal, scale"]
    with gpu_on_the_cpu(call.compute):
        dense = torch.empty(call(call.tensors()).shape, dtype=torch.bfloat16)
        for number in range(4):
            launches_in_python.clear()
            tensors = call.tensors()
            turned = torch.empty_like(dense.transpose(1, 2).contiguous()).transpose(1, 2)
            with torch.inference_mode():
                uncounted = torch.empty_like(dense)
            for out in (None, torch.empty_like(dense), turned, uncounted):
                call.assert_out(call(tensors, **({} if out is None else {"out": out})), tensors)
            assert number < 2 or not launches_in_python
            whole = torch.empty(dense.numel() + 8, dtype=torch.bfloat16)
            for wrong, message in ((whole[1:-7].view(dense.shape), "2 bytes past"), (dense.half(), "float16")):
                with pytest.raises(ArgumentError, match=f"^out: got .*{message}"):
                    call(tensors, out=wrong)


def test_memory_beside_that_of_a_result_is_apart(launches_in_python):
    """To the byte: a result between the other tensors of a call, and the same one element on, or back."""
    call = OPERATIONS["sdpa, causal, scale"]
    with gpu_on_the_cpu(call.compute):
        shape = call(call.tensors()).shape
        made = call.tensors()
        sizes = [made["q"].numel(), torch.Size(shape).numel(), made["k"].numel()]
        for number in range(4):
            whole = torch.empty(sum(sizes) + 8, dtype=torch.bfloat16)
            q, out, k = whole[: sum(sizes)].split(sizes)
            tensors = call.tensors()
            tensors |= {"q": q.view(made["q"].shape).copy_(made["q"]), "k": k.view(made["k"].shape).copy_(made["k"])}
            launches_in_python.clear()
            call.assert_out(call(tensors, out=out.view(shape)), tensors)
            assert number < 2 or not launches_in_python
            for name, begin in (("q", sizes[0] - 8), ("k", sizes[0] + 8)):
                with pytest.raises(LayoutError, match=f"^out: got memory that overlaps {name};"):
                    call(tensors, out=whole[begin : begin + sizes[1]].view(shape))


def test_autocast_that_casts_decides_the_dtype_of_a_result(launches_in_python):
    call = OPERATIONS["sdpa, causal, scale"]
    with gpu_on_the_cpu(call.compute):
        out = torch.empty_like(call(call.tensors()))
        for number in range(4):
            launches_in_python.clear()
            tensors = call.tensors()
            call.assert_out(call(tensors, out=out), tensors)
            with torch.autocast("cpu", torch.bfloat16):  # which casts nothing
                call.assert_out(call(tensors, out=out), tensors)
            assert number < 2 or not launches_in_python
            with torch.autocast("cpu", torch.float16):
                with pytest.raises(DtypeError, match=r"^out: got bfloat16"):
                    call(tensors, out=out)
                call.assert_out(call(tensors, out=out.half()), tensors)


TRAINING = ["sdpa, causal, scale", "sdpa_varlen", "rms_norm", "silu_mul"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", TRAINING)
def test_kinds_of_backward_calls_in_turn(name, launches_in_python):
    """Gradients that lie otherwise, which fused operations copy, and those of some inputs; also after evictions."""
    call = OPERATIONS[name]

    def backward(*, is_turned, of_all):
        tensors = call.tensors(grad=True)
        out = call(tensors)
        grad_out = torch.randn(out.shape).to(out.dtype)
        if is_turned:
            grad_out = grad_out.transpose(0, 1).contiguous().transpose(0, 1)
        wanted = {name: tensors[name] for name in (call.differentiable if of_all else call.differentiable[:1])}
        launches_in_python.clear()
        found = torch.autograd.grad(out, list(wanted.values()), grad_out)
        call.assert_gradients(dict(zip(wanted, found, strict=True)), tensors, grad_out)

    layouts = (False, True) if call.is_attention else (False,)
    kinds = [{"is_turned": turned, "of_all": of_all} for turned in layouts for of_all in (False, True)]
    with gpu_on_the_cpu(call.compute):
        call.warm_up()
        for _ in range(6):
            for plan in [plan for plan in plan_cache.plans() if "backward" in plan.key.name or "grad" in plan.key.name]:
                plan_cache._remove(plan)
            for _ in range(3):
                for kind in kinds:
                    backward(**kind)
            for kind in kinds:
                backward(**kind)
                assert not launches_in_python


@pytest.mark.parametrize("name", [*TRAINING, "layer_norm"])
def test_gradients_of_some_inputs_are_theirs(name, launches_in_python):
    """As where the first ones are frozen: plans compute gradients that nobody needs."""
    call = OPERATIONS[name]
    with gpu_on_the_cpu(call.compute):
        for wanted in (call.differentiable[1:], call.differentiable[-1:], call.differentiable[::2]):
            for _ in range(7):
                tensors = call.tensors()
                leaves = [tensors[x].requires_grad_() for x in wanted]
                out = call(tensors)
                grad_out = torch.randn(out.shape).to(out.dtype)
                launches_in_python.clear()
                found = torch.autograd.grad(out, leaves, grad_out)
                call.assert_gradients(dict(zip(wanted, found, strict=True)), tensors, grad_out)
            assert not launches_in_python


@pytest.mark.parametrize("name", TRAINING)
def test_the_memory_of_a_call_without_backward_pass_is_freed(name, launches_in_python):
    """Autograd's node keeps the result, which keeps the node: not for ever."""
    call = OPERATIONS[name]
    with gpu_on_the_cpu(call.compute):
        call.warm_up()
        launches_in_python.clear()
        tensors = call.tensors(grad=True)
        out = call(tensors)
        memory = [StorageWeakRef(x.untyped_storage()) for x in (out, *tensors.values())]
        assert not launches_in_python
        del out, tensors
        assert all(each.expired() for each in memory)


def test_two_numbers_in_turn(launches_in_python):
    x, weight = (torch.randn(*shape, requires_grad=True) for shape in ((4, 64), (64,)))
    with gpu_on_the_cpu():
        for number in range(16):
            eps = 1e-3 if number % 2 else 1e-6
            out, grad_out = rms_norm(x, weight, eps), torch.randn(4, 64)
            launches_in_python.clear()
            found = torch.autograd.grad(out, (x, weight), grad_out)
            wanted = torch.autograd.grad(torch.nn.functional.rms_norm(x, (64,), weight, eps), (x, weight), grad_out)
            torch.testing.assert_close(found, wanted)
            assert number < 10 or not launches_in_python


@pytest.mark.parametrize("name", [*TRAINING, "sdpa, lengths", "conv2d", "sdpa_paged"])
def test_known_calls_under_autocast_that_casts_nothing(name, launches_in_python):
    call = OPERATIONS[name]
    with gpu_on_the_cpu(call.compute), torch.autocast("cpu", torch.bfloat16):
        call.warm_up()
        launches_in_python.clear()
        tensors = call.tensors()
        call.assert_out(call(tensors), tensors)
        if call.differentiable:
            tensors = call.tensors(grad=True)
            call.assert_gradients(call.gradients(tensors), tensors)
        assert not launches_in_python


def test_autocasts_dtype_on_gpus_is_described(launches_in_python):
    """With another one it may cast what it did not."""
    call, before = OPERATIONS["sdpa, causal, scale"], torch.get_autocast_dtype("cuda")
    with gpu_on_the_cpu(call.compute):
        torch.set_autocast_enabled("cuda", True)
        try:
            for dtype in (torch.bfloat16, torch.float16):
                torch.set_autocast_dtype("cuda", dtype)
                launches_in_python.clear()
                call(call.tensors())
                assert launches_in_python
                call.warm_up()
                launches_in_python.clear()
                call(call.tensors())
                assert not launches_in_python
        finally:
            torch.set_autocast_enabled("cuda", False)
            torch.set_autocast_dtype("cuda", before)


@pytest.mark.parametrize("is_native", [False, True])
def test_observers_of_operators_see_them(tmp_path, is_native):
    call, file = OPERATIONS["sdpa, causal, scale"], tmp_path / "trace.json"
    with gpu_on_the_cpu(call.compute):
        call.warm_up()
        calls.switch(on=is_native)
        for _ in range(3):
            call(call.tensors())
        observer = torch.profiler.ExecutionTraceObserver().register_callback(str(file))
        observer.start()
        call(call.tensors())
        observer.stop()
        observer.unregister_callback()
    assert "cudnn_sdpa::sdpa_forward" in file.read_text()


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", TRAINING)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_compiled_autograd_calls_back(name):
    """Its graph, compiled once, serves calls with the same options and no others."""
    call = OPERATIONS[name]
    calls = [call, call]
    if call.is_attention:
        calls.append(dataclasses.replace(call, options={**call.options, "scale": 0.31}))
    torch._dynamo.reset()
    with gpu_on_the_cpu(call.compute):
        for each in calls:
            each.warm_up()
            tensors = each.tensors(grad=True)
            grad_out = torch.randn_like(out := each(tensors))
            assert out.grad_fn.name().startswith("cudnn_sdpa::")
            with compiled_autograd._enable(torch.compile(backend="eager")):
                out.backward(grad_out)
            each.assert_gradients({name: tensors[name].grad for name in each.differentiable}, tensors, grad_out)
    torch._dynamo.reset()


# Backward passes of graph functions: a call that `backward` returns is repeated without asking Python.


def twice(g, x):
    return g.add(a=x, b=x)


def both(g, a, b):
    return g.add(a=a, b=b), g.sub(a=a, b=b)


double = graph_op(reference=lambda x: x + x)(twice)
sum_and_difference = graph_op(reference=lambda a, b: (a + b, a - b))(both)


@graph_op(reference=lambda x: x * x)
def square(g, x):
    return g.mul(a=x, b=x)


def leaf():
    return torch.randn(4, 128).requires_grad_()


def learned(operation, *others, calls=6):
    """Gradients of enough calls that the next one may be launched natively; and that of the next one."""
    for _ in range(calls + 1):
        x, grad_out = leaf(), torch.randn(4, 128)
        (found,) = torch.autograd.grad(operation(x, *others), x, grad_out.clone())
    return found, grad_out


def one_launch(grads, operands, results):  # noqa: ARG001
    return double.call(grads[0])


def by_number(grads, operands, results):  # noqa: ARG001
    return (double if operands[1] > 0 else square).call(grads[0])


def of_given(grads, operands, results):  # noqa: ARG001
    return square.call(grads[0]) if grads[1] is None else double.call(grads[1])


@pytest.fixture
def fake_gpu() -> Iterator[None]:
    with gpu_on_the_cpu():
        yield


@pytest.mark.usefixtures("fake_gpu")
class TestBackwardPassesThatReturnACall:
    def test_it_is_launched_without_python(self, launches_in_python):
        operation = graph_op(reference=lambda x: x + x, backward=one_launch)(twice)
        learned(operation)
        launches_in_python.clear()
        found, grad_out = learned(operation, calls=0)
        assert not launches_in_python
        assert torch.equal(found, 2 * grad_out)

    def test_its_numbers_are_those_of_the_call(self):
        def times(g, x, factor):
            return g.mul(a=x, b=factor)

        def backward(grads, operands, results):  # noqa: ARG001
            return once.call(grads[0], operands[1])

        once = graph_op(reference=lambda x, factor: x * factor)(times)
        operation = graph_op(reference=lambda x, factor: x * factor, backward=backward)(times)
        for factor in (2.0, 3.0):
            found, grad_out = learned(operation, factor)
            torch.testing.assert_close(found, factor * grad_out)

    def test_numbers_may_decide(self):
        operation = graph_op(reference=lambda x, s: x * s, backward=by_number)(lambda g, x, s: g.mul(a=x, b=s))
        learned(operation, 2.0)
        found, grad_out = learned(operation, -2.0, calls=0)
        assert torch.equal(found, grad_out.square())

    @pytest.mark.parametrize("names", [("a", "b"), ("b", "a"), ("a", "c")])
    def test_it_says_whose_gradients_its_results_are(self, names):
        """And where an operand has none, `backward` is asked in each pass."""
        asked, known = [], []

        def backward(grads, operands, results):  # noqa: ARG001
            asked.append(None)
            return sum_and_difference.call(grads[0], operands[0]).of(*names)

        operation = graph_op(reference=lambda a, b, c: a + b + c, backward=backward)(
            lambda g, a, b, c: g.add(a=g.add(a=a, b=b), b=c)
        )
        for wanted in [*[names] * 4, *[names[1:]] * 4, *[("a", "b", "c")] * 4]:
            asked.clear()
            leaves = {name: torch.randn(4, 128, requires_grad=name in wanted) for name in "abc"}
            out, grad_out = operation(*leaves.values()), torch.randn(4, 128)
            out.backward(grad_out)
            expected = dict(zip(names, (grad_out + leaves["a"], grad_out - leaves["a"]), strict=True))
            for name, leaf in leaves.items():
                if name in wanted and name in names:
                    assert torch.equal(leaf.grad, expected[name])
                else:
                    assert leaf.grad is None
            known.append((len(wanted), bool(asked)))
        assert known[3::4] == [(2, False), (1, False), (3, True)]

    def test_gradients_that_were_one_tensor_may_be_two(self):
        def backward(grads, operands, results):  # noqa: ARG001
            return sum_and_difference.call(*grads)

        operation = graph_op(reference=lambda a, b: (a + b, a - b), backward=backward)(both)
        for of_sum, of_difference in [(torch.randn(4, 128),) * 2] * 6 + [tuple(torch.randn(2, 4, 128))]:
            a, b = leaf(), leaf()
            found = torch.autograd.grad(operation(a, b), (a, b), (of_sum, of_difference))
            assert torch.equal(found[0], of_sum + of_difference)
            assert torch.equal(found[1], of_sum - of_difference)

    def test_a_result_without_gradient(self):
        operation = graph_op(reference=lambda x: (x * x, x + x), backward=of_given, materialize_grads=False)(
            lambda g, x: (g.mul(a=x, b=x), g.add(a=x, b=x))
        )
        for which in (1, 1, 1, 1, 1, 1, 0, 1):
            x, grad_out = leaf(), torch.randn(4, 128)
            (found,) = torch.autograd.grad(operation(x)[which], x, grad_out)
            assert torch.equal(found, 2 * grad_out if which else grad_out.square())

    def test_in_inference_mode(self):
        operation = graph_op(reference=lambda x: x + x, backward=one_launch)(twice)
        for _ in range(6):
            x, grad_out = leaf(), torch.randn(4, 128)
            out = operation(x)
            with torch.inference_mode():
                out.backward(grad_out)
            assert torch.equal(x.grad, 2 * grad_out)

    def test_a_gradient_that_must_be_copied(self, launches_in_python):
        def backward(grads, operands, results):  # noqa: ARG001
            return double.call(grads[0].contiguous())

        operation = graph_op(reference=lambda x: x + x, backward=backward)(twice)
        learned(operation)
        launches_in_python.clear()
        found, grad_out = learned(operation, calls=0)
        assert not launches_in_python
        assert torch.equal(found, 2 * grad_out)
        for _ in range(4):
            x, grad_out = leaf(), torch.randn(128, 4).t()
            (found,) = torch.autograd.grad(operation(x), x, grad_out)
            assert torch.equal(found, 2 * grad_out)


def of_image(convolved):
    image, kernel = (torch.randn(shape).to(memory_format=torch.channels_last) for shape in ((2, 4, 8, 8), (6, 4, 3, 3)))
    return lambda: conv2d(image.requires_grad_(convolved == "x"), kernel.requires_grad_(convolved != "x"), padding=1)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_known_convolution_chooses_its_activation_anew(rank, launches_in_python):
    """Its options are looked up before it is asked who computes the activation: with gradients, a kernel of its own."""
    function, theirs = (getattr(of, f"conv{rank}d") for of in (cudnn_sdpa, torch.nn.functional))
    shapes = (2, 4, *[8] * rank), (6, 4, *[3] * rank), (6,)
    x, weight, bias = (torch.randn(shape).bfloat16() for shape in shapes)
    x, weight = (y.movedim(1, -1).contiguous().movedim(-1, 1) for y in (x, weight))
    given = {"padding": 1, "activation": "silu"}

    def right(x, weight):
        return torch.nn.functional.silu(theirs(x.float(), weight.float(), bias.float(), padding=1))

    with gpu_on_the_cpu():
        for _ in range(8):
            function(x, weight, bias, **given)
        launches_in_python.clear()
        torch.testing.assert_close(
            function(2 * x, weight, bias, **given).float(), right(2 * x, weight), rtol=0.02, atol=0.02
        )
        assert not launches_in_python
        for wrong in (
            {"padding": -1},
            {"padding": 1.5},
            {"stride": 0},
            {"activation": "tanh"},
            {"activation": ["silu"]},
        ):
            with pytest.raises(ArgumentError):
                function(x, weight, bias, **(given | wrong))
        leaf = weight.clone().requires_grad_()
        for _ in range(4):
            found, expected = function(x, leaf, bias, **given), right(x, leaf)
            grad_out = torch.randn_like(expected)
            (gradient,) = torch.autograd.grad(found, leaf, grad_out.bfloat16())
            (wanted,) = torch.autograd.grad(expected, leaf, grad_out.bfloat16().float())
            torch.testing.assert_close(found.float(), expected, rtol=0.02, atol=0.02)
            assert (gradient.float() - wanted.float()).norm() < 0.02 * wanted.float().norm()


#: Calls whose gradients one launch computes.
ONE_LAUNCH = {
    "rms_norm": lambda: rms_norm(leaf(), torch.rand(128, requires_grad=True)),
    "rms_norm, x alone": lambda: rms_norm(leaf(), torch.rand(128)),
    "rms_norm, weight alone": lambda: rms_norm(leaf().detach(), torch.rand(128, requires_grad=True)),
    "rms_norm, no weight": lambda: rms_norm(leaf()),
    "layer_norm": lambda: layer_norm(leaf(), *torch.rand(2, 128).requires_grad_()),
    "layer_norm, no weight": lambda: layer_norm(leaf()),
    "silu_mul": lambda: silu_mul(leaf(), leaf()),
    "silu_mul of both": lambda: silu_mul(leaf()),
    "silu_mul, gate alone": lambda: silu_mul(leaf(), leaf().detach()),
    "silu_mul, up alone": lambda: silu_mul(leaf().detach(), leaf()),
    "conv2d, x alone": of_image("x"),
    "conv2d, weight alone": of_image("weight"),
}


@pytest.mark.parametrize("name", ONE_LAUNCH)
@pytest.mark.usefixtures("fake_gpu")
def test_warm_gradients_of_one_launch_ask_no_python(name, monkeypatch):
    for _ in range(4):
        out = ONE_LAUNCH[name]()
        out.backward(torch.randn_like(out))
    out, asked, gradients = ONE_LAUNCH[name](), [], graph_functions.gradients
    monkeypatch.setattr(graph_functions, "gradients", lambda *x, **options: asked.append(x) or gradients(*x, **options))
    out.backward(torch.randn_like(out))
    assert asked == []


@pytest.mark.usefixtures("fake_gpu")
def test_a_backward_that_returns_tensors_runs_in_each_pass():
    """Whatever it does: Python's variables, elements of tensors, and kernels that PyTorch does not see may decide."""
    passes = []

    def backward(grads, operands, results):  # noqa: ARG001
        passes.append(None)
        triple(grads[0].data_ptr(), grads[0].numel())
        return ((double if len(passes) < 8 else square)(grads[0]),)

    operation = graph_op(reference=lambda x: x + x, backward=backward)(twice)
    for number in range(1, 10):
        x, grad_out = leaf(), torch.randn(4, 128)
        (found,) = torch.autograd.grad(operation(x), x, grad_out.clone())
        assert torch.equal(found, 2 * (3 * grad_out) if number < 8 else (3 * grad_out).square())
        assert len(passes) == number


def triple(address, count):
    """Multiplies numbers at an address by 3, unseen by PyTorch."""
    numbers = (ctypes.c_float * count).from_address(address)
    for place in range(count):
        numbers[place] *= 3

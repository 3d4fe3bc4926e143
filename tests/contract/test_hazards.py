"""What may stand between a call and its plan: in each of these situations a call is right, or says that it is not."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import inspect
import re
import threading
import weakref

import pytest
import torch
import torch.distributed as dist
from fake_gpu import FakePlan
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import bias
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from cudnn_sdpa import (
    ArgumentError,
    DeviceError,
    LayoutError,
    OptionError,
    PlanBuildError,
    UnsupportedError,
    conv1d,
    conv2d,
    conv3d,
    explain,
    kernels,
    plan_cache,
    scaled_dot_product_attention,
    sdpa,
    sdpa_varlen,
)
from cudnn_sdpa.fused.graph_op import GraphFunction
from cudnn_sdpa.graph.definition import find_operation

# Grad mode.


@pytest.mark.differentiates
def test_grad_mode_is_seen(call):
    tensors = call.tensors(grad=True)
    for _ in range(3):
        assert call(tensors).requires_grad
        with torch.no_grad():
            assert not call(tensors).requires_grad
        with torch.inference_mode():
            assert not call(tensors).requires_grad
            with torch.enable_grad():
                assert not call(tensors).requires_grad
        assert not call(call.tensors()).requires_grad


@pytest.mark.differentiates
def test_a_leaf_may_change_its_mind(call):
    tensors = call.tensors(grad=True)
    assert call(tensors).requires_grad
    for name in call.differentiable:
        tensors[name].requires_grad_(False)
    assert not call(tensors).requires_grad
    tensors[call.last].requires_grad_()
    call.assert_gradients(call.gradients(tensors), tensors)


def test_tensors_of_inference_mode_are_named(call):
    with torch.inference_mode():
        tensors = call.make()
    call.assert_out(call(tensors), tensors)
    if not call.differentiable or len(tensors) == 1 or call.is_composed:
        return
    tensors[call.first] = tensors[call.first].clone().requires_grad_()
    with pytest.raises((LayoutError, RuntimeError), match=r"(?i)inference"):
        call(tensors)


@pytest.mark.differentiates
def test_a_result_cannot_be_written_where_a_gradient_is_wanted(attention):
    out = torch.empty_like(attention(attention.tensors()))
    with pytest.raises(UnsupportedError, match="out with a gradient"):
        attention(attention.tensors(grad=True), out=out)


# Gradients.


def test_gradients_that_there_are_none_of_are_refused(call):
    for name in set(call.inputs) - set(call.differentiable):
        tensors = call.tensors()
        tensors[name].requires_grad_()
        for _ in range(2):
            with pytest.raises(UnsupportedError, match=r"requires? grad"):
                call(tensors)
            with torch.no_grad():
                call.assert_out(call(tensors), tensors)


@pytest.mark.differentiates
def test_gradients_that_lie_otherwise(call):
    tensors = call.tensors(grad=True)
    dense = torch.randn_like(call(tensors))
    apart = torch.randn(*dense.shape[:-1], dense.shape[-1] + 8).to(dense.dtype)[..., 8:]
    shifted = torch.randn(dense.numel() + 1).to(dense.dtype)[1:].view(dense.shape)
    turned = torch.randn(dense.transpose(0, 1).shape).to(dense.dtype).transpose(0, 1)
    negated = torch._neg_view(torch.randn(dense.shape).to(dense.dtype))
    same = torch.ones((), dtype=dense.dtype).expand(dense.shape)
    for grad_out in (dense, apart, dense, shifted, turned, negated, same, dense):
        call.assert_gradients(call.gradients(tensors, grad_out), tensors, grad_out)


@pytest.mark.differentiates
def test_gradients_that_are_zeros_without_memory(call):
    tensors = call.tensors(grad=True)
    zeros = torch._efficientzerotensor(call(tensors).shape, dtype=tensors[call.first].dtype)
    for gradient in call.gradients(tensors, zeros).values():
        assert not gradient.any()


class _NoGradient(torch.autograd.Function):
    """The identity, whose gradient is None."""

    @staticmethod
    def forward(_, x):
        return x.view_as(x)

    @staticmethod
    def backward(*_):
        return None


@pytest.mark.differentiates
def test_an_upstream_gradient_may_be_none(call):
    tensors = call.tensors(grad=True)
    leaves = [tensors[name] for name in call.differentiable]
    for _ in range(2):
        out = _NoGradient.apply(call(tensors))
        for gradient in torch.autograd.grad(out.sum(), leaves, allow_unused=True):
            assert gradient is None or not gradient.any()


@pytest.mark.differentiates
def test_second_gradients_are_right_or_refused(call):
    tensors = call.tensors(grad=True)
    x = tensors[call.first]

    def first_gradient():
        return torch.autograd.grad(call(tensors).float().square().sum(), x, create_graph=True)[0]

    if call.has_double_backward:
        gradient = first_gradient()
        (second,) = torch.autograd.grad(gradient.float().sum(), x)
        exact = {name: t.detach().double().requires_grad_() for name, t in tensors.items()}
        squares = call.exact(**exact, **call.options).square().sum()
        (first,) = torch.autograd.grad(squares, exact[call.first], create_graph=True)
        (wanted,) = torch.autograd.grad(first.sum(), exact[call.first])
        assert (second.double() - wanted).norm() < 5e-2 * wanted.norm()
        return
    with pytest.raises(UnsupportedError, match=r"double backward|no backward="):
        torch.autograd.grad(first_gradient().sum(), x)


@pytest.mark.differentiates
def test_batches_of_gradients_are_refused(call):
    tensors = call.tensors(grad=True)
    out = call(tensors)
    with pytest.raises(UnsupportedError, match="batch of gradients"):
        torch.autograd.grad(out, tensors[call.first], torch.randn(2, *out.shape).to(out.dtype), is_grads_batched=True)


@pytest.mark.differentiates
def test_a_gradient_into_the_log_sum_exp_is_refused(attention):
    tensors = attention.tensors(grad=True)
    _, lse = attention(tensors, return_lse=True)
    with pytest.raises(UnsupportedError, match="LSE"):
        lse.sum().backward()


@contextlib.contextmanager
def right_or_refused(message):
    """What runs here ends well, or in the error about memory that this is a part of."""
    try:
        yield
    except LayoutError as error:
        if message not in str(error):
            raise


def moved(x, by):
    """A dense copy that begins `by` elements into other memory."""
    return torch.empty(x.numel() + by, dtype=x.dtype)[by:].view(x.shape).copy_(x)


@pytest.mark.differentiates
def test_hooks_may_keep_tensors_elsewhere(call):
    tensors = call.tensors(grad=True)
    for pack in (torch.clone, lambda x: moved(x, 64), lambda x: x.contiguous()):
        for hooks in (saved_tensors_hooks(pack, lambda x: x), contextlib.nullcontext()):
            with hooks:
                found = call.gradients(tensors)
            call.assert_gradients(found, tensors)


@pytest.mark.differentiates
def test_hooks_that_keep_tensors_where_kernels_cannot_read_them(call):
    tensors = call.tensors(grad=True)
    shift = saved_tensors_hooks(lambda x: moved(x, 1) if x.is_floating_point() else x, lambda x: x)
    with shift, right_or_refused("bytes past a multiple of 16"):
        call.assert_gradients(call.gradients(tensors), tensors)


@pytest.mark.differentiates
def test_checkpoints(call):
    for _ in range(2):
        tensors = call.tensors(grad=True)
        out = checkpoint(lambda tensors=tensors: call(tensors), use_reentrant=False)
        wanted = {name: x for name, x in tensors.items() if x.requires_grad}
        found = torch.autograd.grad(out.sum(), list(wanted.values()))
        call.assert_gradients(dict(zip(wanted, found, strict=True)), tensors)


@pytest.mark.differentiates
def test_a_graph_may_be_kept_and_gone_through_again(call):
    tensors = call.tensors(grad=True)
    out, leaf = call(tensors), tensors[call.last]
    first, second = (torch.autograd.grad(out.sum(), leaf, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    out.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()


@pytest.mark.differentiates
def test_threads_go_through_one_graph(call):
    """And free it: each thread gets the gradients, or the error that they are gone."""
    tensors = call.tensors(grad=True)
    out, leaves = call(tensors), [tensors[name] for name in call.differentiable]
    grad_out = torch.ones_like(out)

    def gradients(kept):
        try:
            found = torch.autograd.grad(out, leaves, grad_out, retain_graph=kept)
        except RuntimeError as error:
            assert "second time" in str(error)  # noqa: PT017
            assert not kept
        else:
            call.assert_gradients(dict(zip(call.differentiable, found, strict=True)), tensors)
        return True

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert all(pool.map(gradients, [True] * 8))
        assert all(pool.map(gradients, [False] * 4))


@pytest.mark.differentiates
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_hooks_of_the_graph_see_gradients(call):
    tensors, seen = call.tensors(grad=True), []
    out = call(tensors)
    out.register_hook(lambda grad: seen.append("out") or grad * 2)
    out.grad_fn.register_prehook(lambda grads: seen.append(f"before, {len(grads)}"))
    tensors[call.last].register_hook(lambda _: seen.append("leaf"))
    with torch.autograd.detect_anomaly(check_nan=True):
        out.backward(torch.ones_like(out))
    assert sorted(seen) == ["before, 1", "leaf", "out"]
    found = {name: tensors[name].grad for name in call.differentiable}
    call.assert_gradients(found, tensors, torch.full_like(out, 2.0))


@pytest.mark.differentiates
def test_errors_of_hooks_are_raised(call):
    def refuse(_):
        raise LookupError("by a hook")

    for hooks in ((refuse, lambda x: x), (lambda x: x, refuse)):
        with pytest.raises(LookupError, match="by a hook"), saved_tensors_hooks(*hooks):
            call(call.tensors(grad=True)).sum().backward()
    tensors = call.tensors(grad=True)
    call.assert_gradients(call.gradients(tensors), tensors)


@pytest.mark.differentiates
def test_gradients_are_summed(call):
    """In `.grad`, from another thread, and into some of the leaves."""
    tensors = call.tensors(grad=True)
    outs = [call(tensors) for _ in range(3)]
    grad_out = torch.ones_like(outs[0])
    for number, out in enumerate(outs):
        inputs = [tensors[call.first]] if number == 2 else None
        thread = threading.Thread(target=out.backward, args=(grad_out,), kwargs={"inputs": inputs})
        thread.start()
        thread.join()
    for name in call.differentiable:
        times = 3 if name == call.first else 2
        call.assert_gradients({name: tensors[name].grad}, tensors, grad_out * times)


@pytest.mark.differentiates
def test_an_input_written_after_the_call_is_noticed(call):
    """Unless the gradients do not depend on it, as on x where the sum with a residual is saved, or a mask."""
    tensors = call.tensors(grad=True)
    kept = {name: x.detach().clone() for name, x in tensors.items()}
    out, wanted = call(tensors), {name: x for name, x in tensors.items() if x.requires_grad}
    with torch.no_grad():
        tensors[call.first].mul_(2)
    try:
        found = torch.autograd.grad(out, list(wanted.values()), torch.ones_like(out))
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)  # noqa: PT017
    else:
        assert "residual" in tensors or call.is_composed or call.function.__name__ == "mask_of_a_user"
        call.assert_gradients(dict(zip(wanted, found, strict=True)), kept)


# Compiled calls.


def one_graph(call):
    """The call, compiled without a break of its graph, unless it has one, whatever was called and compiled before."""
    torch._dynamo.reset()
    return torch.compile(call.__call__, fullgraph=not call.is_composed, backend="aot_eager")


def test_compiled_calls_are_one_graph(call):
    compiled = one_graph(call)
    with torch.no_grad():
        for _ in range(3):
            tensors = call.tensors()
            call.assert_out(compiled(tensors), tensors)
            call.assert_out(call(tensors), tensors)


@pytest.mark.differentiates
def test_compiled_calls_have_gradients(call):
    compiled = one_graph(call)
    for _ in range(3):
        tensors = call.tensors(grad=True)
        wanted = {name: x for name, x in tensors.items() if x.requires_grad}
        out = compiled(tensors)
        call.assert_out(out, tensors)
        grad_out = torch.randn_like(out)
        found = torch.autograd.grad(out, list(wanted.values()), grad_out)
        call.assert_gradients(dict(zip(wanted, found, strict=True)), tensors, grad_out)
        call.assert_gradients(call.gradients(tensors), tensors)


# Who intercepts operators.


class _Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def _own(names):
    return [name for name in names if name.startswith("cudnn_sdpa")]


def test_dispatch_modes_see_the_operators(call):
    tensors = call.tensors(grad=True)
    with _Seen() as seen:
        with torch.no_grad():
            call(tensors)
        assert len(_own(seen.names)) == call.operators
        if not call.differentiable:
            return
        found = call.gradients(tensors)
    assert len(_own(seen.names)) >= 3
    call.assert_gradients(found, tensors)


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
def test_the_profiler_sees_the_operators(call):
    """One of the forward pass, and where there are gradients one of the backward pass or more."""
    tensors = call.tensors()
    seen = profiled(lambda: call.assert_out(call(tensors), tensors))
    assert sum(seen.values()) == call.operators
    if not call.differentiable:
        return
    leaves = call.tensors(grad=True)
    out = call(leaves)
    wanted = {name: x for name, x in leaves.items() if x.requires_grad}
    found = []
    seen = profiled(lambda: found.extend(torch.autograd.grad(out, list(wanted.values()), torch.ones_like(out))))
    assert seen
    call.assert_gradients(dict(zip(wanted, found, strict=True)), leaves)


def profiled(run):
    """The operators of the package that the profiler sees, and how often."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    return {event.key: event.count for event in profile.key_averages() if event.key.startswith("cudnn_sdpa::")}


class _Subclass(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return super().__torch_function__(function, types, args, kwargs or {})


class _Wrapper(torch.Tensor):
    """Holds a tensor, and notes the operators that it is given to."""

    seen = []  # noqa: RUF012

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        cls.seen.append(str(function))
        return function(
            *tree_map_only(cls, lambda x: x.inner, args), **tree_map_only(cls, lambda x: x.inner, kwargs or {})
        )


def test_subclasses_are_tensors(call):
    tensors = call.tensors()
    given = {**tensors, call.first: tensors[call.first].as_subclass(_Subclass)}
    call.assert_out(call(given).as_subclass(torch.Tensor), tensors)


def test_subclasses_that_hold_their_memory_elsewhere_see_operators(call):
    tensors = call.tensors()
    _Wrapper.seen.clear()
    call.assert_out(call({**tensors, call.first: _Wrapper(tensors[call.first])}), tensors)
    assert _Wrapper.seen


@pytest.fixture(scope="module")
def mesh():
    """A mesh of this process alone."""
    if not dist.is_available():
        pytest.skip("this PyTorch has no torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_dtensors_are_unwrapped_or_refused(call, mesh):
    """Replicated and sharded, forward and backward; nobody has said how a user's function may be divided.

    Ranks with the same tensors would draw different random numbers.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    if call.precision is not None:  # their examples view results as bytes, which DTensors cannot
        return
    tensors, refused = call.tensors(), 0
    for placement in (Replicate(), Shard(0), Replicate()):
        given = {name: DTensor.from_local(x, mesh, [Replicate()]) for name, x in tensors.items()}
        given[call.first] = DTensor.from_local(tensors[call.first], mesh, [placement])
        for name in call.differentiable:
            given[name].requires_grad_()
        try:
            out = call(given)
        except UnsupportedError as error:
            assert "on DTensors" in str(error)  # noqa: PT017
            refused += 1
            continue
        assert isinstance(out, DTensor)
        call.assert_out(out.full_tensor(), tensors)
        if call.differentiable:
            found = {name: x.full_tensor() for name, x in call.gradients(given).items()}
            call.assert_gradients(found, tensors)
    is_undivided = call.writes or call.function.__name__.endswith("_of_a_user")
    assert refused == 0 or refused == 1 + 2 * is_undivided + call.is_random
    call.assert_out(call(tensors), tensors)


def test_tangents_are_refused(call):
    tensors = call.tensors()
    with forward_ad.dual_level():
        call.assert_out(call(tensors), tensors)
        dual = forward_ad.make_dual(tensors[call.first], torch.ones_like(tensors[call.first]))
        with pytest.raises(UnsupportedError, match="forward-mode"):
            call({**tensors, call.first: dual})


def test_functorchs_gradients_are_refused(call):
    tensors = call.tensors()
    refused = r"torch\.func\.grad"
    if not (call.differentiable or call.is_attention):
        refused += "|the gradient of"
    with pytest.raises(UnsupportedError, match=refused):
        torch.func.grad(lambda x: call({**tensors, call.first: x}).float().sum())(tensors[call.first])


def test_functionalized_calls_are_right(call):
    """Without a gradient: with one, functorch's levels of autograd are refused elsewhere."""
    tensors = call.tensors()
    if call.writes and call.function.__name__ != "rotated_in_place":  # which copies results of `rope` then
        with pytest.raises(UnsupportedError, match=r"torch\.func\.functionalize"):
            torch.func.functionalize(call)(tensors)
        return
    for _ in range(2):
        call.assert_out(torch.func.functionalize(call)(tensors), tensors)


@pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet implemented the batching rule")
def test_vmap_loops_over_the_operator_or_is_refused(call):
    tensors = call.tensors()
    x = tensors[call.first]
    batch = torch.stack([x, (x.float() * 2).to(x.dtype)])
    run = torch.vmap(lambda x: call({**tensors, call.first: x}))
    if not (call.is_attention or call.loops):
        with pytest.raises(UnsupportedError, match=r"torch\.vmap"):
            run(batch)
        return
    if call.is_random:
        with pytest.raises(RuntimeError, match="randomness"):
            run(batch)
        run = torch.vmap(lambda x: call({**tensors, call.first: x}), randomness="different")
    for one, x in zip(run(batch), batch, strict=True):
        call.assert_out(one, {**tensors, call.first: x})


# PyTorch's settings.


def test_autocast_casts_attention(attention):
    call = attention
    single = {name: x.float() if name in call.cast else x for name, x in call.tensors().items()}
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            out = call(single)
        assert out.dtype == torch.bfloat16
        call.assert_out(out, single)
    assert call(call.tensors()).dtype == torch.bfloat16


def test_autocast_casts_only_what_pytorch_casts(call):
    """Attention and convolutions; norms, gates, FP8 and explicit gradients keep their dtypes."""
    tensors = call.tensors()
    by_plans = (scaled_dot_product_attention, sdpa, sdpa_varlen)
    if call.precision is None and not call.is_attention and call.function not in by_plans:
        tensors = {name: x.float() if x.is_floating_point() else x for name, x in tensors.items()}
    dtype = call(tensors).dtype
    casts = call.function in (*by_plans, kernels.attention, conv1d, conv2d, conv3d)
    lower = torch.float16 if casts else torch.bfloat16  # which autocast can concatenate, as some examples do
    for _ in range(4):
        with torch.autocast("cpu", lower):
            out = call(tensors)
        assert out.dtype == (lower if casts else dtype)
        call.assert_out(out, tensors)
        assert call(tensors).dtype == dtype


def test_autocast_that_casts_nothing(call):
    """Where tensors have its dtype; autocast to another dtype casts queries, keys and values all the same."""
    tensors = call.tensors(grad=True)
    wanted = {name: x for name, x in tensors.items() if x.requires_grad}
    casts = call.function in (scaled_dot_product_attention, sdpa, sdpa_varlen)
    with torch.autocast("cpu", torch.bfloat16):
        dtypes = {torch.bfloat16: call(tensors).dtype, torch.float16: torch.float16}
    for dtype in (torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.float16, torch.bfloat16):
        if dtype is torch.float16 and not casts:
            continue
        with torch.autocast("cpu", dtype):
            out = call(tensors)
        assert out.dtype == dtypes[dtype]
        call.assert_out(out, tensors)
        if wanted:
            grad_out = torch.randn(out.shape).to(out.dtype)
            found = torch.autograd.grad(out, list(wanted.values()), grad_out)
            call.assert_gradients(dict(zip(wanted, found, strict=True)), tensors, grad_out)


def test_deterministic_algorithms_have_plans_of_their_own(call, deterministic_algorithms):
    """Those of fused operations; attention has an option besides, and kernels of the library's own are the same."""

    def is_deterministic():
        tensors = call.tensors(grad=True)
        call.assert_out(call(tensors), tensors)
        if call.differentiable:
            call.assert_gradients(call.gradients(tensors), tensors)
        return FakePlan.launched[-1].deterministic

    for _ in range(3):
        assert is_deterministic() is False
        is_fused = isinstance(find_operation(FakePlan.launched[-1].operation), GraphFunction)
        with deterministic_algorithms():
            assert is_deterministic() is is_fused


def test_deterministic_algorithms_are_heeded(attention, deterministic_algorithms):
    def run(**options):
        """The right results, of a plan that is deterministic or not."""
        tensors = attention.tensors(grad=True)
        if attention.differentiable:
            attention.assert_gradients(attention.gradients(tensors, **options), tensors)
        else:
            attention.assert_out(attention(tensors, **options), tensors)
        return FakePlan.launched[-1].option_values.get("deterministic", False)

    assert run() is False
    if not attention.differentiable and FakePlan.launched[-1].name == "sdpa_forward":
        pytest.skip("forward passes over packed sequences always are")
    if FakePlan.launched[-1].name == "paged_varlen_forward":
        pytest.skip("the kernel always is")
    for _ in range(2):
        with deterministic_algorithms():
            assert run() is True
        assert run() is False
    if attention.differentiable:
        assert run(deterministic=True) is True


# Tensors.


def test_negative_bits_are_heeded(call):
    for name in call.make():
        tensors = call.tensors()
        if tensors[name].element_size() == 1:  # PyTorch negates no FP8
            with pytest.raises(LayoutError, match=f"^{name}: got a negated view"):
                call({**tensors, name: torch._neg_view(tensors[name])})
            continue
        given = {**tensors, name: torch._neg_view(-tensors[name])}
        assert given[name].is_neg()
        call.assert_out(call(given), tensors)


def result_of(attention, tensors):
    """What the result is written to looks like."""
    if "out" not in inspect.signature(attention.function).parameters:
        pytest.skip("it always allocates its result")
    return attention(tensors)


def test_a_result_is_not_written_to_a_negated_view(attention):
    tensors = attention.tensors()
    result = result_of(attention, tensors)
    for _ in range(3):
        attention.assert_out(attention(tensors, out=torch.empty_like(result)), tensors)
        with pytest.raises(LayoutError, match=r"^out: got a negated view"):
            attention(tensors, out=torch._neg_view(torch.empty_like(result)))


def test_a_result_is_not_written_over_any_tensor_of_the_call(attention):
    """Nor by a known call: that memory overlaps is not part of what is known."""
    tensors = attention.tensors()
    result = result_of(attention, tensors)
    for _ in range(3):
        for name, x in tensors.items():
            size = x.untyped_storage().nbytes()
            whole = torch.zeros(result.numel() + size + -size % 8, dtype=result.dtype)
            moved = whole.view(x.dtype)[:0].as_strided(x.shape, x.stride()).copy_(x)
            with pytest.raises(LayoutError, match=f"out: got memory that overlaps {name};"):
                attention({**tensors, name: moved}, out=whole[: result.numel()].view(result.shape))
            assert torch.equal(moved, x)
            out = whole[-result.numel() :].view(result.shape)
            attention.assert_out(attention({**tensors, name: moved}, out=out), tensors)


def test_a_result_is_written_only_where_kernels_can(attention):
    tensors = attention.tensors()
    result = result_of(attention, tensors)
    freed, shifted = torch.empty_like(result), moved(result, 1).fill_(3)
    freed.untyped_storage().resize_(0)
    for _ in range(4):
        with pytest.raises(LayoutError, match=r"^out: got an address 2 bytes past a multiple of 16"):
            attention(tensors, out=shifted)
        with pytest.raises(LayoutError, match=r"^out: got a tensor without memory"):
            attention(tensors, out=freed)
        out = moved(torch.full_like(result, torch.nan), 8)
        assert attention(tensors, out=out) is out
        attention.assert_out(out, tensors)
    assert (shifted == 3).all()


def test_a_result_that_requires_a_gradient_is_written_where_there_are_none(attention):
    tensors = attention.tensors()
    out = torch.empty_like(result_of(attention, tensors)).requires_grad_()
    for _ in range(4):
        with pytest.raises(UnsupportedError, match="out with a gradient"):
            attention(tensors, out=out)
        with torch.no_grad():
            attention.assert_out(attention(tensors, out=out.fill_(torch.nan)), tensors)
        attention.assert_out(attention(tensors, out=torch.full_like(out, torch.nan)), tensors)


def test_autograd_notices_that_a_result_is_written(attention):
    tensors = attention.tensors()
    leaf = torch.ones_like(result_of(attention, tensors)).requires_grad_()
    for _ in range(4):
        out = torch.ones_like(leaf, requires_grad=False)
        product = leaf * out
        assert attention(tensors, out=out) is out
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()


def test_results_are_written_in_inference_mode(attention):
    """To tensors of it, whose changes nobody counts, and to others."""
    tensors = attention.tensors()
    shape = result_of(attention, tensors)
    with torch.inference_mode():
        of_inference = torch.empty_like(shape)
    for _ in range(4):
        for out in (of_inference, torch.empty_like(shape)):
            with torch.inference_mode():
                assert attention(tensors, out=out.fill_(torch.nan)) is out
            attention.assert_out(out, tensors)
        version = out._version
        with torch.inference_mode():
            attention(tensors, out=out)
        assert out._version > version


def test_memory_that_is_shared_until_it_is_written_to_keeps_its_values(attention):
    tensors = attention.tensors()
    kept = torch.full_like(result_of(attention, tensors), 5)
    for _ in range(4):
        attention.assert_out(attention(tensors, out=torch._lazy_clone(kept)), tensors)
        assert (kept == 5).all()


def test_threads_write_their_results(attention):
    shape = result_of(attention, attention.tensors())

    def write(_):
        for _ in range(4):
            tensors, out = attention.tensors(), torch.full_like(shape, torch.nan)
            assert attention(tensors, out=out) is out
            attention.assert_out(out, tensors)
        return True

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert all(pool.map(write, range(4)))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_parts_of_a_conjugate_are_heeded(call):
    """A conjugate is negated lazily, and so is its imaginary part; a complex tensor is refused."""
    for name in call.inputs:
        tensors = call.tensors()
        if tensors[name].element_size() > 1:
            dtype = torch.float32 if tensors[name].dtype == torch.float32 else torch.float16
            tensors = {n: x.to(dtype) if x.dtype == tensors[name].dtype else x for n, x in tensors.items()}
            conjugate = torch.complex(torch.zeros_like(tensors[name]), -tensors[name]).conj()
            assert conjugate.imag.is_neg()
            with right_or_refused(f"{name}: got "):
                call.assert_out(call({**tensors, name: conjugate.imag}), tensors)
        with pytest.raises((ArgumentError, UnsupportedError), match="complex"):
            call({**tensors, name: tensors[name].to(torch.complex64).conj()})


def test_zeros_without_memory_are_zeros_or_refused(call):
    for name in call.make():
        tensors = call.tensors()
        zeros = torch._efficientzerotensor(tensors[name].shape, dtype=tensors[name].dtype)
        with right_or_refused(f"{name}: got a tensor without memory"):
            call.assert_out(call({**tensors, name: zeros}), {**tensors, name: torch.zeros_like(tensors[name])})
        call.assert_out(call(tensors), tensors)


def test_tensors_without_values_are_masks_or_refused(call):
    """PyTorch's `CausalBias` is a tensor whose memory was never written: a mask where one is read as such."""
    for name, x in call.tensors().items():
        tensors = call.tensors()
        if name in ("attn_mask", "mask") and "lse" not in tensors:  # which belongs to the other mask
            if "is_causal" in call.options:
                with pytest.raises(OptionError, match="is_causal: got one in addition to a CausalBias"):
                    call({**tensors, name: bias.causal_upper_left(9, 13)})
                continue
            lengths = tensors[call.first].shape[-2], x.shape[-1]
            for make in (bias.causal_upper_left, bias.causal_lower_right):
                mask = make(*lengths)
                call.assert_out(call({**tensors, name: mask}), {**tensors, name: mask._materialize()})
        elif name != "attn_mask":
            with pytest.raises(LayoutError, match=f"{name}: got a CausalBias"):
                call({**tensors, name: x.as_subclass(bias.CausalBias)})
        call.assert_out(call(tensors), tensors)


def test_addresses_that_cannot_be_read_are_named(call):
    tensors = call.tensors()
    for which in call.inputs:
        x = tensors[which]
        span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        whole = torch.empty(span + 1, dtype=x.dtype)
        shifted = whole[1:].as_strided(x.shape, x.stride(), 1).copy_(x)
        with right_or_refused(f"{which}: got "):  # right where it is copied anyway
            call.assert_out(call({**tensors, which: shifted}), tensors)
        call.assert_out(call(tensors), tensors)


def test_explain_refuses_the_layouts_that_a_call_refuses(attention):
    tensors, refused = attention.tensors(), []
    for name in attention.inputs[:3]:
        x = tensors[name]
        spread = torch.empty(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)[..., ::2].copy_(x)
        for wrong in (spread, moved(x, 1)):
            given = {**tensors, name: wrong}
            try:
                attention.assert_out(attention(given), given)  # of a copy, which a known call may make
            except LayoutError as error:
                refused.append(name)
                with pytest.raises(LayoutError, match=f"^{re.escape(str(error))}$"):
                    explain(attention.function, **given, **attention.options)
    assert set(refused) == set(attention.inputs[:3])


def test_tensors_on_another_device_are_named(call):
    """Before a launch, which would get an address of that device. Meta tensors are where CPU tensors are on a GPU."""
    if len(call.tensors()) == 1:
        pytest.skip("a single tensor is on no other device")
    for grad in (False, True):
        tensors = call.tensors(grad=grad)
        for name in tensors:
            FakePlan.launched.clear()
            with pytest.raises(DeviceError, match=r"expected .*(device|GPU)"):
                call({**tensors, name: tensors[name].detach().to("meta").requires_grad_(tensors[name].requires_grad)})
            assert not FakePlan.launched, f"{name} is elsewhere, and a plan was launched"
        call.assert_out(call(tensors), tensors)


def test_hooks_may_not_keep_tensors_on_another_device(call):
    """The fake GPU's plans check addresses. A gradient that needs no such tensor may be computed before the error."""
    tensors = call.tensors(grad=True)
    for name in call.differentiable:
        address, moved_away = tensors[name].data_ptr(), []

        def unpack(x, address=address, moved_away=moved_away):
            if x.is_meta or x.data_ptr() != address:
                return x
            moved_away.append(x)
            return x.to("meta")

        with saved_tensors_hooks(lambda x: x, unpack):
            out = call(tensors)
        is_refused = True
        with contextlib.suppress(DeviceError):
            out.sum().backward()
            is_refused = False
        assert is_refused == bool(moved_away), f"{name} is elsewhere, and was read"


def test_freed_storage_is_named(call):
    tensors = call.tensors()
    for name, x in tensors.items():
        for offset in (0, 64):  # the address of a view of freed storage is its offset
            size = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
            freed = torch.empty(offset + size, dtype=x.dtype).as_strided(x.shape, x.stride(), offset)
            freed.copy_(x)
            freed.untyped_storage().resize_(0)
            with pytest.raises(LayoutError, match=f"^{name}: got a tensor without memory"):
                call({**tensors, name: freed})


@pytest.mark.differentiates
def test_storage_freed_between_the_passes_is_not_read(call):
    for name in call.differentiable:
        tensors = call.tensors(grad=True)
        kept = {other: x.detach().clone() for other, x in tensors.items()}
        out, wanted = call(tensors), {other: x for other, x in tensors.items() if x.requires_grad}
        tensors[name].untyped_storage().resize_(0)
        try:
            found = torch.autograd.grad(out, list(wanted.values()), torch.ones_like(out))
        except (LayoutError, RuntimeError) as error:
            assert any(part in str(error) for part in ("without memory", "storage of size 0"))  # noqa: PT017
        else:  # no gradient depends on it, as on the bias of a norm
            call.assert_gradients(dict(zip(wanted, found, strict=True)), kept)


def test_small_tensors_may_lie_at_any_address(attention):
    tensors = attention.tensors()
    for name, x in tensors.items():
        if x.dim() == 1:
            attention.assert_out(attention({**tensors, name: moved(x, 1)}), tensors)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR tensor support is in beta")
def test_other_kinds_of_tensors_are_refused(call):
    tensors = call.tensors()
    x = tensors[call.first]
    nested = torch.nested.nested_tensor(list(x.float().unbind(0)))
    for wrong in (nested, x.float().reshape(-1, x.shape[-1]).to_sparse_csr(), x.float().to_sparse(), x.tolist(), None):
        with pytest.raises((ArgumentError, TypeError)):
            call({**tensors, call.first: wrong})
    call.assert_out(call(tensors), tensors)
    for name, x in tensors.items():
        x = x.float() if x.is_floating_point() else x  # noqa: PLW2901 - there are few sparse tensors of others
        nested = [torch.nested.nested_tensor(list(x.unbind(0)))] if x.dim() > 1 else []
        for wrong in (*nested, x.to_sparse()):
            with pytest.raises((ArgumentError, TypeError)):
                call({**tensors, name: wrong})
    call.assert_out(call(tensors), tensors)


@pytest.mark.differentiates
def test_one_tensor_may_be_several_operands(attention):
    call = attention
    tensors = call.tensors()
    tensors["v"] = tensors["k"]
    for _ in range(3):
        call.assert_out(call(tensors), tensors)
    leaf = tensors["k"].detach().clone().requires_grad_()
    given = {**tensors, "k": leaf, "v": leaf}
    for _ in range(3):
        (found,) = torch.autograd.grad(call(given).sum(), leaf)
        apart = {**given, "k": leaf.detach().requires_grad_(), "v": leaf.detach().clone().requires_grad_()}
        of_k, of_v = torch.autograd.grad(call(apart).sum(), (apart["k"], apart["v"]))
        torch.testing.assert_close(found, of_k + of_v, rtol=2e-2, atol=2e-2)


def test_other_shapes_layouts_and_dtypes_are_not_confused(attention):
    call = attention
    for change in (
        lambda x: x,
        lambda x: x.half() if x.dtype == torch.bfloat16 else x,
        lambda x: x.contiguous(),
        lambda x: x[..., :16],
        lambda x: x,
    ):
        tensors = {name: change(x) for name, x in call.tensors().items()}
        call.assert_out(call(tensors), tensors)


# Options.


def test_options_of_another_type_are_refused_after_right_ones(attention):
    tensors = attention.tensors()
    attention(tensors)
    taken = inspect.signature(attention.function).parameters
    flags = {"is_causal": 1}, {"return_lse": 0}, {"deterministic": 1}, {"alibi": 0}
    for wrong in (*flags, {"scale": "0.1"}, {"softcap": "2"}, {"dropout_p": False}, {"window_size": (-1.0, -1)}):
        if not wrong.keys() <= taken.keys():
            continue
        with pytest.raises(ArgumentError, match=next(iter(wrong))):
            attention(tensors, **wrong)


def test_tuples_nested_without_end_are_refused(attention):
    tensors, nested = attention.tensors(), ()
    for _ in range(200_000):
        nested = (nested,)
    if "window_size" in inspect.signature(attention.function).parameters:
        with pytest.raises((ArgumentError, RecursionError)):
            attention(tensors, window_size=nested)
    while nested:  # at once, they could not be freed
        (nested,) = nested


# Plans.


@pytest.mark.differentiates
def test_a_plan_may_be_evicted_between_the_passes(call):
    tensors = call.tensors(grad=True)
    out = call(tensors)
    plan_cache.clear()
    wanted = {name: x for name, x in tensors.items() if x.requires_grad}
    found = torch.autograd.grad(out, list(wanted.values()), torch.ones_like(out))
    call.assert_gradients(dict(zip(wanted, found, strict=True)), tensors)


@pytest.mark.sample(1)
@pytest.mark.parametrize("graph", ["no graph", "a graph"])
def test_evicted_plans_are_freed_at_once(example, graph):
    """Also while autograd's graph of a call is alive, which holds no plan."""
    example.warm_up()
    out = example(example.tensors(grad=True)) if graph == "a graph" else None
    witnesses = witnesses_of_plans()
    with without_collector():
        plan_cache.clear()
        assert not any(witness() for witness in witnesses)
    del out


@pytest.mark.sample(1)
@pytest.mark.differentiates
def test_evicted_plans_of_gradients_are_freed_at_once(example):
    """Also while the plan of the forward pass, and a graph of autograd's, are alive."""
    example.warm_up()
    tensors = example.tensors(grad=True)
    before = plan_cache.plans()[-1].last_used
    out = example(tensors)
    recent = sum(plan.last_used > before for plan in plan_cache.plans())
    witnesses = witnesses_of_plans()
    assert 0 < recent < len(witnesses)
    capacity = plan_cache.info().capacity
    with without_collector():
        try:
            plan_cache.resize(recent)
            alive = [witness() is not None for witness in witnesses]
            assert alive == [False] * (len(witnesses) - recent) + [True] * recent
        finally:
            plan_cache.resize(capacity)
    wanted = {name: x for name, x in tensors.items() if x.requires_grad}
    found = torch.autograd.grad(out, list(wanted.values()), torch.ones_like(out))
    example.assert_gradients(dict(zip(wanted, found, strict=True)), tensors)


class Witness(str):
    """A string of a plan's, which is freed with it: plans themselves take no weak references."""

    __slots__ = ("__weakref__",)


def witnesses_of_plans():
    """Weak references to objects that live as long as the plans in the cache, the least recently used first."""
    found = []
    for plan in plan_cache.plans():
        plan.engine = Witness(plan.engine)
        found.append(weakref.ref(plan.engine))
    return found


@contextlib.contextmanager
def without_collector():
    """Leaves no cycle to Python's garbage collector, and keeps it from running."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_captures_launch_known_plans_and_build_none(call, monkeypatch):
    tensors = call.tensors(grad=True)
    builds, is_known = plan_cache.info().builds, plan_cache.info().plans > 0
    with monkeypatch.context() as capture:
        capture.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        if is_known or not call.is_planned:
            for _ in range(3):
                call.assert_out(call(tensors), tensors)
                if call.differentiable:
                    call.assert_gradients(call.gradients(tensors), tensors)
        else:
            launched = len(FakePlan.launched)
            with pytest.raises(PlanBuildError, match="while a CUDA graph is being captured"):
                call(tensors)
            assert len(FakePlan.launched) == launched
        assert plan_cache.info().builds == builds
    call.assert_out(call(tensors), tensors)
    if call.differentiable:
        call.assert_gradients(call.gradients(tensors), tensors)


def test_threads_call_at_once(call):
    call.warm_up()

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(5):
            tensors = call.tensors(grad=True)
            for name in call.inputs if call.precision is None else ():  # others lie within the range of FP8
                with torch.no_grad():
                    tensors[name].copy_(torch.randn(tensors[name].shape, generator=generator))
            call.assert_out(call(tensors), tensors)
            if call.differentiable:
                call.assert_gradients(call.gradients(tensors), tensors)
        return True

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))

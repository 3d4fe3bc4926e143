"""The kernels that compute the gradient of sinks, run thread by thread on the CPU, against float64."""

from __future__ import annotations

import contextlib
import random
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from fake_gpu import EmulatedKernel, gpu_on_the_cpu

from cudnn_sdpa import LayoutError, sdpa
from cudnn_sdpa.attention import sink_scores

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class Given(NamedTuple):
    """The arguments of `gradient`."""

    grad_out: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    sinks: torch.Tensor
    tokens: torch.Tensor | None = None


def exact(given):
    """The gradient in float64, and for each head the sum of the sizes of all products, which bounds rounding errors."""
    grad_out, out, lse, sinks = (x.double() for x in given[:4])
    if lse.dim() == 2:  # a batch of one entry
        count = lse.shape[0] if given.tokens is None else int(given.tokens)
        grad_out, out, lse = (x[:count].transpose(0, 1).unsqueeze(0) for x in (grad_out, out, lse))
    weights = torch.where(sinks.isneginf().view(-1, 1), 0.0, torch.exp(sinks.view(-1, 1) - lse)).unsqueeze(-1)
    products = weights * grad_out * out
    return -products.sum((0, 2, 3)), products.abs().sum((0, 2, 3))


def check(found, given):
    wanted, sizes = exact(given)
    assert found.dtype == torch.float32
    assert found.shape == wanted.shape
    assert found.isfinite().all()
    errors = (found.double() - wanted).abs()
    assert (errors <= 2e-6 * sizes).all(), (errors / sizes).max()
    assert (found[sizes == 0] == 0).all()


def in_memory(r, values, dtype):
    """The values with dimensions in any order, gaps between rows, and at an address that may not be aligned."""
    kind, axes = r.choice(("plain", "any order", "gaps", "odd", "columns")), list(range(values.dim()))
    if kind == "columns":
        axes = r.sample(axes, len(axes))
    elif kind != "plain":
        axes = [*r.sample(axes[:-1], len(axes) - 1), axes[-1]]
    sizes = [values.shape[axis] for axis in axes]
    gap, first = r.choice((0, 8, 3)) if kind in ("gaps", "odd") else 0, r.choice((1, 3)) if kind == "odd" else 0
    whole = torch.full((*sizes[:-1], sizes[-1] + gap + first), torch.nan, dtype=dtype)
    part = whole[..., first : first + sizes[-1]].permute(*[axes.index(axis) for axis in range(len(axes))])
    return part.copy_(values)


def drawn(r, dtype, *, is_packed):
    batch, heads = r.choice((1, 1, 2, 5)), r.choice((1, 2, 3, 4, 8, 12, 40))
    length, dim = r.choice((1, 2, 7, 33, 70)), r.choice((1, 3, 8, 16, 20, 48, 64, 72, 128, 192, 256, 257, 320))
    shape = (length * batch, heads, dim) if is_packed else (batch, heads, length, dim)
    grad_out, out = torch.randn(shape), torch.randn(shape)
    sinks, of_heads = 3 * torch.randn(heads), (-1,) if is_packed else (-1, 1)
    sinks[torch.rand(heads) < 0.2] = -torch.inf
    lse = torch.logaddexp(sinks.view(of_heads), 5 * torch.randn(shape[:-1]))
    empty = torch.rand(lse.shape) < r.choice((0.0, 0.3, 1.0))  # rows that see no key
    lse = torch.where(empty, sinks.view(of_heads), lse)
    out = out.masked_fill(empty.unsqueeze(-1), 0.0)
    tokens = None
    if is_packed and r.random() < 0.7:
        ends = torch.tensor([0, r.choice((0, shape[0] // 2, max(0, shape[0] - 1), shape[0]))], dtype=torch.int32)
        tokens = ends[-1]
        for x in (grad_out, out, lse):
            x[int(tokens) :] = torch.nan
    of_grad_out = in_memory(r, grad_out, dtype)
    if tokens is None and r.random() < 0.2:
        of_grad_out = of_grad_out.narrow(r.randrange(len(shape)), 0, 1).expand(shape)
    strided_sinks = torch.full((2 * heads,), torch.nan)[:: r.choice((1, 2))][:heads].copy_(sinks)
    return Given(of_grad_out, in_memory(r, out, dtype), in_memory(r, lse, torch.float32), strided_sinks, tokens)


@contextlib.contextmanager
def gpu(processors=132):
    """A fake GPU with so many multiprocessors: the fewer there are, the more rows a thread has."""
    with gpu_on_the_cpu(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            torch.cuda,
            "get_device_properties",
            lambda _: SimpleNamespace(multi_processor_count=processors, uuid="fake"),
        )
        sink_scores._launch_of.cache_clear()
        yield
        sink_scores._launch_of.cache_clear()


@pytest.fixture
def launched(monkeypatch):
    """The calls that the kernels serve."""
    calls, by_kernels = [], sink_scores._gradient_by_kernels
    monkeypatch.setattr(sink_scores, "_gradient_by_kernels", lambda *given: calls.append(given) or by_kernels(*given))
    return calls


@pytest.fixture(params=[0, 1], ids=["first thread first", "last thread first"])
def order(request):
    EmulatedKernel.order = request.param
    yield
    EmulatedKernel.order = 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("seed", range(8))
def test_gradients_against_float64(seed, is_packed, dtype, launched):
    r = random.Random(f"{seed} {is_packed} {dtype}")
    for number in range(1, 5):
        given = drawn(r, dtype, is_packed=is_packed)
        with gpu(processors=r.choice((1, 2, 132))):
            found = sink_scores.gradient(*given)
            assert torch.equal(found, sink_scores.gradient(*given))
        check(found, given)
        assert len(launched) == 2 * number


@pytest.mark.parametrize("layout", ["heads before rows", "rows before heads", "packed"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_many_rows_of_a_thread(layout, dim, order, launched):  # noqa: ARG001
    """Threads go through many rows, over the ends of batch entries; or there are more than 32 sums of a head."""
    grad_out, out = torch.randn(2, 3, 8, 23, dim).bfloat16()
    lse, sinks = 2 + torch.rand(3, 8, 23), torch.randn(8)
    if layout == "rows before heads":
        grad_out, out, lse = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (grad_out, out, lse))
    if layout == "packed":
        grad_out, out, lse = (x.transpose(1, 2).flatten(0, 1) for x in (grad_out, out, lse))
    given = Given(grad_out, out, lse, sinks)
    for processors in (1, 2, 132):
        with gpu(processors):
            check(sink_scores.gradient(*given), given)
    assert len(launched) == 3


def test_each_tensor_is_read_once(order):  # noqa: ARG001
    grad_out, out = torch.randn(2, 1, 4, 300, 128).half()
    given = Given(grad_out, out, torch.ones(1, 4, 300), torch.randn(4))
    EmulatedKernel.traffic[:] = 0, 0
    with gpu():
        check(sink_scores.gradient(*given), given)
    read, written = EmulatedKernel.traffic
    size = grad_out.nbytes + out.nbytes
    assert size < read < 1.3 * size
    assert written < size / 50


def test_what_is_no_number_stays_in_its_head():
    grad_out, out = torch.randn(2, 2, 6, 9, 32)
    lse, sinks = 3 + torch.rand(2, 6, 9), torch.randn(6)
    grad_out[1, 0, 3, 7], out[0, 1, 8, 0], lse[1, 2, 4] = torch.nan, torch.inf, torch.nan
    sinks[4], lse[0, 4, 2] = -torch.inf, -torch.inf
    given = Given(grad_out, out, lse, sinks)
    wanted = sink_scores.gradient(*given)
    with gpu():
        found = sink_scores.gradient(*given)
    assert found[:3].isfinite().tolist() == [False, False, False]
    assert found[4] == 0
    torch.testing.assert_close(found, wanted, equal_nan=True)


def test_what_the_kernels_do_not_serve(launched):
    """Nothing to sum, other dtypes, and what PyTorch's dispatcher must see."""
    lse, sinks = torch.ones(2, 3, 5), torch.zeros(3)
    grad_out, out = torch.randn(2, 2, 3, 5, 8)
    wanted = sink_scores.gradient(grad_out, out, lse, sinks)
    with gpu():
        for shape in ((0, 3, 5, 8), (2, 3, 0, 8), (2, 3, 5, 0)):
            empty = torch.randn(shape)
            assert torch.equal(sink_scores.gradient(empty, empty, torch.ones(shape[:-1]), sinks), torch.zeros(3))
        for given in (
            (grad_out.double(), out.double(), lse, sinks),
            (grad_out, out.double(), lse, sinks),
            (torch._neg_view(-grad_out), out, lse, sinks),
        ):
            torch.testing.assert_close(sink_scores.gradient(*given).float(), wanted)
        freed = torch.zeros(3)
        freed.untyped_storage().resize_(0)
        with pytest.raises(LayoutError, match="without memory"):
            sink_scores.gradient(grad_out, out, lse, freed)
    assert not launched


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"softcap": 3.0}, {"seq_lens_kv": True}], ids=str)
def test_whole_backward_passes(options, launched):
    q, k, v = (torch.randn(2, heads, 9, 16).half().requires_grad_() for heads in (4, 2, 2))
    sinks, grad_out = torch.randn(4).requires_grad_(), torch.randn(2, 4, 9, 16).half()
    if options.pop("seq_lens_kv", False):
        options["seq_lens_kv"] = torch.tensor([0, 6], dtype=torch.int32)
    (wanted,) = torch.autograd.grad(sdpa(q, k, v, sinks=sinks, **options), sinks, grad_out)
    assert not launched
    with gpu():
        out = sdpa(q, k, v, sinks=sinks, **options)
        for _ in range(2):
            (found,) = torch.autograd.grad(out, sinks, grad_out, retain_graph=True)
            torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
    assert len(launched) == 2

"""What may go wrong between ranks, as functions that each rank runs."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import os
import re
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import cudnn_sdpa
import cudnn_sdpa.distributed.all_gather as by_gathering
import cudnn_sdpa.distributed.ring as by_passing_on
import cudnn_sdpa.distributed.ulysses as by_exchange
from cudnn_sdpa import ArgumentError, UnsupportedError, nn
from cudnn_sdpa.attention.flash4 import installed as flash4
from cudnn_sdpa.attention.frontend import installed as frontend
from cudnn_sdpa.distributed import (
    context_parallel,
    context_parallel_varlen,
    gradient_checks,
    parallel_attention,
    shard,
    unshard,
)
from cudnn_sdpa.engine import cpu_target, value_checks
from cudnn_sdpa.offline.installation import Installed

BY_METHOD = {"all_gather": by_gathering, "ring": by_passing_on, "ulysses": by_exchange}


def parts(tokens: int = 8, heads: tuple[int, int] = (4, 2), *, grad: bool = False) -> list[torch.Tensor]:
    """This rank's queries, keys and values of random numbers that all ranks draw."""
    ranks = dist.get_world_size()
    drawn = [torch.randn(1, number, tokens * ranks, 16) for number in (heads[0], heads[1], heads[1])]
    return [shard(x, 2).requires_grad_(grad) for x in drawn]


def parts_of_rows(heads: tuple[int, int] = (4, 2), *, grad: bool = False) -> list[torch.Tensor]:
    """The same of packed sequences."""
    rows = [x[0].transpose(0, 1).contiguous() for x in parts(heads=heads)]
    return [x.requires_grad_(grad) for x in rows]


def still_works() -> None:
    q, k, v = parts()
    assert context_parallel(q, k, v, is_causal=True).shape == q.shape


def refusals() -> int:
    """Wrong arguments, equal on all ranks: each says what is wrong."""
    q, k, v = parts()
    packed = [torch.randn(8, n, 16) for n in (4, 2, 2)]
    offsets = torch.tensor([0, 16]).int()
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (q[:, :, :7], {}, "q: got shape .*even, positive number of tokens.*Pad the sequence to a multiple of 4"),
        (q, {"method": "tree"}, "method: got 'tree'; expected 'all_gather' or 'ulysses' or 'ring'"),
        (q, {"group": 3}, "group: got int"),
        (q, {"is_causal": 1}, "is_causal: got 1"),
        (q, {"return_lse": 1}, "return_lse: got 1"),
        (q, {"window_size": 3}, "window_size: got 3"),
        (q, {"sinks": torch.ones(3)}, "sinks: got"),
        (q.double(), {}, "k: got float32; expected float64"),
        (q.bfloat16().to("meta"), {}, "k: got float32; expected bfloat16"),
        (None, {}, "q: got NoneType"),
    ]
    for given, options, message in cases:
        rows = k[:, :, :7] if isinstance(given, torch.Tensor) and given.shape[2] == 7 else k
        columns = v[:, :, :7] if rows.shape[2] == 7 else v
        with pytest.raises(ArgumentError, match=message):
            context_parallel(given, rows, columns, **options)
        still_works()
    with pytest.raises(ArgumentError, match=r"k: got shape .*8 tokens, as q has"):
        context_parallel(q, k[:, :, :6], v[:, :, :6])
    for wrong, message in (
        ((offsets.long(), 16), "cu_seqlens: got int64"),
        ((None, 16), "cu_seqlens: got NoneType"),
        ((offsets, torch.tensor(16)), "max_seqlen: got"),
        ((offsets, -1), "max_seqlen: got -1"),
    ):
        with pytest.raises(ArgumentError, match=message):
            context_parallel_varlen(*packed, *wrong)
    with pytest.raises(ArgumentError, match=r"x: got shape .*multiple of 4.*Pad it by 2"):
        shard(torch.ones(6), 0)
    with pytest.raises(ArgumentError, match="dim: got 3"):
        shard(torch.ones(8), 3)
    with pytest.raises(ArgumentError, match="x: got list"):
        unshard([1.0], 0)
    apart = DeviceMesh("cpu", [0])
    if dist.get_rank() == 0:
        assert context_parallel(q, k, v, group=apart).shape == q.shape
    else:
        with pytest.raises(ArgumentError, match="group: got a mesh without this process"):
            context_parallel(q, k, v, group=apart)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for placement in (Replicate(), Shard(0)):
        tokens = distribute_tensor(torch.arange(8), mesh, [placement])
        with pytest.raises(ArgumentError, match=r"x: got a DTensor; expected .*whole sequence.*x\.full_tensor"):
            shard(tokens, 0)
        with pytest.raises(ArgumentError, match=r"x: got a DTensor; expected this rank's part.*x\.to_local"):
            unshard(tokens, 0)
    still_works()
    return len(cases)


def kernels_refuse(method: str) -> list[str]:
    """A refusal in the middle, forward and backward, on all ranks: no message of it reaches a later call."""
    found = []
    q, k, v = parts(tokens=16, heads=(4, 4), grad=True)
    wanted = torch.autograd.grad(context_parallel(q, k, v, method=method, is_causal=True).square().sum(), (q, k, v))
    for name in ("attend", "attend_backward"):
        whole = getattr(BY_METHOD[method], name)
        calls = iter(range(100))

        def refusing(*arguments: Any, whole: Any = whole, calls: Any = calls, **tensors: Any) -> Any:
            if next(calls) == 1:  # the second part
                raise UnsupportedError("this shape", ["no kernel has it"], "another")
            return whole(*arguments, **tensors)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BY_METHOD[method], name, refusing)
            for groups in (by_gathering, by_exchange):
                patch.setattr(groups, "MIN_BYTES", 1)
            patch.setattr(by_exchange, "MAX_DENSE_GROUPS", 2)
            with pytest.raises(UnsupportedError, match="no kernel has it") as refused:
                context_parallel(q, k, v, method=method, is_causal=True).sum().backward()
        found.append(str(refused.value))
        for _ in range(3):
            out = context_parallel(q, k, v, method=method, is_causal=True)
            torch.testing.assert_close(torch.autograd.grad(out.square().sum(), (q, k, v)), wanted)
    return found


def wrong_packings() -> list[str]:
    """Values of offsets that are wrong for all tokens, whatever a rank's part of them is."""
    packed = parts_of_rows()
    refused = []
    for offsets, max_seqlen, message in (
        ([0, 5, 16], 4, "max_seqlen: got 4; expected at least 11"),
        ([0, 6, 16], 8, "max_seqlen: got 8; expected at least 10"),
        ([0, 5, 20], 15, "cu_seqlens: got offsets from 0 to 20; expected from 0 to no more than 16"),
        ([2, 9, 16], 9, "cu_seqlens: got offsets from 2 to 16"),
        ([0, 9, 5, 16], 11, "cu_seqlens: got offsets that decrease, from 9 to 5"),
        ([0, -3, 16], 16, "cu_seqlens: got offsets that decrease, from 0 to -3"),
    ):
        for method in BY_METHOD:
            with pytest.raises(ArgumentError, match=message) as error:
                context_parallel_varlen(*packed, torch.tensor(offsets).int(), max_seqlen, method=method)
            refused.append(str(error.value))
    still_works()
    return refused


def gradients_without_kernels() -> list[str]:
    """Gradients that one of the ranks has no kernel for: all refuse the forward call, and name a method that can."""
    found = []
    target = cpu_target.active()
    assert target is not None
    with pytest.MonkeyPatch.context() as patch:  # it crashes for one batch, head and query
        patch.setattr(cpu_target, "active", lambda: dataclasses.replace(target, cudnn=92800))
        patch.setattr(gradient_checks, "known", set())
        single = parts(tokens=2, heads=(1, 1), grad=True)
        pair = parts(tokens=2, heads=(2, 2), grad=True)
        patch.setattr(by_gathering, "MIN_BYTES", 1)  # one head at a time
        for tensors, method in ((single, "ring"), (pair, "all_gather")):
            with pytest.raises(UnsupportedError, match=r"gradient of context_parallel by.*method") as refused:
                context_parallel(*tensors, method=method, is_causal=True)
            assert "one batch, head and query" in refused.value.reasons[0]
            found.append(refused.value.suggestion)
            still_works()
            with torch.no_grad():
                context_parallel(*tensors, method=method, is_causal=True)
        context_parallel(*pair, method=found[-1].split('"')[1], is_causal=True).sum().backward()
    rows, offsets = parts_of_rows(grad=True), torch.tensor([0, 5, 16]).int()
    with cudnn_sdpa.cpu_checks("a100,any-dtype"):
        for method in BY_METHOD:
            with pytest.raises(UnsupportedError, match=r"gradient of context_parallel_varlen by.*method") as refused:
                context_parallel_varlen(*rows, offsets, 11, method=method, is_causal=True)
            assert refused.value.reasons == ["on SM 80 there are no gradients of packed sequences"]
            found.append(refused.value.suggestion)
            context_parallel_varlen(*(x.detach() for x in rows), offsets, 11, method=method, is_causal=True)
            with cudnn_sdpa.fallback("torch"):
                out = context_parallel_varlen(*rows, offsets, 11, method=method, is_causal=True)
            out.sum().backward()
        with pytest.raises(UnsupportedError) as refused:
            context_parallel(*parts(grad=True), softcap=3.0)
        found.append(refused.value.suggestion)
    still_works()
    return found


def calls_of_gradients(method: str) -> list[tuple[set[Any], set[Any]]]:
    """The calls of this rank's backward pass, and those that its forward pass checks."""
    dense, rows = parts(heads=(4, 4), grad=True), parts_of_rows((4, 4), grad=True)
    dense[1] = torch.stack([dense[1].detach()] * 2, -1)[..., 0].requires_grad_()  # copied first
    module, offsets, found = BY_METHOD[method], torch.tensor([0, 5, 16]).int(), []

    def kind(part: Any, *tensors: torch.Tensor) -> Any:
        return part.is_causal, part.window, part.queries == part.keys, *((x.shape, x.stride()) for x in tensors)

    windows = [None] if method == "ring" else [None, (3, 0)]
    for is_packed, is_causal, window in itertools.product((True, False), (True, False), windows):
        made, checked, whole = set(), set(), module.attend_backward

        def noting(options: Any, part: Any, given: Any, inputs: Any, *, made: Any = made, whole: Any = whole) -> Any:
            made.add(kind(part, *inputs.qkv))
            return whole(options, part, given, inputs)

        def checking(options: Any, inputs: Any, *, checked: Any = checked) -> Any:
            checked.update(kind(part, *given.qkv) for part, given in module.calls(options, inputs))
            return iter(())

        common = {"method": method, "is_causal": is_causal, "window_size": window}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "attend_backward", noting)
            patch.setitem(gradient_checks.CALLS, method, checking)
            patch.setattr(gradient_checks, "known", set())
            for groups in (by_gathering, by_exchange):
                patch.setattr(groups, "MIN_BYTES", 1)
            patch.setattr(by_exchange, "MAX_DENSE_GROUPS", 2)
            if is_packed:
                context_parallel_varlen(*rows, offsets, 11, **common).sum().backward()
            else:
                context_parallel(*dense, **common).sum().backward()
        found.append((made, checked))
    return found


def strides() -> int:
    """Queries that no kernel reads are refused before anything is sent; keys and values are copied anyway."""
    q, k, v = parts()
    apart = torch.stack([q, q], -1)[..., 0]
    for method in ("all_gather", "ring"):
        with pytest.raises(ArgumentError, match="q: got stride 2 in the last dimension"):
            context_parallel(apart, k, v, method=method)
        rows = [x[0].transpose(0, 1) for x in (apart, k, v)]
        with pytest.raises(ArgumentError, match="q: got stride 2 in the last dimension"):
            context_parallel_varlen(*rows, torch.tensor([0, 16]).int(), 16, method=method)
    wanted = context_parallel(q, k, v, is_causal=True)
    other = [torch.stack([x, x], -1)[..., 0] for x in (k, v)]
    torch.testing.assert_close(context_parallel(q, *other, is_causal=True), wanted)
    torch.testing.assert_close(context_parallel(apart, *other, is_causal=True, method="ulysses"), wanted)
    return 2


def keys_that_no_kernel_reads(method: str) -> float:
    """On one rank keys have strides, on the other one values an address: as if both were contiguous."""
    q, k, v = parts(grad=True)
    wanted = context_parallel(q, k, v, is_causal=True, method=method)
    if dist.get_rank() == 0:
        k = k.detach().transpose(2, 3).contiguous().transpose(2, 3).requires_grad_()
    else:
        v = torch.cat([torch.zeros(1), v.detach().flatten()])[1:].view_as(v).requires_grad_()
    out = context_parallel(q, k, v, is_causal=True, method=method)
    torch.testing.assert_close(out, wanted)
    found = torch.autograd.grad(out.square().sum(), (q, k, v), create_graph=True)
    assert all(x.requires_grad for x in found)
    q, k, v = (x.detach().contiguous().clone().requires_grad_() for x in (q, k, v))
    out = context_parallel(q, k, v, is_causal=True, method=method)
    exact = torch.autograd.grad(out.square().sum(), (q, k, v))
    return float(torch.cat([(x - y).detach().flatten() for x, y in zip(found, exact, strict=True)]).abs().max())


def complex_parts() -> list[torch.dtype]:
    """The gradient of the whole is that of its part, of any dtype."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    compared = []
    for dtype in (torch.complex64, torch.complex128, torch.float64, torch.bfloat16):
        whole, weights = torch.randn(2, 8, dtype=dtype), torch.randn(2, 8, dtype=dtype)
        part = shard(whole, 1).requires_grad_()
        (unshard(part, 1) * weights * (rank + 1)).sum().abs().backward()
        exact = whole.clone().requires_grad_()
        sum((exact * weights * (other + 1)).sum().abs() for other in range(ranks)).backward()
        compared.append(part.grad.dtype)
        torch.testing.assert_close(part.grad, shard(exact.grad, 1))
        assert torch.equal(unshard(part.detach().conj(), 1), whole.conj())
    return compared


def suggestions() -> int:
    """What a method cannot do names one that can, which works."""
    q, k, v = parts()
    packed = [torch.randn(8, n, 16) for n in (4, 2, 2)]
    offsets = torch.tensor([0, 5, 16]).int()
    cases: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (context_parallel, (q, k, v), {"method": "ring", "window_size": (3, 0), "is_causal": True}),
        (context_parallel, (q, k, v), {"method": "ring", "dropout_p": 0.1}),
        (context_parallel, (q[:, :3], k[:, :1], v[:, :1]), {"method": "ulysses"}),
        (context_parallel_varlen, (*packed, offsets, 11), {"method": "ring", "window_size": (3, 0), "is_causal": True}),
        (context_parallel_varlen, (*packed, offsets, 11), {"method": "all_gather", "window_size": (3, 2)}),
        (context_parallel_varlen, (*packed, offsets, 11), {"method": "ring", "window_size": (3, -1)}),
        (context_parallel_varlen, (*packed, offsets, 11), {"dropout_p": 0.1, "is_causal": True}),
        (context_parallel_varlen, (*packed, offsets, 11), {"dropout_p": 0.1, "window_size": (4, 0)}),
        (context_parallel_varlen, (*packed, offsets, 11), {"dropout_p": 0.1, "is_causal": True, "method": "ring"}),
        (context_parallel_varlen, (*packed, offsets, 11), {"dropout_p": 0.1, "method": "ring"}),
    ]
    for function, tensors, options in cases:
        with pytest.raises(UnsupportedError) as refused:
            function(*tensors, **options)
        named = re.fullmatch(r'method="(\w+)"', refused.value.suggestion)
        assert named, refused.value.suggestion
        inputs = [x.detach().requires_grad_() for x in tensors[:3]]
        out = function(*inputs, *tensors[3:], **{**options, "method": named[1]})
        assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), inputs))
    heads = [torch.randn(8, n, 16) for n in (3, 1, 1)]
    with pytest.raises(UnsupportedError, match="fewer ranks"):
        context_parallel_varlen(*heads, offsets, 11, window_size=(3, 2))
    with pytest.raises(UnsupportedError, match="no dropout"):
        context_parallel_varlen(*heads, offsets, 11, is_causal=True, dropout_p=0.1)
    for least in ({"softcap": 3.0, "is_causal": True}, {"softcap": 3.0, "window_size": (3, 0)}, {}):
        assert context_parallel_varlen(*packed, offsets, 11, dropout_p=0.1, **least).isfinite().all()
    single = torch.arange(17).int()
    assert context_parallel_varlen(*packed, single, 1, dropout_p=0.1, is_causal=True).isfinite().all()
    with cudnn_sdpa.fallback("torch"):
        assert context_parallel_varlen(*packed, offsets, 11, dropout_p=0.1, is_causal=True).isfinite().all()
    return len(cases)


def disagreements() -> list[str]:
    """Ranks that call otherwise: an error on each, at once."""
    rank, found = dist.get_rank(), []
    q, k, v = parts()
    sinks = torch.ones(4)
    longer = parts(tokens=12)
    for mine in (
        (longer if rank else [q, k, v], {}),
        ([q, k, v], {"is_causal": bool(rank), "softcap": 5.0}),
        ([q, k, v], {"scale": 0.5 + rank}),
        ([q, k, v], {"sinks": sinks if rank else None}),
        ([q, k, v], {"method": "ring" if rank else "all_gather", "softcap": 2.0}),
        ([x.double() for x in (q, k, v)] if rank else [q, k, v], {"softcap": 3.0}),
        ([q.detach().requires_grad_(rank == 1), k, v], {"softcap": 4.0}),
    ):
        begin = time.monotonic()
        with pytest.raises(ArgumentError, match="otherwise than rank") as refused:
            context_parallel(*mine[0], **mine[1])
        assert time.monotonic() - begin < 10
        found.append(str(refused.value))
        still_works()
    with (
        cudnn_sdpa.providers("cudnn", *["own"] * rank),
        pytest.raises(ArgumentError, match="otherwise than rank") as refused,
    ):
        context_parallel(q, k, v, softcap=6.0)
    found.append(str(refused.value))
    still_works()
    for name, library in (("fa4", flash4), ("frontend", frontend)):
        with pytest.MonkeyPatch.context() as patch, cudnn_sdpa.providers(name, "cudnn"):
            still_works()
            patch.setattr(library, "installed", lambda: Installed(f"1.{rank} and its files", ""))
            with pytest.raises(ArgumentError, match="otherwise than rank") as refused:
                context_parallel(q, k, v, softcap=6.0)
        found.append(str(refused.value))
        still_works()
    return found


def agreed_kinds(method: str) -> list[str]:
    """Kinds of calls that ranks agreed on, but not at a time: under `CUDNN_SDPA_DEBUG`, an error on each rank."""
    found: list[str] = []
    short, longer = parts(tokens=8, heads=(4, 4)), parts(tokens=16, heads=(4, 4))
    kinds: list[tuple[Any, dict[str, Any]]] = [
        (short, {}),
        (longer, {}),
        (short, {"is_causal": True}),
        (short, {"softcap": 7.0}),
        (short, {"return_lse": True, "scale": 0.5}),
    ]
    for tensors, options in kinds * 2:
        context_parallel(*tensors, method=method, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(value_checks, "enabled", True)
        found += _disagreements_of_known_kinds(kinds, method)
    still_works()
    return found


def _disagreements_of_known_kinds(kinds: list[tuple[Any, dict[str, Any]]], method: str) -> list[str]:
    rank, short, found = dist.get_rank(), kinds[0][0], []
    for other in (1, 2, 3, 4):
        tensors, options = kinds[other if rank else 0]
        begin = time.monotonic()
        with pytest.raises(ArgumentError, match="otherwise than rank") as refused:
            context_parallel(*tensors, method=method, **options)
        assert time.monotonic() - begin < 10
        found.append(str(refused.value))
        still_works()
    for scale in ("wide", 0.5):  # one rank refuses, where the others repeat an agreed kind
        wrong = scale == "wide" if rank else scale != "wide"
        message = "scale: got str" if wrong else f"rank {1 - rank} refused this call of context_parallel.*scale"
        with pytest.raises(ArgumentError, match=message):
            context_parallel(*short, method=method, scale="wide" if wrong else 0.5, return_lse=True)
    return found


def one_refuses() -> str:
    """A rank whose own arguments are wrong tells the others."""
    q, k, v = parts(tokens=6)
    message = "scale: got str" if dist.get_rank() == 1 else "rank 1 refused this call of context_parallel.*scale"
    with pytest.raises(ArgumentError, match=message) as refused:
        context_parallel(q, k, v, scale="wide" if dist.get_rank() == 1 else 0.1)
    still_works()
    return str(refused.value)


def one_is_absent() -> str:
    """The others wait as long as the group's timeout says, and no longer; it is told when it comes."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    q, k, v = parts(tokens=10)
    message = "no answer of rank 1 of 2"
    if dist.get_rank() == 1:
        dist.barrier()
        message = f"rank 0 refused this call of context_parallel.*{message}"  # whose record says so
    with pytest.raises(ArgumentError, match=message) as refused:
        context_parallel(q, k, v, group=group)
    if dist.get_rank() == 0:
        dist.barrier()
    context_parallel(q, k, v, group=group)
    return str(refused.value)


def one_dies(method: str, *, has_arrived: bool) -> None:
    """Before a call that ranks have agreed about, or once it has come to it, and the other waits in a collective."""
    q, k, v = parts(tokens=4)
    context_parallel(q, k, v, method=method)
    _set_pg_timeout(timedelta(seconds=1), dist.group.WORLD)
    if dist.get_rank() == 1:
        if not has_arrived:
            os._exit(7)
        parallel_attention.METHODS[method] = lambda *_, **__: os._exit(7)
    try:
        context_parallel(q, k, v, method=method)
    except (RuntimeError, ArgumentError) as error:
        raise LookupError("the other rank was told") from error


def second_gradients(method: str) -> None:
    """First gradients may have a graph, which raises."""
    q, k, v = parts(grad=True)
    out = context_parallel(q, k, v, method=method, is_causal=True)
    for loss in (out.square().sum(), out.sum()):  # whose gradient of the output requires grad, or does not
        (plain,) = torch.autograd.grad(loss, q, retain_graph=True)
        (gradient,) = torch.autograd.grad(loss, q, create_graph=True)
        torch.testing.assert_close(gradient, plain)
        assert gradient.requires_grad
        with pytest.raises(UnsupportedError, match="double backward"):
            torch.autograd.grad(gradient.sum(), q, retain_graph=True)


class Cut(torch.autograd.Function):
    """The identity, without a gradient on the second rank."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, grad: torch.Tensor) -> torch.Tensor | None:
        return None if dist.get_rank() == 1 else grad


def results_are_as_of_one_process(method: str) -> None:
    """They are no views, and a rank whose output has no gradient sends zeros' gradients."""
    q, k, v = parts(grad=True)
    out, lse = context_parallel(q, k, v, method=method, is_causal=True, return_lse=True)
    assert lse.is_contiguous()
    assert all(x.isfinite().all() for x in torch.autograd.grad(Cut.apply(out).sum(), (q, k, v), retain_graph=True))
    with torch.no_grad():
        wanted = out + 1
    out += 1
    torch.testing.assert_close(out, wanted)


def gradients_of_lse(method: str) -> None:
    q, k, v = parts(grad=True)
    rows = [torch.randn(8, n, 16, requires_grad=True) for n in (4, 2, 2)]
    offsets = torch.tensor([0, 5, 16]).int()
    for dropout_p in (0.0,) if method == "ring" else (0.0, 0.1):
        common: dict[str, Any] = {"method": method, "return_lse": True, "dropout_p": dropout_p}
        dense = context_parallel(q, k, v, **common)
        packed = context_parallel_varlen(*rows, offsets, 11, is_causal=not dropout_p, **common)
        for (out, lse), given in ((dense, q), (packed, rows[0])):
            assert torch.autograd.grad(out.sum(), given, retain_graph=True)[0].isfinite().all()
            for loss in (out.sum() + lse.sum(), lse.sum()):
                with pytest.raises(UnsupportedError, match="LSE"):
                    torch.autograd.grad(loss, given, retain_graph=True)
            with torch.no_grad():
                assert not context_parallel(q, k, v, **common)[1].requires_grad


def other_differentiation() -> list[str]:
    """The errors of transforms that ranks cannot follow."""
    q, k, v = parts()
    found = []
    for transformed in (
        lambda: torch.func.grad(lambda q: context_parallel(q, k, v).sum())(q),
        lambda: torch.vmap(lambda q: context_parallel(q, k, v))(q.unsqueeze(0)),
    ):
        with pytest.raises(UnsupportedError) as caught:
            transformed()
        found.append(str(caught.value))
    still_works()
    return found


def checkpoints(method: str) -> None:
    q, k, v = parts(grad=True)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return context_parallel(q, k, v, method=method, is_causal=True)

    wanted = torch.autograd.grad(run(q, k, v).square().sum(), (q, k, v))
    found = torch.autograd.grad(checkpoint(run, q, k, v, use_reentrant=False).square().sum(), (q, k, v))
    torch.testing.assert_close(found, wanted)


def compiled(method: str) -> float:
    q, k, v = parts(grad=True)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return context_parallel(q * 2, k, v, method=method, is_causal=True) * 3

    wanted = run(q, k, v)
    out = torch.compile(run, backend="aot_eager")(q, k, v)
    torch.testing.assert_close(out, wanted)
    (found,), (exact,) = (torch.autograd.grad(x.sum(), q) for x in (out, wanted))
    torch._dynamo.reset()
    return float((found - exact).abs().max())


def autocast(method: str) -> None:
    q, k, v = parts(grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = context_parallel(q, k, v, method=method, is_causal=True)
    assert out.dtype == torch.bfloat16
    exact = context_parallel(q, k, v, method=method, is_causal=True)
    assert (out.float() - exact).norm() < 2e-2 * exact.norm()
    found, wanted = (torch.autograd.grad(x.float().sum(), k)[0] for x in (out, exact))
    assert found.dtype == torch.float32
    assert (found - wanted).norm() < 3e-2 * wanted.norm()
    with torch.autocast("cpu", torch.bfloat16):
        out = context_parallel(q, k, v, method=method, is_causal=True)
    for dtype in (torch.bfloat16, torch.float16):  # of a backward pass, where "all_gather" raised
        with torch.autocast("cpu", dtype):
            (inside,) = torch.autograd.grad(out.float().sum(), k, retain_graph=True)
        assert torch.equal(inside, found)


def falls_back(method: str) -> None:
    """Head dims that no GPU takes, forward and backward, under a fallback alone."""
    q, k, v = (x[..., :5].detach().requires_grad_() for x in parts())
    with cudnn_sdpa.cpu_checks("h200,any-dtype"):
        with pytest.raises(ArgumentError, match="head dim 5"):
            context_parallel(q, k, v, method=method)
        with cudnn_sdpa.fallback("torch"):
            out = context_parallel(q, k, v, method=method)
        assert torch.autograd.grad(out.sum(), k)[0].isfinite().all()


def dropout(method: str) -> float:
    """The share of weights that is kept, and the gradient of the values for the same random numbers."""
    torch.manual_seed(100 + dist.get_rank())
    ranks = dist.get_world_size()
    tokens, dim = 32 * ranks, 32 * ranks
    q, k = (torch.zeros(1, 4, tokens // ranks, 8) for _ in "qk")
    v = shard(torch.eye(tokens).view(1, 1, tokens, dim).expand(1, 4, tokens, dim).contiguous(), 2).requires_grad_()
    out = context_parallel(q, k, v, method=method, dropout_p=0.25)
    kept = (out > 0).float()
    torch.testing.assert_close(out, kept / (0.75 * tokens))
    (gradient,) = torch.autograd.grad(out.sum(), v)
    received = unshard(gradient, 2).sum((2, 3)) / dim  # of all keys, for the sum of all queries' weights
    weights = kept.sum((2, 3)) / (0.75 * tokens)
    dist.all_reduce(weights)
    torch.testing.assert_close(received, weights)
    return float(kept.mean())


def special_tensors() -> dict[str, float]:
    """Largest errors with negative bits, gradients that are zeros without memory, and in inference mode."""
    q, k, v = parts(grad=True)
    out = context_parallel(q, k, v, is_causal=True)
    negative = context_parallel(torch._neg_view(-q.detach()), torch._neg_view(-k.detach()), v, is_causal=True)
    (of_zeros,) = torch.autograd.grad(out, k, torch._efficientzerotensor(out.shape), retain_graph=True)
    grad = torch.randn(out.shape)
    (of_negative,) = torch.autograd.grad(out, v, torch._neg_view(-grad), retain_graph=True)
    (of_plain,) = torch.autograd.grad(out, v, grad)
    with torch.inference_mode():
        inferred = context_parallel(q, k, v, is_causal=True)
        pairs = {
            "negative bits": (negative, out),
            "zeros without memory": (of_zeros, torch.zeros_like(of_zeros)),
            "a gradient with a negative bit": (of_negative, of_plain),
            "inference mode": (inferred, out),
        }
        return {name: float((found - wanted).abs().max()) for name, (found, wanted) in pairs.items()}


def module(method: str) -> None:
    """`nn.Attention` with a group is the same layer on a part of the tokens."""
    rope = nn.RotaryEmbedding(8)
    options = {"num_kv_heads": 2, "is_causal": True, "rope": rope, "sinks": True}
    whole = nn.Attention(32, 4, **options)
    torch.nn.init.normal_(whole.sinks)
    parallel = nn.Attention(32, 4, **options, cp_group=dist.group.WORLD, cp_method=method)
    parallel.load_state_dict(whole.state_dict())
    copied = copy.deepcopy(torch.nn.Sequential(parallel, parallel))[0]
    x = torch.randn(2, 8 * dist.get_world_size(), 32)
    exact = whole(x)
    exact.square().sum().backward()
    out = parallel(shard(x, 1))
    torch.testing.assert_close(out, shard(exact.detach(), 1))
    assert copied.cp_group is parallel.cp_group
    assert torch.equal(copied(shard(x, 1)), out)
    assert copied.qkv_proj.weight is not parallel.qkv_proj.weight
    out.square().sum().backward()
    for name, parameter in parallel.named_parameters():
        dist.all_reduce(parameter.grad)
        torch.testing.assert_close(parameter.grad, whole.get_parameter(name).grad, msg=name, rtol=1e-4, atol=1e-4)
    for wrong in ({"attn_mask": torch.ones(4, 4, dtype=torch.bool)}, {"seq_lens": torch.tensor([4, 4]).int()}):
        with pytest.raises(UnsupportedError, match="cp_group"):
            parallel(shard(x, 1), **wrong)

"""Pages in FP8, for which PyTorch has few kernels on a GPU; it indexes and masks their bits instead."""

from __future__ import annotations

from typing import Any

import generators
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cudnn_sdpa import PagedKVCache
from cudnn_sdpa.attention.paged import reference as paged
from cudnn_sdpa.attention.paged_varlen import reference as paged_varlen

FP8 = torch.float8_e4m3fn, torch.float8_e5m2

#: What PyTorch does with FP8 on a GPU, besides views: it makes, fills, copies and converts tensors.
HAS = {"zeros", "zero_", "fill_", "clone", "copy_", "_to_copy", "new_zeros", "_unsafe_view"}


class FewKernels(TorchDispatchMode):
    """Refuses what PyTorch lacks kernels for on a GPU, in one of its versions; notes what has FP8 operands.

    It does not look into the library's operators, which are kernels of its own there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        is_own = func.namespace == "cudnn_sdpa"
        if any(x.dtype in FP8 for x in tensors) and not (func.is_view or is_own or name.startswith("empty")):
            self.seen.add(name)
            if name not in HAS:
                raise NotImplementedError(f'"{name}_cuda" not implemented for FP8')
        return func(*args, **(kwargs or {}))


def test_few_kernels_refuse_what_they_should():
    x, at = torch.zeros(3, 4).to(FP8[0]), torch.zeros(1, dtype=torch.int64)
    with FewKernels():
        for wrong in (lambda: x[at], lambda: x.index_copy_(0, at, x[:1]), lambda: torch.cat([x, x]), x.isnan):
            with pytest.raises(NotImplementedError, match="not implemented for FP8"):
                wrong()
        assert x[1].float().sum() == 0


def test_the_reference_gathers_their_bits():
    pages = torch.randn(5, 2, 3, 8).to(FP8[1])
    table = torch.tensor([4, 0, 2], dtype=torch.int32)
    wanted = pages.float()[table].transpose(1, 2).flatten(0, 1)
    with FewKernels():
        whole = paged.gathered(pages, table.unsqueeze(0), torch.tensor([8]))
        part = paged_varlen.gathered(pages, table, slice(2, 8))
    assert whole.dtype == FP8[1]
    assert torch.equal(whole[0].float()[:, :8], wanted.transpose(0, 1)[:, :8])
    assert not whole[0].float()[:, 8:].any()
    assert torch.equal(part[0].float(), wanted.transpose(0, 1)[:, 2:8])


@pytest.mark.parametrize(
    ("name", "seeds"),
    [("PagedKVCache", range(10, 20)), ("append_paged_kv", range(10)), ("sdpa_paged_varlen", range(10))],
)
def test_calls_need_few_kernels_of_fp8(name, seeds):
    with FewKernels() as mode:
        for seed in seeds:
            outcome = generators.attempt(name, seed)
            assert outcome.kind in ("right", "declined"), (seed, outcome)
    assert mode.seen


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("page_layout", ["HND", "NHD"])
def test_pages_of_a_fork_are_copied(dtype, page_layout):
    with FewKernels():
        cache = PagedKVCache(
            pages=8,
            page_size=4,
            heads=2,
            head_dim=16,
            head_dim_v=32,
            layers=2,
            dtype=dtype,
            device="cpu",
            page_layout=page_layout,
            k_scale=torch.tensor(0.4),
        )
        one = cache.add()

        def append(sequence: int, tokens: int) -> None:
            step = cache.reserve([sequence], tokens)
            for layer in range(2):
                cache.append(step, torch.randn(1, 2, tokens, 16).half(), torch.randn(1, 2, tokens, 32).half(), layer)

        append(one, 6)
        before = [x.float() for layer in range(2) for x in cache.read(one, layer)]
        two = cache.fork(one)
        append(two, 3)
        found = [x for layer in range(2) for x in cache.read(one, layer)]
        copied = [x for layer in range(2) for x in cache.read(two, layer)]
    assert {x.dtype for x in found} == {dtype}
    for old, own, other in zip(before, found, copied, strict=True):
        assert old.any()
        assert torch.equal(own.float(), old)
        assert other.shape[1] == 9
        assert torch.equal(other[:, :6].float(), old)

"""`attention/paged_varlen/paged.cu` on the fake GPU: what its kernels compute of their argument, in float64.

The argument is read as the source declares it, so a field in another place, a wrong stride or a wrong address is a
wrong number. How the kernels divide their work is for tests on a GPU.
"""

from __future__ import annotations

import math
import struct
from array import array
from typing import Any

import torch
from float64_reference import attend_packed_on_pages
from torch import Tensor

from cudnn_sdpa.graph.layouts import TensorLayout
from cudnn_sdpa.plans import nvrtc
from cudnn_sdpa.plans.autotune import tensor_at

_QUERIES = {1: torch.float16, 2: torch.bfloat16}
_FP8 = {1: torch.float8_e4m3fn, 2: torch.float8_e5m2}


class PagedKernel:
    """One of its kernels. The first computes everything, and the second, which merges parts, has nothing to do."""

    def __init__(self, kernel: nvrtc.Kernel) -> None:
        self.name, self.shared, self._defines = kernel.name, kernel.shared, kernel.defines
        self._names = tuple(nvrtc.Struct(kernel.path, "Paged")._owners)

    def launch(self, blocks: int, threads: int, fields: array[Any], *_: int, **__: bool) -> None:
        assert blocks > 0
        assert threads % 32 == 0
        assert len(fields) == len(self._names)
        if self.name == "paged_attention":
            _attend({name: _signed(x) for name, x in zip(self._names, fields, strict=True)}, self._defines)


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def _float(bits: int) -> float:
    return struct.unpack("f", struct.pack("I", bits & 0xFFFFFFFF))[0]


def _options(a: dict[str, int], sizes: dict[str, int], at: Any, counts: tuple[int, int, int]) -> dict[str, Any]:
    tokens, heads, group = counts
    left, right = (sizes[name] if sizes[name] >= 0 else -1 for name in ("left", "right"))
    options: dict[str, Any] = {"is_causal": False, "scale": _float(a["scale"])}
    options["causal_alignment"] = "top_left" if sizes["top_left"] else "bottom_right"
    options["window_size"] = (left, right)
    if softcap := _float(sizes["softcap"]):
        options["softcap"] = softcap
    if a["sinks"]:
        options["sinks"] = at("sinks", (heads * group,), (1,), torch.float32)
    if a["tree"]:
        options |= {"tree_mask": at("tree", (tokens, sizes["tree_n"]), (sizes["tree_t"], 1), torch.bool)}
        options["window_size"] = None
    for name in ("k_scale", "v_scale"):
        if a[name]:
            options[name] = at(name, (heads,), (sizes[f"{name}_h"],), torch.float32)
    return options


def _attend(a: dict[str, int], defines: dict[str, int]) -> None:
    sizes = {name.removeprefix("sizes."): x for name, x in a.items() if name.startswith("sizes.")}
    heads, group, page = sizes["heads_kv"], defines["G"], defines["PS"]
    batch, tokens, width, pages = (sizes[name] for name in ("batch", "tokens", "width", "pages"))
    dtype = _QUERIES[defines["DTYPE"]]
    cache = _FP8.get(defines["CACHE"], dtype)

    def at(name: str, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        assert a[name], f"a null pointer for {name}"
        whole = tensor_at(a[name], TensorLayout(shape, stride, dtype), torch.device("cpu"))
        assert isinstance(whole, Tensor)
        return whole

    def of_pages(name: str, dim: int) -> Tensor:
        stride = tuple(sizes[f"{name}_{x}"] for x in "phs")
        bits = at(name, (pages, heads, page, dim), (*stride, 1), cache).view(
            torch.int8 if cache in _FP8.values() else torch.int16
        )
        return torch.cat([bits, torch.zeros_like(bits[:1])]).view(cache)

    def table(name: str) -> Tensor:
        """Page ids; those that are none are of a page of zeros behind the last one."""
        found = at(name, (batch, width), (sizes[f"{name}_b"], 1), torch.int32)
        return found.masked_fill((found < 0) | (found >= pages), pages)

    rows = (batch, sizes["queries"]) if sizes["queries"] else (1, tokens)

    def by_sequence(name: str, last: tuple[int, ...], dtype: torch.dtype, field: str) -> Tensor:
        """Rows of sequences that have as many; packed ones are as those of one."""
        stride = tuple(sizes[f"{name}_{x}"] for x in "bth")
        return at(field, (*rows, heads * group, *last), (*stride, *(1,) * len(last)), dtype)

    q = by_sequence("q", (defines["D"],), dtype, "q")
    out = by_sequence("o", (defines["DV"],), dtype, "out")
    is_query = torch.ones(rows, dtype=torch.bool)
    if sizes["queries"]:
        counts = at("counts", (batch,), (1,), torch.int32) if a["counts"] else torch.full((batch,), rows[1])
        is_query = torch.arange(rows[1]) < counts.clamp(0, rows[1]).unsqueeze(1)
        ends = torch.cat([torch.zeros(1, dtype=torch.int32), is_query.sum(1).cumsum(0).int()])
    else:
        ends = at("ends", (batch + 1,), (1,), torch.int32).clamp(0, tokens)
    lengths = at("lengths", (batch,), (1,), torch.int32).clamp(0, width * page)
    options = _options(a, sizes, at, (tokens, heads, group))
    given = q[is_query], of_pages("k", defines["D"]), of_pages("v", defines["DV"]), table("table_k"), lengths, ends
    found, lse = attend_packed_on_pages(*given, page_layout="HND", page_table_v=table("table_v"), **options)
    assert not any(math.isnan(x) for x in (*found.flatten().tolist(), *lse.flatten().tolist()))
    out.zero_()
    out[is_query] = found.to(dtype)
    if a["lse"]:
        of_rows = by_sequence("l", (), torch.float32, "lse")
        of_rows.fill_(-torch.inf)
        if sizes["queries"] and "sinks" in options:
            of_rows.copy_(options["sinks"])
        of_rows[is_query] = lse.float()

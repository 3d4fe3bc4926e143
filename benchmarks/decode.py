"""`benchmarks decode`: decodes, drafts and chunks of prompts on a paged KV cache, beside FlashAttention-3 and -4."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from rich.progress import track
from torch import Tensor

from benchmarks.tools import cases, flash_attention, peers
from benchmarks.tools.candidates import NOTHING, Timed, ratio, served_by
from benchmarks.tools.flash_attention import V3
from benchmarks.tools.output import Row
from benchmarks.tools.timing import Call, device_times, host_times
from cudnn_sdpa.attention.dense.sdpa import sdpa
from cudnn_sdpa.attention.flash4.installed import installed
from cudnn_sdpa.attention.mask import BOTTOM_RIGHT
from cudnn_sdpa.attention.paged.append import append_paged_kv
from cudnn_sdpa.attention.paged.arguments import NHD
from cudnn_sdpa.attention.paged.kv_cache import PagedKVCache
from cudnn_sdpa.attention.paged.sdpa_paged import sdpa_paged
from cudnn_sdpa.attention.paged.tables import trusted_pages
from cudnn_sdpa.attention.paged_varlen import reference
from cudnn_sdpa.attention.paged_varlen.arguments import PagedVarlenArguments
from cudnn_sdpa.attention.paged_varlen.sdpa_paged_varlen import sdpa_paged_varlen
from cudnn_sdpa.plans.cache import plan_cache
from cudnn_sdpa.plans.providers import FLASH4, providers

VARLEN, PAGED, COPY = "sdpa_paged_varlen", "sdpa_paged", "a copy"
DENSE, CONTIGUOUS = "sdpa, contiguous", "pytorch flash, contiguous"
ON_CUDNN = f"{PAGED} on cuDNN"
BY_FLASH4 = f"{VARLEN} by FlashAttention-4"
V3_PACKED = f"{V3}, cu_seqlens_q"
FP8 = torch.float8_e4m3fn


class Step(NamedTuple):
    """New tokens of sequences on a paged KV cache; attention is causal.

    Attributes:
        new: The number of new tokens of each sequence.
        keys: The number of keys of each sequence, those of its new tokens included.
        heads: Heads of queries, and of keys and values.
        dims: Head dims of keys and of values. With one head of keys and narrower values, the values are the first
            numbers of their keys: multi-head latent attention.
        pages: The dtype of the pages; queries are bfloat16.
    """

    new: tuple[int, ...]
    keys: int
    page_size: int = 64
    heads: tuple[int, int] = (32, 8)
    dims: tuple[int, int] = (128, 128)
    pages: torch.dtype = torch.bfloat16

    @property
    def label(self) -> str:
        """How many sequences have how many new tokens, on how many keys, and what is not as in most steps."""
        tokens = " and ".join(f"{count} × {new:,}" for new, count in Counter(self.new).items())
        usual, others = Step(self.new, self.keys), []
        if self.page_size != usual.page_size:
            others.append(f"pages of {self.page_size}")
        if self.pages != usual.pages:
            others.append("FP8 pages")
        if (self.heads, self.dims) != (usual.heads, usual.dims):
            dims = "/".join(map(str, dict.fromkeys(self.dims)))
            others.append(f"{self.heads[0]}/{self.heads[1]} heads of {dims}")
        return ", ".join([f"{tokens} on {self.keys:,}", *others])

    @property
    def is_uniform(self) -> bool:
        return len(set(self.new)) == 1

    @property
    def bytes(self) -> int:
        """Those of all keys and values, which a step reads at least once."""
        numbers = self.dims[0] if self.is_latent else sum(self.dims)
        return len(self.new) * self.keys * self.heads[1] * numbers * self.pages.itemsize

    @property
    def is_latent(self) -> bool:
        return self.heads[1] == 1 and self.dims[1] < self.dims[0]


STEPS = (
    *(Step((new,) * 32, 4096) for new in (1, 2, 4, 8, 16)),
    *(Step((new,) * 8, 32768) for new in (1, 8)),
    Step((64,) * 16, 4096),
    Step((512,) * 4, 4096),
    Step((2048,), 8192),
    Step((1,) * 60 + (512,), 4096),
    *(Step((1,), keys) for keys in (4096, 32768, 131072)),
    Step((1,) * 32, 4096, page_size=16),
    Step((1,) * 32, 4096, pages=FP8),
    *(Step((new,) * 32, 4096, heads=(64, 8), dims=(64, 64)) for new in (1, 4)),
    Step((1,), 32768, heads=(64, 8), dims=(64, 64)),
    Step((512,) * 4, 4096, heads=(64, 8), dims=(64, 64)),
    Step((2048,), 8192, heads=(64, 8), dims=(64, 64)),
    Step((512,) * 8, 512),
    Step((512,), 32768),
    Step((1,) * 32, 4096, dims=(192, 128)),
    Step((512,) * 4, 4096, dims=(192, 128)),
    *(Step((new,) * 32, 4096, heads=(16, 4), dims=(256, 256)) for new in (1, 4)),
    Step((512,) * 4, 4096, heads=(16, 4), dims=(256, 256)),
    *(Step((1,) * 64, 8192, heads=(heads, 1), dims=(576, 512)) for heads in (16, 32, 64, 128)),
    *(Step((1,) * 32, 4096, heads=(heads, 1), dims=(576, 512)) for heads in (16, 128)),
    Step((4,) * 32, 4096, heads=(16, 1), dims=(576, 512)),
    *(Step((1,), 32768, heads=(heads, 1), dims=(576, 512)) for heads in (16, 128)),
)


class Inputs:
    """The tensors of a step.

    Attributes:
        q: Packed queries, (T, Hq, D).
        pages: Of keys and of values, (P, page size, Hkv, D), in random order.
        table: The page table, which the library may trust.
        lengths: The number of keys of each sequence.
        ends: Where the new tokens of each sequence begin, and at last where they end.
        scales: Of keys and values in FP8, one for each head.
    """

    def __init__(self, step: Step) -> None:
        (heads_q, heads_kv), batch = step.heads, len(step.new)
        columns = -(-step.keys // step.page_size)
        count = batch * columns
        self.q = cases.normal(sum(step.new), heads_q, step.dims[0])
        shape, dtype = (count, step.page_size, heads_kv), FP8 if step.pages == FP8 else self.q.dtype
        k_pages, v_pages = (cases.normal(*shape, dim).to(dtype) for dim in step.dims)
        self.pages = k_pages, k_pages[..., : step.dims[1]] if step.is_latent else v_pages
        self.scales: tuple[Tensor | None, Tensor | None] = (None, None)
        if step.pages == FP8:
            k_scale, v_scale = 0.5 + torch.rand(2, heads_kv, device=cases.DEVICE)
            self.scales = k_scale, v_scale
        self.table = torch.randperm(count, device=cases.DEVICE).int().view(batch, columns)
        self.lengths, self.ends = int32([step.keys] * batch), int32([0, *accumulate(step.new)])
        trusted_pages(self.table, self.lengths, pages=count, page_size=step.page_size)

    def in_float64(self, step: Step) -> Tensor:
        """The output of the first head of keys, (T, heads, D)."""
        group = step.heads[0] // step.heads[1]
        k_scale, v_scale = (None if scale is None else scale[:1] for scale in self.scales)
        k_pages, v_pages = (x[:, :, :1] if step.pages == FP8 else x[:, :, :1].double() for x in self.pages)
        call = PagedVarlenArguments(
            q=self.q[:, :group].double(),
            k_pages=k_pages,
            v_pages=v_pages,
            page_table=self.table,
            page_table_v=None,
            seq_lens_kv=self.lengths,
            cu_seqlens_q=self.ends,
            sinks=None,
            tree_mask=None,
            k_scale=k_scale,
            v_scale=v_scale,
            max_seqlen_q=max(step.new),
            page_layout=NHD,
        )
        return reference.attention(call)[0]


def int32(numbers: Sequence[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=cases.DEVICE)


def candidates(step: Step) -> Timed:
    """What computes a step; all read the same pages, but PyTorch, which gets contiguous keys and values."""
    given, longest, timed = Inputs(step), max(step.new), Timed()
    group = step.heads[0] // step.heads[1]
    expected, out_shape = given.in_float64(step), (*given.q.shape[:2], step.dims[1])
    on_pages = (*given.pages, given.table, given.lengths)

    def add(name: str, call: Callable[[], Tensor]) -> None:
        timed.add(name, lambda: (call(),), sampled, [expected])

    def sampled(results: Sequence[Tensor]) -> list[Tensor]:
        return [x.reshape(out_shape)[:, :group] for x in results]

    k_scale, v_scale = given.scales
    scaled = partial(sdpa_paged_varlen, k_scale=k_scale, v_scale=v_scale, page_layout=NHD)
    add(VARLEN, lambda: scaled(given.q, *on_pages, given.ends, longest))
    if step.pages == FP8:  # under queries in bfloat16, which no other candidate takes
        return timed
    if not installed().missing:
        plain = partial(sdpa_paged_varlen, page_layout=NHD)
        add(BY_FLASH4, lambda: served_by(FLASH4, lambda: (plain(given.q, *on_pages, given.ends, longest),))[0])
    of_v3 = {"page_table": given.table, "cache_seqlens": given.lengths, "causal": True}
    if flash_attention.is_installed(V3):
        function = partial(flash_attention.first, flash_attention.module(V3).flash_attn_with_kvcache)
        packed = {"cu_seqlens_q": given.ends, "max_seqlen_q": longest}
        add(V3_PACKED, lambda: function(given.q, *given.pages, **of_v3, **packed))
    if not step.is_uniform:
        return timed
    q = given.q.view(len(step.new), longest, *given.q.shape[1:])
    padded = q.transpose(1, 2)
    if flash_attention.is_installed(V3):
        add(V3, lambda: function(q, *given.pages, **of_v3))
    add(PAGED, lambda: sdpa_paged(padded, *on_pages, page_layout=NHD).transpose(1, 2))
    k, v = (x[given.table.long()].flatten(1, 2)[:, : step.keys].transpose(1, 2) for x in given.pages)

    def dense() -> Tensor:
        return sdpa(padded, k, v, is_causal=longest > 1, causal_alignment=BOTTOM_RIGHT).transpose(1, 2)

    def contiguous() -> Tensor:
        with peers.only("pytorch flash"):
            if longest == 1:
                return peers.pytorch(padded, k, v, is_causal=False)().transpose(1, 2)
            return peers.pytorch_of_last_queries(padded, k, v)().transpose(1, 2)

    add(DENSE, dense)
    add(CONTIGUOUS, contiguous)
    return timed


def steps() -> list[Row]:
    """Device time of steps, with no data in the GPU's cache; `sdpa_paged` takes cuDNN's kernels."""
    rows: list[Row] = []
    theirs = (V3, V3_PACKED) if flash_attention.is_installed(V3) else ()
    by_flash4 = () if installed().missing else (BY_FLASH4,)
    copy_large = cases.large_copy()
    for step in track(STEPS, "steps", transient=True):
        torch.cuda.empty_cache()
        with providers("cudnn"):
            timed = candidates(step)
            timed.calls[COPY] = copy_large
            times = timed.measure(cold=True)
        row: Row = {"sequences × new tokens on keys": step.label}
        if PAGED in times:
            times[ON_CUDNN] = times[PAGED]
        names = VARLEN, *by_flash4, *theirs, ON_CUDNN, DENSE, CONTIGUOUS
        row |= {f"{name} µs": times.get(name, NOTHING) for name in names}
        row |= {f"fa4 / {VARLEN}": ratio(times, name, VARLEN) for name in by_flash4}
        if VARLEN in times:
            best = min((times[name] for name in theirs if name in times), default=None)
            if theirs:
                row[f"{V3} / {VARLEN}"] = NOTHING if best is None else best / times[VARLEN]
            speed, copy = step.bytes / times[VARLEN], 2 * cases.COPIED / times[COPY]
            row |= {"TB/s": speed / 1e6, "of a copy's": speed / copy}
        row["why not"] = timed.why_not
        rows.append(row)
        del timed
    return rows


# Appending.


class Sizes(NamedTuple):
    """Tokens that are appended in each layer of a model."""

    tokens: int = 64
    layers: int = 32
    heads: int = 8
    dim: int = 128
    pages: int = 512
    page_size: int = 64


APPEND = Sizes()
COPIES = "copies of keys and of values"


def append() -> list[Row]:
    """Device time of a CUDA graph that appends new tokens in every layer, and of graphs of copies of as many bytes."""
    given = APPEND
    both = cases.normal(given.layers, 2, given.tokens, given.heads, given.dim)
    slots = torch.randperm(given.pages * given.page_size, device=cases.DEVICE)[: given.tokens]
    shape = (given.layers, 2, given.pages, given.page_size, given.heads, given.dim)
    caches = {dtype: torch.zeros(shape, dtype=dtype, device=cases.DEVICE) for dtype in (both.dtype, FP8)}
    scales = 0.5 + torch.rand(2, given.heads, device=cases.DEVICE)
    target = torch.empty_like(both)

    def appended(cache: Tensor, scales: tuple[Tensor | None, Tensor | None]) -> None:
        for (k, v), (k_pages, v_pages) in zip(both, cache, strict=True):
            append_paged_kv(k, v, k_pages, v_pages, slots, page_layout=NHD, k_scale=scales[0], v_scale=scales[1])

    def copied() -> None:
        for to, new in zip(target.flatten(0, 1), both.flatten(0, 1), strict=True):
            to.copy_(new)

    def copied_at_once() -> None:
        for to, new in zip(target, both, strict=True):
            to.copy_(new)

    calls: dict[str, Call] = {
        "append_paged_kv": partial(appended, caches[both.dtype], (None, None)),
        "append_paged_kv, FP8 pages": partial(appended, caches[FP8], (scales[0], scales[1])),
        COPIES: copied,
        "one copy of both": copied_at_once,
    }
    graphs = {name: captured(call) for name, call in calls.items()}
    for cache in caches.values():
        cache.zero_()
    for graph in graphs.values():
        graph()
    exact = caches[both.dtype].flatten(2, 3)[:, :, slots]
    bits = caches[FP8].view(torch.uint8).flatten(2, 3)[:, :, slots]  # PyTorch indexes no FP8
    quantized = bits.view(FP8).float() * scales.view(2, 1, given.heads, 1)
    cases.check_agreement(["pages"], [exact], [both], "the tokens", tolerance=1e-6)
    cases.check_agreement(["FP8 pages"], [quantized], [both], "the tokens", tolerance=0.05)
    times = device_times(graphs, cold=True)
    what = f"{given.tokens} tokens × {given.layers} layers"
    return [{what: name, "µs": time, "× copies": time / times[COPIES]} for name, time in times.items()]


def captured(call: Call) -> Call:
    """The replay of a CUDA graph of a call; on the CPU the call itself."""
    call()
    if cases.DEVICE != "cuda":
        return call
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


# Plans.


def plans(count: int = 10_000) -> list[Row]:
    """The number of plans that a server builds if the mixture of tokens, batch and lengths change in every step."""
    draw = random.Random(20261121)
    pages, most, max_length = 2048, 64, 2048
    k_pages, v_pages = (cases.normal(pages, 16, 2, 64) for _ in range(2))
    table = torch.randint(0, pages, (most, max_length // 16), device=cases.DEVICE).int()
    rows: list[Row] = []
    plan_cache.clear()
    before = plan_cache.info()
    for number in track(range(1, count + 1), "mixed steps", transient=True):
        new = [draw.choice([1] * 8 + [draw.randint(2, 8)]) for _ in range(draw.randint(1, most))]
        new += draw.choice([[], [], [draw.randint(9, 512)]])
        new = new[-most:]
        lengths, ends = int32([draw.randint(tokens, max_length) for tokens in new]), int32([0, *accumulate(new)])
        q = cases.normal(sum(new), 8, 64)
        sdpa_paged_varlen(q, k_pages, v_pages, table[: len(new)], lengths, ends, max(new), page_layout=NHD)
        if number in (count // 10, count):
            info = plan_cache.info()
            built, seconds = info.builds - before.builds, info.build_seconds - before.build_seconds
            rows.append({"steps": number, "plans built": built, "in seconds": seconds})
    return rows


# The host.


def host() -> list[Row]:
    """CPU time of one warm call on a step of one token, B=1, 8 heads of 64, 128 tokens, and of its peers."""
    q, new = cases.normal(1, 8, 1, 64), (cases.normal(1, 8, 1, 64), cases.normal(1, 8, 1, 64))
    cache = PagedKVCache(pages=64, page_size=64, heads=8, head_dim=64, dtype=q.dtype, device=q.device, page_layout=NHD)
    sequence, other = cache.add(), cache.add()
    cache.reserve([sequence], 127)
    cache.reserve([other], 128)
    step, spare = cache.new_step(1), cache.new_step(1)
    cache.reserve([sequence], into=step)
    k, v = cases.normal(1, 8, 128, 64), cases.normal(1, 8, 128, 64)
    packed, packed_new, out = q[:, :, 0], (new[0][:, :, 0], new[1][:, :, 0]), torch.empty_like(q[:, :, 0])
    ends = int32([0, 1])
    lengths, slots = step.seq_lens_kv.clone(), torch.tensor([7], device=cases.DEVICE)
    pages, table = (cache.k_pages(), cache.v_pages()), step.page_table.clone()
    on_pages = (*pages, table, lengths)

    def reserve() -> None:
        cache.reserve([other], into=spare)
        cache.truncate(other, 128)

    marked = (*pages, step.page_table, step.seq_lens_kv)
    calls: dict[str, Call] = {
        VARLEN: lambda: sdpa_paged_varlen(packed, *on_pages, ends, 1, page_layout=NHD),
        f"{VARLEN}, out=": lambda: sdpa_paged_varlen(packed, *on_pages, ends, 1, page_layout=NHD, out=out),
        "append_paged_kv": lambda: append_paged_kv(*packed_new, *pages, slots, page_layout=NHD),
        "sdpa_paged": lambda: sdpa_paged(q, *marked, page_layout=NHD),
        "sdpa_paged, other tables": lambda: sdpa_paged(q, *on_pages, page_layout=NHD),
        "PagedKVCache.append": lambda: cache.append(step, *new),
        "PagedKVCache.reserve": reserve,
        "sdpa with seq_lens_kv, contiguous": lambda: sdpa(q, k, v, seq_lens_kv=lengths),
    }
    if flash_attention.is_installed(V3):
        function, tables = flash_attention.module(V3).flash_attn_with_kvcache, {"page_table": table}
        of_v3 = {"cache_seqlens": lengths, "cu_seqlens_q": ends, "max_seqlen_q": 1, "causal": True, **tables}
        calls[V3_PACKED] = lambda: function(packed, *pages, **of_v3)
    pytorch = peers.pytorch(q, k, v, is_causal=False)
    rounds = []
    for _ in range(5):
        times = host_times(calls, per_round=300, rounds=3)
        for name in peers.PYTORCH_BACKENDS:
            with peers.only(name):
                times |= host_times({name: pytorch}, per_round=300, rounds=3)
        rounds.append(times)
    best = {name: min(times[name] for times in rounds) for name in rounds[0]}
    return [{"call": name, "µs": time, "× flash": time / best["pytorch flash"]} for name, time in best.items()]

"""`benchmarks decode`: decode steps, speculative decoding and chunks of prompts on a paged KV cache."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable

import torch
from rich.progress import track
from torch import Tensor

from benchmarks.tools import cases, hand_graphs, peers
from benchmarks.tools.output import Row
from benchmarks.tools.timing import Call, device_times, host_times
from cudnn_sdpa.attention.arguments import scale_of
from cudnn_sdpa.attention.dense.sdpa import sdpa
from cudnn_sdpa.attention.paged import paging
from cudnn_sdpa.attention.paged import specs as paged_specs
from cudnn_sdpa.attention.paged.call import PagedCall
from cudnn_sdpa.attention.paged.kv_cache import PagedKVCache
from cudnn_sdpa.attention.paged.sdpa_paged import sdpa_paged
from cudnn_sdpa.attention.paged.step import PagedStep
from cudnn_sdpa.attention.varlen.call import VarlenCall
from cudnn_sdpa.attention.varlen.sdpa_varlen import VARLEN
from cudnn_sdpa.graph import handles
from cudnn_sdpa.graph.target import live_target
from cudnn_sdpa.plans import plan as plans
from cudnn_sdpa.plans.cache import plan_cache

HEADS_Q, HEADS_KV, DIM = 32, 8, 128

#: B, tokens of each sequence, page size.
STEPS = (
    (32, 4096, 64),
    (128, 4096, 64),
    (32, 4096, 16),
    (128, 4096, 16),
    (8, 32768, 64),
    (1, 32768, 64),
    (1, 32768, 16),
)
#: B, new tokens, tokens of each sequence.
DRAFTS = ((32, 2, 4096), (32, 4, 4096), (32, 8, 4096), (1, 4, 32768))

LAUNCHES = "cuDNN and the frontend's C++, two kernels"
OUTPUT = "an output"


def filled(batch: int, length: int, page_size: int, tokens: int) -> tuple[PagedKVCache, PagedStep]:
    """A cache of random keys and values in pages in random order, and the step of its last tokens."""
    pages = batch * -(-length // page_size)
    like = cases.normal(1)
    cache = PagedKVCache(
        pages=pages,
        page_size=page_size,
        heads=HEADS_KV,
        head_dim=DIM,
        max_length=length,
        dtype=like.dtype,
        device=like.device,
    )
    random.Random(1).shuffle(cache._pool._free)
    for part in (cache.k_pages(), cache.v_pages()):
        part.normal_()
    sequences = [cache.add() for _ in range(batch)]
    cache.reserve(sequences, length - tokens)
    step = cache.reserve(sequences, tokens)
    step.written.add(0)  # the pages are filled above
    return cache, step


def dense(cache: PagedKVCache, batch: int) -> tuple[Tensor, Tensor]:
    """The keys and values as dense tensors (B, Hkv, length, D), token-major."""
    rows = [cache.read(sequence) for sequence in range(batch)]
    k, v = (torch.stack([row[which].transpose(0, 1).contiguous() for row in rows]).transpose(1, 2) for which in (0, 1))
    return k, v


def bandwidth() -> list[Row]:
    """Decode steps: bytes of keys and values per second, compared with a large copy in the same run."""
    rows: list[Row] = []
    copy_large = cases.large_copy()
    for batch, length, page_size in track(STEPS, "decode", transient=True):
        cache, step = filled(batch, length, page_size, 1)
        q = cases.normal(batch, HEADS_Q, 1, DIM)
        ours, foreign = paged_call(cache, step, q), paged_call(cache, step, q, foreign=True)
        k, v = dense(cache, batch)
        with peers.only("pytorch flash"):
            flash = peers.pytorch(q, k, v, is_causal=False)
            for run, name in ((ours, "sdpa_paged's"), (foreign, "that with other tables")):
                cases.check_agreement(["out"], [run()], [flash()], f"PyTorch's, {name}")
            times = device_times({"ours": ours, "foreign": foreign, "flash": flash, "copy": copy_large}, cold=True)
        read = batch * length * HEADS_KV * DIM * 2 * q.element_size()
        copy = 2 * cases.COPIED / times["copy"]
        rows.append(
            {
                "B, tokens, page size": f"{batch}, {length}, {page_size}",
                "sdpa_paged µs": times["ours"],
                "TB/s": read / times["ours"] / 1e6,
                "of a copy's": read / times["ours"] / copy,
                "other tables µs": times["foreign"],
                "pytorch flash, contiguous µs": times["flash"],
                "flash TB/s": read / times["flash"] / 1e6,
                "copy TB/s": copy / 1e6,
            }
        )
        del cache, step, k, v
    return rows


def paged_call(cache: PagedKVCache, step: PagedStep, q: Tensor, *, foreign: bool = False) -> Callable[[], Tensor]:
    """`sdpa_paged` on a step of a cache, or with `foreign` on copies of its tables, which it does not know."""
    page_table, seq_lens_kv = step.page_table, step.seq_lens_kv
    if foreign:
        page_table, seq_lens_kv = page_table.clone(), seq_lens_kv.clone()
    k_pages, v_pages = cache.k_pages(), cache.v_pages()
    layout = cache.page_layout
    return lambda: sdpa_paged(q, k_pages, v_pages, page_table=page_table, seq_lens_kv=seq_lens_kv, page_layout=layout)


def drafts() -> list[Row]:
    """Speculative decoding: a few new tokens of each sequence, compared with a step of one token."""
    rows: list[Row] = []
    for batch, tokens, length in track(DRAFTS, "drafts", transient=True):
        cache, step = filled(batch, length, 64, tokens)
        q = cases.normal(batch, tokens, HEADS_Q, DIM).transpose(1, 2)
        one = q[:, :, -1:].contiguous()
        ours, single = paged_call(cache, step, q), paged_call(cache, step, one)
        cases.check_agreement(["out"], [ours()[:, :, -1:]], [single()], "that of a step of one")
        times = device_times({"ours": ours, "single": single}, cold=True)
        rows.append(
            {
                "B, new tokens, all tokens": f"{batch}, {tokens}, {length}",
                "sdpa_paged µs": times["ours"],
                "one token µs": times["single"],
                "ratio": times["ours"] / times["single"],
            }
        )
        del cache, step
    return rows


def mixed(steps: int = 10_000) -> list[Row]:
    """The number of plans that a server builds if batch, lengths and chunks change in every step."""
    draw = random.Random(20261121)
    pages, max_batch, max_length = 2048, 64, 2048
    k_pages, v_pages = (cases.normal(pages, 2, 16, 64) for _ in range(2))
    table = torch.randint(0, pages, (max_batch, max_length // 16), device=cases.DEVICE).int()
    rows: list[Row] = []
    plan_cache.clear()
    before = plan_cache.info()
    for number in track(range(1, steps + 1), "mixed steps", transient=True):
        queries = draw.choice([1] * 8 + [draw.randint(2, 8), draw.randint(9, 512)])
        batch = draw.randint(1, max_batch if queries <= 8 else 4)
        lengths = torch.full((batch,), draw.randint(queries, max_length), device=cases.DEVICE, dtype=torch.int32)
        q = cases.normal(batch, 8, queries, 64)
        sdpa_paged(q, k_pages, v_pages, page_table=table[:batch], seq_lens_kv=lengths, page_layout="HND")
        if number in (steps // 10, steps):
            info = plan_cache.info()
            built, seconds = info.builds - before.builds, info.build_seconds - before.build_seconds
            rows.append({"steps": number, "plans built": built, "in seconds": seconds})
    return rows


def _launch(q: Tensor, cache: PagedKVCache, step: PagedStep) -> Call:
    """Only the launch of a warm step's plan, on memory that is kept."""
    call = PagedCall(
        q=q,
        k_pages=cache.k_pages(),
        v_pages=cache.v_pages(),
        page_table=step.page_table,
        page_table_v=None,
        seq_lens_kv=step.seq_lens_kv,
        seq_lens_q=None,
        sinks=None,
        k_scale=None,
        v_scale=None,
        page_layout=cache.page_layout,
    )
    device = q.get_device()
    (key,) = call.keys(live_target(device), device)
    plan = plan_cache.peek(key)
    assert plan is not None
    tensors = {
        **plan.constants,
        "q": q,
        "k": call.k_pages,
        "v": call.v_pages,
        "table_k": step.page_table,
        "table_v": step.page_table,
        "seq_len_kv": step.seq_lens_kv,
        "out": torch.empty_like(q),
    }
    scale = array("f", [scale_of(call)])
    known = {name: x.data_ptr() for name, x in tensors.items()} | {"scale": scale.buffer_info()[0]}
    pointers = array("Q", [known[operand.name] for operand in (*key.inputs, *key.outputs)])
    plan.launch(pointers)  # binds the handle to the stream
    workspace = torch.empty(plan.workspace, dtype=torch.uint8, device=q.device)
    handle, execute = handles.thread.slots[device].raw, plan._execute
    # As `backend.Execute` takes them.
    given = pointers.buffer_info()[0], len(pointers), workspace.data_ptr(), handle, -1

    def run(_alive: object = (tensors, scale, pointers, workspace)) -> None:
        execute(*given)

    return run


def host() -> list[Row]:
    """CPU time of one warm decode step, B=1, 8 heads of 64, 128 tokens, and of its peers."""
    cache = PagedKVCache(pages=64, page_size=64, heads=8, head_dim=64, device=cases.DEVICE)
    sequence = cache.add()
    cache.reserve([sequence], 128)
    step = cache.new_step(1)
    cache.reserve([sequence], into=step)
    q = cases.normal(1, 8, 1, 64)
    k, v = cases.normal(1, 8, 128, 64), cases.normal(1, 8, 128, 64)
    lengths = torch.full((1,), 128, dtype=torch.int32, device=cases.DEVICE)
    new = cases.normal(1, 8, 1, 64), cases.normal(1, 8, 1, 64)
    chunk = cases.normal(1, 64, 8, 64).transpose(1, 2)

    other, spare = cache.add(), cache.new_step(1)
    cache.reserve([other], 128)

    def reserve() -> None:
        cache.reserve([other], into=spare)
        cache.truncate(other, 128)

    ours = paged_call(cache, step, q)
    out = ours()
    layout = tuple(out.shape), out.stride(), out.dtype
    calls: dict[str, Call] = {
        "sdpa_paged": ours,
        "sdpa_paged, other tables": paged_call(cache, step, q, foreign=True),
        LAUNCHES: _launch(q, cache, step),
        OUTPUT: lambda: plans.allocate(*layout),
        "sdpa_paged, a chunk of 64 tokens": paged_call(cache, step, chunk),
        "PagedKVCache.append": lambda: cache.append(step, *new),
        "PagedKVCache.reserve": reserve,
        "sdpa with seq_lens_kv, contiguous": lambda: sdpa(q, k, v, seq_lens_kv=lengths),
    }
    pytorch = peers.pytorch(q, k, v, is_causal=False)
    rounds = []
    for _ in range(5):
        times = host_times(calls, per_round=300, rounds=3)
        for name in peers.PYTORCH_BACKENDS:
            with peers.only(name):
                times |= host_times({name: pytorch}, per_round=300, rounds=3)
        rounds.append(times)
    best = {name: min(times[name] for times in rounds) for name in rounds[0]}
    best["launches and output"] = best[LAUNCHES] + best[OUTPUT]
    return [{"call": name, "µs": time, "× flash": time / best["pytorch flash"]} for name, time in best.items()]


# Chunks of prompts, compared with dense attention of the same size, and in parts.


#: B, new tokens, tokens of each sequence, page size.
CHUNKS = ((1, 2048, 8192, 64), (1, 2048, 8192, 16), (4, 512, 4096, 64), (1, 4096, 4096, 64))


def chunks() -> list[Row]:
    """Chunks of a prompt compared with dense attention of the same size, and the parts of their time."""
    rows: list[Row] = []
    copy_large = cases.large_copy()
    for batch, tokens, length, page_size in track(CHUNKS, "chunks", transient=True):
        cache, step = filled(batch, length, page_size, tokens)
        q = cases.normal(batch, tokens, HEADS_Q, DIM).transpose(1, 2)
        k, v = dense(cache, batch)
        with peers.only("pytorch flash"):
            calls = _calls(cache, step, q, dense_kv=(k, v))
            times = device_times({**calls, "copy": copy_large}, cold=True)
        moved = 2 * (k.numel() + v.numel()) * k.element_size()
        rows.append(
            {
                "B, new tokens, all tokens, page size": f"{batch}, {tokens}, {length}, {page_size}",
                "sdpa_paged µs": times["paged"],
                "dense µs": times["dense"],
                "sdpa_paged / dense": times["paged"] / times["dense"],
                "dense with seq_lens_kv µs": times["lengths"],
                "gather µs": times["gather"],
                "that at a copy's bandwidth µs": moved * times["copy"] / (2 * cases.COPIED),
                "packed attention µs": times["packed"],
                "cuDNN's kernel on pages µs": times["by hand"],
                "pytorch flash, contiguous µs": times["flash"],
            }
        )
        del cache, step, k, v, calls
    return rows


def _calls(cache: PagedKVCache, step: PagedStep, q: Tensor, dense_kv: tuple[Tensor, Tensor]) -> dict[str, Call]:
    """The calls to time, checked to agree."""
    k, v = dense_kv
    pages, table = (cache.k_pages(), cache.v_pages()), step.page_table.clone()
    expected = _dense_call(q, k, v)
    graph = hand_graphs.PagedGraph(
        q, pages=pages, table=table, seq_lens_q=step.seq_lens_q, seq_lens_kv=step.seq_lens_kv
    )

    def by_hand() -> Tensor:
        graph.launch()
        return graph.out

    calls: dict[str, Callable[[], Tensor]] = {
        "dense": expected,
        "paged": paged_call(cache, step, q),
        "lengths": _dense_call(q, k, v, seq_lens_kv=step.seq_lens_kv.clone()),
        "by hand": by_hand,
        "flash": peers.pytorch_of_last_queries(q, k, v),
    }
    for name, call in calls.items():
        cases.check_agreement(["out"], [call()], [expected()], f"dense attention's, {name}")
    k_pages, v_pages = pages
    paged = PagedCall(
        q=q,
        k_pages=k_pages,
        v_pages=v_pages,
        page_table=step.page_table,
        page_table_v=None,
        seq_lens_kv=step.seq_lens_kv,
        seq_lens_q=None,
        sinks=None,
        k_scale=None,
        v_scale=None,
        page_layout=cache.page_layout,
    )
    gather = paging.GatherKernel(paged)
    packed = paged_specs.as_packed(paged, gather(paged))
    return {**calls, "gather": lambda: gather(paged), "packed": lambda: VARLEN.on_gpu(VarlenCall._make(packed))}


def _dense_call(q: Tensor, k: Tensor, v: Tensor, seq_lens_kv: Tensor | None = None) -> Callable[[], Tensor]:
    return lambda: sdpa(
        q, k, v, is_causal=True, causal_alignment="bottom_right", seq_lens_kv=seq_lens_kv, deterministic=True
    )

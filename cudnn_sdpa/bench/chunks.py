"""The part of `bench decode` about chunks of prompts: beside dense attention of the same work, and in parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.progress import track
from torch import Tensor

from cudnn_sdpa.attention import paged_long, paging, varlen_calls
from cudnn_sdpa.attention.dense import sdpa
from cudnn_sdpa.attention.kv_cache import PagedKVCache
from cudnn_sdpa.attention.paged_arguments import PagedArguments
from cudnn_sdpa.attention.paged_step import PagedStep
from cudnn_sdpa.bench import cases, decode, hand_graphs, peers
from cudnn_sdpa.bench.timing import Call, device_times

#: B, new tokens, tokens of each sequence, page size.
CHUNKS = ((1, 2048, 8192, 64), (1, 2048, 8192, 16), (4, 512, 4096, 64), (1, 4096, 4096, 64))


def chunks() -> list[dict[str, Any]]:
    """Chunks of a prompt beside dense attention of the same work, and the parts of their time."""
    rows = []
    copy_large = decode.large_copy()
    for batch, tokens, length, page_size in track(CHUNKS, "chunks", transient=True):
        cache, step = decode.filled(batch, length, page_size, tokens)
        q = cases.normal(batch, tokens, decode.HEADS_Q, decode.DIM).transpose(1, 2)
        k, v = decode.dense(cache, batch)
        with peers.only("pytorch flash"):
            calls = _calls(cache, step, q, k, v)
            times = device_times({**calls, "copy": copy_large}, cold=True)
        moved = 2 * (k.numel() + v.numel()) * k.element_size()
        rows.append(
            {
                "B, new tokens, all tokens, page size": f"{batch}, {tokens}, {length}, {page_size}",
                "sdpa_paged µs": times["paged"],
                "dense µs": times["dense"],
                "sdpa_paged / dense": times["paged"] / times["dense"],
                "dense with seq_lens_kv µs": times["lengths"],
                "pages in a row µs": times["gather"],
                "that at a copy's bandwidth µs": moved * times["copy"] / (2 * decode.COPIED),
                "packed attention µs": times["packed"],
                "cuDNN's kernel on pages µs": times["by hand"],
                "pytorch flash, contiguous µs": times["flash"],
            }
        )
        del cache, step, k, v, calls
    return rows


def _calls(cache: PagedKVCache, step: PagedStep, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Call]:
    """What is timed, when all agree."""
    pages, table = (cache.k_pages(), cache.v_pages()), step.page_table.clone()
    expected = _dense_call(q, k, v)
    of_hand = hand_graphs.PagedGraph(q, pages, table, step.seq_lens_q, step.seq_lens_kv)

    def by_hand() -> Tensor:
        of_hand.launch()
        return of_hand.out

    calls: dict[str, Callable[[], Tensor]] = {
        "dense": expected,
        "paged": decode.paged_call(cache, step, q),
        "lengths": _dense_call(q, k, v, seq_lens_kv=step.seq_lens_kv.clone()),
        "by hand": by_hand,
        "flash": peers.pytorch_of_last_queries(q, k, v),
    }
    for name, call in calls.items():
        cases.check_agreement(["out"], [call()], [expected()], f"dense attention's, {name}")
    paged = PagedArguments(q, *pages, *(step.page_table,) * 2, step.seq_lens_kv)
    gather = paging.Gatherer(paged)
    of_rows = paged_long.as_packed(paged, gather(paged))
    return {**calls, "gather": lambda: gather(paged), "packed": lambda: varlen_calls.run_forward(of_rows)}


def _dense_call(q: Tensor, k: Tensor, v: Tensor, seq_lens_kv: Tensor | None = None) -> Callable[[], Tensor]:
    mask: dict[str, Any] = {"is_causal": True, "causal_alignment": "bottom_right"}
    return lambda: sdpa(q, k, v, **mask, seq_lens_kv=seq_lens_kv, deterministic=True)

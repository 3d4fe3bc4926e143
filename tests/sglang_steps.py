"""Requests on a KV pool of SGLang's, driven through the backend as its model runner drives it.

Classes of SGLang are compiled from its source, as its modules import all of its dependencies, which need a GPU. Only
what stores into a pool is ours. No slot but those of keys holds a number, and entries of `req_to_token` past a request
name slots of others.
"""

from __future__ import annotations

import abc
import ast
import enum
import functools
import importlib.util
import math
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from float64_reference import attend
from torch import Tensor, nn

from cudnn_sdpa.integrations.sglang_backend import Engine, backend_class

_SPEC = importlib.util.find_spec("sglang")
#: The folder of the package, which nothing here imports; None where it is missing.
SGLANG = Path(_SPEC.submodule_search_locations[0]) if _SPEC and _SPEC.submodule_search_locations else None
MISSING = "sglang is not there: `make engines`"

POOLS, BATCHES = "srt/mem_cache/memory_pool.py", "srt/model_executor/forward_batch_info.py"
BACKENDS, LAYERS = "srt/layers/attention/base_attn_backend.py", "srt/layers/radix_attention.py"
_KEPT = ("property", "classmethod", "abc.abstractmethod")


@functools.cache
def source(path: str) -> ast.Module:
    assert SGLANG is not None
    return ast.parse((SGLANG / path).read_text())


def definition(path: str, name: str) -> Any:
    (found,) = [node for node in source(path).body if getattr(node, "name", None) == name]
    return found


def compiled(path: str, *names: str, **given: Any) -> Any:
    """SGLang's classes and functions of these names, without decorators that log or split graphs."""
    nodes = [definition(path, name) for name in names]
    for method in (x for node in nodes if isinstance(node, ast.ClassDef) for x in node.body):
        if isinstance(method, ast.FunctionDef):
            method.decorator_list = [x for x in method.decorator_list if ast.unparse(x) in _KEPT]
    space = {"__name__": __name__, "torch": torch, "dataclass": dataclass, "abc": abc, **vars(typing), **given}
    flags = annotations.compiler_flag  # theirs are not evaluated
    exec(compile(ast.Module(nodes, []), path, "exec", flags=flags), space)  # noqa: S102 - the source of an installed package
    return space[names[0]] if len(names) == 1 else [space[name] for name in names]


class _Struct:
    """What SGLang takes of `msgspec.Struct`."""

    def __init_subclass__(cls, frozen: bool) -> None:
        dataclass(cls)


@functools.cache
def sglang() -> SimpleNamespace:
    """The classes, by their names in SGLang."""
    mode = compiled(BATCHES, "ForwardMode", IntEnum=enum.IntEnum, auto=enum.auto)
    mixin = "ForwardBatchDeepSeekMHAMixin"
    of_mixin = compiled("srt/model_executor/forward_batch_deepseek_mha_mixin.py", mixin)
    given = {"Enum": enum.Enum, "ABC": abc.ABC, "ForwardMode": mode, "is_npu": lambda: False}
    attention_type, layer = compiled(LAYERS, "AttentionType", "RadixAttention", nn=nn, **given)
    of_pools = ("KVWriteLoc", "unwrap_write_loc", "write_loc_is_physical", "KVCache", "MHATokenToKVPool")
    loc, unwrap, _, cache, pool = compiled(POOLS, *of_pools, maybe_detect_oob=lambda *_: None)
    of_windows = {"KVCache": cache, "MHATokenToKVPool": pool, "MLATokenToKVPool": (), "unwrap_write_loc": unwrap}
    window_base = compiled("srt/mem_cache/base_swa_memory_pool.py", "BaseSWAKVPool", **of_windows)
    tree_mask_mode = compiled("kernels/ops/speculative/spec_tree.py", "TreeMaskMode", IntEnum=enum.IntEnum)
    return SimpleNamespace(
        ForwardMode=mode,
        ForwardBatch=compiled(BATCHES, "ForwardBatch", field=field, **{mixin: of_mixin}),
        AttentionBackend=compiled(BACKENDS, "SharedReadEnds", "AttentionBackend", **given)[1],
        AttentionType=attention_type,
        RadixAttention=layer,
        KVWriteLoc=loc,
        MHATokenToKVPool=pool,
        SWAKVPool=compiled("srt/mem_cache/swa_memory_pool.py", "SWAKVPool", BaseSWAKVPool=window_base, **of_windows),
        VerifyMask=compiled(
            "srt/layers/attention/verify_mask.py", "VerifyMask", msgspec=SimpleNamespace(Struct=_Struct)
        ),
        TreeMaskMode=tree_mask_mode,
        SpeculativeAlgorithm=compiled(
            "srt/speculative/spec_info.py", "SpeculativeAlgorithm", Enum=enum.Enum, auto=enum.auto, CustomSpecAlgo=None
        ),
    )


@functools.cache
def pool_class() -> Any:
    """SGLang's pool, with memory full of NaN, and a store in place of its kernel."""

    def initialize(
        self: Any, pages: int, page: int, shapes: list[tuple[int, int]], layers: int, **of_kind: Any
    ) -> None:
        self.size, self.page_size, self.dtype = pages * page - page, page, of_kind["dtype"]
        self.store_dtype, self.start_layer, self.layer_transfer_counter = self.dtype, 0, None
        self.requires_physical_write_loc = self.use_hnd = False
        self.kv_cache_layout, self.quant_method = "nhd", SimpleNamespace()
        self.k_buffer, self.v_buffer = (
            [
                torch.full((pages * page, *shape), math.nan, device=of_kind["device"]).to(self.dtype)
                for _ in range(layers)
            ]
            for shape in shapes
        )

    def store(self: Any, layer_idx: int, loc: Tensor, cache_k: Tensor, cache_v: Tensor) -> None:
        for buffers, new in ((self.k_buffer, cache_k), (self.v_buffer, cache_v)):
            is_fp8 = self.dtype.itemsize == 1
            pages, values = (x.view(torch.uint8) if is_fp8 else x for x in (buffers[layer_idx], new))
            pages[loc] = values

    body = {"__init__": initialize, "_store_kv_layer": store, "is_quantized_kv_cache": False}
    new = type("Pool", (sglang().MHATokenToKVPool,), body)
    new.__abstractmethods__ = frozenset()
    return new


def slots_of(pages: Tensor, page: int) -> Tensor:
    return (pages.unsqueeze(1) * page + torch.arange(page)).flatten()


class Server:
    """Requests with their keys, layers on all keys, and with `has_window_pool` another on a pool of its own."""

    def __init__(
        self,
        *,
        page: int = 16,
        heads: tuple[int, int] = (4, 2),
        dims: tuple[int, int] = (16, 32),
        dtype: torch.dtype = torch.float32,
        cache: torch.dtype | None = None,
        device: str = "cpu",
        requests: int = 4,
        context: int = 96,
        sinks: bool = False,
        layers: int = 1,
        scale: float = 0.3,
        has_window_pool: bool = False,
        draft: int = 0,
        topk: int = 1,
        **layer: Any,
    ) -> None:
        of = sglang()
        self.page, self.heads, self.dims, self.device, self.dtype = page, heads, dims, device, dtype
        of_kind = {"dtype": cache or dtype, "device": device}
        shapes = [(heads[1], dim) for dim in dims]
        columns = -(-context // page)
        pages = requests * columns + 2
        self.scales = [torch.tensor(x, device=device) for x in (0.013, 0.017)]
        self.sinks = torch.randn(heads[0], device=device) if sinks else None
        self.of_cache = of_kind["dtype"]
        window = layer.pop("sliding_window_size", -1)
        windows = [-1, window] if has_window_pool else [window] * layers
        self.layers = [
            of.RadixAttention(
                heads[0], dims[0], scale, heads[1], number, v_head_dim=dims[1], sliding_window_size=window, **layer
            )
            for number, window in enumerate(windows)
        ]
        for one in self.layers:
            one.k_scale, one.v_scale = self.scales  # also where the cache is not quantized
        new_pool = functools.partial(pool_class(), pages, page, shapes, layers, **of_kind)
        self.pool = new_pool()
        if has_window_pool:
            self.pool = object.__new__(of.SWAKVPool)
            self.pool.full_kv_pool, self.pool.swa_kv_pool = new_pool(), new_pool()
            self.pool.layers_mapping, self.pool.layer_transfer_counter = {0: (0, False), 1: (0, True)}, None
            to_window = torch.randperm(pages - 1) + 1
            self.pool.full_to_swa_index_mapping = torch.cat([torch.arange(page), slots_of(to_window, page)]).to(device)
        #: Of each request its tokens in the cache, and for each layer their keys and values.
        self.lengths = [0] * requests
        self.kept = [
            [[x.new_zeros(0, *x.shape[1:]) for x in self._new(0)[1:]] for _ in self.layers] for _ in range(requests)
        ]
        #: Pages of none, which a request gets when it needs them, and those of each.
        self.free = torch.randperm(pages - 1).add(1).tolist()
        self.owned: list[list[int]] = [[] for _ in range(requests)]
        table = torch.randint(pages * page, (requests + 1, context + 3), dtype=torch.int32)
        table[0] = 0  # that of rows that pad a graph
        self.req_to_token = table.to(device)
        self.runner = SimpleNamespace(
            page_size=page,
            model_config=SimpleNamespace(context_len=context, is_encoder_decoder=False),
            token_to_kv_pool=self.pool,
            req_to_token_pool=SimpleNamespace(req_to_token=self.req_to_token),
            kv_index_translator=SimpleNamespace(is_translating=False),
            attention_chunk_size=None,
            use_mla_backend=False,
            is_draft_worker=False,
            spec_algorithm=of.SpeculativeAlgorithm["EAGLE" if draft else "NONE"],
        )
        self.engine = Engine(
            write_loc=of.KVWriteLoc,
            pool=pool_class(),
            verify_mask=of.VerifyMask,
            among_drafts=of.TreeMaskMode.QLEN_ONLY,
            draft_tokens=draft,
            topk=topk,
        )
        self.backend = backend_class(of.AttentionBackend)(self.runner, self.engine)

    def _new(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, as views of one projection; queries have no axis of heads."""
        (q_heads, heads), (dim, dim_v) = self.heads, self.dims
        widths = q_heads * dim, heads * dim, heads * dim_v
        q, k, v = torch.randn(tokens, sum(widths), device=self.device).to(self.dtype).split(widths, dim=1)
        return q, k.unflatten(1, (heads, dim)), v.unflatten(1, (heads, dim_v))

    def slots(self, request: int, first: int, last: int) -> Tensor:
        """The slots of tokens of a request, with pages that it did not have before."""
        mine = self.owned[request]
        while len(mine) * self.page < last:
            mine.append(self.free.pop())
        own = slots_of(torch.tensor(mine), self.page)[:last]
        self.req_to_token[request + 1, :last] = own.to(self.device, torch.int32)
        return own[first:]

    def batch(self, mode: str, new: Mapping[int, int], tree: Tensor | None = None) -> Any:
        """SGLang's batch of requests and the numbers of their new tokens."""
        before = {request: self.lengths[request] for request in new}
        slots = [self.slots(x, before[x], before[x] + count) for x, count in new.items()]
        lengths = [before[x] + (0 if mode == "TARGET_VERIFY" else count) for x, count in new.items()]
        int64 = functools.partial(torch.tensor, dtype=torch.int64, device=self.device)
        tokens = sum(new.values())
        batch = sglang().ForwardBatch(
            forward_mode=sglang().ForwardMode[mode],
            batch_size=len(new),
            input_ids=torch.zeros(tokens, dtype=torch.int64, device=self.device),
            req_pool_indices=int64([x + 1 for x in new]),
            seq_lens=int64(lengths),
            out_cache_loc=torch.cat([*slots, torch.zeros(0, dtype=torch.int64)]).to(self.device),
            seq_lens_sum=None,
        )
        if mode in ("EXTEND", "MIXED"):
            batch.extend_seq_lens = int64([*new.values()]).int()
            batch.extend_seq_lens_cpu, batch.extend_num_tokens = [*new.values()], tokens
        if mode == "TARGET_VERIFY":
            batch.spec_info = SimpleNamespace(draft_token_num=max(new.values()), custom_mask=None)
            if tree is not None:
                batch.spec_info.custom_mask = self.backend.verify_mask.buffer
                batch.spec_info.custom_mask[: tree.numel()].copy_(tree.flatten())  # as the draft stage does
        return batch

    def step(self, mode: str, new: Mapping[int, int], tree: Tensor | None = None) -> None:
        """A forward pass without a graph, whose results are compared with float64."""
        batch = self.batch(mode, new, tree)
        self.backend.init_forward_metadata(batch)
        for layer in self.layers:
            q, k, v = self._new(sum(new.values()))
            expected = self.expected(layer, new, (q, k, v), tree)
            out = self.backend.forward(q, k, v, layer, batch, sinks=self.sinks)
            self.compare(out, expected)
        self.accept(mode, new)

    def expected(self, layer: Any, new: Mapping[int, int], qkv: tuple[Tensor, ...], tree: Tensor | None) -> Tensor:
        """The output in float64, (T, Hq · Dv); keeps the new keys and values."""
        found, begin = [], 0
        for number, (request, count) in enumerate(new.items()):
            q, *new_kv = (x[begin : begin + count] for x in qkv)
            begin += count
            kept = self.kept[request][layer.layer_id]
            kept[:] = [torch.cat(pair) for pair in zip(kept, map(self.stored, new_kv, self.scales), strict=True)]
            mask: dict[str, Any] = {"is_causal": True, "causal_alignment": "bottom_right"}
            if layer.sliding_window_size >= 0:
                mask["window_size"] = (layer.sliding_window_size, 0)
            if tree is not None:
                seen = torch.ones(count, len(kept[0]), dtype=torch.bool, device=self.device)
                seen[:, len(kept[0]) - count :] = tree[number].to(self.device)
                mask = {"attn_mask": seen[None, None]}
            if layer.logit_cap:
                mask["softcap"] = layer.logit_cap
            if self.sinks is not None:
                mask["sinks"] = self.sinks
            dense = [x.double().transpose(0, 1)[None] for x in (q.unflatten(1, (self.heads[0], -1)), *kept)]
            out, _ = attend(*dense, scale=layer.scaling, **mask)
            found.append(out[0].transpose(0, 1).flatten(1))
        return torch.cat(found)

    def stored(self, new: Tensor, scale: Tensor) -> Tensor:
        if self.of_cache.itemsize > 1:
            return new.clone()
        return (new / scale).to(self.of_cache).to(self.dtype).double().mul(scale.double())

    def compare(self, out: Tensor, expected: Tensor) -> None:
        few = 3e-5 if self.dtype == torch.float32 else 2e-2
        torch.testing.assert_close(out.double(), expected, atol=few, rtol=few)

    def accept(self, mode: str, new: Mapping[int, int]) -> None:
        """Forgets all tokens of drafts but the first, and in the pool of windows the slots left of them."""
        for request, count in new.items():
            self.lengths[request] += 1 if mode == "TARGET_VERIFY" else count
            if mode == "TARGET_VERIFY":
                self.kept[request] = [[x[: len(x) - count + 1] for x in kv] for kv in self.kept[request]]
            if hasattr(self.pool, "swa_kv_pool"):
                gone = max(0, self.lengths[request] - self.layers[1].sliding_window_size) // self.page
                slots = slots_of(torch.tensor(self.owned[request][:gone], dtype=torch.int64), self.page)
                mapping = self.pool.full_to_swa_index_mapping
                for buffer in (*self.pool.swa_kv_pool.k_buffer, *self.pool.swa_kv_pool.v_buffer):
                    buffer[mapping[slots.to(self.device)]] = math.nan
                mapping[slots.to(self.device)] = 0


class Graph:
    """A graph of as many rows, with SGLang's static buffers; on a CPU its replay repeats the calls."""

    def __init__(self, server: Server, mode: str, rows: int, each: int = 1) -> None:
        self.server, self.mode, self.rows, self.each = server, mode, rows, each
        tokens, backend = rows * each, server.backend
        int64 = {"dtype": torch.int64, "device": server.device}
        fill = backend.get_cuda_graph_seq_len_fill_value()
        self.static = sglang().ForwardBatch(
            forward_mode=sglang().ForwardMode[mode],
            batch_size=rows,
            input_ids=torch.zeros(tokens, **int64),
            req_pool_indices=torch.zeros(rows, **int64),
            seq_lens=torch.full((rows,), fill, **int64),
            out_cache_loc=torch.zeros(tokens, **int64),
            seq_lens_sum=rows * fill,
        )
        if mode == "TARGET_VERIFY":
            self.static.spec_info = SimpleNamespace(draft_token_num=each, custom_mask=None)
        self.inputs = [server._new(tokens) for _ in server.layers]
        self.fill = fill
        backend.init_forward_metadata_out_graph(self.static, in_capture=True)
        self.replay, self.outs = self._captured()

    def _run(self) -> list[Tensor]:
        backend = self.server.backend
        backend.init_forward_metadata_in_graph(self.static)
        # A pool divides keys in place, so they are clones.
        return [
            backend.forward(q, k.clone(), v.clone(), layer, self.static, sinks=self.server.sinks)
            for layer, (q, k, v) in zip(self.server.layers, self.inputs, strict=True)
        ]

    def _captured(self) -> tuple[Callable[[], None], list[Tensor]]:
        outs = self._run()
        if self.server.device == "cpu":
            return lambda: [one.copy_(new) for one, new in zip(outs, self._run(), strict=True)] and None, outs
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = self._run()
        return graph.replay, outs

    def fill_from(self, batch: Any) -> None:
        static = self.static
        for name, padding in (("req_pool_indices", 0), ("seq_lens", self.fill), ("out_cache_loc", 0)):
            mine, real = getattr(static, name), getattr(batch, name)
            mine[: len(real)] = real
            mine[len(real) :] = padding
        static.spec_info = batch.spec_info
        self.server.backend.init_forward_metadata_out_graph(static)

    def step(self, new: Mapping[int, int], tree: Tensor | None = None) -> None:
        """Fills the buffers from a batch of as many requests or fewer, replays, and compares."""
        server, static = self.server, self.static
        self.fill_from(server.batch(self.mode, new, tree))
        tokens, expected = sum(new.values()), []
        for layer, inputs in zip(server.layers, self.inputs, strict=True):
            for mine, fresh in zip(inputs, server._new(len(static.input_ids)), strict=True):
                mine.copy_(fresh)
            expected.append(server.expected(layer, new, tuple(x[:tokens] for x in inputs), tree))
        self.replay()
        for out, want in zip(self.outs, expected, strict=True):
            server.compare(out[:tokens], want)
        server.accept(self.mode, new)


class ServedLayers:
    """The layers of a model with SGLang's batches, for `greedy_serving`; decodes take a graph's batch with `graphs`."""

    def __init__(self, requests: int, layers: int, *, graphs: bool, **options: Any) -> None:
        self.server = Server(requests=requests, layers=layers, **options)
        self.dtype, self.batch, self.graph = self.server.dtype, None, None
        if graphs:
            self.server.backend.init_cuda_graph_state(requests, requests)
            self.graph = Graph(self.server, "DECODE", requests)

    def prepare(self, new: Mapping[int, int]) -> int:
        server, singles = self.server, sum(count == 1 for count in new.values())
        mode = "DECODE" if singles == len(new) else "MIXED" if singles else "EXTEND"
        self.batch = server.batch(mode, new)
        if self.graph is not None and mode == "DECODE":
            self.graph.fill_from(self.batch)
            self.batch = self.graph.static
            server.backend.init_forward_metadata_in_graph(self.batch)
        else:
            server.backend.init_forward_metadata(self.batch)
        server.accept(mode, new)
        return len(self.batch.input_ids)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = self.server.backend.forward(q.flatten(1), k, v, self.server.layers[layer], self.batch)
        return out.view_as(q)

    def end(self, request: int) -> None:
        server = self.server
        server.free += server.owned[request]
        server.owned[request], server.lengths[request] = [], 0


def trees(rows: int, tokens: int) -> Tensor:
    """Which tokens each token of a draft sees in a random tree, itself and its ancestors, (rows, tokens, tokens)."""
    masks = torch.eye(tokens, dtype=torch.bool).repeat(rows, 1, 1)
    for row in masks:
        for token in range(1, tokens):
            row[token] |= row[int(torch.randint(token, ()))]
    return masks

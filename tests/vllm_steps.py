"""A layer of vLLM on the backend, driven by vLLM's metadata as its workers drive it; vLLM is imported on demand.

No slot but those of keys that a new token sees holds a number, page ids past a sequence are wild, and what pads a batch
is NaN.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from float64_reference import attend
from torch import Tensor

E4M3 = torch.float8_e4m3fn

#: Page ids in entries of the table that belong to no sequence.
WILD = (-1, 2**31 - 1, 0, 5)


def backend_of_vllm() -> Any:
    """The registered backend; skips a test where vLLM is missing.

    Python files alone have no platform: that of a GPU would load vLLM's own kernels, which nothing here runs.
    """
    why = "no vLLM 0.33 can be imported; `make test-engines` runs this"
    pytest.importorskip("vllm", reason=why, exc_type=ImportError)
    platforms = pytest.importorskip("vllm.platforms", reason=why, exc_type=ImportError)
    if importlib.util.find_spec("vllm._C_stable_libtorch") is None:
        platforms._current_platform = importlib.import_module("vllm.platforms.interface").UnspecifiedPlatform()
    pytest.importorskip("vllm.v1.attention.backend", reason=why, exc_type=ImportError)
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from cudnn_sdpa.integrations.vllm import NAME, register

    register()
    return AttentionBackendEnum[NAME].get_class()


def config_of(**layers: Any) -> Any:
    """What the backend reads of vLLM's configuration, whose own classes need the whole of vLLM."""
    return SimpleNamespace(
        kernel_config=SimpleNamespace(enable_jit_warmup=True),
        compilation_config=SimpleNamespace(static_forward_context=layers),
    )


def layer_of(
    heads: int, heads_kv: int, dims: tuple[int, int], dtype: torch.dtype, device: str = "cpu", **options: Any
) -> Any:
    """What the backend reads of vLLM's layer, and its implementation, with the scales of a cache in FP8."""
    from cudnn_sdpa.integrations.vllm_backend import CudnnSdpaImpl

    impl = object.__new__(CudnnSdpaImpl)  # without the process groups that vLLM's `__new__` reads
    impl.__init__(heads, dims[0], dims[0] ** -0.5, heads_kv, **options)
    impl.process_weights_after_loading(dtype)
    return SimpleNamespace(
        impl=impl,
        dtype=dtype,
        num_heads=heads,
        head_size=dims[0],
        head_size_v=dims[1],
        _k_scale=torch.tensor(0.013, device=device),
        _v_scale=torch.tensor(0.017, device=device),
    )


class Layer:
    """A layer with vLLM's buffers for batches of up to as many rows and tokens.

    Attributes:
        batch: vLLM's metadata of the buffers.
        caches: Those of three layers, of which `kv_cache` is that of this one.
        out: What the last step has written.
    """

    def __init__(
        self,
        rows: int,
        tokens: int,
        max_query_len: int,
        *,
        layout: str = "LBNHC",
        heads: int = 8,
        heads_kv: int = 2,
        dims: tuple[int, int] = (16, 16),
        page: int = 16,
        columns: int = 6,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        causal: bool = True,
        **options: Any,
    ) -> None:
        from vllm.v1.attention.backend import CommonAttentionMetadata
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheLayout

        from cudnn_sdpa.integrations.vllm_backend import CudnnSdpaMetadataBuilder

        self.layer = layer_of(heads, heads_kv, dims, dtype, device, **options)
        self.is_fp8 = options.get("kv_cache_dtype", "auto").startswith("fp8")
        self.page, self.causal, self.options = page, causal, options
        stored = torch.uint8 if self.is_fp8 else dtype
        shape = (3, 1 + rows * columns, heads_kv, page, sum(dims))  # layers, blocks, heads, block, content
        order = KVCacheLayout[layout].stride_order
        memory = torch.empty([shape[i] for i in order], dtype=stored, device=device)
        self.caches = memory.permute([order.index(i) for i in range(5)])
        self.kv_cache = self.caches[1]
        widths = heads * dims[0], heads_kv * dims[0], heads_kv * dims[1]
        self.qkv = torch.empty(tokens, sum(widths), dtype=dtype, device=device)
        self.query, self.key, self.value = (
            x.unflatten(1, (n, -1))
            for x, n in zip(self.qkv.split(widths, dim=1), (heads, heads_kv, heads_kv), strict=True)
        )
        self.out = torch.empty(tokens, heads, dims[1], dtype=dtype, device=device)
        ints = {"dtype": torch.int32, "device": device}
        self.batch = CommonAttentionMetadata(
            query_start_loc=torch.zeros(rows + 1, **ints),
            query_start_loc_cpu=torch.zeros(rows + 1, dtype=torch.int32),
            seq_lens=torch.zeros(rows, **ints),
            num_reqs=rows,
            num_actual_tokens=tokens,
            max_query_len=max_query_len,
            max_seq_len=columns * page,
            block_table_tensor=torch.zeros(rows, columns, **ints),
            slot_mapping=torch.full((tokens,), -1, device=device),
            causal=causal,
        )
        spec = FullAttentionSpec(
            block_size=page, num_kv_heads=heads_kv, head_size=dims[0], head_size_v=dims[1], dtype=stored
        )
        self.builder = CudnnSdpaMetadataBuilder(spec, ["layer"], config_of(layer=self.layer), torch.device(device))

    def metadata(self) -> Any:
        return self.builder.build(0, self.batch)

    def step(self, metadata: Any) -> Tensor:
        """What a layer does: it writes new keys and values, then attends."""
        impl, batch = self.layer.impl, self.batch
        impl.do_kv_cache_update(self.layer, self.key, self.value, self.kv_cache, batch.slot_mapping)
        result: Tensor = impl.forward(
            self.layer, self.query, self.key, self.value, self.kv_cache, metadata, output=self.out
        )
        return result

    def fill(self, past: Sequence[int], new: Sequence[int]) -> Tensor:
        """Draws sequences with so many keys in the cache, and new tokens; returns their attention in float64.

        Rows behind them pad the batch, as do tokens. Tokens of padding have zeros.
        """
        batch, table = self.batch, self.batch.block_table_tensor
        rows, columns = table.shape
        device = table.device
        for x in (self.qkv, self.out):
            x.fill_(math.nan)
        self.kv_cache.fill_(255 if self.is_fp8 else math.nan)  # all bits: a NaN in E4M3
        ends = [*accumulate(new, initial=0)]
        ends += [ends[-1]] * (rows + 1 - len(ends))
        lengths = [p + n for p, n in zip(past, new, strict=True)]
        lengths += [0] * (rows - len(lengths))
        free = iter((1 + torch.randperm(self.kv_cache.shape[0] - 1)).tolist())  # block 0 is vLLM's null block
        table.copy_(torch.tensor(WILD)[torch.randint(len(WILD), (rows, columns))])
        slots = torch.full((self.qkv.shape[0],), -1)
        exact = torch.zeros_like(self.out, dtype=torch.float64)
        for b, (begin, end) in enumerate(pairwise(ends)):
            length, count = lengths[b], end - begin
            if not count:
                continue
            of_q, of_kv = self.query[begin:end], (length, self.kv_cache.shape[1], -1)
            wide = torch.randn(length, self.kv_cache.shape[1], self.kv_cache.shape[3]).to(of_q)
            k, v = (x.view(of_kv) for x in wide.split((self.layer.head_size, self.layer.head_size_v), dim=2))
            of_q.copy_(torch.randn(of_q.shape))
            self.key[begin:end], self.value[begin:end] = k[-count:], v[-count:]
            first = self._first(length - count)
            for column in range(first // self.page, -(-length // self.page)):
                table[b, column] = next(free)
            table[b, : first // self.page] = 0
            j = torch.arange(first, length, device=device)
            ids = table[b, j // self.page].long()
            slots[begin:end] = (ids * self.page + j % self.page)[-count:].cpu()
            stored = torch.cat([self._stored(k, "_k_scale"), self._stored(v, "_v_scale")], dim=2)[first:]
            old = len(j) - count
            self.kv_cache[ids[:old], :, j[:old] % self.page] = stored[:old]
            read = [self._read(x[first:], name) for x, name in ((k, "_k_scale"), (v, "_v_scale"))]
            exact[begin:end] = self._exact(of_q, *read)
        batch.query_start_loc.copy_(torch.tensor(ends))
        batch.query_start_loc_cpu.copy_(torch.tensor(ends))
        batch.seq_lens.copy_(torch.tensor(lengths))
        batch.slot_mapping.copy_(slots)
        return exact

    def _first(self, past: int) -> int:
        """The first key that a new token sees; vLLM frees the pages before it."""
        window = self.options.get("sliding_window")
        return 0 if window is None else max(0, past - (window - 1))

    def _quantized(self, x: Tensor, scale: str) -> Tensor:
        """Tokens (n, Hkv, D) as the cache holds them; a scale is one number, or one for each head."""
        return (x.float() / getattr(self.layer, scale).view(-1, 1)).clamp(-448, 448).to(E4M3)

    def _stored(self, x: Tensor, scale: str) -> Tensor:
        return self._quantized(x, scale).view(torch.uint8) if self.is_fp8 else x

    def _read(self, x: Tensor, scale: str) -> Tensor:
        return self._quantized(x, scale).double() * getattr(self.layer, scale).view(-1, 1) if self.is_fp8 else x

    def _exact(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        options: dict[str, Any] = {"is_causal": self.causal, "causal_alignment": "bottom_right"}
        if (window := self.options.get("sliding_window")) is not None:
            options["window_size"] = (window - 1, 0 if self.causal else window - 1)
        if cap := self.options.get("logits_soft_cap"):
            options["softcap"] = cap
        if (sinks := self.options.get("sinks")) is not None:
            options["sinks"] = sinks.double()
        dense = (x.double().transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        return attend(*dense, **options)[0][0].transpose(0, 1)


class ServedLayers:
    """The layers of a model, up to three, with vLLM's batches of its requests, for `greedy_serving`.

    With `graphs`, steps of decodes alone take the metadata of a captured graph, and are padded to its rows.
    """

    def __init__(self, requests: int, tokens: int, *, graphs: bool, **settings: Any) -> None:
        self.buffers = Layer(requests, tokens, 1, **settings)
        self.dtype = self.buffers.out.dtype
        self.buffers.caches.fill_(math.nan)
        self.buffers.batch.block_table_tensor.fill_(WILD[0])
        self.lengths = [0] * requests
        self.free = (1 + torch.randperm(self.buffers.kv_cache.shape[0] - 1)).tolist()
        self.owned: list[list[int]] = [[] for _ in range(requests)]
        self.of_graph = self.buffers.builder.build_for_cudagraph_capture(self.buffers.batch) if graphs else None
        self.metadata: Any = None
        self.slots = self.buffers.batch.slot_mapping

    def prepare(self, new: Mapping[int, int]) -> int:
        batch, page = self.buffers.batch, self.buffers.page
        slots = []
        for row, (request, count) in enumerate(new.items()):
            mine, before = self.owned[request], self.lengths[request]
            self.lengths[request] += count
            while len(mine) * page < self.lengths[request]:
                mine.append(self.free.pop())
            batch.block_table_tensor[row, : len(mine)] = torch.tensor(mine)
            slots += [mine[j // page] * page + j % page for j in range(before, self.lengths[request])]
        rows, tokens = len(new), len(slots)
        ends = [*accumulate(new.values(), initial=0)]
        ends += [tokens] * (len(self.lengths) - rows)
        batch.query_start_loc.copy_(torch.tensor(ends))
        batch.query_start_loc_cpu.copy_(torch.tensor(ends))
        batch.seq_lens.zero_()[:rows] = torch.tensor([self.lengths[x] for x in new])
        batch.slot_mapping.fill_(-1)[:tokens] = torch.tensor(slots)
        if self.of_graph is not None and tokens == rows:
            self.metadata, self.slots = self.of_graph, batch.slot_mapping[: len(self.lengths)]
        else:
            real = replace(
                batch,
                num_reqs=rows,
                num_actual_tokens=tokens,
                max_query_len=max(new.values()),
                max_seq_len=max(self.lengths),
                query_start_loc=batch.query_start_loc[: rows + 1],
                query_start_loc_cpu=batch.query_start_loc_cpu[: rows + 1],
                seq_lens=batch.seq_lens[:rows],
                block_table_tensor=batch.block_table_tensor[:rows],
                slot_mapping=batch.slot_mapping[:tokens],
            )
            self.metadata, self.slots = self.buffers.builder.build(0, real), real.slot_mapping
        return len(self.slots)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        of_layer, cache, out = self.buffers.layer, self.buffers.caches[layer], torch.empty_like(q)
        of_layer.impl.do_kv_cache_update(of_layer, k, v, cache, self.slots)
        return of_layer.impl.forward(of_layer, q, k, v, cache, self.metadata, output=out)

    def end(self, request: int) -> None:
        self.free += self.owned[request]
        self.owned[request], self.lengths[request] = [], 0

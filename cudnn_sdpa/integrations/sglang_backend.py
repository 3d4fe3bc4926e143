"""An attention backend of SGLang 0.5.23 on packed queries and pages."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cudnn_sdpa.attention.arguments import FP8_DTYPES
from cudnn_sdpa.attention.paged_varlen.sdpa_paged_varlen import sdpa_paged_varlen
from cudnn_sdpa.errors import raise_if_unsupported
from cudnn_sdpa.integrations.sglang import NAME

_OTHERS = "another --attention-backend, such as triton"

#: The names of the forward modes that are served: those with prompts, that of drafts, and all.
_EXTENDS, _VERIFY = ("EXTEND", "MIXED"), "TARGET_VERIFY"
_MODES = (*_EXTENDS, _VERIFY, "DECODE", "IDLE")

#: The names of the algorithms whose drafts are verified: those that write masks into `verify_mask`, and none.
_DRAFTS = ("NONE", "EAGLE", "EAGLE3", "STANDALONE")


class Engine(NamedTuple):
    """Classes of SGLang that the backend reads, besides its model runner.

    Attributes:
        write_loc: The class `KVWriteLoc`.
        pool: The class `MHATokenToKVPool`, whose pages are read.
        verify_mask: The class `VerifyMask`.
        among_drafts: `TreeMaskMode.QLEN_ONLY`: masks have a row and a column for each token of a draft.
        draft_tokens: The most tokens of a draft, with the one before it; 0 without speculation.
        topk: Branches of a draft; from 2 on it is a tree.
        context_ranks: Over how many ranks a sequence is spread.
    """

    write_loc: Any
    pool: Any
    verify_mask: Any
    among_drafts: Any
    draft_tokens: int = 0
    topk: int = 1
    context_ranks: int = 1


def create(runner: Any) -> Any:
    """The backend of a model runner of SGLang's."""
    context = importlib.import_module("sglang.srt.runtime_context")
    memory_pool = importlib.import_module("sglang.srt.mem_cache.memory_pool")
    parallel = context.get_parallel()
    engine = Engine(
        write_loc=memory_pool.KVWriteLoc,
        pool=memory_pool.MHATokenToKVPool,
        verify_mask=importlib.import_module("sglang.srt.layers.attention.verify_mask").VerifyMask,
        among_drafts=importlib.import_module("sglang.srt.speculative.eagle_utils").TreeMaskMode.QLEN_ONLY,
        draft_tokens=context.max_speculative_num_draft_tokens() or 0,
        topk=context.get_spec().speculative_eagle_topk or 1,
        context_ranks=max(parallel.dcp_size, parallel.attn_cp_size),
    )
    base = importlib.import_module("sglang.srt.layers.attention.base_attn_backend").AttentionBackend
    return backend_class(base)(runner, engine)


@functools.cache
def backend_class(base: type) -> Any:
    """The backend, as a subclass of SGLang's `AttentionBackend`."""
    return type("CudnnSdpaBackend", (PagedAttention, base), {"__module__": __name__})


@dataclass(frozen=True)
class Step:
    """Tensors that all layers of a forward pass share, or buffers for them.

    Attributes:
        tables: Pages of each sequence, (B, max_pages) int32; where layers with windows have a pool of their own, also
            the pages there.
        seq_lens: Keys of each, new ones included, (B,) int32.
        ends: `cu_seqlens_q`, (B + 1,) int32.
        window_slots: Where layers with a pool of their own write the new tokens, (T,) int64.
        max_seqlen_q: New tokens of the longest sequence, or more.
        tree_mask: Which tokens of its draft each token sees, (T, tokens of a draft).
    """

    tables: tuple[Tensor, ...]
    seq_lens: Tensor
    ends: Tensor
    window_slots: Tensor | None = None
    max_seqlen_q: int = 1
    tree_mask: Tensor | None = None


class PagedAttention:
    """The methods of SGLang's `AttentionBackend`, on `sdpa_paged_varlen`.

    A captured graph has its `Step` in buffers that all graphs share, and its first kernels fill them.
    """

    needs_cpu_seq_lens = False

    def __init__(self, runner: Any, engine: Engine) -> None:
        _check_runner(runner, engine)
        self.engine = engine
        self.page_size = runner.page_size
        self.max_context_len = runner.model_config.context_len
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.kv_index_translator = runner.kv_index_translator
        self.req_to_token_pool = runner.req_to_token_pool
        self.req_to_token: Tensor = runner.req_to_token_pool.req_to_token
        self.has_chunks = runner.attention_chunk_size is not None
        self.has_window_pool = hasattr(runner.token_to_kv_pool, "swa_kv_pool")
        self.forward_metadata: Step | None = None
        self._mask = self._new_mask(self.req_to_token.shape[0])
        self._graph_buffers: Step | None = None
        self._graph_steps: dict[tuple[str, int, int], Step] = {}

    @property
    def verify_mask(self) -> Any:
        """The masks of drafts, into which SGLang's draft stage writes; None without speculation."""
        return self._mask

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def init_forward_metadata(self, forward_batch: Any) -> None:
        buffers = self._new_buffers(forward_batch.batch_size, _new_tokens(forward_batch))
        self.forward_metadata = self._new_step(forward_batch, buffers)
        self._check_mask(forward_batch)
        self._fill(self.forward_metadata, forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self._graph_buffers = self._new_buffers(max_bs, max_num_tokens)
        self._graph_steps.clear()
        if self._mask is not None and not self._mask.fits(max_bs):
            self._mask = self._new_mask(max_bs)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        mode = forward_batch.forward_mode.name
        raise_if_unsupported(
            f"a CUDA graph of the forward mode {mode} on SGLang's attention backend {NAME}",
            {"its number of new tokens is not fixed": mode in _EXTENDS},
            "--cuda-graph-backend-prefill breakable or disabled",
        )
        key = mode, forward_batch.batch_size, forward_batch.input_ids.shape[0]
        if in_capture:
            assert self._graph_buffers is not None, "SGLang calls init_cuda_graph_state first"
            self._graph_steps[key] = self._new_step(forward_batch, self._graph_buffers)
        self.forward_metadata = self._graph_steps[key]
        if not in_capture:
            self._check_mask(forward_batch)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        assert self.forward_metadata is not None, "SGLang calls init_forward_metadata_out_graph first"
        self._fill(self.forward_metadata, forward_batch)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        """The output (T, Hq · Dv) of new tokens, whose keys and values are first written into their slots."""
        step, pool, sinks = self.forward_metadata, self.token_to_kv_pool, kwargs.pop("sinks", None)
        assert step is not None, "SGLang calls init_forward_metadata first"
        _check_layer(layer, forward_batch, kwargs, has_chunks=self.has_chunks)
        if save_kv_cache and k is not None:
            where = self.engine.write_loc.for_batch(forward_batch, swa_loc=step.window_slots)
            pool.set_kv_buffer(layer, where, k, v, layer.k_scale, layer.v_scale)
        k_pages, v_pages = (x.view(-1, self.page_size, *x.shape[1:]) for x in pool.get_kv_buffer(layer.layer_id))
        is_in_window_pool = self.has_window_pool and pool.layers_mapping[layer.layer_id][1]
        is_quantized = k_pages.dtype in FP8_DTYPES  # if not, a checkpoint's scales have not been applied
        k_scale, v_scale = (
            x.float() if is_quantized and x is not None else None for x in (layer.k_scale, layer.v_scale)
        )
        buffer = forward_batch._attn_output
        out: Tensor = sdpa_paged_varlen(
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            k_pages,
            v_pages,
            step.tables[is_in_window_pool],
            seq_lens_kv=step.seq_lens,
            cu_seqlens_q=step.ends,
            max_seqlen_q=step.max_seqlen_q,
            page_layout="NHD",
            window_size=(layer.sliding_window_size, 0) if layer.sliding_window_size >= 0 else None,
            scale=layer.scaling,
            softcap=layer.logit_cap or None,
            sinks=sinks,
            tree_mask=step.tree_mask,
            k_scale=k_scale,
            v_scale=v_scale,
            out=None if buffer is None else buffer.view(-1, layer.tp_q_head_num, layer.v_head_dim),
        )
        return out.flatten(1)

    forward_decode = forward_extend

    def _new_mask(self, rows: int) -> Any:
        tokens, is_read = self.engine.draft_tokens, self.engine.topk > 1
        if tokens == 0:
            return None
        buffer = torch.ones(rows * tokens * tokens, dtype=torch.bool, device=self.req_to_token.device)
        return self.engine.verify_mask(buffer=buffer, mode=self.engine.among_drafts, max_bs=rows, is_read=is_read)

    def _new_buffers(self, rows: int, tokens: int) -> Step:
        new = partial(torch.zeros, dtype=torch.int32, device=self.req_to_token.device)
        table, slots = (rows, -(-self.req_to_token.shape[1] // self.page_size)), None
        if self.has_window_pool:
            slots = new(tokens, dtype=torch.int64)
        tables = tuple(new(table) for _ in range(1 + self.has_window_pool))
        return Step(tables, new(rows), new(rows + 1), slots)

    def _new_step(self, forward_batch: Any, buffers: Step) -> Step:
        """The step of a batch in the first rows of buffers, which `_fill` fills."""
        mode, rows, longest, tree = forward_batch.forward_mode.name, forward_batch.batch_size, 1, None
        ragged = getattr(forward_batch.spec_info, "ragged_verify_layout", None)
        raise_if_unsupported(
            f"the forward mode {mode} on SGLang's attention backend {NAME}",
            {
                "it is neither for prompts, decodes nor drafts that are verified": mode not in _MODES,
                "the drafts of a batch have different lengths": ragged is not None,
            },
            _OTHERS,
        )
        if mode in _EXTENDS:
            lengths = forward_batch.extend_seq_lens_cpu  # absent where only the GPU knows them
            longest = forward_batch.extend_num_tokens if lengths is None else max(lengths, default=0)
        elif mode == _VERIFY:
            longest = forward_batch.spec_info.draft_token_num
            if self.engine.topk > 1 and longest > 1:
                tree = self._mask.buffer[: rows * longest * longest].view(rows * longest, longest)
        slots = buffers.window_slots
        return Step(
            tables=tuple(table[:rows] for table in buffers.tables),
            seq_lens=buffers.seq_lens[:rows],
            ends=buffers.ends[: rows + 1],
            window_slots=None if slots is None else slots[: _new_tokens(forward_batch)],
            max_seqlen_q=longest,
            tree_mask=tree,
        )

    def _check_mask(self, forward_batch: Any) -> None:
        """Trees are read from `verify_mask`, so that is where the draft stage has to have written them."""
        mode = getattr(forward_batch, "actual_forward_mode", forward_batch.forward_mode).name
        if mode == _VERIFY and self.forward_metadata is not None and self.forward_metadata.tree_mask is not None:
            mask = forward_batch.spec_info.custom_mask
            raise_if_unsupported(
                f"a tree of drafts on SGLang's attention backend {NAME}",
                {
                    "its mask is not in the backend's verify_mask, as in two-batch overlap": mask is None
                    or mask.data_ptr() != self._mask.buffer.data_ptr()
                },
                "--speculative-eagle-topk 1",
            )

    def _fill(self, step: Step, forward_batch: Any) -> None:
        """Launches kernels that write a step's tensors, and can be captured; nothing waits for the GPU."""
        mode, rows = forward_batch.forward_mode.name, forward_batch.batch_size
        if mode in _EXTENDS:
            torch.cumsum(forward_batch.extend_seq_lens, 0, dtype=torch.int32, out=step.ends[1:])
        else:
            torch.arange(0, rows * step.max_seqlen_q + 1, step.max_seqlen_q, out=step.ends)
        lengths = forward_batch.seq_lens
        step.seq_lens.copy_(lengths + step.max_seqlen_q if mode == _VERIFY else lengths)  # drafts are not counted yet
        first_slots = self.req_to_token[:, :: self.page_size].index_select(0, forward_batch.req_pool_indices)
        torch.floor_divide(first_slots, self.page_size, out=step.tables[0])
        if step.window_slots is not None:
            slots = self.token_to_kv_pool.full_to_swa_index_mapping
            step.tables[1].copy_(slots[first_slots] // self.page_size)
            if len(step.window_slots):
                step.window_slots.copy_(slots[forward_batch.out_cache_loc])


def _new_tokens(forward_batch: Any) -> int:
    return 0 if forward_batch.out_cache_loc is None else len(forward_batch.out_cache_loc)


def _check_runner(runner: Any, engine: Engine) -> None:
    pool, algorithm = runner.token_to_kv_pool, runner.spec_algorithm
    inner = [getattr(pool, name) for name in ("full_kv_pool", "swa_kv_pool") if hasattr(pool, name)] or [pool]
    others = [type(x).__name__ for x in inner if type(x) is not engine.pool]
    raise_if_unsupported(
        f"this model on SGLang's attention backend {NAME}",
        {
            "it has multi-head latent attention": runner.use_mla_backend,
            "its decoder attends to an encoder": runner.model_config.is_encoder_decoder,
            "it writes drafts; --speculative-draft-attention-backend names their backend": runner.is_draft_worker,
            f"drafts of {algorithm} are verified with masks of other forms": getattr(algorithm, "name", "")
            not in _DRAFTS,
            f"a sequence is spread over {engine.context_ranks} ranks": engine.context_ranks > 1,
            "slots have virtual ids, as of --enable-unified-memory": runner.kv_index_translator.is_translating,
            f"its KV cache is a {' and a '.join(others)}, not a {engine.pool.__name__}": bool(others),
            "its keys and values are quantized in blocks": not others and any(x.is_quantized_kv_cache for x in inner),
            "its pages are not (page size, heads, head dim)": not others
            and any(x.kv_cache_layout != "nhd" for x in inner),
        },
        _OTHERS,
    )


def _check_layer(layer: Any, forward_batch: Any, kwargs: Mapping[str, Any], *, has_chunks: bool) -> None:
    unknown = [name for name, value in kwargs.items() if value is not None and value is not False]
    raise_if_unsupported(
        f"layer {layer.layer_id} on SGLang's attention backend {NAME}",
        {
            "it is cross-attention": layer.is_cross_attention,
            f"its attn_type is {layer.attn_type.value}": layer.attn_type.value != "decoder",
            "it attends within chunks": has_chunks and layer.use_irope,
            f"its logits are capped by {layer.logit_capping_method}": bool(layer.logit_cap)
            and layer.logit_capping_method != "tanh",
            f"its pos_encoding_mode is {layer.pos_encoding_mode}": layer.pos_encoding_mode != "NONE",
            "its scores have a temperature (xai_temperature_len)": (layer.xai_temperature_len or 0) > 0,
            "it returns the LSE": forward_batch.mha_return_lse,
            f"it passes {', '.join(unknown)}": bool(unknown),
        },
        _OTHERS,
    )

"""An attention backend of vLLM 0.33 on packed queries and pages: its classes, which vLLM imports by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from vllm.model_executor.warmup.jit_warmup import VllmJitKernel
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)

from cudnn_sdpa.attention.paged.append import append_paged_kv
from cudnn_sdpa.attention.paged_varlen.explain import describe_paged_varlen
from cudnn_sdpa.attention.paged_varlen.sdpa_paged_varlen import sdpa_paged_varlen
from cudnn_sdpa.errors import ArgumentError, UnsupportedError, raise_if_unsupported
from cudnn_sdpa.graph.target import Target
from cudnn_sdpa.integrations.vllm import NAME

E4M3 = torch.float8_e4m3fn

#: vLLM's names of the dtypes of a cache; None is the dtype of the model.
CACHE_DTYPES = {"auto": None, "float16": torch.float16, "bfloat16": torch.bfloat16, "fp8": E4M3, "fp8_e4m3": E4M3}

#: Numbers of new tokens that take the two forms of the kernel, whatever the number of heads is.
OF_EACH_FORM = 1, 65


class CudnnSdpaBackend(AttentionBackend):  # type: ignore[misc]  # vLLM is not there where types are checked
    """The backend's abilities. It reads pages of any size, in any memory order."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(CACHE_DTYPES)
    forward_includes_kv_cache_update = False
    supports_kv_cache_update_bypass = True

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type[CudnnSdpaImpl]:
        return CudnnSdpaImpl

    @staticmethod
    def get_builder_cls() -> type[CudnnSdpaMetadataBuilder]:
        return CudnnSdpaMetadataBuilder

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return True

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        """Why the kernel cannot serve such layers, in words; head sizes and GPUs have no other answer than this."""
        if kv_cache_dtype == "fp8_e5m2":
            return "fp8_e5m2 has no scales in vLLM, and two bits of mantissa: use --kv-cache-dtype fp8, which is E4M3"
        if (kv_cache_dtype or "auto") not in CACHE_DTYPES:
            return f"kv_cache_dtype is {kv_cache_dtype}; this backend has {', '.join(CACHE_DTYPES)}"
        if use_mla:
            return "multi-head latent attention has other classes in vLLM, which this backend lacks"
        if dtype not in cls.supported_dtypes:
            return f"dtype is {dtype}; the kernel has torch.float16 and torch.bfloat16"
        with torch.device("meta"):
            stored = CACHE_DTYPES[kv_cache_dtype or "auto"] or dtype
            cache = torch.empty(1, 1, block_size or 16, 2 * head_size, dtype=stored)
            call = {
                "q": torch.empty(1, 1, head_size, dtype=dtype),
                **pages_of(cache, head_size),
                "page_table": torch.empty(1, 1, dtype=torch.int32),
                "seq_lens_kv": torch.empty(1, dtype=torch.int32),
                "cu_seqlens_q": torch.empty(2, dtype=torch.int32),
            }
        sm = 10 * device_capability.major + device_capability.minor
        properties = (("deviceVer", 10 * sm), ("multiProcessorCount", 0))
        try:
            description = describe_paged_varlen(**call, max_seqlen_q=1, page_layout="HND")
            description.key(Target(properties, cudnn=0, frontend="", name="this GPU"), None)
        except UnsupportedError as error:
            return "; ".join(error.reasons)
        except ArgumentError as error:
            return str(error)
        if (size := head_size * stored.itemsize) % 16:
            return f"values begin {size} bytes behind keys; the kernel reads at multiples of 16 bytes"
        return None


@dataclass
class CudnnSdpaMetadata(AttentionMetadata):  # type: ignore[misc]
    """A batch; its tensors are vLLM's own buffers, which replays of a graph read again."""

    max_query_len: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    causal: bool


class CudnnSdpaMetadataBuilder(AttentionMetadataBuilder[CudnnSdpaMetadata]):  # type: ignore[misc]
    """The metadata of batches, none of which is computed."""

    # Graphs of all batches would be right, too. But vLLM would then run decodes in the kernel's form for prompts.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    supports_update_block_table = True
    supports_draft_decode_metadata_update = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if vllm_config.kernel_config.enable_jit_warmup:
            layers = vllm_config.compilation_config.static_forward_context
            _KERNELS.register_warmup([layers[name] for name in layer_names], kv_cache_spec, device)

    @classmethod
    def get_varlen_cudagraph_max_query_len(cls, vllm_config: Any, kv_cache_spec: Any) -> int:
        return 16

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CudnnSdpaMetadata:
        given = common_attn_metadata
        reasons = {
            "a causal flag for each request": isinstance(given.causal, Tensor),
            "tokens of a prompt that see each other (mm_req_doc_ranges)": bool(given.mm_req_doc_ranges),
            "a window behind a prefix (rswa_prefix_lens)": given.rswa_prefix_lens is not None,
            "decode context parallelism (dcp_local_seq_lens)": given.dcp_local_seq_lens is not None,
        }
        raise_if_unsupported(f"a batch in vLLM's {NAME}", reasons, "--attention-backend FLASH_ATTN or TRITON_ATTN")
        return CudnnSdpaMetadata(
            max_query_len=given.max_query_len,
            query_start_loc=given.query_start_loc,
            seq_lens=given.seq_lens,
            block_table=given.block_table_tensor,
            causal=given.causal,
        )

    def update_block_table(
        self, metadata: CudnnSdpaMetadata, blk_table: Tensor, slot_mapping: Tensor
    ) -> CudnnSdpaMetadata:
        return replace(metadata, block_table=blk_table)  # vLLM hands slots to `do_kv_cache_update`

    def update_draft_decode_metadata(self, metadata: CudnnSdpaMetadata) -> None:
        """Nothing: what changes is in vLLM's buffers."""


class CudnnSdpaImpl(AttentionImpl[CudnnSdpaMetadata]):  # type: ignore[misc]
    """The attention of a layer.

    Raises:
        UnsupportedError: The layer has ALiBi, or is of an encoder or between encoder and decoder.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        reasons = {
            "ALiBi (alibi_slopes): the kernel for pages adds nothing to scores": alibi_slopes is not None,
            f"attn_type {attn_type!r}: its keys are not in a cache of the decoder": attn_type != AttentionType.DECODER,
        }
        raise_if_unsupported(f"a layer in vLLM's {NAME}", reasons, "--attention-backend TRITON_ATTN")
        self.num_heads, self.head_size, self.num_kv_heads = num_heads, head_size, num_kv_heads or num_heads
        self.scale, self.softcap = float(scale), logits_soft_cap or None
        self.before = None if sliding_window is None else sliding_window - 1
        self.kv_cache_dtype, self.kv_sharing_target_layer_name = kv_cache_dtype, kv_sharing_target_layer_name
        self.given_sinks = self.sinks = sinks

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        if self.given_sinks is not None:  # now they are loaded: converted once, and not in every step
            self.sinks = self.given_sinks.detach().float()

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        if key.shape[0] != (tokens := slot_mapping.shape[0]):  # the rest is padding
            key, value = key[:tokens], value[:tokens]
        pages = self._of_cache(layer, kv_cache)
        append_paged_kv(key, value, slot_mapping=slot_mapping, page_layout="HND", **pages)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: CudnnSdpaMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """The attention of new tokens, whose keys are in the cache; padding behind them gets zeros.

        Args:
            layer: vLLM's layer, with the scales of a cache in FP8.
            query: (T, Hq, D).
            key: Not read: `do_kv_cache_update` has written it.
            value: Likewise.
            kv_cache: (blocks, Hkv, block size, D + Dv), in any memory order.
            attn_metadata: The batch; None in vLLM's profiling, which gets zeros.
            output: (T, Hq, Dv), which is written in place.
            output_scale: Declined.
            output_block_scale: Declined.
        """
        if output_scale is not None or output_block_scale is not None:
            reasons = ["the kernel writes its output in the dtype of the queries"]
            raise UnsupportedError("quantization of the output (output_scale)", reasons, "a separate kernel after it")
        if attn_metadata is None:
            return output.fill_(0)
        window = None
        if self.before is not None:
            window = self.before, 0 if attn_metadata.causal else self.before
        sdpa_paged_varlen(
            query,
            page_table=attn_metadata.block_table,
            seq_lens_kv=attn_metadata.seq_lens,
            cu_seqlens_q=attn_metadata.query_start_loc,
            max_seqlen_q=attn_metadata.max_query_len,
            page_layout="HND",
            is_causal=attn_metadata.causal,
            window_size=window,
            scale=self.scale,
            softcap=self.softcap,
            sinks=self.sinks,
            out=output,
            **self._of_cache(layer, kv_cache),
        )
        return output

    def _of_cache(self, layer: Any, kv_cache: Tensor) -> dict[str, Any]:
        if not self.kv_cache_dtype.startswith("fp8"):
            return pages_of(kv_cache, self.head_size)
        scales = {"k_scale": layer._k_scale, "v_scale": layer._v_scale}
        return pages_of(kv_cache.view(E4M3), self.head_size) | scales


def pages_of(kv_cache: Tensor, head_size: int) -> dict[str, Tensor]:
    """The pages of keys and of values, (blocks, Hkv, block size, D or Dv), which lie side by side."""
    k_pages = kv_cache.narrow(3, 0, head_size)
    return {"k_pages": k_pages, "v_pages": kv_cache.narrow(3, head_size, kv_cache.shape[3] - head_size)}


class Warmup(NamedTuple):
    """A step of as many new tokens in a layer, on a cache of its own: it compiles the kernels that others take."""

    layer: Any
    kv_cache_spec: Any
    device: torch.device
    tokens: int

    def run(self) -> None:
        layer, spec, tokens = self.layer, self.kv_cache_spec, self.tokens
        dims = layer.head_size, layer.head_size_v
        with self.device:
            cache = torch.zeros(1, spec.num_kv_heads, spec.block_size, sum(dims), dtype=spec.dtype)
            key, value = (torch.zeros(tokens, spec.num_kv_heads, dim, dtype=layer.dtype) for dim in dims)
            query, output = (torch.zeros(tokens, layer.num_heads, dim, dtype=layer.dtype) for dim in dims)
            batch = CudnnSdpaMetadata(
                max_query_len=tokens,
                query_start_loc=torch.tensor([0, tokens], dtype=torch.int32),
                seq_lens=torch.ones(1, dtype=torch.int32),
                block_table=torch.zeros(1, 1, dtype=torch.int32),
                causal=True,
            )
            no_slots = torch.full((tokens,), -1)
            layer.impl.do_kv_cache_update(layer, key, value, kv_cache=cache, slot_mapping=no_slots)
            layer.impl.forward(layer, query, None, None, kv_cache=cache, attn_metadata=batch, output=output)


class _Kernels(VllmJitKernel[Warmup]):  # type: ignore[misc]
    """The kernels of layers, which vLLM's warm-up compiles before the first request."""

    CompileKey = Warmup

    def get_warmup_keys(self, layers: Sequence[Any], kv_cache_spec: Any, device: torch.device) -> list[Warmup]:
        alike = {(layer.num_heads, layer.impl.softcap is None): layer for layer in layers}
        return [Warmup(layer, kv_cache_spec, device, count) for layer in alike.values() for count in OF_EACH_FORM]

    def compile(self, compile_key: Warmup) -> None:
        compile_key.run()


_KERNELS = _Kernels()

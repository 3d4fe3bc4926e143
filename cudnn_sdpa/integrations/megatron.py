"""Megatron-core's `core_attention` on this library."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import torch
from torch import Tensor

from cudnn_sdpa.attention.dense.sdpa import sdpa
from cudnn_sdpa.attention.varlen.sdpa_varlen import VarlenOptions, sdpa_varlen
from cudnn_sdpa.errors import OptionError, raise_if_unsupported

__all__ = ["CoreAttention"]

_CAUSAL = ("causal", "causal_bottom_right", "padding_causal")
_SOFTMAXES = ("vanilla", "off-by-one", "learnable")


class CoreAttention(torch.nn.Module):
    """Attention of a layer of Megatron-core: `core_attention=CoreAttention` in the layer's spec.

    It has what Megatron's own `DotProductAttention` has: causal and other masks, windows, the three kinds of softmax
    ("off-by-one" and "learnable" are sinks), dropout, and grouped heads, without a copy. It has attention biases and
    packed sequences, which that lacks. Tensor parallelism divides heads as there; context parallelism is refused.

    A mask is applied wherever one is given, also with a causal mask type or a window. It costs memory for all scores,
    so give none where the mask type says it all. Masked scores are minus infinity here, and -10000 there: a query that
    sees no key gets zeros.

    Args:
        config: Megatron's `TransformerConfig`.
        layer_number: The layer, from 1.
        attn_mask_type: Megatron's `AttnMaskType`, if a call gives none.
        attention_type: "self" or "cross"; it changes nothing.
        attention_dropout: Dropout probability; None is that of the configuration.
        softmax_scale: Factor of the scores; None is 1/sqrt(head dim).
        cp_comm_type: How context parallelism would communicate.
        pg_collection: Megatron's process groups, with `tp`; None is those of `parallel_state`.

    Raises:
        UnsupportedError: The configuration asks for context parallelism.
        OptionError: The kind of softmax is unknown.

    Examples:
        >>> from cudnn_sdpa.integrations.megatron import CoreAttention
        >>> # get_gpt_layer_local_spec().submodules.self_attention.submodules.core_attention = CoreAttention
    """

    softmax_offset: Tensor | None

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__()
        what, ranks = "context parallelism in Megatron's core_attention", config.context_parallel_size
        suggestion = "context_parallel_size=1, with tensor, sequence or data parallelism"
        raise_if_unsupported(what, {f"context_parallel_size is {ranks}": ranks != 1}, suggestion)
        self.config, self.attn_mask_type = config, attn_mask_type
        utils = importlib.import_module("megatron.core.transformer.utils")
        is_windowed = utils.is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, max(1, layer_number)
        )
        self.window_size = tuple(config.window_size) if is_windowed else None
        self.scale = softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if pg_collection is None:
            groups = importlib.import_module("megatron.core.process_groups_config").ProcessGroupCollection
            pg_collection = groups.use_mpu_process_groups(required_pgs=["tp"])
        self.tp_group = pg_collection.tp
        heads = config.num_attention_heads // pg_collection.tp.size()
        if config.softmax_type not in _SOFTMAXES:
            raise OptionError("softmax_type", repr(config.softmax_type), " or ".join(map(repr, _SOFTMAXES)))
        if config.softmax_type == "vanilla":
            self.register_buffer("softmax_offset", None)
        else:
            device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
            offset = torch.zeros(heads, dtype=config.params_dtype, device=device)
            if config.softmax_type == "off-by-one":
                self.register_buffer("softmax_offset", offset, persistent=False)
            else:
                self.softmax_offset = torch.nn.Parameter(offset)
                if config.perform_initialization:
                    config.init_method(self.softmax_offset)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """The output (Sq, B, Hq · Dv), or of packed sequences (T, Hq · Dv).

        Args:
            query: Queries (Sq, B, Hq, D), or packed (T, Hq, D).
            key: Keys (Skv, B, Hkv, D), or packed.
            value: Values (Skv, B, Hkv, Dv), or packed.
            attention_mask: True for keys that are masked, broadcastable to (B, Hq, Sq, Skv).
            attn_mask_type: In place of the layer's own.
            attention_bias: Added to the scores, broadcastable to (B, Hq, Sq, Skv).
            packed_seq_params: The offsets of packed sequences, in the format "thd".

        Raises:
            UnsupportedError: cuDNN, this GPU or this library does not support it.
            ArgumentError: An argument is wrong.
        """
        mask_type = (self.attn_mask_type if attn_mask_type is None else attn_mask_type).name
        options: VarlenOptions = {
            "scale": self.scale,
            "dropout_p": self.dropout if self.training else 0.0,
            "sinks": self.softmax_offset,
            "window_size": self.window_size,
            "causal_alignment": "bottom_right",
            "is_causal": mask_type in _CAUSAL and self.window_size is None,
        }
        with self._random_numbers():
            if packed_seq_params is not None:
                dense = {"attention_mask": attention_mask, "attention_bias": attention_bias}
                return self._packed(query, key, value, dense, packed=packed_seq_params, options=options)
            q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            mask = None if attention_mask is None else ~attention_mask
            if mask_type == "arbitrary" and mask is None and self.window_size is None:
                raise OptionError("attention_mask", "None", "a mask, as the mask type is arbitrary")
            if attention_bias is not None:
                mask = attention_bias if mask is None else attention_bias.masked_fill(~mask, -torch.inf)
            out: Tensor = sdpa(q, k, v, attn_mask=mask, **options)
        return out.permute(2, 0, 1, 3).flatten(2).contiguous()

    def _packed(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dense: dict[str, Tensor | None],
        packed: Any,
        options: VarlenOptions,
    ) -> Tensor:
        """Attention within packed sequences; `dense` are arguments without meaning there."""
        offsets, lengths = (packed.cu_seqlens_q, packed.cu_seqlens_kv), (packed.max_seqlen_q, packed.max_seqlen_kv)
        padded = (packed.cu_seqlens_q_padded, packed.cu_seqlens_kv_padded)
        reasons = {
            f"qkv_format {packed.qkv_format!r}": packed.qkv_format != "thd",
            "padding between sequences (cu_seqlens_q_padded)": any(
                a is not None and a is not b for a, b in zip(padded, offsets, strict=True)
            ),
            **{name: tensor is not None for name, tensor in dense.items()},
            "no cu_seqlens or max_seqlen": None in (*lengths, *(None if x is None else 0 for x in offsets)),
        }
        what = "packed sequences of Megatron with these arguments"
        raise_if_unsupported(what, reasons, "sequences end to end, in the format thd")
        # Megatron keeps a dimension of one batch entry in some of its layers.
        q, k, v = (x.squeeze(1) if x.dim() == 4 else x for x in (query, key, value))
        out: Tensor = sdpa_varlen(
            q,
            k,
            v,
            cu_seqlens_q=offsets[0],
            cu_seqlens_kv=offsets[1],
            max_seqlen_q=int(lengths[0]),
            max_seqlen_kv=int(lengths[1]),
            **options,
        )
        return out.flatten(1)

    def _random_numbers(self) -> contextlib.AbstractContextManager[None]:
        """The generator of dropout: each rank's own, unless sequence parallelism has set one."""
        if not (self.dropout and self.training) or self.config.sequence_parallel:
            return contextlib.nullcontext()
        tracker = importlib.import_module("megatron.core.tensor_parallel").get_cuda_rng_tracker()
        forked: contextlib.AbstractContextManager[None] = tracker.fork()
        return forked

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[object, ...] = (), metadata: dict[str, object] | None = None
    ) -> Any:
        """The state for Megatron's distributed checkpoints: the sinks, if they are learned, divided as heads are."""
        make = importlib.import_module("megatron.core.transformer.utils").make_sharded_tensors_for_checkpoint
        state = self.state_dict(prefix="", keep_vars=True)
        groups = {} if metadata is None else {"dp_cp_group": metadata["dp_cp_group"]}
        return make(state, prefix, {"softmax_offset": 0}, sharded_offsets, tp_group=self.tp_group, **groups)

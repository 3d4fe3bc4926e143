"""Arguments and results of the functions and wrappers of `cudnn_sdpa.compat.flashinfer`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from cudnn_sdpa.attention.arguments import SoftmaxOptions, check_scale
from cudnn_sdpa.attention.mask import UNBOUNDED
from cudnn_sdpa.engine.tensor_checks import check_is_tensor, check_tensor
from cudnn_sdpa.errors import ArgumentError, OptionError, ShapeError, UnsupportedError, check_choice
from cudnn_sdpa.graph.scalars import is_integer

#: A cache: keys and values apart, or one tensor of both, (pages, 2, …).
PagedCache = Tensor | tuple[Tensor, Tensor]
Result = Tensor | tuple[Tensor, Tensor]

NHD, HND = "NHD", "HND"
INDICES = (torch.int32, torch.int64)

#: FlashInfer's names of our arguments.
NAMES = {
    "is_causal": "causal",
    "scale": "sm_scale",
    "softcap": "logits_soft_cap",
    "window_size": "window_left",
    "attn_mask": "custom_mask",
    "cu_seqlens_q": "qo_indptr",
    "cu_seqlens_kv": "kv_indptr",
    "max_seqlen_q": "max_token_per_sequence",
    "max_seqlen_kv": "max_sequence_kv",
}

#: What no kernel here does, by the argument that asks for it, and what works in its place.
_REFUSED = {
    "custom_mask": "packed sequences have causal masks and windows; `cudnn_sdpa.sdpa_paged_varlen` has tree masks",
    "packed_custom_mask": "masks are not packed; pass custom_mask to single_prefill_with_kv_cache",
    "prefix_len_ptr": "items are not scored together; make each a sequence with the pages of the prefix",
    "token_pos_in_items_ptr": "items are not scored together; make each a sequence with the pages of the prefix",
    "token_pos_in_items_len": "items are not scored together; make each a sequence with the pages of the prefix",
    "max_item_len_ptr": "items are not scored together; make each a sequence with the pages of the prefix",
    "jit_args": "kernels are not compiled from given source",
    "jit_kwargs": "kernels are not compiled from given source",
    "variant_owns_mask": "kernels are not compiled from given source",
    "args": "they are for kernels that were compiled from given source",
    "kv_cache_sf": "no kernel reads NVFP4; pages may be in float8_e4m3fn or float8_e5m2",
    "skip_softmax_threshold_scale_factor": "no kernel leaves keys out",
    "uses_spcompress": "no kernel leaves keys out",
    "scale_q": "queries are in float16 or bfloat16; `cudnn_sdpa.sdpa_fp8` takes all in FP8",
    "scale_k": "keys that are not on pages have no scale for each head; pass k_scale",
    "scale_v": "values that are not on pages have no scale for each head; pass v_scale",
    "o_scale": "outputs are in float16 or bfloat16; `cudnn_sdpa.sdpa_fp8` has some in FP8",
    "v_indptr": "values lie as keys do",
    "o_indptr": "outputs lie as queries do",
    "profiler_buffer": "kernels record no times; use torch.profiler",
    "use_profiler": "kernels record no times; use torch.profiler",
}


def called(function: Callable[..., Any], *args: Any, names: Mapping[str, str], **options: Any) -> Any:
    """The results of a function of this library, whose errors have FlashInfer's names of arguments, and those given."""
    try:
        return function(*args, **options)
    except (ArgumentError, UnsupportedError) as error:
        raise error.renamed({**NAMES, **names}) from None


def refuse_given(function: str, **given: object) -> None:
    """Raises for each argument that is neither None, empty, zero nor False."""
    reasons = [f"{name}: {_REFUSED[name]}" for name, x in given.items() if isinstance(x, Tensor) or x]
    if reasons:
        raise UnsupportedError(function, reasons)


def refuse_encoding(function: str, mode: str) -> None:
    check_choice("pos_encoding_mode", mode, ("NONE", "ROPE_LLAMA", "ALIBI"))
    if mode == "ROPE_LLAMA":
        reason = "no kernel rotates queries and keys"
        raise UnsupportedError(f"{function} with pos_encoding_mode={mode!r}", [reason], "rotate both before the call")
    if mode == "ALIBI":
        works = "`cudnn_sdpa.sdpa` with alibi=True, or with a bias as attn_mask"
        raise UnsupportedError(f"{function} with pos_encoding_mode={mode!r}", ["it takes no bias"], works)


def check_layout(kv_layout: str) -> Literal["NHD", "HND"]:
    check_choice("kv_layout", kv_layout, (NHD, HND))
    return kv_layout  # type: ignore[return-value]


def dtype_of(name: str, dtype: str | torch.dtype | None) -> torch.dtype:
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise OptionError(name, repr(dtype), "a dtype of torch or the name of one")
    return found


def check_output_dtype(name: str, dtype: str | torch.dtype | None, of_q: torch.dtype) -> None:
    if dtype is not None and (found := dtype_of(name, dtype)) != of_q:
        reason = f"outputs have the dtype of the queries, {of_q}"
        raise UnsupportedError(f"{name}={found}", [reason], f"convert the result with .to({found})")


def softmax_options(
    *, causal: bool, window_left: int, sm_scale: float | None, logits_soft_cap: float | None
) -> SoftmaxOptions:
    if not is_integer(window_left):
        raise OptionError("window_left", repr(window_left), "an int, -1 for no bound")
    called(check_scale, sm_scale, names={})
    window = None if window_left < 0 else (window_left, UNBOUNDED)
    is_off = isinstance(logits_soft_cap, (int, float)) and logits_soft_cap <= 0
    softcap = None if is_off else logits_soft_cap
    return {
        "is_causal": causal,
        "causal_alignment": "bottom_right",
        "window_size": window,
        "scale": sm_scale,
        "softcap": softcap,
    }


def with_scales(options: SoftmaxOptions, dim: int, **scales: float | Tensor | None) -> SoftmaxOptions:
    """Options with the scale of the scores multiplied by those of quantized queries and keys."""
    scale = options.get("scale")
    for name, factor in scales.items():
        if factor is not None:
            if not isinstance(factor, (int, float)):
                raise OptionError(name, type(factor).__name__, "a float, or for keys in FP8 on pages a tensor")
            scale = (1 / math.sqrt(dim) if scale is None else scale) * factor
    return {**options, "scale": scale}


def check_lse(lse: Tensor | None, q: Tensor, base: str = "log2", layout: str = "NH") -> None:
    check_choice("lse_base", base, ("log2", "ln"))
    check_choice("lse_layout", layout, ("NH", "HN"))
    if lse is None:
        return
    check_is_tensor("lse", lse)
    shape = q.shape[:-1] if layout == "NH" else q.shape[1::-1]
    check_tensor("lse", lse, q, dtype=torch.float32, shape=tuple(shape))


def finished(
    result: Result, v_scale: float | Tensor | None, lse: Tensor | None = None, *, base: str = "log2", layout: str = "NH"
) -> Result:
    """A result with values multiplied by their scale, and the LSE in its base and order, in `lse` if there is one."""
    out, natural = result if isinstance(result, tuple) else (result, None)
    if v_scale is not None:
        out.mul_(v_scale)
    if natural is None:
        return out
    found = natural / math.log(2) if base == "log2" else natural
    found = found if layout == "NH" else found.t().contiguous()
    return out, found if lse is None else lse.copy_(found)


def check_indices(name: str, values: Tensor) -> None:
    check_is_tensor(name, values)
    check_tensor(name, values, values, dtype=INDICES, shape=("entries",))


def bound_of_queries(max_token_per_sequence: int | None, uniform_q_len: int | None) -> tuple[str, int | None]:
    """The name and the value of the argument that bounds the new tokens of a sequence."""
    if uniform_q_len is not None:
        return "uniform_q_len", uniform_q_len
    return "max_token_per_sequence", max_token_per_sequence


class Wrapper:
    """The base of all wrappers. FlashInfer has no such name.

    Attributes:
        device: Where plans are: that of the workspace, which nothing else is read of.
    """

    def __init__(
        self, workspace: Tensor, kv_layout: str, buffers: Mapping[str, tuple[str, Tensor | None]] | None
    ) -> None:
        check_is_tensor("float_workspace_buffer", workspace)
        self.device = workspace.device
        self._kv_layout = check_layout(kv_layout)
        self._buffers: dict[str, Tensor] | None = None if buffers is None else {}
        self._limits: dict[str, tuple[int, int]] = {}  # of tokens and of those of a sequence, in captured runs
        for planned, (name, x) in (buffers or {}).items():
            check_is_tensor(name, x, hint="With use_cuda_graph, plans are copied into buffers of yours.")
            assert x is not None
            assert self._buffers is not None
            check_tensor(name, x, workspace, of="the workspace", dtype=torch.int32, shape=("entries",))
            self._buffers[planned] = x

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether plans are copied into buffers, so that captured runs read the next ones, too."""
        return self._buffers is not None

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        """Does nothing: launches have workspaces of their own."""

    def _staged(self, name: str, values: Tensor, *, non_blocking: bool = True, is_exact: bool = True) -> Tensor:
        """Values of a plan on the device, in the mode of CUDA graphs in the buffer for them."""
        check_indices(name, values)
        if self._buffers is None:
            return values.to(self.device, torch.int32, non_blocking=non_blocking)
        buffer, n = self._buffers[name], values.shape[0]
        size = buffer.shape[0]
        if n > size or (is_exact and n != size):
            raise ShapeError(name, f"{n} entries", f"{size} at most" if not is_exact else f"{size}, as its buffer has")
        buffer[:n].copy_(values, non_blocking=non_blocking)
        return buffer

    def _sequences(
        self,
        name: str,
        indptr: Tensor,
        bound: tuple[str, int | None] = ("", None),
        lengths: tuple[str, Tensor | None] = ("", None),
        *,
        non_blocking: bool = True,
    ) -> tuple[Tensor, int, int]:
        """Offsets of packed sequences, the number of their tokens, and a maximum length that captured runs can have."""
        check_indices(name, indptr)
        if not indptr.shape[0]:
            raise ShapeError(name, "no entries", "B + 1 entries")
        host = indptr.cpu()
        all_lengths = host.diff()
        tokens, longest = int(host[-1]), int(all_lengths.max()) if all_lengths.numel() else 0
        if lengths[1] is not None and lengths[1].flatten().tolist() != all_lengths.tolist():
            raise ShapeError(lengths[0], "other lengths", f"those of {name}")
        if bound[1] is not None and longest > bound[1]:
            raise OptionError(bound[0], bound[1], f"at least {longest}, the longest sequence of {name}")
        limit = longest
        if self._buffers is not None:
            most, limit = self._limits.get(name, (tokens, tokens if bound[1] is None else bound[1]))
            if tokens > most or longest > limit:
                got = f"{tokens} tokens, {longest} of a sequence"
                expected = f"at most {most} and {limit}, as in captured runs"
                raise ShapeError(name, got, expected, "Plan with the most tokens first.")
            self._limits[name] = most, limit
        return self._staged(name, indptr, non_blocking=non_blocking), tokens, limit

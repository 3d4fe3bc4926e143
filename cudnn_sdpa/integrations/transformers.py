"""`register`: makes this library's attention available to Hugging Face Transformers."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

import cudnn_sdpa_autoload
from cudnn_sdpa.errors import LibraryError, OptionError
from cudnn_sdpa.integrations.attention import attention
from cudnn_sdpa.integrations.masks import mask_function

__all__ = ["NAME", "register"]

#: The value of `attn_implementation`.
NAME = "cudnn_sdpa"

#: Parameters of transformers' mask functions that this library's mask function needs.
_NEEDED = frozenset({"q_length", "q_offset", "kv_offset", "allow_is_causal_skip", "local_size", "use_vmap", "device"})
_HINT = "Try: pip install 'transformers>=5.17'"


def register(*, inspect_padding: bool = True) -> None:
    """Registers `attn_implementation="cudnn_sdpa"` with Hugging Face Transformers.

    It supports models whose layers call transformers' attention interface: decoders, encoders, encoder-decoders and
    vision models; with the options of `sdpa` that their layers ask for, position biases, and both kinds of cache.
    Causal masks, windows, actual sequence lengths of a static cache and padding need no mask tensor.

    A padding mask is read once per forward pass, as by transformers' own "sdpa". So are `position_ids` of more than one
    query without such a mask: where they restart, they separate packed documents, which do not attend to each other.
    Nothing else is read back from the GPU. Within `torch.compile` and captures nothing is read: there a device
    assertion fails if documents are separated by `position_ids` only.

    From 5.24 on, continuous batching takes this attention for one of FlashAttention's kind: packed sequences without
    masks, block tables in decode steps, CUDA graphs by default.

    May be called again with another setting, which applies to later masks.

    Args:
        inspect_padding: Whether to wait for the GPU to drop padding masks without padding, which `generate` creates,
            and to read `position_ids`. With False, steps are enqueued without waiting, a mask without padding costs as
            much as one with padding, and documents separated by `position_ids` only are an error on the GPU.

    Raises:
        LibraryError: transformers is not installed, or too old.
        OptionError: `inspect_padding` is not a bool.

    Examples:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from cudnn_sdpa.integrations.transformers import register
        >>> register()
        >>> config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_attention_heads=4)
        >>> model = LlamaForCausalLM._from_config(config, attn_implementation="cudnn_sdpa").bfloat16()
        >>> model(torch.arange(8)[None]).logits.shape
        torch.Size([1, 8, 64])
    """
    if not isinstance(inspect_padding, bool):
        raise OptionError("inspect_padding", repr(inspect_padding), "True or False")
    try:
        from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
        from transformers.masking_utils import causal_mask_function, sdpa_mask
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise LibraryError(f"transformers is not installed. {_HINT}") from error
    except ImportError as error:
        raise LibraryError(f"this transformers has no attention and mask interfaces: {error}. {_HINT}") from error
    missing = _NEEDED - set(inspect.signature(inspect.unwrap(sdpa_mask)).parameters)
    if missing:
        raise LibraryError(f"the mask functions of this transformers do not accept {sorted(missing)}. {_HINT}")
    AttentionMaskInterface.register(
        NAME, mask_function(sdpa_mask, causal_mask_function, inspect_padding=inspect_padding)
    )
    AttentionInterface.register(
        NAME, attention if inspect_padding else functools.partial(attention, inspect_positions=False)
    )
    _allow_in_flash_models(PreTrainedModel)
    _allow_in_continuous_batching()
    _allow_in_server()


def _allow_in_flash_models(model: Any) -> None:
    """Patches models that support FlashAttention, but not PyTorch's attention, to accept this one.

    transformers treats every name that contains "sdpa" as PyTorch's attention, which lacks options of these models.
    """
    original = model.get_correct_attn_implementation
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def get_correct_attn_implementation(
        self: Any, requested_attention: str | None, *args: object, **kwargs: object
    ) -> object:
        if requested_attention == NAME and self._supports_flash_attn:
            return NAME
        return original(self, requested_attention, *args, **kwargs)

    model.get_correct_attn_implementation = get_correct_attn_implementation


def _allow_in_continuous_batching() -> None:
    """Patches continuous batching to take this attention for FlashAttention, on whose packed sequences it runs.

    So it is neither replaced nor given masks, its decode steps get block tables, and CUDA graphs are on by default.
    Before 5.24 transformers' mask functions do not know the paged cache: there it stays refused, by transformers.
    Inputs of a batch are ordered after their reset, as well.
    """
    from transformers import masking_utils

    if not hasattr(masking_utils, "PagedAttentionCache"):
        return
    package = "transformers.generation.continuous_batching"
    names = ("cache", "continuous_api", "initialization", "input_outputs")
    cache, api, initialization, inputs = (importlib.import_module(f"{package}.{name}") for name in names)
    for module in (cache, api, initialization):
        _wrap(module, "is_flash_attention_requested", _is_flash_attention)
    _wrap(initialization, "lazy_import_flash_attention", _flash_functions)
    for name in ("ContinuousBatchingIOs", "ContinuousBatchingAsyncIOs"):
        _order_inputs(getattr(inputs, name, None))


def _wrap(module: ModuleType, name: str, replacement: Callable[..., object]) -> None:
    """Replaces a function of a module by one that gets it as its first argument; once."""
    original = getattr(module, name, None)
    if original is not None and not hasattr(original, "__wrapped__"):
        setattr(module, name, functools.wraps(original)(functools.partial(replacement, original)))


def _is_flash_attention(
    original: Callable[..., object],
    config: Any = None,
    requested_attention_implementation: str | None = None,
    **kwargs: object,
) -> object:
    requested = requested_attention_implementation if config is None else config._attn_implementation
    return requested == NAME or original(config, requested_attention_implementation, **kwargs)


def _flash_functions(original: Callable[..., object], implementation: str | None, *args: object) -> object:
    """FlashAttention's functions, of which continuous batching only asks whether the third, on pages, is there."""
    return ((None, None, attention), ()) if implementation == NAME else original(implementation, *args)


def _order_inputs(kind: Any) -> None:
    """Has the stream that brings the inputs of a batch wait for the current stream.

    transformers resets them on the current stream, and brings the next ones on another, which does not wait. Where the
    reset came last, a first batch ran on zeros, and no request's pages got its keys.
    """
    original = getattr(kind, "get_model_kwargs", None)
    if original is None or original.__module__ == __name__:
        return

    def get_model_kwargs(self: Any, *args: object, **kwargs: object) -> object:
        stream = getattr(self, "h2d_stream", None) or self.compute_stream
        if isinstance(stream, torch.cuda.Stream):
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        return original(self, *args, **kwargs)

    kind.get_model_kwargs = get_model_kwargs


def _allow_in_server() -> None:
    """Patches `transformers serve`, whose `--attn-implementation` takes a fixed set of names, once it is imported."""
    if cudnn_sdpa_autoload.is_imported(cudnn_sdpa_autoload.SERVER):
        _patch_server()
    else:
        cudnn_sdpa_autoload.watch(cudnn_sdpa_autoload.SERVER, _patch_server)


def _patch_server() -> bool:
    manager: Any = getattr(sys.modules[cudnn_sdpa_autoload.SERVER], "ModelManager", None)
    original = getattr(manager, "_validate_args", None)
    if original is None or original.__module__ == __name__:
        return True

    def _validate_args(self: Any) -> None:
        name = self.attn_implementation
        try:
            self.attn_implementation = None if name == NAME else name
            original(self)
        finally:
            self.attn_implementation = name

    manager._validate_args = _validate_args
    return True

"""`register`: models of Hugging Face's transformers on this library's attention."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from cudnn_sdpa.errors import LibraryError, OptionError
from cudnn_sdpa.integrations.attention import attention
from cudnn_sdpa.integrations.masks import mask_function

__all__ = ["NAME", "register"]

#: The value of `attn_implementation`.
NAME = "cudnn_sdpa"

#: What transformers' mask functions have to be given for this module's to say the same.
_NEEDED = frozenset({"q_length", "q_offset", "kv_offset", "allow_is_causal_skip", "local_size", "use_vmap", "device"})
_HINT = "Try: pip install 'transformers>=5.17'"


def register(*, inspect_padding: bool = True) -> None:
    """Makes `attn_implementation="cudnn_sdpa"` known to Hugging Face's transformers.

    It serves models whose layers call transformers' attention interface: decoders, encoders, both together, and vision
    models; with grouped-query heads, sliding windows, sinks, logit soft-capping, position biases, and both kinds of
    cache. No mask tensor is made where a structure says the same: causal, a window, the actual sequence lengths of a
    static cache, padding.
    A padding mask is looked at, once for each forward pass, as transformers' own "sdpa" does. So are the `position_ids`
    of more than one query without such a mask: where they begin anew, they tell packed documents apart, which do not
    see each other. Nothing else is read back from the GPU, and within `torch.compile` and captures not that: there the
    GPU stops with an error at documents that only `position_ids` tell apart.

    May be called again, also with another setting, which counts for masks that are made from then on.

    Args:
        inspect_padding: Whether to look if a padding mask hides anything, which waits for the GPU, and to leave it out
            if not: `generate` gives a mask of ones where there is no padding. Whether to look at `position_ids`, too.
            With False steps are enqueued without a wait, a mask of ones costs what one with padding does, and packed
            documents that only `position_ids` tell apart are an error on the GPU.

    Raises:
        LibraryError: transformers is not installed, or too old.
        OptionError: `inspect_padding` is no bool.

    Examples:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from cudnn_sdpa.integrations.transformers import register
        >>> register()
        >>> config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_attention_heads=4)
        >>> model = LlamaForCausalLM._from_config(config, attn_implementation="cudnn_sdpa")
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
        raise LibraryError(f"the mask functions of this transformers do not take {sorted(missing)}. {_HINT}")
    AttentionMaskInterface.register(
        NAME, mask_function(sdpa_mask, causal_mask_function, inspect_padding=inspect_padding)
    )
    AttentionInterface.register(
        NAME, attention if inspect_padding else functools.partial(attention, inspect_positions=False)
    )
    _let_in(PreTrainedModel)


def _let_in(model: Any) -> None:
    """Has models that allow FlashAttention, but not PyTorch's attention, allow this one.

    transformers takes every name with "sdpa" in it for PyTorch's attention, which has no sinks.
    """
    asked = model.get_correct_attn_implementation
    if hasattr(asked, "__wrapped__"):
        return

    @functools.wraps(asked)
    def get_correct_attn_implementation(self: Any, requested_attention: str | None, *args: Any, **kwargs: Any) -> Any:
        if requested_attention == NAME and self._supports_flash_attn:
            return NAME
        return asked(self, requested_attention, *args, **kwargs)

    model.get_correct_attn_implementation = get_correct_attn_implementation

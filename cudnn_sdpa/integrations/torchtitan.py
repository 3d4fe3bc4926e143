"""torchtitan's attention over packed sequences on this library: an override that its command line names."""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any

import torch

from cudnn_sdpa.errors import LibraryError
from cudnn_sdpa.integrations import pytorch

__all__ = ["attention", "register"]


def attention(config: Any) -> Any:
    """torchtitan's override of `VarlenAttention.Config`: the same attention on this library.

    Named in torchtitan's configuration or on its command line:
    `--override.imports cudnn_sdpa.integrations.torchtitan.attention`.

    Its layers call PyTorch's `varlen_attn` as torchtitan's own do, with their sharding, windows and results. Instead of
    activating FlashAttention 3 or 4, they `register` this library as its implementation, in the whole process.

    Args:
        config: The configuration that is replaced.

    Returns:
        A configuration with the same fields.

    Examples:
        >>> from cudnn_sdpa.integrations.torchtitan import attention
        >>> f"{attention.__module__}.{attention.__name__}"  # the name of the override
        'cudnn_sdpa.integrations.torchtitan.attention'
    """
    derive = importlib.import_module("torchtitan.config.override").derive
    return derive(config, _attention_class().Config)


def register() -> None:
    """Registers `attention` with torchtitan's overrides. torchtitan does so itself when it imports this module.

    It is needed only if this module was imported before torchtitan was.

    Raises:
        LibraryError: torchtitan is not installed, or has no overrides.

    Examples:
        >>> import importlib.util
        >>> from cudnn_sdpa.integrations.torchtitan import register
        >>> if importlib.util.find_spec("torchtitan"):
        ...     register()
    """
    try:
        overrides = importlib.import_module("torchtitan.config.override")
        target = importlib.import_module("torchtitan.models.common.attention").VarlenAttention.Config
    except ImportError as error:
        raise LibraryError(
            f"no torchtitan with overrides can be imported: {error}. Try: pip install torchtitan"
        ) from error
    if f"{attention.__module__}.{attention.__name__}" not in overrides._REGISTRY:
        overrides.override(target=target, exact=True, description="varlen_attn on cudnn_sdpa")(attention)


@functools.cache
def _attention_class() -> Any:
    """The layer: torchtitan's, which keeps our implementation of `varlen_attn` active."""
    base: Any = importlib.import_module("torchtitan.models.common.attention").VarlenAttention
    module: Any = importlib.import_module("torchtitan.protocols.module").Module

    def initialize(self: Any, config: Any) -> None:
        module.__init__(self)  # not that of `base`, which activates another implementation
        self.window_size = config.window_size
        if torch.nn.attention.current_flash_attention_impl() != pytorch.NAME:
            pytorch.register()

    config = type("Config", (base.Config,), {"__module__": __name__, "__slots__": ()})
    return type("VarlenAttention", (base,), {"__init__": initialize, "__module__": __name__, "Config": config})


if "torchtitan.config.override" in sys.modules:  # torchtitan imports this module
    register()

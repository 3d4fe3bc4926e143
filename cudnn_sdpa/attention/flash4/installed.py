"""The FlashAttention-4 that is installed: its versions, whether its files are those of its wheel, and its libraries.

Nothing of it is imported here.
"""

from __future__ import annotations

import functools

from cudnn_sdpa.offline.installation import Installed, Sources, examined, install_command

#: Versions of packages with which the tests passed on a GPU. Private functions and their arguments differ in others.
TESTED = {
    "flash-attn-4": "4.0.0b36",
    "nvidia-cutlass-dsl": "4.8.1",
    "apache-tvm-ffi": "0.1.15.post2",
    "quack-kernels": "0.6.5",
}

COMMAND = install_command(TESTED)

#: The wheel of flash-attn (version 2) has an older package of the same name.
_SOURCES = Sources(
    distribution="flash-attn-4",
    package="flash_attn",
    folders=("flash_attn/cute/",),
    marker="cute",
    why_changed="another package (flash-attn 2 has one of this name) has replaced it, or it was changed",
)


@functools.cache
def installed() -> Installed:
    """The installation of this process, examined once."""
    return examined(TESTED, _SOURCES)

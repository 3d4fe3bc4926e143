"""The cuDNN frontend that is installed, as far as its own kernels need it: versions, files, and libraries.

Nothing of it is imported here.
"""

from __future__ import annotations

import functools

from cudnn_sdpa.offline.installation import Installed, Sources, examined, install_command

#: Versions of packages that are tested. What a kernel is made of is private, and may differ in others.
TESTED = {
    "nvidia-cudnn-frontend": "1.32.0",
    "nvidia-cutlass-dsl": "4.8.1",
    "apache-tvm-ffi": "0.1.15.post2",
}

COMMAND = install_command(TESTED)

_SOURCES = Sources(
    distribution="nvidia-cudnn-frontend",
    package="cudnn",
    folders=("cudnn/frost/", "cudnn/sdpa/"),
    marker="sdpa",
    why_changed="it was changed",
)


@functools.cache
def installed() -> Installed:
    """The installation of this process, examined once."""
    return examined(TESTED, _SOURCES)

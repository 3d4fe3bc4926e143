"""Asks NVIDIA's driver for its version and its GPUs, and prints a line of JSON. Run as a file: it needs no package.

A driver that hangs or crashes takes this process with it and no other.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any


def ask() -> dict[str, Any]:
    """What `DriverFacts` has of the library."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return {"loads": False}
    version, devices = ctypes.c_int(), ctypes.c_int()
    answered = library.cuDriverGetVersion(ctypes.byref(version)) == 0
    error = int(library.cuInit(0))  # makes no context, and takes no memory of a GPU
    if error == 0:
        library.cuDeviceGetCount(ctypes.byref(devices))
    return {"loads": True, "cuda": version.value if answered else None, "devices": devices.value, "error": error}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(ask()))

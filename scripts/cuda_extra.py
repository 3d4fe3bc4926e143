"""Prints the extra of this package, cu12 or cu13, that fits the interpreter that runs this script.

Both extras install cuDNN into the same folder, so exactly one may be chosen:

1. PyTorch is installed and was built for CUDA: the extra of the same major version. This is the usual case.
2. PyTorch is installed without CUDA: cu12. cuDNN then only plans offline, and the CUDA 12 libraries do it everywhere.
3. No PyTorch, but an NVIDIA driver: cu13 if the driver runs CUDA 13, which the current PyTorch wheels need, else cu12.
4. Neither: cu12, as in 2.

It needs the standard library only, before and after PyTorch is installed.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import sys
import warnings

OLDEST_CUDA = 12
NEWEST_CUDA = 13


def torch_cuda_version() -> str | None:
    """CUDA version that the installed PyTorch was built for; "" if built without CUDA, None if not installed."""
    if importlib.util.find_spec("torch") is None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns when NumPy is not there yet
        import torch
    return torch.version.cuda or ""


def driver_cuda_version() -> int:
    """Newest CUDA version that the NVIDIA driver runs, as 13000 for 13.0, or 0 without a driver."""
    version = ctypes.c_int(0)
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) != 0:
            return 0
    except (OSError, AttributeError):
        return 0
    return version.value


def choose(torch_cuda: str | None, driver_cuda: int) -> tuple[str, str]:
    """The extra, and why."""
    if torch_cuda:
        major = int(torch_cuda.split(".")[0])
        if not OLDEST_CUDA <= major <= NEWEST_CUDA:
            sys.exit(f"This PyTorch was built for CUDA {torch_cuda}; cudnn-sdpa supports CUDA 12 and 13.")
        return f"cu{major}", f"PyTorch was built for CUDA {torch_cuda}"
    if torch_cuda == "":
        return "cu12", "PyTorch was built without CUDA: cuDNN is installed for planning offline"
    if driver_cuda:
        major = min(max(driver_cuda // 1000, OLDEST_CUDA), NEWEST_CUDA)
        return f"cu{major}", f"no PyTorch yet, and a driver for CUDA {driver_cuda // 1000}.{driver_cuda % 1000 // 10}"
    return "cu12", "neither PyTorch nor an NVIDIA driver: cuDNN is installed for planning offline"


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the extra, cu12 or cu13, that fits this interpreter.")
    parser.add_argument("--explain", action="store_true", help="also say why, on standard error")
    arguments = parser.parse_args()

    torch_cuda, driver_cuda = torch_cuda_version(), driver_cuda_version()
    extra, reason = choose(torch_cuda, driver_cuda)
    if arguments.explain:
        print(f"Extra {extra}: {reason}.", file=sys.stderr)
    if torch_cuda and driver_cuda and driver_cuda // 1000 < int(torch_cuda.split(".")[0]):
        print(
            f"The NVIDIA driver runs CUDA {driver_cuda // 1000}.{driver_cuda % 1000 // 10} at most, but PyTorch was "
            f"built for CUDA {torch_cuda}: it will find no GPU. Update the driver, or install a PyTorch for CUDA "
            f"{driver_cuda // 1000} (see TORCH_INDEX_URL in CONTRIBUTING.md).",
            file=sys.stderr,
        )
    print(extra)


if __name__ == "__main__":
    main()

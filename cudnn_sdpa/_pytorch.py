"""Imports PyTorch before all other modules; if that fails, the error names the fix."""

from __future__ import annotations

try:
    import torch  # noqa: F401
except Exception as error:
    from cudnn_sdpa.doctor.checks import cure_of

    missing = isinstance(error, ModuleNotFoundError) and error.name == "torch"
    cure = "Install it: pip install torch." if missing else "Reinstall PyTorch: pip install --force-reinstall torch."
    raise ImportError(
        f"cudnn_sdpa needs PyTorch, and `import torch` fails: {str(error).rstrip('.')}. {cure_of(str(error), cure)}"
    ) from error

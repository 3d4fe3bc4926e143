"""Helper Python processes: their command, their search path, and the reasons against starting one.

`python -c` and `python -m` put the current folder on the search path, before the standard library. So every process is
started from here, with code whose first line sets the search path to this process's.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from cudnn_sdpa.errors import OfflineError

_PACKAGE = Path(__file__).parent.parent

#: Set in the environment of a helper process, which must not start another one.
IN_HELPER = "CUDNN_SDPA_IN_HELPER"


def command(program: str, *arguments: str) -> list[str]:
    """The command that runs a program with this process's search path, without the current folder."""
    path = [str(Path(entry).resolve()) for entry in sys.path if entry] + [str(_PACKAGE.parent)]
    return [sys.executable, "-c", f"import sys\nsys.path[:] = {path!r}\n{program}", *arguments]


def why_no_python() -> str:
    frozen = getattr(sys, "frozen", False) or "__compiled__" in globals()  # PyInstaller and others; Nuitka
    if frozen or hasattr(sys.modules.get("__main__"), "__compiled__"):
        return (
            "this program is frozen and would start itself instead of Python; compile its plans with "
            "`cudnn-sdpa compile` under Python, and name their folder with use_plan_store"
        )
    if not sys.executable:
        return "sys.executable is not a Python interpreter, as in a program that embeds Python; set it to one"
    return ""


def why_no_helper() -> str:
    if os.environ.get(IN_HELPER):
        return (
            "this is a helper process itself, which imports the modules that define operations; explain, warmup and "
            "compile_plans must not run while such a module is imported: put them under `if __name__ == '__main__':`"
        )
    return why_no_python()


def check() -> None:
    reason = why_no_helper()
    if reason:
        raise OfflineError(f"no helper process that plans with cuDNN can be started: {reason}")


def exit_reason(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # only the first and last real-time signals have names
        return f"was killed by signal {-code}"

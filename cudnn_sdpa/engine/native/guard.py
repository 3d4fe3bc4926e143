"""The process that runs the compiler: it ends the compiler when the program that wants the module has ended.

A program for `python -c`, with the standard library alone. Its standard input is a pipe that the program holds open: at
the pipe's end, which also comes when the program is killed, it kills its process group, the compiler with all that the
compiler has started. Its last line of output tells how the compiler ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

#: Begins the last line, which the compiler's exit status follows.
MARK = "cudnn_sdpa compiler ended: "


def end_with_program() -> None:
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    request = json.loads(sys.argv[1])
    threading.Thread(target=end_with_program, daemon=True).start()
    os.nice(request["niceness"])
    if request["niceness"]:  # it takes 1 GB: where memory is short, the compiler is killed and not the program
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")
    try:
        status = str(
            subprocess.call(request["command"], stdin=subprocess.DEVNULL, stderr=1, timeout=request["seconds"])
        )
    except subprocess.TimeoutExpired:
        status = f"no end in {request['seconds']:g} s"
    except OSError as error:
        status = str(error)
    os.write(1, f"\n{MARK}{status}\n".encode())
    os.killpg(0, signal.SIGKILL)  # what a compiler that took too long has started


if __name__ == "__main__":
    main()

"""Threads that keep launching while the interpreter exits, and forked children of a process that has launched."""

from __future__ import annotations

import pytest

LAUNCHES = """
import sys, threading, time, torch, cudnn_sdpa
q = torch.randn(2, 8, 256, 64, dtype=torch.bfloat16, device="cuda")
weight = torch.ones(64, dtype=torch.bfloat16, device="cuda")
calls = {{
    "sdpa": lambda x: cudnn_sdpa.sdpa(x, x, x, is_causal=True),
    "packed": lambda x: cudnn_sdpa.sdpa_varlen(packed, packed, packed, offsets, offsets, 256, 256),
    "norm": lambda x: cudnn_sdpa.rms_norm(x, weight),
    "backward": lambda x: cudnn_sdpa.sdpa(leaf, leaf, leaf).sum().backward(),
}}
offsets = torch.tensor([0, 100, 256], dtype=torch.int32, device="cuda")
packed = q[0].transpose(0, 1)
leaf = q.clone().requires_grad_()
call, ready = calls["{call}"], threading.Event()

def go_on():
    while True:
        call(q)
        ready.set()

for _ in range({threads}):
    threading.Thread(target=go_on, daemon=True).start()
ready.wait()
time.sleep(0.2)
"""


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("call", ["sdpa", "packed", "norm", "backward"])
def test_the_interpreter_ends_while_threads_launch(run_python, call, threads):
    for _ in range(3):
        result = run_python(LAUNCHES.format(call=call, threads=threads), check=False)
        assert (result.returncode, result.stderr) == (0, "")


def test_the_interpreter_ends_while_threads_compare_launches(run_python):
    """C++ runs Python in each call, in which a daemon's thread must not be ended."""
    for _ in range(4):
        result = run_python(LAUNCHES.format(call="sdpa", threads=4), check=False, CUDNN_SDPA_RECORDED="verify")
        assert (result.returncode, result.stderr) == (0, "")


def test_a_forked_child_ends(run_python):
    code = """
import os, sys, threading, warnings, torch, cudnn_sdpa
warnings.simplefilter("ignore")
q = torch.randn(2, 8, 256, 64, dtype=torch.bfloat16, device="cuda")
cudnn_sdpa.sdpa(q, q, q)
torch.cuda.synchronize()
holding, go_on = threading.Event(), threading.Event()

def hold():
    with cudnn_sdpa.plan_cache._lock:
        holding.set()
        go_on.wait()

thread = threading.Thread(target=hold)
thread.start()
holding.wait()
child = os.fork()
if child == 0:
    sys.exit(7)
for _ in range(300):
    done, status = os.waitpid(child, os.WNOHANG)
    if done:
        break
    threading.Event().wait(0.1)
else:
    os.kill(child, 9)
go_on.set()
thread.join()
print(os.waitstatus_to_exitcode(status) if done else "hangs")
"""
    assert run_python(code).stdout == "7\n"

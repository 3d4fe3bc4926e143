"""Forks and interpreter exit, whatever other threads do at that moment."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: Another thread holds every lock that a child could need; the child then exits as programs do.
FORK = """
import os, sys, threading, warnings
sys.path.insert(0, sys.argv[1])
warnings.simplefilter("ignore")
import cudnn_sdpa
from cudnn_sdpa import plan_cache
from cudnn_sdpa.plans import shape_policy as shapes, default_store, autotune, store as plan_store
from tests.unit.plans.test_cache import StandIn, key
store = cudnn_sdpa.use_plan_store(sys.argv[2]).store
plan_cache.get(key(1), StandIn)
locks = [plan_cache._lock, default_store._setting_lock, default_store._overrides._lock, shapes._lock,
         shapes._overrides._lock, autotune._measuring, plan_store._mutex]
held, go_on, building = threading.Event(), threading.Event(), threading.Event()

def hold():
    for lock in locks:
        lock.acquire()
    held.set()
    go_on.wait()
    for lock in reversed(locks):
        lock.release()

def build(of):
    building.set()
    go_on.wait()
    return StandIn(of)

threads = [threading.Thread(target=plan_cache.get, args=(key(2), build)), threading.Thread(target=hold)]
threads[0].start(); building.wait()
threads[1].start(); held.wait()
child = os.fork()
if child == 0:
    with cudnn_sdpa.shape_policy("exact"), cudnn_sdpa.use_plan_store("off"), cudnn_sdpa.autotune():
        plan_cache.get(key(2), StandIn)
        plan_cache.get(key(3), StandIn)
    assert plan_cache.info().plans == 3
    store.reject(key(4), "for its lock")
    sys.exit(7)
for _ in range(200):
    done, status = os.waitpid(child, os.WNOHANG)
    if done:
        break
    threading.Event().wait(0.1)
else:
    os.kill(child, 9)
    print("the child hangs", flush=True)
go_on.set()
for thread in threads:
    thread.join()
print(os.waitstatus_to_exitcode(status) if done else None)
"""


def test_a_forked_child_exits_whoever_held_a_lock(run_python, tmp_path):
    assert run_python(FORK, str(ROOT), str(tmp_path / "plans")).stdout == "7\n"


def locks_of_modules():
    """Every lock that a module of the package creates on import, with its file."""
    found = []
    for path in sorted((ROOT / "cudnn_sdpa").rglob("*.py")):
        body = ast.parse(path.read_text()).body
        classes = [node for node in body if isinstance(node, ast.ClassDef)]
        for node in [*body, *(each for of in classes for each in of.body)]:
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
                text = ast.unparse(node.value)
                if "Lock()" in text:
                    found.append((str(path.relative_to(ROOT)), text))
    return found


#: Every lock in any object of the package is held by another thread when the process forks; the child asks for each.
ALL_LOCKS = """
import gc, importlib, os, pkgutil, sys, threading, warnings
sys.path.insert(0, sys.argv[1])
warnings.simplefilter("ignore")
import cudnn_sdpa
from cudnn_sdpa import graph_op, nn
from cudnn_sdpa.plans.store import PlanStore

for module in pkgutil.walk_packages(cudnn_sdpa.__path__, "cudnn_sdpa."):
    if not module.name.endswith(("__main__", "_backend")):
        importlib.import_module(module.name)
store = PlanStore(__import__("pathlib").Path(sys.argv[2]))
cache = cudnn_sdpa.PagedKVCache(pages=2, page_size=16, heads=1, head_dim=8, device="cpu")
layer = cudnn_sdpa.Fp8Attention()
kinds = type(threading.Lock()), type(threading.RLock())

def owned(owner, values):
    return [(f"{owner}.{name}", value) for name, value in list(values.items()) if isinstance(value, kinds)]

def locks():
    found = []
    for name, module in list(sys.modules.items()):
        if name.startswith("cudnn_sdpa"):
            found += owned(name, vars(module))
    for thing in gc.get_objects():
        kind = type(thing)
        if str(getattr(kind, "__module__", "")).startswith("cudnn_sdpa"):
            slots = {name: getattr(thing, name, None) for of in kind.__mro__ for name in getattr(of, "__slots__", ())}
            found += owned(f"{kind.__module__}.{kind.__name__}", slots | getattr(thing, "__dict__", {}))
    return found

def hold():
    for _, lock in locks():
        lock.acquire()
    held.set()
    threading.Event().wait()

held = threading.Event()
threading.Thread(target=hold, daemon=True).start()
held.wait()
child = os.fork()
if child == 0:
    free, taken = [], []
    for name, lock in locks():
        (free if lock.acquire(blocking=False) else taken).append(name)
    print("free", *free)
    print("taken", *taken, flush=True)
    os._exit(0)
os.waitpid(child, 0)
os._exit(0)
"""

#: Locks of what only a process with CUDA uses, and its children cannot.
TAKEN_IN_CHILDREN = {
    "cudnn_sdpa.plans.nvrtc.Kernel._lock",
}


def test_a_forked_child_finds_every_lock_free(run_python, tmp_path):
    lines = run_python(ALL_LOCKS, str(ROOT), str(tmp_path / "plans")).stdout.splitlines()
    free, taken = (set(line.split()[1:]) for line in lines)
    assert taken <= TAKEN_IN_CHILDREN
    assert {
        "cudnn_sdpa.plans.shape_policy._lock",
        "cudnn_sdpa.offline.background.BackgroundPlanner._lock",
        "cudnn_sdpa.offline.planner.Helper._lock",
        "cudnn_sdpa.plans.cache.PlanCache._lock",
        "cudnn_sdpa.plans.store._mutex",
        "cudnn_sdpa.settings.Overrides._lock",
    } <= free


def test_every_lock_of_a_module_is_renewed_in_children():
    found = locks_of_modules()
    assert len(found) >= 5
    for path, text in found:
        assert text.startswith("renewed_in_children("), f"{path}: {text}"


#: A thread that keeps calling while the interpreter exits; `launch` stands for a call into C++.
GOES_ON = """
import atexit, sys, threading, time
sys.path.insert(0, sys.argv[1])
from cudnn_sdpa import plan_cache
from tests.unit.plans.test_cache import StandIn, key, use
calls, ended = [], []

def launch():
    try:
        while True:
            use(plan_cache, len(calls) % 3)
            calls.append(time.monotonic())
            if sys.argv[2] == "careless":
                try:
                    plan_cache.get(key(7), StandIn)
                except Exception:
                    pass
    finally:
        ended.append(time.monotonic())

def report():  # registered before the cache's own, so it runs after it
    time.sleep(0.2)
    print(len(ended), bool(calls), plan_cache.info().plans, flush=True)

threading.Thread(target=launch, daemon=True).start()
time.sleep(0.3)
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("how", ["plain", "careless"])
def test_launching_threads_end_before_the_interpreter(run_python, how):
    code = "import atexit\natexit.register(lambda: report())\n" + GOES_ON
    result = run_python(code, str(ROOT), how)
    assert result.stdout == "1 True 0\n"
    assert result.stderr == ""


#: A launch that has begun when the interpreter ends, and lasts for a while.
LASTS = """
import atexit, sys, threading, time
atexit.register(lambda: print(ended, flush=True))  # after the cache's own
sys.path.insert(0, sys.argv[1])
from cudnn_sdpa.plans import cache
from tests.unit.plans.test_cache import use
cache._END_SECONDS = 1.0
ended, begun, ending = [], threading.Event(), threading.Event()
atexit.register(ending.set)  # before it

def launch():
    use(cache.plan_cache, 1)
    begun.set()
    ending.wait()
    time.sleep(0.1)
    ended.append("launched")

threading.Thread(target=launch, daemon=True).start()
begun.wait()
"""


@pytest.mark.slow
def test_the_interpreter_waits_for_a_launch_that_has_begun(run_python):
    assert run_python(LASTS, str(ROOT)).stdout == "['launched']\n"


def test_the_main_thread_may_launch_until_the_end(run_python):
    code = """
import atexit, sys
def last():
    from tests.unit.plans.test_cache import use
    print(use(plan_cache, 3).key.option_values)
atexit.register(last)
sys.path.insert(0, sys.argv[1])
from cudnn_sdpa import plan_cache
"""
    assert run_python(code, str(ROOT)).stdout == "{'n': 3}\n"

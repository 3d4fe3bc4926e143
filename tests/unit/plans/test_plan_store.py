"""The plan store on a real disk: plans are loaded intact or not at all, whatever happens to the files."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

import cudnn_sdpa
from cudnn_sdpa.attention.arguments import ForwardArguments, from_fields
from cudnn_sdpa.attention.dense.specs import ForwardSpec
from cudnn_sdpa.errors import OptionError
from cudnn_sdpa.graph import key as key_module
from cudnn_sdpa.graph.target import Target
from cudnn_sdpa.plans import cache, default_store
from cudnn_sdpa.plans import store as plan_store
from cudnn_sdpa.plans.private_folders import UnsafeFolderError
from cudnn_sdpa.plans.store import PlanStore, StoredPlan

ROOT = Path(__file__).parents[3]


def key(sq=64, cudnn=91900, sm=90, **options):
    q = torch.empty(1, 2, sq, 64, dtype=torch.bfloat16, device="meta")
    target = Target((("deviceVer", sm * 10), ("multiProcessorCount", 132)), cudnn, "1.32.0", "a GPU")
    return ForwardSpec.of(from_fields(ForwardArguments, q, q, q, **options)).key(target, 0)


def plan(of, size=2000, seed=0):
    return StoredPlan(of.identity(), "eng9", {"KNOB": 3}, 256, 0.25, random.Random(seed).randbytes(size))


@pytest.fixture
def store(tmp_path):
    return PlanStore(tmp_path / "plans")


def test_saved_plans_are_loaded(store):
    for sq in (64, 65):
        store.save(key(sq), plan(key(sq), seed=sq))
    for sq in (64, 65):
        assert store.load(key(sq)) == plan(key(sq), seed=sq)
    assert store.load(key(66)) is None
    info = store.info()
    assert (info.plans, info.loads, info.saves, info.rejected, info.evictions) == (2, 2, 2, 0, 0)
    assert info.bytes == sum(path.stat().st_size for path in store.folder.glob("*.plan"))
    assert {path.stat().st_mode & 0o777 for path in store.folder.glob("*.plan")} == {0o600}
    store.clear()
    assert store.load(key()) is None
    assert store.info().plans == 0


def with_option(name, value):
    of = key()
    options = tuple((n, type(value).__name__, value) if n == name else (n, t, v) for n, t, v in of.options)
    return dataclasses.replace(of, options=options)


def test_every_change_of_a_key_has_its_own_file(store):
    keys = [
        key(),
        key(sq=65),
        key(cudnn=92800),
        key(sm=100),
        key(is_causal=True),
        dataclasses.replace(key(), digest="another"),
        dataclasses.replace(key(), operation="another.module:sdpa_forward"),
        dataclasses.replace(key(), target=dataclasses.replace(key().target, frontend="1.33.0")),
        *(with_option("dropout_p", value) for value in (1, 1.0, True)),
    ]
    assert len({store.path(of) for of in keys}) == len(keys)
    assert store.path(dataclasses.replace(key(), device=3)) == store.path(key())  # any GPU of this model
    named = dataclasses.replace(key(), target=dataclasses.replace(key().target, name="a sibling"))
    assert store.path(named) == store.path(key())


@pytest.mark.parametrize("kind", ["flipped", "truncated", "extended", "emptied", "zeroed"])
def test_a_damaged_file_is_removed_and_never_loaded(store, kind, caplog):
    of = key()
    store.save(of, plan(of, size=300))
    path = store.path(of)
    whole = path.read_bytes()
    damages = {
        "flipped": [whole[:i] + bytes([whole[i] ^ 1 << i % 8]) + whole[i + 1 :] for i in range(len(whole))],
        "truncated": [whole[:i] for i in range(0, len(whole), 7)],
        "extended": [whole + b"\0", whole + whole],
        "emptied": [b""],
        "zeroed": [bytes(len(whole)), whole[:-100] + bytes(100)],
    }[kind]
    for number, damaged in enumerate(damages, start=1):
        path.write_bytes(damaged)
        assert store.load(of) is None
        assert not path.exists()
        assert store.info().rejected == number
    assert "it will be built again" in caplog.text
    store.save(of, plan(of, size=300))
    assert store.load(of) == plan(of, size=300)


def test_a_file_of_another_plan_is_not_loaded(store, caplog):
    store.save(key(65), plan(key(65)))
    store.path(key(65)).rename(store.path(key()))
    assert store.load(key()) is None
    assert "belongs to another plan" in caplog.text
    assert not store.path(key()).exists()


def test_folders_writable_by_others_are_refused(tmp_path, store):
    for mode in (0o777, 0o770, 0o720):
        folder = tmp_path / f"open {mode:o}"
        folder.mkdir()
        folder.chmod(mode)
        with pytest.raises(UnsafeFolderError, match="chmod go-w"):
            PlanStore(folder)
        with pytest.raises(OptionError, match="only its owner"):
            cudnn_sdpa.use_plan_store(folder)
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match="cannot be used"):
        cudnn_sdpa.use_plan_store(tmp_path / "file")
    store.save(key(), plan(key()))
    store.path(key()).chmod(0o666)
    assert store.load(key()) is None
    assert not store.path(key()).exists()


def test_symlinks_and_pipes_are_not_followed(store, tmp_path):
    store.save(key(), plan(key()))
    elsewhere = tmp_path / "elsewhere"
    store.path(key()).rename(elsewhere)
    store.path(key()).symlink_to(elsewhere)
    assert store.load(key()) is None
    store.path(key()).unlink()
    os.mkfifo(store.path(key()), 0o600)
    assert store.load(key()) is None


@pytest.mark.skipif(os.getuid() != 0, reason="root can become a user who owns nothing")
def test_a_read_only_folder_of_root_is_read(run_python):
    script = """
import os, sys, pathlib
sys.path.insert(0, sys.argv[2])
from tests.unit.plans.test_plan_store import key, plan
from cudnn_sdpa.plans.store import PlanStore
os.setuid(65534)
store = PlanStore(pathlib.Path(sys.argv[1]))
assert store.load(key()) == plan(key())
store.save(key(65), plan(key(65)))
assert store.load(key(65)) is None
print("read")
"""
    with tempfile.TemporaryDirectory() as folder:  # others cannot reach `tmp_path`: pytest keeps it private
        store = PlanStore(Path(folder) / "plans")
        store.save(key(), plan(key()))
        for path in (Path(folder), store.folder, *store.folder.glob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        result = run_python(script, str(store.folder), str(ROOT))
    assert result.stdout == "read\n"
    assert "cannot be saved" in result.stderr


def test_a_full_disk_saves_nothing_and_warns_once(store, run_python):
    script = """
import pathlib, resource, signal, sys
sys.path.insert(0, sys.argv[2])
from tests.unit.plans.test_plan_store import key, plan
from cudnn_sdpa.plans.store import PlanStore
store = PlanStore(pathlib.Path(sys.argv[1]))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))  # what a full disk does: a part is written, then an error
for sq in range(64, 70):
    store.save(key(sq), plan(key(sq)))
    assert store.load(key(sq)) is None
print(sorted(path.name for path in store.folder.iterdir()))
"""
    result = run_python(script, str(store.folder), str(ROOT))
    assert result.stdout == "[]\n"
    assert result.stderr.count("cannot be saved") == 1


def test_the_least_recently_used_files_are_removed_first(tmp_path):
    size = len(plan(key()).encode())
    store = PlanStore(tmp_path / "plans", capacity=4 * size + size // 2)
    for number, sq in enumerate(range(64, 68)):
        store.save(key(sq), plan(key(sq)))
        os.utime(store.path(key(sq)), (number, number))
    assert store.load(key(64)) is not None  # a use
    store.save(key(70), plan(key(70)))
    assert [sq for sq in (64, 65, 66, 67, 70) if store.path(key(sq)).exists()] == [64, 66, 67, 70]
    assert store.info().evictions == 1
    small = PlanStore(tmp_path / "plans", capacity=1)
    small.save(key(80), plan(key(80)))
    assert [path.name for path in store.folder.glob("*.plan")] == [store.path(key(80)).name]


@pytest.mark.parametrize("age", [2 * 3600.0, -2 * 3600.0], ids=["old", "of a wrong clock"])
def test_leftovers_of_killed_writers_are_removed_and_files_in_progress_are_not(store, age):
    left, in_progress = store.folder / ".writing-abc", store.folder / ".writing-def"
    for path in (left, in_progress):
        path.write_bytes(b"half")
    os.utime(left, (time.time() - age,) * 2)
    store.save(key(), plan(key()))  # the first save of a process
    assert list(store.folder.glob(".writing-*")) == [in_progress]


def test_files_in_progress_count_towards_the_capacity(tmp_path):
    size = len(plan(key(100)).encode())
    store = PlanStore(tmp_path / "plans", capacity=4 * size)
    for sq in range(100, 103):
        store.save(key(sq), plan(key(sq)))
    (store.folder / ".writing-abc").write_bytes(bytes(2 * size))
    PlanStore(tmp_path / "plans", capacity=4 * size).save(key(103), plan(key(103)))
    assert bytes_in(store.folder) <= 4 * size


@pytest.mark.parametrize("ahead", [-1e6, 1e6, 1e9], ids=["past", "future", "far future"])
def test_wrong_clocks_of_other_writers_do_not_evict_new_files(tmp_path, ahead):
    """Files dated by a wrong clock: files saved afterwards stay until they are the oldest."""
    size = len(plan(key(100)).encode())
    store = PlanStore(tmp_path / "plans", capacity=7 * size // 2)
    for sq in range(100, 103):
        store.save(key(sq), plan(key(sq)))
        os.utime(store.path(key(sq)), (time.time() + ahead,) * 2)
    for sq in range(103, 120):
        store.save(key(sq), plan(key(sq)))
        assert store.load(key(sq)) == plan(key(sq))
        if sq > 103:
            assert store.load(key(sq - 1)) == plan(key(sq - 1))
    assert not any(store.path(key(sq)).exists() for sq in range(100, 103))


def test_a_removed_folder_is_recreated(store, caplog):
    store.save(key(), plan(key()))
    shutil.rmtree(store.folder)
    assert store.load(key()) is None
    store.save(key(), plan(key()))
    assert store.load(key()) == plan(key())
    assert store.folder.stat().st_mode & 0o777 == 0o700
    assert caplog.text == ""


def test_files_are_as_readable_as_their_folder(store):
    store.folder.chmod(0o755)
    before = os.umask(0o077)
    try:
        store.save(key(), plan(key()))
    finally:
        os.umask(before)
    assert store.path(key()).stat().st_mode & 0o777 == 0o644


def test_a_rejected_plan_stays_until_it_is_replaced(store):
    """Other processes may be able to use it."""
    store.save(key(), plan(key()))
    store.ignore(key(), "no good here")
    assert PlanStore(store.folder).load(key()) == plan(key())
    assert store.info().rejected == 1
    store.save(key(), plan(key(), seed=1))
    assert store.load(key()) == plan(key(), seed=1)


def bytes_in(folder):
    found = 0
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += path.stat().st_size * path.is_file()
    return found


FILLER = """
import pathlib, sys
sys.path.insert(0, sys.argv[2])
from tests.unit.plans.test_plan_store import key, plan
from cudnn_sdpa.plans.store import PlanStore
store = PlanStore(pathlib.Path(sys.argv[1]), capacity=1_000_000)
for sq in range(64, 94):
    of = key(sq, cudnn=int(sys.argv[3]))
    store.save(of, plan(of, size=100_000))
"""


def test_several_stores_share_one_capacity(tmp_path):
    """Each has saved files that the others have not counted themselves, as in several processes."""
    size = len(plan(key(100)).encode())
    stores = [PlanStore(tmp_path / "plans", capacity=40 * size) for _ in range(8)]
    for sq in range(100, 300):
        stores[sq % 8].save(key(sq), plan(key(sq)))
        assert bytes_in(tmp_path / "plans") <= 60 * size  # each may write a sixteenth before it looks
    assert stores[0].info().plans >= 30


@pytest.mark.slow
def test_several_processes_share_one_capacity(tmp_path):
    folder, most = tmp_path / "plans", 0
    processes = [start(FILLER, str(folder), str(ROOT), str(90000 + number)) for number in range(4)]
    while any(process.poll() is None for process in processes):
        most = max(most, bytes_in(folder) if folder.exists() else 0)
        time.sleep(0.001)
    for process in processes:
        process.stdout.close()
    assert [process.returncode for process in processes] == [0] * 4
    assert 700_000 < most <= 1_400_000  # each may write a file before it sees those of the others
    assert PlanStore(folder).info().plans >= 7


@pytest.mark.skipif(os.getuid() != 0, reason="a small disk needs root")
def test_a_full_disk_evicts_old_files(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir(mode=0o700)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k,mode=700", "tmpfs", disk], check=False)
    if mounted.returncode:
        pytest.skip("a disk cannot be mounted here")
    try:
        store = PlanStore(disk / "plans")
        for sq in range(64, 84):
            store.save(key(sq), plan(key(sq), size=100_000))
            assert store.load(key(sq)) == plan(key(sq), size=100_000)
        info = store.info()
        assert (info.saves, info.plans + info.evictions) == (20, 20)
        assert 3 <= info.plans <= 5
    finally:
        subprocess.run(["umount", disk], check=True)


def test_the_folder_is_seldom_scanned(tmp_path, monkeypatch):
    """With thousands of files, a scan takes longer than building a plan."""
    size = len(plan(key(100)).encode())
    store, looks = PlanStore(tmp_path / "plans", capacity=160 * size), []
    sweep = plan_store._sweep
    monkeypatch.setattr(plan_store, "_sweep", lambda folder: looks.append(folder) or sweep(folder))
    for sq in range(100, 300):
        store.save(key(sq), plan(key(sq)))
        os.utime(store.path(key(sq)), (sq, sq))
        assert sum(path.stat().st_size for path in store.folder.glob("*.plan")) <= store.capacity
    assert len(looks) <= 30
    left = [sq for sq in range(100, 300) if store.path(key(sq)).exists()]
    assert left == list(range(left[0], 300))
    assert store.info().evictions == left[0] - 100


def test_info_includes_files_of_other_processes(tmp_path):
    size = len(plan(key()).encode())
    mine, theirs = (PlanStore(tmp_path / "plans", capacity=10 * size) for _ in range(2))
    for sq in range(100, 106):
        mine.save(key(sq), plan(key(sq)))
        theirs.save(key(sq + 100), plan(key(sq + 100)))
    PlanStore(tmp_path / "plans", capacity=10 * size).save(key(), plan(key()))
    assert mine.info().bytes <= 10 * size


WRITER = """
import pathlib, sys
sys.path.insert(0, sys.argv[2])
from tests.unit.plans.test_plan_store import key, plan
from cudnn_sdpa.plans.store import PlanStore
store = PlanStore(pathlib.Path(sys.argv[1]))
plans = [(key(sq), plan(key(sq), size=300_000, seed=sq)) for sq in range(64, 72)]
print("ready", flush=True)
while True:
    for of, made in plans:
        store.save(of, made)
"""


def start(code, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
    )


@pytest.mark.slow
@pytest.mark.parametrize("moment", range(6))
def test_killed_while_writing(store, moment):
    """Whenever the writer is killed, every file is intact, and the next one can be written."""
    process = start(WRITER, str(store.folder), str(ROOT))
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.005 + 0.013 * moment)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    for sq in range(64, 72):
        found = store.load(key(sq))
        assert found is None or found == plan(key(sq), size=300_000, seed=sq)
    assert store.info().rejected == 0
    assert store.save(key(), plan(key()))
    assert store.load(key()) == plan(key())


SHARER = """
import pathlib, sys, time
sys.path.insert(0, sys.argv[2])
from tests.unit.plans.test_plan_store import key, plan
from cudnn_sdpa.plans.store import PlanStore
store = PlanStore(pathlib.Path(sys.argv[1]))
for sq in range(64, 76):
    of = key(sq)
    if store.load(of) is None:
        time.sleep(0.02)
        assert store.save(of, plan(of, seed=sq))
    assert store.load(of) == plan(of, seed=sq)
"""


@pytest.mark.slow
def test_eight_processes_share_plans(store):
    processes = [start(SHARER, str(store.folder), str(ROOT)) for _ in range(8)]
    for process in processes:
        process.communicate(timeout=120)
    assert [process.returncode for process in processes] == [0] * 8
    assert (store.info().plans, store.info().rejected) == (12, 0)
    assert [path for path in store.folder.iterdir() if path.suffix != ".plan"] == []


def test_a_relative_folder_does_not_follow_chdir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with cudnn_sdpa.use_plan_store("plans") as store:
        monkeypatch.chdir("/")
        store.save(key(), plan(key()))
        assert store.load(key()) == plan(key())
        assert store.folder == tmp_path / "plans"


def test_an_unreadable_file_is_not_a_plan(store, caplog):
    store.path(key()).mkdir()
    with caplog.at_level(logging.WARNING):
        assert store.load(key()) is None


def test_a_plan_of_this_gpu_is_preferred_to_one_of_any_gpu(store, monkeypatch):
    monkeypatch.setattr(key_module, "serial_of", lambda device: f"GPU {device}")
    monkeypatch.setattr(default_store.Setting, "store", store)
    monkeypatch.setattr(default_store.Setting, "is_resolved", True)
    monkeypatch.setattr(cache, "plan_of", lambda _, stored: stored)
    mine = dataclasses.replace(key(), operation="somebody.module:convolve")
    siblings, other = mine.without_device(), dataclasses.replace(mine, device=1)
    store.save(other, plan(other, seed=1))
    assert cache.load_plan(mine) is None
    store.save(siblings, plan(siblings, seed=2))
    assert cache.load_plan(mine) == plan(siblings, seed=2)
    store.save(mine, plan(mine, seed=3))
    assert cache.load_plan(mine) == plan(mine, seed=3)
    assert cache.load_plan(other) == plan(other, seed=1)


def test_a_file_system_without_times_keeps_plans(store, monkeypatch):
    def refuse(*_args, **_options):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "utime", refuse)
    assert store.save(key(), plan(key()))
    assert store.load(key()) == plan(key())

"""Plans are kept in the user's cache folder unless somebody says otherwise; what goes wrong with it harms nothing."""

from __future__ import annotations

import importlib
import logging
import os
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

import cudnn_sdpa
from cudnn_sdpa import cli
from cudnn_sdpa.bench import attention
from cudnn_sdpa.bench import cli as bench_cli
from cudnn_sdpa.plans import default_store
from cudnn_sdpa.plans.build import load_plan
from cudnn_sdpa.plans.manifest import PlanManifest
from cudnn_sdpa.plans.store import PlanStore
from tests.unit.plans.test_plan_store import key, plan

ROOT = Path(__file__).parents[3]

#: Variables of a user who has set nothing; the tests add a home.
NOTHING_SET = {"CUDNN_SDPA_PLAN_DIR": None, "XDG_CACHE_HOME": None}


@pytest.fixture
def home(tmp_path):
    folder = tmp_path / "home"
    folder.mkdir()
    return folder


@pytest.fixture
def untouched(monkeypatch, home, tmp_path):
    """This process as if nobody had set or looked for a store yet; the value is the home."""
    for name in NOTHING_SET:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(default_store._Setting, "is_resolved", False)
    monkeypatch.setattr(default_store._Setting, "store", None)
    return home


@pytest.fixture
def ask(untouched, monkeypatch, caplog):  # noqa: ARG001 - this process is as `untouched` leaves it
    """Asks for a plan twice, as calls on a GPU do: gives the store's folder, if any, and what was logged."""

    def run(**environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with caplog.at_level(logging.INFO, "cudnn_sdpa"):
            start = time.perf_counter()
            for _ in range(2):
                assert load_plan(key()) is None
                assert default_store.active() is default_store.active()
            assert time.perf_counter() - start < 1
        store = default_store.active()
        default_store._Setting.is_resolved = False
        return (store and store.folder), [f"{record.levelname} {record.getMessage()}" for record in caplog.records]

    return run


@pytest.mark.parametrize("variable", [None, ""])
def test_plans_are_kept_in_the_users_cache(run_python, home, variable):
    """In a process of its own, where the variable is not set at all."""
    code = """
import logging, sys
sys.path.insert(0, sys.argv[1])
logging.basicConfig(level=logging.INFO)
from tests.unit.plans.test_plan_store import key, plan
from cudnn_sdpa.plans.build import load_plan
from cudnn_sdpa.plans.default_store import active
assert load_plan(key()) is None
active().save(key(), plan(key()))
print(active().folder)
"""
    result = run_python(code, str(ROOT), **NOTHING_SET | {"CUDNN_SDPA_PLAN_DIR": variable}, HOME=str(home))
    folder = home / ".cache" / "cudnn_sdpa" / "plans"
    assert result.stdout == f"{folder}\n"
    assert result.stderr == ""
    assert folder.stat().st_mode & 0o777 == 0o700
    assert PlanStore(folder).load(key()) == plan(key())


def test_another_cache_folder_of_the_user_is_taken(ask, home, tmp_path):
    elsewhere = tmp_path / "not" / "there" / "yet"
    assert ask(XDG_CACHE_HOME=str(elsewhere)) == (elsewhere / "cudnn_sdpa" / "plans", [])
    assert ask(HOME="/nonexistent") == (elsewhere / "cudnn_sdpa" / "plans", [])
    assert list(home.iterdir()) == []


def test_off_keeps_nothing(ask, home):
    assert ask(CUDNN_SDPA_PLAN_DIR="off") == (None, [])
    assert list(home.iterdir()) == []


def assert_said_once(logged, what, level="INFO"):
    (line,) = logged
    assert line.startswith(f"{level} plans are not stored for later processes: ")
    assert what in line
    assert line.endswith("; CUDNN_SDPA_PLAN_DIR can name another folder")


def test_a_default_folder_that_others_could_replace_is_a_warning_with_the_cure(ask, home):
    home.chmod(0o757)
    assert_said_once(ask()[1], f"chmod go-w {home}", "WARNING")


@pytest.mark.parametrize("missing", ["/nonexistent", "/nonexistent/home/user/"])
def test_a_home_that_is_not_there_is_not_made(ask, missing):
    folder, logged = ask(HOME=missing)
    assert folder is None
    assert_said_once(logged, "there is no home folder /nonexistent")
    assert not Path("/nonexistent").exists()


def test_a_relative_cache_folder_is_not_made_wherever_the_program_is(ask, home, tmp_path):
    folder, logged = ask(XDG_CACHE_HOME="cache")
    if folder is None:
        assert_said_once(logged, "the user has no cache folder")
    else:  # a platformdirs that passes over it, as the specification says
        assert folder.is_relative_to(home)
    assert list(tmp_path.iterdir()) == [home]


def test_a_cache_folder_that_is_a_file_is_not_used(ask, home):
    (home / ".cache").touch()
    folder, logged = ask()
    assert folder is None
    assert_said_once(logged, "cannot be used")


def test_a_folder_that_is_open_to_others_is_not_used(ask, home):
    plans = home / ".cache" / "cudnn_sdpa" / "plans"
    plans.mkdir(parents=True)
    plans.chmod(0o777)
    folder, logged = ask()
    assert folder is None
    assert_said_once(logged, "chmod go-w", "WARNING")
    assert list(plans.iterdir()) == []


def test_a_folder_that_the_user_named_is_a_warning(ask, home, tmp_path):
    (tmp_path / "file").touch()
    folder, (line,) = ask(CUDNN_SDPA_PLAN_DIR=str(tmp_path / "file"))
    assert folder is None
    assert line.startswith("WARNING plans are not stored despite CUDNN_SDPA_PLAN_DIR: ")
    assert list(home.iterdir()) == []


#: Becomes a user who owns nothing and is in no database, once what it needs is imported.
AS_A_STRANGER = """
import logging, os, pwd, sys, time
sys.path.insert(0, sys.argv[1])
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
from tests.unit.plans.test_plan_store import key, plan
from cudnn_sdpa.plans.build import load_plan
from cudnn_sdpa.plans.default_store import active
os.setgroups([])
os.setuid(54321)
start = time.perf_counter()
for _ in range(2):
    assert load_plan(key()) is None
    if active() is not None:
        with active().building(key()):
            active().save(key(), plan(key()))
assert time.perf_counter() - start < 1
print(active() and active().folder)
"""
NEEDS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="root can become a user who may not write")


@NEEDS_ROOT
@pytest.mark.parametrize("made", [False, True], ids=["new", "there already"])
def test_a_home_that_cannot_be_written_to(run_python, home, made):
    """Without a folder there is no store; one of root's is read, and that is said once."""
    plans = home / ".cache" / "cudnn_sdpa" / "plans"
    if made:
        plans.mkdir(parents=True)
    for folder in [home, *home.rglob("*"), *(parent for parent in home.parents if parent != Path("/"))]:
        folder.chmod(folder.stat().st_mode | 0o055)
    result = run_python(AS_A_STRANGER, str(ROOT), **NOTHING_SET, HOME=str(home))
    assert result.stdout == f"{plans if made else None}\n"
    (line,) = result.stderr.splitlines()
    assert line.startswith(
        "INFO plans cannot be saved in " if made else "INFO plans are not stored for later processes: "
    )
    assert [path for path in home.rglob("*") if not path.is_dir()] == []


@NEEDS_ROOT
def test_a_user_without_a_home_gets_no_folder_named_tilde(run_python, tmp_path):
    """Where neither the environment nor the user database knows a home, paths keep their "~"."""
    tmp_path.chmod(0o777)
    result = run_python(AS_A_STRANGER, str(ROOT), **NOTHING_SET, HOME=None)
    assert result.stdout == "None\n"
    assert_said_once(result.stderr.splitlines(), "the user has no cache folder")
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_made_on_the_disk_without_a_plan(run_python, home, tmp_path):
    code = """
import pathlib, sys, torch, cudnn_sdpa
leaves = [torch.randn(1, 2, 8, 16, requires_grad=True) for _ in range(3)]
with cudnn_sdpa.record_plans() as manifest, cudnn_sdpa.no_plan_builds():
    cudnn_sdpa.sdpa(*leaves, is_causal=True).sum().backward()
    torch.compile(cudnn_sdpa.sdpa, backend="eager")(*(x.detach() for x in leaves))
assert len(manifest) == 0 and cudnn_sdpa.plan_cache.info().plans == 0
with cudnn_sdpa.use_plan_store(sys.argv[1]), cudnn_sdpa.use_plan_store("off"):
    pass
cudnn_sdpa.plan_cache.clear()
"""
    run_python(code, str(tmp_path / "chosen"), **NOTHING_SET, HOME=str(home))
    assert list(home.iterdir()) == []
    assert (tmp_path / "chosen").is_dir()


@pytest.mark.parametrize("command", [["version"], ["--help"], ["support", "--sm", "90", "--cudnn", "9.19"]])
def test_commands_that_build_no_plan_make_no_folder(untouched, command):
    result = CliRunner().invoke(cli.app, command)
    assert result.exit_code == 0, result.output
    assert result.output
    assert list(untouched.iterdir()) == []


def test_a_choice_neither_asks_for_the_default_nor_forgets_it(untouched, tmp_path):
    with cudnn_sdpa.use_plan_store(tmp_path / "chosen") as store:
        assert default_store.active() is store
        with cudnn_sdpa.use_plan_store("off"):
            assert default_store.active() is None
        assert default_store.active() is store
    assert list(untouched.iterdir()) == []
    default = default_store.active()
    assert default.folder == untouched / ".cache" / "cudnn_sdpa" / "plans"
    with cudnn_sdpa.use_plan_store("off"):
        pass
    assert default_store.active() is default


def test_a_folder_that_is_asked_for_by_none_must_be_there_too(untouched, monkeypatch):
    with cudnn_sdpa.use_plan_store() as store:
        assert store.folder == untouched / ".cache" / "cudnn_sdpa" / "plans"
    monkeypatch.setenv("HOME", "/nonexistent")
    with pytest.raises(cudnn_sdpa.OptionError, match="there is no home folder /nonexistent"):
        cudnn_sdpa.use_plan_store()


def test_the_warmup_command_says_that_its_plans_could_not_be_kept(untouched, monkeypatch):
    """Plans that end with the command are of no use, so it does not make them."""
    warming = importlib.import_module("cudnn_sdpa.offline.warmup")
    monkeypatch.setattr(cli, "require_gpu", lambda *_: None)
    monkeypatch.setattr(warming, "warmup", lambda *_, **__: pytest.fail("plans were made"))
    monkeypatch.setenv("HOME", "/nonexistent")
    PlanManifest.of([key()]).save("plans.json")
    result = CliRunner().invoke(cli.app, ["warmup", "plans.json"])
    assert result.exit_code == 2
    assert "there is no home folder /nonexistent" in result.output
    assert list(untouched.iterdir()) == []


def test_benchmarks_keep_no_plans(untouched, monkeypatch):
    stores = []

    def kernels(_):
        stores.append(default_store.active())
        return []

    monkeypatch.setattr(bench_cli, "require_gpu", lambda *_: None)
    monkeypatch.setattr(attention, "kernels", kernels)
    assert CliRunner().invoke(cli.app, ["bench", "attention", "--part", "kernels"]).exit_code == 0
    assert stores == [None]
    assert list(untouched.iterdir()) == []


def test_complaints_of_a_store_that_nobody_chose_are_information(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "cudnn_sdpa"):
        for name, level, options in (("chosen", "WARNING", {}), ("default", "INFO", {"log_level": logging.INFO})):
            store = PlanStore(tmp_path / name, **options)
            (tmp_path / name).rmdir()
            (tmp_path / name).touch()
            for _ in range(2):
                store.save(key(), plan(key()))
            (record,) = caplog.records
            assert record.levelname == level
            assert "cannot be saved" in record.message
            caplog.clear()


def test_the_test_suite_itself_keeps_no_plans():
    assert os.environ["CUDNN_SDPA_PLAN_DIR"] == "off"
    assert default_store.active() is None

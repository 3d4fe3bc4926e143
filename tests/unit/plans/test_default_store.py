"""Plans are stored in the user's cache folder by default; problems with the folder never stop a call."""

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
from cudnn_sdpa.plans import default_store
from cudnn_sdpa.plans.cache import load_plan
from cudnn_sdpa.plans.manifest import PlanManifest
from cudnn_sdpa.plans.store import PlanStore
from tests.unit.plans.test_plan_store import key, plan

ROOT = Path(__file__).parents[3]

#: Variables of a user without settings; the tests add a home.
NOTHING_SET = {"CUDNN_SDPA_PLAN_DIR": None, "XDG_CACHE_HOME": None}


@pytest.fixture
def home(tmp_path):
    folder = tmp_path / "home"
    folder.mkdir()
    return folder


@pytest.fixture
def untouched(monkeypatch, home, tmp_path):
    """This process without any store set or looked for; the value is the home."""
    for name in NOTHING_SET:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(default_store.Setting, "is_resolved", False)
    monkeypatch.setattr(default_store.Setting, "store", None)
    return home


@pytest.fixture
def ask(untouched, monkeypatch, caplog):  # noqa: ARG001 - needs the effect of `untouched`
    """Requests a plan twice, as calls on a GPU do. Returns the store's folder, if any, and the log."""

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
        default_store.Setting.is_resolved = False
        return (store and store.folder), [f"{record.levelname} {record.getMessage()}" for record in caplog.records]

    return run


@pytest.mark.parametrize("variable", [None, ""])
def test_plans_are_stored_in_the_users_cache(run_python, home, variable):
    """In a separate process, without the variable."""
    code = """
import logging, sys
sys.path.insert(0, sys.argv[1])
logging.basicConfig(level=logging.INFO)
from tests.unit.plans.test_plan_store import key, plan
from cudnn_sdpa.plans.cache import load_plan
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


def test_xdg_cache_home_is_respected(ask, home, tmp_path):
    elsewhere = tmp_path / "not" / "there" / "yet"
    assert ask(XDG_CACHE_HOME=str(elsewhere)) == (elsewhere / "cudnn_sdpa" / "plans", [])
    assert ask(HOME="/nonexistent") == (elsewhere / "cudnn_sdpa" / "plans", [])
    assert list(home.iterdir()) == []


def test_off_stores_nothing(ask, home):
    assert ask(CUDNN_SDPA_PLAN_DIR="off") == (None, [])
    assert list(home.iterdir()) == []


def assert_said_once(logged, what, level="INFO"):
    (line,) = logged
    assert line.startswith(f"{level} plans are not stored for later processes: ")
    assert what in line
    assert line.endswith("; CUDNN_SDPA_PLAN_DIR can name another folder")


def test_an_unsafe_default_folder_warns_with_the_remedy(ask, home):
    home.chmod(0o757)
    assert_said_once(ask()[1], f"chmod go-w {home}", "WARNING")


@pytest.mark.parametrize("missing", ["/nonexistent", "/nonexistent/home/user/"])
def test_a_missing_home_is_not_created(ask, missing):
    folder, logged = ask(HOME=missing)
    assert folder is None
    assert_said_once(logged, "there is no home folder /nonexistent")
    assert not Path("/nonexistent").exists()


def test_a_relative_cache_folder_is_not_created(ask, home, tmp_path):
    folder, logged = ask(XDG_CACHE_HOME="cache")
    if folder is None:
        assert_said_once(logged, "the user has no cache folder")
    else:  # a platformdirs that ignores it, as the specification says
        assert folder.is_relative_to(home)
    assert list(tmp_path.iterdir()) == [home]


def test_a_file_as_cache_folder_is_not_used(ask, home):
    (home / ".cache").touch()
    folder, logged = ask()
    assert folder is None
    assert_said_once(logged, "cannot be used")


def test_an_unusable_configured_folder_warns(ask, home, tmp_path):
    (tmp_path / "file").touch()
    folder, (line,) = ask(CUDNN_SDPA_PLAN_DIR=str(tmp_path / "file"))
    assert folder is None
    assert line.startswith("WARNING plans are not stored despite CUDNN_SDPA_PLAN_DIR: ")
    assert list(home.iterdir()) == []


#: After its imports, becomes a user who owns nothing and is not in the user database.
AS_A_STRANGER = """
import logging, os, pwd, sys, time
sys.path.insert(0, sys.argv[1])
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
from tests.unit.plans.test_plan_store import key, plan
from cudnn_sdpa.plans.cache import load_plan
from cudnn_sdpa.plans.default_store import active
os.setgroups([])
os.setuid(54321)
start = time.perf_counter()
for _ in range(2):
    assert load_plan(key()) is None
    if active() is not None:
        active().save(key(), plan(key()))
assert time.perf_counter() - start < 1
print(active() and active().folder)
"""
NEEDS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="root can become a user who may not write")


@NEEDS_ROOT
@pytest.mark.parametrize("made", [False, True], ids=["new", "there already"])
def test_a_read_only_home(run_python, home, made):
    """Without a folder there is no store; root's folder is read, which is logged once."""
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
    """If neither the environment nor the user database knows a home, paths keep their "~"."""
    tmp_path.chmod(0o777)
    result = run_python(AS_A_STRANGER, str(ROOT), **NOTHING_SET, HOME=None)
    assert result.stdout == "None\n"
    assert_said_once(result.stderr.splitlines(), "the user has no cache folder")
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_without_a_plan(run_python, home, tmp_path):
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
def test_commands_that_build_no_plan_create_no_folder(untouched, command):
    result = CliRunner().invoke(cli.app, command)
    assert result.exit_code == 0, result.output
    assert result.output
    assert list(untouched.iterdir()) == []


def test_an_explicit_store_does_not_touch_the_default(untouched, tmp_path):
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


def test_use_plan_store_without_a_path_needs_a_usable_default(untouched, monkeypatch):
    with cudnn_sdpa.use_plan_store() as store:
        assert store.folder == untouched / ".cache" / "cudnn_sdpa" / "plans"
    monkeypatch.setenv("HOME", "/nonexistent")
    with pytest.raises(cudnn_sdpa.OptionError, match="there is no home folder /nonexistent"):
        cudnn_sdpa.use_plan_store()


def test_the_warmup_command_reports_that_its_plans_cannot_be_stored(untouched, monkeypatch):
    """Plans that end with the command are useless, so it does not build them."""
    warming = importlib.import_module("cudnn_sdpa.offline.warmup")
    monkeypatch.setattr(cli, "require_gpu", lambda *_: None)
    monkeypatch.setattr(warming, "warmup", lambda *_, **__: pytest.fail("plans were made"))
    monkeypatch.setenv("HOME", "/nonexistent")
    PlanManifest.of([key()]).save("plans.json")
    result = CliRunner().invoke(cli.app, ["warmup", "plans.json"])
    assert result.exit_code == 2
    assert "there is no home folder /nonexistent" in result.output
    assert list(untouched.iterdir()) == []


def test_problems_of_the_default_store_are_logged_as_info(tmp_path, caplog):
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


def test_the_test_suite_stores_no_plans():
    assert os.environ["CUDNN_SDPA_PLAN_DIR"] == "off"
    assert default_store.active() is None

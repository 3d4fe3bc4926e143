"""Folders of plans and of the stand-in driver: no other user can have written their files or their parent folders."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from cudnn_sdpa import OfflineError, OptionError, use_plan_store
from cudnn_sdpa.offline import driver
from cudnn_sdpa.plans import default_store, private_folders
from cudnn_sdpa.plans.private_folders import UnsafeFolderError, check_above, open_private
from cudnn_sdpa.plans.store import PlanStore
from tests.unit.plans.test_plan_store import key, plan

NEEDS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="root alone can give files away")
STRANGER = 54321


def try_to_open(folder: Path) -> str:
    """The reason why a folder is not used; empty if it is used."""
    try:
        os.close(open_private(folder))
    except UnsafeFolderError as error:
        return str(error)
    return ""


@pytest.fixture
def base(tmp_path):
    """A folder with the usual permissions, three levels deep."""
    folder = tmp_path / "home" / ".cache" / "cudnn_sdpa"
    folder.mkdir(parents=True)
    for each in (folder, *folder.parents[:2]):
        each.chmod(0o755)
    return folder


def test_missing_folders_are_created_private_under_any_umask(base):
    for umask in (0o000, 0o002, 0o022, 0o077):
        before = os.umask(umask)
        try:
            assert try_to_open(base / f"{umask:o}" / "deep" / "plans") == ""
        finally:
            os.umask(before)
        made = [base / f"{umask:o}", *(base / f"{umask:o}").rglob("*")]
        assert [path.stat().st_mode & 0o777 for path in made] == [0o700] * 3


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757, 0o772])
@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_parent_folder_writable_by_others_is_refused(base, level, mode, monkeypatch):
    monkeypatch.setattr(private_folders, "_is_users_own_group", lambda _: False)
    parent = (base, *base.parents)[level]
    parent.chmod(mode)
    for folder in (base / "plans", base / "more" / "plans"):
        assert f"{parent} is writable by others" in try_to_open(folder)
        with pytest.raises(OptionError, match=f"chmod go-w {parent}"):
            use_plan_store(folder)
    assert list(base.iterdir()) == []  # nothing was created
    parent.chmod(0o755)
    assert try_to_open(base / "plans") == ""


def test_a_sticky_folder_like_tmp_is_accepted(base):
    base.chmod(0o1777)
    assert try_to_open(base / "plans") == ""


def cures_in(message: str) -> dict[str, str]:
    """The remedies that an error names, and how to try each."""
    found = re.findall(r"(chmod go-w|chmod \+t|CUDNN_SDPA_TRUSTED_FOLDERS)[ =]([^ ;]+)", message)
    return {way: path.rstrip(".") for way, path in found}


@pytest.mark.parametrize("way", ["chmod go-w", "chmod +t", "CUDNN_SDPA_TRUSTED_FOLDERS"])
def test_each_suggested_remedy_works(base, way, monkeypatch, caplog):
    """As on a Kubernetes volume, whose root is writable by all: the plan folder in it is private."""
    monkeypatch.setattr(private_folders, "_is_users_own_group", lambda _: False)
    base.chmod(0o777)
    monkeypatch.setenv("CUDNN_SDPA_PLAN_DIR", str(base / "plans"))
    assert default_store._from_environment() is None
    (warning,) = caplog.records
    assert warning.levelname == "WARNING"
    assert "\n" not in warning.getMessage()
    cures = cures_in(warning.getMessage())
    assert set(cures.values()) == {str(base)}
    if way.startswith("chmod"):
        subprocess.run([*way.split(), cures[way]], check=True)
    else:
        monkeypatch.setenv(way, f"/elsewhere:{cures[way]}")
    store = default_store._from_environment()
    store.save(key(), plan(key()))
    assert store.load(key()) == plan(key())
    assert (base / "plans").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("spelled", ["{}/", " {}", "/other:{}//"])
def test_trusted_folders_may_be_spelled_otherwise(base, monkeypatch, spelled):
    monkeypatch.setattr(private_folders, "_is_users_own_group", lambda _: False)
    base.chmod(0o777)
    assert f"{base}" in try_to_open(base / "plans")
    monkeypatch.setenv("CUDNN_SDPA_TRUSTED_FOLDERS", spelled.format(base))
    assert try_to_open(base / "plans") == ""


def test_only_trusted_folders_are_trusted(base, monkeypatch):
    monkeypatch.setattr(private_folders, "_is_users_own_group", lambda _: False)
    monkeypatch.setenv("CUDNN_SDPA_TRUSTED_FOLDERS", str(base))
    for other in (base.parent, base / "below", base / "below" / "plans"):
        other.mkdir(exist_ok=True)
        other.chmod(0o777)
        assert f"{other}" in try_to_open(base / "below" / "plans")
        other.chmod(0o700)
    assert try_to_open(base / "below" / "plans") == ""


@NEEDS_ROOT
def test_a_trusted_mount_may_have_another_owner_but_its_plans_may_not(base, monkeypatch):
    """A container that runs as root and mounts a folder of the host's user."""
    os.chown(base, STRANGER, STRANGER)
    assert f"CUDNN_SDPA_TRUSTED_FOLDERS={base}" in try_to_open(base / "plans")
    monkeypatch.setenv("CUDNN_SDPA_TRUSTED_FOLDERS", str(base))
    assert try_to_open(base / "plans") == ""
    os.chown(base / "plans", STRANGER, STRANGER)
    assert "belongs to another user" in try_to_open(base / "plans")


@pytest.mark.slow
@NEEDS_ROOT
def test_system_folders_are_trusted_in_single_user_containers(tmp_path):
    """Apptainer, bubblewrap: files of root outside, and `/`, belong to nobody inside."""
    alone = ["unshare", "--user", "--map-user=1000"]
    try:
        subprocess.run([*alone, "true"], check=True, timeout=60, capture_output=True)
    except (OSError, subprocess.SubprocessError):
        pytest.skip("no user namespaces here")
    of_system, user = tmp_path / "of the system", "of the user/cudnn_sdpa"
    (of_system / user).mkdir(parents=True)
    tmp_path.chmod(0o755)
    os.chown(of_system, STRANGER, STRANGER)
    os.chown(tmp_path, STRANGER, STRANGER)
    (tmp_path / "link").symlink_to(of_system)
    os.lchown(tmp_path / "link", STRANGER, STRANGER)
    program = """
import os, sys
from pathlib import Path
from cudnn_sdpa.plans.private_folders import OpenFolderError, open_private
print(os.getuid(), os.stat(sys.argv[1]).st_uid)
os.close(open_private(Path(sys.argv[1]) / sys.argv[2] / "plans"))
os.close(open_private(Path(sys.argv[1]).with_name("link") / sys.argv[2] / "plans"))
try:
    open_private(Path(sys.argv[1]), make=False)
except OpenFolderError as error:
    print(error)
"""
    command = [*alone, sys.executable, "-c", program, str(of_system), user]
    made = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=300, cwd=Path(private_folders.__file__).parents[2]
    )
    assert made.stdout.splitlines()[:1] == ["1000 65534"], made.stderr
    assert "belongs to another user (uid 65534), who could put code in it" in made.stdout, made.stderr
    assert (of_system / user / "plans").stat().st_mode & 0o777 == 0o700
    assert f"{of_system}" in try_to_open(of_system / user / "plans") or f"{tmp_path}" in try_to_open(of_system / user)


def test_only_the_users_private_group_may_write_to_parent_folders(base, monkeypatch):
    base.chmod(0o775)
    asked = []
    monkeypatch.setattr(private_folders, "_is_users_own_group", lambda group: asked.append(group) or True)
    assert try_to_open(base / "plans") == ""
    assert asked == [os.getgid()]
    (base / "plans").chmod(0o775)
    assert "chmod go-w" in try_to_open(base / "plans")


@NEEDS_ROOT
@pytest.mark.parametrize("what", ["folder above", "folder in a sticky one", "link in a sticky one", "folder"])
def test_folders_of_other_users_are_refused(base, tmp_path, what):
    mine = tmp_path / "downloads"
    mine.mkdir(mode=0o700)
    if "sticky" in what:
        base.chmod(0o1777)
    theirs = base / "theirs"
    if "link" in what:
        theirs.symlink_to(mine)
        os.lchown(theirs, STRANGER, STRANGER)
    else:
        theirs.mkdir(mode=0o755)
        os.chown(theirs, STRANGER, STRANGER)
    folder = theirs if what == "folder" else theirs / "plans"
    assert "belongs to another user" in try_to_open(folder)


def test_targets_of_the_users_symlinks_are_checked_too(base, tmp_path, monkeypatch):
    """Caches on another disk are common; the target of a symlink must be as safe as the symlink."""
    monkeypatch.setattr(private_folders, "_is_users_own_group", lambda _: False)
    disk = tmp_path / "disk" / "user"
    disk.mkdir(parents=True)
    (base / "absolute").symlink_to(disk)
    (base / "relative").symlink_to("../../../disk/user")
    (base / "twice").symlink_to("absolute/")
    for name in ("absolute", "relative", "twice"):
        assert try_to_open(base / name) == ""
        assert try_to_open(base / name / "plans") == ""
    disk.parent.chmod(0o777)
    for name in ("absolute", "relative", "twice"):
        assert "disk is writable by others" in try_to_open(base / name / "plans")
    (base / "ring").symlink_to("ring")
    assert "too many symbolic links" in try_to_open(base / "ring")


def test_a_folder_replaced_after_opening_is_checked_again(base, tmp_path):
    """For example by a symlink to a folder of the user with another user's file in it."""
    store = PlanStore(base / "plans")
    store.save(key(), plan(key()))
    forged = PlanStore(tmp_path / "forged")
    forged.save(key(65), plan(key(65), seed=3))
    for use in (lambda: store.load(key(65)), lambda: store.save(key(66), plan(key(66))) or None):
        base.chmod(0o777)
        (base / "plans").rename(base / "was")
        (base / "plans").symlink_to(forged.folder)
        assert use() is None
        (base / "plans").unlink()
        (base / "was").rename(base / "plans")
        base.chmod(0o755)
    assert forged.info().plans == 1
    assert store.load(key()) == plan(key())


def test_missing_folders_can_be_checked_without_creating_them(base):
    check_above(base / "a" / "b")
    base.chmod(0o777)
    with pytest.raises(UnsafeFolderError):
        check_above(base / "a" / "b")
    assert list(base.iterdir()) == []


@pytest.fixture
def cache(tmp_path, monkeypatch):
    if driver.has_real_driver():
        pytest.skip("this machine has a real driver, so no stand-in is made")
    if driver.compiler() is None:
        pytest.skip("no C compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_stand_in_drivers_folder_has_the_same_checks(cache, tmp_path, monkeypatch):
    monkeypatch.setattr(private_folders, "_is_users_own_group", lambda _: False)
    folder = driver.stand_in_folder()
    for open_to_others in (cache, cache / "cudnn_sdpa", folder.parent, folder):
        open_to_others.chmod(0o777)
        with pytest.raises(OfflineError, match="writable by others"):
            driver.stand_in_folder()
        open_to_others.chmod(0o700)
    uploads = tmp_path / "uploads"
    uploads.mkdir()
    (folder / "libcuda.so.1").rename(uploads / "libcuda.so.1")
    (folder / "libcuda.so.1").symlink_to(uploads / "libcuda.so.1")
    with pytest.raises(OfflineError, match="is a link"):
        driver.stand_in_folder()


def test_the_stand_in_driver_creates_no_home(tmp_path, monkeypatch):
    if driver.has_real_driver():
        pytest.skip("this machine has a real driver, so no stand-in is made")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "nobody"))
    with pytest.raises(OfflineError, match="there is no home folder"):
        driver.stand_in_folder()
    assert not (tmp_path / "nobody").exists()


@NEEDS_ROOT
@pytest.mark.parametrize(("real", "effective"), [(STRANGER, 0), (0, STRANGER)])
def test_a_process_that_acts_for_another_user_trusts_no_folder(tmp_path, real, effective):
    folder = tmp_path / "plans"
    folder.mkdir(mode=0o700)
    os.chown(folder, STRANGER, STRANGER)
    tmp_path.chmod(0o755)
    program = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from cudnn_sdpa.plans import private_folders\n"
        "status = os.stat(sys.argv[1])\n"
        f"os.setresuid({real}, {effective}, 0)\n"
        "print(private_folders.is_private(status))\n"
        "for ask in (private_folders.open_private, private_folders.check_above):\n"
        "    try:\n"
        "        ask(Path(sys.argv[1]))\n"
        "    except private_folders.UnsafeFolderError as error:\n"
        "        print(error)\n"
    )
    result = subprocess.run([sys.executable, "-c", program, folder], capture_output=True, text=True, check=False)
    message = f"{folder} cannot be used: this process acts as user {effective} for user {real}"
    assert result.stdout.splitlines()[0] == "False", result.stderr
    assert [line.startswith(message) for line in result.stdout.splitlines()[1:]] == [True, True]


@pytest.mark.parametrize("is_primary", [False, True])
@pytest.mark.parametrize(("name", "members"), [("ada", []), ("ada", ["ada"]), ("ada", ["ada", "bob"]), ("staff", [])])
def test_the_users_own_group_has_no_other_account(monkeypatch, name, members, is_primary):
    """An account's primary group does not list it as a member; `is_primary`: that of another account, too."""
    user = SimpleNamespace(pw_uid=os.geteuid(), pw_gid=4321, pw_name="ada")
    others = [SimpleNamespace(pw_uid=os.geteuid() + 1, pw_gid=4321 if is_primary else 4322, pw_name="bob")]
    monkeypatch.setattr("pwd.getpwuid", lambda _: user)
    monkeypatch.setattr("pwd.getpwall", lambda: [user, *others])
    monkeypatch.setattr("grp.getgrgid", lambda _: SimpleNamespace(gr_name=name, gr_mem=members))
    private_folders._is_users_own_group.cache_clear()
    try:
        is_own = name == "ada" and "bob" not in members and not is_primary
        assert private_folders._is_users_own_group(4321) is is_own
        assert private_folders._is_users_own_group(4322) is False
    finally:
        private_folders._is_users_own_group.cache_clear()

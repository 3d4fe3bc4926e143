"""What is said of the FlashAttention-4 that is installed, and of what only looks like it."""

from __future__ import annotations

import importlib.util
import sys

import flash4_stand_in as stand_in
import pytest

from cudnn_sdpa.attention.flash4.installed import COMMAND, TESTED, installed
from cudnn_sdpa.offline.installation import UNTESTED


def test_a_tested_installation_can_be_used(tmp_path):
    stand_in.write(tmp_path)
    with stand_in.on_the_search_path(tmp_path):
        found = installed()
        assert not found.missing
        assert found.version == TESTED["flash-attn-4"]
        assert found.tvm_ffi == str(tmp_path / "tvm_ffi/lib/libtvm_ffi.so")
        assert "flash_attn" not in sys.modules


def test_another_file_is_another_identity(tmp_path):
    identities = set()
    for number in range(2):
        folder = tmp_path / str(number)
        stand_in.SOURCES["flash_attn/cute/more.py"] = f"{number}\n"
        try:
            stand_in.write(folder)
            with stand_in.on_the_search_path(folder):
                identities.add(installed().identity)
        finally:
            del stand_in.SOURCES["flash_attn/cute/more.py"]
    assert len(identities) == 2


def test_a_file_of_another_package_is_named(tmp_path):
    """flash-attn 2 installs an older package of this name over it; the metadata do not tell."""
    stand_in.write(tmp_path)
    (tmp_path / "flash_attn/cute/interface.py").write_text("def _flash_attn_fwd(q, k, v): ...\n")
    with stand_in.on_the_search_path(tmp_path):
        missing = installed().missing
    assert "interface.py is not that of flash-attn-4" in missing
    assert "pip install 'flash-attn-4==" in missing


@pytest.mark.parametrize("name", TESTED)
def test_an_untested_version_is_refused_by_name(tmp_path, monkeypatch, name):
    stand_in.write(tmp_path, {**TESTED, name: "99.1"})
    with stand_in.on_the_search_path(tmp_path):
        assert f"{name} 99.1 is untested (tested: {TESTED[name]})" in installed().missing
    monkeypatch.setenv(UNTESTED, "1")
    with stand_in.on_the_search_path(tmp_path):
        assert not installed().missing


@pytest.mark.skipif(importlib.util.find_spec("tvm_ffi") is not None, reason="TVM FFI is installed here")
def test_a_missing_library_is_named(tmp_path):
    stand_in.write(tmp_path, libraries=False)
    with stand_in.on_the_search_path(tmp_path):
        assert "tvm_ffi is installed without lib/libtvm_ffi.so" in installed().missing


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is not None, reason="FlashAttention is installed here")
def test_without_it_the_command_that_installs_it_is_named():
    installed.cache_clear()
    assert installed().missing.startswith("flash-attn-4 is not installed; pip install")


def test_the_documentation_has_the_command(repository):
    assert f"```bash\n{COMMAND}\n```" in (repository / "docs" / "providers.md").read_text()

"""Compiled functions of FlashAttention-4 in a process: from a store, from a helper, in the background, and failures."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import threading
import time

import flash4_stand_in as stand_in
import pytest
import torch
from fake_gpu import FakePlan

from cudnn_sdpa import no_plan_builds, plan_cache, providers, record_plans, sdpa
from cudnn_sdpa.attention.dense import specs
from cudnn_sdpa.attention.flash4.plans import Functions, flash4_forward, functions, kind_of, names_of, reasons_against
from cudnn_sdpa.attention.flash4.programs import Kind, Window
from cudnn_sdpa.errors import LibraryError, PlanBuildError
from cudnn_sdpa.graph.key import HOST_SCALAR, Operand, PlanKey, Role
from cudnn_sdpa.graph.layouts import TensorLayout
from cudnn_sdpa.graph.target import Target, load_properties
from cudnn_sdpa.offline import function_compiler
from cudnn_sdpa.offline.warmup import compile_plans
from cudnn_sdpa.plans.default_store import open_store, use_plan_store
from cudnn_sdpa.plans.store import StoredPlan

KIND = Kind(False, "float16", 64, 64, 1, True, False, False, False, False, False, False, False, False)


@pytest.fixture(autouse=True)
def installed(tmp_path):
    stand_in.write(tmp_path / "packages")
    with stand_in.on_the_search_path(tmp_path / "packages"):
        yield


@pytest.fixture
def store(tmp_path):
    folder = tmp_path / "plans"
    folder.mkdir(mode=0o700)
    with use_plan_store(folder):
        yield open_store(folder, "folder")


@pytest.fixture
def loaded(monkeypatch):
    """Libraries are what they were made of."""
    monkeypatch.setattr(Functions, "library_of", lambda _, data: data)


def made(kind: Kind, data: bytes = b"code", features: tuple[str, ...] = ()) -> StoredPlan:
    identity = functions.identity_of(kind, "forward")
    return StoredPlan(identity.identity(), "FlashAttention-4", dict.fromkeys(features, 1), 0, 1.0, data)


def key_of(kind: Kind, length: int = 70) -> PlanKey:
    rows = TensorLayout.contiguous((1, 2, length, kind.dim), torch.float16)
    given = [Operand(name, rows) for name in "qkv"] + [Operand("scale", HOST_SCALAR, Role.SCALAR)]
    target = Target.from_properties(load_properties("h100"))
    return flash4_forward.key(given, [Operand("out", rows)], {"window": (None, 0)}, target, device=None)


def test_what_is_stored_is_loaded_once(store, loaded):  # noqa: ARG001
    found = Functions()
    assert not found.are_ready(KIND)
    store.save(functions.identity_of(KIND, "forward"), made(KIND))
    assert found.are_ready(KIND)
    assert found.of(KIND) == {"forward": b"code"}
    store.clear()
    assert found.of(KIND) is found.of(KIND)


def test_host_code_for_another_processor_is_compiled_again(store, loaded, monkeypatch):  # noqa: ARG001
    store.save(functions.identity_of(KIND, "forward"), made(KIND, features=("avx9000",)))
    found = Functions()
    assert not found.are_ready(KIND)
    monkeypatch.setattr(found, "_compiled", lambda kind: {"forward": made(kind, b"new")})
    assert found.of(KIND) == {"forward": b"new"}
    monkeypatch.setattr("platform.machine", lambda: "another")
    assert not Functions().are_ready(KIND)


def test_what_cannot_be_loaded_is_an_error_of_the_library(store, monkeypatch):
    store.save(functions.identity_of(KIND, "forward"), made(KIND))

    def cannot(*_):
        raise OSError("wrong ELF class")

    monkeypatch.setattr(Functions, "library_of", cannot)
    found = Functions()
    assert not found.are_ready(KIND)
    assert "wrong ELF class" in found.failure(KIND)
    with pytest.raises(LibraryError, match="wrong ELF class"):
        found.of(KIND)


def test_an_installation_that_is_not_used_compiles_nothing(store, tmp_path, monkeypatch):
    """Not for a manifest of another machine, either."""
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a helper is asked"))
    (tmp_path / "packages" / "flash_attn" / "cute" / "interface.py").write_text("changed = 1\n")
    with (
        stand_in.on_the_search_path(tmp_path / "packages"),
        pytest.raises(LibraryError, match="is not that of flash-attn-4"),
    ):
        Functions().compile_into(store, KIND)


@pytest.mark.parametrize("error", [subprocess.TimeoutExpired("python", 3), OSError("no process")])
def test_a_helper_that_does_not_answer_is_asked_once(monkeypatch, error):
    asked = []

    def run(*_, **__):
        asked.append(1)
        raise error

    monkeypatch.setattr(subprocess, "run", run)
    found = Functions()
    for _ in range(2):
        with pytest.raises(LibraryError, match="does not answer"):
            found.of(KIND)
    assert len(asked) == 1


def test_a_failure_names_calls_as_users_make_them(monkeypatch):
    answers = subprocess.CompletedProcess("", 0, '{"error": "OSError: no kernel"}', "")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: answers)
    packed = KIND._replace(dim=192, dim_v=128, group=4, is_causal=False, has_left=True, has_lse=True, is_packed=True)
    back = KIND._replace(is_backward=True, dtype="bfloat16", is_capped=True, few_keys=True, has_lse=True)
    for kind, words in (
        (KIND, "calls in float16, D=64, causal"),
        (packed, "calls in float16, D=192 and 128, 4 query heads for a key head, window, log-sum-exp, packed"),
        (packed._replace(is_on_pages=True, has_lse=False, group=1), "in float16, D=192 and 128, window, on pages"),
        (back, "gradients in bfloat16, D=64, causal, soft cap, one tile of keys"),
    ):
        with pytest.raises(LibraryError, match=f"is not used for .*{words}: OSError: no kernel$") as error:
            Functions().of(kind)
        assert "Kind" not in str(error.value)


def test_a_missing_c_compiler_is_named_with_the_cure(monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    cure = r"install a C compiler \(on Debian: apt-get install gcc libc6-dev\), or name one in CC"
    with pytest.raises(OSError, match=rf"^the C compiler 'no-such-compiler', .* is not found; {cure}$"):
        function_compiler.library_of(None)
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", "/nowhere")
    assert function_compiler.why_no_compiler().startswith("the C compiler 'cc', ")
    monkeypatch.setenv("CC", sys.executable)
    assert function_compiler.why_no_compiler() == ""


def test_nobody_waits_for_another_kind(monkeypatch, loaded):  # noqa: ARG001
    found, other = Functions(), KIND._replace(dim=128)
    begun, goes_on = threading.Event(), threading.Event()

    def compiled(kind):
        begun.set()
        assert goes_on.wait(20)
        return {"forward": made(kind)}

    monkeypatch.setattr(found, "_compiled", compiled)
    found._loaded[KIND] = {"forward": b"code"}
    thread = threading.Thread(target=found.of, args=(other,))
    thread.start()
    assert begun.wait(20)
    start = time.monotonic()
    assert found.are_ready(KIND)
    assert not found.are_ready(other)
    assert found.of(KIND) == {"forward": b"code"}
    assert time.monotonic() - start < 5
    goes_on.set()
    thread.join(20)
    assert found.are_ready(other)


def wait_until_idle(found: Functions) -> None:
    end = time.monotonic() + 30
    while found._pending:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_background_compiles_each_kind_once(monkeypatch, loaded):  # noqa: ARG001
    found, asked = Functions(), []

    def compiled(kind):
        asked.append(kind)
        if kind.dim == 128:
            raise LibraryError("no kernel")
        return {"forward": made(kind)}

    monkeypatch.setattr(found, "_compiled", compiled)
    for _ in range(3):
        found.compile_in_background(KIND)
        found.compile_in_background(KIND._replace(dim=128))
        wait_until_idle(found)
    assert sorted(kind.dim for kind in asked) == [64, 128]
    assert found.are_ready(KIND)
    assert "no kernel" in found.failure(KIND._replace(dim=128))


def test_one_thread_compiles_all_kinds_in_order(monkeypatch, loaded):  # noqa: ARG001
    found, threads, go = Functions(), [], threading.Event()

    def compiled(kind):
        assert go.wait(60)
        threads.append((kind.dim, threading.get_ident()))
        return {"forward": made(kind)}

    monkeypatch.setattr(found, "_compiled", compiled)
    for dim in (64, 128, 256):
        found.compile_in_background(KIND._replace(dim=dim))
    go.set()
    wait_until_idle(found)
    assert [dim for dim, _ in threads] == [64, 128, 256]
    assert len({thread for _, thread in threads}) == 1


def test_no_more_kinds_are_kept_than_the_limit(monkeypatch, loaded):  # noqa: ARG001
    found = Functions()
    monkeypatch.setattr(Functions, "limit", 2)
    monkeypatch.setattr(found, "_compiled", lambda kind: {"forward": made(kind)})
    for dim in (64, 128):
        assert found.failure(KIND._replace(dim=dim)) == ""
        found.of(KIND._replace(dim=dim))
    assert found.failure(KIND) == ""
    assert "2 of its kinds are kept" in found.failure(KIND._replace(dim=256))


def test_a_failure_in_the_background_is_a_warning_once_for_a_missing_package(monkeypatch, caplog):
    answer = '{"error": "no kernel"}'
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess("", 0, answer, ""))
    found = Functions()
    with caplog.at_level("INFO", "cudnn_sdpa"):
        for dim in (64, 128):
            found.compile_in_background(KIND._replace(dim=dim))
        wait_until_idle(found)
        assert len(caplog.records) == 2
        answer = '{"error": "ModuleNotFoundError: triton"}'
        for dim in (192, 256):
            found.compile_in_background(KIND._replace(dim=dim))
            wait_until_idle(found)
    assert "no kernel" in caplog.text


def test_a_package_that_cannot_be_imported_fails_every_kind(monkeypatch):
    answers = subprocess.CompletedProcess("", 0, '{"error": "ModuleNotFoundError: No module named \'triton\'"}', "")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: answers)
    found = Functions()
    with pytest.raises(LibraryError, match="triton"):
        found.of(KIND)
    assert "cannot be imported" in found.failure(KIND._replace(dim=128))


def test_a_warm_call_stays_with_cudnn_where_nothing_may_be_compiled(monkeypatch):
    key, other = key_of(KIND), key_of(KIND, 71)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(functions, "are_ready", lambda _: True)
    started = []
    monkeypatch.setattr(functions, "compile_in_background", started.append)

    def ready(has_plan=False):
        return specs.ready(key, lambda *_: other, lambda of: has_plan and of is other)

    with providers("fa4", "cudnn"):
        assert ready() is key
        with no_plan_builds():
            assert ready(has_plan=True) is key  # a new shape of a compiled kind takes no time
            monkeypatch.setattr(functions, "are_ready", lambda _: False)
            assert ready(has_plan=True) is other
            assert ready() is key  # which raises, as any missing plan
            assert not started
        assert ready() is other
        assert started == [kind_of(key)]
    with providers("fa4"):
        assert ready() is key


def test_a_new_shape_of_a_compiled_kind_is_no_missing_plan(monkeypatch):
    compiled = key_of(KIND)
    monkeypatch.setattr(functions, "are_ready", lambda kind: kind == kind_of(compiled))
    with no_plan_builds():
        for length in (71, 73):
            key = key_of(KIND, length)
            assert plan_cache.get(key, FakePlan, to_use=False).key == key
        with pytest.raises(PlanBuildError, match="no_plan_builds"):
            plan_cache.get(key_of(KIND._replace(dim=128, dim_v=128)), FakePlan, to_use=False)
    plan_cache.clear()


@pytest.mark.parametrize(("window", "is_served"), [((None, None), False), ((4, 3), False), ((None, 0), True)])
def test_more_batch_entries_than_a_grid_has(window: Window, is_served):
    target = Target.from_properties(load_properties("h100"))
    rows = TensorLayout.contiguous((70000, 1, 16, 64), torch.float16)
    found = reasons_against({"q": rows, "k": rows, "v": rows, "out": rows}, window, target)
    assert any("65,535" in reason for reason in found) is not is_served


def test_compile_plans_reports_a_kind_that_fails(monkeypatch, tmp_path):
    def fail(kind):
        raise LibraryError(f"no compiler for {kind.dim}")

    monkeypatch.setattr(functions, "_compiled", fail)
    with providers("fa4"), record_plans(target="h100") as manifest:
        q = torch.empty(1, 2, 70, 64, dtype=torch.float16, device="meta")
        sdpa(q, q, q, is_causal=True)
    report = compile_plans(manifest, "h100", tmp_path / "compiled")
    assert report.built == report.held == 0
    assert ["no compiler for 64" in why for why in report.failed.values()] == [True]


def test_compile_plans_writes_functions_that_another_process_loads(monkeypatch, tmp_path, loaded):  # noqa: ARG001
    """Those of both passes, each kind once; lengths are in no kind, and a second run finds all."""
    asked: list[Kind] = []

    def run(*_, **given):
        asked.append(Kind(*json.loads(given["input"])))
        made = {name: base64.b64encode(f"{name} of {asked[-1]}".encode()).decode() for name in names_of(asked[-1])}
        return subprocess.CompletedProcess("", 0, json.dumps({"functions": made}), "")

    monkeypatch.setattr(subprocess, "run", run)
    with providers("fa4", "cudnn"), record_plans(target="h100") as manifest:
        for length in (70, 90):
            q = torch.empty(1, 2, length, 64, dtype=torch.float16, device="meta", requires_grad=True)
            sdpa(q, q, q, is_causal=True).sum().backward()
    folder = tmp_path / "compiled"
    for built in (2, 0):
        report = compile_plans(manifest, "h100", folder)
        assert (report.failed, report.built) == ({}, built)
        assert {kind.is_backward for kind in asked} == {False, True}
        assert len(asked) == 2
    with use_plan_store(folder):
        for kind in asked:
            assert Functions().of(kind) == {name: f"{name} of {kind}".encode() for name in names_of(kind)}
    assert len(asked) == 2

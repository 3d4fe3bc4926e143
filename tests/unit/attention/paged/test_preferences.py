"""Which kernel `sdpa_paged` takes by measurements, and what `explain` says of it."""

from __future__ import annotations

import pytest
import torch
from fake_gpu import FakePlan, gpu_on_the_cpu
from native_way import native_way

from cudnn_sdpa import OptionError, UnsupportedError, explain, providers, sdpa_paged
from cudnn_sdpa.attention.paged import launch
from cudnn_sdpa.attention.paged_varlen.preferences import OWN, SLOWER, preferences
from cudnn_sdpa.engine.native.calls import NativeCalls
from cudnn_sdpa.graph import known_issues
from cudnn_sdpa.graph.known_issues import KnownIssue

BF16 = torch.bfloat16


def explained(batch, tokens, keys, heads, dims, heads_kv=1, **options):
    """The report of a call on an H200, of a sequence's tokens."""
    columns = keys // 64
    pages = torch.empty(batch * columns, 64, heads_kv, dims[0], dtype=BF16, device="meta")
    table = torch.empty(batch, columns, dtype=torch.int32, device="meta")
    lengths = torch.empty(batch, dtype=torch.int32, device="meta")
    q = torch.empty(batch, heads, tokens, dims[0], dtype=BF16, device="meta")
    return explain(sdpa_paged, q, pages, pages[..., : dims[1]], table, lengths, page_layout="NHD", **options)


@pytest.mark.parametrize(
    ("call", "kernel"),
    [
        ((32, 1, 4096, 32, (128, 128), 8), "own"),
        ((1, 1, 4096, 32, (128, 128), 8), "cudnn"),
        ((1, 1, 32768, 32, (128, 128), 8), "own"),
        ((4, 16, 4096, 32, (128, 128), 8), "own"),
        ((8, 512, 512, 32, (128, 128), 8), "cudnn"),
        ((8, 512, 2048, 32, (128, 128), 8), "own"),
        ((32, 1, 4096, 64, (64, 64), 8), "cudnn"),
        ((32, 3, 4096, 64, (64, 64), 8), "own"),
        ((64, 1, 8192, 16, (576, 512)), "own"),
        ((64, 1, 8192, 128, (576, 512)), "own"),
        ((1, 1, 8192, 16, (576, 512)), "cudnn"),
    ],
)
def test_a_row_of_measurements_chooses(call, kernel, monkeypatch):
    monkeypatch.setenv("CUDNN_SDPA_TARGET", "h200")
    report = explained(*call)
    assert ("paged_varlen_forward" in report.key) == (kernel == "own")
    taken = "our own kernel for pages" if kernel == "own" else "cuDNN's engines"
    assert report.choice.startswith(f"{taken}: measured ")
    assert report.choice in str(report)


def test_a_known_bug_of_the_own_kernel_is_cudnns_call(monkeypatch):
    monkeypatch.setenv("CUDNN_SDPA_TARGET", "h200")
    bug = KnownIssue("it skips a page", "seen on an H200", "refused", concerns=lambda _: True, provider="own")
    monkeypatch.setattr(known_issues, "ATTENTION_ISSUES", (*known_issues.ATTENTION_ISSUES, bug))
    for names in (("default",), ("own", "cudnn")):
        with providers(*names):
            report = explained(32, 1, 4096, 32, (128, 128), 8)
        assert (report.provider, report.supported) == ("cudnn", True)
    with providers("default"):
        assert str(bug) in explained(32, 1, 4096, 32, (128, 128), 8).choice
    with providers("own"):
        assert any(str(bug) in reason for reason in explained(32, 1, 4096, 32, (128, 128), 8).reasons)


def test_without_a_row_nothing_is_said(monkeypatch):
    monkeypatch.setenv("CUDNN_SDPA_TARGET", "h200")
    assert not explained(2, 1, 4096, 4, (96, 96)).choice
    monkeypatch.setenv("CUDNN_SDPA_TARGET", "b200")
    assert not explained(2, 1, 4096, 4, (128, 128)).choice


def test_the_own_kernel_is_preferred_where_it_is_as_fast():
    for row in preferences():
        assert (row.kernel == OWN) == (row.own_us <= SLOWER * row.cudnn_us), row


def test_rows_of_cudnn_are_of_plain_calls(monkeypatch):
    monkeypatch.setenv("CUDNN_SDPA_TARGET", "h200")
    assert explained(32, 1, 4096, 64, (64, 64), 8).choice
    assert not explained(32, 1, 4096, 64, (64, 64), 8, softcap=3.0).choice


# The setting.


@pytest.fixture(params=["python", "native"])
def gpu(request):
    with native_way(on=request.param == "native"), gpu_on_the_cpu():
        yield


def small(dtype=torch.bfloat16, page=16):
    """A call on pages of two sequences, on the fake GPU."""
    pages = torch.randn(6, page, 2, 64).to(dtype)
    table, lengths = torch.arange(6, dtype=torch.int32).view(2, 3), torch.tensor([2 * page, 5], dtype=torch.int32)
    return {
        "q": torch.randn(2, 4, 1, 64).bfloat16(),
        "k_pages": pages,
        "v_pages": pages,
        "page_table": table,
        "seq_lens_kv": lengths,
        "page_layout": "NHD",
    }


@pytest.mark.usefixtures("gpu")
def test_named_providers_serve_calls_in_order():
    given, launched = small(), []
    for names in (["cudnn"], ["own"], ["own", "cudnn"], ["cudnn", "own"], ["fastest"]):
        with providers(*names) as entered:
            assert entered == tuple(names)
            for _ in range(3):  # the last ones are known calls
                sdpa_paged(**given)
                launched.append(FakePlan.launched[-1].provider)
    assert launched == [None] * 3 + ["own"] * 6 + [None] * 6


@pytest.mark.usefixtures("gpu")
def test_calls_that_are_bound_while_the_setting_changes_are_bound_again(monkeypatch):
    given, chooses = small(), launch.runs_own_kernel

    def changed(*args):
        found = chooses(*args)
        providers("own")  # as another thread
        return found

    with providers("cudnn"):
        monkeypatch.setattr(launch, "runs_own_kernel", changed)
        sdpa_paged(**given)
        assert FakePlan.launched[-1].provider is None
        monkeypatch.setattr(launch, "runs_own_kernel", chooses)
        for _ in range(3):
            sdpa_paged(**given)
            assert FakePlan.launched[-1].provider == "own"


@pytest.mark.usefixtures("gpu")
def test_calls_that_the_native_module_gets_while_the_setting_changes_are_forgotten(monkeypatch):
    given, register = small(), NativeCalls.register

    def changed(*args):
        providers("own")  # as another thread
        return register(*args)

    with providers("cudnn"):
        sdpa_paged(**given)
        monkeypatch.setattr(NativeCalls, "register", changed)
        sdpa_paged(**given)
        monkeypatch.setattr(NativeCalls, "register", register)
        providers("own")
        for _ in range(3):
            sdpa_paged(**given)
            assert FakePlan.launched[-1].provider == "own"


@pytest.mark.usefixtures("gpu")
def test_pages_that_cudnn_cannot_read_need_own_kernels():
    for given in (small(torch.float8_e4m3fn), small(page=12)):
        with providers("cudnn", "own"):
            sdpa_paged(**given)
            assert FakePlan.launched[-1].provider == "own"
        with providers("cudnn"), pytest.raises(UnsupportedError, match=r"cuDNN has none for pages(.|\n)*'own'"):
            sdpa_paged(**given)


def test_calls_on_the_cpu_are_refused_alike():
    given = small(page=12)
    sdpa_paged(**given)
    with providers("cudnn"), pytest.raises(UnsupportedError, match="cuDNN has none for pages of no power of two"):
        sdpa_paged(**given)
    sdpa_paged(**given)


def test_own_kernels_are_declined_where_a_target_has_none(monkeypatch):
    given = (32, 1, 4096, 16, (576, 512))
    monkeypatch.setenv("CUDNN_SDPA_TARGET", "a100")
    with providers("own", "cudnn"):
        assert explained(*given).provider == "own"
    monkeypatch.setenv("CUDNN_SDPA_TARGET", "rtx4090")
    with providers("own", "cudnn"):
        assert explained(*given).provider == "cudnn"
    with providers("own"):
        assert "110 KB of shared memory" in str(explained(*given).reasons)


def test_explain_says_who_was_named(monkeypatch):
    monkeypatch.setenv("CUDNN_SDPA_TARGET", "h200")
    with providers("own"):
        report = explained(2, 1, 4096, 4, (96, 96))
    assert report.choice == "our own kernel for pages, by providers('own')"
    assert "provider   own" in str(report)
    assert explained(2, 1, 4096, 4, (96, 96)).provider == "cudnn"


@pytest.mark.parametrize("names", [(), ("fa9",), ("cudnn", "OWN")])
def test_what_is_no_provider(names):
    with pytest.raises(OptionError, match=r"^names: got .*; expected one .*'own', 'fa4', 'frontend', 'fastest'"):
        providers(*names)


def test_the_environment_names_providers(monkeypatch):
    from cudnn_sdpa.plans import providers as module

    monkeypatch.setenv("CUDNN_SDPA_PROVIDERS", "own, cudnn")
    assert module.of_environment() == ("own", "cudnn")
    monkeypatch.setenv("CUDNN_SDPA_PROVIDERS", "")
    assert module.of_environment() == ("default",)
    monkeypatch.setenv("CUDNN_SDPA_PROVIDERS", "cudn")
    with pytest.raises(OptionError, match="CUDNN_SDPA_PROVIDERS: got 'cudn'; expected one of"):
        module.of_environment()

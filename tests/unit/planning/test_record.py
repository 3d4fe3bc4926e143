"""`record_plans` for a GPU that is not in the machine: it records the plans that calls would use there."""

from __future__ import annotations

import logging

import pytest
import torch

import cudnn_sdpa
from cudnn_sdpa import kernels
from cudnn_sdpa.engine.explain import describer_of
from cudnn_sdpa.errors import UnsupportedError
from cudnn_sdpa.graph.target import Target, load_properties
from cudnn_sdpa.planning import record
from cudnn_sdpa.plans.manifest import PlanManifest
from tests.unit import opcheck_calls
from tests.unit.opcheck_calls import CALLS, OF_SAMPLES, HalfInputs, registered
from tests.unit.plans.test_cache import use


@pytest.fixture(scope="module")
def h200():
    return Target.from_properties(load_properties("h200"))


def described(monkeypatch, target, call):
    """The plans that `explain` names for the public functions that `call` uses."""
    keys = []

    def noting(function):
        def run(*args, **kwargs):
            description = describer_of(function)(*args, **kwargs)
            parts = [description] if description.backward is None else [description, description.backward]
            keys.extend(part.for_target(target).key(target, None) for part in parts)
            return function(*args, **kwargs)

        return run

    for name, function in vars(opcheck_calls).copy().items():
        if name in cudnn_sdpa.__all__ and describer_of(function) is not None:
            monkeypatch.setattr(opcheck_calls, name, noting(function))
    monkeypatch.setattr(kernels, "attention", noting(kernels.attention))
    call(HalfInputs())
    return PlanManifest.of(keys).plans


#: `explain` names the plan of grad_x and mentions the other one; and operators that write into `out` do not know
#: whether the LSE is needed, so both plans are recorded.
MORE = (
    "conv2d, trained",
    *(f"{name}, into a tensor" for name in ("sdpa", "varlen", "paged", "packed on pages")),
    "sdpa, into a tensor, with lse",
)


@pytest.mark.parametrize("name", [name for name in CALLS if name != "tokens on pages"])
def test_recorded_plans_are_those_that_explain_names(name, monkeypatch, h200):
    if "sinks" in name and h200.cudnn < 91300:
        pytest.skip("cuDNN has no sinks before 9.13")
    with cudnn_sdpa.record_plans(target="h200") as manifest:
        CALLS[name](HalfInputs())
    expected = described(monkeypatch, h200, CALLS[name])
    assert expected
    missing = [plan for plan in expected if plan not in manifest.plans]
    assert not missing
    assert len(manifest) == len(expected) + (name in MORE)
    assert manifest.recorded_on["gpu"] == "NVIDIA H200"


def test_appending_needs_no_plan():
    with cudnn_sdpa.record_plans(target="h200") as manifest:
        CALLS["tokens on pages"](HalfInputs())
    assert not manifest.plans


@pytest.mark.parametrize(
    "name", ["sdpa, with options", "sdpa, trained", "varlen", "paged", "rms_norm, trained", "conv2d"]
)
def test_meta_tensors_can_be_recorded(name):
    manifests = []
    for device in ("cpu", "meta"):
        with cudnn_sdpa.record_plans(target="h200") as manifest:
            CALLS[name](HalfInputs(device))
        manifests.append(manifest.plans)
    assert manifests[0] == manifests[1] != []


def test_every_operator_can_be_recorded(h200):
    with record._Recorder(h200) as recorder:
        cudnn_sdpa.sdpa(*HalfInputs().qkv())
    assert {*recorder.operators, *record.WITHOUT_PLANS} - OF_SAMPLES - {"", "dropout_seed"} == registered()


def test_dropout_is_recorded():
    with cudnn_sdpa.record_plans(target="h200") as manifest:
        cudnn_sdpa.sdpa(*HalfInputs().qkv(grad=True), dropout_p=0.5).sum().backward()
    assert [plan["options"]["dropout_p"] for plan in manifest.plans] == [0.5, 0.5]


def test_recording_does_not_change_results_and_gradients():
    q, k, v = (torch.randn(1, 2, 8, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    expected = cudnn_sdpa.sdpa(q, k, v, is_causal=True)
    grads = torch.autograd.grad(expected.sum(), (q, k, v))
    with cudnn_sdpa.record_plans(target="b200") as manifest:
        out = cudnn_sdpa.sdpa(q, k, v, is_causal=True)
        found = torch.autograd.grad(out.sum(), (q, k, v))  # an expanded gradient
    assert torch.equal(out, expected)
    assert all(torch.equal(*pair) for pair in zip(found, grads, strict=True))
    assert [plan["operation"].partition(":")[2] for plan in manifest.plans] == ["sdpa_backward", "sdpa_forward"]
    assert "B200" in manifest.recorded_on["gpu"]


def test_each_plan_is_recorded_once_and_only_within_the_context():
    q = torch.randn(1, 2, 8, 16, dtype=torch.bfloat16)
    with cudnn_sdpa.record_plans(target="h200") as manifest:
        for scale in (None, 0.5, 0.25):
            cudnn_sdpa.sdpa(q, q, q, scale=scale)
    cudnn_sdpa.sdpa(q, q, q, is_causal=True)
    assert len(manifest) == 1


def test_empty_calls_record_no_plan():
    q = torch.randn(1, 2, 0, 16, dtype=torch.bfloat16)
    offsets = torch.zeros(2, dtype=torch.int32)
    with cudnn_sdpa.record_plans(target="h200") as manifest:
        cudnn_sdpa.sdpa(q, q, q)
        cudnn_sdpa.sdpa_varlen(
            q[0].mT[..., :0, :].reshape(0, 2, 16), *[q.new_empty(0, 2, 16)] * 2, offsets, offsets, 1, 1
        )
        cudnn_sdpa.rms_norm(q)
    assert len(manifest) == 0


def test_modules_can_be_recorded():
    layer = cudnn_sdpa.nn.TransformerLayer(64, 4, 128, dtype=torch.bfloat16)
    with cudnn_sdpa.record_plans(target="h200") as manifest:
        layer(torch.randn(2, 16, 64, dtype=torch.bfloat16)).sum().backward()
    operations = {plan["operation"].partition(":")[2] for plan in manifest.plans}
    assert {"sdpa_forward", "sdpa_backward"} < operations
    assert any("norm" in operation for operation in operations)


def test_a_call_without_a_plan_raises():
    q = torch.randn(1, 2, 8, 16)
    with cudnn_sdpa.record_plans(target="h200"), pytest.raises(UnsupportedError, match="float32"):
        cudnn_sdpa.sdpa(q, q, q)
    with cudnn_sdpa.record_plans(target="h200"), pytest.raises(UnsupportedError, match="float64"):
        cudnn_sdpa.rms_norm(q.double())
    with cudnn_sdpa.fallback("torch"), cudnn_sdpa.record_plans(target="h200") as manifest:
        cudnn_sdpa.sdpa(q, q, q)
    assert len(manifest) == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_an_empty_recording_warns(caplog):
    q = torch.randn(1, 2, 8, 16)
    with caplog.at_level(logging.WARNING, "cudnn_sdpa"), cudnn_sdpa.record_plans() as manifest:
        cudnn_sdpa.sdpa(q, q, q)
    assert len(manifest) == 0
    (record,) = caplog.records
    assert 'record_plans(target="h200")' in record.message


def test_compiling_an_empty_manifest_warns(caplog, tmp_path):
    with caplog.at_level(logging.WARNING, "cudnn_sdpa"):
        report = cudnn_sdpa.compile_plans(PlanManifest(), "h200", tmp_path / "plans")
    assert (report.built, report.failed) == (0, {})
    assert [record.message for record in caplog.records] == ["the manifest has no plans; nothing to do"]


def test_gradients_of_a_large_packed_call_are_recorded_in_parts():
    tokens = 2**20
    with torch.device("meta"):
        q, k, v = (torch.empty(tokens, 32, 128, dtype=torch.float16, requires_grad=True) for _ in range(3))
        offsets = torch.empty(65, dtype=torch.int32)
    with cudnn_sdpa.record_plans(target="h100") as manifest:
        cudnn_sdpa.sdpa_varlen(q, k, v, offsets, offsets, tokens // 64, tokens // 64).sum().backward()
    backward = [plan for plan in manifest.plans if plan["operation"].endswith(":sdpa_backward")]
    heads = sorted(x["layout"]["shape"][1] for plan in backward for x in plan["inputs"] if x["name"] == "q")
    assert heads == [10, 11]  # 11 + 11 + 10 heads; equal parts have one plan


@pytest.mark.parametrize("target", ["h200", None])
def test_what_was_recorded_before_an_error_is_kept(target):
    q, manifests = torch.empty(1, 2, 8, 64, dtype=torch.bfloat16), []

    def serve():
        with cudnn_sdpa.record_plans(target) as manifest:
            manifests.append(manifest)
            if target:
                cudnn_sdpa.sdpa(q, q, q)
            else:
                use(cudnn_sdpa.plan_cache, 1)
            raise KeyboardInterrupt

    cudnn_sdpa.plan_cache.clear()
    with pytest.raises(KeyboardInterrupt):
        serve()
    cudnn_sdpa.plan_cache.clear()
    assert len(manifests[0]) == 1

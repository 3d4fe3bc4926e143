"""Random valid calls of every operation: cuDNN has plans for them on an H200, or there are reasons why not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import generators
import pytest
import torch

from cudnn_sdpa import CudnnSdpaError, UnsupportedError, record_plans
from cudnn_sdpa.engine.explain import Description, describer_of
from cudnn_sdpa.graph import known_issues
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.graph.target import Target
from cudnn_sdpa.offline.planner import engine_offline, plan_offline
from cudnn_sdpa.plans.kernel_plan import KernelOp

pytestmark = pytest.mark.usefixtures("can_plan")

#: Operations that are sequences of calls, what is plain PyTorch, and kernels of the library's own.
WITHOUT_PLANS = {"PagedKVCache", "merge_states", "nn.KVCache", "nn.FeedForward", "nn.RotaryEmbedding"}
WITHOUT_PLANS |= {
    "kernels.attention",
    "append_paged_kv",
    "rope_append_paged_kv",
    "page_table_of_csr",
    "sdpa_paged_varlen",
}
NAMES = [name for name in generators.OPERATIONS if name not in WITHOUT_PLANS]
#: Operations that `explain` does not support: their calls are recorded.
RECORDED = {"graph_op", *(name for name in NAMES if name.startswith("nn."))}


def descriptions(name: str, seed: int) -> Iterator[tuple[Description, str]]:
    """Descriptions of a call's plans, forward and backward."""
    case = generators.draw(name, seed, "cuda")
    explained = generators.OPERATIONS[name].explained(case)
    if explained is None or case.refusable or case.mode == "autocast":  # its tensors do not have the dtype that runs
        return
    if name in ("silu_mul", "gelu_mul", "relu_squared") and any(0 in spec.shape for spec in case.tensors.values()):
        return  # needs no plan for any layout
    function, args, kwargs = explained
    describer = describer_of(function)
    assert describer is not None
    found = describer(*args, **kwargs)
    yield found, "forward"
    if found.backward is not None:
        yield found.backward, "backward"


def recorded(name: str, seed: int, target: Target) -> list[PlanKey]:
    """Keys of the plans that a call without data and its gradients would use."""
    case, op = generators.draw(name, seed, "cuda"), generators.OPERATIONS[name]
    reads_data = "split" in case.facts or case.facts.get("training") or case.mode == "autocast"
    if reads_data or case.refusable:
        return []
    tensors = {n: spec.make("meta").detach().requires_grad_(n in case.wanted) for n, spec in case.tensors.items()}
    op.before(case, tensors, case.options)
    with record_plans("h200") as manifest:
        found = [x for x in op.call(tensors, case.options, case.facts).values() if x.requires_grad]
        if found:
            wanted = [tensors[n] for n in case.wanted]
            torch.autograd.grad(found, wanted, [torch.empty_like(x) for x in found], allow_unused=True)
    return manifest.keys(target, None)


def keys(name: str, seed: int, target: Target) -> Iterator[tuple[PlanKey, str]]:
    """Keys of a call's plans, forward and backward."""
    if name in RECORDED:
        yield from ((key, "forward") for key in recorded(name, seed, target))
        return
    for description, way in descriptions(name, seed):
        is_own = isinstance(description.operation, KernelOp)  # of pages that cuDNN cannot read
        if not description.is_empty and not is_own:
            yield description.key(target, None), way


def check(name: str, seeds: range, properties: dict[str, Any], ask: Any) -> Counter[str]:
    """Requests the plans of calls from cuDNN; counts supported and declined ones."""
    target, counts = Target.from_properties(properties), Counter()
    for seed in seeds:
        line = f"python tests/generators.py {name} {seed} --device cuda"
        try:
            for key, way in keys(name, seed, target):
                check_key(name, key, line)
                known_issues.check(key)  # as before a build: some graphs crash the process
                if key.provider is None:  # norms and gates may be served by own kernels
                    ask(key, properties)
                counts[f"planned {way}"] += 1
        except UnsupportedError as error:
            by_cudnn = error.what.startswith(("sdpa_forward", "sdpa_backward"))
            counts["declined by cuDNN" if by_cudnn else "declined"] += 1
            counts["without a reason"] += not all(reason.strip() for reason in error.reasons or [""])
        except CudnnSdpaError as error:
            raise AssertionError(line) from error
    assert not counts["without a reason"]
    return counts


def check_key(name: str, key: PlanKey, line: str) -> None:
    """Convolutions are channels last in all strides, also in those of dimensions of size 1."""
    for operand in (*key.inputs, *key.outputs):
        if name.startswith("conv") and operand.name != "bias":
            order, span, expected = [0, *range(2, len(operand.layout.shape)), 1], 1, {}
            for d in reversed(order):
                expected[d], span = span, span * operand.layout.shape[d]
            assert tuple(operand.layout.stride) == tuple(expected[d] for d in sorted(expected)), f"{line}: {key}"


@pytest.mark.parametrize("name", NAMES)
def test_a_few_calls_have_engines_or_reasons(name, h200):
    counts = check(name, range(15), h200, engine_offline)
    assert counts["planned forward"] >= (3 if "fp8" in name.lower() else 6), counts
    assert counts["declined by cuDNN"] <= 1, counts


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_many_calls_have_engines_or_reasons(name, h200):
    counts = check(name, range(15, 300), h200, engine_offline)
    assert counts["planned forward"] >= (60 if "fp8" in name.lower() else 100 if name.startswith("nn.") else 130), (
        counts
    )
    assert counts["declined by cuDNN"] <= max(6, counts["planned forward"] // 50), counts  # a layer has several plans


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_some_calls_have_plans_that_compile(name, h200):
    counts = check(name, range(300, 312), h200, plan_offline)
    assert counts["planned forward"] >= (2 if "fp8" in name.lower() else 1 if name.startswith("nn.") else 4), counts


def test_operations_without_explain_are_listed():
    for name in NAMES:
        case = generators.draw(name, 0, "cuda")
        is_explained = generators.OPERATIONS[name].explained(replace(case, refusable="")) is not None
        assert is_explained is (name not in RECORDED)

"""Under determinism, single queries get kernels that sum in the same order in every run, on every GPU."""

from __future__ import annotations

import pytest
import torch

from cudnn_sdpa.attention.arguments import from_fields
from cudnn_sdpa.attention.dense.explain import describe_sdpa
from cudnn_sdpa.attention.paged.arguments import PagedArguments
from cudnn_sdpa.attention.paged.specs import DecodeSpec
from cudnn_sdpa.attention.varlen import specs
from cudnn_sdpa.attention.varlen.arguments import VarlenArguments
from cudnn_sdpa.graph.backend import is_repeatable
from cudnn_sdpa.graph.target import Target, load_properties
from cudnn_sdpa.offline import driver
from cudnn_sdpa.offline.planner import plan_offline

GPUS = ["a100", "l40s", "h200", "b200", "rtx5090"]
LENGTHS = torch.empty(4, dtype=torch.int32, device="meta")

CASES = {
    "dense": (128, {}),
    "head dim 64, causal": (64, {"is_causal": True, "causal_alignment": "bottom_right"}),
    "head dim 256": (256, {}),
    "lengths and log-sum-exp": (128, {"seq_lens_kv": LENGTHS, "return_lse": True}),
    "sinks": (128, {"sinks": torch.empty(32, device="meta")}),
}


def single(dim, length=4096):
    return (torch.empty(4, heads, n, dim, dtype=torch.bfloat16, device="meta") for heads, n in ((32, 1), (8, length)))


@pytest.fixture
def deterministic_algorithms():
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.sample(1)
@pytest.mark.usefixtures("can_plan")
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("name", CASES)
def test_dense(gpu, name):
    dim, options = CASES[name]
    q, kv = single(dim)
    properties = load_properties(gpu)
    target = Target.from_properties(properties)
    exactly = plan_offline(describe_sdpa(q, kv, kv, **options, deterministic=True).key(target, None), properties)
    assert is_repeatable(exactly.engine, exactly.knobs, single_query=True)
    usual = plan_offline(describe_sdpa(q, kv, kv, **options).key(target, None), properties)
    assert not is_repeatable(usual.engine, usual.knobs, single_query=True)  # otherwise the test proves nothing


@pytest.mark.parametrize("gpu", ["a100", "h200"])
def test_pages(gpu, can_plan):  # noqa: ARG001
    pages, table = (torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in PAGED)
    q, _ = single(128)
    properties = load_properties(gpu)
    tensors = (q, pages, pages, table, None, LENGTHS, *(None,) * 4)  # no lengths of queries, sinks, scales
    call = from_fields(PagedArguments, *tensors, "HND", deterministic=True)
    decode = DecodeSpec.of(call, in_place=True)
    made = plan_offline(decode.key(Target.from_properties(properties), None), properties)
    assert is_repeatable(made.engine, made.knobs, single_query=True)


PAGED = (((500, 8, 64, 128), torch.bfloat16), ((4, 64), torch.int32))


@pytest.mark.sample(1)
@pytest.mark.usefixtures("can_plan")
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize(("queries", "keys"), [(128, 8192), (300, 4096), (4096, 4096)])
def test_several_queries(gpu, queries, keys):
    """On Blackwell, kernels may split the keys of these, too."""
    properties = load_properties(gpu)
    target = Target.from_properties(properties)
    q, kv = (
        torch.empty(1, heads, n, 128, dtype=torch.bfloat16, device="meta") for heads, n in ((32, queries), (8, keys))
    )
    lengths = torch.empty(2, dtype=torch.int32, device="meta")
    rows = (q[0].transpose(0, 1), *(kv[0].transpose(0, 1),) * 2)
    sizes = {"max_seqlen_q": queries, "max_seqlen_kv": keys}
    of_rows = from_fields(VarlenArguments, *rows, None, lengths, lengths, None, **sizes, deterministic=True)
    packed = specs.forward_key(of_rows, target, None)
    for key in (describe_sdpa(q, kv, kv, deterministic=True).key(target, None), packed):
        made = plan_offline(key, properties)
        assert is_repeatable(made.engine, made.knobs, single_query=False)


def test_several_queries_have_one_plan(plan):
    q, kv = (torch.empty(2, 8, n, 64, dtype=torch.bfloat16, device="meta") for n in (2, 128))
    usual, _ = plan(q, kv, kv)
    exactly, _ = plan(q, kv, kv, deterministic=True)
    assert exactly == usual


REFUSED = """
import torch
from cudnn_sdpa import UnsupportedError
from cudnn_sdpa.attention.dense.explain import describe_sdpa
from cudnn_sdpa.graph import backend, heuristics
from cudnn_sdpa.graph.target import Target, load_properties

backend.is_repeatable = lambda engine, knobs, single_query: False
properties = load_properties("h200")
q, kv = (torch.empty(4, heads, n, 64, dtype=torch.bfloat16, device="meta") for heads, n in ((8, 1), (2, 100)))
for deterministic in (False, True):
    description = describe_sdpa(q, kv, kv, deterministic=deterministic)
    key = description.key(Target.from_properties(properties), None)
    try:
        print(description.operation.compile(key, heuristics.HeuristicsBuilder(properties=properties)).engine)
    except UnsupportedError as error:
        print(error)
"""


@pytest.mark.slow
def test_a_graph_without_such_a_kernel_is_refused(run_python, can_plan):  # noqa: ARG001
    environment = {name: driver.helper_environment().get(name) for name in ("LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES")}
    usual, *refused = run_python(REFUSED, **environment).stdout.splitlines()
    assert usual.startswith("eng")
    assert "differ from run to run" in " ".join(refused)

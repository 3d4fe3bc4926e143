"""The kernel for pages in its forms, thread by thread on the CPU: how it divides work, and in which order it runs."""

from __future__ import annotations

import fake_gpu
import pytest
import torch
from emulated_paged import EmulatedPagedKernel
from fake_gpu import gpu_on_the_cpu
from paged_batches import batch_on_pages

from cudnn_sdpa import sdpa_paged_varlen
from cudnn_sdpa.graph.target import Target
from tests.unit.attention.paged_varlen.test_paged_varlen import E4M3, exact, tree_of

BF16, HALF = torch.bfloat16, torch.float16

#: Largest relative error of a token.
WORST = {BF16: 8e-3, HALF: 2e-3}

#: Some sequences have no new tokens, or no keys, or fewer keys than new tokens; one is divided among blocks.
BATCHES = {
    "few": ([1, 2, 1, 0, 3, 1], [130, 70, 1, 50, 2, 0]),
    "many": ([9, 1], [130, 65]),
    "long": ([1, 1], [900, 20]),
}


pytestmark = pytest.mark.sample(1)  # each compiles a kernel


@pytest.fixture(params=[(900, 3), (800, 3)], ids=["Hopper", "Ampere"], autouse=True)
def gpu(request, monkeypatch):
    """Kernels run on a GPU of few multiprocessors; those of Hopper have its instructions."""
    monkeypatch.setattr(fake_gpu, "PagedKernel", EmulatedPagedKernel)
    names = "deviceVer", "multiProcessorCount"
    target = Target(tuple(zip(names, request.param, strict=True)), 91900, "1.32.0", "a GPU")
    with gpu_on_the_cpu(target=target):
        yield


def drawn(name, **given):
    settings = {"page": 16, "dtype": BF16, "before": 1, "behind": 2}
    return batch_on_pages(*BATCHES[name], **settings | given)


def latent(name, **given):
    """Values that are the first numbers of their keys."""
    made = drawn(name, **{"heads": 16, "heads_kv": 1, "dims": (576, 512)} | given)
    return {**made, "v_pages": made["k_pages"][..., :512]}


def assert_right(given):
    """The same bits again, which needs clean flags of parts, and where threads run in the other order."""
    out, lse = sdpa_paged_varlen(**given, return_lse=True)
    wanted, of_lse = exact(given)
    off, size = (out.double() - wanted).norm(dim=-1), wanted.norm(dim=-1)
    assert out.isfinite().all()
    assert (off <= WORST[out.dtype] * size + 1e-5).all(), float((off / (size + 1e-5)).max())
    torch.testing.assert_close(lse.double(), of_lse, rtol=1e-4, atol=1e-4)
    EmulatedPagedKernel.order = 1
    try:
        found = sdpa_paged_varlen(**given, out=torch.full_like(out, torch.nan))
    finally:
        EmulatedPagedKernel.order = 0
    assert torch.equal(found, out)


def copied(given):
    """The bytes that kernels copied and read."""
    before = EmulatedPagedKernel.traffic[0]
    sdpa_paged_varlen(**given)
    return EmulatedPagedKernel.traffic[0] - before


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("heads", [16, 20])
def test_latent_attention(name, heads):
    given = latent(name, heads=heads, dtype=(BF16, HALF)[heads == 20], page=(16, 5)[heads == 20])
    assert_right({**given, "sinks": torch.randn(heads) + 1} if heads == 20 else given)


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("what", ["apart", "table of values", "two key heads", "128 heads"])
def test_latent_attention_on_all_pages(name, what):
    """Values elsewhere than in their keys are as right."""
    if what == "two key heads":
        assert_right(latent(name, heads=6, heads_kv=2, layout="HND"))
    elif what == "128 heads":
        assert_right(latent(name, heads=128))
    else:
        table = what != "apart"
        assert_right(drawn(name, heads=16, heads_kv=1, dims=(576, 512), has_table_v=table))


def test_values_in_their_keys_are_read_once():
    """Also if strides differ that say nothing: of one key head."""
    given = latent("long")
    pages = given["k_pages"]
    once = copied(given)
    keys, both = (sum(BATCHES["long"][1]) * numbers * 2 for numbers in (576, 576 + 512))
    assert once == keys
    one_head = pages.as_strided(pages.shape, (*pages.stride()[:2], 8, 1))
    assert one_head.stride() != pages.stride()
    assert copied({**given, "k_pages": one_head}) == once
    twice = {**given, "v_pages": pages[..., 64:]}
    assert copied(twice) == both, "nothing behind the values"
    assert_right(twice)
    assert copied({**given, "v_pages": pages[..., :512].contiguous()}) == both


def test_pages_that_look_alike():
    """Where values lie is data of each launch: a plan, and a known call, serves both."""
    given = latent("few")
    other = torch.randn_like(given["k_pages"])
    for _ in range(3):
        assert_right(given)
        assert_right({**given, "v_pages": other[..., :512]})


@pytest.mark.parametrize(
    "options",
    [
        {"scale": -0.1, "softcap": 2.5},
        {"window_size": (30, 0)},
        {"is_causal": False},
        {"batch_invariant": True},
    ],
    ids=["soft cap", "window", "full", "batch-invariant"],
)
def test_options_of_latent_attention(options):
    masks = {name: x for name, x in options.items() if name in ("window_size", "is_causal")}
    assert_right({**latent("few", **masks), **options})


def test_trees_of_latent_attention():
    new, _ = BATCHES["few"]
    assert_right({**latent("few", before=0, behind=0), "tree_mask": tree_of(new, 5)})


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_other_head_dims(name, dims):
    assert_right({**drawn(name, heads=8, dims=dims), "sinks": torch.randn(8) + 1})


@pytest.mark.parametrize("gpu", [(900, 40)], ids=["Hopper"], indirect=True)
@pytest.mark.parametrize(("dim_v", "heads"), [(128, 1), (192, 1), (192, 5), (256, 1)])
def test_more_parts_than_lanes(gpu, dim_v, heads):  # noqa: ARG001
    """A warp has the weights of 32 parts at a time, and adds several of them in a step."""
    assert_right(batch_on_pages([1], [9000], page=16, heads=heads, heads_kv=1, dims=(16, dim_v), dtype=BF16))


@pytest.mark.parametrize("gpu", [(900, 3)], ids=["Hopper"], indirect=True)
@pytest.mark.parametrize("name", BATCHES)
def test_pages_in_fp8(name, gpu):  # noqa: ARG001
    given = drawn(name, heads=8, dims=(128, 128), cache=E4M3)
    assert_right({**given, "k_scale": torch.tensor(0.7), "v_scale": torch.tensor([1.9, -0.6])})

"""The kernel for pages in all its forms: head dims, groups, page sizes, FP8, split keys, and other GPUs than Hopper."""

from __future__ import annotations

import pytest
import torch
from paged_varlen_checks import BF16, DECODES, E4M3, E5M2, HALF, MIXED, assert_right, drawn

from cudnn_sdpa import plan_cache, sdpa_paged_varlen
from cudnn_sdpa.attention.paged_varlen import plans

DIMS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (8, 16))
GROUPS = (1, 3, 4, 8, 16, 64)
PAGES = (1, 5, 16, 24, 64, 128)

needs_fp8 = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="this GPU has no FP8"
)


def random_sinks(given):
    return torch.randn(given["q"].shape[1], device="cuda") + 1.5


def scales(kind):
    """The factors of FP8 pages with two heads."""
    if kind == 0:
        return {}
    one, other = torch.tensor(0.7, device="cuda"), torch.tensor([1.9, -0.6], device="cuda")
    return {"k_scale": one, "v_scale": other} if kind == 1 else {"k_scale": other, "v_scale": one.view(1)}


@pytest.mark.parametrize("batch", [DECODES, MIXED], ids=["decodes", "mixed"])
@pytest.mark.parametrize("number", range(len(GROUPS)))
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_head_dims_groups_and_pages(dims, number, batch):
    """Every head dim with every group and with every page size."""
    place = DIMS.index(dims)
    page, dtype = PAGES[(number + place) % len(PAGES)], (BF16, HALF)[(number + place // 6) % 2]
    given = drawn(batch, heads=2 * GROUPS[number], dims=dims, page=page, dtype=dtype, layout=("NHD", "HND")[place % 2])
    if number % 2:
        given["sinks"] = random_sinks(given)
    assert_right(given)


@needs_fp8
@pytest.mark.parametrize("batch", [DECODES, MIXED], ids=["decodes", "mixed"])
@pytest.mark.parametrize("cache", [E4M3, E5M2])
@pytest.mark.parametrize("dims", DIMS[:-1], ids=str)
def test_pages_in_fp8(dims, cache, batch):
    place = DIMS.index(dims)
    settings = {
        "heads": 2 * GROUPS[place % 5],
        "page": PAGES[place],
        "dtype": (BF16, HALF)[(place + (cache == E5M2)) % 2],
    }
    assert_right({**drawn(batch, dims=dims, cache=cache, **settings), **scales(place % 3)})


MASKS = {
    "full": {"is_causal": False},
    "top-left": {"causal_alignment": "top_left"},
    "window": {"window_size": (100, 0)},
    "window of one": {"window_size": (0, 0)},
    "window to both sides": {"is_causal": False, "window_size": (70, 3)},
    "window to both sides, top-left": {"is_causal": False, "window_size": (5, 40), "causal_alignment": "top_left"},
    "window, top-left": {"causal_alignment": "top_left", "window_size": (5, 0)},
    "window to the right": {"is_causal": False, "window_size": (-1, 2)},
    "window to the left": {"is_causal": False, "window_size": (3, -1)},
}


@pytest.mark.parametrize("batch", [DECODES, MIXED], ids=["decodes", "mixed"])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_masks_with_groups_that_divide_no_tile(batch, has_sinks):
    for mask in MASKS.values():
        given = drawn(batch, heads=6, dims=(64, 64), page=5, **mask)
        assert_right({**given, "sinks": random_sinks(given)} if has_sinks else given)


@pytest.mark.parametrize("batch", [DECODES, MIXED], ids=["decodes", "mixed"])
@pytest.mark.parametrize("softcap", [None, 2.5])
def test_scales_and_soft_caps(batch, softcap):
    for scale in (0.2, -0.11, 0.0):
        given = drawn(batch, page=24)
        assert_right({**given, "scale": scale, "softcap": softcap, "sinks": random_sinks(given)})


@pytest.mark.parametrize("batch", [DECODES, MIXED], ids=["decodes", "mixed"])
@pytest.mark.parametrize("hidden", [0.2, 0.9])
def test_trees(batch, hidden):
    given = drawn(batch, before=0, behind=0)
    tree = torch.rand(given["q"].shape[0], given["max_seqlen_q"] + 9, device="cuda") > hidden
    assert_right({**given, "tree_mask": tree[:, :-1]})


def test_sinks_of_minus_infinity_are_none():
    """Also for a token that sees no key."""
    given = drawn(([2, 3], [1, 40]))
    of_none = torch.full((8,), -torch.inf, device="cuda")
    found = sdpa_paged_varlen(**given, sinks=of_none, return_lse=True)
    for one, other in zip(found, assert_right(given), strict=True):
        assert torch.equal(one, other)
    assert not found[0][1].any()
    assert found[1][1].isneginf().all()


def test_two_tables_at_one_address():
    given = drawn(([1, 3, 2], [150, 90, 33]), before=0, behind=0)
    given |= {name: torch.randn_like(given[name]) for name in ("k_pages", "v_pages")}
    pages, width = given["k_pages"].shape[0], given["page_table"].shape[1]
    tables = torch.randint(pages, (6, width), device="cuda", dtype=torch.int32)
    assert_right({**given, "page_table": tables[::2], "page_table_v": tables[:3]})


# Keys that several blocks divide among themselves.


@pytest.mark.parametrize("new", [1, 4, 16, 100])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"dims": (64, 64), "heads": 16},
        {"dims": (256, 256)},
        {"dims": (192, 144)},
        {"dims": (160, 192)},
        {"dims": (24, 72), "heads": 4},
        pytest.param({"cache": E4M3}, marks=needs_fp8),
    ],
    ids=["D=128", "D=64", "D=256", "Dv=144", "Dv=192", "Dv=72", "FP8"],
)
def test_a_long_sequence(new, settings):
    given = drawn(([new], [20011]), **settings)
    assert_right({**given, "sinks": random_sinks(given)})


@pytest.mark.parametrize("new", [1, 16, 100])
def test_windows_and_trees_of_a_long_sequence(new):
    for mask in (
        {"window_size": (9000, 0)},
        {"is_causal": False, "window_size": (5000, 3)},
        {"causal_alignment": "top_left", "is_causal": False, "window_size": (-1, 7000)},
    ):
        assert_right(drawn(([new, 1], [20011, 8000]), **mask))
    given = drawn(([new], [15000]))
    assert_right({**given, "tree_mask": torch.rand(given["q"].shape[0], new, device="cuda") < 0.5})


@pytest.mark.parametrize("chunk", [0, 200])
def test_300_sequences(chunk):
    """Some are long, most are short, some are idle; the list of work spans three groups of sequences."""
    new, lengths = torch.randint(4, (300,)).tolist(), torch.randint(260, (300,)).tolist()
    for number in (3, 140, 299):
        lengths[number] = 3000 + number
        new[number] = 2
    new[77], lengths[77] = max(chunk, 1), 700
    assert_right(drawn((new, lengths), dims=(64, 64)))


# Multi-head latent attention.

needs_shared = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_properties(0).shared_memory_per_block_optin < 163 << 10,
    reason="this GPU has too little shared memory",
)


def latent(batch, **settings):
    """A call on values that are the first numbers of their keys."""
    given = drawn(batch, **{"heads": 16, "heads_kv": 1, "dims": (576, 512)} | settings)
    return {**given, "v_pages": given["k_pages"][..., :512]}


@needs_shared
@pytest.mark.parametrize("batch", [DECODES, MIXED, ([1, 3], [20011, 8000])], ids=["decodes", "mixed", "long"])
@pytest.mark.parametrize("heads", [1, 16, 20, 64, 128])
def test_latent_attention(batch, heads):
    number = [1, 16, 20, 64, 128].index(heads)
    settings = {"page": PAGES[number], "dtype": (BF16, HALF)[number % 2], "layout": ("NHD", "HND")[number % 2]}
    given = latent(batch, heads=heads, **settings)
    assert_right({**given, "sinks": random_sinks(given)} if number % 2 else given)


@needs_shared
@pytest.mark.parametrize("batch", [DECODES, MIXED, ([1, 3], [20011, 8000])], ids=["decodes", "mixed", "long"])
def test_latent_attention_with_values_elsewhere(batch):
    """Apart, by a table of their own, in the last numbers of keys, of two key heads."""
    for has_table in (False, True):
        assert_right(drawn(batch, heads=16, heads_kv=1, dims=(576, 512), has_table_v=has_table))
    given = latent(batch)
    assert_right({**given, "v_pages": given["k_pages"][..., 64:]})
    assert_right(latent(batch, heads=32, heads_kv=2))


@needs_shared
@pytest.mark.parametrize("batch", [DECODES, MIXED], ids=["decodes", "mixed"])
def test_options_of_latent_attention(batch):
    for mask in MASKS.values():
        assert_right(latent(batch, page=5, **mask))
    given = latent(batch, before=0, behind=0)
    assert_right({**given, "scale": -0.06, "softcap": 2.5})
    assert_right({**given, "batch_invariant": True})
    tree = torch.rand(given["q"].shape[0], given["max_seqlen_q"], device="cuda") < 0.6
    assert_right({**given, "tree_mask": tree})


@needs_shared
def test_known_calls_of_latent_attention_on_other_values():
    """Where values lie is no part of a known call: the kernel sees it in each launch."""
    given = latent(([1, 2, 4], [700, 64, 3000]))
    other = torch.randn_like(given["k_pages"])[..., :512]
    assert other.stride() == given["v_pages"].stride()
    for _ in range(3):
        assert_right(given)
        assert_right({**given, "v_pages": other})


# GPUs before Hopper, and after it.


@pytest.fixture(params=[80, 89])
def capability(request, monkeypatch):
    """Kernels are planned as for a GPU of this compute capability, on any GPU."""
    made, original = [], plans._kernel

    def kernel(*given, **defines):
        made.append(defines["WGMMA"])
        return original(*given, **defines)

    major, minor = torch.cuda.get_device_capability()
    monkeypatch.setattr(plans, "HOPPER", 0)
    monkeypatch.setattr(plans, "_SHARED", {10 * major + minor: plans._SHARED[80]} if request.param == 80 else {})
    monkeypatch.setattr(plans, "_kernel", kernel)
    plan_cache.clear()
    yield request.param
    plan_cache.clear()
    assert made
    assert not any(made)


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_the_portable_form(capability, dims):
    place = DIMS.index(dims)
    settings = {"heads": 2 * GROUPS[place % 6], "page": PAGES[(place + 3) % 6], "dtype": (BF16, HALF)[place % 2]}
    for batch in (DECODES, MIXED, ([1, 16], [9001, 3000])):
        given = drawn(batch, dims=dims, **settings)
        assert_right({**given, "sinks": random_sinks(given)} if capability == 80 else given)


@needs_fp8
@pytest.mark.parametrize("capability", [89], indirect=True)
@pytest.mark.parametrize("cache", [E4M3, E5M2])
@pytest.mark.parametrize("dims", DIMS[:-1], ids=str)
def test_the_portable_form_on_pages_in_fp8(capability, dims, cache):  # noqa: ARG001
    place = DIMS.index(dims)
    settings = {"heads": 2 * GROUPS[place % 5], "page": PAGES[place], "dtype": (HALF, BF16)[place % 2]}
    for batch in (DECODES, MIXED, ([1, 16], [9001, 3000])):
        assert_right({**drawn(batch, dims=dims, cache=cache, **settings), **scales(place % 3)})


@needs_shared
@pytest.mark.parametrize("capability", [80], indirect=True)
@pytest.mark.parametrize("heads", [16, 128])
def test_the_portable_form_of_latent_attention(capability, heads):  # noqa: ARG001
    for batch in (DECODES, MIXED, ([1, 16], [9001, 3000])):
        given = latent(batch, heads=heads)
        assert_right({**given, "sinks": random_sinks(given)})
        assert_right({**given, "v_pages": torch.randn_like(given["k_pages"])[..., :512]})


def test_masks_trees_and_soft_caps_of_the_portable_form(capability):  # noqa: ARG001
    for batch in (DECODES, MIXED):
        for mask in MASKS.values():
            assert_right(drawn(batch, heads=6, dims=(64, 64), page=5, **mask))
        given = drawn(batch, heads=6, dims=(64, 64), page=5)
        assert_right({**given, "softcap": 2.5, "scale": -0.2})
        tree = torch.rand(given["q"].shape[0], given["max_seqlen_q"], device="cuda") < 0.6
        assert_right({**given, "tree_mask": tree})

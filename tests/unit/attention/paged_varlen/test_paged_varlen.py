"""`sdpa_paged_varlen` on the CPU, against float64 attention of the same keys, and the errors of its arguments."""

from __future__ import annotations

import pytest
import torch
from float64_reference import attend_packed_on_pages
from paged_batches import PLACES, batch_on_pages

import cudnn_sdpa
from cudnn_sdpa import (
    ArgumentError,
    LayoutError,
    OptionError,
    ShapeError,
    UnsupportedError,
    sdpa_paged,
    sdpa_paged_varlen,
)
from cudnn_sdpa.attention.paged_varlen.sdpa_paged_varlen import PAGED_VARLEN
from cudnn_sdpa.engine import value_checks

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
EXACT = {"rtol": 1e-9, "atol": 1e-9}
LSE = {"rtol": 1e-6, "atol": 1e-6}

#: Decodes, drafts, chunks, a sequence without new tokens, and one with fewer keys than new tokens.
NEW, LENGTHS = (1, 4, 0, 9, 3, 1, 2), (23, 4, 7, 31, 2, 1, 40)


def exact(given):
    """The results in float64, of the arguments of a call."""
    others = ("max_seqlen_q", "out", "batch_invariant")
    return attend_packed_on_pages(**{name: x for name, x in given.items() if name not in others})


def assert_right(given, tolerances=EXACT):
    out, lse = sdpa_paged_varlen(**given, return_lse=True)
    expected, of_lse = exact(given)
    torch.testing.assert_close(out.double(), expected, **tolerances)
    torch.testing.assert_close(lse.double(), of_lse, rtol=LSE["rtol"], atol=max(LSE["atol"], tolerances["atol"]))
    return out, lse


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("page", [1, 5, 16, 24, 64])
@pytest.mark.parametrize("place", PLACES)
def test_pages_of_any_size_and_place(layout, page, place):
    dims = (16, 24) if place in ("apart", "side by side") else (16, 16)
    assert_right(batch_on_pages(NEW, LENGTHS, layout=layout, page=page, place=place, dims=dims))


MASKS = {
    "full": {"is_causal": False},
    "top-left": {"causal_alignment": "top_left"},
    "window": {"window_size": (6, 0)},
    "window of one": {"window_size": (0, 0)},
    "window to both sides": {"is_causal": False, "window_size": (3, 2)},
    "window, top-left": {"causal_alignment": "top_left", "window_size": (2, 0)},
    "window, ahead alone": {"is_causal": False, "window_size": (-1, 1)},
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    """Slots and page ids that no new token's window reaches are garbage, and so are those of idle sequences."""
    assert_right(batch_on_pages(NEW, LENGTHS, **MASKS[name]))


@pytest.mark.parametrize("scale", [None, 0.37, -0.8, 0.0])
@pytest.mark.parametrize("softcap", [None, 1.7])
def test_scores(scale, softcap):
    assert_right({**batch_on_pages(NEW, LENGTHS), "scale": scale, "softcap": softcap})


def test_sinks_and_tokens_of_no_sequence():
    given = batch_on_pages(NEW, LENGTHS, before=3, behind=5)
    given |= {"sinks": torch.randn(4), "out": torch.full((28, 4, 24), torch.nan, dtype=torch.float64)}
    out, lse = assert_right(given)
    assert out is given["out"]
    assert lse[4 + 3 :].isfinite()[:-5].all(), "a token that sees no key has the sink"
    for rows in (slice(0, 3), slice(-5, None)):
        assert not out[rows].any()
        assert lse[rows].isneginf().all()


def test_a_table_of_values_and_an_expanded_one():
    given = batch_on_pages(NEW, LENGTHS, has_table_v=True)
    assert_right(given)
    one = batch_on_pages([2], [13])
    many = batch_on_pages([2, 2, 2], [13, 13, 13])
    many |= {name: one[name] for name in ("k_pages", "v_pages")}
    many["page_table"] = one["page_table"].expand(3, -1)
    assert_right(many)


@pytest.mark.parametrize("cache", [E4M3, E5M2])
@pytest.mark.parametrize("scales", ["none", "one", "heads"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_pages_in_fp8(cache, scales, dtype):
    given = batch_on_pages(NEW, LENGTHS, cache=cache, dtype=dtype, dims=(16, 16), page=7)
    if scales != "none":
        given["k_scale"] = torch.tensor(0.7) if scales == "one" else torch.tensor([0.6, 1.7])
        given["v_scale"] = torch.tensor([1.9]) if scales == "one" else torch.tensor([-1.4, 2.3])
    unit = 1e-9 if dtype == torch.float64 else torch.finfo(dtype).eps
    assert_right(given, {"rtol": unit, "atol": 0.2 * unit if dtype != torch.float64 else 1e-9})


def tree_of(new, columns):
    """A random tree for each sequence: a token sees itself and one earlier token's path."""
    rows = torch.zeros(sum(new), columns, dtype=torch.bool)
    start = 0
    for count in new:
        for i in range(count):
            if i:
                parent = int(torch.randint(i, ()))
                rows[start + i, :i] = rows[start + parent, :i]
            rows[start + i, i] = True
        rows[start : start + count, count:] = torch.rand(count, columns - count) < 0.5  # read by nobody
        start += count
    return rows


@pytest.mark.parametrize("columns", [9, 12])
def test_trees_of_drafts(columns):
    given = batch_on_pages(NEW, LENGTHS)
    given["tree_mask"] = tree_of(NEW, columns)
    found, _ = assert_right(given)
    given["tree_mask"] = torch.tril(torch.ones(9, columns, dtype=torch.bool))[torch.cat([torch.arange(n) for n in NEW])]
    torch.testing.assert_close(sdpa_paged_varlen(**given), sdpa_paged_varlen(**{**given, "tree_mask": None}), **EXACT)
    assert not torch.equal(found, sdpa_paged_varlen(**given))


def test_a_tree_in_a_wider_tensor():
    given = batch_on_pages(NEW, LENGTHS)
    whole = tree_of(NEW, 16)
    given["tree_mask"] = whole[:, :9]
    assert_right(given)


def test_single_tokens_are_those_of_sdpa_paged():
    given = batch_on_pages([1] * 5, [23, 1, 8, 40, 5], page=8, dims=(16, 16), layout="HND", dtype=torch.float32)
    expected, of_lse = sdpa_paged(
        given["q"].unsqueeze(2),
        *(given[name] for name in ("k_pages", "v_pages", "page_table", "seq_lens_kv")),
        page_layout="HND",
        return_lse=True,
    )
    found, lse = sdpa_paged_varlen(**given, return_lse=True)
    torch.testing.assert_close(found, expected[:, :, 0])
    torch.testing.assert_close(lse, of_lse[..., 0])


def test_results_lie_in_memory_as_queries_do():
    given = batch_on_pages(NEW, LENGTHS, dims=(16, 16))
    given["q"] = given["q"].transpose(0, 1).contiguous().transpose(0, 1)
    found, lse = sdpa_paged_varlen(**given, return_lse=True)
    assert found.stride() == given["q"].stride()
    assert lse.is_contiguous()
    whole = torch.full((20, 3, 4, 16), torch.nan, dtype=torch.float64)
    into = sdpa_paged_varlen(**given, out=whole[:, 1])
    assert into.data_ptr() == whole[:, 1].data_ptr()
    assert torch.equal(into, found)
    assert whole[:, ::2].isnan().all()


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("what", ["no tokens", "no sequences", "no columns", "no keys"])
def test_empty_calls(what, has_sinks):
    given = batch_on_pages([2, 1], [4, 3], behind=2)
    if what == "no tokens":
        given |= {"q": given["q"][:0], "cu_seqlens_q": torch.zeros(3, dtype=torch.int32)}
    elif what == "no sequences":
        given |= {"page_table": given["page_table"][:0], "seq_lens_kv": given["seq_lens_kv"][:0]}
        given["cu_seqlens_q"] = given["cu_seqlens_q"][:1]
    else:
        given["seq_lens_kv"] = torch.zeros(2, dtype=torch.int32)
        given["page_table"] = given["page_table"][:, : 0 if what == "no columns" else None]
    sinks = torch.randn(4) if has_sinks else None
    out, lse = sdpa_paged_varlen(**given, sinks=sinks, return_lse=True)
    assert not out.any()
    rows = 3 if has_sinks and what in ("no columns", "no keys") else 0
    if rows:
        assert torch.equal(lse[:rows], sinks.expand(rows, -1))
    assert lse[rows:].isneginf().all()


def test_flops_are_those_of_full_tables():
    from torch.utils.flop_counter import FlopCounterMode

    given = batch_on_pages(NEW, LENGTHS)
    with FlopCounterMode(display=False) as counter:
        sdpa_paged_varlen(**given)
    keys = given["page_table"].shape[1] * 5
    assert counter.get_total_flops() == 2 * 20 * 4 * keys * (16 + 24)


# Errors.


def arguments():
    return batch_on_pages([1, 3], [13, 9], page=4, dims=(16, 24), dtype=torch.bfloat16)


def with_fp8(**more):
    return {name: torch.zeros(3, 16, 2, 16).to(E4M3) for name in ("k_pages", "v_pages")} | more


ONE = torch.ones(())

WRONG = {
    "rank of q": (lambda a: {"q": a["q"].unsqueeze(0)}, "q: got shape .*sdpa_paged takes tensors of rank 4"),
    "dtype of q": (lambda a: {"q": a["q"].int()}, "q: got int32"),
    "FP8 queries": (lambda a: {"q": a["q"].to(E4M3)}, "q: got float8_e4m3fn"),
    "rank of pages": (lambda a: {"k_pages": a["k_pages"][0]}, "k_pages: got shape"),
    "number of pages": (lambda a: {"v_pages": a["v_pages"][:2]}, "v_pages: got 2 pages"),
    "no pages": (lambda a: {n: a[n][:0] for n in ("k_pages", "v_pages")}, "at least one page"),
    "empty pages": (lambda a: {n: a[n][:, :0] for n in ("k_pages", "v_pages")}, "pages of 0 tokens"),
    "page sizes": (lambda a: {"v_pages": a["v_pages"][:, :3]}, "v_pages: got page size 3; expected 4"),
    "dtype of pages": (lambda a: {"k_pages": a["k_pages"].half()}, "k_pages: got float16; expected bfloat16 or float8"),
    "dtypes of pages": (lambda a: {"v_pages": a["v_pages"].to(E5M2)}, "v_pages: got float8_e5m2; expected bfloat16"),
    "dtypes of FP8 pages": (
        lambda a: {n: a[n].to(t) for n, t in (("k_pages", E4M3), ("v_pages", E5M2))},
        "v_pages: got float8_e5m2; expected float8_e4m3fn, the dtype of k_pages",
    ),
    "heads": (lambda a: {"q": a["q"][:, :3]}, "k_pages: got 2 heads; expected a divisor of q's 3 heads"),
    "heads of values": (lambda a: {"v_pages": a["v_pages"][:, :, :1]}, "v_pages: got 1 heads"),
    "head dims": (lambda a: {"q": a["q"][..., :8]}, "k_pages: got head dim 16; expected 8"),
    "multiples": (
        lambda a: {n: a[n][..., :12] for n in ("q", "k_pages")},
        "q: got head dim 12; expected a positive multiple of 8",
    ),
    "large heads": (
        lambda _: (
            {"q": torch.zeros(4, 4, 264).bfloat16(), "k_pages": torch.zeros(9, 4, 2, 264).bfloat16()}
            | {"v_pages": torch.zeros(9, 4, 2, 16).bfloat16()}
        ),
        "q: got head dim 264; expected at most 256",
    ),
    "large values": (
        lambda _: {"k_pages": torch.zeros(9, 4, 2, 16).bfloat16(), "v_pages": torch.zeros(9, 4, 2, 512).bfloat16()},
        "v_pages: got head dim 512; expected at most 256",
    ),
    "dtype of the table": (lambda a: {"page_table": a["page_table"].long()}, "page_table: got int64"),
    "batch of the table": (lambda a: {"page_table": a["page_table"][:1]}, "page_table: got shape"),
    "rows of the table": (lambda a: {"page_table": a["page_table"].t().contiguous().t()}, "page_table: got stride"),
    "no table": (lambda _: {"page_table": None}, "page_table: got NoneType"),
    "second table": (lambda a: {"page_table_v": a["page_table"][:, :2]}, "page_table_v: got shape"),
    "dtype of lengths": (lambda a: {"seq_lens_kv": a["seq_lens_kv"].long()}, "seq_lens_kv: got int64"),
    "number of lengths": (lambda a: {"seq_lens_kv": a["seq_lens_kv"][:1]}, "seq_lens_kv: got shape"),
    "dtype of offsets": (lambda a: {"cu_seqlens_q": a["cu_seqlens_q"].long()}, "cu_seqlens_q: got int64"),
    "no offsets": (lambda a: {"cu_seqlens_q": a["cu_seqlens_q"][:0]}, "cu_seqlens_q: got shape"),
    "offsets as lists": (lambda _: {"cu_seqlens_q": [0, 1, 4]}, "cu_seqlens_q: got list; expected a torch.Tensor"),
    "longest": (lambda _: {"max_seqlen_q": -1}, "max_seqlen_q: got -1"),
    "longest as a tensor": (lambda _: {"max_seqlen_q": torch.tensor(3)}, "max_seqlen_q: got .*device-to-host copy"),
    "layout": (lambda _: {"page_layout": "DNH"}, "page_layout: got 'DNH'"),
    "no layout": (lambda _: {"page_layout": None}, "page_layout: got None"),
    "is_causal": (lambda _: {"is_causal": 2}, "is_causal: got 2"),
    "alignment": (lambda _: {"causal_alignment": "left"}, "causal_alignment: got 'left'"),
    "window_size": (lambda _: {"window_size": 3}, "window_size: got 3"),
    "scale": (lambda _: {"scale": torch.inf}, "scale: got inf"),
    "softcap": (lambda _: {"softcap": 0.0}, "softcap: got 0.0"),
    "sinks": (lambda _: {"sinks": torch.zeros(3)}, "sinks: got shape"),
    "dtype of sinks": (lambda _: {"sinks": torch.zeros(4).double()}, "sinks: got float64"),
    "batch_invariant": (lambda _: {"batch_invariant": 2}, "batch_invariant: got 2"),
    "return_lse": (lambda _: {"return_lse": 1}, "return_lse: got 1"),
    "out": (lambda a: {"out": a["q"]}, r"out: got shape .*; expected shape \(4, 4, 24\)"),
    "dtype of out": (lambda _: {"out": torch.zeros(4, 4, 24)}, "out: got float32"),
    "strides of out": (lambda _: {"out": torch.zeros(4, 4, 25).bfloat16()[..., :24]}, "out: got a stride of 25"),
    "scale of bfloat16": (lambda _: {"k_scale": ONE}, "k_scale: got a tensor; expected None: pages in bfloat16"),
    "scale of bfloat16 values": (lambda _: {"v_scale": ONE}, "v_scale: got a tensor; expected None"),
    "scale as a number": (lambda _: with_fp8(k_scale=0.5), "k_scale: got float; expected a torch.Tensor or None"),
    "dtype of a scale": (lambda _: with_fp8(k_scale=ONE.double()), "k_scale: got float64"),
    "size of a scale": (lambda _: with_fp8(v_scale=torch.ones(4)), r"v_scale: got shape \(4,\); expected shape \(2,\)"),
    "rank of a scale": (lambda _: with_fp8(v_scale=torch.ones(2, 1)), r"v_scale: got shape \(2, 1\)"),
    "dtype of a tree": (lambda _: {"tree_mask": torch.ones(4, 3)}, "tree_mask: got float32"),
    "rows of a tree": (lambda _: {"tree_mask": torch.ones(3, 3, dtype=torch.bool)}, "tree_mask: got shape"),
    "columns of a tree": (
        lambda _: {"tree_mask": torch.ones(4, 2, dtype=torch.bool)},
        r"tree_mask: got shape \(4, 2\); expected a column for each of the up to 3 new tokens",
    ),
    "strides of a tree": (lambda _: {"tree_mask": torch.ones(3, 4, dtype=torch.bool).t()}, "tree_mask: got stride"),
    "tree, not causal": (
        lambda _: {"tree_mask": torch.ones(4, 3, dtype=torch.bool), "is_causal": False},
        "is_causal: got False in addition to tree_mask",
    ),
    "tree, top-left": (
        lambda _: {"tree_mask": torch.ones(4, 3, dtype=torch.bool), "causal_alignment": "top_left"},
        "causal_alignment: got 'top_left' in addition to tree_mask",
    ),
    "tree, window": (
        lambda _: {"tree_mask": torch.ones(4, 3, dtype=torch.bool), "window_size": (4, 0)},
        r"window_size: got \(4, 0\) in addition to tree_mask",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name):
    given = arguments()
    change, message = WRONG[name]
    with pytest.raises(ArgumentError, match=message):
        sdpa_paged_varlen(**{**given, **change(given)})


def test_wrong_devices():
    given = arguments()
    for name, x in given.items():
        if isinstance(x, torch.Tensor) and name != "q":
            with pytest.raises(cudnn_sdpa.DeviceError, match=f"{name}: got meta"):
                sdpa_paged_varlen(**{**given, name: x.to("meta")})


def views(x, *, gap=0, offset=0, last=1):
    """The same values with a gap behind each head vector, from another element on, or with gaps within vectors."""
    *shape, dim = x.shape
    whole = torch.zeros(offset + x.numel() // dim * (last * dim + gap), dtype=x.dtype)
    found = whole[offset:].view(*shape, last * dim + gap)[..., : last * dim : last]
    return found.copy_(x)


@pytest.mark.parametrize("name", ["q", "k_pages", "v_pages"])
def test_memory_that_the_kernel_cannot_read(name):
    given = arguments()
    expected = sdpa_paged_varlen(**given)
    assert torch.equal(sdpa_paged_varlen(**{**given, name: views(given[name], gap=8)}), expected)
    for change, message in (
        ({"gap": 4}, r"stride \d+ from .*; expected a multiple of 8 elements \(16 bytes\)"),
        ({"offset": 4}, "an address 8 bytes past"),
        ({"last": 2}, "stride 2 in the last dimension"),
    ):
        with pytest.raises(LayoutError, match=f"{name}: got {message}"):
            sdpa_paged_varlen(**{**given, name: views(given[name], **change)})


@pytest.mark.parametrize("name", ["q", "k_pages", "v_pages"])
def test_a_result_over_an_input(name):
    given = batch_on_pages([4], [13], page=1, heads=2, dims=(16, 16), dtype=torch.bfloat16)
    out = given[name].flatten()[: 4 * 2 * 16].view(4, 2, 16)
    with pytest.raises(LayoutError, match=f"out: got memory that overlaps {name}"):
        sdpa_paged_varlen(**given, out=out)


def test_fp8_pages_that_the_kernel_cannot_read():
    """Dense vectors of 24 bytes lie at no multiples of 16; with room between them they do."""
    given = batch_on_pages([1, 3], [13, 9], cache=E4M3, dims=(24, 24), dtype=torch.bfloat16)
    with pytest.raises(
        LayoutError, match=r"k_pages: got stride .* multiple of 16 elements .*Allocate pages with 16 bytes"
    ):
        sdpa_paged_varlen(**given)
    apart = {name: views(given[name], gap=8) for name in ("k_pages", "v_pages")}
    assert_right({**given, **apart}, {"rtol": 8e-3, "atol": 1e-3})


def test_what_no_gpu_takes_runs_without_checks():
    given = batch_on_pages(NEW, LENGTHS, dims=(7, 3), dtype=torch.float32)
    with pytest.raises(ShapeError, match="head dim 7"):
        sdpa_paged_varlen(**given)
    with cudnn_sdpa.cpu_checks(None):
        assert_right(given, {"rtol": 2e-5, "atol": 5e-6})


def test_gradients_are_refused():
    given = arguments()
    with pytest.raises(UnsupportedError, match=r"sdpa_paged_varlen with a gradient(.|\n)*inference only"):
        sdpa_paged_varlen(**{**given, "q": given["q"].requires_grad_()})
    with torch.no_grad():
        assert not sdpa_paged_varlen(**given).requires_grad


# Values.


def test_values_are_checked():
    given = batch_on_pages([1, 3], [13, 9], page=4, behind=2)
    table, ends, lengths = given["page_table"], given["cu_seqlens_q"], given["seq_lens_kv"]

    def changed(x, place, value):
        found = x.clone()
        found[place] = value
        return found

    wrong = [
        ({"page_table": changed(table, (1, 2), 10**6)}, "page_table: got page 1000000 for batch entry 1"),
        ({"page_table": changed(table, (0, 0), -1)}, "page_table: got page -1 for batch entry 0"),
        ({"page_table_v": changed(table, (0, 3), -5)}, "page_table_v: got page -5"),
        ({"seq_lens_kv": changed(lengths, 0, -2)}, "seq_lens_kv: got -2 for batch entry 0; expected lengths from 0 to"),
        ({"seq_lens_kv": changed(lengths, 1, 99)}, "seq_lens_kv: got 99 for batch entry 1"),
        ({"cu_seqlens_q": changed(ends, 1, 5)}, "cu_seqlens_q: got offsets that decrease, from 5 to 4"),
        ({"cu_seqlens_q": changed(ends, 0, -1)}, "cu_seqlens_q: got offsets from -1 to 4; expected from 0 or more"),
        ({"cu_seqlens_q": changed(ends, 2, 7)}, "cu_seqlens_q: got offsets from 0 to 7; .* no more than 6"),
        ({"max_seqlen_q": 2}, "max_seqlen_q: got 2; expected at least 3"),
    ]
    for change, message in wrong:
        with pytest.raises(ShapeError, match=message):
            sdpa_paged_varlen(**{**given, **change})


def test_pages_that_no_token_sees_are_not_checked():
    """Engines free the pages left of a window; those of idle sequences and behind the last key are as free."""
    given = batch_on_pages([1, 3, 0], [40, 41, 30], page=4, window_size=(9, 0))
    assert (given["page_table"][:, :6] < 0).logical_or(given["page_table"][:, :6] > 99).all()
    assert_right(given)
    with pytest.raises(ShapeError, match="page_table: got page"):
        sdpa_paged_varlen(**{**given, "window_size": (17, 0)})
    with pytest.raises(ShapeError, match="page_table: got page"):
        sdpa_paged_varlen(**{**given, "causal_alignment": "top_left"})


def test_out_of_range_values_are_clamped(monkeypatch):
    for check in ("check_lengths", "check_pages", "check_offsets"):  # as on a GPU, where they are not read
        monkeypatch.setattr(value_checks, check, lambda *_, **__: None)
    given = arguments()
    given["page_table"].fill_(10**6)
    given["seq_lens_kv"].fill_(-3)
    given["cu_seqlens_q"].mul_(100)
    assert (sdpa_paged_varlen(**given) == 0).all()


# Around the call.


def test_fallback_runs_on_the_reference(monkeypatch, caplog):
    given = arguments()
    expected = sdpa_paged_varlen(**given, return_lse=True)

    def decline(*_):
        raise UnsupportedError("sdpa_paged_varlen", ["no kernel today"])

    monkeypatch.setattr(PAGED_VARLEN, "_run", decline)
    with pytest.raises(UnsupportedError, match="no kernel today"):
        sdpa_paged_varlen(**given, return_lse=True)
    with cudnn_sdpa.fallback("torch"):
        found = sdpa_paged_varlen(**given, return_lse=True)
        into = sdpa_paged_varlen(**given, out=torch.full_like(found[0], torch.nan))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(into, expected[0])
    assert "no kernel today" in caplog.text


@pytest.mark.parametrize("cache", [None, E4M3])
def test_autocast_casts_the_queries(cache):
    given = batch_on_pages(NEW, LENGTHS, dims=(16, 16), dtype=torch.bfloat16, cache=cache)
    expected = sdpa_paged_varlen(**given)
    wide = {**given, "q": given["q"].float()}
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(sdpa_paged_varlen(**wide), expected)
    if cache is None:
        with torch.autocast("cpu", torch.float16), pytest.raises(cudnn_sdpa.DtypeError, match="k_pages: got bfloat16"):
            sdpa_paged_varlen(**wide)


def test_half_precision_sinks_and_inference_mode():
    given = {**arguments(), "sinks": torch.randn(4).bfloat16()}
    expected = exact(given)[0]
    with torch.inference_mode():
        found = sdpa_paged_varlen(**given, out=torch.full((4, 4, 24), torch.nan).bfloat16())
    torch.testing.assert_close(found.double(), expected, rtol=8e-3, atol=8e-3)


def test_options_of_a_wrong_kind_are_named():
    with pytest.raises(TypeError, match="page_size"):
        sdpa_paged_varlen(**arguments(), page_size=4)
    with pytest.raises(OptionError, match="page_layout: got 3"):
        sdpa_paged_varlen(**{**arguments(), "page_layout": 3})

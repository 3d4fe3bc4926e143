"""FP8 attention on paged keys and values."""

from __future__ import annotations

import pytest
import torch
from fake_gpu import TARGET, FakeCache, graph_of
from refusals import assert_refused
from test_fp8 import E4M3, E5M2, fp8_of, lens, scales_of
from test_fp8_fast_path import gpu  # noqa: F401 - a fixture

from cudnn_sdpa import DtypeError, LayoutError, OptionError, ShapeError, UnsupportedError, explain, sdpa_fp8
from cudnn_sdpa.attention.fp8 import launch
from cudnn_sdpa.attention.fp8.explain import describe_sdpa_fp8

PAGE, WIDTH, PAGES = 8, 5, 13


def problem(*, layout="HND", dtype=E4M3, dims=(32, 48)):
    """Queries, pages of keys and values, tables with invalid ids past the lengths, and lengths."""
    q = fp8_of(2, 4, 20, dims[0], dtype=dtype)
    k, v = (fp8_of(PAGES, 2, PAGE, dim, dtype=dtype, layout="bshd" if layout == "NHD" else "bhsd") for dim in dims)
    ids = torch.randperm(PAGES)[: 2 * WIDTH].view(2, WIDTH).int()
    ids_v = torch.randperm(PAGES)[: 2 * WIDTH].view(2, WIDTH).int()
    lengths = lens(33, 9)
    ids[1, 2:] = ids_v[1, 2:] = -1
    return q, k, v, ids, ids_v, lengths


def in_a_row(pages, table):
    return torch.stack([torch.cat([pages[max(i, 0)].float() for i in row], dim=1) for row in table.tolist()]).to(
        pages.dtype
    )


def same(found, wanted):
    return all(a is b if a is None else torch.equal(a.float(), b.float()) for a, b in zip(found, wanted, strict=True))


OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "bottom-right": {"is_causal": True, "causal_alignment": "bottom_right"},
    "window_size": {"window_size": (9, 3), "scale": 0.2},
    "lengths": {"seq_lens_q": lens(3, 20)},
    "to e5m2": {"out_dtype": E5M2},
}


@pytest.mark.usefixtures("reference_alone")
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("name", OPTIONS)
def test_pages_match_contiguous_keys(name, layout):
    q, k, v, ids, ids_v, lengths = problem(layout=layout)
    options = OPTIONS[name]
    for other in (None, ids_v):
        found = sdpa_fp8(
            q, k, v, scales_of(), seq_lens_kv=lengths, page_table=ids, page_table_v=other, return_lse=True, **options
        )
        rows = in_a_row(k, ids), in_a_row(v, ids if other is None else other)
        assert same(found, sdpa_fp8(q, *rows, scales_of(), seq_lens_kv=lengths, return_lse=True, **options))


def test_unused_pages_are_not_read():
    q, k, v, ids, _, lengths = problem()
    expected = sdpa_fp8(q, k, v, scales_of(), seq_lens_kv=lengths, page_table=ids)
    owned = {int(i) for row, n in zip(ids, lengths.tolist(), strict=True) for i in row[: -(-n // PAGE)]}
    for page in set(range(PAGES)) - owned:
        v.view(torch.uint8)[page] = 0x7F
    v.view(torch.uint8)[ids[0, 4], :, 1:] = 0x7F  # from the 34th key of the first sequence on
    assert same(sdpa_fp8(q, k, v, scales_of(), seq_lens_kv=lengths, page_table=ids), expected)


def test_plan_key_on_hopper():
    q, k, v, ids, ids_v, lengths = problem(dims=(128, 128))
    description = describe_sdpa_fp8(q, k, v, scales_of(), seq_lens_kv=lengths, page_table=ids, page_table_v=ids_v)
    key = description.key(TARGET, None)
    layouts = {operand.name: operand.layout for operand in key.inputs}
    assert layouts["k"].shape == (PAGES, 2, PAGE, 128)
    assert layouts["table_k"].shape == layouts["table_v"].shape == (2, 1, WIDTH, 1)
    assert layouts["seq_len_kv"].shape == layouts["seq_len_q"].shape == (2, 1, 1, 1)
    assert any("page ids" in note for note in description.extra_kernels)


def test_hopper_has_no_single_query_and_no_bottom_right():
    q, k, v, ids, _, lengths = problem(dims=(128, 128))
    for of_q, options, reason in (
        (q[:, :, :1], {}, "single query"),
        (q, {"is_causal": True, "causal_alignment": "bottom_right"}, "bottom-right"),
        (q, {"window_size": (18, -1), "causal_alignment": "bottom_right"}, "keys plus the left bound"),
    ):
        with pytest.raises(UnsupportedError, match=reason):
            describe_sdpa_fp8(of_q, k, v, scales_of(), seq_lens_kv=lengths, page_table=ids, **options).key(TARGET, None)


def test_left_windows_that_no_query_passes_have_plans():
    q, k, v, ids, _, lengths = problem(dims=(128, 128))
    for options in (
        {"window_size": (3, -1)},
        {"window_size": (19, -1), "causal_alignment": "bottom_right"},  # of 20 queries
    ):
        key = describe_sdpa_fp8(q, k, v, scales_of(), seq_lens_kv=lengths, page_table=ids, **options).key(TARGET, None)
        left, right, bottom_right = key.option_values["band"]
        assert (left, right) == (options["window_size"][0], None)
        assert bottom_right is ("causal_alignment" in options)


def test_launches_get_the_right_addresses(gpu, monkeypatch):  # noqa: F811
    q, k, v, ids, ids_v, lengths = problem(dims=(128, 128))
    expected = sdpa_fp8(q, k, v, scales_of(), seq_lens_kv=lengths, page_table=ids, page_table_v=ids_v, return_lse=True)

    def gathered(key, tensors):
        for table in (tensors["table_k"], tensors["table_v"]):
            assert int(table.min()) >= 0
            assert int(table.max()) < PAGES
        return graph_of(key, tensors)

    monkeypatch.setattr(launch, "plan_cache", FakeCache(gathered))
    for _ in range(3):
        found = gpu(
            sdpa_fp8, q, k, v, scales_of(), seq_lens_kv=lengths, page_table=ids, page_table_v=ids_v, return_lse=True
        )
        torch.testing.assert_close(found.amax_o, expected.amax_o, rtol=2**-3, atol=0)
        assert same(found._replace(amax_o=expected.amax_o), expected)


WRONG = {
    "no lengths": ({"seq_lens_kv": None}, OptionError),
    "a list": ({"page_table": [[1]]}, OptionError),
    "a table of values alone": ({"page_table": None, "page_table_v": lens(1, 2).view(2, 1)}, OptionError),
    "int64": ({"page_table": torch.zeros(2, 5, dtype=torch.int64)}, DtypeError),
    "rows": ({"page_table": torch.zeros(3, 5, dtype=torch.int32)}, ShapeError),
    "widths": ({"page_table_v": torch.zeros(2, 4, dtype=torch.int32)}, ShapeError),
    "strides": ({"page_table": torch.zeros(2, 10, dtype=torch.int32)[:, ::2]}, LayoutError),
    "page size": ({"k": fp8_of(PAGES, 2, 6, 32), "v": fp8_of(PAGES, 2, 6, 48)}, ShapeError),
    "pages of another size": ({"v": fp8_of(PAGES, 2, 4, 48)}, ShapeError),
    "fewer pages": ({"v": fp8_of(PAGES - 1, 2, PAGE, 48)}, ShapeError),
    "no pages": ({"k": fp8_of(0, 2, PAGE, 32), "v": fp8_of(0, 2, PAGE, 48)}, ShapeError),
    "rank": ({"k": fp8_of(PAGES, 2, PAGE, 32)[0]}, ShapeError),
}


@pytest.mark.parametrize(("changes", "kind"), WRONG.values(), ids=WRONG)
def test_a_wrong_argument_is_named(changes, kind):
    """The first change is the wrong one."""
    q, k, v, ids, _, lengths = problem()
    given = {"q": q, "k": k, "v": v, "scales": scales_of(), "seq_lens_kv": lengths, "page_table": ids}
    assert_refused(lambda: sdpa_fp8(**{**given, **changes}), kind, next(iter(changes)))


def test_explain():
    q, k, v, ids, _, lengths = problem(dims=(128, 128))
    text = str(explain(sdpa_fp8, q[:, :, :1], k, v, scales_of(), seq_lens_kv=lengths, page_table=ids))
    assert "single query" in text

"""`trusted_pages`: tables that are read in place; `page_table_of_csr`: page tables of lists of pages."""

from __future__ import annotations

import contextlib
import random

import pytest
import torch
from fake_gpu import gpu_on_the_cpu
from native_way import native_way

from cudnn_sdpa import (
    ArgumentError,
    DtypeError,
    LayoutError,
    OptionError,
    ShapeError,
    UnsupportedError,
    page_table_of_csr,
    sdpa_paged,
    trusted_pages,
)
from cudnn_sdpa.attention.paged import paging, specs
from cudnn_sdpa.graph.layouts import TensorLayout


def ints(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def call(pages=13, size=4):
    """A decode step of four sequences, with NaN wherever no key is."""
    torch.manual_seed(pages)
    k, v = torch.full((2, pages, 2, size, 16), torch.nan, dtype=torch.bfloat16)
    table, lengths = torch.randperm(pages)[:12].view(4, 3).int(), ints(3 * size, 0, size + 1, 1)
    for row, length in zip(table.tolist(), lengths.tolist(), strict=True):
        for token in range(length):
            for x in (k, v):
                x[row[token // size], :, token % size] = torch.randn(2, 16).bfloat16()
    q = torch.randn(4, 4, 1, 16).bfloat16()
    return {"q": q, "k_pages": k, "v_pages": v, "page_table": table, "seq_lens_kv": lengths, "page_layout": "HND"}


@pytest.fixture
def copies(monkeypatch):
    """Launches on the fake GPU, natively too; counts the kernels that copy and clamp tables."""
    made, kernel = [], paging.PageTableKernel
    monkeypatch.setattr(paging, "PageTableKernel", lambda *x: made.append(x) or kernel(*x))
    with gpu_on_the_cpu(), native_way():
        yield made


def test_trusted_tables_are_read_in_place(copies):
    given = call()
    wanted = sdpa_paged(**given)
    assert len(copies) == 1
    assert wanted.isfinite().all()
    trusted_pages(given["page_table"], given["seq_lens_kv"], pages=13, page_size=4)
    for _ in range(3):
        assert torch.equal(sdpa_paged(**given), wanted)
    given["page_table"].copy_(given["page_table"].flip(0))  # refilled, as an engine does
    given["seq_lens_kv"].copy_(given["seq_lens_kv"].flip(0))
    torch.testing.assert_close(sdpa_paged(**{**given, "q": given["q"].flip(0)}).flip(0), wanted)
    assert len(copies) == 1


@pytest.mark.parametrize("what", ["slices", "copies", "one alone", "other numbers", "a smaller cache", "other pages"])
def test_other_tables_are_copied_and_clamped(copies, what):
    """Also where marks were meant for other tables or another cache: wild ids must not be followed."""
    given = call()
    wanted = sdpa_paged(**given)
    table, lengths = given["page_table"], given["seq_lens_kv"]
    numbers = {"pages": 13, "page_size": 4}
    if what == "a smaller cache":
        numbers["pages"] = 14
    elif what == "other pages":
        numbers["page_size"] = 8
    trusted_pages(table, lengths, **numbers)
    if what == "slices":
        given |= {"page_table": table[:], "seq_lens_kv": lengths[:]}
    elif what == "copies":
        given |= {"page_table": table.clone(), "seq_lens_kv": lengths.clone()}
    elif what == "one alone":
        given |= {"seq_lens_kv": lengths.clone()}
    elif what == "other numbers":
        trusted_pages(table, lengths.clone(), pages=20, page_size=4)
    before = len(copies)
    given["page_table"][1] = 10**6  # of the sequence without keys
    found = sdpa_paged(**given)
    assert torch.equal(found, wanted)
    assert len(copies) > before or what in ("slices", "copies", "one alone")  # bound before


@pytest.mark.parametrize("what", ["resized", "other data"])
def test_no_column_is_read_that_a_trusted_table_has_no_more(copies, what):
    given = call()
    k, v = (given[name].nan_to_num_(0.5) for name in ("k_pages", "v_pages"))
    table, lengths = given["page_table"], given["seq_lens_kv"].fill_(12)
    fewer = table[:, :2].clone()
    trusted_pages(table, lengths, pages=13, page_size=4)
    for _ in range(3):
        sdpa_paged(**given)
    assert not copies
    if what == "resized":
        table.resize_(4, 2).copy_(fewer)
    else:
        table.data = fewer
    wanted = sdpa_paged(given["q"], k, v, fewer.clone(), ints(8, 8, 8, 8), page_layout="HND")
    for _ in range(3):
        assert torch.equal(sdpa_paged(**given), wanted)


WRONG_TRUST = {
    "ids beyond the cache": ({"pages": 3}, ShapeError, "page_table: got page"),
    "lengths beyond the table": ({"seq_lens_kv": ints(13, 0, 1, 1)}, ShapeError, "seq_lens_kv: got 13"),
    "a negative length": ({"seq_lens_kv": ints(1, -1, 1, 1)}, ShapeError, "seq_lens_kv: got -1"),
    "other rows": ({"seq_lens_kv": ints(1, 1, 1)}, ShapeError, "seq_lens_kv: got shape"),
    "lengths of another dtype": ({"seq_lens_kv": ints(1, 1, 1, 1).long()}, DtypeError, "seq_lens_kv: got int64"),
    "a table of another dtype": ({"page_table": torch.zeros(4, 3).long()}, DtypeError, "page_table: got int64"),
    "a table of rank 1": ({"page_table": ints(1, 2)}, ShapeError, "page_table: got shape"),
    "sparse rows": ({"page_table": torch.zeros(4, 6).int()[:, ::2]}, LayoutError, "page_table: got stride 2"),
    "sparse lengths": ({"seq_lens_kv": torch.zeros(8).int()[::2]}, LayoutError, "seq_lens_kv: got stride 2"),
    "no pages": ({"pages": 0}, OptionError, "pages: got 0"),
    "a fraction": ({"page_size": 4.0}, OptionError, r"page_size: got 4\.0"),
    "a truth": ({"pages": True}, OptionError, "pages: got True"),
    "a list": ({"page_table": [[1]]}, OptionError, "page_table: got list"),
}


@pytest.mark.parametrize("name", WRONG_TRUST)
def test_wrong_trust_is_refused_where_it_is_seen(name):
    given = {x: call()[x] for x in ("page_table", "seq_lens_kv")} | {"pages": 13, "page_size": 4}
    changes, error, message = WRONG_TRUST[name]
    trusted_pages(**given)
    with pytest.raises(error, match=message):
        trusted_pages(**{**given, **changes})


def test_values_of_trusted_tables_are_read_on_the_cpu():
    given = call()
    trusted_pages(given["page_table"], given["seq_lens_kv"], pages=13, page_size=4)
    given["page_table"][0, 0] = 13
    with pytest.raises(ShapeError, match="page_table: got page 13"):
        sdpa_paged(**given)


# The number of pages in the keys of plans.


def test_caches_of_nearly_as_many_pages_share_a_plan(copies, monkeypatch):  # noqa: ARG001
    asked, key = [], specs.DecodeSpec.key
    monkeypatch.setattr(specs.DecodeSpec, "key", lambda *x: asked.append(key(*x)) or asked[-1])
    found = {pages: (sdpa_paged(**call(pages)), sdpa_paged(**call(pages)))[1] for pages in (33, 50, 64, 65)}
    assert all(out.isfinite().all() for out in found.values())
    assert len(set(asked[:3])) == 1
    assert len(set(asked)) == 2
    for pages, out in found.items():
        torch.testing.assert_close(out.float(), exact(call(pages)), rtol=2e-2, atol=2e-2)


def exact(given):
    found = torch.zeros(4, 4, 1, 16)
    for b, length in enumerate(given["seq_lens_kv"].tolist()):
        rows = [given[x][given["page_table"][b].long()].transpose(0, 1).flatten(1, 2) for x in ("k_pages", "v_pages")]
        k, v = (x[:, :length].float().repeat_interleave(2, 0) for x in rows)
        if length:
            found[b] = (given["q"][b].float() @ k.mT * 0.25).softmax(-1) @ v
    return found


@pytest.mark.parametrize("pages", [1, 2, 3, 4, 600, 1024])
@pytest.mark.parametrize("shape", [(2, 4, 8), (1, 1, 8), (1, 16, 8)])
def test_the_rounded_layout_has_the_strides_of_the_pages(pages, shape):
    apart = torch.empty(pages, *shape)
    for x in (apart, torch.empty(pages, 2, *shape)[:, 1], torch.empty(*shape[:2], pages, shape[2]).permute(2, 0, 1, 3)):
        layout = TensorLayout.with_first(x, 1 << (pages - 1).bit_length())
        used = [dim for dim in range(4) if x.shape[dim] > 1]
        assert [layout.stride[dim] for dim in used] == [x.stride(dim) for dim in used]


# Lists of pages.


@pytest.fixture(params=[contextlib.nullcontext, gpu_on_the_cpu])
def way(request):
    with request.param():
        yield


def by_loops(indptr, indices, last, page_size, table, lengths):
    for b in range(len(lengths)):
        begin = min(max(int(indptr[b]), 0), len(indices))
        end = min(max(int(indptr[b + 1]), begin), len(indices))
        ids = indices[begin:end]
        if not len(ids) or not table.shape[1]:
            lengths[b] = 0
            continue
        of_last = min(max(int(last[b]), 0), page_size) if len(ids) <= table.shape[1] else page_size
        ids = ids[: table.shape[1]]
        table[b, : len(ids)] = ids
        lengths[b] = (len(ids) - 1) * page_size + of_last


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("seed", range(30))
def test_tables_of_lists_equal_plain_loops(seed):
    r = random.Random(seed)
    torch.manual_seed(seed)
    batch, columns, page_size = r.choice((0, 1, 3, 20)), r.choice((0, 1, 4, 9)), r.choice((1, 5, 16))
    counts = torch.randint(0, 7, (batch,))
    indptr = torch.cat([torch.zeros(1), counts.cumsum(0)]).int()
    indices = torch.randint(0, 99, (int(indptr[-1]) + r.choice((0, 3)),)).int()
    last = torch.randint(1, page_size + 1, (batch,)).int()
    if r.random() < 0.4:  # offsets that decrease, or end behind the ids
        wild = torch.rand(batch + 1) < 0.3
        indptr[wild] = torch.randint(-5, 60, (batch + 1,)).int()[wild]
        last[: batch // 2] = r.choice((-3, 77))
    table = torch.full((batch, columns + 3), -7, dtype=torch.int32)[:, 1 : 1 + columns]
    lengths = torch.full((batch,), -7, dtype=torch.int32)
    twins = table._base.clone(), lengths.clone()
    by_loops(indptr, indices, last, page_size, twins[0][:, 1 : 1 + columns], twins[1])
    found = page_table_of_csr(indptr, indices, last, page_size=page_size, out_table=table, out_lengths=lengths)
    assert found is None
    assert torch.equal(table._base, twins[0])
    assert torch.equal(lengths, twins[1])


def csr():
    return {
        "indptr": ints(0, 2, 3),
        "indices": ints(5, 1, 4),
        "last_page_len": ints(3, 4),
        "page_size": 4,
        "out_table": torch.zeros(2, 3).int(),
        "out_lengths": ints(0, 0),
    }


WRONG_CSR = {
    "too few ends": ({"indptr": ints(0, 2)}, ShapeError, "indptr: got shape"),
    "long ids": ({"indices": ints(5, 1, 4).long()}, DtypeError, "indices: got int64"),
    "other rows": ({"out_table": torch.zeros(3, 3).int()}, ShapeError, "out_table: got shape"),
    "other lengths": ({"last_page_len": ints(1)}, ShapeError, "last_page_len: got shape"),
    "lengths of rank 2": ({"out_lengths": torch.zeros(2, 1).int()}, ShapeError, "out_lengths: got shape"),
    "sparse rows": ({"out_table": torch.zeros(2, 6).int()[:, ::2]}, LayoutError, "out_table: got stride 2"),
    "one row for all": ({"out_table": torch.zeros(1, 3).int().expand(2, 3)}, LayoutError, "out_table: got strides"),
    "no page size": ({"page_size": 0}, OptionError, "page_size: got 0"),
    "a list": ({"indices": [1, 2]}, OptionError, "indices: got list"),
    "elsewhere": ({"indices": ints(5, 1, 4).to("meta")}, ArgumentError, "indices: got meta"),
}


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", WRONG_CSR)
def test_wrong_lists(name):
    page_table_of_csr(**csr())
    changes, error, message = WRONG_CSR[name]
    with pytest.raises(error, match=message):
        page_table_of_csr(**{**csr(), **changes})


@pytest.mark.usefixtures("way")
def test_results_overlap_nothing():
    whole = torch.zeros(8, dtype=torch.int32)
    for changes in (
        {"out_table": whole[:6].view(2, 3), "indices": whole[3:]},
        {"out_lengths": whole[:2], "indptr": whole[:3]},
    ):
        with pytest.raises(LayoutError, match="that overlaps in"):
            page_table_of_csr(**{**csr(), **changes})


@pytest.mark.usefixtures("way")
def test_ends_of_every_size_are_clamped():
    given = {**csr(), "indptr": ints(2, -(2**31), 2**31 - 1), "out_table": torch.full((2, 3), -7).int()}
    page_table_of_csr(**given)
    assert given["out_lengths"].tolist() == [0, 2 * 4 + 4]
    assert given["out_table"].tolist() == [[-7, -7, -7], [5, 1, 4]]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", ["out_table", "out_lengths"])
def test_autograd_notices_that_a_table_is_filled(name):
    given, rows = csr(), torch.ones(9, 2, requires_grad=True)
    total = rows.index_select(0, given[name].view(-1)).sum()
    page_table_of_csr(**given)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


@pytest.mark.usefixtures("way")
def test_tables_are_filled_in_inference_mode():
    with torch.inference_mode():
        given = csr()
        page_table_of_csr(**given)
    assert given["out_lengths"].tolist() == [7, 4]


def test_vmap_is_refused():
    with pytest.raises(UnsupportedError, match=r"page_table_of_csr under torch\.vmap"):
        torch.vmap(lambda x: page_table_of_csr(**{**csr(), "indices": x}))(torch.zeros(2, 3).int())


def test_it_compiles():
    def step(indptr, indices, last):
        table, lengths = torch.full((2, 3), -1, dtype=torch.int32), torch.empty(2, dtype=torch.int32)
        page_table_of_csr(indptr, indices, last, page_size=4, out_table=table, out_lengths=lengths)
        return table, lengths

    given = [csr()[name] for name in ("indptr", "indices", "last_page_len")]
    table, lengths = torch.compile(step, backend="aot_eager", fullgraph=True)(*given)
    assert table.tolist() == [[5, 1, -1], [4, -1, -1]]
    assert lengths.tolist() == [7, 4]

"""FP8 attention on pages: the same values as on contiguous keys and values."""

from __future__ import annotations

import fp8_values
import pytest
import torch
from fp8_values import E4M3, E5M2, error, lens

from cudnn_sdpa import UnsupportedError, no_plan_builds, sdpa_fp8

OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "window_size": {"window_size": (50, 3), "scale": 0.13},
    "lengths of queries": {"seq_lens_q": (3, 70), "is_causal": True},
    "lse": {"return_lse": True},
}


def paged(page_size, *, order="HND", sq=70, keys=300, dim=128, dtype=E4M3, two_tables=True):
    """A problem on pages, its tables, lengths of which one is 0, and the same problem without pages."""
    width = -(-keys // page_size)
    pages = 2 * width + 5
    of = fp8_values.problem(batch=pages, sizes=(sq, page_size), dims=(dim, dim), dtype=dtype)
    of = of._replace(q=of.q[:2].contiguous())
    if order == "HND":
        of = of._replace(k=of.k.contiguous(), v=of.v.contiguous())
    ids = [torch.randperm(pages, device="cuda")[: 2 * width].view(2, width).int() for _ in range(2)]
    tables = ids if two_tables else [ids[0], ids[0]]

    def row(x, table):
        return x.view(torch.uint8)[table.long()].transpose(1, 2).flatten(2, 3).view(x.dtype)

    plain = of._replace(k=row(of.k, tables[0]), v=row(of.v, tables[1]))
    return of, tables, plain


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize(("page_size", "order"), [(16, "NHD"), (64, "HND"), (128, "NHD"), (1, "HND")])
@pytest.mark.parametrize("name", OPTIONS)
def test_pages_match_contiguous_keys(name, page_size, order, dtype):
    of, tables, plain = paged(page_size, order=order, dtype=dtype)
    options = dict(OPTIONS[name])
    if "seq_lens_q" in options:
        options["seq_lens_q"] = lens(*options["seq_lens_q"])
    for ends in ((300, 111), (1, 300), (0, 200)):
        options["seq_lens_kv"] = lens(*ends)
        rows = of.q.shape[:3].numel()
        fp8_values.poison(rows * 128, 4 * rows, 4)
        for table in tables:  # ids past a sequence's last page are invalid
            for entry, end in enumerate(ends):
                table[entry, -(-end // page_size) :] = -1
        found = sdpa_fp8(*of, page_table=tables[0], page_table_v=tables[1], **options)
        return_lse = options.pop("return_lse", False)
        emulated = fp8_values.emulated(plain, **options)
        assert error(found.out, emulated.out) < (0.06 if dtype == E4M3 else 0.12)
        assert (found.out.float()[emulated.lse.isneginf()] == 0).all()  # padding queries, and queries without keys
        if return_lse:
            masked_rows = emulated.lse.isneginf()
            assert found.lse[masked_rows].isneginf().all()
            torch.testing.assert_close(
                found.lse[~masked_rows].double(), emulated.lse[~masked_rows], rtol=1e-3, atol=3e-3
            )
            options["return_lse"] = True
        torch.testing.assert_close(found.amax_o, emulated.amax_o, rtol=0.2, atol=0)
        of, tables, plain = paged(page_size, order=order, dtype=dtype)


def test_tables_and_lengths_are_data_in_a_cuda_graph():
    of, tables, _ = paged(16)
    ends = lens(300, 111)
    given = {"page_table": tables[0], "page_table_v": tables[1], "seq_lens_kv": ends, "is_causal": True}
    sdpa_fp8(*of, **given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = sdpa_fp8(*of, **given)
    for values in ((5, 300), (300, 0)):
        other, ids, plain = paged(16)
        for old, new in zip((*of[:3], *of.scales, *tables), (*other[:3], *other.scales, *ids), strict=True):
            old.copy_(new)
        ends.copy_(torch.tensor(values, dtype=torch.int32))
        graph.replay()
        torch.cuda.synchronize()
        emulated = fp8_values.emulated(plain, is_causal=True, seq_lens_kv=ends)
        assert error(captured.out, emulated.out) < 0.06
    with no_plan_builds():
        sdpa_fp8(*of, **given)


def test_what_hopper_lacks_is_refused():
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("another GPU")
    of, tables, _ = paged(16)
    given = {"page_table": tables[0], "seq_lens_kv": lens(5, 6)}
    with pytest.raises(UnsupportedError, match="single query"):
        sdpa_fp8(of.q[:, :, :1], *of[1:], **given)
    with pytest.raises(UnsupportedError, match="bottom-right"):
        sdpa_fp8(*of, is_causal=True, causal_alignment="bottom_right", **given)

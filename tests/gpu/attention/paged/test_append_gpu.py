"""`append_paged_kv`, `page_table_of_csr` and pages in FP8 on a GPU: whole caches are compared with plain loops."""

from __future__ import annotations

import math

import pytest
import torch
from attention_checks import nothing_synchronizes

from cudnn_sdpa import PagedKVCache, append_paged_kv, page_table_of_csr, sdpa_paged, trusted_pages

BF16, HALF, E4M3, E5M2 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2
LIMITS = {E4M3: 448.0, E5M2: 57344.0}
LAYOUTS = ["HND", "NHD"]


def bits(x):
    return x.contiguous().view(torch.uint8)


def assert_same_memory(found, wanted):
    """The same bits, but any NaN for a NaN."""
    is_nan = wanted.float().isnan()
    assert torch.equal(found.float().isnan(), is_nan)
    keep = ~is_nan.unsqueeze(-1).expand(*is_nan.shape, wanted.element_size()).flatten(-2)
    assert torch.equal(bits(found)[keep], bits(wanted)[keep])


def as_stored(x, dtype, scale):
    """Head vectors (tokens, Hkv, D) as PyTorch rounds them on the CPU."""
    if x.dtype == dtype:
        return x
    values = x.cpu().float()
    values = values if scale is None else values / scale.cpu().view(-1, 1)
    return values.clamp(-LIMITS[dtype], LIMITS[dtype]).to(dtype).cuda()


def expected(whole, halves, new, slots, layout, scales=(None, None)):
    """The memory `whole` after an append, computed in a copy; `halves` are the pages, as views of it."""
    made = whole.clone()
    for pages, x, scale in zip(halves, new, scales, strict=True):
        to = made.view(whole.dtype).as_strided(pages.shape, pages.stride(), pages.storage_offset())
        to = to.transpose(1, 2) if layout == "HND" else to
        rows = as_stored(x, whole.dtype, scale)
        for token, slot in enumerate(slots.tolist()):
            if 0 <= slot < to.shape[0] * to.shape[1]:
                to[slot // to.shape[1], slot % to.shape[1]] = rows[token]
    return made


def memory(shape, dtype):
    return torch.randint(0, 120, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8, device="cuda").view(dtype)


def pages_of(kind, dtype, layout, dims, *, pages=9, heads=3, size=16):
    """Flat memory, and the pages of keys and values in it."""
    shape = (pages, heads, size) if layout == "HND" else (pages, size, heads)
    count, (d, dv) = math.prod(shape), dims
    if kind == "apart":
        whole = memory((count * (d + dv),), dtype)
        return whole, [whole[: count * d].view(*shape, d), whole[count * d :].view(*shape, dv)]
    if kind == "side by side":
        whole = memory((count * (d + dv),), dtype)
        return whole, list(whole.view(*shape, d + dv).split(dims, -1))
    if kind == "interleaved":
        whole = memory((2 * count * max(dims),), dtype)
        of = whole.view(pages, 2, *shape[1:], max(dims))
        return whole, [of[:, 0, ..., :d], of[:, 1, ..., :dv]]
    if kind == "elements apart":
        whole = memory((2 * count * max(dims),), dtype)
        of = whole.view(*shape, max(dims), 2)
        return whole, [of[..., :d, 0], of[..., :dv, 1]]
    whole = memory((count * (d + dv) + 3,), dtype)  # at any address
    return whole, [whole[1 : 1 + count * d].view(*shape, d), whole[3 + count * d :].view(*shape, dv)]


KINDS = ["apart", "side by side", "interleaved", "elements apart", "misaligned"]


def tokens(count, dims, dtype, heads=3):
    """Keys and values of all magnitudes, with NaN and infinities."""
    made = []
    for dim in dims:
        x = torch.randn(count, heads, dim, device="cuda") * torch.exp2(
            torch.randint(-12, 12, (count, heads, dim), device="cuda")
        )
        special = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 464.0, 465.0, 2**-9, 3 * 2**-11]).cuda()
        choice = special[torch.randint(0, len(special), x.shape, device="cuda")]
        x = torch.where(torch.rand_like(x) < 0.1, choice, x)
        made.append(x.clamp(-LIMITS[dtype], LIMITS[dtype]).to(dtype) if dtype in LIMITS else x.to(dtype))
    return made


def some_slots(count, places, dtype=torch.int64):
    slots = torch.randperm(places, device="cuda")[:count].to(dtype)
    return slots.masked_fill(torch.rand(count, device="cuda") < 0.2, -1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dtype", "stored"), [(BF16, BF16), (HALF, HALF), (BF16, E4M3), (HALF, E5M2), (E4M3, E4M3)])
@pytest.mark.parametrize("dims", [(128, 128), (192, 128), (72, 40), (8, 8)], ids=str)
def test_all_memory_is_as_plain_loops_leave_it(kind, layout, dtype, stored, dims):
    whole, halves = pages_of(kind, stored, layout, dims)
    is_quantized = stored != dtype
    scales = (torch.rand(3, device="cuda") + 0.1, torch.tensor(0.37, device="cuda")) if is_quantized else (None, None)
    options = {"page_layout": layout, "k_scale": scales[0], "v_scale": scales[1]}
    for turn in range(4):  # cold, warm, then from C++
        new, slots = tokens(50, dims, dtype), some_slots(50, 9 * 16, (torch.int64, torch.int32)[turn // 2])
        wanted = expected(whole, halves, new, slots, layout, scales)
        with nothing_synchronizes():
            append_paged_kv(*new, *halves, slots, **options)
        assert_same_memory(whole, wanted)


@pytest.mark.parametrize("by", [1, 2, 4, 8])
def test_tokens_at_any_address_and_of_any_strides(by):
    whole, halves = pages_of("apart", BF16, "NHD", (128, 64))
    for _ in range(4):
        new = tokens(20, (128, 64), BF16)
        apart = [torch.empty(20, 3, x.shape[2] + by, device="cuda", dtype=BF16)[..., by:].copy_(x) for x in new]
        slots = some_slots(20, 9 * 16)
        wanted = expected(whole, halves, new, slots, "NHD")
        append_paged_kv(*apart, *halves, slots, page_layout="NHD")
        assert_same_memory(whole, wanted)
        slots = some_slots(20, 9 * 16)
        wanted = expected(whole, halves, new, slots, "NHD")
        heads_first = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in new]
        append_paged_kv(*heads_first, *halves, slots, page_layout="NHD")
        assert_same_memory(whole, wanted)


@pytest.mark.parametrize("stored", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", [BF16, HALF])
@pytest.mark.parametrize("scale", [None, 0.37, 300.0, 1e-4])
def test_every_number_of_16_bits_is_rounded_as_pytorch_does(dtype, stored, scale):
    every = torch.arange(2**16).to(torch.uint16).view(torch.int16).view(dtype).view(64, 4, 256).cuda()
    scale = None if scale is None else torch.tensor([scale], device="cuda")
    pages = [torch.zeros(64, 4, 1, 256, device="cuda").to(stored) for _ in "kv"]
    append_paged_kv(every, every, *pages, torch.arange(64, device="cuda"), page_layout="HND", k_scale=scale)
    assert_same_memory(pages[0].squeeze(2), as_stored(every, stored, scale))
    assert_same_memory(pages[1].squeeze(2), as_stored(every, stored, None))


def test_slots_behind_the_pages_are_skipped():
    whole, halves = pages_of("side by side", BF16, "HND", (64, 64))
    around = whole.clone()
    slots = torch.tensor([9 * 16, 9 * 16 + 7, 2**40, -(2**40), -1], device="cuda")
    append_paged_kv(*tokens(5, (64, 64), BF16), *halves, slots, page_layout="HND")
    assert torch.equal(bits(whole), bits(around))


@pytest.mark.parametrize("count", [1, 64, 3000])
def test_a_captured_append_replays_with_other_slots(count):
    whole, halves = pages_of("side by side", E4M3, "NHD", (128, 128), pages=300)
    new, slots = tokens(count, (128, 128), BF16), some_slots(count, 300 * 16)
    scale = torch.tensor([0.5], device="cuda")
    options = {"page_layout": "NHD", "k_scale": scale, "v_scale": scale}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # not even the first call needs a plan
        append_paged_kv(*new, *halves, slots, **options)
    for _ in range(3):
        for x, fresh in zip(new, tokens(count, (128, 128), BF16), strict=True):
            x.copy_(fresh)
        slots.copy_(some_slots(count, 300 * 16))
        scale.uniform_(0.1, 2.0)
        wanted = expected(whole, halves, new, slots, "NHD", (scale, scale))
        graph.replay()
        assert_same_memory(whole, wanted)


def test_compiled_code_appends():
    def step(k, v, cache, slots):
        append_paged_kv(k * 2, v, *cache.split((64, 64), -1), slots, page_layout="NHD")
        return cache.float().sum()

    compiled = torch.compile(step, fullgraph=True)
    for count in (3, 4, 9):
        k, v = torch.randn(2, count, 2, 64, device="cuda", dtype=BF16)
        cache, slots = torch.zeros(4, 16, 2, 128, device="cuda", dtype=BF16), torch.randperm(64, device="cuda")[:count]
        twin = cache.clone()
        torch.testing.assert_close(compiled(k, v, cache, slots), step(k, v, twin, slots))
        assert torch.equal(cache, twin)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_cache_in_fp8_holds_what_was_appended(dtype, layout):
    scales = {"k_scale": torch.rand(2, device="cuda") + 0.1, "v_scale": torch.tensor(2.5, device="cuda")}
    cache = PagedKVCache(pages=40, page_size=16, heads=2, head_dim=64, dtype=dtype, page_layout=layout, **scales)
    numbers, written = [cache.add() for _ in range(3)], []
    for added in ([37, 3, 0], [1, 1, 1], [0, 2, 5], [1, 1, 1]):
        step = cache.reserve(numbers, added)
        new = [torch.randn(3, max(added), 2, 64, device="cuda").mul(300).bfloat16().transpose(1, 2) for _ in "kv"]
        cache.append(step, *new)
        written.append((added, new))
    for b, number in enumerate(numbers):
        for which, (found, scale) in enumerate(zip(cache.read(number), scales.values(), strict=True)):
            rows = torch.cat([new[which][b, :, : added[b]] for added, new in written], 1).transpose(0, 1)
            assert_same_memory(found.transpose(0, 1), as_stored(rows, dtype, scale))


@pytest.mark.parametrize("seed", range(4))
def test_page_tables_of_lists(seed):
    torch.manual_seed(seed)
    counts = torch.randint(0, 300, (70,))
    indptr = torch.cat([torch.zeros(1), counts.cumsum(0)]).int().cuda()
    indices = torch.randint(0, 9999, (int(indptr[-1]),), device="cuda").int()
    last = torch.randint(1, 17, (70,), device="cuda").int()
    table, lengths = torch.full((70, 310), -7, device="cuda").int(), torch.full((70,), -7, device="cuda").int()
    given = {"page_size": 16, "out_table": table[:, 5:305], "out_lengths": lengths}
    page_table_of_csr(indptr, indices, last, **given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        page_table_of_csr(indptr, indices, last, **given)
    for _ in range(2):
        wanted = table.clone()
        for b, (begin, end) in enumerate(zip(indptr[:-1].tolist(), indptr[1:].tolist(), strict=True)):
            wanted[b, 5 : 5 + end - begin] = indices[begin:end]
        graph.replay()
        assert torch.equal(table, wanted)
        pages = indptr[1:] - indptr[:-1]
        assert torch.equal(lengths, torch.where(pages > 0, (pages - 1) * 16 + last, 0).int())
        indices.copy_(indices.flip(0))
        last.copy_(last.flip(0))
    indptr.copy_(torch.randint(-50, 40000, (71,)))  # wild offsets read and write nothing else
    around = table[:, :5].clone(), table[:, 305:].clone()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(table[:, :5], around[0])
    assert torch.equal(table[:, 305:], around[1])


@pytest.mark.parametrize("pages", [513, 600, 700])
def test_plans_for_more_pages_read_the_last_page(pages):
    """Caches of 513 to 1024 pages share a plan; this one ends with an allocation of its own."""
    k, v = (torch.full((pages, 2, 16, 128), math.nan, device="cuda", dtype=BF16) for _ in "kv")
    table = torch.arange(pages - 8, pages, device="cuda").int().view(4, 2).flip(0).contiguous()
    lengths = torch.tensor([32, 17, 5, 32], device="cuda", dtype=torch.int32)
    q = torch.randn(4, 8, 1, 128, device="cuda", dtype=BF16)
    for row, length in zip(table.tolist(), lengths.tolist(), strict=True):
        for token in range(length):
            k[row[token // 16], :, token % 16] = torch.randn(2, 128, device="cuda").to(BF16)
            v[row[token // 16], :, token % 16] = torch.randn(2, 128, device="cuda").to(BF16)
    for _ in range(2):
        out = sdpa_paged(q, k, v, table, lengths, page_layout="HND")
        for b, length in enumerate(lengths.tolist()):
            keys, values = (x[table[b].long()].transpose(0, 1).flatten(1, 2)[:, :length].double() for x in (k, v))
            keys, values = (x.repeat_interleave(4, 0) for x in (keys, values))
            exact = (q[b].double() @ keys.mT * 128**-0.5).softmax(-1) @ values
            torch.testing.assert_close(out[b].double(), exact, rtol=2e-2, atol=2e-2)
        trusted_pages(table, lengths, pages=pages, page_size=16)

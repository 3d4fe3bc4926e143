"""More batch entries or heads than CUDA's grid has in one dimension: 65,535. Such calls are split where they must be.

Values are compared with float64 at some entries: the first, the last, and those on both sides of the limit.
"""

from __future__ import annotations

import fp8_values
import pytest
import torch
from float64_reference import attend

import cudnn_sdpa
from cudnn_sdpa import UnsupportedError, sdpa, sdpa_backward, sdpa_paged, sdpa_varlen, sdpa_varlen_backward

MANY = 70_000
DTYPE = torch.bfloat16
SCALE = 0.17

ENTRIES, HEADS, GROUPED, ALONE = (MANY, 1, 1), (1, MANY, MANY), (1, 2 * MANY, MANY), (1, MANY, 1)
#: B, Hq, Hkv.
SIZES = {"entries": ENTRIES, "heads": HEADS, "grouped heads": GROUPED, "one key head": ALONE}


@pytest.fixture(autouse=True)
def room():
    """Frees memory, which the next test may need."""
    yield
    torch.cuda.empty_cache()


def picked(count):
    """Entries, or key heads, whose values are compared."""
    if count < 1000:
        return torch.arange(count, device="cuda")
    near = (0, 1, count // 2 - 1, count // 2, 65_534, 65_535, 65_536, count - 2, count - 1)
    return torch.tensor(sorted({x for x in near if x < count}), device="cuda")


def of_group(heads_kv, group):
    return (heads_kv[:, None] * group + torch.arange(group, device="cuda")).flatten()


def randn(*shape):
    return torch.randn(shape, device="cuda", dtype=DTYPE)


def exact(q, k, v, **options):
    return attend(q, k, v, **{"scale": SCALE} | options)


def assert_near(name, found, wanted, tolerance=1.2e-2):
    found, wanted = found.detach().double(), wanted.detach()
    error = float((found - wanted).norm() / wanted.norm())
    assert error < tolerance, f"{name}: {error:.1e}"  # a NaN is not below it


def poison(*sizes):
    """Fills the allocator's next blocks with NaN."""
    tensors = [torch.full((size,), torch.nan, device="cuda", dtype=DTYPE) for size in sizes]
    torch.cuda.synchronize()
    del tensors


MASKS = {"rows": (1, 1, 16), "entries": (None, 1, 1, 16), "heads": (1, None, 16, 16)}
CALLS = {
    "plain": {},
    "deterministic": {"deterministic": True},
    "causal, sinks": {"is_causal": True, "sinks": True},
    "mask of rows": {"mask": "rows"},
    "mask of entries": {"mask": "entries"},
    "mask of heads": {"mask": "heads"},
    "lengths": {"lengths": True},
    "softcap": {"softcap": 5.0},
    "bshd, negative scale": {"bshd": True, "negative": True},
}


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("queries", [16, 1])
def test_values_and_gradients(name, sizes, queries):
    (batch, heads, heads_kv), given = SIZES[sizes], CALLS[name]
    shapes = (batch, heads, queries, 64), (batch, heads_kv, 16, 64), (batch, heads_kv, 16, 64)
    tensors = [randn(*shape) for shape in shapes]
    if given.get("bshd"):
        tensors = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    grad_out = randn(*shapes[0])
    options = {x: given[x] for x in ("is_causal", "deterministic", "softcap") if x in given}
    mask = sinks = lengths = None
    if "mask" in given:
        shape = [*MASKS[given["mask"]]]
        if given["mask"] != "rows":
            shape = [batch if place == 0 else heads if n is None else n for place, n in enumerate(shape)]
            shape[0] = batch if given["mask"] == "entries" else 1
            shape[2] = queries if shape[2] == 16 else 1
        else:
            shape[1] = queries
        mask = randn(*shape)
    if given.get("sinks"):
        sinks = torch.randn(heads, device="cuda")
    if given.get("lengths"):
        lengths = torch.randint(2, 17, (batch,), device="cuda", dtype=torch.int32)
    leaves = [x.requires_grad_() for x in (*tensors, mask, sinks) if x is not None]
    sign = -1 if given.get("negative") else 1
    poison(tensors[0].numel(), tensors[1].numel(), tensors[1].numel())
    out, lse = sdpa(
        *tensors, scale=sign * SCALE, attn_mask=mask, sinks=sinks, seq_lens_kv=lengths, return_lse=True, **options
    )
    gradients = torch.autograd.grad(out, leaves, grad_out)

    entries, of_kv = picked(batch), picked(heads_kv)
    of_q = of_group(of_kv, heads // heads_kv)
    places = [of_q, of_kv, of_kv]
    part = [x.detach()[entries][:, at].double() for x, at in zip(tensors, places, strict=True)]
    part[0] = part[0] * sign
    part_mask = part_sinks = None
    if mask is not None:
        part_mask = mask.detach()[(None,) * (4 - mask.dim())]
        part_mask = part_mask[entries if part_mask.shape[0] > 1 else slice(None)]
        part_mask = part_mask[:, of_q if part_mask.shape[1] > 1 else slice(None)].double()
    if sinks is not None:
        part_sinks = sinks.detach()[of_q].double()
    exact_leaves = [x.requires_grad_() for x in (*part, part_mask, part_sinks) if x is not None]
    part_options = {x: options[x] for x in ("is_causal", "softcap") if x in options}
    ends = None if lengths is None else lengths[entries]
    wanted, wanted_lse = exact(*part, attn_mask=part_mask, sinks=part_sinks, seq_lens_kv=ends, **part_options)
    wanted_gradients = torch.autograd.grad(wanted, exact_leaves, grad_out[entries][:, of_q].double())

    assert_near("out", out.detach()[entries][:, of_q], wanted.detach())
    assert_near("lse", lse[entries][:, of_q], wanted_lse.detach(), 1e-5)
    for what, found, right, at in zip("qkv", gradients, wanted_gradients, places, strict=False):
        assert_near(f"gradient of {what}", found[entries][:, at], sign * right if what == "q" else right)
    all_heads = len(of_kv) == heads_kv
    if mask is not None and (given["mask"] == "entries") is (batch > 1) and given["mask"] != "rows":
        found = gradients[3][entries] if batch > 1 else gradients[3][:, of_q]
        assert_near("gradient of the mask", found, wanted_gradients[3])
    if sinks is not None and batch == 1:
        assert_near("gradient of the sinks", gradients[-1][of_q], wanted_gradients[-1])
    assert all(bool(x.isfinite().all()) for x in (out, lse, *gradients))
    assert all_heads or heads_kv > 1000


@pytest.mark.parametrize("sizes", ["entries", "heads"])
def test_sums_over_all_entries_or_heads(sizes):
    """The gradients of what all parts share: a mask of rows, and sinks of one head or of many."""
    batch, heads, heads_kv = SIZES[sizes]
    q, k, v, grad_out = (randn(batch, n, 16, 64) for n in (heads, heads_kv, heads_kv, heads))
    mask, sinks = randn(16, 16).requires_grad_(), torch.randn(heads, device="cuda", requires_grad=True)
    out = sdpa(q, k, v, scale=SCALE, attn_mask=mask, sinks=sinks)
    found = torch.autograd.grad(out, (mask, sinks), grad_out)
    leaves = [x.detach().double().requires_grad_() for x in (mask, sinks)]
    wanted, _ = exact(q.double(), k.double(), v.double(), attn_mask=leaves[0], sinks=leaves[1])
    for name, a, b in zip(
        ("mask", "sinks"), found, torch.autograd.grad(wanted, leaves, grad_out.double()), strict=True
    ):
        assert_near(f"gradient of the {name}", a, b, 4e-2)


def test_a_public_backward_call_and_a_graph():
    """The parts' bindings are captured, and replayed with other values."""
    q, k, v, grad_out = (randn(MANY, 1, 16, 64) for _ in range(4))

    def run():
        out, lse = sdpa(q, k, v, scale=SCALE, return_lse=True)
        single = sdpa(q[:, :, :1], k, v, scale=SCALE)
        return sdpa_backward(grad_out, out, lse, q, k, v, scale=SCALE), single

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gradients, single = run()
    for x in (q, k, v, grad_out):
        x.copy_(randn(*x.shape))
    graph.replay()
    at = picked(MANY)
    leaves = [x[at].double().requires_grad_() for x in (q, k, v)]
    out, _ = exact(*leaves)
    wanted = torch.autograd.grad(out, leaves, grad_out[at].double())
    for name, found, right in zip("qkv", gradients, wanted, strict=False):
        assert_near(f"gradient of {name}", found[at], right)
    assert_near("single queries", single[at], out[:, :, :1].detach())


def test_single_queries_into_a_given_output_and_compiled():
    q, k, v = (randn(MANY, 1, n, 64) for n in (1, 40, 40))
    out = torch.full_like(q, torch.nan)
    assert sdpa(q, k, v, scale=SCALE, out=out) is out
    at = picked(MANY)
    wanted, _ = exact(*(x[at].double() for x in (q, k, v)))
    assert_near("out", out[at], wanted)
    compiled = torch.compile(lambda q, k, v: sdpa(q, k, v, scale=SCALE), fullgraph=True)
    assert_near("compiled", compiled(q, k, v)[at], wanted)


@pytest.mark.parametrize(
    ("batch", "heads", "tokens"),
    [
        *((n, (1, 1), 1) for n in (49_153, 65_535, 65_536, MANY)),
        (MANY, (4, 2), 4),
        (20_000, (1, 1), 4),
        (MANY, (1, 1), 16),
        (1, (MANY, MANY), 1),
        (1, (MANY, 1), 1),
    ],
)
def test_paged_calls(batch, heads, tokens):
    k_pages, v_pages = (randn(64, heads[1], 16, 64) for _ in range(2))
    table = torch.randint(64, (batch, 2), device="cuda", dtype=torch.int32)
    lengths = torch.randint(tokens, 33, (batch,), device="cuda", dtype=torch.int32)
    q, sinks = randn(batch, heads[0], tokens, 64), torch.randn(heads[0], device="cuda")
    options = {"scale": SCALE, "sinks": sinks, "return_lse": True, "page_layout": "HND"}
    poison(q.numel())
    out, lse = sdpa_paged(q, k_pages, v_pages, table, lengths, **options)
    at, of_kv = picked(batch), picked(heads[1])
    of_q = of_group(of_kv, heads[0] // heads[1])
    rows = (x[table[at].long()][:, :, of_kv].transpose(1, 2).flatten(2, 3).double() for x in (k_pages, v_pages))
    wanted = exact(
        q[at][:, of_q].double(),
        *rows,
        sinks=sinks[of_q].double(),
        seq_lens_kv=lengths[at],
        is_causal=True,
        causal_alignment="bottom_right",
    )
    assert_near("out", out[at][:, of_q], wanted[0])
    assert_near("lse", lse[at][:, of_q], wanted[1], 1e-5)
    assert bool(out.isfinite().all())


@pytest.mark.parametrize(("sequences", "heads"), [(MANY, (2, 1)), (65_535, (2, 1)), (2, (MANY, MANY))])
@pytest.mark.parametrize("deterministic", [False, True])
def test_packed_sequences(sequences, heads, deterministic):
    lengths = torch.randint(1, 5, (sequences,), device="cuda")
    ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()
    tokens = int(ends[-1])
    q, k, v, grad_out = (randn(tokens, n, 64) for n in (heads[0], heads[1], heads[1], heads[0]))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    options = {"is_causal": True, "scale": SCALE, "deterministic": deterministic}
    if deterministic and sequences > 65_535:
        with pytest.raises(UnsupportedError, match="deterministic"):
            sdpa_varlen(q, k, v, ends, ends, 4, 4, **options)
        return
    poison(q.numel(), k.numel(), k.numel())
    out, lse = sdpa_varlen(q, k, v, ends, ends, 4, 4, **options, return_lse=True)
    gradients = torch.autograd.grad(out, leaves, grad_out)
    given = (x.detach() for x in (q, k, v))
    explicit = sdpa_varlen_backward(grad_out, out.detach(), lse.detach(), *given, ends, ends, 4, 4, **options)
    assert_near("explicit", explicit.dq, gradients[0].double(), 1e-3)
    of_kv = picked(heads[1])
    of_q = of_group(of_kv, heads[0] // heads[1])
    places = (of_q, of_kv, of_kv)
    for number in picked(sequences).tolist():
        rows = slice(int(ends[number]), int(ends[number + 1]))
        part = [
            x.detach()[rows, at].transpose(0, 1)[None].double().requires_grad_()
            for x, at in zip(leaves, places, strict=True)
        ]
        wanted, _ = exact(*part, is_causal=True)
        assert_near("out", out.detach()[rows, of_q].transpose(0, 1)[None], wanted.detach())
        if rows.stop - rows.start > 2:  # for fewer, some gradients are differences of what is nearly equal
            exact_gradients = torch.autograd.grad(wanted, part, grad_out[rows, of_q].transpose(0, 1)[None].double())
            for name, found, right, at in zip("qkv", gradients, exact_gradients, places, strict=True):
                assert_near(f"gradient of {name}", found[rows, at].transpose(0, 1)[None], right, 5e-2)
    assert all(bool(x.isfinite().all()) for x in (out, *gradients))


@pytest.mark.parametrize(("sequences", "heads"), [(MANY, (2, 1)), (2, (MANY, MANY))])
def test_packed_single_queries(sequences, heads):
    lengths = torch.randint(1, 21, (sequences,), device="cuda")
    ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()
    q, k, v = randn(sequences, heads[0], 64), *(randn(int(ends[-1]), heads[1], 64) for _ in range(2))
    ones = torch.arange(sequences + 1, device="cuda", dtype=torch.int32)
    out, lse = sdpa_varlen(q, k, v, ones, ends, 1, 20, scale=SCALE, return_lse=True)
    of_kv = picked(heads[1])
    of_q = of_group(of_kv, heads[0] // heads[1])
    for number in picked(sequences).tolist():
        rows = slice(int(ends[number]), int(ends[number + 1]))
        part = q[number : number + 1, of_q], k[rows, of_kv], v[rows, of_kv]
        wanted = exact(*(x.transpose(0, 1)[None].double() for x in part))
        assert_near("out", out[number : number + 1, of_q].transpose(0, 1)[None], wanted[0])
        assert_near("lse", lse[number : number + 1, of_q].transpose(0, 1)[None], wanted[1], 1e-5)
    assert bool(out.isfinite().all())


def test_packed_and_fp8_query_heads_that_share_key_heads_are_refused():
    ends = torch.tensor([0, 5, 9], device="cuda", dtype=torch.int32)
    q, k = randn(9, MANY, 64), randn(9, 1, 64)
    with pytest.raises(UnsupportedError, match="share key heads"):
        sdpa_varlen(q, k, k, ends, ends, 5, 5)
    of = fp8_values.problem(batch=1, heads=(MANY, 2), sizes=(16, 16))
    with pytest.raises(UnsupportedError, match="share key heads"):
        fp8_values.forward(of)


@pytest.mark.parametrize("options", [{}, {"deterministic": True, "is_causal": True}], ids=["", "deterministic"])
@pytest.mark.parametrize("sizes", [ENTRIES, HEADS, (40_000, 4, 2)], ids=str)
def test_gradients_in_fp8(sizes, options):
    batch, heads, heads_kv = sizes
    of = fp8_values.problem(batch=batch, heads=(heads, heads_kv), sizes=(16, 16))
    is_causal = options.get("is_causal", False)
    made = fp8_values.forward(of, return_lse=True, is_causal=is_causal)
    grad_out = fp8_values.fp8_of((batch, heads, 16, 128), 20.0)
    scales = fp8_values.backward_scales(of, descale_do=1 / 20.0)
    fp8_values.poison(*(x.numel() for x in of[:3]), 4)
    call = (grad_out, *of[:3], made.out, made.lse, scales)
    found = cudnn_sdpa.sdpa_fp8_backward(*call, **options)
    at, of_kv = picked(batch), picked(heads_kv)
    of_q = of_group(of_kv, heads // heads_kv)

    def part_of(x, heads):
        return x.view(torch.uint8)[at][:, heads].view(x.dtype)

    part = fp8_values.Problem(part_of(of.q, of_q), part_of(of.k, of_kv), part_of(of.v, of_kv), of.scales)
    wanted = fp8_values.true_gradients(part, part_of(grad_out, of_q), scales, is_causal=is_causal)
    for name, x, right, places in zip(("dq", "dk", "dv"), found, wanted, (of_q, of_kv, of_kv), strict=False):
        assert_near(name, part_of(x, places).double() / getattr(scales, f"scale_{name}").double(), right, 0.08)
        largest = x.float().abs().amax() / getattr(scales, f"scale_{name}")
        assert float(getattr(found, f"amax_{name}") / largest) == pytest.approx(1, rel=0.07)


def test_fp8_attention_trains():
    q, k, v = (randn(MANY, 1, 16, 128).requires_grad_() for _ in range(3))
    grad_out = randn(MANY, 1, 16, 128)
    gradients = torch.autograd.grad(cudnn_sdpa.fp8_attention(q, k, v, scale=SCALE), (q, k, v), grad_out)
    at = picked(MANY)
    leaves = [x.detach()[at].double().requires_grad_() for x in (q, k, v)]
    wanted = torch.autograd.grad(exact(*leaves)[0], leaves, grad_out[at].double())
    for name, found, right in zip("qkv", gradients, wanted, strict=True):
        assert_near(f"gradient of {name}", found[at], right, 0.15)


@pytest.mark.parametrize("options", [{"dropout_p": 0.1}, {"alibi": True, "is_causal": True}], ids=["dropout", "alibi"])
def test_what_cannot_be_split_is_refused_before_the_forward_pass(options):
    q, k, v = (randn(1, MANY, 16, 64).requires_grad_() for _ in range(3))
    with pytest.raises(UnsupportedError, match="cannot be split"):
        sdpa(q, k, v, **options)
    assert bool(sdpa(q.detach(), k.detach(), v.detach(), **options).isfinite().all())


def test_dropout_of_many_entries_without_gradients():
    """The weights that are kept are 1 / (1 - p) times those without dropout, also beyond the limit."""
    q, k = randn(MANY, 1, 16, 64), randn(MANY, 1, 16, 64)
    v = torch.eye(16, 64, device="cuda", dtype=DTYPE).expand(MANY, 1, -1, -1).contiguous()
    kept = sdpa(q, k, v, scale=SCALE, dropout_p=0.25)[:, 0, :, :16].float()
    weights = sdpa(q, k, v, scale=SCALE)[:, 0, :, :16].float() / 0.75
    is_kept = kept != 0
    torch.testing.assert_close(kept[is_kept], weights[is_kept], rtol=2e-2, atol=1e-3)
    for part in (is_kept[:1000], is_kept[65_536:]):
        assert float(part.float().mean()) == pytest.approx(0.75, abs=0.01)

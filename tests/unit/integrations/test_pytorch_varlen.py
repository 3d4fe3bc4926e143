"""PyTorch's `varlen_attn` on this library: packed sequences, windows, used keys, pages."""

from __future__ import annotations

import itertools

import float64_reference as exact
import pytest
import torch
from fake_gpu import TARGET
from torch.utils._python_dispatch import TorchDispatchMode

from cudnn_sdpa import ArgumentError, DtypeError, OptionError, ShapeError, UnsupportedError, plan_cache
from cudnn_sdpa.graph.target import Target
from cudnn_sdpa.integrations import pytorch_varlen
from tests.unit.pytorch_operators import WAYS, as_compiled_code_sees, assert_agrees, operators_registered

varlen = pytest.importorskip("torch.nn.attention.varlen", reason="this PyTorch has no varlen_attn")
operators = torch.ops.torch_attn
has_out = hasattr(operators, "_varlen_attn_out")
#: PyTorch 2.11 and older have no such argument, and do not ask whether heads are grouped.
GROUPED = {"enable_gqa": True} if "enable_gqa" in str(operators._varlen_attn.default._schema) else {}
needs_pages = pytest.mark.skipif(
    "block_table" not in str(operators._varlen_attn.default._schema), reason="this PyTorch's varlen_attn has no pages"
)


@pytest.fixture(params=WAYS)
def way(request):
    """The dtype of calls that take one of the ways."""
    with operators_registered(request.param):
        yield torch.float32 if request.param == "reference" else torch.bfloat16


@pytest.fixture
def registered():
    with operators_registered():
        yield


def offsets(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def options_of(window):
    return {"causal_alignment": "bottom_right", "window_size": window, "is_causal": window == (-1, 0)}


def packed(q, k, v, lengths_q, lengths_kv, grad_out=None, **options):
    """Output (T, H, D), LSE (H, T) and gradients in float64, one sequence after the other; nothing for other rows."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out, lse = exact.attend_packed(*leaves, offsets(lengths_q), offsets(lengths_kv), **options)
    grads = torch.autograd.grad(out, leaves, torch.zeros_like(out) if grad_out is None else grad_out.double())
    return out.detach(), lse.T, grads


def tensors(tokens_q, tokens_kv, heads=4, heads_kv=2, dim=16, dtype=torch.float32, dim_v=None):
    sizes = ((tokens_q, heads, dim), (tokens_kv, heads_kv, dim), (tokens_kv, heads_kv, dim_v or dim))
    return [torch.randn(size).to(dtype).requires_grad_() for size in sizes]


WINDOWS = [(-1, -1), (-1, 0), (3, 0), (2, 2), (-1, 1), (0, 0)]
with_windows = pytest.mark.parametrize(
    "window", WINDOWS if "window_size" in str(operators._varlen_attn.default._schema) else WINDOWS[:2], ids=str
)


def attend(q, k, v, cu_q, cu_k, max_q, max_k, window=(-1, -1), scale=None, **options):
    """The output (T, H, D) and the LSE (H, T)."""
    return operators._varlen_attn(
        q, k, v, cu_q, cu_k, max_q, max_k, window == (-1, 0), scale, list(window), *GROUPED.values(), **options
    )[:2]


@with_windows
@pytest.mark.parametrize("same", [True, False], ids=["self", "cross"])
def test_values_and_gradients_are_those_of_float64(way, window, same):
    lengths_q = [5, 0, 7, 8]
    lengths_kv = lengths_q if same else [9, 3, 0, 8]
    for _ in range(3):  # cold, warm, and natively
        q, k, v = tensors(22, 22, dtype=way)
        cu_q = offsets(lengths_q)
        cu_k = cu_q if same else offsets(lengths_kv)
        out, lse = attend(q, k, v, cu_q, cu_k, 8, 9, window, scale=0.3)
        grad_out = torch.randn_like(out)
        want, want_lse, grads = packed(q, k, v, lengths_q, lengths_kv, grad_out, scale=0.3, **options_of(window))
        assert_agrees(out, want)
        assert_agrees(lse, want_lse)
        assert lse.is_contiguous()
        assert lse.dtype == torch.float32
        for gradient, wanted in zip(torch.autograd.grad(out, (q, k, v), grad_out), grads, strict=True):
            assert_agrees(gradient, wanted)
        with torch.no_grad():
            assert_agrees(attend(q, k, v, cu_q, cu_k, 8, 9, window, scale=0.3)[0], want)


@pytest.mark.parametrize("needed", [x for n in (1, 2) for x in itertools.combinations(range(3), n)], ids=str)
def test_gradients_of_any_of_the_inputs(way, needed):
    lengths = [4, 6]
    all_of_them = tensors(10, 10, dtype=way)
    q, k, v = (x if place in needed else x.detach() for place, x in enumerate(all_of_them))
    cu = offsets(lengths)
    out, _ = attend(q, k, v, cu, cu, 6, 6, (-1, 0))
    grad_out = torch.randn_like(out)
    *_, grads = packed(q, k, v, lengths, lengths, grad_out, **options_of((-1, 0)))
    found = torch.autograd.grad(out, [all_of_them[place] for place in needed], grad_out)
    for place, gradient in zip(needed, found, strict=True):
        assert_agrees(gradient, grads[place])


def test_a_causal_mask_with_a_window_keeps_its_left_bound(registered):  # noqa: ARG001
    q, k, v = tensors(10, 10)
    cu = offsets([4, 6])
    out = operators._varlen_attn(q, k, v, cu, cu, 6, 6, True, None, [2, -1])[0]
    want, *_ = packed(q, k, v, [4, 6], [4, 6], is_causal=True, window_size=(2, -1), causal_alignment="bottom_right")
    assert_agrees(out, want)


def test_gradients_of_a_part_of_the_keys(way):
    """As ring attention asks for them: the output and the LSE are those of all keys."""
    q, k, v = (x.detach() for x in tensors(10, 20, dtype=way))
    cu_q, cu_k, half = offsets([4, 6]), offsets([8, 12]), offsets([4, 6])
    out, lse = attend(q, k, v, cu_q, cu_k, 6, 12)
    grad_out = torch.randn_like(out)
    *_, (grad_q, grad_k, _) = packed(q, k, v, [4, 6], [8, 12], grad_out)
    rows = [torch.tensor([*range(4), *range(8, 14)]), torch.tensor([*range(4, 8), *range(14, 20)])]
    state = torch.zeros(2, dtype=torch.uint64)
    parts = [
        operators._varlen_attn_backward(grad_out, q, k[row], v[row], out, lse, cu_q, half, 6, 6, False, state)
        for row in rows
    ]
    assert_agrees(parts[0][0] + parts[1][0], grad_q)
    for row, (_, part, _) in zip(rows, parts, strict=True):
        assert_agrees(part, grad_k[row])


def test_gradients_of_one_step_after_another(way):
    """What recognizes the last backward call sees other options, lengths and layouts, and plans that are gone."""
    lengths = [4, 6]
    cu = offsets(lengths)
    for step in range(8):
        window = (-1, 0) if step in (2, 5) else (-1, -1)
        q, k, v = tensors(10, 10, heads_kv=4 if step == 3 else 2, dtype=way)
        if step == 4:  # other strides
            q, k, v = (torch.cat([x.detach(), x.detach()], 1)[:, : x.shape[1]].requires_grad_() for x in (q, k, v))
        if step == 6:
            plan_cache.clear()
        out, lse = attend(q, k, v, cu, cu, 6, 6, window)
        grad_out = torch.randn_like(out)
        want, want_lse, grads = packed(q, k, v, lengths, lengths, grad_out, **options_of(window))
        assert_agrees(out, want)
        assert_agrees(lse, want_lse)
        for found, exactly in zip(torch.autograd.grad(out, (q, k, v), grad_out), grads, strict=True):
            assert_agrees(found, exactly)


def test_a_wrong_call_after_a_right_one_is_refused(way):
    q, k, v = (x.detach() for x in tensors(10, 10, dtype=way))
    cu, state = offsets([4, 6]), torch.zeros(2, dtype=torch.uint64)
    out, lse = attend(q, k, v, cu, cu, 6, 6)
    grad_out = torch.randn_like(out)

    def gradients(q=q, out=out, lse=lse, grad_out=grad_out):
        return operators._varlen_attn_backward(grad_out, q, k, v, out, lse, cu, cu, 6, 6, False, state)

    for _ in range(2):
        gradients()
    for wrong in (
        *({"lse": x} for x in (lse[:, :9], lse[:1], lse[0], lse.T.contiguous())),
        *({"grad_out": grad_out[:9]}, {"q": q[:9]}, {"out": out[..., :8].contiguous()}),
    ):
        with pytest.raises(ArgumentError):
            gradients(**wrong)
    gradients()


def test_values_of_another_head_dim_are_right_or_refused(registered):  # noqa: ARG001
    q, k, v = tensors(10, 10, dim_v=32)
    cu = offsets([4, 6])
    if pytorch_varlen._Rules.values_have_their_head_dim:
        assert_agrees(attend(q, k, v, cu, cu, 6, 6)[0], packed(q, k, v, [4, 6], [4, 6])[0])
    else:
        with pytest.raises(UnsupportedError, match="32 where query has 16"):
            attend(q, k, v, cu, cu, 6, 6)


@needs_pages
@with_windows
def test_used_keys_are_the_first_of_each_sequence(way, window):
    lengths_q, slots, used = [2, 3, 1, 4], [8, 8, 8, 8], [5, 8, 0, 6]
    q, k, v = (x.detach() for x in tensors(10, 32, dtype=way))
    with torch.no_grad():
        for number, length in enumerate(used):  # what lies behind them may be anything
            k[8 * number + length : 8 * number + 8] = torch.nan
            v[8 * number + length : 8 * number + 8] = torch.inf
    for _ in range(3):
        out, lse = attend(
            q, k, v, offsets(lengths_q), offsets(slots), 4, 8, window, seqused_k=torch.tensor(used, dtype=torch.int32)
        )
        rows = torch.cat([torch.arange(8 * n, 8 * n + length) for n, length in enumerate(used)])
        want, want_lse, _ = packed(q, k[rows], v[rows], lengths_q, used, **options_of(window))
        assert_agrees(out, want)
        assert_agrees(lse, want_lse)


@needs_pages
def test_used_keys_of_no_sequences_and_of_none(registered):  # noqa: ARG001
    q, k, v = (x.detach() for x in tensors(3, 8))
    none = torch.zeros(2, dtype=torch.int32)
    out, lse = attend(q, k, v, offsets([1, 2]), offsets([4, 4]), 2, 4, seqused_k=none)
    assert not out.any()
    assert (lse == -torch.inf).all()
    out, _ = attend(q, k[:0], v[:0], offsets([1, 2]), offsets([0, 0]), 2, 0, seqused_k=none)
    assert not out.any()
    out, _ = attend(q[:0], k, v, offsets([]), offsets([]), 0, 0, seqused_k=none[:0])
    assert out.shape == (0, 4, 16)


def paged(lengths_kv, *, dtype, page_size=16, heads_kv=2, dim=16):
    """Pages in random order, and the keys and values of each sequence, end to end. Slots of none are NaN."""
    most = max(-(-n // page_size) for n in lengths_kv) or 1
    count = len(lengths_kv) * most + 3
    table = torch.randperm(count)[: len(lengths_kv) * most].view(-1, most).int()
    pages, rows = [], []
    for _ in range(2):
        x = torch.full((count, page_size, heads_kv, dim), torch.nan, dtype=dtype)
        of = [torch.randn(length, heads_kv, dim).to(dtype) for length in lengths_kv]
        for ids, row in zip(table.tolist(), of, strict=True):
            for j, token in enumerate(row):
                x[ids[j // page_size], j % page_size] = token
        pages.append(x)
        rows.append(torch.cat(of))
    return pages, table, rows


MIXES = {
    "one query each": ([1, 1, 1], 1),
    "several queries": ([2, 8, 3], 8),
    "sequences without queries": ([0, 1, 0], 1),
    "mixed": ([3, 1, 16], 16),
    "a prompt without cache": ([0, 20, 1], 20),
}


@pytest.mark.sample(8)
@needs_pages
@with_windows
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("padded", [0, 3], ids=["", "padded"])  # tokens behind the last sequence, and before the first
@pytest.mark.parametrize(("dim", "page_size"), [(16, 16), (16, 5), (264, 16)], ids=str)
def test_pages(way, window, mix, padded, dim, page_size):
    lengths_q, max_q = MIXES[mix]
    lengths_kv = [40, 21, 64]
    (k_pages, v_pages), table, (k, v) = paged(lengths_kv, dtype=way, page_size=page_size, dim=dim)
    lead = padded // 2
    for _ in range(3):
        tokens = lead + sum(lengths_q)
        q = torch.randn(tokens + padded, 4, dim).to(way)
        q[:lead] = q[tokens:] = torch.nan  # rows of no sequence
        given = (q, k_pages, v_pages, offsets(lengths_q) + lead, None, max_q, 64, window)
        used = torch.tensor(lengths_kv, dtype=torch.int32)
        out, lse = attend(*given, seqused_k=used, block_table=table)
        want, want_lse, _ = packed(q[lead:tokens], k, v, lengths_q, lengths_kv, **options_of(window))
        assert_agrees(out[lead:tokens], want)
        assert_agrees(lse[:, lead:tokens], want_lse)
        for rows in (slice(0, lead), slice(tokens, None)):
            assert not out[rows].any()
            assert (lse[:, rows] == -torch.inf).all()


@needs_pages
@pytest.mark.parametrize("dim", [16, 264])
def test_pages_of_sequences_without_keys(way, dim):
    (k_pages, v_pages), table, (k, v) = paged([0, 21], dtype=way, dim=dim)
    q = torch.randn(3, 4, dim).to(way)
    used = torch.tensor([0, 21], dtype=torch.int32)
    for max_q in (2, 12):
        out, lse = attend(q, k_pages, v_pages, offsets([1, 2]), None, max_q, 32, seqused_k=used, block_table=table)
        want, want_lse, _ = packed(q, k, v, [1, 2], [0, 21])
        assert_agrees(out, want)
        assert_agrees(lse, want_lse)
    of_none = attend(q, k_pages, v_pages, offsets([0, 0]), None, 0, 32, seqused_k=used, block_table=table)
    assert not of_none[0].any()
    assert (of_none[1] == -torch.inf).all()
    empty = attend(q[:0], k_pages, v_pages, offsets([0, 0]), None, 0, 32, seqused_k=used, block_table=table)
    assert [x.shape for x in empty] == [(0, 4, dim), (4, 0)]
    out, lse = attend(q, k_pages, v_pages, offsets([1, 2]), None, 2, 0, seqused_k=used * 0, block_table=table[:, :0])
    assert not out.any()
    assert (lse == -torch.inf).all()


@pytest.mark.skipif(not has_out, reason="this PyTorch has no varlen_attn_out")
def test_a_given_output_is_written(way):
    lengths = [5, 0, 7, 8]
    cu = offsets(lengths)
    for _ in range(3):
        q, k, v = (x.detach() for x in tensors(20, 20, dtype=way))
        out = torch.full_like(q, torch.nan)
        version = out._version
        lse = operators._varlen_attn_out(out, q, k, v, cu, cu, 8, 8, True, None, [-1, 0], True)
        want, want_lse, _ = packed(q, k, v, lengths, lengths, **options_of((-1, 0)))
        assert out._version > version
        assert_agrees(out, want)
        assert_agrees(lse, want_lse)


@needs_pages
@pytest.mark.skipif(not has_out, reason="this PyTorch has no varlen_attn_out")
@pytest.mark.parametrize("max_q", [2, 16])
@pytest.mark.parametrize("dim", [16, 264])
def test_a_given_output_is_written_from_pages(way, max_q, dim):
    (k_pages, v_pages), table, (k, v) = paged([30, 21], dtype=way, dim=dim)
    used = torch.tensor([30, 21], dtype=torch.int32)
    for _ in range(3):
        q = torch.randn(3, 4, dim).to(way)
        whole = torch.full((3, 4, 2 * dim), torch.nan, dtype=way)
        out, version = whole[:, :, :dim], whole._version
        given = (out, q, k_pages, v_pages, offsets([1, 2]), None, max_q, 32)
        lse = operators._varlen_attn_out(*given, seqused_k=used, block_table=table)
        want, want_lse, _ = packed(q, k, v, [1, 2], [30, 21])
        assert_agrees(out, want)
        assert_agrees(lse, want_lse)
        assert whole[:, :, dim:].isnan().all()
        assert out._version > version


class Operators(TorchDispatchMode):
    """The names of the operators that run, in order, but for views."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@needs_pages
@pytest.mark.parametrize("max_q", [2, 16])
@pytest.mark.parametrize("into", [False, True], ids=["", "out"])
def test_pages_are_one_operator(way, max_q, into):
    """The other one brings the LSE in PyTorch's order."""
    (k_pages, v_pages), table, _ = paged([30, 21], dtype=way)
    q, used = torch.randn(3, 4, 16).to(way), torch.tensor([30, 21], dtype=torch.int32)
    given = (q, k_pages, v_pages, offsets([1, 2]), None, max_q, 32)
    with Operators() as seen:
        pytorch_varlen._attention(torch.empty_like(q) if into else None, *given, seqused_k=used, block_table=table)
    ours = "cudnn_sdpa::paged_varlen_forward_out" if into else "cudnn_sdpa::paged_varlen_forward_lse"
    assert seen.names == ["aten::empty_like"] * into + [ours, "aten::clone"]


@needs_pages
@pytest.mark.parametrize("dim", [16, 264])
def test_pages_on_a_gpu_without_kernels(dim):
    target = Target((("deviceVer", 750), ("multiProcessorCount", 40)), TARGET.cudnn, TARGET.frontend, "an old GPU")
    (k_pages, v_pages), table, _ = paged([30, 21], dtype=torch.bfloat16, dim=dim)
    q, used = torch.randn(3, 4, dim).bfloat16(), torch.tensor([30, 21], dtype=torch.int32)
    given = (q, k_pages, v_pages, offsets([1, 2]), None, 2, 32)
    with (
        operators_registered("python", target=target),
        pytest.raises(UnsupportedError, match=r"an old GPU .* 7\.5|8\.0"),
    ):
        attend(*given, seqused_k=used, block_table=table)


def test_an_output_over_an_input_is_refused(registered):  # noqa: ARG001
    if not has_out:
        pytest.skip("this PyTorch has no varlen_attn_out")
    q, k, v = (x.detach() for x in tensors(10, 10))
    cu = offsets([4, 6])
    with pytest.raises(ArgumentError, match="overlaps query"):
        varlen.varlen_attn_out(q, q, k, v, cu, cu, 6, 6, **GROUPED)


@pytest.mark.parametrize("layout", ["token-major", "heads apart", "of packed keys and values", "one head"])
def test_results_lie_as_pytorch_promises_compiled_code(registered, layout):  # noqa: ARG001
    q, k, v = (x.detach() for x in tensors(10, 10, heads=1 if layout == "one head" else 4, heads_kv=1))
    if layout == "heads apart":
        q, k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v))
    elif layout == "of packed keys and values":
        q, k, v = (torch.stack([x, x], 1)[:, 0] for x in (q, k, v))
    cu = offsets([4, 6])
    like = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in (q, k, v, cu, cu)]
    results, promised = (operators._varlen_attn(*given, 6, 6) for given in ((q, k, v, cu, cu), like))
    for found, said in zip(results, promised, strict=True):
        assert as_compiled_code_sees(found) == as_compiled_code_sees(said)
    grad_out = torch.randn_like(results[0])
    gradients = operators._varlen_attn_backward(
        grad_out, q, k, v, results[0], results[1], cu, cu, 6, 6, False, results[2]
    )
    for found, tensor in zip(gradients, (q, k, v), strict=True):
        assert as_compiled_code_sees(found) == as_compiled_code_sees(torch.empty_like(tensor))
    if has_pages():
        pages = torch.randn(4, 16, 1, 16)
        table, used = torch.tensor([[0, 2], [1, 3]], dtype=torch.int32), torch.tensor([20, 30], dtype=torch.int32)
        for max_q in (6, 12):
            out, lse = attend(q, pages, pages, cu, None, max_q, 32, seqused_k=used, block_table=table)
            assert [as_compiled_code_sees(out), as_compiled_code_sees(lse)] == [
                as_compiled_code_sees(x) for x in promised[:2]
            ]


def has_pages():
    return "block_table" in str(operators._varlen_attn.default._schema)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_in_one_graph(registered, dynamic):  # noqa: ARG001
    def run(q, k, v, cu):
        return varlen.varlen_attn(q * 2, k, v, cu, cu, 12, 12, window_size=(-1, 0), **GROUPED) * 3

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for lengths in ([5, 0, 7, 8], [12, 3, 1, 2]):
        q, k, v = tensors(sum(lengths), sum(lengths))
        cu = offsets(lengths)
        out, want = compiled(q, k, v, cu), run(q, k, v, cu)
        grad_out = torch.randn_like(out)
        assert_agrees(out, want)
        expected = torch.autograd.grad(want, (q, k, v), grad_out)
        for found, gradient in zip(torch.autograd.grad(out, (q, k, v), grad_out), expected, strict=True):
            assert_agrees(found, gradient)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # of PyTorch's own check
def test_operators_keep_their_promises(registered):  # noqa: ARG001
    q, k, v = tensors(10, 10)
    cu = offsets([4, 6])
    torch.library.opcheck(
        operators._varlen_attn.default,
        (q, k, v, cu, cu, 6, 6, True),
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


def test_autocast_casts_nothing(way):
    dtype = torch.float16 if way == torch.bfloat16 else torch.float32
    q, k, v = tensors(10, 10, dtype=dtype)
    cu = offsets([4, 6])
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            out, _ = attend(q, k, v, cu, cu, 6, 6)
        assert out.dtype == dtype
        assert_agrees(out, packed(q, k, v, [4, 6], [4, 6])[0])


CU = offsets([4, 6])
PAGES = torch.randn(4, 16, 2, 16)
TABLE, USED = torch.tensor([[0, 2], [1, 3]], dtype=torch.int32), torch.tensor([20, 30], dtype=torch.int32)
IN_PAGES = {"key": PAGES, "value": PAGES, "cu_seq_k": None, "max_k": 32, "block_table": TABLE, "seqused_k": USED}


@needs_pages
@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"num_splits": 1}, UnsupportedError, "num_splits=1"),
        ({"window_size": [1, 2, 3]}, OptionError, "window_size"),
        ({"window_size": [-2, 0]}, OptionError, "window_size"),
        ({"cu_seq_k": None}, OptionError, "cu_seq_k"),
        ({"cu_seq_q": CU.long()}, DtypeError, "cu_seq_q: got int64"),
        ({"cu_seq_q": torch.tensor([0, 8, 30], dtype=torch.int32)}, ShapeError, "cu_seq_q"),
        ({"max_q": 3}, ShapeError, "max_q: got 3; expected at least 6"),
        ({"key": torch.randn(10, 2, 24)}, ShapeError, "key: got head dim 24"),
        ({"seqused_k": torch.tensor([5, 6], dtype=torch.int32)}, ShapeError, r"seqused_k: got lengths \[5, 6\]"),
        ({"seqused_k": torch.tensor([4], dtype=torch.int32)}, ShapeError, "seqused_k"),
        ({"seqused_k": torch.tensor([4, 4])}, DtypeError, "seqused_k: got int64"),
        ({**IN_PAGES, "seqused_k": None}, OptionError, "seqused_k: got None"),
        ({**IN_PAGES, "block_table": TABLE.long()}, DtypeError, "block_table: got int64"),
        ({**IN_PAGES, "block_table": TABLE + 3}, ShapeError, "block_table: got page"),
        ({**IN_PAGES, "seqused_k": USED + 20}, ShapeError, "seqused_k"),
        ({**IN_PAGES, "value": PAGES[:, :12]}, ShapeError, "value: got page size 12"),
        ({**IN_PAGES, "value": PAGES[:3]}, ShapeError, "value: got 3 pages"),
        ({**IN_PAGES, "key": PAGES.double()}, DtypeError, "key: got float64"),
        ({**IN_PAGES, "key": PAGES[0]}, ShapeError, "key"),
        ({**IN_PAGES, "query": torch.randn(2, 5, 4, 16)}, ShapeError, "query"),
        ({**IN_PAGES, "max_q": 3}, ShapeError, "max_q"),
    ],
)
def test_bad_input_is_refused_by_pytorchs_names(registered, changed, error, message):  # noqa: ARG001
    q, k, v = (x.detach() for x in tensors(10, 10))
    given = {"query": q, "key": k, "value": v, "cu_seq_q": CU, "cu_seq_k": CU, "max_q": 6, "max_k": 6} | changed
    with pytest.raises(error, match=message):
        operators._varlen_attn(**given)


@needs_pages
def test_pages_have_no_gradient(registered):  # noqa: ARG001
    with pytest.raises(RuntimeError, match="inference-only"):
        attend(
            torch.randn(10, 4, 16, requires_grad=True), PAGES, PAGES, CU, None, 6, 32, seqused_k=USED, block_table=TABLE
        )

"""PyTorch's cuDNN attention operators on this library: values, gradients, layouts, options, refusals."""

from __future__ import annotations

import itertools

import float64_reference as exact
import pytest
import torch
from torch.nn.functional import pad

from cudnn_sdpa import ArgumentError, DtypeError, ShapeError, UnsupportedError, cpu_checks, sdpa
from cudnn_sdpa.integrations import pytorch_dense
from tests.unit.pytorch_operators import WAYS, as_compiled_code_sees, assert_agrees, operators_registered

forward = torch.ops.aten._scaled_dot_product_cudnn_attention
backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward


@pytest.fixture(params=WAYS)
def way(request):
    """The dtype of calls that take one of the ways."""
    with operators_registered(request.param):
        yield torch.float64 if request.param == "reference" else torch.bfloat16


@pytest.fixture
def registered():
    with operators_registered():
        yield


def qkv(batch=2, heads=4, heads_kv=4, sq=24, skv=24, dim=16, dim_v=None, *, dtype=torch.float64, token_major=False):
    """Random q, k and v that require grad."""
    sizes = ((heads, sq, dim), (heads_kv, skv, dim), (heads_kv, skv, dim_v or dim))
    made = (
        torch.randn(batch, s, h, d, dtype=dtype).transpose(1, 2)
        if token_major
        else torch.randn(batch, h, s, d).to(dtype)
        for h, s, d in sizes
    )
    return [x.requires_grad_() for x in made]


def bias_of(q, k, *, shape=None, dtype=torch.float64):
    full = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    return torch.randn(shape or full).to(dtype)


CALLS = {
    "plain": ({}, {}),
    "causal": ({}, {"is_causal": True}),
    "causal, fewer queries": ({"sq": 8}, {"is_causal": True}),
    "causal, fewer keys": ({"skv": 8}, {"is_causal": True}),
    "grouped heads": ({"heads_kv": 2}, {"is_causal": True}),
    "scale": ({}, {"scale": 0.37}),
    "negative scale": ({}, {"scale": -0.2, "is_causal": True}),
    "one query": ({"sq": 1}, {}),
    "one query, causal": ({"sq": 1}, {"is_causal": True}),
    "one key": ({"skv": 1}, {}),
    "other values": ({"dim_v": 32}, {"is_causal": True}),
    "token-major": ({"token_major": True, "heads_kv": 1}, {"is_causal": True}),
    "a bias": ({}, {"bias": None}),
    "a bias for all": ({"heads_kv": 2}, {"bias": (1, 1, 24, 24)}),
    "a bias of keys": ({}, {"bias": (2, 1, 1, 24)}),
    "a bias, causal": ({}, {"bias": None, "is_causal": True}),
}


@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients_are_those_of_float64(way, name):
    sizes, options = CALLS[name]
    for _ in range(3):  # cold, warm, and natively
        q, k, v = qkv(**sizes, dtype=way)
        given = dict(options)
        bias = bias_of(q, k, shape=given.pop("bias"), dtype=way) if "bias" in given else None
        causal, scale = given.get("is_causal", False), given.get("scale")
        out, lse, *_ = forward(q, k, v, bias, True, 0.0, causal, scale=scale)
        grad_out = torch.randn_like(out)
        found = torch.autograd.grad(out, (q, k, v), grad_out)
        masks = {} if bias is None else {"attn_mask": bias}
        want, want_lse, grads = exact.gradients({"q": q, "k": k, "v": v, **masks}, grad_out, **given)
        assert_agrees(out, want)
        assert_agrees(lse.squeeze(-1), want_lse)
        for name_of, gradient in zip("qkv", found, strict=True):
            assert_agrees(gradient, grads[name_of])
        with torch.no_grad():
            assert_agrees(forward(q, k, v, bias, False, 0.0, causal, scale=scale)[0], want)


def test_a_boolean_bias_masks(way):
    q, k, v = qkv(dtype=way)
    mask = torch.rand(2, 4, 24, 24) > 0.4
    mask[0, 0, 3] = False  # sees nothing
    out, lse, *_ = forward(q, k, v, mask, True)
    want, want_lse = exact.attend(q, k, v, attn_mask=mask)
    assert_agrees(out, want)
    assert_agrees(lse.squeeze(-1), want_lse)
    assert lse[0, 0, 3] == -torch.inf


@pytest.mark.parametrize("needed", [x for n in (1, 2, 3) for x in itertools.combinations("qkv", n)], ids="".join)
def test_gradients_of_any_of_the_inputs(way, needed):
    tensors = dict(zip("qkv", qkv(dtype=way), strict=True))
    given = {name: x if name in needed else x.detach() for name, x in tensors.items()}
    out = forward(*given.values(), None, True, 0.0, True)[0]
    grad_out = torch.randn_like(out)
    *_, grads = exact.gradients(tensors, grad_out, is_causal=True)
    for name, gradient in zip(
        needed, torch.autograd.grad(out, [given[name] for name in needed], grad_out), strict=True
    ):
        assert_agrees(gradient, grads[name])


def test_dropout_gives_its_gradients_the_same_random_numbers(way):
    q, k, v = qkv(skv=16, dtype=way)
    p = 0.3

    def run(values):
        torch.manual_seed(5)
        return forward(q, k, values, None, True, p, True)

    identity = torch.eye(16, dtype=way).expand(2, 4, 16, 16).contiguous()
    kept = run(identity)[0] != 0
    kept |= ~exact.seen_keys(2, 24, 16, {"is_causal": True})
    assert 0.55 < kept.double().mean() < 0.9
    results = run(v)
    seed, offset = results[6:8]
    assert (seed.shape, seed.dtype, offset.shape, offset.dtype) == ((), torch.int64, (), torch.int64)
    grad_out = torch.randn_like(results[0])
    want, _, grads = exact.gradients({"q": q, "k": k, "v": v}, grad_out, kept=kept, dropout_p=p, is_causal=True)
    assert_agrees(results[0], want)
    for name, gradient in zip("qkv", torch.autograd.grad(results[0], (q, k, v), grad_out), strict=True):
        assert_agrees(gradient, grads[name])
    given = (grad_out, q, k, v, *(x.detach() for x in results[:2]))
    with torch.no_grad():
        again, other = (
            backward(*given, number, offset, None, None, None, 24, 16, p, True)[2] for number in (seed, seed + 1)
        )
    assert_agrees(again, grads["v"])
    assert (other - again).abs().max() > 0.1


def test_dropout_follows_the_generator(registered):  # noqa: ARG001
    q, k, v = (x.detach() for x in qkv())
    torch.manual_seed(1)
    first = forward(q, k, v, None, False, 0.5)[0]
    second = forward(q, k, v, None, False, 0.5)[0]
    torch.manual_seed(1)
    assert torch.equal(first, forward(q, k, v, None, False, 0.5)[0])
    assert not torch.equal(first, second)


def test_gradients_of_a_part_of_the_keys(way):
    """As ring attention asks for them: the output and the LSE are those of all keys."""
    q, k, v = (x.detach() for x in qkv(dtype=way))
    out, lse, *_ = forward(q, k, v, None, True)
    grad_out = torch.randn_like(out)
    *_, grads = exact.gradients({"q": q, "k": k, "v": v}, grad_out)
    zero = torch.zeros((), dtype=torch.int64)
    parts = [
        backward(grad_out, q, k[:, :, part], v[:, :, part], out, lse, zero, zero, None, None, None, 24, 12, 0.0, False)
        for part in (slice(0, 12), slice(12, 24))
    ]
    assert_agrees(parts[0][0] + parts[1][0], grads["q"])
    assert_agrees(torch.cat([parts[0][1], parts[1][1]], 2), grads["k"])
    assert_agrees(torch.cat([parts[0][2], parts[1][2]], 2), grads["v"])


LAYOUTS = {
    "heads apart": lambda x: x,
    "token-major": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "of packed projections": lambda x: torch.stack([x, x], 2)[:, :, 0],
    "batch inside": lambda x: x.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3),
    "a part of a batch": lambda x: torch.cat([x, x])[: x.shape[0]],
    "a part of the tokens": lambda x: pad(x, (0, 0, 0, 8))[:, :, : x.shape[2]],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sizes", [{}, {"batch": 1}, {"heads": 1, "heads_kv": 1}, {"sq": 1}, {"dim_v": 8}], ids=str)
def test_results_lie_as_pytorch_promises_compiled_code(registered, layout, sizes):  # noqa: ARG001
    q, k, v = (LAYOUTS[layout](x.detach()) for x in qkv(**sizes))
    with torch.device("meta"):
        like = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) for x in (q, k, v)]
    results, promised = forward(q, k, v, None, True), forward(*like, None, True)
    for found, said in zip(results, promised, strict=True):
        assert as_compiled_code_sees(found) == as_compiled_code_sees(said)
    without = forward(q, k, v, None, False)
    assert [as_compiled_code_sees(x) for x in without] == [as_compiled_code_sees(x) for x in promised]
    grad_out = torch.randn_like(results[0])
    rest = (results[6], results[7], None, None, None, q.shape[2], k.shape[2], 0.0, False)
    gradients = backward(grad_out, q, k, v, *results[:2], *rest)
    for found, tensor in zip(gradients, (q, k, v), strict=True):
        assert as_compiled_code_sees(found) == as_compiled_code_sees(torch.empty_like(tensor))


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"sq": 0}, {"skv": 0}, {"batch": 0, "sq": 0}], ids=str)
def test_empty_calls(way, sizes):
    q, k, v = qkv(**sizes, dtype=way)
    out, lse, *_ = forward(q, k, v, None, True, 0.0, True)
    assert out.shape == q.shape
    assert lse.shape == (*q.shape[:3], 1)
    assert not out.any()
    assert (lse == -torch.inf).all()
    for gradient, x in zip(torch.autograd.grad(out.sum(), (q, k, v)), (q, k, v), strict=True):
        assert gradient.shape == x.shape
        assert not gradient.any()


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_in_one_graph(registered, backend):  # noqa: ARG001
    def attend(q, k, v):
        return forward(q * 2, k, v, None, True, 0.0, True)[0] * 3

    for sizes in ({}, {"sq": 16, "token_major": True}):
        q, k, v = qkv(**sizes)
        out = torch.compile(attend, backend=backend, fullgraph=True)(q, k, v)
        grad_out = torch.randn_like(out)
        want, expected = attend(q, k, v), torch.autograd.grad(attend(q, k, v), (q, k, v), grad_out)
        torch.testing.assert_close(out, want)
        for found, gradient in zip(torch.autograd.grad(out, (q, k, v), grad_out), expected, strict=True):
            torch.testing.assert_close(found, gradient, atol=1e-6, rtol=1e-5)


def test_autocast_casts_no_argument_of_an_operator(way):
    """What autocast casts, it has cast before the operator; the results have the dtype that PyTorch promises."""
    dtype = torch.float32 if way == torch.float64 else torch.float16
    q, k, v = qkv(dtype=dtype)
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            out = forward(q, k, v, None, True)[0]
        assert out.dtype == dtype
        assert_agrees(out, exact.attend(q, k, v)[0])
        assert [x.dtype for x in torch.autograd.grad(out.sum(), (q, k, v))] == [dtype] * 3


def test_plans_are_deterministic_where_pytorch_is(registered, monkeypatch):  # noqa: ARG001
    seen = []
    whole = pytorch_dense._call
    monkeypatch.setattr(pytorch_dense, "_call", lambda *a, **k: seen.append(whole(*a, **k)) or seen[-1])
    q, k, v = qkv()
    torch.use_deterministic_algorithms(True)
    try:
        forward(q, k, v, None, True)[0].sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    forward(q, k, v, None, True)[0].sum().backward()
    assert [call.softmax.deterministic for call in seen] == [True, True, False, False]


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"return_debug_mask": True}, UnsupportedError, "return_debug_mask"),
        ({"key": torch.randn(2, 4, 24, 8)}, ShapeError, "key: got head dim 8"),
        ({"key": torch.randn(2, 3, 24, 16), "value": torch.randn(2, 3, 24, 16)}, ShapeError, "key: got 3 heads"),
        ({"query": torch.randn(4, 24, 16)}, ShapeError, "query"),
        ({"value": torch.randn(2, 4, 24, 16, dtype=torch.float64)}, DtypeError, "value: got float64"),
        ({"attn_bias": torch.randn(5, 24)}, ShapeError, "attn_bias"),
        ({"attn_bias": torch.zeros(24, 24, dtype=torch.int64)}, DtypeError, "attn_bias"),
        ({"dropout_p": 1.5}, ArgumentError, "dropout_p"),
        ({"scale": float("nan")}, ArgumentError, "scale"),
    ],
)
def test_bad_input_is_refused_by_pytorchs_names(registered, changed, error, message):  # noqa: ARG001
    query = key = value = torch.randn(2, 4, 24, 16)
    given = {"query": query, "key": key, "value": value, "attn_bias": None, "compute_log_sumexp": True} | changed
    with pytest.raises(error, match=message):
        forward(**given)


@pytest.mark.parametrize(
    ("place", "tensor", "message"),
    [
        (0, torch.randn(2, 4, 23, 16), "grad_out"),
        (0, torch.randn(2, 4, 24, 16, dtype=torch.float64), "grad_out: got float64"),
        (4, torch.randn(2, 4, 24, 8), "out"),
        (5, torch.randn(2, 4, 23, 1), "logsumexp"),
        (5, torch.randn(2, 4, 24, 1, dtype=torch.float64), "logsumexp"),
        (9, torch.zeros(3, dtype=torch.int32), "cum_seq_q"),
    ],
)
def test_wrong_results_of_a_forward_pass_reach_no_kernel(registered, place, tensor, message):  # noqa: ARG001
    q = k = v = torch.randn(2, 4, 24, 16)
    out, lse, *_ = forward(q, k, v, None, True)
    zero = torch.zeros((), dtype=torch.int64)
    given = [torch.randn_like(out), q, k, v, out, lse, zero, zero, None, None, None, 24, 24, 0.0, False]
    given[place] = tensor
    with pytest.raises((ArgumentError, UnsupportedError), match=message):
        backward(*given)


def test_missing_random_numbers_of_dropout_are_refused(registered):  # noqa: ARG001
    q = k = v = torch.randn(2, 4, 24, 16)
    out, lse, *_ = forward(q, k, v, None, True)
    with pytest.raises(ArgumentError, match="philox"):
        backward(torch.randn_like(out), q, k, v, out, lse, None, None, None, None, None, 24, 24, 0.5, False)


def test_the_forward_pass_refuses_what_has_no_gradient(registered):  # noqa: ARG001
    with cpu_checks("a100"):
        q, k, v = qkv(dim=256, dtype=torch.bfloat16)
        with pytest.raises(UnsupportedError) as ours:
            sdpa(q, k, v)
        with pytest.raises(UnsupportedError, match="gradients have no kernel for head dims 256") as theirs:
            forward(q, k, v, None, True)
        assert theirs.value.reasons == ours.value.reasons
        with torch.no_grad():
            assert forward(q, k, v, None, True)[0].shape == q.shape


def test_known_calls_are_launched_natively():
    with operators_registered("native"):
        q, k, v = qkv(dtype=torch.bfloat16)
        for known in (0, 1, 1):
            out = forward(q, k, v, None, True, 0.0, True)[0]
            assert len(pytorch_dense._calls) == known
        assert_agrees(out, exact.attend(q, k, v, is_causal=True)[0])
        out.sum().backward()
        *_, grads = exact.gradients({"q": q, "k": k, "v": v}, torch.ones_like(out), is_causal=True)
        assert_agrees(q.grad, grads["q"])


def test_without_it_nothing_is_there():
    q = k = v = torch.randn(1, 1, 8, 8)
    with pytest.raises(NotImplementedError):
        forward(q, k, v, None, False)


def of_aten(q, k, v, bias=None, **options):
    """What `F.scaled_dot_product_attention` does on a GPU: it asks for an LSE if an input requires grad."""
    with_lse = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    return forward(q, k, v, bias, with_lse, 0.0, True, **options)[0]


def fill_free_memory():
    """As in any program: what is allocated next is not zero."""
    made = [torch.full((2, 4, 8), 7.0) for _ in range(50)]
    del made


def compiled(f):
    return torch.compile(f, backend="aot_eager")


def exported(f, *example):
    return torch.export.export(_Module(f), example).module()


class _Module(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *given):
        return self.function(*given)


def by_vmap(f, xs, w):
    return torch.vmap(f, (0, None))(xs, w).sum()


#: Ways to the gradient of a loss by its weights, that of all examples.
DIFFERENTIATED = {
    "a loop": lambda f, xs, w: torch.autograd.grad(sum(f(x, w) for x in xs), w)[0],
    "vmap": lambda f, xs, w: torch.autograd.grad(by_vmap(f, xs, w), w)[0],
    "func.grad": lambda f, xs, w: torch.func.grad(lambda w: by_vmap(f, xs, w))(w.detach()),
    "compiled vmap": lambda f, xs, w: torch.autograd.grad(compiled(lambda xs, w: by_vmap(f, xs, w))(xs, w), w)[0],
    "exported": lambda f, xs, w: torch.autograd.grad(sum(exported(f, xs[0], w.detach())(x, w) for x in xs), w)[0],
    "exported, compiled": lambda f, xs, w: torch.autograd.grad(
        sum(compiled(exported(f, xs[0], w.detach()))(x, w) for x in xs), w
    )[0],
}


@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_gradients_read_no_lse_that_nobody_wrote(way, name):
    """PyTorch does not ask for an LSE where it sees no input that requires grad, and autograd saves it all the same."""
    xs = torch.randn(3, 2, 4, 8, 16).to(way)
    w = torch.ones(16, dtype=way, requires_grad=True)
    doubles = xs.double(), w.detach().double().requires_grad_()

    def loss(x, w):
        return of_aten(x * w, x, x).float().square().sum()

    def exact_loss(x, w):
        return exact.attention(x * w, x, x, is_causal=True).out.square().sum()

    wanted = torch.autograd.grad(sum(exact_loss(x, doubles[1]) for x in doubles[0]), doubles[1])[0]
    fill_free_memory()
    found = DIFFERENTIATED[name](loss, xs, w)
    assert (found - wanted).norm() < 3e-2 * wanted.norm()


def test_inference_mode_computes_no_lse(way, monkeypatch):
    q, k, v = (x.detach() for x in qkv(dtype=way))
    asked = []
    of = pytorch_dense._attention
    monkeypatch.setattr(pytorch_dense, "_attention", lambda x, *rest: asked.append(x[4]) or of(x, *rest))
    for context in (torch.inference_mode, torch.no_grad):
        with context():
            forward(q, k, v, None, False)
    assert asked == [False, True]

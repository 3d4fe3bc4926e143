"""Modules on the GPU: caches, CUDA graphs, compile, autocast, synchronization. `generators` has values of each."""

from __future__ import annotations

import copy

import pytest
import torch
from attention_checks import nothing_synchronizes
from module_values import difference, gradients_in_float64, in_float64, randomize

import cudnn_sdpa
from cudnn_sdpa import DtypeError, PagedKVCache, UnsupportedError
from cudnn_sdpa.nn import (
    KVCache,
    RotaryEmbedding,
    TransformerLayer,
)

DEVICE = "cuda"
#: bfloat16 has 8 bits, and the output of a layer has been rounded a dozen times.
TOLERANCE = 2e-2
BF16 = {"device": DEVICE, "dtype": torch.bfloat16}


def rope(head_dim=64, **options):
    return RotaryEmbedding(head_dim, device=DEVICE, **options)


def make_layers(number, **options):
    """LLaMA layers that share a rotary embedding."""
    shared = rope()
    options = {"num_kv_heads": 2, "head_dim": 64, "is_causal": True, "rope": shared, **BF16, **options}
    return torch.nn.ModuleList(randomize(TransformerLayer(256, 4, 512, **options)) for _ in range(number)), shared


def exact_stack(layers, x):
    return in_float64(torch.nn.Sequential(*layers), x)


def numbers(*shape):
    return torch.randn(*shape, **BF16)


def test_a_float32_module_raises_and_runs_under_autocast():
    module = randomize(TransformerLayer(256, 4, 512, num_kv_heads=2, is_causal=True, rope=rope(), device=DEVICE))
    x = torch.randn(2, 100, 256, device=DEVICE)
    with pytest.raises((DtypeError, UnsupportedError), match="float32"):
        module(x)
    leaf = x.clone().requires_grad_()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = module(leaf)
    assert out.dtype == torch.float32
    assert difference(out, in_float64(module, x)) < TOLERANCE
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, [leaf, *module.parameters()], grad)
    wanted = gradients_in_float64(module, x, grad=grad)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == torch.float32
        assert difference(one, other) < 2 * TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize(
    "options",
    [{}, {"window_size": (20, 0)}, {"sinks": True}, {"window_size": (20, 0), "sinks": True}],
    ids=lambda options: "+".join(options) or "plain",
)
@pytest.mark.parametrize("kind", ["static", "paged"])
def test_steps_match_the_whole_sequences(options, kind):
    layers, shared = make_layers(2, **options)
    layers.eval()
    x = numbers(3, 100, 256)
    if kind == "static":
        cache = KVCache(batch=3, heads=2, head_dim=64, max_length=128, layers=2)
        reserve = cache.reserve
    else:
        cache = PagedKVCache(pages=64, page_size=16, heads=2, head_dim=64, layers=2)
        sequences = [cache.add() for _ in range(3)]
        reserve = lambda tokens: cache.reserve(sequences, tokens)  # noqa: E731
    found = []
    for part in x.split([60, 20, *(1,) * 20], dim=1):
        step, y = reserve(part.shape[1]), part
        rotations = shared(step.positions)
        for number, layer in enumerate(layers):
            y = layer(y, step=step, layer=number, rotations=rotations)
        found.append(y)
    assert difference(torch.cat(found, dim=1), exact_stack(layers, x)) < TOLERANCE


@torch.no_grad()
def test_prompts_of_different_lengths_on_a_static_cache():
    layers, _ = make_layers(1)
    module, x, lengths = layers[0].eval(), numbers(3, 60, 256), [50, 7, 23]
    cache = KVCache(batch=3, heads=2, head_dim=64, max_length=64)
    found = [module(x[:, :50], step=cache.reserve(50, torch.tensor(lengths, dtype=torch.int32, device=DEVICE)))]
    for number in range(8):
        rows = torch.stack([x[row, length + number] for row, length in enumerate(lengths)])
        found.append(module(rows[:, None], step=cache.reserve()))
    for row, length in enumerate(lengths):
        whole = exact_stack(layers, x[row : row + 1, : length + 8])[0]
        assert difference(found[0][row, :length], whole[:length]) < TOLERANCE
        assert difference(torch.cat([part[row] for part in found[1:]]), whole[length:]) < TOLERANCE


@torch.no_grad()
def test_one_cuda_graph_decodes_all_positions():
    layers, _ = make_layers(2)
    layers.eval()
    x = numbers(2, 90, 256)
    cache = KVCache(batch=2, heads=2, head_dim=64, max_length=80, layers=2)
    token = numbers(2, 1, 256)

    def decode(y):
        step = cache.reserve(y.shape[1])
        for number, layer in enumerate(layers):
            y = layer(y, step=step, layer=number)
        return y

    decode(token)  # builds the plans
    cache.reset()
    prompt = decode(x[:, :50])
    lengths = cache.lengths.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode(token)
    cache.lengths.copy_(lengths)
    found = [prompt]
    torch.cuda.synchronize()
    for position in range(50, 80):
        token.copy_(x[:, position : position + 1])
        graph.replay()
        found.append(out.clone())
    assert cache.lengths.tolist() == [80, 80]
    assert difference(torch.cat(found, dim=1), exact_stack(layers, x[:, :80])) < TOLERANCE
    for _ in range(2):  # one token too many gives NaN there, and affects nothing else
        graph.replay()
        assert out.isnan().all()
    cache.reset()
    token.copy_(x[:, :1])
    graph.replay()
    assert difference(out, exact_stack(layers, x[:, :1])) < TOLERANCE


@torch.no_grad()
def test_a_warm_step_does_not_synchronize():
    layers, _ = make_layers(2)
    layers.eval()
    cache = KVCache(batch=2, heads=2, head_dim=64, max_length=80, layers=2)
    parts = [numbers(2, 1, 256) for _ in range(6)]

    def decode(y):
        step = cache.reserve()
        for number, layer in enumerate(layers):
            y = layer(y, step=step, layer=number)
        return y

    found = [decode(part) for part in parts[:3]]
    torch.cuda.synchronize()
    with nothing_synchronizes(), cudnn_sdpa.no_plan_builds():
        found += [decode(part) for part in parts[3:]]
    assert difference(torch.cat(found, dim=1), exact_stack(layers, torch.cat(parts, dim=1))) < TOLERANCE


def test_compiled_layers_with_gradients():
    torch._dynamo.reset()
    layers, shared = make_layers(2)

    @torch.compile(fullgraph=True)
    def run(x, positions):
        rotations = shared(positions)
        for layer in layers:
            x = layer(x, rotations=rotations)
        return x

    for start in (0, 100):
        x = numbers(2, 96, 256).requires_grad_()
        out = run(x, torch.arange(start, start + 96, device=DEVICE))
        stack = torch.nn.Sequential(*layers)
        assert difference(out, in_float64(stack, x)) < TOLERANCE
        grad = torch.randn_like(out)
        found = torch.autograd.grad(out, [x, *layers.parameters()], grad)
        for one, other in zip(found, gradients_in_float64(stack, x, grad=grad), strict=True):
            assert difference(one, other) < 2 * TOLERANCE
    torch._dynamo.reset()


@torch.no_grad()
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_one_compiled_step_serves_all_positions(mode):
    torch._dynamo.reset()
    layers, _ = make_layers(2)
    layers.eval()
    cache = KVCache(batch=2, heads=2, head_dim=64, max_length=32, layers=2)

    def decode(y):
        step = cache.reserve()
        for number, layer in enumerate(layers):
            y = layer(y, step=step, layer=number)
        return y

    compiled = torch.compile(decode, fullgraph=True, mode=mode)
    x = numbers(2, 20, 256)
    found = [compiled(x[:, i : i + 1].clone()).clone() for i in range(20)]
    assert difference(torch.cat(found, dim=1), exact_stack(layers, x)) < TOLERANCE
    torch._dynamo.reset()


def test_conversion_of_pytorchs_layer():
    theirs = torch.nn.TransformerEncoderLayer(256, 4, 512, 0.0, "gelu", batch_first=True, norm_first=True, **BF16)
    for parameter in theirs.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=0.5)
    module = TransformerLayer.from_torch(theirs)
    assert next(module.parameters()).device.type == DEVICE
    x = numbers(2, 100, 256)
    expected = copy.deepcopy(theirs).double()(x.double())
    assert difference(module(x), expected) < TOLERANCE
    assert difference(theirs(x), expected) < TOLERANCE


def shorten(cache, tokens):
    cache.lengths -= tokens


FORGET = {
    "reset": lambda cache, _: cache.reset(),
    "cancel": lambda cache, step: cache.cancel(step),
    "truncate": lambda cache, _: cache.truncate(torch.zeros_like(cache.lengths)),
    "in place": lambda cache, _: cache.lengths.zero_(),
    "-=": lambda cache, _: shorten(cache, 250),
}


@torch.no_grad()
@pytest.mark.parametrize("forget", FORGET)
def test_an_overflow_ends_with_its_tokens(forget):
    """NaN and infinity in truncated keys and values of a static cache reach no result, without synchronization."""
    cache = KVCache(batch=2, heads=2, head_dim=64, max_length=300, dtype=torch.bfloat16, device=DEVICE)
    for number in (float("nan"), float("inf")):
        for tokens in (1, 20):
            step = cache.reserve(250)
            new = torch.full((2, 2, 250, 64), number, dtype=torch.bfloat16, device=DEVICE)
            cache.append(step, new, new)
            with nothing_synchronizes():
                FORGET[forget](cache, step)
                step = cache.reserve(tokens)
            q, k, v = torch.randn(3, 2, 2, tokens, 64, dtype=torch.bfloat16, device=DEVICE)
            cache.append(step, k, v)
            found = cache.attend(step, q).double()
            causal = torch.ones(tokens, tokens, device=DEVICE).tril().log()
            expected = (q.double() @ k.double().mT * 0.125 + causal).softmax(-1) @ v.double()
            assert (found - expected).norm() < 1e-2 * expected.norm()
            cache.reset()


def one_token():
    """A cache, the tensors of a token, and a step of them, whose plan is built."""
    cache = KVCache(batch=2, heads=2, head_dim=64, max_length=300, dtype=torch.bfloat16, device=DEVICE)
    q, k, v = torch.randn(3, 2, 2, 1, 64, dtype=torch.bfloat16, device=DEVICE)

    def decode():
        step = cache.reserve()
        cache.append(step, k, v)
        return cache.attend(step, q)

    decode()
    return cache, (q, k, v), decode


@torch.no_grad()
@pytest.mark.parametrize("forget", ["reset", "truncate", "-="])
def test_an_overflow_between_replays_ends_with_its_tokens(forget):
    """A captured step clears nothing; shortening lengths between two replays does."""
    cache, (q, k, v), decode = one_token()
    cache.reset()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode()
    cache.reset()
    for number in (float("nan"), float("inf")):
        step = cache.reserve(250)
        new = torch.full((2, 2, 250, 64), number, dtype=torch.bfloat16, device=DEVICE)
        cache.append(step, new, new)
        graph.replay()
        assert out.isnan().all()
        if forget == "-=":
            shorten(cache, 251)
        else:
            FORGET[forget](cache, step)
        for tensor in (q, k, v):
            tensor.copy_(torch.randn_like(tensor))
        graph.replay()
        assert cache.lengths.tolist() == [1, 1]
        assert torch.equal(out, v)
        cache.reset()


@torch.no_grad()
def test_in_place_lengths_before_a_capture_do_not_clear_in_each_replay():
    cache, _, decode = one_token()
    cache.lengths.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode()
    cache.v()[:, :, 200:] = 7
    graph.replay()
    assert (cache.v()[:, :, 200:] == 7).all()
    decode()  # outside of the graph in-place writes are noticed
    assert not cache.v()[:, :, 200:].any()

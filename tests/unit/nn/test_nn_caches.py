"""Modules with KV caches: decoding matches the whole sequence, and invalid steps are refused."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from module_values import in_float64, randomize
from torch import nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

from cudnn_sdpa import ArgumentError, DtypeError, OptionError, PagedKVCache, ShapeError, UnsupportedError, sdpa
from cudnn_sdpa.engine import value_checks
from cudnn_sdpa.nn import Attention, KVCache, RotaryEmbedding, TransformerLayer

OPTIONS = [
    {},
    {"window_size": (3, 0)},
    {"rope": RotaryEmbedding(16), "num_kv_heads": 2},
    {"rope": RotaryEmbedding(16, interleaved=True), "num_kv_heads": 1, "window_size": (4, 0), "sinks": True},
    {"softcap": 2.0, "bias": True, "scale": 0.4, "num_kv_heads": 2},
    {"sinks": True, "qkv_bias": True},
]


def make(**options):
    return randomize(Attention(64, 4, head_dim=16, is_causal=True, **options)).eval()


def static(module, batch=2, max_length=24, **options):
    sizes = {"heads": module.num_kv_heads, "head_dim": module.head_dim, "dtype": torch.float32, "device": "cpu"}
    return KVCache(batch=batch, max_length=max_length, **sizes, **options)


def paged(module, **options):
    sizes = {"heads": module.num_kv_heads, "head_dim": module.head_dim, "dtype": torch.float32, "device": "cpu"}
    return PagedKVCache(pages=16, page_size=4, **sizes, **options)


def assert_close(found, expected):
    torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.usefixtures("reference_alone")
@torch.no_grad()
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options) or "plain")
@pytest.mark.parametrize("chunks", [(5, 1, 1, 1, 3, 1), (1,) * 12, (12,), (2, 10)], ids=str)
@pytest.mark.parametrize("kind", ["static", "paged"])
def test_steps_match_the_whole_sequence(options, chunks, kind):
    module, x = make(**options), torch.randn(2, 12, 64)
    if kind == "static":
        cache = static(module, max_length=12)  # which is then full
        reserve = cache.reserve
    else:
        cache = paged(module)
        numbers = [cache.add(), cache.add()]
        reserve = lambda tokens: cache.reserve(numbers, tokens)  # noqa: E731
    found = [module(part, step=reserve(part.shape[1])) for part in x.split(chunks, dim=1)]
    assert_close(torch.cat(found, dim=1), in_float64(module, x))


@pytest.mark.usefixtures("reference_alone")
@torch.no_grad()
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options) or "plain")
@pytest.mark.parametrize("kind", ["static", "paged"])
def test_sequences_of_different_lengths(options, kind):
    module, x, lengths = make(**options), torch.randn(3, 11, 64), [5, 8, 1]
    if kind == "static":
        cache = static(module, 3)
        step = cache.reserve(8, torch.tensor(lengths, dtype=torch.int32))
        more = [cache.reserve for _ in range(3)]
    else:
        cache = paged(module)
        numbers = [cache.add() for _ in range(3)]
        step = cache.reserve(numbers, lengths)
        more = [lambda: cache.reserve(numbers)] * 3
    found = [module(x[:, :8], step=step)]
    for number, reserve in enumerate(more):
        rows = torch.stack([x[row, length + number] for row, length in enumerate(lengths)])
        found.append(module(rows[:, None], step=reserve()))
    for row, length in enumerate(lengths):
        whole = in_float64(module, x[row : row + 1, : length + 3])[0]
        assert_close(found[0][row, :length], whole[:length])
        assert_close(torch.cat([part[row] for part in found[1:]]), whole[length:])


@torch.no_grad()
@pytest.mark.parametrize("kind", ["static", "paged"])
def test_a_stack_of_layers_shares_a_cache_and_its_rotations(kind):
    rope = RotaryEmbedding(16)
    layers = nn.ModuleList(
        randomize(TransformerLayer(64, 4, 96, num_kv_heads=2, is_causal=True, rope=rope)) for _ in range(3)
    ).eval()
    attention, x = layers[0].self_attn, torch.randn(2, 9, 64)
    cache = (static if kind == "static" else paged)(attention, layers=3)
    numbers = [] if kind == "static" else [cache.add(), cache.add()]
    found = []
    for part in x.split([4, 1, 1, 3], dim=1):
        tokens = part.shape[1]
        step = cache.reserve(tokens) if kind == "static" else cache.reserve(numbers, tokens)
        rotations = rope(step.positions)
        for number, layer in enumerate(layers):
            part = layer(part, step=step, layer=number, rotations=rotations)  # noqa: PLW2901
        found.append(part)
    expected = x.double()
    for layer in layers:
        expected = in_float64(layer, expected)
    assert_close(torch.cat(found, dim=1), expected)


@pytest.mark.usefixtures("reference_alone")
@torch.no_grad()
def test_masks_on_a_static_cache():
    module, x = make(num_kv_heads=2), torch.randn(2, 9, 64)
    cache = static(module)
    padded_left = torch.arange(24) >= torch.tensor([[3], [0]])
    step = cache.reserve(9)
    found = module(x, step=step, attn_mask=padded_left[:, None, None])
    expected = in_float64(module, x, attn_mask=padded_left[:, None, None, :9])
    assert_close(found[0, 3:], expected[0, 3:])
    assert_close(found[1], expected[1])


@torch.no_grad()
def test_reset_and_shorter_lengths():
    module, x = make(rope=RotaryEmbedding(16)), torch.randn(2, 9, 64)
    cache = static(module)
    module(torch.randn(2, 6, 64), step=cache.reserve(6))
    cache.reset()
    module(x[:, :5], step=cache.reserve(5))
    module(torch.randn(2, 3, 64), step=cache.reserve(3))  # drafts
    cache.lengths.fill_(5)
    assert_close(module(x[:, 5:], step=cache.reserve(4)), in_float64(module, x)[:, 5:])


@pytest.mark.parametrize("compiled", [False, True])
@torch.no_grad()
def test_lengths_are_written_in_place(compiled):
    def forget(cache):
        cache.lengths -= 1

    cache = static(make(), max_length=8)
    cache.lengths += 3
    lengths = cache.lengths
    (torch.compile(forget, backend="eager", fullgraph=True) if compiled else forget)(cache)
    assert cache.lengths.tolist() == [2, 2]
    with pytest.raises(OptionError, match="lengths: got another tensor"):
        cache.lengths = torch.zeros(2, dtype=torch.int32)
    assert cache.lengths is lengths


@torch.no_grad()
def test_a_full_cache_says_so():
    module = make()
    cache = static(module, max_length=8)
    module(torch.randn(2, 6, 64), step=cache.reserve(6))
    with pytest.raises(OptionError, match=r"tokens: got 3 after 6; expected at most max_length \(8\) tokens in total"):
        cache.reserve(3)
    assert cache.lengths.tolist() == [6, 6], "something was taken"
    with pytest.raises(OptionError, match="seq_lens: got list"):
        cache.reserve(1, [1, 1])
    with pytest.raises(OptionError, match="seq_lens"):
        cache.reserve(1, torch.tensor([1, 2], dtype=torch.int32))
    step = cache.reserve(2, torch.tensor([2, 1], dtype=torch.int32))
    assert step.positions.tolist() == [[6, 7], [6, 7]]
    assert cache.lengths.tolist() == [8, 7]


@torch.no_grad()
def test_a_full_cache_gives_nan_where_lengths_are_not_checked(monkeypatch):
    """A sequence that becomes too long writes no rows, not even those that there would be room for."""
    module, x = make(num_kv_heads=2), torch.randn(2, 9, 64)
    cache = static(module, max_length=8)
    module(x[:, :5], step=cache.reserve(5, torch.tensor([5, 3], dtype=torch.int32)))
    before = cache.k().clone(), cache.v().clone()
    monkeypatch.setattr(cache, "_check_room", lambda *_: None)  # as on a GPU
    monkeypatch.setattr(value_checks, "check_lengths", lambda *_: None)
    over = module(x[:, 5:], step=cache.reserve(4))
    assert over[0].isnan().all()
    again = torch.cat([x[1:, :3], x[1:, 5:]], dim=1)
    assert_close(over[1], in_float64(module, again)[0, 3:])
    for rows, old in zip((cache.k(), cache.v()), before, strict=True):
        assert torch.equal(rows[0], old[0])
        assert rows[1, :, 3:7].ne(old[1, :, 3:7]).all()


@torch.no_grad()
def test_an_overflowing_step_leaves_no_nan_after_reset(monkeypatch):
    layers = [make(), make()]
    cache = static(layers[0], max_length=8, layers=2)

    def run(x, step):
        for number, layer in enumerate(layers):
            x = layer(x, step=step, layer=number)
        return x

    monkeypatch.setattr(cache, "_check_room", lambda *_: None)  # as on a GPU
    monkeypatch.setattr(value_checks, "check_lengths", lambda *_: None)
    run(torch.randn(2, 6, 64), cache.reserve(6))
    assert run(torch.randn(2, 4, 64), cache.reserve(4)).isnan().all()
    cache.reset()
    x = torch.randn(2, 5, 64)
    assert_close(run(x, cache.reserve(5)), layers[1](layers[0](x)).double())


def test_sinks_get_gradients_with_frozen_keys():
    module, x = make(sinks=True), torch.randn(2, 9, 64)
    module.qkv_proj.requires_grad_(False)
    step = static(module).reserve(9)
    found = torch.autograd.grad(module(x, step=step).square().mean(), module.sinks)[0]
    expected = torch.autograd.grad(module(x).square().mean(), module.sinks)[0]
    assert_close(found, expected.double())


def test_invalid_steps_are_refused():
    module, x = make(), torch.randn(2, 3, 64)
    cache = static(module)
    with torch.no_grad():
        step = cache.reserve(3)
        for tensors, options, kind, name in [
            ((x[:, :2],), {"step": step}, ShapeError, "x"),
            ((x,), {"step": step, "seq_lens": torch.ones(2, dtype=torch.int32)}, OptionError, "seq_lens"),
            ((x,), {"step": step, "layer": 1}, OptionError, "layer"),
            ((x,), {"step": 3}, OptionError, "step"),
        ]:
            with pytest.raises(kind) as error:
                module(*tensors, **options)
            assert error.value.argument == name
        with pytest.raises(OptionError, match="earlier tokens would have to see later ones"):
            randomize(Attention(64, 4))(x, step=step)
        with pytest.raises(OptionError, match="of this cache"):
            static(module).attend(step, x)
        with pytest.raises(DtypeError, match="the dtype of the cache"):
            make().double()(x.double(), step=step)
        with pytest.raises(ShapeError, match="k: got"):
            make(num_kv_heads=2)(x, step=step)
        pages = paged(module)
        on_pages = pages.reserve([pages.add(), pages.add()], 3)
        with pytest.raises(UnsupportedError, match="no attn_mask"):
            module(x, step=on_pages, attn_mask=torch.ones(3, 3))
        with pytest.raises(UnsupportedError, match=r"module\.eval\(\)"):
            make(dropout=0.1).train()(x, step=step)
    with pytest.raises(UnsupportedError, match=r"torch\.no_grad\(\)"):
        module(x, step=step)


@pytest.mark.parametrize(
    ("options", "name"), [({"batch": 0}, "batch"), ({"max_length": 1.5}, "max_length"), ({"dtype": "half"}, "dtype")]
)
def test_wrong_sizes_are_named(options, name):
    with pytest.raises(OptionError) as error:
        KVCache(**{"batch": 1, "heads": 1, "head_dim": 8, "max_length": 4, "device": "cpu", **options})
    assert error.value.argument == name


def test_a_cache_works_across_grad_modes():
    module, x = make(), torch.randn(2, 4, 64)
    with torch.inference_mode():
        cache = static(module)
        first = module(x[:, :2], step=cache.reserve(2))
    with torch.no_grad():
        second = module(x[:, 2:], step=cache.reserve(2))
    assert_close(torch.cat([first, second], dim=1), in_float64(module, x))


@pytest.mark.sample(1)
@torch.no_grad()
@pytest.mark.parametrize("chunks", [(1,) * 12, (3, 5, 4)], ids=["tokens", "chunks"])
def test_one_compiled_step_serves_all_positions(chunks):
    torch._dynamo.reset()
    rope = RotaryEmbedding(16)
    layers = nn.ModuleList(
        randomize(TransformerLayer(64, 4, 96, num_kv_heads=2, is_causal=True, rope=rope)) for _ in range(2)
    ).eval()
    cache, x = static(layers[0].self_attn, layers=2), torch.randn(2, 12, 64)

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=len(set(chunks)) > 1)
    def run(part):
        step = cache.reserve(part.shape[1])
        for number, layer in enumerate(layers):
            part = layer(part, step=step, layer=number)
        return part

    found = [run(part.clone()) for part in x.split(chunks, dim=1)]
    assert len(_debug_get_cache_entry_list(run._torchdynamo_orig_callable.__code__)) == 1
    expected = x.double()
    for layer in layers:
        expected = in_float64(layer, expected)
    assert_close(torch.cat(found, dim=1), expected)
    assert cache.lengths.tolist() == [12, 12]


@torch.no_grad()
@pytest.mark.parametrize("layers_before", [0, 1])
def test_a_failed_call_releases_its_reservation(layers_before):
    stack = [make(rope=RotaryEmbedding(16)) for _ in range(2)]
    cache, x = static(stack[0], layers=2), torch.randn(2, 6, 64)

    def run(part, step):
        for number, module in enumerate(stack):
            part = module(part, step=step, layer=number)
        return part

    def expected():
        first = in_float64(stack[0], x)
        return in_float64(stack[1], first.float())

    failed = cache.reserve(4, torch.tensor([4, 2], dtype=torch.int32))
    for number in range(layers_before):
        stack[number](torch.randn(2, 4, 64), step=failed, layer=number)
    with pytest.raises(ShapeError, match="x: got"):
        stack[layers_before](torch.randn(1, 4, 64), step=failed, layer=layers_before)
    if not layers_before:
        with pytest.raises(OptionError, match=r"the previous step are appended first(.|\n)*cache\.cancel\(step\)"):
            cache.reserve(6)
    cache.cancel(failed)
    assert cache.lengths.tolist() == [0, 0]
    with pytest.raises(OptionError, match="step: got a stale step"):
        cache.cancel(failed)
    found = [run(part, cache.reserve(part.shape[1])) for part in x.split((4, 2), dim=1)]
    assert_close(torch.cat(found, dim=1), expected())
    cache.reserve(1)
    cache.reset()
    assert_close(run(x, cache.reserve(6)), expected())


@torch.no_grad()
def test_two_layers_cannot_write_to_the_same_cache_layer():
    stack = [make() for _ in range(2)]
    cache, x = static(stack[0], layers=2), torch.randn(2, 3, 64)
    step = cache.reserve(3)
    first = stack[0](x, step=step)
    with pytest.raises(OptionError, match=r"layer: got 0; expected another layer(.|\n)*its own number"):
        stack[1](first, step=step)
    stack[1](first, step=step, layer=1)


@torch.no_grad()
def test_compiled_functions_use_steps_reserved_outside():
    torch._dynamo.reset()
    module, x = make(), torch.randn(2, 6, 64)
    cache = static(module)
    run = torch.compile(lambda part, step: module(part, step=step), fullgraph=True, backend="aot_eager")
    found = [run(x[:, at : at + 1].clone(), cache.reserve()) for at in range(6)]
    assert_close(torch.cat(found, dim=1), in_float64(module, x))
    assert len(_debug_get_cache_entry_list(run._torchdynamo_orig_callable.__code__)) == 1


FORGET = {
    "reset": lambda cache, _: cache.reset(),
    "cancel": lambda cache, step: cache.cancel(step),
    "truncate": lambda cache, _: cache.truncate(torch.tensor([0, 0], dtype=torch.int32)),
    "zero_": lambda cache, _: cache.lengths.zero_(),
    "single ones": lambda cache, _: [cache.lengths[row].fill_(0) for row in range(2)],
    "out=": lambda cache, _: torch.zeros(2, dtype=torch.int32, out=cache.lengths),
    "-=": lambda cache, _: shorten(cache, 20),
    "-= compiled": lambda cache, _: torch.compile(shorten, backend="eager", fullgraph=True)(cache, 20),
}


def shorten(cache, tokens):
    cache.lengths -= tokens


@torch.no_grad()
@pytest.mark.parametrize("forget", FORGET)
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_truncated_tokens_reach_no_result(forget, number, which, mode):
    """An overflow ends with its tokens: 0 times a leftover inf or NaN would be NaN."""
    with mode():
        check_forgotten(forget, number, which)


def check_forgotten(forget, number, which):
    cache = KVCache(batch=2, heads=2, head_dim=16, max_length=24, layers=2, dtype=torch.float32, device="cpu")
    step = cache.reserve(20)
    for layer in range(2):
        new = {"k": torch.randn(2, 2, 20, 16), "v": torch.randn(2, 2, 20, 16)}
        new[which][:, :, 3:] = number
        cache.append(step, new["k"], new["v"], layer)
    FORGET[forget](cache, step)
    assert cache.lengths.tolist() == [0, 0]
    step = cache.reserve(5, torch.tensor([5, 2], dtype=torch.int32))
    for layer in range(2):
        q, k, v = torch.randn(3, 2, 2, 5, 16).double()
        cache.append(step, k.float(), v.float(), layer)
        found = cache.attend(step, q.float(), layer).double()
        for row, length in enumerate((5, 2)):
            causal = torch.ones(length, length).tril().log()
            weights = (q[row, :, :length] @ k[row, :, :length].mT * 0.25 + causal).softmax(-1)
            assert_close(found[row, :, :length], weights @ v[row, :, :length])


@torch.no_grad()
def test_the_cache_is_cleared_only_after_external_length_changes():
    """A step writes only its own rows; the whole cache is written after external changes of the lengths."""
    cache = KVCache(batch=2, heads=2, head_dim=16, max_length=24, dtype=torch.float32, device="cpu")
    k = torch.randn(2, 2, 1, 16)
    cache.v()[:, :, 10:] = 7

    def step():
        cache.append(cache.reserve(), k, k)
        return cache.v()[:, :, 10:]

    for forget in (lambda: None, lambda: cache.cancel(cache.reserve()), lambda: cache.truncate(cache.lengths - 1)):
        forget()
        cache.v()[:, :, 10:] = 7
        assert all((step() == 7).all() for _ in range(2))
    cache.lengths.sub_(1)
    assert not step().any()
    cache.v()[:, :, 10:] = 7
    assert (step() == 7).all()


def test_truncate_keeps_the_given_lengths():
    cache = KVCache(batch=3, heads=2, head_dim=16, max_length=8, dtype=torch.float32, device="cpu")
    k = torch.randn(3, 2, 6, 16)
    cache.append(cache.reserve(6), k, k)
    cache.truncate(torch.tensor([4, 9, -1], dtype=torch.int32))
    assert cache.lengths.tolist() == [4, 6, 0]
    assert torch.equal(cache.k()[0, :, :4], k[0, :, :4])
    assert torch.equal(cache.k()[1, :, :6], k[1])
    assert (cache.k()[0, :, 4:] == 0).all()
    assert (cache.v()[2] == 0).all()
    for wrong in (None, 4, [1, 2, 3], torch.tensor([1, 2, 3]), torch.tensor([1], dtype=torch.int32)):
        with pytest.raises(ArgumentError, match="lengths"):
            cache.truncate(wrong)


def keys(tokens):
    return torch.randn(2, 2, tokens, 16).bfloat16()


@pytest.mark.parametrize("how", ["cancel", "reset", "truncate"])
def test_steps_are_stale_once_tokens_are_removed(how):
    cache = KVCache(batch=2, heads=2, head_dim=16, max_length=8, device="cpu")
    old = cache.reserve(2)
    if how == "truncate":
        cache.append(old, keys(2), keys(2))
    {
        "cancel": lambda: cache.cancel(old),
        "reset": cache.reset,
        "truncate": lambda: cache.truncate(torch.zeros(2, dtype=torch.int32)),
    }[how]()
    new = cache.reserve(2)
    cache.append(new, keys(2), keys(2))
    before = cache.k().clone()
    for wrong in (lambda: cache.append(old, keys(2), keys(2)), lambda: cache.attend(old, keys(2))):
        with pytest.raises(OptionError, match=r"step: got a stale step; .*(?s:.*)Reserve another"):
            wrong()
    torch.testing.assert_close(cache.k(), before, rtol=0, atol=0)


def test_the_callers_lengths_may_change_after_reserve():
    cache = KVCache(batch=2, heads=2, head_dim=16, max_length=8, device="cpu")
    lengths = torch.tensor([2, 1], dtype=torch.int32)
    step = cache.reserve(2, lengths)
    lengths.zero_()
    assert step.seq_lens_q.tolist() == [2, 1]
    cache.cancel(step)
    assert cache.lengths.tolist() == [0, 0]


def by_pickle(x):
    return pickle.loads(pickle.dumps(x))


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("copied", [copy.deepcopy, by_pickle])
def test_a_copy_of_a_static_cache_goes_on_by_itself(copied, inference):
    cache = KVCache(batch=2, heads=2, head_dim=16, max_length=8, device="cpu")
    first, more, q = keys(3), keys(1), keys(1)
    cache.append(cache.reserve(3), first, first)
    with torch.inference_mode(inference):
        twin = copied(cache)
    results = []
    for each in (cache, twin):  # the second one is not what the first one writes to
        step = each.reserve()
        each.append(step, more, more)
        results.append(each.attend(step, q))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    twin.lengths.sub_(2)
    twin.reserve()
    assert twin.k()[:, :, 2:].count_nonzero() == 0, "rows past the lengths are cleared"
    assert cache.lengths.tolist() == [4, 4]


@pytest.mark.parametrize("copied", [copy.deepcopy, by_pickle])
def test_a_copy_of_pages_goes_on_by_itself(copied):
    cache = PagedKVCache(pages=4, page_size=4, heads=2, head_dim=16, layers=2, device="cpu")
    first, more = (x[:1] for x in (keys(3), keys(1)))
    owner = cache.add()
    step = cache.reserve([owner], 3)
    for layer in range(2):
        cache.append(step, first, first, layer)
    twin = copied(cache)
    results = []
    for each in (cache, twin):
        fork = each.fork(owner)
        step = each.reserve([fork], 1)  # copies the page that both share
        for layer in range(2):
            each.append(step, more, more, layer)
        results += [each.read(fork, layer)[0] for layer in range(2)]
    torch.testing.assert_close(results[:2], results[2:], rtol=0, atol=0)
    torch.testing.assert_close(results[0], torch.cat([first, more], 2)[0], rtol=0, atol=0)


def test_pages_do_not_depend_on_the_default_device():
    cache = PagedKVCache(pages=4, page_size=4, heads=2, head_dim=16, device="cpu")
    k = keys(3)[:1]
    with torch.device("meta"):
        owner = cache.add()
        cache.append(cache.reserve([owner], 3), k, k)
        fork = cache.fork(owner)
        cache.append(cache.reserve([fork], 1), k[:, :, :1], k[:, :, :1])
    torch.testing.assert_close(cache.read(fork)[0].sum(), torch.cat([k, k[:, :, :1]], 2).sum(), rtol=2e-2, atol=2e-2)


def two_layers():
    return KVCache(batch=2, heads=2, head_dim=16, max_length=8, layers=2, device="cpu")


def test_a_step_without_keys_of_a_layer_is_refused():
    """Also where a call has failed between two layers."""
    cache = two_layers()
    step = cache.reserve(3)
    for layer in range(2):
        with pytest.raises(OptionError, match=f"step: got a step without keys and values of layer {layer}"):
            cache.attend(step, keys(3), layer)
        if layer == 0:
            cache.append(step, keys(3), keys(3), layer)
    with pytest.raises(OptionError, match=r"appended first; layers without: \[1\]\. .*cache\.cancel\(step\)"):
        cache.reserve()
    cache.append(step, keys(3), keys(3), 1)
    assert cache.attend(step, keys(3), 1).isfinite().all()
    assert cache.reserve().seq_lens_kv.tolist() == [4, 4]


@pytest.mark.parametrize("eager", [0, 1])
def test_a_step_that_a_compiled_function_has_written_can_be_read(eager):
    """Also where only some layers are compiled."""
    cache, x = two_layers(), keys(3)
    step = cache.reserve(3)
    for layer in range(eager):
        cache.append(step, x, x, layer)
    torch.compile(lambda: [cache.append(step, x, x, layer) for layer in range(eager, 2)], backend="eager")()
    assert cache.reserve().seq_lens_kv.tolist() == [4, 4]
    torch.testing.assert_close(cache.attend(step, x, 1), sdpa(x, x, x, is_causal=True), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("number", [1, 2, 4])
@pytest.mark.parametrize("tokens", [1, 3])
def test_queries_are_those_of_the_step(number, tokens):
    pages = PagedKVCache(pages=4, page_size=4, heads=2, head_dim=16, device="cpu")
    static = KVCache(batch=2, heads=2, head_dim=16, max_length=8, device="cpu")
    for cache, step in (
        (static, static.reserve(tokens)),
        (pages, pages.reserve([pages.add(), pages.add()], tokens)),
    ):
        cache.append(step, keys(tokens), keys(tokens))
        if number == tokens:
            assert cache.attend(step, keys(number)).shape == (2, 2, number, 16)
            continue
        with pytest.raises(ShapeError, match=rf"q: got shape \(2, 2, {number}, 16\); expected \(B, Hq, {tokens}, D\)"):
            cache.attend(step, keys(number))


def test_wrong_arguments_of_a_static_cache_are_named():
    cache = KVCache(batch=2, heads=2, head_dim=16, max_length=8, device="cpu")
    step = cache.reserve(3)
    for wrong in (None, keys(3).float().numpy()):
        with pytest.raises(OptionError, match=f"k: got {type(wrong).__name__}; expected a torch.Tensor"):
            cache.append(step, wrong, keys(3))
    cache.append(step, keys(3), keys(3))
    with pytest.raises(OptionError, match="return_lse: got an argument; expected one of alibi, "):
        cache.attend(step, keys(3), return_lse=True)


def test_an_interrupted_append_may_be_made_again(monkeypatch):
    cache = KVCache(batch=1, heads=2, head_dim=64, max_length=16, dtype=torch.float32)
    k, v = torch.randn(1, 2, 3, 64), torch.randn(1, 2, 3, 64)
    step = cache.reserve(3)

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "__setitem__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cache.append(step, k, v)
    with pytest.raises(OptionError, match="without keys and values of layer 0"):
        cache.attend(step, torch.randn(1, 2, 3, 64))
    cache.append(step, k, v)
    assert cache.k()[:, :, :3].equal(k)
    assert cache.v()[:, :, :3].equal(v)

"""Transformers models on the GPU: as close to float32 as eager attention, no synchronization, compiled and captured."""

from __future__ import annotations

import warnings

import pytest
import torch

pytest.importorskip("transformers")

from hf_models import DECODERS, ENCODERS, PAIRS, inputs_of, padded, tiny
from transformers import DynamicCache, StaticCache

import cudnn_sdpa
from cudnn_sdpa import UnsupportedError
from cudnn_sdpa.integrations.transformers import register

DEVICE, DTYPE = "cuda", torch.bfloat16
#: Tolerance: a few times the error of "eager", or a fraction of the largest logit where that error is tiny.
FACTOR, ROUNDING = 2.0, 1e-2


@pytest.fixture(autouse=True)
def registered():
    register(inspect_padding=False)
    yield
    register()


def three(make):
    """A model in bfloat16 on this library and on eager attention, and in float32 with the same weights."""
    models = [tiny(make, name).to(DEVICE, DTYPE) for name in ("cudnn_sdpa", "eager")]
    exact = tiny(make, "eager").to(DEVICE)
    exact.load_state_dict({name: tensor.float() for name, tensor in models[0].state_dict().items()}, strict=False)
    return *models, exact


def assert_as_near(ours, theirs, exact, where=...):
    """In the norm, as close to float32 as eager attention in bfloat16, up to a factor."""
    ours, theirs, exact = (x.detach().float()[where] for x in (ours, theirs, exact))
    assert torch.isfinite(ours).all()
    error, other = ((x - exact).norm() / exact.norm() for x in (ours, theirs))
    assert error <= FACTOR * other + ROUNDING, f"{error:.3g} against {other:.3g}"


def fresh(length, batch=4):
    return torch.randint(3, 96, (batch, length), device=DEVICE)


@pytest.mark.parametrize("name", DECODERS)
@torch.no_grad()
def test_logits_with_and_without_padding(name):
    ours, theirs, exact = three(DECODERS[name])
    for length in (14, 40):
        ids, mask = fresh(length), padded(length, DEVICE)
        assert_as_near(*(model(ids).logits for model in (ours, theirs, exact)))
        results = (model(ids, attention_mask=mask).logits for model in (ours, theirs, exact))
        assert_as_near(*results, mask.bool())


@pytest.mark.parametrize("name", DECODERS)
@torch.no_grad()
def test_steps_on_every_cache(name):
    ours, theirs, exact = three(DECODERS[name])
    ids = fresh(14)
    expected, other = exact(ids).logits, theirs(ids).logits
    for cache in (DynamicCache(), DynamicCache(config=ours.config), StaticCache(config=ours.config, max_cache_len=24)):
        steps = [ours(part, past_key_values=cache).logits for part in ids.split((8, 1, 1, 3, 1), dim=1)]
        assert_as_near(torch.cat(steps, dim=1), other, expected)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("inspect_padding", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
@torch.no_grad()
def test_generated_tokens_match_a_single_pass(name, inspect_padding, cache):
    register(inspect_padding=inspect_padding)
    ours, theirs, exact = three(DECODERS[name])
    ids, mask = fresh(9), torch.ones(4, 9, dtype=torch.long, device=DEVICE)
    if not inspect_padding:
        mask[0, :4] = 0
    result = ours.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=5,
        min_new_tokens=5,
        do_sample=False,
        cache_implementation=cache,
        disable_compile=True,
        return_dict_in_generate=True,
        output_logits=True,
    )
    whole = torch.cat([mask, mask.new_ones(4, 5)], dim=1)
    positions = (whole.cumsum(1) - 1).clamp(min=0)
    teachers = (
        model(result.sequences, attention_mask=whole, position_ids=positions).logits[:, 8:-1]
        for model in (theirs, exact)
    )
    assert_as_near(torch.stack(result.logits, dim=1), *teachers)


@pytest.mark.parametrize("name", ENCODERS)
@torch.no_grad()
def test_encoders(name):
    models, inputs = three(ENCODERS[name]), inputs_of(name, DEVICE, DTYPE)
    single = {key: x.float() if x.is_floating_point() else x for key, x in inputs.items()}
    field = "logits_per_image" if name == "clip" else "last_hidden_state"
    where = inputs["attention_mask"].bool() if name in ("bert", "modernbert") else ...
    results = [getattr(model(**given), field) for model, given in zip(models, (inputs, inputs, single), strict=True)]
    assert_as_near(*results, where)


@pytest.mark.parametrize("name", PAIRS)
@torch.no_grad()
def test_encoder_decoder_models(name):
    models, inputs = three(PAIRS[name]), inputs_of(name, DEVICE, DTYPE)
    single = {key: x.float() if x.is_floating_point() else x for key, x in inputs.items()}
    assert_as_near(*(model(**given).logits for model, given in zip(models, (inputs, inputs, single), strict=True)))


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "gemma2"])
def test_training(name):
    models = [model.train() for model in three(DECODERS[name])]
    ids, mask = fresh(40), padded(40, DEVICE)
    after_hidden = torch.cat([mask[:, :1], mask[:, :-1]], dim=1) == 0
    labels = ids.masked_fill((mask == 0) | after_hidden, -100)
    for model in models:
        model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
    gradients = [
        torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None]) for model in models
    ]
    assert_as_near(*gradients)


def waits_in(run):
    """Files with an operation that synchronizes while `run` runs."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return {one.filename for one in found if "called a synchronizing" in str(one.message)}


def test_synchronization_would_be_detected():
    number = torch.ones(1, device=DEVICE)
    assert waits_in(number.item)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
@torch.no_grad()
def test_steps_do_not_synchronize(name, with_mask, cache):
    model = tiny(DECODERS[name], "cudnn_sdpa").to(DEVICE, DTYPE)
    ids, mask, positions = fresh(26), padded(26, DEVICE), torch.arange(26, device=DEVICE)[None]
    past = (
        DynamicCache(config=model.config) if cache == "dynamic" else StaticCache(config=model.config, max_cache_len=32)
    )

    def run(start, end):
        seen = {"attention_mask": mask[:, :end]} if with_mask else {}
        model(ids[:, start:end], past_key_values=past, position_ids=positions[:, start:end], **seen)

    run(0, 20)
    run(20, 21)  # builds or requests plans
    run(21, 22)
    waits = waits_in(lambda: [run(at, at + 1) for at in range(22, 26)])
    here = {file for file in waits if "cudnn_sdpa" in file or "masking_utils" in file}
    assert not here
    if name == "llama":  # transformers' layers and caches create host values
        assert not waits


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
@torch.no_grad()
def test_prompts_do_not_synchronize(name):
    model = tiny(DECODERS[name], "cudnn_sdpa").to(DEVICE, DTYPE)
    ids, mask, positions = fresh(20), padded(20, DEVICE), torch.arange(20, device=DEVICE)[None]

    def run():
        model(ids, attention_mask=mask, position_ids=positions, use_cache=False)

    run()
    waits = waits_in(run)
    assert not {file for file in waits if "cudnn_sdpa" in file or "masking_utils" in file}


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
@torch.no_grad()
def test_compiled_steps_on_a_static_cache_are_cuda_graphs(name):
    ours, theirs, exact = three(DECODERS[name])
    ids = fresh(16)
    cache = StaticCache(config=ours.config, max_cache_len=24)
    logits = [ours(ids[:, :6], past_key_values=cache).logits]
    torch._dynamo.reset()
    step = torch.compile(ours, mode="reduce-overhead", fullgraph=name != "gpt_oss")
    logits += [step(ids[:, at : at + 1].clone(), past_key_values=cache).logits.clone() for at in range(6, 16)]
    assert_as_near(torch.cat(logits, dim=1), theirs(ids).logits, exact(ids).logits)


@pytest.mark.parametrize("with_padding", [False, True])
@torch.no_grad()
def test_a_growing_cache_needs_one_plan_for_256_steps(with_padding):
    model = tiny(DECODERS["llama"], "cudnn_sdpa").to(DEVICE, DTYPE)
    ids, mask = fresh(20), padded(20, DEVICE) if with_padding else None
    cache = DynamicCache(config=model.config)

    def run(start, end):
        seen = {} if mask is None else {"attention_mask": mask[:, :end]}
        model(ids[:, start:end], past_key_values=cache, **seen)

    run(0, 12)
    before = cudnn_sdpa.plan_cache.info().builds
    for at in range(12, 20):
        run(at, at + 1)
    assert cudnn_sdpa.plan_cache.info().builds - before <= 1


@torch.no_grad()
def test_float32_needs_the_fallback():
    ours, theirs = (tiny(DECODERS["llama"], name).to(DEVICE) for name in ("cudnn_sdpa", "eager"))
    ids = fresh(12)
    with pytest.raises((UnsupportedError, cudnn_sdpa.DtypeError), match="float32"):
        ours(ids)
    with cudnn_sdpa.fallback("torch"):
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=1e-3, atol=1e-3)
    with torch.autocast("cuda", torch.bfloat16):
        assert torch.isfinite(ours(ids).logits).all()

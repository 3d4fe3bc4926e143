"""Launches of FP8 calls without a GPU: a fake plan reads and writes the addresses of its launch."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from fake_gpu import TARGET, gpu_on_the_cpu

from cudnn_sdpa import LayoutError, UnsupportedError, fallback
from cudnn_sdpa.attention.arguments import ForwardArguments, from_fields
from cudnn_sdpa.attention.fp8 import reference, specs, workarounds
from cudnn_sdpa.attention.fp8.arguments import Fp8Arguments, Fp8BackwardArguments, Fp8BackwardScales, Fp8Scales
from cudnn_sdpa.attention.fp8.sdpa_fp8 import sdpa_fp8, sdpa_fp8_backward
from cudnn_sdpa.attention.fp8.specs import BackwardSpec, ForwardSpec, spec_of
from cudnn_sdpa.attention.mask import normalize_mask
from cudnn_sdpa.plans.cache import plan_cache

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SCALES = tuple(torch.tensor([1.5 + 0.25 * n]) for n in range(12))


def lens(*values):
    return torch.tensor(values, dtype=torch.int32)


def qkv(lengths=(40, 56), dtype=E4M3):
    def tensor(heads, length, dim):
        return (torch.randn(2, length, heads, dim) * 3).to(dtype).transpose(1, 2)

    return tensor(4, lengths[0], 128), tensor(2, lengths[1], 128), tensor(2, lengths[1], 128)


CASES = {
    "dense": ((40, 56), {}),
    "causal": ((40, 56), {"is_causal": True}),
    "bottom-right": ((40, 56), {"is_causal": True, "causal_alignment": "bottom_right"}),
    "queries that see no key": ((56, 40), {"is_causal": True, "causal_alignment": "bottom_right"}),
    "window, fewer keys": ((56, 40), {"window_size": (9, -1), "scale": 0.31}),
    "lengths": ((40, 56), {"seq_lens_q": lens(31, 99), "seq_lens_kv": lens(0, 17)}),
    "lengths of keys": ((40, 56), {"seq_lens_kv": lens(99, 17), "is_causal": True}),
    "lengths of queries": ((40, 56), {"seq_lens_q": lens(0, 17), "window_size": (9, 4)}),
}


def split(options):
    left, right = options.get("window_size", (-1, -1))
    return {**{k: v for k, v in options.items() if k != "window_size"}, "window_left": left, "window_right": right}


def within(options, lengths):
    """The options with lengths clamped as on a GPU; the CPU refuses out-of-range lengths."""
    sizes = {"seq_lens_q": lengths[0], "seq_lens_kv": lengths[1]}
    return {name: x.clamp(0, sizes[name]) if name in sizes else x for name, x in options.items()}


def same(a, b):
    return a is b if a is None or b is None else torch.equal(a.float(), b.float())


@pytest.mark.parametrize("entries", [1, 2])
@pytest.mark.parametrize("case", ["causal", "bottom-right", "lengths of keys, causal", "queries that see no key"])
def test_batch_entries_may_be_split_into_several_launches(case, entries, monkeypatch):
    monkeypatch.setattr(specs, "_LONG", 16)
    monkeypatch.setattr(specs, "_ENOUGH_TILES", 4 * entries)
    lengths, options = {**CASES, "lengths of keys, causal": ((40, 56), {"seq_lens_kv": lens(9, 17, 56, 0)})}[case]
    options = {**options, "is_causal": True}
    q, k, v = (torch.cat([x, (x.float().flip(0) / 2).to(x.dtype)]) for x in map(heads_last, qkv(lengths)))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    options = within(options, lengths)
    forward = sdpa_fp8(q, k, v, Fp8Scales(*SCALES[:6]), **options, return_lse=True)
    grad_out, scales = torch.randn(4, 4, lengths[0], 128).to(E5M2), Fp8BackwardScales(*SCALES)
    expected = sdpa_fp8_backward(grad_out, q, k, v, forward.out, forward.lse, scales, **options)
    given = (grad_out, q, k, v, forward.out, forward.lse)
    whole = BackwardSpec.of(from_fields(Fp8BackwardArguments, *given, *scales, **split(options)))
    assert whole.part(TARGET).dense.q.shape[0] == entries
    assert any("launches" in note for note in whole.extra_kernels())
    with gpu_on_the_cpu():
        found = sdpa_fp8_backward(*given, scales, **options)
    assert all(map(same, found, expected))
    assert [x.stride() for x in found] == [x.stride() for x in expected]
    assert [tuple(x.shape) for x in found[3:]] == [(1,)] * 4


def heads_last(x):
    return x.transpose(1, 2).contiguous()


def test_when_batch_entries_are_split_into_launches():
    def entries_per_launch(batch, heads, length, target=TARGET, **options):
        q = torch.empty(batch, length, heads, 128, dtype=E4M3, device="meta").transpose(1, 2)
        lse = torch.empty(batch, heads, length, device="meta")
        call = from_fields(Fp8BackwardArguments, q, q, q, q, q, lse, *SCALES, **options)
        return BackwardSpec.of(call).part(target).dense.q.shape[0]

    causal = {"is_causal": True}
    assert [
        entries_per_launch(*sizes, **causal) for sizes in ((4, 32, 4096), (8, 32, 1024), (6, 16, 2048), (4, 8, 4096))
    ] == [
        1,
        2,
        2,
        2,
    ]
    assert [entries_per_launch(*sizes, **causal) for sizes in ((64, 32, 512), (1, 32, 4096), (5, 8, 2048))] == [
        64,
        1,
        5,
    ]
    assert entries_per_launch(4, 32, 4096) == 4
    blackwell = dataclasses.replace(TARGET, properties=(("deviceVer", 1000), ("multiProcessorCount", 148)))
    assert entries_per_launch(4, 32, 4096, blackwell, **causal) == 4


def test_an_unreadable_grad_out_gets_the_layout_of_the_output():
    q, k, v = qkv()
    wide = torch.randn(2, 4, 40, 256).to(E5M2)
    call = Fp8BackwardArguments(wide[..., ::2], q, k, v, torch.empty_like(q), torch.randn(2, 4, 40), *SCALES)
    layout = workarounds.readable_layout(call)
    assert (layout.dtype, layout.stride) == (E5M2, q.stride())
    copy = workarounds.copied("grad_out", call.grad_out, layout)
    assert torch.equal(copy.float(), call.grad_out.float())
    dense = call._replace(grad_out=wide[..., :128])
    assert workarounds.readable_layout(dense).stride == dense.grad_out.stride()


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0)])
def test_empty_calls_need_no_plan(lengths):
    q, k, v = qkv(lengths)
    scales, options = Fp8Scales(*SCALES[:6]), {"out_dtype": E5M2, "return_lse": True}
    expected = sdpa_fp8(q, k, v, scales, **options)
    given = (torch.empty_like(q), q, k, v, q, expected.lse, Fp8BackwardScales(*SCALES))
    gradients = sdpa_fp8_backward(*given)
    with gpu_on_the_cpu():
        assert all(map(same, sdpa_fp8(q, k, v, scales, **options), expected))
        assert all(map(same, sdpa_fp8_backward(*given), gradients))
        assert plan_cache.info().builds == 0


def test_there_is_no_fallback():
    """The emulation rounds as cuDNN does: it takes the place of no other kernel."""
    q, k, v = (x[..., :96].contiguous() for x in qkv())
    given = (torch.empty_like(q), q, k, v, q, torch.zeros(2, 4, 40), Fp8BackwardScales(*SCALES))
    with gpu_on_the_cpu(), fallback("torch"), pytest.raises(UnsupportedError, match="head dim"):
        sdpa_fp8_backward(*given)


@pytest.mark.parametrize("lengths", [(5, 9), (9, 5), (7, 7), (1, 8)])
@pytest.mark.parametrize("window_size", [(-1, -1), (2, -1), (7, 1), (0, 3), (-1, 2)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_bottom_right_masks_become_equivalent_top_left_masks(lengths, window_size, is_causal):
    q, k, v = qkv(lengths)
    options = {"is_causal": is_causal, "causal_alignment": "bottom_right"}
    call = from_fields(ForwardArguments, q, k, v, **options, window_left=window_size[0], window_right=window_size[1])
    mask = spec_of(call).mask
    left, right, bottom_right = mask.band or (None, None, False)
    assert not (bottom_right and right is not None and (left is None or left >= lengths[1] - lengths[0]))
    again = from_fields(
        ForwardArguments,
        *(q[:, :, mask.masked_rows :], k, v),
        causal_alignment="bottom_right" if bottom_right else "top_left",
        window_left=-1 if left is None else left,
        window_right=-1 if right is None else right,
    )
    assert torch.equal(reference.visible(again), reference.visible(call)[:, :, mask.masked_rows :])
    assert not reference.visible(call)[:, :, : mask.masked_rows].any()
    assert mask.masked_rows == normalize_mask(*options.values(), window_size, *lengths).masked_rows


def test_equivalent_options_share_a_plan():
    q, k, v = qkv((40, 40))
    keys = {
        ForwardSpec.of(from_fields(Fp8Arguments, q, k, v, *SCALES[:6], scale=scale, **options)).key(TARGET, 0)
        for scale in (None, 0.3)
        for options in (
            {"is_causal": True},
            {"window_right": 0},
            {"is_causal": True, "causal_alignment": "bottom_right"},
        )
    }
    assert len(keys) == 1


def test_unreadable_row_strides_are_refused_by_name():
    q, k, v = qkv()
    flat = torch.randn(2 * 2 * 56 * 136).to(E4M3)
    odd = flat.as_strided(k.shape, (2 * 56 * 136, 56 * 136, 136, 1))
    with pytest.raises(LayoutError, match="k: got stride 136 from token to token; expected a multiple of 16"):
        sdpa_fp8(q, odd, v, Fp8Scales(*SCALES[:6]))

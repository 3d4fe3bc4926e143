"""What the library's own kernels for dense attention compute, in plain PyTorch, and random cases for them.

The formulas run on any device, one small PyTorch kernel per operation, without synchronizing. The cases run on the fake
GPU and on a real one.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor

from cudnn_sdpa.attention.bias import BiasKernel, bias_layout
from cudnn_sdpa.attention.dense.specs import DenseSpec
from cudnn_sdpa.attention.lengths import LengthsKernel, RowLimitsKernel
from cudnn_sdpa.attention.mask import Band, Mask
from cudnn_sdpa.engine.launch import Address
from cudnn_sdpa.graph.layouts import ALIGNMENT, TensorLayout
from cudnn_sdpa.plans.autotune import tensor_at

HALF = torch.float16


def corrected_lengths(
    lengths_q: Tensor | None, lengths_kv: Tensor | None, sq: int, skv: int, *, decode: bool
) -> dict[str, Tensor]:
    """Lengths clamped to the tensors, with sequences without keys, or in a decode step without queries, corrected."""
    if decode:
        keys = None if lengths_kv is None else lengths_kv.clamp(0, skv)
        if lengths_q is not None:
            keys = lengths_q.clamp(0, 1) * (skv if keys is None else keys)
        return {"seq_len_kv": keys}
    if lengths_kv is None:
        return {"seq_len_q": lengths_q.clamp(0, sq)}
    return {
        "seq_len_q": lengths_kv.clamp(0, 1) * (sq if lengths_q is None else lengths_q.clamp(0, sq)),
        "seq_len_kv": lengths_kv.clamp(1, skv),
    }


def row_limits(
    lengths_q: Tensor | None, lengths_kv: Tensor | None, sq: int, skv: int, rows: int, band: Band | None
) -> dict[str, Tensor]:
    """The first and the last key that each query sees, (B, rows)."""
    lengths = lengths_kv if lengths_q is None else lengths_q
    of_q = torch.full_like(lengths, sq) if lengths_q is None else lengths_q.clamp(0, sq)
    of_kv = torch.full_like(lengths, skv) if lengths_kv is None else lengths_kv.clamp(0, skv)
    of_q, of_kv = of_q.view(-1, 1), of_kv.view(-1, 1)
    left, right, bottom_right = band or (None, None, False)
    row = torch.arange(rows, dtype=torch.int32, device=lengths.device).expand(lengths.shape[0], rows)
    diagonal = row + (of_kv - of_q) if bottom_right else row
    last = (of_kv - 1).expand_as(row) if right is None else torch.minimum(diagonal + right, of_kv - 1)
    first = torch.zeros_like(row) if left is None else (diagonal - left).clamp_min(0)
    return {"lowest": first, "highest": last.masked_fill(row >= of_q, -1)}


def bias(mask: Tensor, q: Tensor, skv: int, masked_rows: int) -> Tensor:
    """The bias that cuDNN adds to the scores, as dense as `bias_layout` says."""
    shape = bias_layout(mask, q, skv, masked_rows).shape
    mask = mask[(None,) * (4 - mask.dim())] if mask.dim() < 4 else mask
    if masked_rows and mask.shape[2] != 1:
        mask = mask[:, :, masked_rows:]
    mask = mask[tuple(slice(0, 1 if size == 1 else None) for size in shape)]
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(~mask, -torch.inf)
    return mask.expand(shape)


@dataclass(frozen=True)
class LengthsCase:
    """Lengths of a dense call: its spec, and the values, which may be outside the tensors."""

    spec: DenseSpec
    lengths_q: Tensor | None
    lengths_kv: Tensor | None

    @classmethod
    def drawn(cls, seed: int, *, softcap: bool, device: str = "cpu", batch: int | None = None) -> LengthsCase:
        """A random case; many sizes and lengths are 1 or 0."""
        rng = random.Random(seed)
        batch = rng.choice((1, 1, 2, 3, 7, 300)) if batch is None else batch
        sq, skv = (rng.choice((1, 1, 2, 5, 64, 129)) for _ in range(2))
        which = rng.choice(("q", "kv", "both"))
        lengths_q, lengths_kv = (
            _lengths(rng, batch, size, device) if which in (name, "both") else None
            for name, size in (("q", sq), ("kv", skv))
        )
        left, right = (rng.choice((None, 0, rng.randrange(200))) for _ in range(2))
        band = None if left is None and right is None else (left, right, rng.random() < 0.5)
        q, k = (TensorLayout.contiguous((batch, 2, size, 8), HALF) for size in (sq, skv))
        spec = DenseSpec(
            q=q,
            k=k,
            v=k,
            mask=Mask(band),
            lengths_q=lengths_q is not None,
            lengths_kv=lengths_kv is not None,
            is_capped=softcap,
        )
        return cls(spec, lengths_q, lengths_kv)

    @property
    def addresses(self) -> dict[str, int]:
        """The addresses of the lengths that are given, by name."""
        given = {"seq_lens_q": self.lengths_q, "seq_lens_kv": self.lengths_kv}
        return {name: lengths.data_ptr() for name, lengths in given.items() if lengths is not None}

    def kernel(self, *, decode: bool = False) -> LengthsKernel | RowLimitsKernel:
        spec = self.spec
        if spec.is_capped:
            sizes = {"rows": spec.sq, "max_q": spec.sq, "max_kv": spec.skv}
            return RowLimitsKernel(batch=spec.q.shape[0], band=spec.mask.band, device=0, **sizes)
        sizes = {"batch": spec.q.shape[0], "sq": spec.sq, "skv": spec.skv}
        return LengthsKernel(**sizes, has_kv=spec.lengths_kv, device=0, decode=decode)

    def expected(self, *, decode: bool = False) -> dict[str, Tensor]:
        """What the plan reads."""
        spec = self.spec
        given = self.lengths_q, self.lengths_kv, spec.sq, spec.skv
        if spec.is_capped:
            return row_limits(*given, rows=spec.sq, band=spec.mask.band)
        return corrected_lengths(*given, decode=decode)


def _lengths(rng: random.Random, batch: int, size: int, device: str) -> Tensor:
    values = [rng.choice((0, 1, size - 1, size, rng.randint(0, size), -1, size + 1)) for _ in range(batch)]
    if batch > 2:
        values[-2:] = -(2**31), 2**31 - 1
    whole = torch.tensor([99, *values], dtype=torch.int32, device=device)
    return whole[1:]  # at any address


@dataclass(frozen=True)
class MaskCase:
    """A mask of a dense call, broadcast along some dimensions, anywhere in memory."""

    mask: Tensor
    q: Tensor
    skv: int
    masked_rows: int

    @classmethod
    def drawn(cls, seed: int, device: str = "cpu") -> MaskCase:
        rng = random.Random(seed)
        shape = [rng.choice((1, 1, 2, 3)), rng.choice((1, 2, 4)), rng.choice((1, 2, 9, 64)), rng.choice((1, 7, 16, 77))]
        dtype = rng.choice((torch.float16, torch.bfloat16))
        q = torch.zeros(*shape[:3], 8, dtype=dtype, device=device)
        of_mask = rng.choice((torch.bool, torch.bool, dtype, torch.float32))
        sizes = [1 if rng.random() < 0.3 else size for size in shape]
        mask = _values(of_mask, sizes, rng, device)
        if rng.random() < 0.3:
            mask = mask.expand(shape)
        if mask.shape[0] == 1 and rng.random() < 0.5:
            mask = mask[0]
        masked_rows = rng.randrange(shape[2]) if rng.random() < 0.5 else 0
        return cls(mask, q, shape[3], masked_rows)


def _values(dtype: torch.dtype, shape: list[int], rng: random.Random, device: str) -> Tensor:
    """Random values: dense, in another memory order, in every other element, or a slice at any address."""
    kind = rng.randrange(5)
    if kind == 0:
        order = rng.sample(range(4), 4)
        whole = torch.empty([shape[dim] for dim in order], device=device)
        empty = whole.permute([order.index(dim) for dim in range(4)])
    elif kind == 1:
        empty = torch.empty(*shape[:-1], 2 * shape[-1], device=device)[..., ::2]
    elif kind == 2:
        past = rng.randrange(1, 17)
        empty = torch.empty([shape[0], shape[1], shape[2] + 1, shape[3] + past], device=device)[:, :, 1:, past:]
    elif kind == 3:
        empty = torch.empty([shape[0], shape[1], shape[2], -(-shape[3] // 8) * 8 + 8], device=device)[..., : shape[3]]
    else:
        empty = torch.empty(shape, device=device)
    whole = empty if empty._base is None else empty._base
    stored = torch.randn(whole.shape, device=device)
    stored = stored > 0 if dtype == torch.bool else stored.masked_fill(stored > 0.5, -torch.inf).to(dtype)
    if rng.random() < 0.3:  # another address: the same memory order, one element later
        moved = torch.empty(stored.numel() + 1, dtype=dtype, device=device)[1:].view(stored.shape)
        stored = moved.copy_(stored)
    return stored.as_strided(empty.shape, empty.stride(), stored.storage_offset() + empty.storage_offset())


def assert_both(masks: MaskCase, lengths: LengthsCase, *, decode: bool) -> None:
    """One launch makes the bias of a case, and what plans read of another's lengths."""
    of_mask, of_lengths = BiasKernel(masks.mask, masks.q, masks.skv, masks.masked_rows), lengths.kernel(decode=decode)
    extras = of_mask.extras_with(of_lengths, list(lengths.addresses))
    (both,) = extras.kernels
    made = both(attn_mask=masks.mask.data_ptr(), **lengths.addresses)
    assert set(extras.operands) == {"attn_mask", *lengths.addresses}
    expected = lengths.expected(decode=decode)
    assert set(extras.addresses) == {"bias", *expected}

    def at(name: str, layout: TensorLayout) -> Tensor:
        address: Address = extras.addresses[name]
        size = 0 if name == "bias" else 4 * math.prod(layout.shape)
        assert address.of == both.name
        assert address.offset % ALIGNMENT == 0
        assert address.offset + size <= made.numel() * made.itemsize
        return tensor_at(made.data_ptr() + address.offset, layout, made.device)

    found = at("bias", bias_layout(masks.mask, masks.q, masks.skv, masks.masked_rows))
    assert torch.equal(found, bias(masks.mask, masks.q, masks.skv, masks.masked_rows))
    for name, right in expected.items():
        assert torch.equal(at(name, TensorLayout.contiguous(tuple(right.shape), right.dtype)), right), name

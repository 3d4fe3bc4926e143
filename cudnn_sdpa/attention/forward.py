"""A forward call without its data, and the key of its plan."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cudnn_sdpa.attention import graphs
from cudnn_sdpa.attention.arguments import CUDA_DTYPES, ForwardArguments
from cudnn_sdpa.attention.options import BOTTOM_RIGHT, Mask, normalize_mask
from cudnn_sdpa.errors import UnsupportedError
from cudnn_sdpa.runtime.key import Operand, PlanKey, Role
from cudnn_sdpa.runtime.layouts import TensorLayout, canonical_stride, dense_stride_like
from cudnn_sdpa.runtime.target import Target

MIN_SM = 80
MAX_HEAD_DIM = 1024

#: Smallest scale that is handed to cuDNN. Its kernels hide keys by a score of -inf before they scale, so that with
#: a scale of 0 or less a hidden key becomes NaN or +inf (seen on cuDNN 9.19: wrong numbers). At this one every
#: float16 or bfloat16 score is 0 in all digits.
MIN_SCALE = 1e-30


@dataclass(frozen=True, slots=True)
class Forward:
    """A forward call without its data: what all tensors look like, and which options are set."""

    q: TensorLayout
    k: TensorLayout
    v: TensorLayout
    out: TensorLayout
    mask: Mask
    lengths_q: bool
    lengths_kv: bool
    with_lse: bool

    @classmethod
    def of(cls, call: ForwardArguments) -> Forward:
        """Describes a call. The output, where it is not given, lies in memory in the order of `q`."""
        q, k, v, out = call.q, call.k, call.v, call.out
        lengths_q, lengths_kv = call.seq_lens_q is not None, call.seq_lens_kv is not None
        out_shape = (*q.shape[:3], v.shape[3])
        out_stride = dense_stride_like(out_shape, q.shape, q.stride())
        return cls(
            TensorLayout.of(q),
            TensorLayout.of(k),
            TensorLayout.of(v),
            TensorLayout(out_shape, out_stride, q.dtype) if out is None else TensorLayout.of(out),
            normalize_mask(
                call.is_causal, call.causal_alignment, q.shape[2], k.shape[2], has_lengths=lengths_q or lengths_kv
            ),
            lengths_q,
            lengths_kv,
            call.with_lse,
        )

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute: no query, or no key."""
        return 0 in self.q.shape or 0 in self.k.shape

    @property
    def is_decode(self) -> bool:
        """One query for each sequence: cuDNN's decode engines take it."""
        return self.q.shape[2] == 1

    def _check_supported(self, target: Target) -> None:
        """Refuses what is known to have no plan, before cuDNN is asked, with all reasons at once."""
        sq, skv = self.q.shape[2], self.k.shape[2]
        reasons, ways_out = [], []
        if target.sm < MIN_SM:
            reasons.append(f"{target} has compute capability {target.sm / 10:.1f}; cuDNN's attention needs 8.0")
            ways_out.append("torch.nn.functional.scaled_dot_product_attention on this GPU")
        if self.q.dtype not in CUDA_DTYPES:
            dtype = str(self.q.dtype).removeprefix("torch.")
            reasons.append(f"cuDNN's attention takes float16 or bfloat16, not {dtype}")
            ways_out.append("q, k and v converted to torch.bfloat16")
        largest = max(self.q.shape[3], self.v.shape[3])
        if largest > MAX_HEAD_DIM:
            reasons.append(f"head dim {largest} is over {MAX_HEAD_DIM}, the largest that this library is tested with")
            ways_out.append(f"head dims of up to {MAX_HEAD_DIM}")
        if self.mask.causal == BOTTOM_RIGHT and sq > skv:
            reasons.append(
                f"with lengths, cuDNN aligns a causal mask bottom-right only if Sq <= Skv, and here {sq} > {skv}"
            )
            pad = f"(0, 0, 0, {sq - skv})"
            ways_out.append(f"k and v padded to Sq rows, torch.nn.functional.pad(k, {pad}), with seq_lens_kv given")
        if reasons:
            raise UnsupportedError("sdpa", reasons, "; ".join(ways_out))

    def key(self, target: Target, device: int | None) -> PlanKey:
        """The key of this call's plan.

        Raises:
            UnsupportedError: It is known to have none.
        """
        self._check_supported(target)
        scalar = TensorLayout.contiguous((1, 1, 1, 1), torch.float32)
        inputs = [
            Operand("q", _cut_rows(self.q, self.mask.blind_rows)),
            Operand("k", self.k),
            Operand("v", self.v),
            Operand("scale", scalar, Role.SCALAR),
            *self._length_operands(),
        ]
        out = _cut_rows(self.out, self.mask.blind_rows)
        outputs = [Operand("out", out)]
        if self.with_lse:
            outputs.append(Operand("lse", TensorLayout.contiguous((*out.shape[:3], 1), torch.float32)))
        options = {"causal": self.mask.causal, "with_lse": self.with_lse}
        return graphs.sdpa_forward.key(inputs, outputs, options, target, device)

    def _length_operands(self) -> list[Operand]:
        """cuDNN takes the lengths of queries and keys together or not at all."""
        if not (self.lengths_q or self.lengths_kv):
            return []
        layout = TensorLayout.contiguous((self.q.shape[0], 1, 1, 1), torch.int32)
        # A decode engine ignores the queries' lengths; a plan for more queries gets corrected ones: `_lengths`.
        q_is_data = not self.is_decode
        kv_is_data = self.lengths_kv or self.is_decode
        return [
            Operand("seq_len_q", layout) if q_is_data else Operand("seq_len_q", layout, Role.FILL, 1),
            Operand("seq_len_kv", layout) if kv_is_data else Operand("seq_len_kv", layout, Role.FILL, self.k.shape[2]),
        ]

    def extra_kernels(self) -> list[str]:
        """What a call runs beside its plan, for `explain`."""
        notes = []
        if self.mask.blind_rows:
            notes.append(f"the first {self.mask.blind_rows} queries see no key: their output is filled with zeros")
            if self.with_lse:
                notes.append("the log-sum-exp of the other queries is copied into place")
        if (self.lengths_q or self.lengths_kv) and not self.is_decode:
            notes.append("lengths are kept within the tensors")
        if self.lengths_kv and not self.is_decode:
            notes.append(
                "lengths are corrected on the GPU where a sequence has no keys (cuDNN leaves its rows unwritten)"
            )
        if self.lengths_q and self.is_decode:
            notes.append("lengths are combined (cuDNN's decode engines ignore those of the queries)")
        return notes


def _cut_rows(layout: TensorLayout, rows: int) -> TensorLayout:
    """The layout of `tensor[:, :, rows:]`."""
    batch, heads, length, dim = layout.shape
    shape = (batch, heads, length - rows, dim)
    return TensorLayout(shape, canonical_stride(shape, layout.stride), layout.dtype)

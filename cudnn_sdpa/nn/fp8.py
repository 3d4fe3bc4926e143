"""`Fp8Attention`: attention in FP8 as a layer."""

from __future__ import annotations

import weakref

from torch import Tensor, nn

from cudnn_sdpa.attention.fp8.fp8_attention import fp8_attention
from cudnn_sdpa.attention.fp8.scaling import Fp8Scaling
from cudnn_sdpa.attention.mask import Alignment
from cudnn_sdpa.errors import OptionError

#: The layer of each `Fp8Scaling`. Copied and unpickled ones have none at first.
_owners: weakref.WeakKeyDictionary[Fp8Scaling, weakref.ref[Fp8Attention]] = weakref.WeakKeyDictionary()


class Fp8Attention(nn.Module):
    """Attention computed in FP8, on tensors in bfloat16 or float16, as a layer with its scales. Differentiable.

    It calls `fp8_attention` with its own `Fp8Scaling`. In training mode each training step updates the scales, and
    `state_dict` includes them.

    Args:
        is_causal: Whether later keys are masked.
        causal_alignment: "top_left" aligns the first query with the first key, "bottom_right" the last with the last.
        window_size: (left, right) bounds around the diagonal; -1 is unbounded.
        scale: Factor applied to the scores, positive; None is 1/sqrt(D).
        scaling: The layer's `Fp8Scaling`, which no other layer may use; None creates one with the default options.

    Raises:
        OptionError: `scaling` is not an `Fp8Scaling`, or belongs to another `Fp8Attention`.

    Examples:
        >>> import torch
        >>> from cudnn_sdpa.nn.fp8 import Fp8Attention
        >>> attend = Fp8Attention(is_causal=True)
        >>> for step in range(3):
        ...     q, k, v = torch.randn(3, 1, 4, 64, 128, dtype=torch.bfloat16).requires_grad_()
        ...     attend(q, k, v).square().sum().backward()
        >>> attend.scaling.amax_history.count_nonzero(dim=1)  # two steps are over
        tensor([2, 2, 2, 2, 2, 2, 2, 2, 2, 2])
    """

    def __init__(
        self,
        *,
        is_causal: bool = False,
        causal_alignment: Alignment = "top_left",
        window_size: tuple[int, int] | None = None,
        scale: float | None = None,
        scaling: Fp8Scaling | None = None,
    ) -> None:
        super().__init__()
        if scaling is not None and not isinstance(scaling, Fp8Scaling):
            raise OptionError("scaling", type(scaling).__name__, "cudnn_sdpa.Fp8Scaling or None")
        if scaling is not None and _owner_of(scaling) is not None:
            expected = "one for this layer only: the amax values of two layers would be mixed"
            hint = "Make another Fp8Scaling with the same options, or copy this one with copy.deepcopy."
            raise OptionError("scaling", "that of another Fp8Attention", expected, hint)
        self.is_causal, self.causal_alignment = is_causal, causal_alignment
        self.window_size, self.scale = window_size, scale
        self.scaling = Fp8Scaling() if scaling is None else scaling
        _owners[self.scaling] = weakref.ref(self)

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if _owner_of(self.scaling) is None:
            _owners[self.scaling] = weakref.ref(self)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, seq_lens_q: Tensor | None = None, seq_lens_kv: Tensor | None = None
    ) -> Tensor:
        """Attention of queries (B, Hq, Sq, D), keys (B, Hkv, Skv, D) and values (B, Hkv, Skv, Dv).

        Args:
            q: Queries, bfloat16 or float16.
            k: Keys.
            v: Values.
            seq_lens_q: Actual sequence lengths of the queries, (B,) int32. Output rows past them are zeros.
            seq_lens_kv: Actual sequence lengths of the keys, (B,) int32.

        Returns:
            The output (B, Hq, Sq, Dv) in q's dtype and memory order.
        """
        return fp8_attention(
            q,
            k,
            v,
            scaling=self.scaling,
            is_causal=self.is_causal,
            causal_alignment=self.causal_alignment,
            window_size=self.window_size,
            scale=self.scale,
            seq_lens_q=seq_lens_q,
            seq_lens_kv=seq_lens_kv,
        )

    def extra_repr(self) -> str:
        return (
            f"is_causal={self.is_causal}, causal_alignment={self.causal_alignment!r}, window_size={self.window_size}, "
            f"scale={self.scale}"
        )


def _owner_of(scaling: Fp8Scaling) -> Fp8Attention | None:
    owner = _owners.get(scaling)
    return None if owner is None else owner()

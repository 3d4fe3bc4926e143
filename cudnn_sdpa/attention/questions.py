"""Calls without tensors, of which only is known what decides whether they have plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from cudnn_sdpa.attention import arguments, fp8_passes, pieces, varlen_calls
from cudnn_sdpa.attention.arguments import ForwardArguments
from cudnn_sdpa.attention.fp8_arguments import FP8_DTYPES, OUT_DTYPES
from cudnn_sdpa.attention.fp8_support import RULES as FP8_RULES
from cudnn_sdpa.attention.options import BOTTOM_RIGHT, TOP_LEFT
from cudnn_sdpa.attention.passes import Backward, Forward
from cudnn_sdpa.attention.support import BACKWARD, FORWARD, RULES, Case, Rule, refusal
from cudnn_sdpa.attention.varlen_arguments import VarlenArguments
from cudnn_sdpa.errors import OptionError, UnsupportedError
from cudnn_sdpa.runtime import known_issues
from cudnn_sdpa.runtime.key import PlanKey
from cudnn_sdpa.runtime.layouts import TensorLayout
from cudnn_sdpa.runtime.target import Target

#: Operations, and how they place the diagonal unless told otherwise.
OPERATIONS = {"sdpa": TOP_LEFT, "sdpa_varlen": BOTTOM_RIGHT, "sdpa_fp8": TOP_LEFT}
DIRECTIONS = (FORWARD, BACKWARD)
_OF_MASKS = ("attn_mask", "attn_mask_grad", "alibi")
#: The options that an operation does not have.
LACKING = {
    "sdpa": ("out_dtype",),
    "sdpa_varlen": (*_OF_MASKS, "seq_lens", "out_dtype"),
    "sdpa_fp8": (*_OF_MASKS, "dropout", "softcap", "sinks"),
}
#: The dtypes that an operation takes, its own first.
DTYPES_OF = {
    "sdpa": (torch.bfloat16, torch.float16),
    "sdpa_varlen": (torch.bfloat16, torch.float16),
    "sdpa_fp8": FP8_DTYPES,
}
#: Head counts and batch of the shapes that are asked about: they decide nothing, unless a tensor of so many elements
#: would not fit into one plan. Such calls are computed piece by piece, so that the smallest piece decides.
BATCH, HEADS = 2, 8
MOST_ELEMENTS = 2**31 - 1
FLAGS = ("is_causal", "dropout", "softcap", "sinks", "deterministic", *_OF_MASKS, "seq_lens")


@dataclass(frozen=True, kw_only=True)
class Question:
    """What `support` is asked, without the GPU and the version; the fields are its arguments."""

    operation: str = "sdpa"
    direction: str = FORWARD
    dtype: torch.dtype = torch.bfloat16
    head_dim: int
    head_dim_v: int
    is_causal: bool = False
    causal_alignment: str = TOP_LEFT
    window: tuple[int, int] | None = None
    attn_mask: bool = False
    attn_mask_grad: bool = False
    dropout: bool = False
    softcap: bool = False
    alibi: bool = False
    sinks: bool = False
    seq_lens: bool = False
    deterministic: bool = False
    out_dtype: torch.dtype | None = None
    sq: int = 1024
    skv: int = 1024

    def check(self) -> None:
        """Refuses what is no option.

        Raises:
            OptionError: The operation, the direction or an option is none that there is.
        """
        if self.operation not in OPERATIONS:
            raise OptionError("operation", repr(self.operation), " or ".join(map(repr, OPERATIONS)))
        if self.direction not in DIRECTIONS:
            raise OptionError("direction", repr(self.direction), " or ".join(map(repr, DIRECTIONS)))
        if not isinstance(self.dtype, torch.dtype):
            raise OptionError("dtype", repr(self.dtype), "a torch.dtype")
        if self.operation == "sdpa_fp8" and self.dtype not in FP8_DTYPES:
            raise OptionError("dtype", repr(self.dtype), "torch.float8_e4m3fn or torch.float8_e5m2")
        for name in FLAGS:
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise OptionError(name, repr(value), "True or False: whether the option is used")
            if value and name in LACKING[self.operation]:
                raise OptionError(name, "True", f"False: {self.operation} has no such argument")
        self._check_out_dtype()
        for name in ("head_dim", "head_dim_v", "sq", "skv"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise OptionError(name, repr(value), "a positive integer")
        arguments.check_options(self.dense())

    def _check_out_dtype(self) -> None:
        if self.out_dtype is None:
            return
        if "out_dtype" in LACKING[self.operation]:
            raise OptionError("out_dtype", repr(self.out_dtype), f"None: {self.operation} has no such argument")
        if self.out_dtype not in OUT_DTYPES:
            raise OptionError(
                "out_dtype", repr(self.out_dtype), "a dtype of FP8, torch.bfloat16, torch.float16 or None"
            )

    @property
    def is_packed(self) -> bool:
        """Whether it is about packed sequences."""
        return self.operation == "sdpa_varlen"

    @property
    def sizes(self) -> tuple[int, int]:
        """Batch and heads of the call that is asked about."""
        of_head = max(self.sq, self.skv) * max(self.head_dim, self.head_dim_v)
        return (BATCH, HEADS) if BATCH * HEADS * of_head <= MOST_ELEMENTS else (1, 1)

    def _tensor(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device="meta")

    def _shared(self) -> dict[str, Any]:
        left, right = arguments.window_bounds(self.window)
        _, heads = self.sizes
        return {
            "rng": self._tensor(2, dtype=torch.int64) if self.dropout else None,
            "sinks": self._tensor(heads, dtype=torch.float32) if self.sinks else None,
            "is_causal": self.is_causal,
            "causal_alignment": self.causal_alignment,
            "window_left": left,
            "window_right": right,
            "dropout_p": 0.1 if self.dropout else 0.0,
            "softcap": 20.0 if self.softcap else None,
            "deterministic": self.deterministic,
            "with_lse": self.direction == BACKWARD,
        }

    def dense(self) -> ForwardArguments:
        """A call of `sdpa` without data."""
        has_mask = self.attn_mask or self.attn_mask_grad
        batch, heads = self.sizes
        lengths = self._tensor(batch, dtype=torch.int32) if self.seq_lens else None
        return ForwardArguments(
            self._tensor(batch, heads, self.sq, self.head_dim),
            self._tensor(batch, heads, self.skv, self.head_dim),
            self._tensor(batch, heads, self.skv, self.head_dim_v),
            attn_mask=self._tensor(batch, heads, self.sq, self.skv) if has_mask else None,
            seq_lens_q=lengths,
            seq_lens_kv=lengths,
            alibi=self.alibi,
            **self._shared(),
        )

    def packed(self) -> VarlenArguments:
        """A call of `sdpa_varlen` without data."""
        batch, heads = self.sizes
        offsets = self._tensor(batch + 1, dtype=torch.int32)
        return VarlenArguments(
            self._tensor(batch * self.sq, heads, self.head_dim),
            self._tensor(batch * self.skv, heads, self.head_dim),
            self._tensor(batch * self.skv, heads, self.head_dim_v),
            cu_seqlens_q=offsets,
            cu_seqlens_kv=offsets,
            max_seqlen_q=self.sq,
            max_seqlen_kv=self.skv,
            **self._shared(),
        )

    def plans(self) -> list[NeededPlan]:
        """The plans that such a call needs; gradients need that of the forward pass too."""
        if self.operation == "sdpa_fp8":
            return self._fp8_plans()
        return self._packed_plans() if self.is_packed else self._dense_plans()

    def _dense_plans(self) -> list[NeededPlan]:
        forward = Forward.of(self.dense())
        problem, out = forward.problem, forward.out
        if problem.has_no_plan:
            return []
        plans = [NeededPlan("sdpa", partial(problem.case, FORWARD), partial(forward.key, device=None))]
        if self.direction == BACKWARD and not problem.is_single:
            backward = Backward(problem, out, out, self.deterministic, self.attn_mask_grad, self.sinks)
            case = partial(problem.case, BACKWARD, deterministic=self.deterministic, bias_gradient=self.attn_mask_grad)
            key = partial(backward.key, device=None)
            plans.append(NeededPlan("the gradient of sdpa", case, partial(_key_of_piece, self.dense(), key)))
        return plans

    def _packed_plans(self) -> list[NeededPlan]:
        call = self.packed()
        packed = varlen_calls.packed(call)
        out = TensorLayout.contiguous((*packed.q.shape[:2], self.head_dim_v), self.dtype)
        key = partial(packed.forward_key, out, self.direction == BACKWARD, device=None)
        plans = [NeededPlan("sdpa_varlen", partial(packed.case, FORWARD), key)]
        if self.direction == BACKWARD:
            case = partial(packed.case, BACKWARD, deterministic=self.deterministic)
            key = partial(packed.backward_key, out, out, self.deterministic, device=None)
            plans.append(NeededPlan("the gradient of sdpa_varlen", case, partial(_key_of_piece, call.as_dense(), key)))
        return plans

    def _fp8_plans(self) -> list[NeededPlan]:
        problem = fp8_passes.problem_of(self.dense())
        shape = (*problem.q.shape[:3], self.head_dim_v)
        half = self.out_dtype not in (None, *FP8_DTYPES)
        out = TensorLayout.contiguous(shape, self.out_dtype or self.dtype)
        forward = fp8_passes.Forward(problem, out, self.direction == BACKWARD)
        case = partial(problem.case, FORWARD, half_output=half)
        plans = [NeededPlan("sdpa_fp8", case, partial(forward.key, device=None), FP8_RULES)]
        if self.direction == BACKWARD:
            quantized = TensorLayout.contiguous(shape, self.dtype)
            backward = fp8_passes.Backward(problem, quantized, quantized, self.deterministic)
            case = partial(problem.case, BACKWARD, deterministic=self.deterministic)
            plans.append(NeededPlan("sdpa_fp8_backward", case, partial(backward.key, device=None), FP8_RULES))
        return plans

    def __str__(self) -> str:
        what = self.operation if self.direction == FORWARD else f"gradients of {self.operation}"
        used = [name for name in FLAGS if getattr(self, name)]
        used += [f"window={self.window}"] if self.window is not None else []
        used += [f"out_dtype={self.out_dtype}".replace("torch.", "")] if self.out_dtype is not None else []
        used += [self.causal_alignment] if self.is_causal or self.window is not None else []
        dims = f"head dims {self.head_dim} and {self.head_dim_v}, Sq={self.sq}, Skv={self.skv}"
        return f"{what}: " + ", ".join([str(self.dtype).removeprefix("torch."), dims, *used])


def _key_of_piece(call: ForwardArguments, key: Callable[[Target], PlanKey], target: Target) -> PlanKey:
    """The key of a call that is no larger than it must be, unless it is too large even so."""
    if pieces.is_too_large(*call[:3]):
        pieces.cut(*call[:3])
    return key(target)


@dataclass(frozen=True)
class NeededPlan:
    """A plan that a call needs, with the GPU and the version still open.

    Attributes:
        what: What it computes, for messages.
        case: What the rules of support are asked about.
        key: Its key; raises `UnsupportedError` if a rule speaks against it.
        rules: The rules of support that hold for it.
    """

    what: str
    case: Callable[[Target], Case]
    key: Callable[[Target], PlanKey]
    rules: tuple[Rule, ...] = RULES

    def refusal(self, target: Target) -> UnsupportedError | None:
        """Everything that speaks against it: rules of support, or faults of this version that it would show."""
        refused = refusal(replace(self.case(target), gpu=target.name), self.what, self.rules)
        if refused is not None:
            return refused
        return UnsupportedError.of(lambda: known_issues.check(self.key(target)))

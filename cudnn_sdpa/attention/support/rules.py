"""The limits of cuDNN's attention kernels, as data: a configuration, and the rules that reject it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cudnn_sdpa.attention.mask import Band
from cudnn_sdpa.attention.sink_scores import SinkUse
from cudnn_sdpa.attention.spec import AttentionSpec
from cudnn_sdpa.errors import UnsupportedError
from cudnn_sdpa.graph.target import Target

FORWARD = "forward"
BACKWARD = "backward"


@dataclass(frozen=True, slots=True)
class Configuration:
    """One computation on one kind of GPU, as far as it decides whether there is a plan.

    Attributes:
        operation: "forward" or "backward".
        sm: Compute capability as one number, 90 for 9.0.
        cudnn: Version as a number, 91900 for 9.19.0.
        gpu: The GPU's name, for messages.
        band: The normalized mask.
        bias: Whether there is an `attn_mask`, of any dtype.
        capped: Whether there is logit soft-capping.
        alibi: Whether there are linear biases.
        deterministic: Whether the gradients must be bit-exact.
        half_output: Whether what is computed from FP8 is to be float16 or bfloat16.
    """

    operation: str
    dtype: torch.dtype
    head_dim: int
    head_dim_v: int
    sq: int
    skv: int
    sm: int
    cudnn: int
    gpu: object = "this GPU"
    packed: bool = False
    band: Band | None = None
    lengths: bool = False
    bias: bool = False
    bias_gradient: bool = False
    sinks: bool = False
    dropout: bool = False
    capped: bool = False
    alibi: bool = False
    deterministic: bool = False
    half_output: bool = False

    @classmethod
    def of(cls, spec: AttentionSpec, operation: str, target: Target, **facts: Any) -> Configuration:
        """The configuration of a spec's plan; `facts` are the attributes that depend on the kind of call."""
        return cls(
            operation=operation,
            dtype=spec.q.dtype,
            head_dim=spec.q.shape[-1],
            head_dim_v=spec.v.shape[-1],
            sm=target.sm,
            cudnn=target.cudnn,
            gpu=target,
            band=spec.mask.band,
            sinks=spec.sink_use is not SinkUse.ABSENT,
            dropout=spec.dropout_p > 0,
            capped=spec.is_capped,
            alibi=spec.alibi,
            **facts,
        )

    @property
    def backward(self) -> bool:
        return self.operation == BACKWARD

    @property
    def largest_head_dim(self) -> int:
        return max(self.head_dim, self.head_dim_v)

    @property
    def bottom_right(self) -> bool:
        """Whether cuDNN itself would have to align a causal mask to the last key."""
        return self.band is not None and self.band[2] and self.band[1] is not None

    @property
    def backward_head_dim(self) -> int:
        return 256 if self.sm // 10 == 9 else 128

    @property
    def is_hopper(self) -> bool:
        """Whether the GPU has engines of SM 90."""
        return self.sm // 10 == 9

    @property
    def is_consumer_blackwell(self) -> bool:
        """Whether the GPU is of the kind of an RTX 50, SM 12x."""
        return self.sm // 10 == 12

    @property
    def is_ampere_kind(self) -> bool:
        """Whether the GPU is served by the engines of SM 8x, as SM 12x is too."""
        return self.sm // 10 in (8, 12)

    @property
    def is_data_center_blackwell(self) -> bool:
        """Whether the GPU has engines of SM 10x."""
        return self.sm // 10 == 10

    @property
    def has_dropout_or_bias_gradient(self) -> bool:
        """Whether the backward pass has dropout, cuDNN's linear biases, or a gradient of attn_mask to give."""
        return self.bias_gradient or self.dropout or (self.alibi and not self.capped)


DTYPES = (torch.float16, torch.bfloat16)
MIN_SM = 80
MAX_HEAD_DIM = 1024


@dataclass(frozen=True, slots=True)
class Rule:
    """Something that cuDNN lacks.

    Attributes:
        applies: Whether it rejects a configuration.
        reason: Why, filled in with the configuration's attributes.
        suggestion: What works instead, likewise.
        wrong: Whether cuDNN has a plan nevertheless, which is wrong or was never seen to be right.
    """

    applies: Callable[[Configuration], bool]
    reason: str
    suggestion: str
    wrong: bool = False


def _lacks_backward_head_dim(config: Configuration) -> bool:
    if not config.backward or config.largest_head_dim <= config.backward_head_dim:
        return False
    if not config.is_data_center_blackwell:
        return True
    first = {(192, 128): 91100, (256, 256): 92300}.get((config.head_dim, config.head_dim_v))
    return first is None or config.cudnn < first


def _starts_late(config: Configuration) -> bool:
    negative = config.band is not None and config.band[0] is not None and config.band[0] < 0
    return negative and not config.capped and (config.bias or config.dropout or config.alibi)


def _lacks_gradient_over_one_key(config: Configuration) -> bool:
    if not (config.backward and config.bias and config.skv == 1):
        return False
    if config.is_data_center_blackwell:
        return config.bias_gradient or (config.cudnn < 92800 and (config.deterministic or config.capped))
    return config.is_ampere_kind


RULES = (
    Rule(
        lambda config: config.sm < MIN_SM,
        "{gpu} has compute capability {capability}; cuDNN's attention needs 8.0",
        "torch.nn.functional.scaled_dot_product_attention on this GPU",
    ),
    Rule(
        lambda config: config.dtype not in DTYPES,
        "cuDNN's attention takes float16 or bfloat16, not {dtype_name}",
        "q, k and v converted to torch.bfloat16",
    ),
    Rule(
        lambda config: config.head_dim % 8 != 0 or config.head_dim_v % 8 != 0,
        "cuDNN's attention takes head dims that are multiples of 8, not {head_dim} and {head_dim_v}",
        "q, k and v padded with torch.nn.functional.pad",
    ),
    Rule(
        lambda config: config.largest_head_dim > MAX_HEAD_DIM,
        f"head dim {{largest_head_dim}} is over {MAX_HEAD_DIM}, the largest that this library is tested with",
        f"head dims of up to {MAX_HEAD_DIM}",
    ),
    Rule(
        lambda config: config.cudnn in (91000, 91001),
        "cuDNN {version} computes attention wrongly",
        "cuDNN 9.10.2 or newer",
        wrong=True,
    ),
    Rule(
        _lacks_backward_head_dim,
        "gradients have no kernel for head dims {head_dim} and {head_dim_v} on SM {sm}",
        "head dims of up to {backward_head_dim}, or no gradients",
    ),
    Rule(
        lambda config: (
            config.dropout
            and config.is_data_center_blackwell
            and config.head_dim > config.head_dim_v == 128
            and config.head_dim != 192
            and config.cudnn >= 91100  # it compiles on 9.10.2
        ),
        "on SM {sm} there is no dropout for head dims {head_dim} and 128: cuDNN's kernel does not compile",
        "v padded to head dim 136, and the output sliced",
    ),
    Rule(
        lambda config: config.backward and config.packed and config.is_ampere_kind,
        "on SM {sm} there are no gradients of packed sequences",
        "padded sequences, with seq_lens_q and seq_lens_kv",
    ),
    Rule(
        lambda config: config.backward and config.capped and config.is_ampere_kind,
        "on SM {sm} there are no gradients with softcap",
        "softcap=None, or no gradients",
    ),
    Rule(
        lambda config: config.bottom_right and not config.capped and (config.bias or config.dropout or config.alibi),
        "a causal mask or right window bound aligned bottom-right cannot be combined with attn_mask, dropout or alibi "
        "if sequence lengths are given or the window is narrower than Skv - Sq",
        "the band drawn into attn_mask, without is_causal and window",
    ),
    Rule(
        lambda config: config.backward and _starts_late(config),
        "gradients with attn_mask, dropout or alibi cannot be combined with a bottom-right window that starts after "
        "the first query's key",
        "the band drawn into attn_mask, without is_causal and window",
    ),
    Rule(
        lambda config: (
            config.alibi and not config.capped and (config.band is None or config.band[1] != 0 or config.band[2])
        ),
        "alibi needs a causal mask aligned top-left",
        "the ALiBi biases passed as attn_mask",
    ),
    Rule(
        lambda config: config.alibi and config.capped,
        "softcap and alibi cannot be combined",
        "the ALiBi biases passed as attn_mask",
        wrong=True,
    ),
    Rule(
        lambda config: (
            config.sinks and not config.backward and config.cudnn < 91300 and (config.packed or config.sq > 1)
        ),
        "attention sinks need cuDNN 9.13, and this is {version}",
        "a newer cuDNN, or no sinks",
    ),
    Rule(  # seen on 9.10.2, not on 9.19
        lambda config: config.backward and config.sq == 1 and config.is_data_center_blackwell and config.cudnn < 91900,
        "on SM {sm} planning the gradients of a single query crashes cuDNN before 9.19, and this is {version}",
        "a newer cuDNN, or no gradients",
        wrong=True,
    ),
    Rule(  # seen on 9.10.2, not on 9.19
        lambda config: config.backward and config.capped and config.skv % 128 != 0 and config.cudnn < 91100,
        "gradients with softcap need a multiple of 128 keys with cuDNN {version}",
        "a newer cuDNN, or keys padded to a multiple of 128 and hidden with attn_mask",
    ),
    Rule(
        lambda config: config.capped and config.lengths and config.sq == 1 and not config.packed,
        "with softcap and actual sequence lengths, cuDNN computes a single query wrongly",
        "an attn_mask (B, 1, 1, Skv) that masks the keys past each length",
        wrong=True,
    ),
    Rule(
        lambda config: config.dropout and config.sq == 1,
        "dropout with a single query is disabled: cuDNN reads out of bounds (known issue)",
        "dropout_p=0, or more queries",
        wrong=True,
    ),
    Rule(
        lambda config: config.capped and config.bias_gradient,
        "with softcap, cuDNN gives wrong gradients of attn_mask",
        "an attn_mask that requires no grad",
        wrong=True,
    ),
    Rule(
        lambda config: (
            config.backward
            and config.is_data_center_blackwell
            and config.head_dim == config.head_dim_v == 256
            and config.has_dropout_or_bias_gradient
        ),
        "on SM {sm} gradients with head dim 256 cannot be combined with dropout, alibi or gradients of attn_mask",
        "head dims of up to {backward_head_dim}, or none of these",
    ),
    Rule(
        lambda config: (
            config.bias_gradient
            and config.is_data_center_blackwell
            and (config.head_dim, config.head_dim_v) == (192, 128)
        ),
        "on SM {sm} there are no gradients of attn_mask for head dims {head_dim} and {head_dim_v}",
        "an attn_mask that requires no grad, or head dims of up to {backward_head_dim}",
    ),
    Rule(
        lambda config: (
            config.bias_gradient
            and config.dropout
            and config.is_data_center_blackwell
            and config.cudnn >= 91100  # 9.10.2 has a kernel
        ),
        "on SM {sm} there are no gradients of attn_mask with dropout",
        "dropout_p=0, or an attn_mask that requires no grad",
    ),
    Rule(
        _lacks_gradient_over_one_key,
        "on SM {sm} there are no gradients with an attn_mask over a single key",
        "a second key that attn_mask masks",
    ),
    Rule(
        lambda config: (
            config.backward
            and config.deterministic
            and config.is_data_center_blackwell
            and config.has_dropout_or_bias_gradient
        ),
        "on SM {sm} there is no deterministic kernel for gradients of attn_mask, dropout or alibi",
        "deterministic=False",
    ),
    Rule(
        lambda config: (
            config.backward and config.deterministic and config.is_data_center_blackwell and config.cudnn < 91800
        ),
        "on SM {sm} deterministic gradients need cuDNN 9.18, and this is {version}",
        "deterministic=False",
    ),
    Rule(
        lambda config: (
            config.backward
            and config.deterministic
            and config.capped
            and config.lengths
            and config.is_data_center_blackwell
            and config.cudnn < 92800
        ),
        "on SM {sm} deterministic gradients with softcap and lengths need cuDNN 9.28, and this is {version}",
        "deterministic=False",
    ),
    Rule(
        lambda config: config.packed and config.sm < 90 and config.cudnn < 91801,
        "on SM {sm} packed sequences need cuDNN 9.18.1, and this is {version}",
        "padded sequences, with seq_lens_q and seq_lens_kv",
    ),
)


def refusal(config: Configuration, what: str, rules: Sequence[Rule] = RULES) -> UnsupportedError | None:
    """One error with the reasons of all rules that reject a configuration; None if none does."""
    broken = [rule for rule in rules if rule.applies(config)]
    if not broken:
        return None
    named = ("gpu", "sm", "head_dim", "head_dim_v", "largest_head_dim", "sq", "skv")
    facts = {name: getattr(config, name) for name in named}
    facts |= {
        "capability": config.sm / 10,
        "dtype_name": str(config.dtype).removeprefix("torch."),
        "backward_head_dim": config.backward_head_dim,
        "version": f"{config.cudnn // 10000}.{config.cudnn // 100 % 100}.{config.cudnn % 100}",
    }
    suggestions = dict.fromkeys(rule.suggestion.format(**facts) for rule in broken)
    return UnsupportedError(what, [rule.reason.format(**facts) for rule in broken], "; ".join(suggestions))


def refuse(config: Configuration, what: str, rules: Sequence[Rule] = RULES) -> None:
    """Raises one error with the reasons of all rules that reject the configuration, if any does."""
    refused = refusal(config, what, rules)
    if refused is not None:
        raise refused

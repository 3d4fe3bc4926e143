"""What cuDNN has FP8 kernels for, as data: the rules that reject a configuration.

Found by planning for an H200, a B200 and an RTX 5090 with cuDNN 9.19, and in the frontend's own checks
(`sdpa_support_surface.h`, `sdpa_fp8_bwd.h`).
"""

from __future__ import annotations

from cudnn_sdpa.attention.support.rules import Configuration, Rule

MIN_SM = 90
FIRST_WIDE_KEYS = 91900  #: cuDNN's first kernels on Blackwell for head dims 192 and 128
FIRST_HALF_OUTPUT = 91300  #: and for outputs that are not FP8

_BFLOAT16 = "sdpa, with q, k and v dequantized to torch.bfloat16"


def _lacks_wide_heads(case: Configuration) -> bool:
    if case.sm < 100 or case.largest_head_dim <= 128:
        return False
    if case.is_data_center_blackwell:
        known = [(192, 128)] if case.backward else [(192, 128), (256, 256)]
        return (case.head_dim, case.head_dim_v) not in known
    return True


def _lacks_half_output(case: Configuration) -> bool:
    return case.half_output and (not case.is_data_center_blackwell or case.cudnn < FIRST_HALF_OUTPUT)


RULES = (
    Rule(
        lambda case: case.sm < MIN_SM,
        "{gpu} has compute capability {capability}; cuDNN's attention in FP8 needs 9.0",
        _BFLOAT16,
    ),
    Rule(
        lambda case: case.cudnn == 91000,
        "cuDNN {version} has no attention in FP8",
        "cuDNN 9.10.1 or newer",
    ),
    Rule(
        lambda case: case.backward and case.is_consumer_blackwell,
        "on SM {sm} there are no gradients in FP8",
        f"{_BFLOAT16}, for training on this GPU",
    ),
    Rule(
        lambda case: case.is_hopper and not case.backward and case.largest_head_dim > 256,
        "head dims {head_dim} and {head_dim_v} have no FP8 kernel on SM {sm}",
        "head dims of up to 256",
    ),
    Rule(
        lambda case: case.is_hopper and not case.backward and case.head_dim <= 128 < case.head_dim_v,
        "on SM {sm} with a head dim of up to 128, {head_dim}, and one of v over 128, {head_dim_v}, cuDNN's FP8 kernel "
        "accesses memory that is not its own (seen on 9.19 with an H200)",
        "q and k padded with zeros to a head dim over 128, with the scale of their own size",
        wrong=True,
    ),
    Rule(
        lambda case: case.is_hopper and case.backward and (case.head_dim, case.head_dim_v) != (128, 128),
        "on SM {sm} gradients in FP8 have kernels for head dim 128 alone, not for {head_dim} and {head_dim_v}",
        "smaller heads padded with zeros to head dim 128, with the scale of their own size; or " + _BFLOAT16,
    ),
    Rule(
        _lacks_wide_heads,
        "head dims {head_dim} and {head_dim_v} have no FP8 kernel on SM {sm}",
        "head dims of up to 128",
    ),
    Rule(  # from 9.26 on there is a plan
        lambda case: case.is_data_center_blackwell and case.head_dim == case.head_dim_v == 256 and not case.backward,
        "on SM {sm} attention in FP8 with head dim 256 is wrong (cudnn-frontend#981)",
        "head dims of up to 128",
        wrong=True,
    ),
    Rule(
        lambda case: (
            (case.head_dim, case.head_dim_v) == (192, 128)
            and case.is_data_center_blackwell
            and case.cudnn < FIRST_WIDE_KEYS
        ),
        "on SM {sm} head dims 192 and 128 in FP8 need cuDNN 9.19, and this is {version}",
        "a newer cuDNN, or head dims of up to 128",
    ),
    Rule(
        lambda case: case.is_hopper and case.bottom_right,
        "on SM {sm} there is no FP8 kernel for a bottom-right mask with a right bound, unless it can be counted from "
        "the top left, which actual sequence lengths and a window narrower than Skv - Sq do not allow",
        "calls without seq_lens_q and seq_lens_kv, or causal_alignment='top_left'",
    ),
    Rule(
        lambda case: (
            case.backward
            and case.bottom_right
            and case.is_data_center_blackwell
            and (case.sq % 64 != 0 or case.skv % 64 != 0)
        ),
        "bottom-right gradients in FP8 need multiples of 64 queries and keys, not {sq} and {skv}",
        "queries and keys padded to multiples of 64, with seq_lens_q and seq_lens_kv",
    ),
    Rule(
        lambda case: case.backward and case.bottom_right and case.is_data_center_blackwell and case.sq > case.skv,
        "bottom-right gradients in FP8 need as many keys as queries, {sq}, and not {skv}",
        "keys and values padded to as many as queries, with seq_lens_q and seq_lens_kv",
    ),
    Rule(
        _lacks_half_output,
        "on SM {sm} with cuDNN {version} the output in FP8 attention is FP8: others need SM 100 and cuDNN 9.13",
        "out_dtype=None, and then out.to(torch.bfloat16) / scales.scale_o",
    ),
    Rule(
        lambda case: case.sq == 1 and not case.backward and not case.is_data_center_blackwell,
        "on SM {sm} there is no FP8 kernel for a single query",
        "two queries or more, of which all but one are padding; or " + _BFLOAT16,
    ),
    Rule(
        lambda case: (
            case.sq == 1
            and not case.backward
            and case.is_data_center_blackwell
            and (case.head_dim, case.head_dim_v) == (192, 128)
        ),
        "on SM {sm} there is no FP8 kernel for a single query with head dims 192 and 128",
        "two queries or more, of which all but one are padding; or head dims of up to 128",
    ),
    Rule(  # on Hopper the query gets rows of zeros after it
        lambda case: case.backward and case.sq == case.skv == 1 and not case.is_hopper,
        "cuDNN has no gradients of one query on one key",
        "nothing: the gradient of v is the output's, and those of q and k are zero",
    ),
)

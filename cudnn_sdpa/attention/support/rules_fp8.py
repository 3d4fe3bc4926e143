"""The limits of cuDNN's FP8 kernels, as data: the rules that reject a configuration.

Found by planning for an H200, a B200 and an RTX 5090 with cuDNN 9.19, and in the frontend's own checks
(`sdpa_support_surface.h`, `sdpa_fp8_bwd.h`).
"""

from __future__ import annotations

from cudnn_sdpa.attention.support.rules import Configuration, Rule

MIN_SM = 90
FIRST_WIDE_KEYS = 91900  #: cuDNN's first kernels on Blackwell for head dims 192 and 128
FIRST_HALF_OUTPUT = 91300  #: and for outputs that are not FP8

_BFLOAT16 = "sdpa, with q, k and v dequantized to torch.bfloat16"


def _lacks_wide_heads(config: Configuration) -> bool:
    if config.sm < 100 or config.largest_head_dim <= 128:
        return False
    if config.is_data_center_blackwell:
        known = [(192, 128)] if config.backward else [(192, 128), (256, 256)]
        return (config.head_dim, config.head_dim_v) not in known
    return True


def _lacks_half_output(config: Configuration) -> bool:
    return config.half_output and (not config.is_data_center_blackwell or config.cudnn < FIRST_HALF_OUTPUT)


def _passes_the_last_key(config: Configuration) -> bool:
    left, right, bottom_right = config.band or (None, None, False)
    is_left_window = left is not None and right is None and bottom_right and config.sq > left + 1
    return config.is_hopper and config.lengths and is_left_window


RULES = (
    Rule(
        lambda config: config.sm < MIN_SM,
        "{gpu} has compute capability {capability}; cuDNN's attention in FP8 needs 9.0",
        _BFLOAT16,
    ),
    Rule(
        lambda config: config.cudnn == 91000,
        "cuDNN {version} has no attention in FP8",
        "cuDNN 9.10.1 or newer",
    ),
    Rule(
        lambda config: config.backward and config.is_consumer_blackwell,
        "on SM {sm} there are no gradients in FP8",
        f"{_BFLOAT16}, for training on this GPU",
    ),
    Rule(
        lambda config: config.is_hopper and not config.backward and config.largest_head_dim > 256,
        "head dims {head_dim} and {head_dim_v} have no FP8 kernel on SM {sm}",
        "head dims of up to 256",
    ),
    Rule(
        lambda config: config.is_hopper and not config.backward and config.head_dim <= 128 < config.head_dim_v,
        "on SM {sm} with a head dim of up to 128, {head_dim}, and one of v over 128, {head_dim_v}, cuDNN's FP8 kernel "
        "accesses memory out of bounds (seen on 9.19 with an H200)",
        "q and k padded with zeros to a head dim over 128, with the scale of their own size",
        wrong=True,
    ),
    Rule(
        lambda config: config.is_hopper and config.backward and (config.head_dim, config.head_dim_v) != (128, 128),
        "FP8 gradients on SM {sm} support only head dim 128, not head dims {head_dim} and {head_dim_v}",
        "smaller heads padded with zeros to head dim 128, with the scale of their own size; or " + _BFLOAT16,
    ),
    Rule(
        _lacks_wide_heads,
        "head dims {head_dim} and {head_dim_v} have no FP8 kernel on SM {sm}",
        "head dims of up to 128",
    ),
    Rule(  # from 9.26 on there is a plan
        lambda config: (
            config.is_data_center_blackwell and config.head_dim == config.head_dim_v == 256 and not config.backward
        ),
        "on SM {sm} attention in FP8 with head dim 256 is wrong (cudnn-frontend#981)",
        "head dims of up to 128",
        wrong=True,
    ),
    Rule(
        lambda config: (
            (config.head_dim, config.head_dim_v) == (192, 128)
            and config.is_data_center_blackwell
            and config.cudnn < FIRST_WIDE_KEYS
        ),
        "on SM {sm} head dims 192 and 128 in FP8 need cuDNN 9.19, and this is {version}",
        "a newer cuDNN, or head dims of up to 128",
    ),
    Rule(
        lambda config: config.is_hopper and config.bottom_right,
        "on SM {sm} there is no FP8 kernel for a causal mask or right window bound aligned bottom-right if sequence "
        "lengths are given or the window is narrower than Skv - Sq",
        "calls without seq_lens_q and seq_lens_kv, or causal_alignment='top_left'",
    ),
    Rule(
        _passes_the_last_key,
        "on SM {sm} cuDNN's FP8 kernel attends to keys past a length if a bottom-right window has no right bound "
        "and a sequence has more queries than keys plus the left bound (seen on 9.19 with an H200)",
        "calls without seq_lens_q and seq_lens_kv, causal_alignment='top_left', or a left bound of at least Sq - 1",
        wrong=True,
    ),
    Rule(
        lambda config: (
            config.backward
            and config.bottom_right
            and config.is_data_center_blackwell
            and (config.sq % 64 != 0 or config.skv % 64 != 0)
        ),
        "bottom-right gradients in FP8 need multiples of 64 queries and keys, not {sq} and {skv}",
        "queries and keys padded to multiples of 64, with seq_lens_q and seq_lens_kv",
    ),
    Rule(
        lambda config: (
            config.backward and config.bottom_right and config.is_data_center_blackwell and config.sq > config.skv
        ),
        "bottom-right gradients in FP8 need as many keys as queries, {sq}, and not {skv}",
        "keys and values padded to as many as queries, with seq_lens_q and seq_lens_kv",
    ),
    Rule(
        _lacks_half_output,
        "on SM {sm} with cuDNN {version} the output of FP8 attention is FP8; other dtypes need SM 100 and cuDNN 9.13",
        "out_dtype=None, and then out.to(torch.bfloat16) / scales.scale_o",
    ),
    Rule(
        lambda config: config.sq == 1 and not config.backward and not config.is_data_center_blackwell,
        "on SM {sm} there is no FP8 kernel for a single query",
        "two queries or more, of which all but one are padding; or " + _BFLOAT16,
    ),
    Rule(
        lambda config: (
            config.sq == 1
            and not config.backward
            and config.is_data_center_blackwell
            and (config.head_dim, config.head_dim_v) == (192, 128)
        ),
        "on SM {sm} there is no FP8 kernel for a single query with head dims 192 and 128",
        "two queries or more, of which all but one are padding; or head dims of up to 128",
    ),
    Rule(  # on Hopper the query gets rows of zeros after it
        lambda config: config.backward and config.sq == config.skv == 1 and not config.is_hopper,
        "cuDNN has no gradients of one query on one key",
        "nothing: the gradient of v is the output's, and those of q and k are zero",
        wrong=True,  # NVIDIA's frontend refuses it where it has engines of its own; cuDNN 9.28 plans it on SM 100
    ),
)

"""How calls on DTensors may be divided: what each option means for it. Calls are in `engine/test_sharding.py`."""

from __future__ import annotations

from cudnn_sdpa.attention import sharding
from cudnn_sdpa.attention.arguments import ForwardArguments, Softmax
from cudnn_sdpa.attention.fp8.arguments import Fp8Arguments

#: Arguments that mean the same for each query, wherever it stands in the sequence.
FOR_ALL_QUERIES = {
    *("q", "k", "v", "attn_mask", "sinks", "seq_lens_kv", "page_table", "page_table_v", "rng"),
    *("scale", "dropout_p", "softcap", "deterministic", "with_lse", "out", "out_dtype"),
    *("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o"),
}
#: Arguments that place the band.
OF_THE_BAND = {"causal_alignment", "window_left", "window_right"}


def test_it_is_known_of_each_argument_whether_it_counts_queries():
    arguments = {*ForwardArguments._fields, *Softmax._fields, *Fp8Arguments._fields} - {"softmax"}
    assert arguments == FOR_ALL_QUERIES | OF_THE_BAND | set(sharding.OF_POSITIONS)

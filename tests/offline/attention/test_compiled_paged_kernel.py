"""The kernel for pages of latent attention, compiled by the real NVRTC for absent GPUs: registers and shared memory."""

from __future__ import annotations

import re

import pytest
import torch

from cudnn_sdpa.attention.paged_varlen.plans import Spec, paged_varlen_forward
from cudnn_sdpa.attention.paged_varlen.sdpa_paged_varlen import call_of
from cudnn_sdpa.graph.target import Target

pytestmark = pytest.mark.usefixtures("nvrtc")


@pytest.mark.parametrize(("sm", "spills"), [(80, 500), (90, 0), (100, 500)])
def test_latent_attention(sm, spills):
    """On Hopper no register of the 128 sums and 32 scores of a thread is spilled."""
    target = Target((("deviceVer", 10 * sm), ("multiProcessorCount", 100)), 91900, "1", "a GPU")
    q = torch.empty(4, 16, 576, dtype=torch.bfloat16, device="meta")
    pages = torch.empty(9, 64, 1, 576, dtype=torch.bfloat16, device="meta")
    ints = torch.empty(5, 8, dtype=torch.int32, device="meta")
    optional = dict.fromkeys(("page_table_v", "window_size", "scale", "softcap", "sinks", "tree_mask"))
    optional |= dict.fromkeys(("k_scale", "v_scale", "out"))
    call = call_of(
        q=q,
        k_pages=pages,
        v_pages=pages[..., :512],
        page_table=ints[:4],
        seq_lens_kv=ints[:4, 0],
        cu_seqlens_q=ints[:, 0],
        max_seqlen_q=1,
        page_layout="NHD",
        is_causal=True,
        causal_alignment="bottom_right",
        batch_invariant=False,
        return_lse=True,
        **optional,
    )
    (launch,) = paged_varlen_forward.program(Spec.of(call).key(target, None)).calls
    assert launch.kernel.shared <= (163 if sm == 80 else 227) << 10
    code, log = launch.kernel.compile_verbosely(sm, "--ptxas-options=-v")
    assert code[:4] == b"\x7fELF"
    assert "warning" not in log.lower()
    spilled = re.findall(r"(\d+) bytes spill", log)
    assert spilled, log
    assert sum(map(int, spilled)) <= spills, log

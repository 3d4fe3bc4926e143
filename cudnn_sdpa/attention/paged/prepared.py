"""`prepare_paged`: decode steps that are repeated on the same tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from cudnn_sdpa.attention.arguments import MIN_SCALE
from cudnn_sdpa.attention.paged import launch, plans
from cudnn_sdpa.attention.paged.arguments import HND, PagedArguments
from cudnn_sdpa.attention.paged.sdpa_paged import PAGED
from cudnn_sdpa.engine.launch import BoundPlan
from cudnn_sdpa.errors import UnsupportedError
from cudnn_sdpa.plans.plan import current_raw_stream


class PreparedPaged:
    """A decode step on fixed memory: a call launches the plan and nothing else.

    Each call reads the tensors that it was prepared with: write new queries, lengths and tables into them. The kernel
    is chosen once; later changes of `torch.use_deterministic_algorithms` have no effect. Made by `prepare_paged`.

    Attributes:
        out: The output (B, Hq, 1, Dv), overwritten by each call.
        lse: The log-sum-exp (B, Hq, 1), or None.
    """

    def __init__(self, call: PagedArguments, bound: BoundPlan) -> None:
        self._plan = bound.plan
        with torch.cuda.device(self._plan.device):
            self._operands, outputs, kept = bound.pointers_for(call, (call.q, call.k_pages, call.v_pages))
        self._kept = call, bound, kept  # keeps the tensors alive
        self.out = outputs[0]
        self.lse = outputs[1] if len(outputs) > 1 else None
        self._stream = current_raw_stream(self._plan.device)
        self._workspace = torch.empty(self._plan.workspace, dtype=torch.uint8, device=call.q.device)

    def __call__(self) -> Tensor:
        """Launches the step on the current stream and returns the output; the tensors' GPU must be current."""
        if current_raw_stream(self._plan.device) != self._stream:
            for tensor in (self._workspace, self.out, self.lse):
                if tensor is not None:  # the allocator must not reuse their memory before this launch is done
                    tensor.record_stream(torch.cuda.current_stream())
        self._plan.launch_kept(self._operands, self._workspace.data_ptr())
        return self.out


def prepare_paged(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    seq_lens_kv: Tensor,
    *,
    page_layout: str = HND,
    scale: float | None = None,
    return_lse: bool = False,
) -> PreparedPaged:
    """Prepares a decode step that is repeated on the same tensors: a call costs no more than its launch.

    It takes single queries, with a batch size of 2^n or 3·2^n, on the tables and lengths of a `PagedKVCache`. For
    everything else use `sdpa_paged`.

    Args:
        q: Queries (B, Hq, 1, D).
        k_pages: Keys, as `sdpa_paged` takes them.
        v_pages: Values.
        page_table: Of a `PagedKVCache`.
        seq_lens_kv: Of a `PagedKVCache`.
        page_layout: "HND" or "NHD".
        scale: Factor applied to the scores; None is 1/sqrt(D).
        return_lse: Whether to compute the log-sum-exp.

    Returns:
        The prepared step.

    Raises:
        ArgumentError: An argument is wrong.
        UnsupportedError: The step takes more than one launch, with every reason.

    Examples:
        See the guide "Serving"; a GPU is required.
    """
    call = PagedArguments(
        q=q,
        k_pages=k_pages,
        v_pages=v_pages,
        page_table=page_table,
        page_table_v=None,
        seq_lens_kv=seq_lens_kv,
        page_layout=page_layout,
        scale=scale,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        with_lse=return_lse,
    )
    PAGED.check_all(call)
    reasons = plans.reasons_against_in_place(call)
    if call.scale_value < MIN_SCALE:
        reasons.append(f"the scale is {call.scale_value}, and cuDNN computes only positive ones")
    if not q.is_cuda:
        reasons.append(f"q is on {q.device}, and only cuDNN's plans can be prepared")
    if reasons:
        raise UnsupportedError("prepare_paged", reasons, "sdpa_paged")
    PAGED.check_strides(call)
    PAGED.check_memory(call)
    return PreparedPaged(call, launch.bind_decode(call, in_place=True))

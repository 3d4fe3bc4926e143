"""`prepare_paged`: decode steps that are repeated on the same tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from cudnn_sdpa.attention import memory
from cudnn_sdpa.attention.arguments import MIN_SCALE
from cudnn_sdpa.attention.paged import arguments, launch
from cudnn_sdpa.attention.paged.arguments import HND, PagedArguments, in_heads_order
from cudnn_sdpa.attention.paged.launch import PagedCall
from cudnn_sdpa.attention.paged.sdpa_paged import refuse_gradients
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

    def __init__(self, call: PagedArguments, prepared: PagedCall) -> None:
        self._kept = call, prepared  # keeps the tensors alive
        with torch.cuda.device(prepared.plan.device):
            outputs = prepared.outputs()
        self.out = outputs[0]
        self.lse = outputs[1] if len(outputs) > 1 else None
        self._operands = prepared.operands(
            q=call.q.data_ptr(),
            k=call.k.data_ptr(),
            v=call.v.data_ptr(),
            table_k=call.table_k.data_ptr(),
            table_v=call.table_v.data_ptr(),
            seq_lens_kv=call.seq_lens_kv.data_ptr(),
            outputs=outputs,
        )
        self._plan = prepared.plan
        self._stream = current_raw_stream(self._plan.device)
        self._workspace = torch.empty(self._plan.workspace, dtype=torch.uint8, device=call.q.device)

    def __call__(self) -> Tensor:
        """Launches the step on the current stream and returns the output; the tensors' GPU must be current."""
        if self._workspace.numel() != self._plan.workspace:  # `autotune` has chosen another plan
            self._workspace = self._workspace.new_empty(self._plan.workspace)
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
    k, v = in_heads_order(k_pages, page_layout), in_heads_order(v_pages, page_layout)
    call = PagedArguments(
        q=q, k=k, v=v, table_k=page_table, table_v=page_table, seq_lens_kv=seq_lens_kv, scale=scale, with_lse=return_lse
    )
    arguments.check(call)
    refuse_gradients(call)
    reasons = launch.reasons_against_in_place(call)
    if call.scale_value < MIN_SCALE:
        reasons.append(f"the scale is {call.scale_value}, and cuDNN computes only positive ones")
    if not q.is_cuda:
        reasons.append(f"q is on {q.device}, and only cuDNN's plans can be prepared")
    if reasons:
        raise UnsupportedError("prepare_paged", reasons, "sdpa_paged")
    memory.check_strides(call.q, call.k, call.v)
    memory.check_memory(call.q, call.k, call.v, None)
    return PreparedPaged(call, launch.find(call))

"""Steps of several tokens after which all sequences are equally long, as the host knows: plans for exactly that length.

`sdpa_paged` gets lengths as data, which its plans then read; on an H200 they take 8 to 17 % longer than one for exactly
these lengths. A `PagedKVCache` knows the lengths of its steps. The chunks of long prompts mostly end at the same ones,
and a length that comes back gets a plan of its own, built in the background as for `sdpa`.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from cudnn_sdpa.attention import arguments, debug, paged, paged_calls, paging
from cudnn_sdpa.attention.calls import Result, bind
from cudnn_sdpa.attention.comebacks import Comeback, comebacks
from cudnn_sdpa.attention.operators import MIN_SCALE
from cudnn_sdpa.attention.paged_arguments import PagedArguments, in_heads_order
from cudnn_sdpa.attention.paged_long import sequences_at_once
from cudnn_sdpa.attention.paged_plans import MOST_DECODED
from cudnn_sdpa.attention.paged_step import PagedStep
from cudnn_sdpa.attention.passes import Forward
from cudnn_sdpa.errors import UnsupportedError
from cudnn_sdpa.runtime import shapes
from cudnn_sdpa.runtime.eager import is_compiling
from cudnn_sdpa.runtime.plan import Plan, current_device
from cudnn_sdpa.runtime.target import live_target

#: Of so many shapes is remembered what waits for their plans.
MOST_WAITING = 1024

EQUAL = "equal"

_waiting: dict[Hashable, tuple[Forward, Comeback] | None] = {}


class EqualCall:
    """A call on sequences of one length, bound to the plan for it.

    Attributes:
        plan: The plan.
        last: What a `CallTable` resets.
    """

    __slots__ = ("_elsewhere", "_gather", "_own", "last", "plan")

    def __init__(self, call: PagedArguments, length: int, forward: Forward, plan: Plan) -> None:
        self._elsewhere = torch.cuda.device_count() > 1
        self._gather = paging.Gatherer(call, length)
        self._own = bind(forward, plan, call.scale_value, call.softcap)
        self.plan = plan
        self.last: Any = None

    def __call__(self, call: PagedArguments) -> Result:
        """The results of a call whose arguments are checked."""
        if self._elsewhere and current_device() != self.plan.device:
            with torch.cuda.device(self.plan.device):
                return self(call)
        batch = call.q.shape[0]
        k, v = (rows.view(batch, -1, *rows.shape[1:]).transpose(1, 2) for rows in self._gather.rows(call))
        return self._own(call.as_dense(call.q, k, v, with_lse=call.with_lse, out=call.out))


def attend(step: PagedStep, q: Tensor, pages: tuple[Tensor, Tensor], layout: str, options: dict[str, Any]) -> Result:
    """Attention of a step's tokens, by `sdpa_paged` or by the plan of a length that has come back."""
    call = None if is_compiling() else _as_equal(step, q, pages, layout, options)
    name = None if call is None else _name(step, call)
    if call is not None and name is not None:
        own = paged.find_known(call, lambda _: paged_calls.calls.get(name))
        if own is not None:
            return own(call)
    # A step of several tokens in a graph may have absent ones in a later replay.
    present = step.seq_lens_q if step.tokens > 1 or step.has_absent else None
    tables = step.page_table, step.seq_lens_kv
    result: Result = paged.sdpa_paged(q, *pages, *tables, seq_lens_q=present, page_layout=layout, **options)
    if call is not None and name is not None:
        _count(call, step.common_length or 0, name)
    return result


def _as_equal(
    step: PagedStep, q: Tensor, pages: tuple[Tensor, Tensor], layout: str, options: dict[str, Any]
) -> PagedArguments | None:
    """The call, not checked yet, if a plan for exactly its length could serve it."""
    if step.tokens <= MOST_DECODED or step.common_length is None or debug.enabled:
        return None
    if not isinstance(q, Tensor) or not q.is_cuda:
        return None
    if torch.cuda.is_current_stream_capturing():  # a replay may serve other lengths
        return None
    known = dict(options)
    left, right = arguments.window_bounds(known.pop("window", None))
    with_lse = known.pop("return_lse", False)
    k, v = (in_heads_order(part, layout) for part in pages)
    tables = step.page_table, step.page_table, step.seq_lens_kv
    try:
        return PagedArguments(q, k, v, *tables, window_left=left, window_right=right, with_lse=with_lse, **known)
    except TypeError:  # another option: `sdpa_paged` will know it, or say so
        return None


def _name(step: PagedStep, call: PagedArguments) -> Hashable:
    """All that decides a call, and whether its arguments are right; None of one that `sdpa_paged` will refuse."""
    try:
        return EQUAL, step.common_length, paged_calls.signature(call, in_place=False)
    except (AttributeError, IndexError, TypeError, RuntimeError):
        return None


def _count(call: PagedArguments, length: int, name: Hashable) -> None:
    """Counts the use of a shape whose arguments have been checked; takes over its own plan, once that is there."""
    if shapes.active() != shapes.TIERED or call.scale_value < MIN_SCALE:
        return
    if call.q.shape[0] > sequences_at_once(call) or torch.are_deterministic_algorithms_enabled():
        return
    if name not in _waiting:
        if len(_waiting) >= MOST_WAITING:
            _waiting.clear()
        _waiting[name] = _described(call, length)
    waiting = _waiting.get(name)
    plan = None if waiting is None else waiting[1].use()
    if waiting is not None and plan is not None:
        with torch.cuda.device(plan.device):
            paged_calls.calls.add(name, EqualCall(call, length, waiting[0], plan))


def _described(call: PagedArguments, length: int) -> tuple[Forward, Comeback] | None:
    """The call on keys and values in a row, and the count of its uses; None if there is known to be no plan."""
    rows = []
    for pages in (call.k, call.v):
        shape = call.q.shape[0], length, pages.shape[1], pages.shape[3]
        rows.append(torch.empty(shape, dtype=pages.dtype, device="meta").transpose(1, 2))
    forward = Forward.of(call.as_dense(call.q, *rows, with_lse=call.with_lse, out=call.out))
    device = call.q.get_device()
    try:
        return forward, comebacks.of(forward.key(live_target(device), device))
    except UnsupportedError:
        return None

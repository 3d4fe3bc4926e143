"""Packed documents that only `position_ids` tell apart: where positions go back, or stay, another document begins.

DeepSpeed's sequence parallelism and collators without padding say it so, also beside a cache, where transformers' own
masks do not look. A look waits for the GPU, so there is one for each tensor of positions, which all layers share.
Where nothing can be looked at, the device is asked to stop: documents must not see each other in silence.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cudnn_sdpa.engine.dispatch_state import is_plain_memory
from cudnn_sdpa.graph.symbolic_shapes import is_true

#: What says the same everywhere. Messages on a GPU have at most 255 characters.
SUGGESTION = "use_cache=False, or cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k"
_STOP = (
    f"cudnn_sdpa in transformers: position_ids begin anew, where none may be looked at (compiled, captured, or "
    f"inspect_padding=False). Use {SUGGESTION}."
)


class Documents(NamedTuple):
    """Offsets (N + 1,) int32 of the documents of all sequences, end to end, and the length of the longest."""

    offsets: Tensor
    longest: int


class _Look(NamedTuple):
    """What was found in a tensor of positions, as it was then."""

    positions: weakref.ref[Tensor]
    version: int | None
    batch: int
    may_look: bool
    found: Documents | None


_last = threading.local()


def documents(positions: Any, query: Tensor, *, may_look: bool) -> Documents | None:
    """The documents that positions (B or 1, S) tell apart among queries (B, Hq, S, D), None if they are one each.

    Positions of other shapes say something else, and are passed over.

    Args:
        positions: What a model hands on as `position_ids`.
        query: Queries, more than one.
        may_look: Whether to wait for the GPU.
    """
    batch, length = query.shape[0], query.shape[2]
    if not isinstance(positions, Tensor) or positions.dim() not in (1, 2) or positions.is_floating_point():
        return None
    rows = 1 if positions.dim() == 1 else positions.shape[0]
    if not is_true(positions.shape[-1] == length) or not (is_true(rows == 1) or is_true(rows == batch)):
        return None
    if torch.compiler.is_compiling() or not is_plain_memory(positions) or _is_captured(positions):
        _stop(positions)
        return None
    version = None if positions.is_inference() else positions._version
    last: _Look | None = getattr(_last, "look", None)
    if last is not None and version is not None and last.positions() is positions:  # no other, nor a changed one
        asked = last.version, last.batch, last.may_look
        if asked == (version, batch, may_look):
            return last.found
    found = None
    if may_look:
        found = _look(positions.expand(batch, length))
    else:
        _stop(positions)
    _last.look = _Look(weakref.ref(positions), version, batch, may_look, found)
    return found


def _look(positions: Tensor) -> Documents | None:
    """What positions (B, S) say; this is where the host waits."""
    begins = positions.diff(dim=1) < 1
    if not bool(begins.any()):
        return None
    begins = torch.nn.functional.pad(begins, (1, 0), value=True).flatten()
    starts = begins.nonzero().flatten().to(torch.int32)
    offsets = torch.cat([starts, starts.new_full((1,), begins.shape[0])])
    return Documents(offsets, int(offsets.diff().max()))


def _stop(positions: Tensor) -> None:
    """Has the device stop with an error, in its own time, if a document begins among positions."""
    torch._assert_async((positions.diff(dim=-1) > 0).all(), _STOP)


def _is_captured(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()

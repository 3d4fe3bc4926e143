"""Packed documents that only `position_ids` separate: where positions do not increase, a new document begins.

DeepSpeed's sequence parallelism and padding-free collators use this, also with a cache, where transformers' own masks
do not check positions. Reading positions waits for the GPU, so they are read once for all layers. Where they cannot be
read, a device assertion checks that there is one document: otherwise documents would silently attend to each other.
"""

from __future__ import annotations

import threading
import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from cudnn_sdpa.engine.dispatch_state import is_plain_memory
from cudnn_sdpa.graph.symbolic_shapes import is_true

#: Arguments for every case, named in errors.
SUGGESTION = "use_cache=False, or cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k"

#: Messages of device assertions have at most 255 characters.
_MESSAGE = (
    f"cudnn_sdpa in transformers: position_ids restart, where they may not be read (compiled, captured, or "
    f"inspect_padding=False). Use {SUGGESTION}."
)


class Documents(NamedTuple):
    """Offsets (N + 1,) int32 of the documents of all sequences, packed, and the length of the longest one."""

    offsets: Tensor
    max_length: int


class _LastRead(NamedTuple):
    """Documents of a tensor of positions, and its version."""

    positions: weakref.ref[Tensor]
    version: int | None
    batch: int
    may_read: bool
    result: Documents | None


_last = threading.local()


def documents(positions: object, query: Tensor, *, may_read: bool) -> Documents | None:
    """The documents that positions (B or 1, S) separate among queries (B, Hq, S, D); None if there is one per sequence.

    Positions of other shapes have another meaning and are ignored.

    Args:
        positions: The model's `position_ids`.
        query: Queries, more than one.
        may_read: Whether positions may be read, which waits for the GPU.
    """
    batch, length = query.shape[0], query.shape[2]
    if not isinstance(positions, Tensor) or positions.dim() not in (1, 2) or positions.is_floating_point():
        return None
    rows = 1 if positions.dim() == 1 else positions.shape[0]
    if not is_true(positions.shape[-1] == length) or not (is_true(rows == 1) or is_true(rows == batch)):
        return None
    if torch.compiler.is_compiling() or not is_plain_memory(positions) or _is_captured(positions):
        _assert_one_document(positions)
        return None
    version = None if positions.is_inference() else positions._version
    last: _LastRead | None = getattr(_last, "read", None)
    is_same = last is not None and version is not None and last.positions() is positions
    if last is not None and is_same and (last.version, last.batch, last.may_read) == (version, batch, may_read):
        return last.result
    result = None
    if may_read:
        result = _read(positions.expand(batch, length))
    else:
        _assert_one_document(positions)
    _last.read = _LastRead(
        positions=weakref.ref(positions), version=version, batch=batch, may_read=may_read, result=result
    )
    return result


def _read(positions: Tensor) -> Documents | None:
    """The documents in positions (B, S); waits for the GPU."""
    begins = positions.diff(dim=1) < 1
    if not bool(begins.any()):
        return None
    begins = torch.nn.functional.pad(begins, (1, 0), value=True).flatten()
    starts = begins.nonzero().flatten().to(torch.int32)
    offsets = torch.cat([starts, starts.new_full((1,), begins.shape[0])])
    return Documents(offsets, int(offsets.diff().max()))


def _assert_one_document(positions: Tensor) -> None:
    """Enqueues a device assertion that no document begins within a sequence."""
    torch._assert_async((positions.diff(dim=-1) > 0).all(), _MESSAGE)


def _is_captured(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()

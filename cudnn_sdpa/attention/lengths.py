"""Actual sequence lengths as plans read them, computed on the GPU by one kernel of our own per call.

Plans read corrected lengths; those with logit soft-capping read the first and the last key that each query sees.
"""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from cudnn_sdpa.attention import memory
from cudnn_sdpa.attention.mask import Band
from cudnn_sdpa.graph.layouts import ALIGNMENT
from cudnn_sdpa.plans.nvrtc import Kernel, slots
from cudnn_sdpa.plans.plan import allocate, current_raw_stream

_SOURCE = Path(__file__).with_name("lengths.cu")
correct_kernel = Kernel(_SOURCE, "correct_lengths")
limit_kernel = Kernel(_SOURCE, "limit_rows")

_THREADS = 256
_PER_CALL = 0  #: an address that is filled in at each launch
_UNBOUNDED = 1 << 40  #: farther than any key is from the diagonal
_LARGEST = 2**31 - 1


class LengthsFields(NamedTuple):
    """The struct `Lengths` of `lengths.cu`."""

    q: int
    kv: int
    batch: int
    max_q: int
    max_kv: int
    seq_len_q: int
    seq_len_kv: int


class LimitsFields(NamedTuple):
    """The struct `Limits` of `lengths.cu`."""

    q: int
    kv: int
    batch: int
    max_q: int
    max_kv: int
    rows: int
    left: int
    right: int
    bottom_right: int
    lowest: int
    highest: int


class _IntsKernel:
    """A kernel that makes int32 tensors of lengths, for calls of one plan.

    Attributes:
        offsets: Where each tensor begins in the memory that a launch fills, in bytes, by operand.
    """

    __slots__ = ("_blocks", "_device", "_fields", "_kernel", "_outputs", "_size", "offsets")

    def __init__(
        self, kernel: Kernel, fields: tuple[int, ...], outputs: dict[str, int], size: int, device: int
    ) -> None:
        """Loads the kernel.

        Args:
            kernel: Its source.
            fields: Its argument, without addresses; lengths of queries and of keys come first.
            outputs: The place in `fields` of the address of each tensor that is made, by operand.
            size: Number of elements of each of these tensors.
            device: The GPU.
        """
        aligned = -(-4 * size // ALIGNMENT) * ALIGNMENT
        self.offsets = {name: number * aligned for number, name in enumerate(outputs)}
        self._outputs = [(place, self.offsets[name]) for name, place in outputs.items()]
        self._size = (len(outputs) * aligned // 4,)
        self._fields = array("q", fields)
        self._device = device
        self._kernel = kernel.on(device)
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._blocks = max(1, min(-(-size // _THREADS), 4 * processors))

    def __call__(self, lengths_q: int, lengths_kv: int) -> Tensor:
        """Launches the kernel on the current device and stream; returns the memory that it fills.

        Args:
            lengths_q: Address of the lengths of queries; 0 if all queries are present.
            lengths_kv: Address of the lengths of keys; 0 if all keys are present.
        """
        made: Tensor = allocate(self._size, (1,), torch.int32)
        start = made.data_ptr()
        fields = self._fields[:]  # of this call alone: many threads call at once
        fields[0], fields[1] = lengths_q, lengths_kv
        for place, offset in self._outputs:
            fields[place] = start + offset
        self._kernel.launch(self._blocks, _THREADS, fields, current_raw_stream(self._device))
        return made


class LengthsKernel(_IntsKernel):
    """Corrects the lengths of calls that look alike: "seq_len_q" and "seq_len_kv", (B,) int32.

    Lengths are clamped to the tensors. cuDNN 9.19 writes nothing for a sequence without keys, so it is passed as one
    without queries, whose rows cuDNN fills with zeros and -inf. cuDNN's decode engines ignore lengths of queries, so a
    sequence without queries is passed to them as one without keys.
    """

    __slots__ = ()

    def __init__(self, *, batch: int, sq: int, skv: int, has_kv: bool, device: int, decode: bool = False) -> None:
        """Binds it.

        Args:
            batch: Number of sequences.
            sq: Number of queries of each sequence.
            skv: Number of keys of each sequence.
            has_kv: Whether the call has lengths of keys; without, it has those of queries.
            device: The GPU.
            decode: Whether the plan is one of a decode engine, which reads only lengths of keys.
        """
        fields = LengthsFields(
            q=_PER_CALL,
            kv=_PER_CALL,
            batch=batch,
            max_q=sq,
            max_kv=skv,
            seq_len_q=_PER_CALL,
            seq_len_kv=_PER_CALL,
        )
        made = [] if decode else ["seq_len_q"]
        if decode or has_kv:
            made.append("seq_len_kv")
        outputs = dict(zip(made, slots(LengthsFields, *made), strict=True))
        super().__init__(correct_kernel, fields, outputs, size=batch, device=device)


class RowLimitsKernel(_IntsKernel):
    """Computes the keys that each query sees: "lowest" and "highest", (B, rows) int32.

    Graphs with soft-capping read these instead of lengths: a query sees no key before `lowest` and none after
    `highest`, which is -1 where there is no query.
    """

    __slots__ = ()

    def __init__(
        self, *, batch: int, rows: int, band: Band | None, device: int, max_q: int = _LARGEST, max_kv: int = _LARGEST
    ) -> None:
        """Binds it.

        Args:
            batch: Number of sequences.
            rows: Number of queries of each sequence in the plan.
            band: The band, None if a query sees all keys.
            device: The GPU.
            max_q: What lengths of queries are clamped to.
            max_kv: What lengths of keys are clamped to.
        """
        left, right, bottom_right = band or (None, None, False)
        fields = LimitsFields(
            q=_PER_CALL,
            kv=_PER_CALL,
            batch=batch,
            max_q=max_q,
            max_kv=max_kv,
            rows=rows,
            left=_UNBOUNDED if left is None else left,
            right=_UNBOUNDED if right is None else right,
            bottom_right=bottom_right,
            lowest=_PER_CALL,
            highest=_PER_CALL,
        )
        lowest, highest = slots(LimitsFields, "lowest", "highest")
        outputs = {"lowest": lowest, "highest": highest}
        super().__init__(limit_kernel, fields, outputs, size=batch * rows, device=device)


def addresses_of(lengths_q: Tensor | None, lengths_kv: Tensor | None) -> tuple[int, int]:
    """The addresses of the lengths of a call, 0 for those that it lacks.

    Raises:
        LayoutError: One has no memory.
    """
    address_q = 0 if lengths_q is None else lengths_q.data_ptr()
    address_kv = 0 if lengths_kv is None else lengths_kv.data_ptr()
    if not (address_q and address_kv):  # missing, or freed: the kernel would take that for missing
        memory.check_lengths_present(lengths_q, lengths_kv)
    return address_q, address_kv

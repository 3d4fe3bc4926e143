"""Actual sequence lengths as plans read them, computed on the GPU by one kernel of our own per call.

Plans read corrected lengths; those with logit soft-capping read the first and the last key that each query sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from cudnn_sdpa.attention.mask import Band
from cudnn_sdpa.engine.launch import Address, LaunchExtras, OwnKernel
from cudnn_sdpa.graph.layouts import ALIGNMENT
from cudnn_sdpa.plans.nvrtc import Kernel, Struct

_SOURCE = Path(__file__).with_name("lengths.cu")
correct_kernel = Kernel(_SOURCE, "correct_lengths")
limit_kernel = Kernel(_SOURCE, "limit_rows")
_HEADER = _SOURCE.with_suffix(".cuh")
_lengths, _limits = Struct(_HEADER, "Lengths"), Struct(_HEADER, "Limits")

LENGTHS = ("seq_lens_q", "seq_lens_kv")  #: of a call; kernels take them first
LENGTHS_OF_CALL = tuple(map(Address, LENGTHS))

_THREADS = 256
_MADE = "lengths"  #: what addresses call the memory that a kernel fills
_UNBOUNDED = 1 << 40  #: farther than any key is from the diagonal
_LARGEST = 2**31 - 1


class _IntsKernel(OwnKernel):
    """A kernel that makes int32 tensors of lengths, for calls of one plan.

    Attributes:
        offsets: Where each tensor begins in the memory that a launch fills, in bytes, by operand.
    """

    __slots__ = ("offsets",)

    def __init__(
        self,
        kernel: Kernel,
        argument: Struct,
        values: dict[str, object],
        outputs: Sequence[str],
        size: int,
        device: int,
        lengths: Sequence[Address] = LENGTHS_OF_CALL,
    ) -> None:
        """Loads the kernel.

        Args:
            kernel: Its source.
            argument: Its argument.
            values: Those of the argument, without addresses.
            outputs: The tensors that are made, as the argument and operands of plans call them.
            size: Number of elements of each of these tensors.
            device: The GPU.
            lengths: Where the lengths of queries and of keys are.
        """
        aligned = -(-4 * size // ALIGNMENT) * ALIGNMENT
        self.offsets = {name: number * aligned for number, name in enumerate(outputs)}
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        super().__init__(
            kernel,
            name=_MADE,
            buffer_layout=((len(outputs) * aligned // 4,), (1,), torch.int32),
            blocks=max(1, min(-(-size // _THREADS), 4 * processors)),
            threads=_THREADS,
            argument=argument,
            values=values,
            addresses=dict(zip(("given.q", "given.kv"), lengths, strict=True))
            | {name: Address(_MADE, offset) for name, offset in self.offsets.items()},
            device=device,
        )

    def extras(self, lengths: Sequence[str] = ()) -> LaunchExtras:
        """Launch extras of a plan that reads this output, made of the call's lengths or of another kernel's."""
        return LaunchExtras(
            operands=tuple(lengths),
            unaligned_ok=tuple(lengths),
            kernels=(self,),
            addresses={name: Address(_MADE, offset) for name, offset in self.offsets.items()},
        )


class LengthsKernel(_IntsKernel):
    """Corrects the lengths of calls that look alike: "seq_len_q" and "seq_len_kv", (B,) int32.

    Lengths are clamped to the tensors. cuDNN 9.19 writes nothing for a sequence without keys, so it is passed as one
    without queries, whose rows cuDNN fills with zeros and -inf. cuDNN's decode engines ignore lengths of queries, so a
    sequence without queries is passed to them as one without keys.
    """

    __slots__ = ()

    def __init__(self, *, batch: int, sq: int, skv: int, has_kv: bool, device: int, decode: bool = False) -> None:
        """Binds it to calls with lengths of keys (`has_kv`) or else of queries, and to a `decode` engine or another."""
        made = [] if decode else ["seq_len_q"]
        if decode or has_kv:
            made.append("seq_len_kv")
        given = {"batch": batch, "max_q": sq, "max_kv": skv}
        super().__init__(correct_kernel, _lengths, {"given": given}, made, size=batch, device=device)


class RowLimitsKernel(_IntsKernel):
    """Computes the keys that each query sees: "lowest" and "highest", (B, rows) int32.

    Graphs with soft-capping read these instead of lengths: a query sees no key before `lowest` and none after
    `highest`, which is -1 where there is no query.
    """

    __slots__ = ()

    def __init__(
        self,
        *,
        batch: int,
        rows: int,
        band: Band | None,
        device: int,
        max_q: int = _LARGEST,
        max_kv: int = _LARGEST,
        lengths: Sequence[Address] = LENGTHS_OF_CALL,
    ) -> None:
        """Binds it to a plan with this many `rows` of queries; lengths are clamped to `max_q` and `max_kv`."""
        left, right, bottom_right = band or (None, None, False)
        values: dict[str, object] = {
            "given": {"batch": batch, "max_q": max_q, "max_kv": max_kv},
            "rows": rows,
            "left": _UNBOUNDED if left is None else left,
            "right": _UNBOUNDED if right is None else right,
            "bottom_right": bottom_right,
        }
        outputs = "lowest", "highest"
        super().__init__(limit_kernel, _limits, values, outputs, size=batch * rows, device=device, lengths=lengths)

"""What ends a step of `Fp8Scaling`: largest values are shared among ranks, enter the history, and become scales."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from cudnn_sdpa.attention.fp8_quantization import SOURCE, THREADS, by_kernel
from cudnn_sdpa.attention.fp8_tables import scale_for
from cudnn_sdpa.errors import OptionError
from cudnn_sdpa.runtime.kernels import Kernel
from cudnn_sdpa.runtime.plan import current_raw_stream

update_kernel = Kernel(SOURCE, "fp8_update")

#: What says "the default group" where there need not be one yet.
WORLD = "world"


def check_group(group: Any) -> None:
    """Whether largest values can be shared among these ranks.

    Raises:
        OptionError: It is no group, or one that this rank is not in.
    """
    if group is None or group == WORLD or (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        return
    raise OptionError(
        "process_group", repr(group), f"{WORLD!r}, a torch.distributed.ProcessGroup of this rank, or None"
    )


def share(amaxes: Sequence[Tensor], group: Any) -> None:
    """Raises largest values to those of all ranks of a group, in place; infinity where a rank's is not finite.

    Args:
        amaxes: (10,) each, on one device; on each rank as many, in the same order.
        group: A process group, or `WORLD`.

    Raises:
        OptionError: There is no default group.
    """
    if group == WORLD and not (dist.is_available() and dist.is_initialized()):
        hint = "Call torch.distributed.init_process_group() before the first step ends."
        raise OptionError("process_group", repr(WORLD), "a default process group, and there is none", hint)
    largest = torch.cat(list(amaxes)).nan_to_num_(nan=math.inf, posinf=math.inf)  # what MAX makes of NaN is open
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=None if group == WORLD else group)
    for amax, shared in zip(amaxes, largest.view(len(amaxes), -1).unbind(), strict=True):
        amax.copy_(shared)


def update(amax: Tensor, history: Tensor, scale: Tensor, limits: Tensor, *, most_recent: bool) -> None:
    """`update_in_pytorch`, by a kernel of our own where one can."""
    if by_kernel(amax):
        device = amax.get_device()
        addresses = [tensor.data_ptr() for tensor in (amax, history, scale, limits)]
        fields = array("q", [*addresses, history.shape[1], most_recent])
        with torch.cuda.device(device):
            update_kernel.on(device).launch(1, THREADS, fields, current_raw_stream(device))
    else:
        update_in_pytorch(amax, history, scale, limits, most_recent=most_recent)


def update_in_pytorch(amax: Tensor, history: Tensor, scale: Tensor, limits: Tensor, *, most_recent: bool) -> None:
    """What the kernel `fp8_update` does, in place.

    Args:
        amax: Of the step, (10,); zeros afterwards.
        history: (10, length), the latest step first.
        scale: (10,).
        limits: What the largest values shall become, (10,); 0 where the scale stays.
        most_recent: Whether the latest step alone counts.
    """
    counts = amax.isfinite().all()
    moved = torch.cat([amax.unsqueeze(1), history[:, :-1]], dim=1)
    history.copy_(torch.where(counts, moved, history))
    peak = history[:, 0] if most_recent else history.amax(1)
    scale.copy_(torch.where(counts & (peak > 0) & (limits > 0), scale_for(limits, peak), scale))
    amax.zero_()


def scales_of(history: Tensor, scale: Tensor, limits: Tensor, *, most_recent: bool) -> Tensor:
    """The scales that updates to a history have left, (10,), for a layer with these limits.

    Args:
        history: (10, length).
        scale: What stays where the history has nothing, (10,).
        limits: As for an update.
        most_recent: Whether the latest step counts alone: the latest one in which there was something.
    """
    if most_recent:
        latest = (history > 0).to(torch.uint8).argmax(1, keepdim=True)
        peak = history.gather(1, latest).squeeze(1)
    else:
        peak = history.amax(1)
    return torch.where((peak > 0) & (limits > 0), scale_for(limits, peak), scale)

"""Process groups: this process's place in one, and whether a tensor is where its backend communicates."""

from __future__ import annotations

from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from cudnn_sdpa.errors import DeviceError, OptionError


class Place(NamedTuple):
    """A process group, and this process's place in it.

    Attributes:
        group: The group.
        rank: This process's rank in it.
        ranks: The number of processes.
    """

    group: dist.ProcessGroup
    rank: int
    ranks: int

    @property
    def others(self) -> list[int]:
        """The other ranks."""
        return [rank for rank in range(self.ranks) if rank != self.rank]

    def neighbor(self, distance: int) -> int:
        """The global rank of the process that many ranks on."""
        return int(dist.get_global_rank(self.group, (self.rank + distance) % self.ranks))


def place_in(group: object) -> Place:
    """This process's place in a process group, a one-dimensional device mesh, or (None) among all processes.

    Raises:
        OptionError: It is none of these, this process is not in it, or there are no process groups.
    """
    expected = "a torch.distributed.ProcessGroup, a DeviceMesh of one dimension, or None for all processes"
    if not dist.is_available() or not dist.is_initialized():
        raise OptionError("group", "no process group", expected, "Call torch.distributed.init_process_group before.")
    if hasattr(group, "get_group") and hasattr(group, "ndim") and hasattr(group, "get_coordinate"):
        if group.ndim != 1:
            raise OptionError("group", f"a mesh of {group.ndim} dimensions", expected, 'Take one: mesh["cp"].')
        if group.get_coordinate() is None:
            raise OptionError("group", "a mesh without this process", expected)
        group = group.get_group()
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        got = "a group without this process" if group is dist.GroupMember.NON_GROUP_MEMBER else type(group).__name__
        raise OptionError("group", got, expected)
    rank = dist.get_rank(group)
    if rank < 0:
        raise OptionError("group", "a group without this process", expected)
    return Place(group, rank, dist.get_world_size(group))


def check_device(name: str, tensor: Tensor, place: Place) -> None:
    """Refuses a tensor on a device that the group's backend does not serve.

    Raises:
        DeviceError: It is on one.
    """
    served = {device.type for device in getattr(place.group, "_device_types", ())}
    if served and tensor.device.type not in served:
        backend = dist.get_backend(place.group)
        hint = "Move it, or make the group with a backend for that device."
        expected = f"{' or '.join(sorted(served))}, the devices of the group's backend {backend}"
        raise DeviceError(name, str(tensor.device), expected, hint)

"""Process groups with this process's rank, and the devices that their backends serve."""

from __future__ import annotations

from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from cudnn_sdpa.errors import DeviceError, OptionError


class GroupRank(NamedTuple):
    """A process group, and this process's rank among its `ranks` processes."""

    group: dist.ProcessGroup
    rank: int
    ranks: int

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(self.ranks) if rank != self.rank]

    def neighbor(self, distance: int) -> int:
        """The global rank of the process at this distance after the own rank."""
        return int(dist.get_global_rank(self.group, (self.rank + distance) % self.ranks))


def group_rank_of(group: object) -> GroupRank:
    """The rank in a process group, in a one-dimensional device mesh, or (None) among all processes.

    Raises:
        OptionError: The argument is none of these, lacks this process, or there are no process groups.
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
    return GroupRank(group, rank, dist.get_world_size(group))


def check_device(name: str, tensor: Tensor, group_rank: GroupRank) -> None:
    """Refuses a tensor on a device that the group's backend does not serve.

    Raises:
        DeviceError: The backend serves other devices.
    """
    served = {device.type for device in getattr(group_rank.group, "_device_types", ())}
    if served and tensor.device.type not in served:
        backend = dist.get_backend(group_rank.group)
        hint = "Move it, or make the group with a backend for that device."
        expected = f"{' or '.join(sorted(served))}, the devices of the group's backend {backend}"
        raise DeviceError(name, str(tensor.device), expected, hint)

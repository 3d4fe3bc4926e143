"""A process of `benchmarks distributed`: parts on all ranks; rank 0 prints one line of JSON, the rows of each part.

`torchrun --nproc-per-node N -m benchmarks.programs.many_gpus PART… [small]`
"""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist

from benchmarks.distributed import attention, models
from benchmarks.tools.output import Row
from benchmarks.tools.parts import DistributedPart


def measure(part: DistributedPart, *, small: bool = False) -> list[Row]:
    """The rows of a part, by all ranks of the default process group."""
    of_attention = attention.SMALL if small else attention.FULL
    of_models = models.SMALL if small else models.FULL
    if part is DistributedPart.WEAK:
        return attention.weak(of_attention)
    if part is DistributedPart.STRONG:
        return attention.strong(of_attention)
    if part is DistributedPart.TENSOR:
        return models.tensor(of_models)
    return models.model(of_models)


def main(arguments: list[str]) -> None:
    """Joins the group that torchrun describes, measures, and prints."""
    has_gpu, is_small = torch.cuda.is_available(), "small" in arguments
    if has_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if has_gpu else "gloo")
    found = {name: measure(DistributedPart(name), small=is_small) for name in arguments if name != "small"}
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])

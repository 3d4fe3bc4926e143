"""Registration of torch operators, and the operator that draws dropout's seed and offset."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.fx import traceback as fx_traceback
from torch.utils.checkpoint import CheckpointPolicy

from cudnn_sdpa.errors import UnsupportedError
from cudnn_sdpa.graph.symbolic_shapes import is_compiling

library: Any = torch.library.Library("cudnn_sdpa", "DEF")  # type: ignore[no-untyped-call]


Implementation = Callable[..., object]

#: The implementation for CUDA of every operator, by name.
implementations: dict[str, Implementation] = {}


def define(
    name: str, inputs: str, returns: str, cuda: Implementation, cpu: Implementation, fake: Implementation
) -> None:
    """Registers the operator ``cudnn_sdpa::name`` with its three implementations."""
    library.define(f"{name}({inputs}) -> {returns}", tags=(torch.Tag.pt2_compliant_tag,))
    implementations[name] = cuda
    library.impl(name, cuda, "CUDA")
    library.impl(name, cpu, "CPU")
    torch.library.register_fake(f"cudnn_sdpa::{name}", fake, lib=library)


# The random numbers that dropout starts from, also in compiled code.


def new_seed(q: Tensor) -> Tensor:
    """Seed and offset of dropout, from PyTorch's generator of q's device.

    manual_seed, checkpointing and CUDA graphs act on it. In compiled code it is an operator of its own: see `_seed`.
    """
    if is_compiling():
        seed: Tensor = torch.ops.cudnn_sdpa.dropout_seed(q)
        return seed
    return torch.randint(2**62, (2,), dtype=torch.int64, device=q.device)


def _seed(q: Tensor) -> Tensor:
    """What the compiler traces in place of `dropout_seed`: a random number that it must keep for the backward pass.

    With `torch._functorch.config.activation_memory_budget` below 1 it would draw another one there.

    Raises:
        UnsupportedError: The budget is 0: the compiler keeps nothing then, whatever a node says.
    """
    if functorch_config.activation_memory_budget == 0 and torch.is_grad_enabled():
        raise UnsupportedError(
            "dropout under torch.compile with an activation memory budget of 0",
            ["the compiler would draw the random numbers of the backward pass again"],
            "a budget above 0",
        )
    meta = fx_traceback.current_meta
    before = meta.get("recompute")
    meta["recompute"] = CheckpointPolicy.MUST_SAVE
    try:
        return torch.randint(2**62, (2,), dtype=torch.int64, device=q.device)
    finally:
        meta.pop("recompute")
        if before is not None:
            meta["recompute"] = before


library.define(
    "dropout_seed(Tensor q) -> Tensor", tags=(torch.Tag.pt2_compliant_tag, torch.Tag.nondeterministic_seeded)
)
library.impl("dropout_seed", _seed, "CompositeImplicitAutograd")

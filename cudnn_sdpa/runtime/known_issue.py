"""What one row says about a fault of cuDNN."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cudnn_sdpa.runtime.key import PlanKey

NEVER_FIXED = 10**9


@dataclass(frozen=True, slots=True)
class KnownIssue:
    """A fault of cuDNN.

    Attributes:
        fault: What goes wrong.
        source: Where it was reported, or on which version and GPU this library's tests met it.
        treatment: How it is avoided, or that the plan is refused.
        concerns: Whether a plan on a version with the fault could show it.
        avoids: Whether the plan is made so that it does not.
        first: First version with the fault, as a number.
        fixed: First version without it.
        in_capture: Whether it shows only where the plan is launched into a CUDA graph, which is then refused.
    """

    fault: str
    source: str
    treatment: str
    concerns: Callable[[PlanKey], bool]
    avoids: Callable[[PlanKey], bool] = lambda _: False
    first: int = 0
    fixed: int = NEVER_FIXED
    in_capture: bool = False

    def __str__(self) -> str:
        return f"{self.fault} ({self.source}); {self.treatment}"

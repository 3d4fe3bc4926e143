"""The shape policy: which plan serves a call whose shape has none yet."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from cudnn_sdpa.errors import OptionError
from cudnn_sdpa.settings import Override, Overrides, renewed_in_children

EXACT = "exact"
BUCKETED = "bucketed"
TIERED = "tiered"
POLICIES = (EXACT, BUCKETED, TIERED)

#: Environment variable that names the policy.
VARIABLE = "CUDNN_SDPA_SHAPE_POLICY"
DEFAULT = TIERED

_listeners: list[Callable[[], None]] = []
_lock = renewed_in_children(threading.Lock())


class ShapePolicyUse(Override[str]):
    """What `shape_policy` returns: leave it alone, or use it in a `with` statement to go back to what was before.

    Attributes:
        policy: The policy in force.
    """

    def __init__(self, policy: str) -> None:
        self.policy = policy
        super().__init__(_overrides, policy)

    def __enter__(self) -> str:
        self._enter()
        return self.policy


class _Setting:
    """The policy of this process."""

    policy = ""


def active() -> str:
    """The policy in force."""
    policy = _Setting.policy
    if not policy:
        with _lock:
            policy = _Setting.policy = _Setting.policy or _from_environment()
    return policy


def _from_environment() -> str:
    name = os.environ.get(VARIABLE) or DEFAULT
    if name not in POLICIES:
        raise OptionError(VARIABLE, repr(name), f"one of {', '.join(POLICIES)}")
    return name


def shape_policy(policy: str) -> ShapePolicyUse:
    """Sets what serves a call of `sdpa` whose shape has no plan yet.

    - "exact": a plan is built for it, which takes 30 to 700 ms. Every call runs the best plan for its shape.
    - "bucketed": the plan of its bucket serves it. The batch is seen as sequences end to end, whose lengths are data;
      lengths up to 1,024, 8,192 and 65,536 share a plan each, and so do numbers of sequences that are rounded up to
      the same power of two, or one and a half times one. A new shape costs 0.2 ms; each call takes up to 1.9
      times as long as with a plan of its own, single queries on long caches up to 13 times.
    - "tiered": the first three shapes of a bucket get plans of their own. Further ones are served at once by the
      bucket's plan. One that comes back is built by a helper process meanwhile, which uses no GPU, and its own plan
      takes over when it is ready. With `deterministic=True`, and while `torch.use_deterministic_algorithms` or
      `autotune` is in force, new shapes get plans of their own at once.

    Buckets serve calls for inference without `return_lse`, lengths, masks of the caller, dropout, soft caps, sinks and
    linear biases; all others are exact under each policy. The results of two plans differ by rounding.

    The setting holds for the whole process, until the end of the `with` statement if it is used in one. Without a call
    the environment variable `CUDNN_SDPA_SHAPE_POLICY` names the policy.

    Args:
        policy: "exact", "bucketed" or "tiered".

    Returns:
        A context manager whose value is the policy.

    Raises:
        OptionError: There is no such policy.

    Examples:
        >>> import cudnn_sdpa
        >>> with cudnn_sdpa.shape_policy("exact") as policy:
        ...     policy
        'exact'
    """
    if policy not in POLICIES:
        raise OptionError("policy", repr(policy), f"one of {', '.join(map(repr, POLICIES))}")
    return ShapePolicyUse(policy)


def on_change(listener: Callable[[], None]) -> Callable[[], None]:
    """Has `listener` called after every change of the policy."""
    _listeners.append(listener)
    return listener


def _set(policy: str) -> None:
    with _lock:
        changed, _Setting.policy = _Setting.policy != policy, policy
    for listener in _listeners if changed else ():
        listener()


_overrides = Overrides(active, _set)

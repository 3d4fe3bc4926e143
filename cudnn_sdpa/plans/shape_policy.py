"""The shape policy: which plan serves a call whose shape has no plan yet."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Final, Literal

from cudnn_sdpa.errors import OptionError
from cudnn_sdpa.settings import Override, Overrides, renewed_in_children

Policy = Literal["exact", "bucketed", "tiered"]
EXACT: Final = "exact"
BUCKETED: Final = "bucketed"
TIERED: Final = "tiered"
POLICIES = (EXACT, BUCKETED, TIERED)

#: Environment variable that names the policy.
VARIABLE = "CUDNN_SDPA_SHAPE_POLICY"
DEFAULT = TIERED

_listeners: list[Callable[[], None]] = []
_lock = renewed_in_children(threading.RLock())


class ShapePolicyUse(Override[str]):
    """The result of `shape_policy`: ignore it, or use it in a `with` statement to restore the previous policy."""

    def __init__(self, policy: str) -> None:
        self.policy = policy
        super().__init__(_overrides, policy)

    def __enter__(self) -> str:
        self._enter()
        return self.policy


class Setting:
    policy = ""


def active() -> str:
    policy = Setting.policy
    if not policy:
        named = of_environment()
        with _lock:
            policy = Setting.policy = Setting.policy or named
    return policy


def of_environment() -> str:
    name = os.environ.get(VARIABLE) or DEFAULT
    if name not in POLICIES:
        raise OptionError(VARIABLE, repr(name), f"one of {', '.join(POLICIES)}")
    return name


def shape_policy(policy: Policy) -> ShapePolicyUse:
    """Sets which plan serves a call of `sdpa` whose shape has no plan yet.

    - "exact": the call builds a plan for its shape, which takes 30 to 700 ms. Every call runs the best plan for its
      shape.
    - "bucketed": the plan of its bucket serves it. The batch is treated as packed sequences whose lengths are data.
      Lengths up to 1,024, 8,192 and 65,536 share a plan each; so do batch sizes that round up to the same power of
      two, or 1.5 times one. A new shape costs 0.2 ms; each call takes up to 1.9 times as long as with an exact-shape
      plan, single queries on long caches up to 13 times.
    - "tiered": the first three shapes of a bucket get exact-shape plans. The bucket's plan serves further ones at
      once. If such a shape recurs, a helper process, which uses no GPU, builds its exact-shape plan in the background;
      that plan takes over when it is ready. With `deterministic=True`, and while
      `torch.use_deterministic_algorithms` or `autotune` is in force, new shapes get exact-shape plans at once.

    Buckets serve inference calls that return no LSE and have no options but `is_causal`, `causal_alignment`,
    `window_size`, `scale` and `out`; all others are exact under every policy. The results of two plans differ by
    rounding.

    The setting is process-wide, and ends with the `with` statement if it is used in one. Without a call, the
    environment variable `CUDNN_SDPA_SHAPE_POLICY` names the policy.

    Args:
        policy: "exact", "bucketed" or "tiered".

    Returns:
        A context manager whose value is the policy.

    Raises:
        OptionError: The policy does not exist.

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
    _listeners.append(listener)
    return listener


def _set(policy: str) -> None:
    with _lock:
        changed, Setting.policy = Setting.policy != policy, policy
    for listener in _listeners if changed else ():
        listener()


def _value() -> str:
    """The policy in force; empty while the environment names an unknown one, which the next call raises."""
    try:
        return active()
    except OptionError:
        return ""


_overrides = Overrides(_value, _set)

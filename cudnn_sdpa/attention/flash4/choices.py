"""Which provider was faster at a call, as `autotune` has measured it under `providers("fastest")`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from cudnn_sdpa.attention.flash4.checks import is_right
from cudnn_sdpa.attention.flash4.plans import flash4_forward, kind_of
from cudnn_sdpa.attention.flash4.programs import ENGINE
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.plans import autotune, default_store
from cudnn_sdpa.plans.autotune import Alternative
from cudnn_sdpa.plans.cache import build_plan, plan_cache
from cudnn_sdpa.plans.providers import CUDNN, FLASH4
from cudnn_sdpa.plans.store import StoredPlan

_MAX_REMEMBERED = 4096


@dataclass(frozen=True)
class _Choice:
    """The identity of a choice's record in the plan store."""

    key: PlanKey

    def identity(self) -> dict[str, object]:
        return {**self.key.identity(), "choice": "autotune"}


class Choices:
    """The choices of this process and of the plan store, by the key of FlashAttention-4's plan without a device."""

    def __init__(self) -> None:
        self._made: dict[PlanKey, str | None] = {}
        self._offered: dict[PlanKey, PlanKey] = {}

    def of(self, key: PlanKey) -> str | None:
        if key not in self._made:
            store = default_store.active()
            stored = None if store is None else store.load(_Choice(key))
            self._remember(key, None if stored is None else stored.data.decode())
        return self._made[key]

    def offer(self, of_cudnn: PlanKey, key: PlanKey) -> None:
        """Has the plan of `key` compared with cuDNN's, when that is built."""
        if len(self._offered) >= _MAX_REMEMBERED:
            self._offered.clear()
        self._offered[of_cudnn] = key

    def alternatives_of(self, of_cudnn: PlanKey) -> list[Alternative]:
        key = self._offered.pop(of_cudnn, None)
        if key is None or key.device is None or not is_right(kind_of(key), key.device):
            return []
        plan = plan_cache.get(key, partial(build_plan, flash4_forward), to_use=False)
        return [Alternative(of_cudnn, plan, partial(self._settled, key.without_device()))]

    def _settled(self, key: PlanKey, is_fastest: bool) -> None:
        provider = FLASH4 if is_fastest else CUDNN
        self._remember(key, provider)
        store, choice = default_store.active(), _Choice(key)
        if store is not None:
            store.save(choice, StoredPlan.of_text(choice, ENGINE, provider))
        plan_cache.forget_calls()

    def _remember(self, key: PlanKey, provider: str | None) -> None:
        if len(self._made) >= _MAX_REMEMBERED:
            self._made.clear()
        self._made[key] = provider


choices = Choices()
autotune.alternatives.append(choices.alternatives_of)

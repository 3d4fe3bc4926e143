"""Which provider was faster at a call, as `autotune` has measured it under `providers("fastest")`."""

from __future__ import annotations

import logging
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
from cudnn_sdpa.plans.store import PlanStore, StoredPlan

_log = logging.getLogger("cudnn_sdpa")

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
        self._read_from: PlanStore | None = None

    def of(self, key: PlanKey) -> str | None:
        store = default_store.active()
        if store is not self._read_from:
            self._made.clear()
            self._read_from = store
        if key in self._made:
            return self._made.get(key)
        stored = None if store is None else store.load(_Choice(key))
        found = None if stored is None else stored.data.decode()
        self._remember(key, found)
        return found

    def offer(self, of_cudnn: PlanKey, key: PlanKey) -> None:
        """Has the plan of `key` compared with cuDNN's, when that is built."""
        if len(autotune.offered) >= _MAX_REMEMBERED:
            autotune.offered.clear()
        autotune.offered[of_cudnn] = key

    def alternatives_of(self, of_cudnn: PlanKey) -> list[Alternative]:
        key = autotune.offered.pop(of_cudnn, None)
        try:
            if key is None or key.device is None or not is_right(kind_of(key), key.device):
                return []
            plan = plan_cache.get(key, partial(build_plan, flash4_forward), to_use=False)
        except Exception as error:  # noqa: BLE001 - such as a lack of memory: the call is cuDNN's
            _log.warning("FlashAttention-4 was not compared with cuDNN: %s", error)
            return []
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
autotune.on_leaving.append(plan_cache.forget_calls)

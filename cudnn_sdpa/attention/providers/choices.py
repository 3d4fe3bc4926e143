"""Which provider was faster at a call, as `autotune` has measured it under `providers("fastest")`."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial

from cudnn_sdpa.attention.flash4 import checks
from cudnn_sdpa.attention.flash4.plans import functions, kind_of
from cudnn_sdpa.graph.definition import find_operation
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.plans import autotune, default_store
from cudnn_sdpa.plans.autotune import Alternative
from cudnn_sdpa.plans.cache import build_plan, plan_cache
from cudnn_sdpa.plans.providers import CUDNN, FLASH4
from cudnn_sdpa.plans.store import PlanStore, StoredPlan

_log = logging.getLogger("cudnn_sdpa")

_MAX_REMEMBERED = 4096

#: What is stored as the engine of a choice.
_ENGINE = "autotune"


@dataclass(frozen=True)
class _Choice:
    """The identity of a choice's record in the plan store: the keys of the plans that are compared with cuDNN's."""

    keys: tuple[PlanKey, ...]

    def identity(self) -> dict[str, object]:
        first, *others = (key.identity() for key in self.keys)
        return {**first, "choice": ["autotune", *others]}


class Choices:
    """The choices of this process and of the plan store, by the other providers' keys without a device."""

    def __init__(self) -> None:
        self._made: dict[_Choice, str | None] = {}
        self._read_from: PlanStore | None = None

    def of(self, keys: tuple[PlanKey, ...]) -> str | None:
        store, choice = default_store.active(), _Choice(keys)
        if store is not self._read_from:
            self._made.clear()
            self._read_from = store
        if choice in self._made:
            return self._made.get(choice)
        stored = None if store is None else store.load(choice)
        found = None if stored is None else stored.data.decode()
        self._remember(choice, found)
        return found

    def offer(self, of_cudnn: PlanKey, keys: tuple[PlanKey, ...]) -> None:
        """Has the plans of `keys` compared with cuDNN's, when that is built."""
        if len(autotune.offered) >= _MAX_REMEMBERED:
            autotune.offered.clear()
        autotune.offered[of_cudnn] = partial(self._alternatives, of_cudnn, keys)

    def _alternatives(self, of_cudnn: PlanKey, keys: tuple[PlanKey, ...]) -> list[Alternative]:
        choice, found = _Choice(tuple(key.without_device() for key in keys)), list[Alternative]()
        for key in keys:
            try:
                if key.provider == FLASH4 and (key.device is None or not checks.is_right(kind_of(key), key.device)):
                    continue
                plan = plan_cache.get(key, partial(build_plan, find_operation(key.operation)), to_use=False)
            except Exception as error:  # noqa: BLE001 - such as a lack of memory: the call is cuDNN's
                _log.warning("%s was not compared with cuDNN: %s", key.provider, error)
                continue
            found.append(Alternative(of_cudnn, plan, partial(self._settled, choice, key)))
        return found

    def _settled(self, choice: _Choice, key: PlanKey, is_fastest: bool, why_discarded: str) -> None:
        """Keeps the choice. A kind of FlashAttention-4's that was discarded serves no call any more."""
        if why_discarded:
            _log.warning("the plan %s was discarded: %s", key, why_discarded)
            if key.provider == FLASH4:
                functions.refuse(kind_of(key), f"in a comparison, {why_discarded}")
        else:
            provider = (key.provider or CUDNN) if is_fastest else CUDNN
            self._remember(choice, provider)
            store = default_store.active()
            if store is not None:
                store.save(choice, StoredPlan.of_text(choice, _ENGINE, provider))
        plan_cache.forget_calls()

    def _remember(self, choice: _Choice, provider: str | None) -> None:
        if len(self._made) >= _MAX_REMEMBERED:
            self._made.clear()
        self._made[choice] = provider


choices = Choices()
autotune.on_leaving.append(plan_cache.forget_calls)

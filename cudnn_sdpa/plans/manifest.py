"""Plan manifests: the plans that a program used, to be built for other machines and later runs."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from cudnn_sdpa._version import __version__
from cudnn_sdpa.errors import OptionError
from cudnn_sdpa.graph.backend import version_string
from cudnn_sdpa.graph.definition import find_operation
from cudnn_sdpa.graph.diagnostics import shortened
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.graph.layouts import JsonObject
from cudnn_sdpa.graph.target import Target, live_target, read_text

#: Format version; changes when files of older versions could be misread.
VERSION = 1
_SCHEMA = Path(__file__).with_name("manifest.schema.json")


@dataclass
class PlanManifest:
    """Plan keys without a GPU: written by `record_plans`, read by `warmup` and `compile_plans`.

    Attributes:
        plans: A description of each plan: its operation, operands and options, as `PlanKey.to_json` gives them.
        recorded_on: The GPU and versions it was recorded with, for people.
    """

    plans: list[JsonObject] = field(default_factory=list)
    recorded_on: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, keys: list[PlanKey]) -> PlanManifest:
        """The manifest of some plans, deduplicated, in an order independent of their use."""
        # Without digests, which `keys` computes from the builders of its process.
        plans = [{name: x for name, x in key.to_json().items() if name != "digest"} for key in keys]
        texts = sorted({json.dumps(plan, sort_keys=True) for plan in plans})
        recorded_on = {}
        if keys:
            of = keys[0].target
            recorded_on = {"gpu": of.name, "cudnn": version_string(of.cudnn), "nvidia-cudnn-frontend": of.frontend}
        return cls([json.loads(text) for text in texts], recorded_on)

    def save(self, path: str | Path) -> None:
        """Writes the manifest as JSON."""
        data = {"manifest": VERSION, "cudnn_sdpa": __version__, "recorded_on": self.recorded_on, "plans": self.plans}
        Path(path).write_text(json.dumps(data, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> PlanManifest:
        """Reads a manifest; repeated plans are merged.

        Raises:
            OptionError: The file cannot be read, or does not follow the schema; the message says where.
        """
        try:
            data = json.loads(read_text(path))
            violation = _violation(data)
        except (OSError, ValueError, RecursionError, TypeError) as error:
            why = shortened(str(getattr(error, "strerror", None) or error))
            raise OptionError("manifest", f"{str(path)!r} ({why})", "a file written by PlanManifest.save") from error
        if violation is not None:
            got = f"{str(path)!r}: {shortened(violation[0])}: {shortened(violation[1])}"
            raise OptionError("manifest", got, f"a plan manifest, version {VERSION}")
        distinct = {json.dumps(plan, sort_keys=True): plan for plan in data["plans"]}
        return cls(list(distinct.values()), data["recorded_on"])

    def keys(self, target: Target, device: int | None) -> list[PlanKey]:
        """The keys of the plans on a GPU, deduplicated, with this installation's versions of their operations.

        Modules of custom operations must be imported before; this method imports only this package's.
        """
        return list(dict.fromkeys(replace(_key_of(plan, target), device=device) for plan in self.plans))

    def __len__(self) -> int:
        return len(self.plans)


def _violation(data: object) -> tuple[str, str] | None:
    """The path of a violation of the schema, and the error; None if the manifest follows it."""
    from jsonschema import Draft202012Validator  # takes 50 ms
    from jsonschema.exceptions import best_match

    error = best_match(Draft202012Validator(json.loads(_SCHEMA.read_text())).iter_errors(data))
    return None if error is None else (error.json_path, error.message)


def _key_of(plan: JsonObject, target: Target) -> PlanKey:
    name = plan.get("operation") if isinstance(plan, dict) else plan
    try:
        operation = find_operation(str(name), only_imported=True)
        digest, provider = operation.digest, operation.provider
    except (ImportError, AttributeError, TypeError, KeyError, ValueError, RecursionError) as error:
        got = f"the operation {shortened(repr(name))} ({shortened(str(error))})"
        expected = "an operation of this installation; import the module that defines it first"
        raise OptionError("manifest", got, expected) from error
    try:
        _check_numbers(plan)
        key = PlanKey.from_json({**plan, "digest": digest, "provider": provider}, target)
        hash(key)  # a manifest that was not read from a file may have dictionaries among the options
    except (AttributeError, TypeError, KeyError, ValueError, RecursionError) as error:
        got = f"a plan of {shortened(repr(name))} ({shortened(str(error))})"
        raise OptionError("manifest", got, "a plan as PlanManifest.save writes it") from error
    return key


def _check_numbers(plan: JsonObject) -> None:
    for operand in (*plan["inputs"], *plan["outputs"]):
        layout = operand["layout"]
        for number in (*layout["shape"], *layout["stride"], operand["fill"]):
            if type(number) is not int or number >= 1 << 63:
                raise ValueError(f"{operand['name']}: {number!r} where an integer of 64 bits is expected")
        if len(layout["shape"]) != len(layout["stride"]):
            raise ValueError(f"{operand['name']}: {len(layout['shape'])} sizes and {len(layout['stride'])} strides")


# Plans for a GPU that is not there.


@dataclass(eq=False)
class Recording:
    """Keys of the plans that a thread's calls would use on a GPU.

    Attributes:
        is_paused: Whether operators are those of a call whose one plan is among the keys.
    """

    target: Target
    keys: list[PlanKey] = field(default_factory=list)
    is_paused: bool = False


class _Recordings(threading.local):
    """The recordings of a thread, the outermost first."""

    active: tuple[Recording, ...] = ()


recordings = _Recordings()


def target_of(x: Tensor) -> Target | None:
    """The GPU that a tensor's calls are planned for, if there is one."""
    if x.is_cuda:
        return live_target(x.get_device())
    return recordings.active[-1].target if recordings.active else None


@contextmanager
def recorded_as(key_of: Callable[[Target], PlanKey], tensors: Sequence[Tensor]) -> Iterator[None]:
    """Records one plan, of the kernel that a GPU runs in place of the operators that run here on these tensors."""
    # Operators refuse float64 themselves.
    is_recorded = all((x.is_cpu or x.is_meta) and x.dtype != torch.float64 for x in tensors)
    recording = [each for each in recordings.active if is_recorded and not each.is_paused]
    for each in recording:
        each.keys.append(key_of(each.target))
        each.is_paused = True
    try:
        yield
    finally:
        for each in recording:
            each.is_paused = False

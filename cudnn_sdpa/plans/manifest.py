"""Plan manifests: the plans that a program used, to be built for other machines and later runs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cudnn_sdpa._version import __version__
from cudnn_sdpa.errors import OptionError
from cudnn_sdpa.graph.backend import version_string
from cudnn_sdpa.graph.definition import find_operation
from cudnn_sdpa.graph.diagnostics import shortened
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.graph.layouts import JsonObject
from cudnn_sdpa.graph.target import Target, read_text

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
        descriptions = {json.dumps(_without_digest(key), sort_keys=True) for key in keys}
        return cls([json.loads(text) for text in sorted(descriptions)], _recorded_on(keys))

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
            plans = data.get("plans") if isinstance(data, dict) else None
            distinct: dict[str, tuple[int, JsonObject]] = {}
            for number, plan in enumerate(plans if isinstance(plans, list) else ()):
                distinct.setdefault(json.dumps(plan, sort_keys=True), (number, plan))
            violation = _violation(data, list(distinct.values()))
        except (OSError, ValueError, RecursionError, TypeError) as error:
            why = shortened(str(getattr(error, "strerror", None) or error))
            raise OptionError("manifest", f"{str(path)!r} ({why})", "a file written by PlanManifest.save") from error
        if violation is not None:
            got = f"{str(path)!r}: {shortened(violation[0])}: {shortened(violation[1])}"
            raise OptionError("manifest", got, f"a plan manifest, version {VERSION}")
        return cls([plan for _, plan in distinct.values()], data["recorded_on"])

    def keys(self, target: Target, device: int | None) -> list[PlanKey]:
        """The keys of the plans on a GPU, deduplicated, with this installation's versions of their operations.

        Modules of custom operations must be imported before; this method imports only this package's.
        """
        return list(dict.fromkeys(replace(_key_of(plan, target), device=device) for plan in self.plans))

    def __len__(self) -> int:
        return len(self.plans)


def _violation(data: object, plans: Sequence[tuple[int, object]]) -> tuple[str, str] | None:
    """The path of the first violation of the schema, and the error; None if the manifest follows it."""
    from jsonschema import Draft202012Validator  # takes 50 ms
    from jsonschema.exceptions import best_match

    schema = json.loads(_SCHEMA.read_text())
    of_plan = {"$ref": "#/$defs/plan", "$defs": schema["$defs"]}
    head = {**data, "plans": []} if isinstance(data, dict) and isinstance(data.get("plans"), list) else data
    parts = [("$", head, schema), *((f"$.plans[{number}]", plan, of_plan) for number, plan in plans)]
    for path, part, rules in parts:
        if not _surely_follows(part, rules, schema["$defs"]):
            error = best_match(Draft202012Validator(rules).iter_errors(part))
            if error is not None:
                return path + error.json_path[1:], error.message
    return None


#: JSON's types by Python's. 8.0 is an integer in JSON schemas: `jsonschema` accepts that.
_TYPES: dict[type, frozenset[str]] = {
    dict: frozenset(("object",)),
    list: frozenset(("array",)),
    str: frozenset(("string",)),
    bool: frozenset(("boolean",)),
    type(None): frozenset(("null",)),
    int: frozenset(("integer", "number")),
    float: frozenset(("number",)),
}

#: Maximum depth of values for `_surely_follows`.
_MAX_DEPTH = 16

_Follows = Callable[[object, JsonObject], bool]


def _has_others(rule: Any, value: JsonObject, rules: JsonObject, follows: _Follows) -> bool:
    others = [part for name, part in value.items() if name not in rules.get("properties", ())]
    return not others if rule is False else all(follows(part, rule) for part in others)


#: Checks of a value against a keyword of a schema, given the keyword's rule, the value and all rules of the schema.
_KEYWORDS: dict[str, Callable[[Any, Any, JsonObject, _Follows], bool]] = {
    "type": lambda rule, x, *_: not _TYPES[type(x)].isdisjoint([rule] if isinstance(rule, str) else rule),
    "required": lambda rule, x, *_: bool(set(rule) <= x.keys()),
    "properties": lambda rule, x, _, follows: all(follows(part, rule[n]) for n, part in x.items() if n in rule),
    "additionalProperties": _has_others,
    "propertyNames": lambda rule, x, _, follows: all(follows(name, rule) for name in x),
    "items": lambda rule, x, _, follows: all(follows(part, rule) for part in x),
    "anyOf": lambda rule, x, _, follows: any(follows(x, each) for each in rule),
    "minItems": lambda rule, x, *_: len(x) >= rule,
    "maxLength": lambda rule, x, *_: not isinstance(x, str) or len(x) <= rule,
    "pattern": lambda rule, x, *_: re.search(rule, x) is not None,
    "minimum": lambda rule, x, *_: bool(x >= rule),
    "enum": lambda rule, x, *_: isinstance(x, str) and x in rule,
    "const": lambda rule, x, *_: type(x) is type(rule) and bool(x == rule),
    **dict.fromkeys(("$schema", "$defs", "title", "description"), lambda *_: True),
}


def _surely_follows(value: object, rules: JsonObject, defs: JsonObject, depth: int = 0) -> bool:
    """Checks a value against a schema, for the keywords that the manifest's schema has.

    This takes a tenth of the time of `jsonschema`, which has the last word, and explains it, where this is False.
    """
    rules = defs[rules["$ref"].rpartition("/")[2]] if "$ref" in rules else rules

    def follows(part: object, rule: JsonObject) -> bool:
        return depth < _MAX_DEPTH and _surely_follows(part, rule, defs, depth + 1)

    return all(key in _KEYWORDS and _KEYWORDS[key](rule, value, rules, follows) for key, rule in rules.items())


def _without_digest(key: PlanKey) -> dict[str, object]:
    description = key.to_json()
    del description["digest"]  # `keys` computes it from the builder in its process
    return description


def _recorded_on(keys: list[PlanKey]) -> dict[str, str]:
    if not keys:
        return {}
    target = keys[0].target
    return {"gpu": target.name, "cudnn": version_string(target.cudnn), "nvidia-cudnn-frontend": target.frontend}


def _key_of(plan: JsonObject, target: Target) -> PlanKey:
    name = plan.get("operation") if isinstance(plan, dict) else plan
    try:
        digest = find_operation(str(name), only_imported=True).digest
    except (ImportError, AttributeError, TypeError, KeyError, ValueError, RecursionError) as error:
        got = f"the operation {shortened(repr(name))} ({shortened(str(error))})"
        expected = "an operation of this installation; import the module that defines it first"
        raise OptionError("manifest", got, expected) from error
    try:
        _check_numbers(plan)
        key = PlanKey.from_json({**plan, "digest": digest}, target)
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

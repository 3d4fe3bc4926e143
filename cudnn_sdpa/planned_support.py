"""What cuDNN itself plans for a GPU that need not be here: the engine behind every option, or the reason for none.

`support` answers from rules; this asks cuDNN. Its heuristics answer for the whole grid, and the first plan of each kind
is compiled, since an engine that is proposed may still fail there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from cudnn_sdpa._version import __version__
from cudnn_sdpa.attention.questions import DIRECTIONS, DTYPES_OF, LACKING, OPERATIONS, NeededPlan, Question
from cudnn_sdpa.attention.support import DTYPES as HALF_DTYPES
from cudnn_sdpa.errors import UnsupportedError
from cudnn_sdpa.offline.planner import engine_offline, plan_offline
from cudnn_sdpa.runtime import backend
from cudnn_sdpa.runtime.target import Target
from cudnn_sdpa.support_matrix import ROWS

#: What is asked about: FP8 of the one kind that forward passes are made for.
DTYPES = (*HALF_DTYPES, torch.float8_e4m3fn)
#: Head dims that are asked about: of queries and keys, and of values.
HEAD_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256), (512, 512))


@dataclass(frozen=True)
class PlannedCall:
    """What cuDNN says of one kind of call.

    Attributes:
        operation: "sdpa", "sdpa_varlen" or "sdpa_fp8".
        direction: "forward" or "backward".
        dtype: Of queries, keys and values.
        head_dim: Of queries and keys.
        head_dim_v: Of values.
        option: The option, in words.
        engine: cuDNN's engine; empty if there is none.
        reasons: Every reason why there is none: this library's rules, or cuDNN's own words.
        compiled: Whether the plan was compiled, and not only proposed.
    """

    operation: str
    direction: str
    dtype: torch.dtype
    head_dim: int
    head_dim_v: int
    option: str
    engine: str = ""
    reasons: list[str] = field(default_factory=list)
    compiled: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values, ready for JSON."""
        return {**self.__dict__, "dtype": str(self.dtype).removeprefix("torch.")}


def planned_calls(
    properties: dict[str, Any], dtypes: tuple[torch.dtype, ...] = DTYPES, *, compiles: bool = True
) -> Iterator[PlannedCall]:
    """Every operation, direction, dtype, head dim and option, as cuDNN plans it for the GPU of `properties`.

    Args:
        properties: In the form of cuDNN's device-properties JSON.
        dtypes: Only these.
        compiles: Whether the first plan of each operation, direction, option and engine is compiled.

    Raises:
        OfflineError: No helper process can plan here, for example without a C compiler.
    """
    target, seen = Target.from_properties(properties), set[tuple[str, ...]]()
    for question, option in questions(dtypes):
        call = (question.operation, question.direction, question.dtype, question.head_dim, question.head_dim_v, option)
        plan = question.plans()[-1]
        try:
            engine = _proposed(plan, target, properties)
            kind = (question.operation, question.direction, option, engine)
            is_first = compiles and kind not in seen
            if is_first:
                seen.add(kind)
                plan_offline(plan.key(target), properties)
        except UnsupportedError as error:
            yield PlannedCall(*call, reasons=list(error.reasons))
        else:
            yield PlannedCall(*call, engine=engine, compiled=is_first)


def questions(dtypes: tuple[torch.dtype, ...]) -> Iterator[tuple[Question, str]]:
    """What is asked, each with its option in words."""
    options = {name: chosen for name, chosen in ROWS.items() if "head_dim" not in chosen}
    for operation, alignment in OPERATIONS.items():
        for option, chosen in options.items():
            if any(name in LACKING[operation] for name in chosen):
                continue
            for dtype in (dtype for dtype in dtypes if dtype in DTYPES_OF[operation]):
                for head_dim, head_dim_v in HEAD_DIMS:
                    for direction in DIRECTIONS:
                        of_call = {"sq": 512, "skv": 1024, "causal_alignment": alignment, **chosen}
                        of_call |= {"operation": operation, "direction": direction, "dtype": dtype}
                        yield Question(head_dim=head_dim, head_dim_v=head_dim_v, **of_call), option


def _proposed(plan: NeededPlan, target: Target, properties: dict[str, Any]) -> str:
    refused = plan.refusal(target)
    if refused is not None:
        raise refused
    return engine_offline(plan.key(target), properties)


def environment(properties: dict[str, Any]) -> dict[str, str]:
    """What the answers hold for: the GPU and the versions."""
    target = Target.from_properties(properties)
    return {
        "gpu": str(target),
        "cudnn_sdpa": __version__,
        "cudnn": backend.version_string(target.cudnn),
        "nvidia-cudnn-frontend": target.frontend,
    }


def to_json(of: dict[str, str], calls: list[PlannedCall]) -> str:
    """The answers and what they hold for as JSON, a line for each call."""
    lines = ",\n".join(json.dumps(call.to_dict()) for call in calls)
    return f'{{"environment": {json.dumps(of)},\n"calls": [\n{lines}\n]}}\n'


def tables(calls: list[PlannedCall]) -> dict[str, list[dict[str, str]]]:
    """Tables for people, one for each operation: an option, head dims that have the same answers, and these."""
    found: dict[str, dict[tuple[str, str], dict[str, str]]] = {}
    for call in calls:
        dims = str(call.head_dim) if call.head_dim == call.head_dim_v else f"{call.head_dim}/{call.head_dim_v}"
        row = found.setdefault(call.operation, {}).setdefault((call.option, dims), dict.fromkeys(DIRECTIONS, ""))
        engine = call.engine or "none"
        known = row[call.direction].split(", ") if row[call.direction] else []
        row[call.direction] = ", ".join(dict.fromkeys([*known, engine]))  # of all dtypes
    return {operation: list(_merged(rows)) for operation, rows in found.items()}


def _merged(rows: dict[tuple[str, str], dict[str, str]]) -> Iterator[dict[str, str]]:
    dims_of: dict[tuple[str, ...], list[str]] = {}
    for (option, dims), row in rows.items():
        dims_of.setdefault((option, *row.values()), []).append(dims)
    for (option, *engines), dims_of_row in dims_of.items():
        yield {"with": option, "head dims": ", ".join(dims_of_row), **dict(zip(DIRECTIONS, engines, strict=True))}

"""Writes the table of measured preferences out of the JSON of the benchmarks.

Rows for `sdpa_paged` have ranges, which people choose, and the times of a step of `benchmarks decode`. Those for
`sdpa_paged_varlen` are the steps that FlashAttention-4 served there. Those for `sdpa` are the calls of `benchmarks
providers`. Those of norms and gates have the times of a call of `benchmarks fused`, and those of convolutions the times
of one of `benchmarks conv`; people choose what they are for.

python scripts/preferences.py            # write it
python scripts/preferences.py --check    # exit with 1 if the table is another
"""

from __future__ import annotations

import json
import sys
from typing import Any

import pages
from bench_tables import measured
from pages import ROOT

from benchmarks import decode as benchmark
from benchmarks import providers
from benchmarks.peers import Configuration
from cudnn_sdpa.attention.flash4.preferences import CAUSAL, FULL, WINDOW
from cudnn_sdpa.attention.varlen.specs import sequence_bucket
from cudnn_sdpa.plans.providers import CUDNN, FLASH4

TABLE = ROOT / "cudnn_sdpa" / "plans" / "preferences.json"

DECODE, CHUNKS, PROVIDERS = "decode-h100", "decode-flash4-h200", "providers-h100"

#: The same calls on another GPU, and more.
OTHER_GPU = "providers-h200"

#: Files of the other functions, and the parts of these.
FUSED = {
    "norms": ("fused-norms-h200", "norms"),
    "gates": ("fused-gates-h200", "gates"),
    "few_rows": ("fused-few-rows-h200", "few_rows"),
    "convolutions": ("conv-activations-h200", "activations"),
}
SM = 90  # of the GPUs of all

LABEL, OWN_US, CUDNN_US = "sequences × new tokens on keys", "sdpa_paged_varlen µs", "sdpa_paged on cuDNN µs"
FLASH4_US = f"{benchmark.BY_FLASH4} µs"

#: Parts of `benchmarks providers` that measure one pass, and their calls.
PARTS = {
    "forward": (False, providers.FORWARD),
    "lengths": (False, providers.LENGTHS),
    "backward": (True, providers.BACKWARD),
    "backward_lengths": (True, providers.LENGTHS),
}

Row = dict[str, Any]


def render(text: str) -> str:
    """The table, whose ranges are those of `text`."""
    decode, chunks, of_providers, other = (measured(x) for x in (DECODE, CHUNKS, PROVIDERS, OTHER_GPU))
    paged = rows_for_pages(json.loads(text)["sdpa_paged"]["rows"], decode)
    sections = [
        _section("sdpa_paged", DECODE, decode, paged),
        _section("sdpa_paged_varlen", CHUNKS, chunks, rows_for_chunks(chunks)),
        _section("sdpa", PROVIDERS, of_providers, list(rows(of_providers).values())),
        _section("sdpa_h200", OTHER_GPU, other, list(rows(other).values())),
        *(
            _section(function, name, data, rows_of_fused(json.loads(text)[function]["rows"], data[part]))
            for function, (name, part) in FUSED.items()
            for data in (measured(name),)
        ),
    ]
    return "{\n" + ",\n".join(sections) + "\n}\n"


def _section(function: str, name: str, data: Row, found: list[Row]) -> str:
    versions, source = data["environment"], f"docs/benchmarks/{name}.json"
    how = f"{versions['gpu']}, cuDNN {versions['cudnn']}, PyTorch {versions['torch']}, {versions['date']}"
    facts = "".join(f'    "{fact}": {json.dumps(value)},\n' for fact, value in (("source", source), ("measured", how)))
    lines = ",\n".join("      " + json.dumps(row, ensure_ascii=False) for row in found)
    return f'  "{function}": {{\n{facts}    "rows": [\n{lines}\n    ]\n  }}'


def rows_for_pages(ranges: list[Row], data: Row) -> list[Row]:
    steps = {row[LABEL]: row for row in data["steps"]}
    times = {"own_us": OWN_US, "cudnn_us": CUDNN_US}
    return [row | {name: round(steps[row["of"]][column], 1) for name, column in times.items()} for row in ranges]


def rows_for_chunks(data: Row) -> list[Row]:
    steps = {step.label: step for step in benchmark.STEPS if step.is_uniform}
    return [
        {
            "sm": SM,
            "dims": list(steps[row[LABEL]].dims),
            "is_grouped": steps[row[LABEL]].heads[0] > steps[row[LABEL]].heads[1],
            "new_tokens": steps[row[LABEL]].new[0],
            "fa4_us": round(row[FLASH4_US], 1),
            "own_us": round(row[OWN_US], 1),
            "of": row[LABEL],
        }
        for row in data["steps"]
        if row[LABEL] in steps and isinstance(row.get(FLASH4_US), float)
    ]


def rows_of_fused(choices: list[Row], measured_rows: list[Row]) -> list[Row]:
    """Rows with the times of their call; people choose that, and what all calls like it do."""
    calls = {str(next(iter(row.values()))): row for row in measured_rows}

    def of_call(name: str, call: Row) -> float:
        return round(call[f"{name.removesuffix('_us')} µs"], 1)

    return [row | {name: of_call(name, calls[row["of"]]) for name in row if name.endswith("_us")} for row in choices]


def rows(data: Row) -> dict[tuple[bool, str], Row]:
    """The rows of a file for `sdpa`, by pass and call."""
    found: dict[tuple[bool, str], Row] = {}
    for part, (is_backward, configurations) in PARTS.items():
        calls = {each.name: each for each in configurations}
        for row in data.get(part, []):
            if all(isinstance(row[f"{name} µs"], float) for name in (CUDNN, FLASH4)):
                found[is_backward, row["call"]] = _row(calls[row["call"]], row, is_backward=is_backward)
    return found


def _row(call: Configuration, row: Row, *, is_backward: bool) -> Row:
    mean = sum(call.lengths) / sequence_bucket(len(call.lengths))  # of packed sequences, as a key has them
    return {
        "sm": SM,
        "is_backward": is_backward,
        "dims": [call.dim, call.dim_v or call.dim],
        "mask": WINDOW if call.left is not None else CAUSAL if call.causal else FULL,
        "is_capped": call.softcap is not None,
        "has_sinks": call.sinks and not is_backward,
        "is_grouped": call.heads[0] > call.heads[1],
        "is_packed": call.packed,
        "queries": round(mean) if call.packed else call.lengths[0],
        "keys": round(mean) if call.packed else call.keys or call.lengths[0],
        "tokens": sum(call.lengths),
        **({} if call.left is None else {"left": call.left}),
        "fa4_us": round(row["fa4 µs"], 1),
        "cudnn_us": round(row["cudnn µs"], 1),
        "of": call.name,
    }


if __name__ == "__main__":
    sys.exit(pages.main(__file__, render, TABLE))

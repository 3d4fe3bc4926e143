"""Writes the rows of `cudnn_sdpa/attention/flash4/preferences.json` out of the JSON of `benchmarks providers`.

python scripts/provider_rows.py docs/benchmarks/providers-h100.json 90
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pages import ROOT

from benchmarks import providers
from benchmarks.peers import Configuration
from cudnn_sdpa.attention.flash4.preferences import CAUSAL, FULL, WINDOW
from cudnn_sdpa.attention.varlen.specs import sequence_bucket
from cudnn_sdpa.plans.providers import CUDNN, FLASH4

TARGET = ROOT / "cudnn_sdpa" / "attention" / "flash4" / "preferences.json"

#: Parts of the benchmark that measure one pass, and their calls.
PARTS = {
    "forward": (False, providers.FORWARD),
    "lengths": (False, providers.LENGTHS),
    "backward": (True, providers.TRAINING),
    "backward_lengths": (True, providers.LENGTHS),
}


def rows(measured: dict[str, Any], sm: int) -> list[dict[str, Any]]:
    found: dict[tuple[bool, str], dict[str, Any]] = {}
    for part, (is_backward, configurations) in PARTS.items():
        calls = {each.name: each for each in configurations}
        for row in measured.get(part, []):
            if all(isinstance(row[f"{name} µs"], float) for name in (CUDNN, FLASH4)):
                found[is_backward, row["call"]] = _row(calls[row["call"]], row, is_backward=is_backward, sm=sm)
    return list(found.values())


def _row(call: Configuration, row: dict[str, Any], *, is_backward: bool, sm: int) -> dict[str, Any]:
    mean = sum(call.lengths) / sequence_bucket(len(call.lengths))  # of packed sequences, as a key has them
    return {
        "sm": sm,
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
        "fa4_us": round(row["fa4 µs"], 1),
        "cudnn_us": round(row["cudnn µs"], 1),
        "of": call.name,
    }


def main(path: str, sm: str) -> None:
    """Writes the table."""
    found = rows(json.loads(Path(path).read_text()), int(sm))
    lines = ",\n".join(f"    {json.dumps(row, ensure_ascii=False)}" for row in found)
    TARGET.write_text(f'{{\n  "rows": [\n{lines}\n  ]\n}}\n')


if __name__ == "__main__":
    main(*sys.argv[1:])

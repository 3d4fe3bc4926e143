"""Copies measured times into the table that chooses kernels for pages, out of the JSON of `benchmarks decode`.

python scripts/preference_times.py            # write them
python scripts/preference_times.py --check    # exit with 1 if the table has other times
"""

from __future__ import annotations

import json
import sys

import pages
from bench_tables import measured
from pages import ROOT

TABLE = ROOT / "cudnn_sdpa" / "attention" / "paged_varlen" / "preferences.json"
LABEL, OWN, CUDNN = "sequences × new tokens on keys", "sdpa_paged_varlen µs", "sdpa_paged on cuDNN µs"


def render(text: str) -> str:
    """The table with the times of each row's step, and what they were measured with."""
    data = measured("decode-h100")
    steps, versions = {row[LABEL]: row for row in data["steps"]}, data["environment"]
    rows = json.loads(text)["rows"]
    for row in rows:
        row |= {"own_us": round(steps[row["of"]][OWN], 1), "cudnn_us": round(steps[row["of"]][CUDNN], 1)}
    software = f"cuDNN {versions['cudnn']}, PyTorch {versions['torch']}"
    how = f"`benchmarks decode`, {versions['gpu']}, {software}, {versions['date']}"
    lines = ",\n".join("    " + json.dumps(row, ensure_ascii=False) for row in rows)
    return f'{{\n  "measured": {json.dumps(how)},\n  "rows": [\n{lines}\n  ]\n}}\n'


if __name__ == "__main__":
    sys.exit(pages.main(__file__, render, TABLE))

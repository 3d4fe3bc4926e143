"""Executes the notebooks of samples/ on the CPU and stores them with what they printed and drew, and nothing else.

    python scripts/notebooks.py                 # all of them: `make notebooks`
    python scripts/notebooks.py samples/02*     # some
    python scripts/notebooks.py --check         # whether they are stored as this script would

What is stored does not tell when, where or in how long it ran, so that a diff shows what has changed. It tells from
which files of docs/benchmarks pictures were drawn, so that --check finds those whose numbers have changed since. The
link to Colab is made of `extra.colab_repository` in mkdocs.yml.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import re
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

ROOT = Path(__file__).parent.parent
LINK = "[Open in Colab](https://colab.research.google.com/github/{repository}/blob/main/samples/{name})"
#: The second cell of each. The site leaves it out.
INSTALL = """\
import importlib.util
import subprocess
import sys

if None in map(importlib.util.find_spec, ["cudnn_sdpa"]):  # in Colab, for instance
    import torch

    extra = "cu13" if (torch.version.cuda or "12").startswith("13") else "cu12"
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", f"cudnn-sdpa[{extra}]"], check=True)"""
#: Extras of the package that a notebook needs beside CUDA's, and packages by the same name that come with them.
EXTRAS = {"10_hugging_face.ipynb": "transformers"}
#: Files of docs/benchmarks that a picture is drawn from.
DRAWN = re.compile(r"\w+-h200\.json")
#: Places of one machine, times and addresses.
TRACES = re.compile(r"/(tmp|home|root|Users|work)/|\b\d+:\d\d:\d\d\b|\b0x[0-9a-f]{6,}")


def repository() -> str:
    """The owner and name on GitHub that links to Colab name."""
    found = re.search(r"^  colab_repository: (\S+)", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def arrange(notebook: NotebookNode, name: str) -> None:
    """Puts the link and the first cell in place, and drops metadata that differ from run to run."""
    title, *rest = notebook.cells
    if rest[0].metadata.get("tags") != ["install"]:
        rest.insert(0, nbformat.v4.new_code_cell())
    rest[0].source = INSTALL
    if more := EXTRAS.get(name):
        rest[0].source = INSTALL.replace("{extra}", "{extra}," + more).replace(
            '["cudnn_sdpa"', f'["cudnn_sdpa", "{more}"'
        )
    heading, *text = [line for line in title.source.splitlines() if not line.startswith("[Open in Colab]")]
    body = "\n".join(text).strip()
    title.source = f"{heading}\n\n{LINK.format(repository=repository(), name=name)}\n\n{body}"
    notebook.cells = [title, *rest]
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
        cell.metadata = NotebookNode(tags=["install"]) if number == 1 else NotebookNode()
        for output in cell.get("outputs", []):
            output.pop("metadata", None) if output.output_type == "stream" else output.update(metadata=NotebookNode())
    notebook.metadata = NotebookNode(
        kernelspec={"display_name": "Python 3", "language": "python", "name": "python3"},
        language_info={"name": "python"},
        drawn_from=notebook.metadata.get("drawn_from", {}),
    )
    notebook.nbformat, notebook.nbformat_minor = 4, 5


def drawn_from(notebook: NotebookNode) -> dict[str, str]:
    """What the measurements that a notebook draws are, as digests of their files."""
    code = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    files = [ROOT / "docs" / "benchmarks" / name for name in sorted(set(DRAWN.findall(code)))]
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest()[:12] for file in files}


def execute(notebook: NotebookNode) -> None:
    """Runs all cells, on the CPU and without plans of earlier runs."""
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "CUDNN_SDPA_PLAN_DIR": "off"}
    os.environ["PYTHONWARNINGS"] = "ignore:IProgress not found"  # tqdm misses Jupyter's progress bars
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    logging.getLogger("traitlets").setLevel(logging.ERROR)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(ROOT / "samples")}}).execute()
    notebook.metadata.drawn_from = drawn_from(notebook)


def complaints(notebook: NotebookNode) -> list[str]:
    """What must not be stored."""
    found = []
    if notebook.metadata.drawn_from != drawn_from(notebook):
        found.append("shows other measurements than those in docs/benchmarks: execute it again")
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    if [cell.execution_count for cell in code] != list(range(1, len(code) + 1)):
        found.append("was not executed from its beginning to its end")
    for cell in code:
        for output in cell.outputs:
            if output.output_type == "error" or output.get("name") == "stderr":
                found.append(f"cell {cell.id} has an error or a warning")
            text = output.get("text", "") + str(output.get("data", {}).get("text/plain", ""))
            if trace := TRACES.search(text):
                found.append(f"cell {cell.id} shows {trace[0]!r}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("notebooks", nargs="*", type=Path, help="all in samples/ if none is given")
    parser.add_argument("--check", action="store_true", help="only say whether they are stored as this script would")
    options = parser.parse_args()
    wrong = []
    for path in options.notebooks or sorted((ROOT / "samples").glob("*.ipynb")):
        before = path.read_text() if path.exists() else ""
        notebook = nbformat.reads(before, as_version=4)
        arrange(notebook, path.name)
        if not options.check:
            execute(notebook)
            arrange(notebook, path.name)
        nbformat.validate(notebook)
        wrong += [f"{path.name} {complaint}" for complaint in complaints(notebook)]
        after = nbformat.writes(notebook, indent=1) + "\n"
        if options.check and after != before:
            wrong.append(f"{path.name} is not as `make notebooks` leaves it")
        elif not options.check:
            path.write_text(after)
            print(path.name)
    print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

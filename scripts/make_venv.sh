#!/bin/sh
# Creates or updates a virtual environment with this package in editable mode and every development tool.
#
#   scripts/make_venv.sh .venv python3
#
# PyTorch comes first, because which cuDNN belongs beside it depends on the CUDA version that it was built for.
# TORCH_INDEX_URL may name a package index with other builds of PyTorch, such as the CPU ones of pytorch.org.
set -eu

venv=$1
base_python=$2
python=$venv/bin/python

if ! "$python" -m pip --version >/dev/null 2>&1 || ! scripts/find_python.sh "$python" >/dev/null 2>&1; then
    echo "Creating $venv with $("$base_python" --version)"
    "$base_python" -m venv --clear "$venv" || {
        echo "Could not create $venv. On Debian and Ubuntu the package python3-venv is needed." >&2
        exit 1
    }
fi

export PIP_DISABLE_PIP_VERSION_CHECK=1
quiet=
[ -t 1 ] || quiet=--quiet

echo "Installing PyTorch into $venv (a few minutes the first time)"
"$python" -m pip install $quiet ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} -c constraints.txt torch

extra=$("$python" scripts/cuda_extra.py --explain)
constraints=constraints.txt
if "$python" -c 'import sys, torch; sys.exit(torch.version.cuda is not None)' 2>/dev/null; then
    constraints=constraints-cpu.txt
fi

echo "Installing cudnn-sdpa[$extra,dev,docs] into $venv"
"$python" -m pip install $quiet -c "$constraints" -e ".[$extra,dev,docs]"

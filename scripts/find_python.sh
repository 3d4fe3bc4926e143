#!/bin/sh
# Prints the first of the given interpreters that runs and is a Python this package supports (3.10 to 3.14).
#
#   scripts/find_python.sh python3 python3.13 python3.12
#
# A name on PATH is tried, not only looked up: pyenv leaves shims that find nothing while their version is not selected.
# The versions that pyenv has installed are tried next.
set -eu

supported() {
    "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))' >/dev/null 2>&1
}

for name in "$@"; do
    for candidate in "$name" "${PYENV_ROOT:-${HOME-}/.pyenv}/versions/${name#python}".*/bin/python; do
        if supported "$candidate"; then
            echo "$candidate"
            exit 0
        fi
    done
done
echo "No Python 3.10 to 3.14 found; tried: $*." >&2
echo "Install one, or name yours: BASE_PYTHON=/path/to/python3 for make venv," >&2
echo "BASE_PYTHON_MIN=…, BASE_PYTHON_2.11=…, BASE_PYTHON_NEW=… for make test-min, test-2.11, test-new." >&2
exit 1

#!/bin/sh
# Prints the first of the given interpreters that runs and is a Python this package supports (3.10 to 3.14).
#
#   scripts/find_python.sh python3 python3.13 python3.12
#
# A name on PATH is tried, not only looked up: version managers leave shims that find nothing.
set -eu

for candidate in "$@"; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))' >/dev/null 2>&1; then
        echo "$candidate"
        exit 0
    fi
done
echo "No Python 3.10 to 3.14 found; tried: $*." >&2
echo "Install one, or name yours: make venv BASE_PYTHON=/path/to/python3" >&2
exit 1

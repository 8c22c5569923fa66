#!/usr/bin/env bash
# Runs the tests: scripts/run_tests.sh [--slow] [pytest arguments].
#
# Makes the environment first if there is none (see environment.sh). Tests marked slow are left out
# unless --slow is given. Files of tests run side by side, one a core; -n 0 runs them in one process.
set -euo pipefail

# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

selection=(-m "not slow")
arguments=()
for argument in "$@"; do
    if [[ "$argument" == --slow ]]; then
        selection=()
    else
        arguments+=("$argument")
    fi
done

find_python "$ROOT/requirements.txt" "$ROOT/requirements-dev.txt"
cd "$ROOT"
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
# In the order of their folders: the long ones, on several ranks, come early.
side_by_side=(-n "$(nproc)" --maxprocesses=4 --dist=loadfile --no-loadscope-reorder)
exec "$PYTHON" -m pytest -q "${side_by_side[@]}" "${selection[@]}" "${arguments[@]}"

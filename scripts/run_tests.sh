#!/usr/bin/env bash
# Runs the tests: scripts/run_tests.sh [--slow] [pytest arguments].
#
# Makes the environment first if there is none (see environment.sh). Tests marked slow are left out
# unless --slow is given.
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
exec "$PYTHON" -m pytest -q "${selection[@]}" "${arguments[@]}"

# shellcheck shell=bash
# Finds or makes the Python environment. To be sourced; then:
#
#   find_python REQUIREMENTS...    sets PYTHON to an interpreter that has what these files list
#
# The active python is taken if it has the packages; otherwise, or if VENV is set, the virtual
# environment $VENV (default: .venv beside run_train.sh), which is made or brought up to date once.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

find_python() {
    local active
    active="$(command -v python3 || command -v python || true)"
    if [[ -z "${VENV:-}" && -n "$active" ]] && has_packages "$active" "$@"; then
        PYTHON="$active"
        return
    fi
    VENV="${VENV:-$ROOT/.venv}"
    PYTHON="$VENV/bin/python"
    is_ready "$@" || install_packages "${active:-python3}" "$@"
}

# Whether an interpreter has every package of the requirements files; torch and torchtitan have to
# be the pinned versions. Reads metadata alone: importing torch would take seconds.
has_packages() {
    "$1" - "${@:2}" 2>/dev/null <<'PYTHON'
import re
import sys
from importlib.metadata import version

for path in sys.argv[1:]:
    for line in open(path):
        pin = re.match(r"([\w-]+)==([^\s;]+)", line)
        if pin is None or ("sys_platform" in line and sys.platform != "linux"):
            continue
        installed = version(pin[1]).split("+")[0]  # without a build tag such as +cpu
        if pin[1] in ("torch", "torchtitan") and installed != pin[2]:
            sys.exit(1)
PYTHON
}

# Whether VENV was installed from the requirements files as they are now. A virtual environment
# that somebody else made has no stamps, and counts if it has the packages.
is_ready() {
    [[ -x "$PYTHON" ]] || return 1
    if ! compgen -G "$VENV/.installed-*" >/dev/null; then
        has_packages "$PYTHON" "$@"
        return
    fi
    local file
    for file in "$@"; do
        [[ "$(cat "$(stamp_of "$file")" 2>/dev/null)" == "$(hash_of "$file")" ]] || return 1
    done
}

stamp_of() { echo "$VENV/.installed-$(basename "$1" .txt)"; }
hash_of() { sha256sum "$1" | cut -d' ' -f1; }

install_packages() {
    local base="$1" file stamp
    shift
    if ! "$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        echo "error: needs Python 3.11 or later to make $VENV, and $base is not" >&2
        exit 1
    fi
    mkdir -p "$VENV"
    # Two starts at once: the second waits, then finds the work done.
    exec 9>"$VENV/.lock"
    flock 9
    if ! is_ready "$@"; then
        echo "Installing $(basename -a "$@" | paste -sd' ') into $VENV (once; about 2 minutes)" >&2
        # An interrupted install leaves stamps that match no file, so it is done again.
        for file in "$@"; do echo incomplete >"$(stamp_of "$file")"; done
        [[ -x "$PYTHON" ]] || "$base" -m venv "$VENV"
        for file in "$@"; do
            if ! "$PYTHON" -m pip install -qq --disable-pip-version-check -r "$file" >&2; then
                echo "error: could not install $file" >&2
                exit 1
            fi
            stamp="$(stamp_of "$file")"
            hash_of "$file" >"$stamp.new" && mv "$stamp.new" "$stamp"
        done
    fi
    exec 9>&-
}

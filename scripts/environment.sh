# Sourced by the scripts beside it. Sets $root to the checkout, and has one function:
#
#   use_environment EXTRA...    sets $python to the Python to run: that of $PYTHON, as it is, if the variable is set;
#                               else that of .venv with lsgd and these extras, which the first call makes.

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
recent='import sys; sys.exit(sys.version_info < (3, 11))'

use_environment() {
    if [[ -n ${PYTHON:-} ]]; then
        use_existing
        return
    fi
    local candidate
    for candidate in python3 python3.{14,13,12,11} python; do
        if "$candidate" -c "$recent" 2>/dev/null; then
            "$candidate" "$root/scripts/environment.py" "$@" || exit 1
            python=$root/.venv/bin/python
            return
        fi
    done
    fail "no Python 3.11 or newer on the PATH (python3 is: $(python3 --version 2>&1 || true)); install one, or name" \
        "the Python of an environment that has lsgd: PYTHON=/path/to/python bash $0"
}

use_existing() {
    "$PYTHON" -c "$recent" 2>/dev/null ||
        fail "PYTHON=$PYTHON is not a Python of 3.11 or newer ($("$PYTHON" --version 2>&1 || true))"
    python=$("$PYTHON" -c 'import sys; print(sys.executable)')
    "$python" -P -c 'import lsgd' 2>/dev/null ||
        fail "PYTHON=$PYTHON cannot import lsgd; install it there: '$python' -m pip install -e '$root[examples]'," \
            "or unset PYTHON to use .venv"
}

fail() {
    echo "$(basename -- "$0"): $*" >&2
    exit 1
}

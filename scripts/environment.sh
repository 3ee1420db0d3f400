# The scripts beside it source this. It sets $root to the checkout, and defines one function:
#
#   use_environment EXTRA...    sets $python to the Python to run: $PYTHON, unchanged, if that variable is set;
#                               else the one in .venv, with lsgd and these extras. The first call creates it.

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
            python=$root/.venv/bin/python
            [[ -w $root/.venv.lock || (! -e $root/.venv.lock && -w $root) ]] || fail "$root/.venv belongs to another user; use it as it" \
                "is, if it is complete: PYTHON=$python bash $0"
            make_environment "$candidate" "$@" 9>>"$root/.venv.lock" || exit 1
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

# Brings .venv up to date, one process at a time. .venv/installed says what it contains: the Python and the folder, the
# requirements, the extras. It is empty during an installation, so an interrupted one starts again from nothing.
make_environment() (
    cd -- "$root"
    flock --nonblock 9 || { say "waiting for another process, which is making $root/.venv" && flock 9; }
    base=$1 stamp=.venv/installed made_of= extras=
    [[ ! -f $stamp ]] || { read -r made_of && read -r _ && read -r extras; } <"$stamp" || true
    extras=$(printf '%s\n' "${@:2}" ${extras//,/ } | sed '/^$/d' | sort -u | paste -sd, -)
    home="$("$base" -c 'import platform; print(platform.python_version())' | cut -d. -f1,2), $root"
    wanted=$(printf '%s\n' "$home" "$(cat pyproject.toml constraints.txt | sha256sum)" "$extras")
    [[ ! -x $python || ! -f $stamp || $(<"$stamp") != "$wanted" ]] || return 0
    if [[ ! -x $python || (-f $stamp && $made_of != "$home") ]]; then # one without a stamp was made by hand, and stays
        reason=$("$base" -c 'import ensurepip, venv' 2>&1) ||
            fail "$base cannot make environments (${reason##*Error: }); on Debian and Ubuntu:" \
                "apt install python${home%%,*}-venv"
        mkdir -p .venv && : >"$stamp"
        find .venv/ -mindepth 1 ! -path "$stamp" -delete
        "$base" -m venv .venv >&2 || fail "$base cannot make an environment in $root/.venv, for the reason above"
    fi
    say "installing into $root/.venv; this happens once and takes some minutes"
    [[ ! -f $stamp ]] || : >"$stamp"
    pip_install setuptools uv # setuptools builds lsgd, and torch needs it anyway
    install_cpu_torch
    install_packages --no-build-isolation --editable ".${extras:+[$extras]}"
    install_streaming
    compile_imported
    printf '%s\n' "$wanted" >"$stamp"
)

# Without an NVIDIA driver, torch's CPU build: the other one brings gigabytes of CUDA libraries. uv takes half of pip's
# time for it, and must be told of the wheels that pip knows of.
install_cpu_torch() {
    local pin from links=(${PIP_FIND_LINKS:-})
    ! command -v nvidia-smi >/dev/null && pin=$(grep '^torch==' constraints.txt) || return 0
    for from in ${links:+--no-index} --index-url=https://download.pytorch.org/whl/cpu; do
        UV_HTTP_RETRIES=0 UV_HTTP_TIMEOUT=10 "$python" -m uv pip install "$pin" --no-deps "$from" \
            "${links[@]/#/--find-links=}" --python "$python" >&2 && return
    done
    "$python" -m pip install "$pin" --no-deps --index-url https://download.pytorch.org/whl/cpu --retries 0 --timeout 10 \
        --no-compile --disable-pip-version-check >&2 || say "torch's CPU build cannot be fetched there; pip takes the one that it finds"
}

# mosaicml-streaming asks for older releases of numpy, transformers and xxhash than those that it works with here, and
# for the libraries of six clouds: tests have it alone, and the extra dev has what it imports.
install_streaming() {
    local pin
    [[ ,$extras, == *,dev,* ]] && pin=$(grep '^mosaicml-streaming==' constraints.txt) || return 0
    install_packages --no-deps "$pin"
}

# With uv, which is faster than pip, or with pip if packages come from an index that only pip knows. Neither compiles
# what it installs: of 9,000 files, a run imports 2,000.
install_packages() {
    "$python" -m uv pip install "$@" --python "$python" --constraint constraints.txt >&2 ||
        { say "uv cannot install that; pip tries it" && pip_install "$@"; }
}

# Compiles what a run of the example imports, once for all its processes: else each worker would do it for itself, and at
# each start where PYTHONDONTWRITEBYTECODE is set. What is not installed is left out. The first optimizer imports
# torch._dynamo, which takes as long as torch.
compile_imported() {
    local modules
    for modules in "torch._dynamo, lsgd.client.worker" "lsgd.cli.commands, lsgd.node.launch, lsgd.server.cli, lsgd.watch.curve" \
        "sklearn.datasets"; do
        env --unset PYTHONDONTWRITEBYTECODE "$python" -P -c "import $modules" 2>/dev/null &
    done
    wait
}

pip_install() {
    local status=0 command=("$python" -m pip install "$@" --constraint constraints.txt --no-compile --disable-pip-version-check)
    "${command[@]}" >&2 || status=$?
    ((!status)) || fail "pip failed with exit code $status, for the reason above; mend it and start again, or try it by" \
        "hand in $root: $(printf '%q ' "${command[@]}")"
}

say() {
    echo "environment: $*" >&2
}

fail() {
    echo "$(basename -- "$0"): $*" >&2
    exit 1
}

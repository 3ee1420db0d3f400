#!/usr/bin/env bash
# Tests lsgd on this machine's GPU and measures it, in less than eight minutes, without internet (docs/guides/gpu.md).
#
#   bash scripts/gpu.sh WHEELS                  what is missing comes from a folder of wheels; leave it out if nothing is
#   bash scripts/gpu.sh WHEELS --device cpu     the same in small, without a GPU
#   bash scripts/gpu.sh --download WHEELS 3.12 [PACKAGE...]   fills the folder for that Python, where there is internet
#
#   --parts 1 3     only these of the five parts
#   --only REGEX    only what the regular expression matches
#   --out FOLDER    for table, figures and log, instead of build/gpu
#   --keep          also puts the results in the documentation
#
# PYTHON names the Python that has torch and CuPy; without it, the one in .venv, which train.sh has made, or else python3.
# Nothing is installed into it.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

if [[ " $* " == *" --help "* || " $* " == *" -h "* ]]; then
    sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
    exit
fi
base=${PYTHON:-python3}
if [[ -z ${PYTHON:-} ]] && "$root/.venv/bin/python" -c 'import torch' 2>/dev/null; then
    base=$root/.venv/bin/python
fi
"$base" -c "$recent" 2>/dev/null || fail "$base is no Python of 3.11 or newer; name one: PYTHON=/path/to/python bash $0"
environment=$root/benchmarks/gpu/environment.py
if [[ ${1:-} == --download ]]; then
    (($# > 1)) || fail "usage: gpu.sh --download WHEELS [RELEASE [PACKAGE...]]"
    exec "$base" "$environment" download "${@:2}"
fi
wheels=()
if (($#)) && [[ $1 != -* ]]; then
    [[ -d $1 ]] || fail "there is no folder $1; --download fills one, as --help shows"
    wheels=("$(cd -- "$1" && pwd)")
    shift
fi
device=cuda
[[ " $* " != *" --device cpu "* && " $* " != *" --device=cpu "* ]] || device=cpu
python=$("$base" "$environment" python "$device" "${wheels[@]}")
PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} exec "$python" -P -m benchmarks.gpu "$@"

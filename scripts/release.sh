#!/usr/bin/env bash
# Builds a release from the last commit, and tries it as a user would, in an environment of its own.
#   bash scripts/release.sh              builds into dist/, tries the wheel and the sdist, and says how to publish
#   bash scripts/release.sh build DIST   only builds, into this folder
# The same commit gives the same bytes wherever the same setuptools builds it (constraints.txt): files have the commit's time, and stand in
# the archives in one order (SOURCE_DATE_EPOCH, https://reproducible-builds.org/specs/source-date-epoch).
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"
cd -- "$root"
use_environment examples test
work=$(mktemp --directory)
trap 'rm -rf "$work"' EXIT
export PIP_CONSTRAINT=$root/constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH

build() { # DIST: an sdist, and a wheel from it
    local copy
    copy=$(mktemp --directory "$work/XXXX")/lsgd
    mkdir "$copy"
    git archive HEAD | tar --extract --directory="$copy"
    "$python" -m build --no-isolation --outdir "$1" "$copy" >"$work/log" 2>&1 || { cat "$work/log" >&2 && fail "the build failed"; }
    "$python" scripts/same_bytes.py "$1"/*.tar.gz
}

try() { # ARCHIVE: installs it where nothing else is, and trains with it
    say "trying ${1##*/}"
    local home=$work/${1##*.} bin=$work/${1##*.}/bin
    "$python" -m venv "$home"
    python=$bin/python install_cpu_torch
    "$bin/python" -m pip install --quiet "$1[examples]"
    cd "$home"
    "$bin/lsgd" --version
    timeout 600 "$bin/lsgd" quickstart --run-dir quickstart
    two_nodes "$bin"
    cd "$root"
}

two_nodes() { # BIN: two nodes of one worker, each with a folder of its own, over loopback
    local bin=$1 node pids=()
    for node in 0 1; do
        OMP_NUM_THREADS=1 LSGD_ITERATIONS=400 timeout 600 "$bin/lsgd" launch --nodes 2 --node "$node" --workers 1 \
            --address 127.0.0.1 --run-dir "node$node" -- "$bin/python" quickstart/digits.py &
        pids+=($!)
    done
    wait "${pids[0]}" && wait "${pids[1]}" || fail "two nodes did not train to their end, for the reason above"
}

"$python" -c 'import build' 2>/dev/null || pip_install build
if [[ ${1:-} == build ]]; then
    build "${2:?name a folder}"
    exit
fi
[[ -z $(git status --porcelain) ]] || fail "the checkout has changes that no commit has: commit them, or stash them"
version=$("$python" -c 'import tomllib; print(tomllib.load(open("pyproject.toml", "rb"))["project"]["version"])')
grep -q "^## $version, 20[0-9-]*$" CHANGELOG.md ||
    fail "CHANGELOG.md has no line '## $version, $(date +%F)': give the release its date"
rm -rf dist
build dist
build "$work/again"
for file in dist/*; do
    cmp "$file" "$work/again/${file##*/}" || fail "two builds of one commit differ"
done
for file in dist/*; do
    try "$root/$file"
done
say "dist/ is ready. To publish it:
    git tag --annotate v$version --message 'lsgd $version' && git push origin v$version
    $python -m pip install twine && $python -m twine upload dist/*"

#!/usr/bin/env bash
# Runs tests several times in a row with busy loops beside them: one that depends on the time it gets fails here.
#   bash scripts/under_load.sh                         all tests, five times beside four loops
#   bash scripts/under_load.sh RUNS LOOPS [ARGUMENTS]  arguments go to test.sh:  ... 20 4 tests/server -k run
set -euo pipefail
runs=${1:-5} loops=${2:-4} arguments=("${@:3}")
((${#arguments[@]})) || arguments=(--all)
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
for ((loop = 0; loop < loops; loop++)); do
    while kill -0 $$; do for ((i = 0; i < 100000; i++)); do :; done; done 2>/dev/null & # ends with this script
done
failed=()
for ((run = 1; run <= runs; run++)); do
    echo "run $run of $runs, beside $loops busy loops"
    bash "$(dirname -- "${BASH_SOURCE[0]}")/test.sh" "${arguments[@]}" || failed+=("$run") # the others may find another one
done
if ((${#failed[@]})); then
    echo "under_load.sh: ${#failed[@]} of $runs runs failed: ${failed[*]}" >&2
    exit 1
fi
echo "under_load.sh: all $runs runs passed"

#!/usr/bin/env bash
# Checks lsgd. The first call makes .venv.
#   bash scripts/test.sh            style, types, all that runs on virtual time, and one real run of each kind
#   bash scripts/test.sh --all      that and the rest, in an environment with all packages that a test needs
#   bash scripts/test.sh --rest     only the rest
#   bash scripts/test.sh ARGUMENTS  only pytest, with these:  bash scripts/test.sh tests/node -k launch
# A run ends with what it skipped, and why (scripts/packages.txt has the packages of Debian that tests need), and with
# the sum of its tests.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"
extras=(examples test)
(($# == 0)) || extras+=(dashboard dev docs lightning metrics ray store tensorboard transformers wandb)
use_environment "${extras[@]}"
cd -- "$root"
export PYTHONDONTWRITEBYTECODE=  # the many processes that tests start read what the first one has compiled

case ${1:-} in
    "") lanes=(first) ;;
    --all) lanes=(first rest) ;;
    --rest) lanes=(rest) ;;
    *) exec "$python" -m pytest "$@" ;;
esac
cores=$(nproc)
# Tests of a file share what they have imported, and the servers that they fork from.
by_file=(--dist=loadfile --no-loadscope-reorder)
log=$(mktemp) failed=()
trap 'rm -f "$log"' EXIT
trap 'exit 130' INT

# What decides for everybody is tested to the last branch, by tests that are cheap to trace. Those that are not, and
# reach no other branch, are marked no_cover.
decides=(lsgd/server/{admission,answers,coordinator,data,endings,evictions,greetings,ledger,life,links,next_step,phases,reasons,roster,rounds,scheduler,standbys,state,stream,succession,tenure,waits}.py
    lsgd/protocol/{messages,events,fields}.py lsgd/plan/plan.py lsgd/election.py lsgd/node/allegiance.py)
traced=(tests/server/test_{announced,calls,coordinator,data,holders,lacking,last_rounds,life,links,lookahead,member_states,memento,next_step,own_loops,pace,patience,rendezvous,report,resume,silence,standbys,stream,succession,ways}.py
    tests/lsgd/test_{messages,plan,settings}.py tests/node/test_allegiance.py)
ls "${decides[@]}" >/dev/null # a name that is not there any more would not be missed below

check() { # NAME COMMAND...: notes the name if the command fails, and goes on
    "${@:2}" || failed+=("$1")
}

run_tests() {
    "$python" -m pytest "$@" --color="$([[ -t 1 ]] && echo yes || echo no)" | tee -a "$log"
}

first() {
    "$python" -m mypy &
    local types=$!
    check "ruff check" "$python" -m ruff check
    check "ruff format" "$python" -m ruff format --check
    check "traced tests" run_tests "${traced[@]}" --cov --cov-report=
    check "coverage" "$python" -m coverage report --fail-under=100 --show-missing --include="$(IFS=, && echo "${decides[*]}")"
    check "tests" run_tests "${by_file[@]}" "--numprocesses=$cores" "${traced[@]/#/--ignore=}" -m "first or not (slow or alone)" --durations=20
    check "mypy" wait "$types"
}

rest() {
    # Each process collects only the files that may have tests for it: all of them take it 8 s. A test is slow by its
    # mark, by the fixture cluster (tests/integration/conftest.py), or by its file (tests/needs.py).
    local slow alone
    mapfile -t slow < <({
        grep -rlE --include='test_*.py' 'mark\.slow|\bcluster\b' tests
        sed -n 's|^    "\(.*\.py\)": .*|tests/\1|p' tests/needs.py
    } | sort -u)
    # Slow tests wait for half of their time.
    check "slow tests" run_tests "${slow[@]}" "${by_file[@]}" "--numprocesses=$((2 * cores))" -m "slow and not (first or alone)" --durations=20
    mapfile -t alone < <(grep -rl --include='*.py' 'pytest\.mark\.alone' tests)
    check "tests alone" run_tests "${alone[@]}" "--numprocesses=$cores" --dist=load -m "alone and not first" --durations=10
}

plain() {
    sed 's/\x1b\[[0-9;]*m//g' "$log"
}

for lane in "${lanes[@]}"; do
    "$lane"
done
echo "test.sh: skipped tests, and what they need:"
plain | sed -n 's/^SKIPPED/   /p' | sort | uniq
((!${#failed[@]})) || printf 'test.sh: %s failed\n' "${failed[@]}"
plain | awk '
    /^=+ .* in [0-9.]+s( \(.*\))? =+$/ {
        for (i = 2; i < NF; i++) if ($i ~ /^[0-9]+$/) { kind = $(i + 1); sub(/,$/, "", kind); count[kind] += $i }
    }
    END {
        printf "%d passed, %d failed, %d skipped\n", count["passed"], count["failed"] + count["error"] + count["errors"], count["skipped"]
    }'
((!${#failed[@]}))

#!/usr/bin/env bash
# Checks everything: style, types, tests, and their coverage. The first call makes .venv.
#   bash scripts/test.sh            all of it, as continuous integration does
#   bash scripts/test.sh --fast     what to run before a commit: no test that is slow or needs root
#   bash scripts/test.sh ARGUMENTS  only pytest, with these:  bash scripts/test.sh tests/node -k launch
# The whole run ends with what it skipped, and why: scripts/packages.txt has the packages of Debian that tests need.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"
use_environment dashboard dev docs examples lightning metrics ray store tensorboard transformers wandb
cd -- "$root"
export PYTHONDONTWRITEBYTECODE=  # the many processes that tests start read what the first one has compiled

if (($#)) && [[ $1 != --fast ]]; then
    exec "$python" -m pytest "$@"
fi
cores=$(nproc)
# Tests wait for half of their time. Those of a file share what they have imported, and the servers that they fork from.
several=("--numprocesses=$((2 * cores))" --dist=loadfile --no-loadscope-reorder)

"$python" -m ruff check
"$python" -m ruff format --check
"$python" -m mypy &
types=$!

if (($#)); then
    wait "$types"
    exec "$python" -m pytest "${several[@]}" -m "not slow and not alone and not root"
fi

log=$(mktemp)
trap 'say_what_was_skipped; rm -f "$log"' EXIT

run_tests() {
    "$python" -m pytest "$@" --color="$([[ -t 1 ]] && echo yes || echo no)" | tee -a "$log"
}

say_what_was_skipped() {
    echo "test.sh: skipped tests, and what they need:"
    sed -n 's/\x1b\[[0-9;]*m//g; s/^SKIPPED/   /p' "$log" | sort | uniq
}

# What decides for everybody is tested to the last branch, by tests that are cheap to trace.
decides=(lsgd/server/{admission,answers,books,coordinator,course,endings,greetings,links,next_step,reasons,roster,scheduler,standbys,state,stream,succession,waits}.py
    lsgd/protocol/{messages,events,fields}.py lsgd/plan/plan.py lsgd/election.py lsgd/node/allegiance.py)
traced=(tests/server/test_{announced,coordinator,holders,lacking,last_rounds,links,lookahead,meeting,member_states,memento,next_step,own_loops,pace,patience,rendezvous,report,resume,standbys,stream,succession,ways}.py
    tests/lsgd/test_{messages,plan,settings}.py tests/node/test_allegiance.py)
ls "${decides[@]}" >/dev/null # a name that is not there any more would not be missed below
run_tests "${traced[@]}" --cov --cov-report=
wait "$types"
"$python" -m coverage report --fail-under=100 --show-missing --include="$(IFS=, && echo "${decides[*]}")"
run_tests "${several[@]}" "${traced[@]/#/--ignore=}" -m "not alone" --durations=20
mapfile -t alone < <(grep -rl --include='*.py' 'pytest\.mark\.alone' tests) # collecting all tests takes each process 8 s
run_tests "${alone[@]}" "--numprocesses=$cores" --dist=load -m alone --durations=10

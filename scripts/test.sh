#!/usr/bin/env bash
# Checks everything: style, types, tests, and their coverage. The first call makes .venv.
# Arguments go to pytest, and only pytest runs then:   bash scripts/test.sh tests/client -k launch
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"
use_environment dev examples
cd -- "$root"

if (($#)); then
    exec "$python" -m pytest "$@"
fi
"$python" -m ruff check
"$python" -m ruff format --check
"$python" -m mypy
# What decides for everybody is tested to the last branch; the rest runs without being traced, which takes time.
# Two processes share the files, but for tests of network namespaces, which count bytes and see what is left behind.
two=(--numprocesses=2 --dist=loadfile)
decides=(tests/server tests/lsgd/test_messages.py tests/lsgd/test_plan.py tests/lsgd/test_settings.py)
"$python" -m pytest "${two[@]}" "${decides[@]}" --cov --cov-report=
for module in server/{admission,coordinator,grants,history,links,phases,reasons,roster,rounds,scheduler,state,tokens} protocol/messages plan/plan; do
    "$python" -m coverage report --fail-under=100 --show-missing --include="*/$module.py"
done
"$python" -m pytest "${two[@]}" "${decides[@]/#/--ignore=}" -m "not root" --durations=20
"$python" -m pytest -m root --durations=10

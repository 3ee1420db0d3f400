#!/usr/bin/env bash
# Trains the example on two nodes of two workers each: two network namespaces of this machine. Needs root.
#
#   sudo bash scripts/two_nodes.sh                                 an unlimited network
#   sudo bash scripts/two_nodes.sh --rate-mbit 100 --delay-ms 5    a slow one
#
# Results are in runs/two_nodes/node0. PLAN, RUN_NAME and the other settings of train.sh work, too.

set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"
((EUID == 0)) || fail "makes network namespaces and needs root: sudo bash $0"

use_environment examples # here, because nothing can be installed inside the namespaces
export PYTHON=$python IP_ADDR=10.77.0.1 NUM_GROUPS=2 NUM_WORKERS=${NUM_WORKERS:-2} RUN_NAME=${RUN_NAME:-two_nodes}
cd -- "$root"
exec "$python" -m benchmarks.testbed 2 "$@" -- bash -c 'RUN_NAME+=/node$TESTBED_HOST exec bash scripts/train.sh "$TESTBED_HOST"'

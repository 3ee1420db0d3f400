#!/usr/bin/env bash
# Trains on this machine as node <node_idx> of a run: starts the servers and the workers, shows what they say, and ends
# all of them when it ends.
#
#   bash scripts/train.sh 0                              the example, on this machine alone
#   bash scripts/train.sh <node_idx> -- python my.py     a training script of your own (README.md says how to write it)
#   srun --ntasks-per-node=1 bash scripts/train.sh       under Slurm, which knows index, address and number of nodes
#
# Settings: change them here, or set variables of these names. All nodes need the same IP_ADDR, PORT and NUM_GROUPS.

IP_ADDR=${IP_ADDR:-}          # address of node 0 that all nodes can reach; empty: 127.0.0.1, or what Slurm says
PORT=${PORT:-}                # TCP port of node 0; empty: 27400, or any free port with one node
NUM_GROUPS=${NUM_GROUPS:-}    # number of nodes; empty: 1, or what Slurm says
NUM_WORKERS=${NUM_WORKERS:-}  # workers on this node; empty: one for each GPU, or 2 without GPUs
DEVICE=${DEVICE:-auto}        # auto, cpu, cuda, or one GPU: cuda:0
PLAN=${PLAN:-}                # the plan, a TOML file (node 0's counts); empty: the example's, or the defaults
ALGORITHM=${ALGORITHM:-}      # leader, bytegrad, qsgd, ... (lsgd algorithms lists them); empty: the plan's
INSECURE=${INSECURE:-}        # 1: without keys, on a network where everybody is trusted
RUN_NAME=${RUN_NAME:-}        # logs and results go to runs/<RUN_NAME> in the folder that you are in (the example's in the
                              # checkout); empty: the time of the start
RESUME=${RESUME:-}            # 1: resume from the checkpoints of RUN_NAME, or of the newest run, with its plan
STORE=${STORE:-}              # URL to upload checkpoints and results to, such as s3://bucket/run (RUN_NAME is then its
                              # last part, unless you give one); with RESUME=1 also to resume from

# With more than one node, node 0 makes keys and prints the line that starts each other node with its token.

set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

for name in $(compgen -e); do # of the environment
    case $name in
        IP_ADDR | NUM_GROUPS | NUM_WORKERS | RUN_NAME) ;;
        IP_A* | NUM_[GNW]* | RUN_N*) fail "the variable $name is unknown; the settings are IP_ADDR, NUM_GROUPS (of nodes)," \
            "NUM_WORKERS, RUN_NAME and more at the top of $0; unset $name" ;;
    esac
done

node=()
if (($#)) && [[ $1 != -- ]]; then
    [[ $1 =~ ^[0-9]+$ ]] || fail "the index of a node is a whole number from 0, not '$1'; usage: train.sh <node_idx> [-- command ...]"
    node=(--node "$1")
    shift
fi
if (($#)); then
    [[ $1 == -- && $# -gt 1 ]] || fail "usage: train.sh <node_idx> [-- command ...]"
    shift
fi

if ((!${#node[@]})) && [[ -z ${SLURM_STEP_ID:-} ]]; then
    fail "cannot tell which node this is; pass its index, from 0: train.sh 0 (srun sets it)"
fi

for name in INSECURE RESUME; do
    case ${!name} in
        "" | 0 | no | false) printf -v "$name" %s "" ;;
        1 | yes | true) printf -v "$name" 1 ;;
        *) fail "$name is 1 or empty, not '${!name}'" ;;
    esac
done

use_environment examples ${STORE:+store}
store_name=${STORE%/}
RUN_NAME=${RUN_NAME:-${store_name##*/}}
printf -v join "IP_ADDR=%q NUM_GROUPS=%q" "$IP_ADDR" "$NUM_GROUPS"
join+="${RESUME:+ RESUME=1}${STORE:+ STORE=$(printf %q "$STORE")}${PORT:+ PORT=$PORT} bash $(printf %q "$0") NODE"
((!$#)) || join+=" --$(printf ' %q' "$@")"
runs=$PWD/runs
if ((!$#)); then
    runs=$root/runs
    set -- "$python" "$root/examples/digits.py"
    [[ -n $RESUME ]] || PLAN=${PLAN:-$root/examples/digits.toml}
fi
run_dir=$runs/${RUN_NAME:-$(date +%Y%m%d-%H%M%S)}
[[ -z $RESUME ]] || run_dir=$runs${RUN_NAME:+/$RUN_NAME}
[[ -z $ALGORITHM ]] || export LSGD_ALGORITHM=$ALGORITHM
exec "$python" -P -m lsgd.client launch "${node[@]}" \
    ${IP_ADDR:+--address "$IP_ADDR"} ${PORT:+--port "$PORT"} \
    ${NUM_GROUPS:+--nodes "$NUM_GROUPS"} ${NUM_WORKERS:+--workers "$NUM_WORKERS"} \
    --device "$DEVICE" ${PLAN:+--plan "$PLAN"} ${INSECURE:+--insecure} --join-line "$join" \
    --run-dir "$run_dir" ${STORE:+--store "$STORE"} ${RESUME:+--resume} -- "$@"

#!/usr/bin/env bash
# One node of a Ray cluster where no operator makes one: an Indexed Job, Slurm, or machines by hand.
#
#   ray-node.sh COMMAND...    the same on every node; node 0 is the head and runs COMMAND once all nodes are there
#
# RAY_NODE_RANK (or JOB_COMPLETION_INDEX), RAY_NODES, RAY_HEAD_HOST and RAY_PORT (6379) say who is who. A worker tries to join
# JOIN_ATTEMPTS times (60), JOIN_PAUSE seconds (10) apart, and ends with the head. The head waits as long for its workers.
# RAY_AUTH_TOKEN is a secret that all nodes share: without it Ray answers nobody, and these nodes do not start.
# Exit code: that of COMMAND; a worker's is 0 when the head ended after it had joined; 3 when a node did not join in time.
set -euo pipefail

rank="${RAY_NODE_RANK:-${JOB_COMPLETION_INDEX:-}}"
nodes="${RAY_NODES:-1}"
host="${RAY_HEAD_HOST:-127.0.0.1}"
port="${RAY_PORT:-6379}"
attempts="${JOIN_ATTEMPTS:-60}"
pause="${JOIN_PAUSE:-10}"
export RAY_USAGE_STATS_ENABLED=0 RAY_memory_monitor_refresh_ms=0 RAY_AUTH_MODE=token

say() { echo "ray-node ${rank}: $*" >&2; }
fail() { say "$*"; exit 3; }

[ -n "$rank" ] || fail "set RAY_NODE_RANK or JOB_COMPLETION_INDEX to this node's number; the head has 0"
[ -n "${RAY_AUTH_TOKEN:-}${RAY_AUTH_TOKEN_PATH:-}" ] || fail "set RAY_AUTH_TOKEN to one secret on all nodes (openssl rand -hex 32)"

count_nodes() {
    python -c 'import ray; ray.init(address="auto", logging_level="ERROR"); print(sum(n["Alive"] for n in ray.nodes()))' 2>/dev/null || echo 0
}

run_head() {
    [ "$#" -gt 0 ] || fail "no command: ray-node.sh COMMAND..."
    ray start --head --port="$port" --dashboard-host=0.0.0.0
    trap 'ray stop >/dev/null 2>&1 || true' EXIT
    local try found=0
    for ((try = 1; try <= attempts; try++)); do
        found=$(count_nodes)
        [ "$found" -ge "$nodes" ] && break
        say "$found of $nodes nodes are there (look $try of $attempts)"
        [ "$try" -eq "$attempts" ] || sleep "$pause"
    done
    [ "$found" -ge "$nodes" ] ||
        fail "waited $((attempts * pause)) s for $nodes nodes and $found came: look at the logs of the workers, or lower RAY_NODES"
    say "all $nodes nodes are there; starting: $*"
    RAY_ADDRESS="127.0.0.1:$port" "$@"
}

run_worker() {
    local try joined=no
    for ((try = 1; try <= attempts; try++)); do
        if ray health-check --address "$host:$port" >/dev/null 2>&1; then
            joined=yes
            say "the head at $host:$port answers; joining"
            ray start --address="$host:$port" --block || say "this node left the cluster"
        elif [ "$joined" = yes ]; then
            say "the head at $host:$port has ended, and so does this worker"
            return 0
        else
            say "no Ray head answers at $host:$port yet (attempt $try of $attempts)"
        fi
        [ "$try" -eq "$attempts" ] || sleep "$pause"
    done
    [ "$joined" = yes ] && fail "left the cluster at $host:$port again and again, $attempts times: look at this node's Ray logs"
    fail "waited $((attempts * pause)) s for the Ray head at $host:$port, in $attempts attempts, and it never answered: is node 0 running?"
}

if [ "$rank" = 0 ]; then run_head "$@"; else run_worker; fi

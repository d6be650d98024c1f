#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# usage: nodes.sh MUSTER NODE-RANK-PROGRAM [HOSTS.SH]
# Runs `muster run` on two nodes: both on this host, and on separate hosts if HOSTS.SH is given.
set -euo pipefail
muster=$1 program=$2 hosts=${3:-}
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT MUSTER_JOB MUSTER_MASTER_PORT
place=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$place"' EXIT

fail() {
  printf 'nodes.sh: %s\n' "$*" >&2
  head -50 "$place"/*.out "$place"/*.err >&2 || true
  exit 1
}

# node K RANKS [OPTION...] -- COMMAND...: runs in the background, with its output in files.
node() {
  local number=$1 ranks=$2
  shift 2
  "$muster" run -n "$ranks" --nodes 2 --node-rank "$number" "$@" >"$place/$number.out" 2>"$place/$number.err" &
  pids[number]=$!
}
# ends STATUS-0 STATUS-1: checks the exit statuses of both launchers.
ends() {
  local number status
  for number in 0 1; do
    status=0
    wait "${pids[number]}" || status=$?
    [ "$status" = "$1" ] || fail "node $number ended with $status, not $1"
    shift
  done
}
has() { grep -q -- "$2" "$place/$1" || fail "$1 lacks: $2"; }
pids=()
meet() { meeting=file://$place/meeting-$1; }

meet whole
node 0 2 --rendezvous "$meeting" -- "$program"
node 1 3 --rendezvous "$meeting" -- "$program"
ends 0 0
has 0.out '^5 ranks on 1 hosts: gathered 10, reduced 10, local 0 of 2$'

# Both nodes have one job, which has a new number.
meet job
for number in 0 1; do
  # shellcheck disable=SC2016 # the rank expands it
  node $number 1 --rendezvous "$meeting" -- sh -c 'echo "$MUSTER_JOB $MASTER_ADDR $MASTER_PORT $MUSTER_MASTER_PORT"'
done
ends 0 0
has 0.out '^[0-9a-f]\{32\} [0-9a-f.:]* [1-9][0-9]* [1-9][0-9]*$'
cmp "$place/0.out" "$place/1.out" || fail "the nodes have two jobs"

# A rank of node 1 fails: both launchers report the rank, and exit with its status.
meet failing
MUSTER_TEST_END=3 node 0 2 --rendezvous "$meeting" --grace 0.2 -- "$program"
MUSTER_TEST_END=3 node 1 2 --rendezvous "$meeting" --grace 0.2 -- "$program"
ends 41 41
has 0.err 'node 1: rank 3 (pid [0-9]*) on host .* ended with status 41'
has 1.err 'muster run: rank 3 (pid [0-9]*) on host .* ended with status 41'
has 1.err '^rank 3 ends$'

# The command is missing on one node; a log directory cannot be created.
meet missing
node 0 1 --rendezvous "$meeting" --grace 0.2 -- "$program"
node 1 1 --rendezvous "$meeting" --grace 0.2 -- "$place/nothing"
ends 127 127
has 0.err 'node 1: host .*: starting the ranks: exec: does not exist'
meet unwritable
node 0 1 --rendezvous "$meeting" --grace 0.2 -- "$program"
node 1 1 --rendezvous "$meeting" --logs /proc/none -- "$program"
ends 125 2
has 0.err '"/proc/none": creating the log directory'

# A launcher is killed while its ranks wait.
meet killed
MUSTER_TEST_END=9 node 0 2 --rendezvous "$meeting" --grace 0.2 -- "$program"
MUSTER_TEST_END=9 node 1 2 --rendezvous "$meeting" --grace 0.2 -- "$program"
until [ "$(cat "$place"/[01].out | wc -l)" = 4 ]; do read -rt 0.02 <> <(:) || true; done
kill -KILL "${pids[1]}"
ends 125 137
has 0.err 'the launcher of node 1 is lost'
for pid in $(cat "$place"/[01].out); do
  for turn in {1..500}; do
    kill -0 "$pid" 2>/dev/null || break
    read -rt 0.02 <> <(:) || true
  done
  [ "$turn" -lt 500 ] || fail "rank $pid lives on"
done

# A node that never arrives is named; invalid options.
status=0
"$muster" run -n 1 --nodes 2 --node-rank 0 --rendezvous tcp://127.0.0.1:0 -- true 2>"$place/0.err" || status=$?
[ "$status" = 2 ] || fail "a port of 0: $status"
meet late
status=0
"$muster" run -n 1 --nodes 2 --node-rank 0 --rendezvous "$meeting" --rendezvous-timeout 0.3 -- true 2>"$place/0.err" || status=$?
[ "$status" = 2 ] || fail "a node that never comes: $status"
has 0.err 'rendezvous of the launchers of 2 nodes (each launcher is a rank here).*for rank 1'
for options in "--nodes 2" "--nodes 2 --node-rank 0" "--nodes 2 --node-rank 2 --rendezvous tcp://h:1" "--tee" \
  "--nodes 2 --node-rank 0 --rendezvous h:1"; do
  status=0
  # shellcheck disable=SC2086 # words
  "$muster" run -n 1 $options -- true 2>"$place/0.err" || status=$?
  [ "$status" = 2 ] || fail "$options: $status"
  [ "$(wc -l <"$place/0.err")" = 1 ] || fail "$options: more than a line"
done
ls "$place" | grep -q meeting && fail "a file of a meeting is left"

[ -n "$hosts" ] || exit 0
# On separate hosts, which share only the network.
cat >"$place/both" <<'END'
set -euo pipefail
hosts=$1 muster=$2 program=$3
first=$("$hosts" on h1 hostname -I | cut -d' ' -f1)
"$hosts" on h2 "$muster" run -n 2 --nodes 2 --node-rank 1 --rendezvous "tcp://$first:29400" -- "$program" &
"$hosts" on h1 "$muster" run -n 2 --nodes 2 --node-rank 0 --rendezvous "tcp://$first:29400" -- "$program"
wait $!
END
status=0
"$hosts" with 2 bash "$place/both" "$hosts" "$muster" "$program" >"$place/hosts.out" 2>"$place/hosts.err" || status=$?
[ "$status" = 77 ] && exit 0
[ "$status" = 0 ] || fail "on two hosts: $status"
has hosts.out '^4 ranks on 2 hosts: gathered 6, reduced 6, local 0 of 2$'

#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# usage: conformance.sh HOSTS PROGRAM
# Runs the conformance tests of every gather, merge and stream with MPI's own launcher. It starts seven processes, on
# one host or over several (hosts.sh). Ranks alternate between hosts, so that groups of two ranks are on two hosts.
set -euo pipefail
here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
count=$1
if [ "$count" -gt 1 ] && [ -z "${MUSTER_HOSTS:-}" ]; then
  exec "$here/hosts.sh" with "$count" "$BASH" "${BASH_SOURCE[0]}" "$@"
fi
shift
source "$here/checks.sh"
said=$(mktemp)
trap 'rm -f "$said"' EXIT
export MUSTER_TEST_GROUP=started

start() { # PROGRAM ARGUMENT...
  if [ "$count" -gt 1 ]; then
    timeout 120 "$here/hosts.sh" run -n 7 -ppn 1 "$@"
  else
    timeout 120 "$here/launch.sh" -n 7 "$@"
  fi
}

for turn in 1 2 3; do
  status=0
  start "$1" --no-colors=true >"$said" 2>&1 || status=$?
  [ "$status" != 77 ] || { cat "$said" && exit 77; }
  # MPICH may wait forever in MPI_Finalize (docs/explanation/mpi-and-tcp.md).
  grep -q "MPI_Finalize did not return" "$said" || break
  echo "MPI_Finalize did not return: run $turn"
done
# The processes write into each other's lines.
ended=$(grep -o 'SUCCESS!' "$said" | wc -l || true)
check "status $status, $ended of seven processes are well" test "$status" = 0 -a "$ended" = 7
check "no case is skipped" test "$(grep -c skipped: "$said")" = 0
[ "$failures" = 0 ] || cat "$said"
# A rank that fails ends the job with its error, because the others would wait for it.
status=0
MUSTER_ROUTE=nonsense start "$1" -tc="the report tells*" >"$said" 2>&1 || status=$?
check "a case that fails fails the job (status $status)" test "$status" != 0 -a "$status" != 124
# Several processes write into one line.
check "and says why" grep -q "nonsense" "$said"
[ "$failures" = 0 ] || cat "$said"
[ "$failures" = 0 ] && echo "all is well on $count host(s)"
exit "$((failures > 0))"

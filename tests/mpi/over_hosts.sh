#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Ranks on two and three hosts (hosts.sh) started by mpiexec. A gather uses the link, ranks exit in order, and a limited
# link reaches its rate. When a host is cut off, all ranks end in time and name it.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
hosts=$here/hosts.sh
if [ -z "${MUSTER_HOSTS:-}" ]; then
  "$hosts" with 2 "$BASH" "${BASH_SOURCE[0]}" two
  exec "$hosts" with 3 "$BASH" "${BASH_SOURCE[0]}" three
fi

out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
source "$(dirname "${BASH_SOURCE[0]}")/checks.sh"
sent() { "$hosts" bytes "$1" | cut -d' ' -f1; }
well() { [ "$(cat "$out"/* | grep -c well)" = "$1" ]; }
work() { # RANKS RANKS_PER_HOST SECONDS
  rm -f "$out"/*
  local status turn
  # MPICH may wait forever in MPI_Finalize (docs/explanation/mpi-and-tcp.md). Muster ends that at a deadline with a
  # message, and the test runs again.
  for turn in 1 2 3; do
    status=0
    before=$(sent h2)
    timeout 60 "$hosts" run -n "$1" -ppn "$2" "$MUSTER_MPI_RANK" "$out" work "$3" >"$out.said" 2>&1 || status=$?
    grep -q "MPI_Finalize did not return" "$out.said" || break
    echo "MPI_Finalize did not return: run $turn"
  done
  check "$1 ranks, $2 a host: status $status" test "$status" = 0
  # A warning of Open MPI's launcher about the namespaces.
  sed -i '/plm:rsh: Warning: setpgid/d' "$out.said"
  check "nothing is said at the end" test ! -s "$out.said"
  [ ! -s "$out.said" ] || cat "$out.said"
  rm -f "$out.said"
  check "$1 ranks, $2 a host" well "$1"
}

case $1 in
  two)
    work 4 2 0
    # Two ranks with 2 MiB each on the other host.
    check "what the other host sends goes over its link" test $(($(sent h2) - before)) -gt $((2 * (2 << 20)))
    check "and not twice" test $(($(sent h2) - before)) -lt $((3 * (2 << 20)))
    # Ranks alternate between the hosts.
    work 5 1 0
    "$hosts" limit 100mbit
    started=$(date +%s%N)
    work 4 2 0
    check "4 MiB at 100 Mbit/s take a third of a second" test $(($(date +%s%N) - started)) -gt 300000000
    "$hosts" limit none

    # The host is cut off during the job. mpiexec can no longer reach its own processes there, so the test kills it.
    rm -f "$out"/*
    MUSTER_TIMEOUT=2 setsid "$hosts" run -disable-auto-cleanup -n 4 -ppn 2 "$MUSTER_MPI_RANK" "$out" work 60 >"$out.said" 2>&1 &
    job=$!
    sleep 2
    "$hosts" cut h2
    cut_at=$(date +%s.%N)
    for ((turn = 0; turn < 100; turn++)); do
      [ "$(find "$out" -name '[0-3]' | wc -l)" -lt 4 ] || break
      sleep 0.1
    done
    kill -KILL -- "-$job" 2>/dev/null || true
    for rank in 0 1 2 3; do
      other=$((rank < 2 ? 2 : 1))
      check "rank $rank names the other host" grep -q "host h$other" "$out/$rank"
      check "rank $rank ends within the deadline and two seconds" \
        awk -v cut="$cut_at" '{exit !($1 - cut < 4.0)}' "$out/$rank"
    done
    cat "$out"/[0-3]
    rm -f "$out.said"
    "$hosts" mend h2
    ;;
  three)
    work 6 2 0
    work 5 1 0
    ;;
esac
for ((host = 1; host <= $(cat "$MUSTER_HOSTS/count"); host++)); do
  left=$("$hosts" on "h$host" ls /dev/shm | grep -c muster || true)
  check "nothing of Muster stays in /dev/shm of h$host" test "$left" = 0
done
[ "$failures" = 0 ] && echo "$1 hosts: all is well"
exit "$((failures > 0))"

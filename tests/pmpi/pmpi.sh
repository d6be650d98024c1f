#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# usage: pmpi.sh RANKS | pmpi.sh hosts
# Runs an MPI program with libmuster-pmpi, with RANKS ranks on one host, or with ranks on two hosts. Checks its results,
# and which of its calls use Muster and which MPI.
set -euo pipefail
here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
launch=$here/../mpi/launch.sh
hosts=$here/../mpi/hosts.sh
"$launch" --check || exit
source "$here/../mpi/checks.sh"
ranks=$1
if [ "$ranks" = hosts ] && [ -z "${MUSTER_HOSTS:-}" ]; then
  exec "$hosts" with 2 "$BASH" "${BASH_SOURCE[0]}" "$@"
fi
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cd "$place"
preloaded=(env LD_PRELOAD="$MUSTER_PMPI_LIBRARY" ASAN_OPTIONS="${ASAN_OPTIONS:-}:verify_asan_link_order=0")

if [ "$ranks" = hosts ]; then
  # MPI_Finalize may still hang.
  timeout 20 "$hosts" run -n 4 -ppn 2 "${preloaded[@]}" MUSTER_PMPI_REPORT="$place/report" "$MUSTER_PMPI_PROGRAM" \
    --hosts >said 2>&1 || true
  check "ranks of two hosts are right" test "$(grep -o "all results are right" said | wc -l)" = 4
  check "they go through MPI, those of one host through Muster" \
    grep -qx "MPI_Allreduce: 1 through Muster, 1 through MPI" report
else
  check "the program is right" timeout 60 "$launch" -n "$ranks" "${preloaded[@]}" \
    MUSTER_PMPI_REPORT="$place/report" "$MUSTER_PMPI_PROGRAM" expected
  check "every call goes its way" diff expected report
  if [ "$ranks" = 1 ]; then
    timeout 60 "$launch" -n 1 "${preloaded[@]}" MUSTER_PMPI_REPORT=- "$MUSTER_PMPI_PROGRAM" expected >said 2>&1 || true
    check "the report is told on stderr" test "$(grep -c 'through Muster' said)" = 14
  else
    # mpiexec may end ranks before all have reported.
    timeout 60 "$launch" -disable-auto-cleanup -n "$ranks" sh -c 'trap "" USR1; exec "$@"' sh "${preloaded[@]}" \
      "$MUSTER_PMPI_PROGRAM" --die >said 2>&1 || true
    check "a death is an error of MPI, in words" grep -q "muster-pmpi: MPI_Allreduce: .*rank $((ranks - 1)) .*died" said
    check "a death is an error that MPI's handler returns" grep -q "has an error" said
  fi
fi
[ "$failures" = 0 ] || cat said 2>/dev/null
exit "$((failures > 0))"

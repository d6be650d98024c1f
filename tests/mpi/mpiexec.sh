#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Every command of muster under mpiexec on one host: the world of each process, exit statuses, and the remains of
# failures.
set -euo pipefail
here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
"$here/launch.sh" --check || exit
source "$here/checks.sh"
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cd "$place"
touch started
muster=$MUSTER_PROGRAM
# ranks N STATUS COMMAND...: runs under mpiexec; the messages are in ./said.
ranks() {
  local count=$1 expected=$2 status=0
  shift 2
  timeout 60 "$here/launch.sh" -n "$count" "$@" >said 2>&1 || status=$?
  [ "$status" = "$expected" ] || {
    echo "FAILED: status $status, not $expected: -n $count $*"
    cat said
    failures=$((failures + 1))
  }
}
own_rank='${PMI_RANK:-$OMPI_COMM_WORLD_RANK}' # for a shell that is a rank
said() { [ "$(grep -c -- "$1" said)" = "$2" ]; }

"$MUSTER_DEMO_MODEL" model >/dev/null
"$muster" shard model --to 4 --plan auto --out shards >/dev/null
"$muster" shard model --to 2 --plan auto --workspace --out workspace >/dev/null
"$muster" export shards --plan auto --out alone --processes 1 >/dev/null

# Collective: all ranks together, once.
ranks 3 0 "$muster" export shards --plan auto --out together
check "the export of three ranks is said once" said tensors 1
check "three ranks export what one does" diff -r alone together
ranks 2 2 "$muster" export shards --plan auto --out together
check "a refusal is said once" said "^muster " 1
ranks 1 0 "$muster" export shards --plan auto --out single
check "one rank exports what one process does" diff -r alone single

# All other commands run separately in each process, like any program.
shard=shards/rank-00000-of-00004.safetensors
for command in "show $shard" "stats $shard" "ls workspace" "verify alone" "diff $shard $shard" "gc workspace" doctor \
  "completion bash" man "export shards --plan auto --dry-run" "convert $shard out.h5"; do
  # shellcheck disable=SC2086
  ranks 2 0 "$muster" $command
done
ranks 2 2 "$muster" show nothing
check "each says what it cannot do" said "^muster " 2
# Each rank converts a different file.
ranks 2 0 sh -c "$muster convert shards/rank-0000$own_rank-of-00004.safetensors own-$own_rank.h5"
check "each rank converts its own" test -s own-0.h5 -a -s own-1.h5

# Detection of the launcher.
mkdir out
ranks 3 0 "$MUSTER_MPI_RANK" out work
check "mpiexec's ranks are one world" test "$(cat out/* | grep -c well)" = 3
rm out/*
ranks 2 0 "$muster" run -n 3 -- "$MUSTER_MPI_RANK" out work
check "the ranks of muster run are a world within mpiexec's" test "$(ls out | tr '\n' ' ')" = "0 1 2 "
rm out/*
"$muster" run -n 2 -- "$here/launch.sh" -n 3 "$MUSTER_MPI_RANK" out work
check "mpiexec's ranks are a world within muster run's" test "$(ls out | tr '\n' ' ')" = "0 1 2 "
rm out/*
# A script that sets torch's variables from those of MPI.
MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 ranks 2 0 sh -c "RANK=$own_rank"' WORLD_SIZE=2 exec "$0" out work' \
  "$MUSTER_MPI_RANK"
check "variables that agree are one world" test "$(ls out | tr '\n' ' ')" = "0 1 "
rm out/*
ranks 2 2 env RANK=0 WORLD_SIZE=3 "$MUSTER_MPI_RANK" out work
check "variables that contradict are reported" said "two launchers set conflicting variables" 2

# A rank of another version, which looks for its own libmuster-mpi.
ln -s "$MUSTER_MPI_LIBRARY" libmuster-mpi.so.0.0.9
ranks 2 2 "$MUSTER_MPI_RANK" out work : -n 1 env LD_PRELOAD="$MUSTER_OTHER_VERSION" \
  LD_LIBRARY_PATH="$PWD:${LD_LIBRARY_PATH:-}" ASAN_OPTIONS="${ASAN_OPTIONS:-}:verify_asan_link_order=0" \
  "$MUSTER_MPI_RANK" out work
check "all ranks refuse another version, and say which" said "rank 2 .*0.0.9.*Start all ranks with one version" 3

# MPI_Init cannot be cancelled: a rank that waits there for a missing rank ends at the deadline with a message.
rm -f out/*
# never_comes WORDS COMMAND...: ranks 0 and 2 of three wait for rank 1.
never_comes() {
  local words=$1 status=0
  shift
  MUSTER_TIMEOUT=2 timeout 30 "$@" >said 2>&1 || status=$?
  check "the job of $words has failed in time" test "$status" != 0 -a "$status" != 124
  # Without its clean-up mpiexec does not wait for all ranks.
  for ((turn = 0; turn < 30 && $(grep -c "in MPI_Init" said) < 1; turn++)); do sleep 0.1; done
  check "who waits for $words says it" grep -q "rank [02] of 3 (host .*) has waited 2.* s in MPI_Init for the other ranks" said
}
never_comes "a rank that is late" mpiexec -n 3 "$MUSTER_MPI_RANK" out absent 1
never_comes "a rank that has ended" mpiexec -n 3 "$MUSTER_MPI_RANK" out late 1
never_comes "one that mpiexec leaves alone" mpiexec -disable-auto-cleanup -n 3 "$MUSTER_MPI_RANK" out late 1
# mpiexec sends this signal when a rank has died, so that no rank waits until the deadline.
(
  for ((turn = 0; turn < 50; turn++)); do [ -s pid.0 ] && break || sleep 0.1; done
  sleep 1
  kill -USR1 "$(cat pid.0)"
) &
status=0
timeout 30 mpiexec -n 2 sh -c 'echo $$ >pid.$PMI_RANK; exec "$0" out absent 1' "$MUSTER_MPI_RANK" >said 2>&1 || status=$?
check "a death that is told ends the job" test "$status" != 0 -a "$status" != 124
# The thread sanitizer delays signals while a thread waits in a call that it does not know.
[ -n "${TSAN_OPTIONS:-}" ] ||
  check "who is told of it says it" grep -q "rank 0 of 2 .* in MPI_Init .* mpiexec reports that one of them has ended" said
wait

# Without mpiexec's clean-up, the survivors end by themselves. mpiexec still sends them SIGUSR1, which terminates a
# process that does not ignore it, and does not wait for them.
rm -f out/*
(sleep 1 && touch out/die) &
status=0
MUSTER_TIMEOUT=5 timeout 30 "$here/launch.sh" -disable-auto-cleanup -n 4 \
  sh -c 'trap "" USR1; exec "$0" out die 2 2>said.$$' "$MUSTER_MPI_RANK" >said 2>&1 || status=$?
# Open MPI's mpiexec returns 0 if it was told to continue without dead ranks.
check "the job has failed" test "$status" != 0 -o "${MUSTER_MPI:-}" = openmpi
check "it has not hung" test "$status" != 124
wait
# mpiexec exits at once, and its proxy may kill survivors before they report. Each rank that reports must be right. (In
# mpi_kill_test all of them report, under a process manager that allows it.)
for ((turn = 0; turn < 30 && $(find out -name '[0-3]' | wc -l) < 3; turn++)); do sleep 0.1; done
while read -r words; do check "$words names rank 2" grep -q "rank 2" "$words"; done < <(find out -name '[0-3]')
# If MPI_Finalize does not return, a rank exits without it, with its own status. The status of mpiexec depends on
# whether the other rank has exited before mpiexec kills it.
stuck=()
for wanted in 0 3; do
  (
    failures=0
    mkdir -p "stuck-$wanted/out"
    cd "stuck-$wanted"
    status=0
    timeout 60 "$here/launch.sh" -n 2 "$MUSTER_STUCK_END" out "$wanted" >said 2>&1 || status=$?
    check "a rank that cannot end has ended" test "$status" != 124
    check "a rank that cannot end says so" grep -q "MPI_Finalize did not return" said
    for rank in 0 1; do check "what rank $rank has in a buffer is written" test "$(cat out/$rank)" = "all of it"; done
    exit "$((failures > 0))"
  ) &
  stuck+=($!)
done
for job in "${stuck[@]}"; do wait "$job" || failures=$((failures + 1)); done
# Shared memory has no name there. Directories belong to other tests, which may run at the same time.
leftovers=$(find /dev/shm -maxdepth 1 -name 'muster*' ! -type d -newer started | wc -l)
check "no shared memory of Muster stays in /dev/shm" test "$leftovers" = 0
[ "$failures" = 0 ] && echo "all is well under mpiexec"
exit "$((failures > 0))"

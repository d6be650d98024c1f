#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Ranks that Slurm starts: a cluster of two nodes on the hosts of hosts.sh. Skipped if Slurm is not installed (Debian:
# slurmctld, slurmd, slurm-client). Its daemons end with the hosts.
set -euo pipefail
here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
hosts=$here/hosts.sh
PATH=$PATH:/usr/sbin
for tool in slurmctld slurmd srun; do
  command -v "$tool" >/dev/null || {
    echo "skipped: no $tool here"
    exit 77
  }
done
if [ -z "${MUSTER_HOSTS:-}" ]; then exec "$hosts" with 2 "$BASH" "${BASH_SOURCE[0]}"; fi
source "$here/checks.sh"
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cd "$place"

# Two nodes without authentication, with more processors than the machine has. The files of PMIx on each host cannot be
# in /tmp, because the hosts share it.
read -r _ version < <(slurmctld -V)
cgroups=disabled
[ "${version%%.*}" -ge 23 ] || cgroups=cgroup/v1
cat >slurm.conf <<END
ClusterName=tests
SlurmctldHost=switch(10.77.0.254)
SlurmUser=root
AuthType=auth/none
CredType=cred/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerParameters=batch_sched_delay=0,sched_interval=1
SelectType=select/linear
SlurmdParameters=config_overrides
StateSaveLocation=$place/state
SlurmctldPidFile=$place/slurmctld.pid
SlurmdSpoolDir=$place/%n
SlurmdPidFile=$place/%n.pid
MailProg=/bin/true
NodeName=h1,h2 CPUs=8
PartitionName=all Nodes=ALL Default=YES State=UP
END
printf 'CgroupPlugin=%s\nCgroupMountpoint=%s\n' "$cgroups" "$place/cgroup" >cgroup.conf
echo 'PMIxCliTmpDirBase=/dev/shm' >mpi.conf
export SLURM_CONF=$place/slurm.conf
mkdir state h1 h2
unshare --uts bash -c 'hostname switch && exec slurmctld -D' >slurmctld.said 2>&1 &
for host in h1 h2; do "$hosts" on "$host" slurmd -D >"$host.said" 2>&1 & done
for ((turn = 0; turn < 100; turn++)); do
  [ "$(sinfo -h -t idle -o %D 2>/dev/null)" != 2 ] || break
  sleep 0.1
done
[ "$turn" -lt 100 ] || {
  tail -n 3 ./*.said
  echo "skipped: Slurm does not start here"
  exit 77
}

srun() { timeout 60 srun "$@"; }
# job STATUS COMMAND...: its messages are in ./said, those of its ranks in ./out.
job() {
  local expected=$1 status=0
  shift
  rm -rf out
  mkdir out
  "$@" >said 2>&1 || status=$?
  [ "$status" = "$expected" ] || {
    echo "FAILED: status $status, not $expected: $*"
    cat said
    failures=$((failures + 1))
  }
}
# submit OPTION... SCRIPT ARGUMENT...: ends with the status of the batch job. (sbatch --wait polls only every few
# seconds.)
submit() {
  local id state
  id=$(sbatch --parsable -o "$place/script" "$@") || return
  for ((turn = 0; turn < 400; turn++)); do
    state=$(scontrol show job -o "$id")
    case $state in
      *JobState=COMPLETED* | *JobState=FAILED*)
        cat script
        [[ $state =~ ExitCode=([0-9]+):([0-9]+) ]]
        return $((BASH_REMATCH[1] + BASH_REMATCH[2]))
        ;;
    esac
    sleep 0.1
  done
  cat script
  return 124
}
# in_script COMMAND...: runs in the script of an allocation of two nodes.
in_script() { submit -N 2 -n 4 --wrap "$*"; }
said() { [ "$(grep -c -- "$1" said)" = "$2" ]; }
well() { [ "$(cat out/* | grep -c well)" = "$1" ]; }
work=("$MUSTER_MPI_RANK" "$place/out" work)

# The PMI with which srun starts this MPI, and another one.
case ${MUSTER_MPI:-mpich} in
  openmpi) ours=pmix other=none ;;
  *) ours=pmi2 other=pmix ;;
esac
# `srun --mpi=list` also lists a type whose library is missing.
starts_by() { srun "--mpi=$1" -n 1 true >/dev/null 2>&1; }
starts_by "$ours" || {
  echo "skipped: this Slurm cannot start ranks by --mpi=$ours"
  exit 77
}

for nodes in 1 2; do
  job 0 srun "--mpi=$ours" -N "$nodes" -n 4 "${work[@]}"
  check "four ranks of $nodes node(s) are one world" well 4
done
job 0 srun "--mpi=$ours" -N 2 -n 5 -m cyclic "${work[@]}"
check "five ranks in turns are one world" well 5
job 0 srun "--mpi=$ours" -n 1 "${work[@]}"
check "one task is one process" well 1

job 0 srun -N 1 -n 4 "${work[@]}"
check "ranks of one node need no PMI" well 4
job 0 srun -N 2 -n 4 "${work[@]}"
check "ranks of two need none either: they meet by TCP" well 4
mkdir workspace
MUSTER_WORKSPACE=$place/workspace job 0 srun -N 2 -n 4 "${work[@]}"
check "or meet in a workspace" well 4
if [ "$other" != none ] && starts_by "$other"; then
  job 2 srun "--mpi=$other" -N 1 -n 2 "${work[@]}"
  check "a PMI that this MPI does not speak is told" said "the environment has PMIX_RANK=.* but MPI reports rank 0 of 1" 2
fi

# In the script of an allocation a process is a single process. Its steps and mpiexec are worlds.
job 0 in_script "${work[@]}"
check "a script is one process" well 1
job 0 in_script srun "--mpi=$ours" "${work[@]}"
check "its step is a world" well 4
job 0 in_script "$here/launch.sh" "${work[@]}"
check "its mpiexec takes nodes and ranks from Slurm" well 4

"$MUSTER_DEMO_MODEL" model >/dev/null
"$MUSTER_PROGRAM" shard model --to 4 --plan auto --out shards >/dev/null
"$MUSTER_PROGRAM" export shards --plan auto --out alone --processes 1 >/dev/null
job 0 srun "--mpi=$ours" -N 2 -n 3 "$MUSTER_PROGRAM" export shards --plan auto --out together
check "three ranks on two nodes export what one does" diff -r alone together

# The example. In its second job, a rank is killed while the others wait for it.
example=$here/../../packaging/container/export.sbatch
mkdir programs
ln -s "$MUSTER_PROGRAM" programs/muster
PATH=$place/programs:$PATH job 0 submit "$example" shards by_script
check "the example exports what one process does" diff -r alone by_script
cat >killed <<END
#!/bin/sh
[ "\$SLURM_PROCID" != 5 ] || { sleep 1; kill -KILL \$\$; }
exec '$MUSTER_PROGRAM' "\$@"
END
chmod +x killed
ln -sf "$place/killed" programs/muster
SECONDS=0
! MUSTER_TIMEOUT=60 PATH=$place/programs:$PATH submit "$example" shards killed_script >said 2>&1 && [ "$SECONDS" -lt 30 ] || {
  echo "FAILED: a killed rank does not end the example: $SECONDS s"
  failures=$((failures + 1))
}
check "srun names the killed rank" said "task 5: Killed" 1
check "and nothing was exported" test ! -e killed_script

# Without -K, srun leaves the other ranks alive.
(sleep 2 && touch out/die) &
MUSTER_TIMEOUT=10 job 137 srun "--mpi=$ours" -N 2 -n 4 "$MUSTER_MPI_RANK" "$place/out" die 2
for rank in 0 1 3; do check "rank $rank names the dead one" grep -q "rank 2 (host h2.* died" "out/$rank"; done
[ "$failures" = 0 ] && echo "all is well under Slurm $version"
exit "$((failures > 0))"

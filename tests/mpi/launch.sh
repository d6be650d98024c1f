#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Starts ranks with the mpiexec of the MPI that libmuster-mpi was built with. MUSTER_MPI is mpich or openmpi, because
# several may be installed and each starts only its own programs. The options are those of MPICH's mpiexec. Exits with
# status 77 if there is no such mpiexec.
set -euo pipefail

usage() {
  cat <<'END'
usage: launch.sh --check      exits 77, aloud, where there is no such mpiexec
       launch.sh [--over h1,h2,...] [-n N] [-ppn K] [-disable-auto-cleanup] [MPIEXEC-ARGUMENT...] COMMAND...

  --over HOSTS           hosts of hosts.sh, in blocks of K ranks, in turns if K is 1
  -disable-auto-cleanup  a rank that dies does not take the others with it
END
}

here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")

# program_of WORD NAME...: the first of these programs whose version text contains WORD.
program_of() {
  local word=$1 name
  shift
  for name in "$@"; do
    # The output is read to its end, because mpirun fails on a closed pipe.
    if command -v "$name" >/dev/null && [[ $("$name" --version 2>/dev/null) == *$word* ]]; then
      printf '%s' "$name"
      return 0
    fi
  done
  echo "skipped: no mpiexec of ${MUSTER_MPI:-mpich} here" >&2
  return 77
}

just_looks='' over='' count='' each='' cleans_up=yes
while [ $# -gt 0 ]; do
  case $1 in
    --check) just_looks=yes && shift ;;
    --over) over=$2 && shift 2 ;;
    -n) count=$2 && shift 2 ;;
    -ppn) each=$2 && shift 2 ;;
    -disable-auto-cleanup) cleans_up='' && shift ;;
    -h | --help) usage && exit 0 ;;
    *) break ;;
  esac
done

case ${MUSTER_MPI:-mpich} in
  mpich)
    program=$(program_of HYDRA mpiexec.hydra mpiexec.mpich mpiexec)
    words=(${count:+-n "$count"} ${each:+-ppn "$each"})
    [ -n "$cleans_up" ] || words+=(-disable-auto-cleanup)
    if [ -n "$over" ]; then
      words+=(-launcher ssh -launcher-exec "$here/launch_on_host.sh" -localhost 10.77.0.254 -hosts "$over")
    fi
    ;;
  openmpi)
    program=$(program_of "Open" mpiexec.openmpi mpirun.openmpi mpiexec mpirun)
    words=(--oversubscribe --allow-run-as-root ${count:+-n "$count"})
    [ -n "$cleans_up" ] || words+=(--enable-recovery)
    if [ -n "$over" ]; then
      words+=(--mca plm rsh --mca plm_rsh_agent "$here/launch_on_host.sh" --host "${over//,/:${each:-1},}:${each:-1}")
      [ "${each:-1}" != 1 ] || words+=(--map-by node)
      # Passes each variable by name to the hosts.
      for name in $(compgen -e MUSTER_); do words+=(-x "$name"); done
    fi
    ;;
  *)
    echo "launch.sh: no such MPI: $MUSTER_MPI" >&2
    exit 2
    ;;
esac
[ -z "$just_looks" ] || exit 0
exec "$program" "${words[@]}" "$@"

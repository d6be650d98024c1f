#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Third-party programs with libmuster-pmpi. Needs network access once. Run it by hand.
set -euo pipefail

usage() {
  cat <<'END'
usage: others.sh BUILD PLACE imb [ARGUMENT...]   the Intel MPI Benchmarks of PyPI's impi-rt, plain and preloaded by turns
       others.sh BUILD PLACE mpich               MPICH's own tests of collectives, of Debian's sources
       others.sh BUILD PLACE mpi4py              mpi4py's tests of collectives

  BUILD     a build folder of Muster, whose MPI is MPICH
  PLACE     a folder for what is downloaded and built, outside of the sources
  ARGUMENT  of IMB-MPI1: -iter 1000, -off_cache -1, names of benchmarks; by default all that the library has, up to 4 MiB

  RANKS="2 4" is how many ranks they run with, ROUNDS=3 how often each benchmark runs.
END
}

[ $# -ge 3 ] || {
  usage >&2
  exit 2
}
build=$(readlink -f "$1")
mkdir -p "$2"
place=$(readlink -f "$2")
what=$3
shift 3
library=$build/tests/pmpi/libmuster-pmpi.so
mpi_library=$(ldd "$build/tests/pmpi/pmpi_program" | sed -nE 's/.*libmpich[^ ]* => ([^ ]*).*/\1/p')
read -ra ranks <<<"${RANKS:-2 4}"
limit=600 # seconds, per program

# preloaded REPORT COMMAND...
preloaded() {
  local report=$1
  shift
  timeout "$limit" "${start[@]}" -n "$count" env LD_PRELOAD="$libraries" MUSTER_PMPI_REPORT="$report" "$@" </dev/null
}
plain() { timeout "$limit" "${start[@]}" -n "$count" "$@" </dev/null; }
# Sums the reports of rank 0, by function.
sum_of() { awk '{ours[$1] += $2; theirs[$1] += $5} END {for (name in ours) print name, ours[name], "through Muster,", theirs[name], "through MPI"}' "$@" | sort; }

imb() {
  local venv=$place/impi round table=$place/imb.txt
  local benchmarks=(Allreduce Bcast Reduce Allgather Allgatherv Gather Gatherv Scatter Scatterv Alltoall Alltoallv
    Reduce_scatter Reduce_scatter_block Barrier)
  [ -x "$venv/bin/IMB-MPI1" ] || { python3 -m venv "$venv" && "$venv/bin/pip" install -q impi-rt; }
  export LD_LIBRARY_PATH=$venv/lib I_MPI_ROOT=$venv I_MPI_FABRICS=shm
  start=("$venv/bin/mpiexec.hydra")
  libraries=$library
  # The columns are bytes (missing for Barrier), repetitions, and the minimum, maximum and average time of the ranks.
  figures_of() {
    awk -v way="$1" '/^# Benchmarking/ {name = $3} /^ *[0-9]/ {print name, (NF > 4 ? $1 : "-"), way, $NF}' >>"$table"
  }
  for count in "${ranks[@]}"; do
    : >"$table"
    local arguments=(-npmin "$count" -msglog 2:22 "$@")
    [[ " $* " == *[A-Z][a-z]* ]] || arguments+=("${benchmarks[@]}")
    for ((round = 0; round < ${ROUNDS:-3}; round++)); do
      plain "$venv/bin/IMB-MPI1" "${arguments[@]}" | figures_of plain
      preloaded "$place/imb.report" "$venv/bin/IMB-MPI1" "${arguments[@]}" | figures_of preloaded
    done
    echo
    echo "$count ranks, medians of ${ROUNDS:-3} rounds, microseconds (t_avg)"
    echo
    python3 - "$table" <<'END'
import collections, statistics, sys
times = collections.defaultdict(lambda: collections.defaultdict(list))
for line in open(sys.argv[1]):
    name, size, way, time = line.split()
    times[name, size][way].append(float(time))
print("| | bytes | Intel MPI | preloaded | ratio |\n|---|---|---|---|---|")
for (name, size), ways in times.items():
    plain, ours = (statistics.median(ways[way]) if ways[way] else float("nan") for way in ("plain", "preloaded"))
    print(f"| {name} | {size} | {plain:.2f} | {ours:.2f} | {ours / plain if plain else float('nan'):.2f} |")
END
    sum_of "$place/imb.report"
  done
}

mpich() {
  local sources=$place/mpich-sources tests=$place/mpich-tests folder names
  names='U MPI_(Allreduce|Bcast|Reduce|Allgatherv?|Gatherv?|Scatterv?|Alltoallv?|Reduce_scatter(_block)?|Barrier)$'
  if [ ! -d "$sources" ]; then
    # Most systems do not list source packages, so this uses a separate apt configuration.
    mkdir -p "$place"/apt/{parts,lists/partial,archives/partial}
    sed 's/^deb /deb-src /; s/^Types: deb$/Types: deb-src/' /etc/apt/sources.list.d/debian.sources >"$place/apt/parts/debian.sources"
    local asked=(-o APT::Sandbox::User=root -o Dir::Etc::sourcelist=/dev/null -o Dir::Etc::sourceparts="$place/apt/parts"
      -o Dir::State::lists="$place/apt/lists" -o Dir::Cache="$place/apt")
    apt-get -qq "${asked[@]}" update
    (cd "$place" && apt-get -qq "${asked[@]}" source --download-only mpich)
    mkdir "$sources"
    tar xf "$place"/mpich_*.orig.tar.* -C "$sources" --strip-components 1
  fi
  mkdir -p "$tests"
  [ -f "$tests/Makefile" ] ||
    (cd "$tests" && "$sources/test/mpi/configure" -q --disable-fortran --disable-cxx --without-cuda --with-mpi=/usr \
      CC=mpicc.mpich CFLAGS=-O0 ac_cv_header_cuda_runtime_api_h=no) >"$tests.log" 2>&1
  for folder in util dtpools coll; do make -k -C "$tests/$folder" >>"$tests.log" 2>&1 || true; done
  cd "$tests/coll"
  start=(mpiexec.mpich)
  libraries=$library
  limit=120
  for count in "${ranks[@]}"; do
    local passed=0 failed=0 skipped=0 line program status reports lists=(testlist)
    # testlist.dtp has thousands of derived types, which go through MPI. It takes minutes if ranks share cores.
    [ "$count" -gt "$(nproc)" ] || lists+=(testlist.dtp)
    reports=$(mktemp -d)
    while read -r program line; do
      # Each line of the list has the intended number of ranks and the arguments.
      read -ra words <<<"$(grep -oE 'arg=[^ ]+' <<<"$line" | sed 's/^arg=//' | tr '\n' ' ')"
      nm -u "$program" 2>/dev/null | grep -qE "$names" || continue
      status=0
      preloaded "$reports/$((passed + failed + skipped))" "./$program" "${words[@]}" >said 2>&1 || status=$?
      if [ "$status" = 0 ] && grep -q "No Errors" said; then
        passed=$((passed + 1))
      else
        local first
        first=$(head -n 1 said)
        if plain "./$program" "${words[@]}" >said 2>&1 && grep -q "No Errors" said; then
          failed=$((failed + 1))
          echo "failed, $count ranks: $program ${words[*]} (status $status): $first"
        else
          # Most of these need another number of ranks.
          skipped=$((skipped + 1))
          echo "skipped, $count ranks, fails without the library, too: $program ${words[*]}: $first"
        fi
      fi
    done < <(grep -hE '^[a-z]' "${lists[@]}" | awk '{ranks = $2; $2 = ""; if (!seen[$0]++) print}')
    echo "$count ranks: $passed passed, $failed failed, $skipped skipped"
    sum_of "$reports"/*
    rm -rf "$reports"
  done
}

mpi4py() {
  # 4.0 and later call the large-count functions of MPI 4, which the library does not have.
  local venv=$place/mpi4py version=3.1.6
  if [ ! -d "$venv/tests" ]; then
    python3 -m venv "$venv"
    "$venv/bin/pip" install -q 'setuptools<81' wheel 'cython<3' numpy
    "$venv/bin/pip" download -q --no-deps --no-build-isolation --no-binary :all: -d "$venv" mpi4py==$version
    MPICC=mpicc.mpich "$venv/bin/pip" install -q --no-build-isolation "$venv/mpi4py-$version.tar.gz"
    mkdir "$venv/tests"
    tar xf "$venv/mpi4py-$version.tar.gz" -C "$venv/tests" --strip-components 2 "mpi4py-$version/test"
  fi
  cd "$venv/tests"
  start=(mpiexec.mpich)
  # Python loads MPI late, and with local visibility.
  libraries="$library $mpi_library"
  limit=1800
  for count in "${ranks[@]}"; do
    local status=0
    preloaded "$venv/report" "$venv/bin/python" -W ignore runtests.py -q -i test_cco >"$venv/said" 2>&1 || status=$?
    # Ranks write into each other's lines. The status reports a failure of any rank.
    echo "$count ranks: status $status; $(grep -oE '^Ran [0-9]+ tests' "$venv/said" | sort | uniq -c | xargs)"
    grep -E '^(FAILED|ERROR:|FAIL:)' "$venv/said" || true
    sum_of "$venv/report"
  done
}

case $what in
  imb | mpich | mpi4py) "$what" "$@" ;;
  *)
    usage >&2
    exit 2
    ;;
esac

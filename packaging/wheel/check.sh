# SPDX-License-Identifier: Apache-2.0
# Checks the wheels in $out. Sourced by tools/wheels --check.

limit() { # FACT MEASURED MOST UNIT
  printf '   %s: %s %s (at most %s)\n' "$1" "$2" "$4" "$3"
  [ "$2" -le "$3" ] || die "$1 is $2 $4, and may be at most $3"
}

# median COMMAND...: milliseconds of the middle one of nine runs.
median() {
  local i started
  for i in 1 2 3 4 5 6 7 8 9; do
    started=$(date +%s%N)
    "$@" >/dev/null
    echo $((($(date +%s%N) - started) / 100000))
  done | sort -n | sed -n '5s/\(.\)$/.\1/p'
}

tools=$work/tools/bin
place=$(mktemp -d)
trap 'rm -rf --one-file-system "$place"' EXIT
wheel_for 3.11 "$arch" >/dev/null
wheels=("$out/muster-$muster_version"-*_"$arch".whl)
say "metadata and symbols"
"$tools/twine" check --strict "${wheels[@]}"
for wheel in "${wheels[@]}"; do
  said=$("$tools/auditwheel" show "$wheel" | tr '\n' ' ')
  grep -o 'is consistent with.*tag: "[a-z0-9_]*' <<<"$said" | tail -n 1
  grep -q "manylinux_2_28_$arch" <<<"$said" || die "$wheel is no manylinux_2_28 wheel: $said"
  python3 -m zipfile -e "$wheel" "$place/unpacked"
  exported=$("$multiarch-nm" -D --defined-only "$place"/unpacked/muster/_core.*.so | cut -d ' ' -f 3)
  [ "$exported" = PyInit__core ] || die "the extension of $wheel exports more than its entry: $exported"
  rm -r "$place/unpacked"
  case $wheel in *abi3*) "$tools/abi3audit" --strict "$wheel" ;; esac
  limit "size of $(basename "$wheel")" $((($(stat -c %s "$wheel") + 1023) / 1024)) $((12 * 1024)) KiB
done

source "$root/packaging/rootfs.sh"

# new_system NAME PACKAGES [SUITE]: unpacks a Debian root file system without compilers into the folder $place/NAME, with
# the wheels and the sources of the tutorials.
new_system() {
  root_file_system "$1" "$2" "${3:-bookworm}" "$debian_architecture"
  mkdir -p "$place/$1"
  unpack_root_file_system "$1" "$place/$1"
  [ -z "$(find "$place/$1/usr/bin" -name '*gcc*' -o -name '*g++*' -o -name cc)" ] || die "the root file system '$1' has a compiler"
  mkdir "$place/$1/source" "$place/$1/wheels"
  tar -C "$root" -c docs/tutorials examples tests/docs python/tests README.md | tar -C "$place/$1/source" -x
  cp "${wheels[@]}" "$place/$1/wheels/"
}

suites=(bookworm)
# Its Python is 3.13.
if has_wheel 3.12 "$arch"; then suites+=(trixie); else say "left out: Debian trixie, because there is no wheel of Python 3.12"; fi
for suite in "${suites[@]}"; do
  say "both tutorials on Debian $suite"
  new_system $suite python3-venv,python3-numpy $suite
  started=$SECONDS
  run_in "$place/$suite" '
    python3 -m venv --system-site-packages /venv
    /venv/bin/pip install -q --no-index --find-links /wheels muster
    export PATH=/venv/bin:$PATH MUSTER_TEST_PYTHON=/venv/bin/python
    cd /source
    for page in python cli; do python tests/docs/pages.py run . docs/tutorials/$page.md | tail -n 1; done' ||
    die "the tutorials fail on Debian $suite"
  took=$((SECONDS - started))
  # Emulated programs are slow.
  [ "$arch" != "$(uname -m)" ] || limit "installation and both tutorials" $took 30 s
done

if [ "$arch" = x86_64 ]; then
  say "the program on Debian bullseye, whose glibc is 2.31"
  new_system bullseye python3-numpy bullseye
  run_in "$place/bullseye" '
    python3 -m zipfile -e /wheels/muster-*-cp311-*.whl /unpacked
    chmod +x /unpacked/muster/muster*
    export PATH=/unpacked/muster:$PATH
    cd /source
    python3 tests/docs/pages.py run . docs/tutorials/cli.md | tail -n 1' ||
    die "the tutorial of the command line fails on Debian bullseye"
else
  say "left out: Debian bullseye with glibc 2.31, which Debian's mirrors no longer have for $arch"
fi

say "ranks without MPI"
run_in "$place/bookworm" '
  refused() { # WORDS VARIABLE...
    words=$1
    shift
    ! env "$@" /venv/bin/python -c "import muster; muster.world()" 2>said || exit 1
    grep -q "^muster.errors.UnsupportedError: MPI: no library of $words" said || { cat said; exit 1; }
  }
  refused "MPICH .* (PMI_RANK=0, PMI_SIZE=2): libmpi.so.12: .*libmpich.so.12: .*Debian: mpich" \
    PMI_RANK=0 PMI_SIZE=2 PMI_PORT=localhost:9
  refused "Open MPI .* (OMPI_COMM_WORLD_RANK=0, OMPI_COMM_WORLD_SIZE=2): libmpi.so.40: .*Debian: openmpi-bin" \
    OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2
  refused "Open MPI or MPICH" PMIX_RANK=0
  /venv/bin/muster doctor >said || true
  grep -q "MPI: no library of MPICH or Open MPI" said' ||
  die "without MPI, the error is another one"

# Both on one machine: the variables of each mpiexec select its MPI.
say "ranks of MPICH and of Open MPI"
new_system mpi python3-venv,mpich,openmpi-bin
run_in "$place/mpi" '
  python3 -m venv /venv
  /venv/bin/pip install -q --no-index --find-links /wheels muster
  ranks() { # MPI PROGRAM OPTION...
    mpi=$1
    shift
    mkdir /told
    timeout 60 "$@" -n 2 /venv/bin/python /source/python/tests/starters.py rank /told
    [ "$(cat /told/told)" = "[[[0, 65536], [1, 65536]], '"'mpi'"']" ] || { cat /told/told; exit 1; }
    rm -r /told
    timeout 60 "$@" -n 2 /venv/bin/muster doctor >said || true
    grep -q "libmuster-mpi with $mpi" said
  }
  ranks MPICH mpiexec.mpich
  ranks "Open MPI" mpiexec.openmpi --allow-run-as-root --oversubscribe' ||
  die "ranks of an mpiexec fail in the root file system"

if [ "$arch" != "$(uname -m)" ]; then
  say "left out: the Python tests, the time and the memory of the import, which need a machine for $arch"
  return 0
fi
# The newer Pythons take the wheel of 3.12.
for version in 3.10 3.11 3.12 3.13 3.14; do
  interpreter=$(python "$version") || continue
  served=$version
  case $version in 3.1[2-9]) served=3.12 ;; esac
  has_wheel $served x86_64 || { say "left out: Python $version, for which there is no wheel" && continue; }
  venv=$work/try$version
  rm -rf "$venv"
  "$interpreter" -m venv "$venv"
  say "Python $version"
  "$venv/bin/pip" install -q --no-index --find-links "$out" --no-deps muster >"$work/pip.log" 2>&1 || fail "pip cannot install the wheel" "$work/pip.log"
  [ -z "$(find "$venv" -name 'libmuster*.so*' -not -name 'libmuster-hdf5.so*' -not -name 'libmuster-mpi-*.so*')" ] || die "the wheel has a library that it should contain"
  cold='import resource, sys; before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
import time; start = time.perf_counter(); import muster; spent = time.perf_counter() - start
print(round(spent * 1000), (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)'
  env -C / "$venv/bin/python" -c 'import muster'
  read -r spent memory < <(for _ in 1 2 3 4 5; do env -C / "$venv/bin/python" -c "$cold"; done | sort -n | sed -n 3p)
  # Times are printed, and judged by a person: a busy machine takes longer.
  printf '   import: %s ms (the aim is 60); muster --help: %s ms (the aim is 20)\n' "$spent" "$(median "$venv/bin/muster" --help)"
  limit "memory of the import" "$memory" 25 MiB
  "$venv/bin/pip" install -q numpy ml_dtypes pytest
  env -C / -u PYTHONPATH MUSTER_PROGRAM="$venv/bin/muster" PYTHONDONTWRITEBYTECODE=1 nice -n 5 \
    "$venv/bin/python" "$root/python/tests/run.py" "$root/python/tests" >"$work/tests$version.log" 2>&1 ||
    fail "the Python tests with the wheel on $version" "$work/tests$version.log"
  tail -n 1 "$work/tests$version.log"
done

#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs all tests of a build again and again beside busy loops. A test that waits for a fixed time, or that depends on
# the order in which processes run, fails here sooner than on an idle machine.
set -euo pipefail

usage() {
  cat <<'END_OF_USAGE'
usage: beside_load.sh BUILD [RUNS [LOOPS]] [-- MESON-TEST-ARGUMENT...]

Runs all tests of BUILD RUNS times (50) beside LOOPS busy loops (2), and prints one line per run.
BUILD/beside-load has a line per finished run, also of earlier calls, and the log of each run that failed.
The exit status is 1 if a test failed. MUSTER_TEST_PYTHON is the interpreter of comparison tests; it needs an absolute path.
END_OF_USAGE
}

case ${1:-} in
  -h | --help) usage; exit 0 ;;
  '') usage >&2; exit 2 ;;
esac
build=$1 runs=50 loops=2
shift
if [[ ${1:-} =~ ^[0-9]+$ ]]; then runs=$1; shift; fi
if [[ ${1:-} =~ ^[0-9]+$ ]]; then loops=$1; shift; fi
[ "${1:-}" != -- ] || shift

record=$build/beside-load
mkdir -p "$record"
for ((i = 0; i < loops; i++)); do
  (while kill -0 $$ 2>/dev/null; do :; done) &
done
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT

status=0
for ((run = 1; run <= runs; run++)); do
  started=$SECONDS
  rm -f "$build/meson-logs/testlog.json"
  # Many tests wait for deadlines, so two more run at once than there are cores. The limit of a test is three times its
  # usual one, because the loops take up to half of the processor time.
  meson test -C "$build" --no-rebuild --quiet --num-processes $(($(nproc) + 2)) --timeout-multiplier 3 "$@" \
    >"$record/meson.log" 2>&1 || true
  [ -s "$build/meson-logs/testlog.json" ] || {
    cat "$record/meson.log" >&2
    echo "beside_load.sh: no test ran in $build" >&2
    exit 1
  }
  line=$(python3 - "$build/meson-logs/testlog.json" <<'END_OF_COUNT'
import json, sys

tests = [json.loads(line) for line in open(sys.argv[1])]
bad = [test["name"] for test in tests if test["result"] not in ("OK", "EXPECTEDFAIL", "SKIP")]
skipped = sum(test["result"] == "SKIP" for test in tests)
print(f"{len(tests) - len(bad) - skipped} passed, {len(bad)} failed, {skipped} skipped" + (": " if bad else "") + ", ".join(bad))
END_OF_COUNT
  )
  line="$(date -u +%FT%TZ) $((SECONDS - started)) s: $line"
  echo "$line" | tee -a "$record/runs"
  case $line in
    *', 0 failed,'*) ;;
    *)
      status=1
      cp "$build/meson-logs/testlog.txt" "$record/$(date -u +%s).txt"
      ;;
  esac
done
exit $status

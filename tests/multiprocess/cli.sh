# SPDX-License-Identifier: Apache-2.0
# Shared functions of the command tests. bash sources it, with MUSTER_PROGRAM and MUSTER_DEMO_MODEL. It leaves the shell
# in an empty directory that is deleted at the end. A test ends with: finish.
program=${MUSTER_PROGRAM:?}
demo=${MUSTER_DEMO_MODEL:?}
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT MUSTER_JOB NO_COLOR
# The directory is in memory if there is space. The tests do not measure the disk, and waiting for it would take most of
# the time.
room=$(df --output=avail /dev/shm 2> /dev/null | tail -1)
[ "${room:-0}" -ge 1048576 ] && parent=/dev/shm || parent=${TMPDIR:-/tmp}
work=$(mktemp -d "$parent/cli-test-XXXXXX") || exit 1
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1
failures=0
fail() { echo "FAILED: $*"; failures=$((failures + 1)); }
mkdir .log && out=$work/.log/out err=$work/.log/err

# says STATUS WORDS COMMAND...: checks the status, and WORDS on standard output (0, 1) or only on standard error (2).
says() {
  local wanted=$1 words=$2 status from=$out
  shift 2
  "$@" > "$out" 2> "$err"
  status=$?
  [ "$status" = "$wanted" ] || fail "status $status, not $wanted: $*: $(cat "$out" "$err")"
  if [ "$wanted" = 2 ]; then
    from=$err
    [ "$(wc -l < "$err")" = 1 ] || fail "not one line: $*: $(cat "$err")"
    [ -s "$out" ] && fail "words on standard output: $*"
  else
    [ -s "$err" ] && fail "words on standard error: $*: $(cat "$err")"
  fi
  grep -qF -- "$words" "$from" || fail "no \"$words\": $*: $(cat "$out" "$err")"
}
# flip FILE OFFSET: flips one bit.
flip() {
  local byte
  byte=$(od -An -tu1 -j "$2" -N 1 "$1" | tr -d ' ')
  printf "$(printf '\\x%02x' $((byte ^ 1)))" | dd of="$1" bs=1 seek="$2" conv=notrunc 2> /dev/null
}

finish() {
  [ "$failures" = 0 ] && echo "all as it should be"
  exit $((failures != 0))
}

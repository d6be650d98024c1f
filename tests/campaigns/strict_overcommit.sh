#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# strict_overcommit.sh BUILD: tests of shared memory with strict overcommit (vm.overcommit_memory=2). A sparse file of
# 2^60 bytes and its mappings must still cost only the touched pages. The script changes the setting of the whole
# machine, and restores it. Needs root. Run it by hand.
set -eu
build=$(realpath "$1")
before=$(cat /proc/sys/vm/overcommit_memory)
trap 'echo "$before" > /proc/sys/vm/overcommit_memory' EXIT
echo 2 > /proc/sys/vm/overcommit_memory || { echo "skipped: vm.overcommit_memory cannot be set"; exit 77; }
failed=0
while read -r program file; do
  if "$build/tests/$program" "-sf=*/${file}_test.cpp" < /dev/null > /dev/null; then echo "ok      $file"; else echo "FAILED  $file"; failed=1; fi
done <<'END'
conformance/conformance gather
conformance/conformance merge
conformance/conformance stream
multiprocess/multiprocess_tests region
multiprocess/multiprocess_tests shm_route
multiprocess/multiprocess_tests memory
END
exit $failed

#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# strict_overcommit.sh BUILD: tests of shared memory on a machine that promises no memory that it has not
# (vm.overcommit_memory=2), where a sparse file of 2^60 bytes and its mappings must still cost what is touched. Changes
# the setting of the whole machine, and puts it back. Needs root. By hand only.
set -eu
build=$(realpath "$1")
before=$(cat /proc/sys/vm/overcommit_memory)
trap 'echo "$before" > /proc/sys/vm/overcommit_memory' EXIT
echo 2 > /proc/sys/vm/overcommit_memory || { echo "skipped: vm.overcommit_memory cannot be set"; exit 77; }
failed=0
for program in conformance/gather_conformance conformance/merge_conformance conformance/stream_conformance \
  multiprocess/region_test multiprocess/shm_route_test multiprocess/memory_test; do
  if "$build/tests/$program" > /dev/null; then echo "ok      $program"; else echo "FAILED  $program"; failed=1; fi
done
exit $failed

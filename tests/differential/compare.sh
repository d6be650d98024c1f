#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Random exchanges by two builds, and where what they bring differs:
#   compare.sh BASE_BUILD NEW_BUILD [FIRST_SEED [SEEDS [JOBS]]]
# Both are build folders. One of an earlier version is made from the commit that added this folder, or from a later one.
# The environment chooses kinds of memory and routes for both, such as MUSTER_SHM=posix or MUSTER_TEST_GROUP=file.
set -euo pipefail
[ $# -ge 2 ] || { sed -n 's/^# \{0,1\}//; 3,6p' "$0" >&2; exit 2; }
base=$1 new=$2 first=${3:-1} seeds=${4:-5} jobs=${5:-40}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

exchanges() { # BUILD NAME SEED
  MUSTER_PROGRAM=$(realpath "$1/tools/muster") "$1/tests/differential/exchanges" "$3" 1 "$jobs" > "$work/$2"
}

differing=0
for ((seed = first; seed < first + seeds; ++seed)); do
  exchanges "$base" base "$seed"
  exchanges "$new" new "$seed"
  if ! diff --unified=3 --show-function-line='^job' "$work/base" "$work/new" > "$work/difference"; then
    echo "seed $seed:"
    cat "$work/difference"
    differing=$((differing + 1))
  fi
done
echo "$differing of $seeds seeds differ"
[ "$differing" -eq 0 ]

#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Unreadable datasets of HDF5 files are never skipped silently: convert and diff refuse, verify and the listings name
# them.
#   MUSTER_PROGRAM, MUSTER_DEMO_MODEL, MUSTER_MAKE_FOREIGN_HDF5: the programs under test
set -u
source "$(dirname "$0")/../multiprocess/cli.sh"

"${MUSTER_MAKE_FOREIGN_HDF5:?}" gallery . > /dev/null || fail "no files"
for file in external_link filters overlap huge_chunk elements deep; do
  says 2 "\"$file.h5\": converting: " "$program" convert $file.h5 new.safetensors
  says 2 "--skip-unreadable" "$program" convert $file.h5 new.h5
  [ -e new.safetensors ] || [ -e new.h5 ] && fail "a refused conversion of $file.h5 left a file"
  says 2 "cannot be read" "$program" diff $file.h5 $file.h5
  says 1 "unreadable: " "$program" verify $file.h5
  says 1 '"defect": "unreadable"' "$program" verify $file.h5 --json
  "$program" show $file.h5 | tail -1 | grep -q "not shown: " || fail "show $file.h5 does not end with the loss"
  "$program" show $file.h5 --json | grep -q '"not_readable": [1-9]' || fail "show --json $file.h5"
  "$program" ls $file.h5 2>&1 > /dev/null | grep -q "not shown: " || fail "ls $file.h5 does not tell of the loss"
done
says 0 "left out: link: a link to another file" "$program" convert external_link.h5 new.safetensors --skip-unreadable
says 0 "good" "$program" ls new.safetensors
says 1 "not compared: cannot be read in A" "$program" diff external_link.h5 overlap.h5
says 2 "a link to another file" "$program" cat external_link.h5 link
"$program" stats external_link.h5 | tail -1 | grep -q "not shown: " || fail "stats does not end with the loss"
# Second names and soft links are not reported as losses.
says 0 "left out: a: a soft link" "$program" convert soft_cycle.h5 links.safetensors
says 0 "same" "$program" diff soft_cycle.h5 soft_cycle.h5
finish

#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Memory of the root over two hosts of two ranks each: streams_over_hosts.sh PROGRAM MIB BUDGET_MIB [LAYERS]. First runs
# gather_each with a consumer that writes, then an export that the root writes. Uses twice MIB of disk in TMPDIR.
set -euo pipefail

program=$(readlink -f "$1")
mib=$2
budget=$3
hosts=$(readlink -f "${BASH_SOURCE[0]%/*}")/../mpi/hosts.sh
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

for form in stream export; do
  "$hosts" with 2 "$hosts" run -n 4 -ppn 2 "$program" "$form" "$mib" "$budget" "$folder" "${@:4}"
  rm -rf "${folder:?}"/*
done

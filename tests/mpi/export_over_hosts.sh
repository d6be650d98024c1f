#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# `muster export` under mpiexec over two hosts of two ranks. The files equal those that one rank writes, whichever ranks
# write. The link has carried the required bytes.
set -euo pipefail

hosts=$(readlink -f "${BASH_SOURCE[0]%/*}")/hosts.sh
if [ "${1:-}" != inside ]; then
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  "$MUSTER_DEMO_MODEL" "$work/model" --megabytes 10 >/dev/null
  "$MUSTER_PROGRAM" shard "$work/model" --to 4 --plan llama --out "$work/shards" >/dev/null
  "$MUSTER_PROGRAM" export "$work/shards" --plan llama --processes 1 --max-shard-size 2MB --out "$work/alone" >/dev/null
  "$hosts" with 2 "${BASH_SOURCE[0]}" inside "$work"
  exit
fi
work=$2

for writers in all rank0; do
  read -r sent _ < <("$hosts" bytes h2)
  "$hosts" run -n 4 -ppn 2 "$MUSTER_PROGRAM" export "$work/shards" --plan llama --writers "$writers" --memory-budget 2MiB \
    --max-shard-size 2MB --out "$work/$writers"
  read -r sent_then _ < <("$hosts" bytes h2)
  diff -r "$work/alone" "$work/$writers"
  echo "$writers: the second host has sent $((sent_then - sent)) bytes"
done
size=$(du -sb "$work/alone" | cut -f1)
# Half of the model is on the second host, and the root writes all of it.
[ $((sent_then - sent)) -gt $((size * 2 / 5)) ]
